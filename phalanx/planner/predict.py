"""What a step of a recipe's own layout takes on given devices: one prediction, and no search."""

from dataclasses import dataclass, replace
from typing import Any

from phalanx.config.schema import Config
from phalanx.layout import pipeline_stages as pipelines
from phalanx.layout.model_shape import ModelSpec
from phalanx.planner import cost
from phalanx.planner.cluster import Cluster
from phalanx.planner.constants import DEFAULT, Constants
from phalanx.planner.cost import Estimate, Model
from phalanx.planner.heterogeneous import Unlike
from phalanx.planner.layout_choice import Choice
from phalanx.planner.memory import REPLICAS, Held
from phalanx.planner.recipe_keys import shape_of, work_of
from phalanx.planner.work import Work


@dataclass(frozen=True)
class Prediction:
    """`choice`: the layout that was meant, complete with stages and shares; `estimate`: its step and its memory."""

    work: Work
    cluster: Cluster
    choice: Choice
    estimate: Estimate


def predict(
    config: Config, cluster: Cluster, folder_spec: ModelSpec | None = None, constants: Constants = DEFAULT
) -> Prediction:
    """A step of the layout that `config` describes, on all devices of `cluster` in their order.

    What is still `auto` is taken as a run would resolve it without looking at memory, and `train.micro_batch` as the
    largest power of two that fits. `folder_spec` are the shapes of `model.from_hf`. Raises ConfigError for a network of
    one's own, and for degrees that do not come out even.
    """
    work = work_of(config, shape_of(config, folder_spec), cluster)
    choice = choice_of(config, cluster)
    unlike, model = Unlike(work, cluster, constants), Model(work, cluster, constants)
    if config.train.micro_batch != "auto":
        choice = unlike.completed(choice)
        return Prediction(work, cluster, choice, model.predict(choice))
    size = -(-work.global_batch // config.parallel.axes.data(cluster.devices))
    size = 1 << (size.bit_length() - 1)
    while True:
        tried = unlike.completed(replace(choice, micro_batch=size))
        estimate = model.predict(tried)
        if estimate.fits or size == 1:
            return Prediction(work, cluster, tried, estimate)
        size //= 2


def choice_of(config: Config, cluster: Cluster) -> Choice:
    """The layout of a recipe, as `recipe_keys.keys_of` has written it. Raises ConfigError where the degrees do not
    divide the devices."""
    parallel, memory = config.parallel, config.memory.activations
    devices, batch = cluster.devices, config.train.global_batch
    staged = parallel.pipeline > 1
    schedule = parallel.schedule if staged else "1f1b"
    copies = config.parallel.axes.data(devices)
    zero, reduce = parallel.settled
    work, state = config.balance.work, config.balance.state
    shares: tuple[int, ...] = ()
    if isinstance(work, list):
        shares = tuple(work)
    elif work == "even":
        shares = cost.even(batch, copies)
    full: dict[str, Any] = {"recompute": "full", "offload": True}
    kept = full if memory == "offload" else {"recompute": "none" if memory == "auto" else memory}
    cuts = config.data.seq_len % parallel.tensor == 0 if parallel.sequence == "auto" else parallel.sequence
    return Choice(
        zero=zero,
        shard_degree=0 if parallel.shard_degree == "auto" or copies == 1 else parallel.shard_degree,
        tensor=parallel.tensor,
        sequence=parallel.tensor > 1 and bool(cuts),
        pipeline=parallel.pipeline,
        stages=() if parallel.stages == "auto" or not staged else tuple(parallel.stages),
        virtual=pipelines.HELD[schedule],
        order="1f1b" if schedule == "interleaved" else schedule,
        micro_batch=1 if config.train.micro_batch == "auto" else config.train.micro_batch,
        shares=shares,
        reduce=reduce,
        slots=1 if zero == 3 else config.optim.slots,
        engine="fsdp" if parallel.data == "fsdp2" else "sharded",
        devices=devices,
        state=tuple(part / sum(state) for part in state) if isinstance(state, list) else (),
        **kept,
    )


def allocated_bytes(held: Held) -> float:
    """What a run's records can show of it: on an accelerator what is allocated, so without the driver's and the
    fragments; on a CPU what is resident, with what a process is itself, but no replica, which another process has."""
    reserved = held.parts.get("reserved", 0.0) + held.parts.get(REPLICAS, 0.0)
    return held.total - reserved + (held.kind.reserved_bytes if held.kind.on_host else 0.0)
