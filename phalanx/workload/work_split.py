"""Who does how much of a step: what `balance.work` asks for, and what the ranks' measured times make of it.

After the backward passes of a step the ranks exchange how long each has worked. Rank 0 decides whether the next step is
divided otherwise, and all hear of it before this step ends. Every decision is an event; a run that is started again
from a checkpoint repeats those that were taken behind it, as far as steps are recorded, so that it walks them bit by
bit as before; unless its devices are others now, for which they were not taken.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.collectives import Pending, all_reduce
from phalanx.comm.json_objects import JsonGroup
from phalanx.comm.mesh import Mesh
from phalanx.core.events import Kind
from phalanx.core.json_lines import last_line, read_lines
from phalanx.core.run_paths import RunPaths
from phalanx.layout import balance, rebalance
from phalanx.layout.balance import Division, Speed

SHOWN_RANKS = 64  # with more of them a step's record names shares and seconds now and then only
SHOWN_EVERY = 64

Say = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Recorded:
    """What the run folder tells of divisions: (first step, division), and the last step that was walked. Where the run
    went on with other devices (`moved`), those of before are left out."""

    divisions: list[tuple[int, Division]]
    last: int
    moved: bool = False

    def of(self, step: int) -> Division | None:
        return next((division for first, division in reversed(self.divisions) if first <= step), None)


class Sharing:
    """The division of every step, the same on all ranks. `division` is that of the next step, `balance_s` what all this
    has taken of the host's time since the run began."""

    def __init__(
        self,
        work: str | list[int],
        total: int,
        speeds: Sequence[Speed],
        mesh: Mesh,
        part_s: float = 0.0,
        lockstep: bool = True,
    ) -> None:
        """`work` as in the recipe; `total` sequences of a step; `speeds` in order of rank, with each rank's limit.

        `part_s` is what a micro-batch costs all ranks for its collectives; `lockstep`: there are some, so that all run
        as many. Where several ranks hold one copy of the model, `speeds` are those of the copies, and whatever is said
        of ranks here goes for copies: one is as slow as the slowest of its ranks.
        """
        self.balance_s = 0.0
        self.most = [speed.most for speed in speeds]
        self._mesh, self._work, self._lockstep = mesh, work, lockstep
        self._copy = [mesh.axes.place(rank, mesh.world).data for rank in range(mesh.world)]  # of the model, by rank
        self._say: Say = lambda kind, details: None
        if isinstance(work, list):
            # What fits is not measured where several ranks hold a copy: a small share is not to be a large micro-batch.
            self.division = balance.in_parts(work, self.most, lockstep or mesh.axes.model > 1)
            if not lockstep:
                self.division = balance.without_empty(self.division)
            self._why = "balance.work says so"
        elif work == "even":
            self.division = balance.in_parts(balance.even(total, len(self.most)), self.most, lockstep)
            self._why = "balance.work is even"
        else:
            self.division = balance.divide(total, speeds, part_s, lockstep)
            alike = len({(speed.sequence_s, speed.fixed_s) for speed in speeds}) == 1
            self._why = "the devices count as alike" if alike else "as the devices were measured"
        self._history = rebalance.begin(speeds, self.division, part_s, lockstep)
        self._repeated = Recorded([], 0)
        self._walked: dict[int, Division] = {}  # of the last steps
        self._heard: dict[int, dict[int, float]] = {}  # on rank 0: by step and rank, seconds worked
        self._busy: dict[int, list[float]] = {}
        self._decided = self.division  # on rank 0
        # Two collectives, and tensors that must live as long: what each has worked, and what rank 0 answers.
        self._told: Pending | None = None
        self._answered: Pending | None = None
        self._table: torch.Tensor | None = None
        self._message: torch.Tensor | None = None
        self._rows: list[list[float]] = []

    def largest(self, rank: int) -> int:
        """Sequences of the largest micro-batch that this rank runs now."""
        return self.division.largest(rank)

    def of_evaluation(self, count: int) -> Division:
        """A batch of `count` sequences in the proportions of the step's."""
        return balance.scaled(count, self.division, self.most, self._lockstep)

    def _can_be(self, division: Division) -> bool:
        """Whether these ranks can walk a division of before."""
        return division.fits(self.most) and not (self._lockstep and division.own)

    # ------------------------------------------------------------------------------------------------ beginning, saving

    def header(self) -> dict[str, Any]:
        """What a checkpoint keeps: the division of the step that follows it."""
        return self.division.tree()

    def begin(self, step: int, header: Mapping[str, Any] | None, paths: RunPaths, group: JsonGroup, say: Say) -> None:
        """Go on after `step`, from the header of its checkpoint if there is one. Collective; `say` writes events."""
        if len(self.most) == 1:
            return
        self._say = say
        mine = recorded(paths) if self._mesh.rank == 0 else Recorded([], 0)
        told = [[[first, each.tree()] for first, each in mine.divisions], mine.last, mine.moved]
        rows, last, moved = group.broadcast_object(told)
        divisions = [(first, division) for first, tree in rows if (division := balance.division_of(tree)) is not None]
        known = Recorded(divisions, last, moved)
        before, saved = known.of(step + 1), balance.division_of(header)
        later = [division for first, division in known.divisions if first > step + 1]
        repeat = self._work == "auto" and before is not None and all(map(self._can_be, [before, *later]))
        if repeat and before is not None:
            self._repeated, self.division = known, before
        elif self._work == "auto" and known.moved and known.of(step) is None:
            self._why = f"for other devices than before, {self._why}"
        elif self._work == "auto" and saved is not None and self._can_be(saved):
            self.division, self._why = saved, f"as when step {step} was saved"
        self._history = rebalance.begin(
            self._history.speeds, self.division, self._history.part_s, self._history.lockstep
        )
        # The record always says what is walked: what it says of steps to come is otherwise taken back.
        if before != self.division or (later and not repeat):
            self._say(Kind.SHARED, {"step": step + 1, **self.header(), "why": self._why})

    # ------------------------------------------------------------------------------------------------------- every step

    def exchange(self, step: int, late: int, busy_s: float, mine: Sequence[float] = ()) -> None:
        """In step `step`, behind its backward passes: tell the others how long this rank has worked on the step `late`
        before, and what else `rows` shall give to all. Rank 0 decides. Collective."""
        self._walked[step] = self._decided = self.division
        for kept in (self._walked, self._heard, self._busy):
            for old in [number for number in kept if number < step - 3]:
                del kept[old]
        self._rows = [list(mine)]
        if self._mesh.world == 1:
            return
        began = time.thread_time()
        # One small table, a row a rank, filled by summing.
        row = [busy_s if math.isfinite(busy_s) else 0.0, float(step - late), *mine]
        self._table = torch.zeros(self._mesh.world, len(row), dtype=torch.float64)
        self._table[self._mesh.rank] = torch.tensor(row, dtype=torch.float64)
        self._told = all_reduce(self._table, self._mesh.control, self._mesh.bookkeeping)
        if self._mesh.rank == 0:
            self._told.wait()
            heard = self._hear(self._table[:, :2].tolist())
            if self._work == "auto":
                self._decided = self._next(step, heard)
        self.balance_s += time.thread_time() - began

    def rows(self) -> list[list[float]]:
        """What each rank gave to `exchange` as `mine`, in order of rank. Waits for all of them."""
        if self._told is not None and self._table is not None:
            self._told.wait()
            self._rows = self._table[:, 2:].tolist()
        return self._rows

    def announce(self, asked: bool, requests: int = 0) -> None:
        """Begin to tell all what rank 0 has decided, its callbacks' `requests`, and whether this rank was `asked` to
        stop. Collective."""
        began = time.thread_time()
        decided = self._decided
        own = [] if self._lockstep else decided.own or [0] * len(self.most)
        told = [decided.parts, *decided.shares, *own]
        told = [int(requests), *told]
        self._message = torch.tensor([int(asked), *(told if self._mesh.rank == 0 else [0] * len(told))])
        self._answered = all_reduce(self._message, self._mesh.control, self._mesh.bookkeeping)
        self.balance_s += time.thread_time() - began

    def settle(self) -> tuple[bool, int]:
        """At the end of a step: from here on `division` is that of the next one. Returns whether any rank was asked to
        stop, and what rank 0's callbacks request. Collective where nothing was announced."""
        if self._answered is None:
            self.announce(asked=False)
        assert self._answered is not None and self._message is not None
        began = time.thread_time()
        if self._told is not None:
            self._told.wait()
        self._answered.wait()
        self._told = self._answered = None
        asked, requests, parts, *told = self._message.tolist()
        shares, own = told[: len(self.most)], told[len(self.most) :]
        self.division = Division(tuple(shares), parts, tuple(own) if any(own) else ())
        self.balance_s += time.thread_time() - began
        return asked > 0, requests

    def _hear(self, rows: list[list[float]]) -> list[int]:
        """Take in (seconds, step that they are of) of each rank, whose clocks may be late or not; returns the steps of
        which all have told now."""
        for rank, (busy_s, of) in enumerate(rows):
            self._heard.setdefault(int(of), {})[rank] = busy_s
        told = sorted(of for of, by_rank in self._heard.items() if len(by_rank) == self._mesh.world)
        for of in told:
            by_copy = [0.0] * len(self.most)
            for rank, busy_s in self._heard.pop(of).items():
                by_copy[self._copy[rank]] = max(by_copy[self._copy[rank]], busy_s)
            self._busy[of] = by_copy
        return told

    def _next(self, step: int, heard: list[int]) -> Division:
        """What rank 0 decides once it has heard of these steps: the division of the step after `step`."""
        for observed in heard:
            if observed in self._walked:
                self._history = rebalance.observe(self._history, self._walked[observed], self._busy[observed])
        if step < self._repeated.last:
            repeated = self._repeated.of(step + 1)
            assert repeated is not None
            self._history = rebalance.divided(self._history, repeated)
            return repeated
        self._history, decision = rebalance.decide(self._history)
        if decision is not None:
            details = {"why": decision.why, "before_s": decision.before_s, "after_s": decision.after_s}
            self._say(Kind.RESHARED, {"step": step + 1, **decision.division.tree(), **details})
        return self._history.division

    def paces(self) -> list[float]:
        """On rank 0, by copy of the model: seconds of an even share of a step, by what was measured last; nothing while
        nothing was, or where nobody divides anew."""
        if self._work != "auto" or not self._history.paces or not self._busy:
            return []
        even = max(1, sum(self.division.shares) // len(self.most))
        speeds = self._history.measured
        if self._lockstep:
            return [speed.seconds(even, self.division.parts) for speed in speeds]
        return [speed.seconds(even, -(-even // speed.most)) for speed in speeds]

    def shown(self, step: int) -> tuple[Division | None, list[float] | None]:
        """The division and the seconds worked, in order of rank, for the record of a step; None where it does not name
        them."""
        division, before = self._walked.get(step), self._walked.get(step - 1)
        if len(self.most) == 1 or division is None:
            return None, None
        if len(self.most) > SHOWN_RANKS and division == before and step % SHOWN_EVERY:
            return None, None
        busy_s = self._busy.get(step)
        return division, busy_s if busy_s and min(busy_s) > 0 else None


def recorded(paths: RunPaths) -> Recorded:
    """The divisions that the steps of the run folder were walked with, by the devices that the run has now; a later
    attempt's takes the place of what was behind it."""
    kept: list[tuple[int, Division]] = []
    moved, since = False, 0
    for event in read_lines(paths.events):
        if event.get("kind") == Kind.DEVICES_CHANGED:
            kept, moved, since = [], True, int(event.get("attempt", 0))
        step, division = event.get("step"), balance.division_of(event)
        if event.get("kind") not in (Kind.SHARED, Kind.RESHARED) or division is None or not isinstance(step, int):
            continue
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, division))
    newest = last_line(paths.metrics) or {}
    last = newest.get("step") if newest.get("attempt", since) >= since else 0  # what was walked before is not repeated
    return Recorded(kept, max([last if isinstance(last, int) else 0, *(first for first, _ in kept)]), moved)
