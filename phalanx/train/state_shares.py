"""Which part of the optimizer's state each rank holds: equal parts, and less where memory is short."""

from typing import TYPE_CHECKING

from phalanx import accelerator, balance
from phalanx.comm.mesh import Mesh
from phalanx.errors import ConfigError
from phalanx.optim.choose import make_rule
from phalanx.optim.layout import lay_out
from phalanx.optim.memory import held_bytes
from phalanx.optim.units import describe
from phalanx.parallel.apply import own_units, precision_of
from phalanx.train.engines import sharding_of
from phalanx.train.subject import Subject

if TYPE_CHECKING:
    from phalanx.config import Config

FOR_STATE = 0.6  # of the free memory, with whole parameters and gradients: the rest is for activations
AT_MOST = 0.9  # where it does not fit otherwise
IN_SHARES = ("master weights", "optimizer state")


def state_weights(config: "Config", subject: Subject, mesh: Mesh, local_world: int) -> tuple[float, ...] | None:
    """How much of the state each rank holds, in order of rank, among those that hold a copy together; None: the same.

    Collective, and the same on all ranks. Raises ConfigError where all of them together have no room for it.
    """
    if config.parallel.data != "sharded" or config.balance.state == "even":
        return None
    sharding = sharding_of(config)
    if sharding.weights is not None:
        return sharding.weights
    if mesh.axes.model > 1:  # what follows is about ranks that hold a whole model each
        return None
    free = float(accelerator.memory_free(mesh.device, local_world))
    degree = sharding.degree or mesh.world
    model, rule = subject.model(), make_rule(config.optim)
    buckets = lay_out(describe(model, own_units(model), rule), (1.0,) * degree, apart=sharding.apart)
    items = held_bytes(buckets, 0, sharding, precision_of(config.train.dtype, mesh), rule, accumulates=True)
    own = sum(items[name] for name in IN_SHARES)
    # Ranks may compute in unlike types: each says for itself what is left.
    left, most = (mesh.gather(free * part - (sum(items.values()) - own)) for part in (FOR_STATE, AT_MOST))
    (needed,) = mesh.max([float(degree * own)])
    try:
        shares = balance.state_shares([min(left[place::degree]) for place in range(degree)], needed)
    except ConfigError:
        shares = balance.state_shares([min(most[place::degree]) for place in range(degree)], needed)
    return None if len(set(shares)) == 1 else shares
