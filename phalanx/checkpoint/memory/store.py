"""In-memory checkpoints: a rank's state in shared memory, committed step by step, and reading the state of earlier
ranks.

Where ranks compute on the CPU with the sharded engine the state lives in the file's two slots, and nothing is copied.
Otherwise it is copied into them; from an accelerator concurrently with computation, by a separate thread and stream.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from phalanx.checkpoint.memory import slots
from phalanx.checkpoint.memory.interval import SlotRotation, SnapshotInterval
from phalanx.checkpoint.memory.previous_state import map_slot
from phalanx.checkpoint.memory.replication import Replicate, Replication
from phalanx.checkpoint.memory.slots import MEMORY_KEY, OnEvent, StateFolder, WorkingMemory
from phalanx.comm.comm_thread import CommThread
from phalanx.comm.mesh import Mesh
from phalanx.core.placement import InMemoryCheckpoint
from phalanx.core.records import EventKind
from phalanx.engine.interface import StepOutcome
from phalanx.optim.update import Slot, StatePiece, StepUpdate
from phalanx.recovery.replica_client import ReplicaClient
from phalanx.recovery.state_file import StateFile
from phalanx.system import accelerator

# An engine's pieces in coordinates of whole parameters.
ToGlobalPieces = Callable[[Iterable[StatePiece]], Iterable[StatePiece]]
# Of a step, the tokens since step 1, and what came of the step, where it was just taken.
BuildHeader = Callable[[int, int, StepOutcome | None], dict[str, Any]]
BuildRecord = Callable[[int, StepOutcome], dict[str, Any] | None]  # what this rank has measured of a step


class SharedMemoryStore:
    """This rank's slots, as an engine knows them (`phalanx.engine.interface.InMemoryStore`).

    `StateFolder` makes or finds the file that they are in, `SlotRotation` says which is written next, and `Replication`
    sends steps to another node. Before this rank confirms a step to the others it waits for its replica.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        generation: int,
        run: bytes,
        on_event: OnEvent,
        previous: InMemoryCheckpoint | None = None,
        wanted: bool | Literal["auto"] = "auto",
        in_place: bool = True,
        background: bool = False,
        replicas: ReplicaClient | None = None,
        replicate: Replicate = "auto",
        rule: Mapping[str, float] | None = None,
        first_on_node: bool | None = None,
    ) -> None:
        """Files are made in `folder`, as those of attempt `generation` of a `run`. `previous`: what the attempt begins
        with. `in_place`: engines may work in the slots; else states are copied, in the `background` or not.
        `replicas`: the way to other nodes, if there are any; `replicate`: as in a recipe; `rule`: AdamW's numbers,
        where that is the rule, whose updates other nodes can make again; `first_on_node`: whether no rank of this node
        is before this one (None: there is one node)."""
        assert not (in_place and background), "only copied state is copied in the background"
        self.in_place, self.commits_async, self.has_state = in_place, False, False
        self.slots: list[Slot] = []
        self.tokens = 0
        self.replicas = replicas
        self.to_global: ToGlobalPieces = iter
        self._mesh, self._on_event = mesh, on_event
        every = replicate if isinstance(replicate, int) and replicas is not None else None
        first = mesh.rank == 0 if first_on_node is None else first_on_node
        self._folder = StateFolder(folder, mesh, generation, run, previous, wanted, first, replicas, on_event)
        self._rotation = SlotRotation(every)
        self._replication: Replication | None = None
        if replicas is not None:
            again = rule if in_place and every is None else None
            self._replication = Replication(replicas, mesh, replicate, self._rotation, again, on_event)
        self._comm_thread = CommThread(mesh.device) if background else None
        self._interval = SnapshotInterval(
            mesh.device, background and wanted is not True and replicate != "every_step", every
        )
        self._working_memory = WorkingMemory(folder, mesh.rank)
        self._file: StateFile | None = None
        # The step that was confirmed, and the one that was given to `commit`.
        self._confirmed_step = self._last_step = 0
        self._header: BuildHeader = lambda step, tokens, outcome: {"step": step, "tokens": tokens}
        self._record: BuildRecord = lambda step, outcome: None

    def set_metadata(self, header: BuildHeader, record: BuildRecord) -> None:
        """The metadata of a step. `header` is called by the committing thread, `record` by the copying one."""
        self._header, self._record = header, record

    @property
    def file(self) -> StateFile:
        assert self._file is not None, "the slots are not open"
        return self._file

    def open(self, like: Slot, pieces: Callable[[Slot], Iterable[StatePiece]]) -> bool:
        """As the engine's interface has it; the slots are those of a file that was kept if on every rank it looks just
        as it would be made. Raises ConfigError where there is no room for what was asked for, and DamagedState where
        what was kept is not what was written."""
        folder, rotation, replication, mesh = self._folder, self._rotation, self._replication, self._mesh
        if folder.previous is not None:
            slots.verify_checkpoint(folder.previous, mesh, self.replicas)
        index, slot_bytes, part = slots.build_index(like, self.to_global(pieces(like)), mesh)
        parts = [int(each) for each in mesh.gather(float(part))]
        who = folder.owner(parts)
        index["who"] = [who.part, who.parts, *index["who"]]
        if replication is not None:
            replication.gather_nodes(parts)
        mine = folder.find_matching(index, slot_bytes, who, rotation.slot_count)
        (attached,) = mesh.min([float(mine is not None)])
        if attached and folder.previous is not None:
            self._file, self.has_state, rotation.current_step = mine, True, folder.previous.step
        else:
            self._file = folder.create_file(index, slot_bytes, who, rotation.slot_count)
        if self._file is None:
            if replication is not None:
                replication.refuse_without_file(folder.shortage)
            return False
        if self._comm_thread is not None:
            accelerator.page_lock(torch.frombuffer(self._file.map, dtype=torch.uint8), mesh.device)
        self._begin_replicas()
        if self.has_state:
            rotation.current_index = folder.first_slot(self._file)
        self.slots = [map_slot(self._file, slot, index["tensors"]) for slot in range(rotation.slot_count)]
        if rotation.every is not None:  # it is agreed on what its other slots hold
            self.wait_until_ready()
            if self.has_state and replication is not None:
                rotation.pin(self._file, replication.partner_steps(), mesh)
        self._agree_on_async()
        return True

    def _begin_replicas(self, last: bool = False) -> None:
        """Decide which ranks have replicas from now on. Collective where there are other nodes."""
        if self._replication is not None:
            newest = self._rotation.current_step if self.has_state else None
            self._replication.begin(self.file, newest, self._folder, last)

    def _agree_on_async(self) -> None:
        replicates = self._replication is not None and self._replication.active
        (late,) = self._mesh.max([float(self._comm_thread is not None or replicates)])
        self.commits_async = bool(late)

    def wait_until_ready(self) -> None:
        """As the engine's interface has it."""
        if self.has_state:
            self._folder.finish_copy(self.file)

    def allocate_working(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self._working_memory.allocate(elements, dtype)

    # ------------------------------------------------------------------------------------------------------ every step

    @property
    def current_index(self) -> int:
        return self._rotation.current_index

    @property
    def next_index(self) -> int:
        return self._rotation.next_index(self.file)

    def begin_write(self) -> None:
        if self.in_place:
            self.file.invalidate(self.next_index)

    def note_updates(self, keys: Collection[str], grads: Mapping[str, torch.Tensor], change: StepUpdate) -> None:
        if self._replication is not None and self._replication.gradients is not None:
            self._replication.gradients.note_updates(keys, grads, change)

    def commit(self, step: int, outcome: StepOutcome, state: Slot) -> None:
        self.tokens += outcome.weight
        if not self._interval.is_due(step):
            return
        self._rotation.advance(step, self.file)
        self._last_step = step
        keep = functools.partial(
            self._keep, self.current_index, self._header(step, self.tokens, outcome), state, outcome
        )
        if self._comm_thread is None:
            keep()
        else:
            self._comm_thread.wait_current_stream()  # after the computation of the state
            self._comm_thread.submit(keep)

    def _keep(self, slot: int, header: dict[str, Any], state: Slot, outcome: StepOutcome | None = None) -> None:
        self.file.invalidate(slot)
        if not self.in_place:
            pairs = [
                (self.slots[slot][key][kind], each) for key, kinds in state.items() for kind, each in kinds.items()
            ]
            if pairs:  # a rank may have an empty shard
                torch._foreach_copy_([into for into, _ in pairs], [each for _, each in pairs], non_blocking=True)
            accelerator.synchronize_stream(self._mesh.device)
        record = self._record(header["step"], outcome) if outcome is not None else None
        self.file.commit(slot, header["step"], self.file.make_header(slot, header | {"record": record}))
        if self._replication is not None:
            self._replication.send_commit(header["step"], begins=outcome is None)

    def decide(self, step: int) -> None:
        """A step has ended: when enough have, settle how often one is kept. Collective."""
        if self._file is not None and (reason := self._interval.decide(step, self._mesh)) is not None:
            value = f"every {self._interval.every} steps"
            self._on_event(EventKind.AUTO_RESOLVED, {"key": MEMORY_KEY, "value": value, "reason": reason})

    def wait_for_commit(self) -> None:
        if self._confirmed_step == self._last_step:  # nothing was kept since
            return
        self._confirmed_step, asked = self._last_step, self._interval.take_stamp()
        if self._comm_thread is not None:
            self._comm_thread.drain()
        if self._replication is not None:
            self._replication.wait_for_ack()
        self._interval.add_wait(asked)

    def adopt_state(self, step: int, state: Slot) -> None:
        """The state is that of `step`; of the starting weights nothing is kept, since they can be made again."""
        self._rotation.adopt(step, self.file, self.has_state)
        if not self.has_state and step > 0:
            self._keep(self.current_index, self._header(step, self.tokens, None), state)
        elif self._replication is not None and step > 0:
            self._replication.send_commit(step, begins=True)  # which the partner may have already

    def discard_previous(self) -> None:
        """Void the kept state: another state is about to be loaded. Collective."""
        self.wait_for_commit()
        self.has_state = False
        self._rotation.unpin()
        if self._file is not None:
            self._file.invalidate_all()
        if self._replication is not None and self._replication.active:
            self._replication.client.invalidate_replica(self.file.metadata.way)
        self._mesh.min([1.0])

    def remove_other_files(self) -> None:
        """All ranks have loaded their state: remove everything else in the folder. Collective. Raises ConfigError where
        there is no room yet for replicas that were asked for."""
        self._mesh.min([1.0])
        if self._file is None:
            return
        replication, step = self._replication, self._rotation.current_step
        self._folder.remove_previous(self._file, () if replication is None else replication.hosted)
        if replication is not None and replication.deferred:
            self._mesh.min([1.0])  # there is room on all nodes now
            self._begin_replicas(last=True)
            self._agree_on_async()
            if step > 0:
                replication.send_commit(step, begins=True)

    def close(self) -> None:
        if self._comm_thread is not None:
            self._comm_thread.close()
        if self.replicas is not None:
            self.replicas.close()
