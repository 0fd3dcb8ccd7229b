"""What an attempt begins with: the last committed step in shared memory, the newest checkpoint, or starting weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx.checkpoint.disk.load import Checkpoint, find, newest_agreed
from phalanx.checkpoint.memory.previous_state import KeptState
from phalanx.checkpoint.memory.store import KEY, REPLICATE, Memory
from phalanx.comm.compression import other_nodes
from phalanx.comm.json_objects import JsonGroup
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.events import Kind
from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.optim.make_rule import make_rule
from phalanx.optim.update import AdamW
from phalanx.parallel.materialize import frozen_only, materialise
from phalanx.recovery import state_file
from phalanx.recovery.replica_client import Replicas
from phalanx.workload.build import Parts
from phalanx.workload.sinks import Records

if TYPE_CHECKING:
    from phalanx.config.schema import Config

NOTHING: dict[str, Any] = {"step": 0, "skipped": 0, "tokens": 0}


@dataclass(frozen=True)
class Start:
    """Where a run goes on: what is said of the step that it goes on after. `in_memory`: that is where the step was.
    `left`: on rank 0, what the ranks that committed it there had measured of it."""

    header: dict[str, Any]
    in_memory: bool
    left: Sequence[Mapping[str, Any]] = ()

    @property
    def step(self) -> int:
        return int(self.header["step"])


def memory_of(config: "Config", placement: Placement, mesh: Mesh, paths: RunPaths, records: Records) -> Memory | None:
    """This rank's slots in shared memory; None where the recipe, or how the ranks were started, leaves them out.

    Raises ConfigError where they are asked for and cannot be.
    """
    wanted = config.resilience.memory
    if wanted is False:
        return None
    why = None
    if placement.shared is None:
        why = "something else than Phalanx started the ranks and starts them again"
    elif not placement.keeps:
        why = "shared memory cannot be used on every node"
        if wanted == "auto":
            reason = f"after a failure the run goes back to a checkpoint, since {why}"
            records.event(Kind.RESOLVED, {"key": KEY, "value": False, "reason": reason})
    if placement.shared is None or why is not None:
        if wanted is True:
            raise ConfigError(f"{KEY} is true, but {why}; set {KEY}=auto or false")
        if config.resilience.replicate not in ("auto", "off"):
            raise ConfigError(f"{REPLICATE} is {config.resilience.replicate}, but {why}; set {REPLICATE}=auto or off")
        return None
    on_host, replicas = mesh.device.type == "cpu", None
    if placement.nodes > 1 or (placement.kept is not None and any(file.address for file in placement.kept.files)):
        patience_s = config.comm.timeout_s
        replicas = Replicas(
            Path(placement.shared), placement.node, placement.nodes, placement.partner, placement.attempt, patience_s
        )
    return Memory(
        Path(placement.shared),
        mesh,
        generation=placement.attempt,
        run=state_file.run_of(paths.events),
        say=records.event,
        kept=placement.kept,
        wanted=wanted,
        in_place=on_host and config.parallel.data == "sharded",
        background=not on_host,
        replicas=replicas,
        replicate=config.resilience.replicate,
        rule=asdict(rule) if isinstance(rule := make_rule(config.optim), AdamW) else None,
        first_here=placement.local_rank == 0,
    )


def restore(
    config: "Config",
    placement: Placement,
    mesh: Mesh,
    parts: Parts,
    paths: RunPaths,
    records: Records,
    memory: Memory | None,
    beating: Callable[[Any], Any],
) -> Start:
    """Fill model and state, in `memory` where they are kept; `beating` wraps what takes long. Collective.

    Raises RunError where there are checkpoints and none can be used.
    """
    group = JsonGroup(mesh.checkpoint)  # nothing is being saved yet, and it has patience with a store
    replicas = None if memory is None else memory.replicas
    source = _source(placement, mesh, group, parts, paths, records, replicas)
    if memory is not None:
        memory.whole = parts.parted.whole
    fill = beating(parts.starting_weights)
    materialise(parts.model, parts.engine, fill if source is None else frozen_only(fill))
    # Ranks of before may have written its unimportant parts at different moments; and for other ranks it may be far.
    header = group.broadcast_object((NOTHING if source is None else source.header) if mesh.rank == 0 else None)
    left = source.records() if isinstance(source, KeptState) and mesh.rank == 0 else []
    start = Start(header, isinstance(source, KeptState), left)
    if source is not None:
        if memory is None or not memory.attached:
            with torch.no_grad():
                parts.engine.load(parts.parted.reading(beating(source.read)))
        where = {"checkpoint": source.path.name} if isinstance(source, Checkpoint) else {"memory": True}
        records.event(Kind.RESUMED, {"step": start.step, **where})
        moved = other_nodes(config.comm.compress, header.get("nodes"), mesh.topology)
        if moved is not None:
            records.event(Kind.WARNING, {"message": moved})
        if isinstance(source, Checkpoint):
            source.close()
    elif placement.attempt > 1:
        records.event(Kind.WARNING, {"message": "there is no checkpoint yet: starting again from step 1"})
    if not start.step:
        for message in [*parts.subject.warnings(), *parts.train.warnings()]:
            records.event(Kind.WARNING, {"message": message})
    return start


def _source(
    placement: Placement,
    mesh: Mesh,
    group: JsonGroup,
    parts: Parts,
    paths: RunPaths,
    records: Records,
    replicas: Replicas | None,
) -> KeptState | Checkpoint | None:
    """What the attempt goes on from; None: from nothing."""
    if placement.kept is not None:
        return KeptState(placement.kept, parts.parted.shapes, replicas)
    folder = paths.checkpoints
    checkpoint = newest_agreed(folder, mesh.rank, group, None, records.event)
    if checkpoint is None and group.broadcast_object(len(find(folder))):
        # Beginning anew would write over what may only be unreadable for the moment.
        raise RunError(
            f"none of the checkpoints in {folder} can be used (their reasons are in {paths.events}); restore one, or "
            "move that folder away to begin again"
        )
    return checkpoint
