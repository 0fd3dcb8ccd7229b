"""Which engine a configuration asks for, and what it is told to shard."""

import functools
from typing import TYPE_CHECKING

from phalanx.comm.mesh import Mesh
from phalanx.engine.fsdp2 import Fsdp2
from phalanx.engine.interface import Keeper
from phalanx.engine.sharded import Sharded
from phalanx.engine.sharding_spec import Sharding
from phalanx.engine.single import Single
from phalanx.parallel.parallelize import MakeEngine

if TYPE_CHECKING:  # the loop runs where pydantic is not installed
    from phalanx.config.schema import Config


Weights = tuple[float, ...] | None


def make_engine(config: "Config", weights: Weights = None, keeper: Keeper | None = None) -> MakeEngine:
    """What makes the engine of a resolved configuration; `weights` as for `sharding_of`, `keeper` what its state is
    committed to."""
    assert config.parallel.data != "auto"
    if config.parallel.data == "sharded":
        return functools.partial(Sharded, sharding=sharding_of(config, weights), keeper=keeper)
    others: dict[str, MakeEngine] = {"single": Single, "fsdp2": Fsdp2}
    return functools.partial(others[config.parallel.data], keeper=keeper)


def agreed(config: "Config", mesh: Mesh) -> "Config":
    """The configuration with what all ranks must do alike: of what each has resolved for its own memory, that which
    shards most. Collective."""
    if config.parallel.data != "sharded":
        return config
    mine = sharding_of(config)
    zero, often = mesh.max([float(mine.zero), float(mine.reduce == "per_micro_batch")])
    alike = {"zero": int(zero), "reduce": "per_micro_batch" if often else "per_step"}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=alike)})


def sharding_of(config: "Config", weights: Weights = None) -> Sharding:
    """What the sharded engine is told; where nobody has looked at memories, as little is sharded as possible.

    `weights`: how much of the state each rank holds, where balance.state says no numbers.
    """
    zero, reduce = config.parallel.settled
    state = config.balance.state
    weights = tuple(map(float, state)) if isinstance(state, list) else weights
    degree = None if config.parallel.shard_degree == "auto" else config.parallel.shard_degree
    # Parameters that are released are gathered anew anyway: there is nothing to do early.
    slots = 1 if zero == 3 else config.optim.slots
    return Sharding(zero, reduce, weights, slots, degree=degree, compress=config.comm.compress)
