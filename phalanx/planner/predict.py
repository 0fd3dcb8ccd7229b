"""What a step of a recipe's own layout takes on given devices: one prediction, and no search."""

from dataclasses import dataclass, replace
from typing import Any

from phalanx.config.schema import Config
from phalanx.layout import pipeline_stages as pipelines
from phalanx.layout.model_shape import ModelSpec
from phalanx.planner import cost
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.constants import DEFAULT_CONSTANTS, CostConstants
from phalanx.planner.cost import CostModel, StepEstimate
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
    largest power of two that fits. `folder_spec` are the shapes of `model.from_hf`. Raises ConfigError for a network of
    one's own, and for degrees that do not come out even.
    """
    work = work_of(config, shape_of(config, folder_spec), cluster)
    choice = choice_of(config, cluster)
    unlike, model = HeterogeneousDevices(work, cluster, constants), CostModel(work, cluster, constants)
    if config.train.micro_batch != "auto":
        choice = unlike.complete(choice)
        return Prediction(work, cluster, choice, model.estimate(choice))
    size = -(-work.global_batch // config.parallel.axes.data_parallel_size(cluster.devices))
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
    staged = parallel.pipeline > 1
    schedule = parallel.schedule if staged else "1f1b"
    copies = config.parallel.axes.data_parallel_size(devices)
    zero, reduce = parallel.resolve_sharding
    work, state = config.balance.batch, config.balance.optimizer_state
    shares: tuple[int, ...] = ()
    if isinstance(work, list):
        shares = tuple(work)
    elif work == "even":
        shares = cost.split_evenly(batch, copies)
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
    """What a run's records can show of it: on an accelerator what is allocated, so without the driver's and the
    fragments; on a CPU what is resident, with what a process is itself, but no replica, which another process has."""
    reserved = held.parts.get("reserved", 0.0) + held.parts.get(REPLICAS, 0.0)
    return held.total_bytes - reserved + (held.kind.reserved_bytes if held.kind.on_host else 0.0)
