"""Prediction of the step of a recipe's own layout on given devices, without a search."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config.schema import Config
from phalanx.layout import balance
from phalanx.layout import pipeline_stages as pipelines
from phalanx.layout.model_shape import ModelSpec
from phalanx.planner.advice import TERM_NAMES
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.cost import CostModel, StepEstimate
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS, CostConstants
from phalanx.planner.heterogeneous import HeterogeneousDevices
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.memory import REPLICAS, DeviceMemory
from phalanx.planner.recipe_keys import shape_of, work_of
from phalanx.planner.work import StepWork


@dataclass(frozen=True)
class Prediction:
    """`choice`: the layout that was meant, complete with stages and shares; `estimate`: its step and its memory."""

    work: StepWork
    cluster: ClusterSpec
    choice: LayoutChoice
    estimate: StepEstimate


def predict_recipe_step(
    config: Config,
    cluster: ClusterSpec,
    folder_spec: ModelSpec | None = None,
    constants: CostConstants = DEFAULT_CONSTANTS,
) -> Prediction:
    """A step of the layout that `config` describes, on all devices of `cluster` in their order.

    What is still `auto` is taken as a run would resolve it without looking at memory, and `train.micro_batch` as the
    largest power of two that fits. `folder_spec` are the shapes of `model.from_hf`. Raises ConfigError for a custom
    network, and for degrees that do not divide.
    """
    work = work_of(config, shape_of(config, folder_spec), cluster)
    choice = choice_of(config, cluster)
    unlike, model = HeterogeneousDevices(work, cluster, constants), CostModel(work, cluster, constants)
    if config.train.micro_batch != "auto":
        choice = unlike.complete(choice)
        return Prediction(work, cluster, choice, model.estimate(choice))
    size = -(-work.global_batch // config.parallel.axes.count_row_groups(cluster.devices))
    size = 1 << (size.bit_length() - 1)
    while True:
        tried = unlike.complete(replace(choice, micro_batch=size))
        estimate = model.estimate(tried)
        if estimate.fits or size == 1:
            return Prediction(work, cluster, tried, estimate)
        size //= 2


def choice_of(config: Config, cluster: ClusterSpec) -> LayoutChoice:
    """The layout of a recipe, as `recipe_keys.keys_of` has written it. Raises ConfigError where the degrees do not
    divide the devices."""
    parallel, memory = config.parallel, config.memory.activations
    devices, batch = cluster.devices, config.train.global_batch
    groups = parallel.axes.count_row_groups(devices)
    staged = parallel.pipeline > 1
    schedule = parallel.schedule if staged else "1f1b"
    copies = config.parallel.axes.data_parallel_size(devices)
    zero, reduce = parallel.resolve_sharding
    work, state = config.balance.batch, config.balance.optimizer_state
    shares: tuple[int, ...] = ()
    if isinstance(work, list):
        shares = tuple(work)
    elif work == "even":
        shares = tuple(balance.split_evenly(batch, groups))
    full: dict[str, Any] = {"recompute": "full", "offload": True}
    kept = full if memory == "offload" else {"recompute": "none" if memory == "auto" else memory}
    cuts = (
        config.data.seq_len % parallel.tensor == 0
        if parallel.sequence_parallel == "auto"
        else parallel.sequence_parallel
    )
    return LayoutChoice(
        zero=zero,
        shard_degree=0 if parallel.shard_degree == "auto" or copies == 1 else parallel.shard_degree,
        tensor=parallel.tensor,
        sequence=parallel.tensor > 1 and bool(cuts),
        pipeline=parallel.pipeline,
        context=parallel.context,
        expert=parallel.expert,
        stages=() if parallel.layers_per_stage == "auto" or not staged else tuple(parallel.layers_per_stage),
        virtual=pipelines.STAGES_PER_RANK[schedule],
        order="1f1b" if schedule == "interleaved" else schedule,
        micro_batch=1 if config.train.micro_batch == "auto" else config.train.micro_batch,
        shares=shares,
        reduce=reduce,
        slots=2 if config.optim.double_buffer and zero != 3 else 1,
        engine="fsdp" if parallel.engine == "fsdp2" else "sharded",
        devices=devices,
        state=tuple(part / sum(state) for part in state) if isinstance(state, list) else (),
        **kept,
    )


def allocator_bytes(held: DeviceMemory) -> float:
    """The memory visible in a run's records: on an accelerator the allocated bytes, without the driver's and
    fragmentation; on a CPU the resident bytes, with the process's base, but without replicas, which another
    process holds."""
    reserved = held.parts.get("reserved", 0.0) + held.parts.get(REPLICAS, 0.0)
    return held.total_bytes - reserved + (held.kind.reserved_bytes if held.kind.on_host else 0.0)


# ---------------------------------------------------------------------------------------------------------- comparison
# Comparison of a run's measured steps with their prediction, part by part as far as its records have them. On a CPU the
# host does all work itself, so waiting, updates and the rest are known; on an accelerator only the passes are known,
# and all else is one part. Medians over steps, without the first ones of an attempt, which compile and warm up.


WARM_UP, ENOUGH = 5, 20  # steps of an attempt that are excluded, and the number that is compared
FAR = 0.15  # relative error from which on the part that is off is named
COMPUTE_TERMS = ("compute", "offload")
WAIT_TERMS = ("communication", "bubble")
UPDATE_TERMS = ("optimizer", "commit")  # an update writes to where its step is kept
ALL = tuple(TERM_NAMES)


def compare_steps(
    expected: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], beside: bool, basis: str
) -> dict[str, Any] | None:
    """Details of the event; None while there are too few of `steps`, the records of one attempt in order.

    `beside`: updates are done beside the thread that computes, which waits for them. `expected` as
    `choose_layout.prediction_with_memory` has it. `off` is the name of the part that explains most of a difference of
    more than FAR.
    """
    taken = list(steps)[WARM_UP:]
    if len(steps) < ENOUGH:
        return None
    step_s = median(record["step_s"] for record in taken)
    terms: Mapping[str, float] = dict.fromkeys(TERM_NAMES, 0.0) | expected["terms"]
    rows: list[dict[str, Any]] = [
        {
            "name": " and ".join(TERM_NAMES[name] for name in names if terms[name] > 0) or TERM_NAMES[names[0]],
            "terms": list(names),
            "predicted_s": sum(terms[name] for name in names),
            "measured_s": seconds,
        }
        for names, seconds in split_measured_step(taken, beside).items()
        if any(terms[name] > 0 for name in names) or seconds > 0
    ]
    off = None
    if abs(step_s / expected["step_s"] - 1) > FAR:
        more = step_s > expected["step_s"]
        off = max(rows, key=lambda row: (row["measured_s"] - row["predicted_s"]) * (1 if more else -1))["name"]
    return {
        "step": taken[-1]["step"],
        "steps": len(taken),
        "basis": basis,
        "predicted_s": expected["step_s"],
        "measured_s": step_s,
        "terms": rows,
        "off": off,
        "predicted_bytes": expected["allocated_bytes"],
        "measured_bytes": max(int(record["memory_bytes"]) for record in taken),
    }


def split_measured_step(taken: Sequence[Mapping[str, Any]], beside: bool) -> dict[tuple[str, ...], float]:
    """Seconds of a step by the terms of a prediction that they belong to; several terms where nothing tells them apart.
    They add up to the step but for medians being taken one by one."""
    step_s = median(record["step_s"] for record in taken)
    busy = [record["busy_s"] for record in taken if record.get("busy_s")]
    data_s = median(record["data_s"] for record in taken)
    updates = [record["update_s"] for record in taken if record.get("update_s") is not None]
    if not updates:  # an accelerator
        if not busy:
            return {ALL: step_s}
        slowest, average = median(map(max, busy)), median(map(mean, busy))
        rest = (*WAIT_TERMS, *UPDATE_TERMS, "other")
        return {COMPUTE_TERMS: average, ("imbalance",): slowest - average, rest: max(0.0, step_s - slowest)}
    update_s = median(updates)
    waits = median(record.get("wait_s") or 0.0 for record in taken)
    slowest = median(map(max, busy)) if busy else step_s - waits
    average = median(map(mean, busy)) if busy else slowest
    return {
        COMPUTE_TERMS: max(0.0, average - data_s - (0.0 if beside else update_s)),
        ("imbalance",): slowest - average,
        WAIT_TERMS: max(0.0, step_s - slowest - (update_s if beside else 0.0)),
        UPDATE_TERMS: update_s,
        ("other",): data_s,
    }


def median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
