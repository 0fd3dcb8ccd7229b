"""Automatic layout (`parallel.layout: auto`), and the predicted memory and time of a run's layout, which its first
steps are compared with. No torch here but where a Hugging Face folder is asked for its shapes, in a child."""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.config import load, resolve
from phalanx.config.schema import Config, get_knob
from phalanx.core.errors import ConfigError
from phalanx.core.records import EventKind, write_event
from phalanx.core.renamed import rename_dotted
from phalanx.core.run_paths import RunPaths
from phalanx.health.findings import DeviceInfo
from phalanx.layout import hardware
from phalanx.layout.hardware import Hardware
from phalanx.layout.model_shape import ModelSpec
from phalanx.models import hf_config
from phalanx.planner import choose_layout, predict, present_cluster
from phalanx.planner.choose_layout import LayoutRequest
from phalanx.planner.present_cluster import NodeDevice
from phalanx.planner.recipe_keys import AUTO_LAYOUT
from phalanx.storage.local_copies import fetch_folder
from phalanx.system.fork import fork_call

LayoutRecord = dict[str, Any]


def planner_devices(nodes: Sequence[Sequence[DeviceInfo]]) -> tuple[tuple[NodeDevice, ...], ...]:
    """The devices of all ranks, by node, as a plan takes them: the ranks of a CPU have equal parts of it."""
    found = []
    for devices in nodes:
        parts = [len(devices) if device.name == "cpu" else 1 for device in devices]
        found.append(
            tuple(
                NodeDevice(device.model, device.memory_bytes // part, device.cores / part)
                for device, part in zip(devices, parts, strict=True)
            )
        )
    return tuple(found)


def resolve_layout(
    wanted: Config,
    config: Config,
    paths: RunPaths,
    nodes: Sequence[Sequence[DeviceInfo]],
    meanwhile: Callable[[], None] | None = None,
) -> tuple[Config, LayoutRecord]:
    """Resolve `config` to the best layout for these devices (continuing from the run folder if there is one), with its
    record. Keys that `wanted` sets are fixed. Raises ConfigError where nothing fits, or the recipe cannot be
    planned."""
    present = planner_devices(nodes)
    devices = [device for node in nodes for device in node]
    kind, bf16 = devices[0].name.partition(":")[0], {device.bf16 for device in devices}
    written = sorted(key for key in load.find_explicit_keys(wanted) if get_knob(wanted, key) != "auto")
    free = {key: value for key, value in AUTO_LAYOUT.items() if key not in written}
    # A hardware file informs the plan; it does not fix the layout.
    freed = load.update_config(config, free | {"balance.hardware": None, "parallel.layout": "given"})
    resolved, _ = resolve.resolve_autos(freed, device=kind, world=len(devices), bf16=all(bf16), differ=len(bf16) > 1)
    asked = (resolved, written, present, _read_measured(config.balance.hardware, paths), read_last_record(paths))
    told = fork_call(_choose, *asked, timeout_s=None, meanwhile=meanwhile)
    keys = dict(told["keys"])
    if keys["parallel.tensor"] * keys["parallel.pipeline"] > 1:
        keys["balance.hardware"] = None
    return load.update_config(config, keys | {"parallel.layout": "given"}), told


def _choose(
    config: Config,
    written: list[str],
    nodes: tuple[tuple[NodeDevice, ...], ...],
    known: Hardware | None,
    last: LayoutRecord | None,
) -> LayoutRecord:
    spec = None if config.model.from_hf is None else _folder_spec(config)
    return choose_layout.choose_layout(LayoutRequest(config, frozenset(written), nodes, known, spec), last)


def _folder_spec(config: Config) -> ModelSpec:
    from phalanx.workload import local_copies
    from phalanx.workload.workload import read_model_shape

    return read_model_shape(local_copies.fetch_local_copies(config, weights=False))


def predict_layout(
    config: Config, paths: RunPaths, nodes: tuple[tuple[NodeDevice, ...], ...], spec: ModelSpec | None
) -> LayoutRecord | None:
    """Predict memory and time of a resolved `config`'s layout; None where that is unknown: for a custom network, and
    where a node did not report its devices' memory. `spec`: the model's shapes where they are a folder's."""
    if any(device.memory_bytes <= 0 for node in nodes for device in node):
        return None
    folder_spec = spec if config.model.from_hf is not None else None
    try:
        return choose_layout.predict_recipe_layout(
            LayoutRequest(config, frozenset(), nodes, _read_measured(config.balance.hardware, paths), folder_spec)
        )
    except ConfigError:
        return None


def _read_measured(file: str | None, paths: RunPaths) -> Hardware | None:
    """The device measurements: the file that the recipe names, else that of the run folder if it is usable."""
    return (
        hardware.read_hardware(Path(file).expanduser())
        if file is not None
        else hardware.read_hardware_if_valid(paths.hardware)
    )


def read_last_record(paths: RunPaths) -> LayoutRecord | None:
    """The record of the last start, one of an older version by today's keys; None where none can be read."""
    try:
        told = json.loads(paths.plan.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or not isinstance(told.get("keys"), dict):
        return None
    return {**told, "keys": rename_dotted(told["keys"])}


def layout_event(record: LayoutRecord) -> LayoutRecord:
    """Details of the event that a layout was chosen."""
    return {
        "layout": record["layout"],
        "keys": record["keys"],
        "step_s": record["expected"]["step_s"],
        "why": record["why"],
        "basis": record["basis"],
        "again": record["again"],
    }


def render_plan_json(record: LayoutRecord) -> str:
    """Format the run folder's plan.json."""
    kept = {key: value for key, value in record.items() if key != "again"}
    return json.dumps(kept, indent=1, allow_nan=False) + "\n"


def read_folder_spec(config: Config) -> ModelSpec | None:
    """The shapes of the folder that `model.from_hf` names, or None; weights are not fetched. Raises ConfigError."""
    name = config.model.from_hf
    if name is None:
        return None
    return hf_config.spec_from_config(hf_config.read_config(fetch_folder(name, config.data.cache, weights=False)), name)


class PredictionCheck:
    """Compares some steps of an attempt with their prediction; a sink of rank 0's records.

    Reads the prediction from the run folder's plan.json, and writes one event per attempt. If the attempt has measured
    its devices since plan.json was written, the prediction is repeated with the measurements. `say` receives the event.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec | None,
        paths: RunPaths,
        attempt: int,
        say: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._config, self._spec, self._paths, self._attempt, self._say = config, spec, paths, attempt, say
        self._steps: list[dict[str, Any]] = []
        self._expected: tuple[dict[str, Any], str] | None = None

    def on_step(self, record: dict[str, Any]) -> None:
        train = self._config.train
        if len(self._steps) >= predict.ENOUGH or train.batches.batch_size(record["step"]) < train.global_batch:
            return  # the prediction is for a step of a whole batch
        if not self._steps:  # before any step of it is known
            self._expected = self._read_prediction()
        self._steps.append(record)
        if self._expected is None or len(self._steps) < predict.ENOUGH:
            return
        expected, basis = self._expected
        beside = self._config.parallel.engine == "sharded"
        found = predict.compare_steps(expected, self._steps, beside, basis)
        if found is None:
            return
        with contextlib.suppress(OSError):  # a full disk stops no training
            event = write_event(self._paths.events, EventKind.PREDICTION_CHECKED, self._attempt, **found)
            if self._say is not None:
                self._say(event)

    def on_event(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...

    def _read_prediction(self) -> tuple[dict[str, Any], str] | None:
        """The prediction for a step and its basis; None without one."""
        try:
            told = json.loads(self._paths.plan.read_text(encoding="utf-8"))
            expected, basis = dict(told["expected"]), str(told["basis"])
            nodes = present_cluster.parse_node_devices(told["for"]["nodes"])
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None
        again = predict_layout(self._config, self._paths, nodes, self._spec)
        if again is not None and again["basis"] != basis:
            return again["expected"], again["basis"]
        return expected, basis
