"""A rank's state in shared memory, committed step by step, and reading what ranks before have left there.

Where ranks compute on the CPU with the sharded engine the state lives in the file's two slots, and nothing is copied.
Otherwise it is copied into them; from an accelerator beside the computation, by a thread and a stream of its own.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from phalanx.checkpoint.memory import slots
from phalanx.checkpoint.memory.interval import SnapshotInterval
from phalanx.checkpoint.memory.previous_state import open_state_file
from phalanx.checkpoint.memory.replica_update import SharedGradients, describe_kernels, gradient_bytes
from phalanx.checkpoint.memory.slots import WorkingMemory
from phalanx.comm.comm_thread import CommThread
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.core.placement import InMemoryCheckpoint
from phalanx.core.records import EventKind
from phalanx.engine.interface import StepOutcome
from phalanx.optim.state import Slot, StatePiece
from phalanx.optim.update import StepUpdate
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import find_redundant
from phalanx.recovery.replica_client import ReplicaClient
from phalanx.recovery.shared_memory import HOST_MEMORY_SHARE, format_bytes
from phalanx.recovery.state_file import StateFile, StateFileOwner
from phalanx.system import accelerator
from phalanx.system import memory as host_memory

MEMORY_KEY, REPLICATE_KEY = "resilience.in_memory_checkpoints", "resilience.replicate_every"
COPIED_BYTES = 64 << 20  # of a file that is copied, at a time

# An engine's pieces in coordinates of whole parameters.
ToGlobalPieces = Callable[[Iterable[StatePiece]], Iterable[StatePiece]]
BuildHeader = Callable[[int, int], dict[str, Any]]  # of a step and the tokens since step 1
BuildRecord = Callable[[int, StepOutcome], dict[str, Any] | None]  # what this rank has measured of a step
OnEvent = Callable[[str, dict[str, Any]], None]
Replicate = int | Literal["auto", "every_step", "off"]


class SharedMemoryStore:
    """This rank's slots, as an engine knows them (`phalanx.engine.interface.InMemoryStore`).

    Before this rank tells the others that it is through with a step it waits for the node that holds its replica to
    have that too, where that gets it. Where that gets every so manieth only, there is a third slot: in it the last step
    stays that all of them have, which ranks that live go back to with those of a lost node. Its place is taken by the
    next such step once nobody can have to go back behind that.
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
        assert not (in_place and background), "what is not copied is not copied in the background"
        self.in_place, self.commits_async, self.has_state = in_place, False, False
        self.slots: list[Slot] = []
        self.current_index, self.tokens = 0, 0
        self._current_step = 0  # the step in the current slot
        self._pinned: int | None = None  # the slot with a step that all nodes have
        self._base_step = (
            0  # a step that other nodes get whatever its number is, as they lack what this attempt began with
        )
        self._folder, self._mesh, self._generation, self._run = folder, mesh, generation, run
        self._on_event, self._previous, self._wanted = on_event, previous, wanted
        self.replicas, self._replicate = replicas, replicate
        self._every = replicate if isinstance(replicate, int) and replicas is not None else None
        self._rule = rule if in_place and self._every is None else None
        self._gradients: SharedGradients | None = None
        self._replicates = False  # whether this rank's state is
        self._replicas_deferred = False  # replicas begin once what lies here of attempts before has made room
        self._hosted: set[int] = set()  # ranks whose replicas this node holds
        self._first_on_node = mesh.rank == 0 if first_on_node is None else first_on_node
        self._comm_thread = CommThread(mesh.device) if background else None
        self._interval = SnapshotInterval(
            mesh.device, background and wanted is not True and replicate != "every_step", self._every
        )
        self._liveness_lock = inventory.hold_liveness_lock(folder)
        self._working_memory = WorkingMemory(folder, mesh.rank)
        self._file: StateFile | None = None
        self._no_file_reason = ""  # why no file could be made
        self._nodes: list[int] = []  # of each rank
        self._redundant: list[bool] = []  # whether what a rank holds is on another node anyway
        self._copy_pending = False  # it is a copy of one of another node that may not be whole yet
        self._confirmed_step = self._last_step = (
            0  # the step that was confirmed, and the one that was given to `commit`
        )
        self.to_global: ToGlobalPieces = iter  # gives an engine's pieces in coordinates of whole parameters
        self._header: BuildHeader = lambda step, tokens: {"step": step, "tokens": tokens}
        self._record: BuildRecord = lambda step, outcome: None

    def set_metadata(self, header: BuildHeader, record: BuildRecord) -> None:
        """What is said of a step besides its state. `header` is asked by the thread that commits, `record` by the one
        that copies."""
        self._header, self._record = header, record

    @property
    def file(self) -> StateFile:
        assert self._file is not None, "the slots are not open"
        return self._file

    def open(self, like: Slot, pieces: Callable[[Slot], Iterable[StatePiece]]) -> bool:
        """As the engine's interface has it; the slots are those of a file that was kept if on every rank it looks just
        as it would be made. Raises ConfigError where there is no room for what was asked for, and DamagedState where
        what was kept is not what was written."""
        if self._previous is not None:
            slots.verify_checkpoint(self._previous, self._mesh, self.replicas)
        index, slot_bytes, part = slots.build_index(like, self.to_global(pieces(like)), self._mesh)
        parts = [int(each) for each in self._mesh.gather(float(part))]
        who = self._owner(parts)
        index["who"] = [who.part, who.parts, *index["who"]]
        self._gather_nodes(parts)
        mine = self._find_matching(index, slot_bytes, who)
        (attached,) = self._mesh.min([float(mine is not None)])
        if attached and self._previous is not None:
            self._file, self.has_state, self._current_step = mine, True, self._previous.step
        elif not self._create_file(index, slot_bytes, who):
            if self.replicas is not None and self._replicate not in ("auto", "off"):
                raise ConfigError(
                    f"{REPLICATE_KEY} is {self._replicate}, but shared memory has no room even for the state of each "
                    f"node's own ranks ({self._no_file_reason}); give the machine or container a larger /dev/shm, or "
                    f"set {REPLICATE_KEY}=auto or off"
                )
            return False
        if self._comm_thread is not None:
            accelerator.page_lock(torch.frombuffer(self.file.map, dtype=torch.uint8), self._mesh.device)
        self._begin_replicas()
        if self.has_state:
            self.current_index = 0 if self._copy_pending else self.file.metadata.steps[self._current_step]
        self.slots = [slots.map_slot(self.file, slot, index) for slot in range(self._slot_count)]
        if self._every is not None:  # it is agreed on what its other slots hold
            self.wait_until_ready()
        self._pin()
        self._agree_on_async()
        return True

    def _agree_on_async(self) -> None:
        (late,) = self._mesh.max([float(self._comm_thread is not None or self._replicates)])
        self.commits_async = bool(late)

    def wait_until_ready(self) -> None:
        """As the engine's interface has it."""
        if self.has_state and self._copy_pending and self.replicas is not None:
            self.replicas.wait_for_fetch()
            self.file.refresh()
            self._copy_pending = False
            if self._previous is not None:
                slots.verify_copy(self.file, self._previous.step)

    def _owner(self, parts: list[int]) -> StateFileOwner:
        """Whose file it is, from what each rank's pieces are known by."""
        mesh = self._mesh
        return StateFileOwner(
            self._generation, mesh.rank, mesh.world, self._run, parts.index(parts[mesh.rank]), len(set(parts))
        )

    def _gather_nodes(self, parts: list[int]) -> None:
        """See which ranks are on which nodes, and whose pieces several nodes have anyway. Collective."""
        if self.replicas is None:
            return
        self._nodes = [int(each) for each in self._mesh.gather(float(self.replicas.node))]
        self._redundant = find_redundant(parts, self._nodes)
        if self.replicas.partner is None or all(self._redundant):
            self._every = None

    @property
    def _slot_count(self) -> int:
        """Of slots."""
        return 2 if self._every is None else 3

    def _find_matching(self, index: dict[str, Any], slot_bytes: int, who: StateFileOwner) -> StateFile | None:
        """A file with the step that is to be gone on from in that layout: this rank's own, or a copy of one that is
        elsewhere, as a replica of it is, or that of a rank with the same pieces."""
        if self._previous is None:
            return None
        layout = state_file.digest_json(index).hex()
        alike = [file for file in self._previous.files if file.layout == layout]
        if not alike:
            return None
        chosen = min(alike, key=lambda file: (file.rank != who.rank, file.address is not None))
        path = Path(chosen.path)
        if chosen.address is None and chosen.rank == who.rank and path.parent == self._folder:
            return self._fitting(StateFile(path, writable=True))
        if chosen.address is not None and chosen.rank == who.rank and self.replicas is not None:
            coming = self.replicas.start_fetch(chosen.address, chosen.path, self._previous.step, self._slot_count)
            if coming is not None:  # while it comes other ranks get on, and this one with what is to be agreed on
                self._copy_pending = True
                return self._fitting(StateFile(self._folder / coming, writable=True))
        source, slot = open_state_file(chosen, self._previous.step, self.replicas)
        facts = source.metadata
        try:
            # As if it had always been here: of the same attempt as those of the other ranks.
            made = state_file.create_state_file(
                self._folder, dataclasses.replace(who, generation=facts.generation), index, slot_bytes, self._slot_count
            )
        except OSError:  # there is no room beside what lies there; it is read by coordinates, if anything
            return None
        made.invalidate_all(facts.way)
        for at in range(0, facts.slot_bytes, COPIED_BYTES):
            count = min(COPIED_BYTES, facts.slot_bytes - at)
            made.map[made.slot_offset(0) + at : made.slot_offset(0) + at + count] = source.read_bytes(
                facts.slot_offset(slot) + at, count
            )
        made.commit(0, self._previous.step, source.raw_header(slot))
        made = StateFile(made.metadata.path, writable=True)
        slots.verify_copy(made, self._previous.step)
        return made

    def _fitting(self, file: StateFile) -> StateFile | None:
        """A file, if it has as many slots as are needed; else what it holds is read by coordinates."""
        return file if file.metadata.slots == self._slot_count else None

    def _begin_replicas(self, last: bool = False) -> None:
        """See which ranks have replicas made of their state, from now on, and have the partners make room; where what
        lies in memory of attempts before takes that, it is waited until nobody reads it any more: then this is the
        `last` time. Collective where there are other nodes."""
        replicas, mesh = self.replicas, self._mesh
        if replicas is None:
            return
        needed, bare = self._replicate != "off" and replicas.partner is not None, self._redundant[mesh.rank]
        rule = None if self._rule is None or bare else {"rule": dict(self._rule), "kernels": describe_kernels()}
        asked = self._replicate not in ("auto", "off")
        newest = self._current_step if self.has_state else None  # later ones are walked again, maybe cut otherwise
        short = replicas.begin_replica(self.file.metadata.path, asked, bare, rule, newest) if needed else None
        lacking, made = mesh.sum([float(short is not None), float(needed and short is None and not bare)])
        self._replicas_deferred = lacking > 0 and not last and self._exists_on_any_node(self._previous_files())
        if lacking and asked and not self._replicas_deferred:
            raise ConfigError(
                f"{REPLICATE_KEY} is {self._replicate}, but "
                + (short or "another node has no room for replicas (its rank's log has the numbers)")
                + f"; set {REPLICATE_KEY}=auto or off, or give the machine or container a larger /dev/shm"
            )
        self._replicates = needed and not lacking
        if lacking and needed and short is None:
            replicas.release_replica()
        if self._replicas_deferred:
            return
        self._gradients = self._share_gradients(replicas) if self._replicates and replicas.replays else None
        (again,) = mesh.sum([float(self._gradients is not None)])
        kept = mesh.gather(float(self._replicates))
        self._hosted = {
            rank for rank in range(mesh.world) if kept[rank] and self._nodes[rank] == replicas.previous_node
        }
        takes = 2.0 * self.file.metadata.slot_bytes * (self._replicates and not bare)
        (replica_bytes,) = mesh.sum([takes])
        if self.has_state:
            return
        if lacking:
            reason = f"a node that is lost takes the run back to a checkpoint, since {short or 'a node has no room'}"
        elif made:
            reason = f"the state of {made:g} of {mesh.world} ranks is kept on a second node"
            if self._every is None:
                how = "gradients with which it makes the update again" if again == made else self._as_it_is(int(again))
                reason += f", which gets {how}"
            else:
                reason += (
                    f" every {self._every} steps, where it takes {format_bytes(replica_bytes)} over all nodes; a lost "
                    f"node costs {self._every - 1} committed steps at most"
                )
        elif self._replicate == "off":
            return
        else:
            reason = "every part of the state is on two nodes anyway"
        value = (self._every or "every_step") if made and not lacking else "off"
        self._on_event(EventKind.AUTO_RESOLVED, {"key": REPLICATE_KEY, "value": value, "reason": reason})

    def _pin(self) -> None:
        """Find, in files that were kept, the step that all nodes have besides that which is gone on from; where there
        is none, or all should have this one, all get the next. Collective."""
        if self._every is None or not self.has_state:
            return
        steps = self.file.metadata.steps
        there = (
            self.replicas.partner_steps if self.replicas is not None and not self._redundant[self._mesh.rank] else steps
        )
        step = max(
            (each for each in steps if each in there and each <= self._current_step and self._is_due(each)), default=-1
        )
        (least,), (most,) = self._mesh.min([float(step)]), self._mesh.max([float(step)])
        if least == most > 0 and step < self._current_step:
            self._pinned = steps[step]
        if least != most or (step != self._current_step and (self._pinned is None or self._is_due(self._current_step))):
            self._base_step = self._current_step + 1

    def _is_due(self, step: int) -> bool:
        """Whether other nodes get that step, or have had it."""
        return (
            self._every is None or step == self._base_step or (step % self._every == 0 and step != self._base_step - 1)
        )

    def _is_sent(self, step: int, begins: bool = False) -> bool:
        """Whether the partner gets what this rank has of a step: where others hold the same state anyway, what was
        said of it, each time. What an attempt `begins` with goes only where nothing has to travel: ranks wait for the
        next step, whose weights and gradients share the link, and then that one is sent as a whole in its place."""
        if not self._replicates or self.replicas is None:
            return False
        if begins and not self._redundant[self._mesh.rank]:
            return step in self.replicas.partner_steps
        return self._redundant[self._mesh.rank] or self._is_due(step)

    def _share_gradients(self, replicas: ReplicaClient) -> SharedGradients | None:
        """Memory for gradients, which the process that sends them has too; None where there is too little."""
        tensors = self.file.index()["tensors"]
        if gradient_bytes(tensors) > HOST_MEMORY_SHARE * host_memory.free_bytes():
            return None
        try:
            gradients = SharedGradients(tensors)
        except OSError:
            return None
        replicas.share_gradients(gradients.descriptor, gradients.bytes)
        return gradients

    def _as_it_is(self, again: int) -> str:
        """Why not all replicas are made of gradients."""
        if again:
            return f"gradients of {again} of them and else the state itself, as there is no memory for gradients"
        if self._rule is None:
            return "it as it is, since only AdamW's updates are made again, of states that live in shared memory"
        return "it as it is, since the nodes' processors or versions of torch differ, or there is no memory for more"

    def _create_file(self, index: dict[str, Any], slot_bytes: int, who: StateFileOwner) -> bool:
        """Make this rank's file. False, on all ranks, where it would not fit on one of them."""
        take = functools.partial(
            slots.allocate_state_file,
            self._folder,
            self._mesh,
            who,
            index,
            slot_bytes,
            self._slot_count,
            self._wanted is True,
        )
        self._file, short, takes = take()
        if short is not None and self._free_old_replicas():
            self._file, short, takes = take()
        self._no_file_reason = short or ""
        if short is not None and self._wanted is True:
            raise ConfigError(
                f"{MEMORY_KEY} is true, but the state of the ranks does not fit into shared memory: {short}; set "
                f"{MEMORY_KEY}=auto or false, or give this machine or container a larger /dev/shm"
            )
        if self._previous is None or short is not None:
            reason = takes if short is None else f"after a failure the run goes back to a checkpoint, since {short}"
            self._on_event(EventKind.AUTO_RESOLVED, {"key": MEMORY_KEY, "value": short is None, "reason": reason})
        return short is None

    def _free_old_replicas(self) -> bool:
        """Remove replicas of what ranks begin with, which were to be gone on with and will not be: it is read where
        else it lies. Collective; whether there were any."""
        read = {file.path for file in self._previous.files} if self._previous is not None else set()
        replicas = [
            path for path in inventory.list_state_files(self._folder / inventory.REPLICAS) if str(path) not in read
        ]
        for path in replicas if self._first_on_node else ():
            path.unlink(missing_ok=True)
        return self._exists_on_any_node(replicas)

    def _exists_on_any_node(self, paths: Collection[Path]) -> bool:
        """Whether there are such files on any node. Collective."""
        (some,) = self._mesh.max([float(len(paths))])
        return some > 0

    def allocate_working(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self._working_memory.allocate(elements, dtype)

    # ------------------------------------------------------------------------------------------------------ every step

    @property
    def next_index(self) -> int:
        """The slot that the next step is written to, the same until that is committed: one that nobody goes back to
        once all ranks are through with the step in the current one, and all nodes have that which get it."""
        used = {self.current_index, self._pinned if not self._moves else None}
        return min((slot for slot in range(len(self.slots)) if slot not in used), key=self.file.slot_step)

    @property
    def _moves(self) -> bool:
        """Whether the step that is gone back to with a lost node is the one in the current slot from here on."""
        return self._every is not None and self._current_step > 0 and self._is_due(self._current_step)

    def begin_write(self) -> None:
        if self.in_place:
            self.file.invalidate(self.next_index)

    def note_updates(self, keys: Collection[str], grads: Mapping[str, torch.Tensor], change: StepUpdate) -> None:
        if self._gradients is not None:
            self._gradients.note_updates(keys, grads, change)

    def commit(self, step: int, outcome: StepOutcome, state: Slot) -> None:
        self.tokens += outcome.weight
        if not self._interval.is_due(step):
            return
        before, moves = self.current_index, self._moves
        self.current_index = self.next_index
        self._pinned = before if moves else self._pinned
        self._last_step = self._current_step = step
        keep = functools.partial(self._keep, self.current_index, self._header(step, self.tokens), state, outcome)
        if self._comm_thread is None:
            keep()
        else:
            self._comm_thread.wait_current_stream()  # behind what computes the state
            self._comm_thread.submit(keep)

    def _keep(self, slot: int, header: dict[str, Any], state: Slot, outcome: StepOutcome | None = None) -> None:
        self.file.invalidate(slot)
        if not self.in_place:
            pairs = [
                (self.slots[slot][key][kind], each) for key, kinds in state.items() for kind, each in kinds.items()
            ]
            if pairs:  # a rank may hold nothing
                torch._foreach_copy_([into for into, _ in pairs], [each for _, each in pairs], non_blocking=True)
            accelerator.synchronize_stream(self._mesh.device)
        record = self._record(header["step"], outcome) if outcome is not None else None
        self.file.commit(slot, header["step"], self.file.make_header(slot, header | {"record": record}))
        if self.replicas is not None and self._is_sent(header["step"], begins=outcome is None):
            # What came from elsewhere was made by no update.
            told = None if self._gradients is None or outcome is None else self._gradients.to_message()
            self.replicas.send_commit(header["step"], told)

    def decide(self, step: int) -> None:
        """A step has ended: when enough have, settle how often one is kept. Collective."""
        if self._file is not None and (reason := self._interval.decide(step, self._mesh)) is not None:
            self._on_event(
                EventKind.AUTO_RESOLVED,
                {"key": MEMORY_KEY, "value": f"every {self._interval.every} steps", "reason": reason},
            )

    def wait_for_commit(self) -> None:
        if self._confirmed_step == self._last_step:  # nothing was kept since
            return
        self._confirmed_step, asked = self._last_step, self._interval.take_stamp()
        if self._comm_thread is not None:
            self._comm_thread.drain()
        if self._replicates and self.replicas is not None:
            began, waits = time.perf_counter(), self._mesh.bookkeeping
            with waits.report_wait("message"):  # a rank that waits for another node does not hang
                self.replicas.wait_for_ack()
            if threading.current_thread() is threading.main_thread():  # nor is it slow; a lane holds nobody up
                waits.add_wait(time.perf_counter() - began)
        self._interval.add_wait(asked)

    def adopt_state(self, step: int, state: Slot) -> None:
        """The state is that of `step`; of the starting weights nothing is kept, since they can be made again."""
        self._current_step = step
        if not self.has_state:
            self._pinned, self._base_step = None, step + 1 if step else 0
        for slot in range(len(self.slots)):
            if slot not in (self.current_index, self._pinned):
                self.file.invalidate(slot)
        if not self.has_state and step > 0:
            self._keep(self.current_index, self._header(step, self.tokens), state)
        elif self.replicas is not None and step > 0 and self._is_sent(step, begins=True):
            self.replicas.send_commit(step)  # which the partner may have already

    def discard_previous(self) -> None:
        """What is kept is not to be gone on from: another state is about to be loaded in its place. Collective."""
        self.wait_for_commit()
        self.has_state, self._pinned = False, None
        if self._file is not None:
            self._file.invalidate_all()
        if self._replicates and self.replicas is not None:
            self.replicas.invalidate_replica(self.file.metadata.way)
        self._mesh.min([1.0])

    def remove_other_files(self) -> None:
        """All ranks have loaded what they go on from: remove what else lies in the folder. Collective. Raises
        ConfigError where there is no room yet for replicas that were asked for."""
        self._mesh.min([1.0])
        if self._file is None:
            return
        if self._first_on_node:
            slots.remove_stale(self._folder, self._mesh.world)
            there = inventory.read_state_files(self._folder / inventory.REPLICAS, self._run)
            passed = [facts.path for facts in there if facts.rank not in self._hosted]
            for path in (*self._previous_files(), *passed):
                path.unlink(missing_ok=True)
        if self._replicas_deferred:
            self._mesh.min([1.0])  # there is room on all nodes now
            self._begin_replicas(last=True)
            self._agree_on_async()
            if self.replicas is not None and self._current_step > 0 and self._is_sent(self._current_step, begins=True):
                self.replicas.send_commit(self._current_step)

    def _previous_files(self) -> list[Path]:
        """State files in the folder that attempts before have made, and that are not gone on with."""
        paths = [
            *inventory.list_state_files(self._folder),
            *inventory.list_state_files(self._folder / inventory.REPLICAS),
        ]
        facts = ((path, state_file.read_metadata(path)) for path in paths)
        return [path for path, each in facts if each is None or each.generation != self.file.metadata.generation]

    def close(self) -> None:
        if self._comm_thread is not None:
            self._comm_thread.close()
        if self.replicas is not None:
            self.replicas.close()
        # What says that this process lives stays: buffers of its engine may still be there.
