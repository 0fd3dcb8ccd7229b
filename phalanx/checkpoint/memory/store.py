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

from phalanx.checkpoint.memory.allocate import taken
from phalanx.checkpoint.memory.interval import Thinning
from phalanx.checkpoint.memory.previous_state import open_kept
from phalanx.checkpoint.memory.replica_update import Gradients, gradient_bytes, kernels
from phalanx.checkpoint.memory.slot_index import index_of, views
from phalanx.checkpoint.memory.verify import check_copy, check_kept
from phalanx.checkpoint.memory.working_memory import Working, forget_from
from phalanx.comm.comm_thread import Lane
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.core.events import Kind
from phalanx.core.placement import Kept
from phalanx.engine.interface import Outcome
from phalanx.optim.state import Piece, Slot
from phalanx.optim.update import Change
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import elsewhere
from phalanx.recovery.replica_client import Replicas
from phalanx.recovery.shared_memory import OF_HOST, size
from phalanx.recovery.state_file import StateFile, Who
from phalanx.system import accelerator
from phalanx.system import memory as host_memory

KEY, REPLICATE = "resilience.memory", "resilience.replicate"
COPIED_BYTES = 64 << 20  # of a file that is copied, at a time

Whole = Callable[[Iterable[Piece]], Iterable[Piece]]  # an engine's pieces in coordinates of whole parameters
Header = Callable[[int, int], dict[str, Any]]  # of a step and the tokens since step 1
Record = Callable[[int, Outcome], dict[str, Any] | None]  # what this rank has measured of a step
Say = Callable[[str, dict[str, Any]], None]
Replicate = int | Literal["auto", "every_step", "off"]


class Memory:
    """This rank's slots, as an engine knows them (`phalanx.engine.interface.Keeper`).

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
        say: Say,
        kept: Kept | None = None,
        wanted: bool | Literal["auto"] = "auto",
        in_place: bool = True,
        background: bool = False,
        replicas: Replicas | None = None,
        replicate: Replicate = "auto",
        rule: Mapping[str, float] | None = None,
        first_here: bool | None = None,
    ) -> None:
        """Files are made in `folder`, as those of attempt `generation` of a `run`. `kept`: what the attempt begins
        with. `in_place`: engines may work in the slots; else states are copied, in the `background` or not.
        `replicas`: the way to other nodes, if there are any; `replicate`: as in a recipe; `rule`: AdamW's numbers,
        where that is the rule, whose updates other nodes can make again; `first_here`: whether no rank of this node is
        before this one (None: there is one node)."""
        assert not (in_place and background), "what is not copied is not copied in the background"
        self.in_place, self.late, self.attached = in_place, False, False
        self.slots: list[Slot] = []
        self.current, self.tokens = 0, 0
        self._at = 0  # the step in the current slot
        self._pinned: int | None = None  # the slot with a step that all nodes have
        self._base = 0  # a step that other nodes get whatever its number is, as they lack what this attempt began with
        self._folder, self._mesh, self._generation, self._run = folder, mesh, generation, run
        self._say, self._kept, self._wanted = say, kept, wanted
        self.replicas, self._replicate = replicas, replicate
        self._every = replicate if isinstance(replicate, int) and replicas is not None else None
        self._rule = rule if in_place and self._every is None else None
        self._gradients: Gradients | None = None
        self._replicates = False  # whether this rank's state is
        self._waits = False  # replicas begin once what lies here of attempts before has made room
        self._wards: set[int] = set()  # ranks whose replicas this node holds
        self._first_here = mesh.rank == 0 if first_here is None else first_here
        self._lane = Lane(mesh.device) if background else None
        self._thinning = Thinning(
            mesh.device, background and wanted is not True and replicate != "every_step", self._every
        )
        self._alive = inventory.live_in(folder)
        self._working = Working(folder, mesh.rank)
        self._file: StateFile | None = None
        self._short = ""  # why no file could be made
        self._nodes: list[int] = []  # of each rank
        self._bare: list[bool] = []  # whether what a rank holds is on another node anyway
        self._coming = False  # it is a copy of one of another node that may not be whole yet
        self._settled = self._last = 0  # the step that was confirmed, and the one that was given to `commit`
        self.whole: Whole = iter  # gives an engine's pieces in coordinates of whole parameters
        self._header: Header = lambda step, tokens: {"step": step, "tokens": tokens}
        self._record: Record = lambda step, outcome: None

    def describe(self, header: Header, record: Record) -> None:
        """What is said of a step besides its state. `header` is asked by the thread that commits, `record` by the one
        that copies."""
        self._header, self._record = header, record

    @property
    def file(self) -> StateFile:
        assert self._file is not None, "the slots are not open"
        return self._file

    def open(self, like: Slot, pieces: Callable[[Slot], Iterable[Piece]]) -> bool:
        """As the engine's interface has it; the slots are those of a file that was kept if on every rank it looks just
        as it would be made. Raises ConfigError where there is no room for what was asked for, and DamagedState where
        what was kept is not what was written."""
        if self._kept is not None:
            check_kept(self._kept, self._mesh, self.replicas)
        index, slot_bytes, part = index_of(like, self.whole(pieces(like)), self._mesh)
        parts = [int(each) for each in self._mesh.gather(float(part))]
        who = self._who(parts)
        index["who"] = [who.part, who.parts, *index["who"]]
        self._see_others(parts)
        mine = self._found(index, slot_bytes, who)
        (attached,) = self._mesh.min([float(mine is not None)])
        if attached and self._kept is not None:
            self._file, self.attached, self._at = mine, True, self._kept.step
        elif not self._make(index, slot_bytes, who):
            if self.replicas is not None and self._replicate not in ("auto", "off"):
                raise ConfigError(
                    f"{REPLICATE} is {self._replicate}, but shared memory has no room even for the state of each "
                    f"node's own ranks ({self._short}); give the machine or container a larger /dev/shm, or set "
                    f"{REPLICATE}=auto or off"
                )
            return False
        if self._lane is not None:
            accelerator.page_lock(torch.frombuffer(self.file.map, dtype=torch.uint8), self._mesh.device)
        self._begin_replicas()
        if self.attached:
            self.current = 0 if self._coming else self.file.facts.steps[self._at]
        self.slots = [views(self.file, slot, index) for slot in range(self._count)]
        if self._every is not None:  # it is agreed on what its other slots hold
            self.arrive()
        self._pin()
        self._see_late()
        return True

    def _see_late(self) -> None:
        (late,) = self._mesh.max([float(self._lane is not None or self._replicates)])
        self.late = bool(late)

    def arrive(self) -> None:
        """As the engine's interface has it."""
        if self.attached and self._coming and self.replicas is not None:
            self.replicas.fetched()
            self.file.look()
            self._coming = False
            if self._kept is not None:
                check_copy(self.file, self._kept.step)

    def _who(self, parts: list[int]) -> Who:
        """Whose file it is, from what each rank's pieces are known by."""
        mesh = self._mesh
        return Who(self._generation, mesh.rank, mesh.world, self._run, parts.index(parts[mesh.rank]), len(set(parts)))

    def _see_others(self, parts: list[int]) -> None:
        """See which ranks are on which nodes, and whose pieces several nodes have anyway. Collective."""
        if self.replicas is None:
            return
        self._nodes = [int(each) for each in self._mesh.gather(float(self.replicas.node))]
        self._bare = elsewhere(parts, self._nodes)
        if self.replicas.partner is None or all(self._bare):
            self._every = None

    @property
    def _count(self) -> int:
        """Of slots."""
        return 2 if self._every is None else 3

    def _found(self, index: dict[str, Any], slot_bytes: int, who: Who) -> StateFile | None:
        """A file with the step that is to be gone on from in that layout: this rank's own, or a copy of one that is
        elsewhere, as a replica of it is, or that of a rank with the same pieces."""
        if self._kept is None:
            return None
        layout = state_file.digest(index).hex()
        alike = [file for file in self._kept.files if file.layout == layout]
        if not alike:
            return None
        chosen = min(alike, key=lambda file: (file.rank != who.rank, file.address is not None))
        path = Path(chosen.path)
        if chosen.address is None and chosen.rank == who.rank and path.parent == self._folder:
            return self._fitting(StateFile(path, writable=True))
        if chosen.address is not None and chosen.rank == who.rank and self.replicas is not None:
            coming = self.replicas.fetch(chosen.address, chosen.path, self._kept.step, self._count)
            if coming is not None:  # while it comes other ranks get on, and this one with what is to be agreed on
                self._coming = True
                return self._fitting(StateFile(self._folder / coming, writable=True))
        source, slot = open_kept(chosen, self._kept.step, self.replicas)
        facts = source.facts
        try:
            # As if it had always been here: of the same attempt as those of the other ranks.
            made = state_file.create(
                self._folder, dataclasses.replace(who, generation=facts.generation), index, slot_bytes, self._count
            )
        except OSError:  # there is no room beside what lies there; it is read by coordinates, if anything
            return None
        made.forget(facts.way)
        for at in range(0, facts.slot_bytes, COPIED_BYTES):
            count = min(COPIED_BYTES, facts.slot_bytes - at)
            made.map[made.at(0) + at : made.at(0) + at + count] = source.read(facts.at(slot) + at, count)
        made.commit(0, self._kept.step, source.raw_header(slot))
        made = StateFile(made.facts.path, writable=True)
        check_copy(made, self._kept.step)
        return made

    def _fitting(self, file: StateFile) -> StateFile | None:
        """A file, if it has as many slots as are needed; else what it holds is read by coordinates."""
        return file if file.facts.slots == self._count else None

    def _begin_replicas(self, last: bool = False) -> None:
        """See which ranks have replicas made of their state, from now on, and have the partners make room; where what
        lies in memory of attempts before takes that, it is waited until nobody reads it any more: then this is the
        `last` time. Collective where there are other nodes."""
        replicas, mesh = self.replicas, self._mesh
        if replicas is None:
            return
        needed, bare = self._replicate != "off" and replicas.partner is not None, self._bare[mesh.rank]
        rule = None if self._rule is None or bare else {"rule": dict(self._rule), "kernels": kernels()}
        asked = self._replicate not in ("auto", "off")
        newest = self._at if self.attached else None  # later ones are walked again, maybe cut otherwise
        short = replicas.begin(self.file.facts.path, asked, bare, rule, newest) if needed else None
        lacking, made = mesh.sum([float(short is not None), float(needed and short is None and not bare)])
        self._waits = lacking > 0 and not last and self._is_anywhere(self._of_before())
        if lacking and asked and not self._waits:
            raise ConfigError(
                f"{REPLICATE} is {self._replicate}, but "
                + (short or "another node has no room for replicas (its rank's log has the numbers)")
                + f"; set {REPLICATE}=auto or off, or give the machine or container a larger /dev/shm"
            )
        self._replicates = needed and not lacking
        if lacking and needed and short is None:
            replicas.leave()
        if self._waits:
            return
        self._gradients = self._handed_over(replicas) if self._replicates and replicas.replays else None
        (again,) = mesh.sum([float(self._gradients is not None)])
        kept = mesh.gather(float(self._replicates))
        self._wards = {rank for rank in range(mesh.world) if kept[rank] and self._nodes[rank] == replicas.before}
        takes = 2.0 * self.file.facts.slot_bytes * (self._replicates and not bare)
        (replica_bytes,) = mesh.sum([takes])
        if self.attached:
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
                    f" every {self._every} steps, where it takes {size(replica_bytes)} over all nodes; a lost node "
                    f"costs {self._every - 1} committed steps at most"
                )
        elif self._replicate == "off":
            return
        else:
            reason = "every part of the state is on two nodes anyway"
        value = (self._every or "every_step") if made and not lacking else "off"
        self._say(Kind.RESOLVED, {"key": REPLICATE, "value": value, "reason": reason})

    def _pin(self) -> None:
        """Find, in files that were kept, the step that all nodes have besides that which is gone on from; where there
        is none, or all should have this one, all get the next. Collective."""
        if self._every is None or not self.attached:
            return
        steps = self.file.facts.steps
        there = self.replicas.there if self.replicas is not None and not self._bare[self._mesh.rank] else steps
        step = max((each for each in steps if each in there and each <= self._at and self._is_due(each)), default=-1)
        (least,), (most,) = self._mesh.min([float(step)]), self._mesh.max([float(step)])
        if least == most > 0 and step < self._at:
            self._pinned = steps[step]
        if least != most or (step != self._at and (self._pinned is None or self._is_due(self._at))):
            self._base = self._at + 1

    def _is_due(self, step: int) -> bool:
        """Whether other nodes get that step, or have had it."""
        return self._every is None or step == self._base or (step % self._every == 0 and step != self._base - 1)

    def _is_sent(self, step: int, begins: bool = False) -> bool:
        """Whether the partner gets what this rank has of a step: where others hold the same state anyway, what was
        said of it, each time. What an attempt `begins` with goes only where nothing has to travel: ranks wait for the
        next step, whose weights and gradients share the link, and then that one is sent as a whole in its place."""
        if not self._replicates or self.replicas is None:
            return False
        if begins and not self._bare[self._mesh.rank]:
            return step in self.replicas.there
        return self._bare[self._mesh.rank] or self._is_due(step)

    def _handed_over(self, replicas: Replicas) -> Gradients | None:
        """Memory for gradients, which the process that sends them has too; None where there is too little."""
        tensors = self.file.index()["tensors"]
        if gradient_bytes(tensors) > OF_HOST * host_memory.free():
            return None
        try:
            gradients = Gradients(tensors)
        except OSError:
            return None
        replicas.hand_over(gradients.descriptor, gradients.bytes)
        return gradients

    def _as_it_is(self, again: int) -> str:
        """Why not all replicas are made of gradients."""
        if again:
            return f"gradients of {again} of them and else the state itself, as there is no memory for gradients"
        if self._rule is None:
            return "it as it is, since only AdamW's updates are made again, of states that live in shared memory"
        return "it as it is, since the nodes' processors or versions of torch differ, or there is no memory for more"

    def _make(self, index: dict[str, Any], slot_bytes: int, who: Who) -> bool:
        """Make this rank's file. False, on all ranks, where it would not fit on one of them."""
        take = functools.partial(
            taken, self._folder, self._mesh, who, index, slot_bytes, self._count, self._wanted is True
        )
        self._file, short, takes = take()
        if short is not None and self._make_room():
            self._file, short, takes = take()
        self._short = short or ""
        if short is not None and self._wanted is True:
            raise ConfigError(
                f"{KEY} is true, but the state of the ranks does not fit into shared memory: {short}; set "
                f"{KEY}=auto or false, or give this machine or container a larger /dev/shm"
            )
        if self._kept is None or short is not None:
            reason = takes if short is None else f"after a failure the run goes back to a checkpoint, since {short}"
            self._say(Kind.RESOLVED, {"key": KEY, "value": short is None, "reason": reason})
        return short is None

    def _make_room(self) -> bool:
        """Remove replicas of what ranks begin with, which were to be gone on with and will not be: it is read where
        else it lies. Collective; whether there were any."""
        read = {file.path for file in self._kept.files} if self._kept is not None else set()
        replicas = [path for path in inventory.files_in(self._folder / inventory.REPLICAS) if str(path) not in read]
        for path in replicas if self._first_here else ():
            path.unlink(missing_ok=True)
        return self._is_anywhere(replicas)

    def _is_anywhere(self, paths: Collection[Path]) -> bool:
        """Whether there are such files on any node. Collective."""
        (some,) = self._mesh.max([float(len(paths))])
        return some > 0

    def working(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self._working.take(elements, dtype)

    # ------------------------------------------------------------------------------------------------------ every step

    @property
    def next(self) -> int:
        """The slot that the next step is written to, the same until that is committed: one that nobody goes back to
        once all ranks are through with the step in the current one, and all nodes have that which get it."""
        used = {self.current, self._pinned if not self._moves else None}
        return min((slot for slot in range(len(self.slots)) if slot not in used), key=self.file.word)

    @property
    def _moves(self) -> bool:
        """Whether the step that is gone back to with a lost node is the one in the current slot from here on."""
        return self._every is not None and self._at > 0 and self._is_due(self._at)

    def begin(self) -> None:
        if self.in_place:
            self.file.void(self.next)

    def updates(self, keys: Collection[str], grads: Mapping[str, torch.Tensor], change: Change) -> None:
        if self._gradients is not None:
            self._gradients.note(keys, grads, change)

    def commit(self, step: int, outcome: Outcome, state: Slot) -> None:
        self.tokens += outcome.weight
        if not self._thinning.keeps(step):
            return
        before, moves = self.current, self._moves
        self.current = self.next
        self._pinned = before if moves else self._pinned
        self._last = self._at = step
        keep = functools.partial(self._keep, self.current, self._header(step, self.tokens), state, outcome)
        if self._lane is None:
            keep()
        else:
            self._lane.follow()  # behind what computes the state
            self._lane.put(keep)

    def _keep(self, slot: int, header: dict[str, Any], state: Slot, outcome: Outcome | None = None) -> None:
        self.file.void(slot)
        if not self.in_place:
            pairs = [
                (self.slots[slot][key][kind], each) for key, kinds in state.items() for kind, each in kinds.items()
            ]
            if pairs:  # a rank may hold nothing
                torch._foreach_copy_([into for into, _ in pairs], [each for _, each in pairs], non_blocking=True)
            accelerator.wait_here(self._mesh.device)
        record = self._record(header["step"], outcome) if outcome is not None else None
        self.file.commit(slot, header["step"], self.file.header_of(slot, header | {"record": record}))
        if self.replicas is not None and self._is_sent(header["step"], begins=outcome is None):
            # What came from elsewhere was made by no update.
            told = None if self._gradients is None or outcome is None else self._gradients.told()
            self.replicas.committed(header["step"], told)

    def decide(self, step: int) -> None:
        """A step has ended: when enough have, settle how often one is kept. Collective."""
        if self._file is not None and (reason := self._thinning.decide(step, self._mesh)) is not None:
            self._say(Kind.RESOLVED, {"key": KEY, "value": f"every {self._thinning.every} steps", "reason": reason})

    def settle(self) -> None:
        if self._settled == self._last:  # nothing was kept since
            return
        self._settled, asked = self._last, self._thinning.stamp()
        if self._lane is not None:
            self._lane.drain()
        if self._replicates and self.replicas is not None:
            began, waits = time.perf_counter(), self._mesh.bookkeeping
            with waits.waiting("message"):  # a rank that waits for another node does not hang
                self.replicas.acknowledged()
            if threading.current_thread() is threading.main_thread():  # nor is it slow; a lane holds nobody up
                waits.waited(time.perf_counter() - began)
        self._thinning.waited(asked)

    def loaded(self, step: int, state: Slot) -> None:
        """The state is that of `step`; of the starting weights nothing is kept, since they can be made again."""
        self._at = step
        if not self.attached:
            self._pinned, self._base = None, step + 1 if step else 0
        for slot in range(len(self.slots)):
            if slot not in (self.current, self._pinned):
                self.file.void(slot)
        if not self.attached and step > 0:
            self._keep(self.current, self._header(step, self.tokens), state)
        elif self.replicas is not None and step > 0 and self._is_sent(step, begins=True):
            self.replicas.committed(step)  # which the partner may have already

    def forget(self) -> None:
        """What is kept is not to be gone on from: another state is about to be loaded in its place. Collective."""
        self.settle()
        self.attached, self._pinned = False, None
        if self._file is not None:
            self._file.forget()
        if self._replicates and self.replicas is not None:
            self.replicas.forget(self.file.facts.way)
        self._mesh.min([1.0])

    def forget_others(self) -> None:
        """All ranks have loaded what they go on from: remove what else lies in the folder. Collective. Raises
        ConfigError where there is no room yet for replicas that were asked for."""
        self._mesh.min([1.0])
        if self._file is None:
            return
        if self._first_here:
            forget_from(self._folder, self._mesh.world)
            there = inventory.there(self._folder / inventory.REPLICAS, self._run)
            passed = [facts.path for facts in there if facts.rank not in self._wards]
            for path in (*self._of_before(), *passed):
                path.unlink(missing_ok=True)
        if self._waits:
            self._mesh.min([1.0])  # there is room on all nodes now
            self._begin_replicas(last=True)
            self._see_late()
            if self.replicas is not None and self._at > 0 and self._is_sent(self._at, begins=True):
                self.replicas.committed(self._at)

    def _of_before(self) -> list[Path]:
        """State files in the folder that attempts before have made, and that are not gone on with."""
        paths = [*inventory.files_in(self._folder), *inventory.files_in(self._folder / inventory.REPLICAS)]
        facts = ((path, state_file.facts_of(path)) for path in paths)
        return [path for path, each in facts if each is None or each.generation != self.file.facts.generation]

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()
        if self.replicas is not None:
            self.replicas.close()
        # What says that this process lives stays: buffers of its engine may still be there.
