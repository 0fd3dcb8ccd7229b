"""Calibration: learn the speeds of devices, links and host from a run's steps, as a hardware.json for predictions.

Each part of a step is attributed to one cause, as far as records distinguish parts (`comparison.split_measured_step`):
computing to the devices' speeds, waiting that is no pipeline's bubble to the links, updates to the memory, the rest to
the host. Implausible values are not learned.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config.model_spec import build_model_spec
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.layout.balance import parse_division
from phalanx.layout.hardware import MOST, Calibration, Hardware, MeasuredDevice, MeasuredLink
from phalanx.layout.model_shape import ModelSpec, list_timing_shapes
from phalanx.models.families.catalog import adapter_count, parameter_count
from phalanx.planner import link_cost, measured_cluster, predict, present_cluster
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.cost import CostModel
from phalanx.planner.device_catalog import RANGES, CostConstants, DeviceKind
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.predict import Prediction, predict_recipe_step
from phalanx.planner.present_cluster import NodeDevice
from phalanx.planner.work import StepWork
from phalanx.report.formats import format_difference, format_seconds

# Plausible ratios of measured speed to data sheet, for devices, updates and links: values beyond have another cause.
# The data of CPUs are orders of magnitude.
SPEEDS, SPEEDS_OF_CPU = (0.02, 1.25), (1e-3, 1e3)
UPDATES = (0.01, 4.0)
LINKS = (1e-3, 8.0)
HALVINGS = 40
LEAST_S = 1e-9  # of anything that is divided by
LITTLE = 0.02  # of a step: a shorter wait for communication says nothing about links
NEEDED, OPTIONAL_FIELDS = (
    ("step", "step_s", "data_s"),
    ("wait_s", "update_s"),
)  # of a step's record; and what may not be known


@dataclass(frozen=True)
class MeasuredRun:
    """Records of a run: the resolved `config`, the devices of its `nodes`, the measurements `known` of them, and
    the `steps` of its newest attempt. `spec`: the shapes of `model.from_hf`."""

    name: str
    config: Config
    nodes: tuple[tuple[NodeDevice, ...], ...]
    known: Hardware | None
    steps: Sequence[Mapping[str, Any]]
    spec: ModelSpec | None = None


@dataclass(frozen=True)
class CalibrationResult:
    """The result of a calibration: a hardware file and sentences; seconds of a step as measured, as predicted before,
    and as predicted now."""

    hardware: Hardware
    findings: tuple[str, ...]
    measured_s: float
    before_s: float
    after_s: float


def calibrate_run(run: MeasuredRun) -> CalibrationResult:
    """Calibrate from a run. Raises ConfigError for a run that is too short, or of a custom network."""
    train = run.config.train
    whole = [record for record in run.steps if train.batches.batch_size(record["step"]) == train.global_batch]
    run = replace(run, steps=whole)
    if len(run.steps) < predict.ENOUGH:
        raise ConfigError(
            f"the newest attempt of the run {run.name} has {len(run.steps)} steps, and {predict.ENOUGH} are needed, "
            f"of which the first {predict.WARM_UP} do not count; continue it, or name a longer one"
        )
    taken = run.steps[predict.WARM_UP :]
    _refuse_others(run, taken)
    parts = predict.split_measured_step(taken, run.config.parallel.engine == "sharded")
    measured_s = predict.median(record["step_s"] for record in taken)
    cluster, constants, _ = present_cluster.resolve_cluster(run.nodes, run.known)
    before = predict_recipe_step(run.config, cluster, run.spec, constants)
    said: list[str] = []
    speeds = _speeds(run, before, parts, taken, constants, said)
    learnt = Calibration(run.name, len(taken), _host_s(parts), None)
    found = _file(run, before, cluster, speeds, learnt, constants)
    found = replace(found, learnt=replace(learnt, update=_update(run, found, parts, said)))
    found = replace(found, link=_link(run, found, parts, measured_s, said))
    if learnt.host_s is not None:
        said.append(f"the host: {format_seconds(learnt.host_s)} a step beside all else")
    after = _predict_step_s(run, found)
    return CalibrationResult(found, tuple(said), measured_s, before.estimate.step_s, after.estimate.step_s)


def _refuse_others(run: MeasuredRun, taken: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError where devices share rows or experts, so that steps do not tell them apart, and where the steps
    are of other ranks than those that the newest start has been given."""
    parallel = run.config.parallel
    for axis in ("context", "expert"):
        if (degree := getattr(parallel, axis)) > 1:
            raise ConfigError(
                f"the run {run.name} has parallel.{axis} {degree}, with which a device's time is not its own alone; "
                "name a run without it"
            )
    world = sum(map(len, run.nodes))
    copies = run.config.parallel.axes.data_parallel_size(world)
    divided = parse_division(taken[-1])
    if divided is not None and len(divided.shares) != copies:
        raise ConfigError(
            f"the newest start of the run {run.name}, with {copies} copies of the model, has done no steps; the "
            f"earlier ones were done by {len(divided.shares)}: continue it for some steps"
        )


def _predict_step_s(run: MeasuredRun, found: Hardware) -> Prediction:
    constants = measured_cluster.constants_from_hardware(found)
    return predict_recipe_step(
        run.config, measured_cluster.cluster_from_hardware(found, constants), run.spec, constants
    )


# -------------------------------------------------------------------------------------------------------------- devices


def _speeds(
    run: MeasuredRun, before: Prediction, parts: Mapping[tuple[str, ...], float], taken: Sequence[Mapping[str, Any]],
    constants: CostConstants, said: list[str],
) -> list[float]:  # fmt: skip
    """The measured over the predicted speed of each copy of the model."""
    copies = run.config.parallel.axes.data_parallel_size(before.cluster.devices)
    busy = [record["busy_s"] for record in taken if record.get("busy_s") and len(record["busy_s"]) == copies]
    terms = before.estimate.terms
    computes = terms["compute"] + terms["offload"]
    kinds = [before.cluster.kind_of(copy * before.choice.tensor) for copy in range(copies)]
    if predict.ALL in parts:  # only whole steps are known
        said.append("of one accelerator only whole steps are known: the whole difference is attributed to the device")
        raw = [computes / max(LEAST_S, parts[predict.ALL] - (before.estimate.step_s - computes))] * copies
    elif not busy:
        raw = [computes / max(LEAST_S, parts[predict.COMPUTE_TERMS])] * copies
    else:
        spent = predict.median(map(predict.mean, busy)) - parts[predict.COMPUTE_TERMS]  # on data, and on updates
        told = (division for record in taken if (division := parse_division(record)) is not None)
        rows = [division for division in told if len(division.shares) == copies]
        raw = []
        for copy in range(copies):
            share = predict.median(division.shares[copy] for division in rows) if rows else 1.0
            cuts = predict.median(division.micro_batches_of(copy) for division in rows) if rows else 1.0
            took = predict.median(each[copy] for each in busy) - spent
            raw.append(_copy_s(before, copy, share, cuts, constants) / max(LEAST_S, took))
    found = [_bounded(speed, kind, said) for speed, kind in zip(raw, kinds, strict=True)]
    slow, fast = min(found), max(found)
    words = f"{slow:.3g}" if fast / slow < 1.02 else f"{slow:.3g} to {fast:.3g}"
    said.insert(0, f"devices: {words} times as fast as was thought")
    return found


def _bounded(speed: float, kind: DeviceKind, said: list[str]) -> float:
    least, most = SPEEDS_OF_CPU if kind.on_host else SPEEDS
    if not least <= speed <= most:
        said.append(
            f"a {kind.name} {speed:.3g} times as fast as was thought is not plausible: "
            f"{min(most, max(least, speed)):g} is taken, and something else is off"
        )
    return min(most, max(least, speed))


def _copy_s(before: Prediction, copy: int, share: float, cuts: float, constants: CostConstants) -> float:
    """Predicted compute seconds of a copy's busiest rank: `share` sequences in `cuts` micro-batches."""
    choice, work = before.choice, before.work
    size = max(1, round(share / cuts))
    width = choice.tensor * before.cluster.devices // (choice.tensor * choice.pipeline)
    longest = 0.0
    layers = choice.layers_of(work.layers)
    for stage in range(choice.pipeline):
        kind = before.cluster.kind_of(stage * width + copy * choice.tensor)
        whole = _alone(work, kind, replace(choice, micro_batch=size), constants)
        longest = max(longest, whole * layers[stage] / work.layers)
    return longest * share / size


def _alone(work: StepWork, kind: DeviceKind, choice: LayoutChoice, constants: CostConstants) -> float:
    """Seconds that the whole model computes for one micro-batch on devices of a kind, cut as `choice` has it."""
    plain = replace(
        choice, pipeline=1, virtual=1, stages=(), shares=(), state=(), shard_degree=0, devices=choice.tensor
    )
    there = ClusterSpec((NodeGroup(1, choice.tensor, kind),))
    terms = CostModel(replace(work, global_batch=choice.micro_batch), there, constants).estimate(plain).terms
    return terms["compute"] + terms["offload"]


def _file(
    run: MeasuredRun,
    before: Prediction,
    cluster: ClusterSpec,
    speeds: Sequence[float],
    learnt: Calibration,
    constants: CostConstants,
) -> Hardware:
    """The devices, each with the derived time of a pass of the whole model; the link unchanged."""
    axes, world = run.config.parallel.axes, cluster.devices
    size = max(1, before.choice.micro_batch)
    rows = run.known.devices if run.known is not None and len(run.known.devices) == world else None
    work = run.known.work if rows is not None and run.known is not None else _measured_work(run)
    passes = replace(measured_cluster.single_device_choice(work), micro_batch=size)
    found, rank = [], 0
    for number, node in enumerate(run.nodes):
        for place, device in enumerate(node):
            kind = cluster.kind_of(rank)
            took = _alone(before.work, kind, passes, constants)
            took /= speeds[axes.coordinates(rank, world).data]
            told = rows[rank] if rows is not None else _device(rank, number, place, device, kind, size)
            found.append(replace(told, times=((size, took),)))
            rank += 1
    return Hardware(work, tuple(found), None if world == 1 else _link_of(cluster, constants), learnt)


def _device(rank: int, node: int, place: int, device: NodeDevice, kind: DeviceKind, most: int) -> MeasuredDevice:
    return MeasuredDevice(
        rank=rank, node=node, local_rank=place, host="", name="cpu" if kind.on_host else f"accelerator:{place}",
        model=device.model, memory_bytes=device.memory_bytes, most=most, times=(),
        host_to_device_bytes_per_s=None if kind.on_host else kind.host_bytes_per_s,
        carries_s_per_byte=kind.carries_s_per_byte,
    )  # fmt: skip


def _measured_work(run: MeasuredRun) -> dict[str, Any]:
    """The work in the form of a run that measures its devices."""
    config, spec = run.config, build_model_spec(run.config, run.spec)
    how = {
        "task": config.task.kind,
        "parameters": parameter_count(spec) + (adapter_count(spec) if spec.lora is not None else 0),
        "positions": config.data.seq_len,
        "dtype": config.train.dtype,
        "activations": config.memory.activations,
    }
    if config.memory.activations == "offload":
        how["horizon"] = config.memory.offload_prefetch_blocks
    told: dict[str, Any] = json.loads(json.dumps(how | list_timing_shapes(spec)))
    return told


# ------------------------------------------------------------------------------------------------ updates, links, host


def _host_s(parts: Mapping[tuple[str, ...], float]) -> float | None:
    if ("other",) not in parts:
        return None
    least, most = RANGES["step_s"]
    return min(most, max(least, parts[("other",)]))


def _update(run: MeasuredRun, found: Hardware, parts: Mapping[tuple[str, ...], float], said: list[str]) -> float | None:
    """The measured speed of updates over that by the memory bandwidth of the device's kind."""
    took = parts.get(predict.UPDATE_TERMS, 0.0)
    if took <= 0:
        return None
    terms = _predict_step_s(run, found).estimate.terms
    thought = sum(terms[name] for name in predict.UPDATE_TERMS)
    if thought <= 0:
        return None
    speed = min(UPDATES[1], max(UPDATES[0], thought / took))
    said.append(f"updates: {speed:.3g} times as fast as the devices' memory would have them")
    return speed


def _link_of(cluster: ClusterSpec, constants: CostConstants) -> MeasuredLink:
    """The all-reduce measurement from which `measured_cluster` derives this cluster."""
    ring = link_cost.ring_of(0, cluster.devices, 1, cluster)
    if cluster.nodes > 1:
        share = 2 * (1 - 1 / cluster.nodes)
        rate = cluster.between_bits_per_s * constants.far_share / 8 / share
        latency_s = cluster.between_latency_s * 2 * cluster.nodes
    else:
        share = 2 * (1 - 1 / cluster.devices)
        rate = ring.kind.link_bytes_per_s * constants.near_share / share
        latency_s = ring.kind.link_latency_s * 2 * cluster.devices
    later_s = cluster.busy_hop_s * 2 * (cluster.devices - 1)
    return MeasuredLink(rate, latency_s, latency_s + later_s if later_s else None)


def _link(
    run: MeasuredRun, found: Hardware, parts: Mapping[tuple[str, ...], float], step_s: float, said: list[str]
) -> MeasuredLink | None:
    """The link that explains the measured wait; unchanged where the wait says nothing about it."""
    link = found.link
    if link is None or predict.WAIT_TERMS not in parts:
        return link
    terms = _predict_step_s(run, found).estimate.terms
    waited = max(0.0, parts[predict.WAIT_TERMS] - terms["bubble"])
    if max(waited, terms["communication"]) < LITTLE * step_s:
        said.append("links: communication is hidden, which says nothing of them; they are left as they were")
        return link

    def slower(factor: float) -> MeasuredLink:
        busy_s = None if link.busy_latency_s is None else link.busy_latency_s * factor
        return MeasuredLink(link.bytes_per_s / factor, link.latency_s * factor, busy_s)

    def communicates(factor: float) -> float:
        return _predict_step_s(run, replace(found, link=slower(factor))).estimate.terms["communication"]

    low, high = math.log(1 / LINKS[1]), math.log(1 / LINKS[0])
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if communicates(math.exp(middle)) < waited else (low, middle)
    factor = math.exp((low + high) / 2)
    said.append(
        f"links: {1 / factor:.3g} times as fast as was thought, by {format_seconds(waited)} of waiting in a step"
    )
    return slower(factor)


def describe_calibration(result: CalibrationResult) -> list[str]:
    """Format the calibration as lines of text."""
    took, then, now = result.measured_s, result.before_s, result.after_s
    return [
        *result.findings,
        f"a step took {format_seconds(took)}: {format_difference(took, then)} the {format_seconds(then)} predicted, "
        f"{format_difference(took, now)} the {format_seconds(now)} that are predicted now",
    ]


def last_attempt_steps(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps of the newest attempt with complete records."""
    steps = [step for step in steps if _is_whole(step)]
    newest = max((step.get("attempt", 1) for step in steps), default=1)
    return [step for step in steps if step.get("attempt", 1) == newest]


def _is_whole(step: Mapping[str, Any]) -> bool:
    """Whether a record has all required fields with plausible numbers; a file may be damaged."""
    busy = step.get("busy_s") or []
    if not isinstance(busy, list) or type(step.get("attempt", 1)) is not int:
        return False
    told: list[Any] = (
        [step.get(name) for name in NEEDED]
        + [step[name] for name in OPTIONAL_FIELDS if step.get(name) is not None]
        + busy
    )
    possible = all(type(each) in (int, float) and 0 <= each <= MOST for each in told)
    return possible and step["step_s"] >= LEAST_S
