"""Discrete-event simulation of a job on a large cluster over weeks, with the `decide` of a real run.

Failures come by chance at a constant rate (an exponential time between them, from a seed). Each takes a process or a
whole node with it and is noticed a little later; then `decide` (elastic/supervisor/decide.py) says what happens:
another attempt on the same nodes, a spare in place of the lost one, a division over fewer nodes, waiting, or the end.
An attempt needs some time before its first step, resumes from the step that `decide` finds, and replays lost steps.
Between events time is passed over by formulas, so that a month of 16,384 devices takes seconds.
"""

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.core.placement import ExitCode
from phalanx.elastic.supervisor import state as supervisor_state
from phalanx.elastic.supervisor.decide import decide
from phalanx.elastic.supervisor.state import JobPhase
from phalanx.recovery.catalog import StateFileInfo

DAY_S = 86400.0
MOST_EVENTS = 5_000_000  # beyond which it would take many minutes
KIND, SHARD = "device", "shard"  # all nodes, and their parts of the state, are equal here
ROUNDED = 1e-6  # of a step: what may be lost by rounding
BUCKETS = (
    "working", "replaying", "commits", "checkpoints", "detecting", "restarting", "waiting", "slower", "stalled",
    "given up",
)  # fmt: skip


@dataclass(frozen=True)
class Stragglers:
    """One begins every `every_s` on average and has `speed` of its speed for `for_s`; where the work is `shared` again
    the others take some of it."""

    every_s: float = math.inf
    speed: float = 0.5
    for_s: float = 3600.0
    shared: bool = True


@dataclass(frozen=True)
class Stalls:
    """All stop for `for_s` every `every_s` on average; for more than `hang_s` it counts as a failure of processes."""

    every_s: float = math.inf
    for_s: float = 30.0
    hang_s: float = math.inf


@dataclass(frozen=True)
class Scenario:
    """Parameters of a simulated job and its failures; an `every` of infinity means never.

    `mtbf_s` is the time between failures of the whole job on all its `nodes`; a fraction `hard` of them takes a node,
    the others a process. Failures are noticed after `detect_s`; an attempt begins its first step after `restart_s`, and
    redistributing the ranks takes `prepare_s`. With `memory`, each `commit_steps` steps a commit takes `commit_s`,
    which outlives processes; the next node has a copy of each `copied`th one (0: of none), which outlives nodes. After
    each `checkpoint_steps` (0: never) a checkpoint stalls training for `checkpoint_s`. A lost node is back after
    `repair_s`. `policy`, groups in nodes: that of a recipe by default."""

    nodes: int
    span_s: float
    mtbf_s: float
    step_s: float = 10.0
    hard: float = 1.0
    detect_s: float = 1.0
    restart_s: float = 60.0
    prepare_s: float = 1.0
    commit_steps: int = 1
    commit_s: float = 0.0
    memory: bool = True
    copied: int = 0
    checkpoint_steps: int = 0
    checkpoint_s: float = 0.0
    spares: int = 0
    repair_s: float = DAY_S
    stragglers: Stragglers = Stragglers()
    stalls: Stalls = Stalls()
    policy: supervisor_state.RecoveryPolicy | None = None

    def __post_init__(self) -> None:
        rates = (self.mtbf_s, self.stragglers.every_s, self.stalls.every_s)
        assert self.nodes >= 1 and min(self.span_s, self.step_s, *rates) > 0 and self.spares >= 0, self
        assert 0 <= self.hard <= 1 and min(self.copied, self.checkpoint_steps) >= 0, self
        assert 0 < self.stragglers.speed <= 1 <= self.commit_steps, self
        assert min(self.detect_s, self.restart_s, self.commit_s, self.checkpoint_s, self.stalls.for_s) >= 0, self
        saves_s = self.checkpoint_steps * self.step_s or math.inf
        if self.span_s * sum(1 / every for every in (saves_s, *rates)) > MOST_EVENTS:
            often = min(saves_s, *rates)
            raise ConfigError(
                f"{self.span_s / DAY_S:g} days in which something happens every {often:.3g} s are more than "
                f"{MOST_EVENTS:,} events to simulate; give fewer days, or more time between failures"
            )


@dataclass
class SimulationResult:
    """The result of a simulation: seconds by BUCKETS, which sum to `span_s`; `ended`: why and when the job
    stopped. `working` is the time that the completed steps would have taken with all nodes, each counted once."""

    span_s: float
    fewest: int  # nodes that it ran on
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    steps: int = 0
    hard: int = 0
    soft: int = 0
    stalls: int = 0
    stragglers: int = 0
    attempts: int = 0
    ended: tuple[float, str] | None = None

    @property
    def goodput(self) -> float:
        """Which share of the time went into steps, at the speed of all nodes."""
        return self.seconds["working"] / self.span_s


def simulate(scenario: Scenario, seed: int = 0) -> SimulationResult:
    """What becomes of a job; the same seed gives the same failures. A Scenario with too many events is refused when it
    is made (ConfigError)."""
    job = _SimulatedJob(scenario, random.Random(seed))
    job.run_to_end()
    return job.outcome


class _SimulatedJob:
    """The cluster that the supervisor decides about: its clock, its nodes, and how far the work is."""

    def __init__(self, scenario: Scenario, draws: random.Random) -> None:
        self.scenario, self.draws = scenario, draws
        self.outcome = SimulationResult(scenario.span_s, scenario.nodes)
        self.queue: list[tuple[float, int, str, Any]] = []
        self.order = itertools.count()
        self.now = 0.0
        policy = replace(scenario.policy or supervisor_state.RecoveryPolicy(scenario.nodes), nodes=scenario.nodes)
        # A node is lost or kept as a whole, so to the supervisor each has one rank.
        nodes = tuple(_node(number, ready=1) for number in range(scenario.nodes + scenario.spares))
        slots, seats = (supervisor_state.NodeSlot(1, KIND),) * scenario.nodes, tuple(range(scenario.nodes))
        self.state = supervisor_state.JobState(policy, nodes=nodes, slots=slots, seats=seats)
        self.mode = "waiting"  # a bucket, or "saving"
        self.entered = 0  # number of mode changes: events of an earlier mode are void
        self.paced = 0  # how often the next checkpoint was planned
        self.work_s = 0.0  # that the state holds, in seconds of all nodes
        self.most_s = 0.0  # the most ever reached: below this, steps are replayed
        self.since_s = 0.0  # of work since the last checkpoint
        self.saved = 0  # step of the last checkpoint, which the supervisor is told with its next event
        self.newest = 0  # commit that an ended attempt had
        self.base = 0  # a step that other nodes have, whatever its number: an attempt began after the newest with it
        self.lost: set[int] = set()  # lost nodes that are not noticed yet
        self.slowed: dict[int, float] = {}  # until when, by node

    def run_to_end(self) -> None:
        """Pass over the whole span, from event to event."""
        scenario = self.scenario
        self.next_of("fail", scenario.mtbf_s)
        self.next_of("slow", scenario.stragglers.every_s)
        self.next_of("stall", scenario.stalls.every_s)
        self.decide_on(supervisor_state.Tick(0.0))
        while self.outcome.ended is None and self.queue and self.queue[0][0] < scenario.span_s:
            at, _, what, about = heapq.heappop(self.queue)
            self.pass_until(at)
            self.handle_event(what, about)
        self.pass_until(scenario.span_s)
        self.outcome.steps = _whole(self.most_s / scenario.step_s)

    # -------------------------------------------------------------------------------------------------------- the clock

    def at(self, time_s: float, what: str, about: Any = None) -> None:
        heapq.heappush(self.queue, (time_s, next(self.order), what, about))

    def after(self, delay_s: float, what: str, about: Any = None) -> None:
        self.at(self.now + delay_s, what, about)

    def next_of(self, what: str, every_s: float) -> None:
        """By chance, at a constant rate."""
        if every_s < math.inf:
            self.after(self.draws.expovariate(1 / every_s), what)

    def speed(self) -> float:
        """As a part of that of all nodes: fewer do less; one that is slow holds up all, or only does less itself."""
        seats, scenario = self.state.seats, self.scenario
        slow = sum(node in self.slowed for node in seats) if self.slowed else 0
        share = slow / len(seats) if scenario.stragglers.shared else float(slow > 0)
        return len(seats) / scenario.nodes * (1 - share * (1 - scenario.stragglers.speed))

    def work_rates(self) -> tuple[float, float]:
        """(work, commits) in a second of the clock; a commit takes as long with fewer nodes."""
        speed, scenario = self.speed(), self.scenario
        commit = scenario.commit_s / (scenario.commit_steps * scenario.step_s)
        work = speed / (1 + speed * commit)
        return work, work * commit

    def pass_until(self, at: float) -> None:
        """Advance the clock, and count the time in its bucket."""
        passed, self.now, seconds = at - self.now, at, self.outcome.seconds
        if self.mode != "working":
            seconds["checkpoints" if self.mode == "saving" else self.mode] += passed
            return
        work, commits = self.work_rates()
        done = passed * work
        again = min(done, max(0.0, self.most_s - self.work_s))
        self.work_s += done
        self.since_s += done
        self.most_s = max(self.most_s, self.work_s)
        for name, value in (("working", done - again), ("replaying", again), ("commits", passed * commits)):
            seconds[name] += value
        seconds["slower"] += passed * (1 - work - commits)

    def enter(self, mode: str) -> None:
        self.mode = mode
        self.entered += 1
        self.plan_checkpoint()

    def plan_checkpoint(self) -> None:
        """At the speed that there is now."""
        self.paced += 1
        if self.mode == "working" and self.scenario.checkpoint_steps:
            left = self.scenario.checkpoint_steps * self.scenario.step_s - self.since_s
            self.after(max(0.0, left) / self.work_rates()[0], "checkpoint", self.paced)

    # ----------------------------------------------------------------------------------------------------- what happens

    def handle_event(self, what: str, about: Any) -> None:
        scenario, due = self.scenario, about == self.entered
        match what:
            case "fail":
                self.next_of(what, scenario.mtbf_s)
                hard = self.draws.random() < scenario.hard
                self.fail(self.draws.choice(self.state.seats), hard, scenario.detect_s)
            case "noticed":
                self.notice_failure(*about)
            case "slow":
                self.next_of(what, scenario.stragglers.every_s)
                self.outcome.stragglers += 1
                node = self.draws.choice(self.state.seats)
                self.slowed[node] = self.now + scenario.stragglers.for_s
                self.at(self.slowed[node], "fast", node)
                self.plan_checkpoint()
            case "fast" if self.slowed.get(about, math.inf) <= self.now:
                del self.slowed[about]
                self.plan_checkpoint()
            case "stall":
                self.next_of(what, scenario.stalls.every_s)
                self.outcome.stalls += 1
                if self.mode == "working":
                    self.enter("stalled")
                    lasts_s, hung = scenario.stalls.for_s, scenario.stalls.for_s > scenario.stalls.hang_s
                    self.after(min(lasts_s, scenario.stalls.hang_s), "hung" if hung else "continue", self.entered)
            case "hung" if due:
                self.fail(self.state.seats[0], False, 0.0)
            case "continue" if due:
                self.enter("working")
            case "checkpoint" if about == self.paced:
                self.enter("saving")
                self.after(scenario.checkpoint_s, "saved", self.entered)
            case "saved" if due:
                self.finish_checkpoint()
                self.enter("working")
            case "ended" if due:  # as they were asked to, with a checkpoint
                self.finish_checkpoint()
                self.all_end(ExitCode.STOPPED)
            case "prepared":
                self.decide_on(supervisor_state.DivisionPrepared(self.now, about))
            case "back":
                self.decide_on(supervisor_state.NodeJoined(self.now, _node(about)))
            case "time":
                self.decide_on(supervisor_state.Tick(self.now))

    def finish_checkpoint(self) -> None:
        self.since_s = 0.0
        self.saved = _whole(self.work_s / self.scenario.step_s)

    def fail(self, node: int, hard: bool, detect_s: float) -> None:
        """A failure: ranks make no progress, but the agents have yet to notice."""
        self.outcome.hard += hard
        self.outcome.soft += not hard
        if hard:
            self.lost.add(node)
            self.after(self.scenario.repair_s + detect_s, "back", node)
        if self.state.phase in (JobPhase.RUNNING, JobPhase.ENDING):
            self.enter("detecting")
        self.after(detect_s, "noticed", (node, hard, self.state.attempt))

    def notice_failure(self, node: int, hard: bool, attempt: int) -> None:
        self.keep_memory()
        if hard:
            self.slowed.pop(node, None)
            self.lost.discard(node)
            self.decide_on(supervisor_state.NodeLost(self.now, node, "it is gone"))
        else:
            cause = supervisor_state.FailureCause(0, int(ExitCode.FAILED), f"a rank of node {node} was killed")
            self.decide_on(supervisor_state.RanksEnded(self.now, node, attempt, int(ExitCode.FAILED), cause))
        self.all_end(ExitCode.FAILED)

    def keep_memory(self) -> None:
        """The commits that living nodes hold, by rank, when an attempt ends: the rank's newest and last copied one, and
        copies of the previous node's."""
        scenario = self.scenario
        if self.state.phase != JobPhase.RUNNING or not scenario.memory:
            return
        period, every = scenario.commit_steps, scenario.commit_steps * scenario.copied
        self.newest = step = _whole(self.work_s / (period * scenario.step_s)) * period
        copied = max(step // every * every, self.base) if every else step
        seats = self.state.seats
        rank_of = {node: rank for rank, node in enumerate(seats)}
        whose = {
            node: (rank, (rank - 1) % len(seats)) if scenario.copied else (rank,)
            for node, rank in rank_of.items()
            if node not in self.lost
        }
        nodes = [
            replace(
                node,
                held=tuple(
                    self.slot(rank, step, copied, rank != rank_of[node.node]) for rank in whose.get(node.node, ())
                ),
            )
            for node in self.state.nodes
        ]
        self.state = replace(self.state, nodes=tuple(nodes))
        if scenario.copied and {each.rank for node in nodes for each in node.held} >= set(rank_of.values()):
            # Equivalent to a checkpoint, so later steps are progress.
            self.decide_on(supervisor_state.StepsCommitted(self.now, copied))

    def slot(self, rank: int, step: int, copied: int, replica: bool) -> StateFileInfo:
        """State file entry of a rank in a node's memory."""
        world, steps = len(self.state.seats), (copied,) if replica else (step, copied)
        return StateFileInfo(self.state.attempt, 0, rank, world, rank, world, steps, SHARD, replica)

    # ---------------------------------------------------------------------------------------------------- actions

    def decide_on(self, event: supervisor_state.SupervisorEvent) -> None:
        """Have the supervisor decide, and carry it out."""
        if self.saved > self.state.committed:
            self.state, _ = decide(self.state, supervisor_state.StepsCommitted(self.now, self.saved))
        self.state, actions = decide(self.state, event)
        for action in actions:
            match action:
                case supervisor_state.EndAttempt(save_first=True):
                    self.enter("saving")
                    self.after(self.scenario.checkpoint_s, "ended", self.entered)
                case supervisor_state.PrepareDivision():
                    self.after(self.scenario.prepare_s, "prepared", action.division)
                case supervisor_state.SendOffer():
                    self.all_ready(action.division, action.node)
                case supervisor_state.StartAttempt():
                    self.start(action)
                case supervisor_state.FinishJob():
                    self.outcome.ended = (self.now, action.why)
                    self.enter("given up")
        if self.state.phase in (JobPhase.IDLE, JobPhase.PREPARING, JobPhase.READYING):
            if self.mode != "waiting":
                self.enter("waiting")
            if self.state.phase == JobPhase.READYING and self.state.start_at > self.now:
                self.at(self.state.start_at, "time")
            elif self.state.phase == JobPhase.IDLE and self.state.wait_until is not None:
                self.at(max(self.now, self.state.wait_until) + 1e-3, "time")

    def all_end(self, code: ExitCode) -> None:
        """All other nodes report that their ranks have ended. The supervisor only counts these messages until the
        last one, so they are put into its state together: processing 2048 one by one would dominate the run time."""
        if self.state.phase != JobPhase.ENDING:
            return
        state = self.state
        *others, last = (node for node in state.seats if node not in state.codes and node not in state.lost_with_ranks)
        self.state = replace(state, codes={**state.codes, **dict.fromkeys(others, int(code))})
        self.decide_on(supervisor_state.RanksEnded(self.now, last, state.attempt, int(code)))

    def all_ready(self, division: int, node: int | None) -> None:
        """Nodes report ready for a division: one node, or all together."""
        if node is None:
            *others, last = self.state.nodes
            ready = tuple(each if each.ready == division else replace(each, ready=division) for each in others)
            self.state = replace(self.state, nodes=(*ready, last))
            node = last.node
        self.decide_on(supervisor_state.NodeReady(self.now, node, division))

    def start(self, action: supervisor_state.StartAttempt) -> None:
        self.outcome.attempts += 1
        self.outcome.fewest = min(self.outcome.fewest, len(action.seats))
        if action.step != self.newest:
            self.base = action.step
        self.work_s = action.step * self.scenario.step_s
        self.since_s = self.work_s - self.state.committed * self.scenario.step_s
        self.enter("restarting")
        self.after(self.scenario.restart_s, "continue", self.entered)


def _node(number: int, ready: int = 0) -> supervisor_state.Node:
    return supervisor_state.Node(number, f"node{number}", 1, KIND, ready)


def _whole(steps: float) -> int:
    return math.floor(steps + ROUNDED)
