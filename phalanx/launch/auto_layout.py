"""Between a start and the planner: the layout of a run that leaves it to `parallel.layout: auto`, and what is expected
of the layout of any run. No torch here but where a Hugging Face folder is asked for its shapes, in a child."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.config import load
from phalanx.config.schema import Config, get
from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import RunPaths
from phalanx.health.devices import Device
from phalanx.layout import hardware
from phalanx.layout.hardware import Hardware
from phalanx.layout.model_shape import ModelSpec
from phalanx.planner import choose_layout
from phalanx.planner.choose_layout import Asked
from phalanx.planner.present_cluster import Present
from phalanx.planner.recipe_keys import FREE
from phalanx.system.fork import fork_call

Record = dict[str, Any]


def present_on(nodes: Sequence[Sequence[Device]]) -> tuple[tuple[Present, ...], ...]:
    """The devices of all ranks, by node, as a plan takes them: the ranks of a CPU have equal parts of it."""
    found = []
    for devices in nodes:
        parts = [len(devices) if device.name == "cpu" else 1 for device in devices]
        found.append(
            tuple(
                Present(device.model, device.memory_bytes // part, device.cores / part)
                for device, part in zip(devices, parts, strict=True)
            )
        )
    return tuple(found)


def laid_out(
    wanted: Config,
    config: Config,
    paths: RunPaths,
    nodes: Sequence[Sequence[Device]],
    meanwhile: Callable[[], None] | None = None,
) -> tuple[Config, Record]:
    """`config`, which goes on from the run folder if there is one, in the best layout for these devices, and the record
    of it. What `wanted` writes itself stays. Raises ConfigError where nothing fits, or nothing can be planned."""
    present = present_on(nodes)
    devices = [device for node in nodes for device in node]
    kind, bf16 = devices[0].name.partition(":")[0], {device.bf16 for device in devices}
    written = sorted(key for key in load.written(wanted) if get(wanted, key) != "auto")
    free = {key: value for key, value in FREE.items() if key not in written}
    # A file of what was measured informs a plan; it is no wish to leave the model whole.
    freed = load.update(config, free | {"balance.hardware": None, "parallel.layout": "given"})
    resolved, _ = load.resolve(freed, device=kind, world=len(devices), bf16=all(bf16), differ=len(bf16) > 1)
    asked = (resolved, written, present, _known(config.balance.hardware, paths), _last(paths))
    told = fork_call(_choose, *asked, timeout_s=None, meanwhile=meanwhile)
    keys = dict(told["keys"])
    if keys["parallel.tensor"] * keys["parallel.pipeline"] > 1:
        keys["balance.hardware"] = None
    return load.update(config, keys | {"parallel.layout": "given"}), told


def _choose(
    config: Config,
    written: list[str],
    nodes: tuple[tuple[Present, ...], ...],
    known: Hardware | None,
    last: Record | None,
) -> Record:
    spec = None if config.model.from_hf is None else _folder_spec(config)
    return choose_layout.choose(Asked(config, frozenset(written), nodes, known, spec), last)


def _folder_spec(config: Config) -> ModelSpec:
    from phalanx.workload import local_copies
    from phalanx.workload.workload import spec_from_run

    return spec_from_run(local_copies.fetched(config, weights=False))


def foretold(
    config: Config, paths: RunPaths, nodes: tuple[tuple[Present, ...], ...], spec: ModelSpec | None
) -> Record | None:
    """What the layout of a resolved `config` is expected to take; None where nobody can say: for a network of one's
    own, and where a node has not said what its devices hold. `spec`: the model's shapes where they are a folder's."""
    if any(device.memory_bytes <= 0 for node in nodes for device in node):
        return None
    folder_spec = spec if config.model.from_hf is not None else None
    try:
        return choose_layout.foretold(
            Asked(config, frozenset(), nodes, _known(config.balance.hardware, paths), folder_spec)
        )
    except ConfigError:
        return None


def _known(file: str | None, paths: RunPaths) -> Hardware | None:
    """What was measured: the file that the recipe names, else that of the run folder, if it is of any use."""
    return hardware.read(Path(file).expanduser()) if file is not None else hardware.read_if_any(paths.hardware)


def _last(paths: RunPaths) -> Record | None:
    """The record of the last start; None where there is none that can be read."""
    try:
        told = json.loads(paths.plan.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def event_of(told: Record) -> Record:
    """Details of the event that a layout was chosen."""
    return {
        "layout": told["layout"],
        "keys": told["keys"],
        "step_s": told["expected"]["step_s"],
        "why": told["why"],
        "basis": told["basis"],
        "again": told["again"],
    }


def text_of(told: Record) -> str:
    """What the run folder's plan.json holds of it."""
    kept = {key: value for key, value in told.items() if key != "again"}
    return json.dumps(kept, indent=1, allow_nan=False) + "\n"
