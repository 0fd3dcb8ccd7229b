"""Create the engine of a configuration, with its sharding."""

import functools

from phalanx.comm.mesh import Mesh
from phalanx.config.load import update_config
from phalanx.config.schema import Config
from phalanx.engine.fsdp2 import Fsdp2Engine
from phalanx.engine.interface import InMemoryStore
from phalanx.engine.sharded import ShardedEngine
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.engine.single import SingleEngine
from phalanx.parallel.parallelize import MakeEngine

StateWeights = tuple[float, ...] | None


def make_engine_factory(
    config: Config, weights: StateWeights = None, in_memory_store: InMemoryStore | None = None
) -> MakeEngine:
    """Make a function that creates the engine of a resolved configuration; `weights` as for `make_sharding_spec`,
    `in_memory_store` what its state is committed to."""
    assert config.parallel.engine != "auto"
    if config.parallel.engine == "sharded":
        return functools.partial(ShardedEngine, sharding=make_sharding_spec(config, weights), keeper=in_memory_store)
    others: dict[str, MakeEngine] = {"single": SingleEngine, "fsdp2": Fsdp2Engine}
    return functools.partial(others[config.parallel.engine], keeper=in_memory_store)


def agree_on_sharding(config: Config, mesh: Mesh) -> Config:
    """The configuration with what all ranks must do alike: of what each has resolved for its own memory, that which
    shards most. Collective."""
    if config.parallel.engine != "sharded":
        return config
    mine = make_sharding_spec(config)
    zero, often = mesh.max([float(mine.zero), float(mine.reduce == "per_micro_batch")])
    reduce = "per_micro_batch" if often else "per_step"
    if (int(zero), reduce) == (mine.zero, mine.reduce):
        return config
    early = {"optim.double_buffer": False} if zero == 3 else {}  # with zero 3 nothing is updated early
    return update_config(config, {"parallel.zero": int(zero), "parallel.grad_reduce": reduce} | early)


def make_sharding_spec(config: Config, weights: StateWeights = None) -> ShardingSpec:
    """The sharding of the sharded engine; before memory was measured, as little is sharded as possible.

    `weights`: how much of the state each rank holds, where balance.optimizer_state says no numbers.
    """
    zero, reduce = config.parallel.resolve_sharding
    state = config.balance.optimizer_state
    weights = tuple(map(float, state)) if isinstance(state, list) else weights
    degree = None if config.parallel.shard_degree == "auto" else config.parallel.shard_degree
    # Resharded parameters are gathered again anyway, so there are no early updates.
    slots = 2 if config.optim.double_buffer and zero != 3 else 1
    return ShardingSpec(
        zero, reduce, weights, slots, degree=degree, compress=config.comm.compress, fp8=config.train.fp8 == "block"
    )
