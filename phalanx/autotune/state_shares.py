"""Choose `balance.optimizer_state`: equal shares, and smaller ones where memory is short."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.autotune.rank_bytes import StateLayout, commit_bytes, state_items
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.config.optimizers import find_optimizer
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.layout import balance
from phalanx.layout.memory_model import STATE_ITEMS
from phalanx.models.model import Model
from phalanx.optim.make_rule import make_rule
from phalanx.parallel.parallelize import precision_of
from phalanx.recovery.catalog import NO_COPIES, StateCopies, list_copy_options, needs_replicas
from phalanx.system import accelerator
from phalanx.workload.engines import StateWeights, make_sharding_spec
from phalanx.workload.sinks import RecordWriter, find_resolved_value
from phalanx.workload.workload import Workload

if TYPE_CHECKING:
    from phalanx.config.schema import Config

STATE_SHARE = 0.6  # of the free memory, with whole parameters and gradients: the rest is for activations
MAX_STATE_SHARE = 0.9  # where it does not fit otherwise
FULL_SHARE = 1.0  # where it is known what was held before
KEY = "balance.optimizer_state"
UNEVEN_REASON = "equal parts do not fit beside parameters and activations everywhere"
EVEN_REASON = "equal parts fit beside parameters and activations"


@dataclass(frozen=True)
class InMemoryOptions:
    """What a run keeps, in `options` from what it wants to nothing, in the memory that its ranks on CPUs compute in;
    `reusable_bytes`: bytes of it that a rank before has left, and that one with the same part takes up."""

    options: Sequence[StateCopies] = (NO_COPIES,)
    reusable_bytes: float = 0.0


def find_in_memory_options(config: "Config", placement: Placement, mesh: Mesh) -> InMemoryOptions:
    """What ranks that were started so keep; all of them say the same options. Collective."""
    nodes = [int(node) for node in mesh.gather(float(placement.node))]
    if placement.shared is None or not placement.keeps:
        return InMemoryOptions()
    parts = mesh.axes.state_parts(mesh.world, make_sharding_spec(config).degree)
    options = list_copy_options(
        config.resilience.in_memory_checkpoints,
        config.resilience.replicate_every,
        needs_replicas(parts, nodes),
        find_optimizer(config.optim.name).replays,
    )
    left = 0
    for path in Path(placement.shared).rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the process that keeps replicas may take one away just now
            left += path.stat().st_size if path.is_file() else 0
    # Where it cannot be kept at all, the in-memory store reports that with numbers.
    options = options if options[-1] == NO_COPIES else (*options, NO_COPIES)
    return InMemoryOptions(options, left / placement.local_world)


def resolve_state_weights(
    config: "Config", workload: Workload, mesh: Mesh, local_world: int, paths: RunPaths, records: RecordWriter,
    already_fits: bool = False, in_memory: InMemoryOptions | None = None, make_model: Callable[[], Model] | None = None,
) -> StateWeights:  # fmt: skip
    """As `compute_state_weights`, but what was found for the same ranks before is taken again as long as it fits
    (`already_fits`: which is known, since it is in memory): another cut adds up in another order. What is found is an
    event, from which the next start reads it. `make_model` gives the model on meta, if another one need not be made.
    Collective."""
    if (
        config.balance.optimizer_state != "auto"
        or config.parallel.engine != "sharded"
        or mesh.data.world == 1
        or mesh.axes.model_parallel_size * mesh.axes.expert > 1
    ):
        return compute_state_weights(config, workload, mesh, local_world)
    in_memory, make_model = in_memory or InMemoryOptions(), make_model or functools.cache(workload.model)
    group, sharding = JsonGroup(mesh.checkpoint), make_sharding_spec(config)
    of = {
        "devices": group.all_gather_objects(accelerator.get_device_name(mesh.device)),
        "zero": sharding.zero,
        "slots": sharding.slots,
        "degree": sharding.degree or mesh.world,
    }
    before = group.broadcast_object(read_state_weights(paths, of) if mesh.rank == 0 else None)
    if before is not None and already_fits:
        return None if before == "even" else tuple(before)
    found = None
    for keeps in in_memory.options:
        if before is not None:
            rooms = _measure_room(config, make_model(), mesh, local_world, FULL_SHARE, keeps, in_memory.reusable_bytes)
            if _still_fits(before, *rooms):
                return None if before == "even" else tuple(before)
        try:
            found = compute_state_weights(config, workload, mesh, local_world, keeps, make_model)
            break
        except ConfigError:
            if keeps == in_memory.options[-1]:
                raise
    weights = None if found is None else tuple(round(part, 4) for part in found)  # as the event has it
    value, reason = ("even", EVEN_REASON) if weights is None else (list(weights), UNEVEN_REASON)
    records.write_event(EventKind.AUTO_RESOLVED, {"key": KEY, "value": value, "reason": reason, "of": of})
    return weights


def _still_fits(before: Any, rooms: list[float], needed: float) -> bool:
    """Whether the parts `before` have room now."""
    known = [1 / len(rooms)] * len(rooms) if before == "even" else before
    return all(part * needed <= room for part, room in zip(known, rooms, strict=True))


def read_state_weights(paths: RunPaths, of: dict[str, Any]) -> Any:
    """What was found last for such ranks: "even", or a list of parts in their order; None where nothing was."""
    found = find_resolved_value(paths, KEY, of)
    usable = isinstance(found, list) and len(found) == of["degree"] and all(type(part) is float for part in found)
    return found if usable or found == "even" else None


def compute_state_weights(
    config: "Config", workload: Workload, mesh: Mesh, local_world: int, keeps: StateCopies = NO_COPIES,
    make_model: Callable[[], Model] | None = None,
) -> StateWeights:  # fmt: skip
    """How much of the state each rank holds, in order of rank, among those that hold a copy together; None: the same.
    `keeps`: how often it lies in the memory that ranks on CPUs compute in; `make_model` as in `resolve_state_weights`.

    Collective, and the same on all ranks. Raises ConfigError where all of them together have no room for it.
    """
    if config.parallel.engine != "sharded" or config.balance.optimizer_state == "even":
        return None
    if (given := make_sharding_spec(config).weights) is not None:
        return given
    # What follows is about ranks that hold a whole model each.
    if mesh.axes.model_parallel_size * mesh.axes.expert > 1:
        return None
    model = workload.model() if make_model is None else make_model()
    left, needed = _measure_room(config, model, mesh, local_world, STATE_SHARE, keeps)
    most, _ = _measure_room(config, model, mesh, local_world, MAX_STATE_SHARE, keeps)
    try:
        shares = balance.state_shares(left, needed)
    except ConfigError:
        shares = balance.state_shares(most, needed)
    return None if len(set(shares)) == 1 else shares


def _measure_room(
    config: "Config",
    model: Model,
    mesh: Mesh,
    local_world: int,
    part: float,
    keeps: StateCopies,
    reusable_bytes: float = 0.0,
) -> tuple[list[float], float]:
    """Bytes that `part` of the free memory, `reusable_bytes` included, has left for the state on each of the ranks that
    hold a copy together, and what the state needs on all of these. Collective."""
    sharding = make_sharding_spec(config)
    on_host = mesh.device.type == "cpu"
    free = float(accelerator.memory_free(mesh.device, local_world)) + (reusable_bytes if on_host else 0.0)
    degree = sharding.degree or mesh.world
    layout = StateLayout(precision_of(config.train.dtype, mesh), mesh.world, make_rule(config.optim), sharding)
    items = state_items(model, None, layout, 0)
    own = sum(items[name] for name in STATE_ITEMS)
    kept = keeps.total_bytes(*commit_bytes(model, layout, 0)) if keeps.own and on_host else own
    # Ranks may compute in different dtypes: each converts its free memory to a fraction of the whole state.
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
