"""Which part of the optimizer's state each rank holds: equal parts, and less where memory is short."""

from typing import TYPE_CHECKING, Any

from phalanx import accelerator, balance
from phalanx.comm.mesh import Mesh
from phalanx.comm.objects import JsonGroup
from phalanx.errors import ConfigError
from phalanx.optim.choose import make_rule
from phalanx.optim.layout import lay_out
from phalanx.optim.memory import held_bytes
from phalanx.optim.units import describe
from phalanx.parallel.apply import own_units, precision_of
from phalanx.records import Kind, RunPaths
from phalanx.train.engines import Weights, sharding_of
from phalanx.train.sinks import Records, resolved_before
from phalanx.train.subject import Subject

if TYPE_CHECKING:
    from phalanx.config import Config

FOR_STATE = 0.6  # of the free memory, with whole parameters and gradients: the rest is for activations
AT_MOST = 0.9  # where it does not fit otherwise
WHOLE = 1.0  # where it is known what was held before
IN_SHARES = ("master weights", "optimizer state")
KEY = "balance.state"
SHORT = "equal parts do not fit beside parameters and activations everywhere"
ENOUGH = "equal parts fit beside parameters and activations"


def settled_weights(
    config: "Config", subject: Subject, mesh: Mesh, local_world: int, paths: RunPaths, records: Records,
    fits: bool = False,
) -> Weights:  # fmt: skip
    """As `state_weights`, but what was found for the same ranks before is taken again as long as it fits (`fits`: which
    is known, since it is in memory): another cut adds up in another order. What is found is an event, from which the
    next start reads it. Collective."""
    if (
        config.balance.state != "auto"
        or config.parallel.data != "sharded"
        or mesh.data.world == 1
        or mesh.axes.model > 1
    ):
        return state_weights(config, subject, mesh, local_world)
    group, sharding = JsonGroup(mesh.checkpoint), sharding_of(config)
    of = {
        "devices": group.all_objects(accelerator.name(mesh.device)),
        "zero": sharding.zero,
        "slots": sharding.slots,
        "degree": sharding.degree or mesh.world,
    }
    before = group.broadcast_object(recorded(paths, of) if mesh.rank == 0 else None)
    if before is not None and (fits or _fit(before, *_rooms(config, subject, mesh, local_world, WHOLE))):
        return None if before == "even" else tuple(before)
    found = state_weights(config, subject, mesh, local_world)
    weights = None if found is None else tuple(round(part, 4) for part in found)  # as the event has it
    value, reason = ("even", ENOUGH) if weights is None else (list(weights), SHORT)
    records.event(Kind.RESOLVED, {"key": KEY, "value": value, "reason": reason, "of": of})
    return weights


def _fit(before: Any, rooms: list[float], needed: float) -> bool:
    """Whether what was `recorded` has room now."""
    known = [1 / len(rooms)] * len(rooms) if before == "even" else before
    return all(part * needed <= room for part, room in zip(known, rooms, strict=True))


def recorded(paths: RunPaths, of: dict[str, Any]) -> Any:
    """What was found last for such ranks: "even", or a list of parts in their order; None where nothing was."""
    found = resolved_before(paths, KEY, of)
    usable = isinstance(found, list) and len(found) == of["degree"] and all(type(part) is float for part in found)
    return found if usable or found == "even" else None


def state_weights(config: "Config", subject: Subject, mesh: Mesh, local_world: int) -> Weights:
    """How much of the state each rank holds, in order of rank, among those that hold a copy together; None: the same.

    Collective, and the same on all ranks. Raises ConfigError where all of them together have no room for it.
    """
    if config.parallel.data != "sharded" or config.balance.state == "even":
        return None
    if (given := sharding_of(config).weights) is not None:
        return given
    if mesh.axes.model > 1:  # what follows is about ranks that hold a whole model each
        return None
    left, needed = _rooms(config, subject, mesh, local_world, FOR_STATE)
    most, _ = _rooms(config, subject, mesh, local_world, AT_MOST)
    try:
        shares = balance.state_shares(left, needed)
    except ConfigError:
        shares = balance.state_shares(most, needed)
    return None if len(set(shares)) == 1 else shares


def _rooms(config: "Config", subject: Subject, mesh: Mesh, local_world: int, part: float) -> tuple[list[float], float]:
    """Bytes that `part` of the free memory has left for the state on each of the ranks that hold a copy together, and
    what the state needs on all of these. Collective."""
    sharding = sharding_of(config)
    free = float(accelerator.memory_free(mesh.device, local_world))
    degree = sharding.degree or mesh.world
    model, rule = subject.model(), make_rule(config.optim)
    buckets = lay_out(describe(model, own_units(model), rule), (1.0,) * degree, apart=sharding.apart)
    items = held_bytes(buckets, 0, sharding, precision_of(config.train.dtype, mesh), rule, accumulates=True)
    own = sum(items[name] for name in IN_SHARES)
    # Ranks may compute in unlike types: each says for itself what is left.
    left = mesh.gather(free * part - (sum(items.values()) - own))
    (needed,) = mesh.max([float(degree * own)])
    return [min(left[place::degree]) for place in range(degree)], needed
