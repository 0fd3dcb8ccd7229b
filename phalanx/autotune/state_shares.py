"""Which part of the optimizer's state each rank holds: equal parts, and less where memory is short."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.comm.json_objects import JsonGroup
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.core.events import Kind
from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.engine.memory_model import STATE, held_bytes, slot_bytes
from phalanx.engine.units import describe
from phalanx.layout import balance
from phalanx.layout.buckets import lay_out
from phalanx.models.model import Model
from phalanx.optim.make_rule import make_rule
from phalanx.parallel.parallelize import own_units, precision_of
from phalanx.recovery.budget import NONE, Keeps, keeps_of
from phalanx.recovery.catalog import elsewhere
from phalanx.system import accelerator
from phalanx.workload.engines import Weights, sharding_of
from phalanx.workload.sinks import Records, resolved_before
from phalanx.workload.workload import Subject

if TYPE_CHECKING:
    from phalanx.config.schema import Config

FOR_STATE = 0.6  # of the free memory, with whole parameters and gradients: the rest is for activations
AT_MOST = 0.9  # where it does not fit otherwise
WHOLE = 1.0  # where it is known what was held before
KEY = "balance.state"
SHORT = "equal parts do not fit beside parameters and activations everywhere"
ENOUGH = "equal parts fit beside parameters and activations"


@dataclass(frozen=True)
class Keeping:
    """What a run keeps, in `options` from what it wants to nothing, in the memory that its ranks on CPUs compute in;
    `there`: bytes of it that a rank before has left, and that one with the same part takes up."""

    options: Sequence[Keeps] = (NONE,)
    there: float = 0.0


def keeping_of(config: "Config", placement: Placement, mesh: Mesh) -> Keeping:
    """What ranks that were started so keep; all of them say the same options."""
    if placement.shared is None or not placement.keeps:
        return Keeping()
    degree = sharding_of(config).degree or mesh.world
    parts = [rank % degree for rank in range(mesh.world)]
    several = placement.nodes > 1 and not all(elsewhere(parts, mesh.topology.node_of))
    options = keeps_of(config.resilience.memory, config.resilience.replicate, several, config.optim.rule == "adamw")
    left = 0
    for path in Path(placement.shared).rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the process that keeps replicas may take one away just now
            left += path.stat().st_size if path.is_file() else 0
    # Where it cannot be kept at all, that is said by who keeps it, with numbers.
    options = options if options[-1] == NONE else (*options, NONE)
    return Keeping(options, left / placement.local_world)


def settled_weights(
    config: "Config", subject: Subject, mesh: Mesh, local_world: int, paths: RunPaths, records: Records,
    fits: bool = False, keeping: Keeping | None = None, made: Callable[[], Model] | None = None,
) -> Weights:  # fmt: skip
    """As `state_weights`, but what was found for the same ranks before is taken again as long as it fits (`fits`: which
    is known, since it is in memory): another cut adds up in another order. What is found is an event, from which the
    next start reads it. `made` gives the model on meta, if another one need not be made. Collective."""
    if (
        config.balance.state != "auto"
        or config.parallel.data != "sharded"
        or mesh.data.world == 1
        or mesh.axes.model > 1
    ):
        return state_weights(config, subject, mesh, local_world)
    keeping, made = keeping or Keeping(), made or functools.cache(subject.model)
    group, sharding = JsonGroup(mesh.checkpoint), sharding_of(config)
    of = {
        "devices": group.all_objects(accelerator.name(mesh.device)),
        "zero": sharding.zero,
        "slots": sharding.slots,
        "degree": sharding.degree or mesh.world,
    }
    before = group.broadcast_object(recorded(paths, of) if mesh.rank == 0 else None)
    if before is not None and fits:
        return None if before == "even" else tuple(before)
    found = None
    for keeps in keeping.options:
        if before is not None:
            rooms = _rooms(config, made(), mesh, local_world, WHOLE, keeps, keeping.there)
            if _fit(before, *rooms):
                return None if before == "even" else tuple(before)
        try:
            found = state_weights(config, subject, mesh, local_world, keeps, made)
            break
        except ConfigError:
            if keeps == keeping.options[-1]:
                raise
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


def state_weights(
    config: "Config", subject: Subject, mesh: Mesh, local_world: int, keeps: Keeps = NONE,
    made: Callable[[], Model] | None = None,
) -> Weights:  # fmt: skip
    """How much of the state each rank holds, in order of rank, among those that hold a copy together; None: the same.
    `keeps`: how often it lies in the memory that ranks on CPUs compute in; `made` as in `settled_weights`.

    Collective, and the same on all ranks. Raises ConfigError where all of them together have no room for it.
    """
    if config.parallel.data != "sharded" or config.balance.state == "even":
        return None
    if (given := sharding_of(config).weights) is not None:
        return given
    if mesh.axes.model > 1:  # what follows is about ranks that hold a whole model each
        return None
    model = subject.model() if made is None else made()
    left, needed = _rooms(config, model, mesh, local_world, FOR_STATE, keeps)
    most, _ = _rooms(config, model, mesh, local_world, AT_MOST, keeps)
    try:
        shares = balance.state_shares(left, needed)
    except ConfigError:
        shares = balance.state_shares(most, needed)
    return None if len(set(shares)) == 1 else shares


def _rooms(
    config: "Config", model: Model, mesh: Mesh, local_world: int, part: float, keeps: Keeps, there: float = 0.0
) -> tuple[list[float], float]:
    """Bytes that `part` of the free memory, `there` included, has left for the state on each of the ranks that hold a
    copy together, and what the state needs on all of these. Collective."""
    sharding = sharding_of(config)
    on_host = mesh.device.type == "cpu"
    free = float(accelerator.memory_free(mesh.device, local_world)) + (there if on_host else 0.0)
    degree = sharding.degree or mesh.world
    rule = make_rule(config.optim)
    buckets = lay_out(describe(model, own_units(model), rule), (1.0,) * degree, apart=sharding.apart)
    precision = precision_of(config.train.dtype, mesh)
    items = held_bytes(buckets, 0, sharding, precision, rule, accumulates=True)
    own = sum(items[name] for name in STATE)
    kept = keeps.bytes(*slot_bytes(buckets, 0, precision, rule)) if keeps.own and on_host else own
    # Ranks may compute in unlike types: each says for itself what is left, and what of the whole state that is.
    (needed,) = mesh.max([float(degree * kept)])
    left = mesh.gather((free * part - (sum(items.values()) - own)) * (needed / (degree * kept) if kept else 1.0))
    if keeps.replicas:
        # Another node holds as much again: what both have room for is enough for either.
        node = mesh.topology.node_of
        nodes = list(dict.fromkeys(node))
        after = dict(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
        next_left = {each: min(left[rank] for rank in range(mesh.world) if node[rank] == each) for each in nodes}
        left = [min(mine, next_left[after[node[rank]]]) for rank, mine in enumerate(left)]
    return [min(left[place::degree]) for place in range(degree)], needed
