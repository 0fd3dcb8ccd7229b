"""Which engine a configuration asks for, and what it is told to shard."""

import functools
from typing import TYPE_CHECKING

from phalanx.optim.fsdp2 import Fsdp2
from phalanx.optim.order import Sharding
from phalanx.optim.sharded import Sharded
from phalanx.optim.single import Single
from phalanx.parallel.apply import MakeEngine

if TYPE_CHECKING:  # the loop runs where pydantic is not installed
    from phalanx.config import Config


Weights = tuple[float, ...] | None


def make_engine(config: "Config", weights: Weights = None) -> MakeEngine:
    """What makes the engine of a resolved configuration; `weights` as for `sharding_of`."""
    assert config.parallel.data != "auto"
    if config.parallel.data == "sharded":
        return functools.partial(Sharded, sharding=sharding_of(config, weights))
    others: dict[str, MakeEngine] = {"single": Single, "fsdp2": Fsdp2}
    return others[config.parallel.data]


def sharding_of(config: "Config", weights: Weights = None) -> Sharding:
    """What the sharded engine is told; where nobody has looked at memories, as little is sharded as possible.

    `weights`: how much of the state each rank holds, where balance.state says no numbers.
    """
    zero = 1 if config.parallel.zero == "auto" else config.parallel.zero
    reduce = config.parallel.reduce
    if reduce == "auto":
        reduce = "per_step" if zero == 1 else "per_micro_batch"
    state = config.balance.state
    weights = tuple(map(float, state)) if isinstance(state, list) else weights
    degree = None if config.parallel.shard_degree == "auto" else config.parallel.shard_degree
    return Sharding(zero, reduce, weights, config.optim.slots, degree=degree)
