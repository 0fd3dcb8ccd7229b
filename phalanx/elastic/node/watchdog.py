"""Hang detection: an agent judges ranks by their progress pages, without waiting for them.

A rank hangs if its progress page has not changed for longer than a limit that follows from the duration of its earlier
steps. Ranks that only wait for others are not the cause: the rank that they wait for is named. `find_hang` decides,
from plain numbers; `Watchdog` reads those of a node. The rank that is furthest behind among all ranks of a job is the
cause: so each agent reports its ranks, and the leader judges (`JobHangDetector`), once all nodes with ranks have
reported recently. No torch here.
"""

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from phalanx.core import progress_page
from phalanx.core.progress_page import PHASES, STEP_PHASES, RankProgress
from phalanx.elastic.membership.channel import Message
from phalanx.system.exit_causes import DEADLOCK, HANG

FACTOR = 10  # multiple of the longest of the last steps that a step may take without progress
FLOOR_S = 20.0  # and so long it may take anyway: a store, a collection of garbage, another program
COMPILE_FLOOR_S = 180.0  # where a micro-batch of another size may have to be compiled for
WARM_STEPS = 2  # of an attempt, which compile and allocate; before them only what attempts before took is known
LOOK_S = 0.1  # between two looks
OVERSLEPT_S = 1.0  # a longer pause between two checks means that this node was stalled: the ranks get that time again
CALM_S = 2.0  # they are judged
SLOW_DISK = ("starting", "restore", "checkpoint", "profile", "ending")  # where a disk may be waited for


@dataclass(frozen=True)
class HangTimeouts:
    """Hang limits: how long a rank may make no progress. `floor_s`: minimum in a step; `other_s`: outside of steps, and
    in the first steps; `fixed_s`: in a step, if set by the user. `before_s`: the longest step of earlier attempts with
    the same ranks, their first steps included; None: unknown."""

    floor_s: float
    other_s: float
    fixed_s: float | None = None
    before_s: float | None = None

    @property
    def least_s(self) -> float:
        """With a rank that is stopped, whatever it does, and with which all looking begins."""
        return self.fixed_s or self.floor_s

    def timeout_for(self, beat: RankProgress, status: "ProcessStatus | None" = None) -> float:
        if status is not None and status.stopped:
            return self.least_s
        if beat.phase not in STEP_PHASES or (beat.steps < WARM_STEPS and self.before_s is None):
            return max(self.other_s, self.least_s)
        if beat.steps < WARM_STEPS:
            assert self.before_s is not None
            return min(max(self.other_s, self.least_s), max(self.least_s, FACTOR * self.before_s))
        return self.fixed_s or max(self.floor_s, FACTOR * beat.longest_s)


def make_hang_timeouts(hang_s: str | float, timeout_s: float, compiled: bool) -> HangTimeouts | None:
    """Make the limits from `resilience.hang_timeout_s`, `comm.timeout_s` and whether anything is compiled; None: hang
    detection is off."""
    if hang_s == "off":
        return None
    fixed_s = None if isinstance(hang_s, str) else hang_s
    return HangTimeouts(COMPILE_FLOOR_S if compiled else FLOOR_S, timeout_s, fixed_s)


@dataclass
class StepHistory:
    """What attempts of the same ranks have shown on a node: the longest of their steps."""

    longest_s: float | None = None

    def update(self, beats: Sequence[RankProgress]) -> None:
        """Observe a running attempt. What does not get through its first steps shows nothing."""
        seen = [beat.longest_s for beat in beats if beat.steps >= WARM_STEPS]
        self.longest_s = max([*seen, self.longest_s or 0.0]) if seen else self.longest_s


@dataclass(frozen=True)
class ProcessStatus:
    """Status of a rank's process in the kernel: stopped by a signal; being debugged; reading or writing files."""

    stopped: bool = False
    traced: bool = False
    on_disk: bool = False


NO_SIGNS = ProcessStatus()


@dataclass(frozen=True)
class ProgressReport:
    """An agent's observation of its running ranks; no `statuses` while none is about to be judged."""

    beats: tuple[RankProgress, ...]
    statuses: Mapping[int, ProcessStatus]
    timeouts: HangTimeouts

    def find_hang(self) -> "Hang | None":
        """Whether ranks hang, where there are no others than these."""
        return find_hang(self.beats, self.statuses, len(self.beats), self.timeouts)


@dataclass(frozen=True)
class Hang:
    """Ranks that hang, and those that wait for them. Without `late`, all wait for one another."""

    late: tuple[RankProgress, ...]
    waiting: tuple[RankProgress, ...]
    stopped: frozenset[int] = frozenset()

    def assign_blame(self) -> list["Blame"]:
        """The blame for each rank declared failed; in a deadlock, for one of them."""
        kind = HANG if self.late else DEADLOCK
        blamed = self.late or self.waiting[:1]
        return [Blame(beat.rank, kind, self.reason(beat), progress_order(beat)[0] or None) for beat in blamed]

    def reason(self, beat: RankProgress) -> str:
        """A sentence on why `beat`'s rank is taken to hang."""
        where = describe_position(beat)
        if not self.late:
            on_device = beat.waits_for == "device" or beat.device_behind is not None
            kernel = "a kernel on one of their devices does not finish, " if on_device else ""
            return (
                f"it has waited for {beat.idle_s:.0f} s in {where}, like all ranks, and none is behind: the network "
                f"between them broke, {kernel}or they wait in different collectives; the stacks are in the logs"
            )
        how = ", stopped by a signal" if beat.rank in self.stopped else ""
        others = ""
        if self.waiting:
            names = format_ranks([other.rank for other in self.waiting])
            others = (
                f", while {names} wait{'s' if len(self.waiting) == 1 else ''} in {describe_position(self.waiting[0])}"
            )
        return f"no progress for {beat.idle_s:.0f} s in {where}{how}{others}; the stacks are in the logs"


@dataclass(frozen=True)
class Blame:
    """A rank declared failed: `kind` is HANG or DEADLOCK."""

    rank: int
    kind: str
    reason: str
    step: int | None


def describe_position(beat: RankProgress) -> str:
    """Describe where a rank is; and its device, if that is behind and the rank waits for it."""
    if beat.device_behind is not None:
        step, phase, micro_batch = beat.device_behind
        there = replace(beat, step=step, phase=phase, micro_batch=micro_batch, waits_for="", device_behind=None)
        return f"{describe_position(there)} on its device"
    of_step = f" of step {beat.step}" if beat.step else ""
    many = f", micro-batch {beat.micro_batch + 1}," if beat.micro_batch else ""
    waits = f" ({beat.waits_for})" if beat.waits_for else ""
    return f"{beat.phase}{many}{of_step}{waits}"


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 2`, `ranks 0, 1, 2 and 61 others`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:3]))} and {len(ranks) - 3} others"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def progress_order(beat: RankProgress) -> tuple[int, int, int]:
    """How far a rank has come: (step, micro-batch, phase), in the order in which ranks go through them. It has come no
    further than its device."""
    step, phase, micro_batch = beat.device_behind or (beat.step, beat.phase, beat.micro_batch)
    if phase in ("forward", "backward"):
        return step, micro_batch, PHASES.index(phase)
    ahead = PHASES.index(phase) >= PHASES.index("exchange")
    return step, 1 << 40 if ahead else -1, PHASES.index(phase)


def find_hang(
    beats: Sequence[RankProgress], statuses: Mapping[int, ProcessStatus], world: int, timeouts: HangTimeouts
) -> Hang | None:
    """Find hung ranks. `beats` are those of all `world` ranks, or of some, if no others are known.

    A rank that does not wait hangs when its page has not changed for longer than `timeouts`; of several, those that are
    behind the others are at fault. Waiting ranks are only judged when all ranks wait; a single one waits for its
    device. While a rank is being debugged, no rank is judged.
    """
    if any(sign.traced for sign in statuses.values()):
        return None
    still = [
        beat
        for beat in beats
        if beat.idle_s > timeouts.timeout_for(beat, statuses.get(beat.rank)) and not _on_disk(beat, statuses)
    ]
    stopped = frozenset(beat.rank for beat in still if statuses.get(beat.rank, NO_SIGNS).stopped)
    stuck = [beat for beat in still if not beat.is_waiting or beat.rank in stopped]
    if stopped:  # they do not continue by themselves
        stuck = [beat for beat in stuck if beat.rank in stopped]
    if stuck:
        behind = min(progress_order(beat) for beat in stuck)
        late = [beat for beat in stuck if progress_order(beat) == behind or beat.rank in stopped]
        return _hang(late, beats, stopped)
    if not still or len(still) < len(beats) or len(beats) < world:
        return None  # waiting ranks wait for one that works, or that is unknown here
    behind = min(progress_order(beat) for beat in still)
    late = [beat for beat in still if progress_order(beat) == behind]
    return _hang(late if len(late) < len(still) or world == 1 else [], beats, stopped)


def _on_disk(beat: RankProgress, statuses: Mapping[int, ProcessStatus]) -> bool:
    sign = statuses.get(beat.rank, NO_SIGNS)
    return beat.phase in SLOW_DISK and sign.on_disk and not sign.stopped


def _hang(late: Sequence[RankProgress], beats: Sequence[RankProgress], stopped: frozenset[int]) -> Hang:
    names = {beat.rank for beat in late}
    return Hang(tuple(late), tuple(beat for beat in beats if beat.rank not in names), stopped)


# --------------------------------------------------------------------------------------------------------- thin reader


class Watchdog:
    """Watches the progress of this node's ranks in one attempt. `pids` by rank; `step_history`: what attempts before
    have shown, and this one does."""

    def __init__(
        self,
        folder: Path | None,
        attempt: int,
        pids: Mapping[int, int],
        timeouts: HangTimeouts | None,
        step_history: StepHistory | None = None,
    ) -> None:
        self._folder, self._attempt, self._pids = folder, attempt, dict(pids)
        self._step_history = step_history or StepHistory()
        self._timeouts = None
        if folder is not None and timeouts is not None:
            self._timeouts = replace(timeouts, before_s=self._step_history.longest_s)
        self._begun = self._looked = time.monotonic()
        self._calm_until = self._next = 0.0
        self._moved: dict[int, tuple[int, float]] = {}  # bytes read and written, and when that was first seen

    def read_progress(self, gone: Sequence[int] = ()) -> list[RankProgress]:
        """The pulses of this node's ranks but for those that are `gone`; one that has none yet is about to start."""
        now, now_ns, found = time.monotonic(), time.monotonic_ns(), []
        for rank in self._pids:
            if rank in gone or self._folder is None:
                continue
            beat = progress_page.read_progress(
                _content(progress_page.progress_page_path(self._folder, rank)), rank, self._attempt, now_ns
            )
            found.append(beat or RankProgress(rank, 0, "starting", 0, "", now - self._begun, 0, 0.0))
        return found

    def blame_for_timeout(self, world: int) -> list["Blame"]:
        """Find the ranks to blame for a collective that exceeded its time limit, of `world` ranks."""
        if self._timeouts is None:
            return []
        # Half of it: waiting ranks arrived some time after the hung one.
        patience = replace(self._timeouts, fixed_s=self._timeouts.other_s / 2, other_s=self._timeouts.other_s / 2)
        hang = find_hang(self.read_progress(), {}, world, patience)
        return [] if hang is None else hang.assign_blame()

    def make_report(self, gone: Sequence[int] = (), every_s: float = LOOK_S) -> "ProgressReport | None":
        """The progress report, if it is due; ranks that are `gone` have ended."""
        now = time.monotonic()
        if self._timeouts is None or now < self._next:
            return None
        if now > self._looked + OVERSLEPT_S:
            self._calm_until = now + CALM_S
        self._looked, self._next = now, now + every_s
        if now < self._calm_until:
            return None
        beats, patience = self.read_progress(gone), self._timeouts
        self._step_history.update(beats)
        near = any(beat.idle_s > patience.least_s / 2 for beat in beats)
        signs = {beat.rank: self._read_status(beat.rank, now, patience) for beat in beats} if near else {}
        return ProgressReport(tuple(beats), signs, patience)

    def _read_status(self, rank: int, now: float, timeouts: HangTimeouts) -> ProcessStatus:
        root = Path(f"/proc/{self._pids[rank]}")
        states = [_content(task / "stat").rpartition(b")")[2].split()[:1] for task in _tasks(root)]
        traced = b"TracerPid:\t0\n" not in (status := _content(root / "status")) and b"TracerPid:" in status
        moved = sum(int(line.split()[1]) for line in _content(root / "io").splitlines()[:2])  # rchar, wchar
        before, since = self._moved.get(rank, (moved, -timeouts.other_s))
        if moved != before:
            since = now
        self._moved[rank] = moved, since
        on_disk = [b"D"] in states or now < since + timeouts.other_s / 2
        return ProcessStatus(stopped=[b"T"] in states[:1], traced=traced or [b"t"] in states, on_disk=on_disk)


def _tasks(root: Path) -> list[Path]:
    """The threads of a process, its first one first."""
    try:
        return [root / "task" / name for name in sorted(os.listdir(root / "task"), key=int)]
    except OSError:
        return []


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


STALE_S = 3.0  # older reports are ignored
AGAIN_S = 10.0  # time of agents to end an attempt with hung ranks


def encode_report(attempt: int, report: ProgressReport) -> Message:
    return {
        "attempt": attempt,
        "beats": [astuple(beat) for beat in report.beats],
        "signs": {str(rank): astuple(signs) for rank, signs in report.statuses.items()},
        "patience": astuple(report.timeouts),
    }


def decode_report(message: Message) -> tuple[int, ProgressReport]:
    """The attempt that a word is of, and the word."""
    rows = [[*row[:-1], row[-1] and tuple(row[-1])] for row in message["beats"]]
    signs = {int(rank): ProcessStatus(*row) for rank, row in message["signs"].items()}
    return int(message["attempt"]), ProgressReport(
        tuple(RankProgress(*row) for row in rows), signs, HangTimeouts(*message["patience"])
    )


class JobHangDetector:
    """The words of all nodes, by the leader; of one attempt at a time."""

    def __init__(self) -> None:
        self._attempt = 0
        self._reports: dict[int, tuple[float, ProgressReport]] = {}
        self._next = 0.0

    def add_report(self, node: int, message: Message) -> None:
        """Take what an agent says."""
        attempt, word = decode_report(message)
        if attempt > self._attempt:
            self._attempt, self._reports, self._next = attempt, {}, 0.0
        if attempt == self._attempt:
            self._reports[node] = time.monotonic(), word

    def find_hang(self, attempt: int, nodes: Collection[int]) -> Hang | None:
        """Find hung ranks of an attempt, of which `nodes` still have some."""
        now = time.monotonic()
        if attempt != self._attempt or now < self._next or not nodes:
            return None
        if any(node not in self._reports or self._reports[node][0] < now - STALE_S for node in nodes):
            return None
        words = [self._reports[node][1] for node in nodes]
        beats = sorted((beat for word in words for beat in word.beats), key=lambda beat: beat.rank)
        signs = {rank: each for word in words for rank, each in word.statuses.items()}
        # A new node has no step history: its ranks may have to compile what others have compiled.
        known = [math.inf if word.timeouts.before_s is None else word.timeouts.before_s for word in words]
        patience = words[known.index(max(known))].timeouts
        hang = ProgressReport(tuple(beats), signs, patience).find_hang()
        if hang is not None:
            self._next = now + AGAIN_S
        return hang
