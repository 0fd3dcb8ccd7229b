"""Restoring the state of an attempt: the last committed step in shared memory, the newest checkpoint, or initial
weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx.checkpoint.disk.load import Checkpoint, agree_on_newest, list_steps
from phalanx.checkpoint.memory.previous_state import InMemoryCheckpointReader
from phalanx.checkpoint.memory.replication import REPLICATE_KEY
from phalanx.checkpoint.memory.slots import MEMORY_KEY
from phalanx.checkpoint.memory.store import SharedMemoryStore
from phalanx.comm.compression import describe_node_change
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.optim.make_rule import make_rule
from phalanx.optim.update import AdamW
from phalanx.parallel.init_weights import make_frozen_fill, materialize
from phalanx.recovery import state_file
from phalanx.recovery.replica_client import ReplicaClient
from phalanx.workload.build import RunComponents
from phalanx.workload.sinks import RecordWriter

if TYPE_CHECKING:
    from phalanx.config.schema import Config

EMPTY_HEADER: dict[str, Any] = {"step": 0, "skipped": 0, "tokens": 0}


@dataclass(frozen=True)
class ResumePoint:
    """The resume point of a run: the step after which it resumes. `in_memory`: from shared memory.
    `step_measurements`: on rank 0, the measurements of the ranks that committed it there."""

    header: dict[str, Any]
    in_memory: bool
    step_measurements: Sequence[Mapping[str, Any]] = ()

    @property
    def step(self) -> int:
        return int(self.header["step"])


def make_in_memory_store(
    config: "Config", placement: Placement, mesh: Mesh, paths: RunPaths, records: RecordWriter
) -> SharedMemoryStore | None:
    """Make this rank's slots in shared memory; None if the recipe, or how the ranks were started, excludes them.
    Raises ConfigError if they are required but impossible.
    """
    wanted = config.resilience.in_memory_checkpoints
    if wanted is False:
        return None
    why = None
    if placement.shared is None:
        why = "another launcher started the ranks and restarts them"
    elif not placement.keeps:
        why = "shared memory cannot be used on every node"
        if wanted == "auto":
            reason = f"after a failure the run goes back to a checkpoint: {why}"
            records.write_event(EventKind.AUTO_RESOLVED, {"key": MEMORY_KEY, "value": False, "reason": reason})
    if placement.shared is None or why is not None:
        if wanted is True:
            raise ConfigError(f"{MEMORY_KEY} is true, but {why}; set {MEMORY_KEY}=auto or false")
        if config.resilience.replicate_every not in ("auto", "off"):
            raise ConfigError(
                f"{REPLICATE_KEY} is {config.resilience.replicate_every}, but {why}; set {REPLICATE_KEY}=auto or off"
            )
        return None
    on_host, replicas = mesh.device.type == "cpu", None
    if placement.nodes > 1 or (placement.kept is not None and any(file.address for file in placement.kept.files)):
        patience_s = config.comm.timeout_s
        replicas = ReplicaClient(
            Path(placement.shared), placement.node, placement.nodes, placement.partner, placement.attempt, patience_s
        )
    return SharedMemoryStore(
        Path(placement.shared),
        mesh,
        generation=placement.attempt,
        run=state_file.compute_run_id(paths.events),
        on_event=records.write_event,
        previous=placement.kept,
        wanted=wanted,
        in_place=on_host and config.parallel.engine == "sharded",
        background=not on_host,
        replicas=replicas,
        replicate=config.resilience.replicate_every,
        rule=asdict(rule) if isinstance(rule := make_rule(config.optim), AdamW) else None,
        first_on_node=placement.local_rank == 0,
    )


def restore_state(
    config: "Config",
    placement: Placement,
    mesh: Mesh,
    components: RunComponents,
    paths: RunPaths,
    records: RecordWriter,
    in_memory_store: SharedMemoryStore | None,
    wrap_with_progress_touch: Callable[[Any], Any],
) -> ResumePoint:
    """Restore model and state, into `in_memory_store` if there is one; `wrap_with_progress_touch` wraps slow
    operations. Collective. Raises RunError if there are checkpoints but none is usable.
    """
    group = JsonGroup(mesh.checkpoint)  # no save is running, and this group has the timeout for a store
    replicas = None if in_memory_store is None else in_memory_store.replicas
    source = _source(placement, mesh, group, components, paths, records, replicas)
    if in_memory_store is not None:
        in_memory_store.to_global = components.model_part.to_whole_pieces
    fill = wrap_with_progress_touch(components.starting_weights)
    materialize(components.model, components.engine, fill if source is None else make_frozen_fill(fill))
    # Earlier ranks may have written its optional parts at different times; and other ranks may see another version.
    header = group.broadcast_object((EMPTY_HEADER if source is None else source.header) if mesh.rank == 0 else None)
    left = source.records() if isinstance(source, InMemoryCheckpointReader) and mesh.rank == 0 else []
    start = ResumePoint(header, isinstance(source, InMemoryCheckpointReader), left)
    if source is not None:
        if in_memory_store is None or not in_memory_store.has_state:
            with torch.no_grad():
                components.engine.load(components.model_part.make_reader(wrap_with_progress_touch(source.read_into)))
        where = {"checkpoint": source.path.name} if isinstance(source, Checkpoint) else {"memory": True}
        records.write_event(EventKind.RESUMED, {"step": start.step, **where})
        moved = describe_node_change(config.comm.compress, header.get("nodes"), mesh.topology)
        if moved is not None:
            records.write_event(EventKind.WARNING, {"message": moved})
        if isinstance(source, Checkpoint):
            source.close()
    elif placement.attempt > 1:
        records.write_event(EventKind.WARNING, {"message": "there is no checkpoint yet: restarting from step 1"})
    if not start.step:
        for message in [*components.workload.warnings(), *components.train.warnings()]:
            records.write_event(EventKind.WARNING, {"message": message})
    return start


def _source(
    placement: Placement,
    mesh: Mesh,
    group: JsonGroup,
    components: RunComponents,
    paths: RunPaths,
    records: RecordWriter,
    replicas: ReplicaClient | None,
) -> InMemoryCheckpointReader | Checkpoint | None:
    """The state that the attempt resumes from; None for a new run."""
    if placement.kept is not None:
        return InMemoryCheckpointReader(placement.kept, components.model_part.shapes, replicas)
    folder = paths.checkpoints
    checkpoint = agree_on_newest(folder, mesh.rank, group, None, records.write_event)
    if checkpoint is None and group.broadcast_object(len(list_steps(folder))):
        # Starting over would overwrite checkpoints that may be unreadable only temporarily.
        raise RunError(
            f"none of the checkpoints in {folder} can be used (their reasons are in {paths.events}); restore one, or "
            "move that folder away to start over"
        )
    return checkpoint
