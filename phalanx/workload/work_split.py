"""The work split of each step (`balance.batch`), and its rebalancing by the ranks' measured times.

After the backward passes of a step the ranks exchange how long each has worked. Rank 0 decides whether the next step is
split differently, and all receive the decision before this step ends. Every decision is an event; a run resumed from a
checkpoint repeats the recorded decisions of later steps, so that replayed steps are bitwise the same, unless its
devices have changed.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.collectives import PendingCollective, all_reduce
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.json_lines import read_last_line
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import RunPaths
from phalanx.layout import balance, rebalance
from phalanx.layout.balance import Division, Speed
from phalanx.layout.batch_ramp import BatchSchedule, make_batch_schedule

MAX_RANKS_EVERY_STEP = 64  # with more of them a step's record names shares and seconds now and then only
REPORT_EVERY = 64

ReportEvent = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class RecordedDivisions:
    """The recorded divisions of a run folder: (first step, division), and the last recorded step. Those before a change
    of devices (`devices_changed`) are dropped."""

    divisions: list[tuple[int, Division]]
    last_step: int
    devices_changed: bool = False

    def division_at(self, step: int) -> Division | None:
        return next((division for first, division in reversed(self.divisions) if first <= step), None)


class WorkSplit:
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
        schedule: BatchSchedule | None = None,
    ) -> None:
        """`work` as in the recipe; `total` sequences of a step, fewer by a `schedule`; `speeds` in order of rank,
        with each rank's limit.

        `part_s` is what a micro-batch costs all ranks for its collectives; `lockstep`: there are some, so that all run
        as many. Where several ranks hold one copy of the model or take rows together, `speeds` are those of the copies
        or groups, each as slow as its slowest rank.
        """
        self.balance_s = 0.0
        self.micro_batch_limits = [speed.most for speed in speeds]
        self._mesh, self._work, self._lockstep = mesh, work, lockstep
        self._schedule = make_batch_schedule(total) if schedule is None else schedule
        self._report_event: ReportEvent = lambda kind, details: None
        if isinstance(work, list):
            # What fits is not measured where several ranks hold a copy: a small share is not to be a large micro-batch.
            self.division = balance.cut_into_micro_batches(
                work, self.micro_batch_limits, lockstep or mesh.axes.model_parallel_size > 1
            )
            if not lockstep:
                self.division = balance.drop_empty_micro_batches(self.division)
            self._why = "balance.batch says so"
        elif work == "even":
            self.division = balance.cut_into_micro_batches(
                balance.split_evenly(total, len(self.micro_batch_limits)), self.micro_batch_limits, lockstep
            )
            self._why = "balance.batch is even"
        else:
            self.division = balance.divide(total, speeds, part_s, lockstep)
            alike = len({(speed.sequence_s, speed.fixed_s) for speed in speeds}) == 1
            self._why = "devices treated as identical" if alike else "as the devices were measured"
        self._history = rebalance.begin_history(speeds, self.division, part_s, lockstep)
        self._recorded = RecordedDivisions([], 0)
        self._past_divisions: dict[int, Division] = {}  # of the last steps
        self._reported_times: dict[int, dict[int, float]] = {}  # on rank 0: by step and rank, seconds worked
        self._busy_by_copy: dict[int, list[float]] = {}
        self._decided = self.division  # on rank 0
        # Two collectives, and tensors that must live as long: what each has worked, and what rank 0 answers.
        self._pending_times: PendingCollective | None = None
        self._pending_decision: PendingCollective | None = None
        self._table: torch.Tensor | None = None
        self._message: torch.Tensor | None = None
        self._rows: list[list[float]] = []

    def largest_micro_batch(self, rank: int) -> int:
        """Sequences of the largest micro-batch that this rank runs now."""
        return self.division.largest_micro_batch(rank)

    def divide_step(self, step: int) -> Division:
        """The division of `step`, which is the next one; a batch that is still growing has the proportions of a whole
        one."""
        size = self._schedule.batch_size(step)
        return self.division if size == sum(self.division.shares) else self.split_evaluation(size)

    def share_of_batch(self, step: int) -> float:
        """The part of a whole global batch that a step has."""
        return self._schedule.batch_size(step) / sum(self.division.shares)

    def split_evaluation(self, count: int) -> Division:
        """A batch of `count` sequences in the proportions of the step's."""
        return balance.scale_division(count, self.division, self.micro_batch_limits, self._lockstep)

    def _is_feasible(self, division: Division) -> bool:
        """Whether these ranks can use a recorded division."""
        return division.fits(self.micro_batch_limits) and not (self._lockstep and division.own)

    # ------------------------------------------------------------------------------------------------ beginning, saving

    def to_header(self) -> dict[str, Any]:
        """What a checkpoint keeps: the division of the step that follows it."""
        return self.division.to_json()

    def begin(
        self, step: int, header: Mapping[str, Any] | None, paths: RunPaths, group: JsonGroup, say: ReportEvent
    ) -> None:
        """Resume after `step`, from the header of its checkpoint if there is one. Collective; `say` writes events."""
        if len(self.micro_batch_limits) == 1:
            return
        self._report_event = say
        mine = read_divisions(paths) if self._mesh.rank == 0 else RecordedDivisions([], 0)
        told = [[[first, each.to_json()] for first, each in mine.divisions], mine.last_step, mine.devices_changed]
        rows, last, moved = group.broadcast_object(told)
        divisions = [
            (first, division) for first, tree in rows if (division := balance.parse_division(tree)) is not None
        ]
        known = RecordedDivisions(divisions, last, moved)
        before, saved = known.division_at(step + 1), balance.parse_division(header)
        later = [division for first, division in known.divisions if first > step + 1]
        repeat = self._work == "auto" and before is not None and all(map(self._is_feasible, [before, *later]))
        if repeat and before is not None:
            self._recorded, self.division = known, before
        elif self._work == "auto" and known.devices_changed and known.division_at(step) is None:
            self._why = f"for other devices than before, {self._why}"
        elif self._work == "auto" and saved is not None and self._is_feasible(saved):
            self.division, self._why = saved, f"as when step {step} was saved"
        self._history = rebalance.begin_history(
            self._history.speeds, self.division, self._history.part_s, self._history.lockstep
        )
        # The record always has the division in use, since records of later steps may be dropped.
        if before != self.division or (later and not repeat):
            self._report_event(EventKind.WORK_SPLIT, {"step": step + 1, **self.to_header(), "why": self._why})

    # ------------------------------------------------------------------------------------------------------- every step

    def exchange(self, step: int, late: int, busy_s: float, mine: Sequence[float] = ()) -> None:
        """In step `step`, behind its backward passes: tell the others how long this rank has worked on the step `late`
        before, and what else `rows` shall give to all. Rank 0 decides. Collective."""
        self._decided, self._past_divisions[step] = self.division, self.divide_step(step)
        for kept in (self._past_divisions, self._reported_times, self._busy_by_copy):
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
        self._pending_times = all_reduce(self._table, self._mesh.control, self._mesh.bookkeeping)
        if self._mesh.rank == 0:
            self._pending_times.wait()
            heard = self._collect_times(self._table[:, :2].tolist())
            if self._work == "auto":
                self._decided = self._decide_next(step, heard)
        self.balance_s += time.thread_time() - began

    def gather_rows(self) -> list[list[float]]:
        """What each rank gave to `exchange` as `mine`, in order of rank. Waits for all of them."""
        if self._pending_times is not None and self._table is not None:
            self._pending_times.wait()
            self._rows = self._table[:, 2:].tolist()
        return self._rows

    def announce(self, asked: bool, requests: int = 0) -> None:
        """Begin to tell all what rank 0 has decided, its callbacks' `requests`, and whether this rank was `asked` to
        stop. Collective."""
        began = time.thread_time()
        decided = self._decided
        own = [] if self._lockstep else decided.own or [0] * len(self.micro_batch_limits)
        told = [decided.parts, *decided.shares, *own]
        told = [int(requests), *told]
        self._message = torch.tensor([int(asked), *(told if self._mesh.rank == 0 else [0] * len(told))])
        self._pending_decision = all_reduce(self._message, self._mesh.control, self._mesh.bookkeeping)
        self.balance_s += time.thread_time() - began

    def settle(self) -> tuple[bool, int]:
        """At the end of a step: from here on `division` is that of the next one. Returns whether any rank was asked to
        stop, and what rank 0's callbacks request. Collective where nothing was announced."""
        if self._pending_decision is None:
            self.announce(asked=False)
        assert self._pending_decision is not None and self._message is not None
        began = time.thread_time()
        if self._pending_times is not None:
            self._pending_times.wait()
        self._pending_decision.wait()
        self._pending_times = self._pending_decision = None
        asked, requests, parts, *told = self._message.tolist()
        shares, own = told[: len(self.micro_batch_limits)], told[len(self.micro_batch_limits) :]
        self.division = Division(tuple(shares), parts, tuple(own) if any(own) else ())
        self.balance_s += time.thread_time() - began
        return asked > 0, requests

    def _collect_times(self, rows: list[list[float]]) -> list[int]:
        """Take in (seconds, step that they are of) of each rank, whose clocks may be late or not; returns the steps of
        which all have told now."""
        for rank, (busy_s, of) in enumerate(rows):
            self._reported_times.setdefault(int(of), {})[rank] = busy_s
        told = sorted(of for of, by_rank in self._reported_times.items() if len(by_rank) == self._mesh.world)
        for of in told:
            by_copy = [0.0] * len(self.micro_batch_limits)
            for rank, busy_s in self._reported_times.pop(of).items():
                copy = self._mesh.axes.row_group(rank, self._mesh.world)
                by_copy[copy] = max(by_copy[copy], busy_s)
            self._busy_by_copy[of] = by_copy
        return told

    def _decide_next(self, step: int, heard: list[int]) -> Division:
        """What rank 0 decides once it has heard of these steps: the division of the step after `step`."""
        for observed in heard:
            if observed in self._past_divisions:
                self._history = rebalance.observe_step(
                    self._history, self._past_divisions[observed], self._busy_by_copy[observed]
                )
        if step < self._recorded.last_step:
            repeated = self._recorded.division_at(step + 1)
            assert repeated is not None
            self._history = rebalance.with_division(self._history, repeated)
            return repeated
        self._history, decision = rebalance.decide(self._history)
        if decision is not None:
            details = {"why": decision.why, "before_s": decision.before_s, "after_s": decision.after_s}
            self._report_event(EventKind.WORK_REBALANCED, {"step": step + 1, **decision.division.to_json(), **details})
        return self._history.division

    def compute_copy_seconds(self) -> list[float]:
        """On rank 0, by copy of the model: seconds of an even share of a step, by the last measurements; empty before
        any, or where the split is fixed."""
        if self._work != "auto" or not self._history.rank_speeds or not self._busy_by_copy:
            return []
        even = max(1, sum(self.division.shares) // len(self.micro_batch_limits))
        speeds = self._history.current_speeds
        if self._lockstep:
            return [speed.seconds(even, self.division.parts) for speed in speeds]
        return [speed.seconds(even, -(-even // speed.most)) for speed in speeds]

    def describe_step(self, step: int) -> tuple[Division | None, list[float] | None]:
        """The division and the seconds worked, in order of rank, for the record of a step; None where it does not name
        them."""
        division, before = self._past_divisions.get(step), self._past_divisions.get(step - 1)
        if len(self.micro_batch_limits) == 1 or division is None:
            return None, None
        if len(self.micro_batch_limits) > MAX_RANKS_EVERY_STEP and division == before and step % REPORT_EVERY:
            return None, None
        busy_s = self._busy_by_copy.get(step)
        return division, busy_s if busy_s and min(busy_s) > 0 else None


def read_divisions(paths: RunPaths) -> RecordedDivisions:
    """The divisions that the steps of the run folder were walked with, by the devices that the run has now; a later
    attempt's takes the place of what was behind it."""
    kept: list[tuple[int, Division]] = []
    moved, since = False, 0
    for event in read_events(paths.events):
        if event.get("kind") == EventKind.DEVICES_CHANGED:
            kept, moved, since = [], True, int(event.get("attempt", 0))
        step, division = event.get("step"), balance.parse_division(event)
        if (
            event.get("kind") not in (EventKind.WORK_SPLIT, EventKind.WORK_REBALANCED)
            or division is None
            or not isinstance(step, int)
        ):
            continue
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, division))
    newest = read_last_line(paths.metrics) or {}
    last = newest.get("step") if newest.get("attempt", since) >= since else 0  # steps before that are not replayed
    return RecordedDivisions(kept, max([last if isinstance(last, int) else 0, *(first for first, _ in kept)]), moved)
