"""Runs that faults happen to: what is drawn by a seed, how it is brought about, and what became of the run."""

import json
import math
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.started import Run, start
from phalanx.core import faults
from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths

STEPS = 40
EVERY = 3  # steps between checkpoints, and between comparisons of the ranks' parameters
HANG_S = 4.0
RECIPE = """
model: {hidden: 32, layers: 1, heads: 2, intermediate: 64, dropout: 0.1}
data: {source: text.jsonl, tokenizer_vocab: 280, seq_len: 16, held_out: 0.2, cache: cache}
train: {steps: 40, global_batch: 4, micro_batch: 2, eval_sequences: 0, dtype: fp64, compile: false}
optim: {lr: 1e-2}
balance: {batch: even}
checkpoint: {every: 3, keep: 4}
comm: {timeout_s: 30}
resilience: {max_restarts: 1000, max_identical_failures: 50, hang_timeout_s: 4, checksum_every: 3, health: "off",
             on_spike: "off"}
report: {tensorboard: false}
"""
PATIENCE_S = 180.0
LOOK_S = 0.004
SAME = 1e-9

# What ends an attempt when a run does it to itself, what does not, and what is done from outside.
DEADLY = ("kill", "crash", "exception", "hang", "freeze", "oom")
HARMLESS = ("slow", "disk-full", "corrupt-checkpoint", "bit-flip")
CHANGING = {"nan": "nan:rank=1,step=5,every=true", "spike": "spike:rank=0,step=5,every=true"}  # the curve, for good
OUTSIDE = ("SIGKILL to a rank", "SIGSTOP to a rank", "SIGKILL to an agent", "SIGSTOP to an agent")
STOPPED_S = 3.0  # for which an agent is stopped: longer than its heartbeats may be late


@dataclass
class Strike:
    """One fault as it happened; `during`: while the run was recovering from the one before. `right` is None where
    there is nothing to be named: nobody is left who could, or nothing went wrong by it."""

    kind: str
    victim: int  # rank, or node
    at: float = 0.0  # seconds since the epoch
    attempt: int = 0
    during: bool = False
    happened: bool = True
    right: bool | None = None
    dead_s: float | None = None


@dataclass
class Plan:
    """What a run is, and what happens to it. `injected` is for --inject; `outside` is done by signals, each with the
    step after which it comes, or with the seconds after the one before, where that is a `during`. `marks`: of
    CHANGING. `alone`: a run for what is said of one fault; its weights are not looked at."""

    nodes: int
    spares: int
    shrinks: bool = False
    marks: tuple[str, ...] = ()
    alone: bool = False
    overrides: tuple[str, ...] = ()
    injected: list[tuple[Strike, str]] = field(default_factory=list)
    outside: list[tuple[Strike, float]] = field(default_factory=list)

    @property
    def shape(self) -> str:
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''}"

    @property
    def re_cut(self) -> bool:
        """Whether the layout may change on the way, and with it the last bits."""
        return self.shrinks or any(strike.kind == "oom" for strike, _ in self.injected)


@dataclass
class Outcome:
    """What became of a run."""

    plan: Plan
    strikes: list[Strike]
    ended: bool
    same: bool
    steps_lost: int
    blamed: list[str]  # what was said against ranks and nodes that were well
    where: Path


def draw_plan(draw: random.Random, most: int) -> Plan:
    """A run with at most so many faults."""
    nodes, inside = draw.choice((1, 1, 2)), draw.random() < 0.5
    plan = Plan(nodes, spares=0)
    if inside and draw.random() < 0.25:
        plan.marks = (draw.choice(tuple(CHANGING)),)
    if inside:
        _draw_injected(plan, draw, min(most, draw.randint(5, 9)))
    else:
        plan.spares = int(nodes == 2 and draw.random() < 0.4)
        plan.shrinks = nodes == 2 and not plan.spares and draw.random() < 0.3
        _draw_outside(plan, draw, min(most, draw.randint(3, 6)))
    return plan


def _draw_injected(plan: Plan, draw: random.Random, count: int) -> None:
    attempt, step = 1, 6
    for _ in range(count):
        kind = draw.choice(DEADLY if draw.random() < 0.7 else HARMLESS)
        rank = draw.randrange(2)
        if kind == "oom" and any(strike.kind == kind for strike, _ in plan.injected):
            kind = "kill"  # below one sequence there is no smaller micro-batch, and a run rightly ends
        strike = Strike(kind, rank, attempt=attempt)
        text = f"{kind}:rank={rank},attempt={attempt}"
        if kind in HARMLESS:
            # Seen when parameters are compared, or when a checkpoint is saved.
            step += -step % EVERY
            text += f",step={step}" + ",steps=2" * (kind == "slow")
            step += 2 * EVERY
        else:
            text += f",step={step},phase={draw.choice(('data', 'forward', 'backward', 'update'))}"
            attempt += 1
            if draw.random() < 0.3:  # again in the first step that follows, where the one before was lost at its end
                strike.during = True
            else:
                step += draw.randint(1, 5)
        if step >= STEPS - 2:
            return
        plan.injected.append((strike, text))


def _draw_outside(plan: Plan, draw: random.Random, count: int) -> None:
    step = 4
    for number in range(count):
        kind = draw.choice(OUTSIDE)
        of_rank = kind.endswith("rank")
        victim = draw.randrange(2 if of_rank else plan.nodes)
        during = number > 0 and draw.random() < 0.25
        plan.outside.append((Strike(kind, victim, during=during), draw.uniform(0.0, 1.0) if during else step))
        step += draw.randint(3, 6)


def plan_alone(kind: str, nodes: int, draw: random.Random) -> Plan:
    """A run with one fault, for what is said of it. Who is hit is drawn."""
    victim, step = draw.randrange(2), draw.randint(6, 20)
    plan = Plan(nodes, 0, alone=True)
    if kind in OUTSIDE:
        plan.nodes = 2 if kind.endswith("agent") else nodes  # a lone agent has nobody to name it
        plan.outside = [(Strike(kind, victim), step)]
        return plan
    text = f"{kind}:rank={victim},step={step}"
    if kind in CHANGING:
        text = CHANGING[kind]
        victim = 1 if kind == "nan" else 0
    if kind == "spike":  # there has to be something to compare it with, and to go back to
        text = f"spike:rank=0,step={step + 16},factor=30"
        plan.overrides = ("resilience.on_spike=rollback", "resilience.rollback_steps=2")
    elif kind == "corrupt-checkpoint":  # the newest one, before which there is another, and somebody who reads it
        text, kill = f"{kind}:rank={victim},step=22", f"kill:rank={victim},step=32"
        plan.overrides = ("resilience.in_memory_checkpoints=false", "checkpoint.every=11")
        plan.injected.append((Strike("kill", victim, attempt=1), kill))
    elif kind in HARMLESS:
        step -= step % EVERY
        text = f"{kind}:rank={victim},step={step}" + ",steps=5" * (kind == "slow")
    plan.injected.insert(0, (Strike(kind, victim, attempt=1), text))
    return plan


# -------------------------------------------------------------------------------------------------------------- one run


class FaultyRun(Run):
    """A run's folder and its agents, each in a process of its own."""

    def __init__(self, place: Path, name: str, plan: Plan) -> None:
        super().__init__(RunPaths(place / name), nodes=plan.nodes + plan.spares)
        self.place, self.name, self.plan = place, name, plan
        self.safe: dict[int, int] = {}  # the newest step that was seen to be safe, by attempt

    def arguments(self, node: int) -> list[str]:
        plan = self.plan
        words = ["train", "recipe.yaml", "--run-dir", self.name, "--ranks", str(2 // plan.nodes)]
        words += ["resilience.in_memory_checkpoints=true"]
        if plan.nodes > 1:
            words += ["--nodes", str(plan.nodes), "--node-rank", str(node), "--rendezvous-timeout", "100"]
            words += ["--rendezvous", f"file://{self.place}/meet-{self.name}"]
            words += ["--spares", str(plan.spares)] if plan.spares else []
            ways = "[shrink]" if plan.shrinks else "[replace, wait]"
            words += [f"resilience.on_lost_node={ways}"]
        words += plan.overrides
        asked = [CHANGING[mark] for mark in plan.marks] + [text for _, text in plan.injected]
        return words + (["--inject", "; ".join(asked)] if asked else [])

    def start(self, node: int) -> None:
        """Start a node's command, or start it again."""
        output = self.place / f"{self.name}-{node}.txt"
        self.commands[node] = start(self.arguments(node), self.place, output)

    def look(self) -> None:
        """Note what is safe, and who has ended."""
        for node, command in list(self.commands.items()):
            if command.over():
                del self.commands[node]
        attempt, committed = self.attempt(), self.committed()
        # On two nodes a step counts when the other one has it too.
        safe = min(committed, self.replicated()) if self.plan.nodes > 1 else committed
        self.safe[attempt] = max(safe, self.safe.get(attempt, 0))

    def until(self, condition: Callable[[], bool]) -> bool:
        """Until something holds; False where the run has ended before, or nothing happens for too long."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            self.look()
            if not self.commands or time.monotonic() > until:
                return condition()
            time.sleep(LOOK_S)
        return True

    def until_after(self, attempt: int) -> None:
        """Until a later attempt has begun, or the run is done."""
        self.until(lambda: self.attempt() > attempt or bool(self.events(EventKind.FINISHED)))

    def to_its_end(self) -> bool:
        """Wait until the last agent has left; whether the last step was done."""
        ended = self.until(lambda: not self.commands)
        return ended and bool(self.events(EventKind.FINISHED))


def perform(place: Path, name: str, plan: Plan) -> FaultyRun:
    """Have a run happen, and all that is to happen to it."""
    run = FaultyRun(place, name, plan)
    for node in range(plan.nodes + plan.spares):
        run.start(node)
    for number, (strike, after) in enumerate(plan.outside):
        _strike(run, strike, after)
        following = [each for each, _ in plan.outside[number + 1 : number + 2]]
        if strike.happened and not (following and following[0].during):
            run.until_after(strike.attempt)
    return run


def _strike(run: FaultyRun, strike: Strike, after: float) -> None:
    """Do something to a rank or an agent, and start an agent again that has ended by it."""
    if strike.during:
        time.sleep(after)
    there = run.until(lambda: bool(_victims(run, strike)) and (strike.during or run.committed() >= after))
    victims = _victims(run, strike)
    if not there or not victims or run.committed() >= STEPS - 1:
        strike.happened = False
        return
    pid, node = victims[0]
    run.look()
    strike.attempt, strike.at = run.attempt(), time.time()
    number = signal.SIGKILL if "SIGKILL" in strike.kind else signal.SIGSTOP
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has just ended by what came before
        strike.happened = False
        return
    if not strike.kind.endswith("agent"):
        return
    if number == signal.SIGSTOP:
        until = time.monotonic() + STOPPED_S
        run.until(lambda: time.monotonic() > until)
        os.kill(pid, signal.SIGCONT)
        if run.plan.nodes == 1:
            strike.attempt = -1  # nothing follows: its ranks went on meanwhile
            return
    # One that is given up leaves, and comes back as a new one; the job may be over by then.
    run.until(lambda: node not in run.commands or bool(run.events(EventKind.FINISHED)))
    if node not in run.commands and not run.events(EventKind.FINISHED):
        run.start(node)


def _victims(run: FaultyRun, strike: Strike) -> list[tuple[int, int]]:
    """Pid and node of whoever is to be hit, if it is there."""
    if strike.kind.endswith("agent"):
        # Of two nodes one has to be there that goes on; which numbers the members have now is theirs to know.
        here = run.commands.get(strike.victim)
        enough = len(run.commands) == run.plan.nodes + run.plan.spares
        return [(here.pid, strike.victim)] if here is not None and enough else []
    return [
        (pid, node)
        for node in run.commands
        for rank, pid in run.commands[node].ranks().items()
        if rank == strike.victim
    ]


# ------------------------------------------------------------------------------------------------------------ judgement

EXPECTED: dict[str, tuple[str, str]] = {
    "kill": (EventKind.WORKER_DIED, "killed by SIGKILL"),
    "crash": (EventKind.WORKER_DIED, "killed by SIGSEGV"),
    "exception": (EventKind.WORKER_DIED, "RuntimeError: --inject exception"),
    "hang": (EventKind.WORKER_DIED, "no progress for"),
    "freeze": (EventKind.WORKER_DIED, "stopped by a signal"),
    "oom": (EventKind.WORKER_DIED, "ran out of memory"),
    "disk-full": (EventKind.CHECKPOINT_FAILED, "No space left"),
    "bit-flip": (EventKind.CORRUPTED, ""),
    "nan": (EventKind.STEP_SKIPPED, ""),
    "SIGKILL to a rank": (EventKind.WORKER_DIED, "killed by SIGKILL"),
    "SIGSTOP to a rank": (EventKind.WORKER_DIED, "stopped by a signal"),
    "SIGKILL to an agent": (EventKind.NODE_LOST, ""),
    "SIGSTOP to an agent": (EventKind.NODE_LOST, ""),
}
# Of a run that has one fault, and is made to come upon it.
EXPECTED_ALONE: dict[str, tuple[str, str]] = {
    "spike": (EventKind.ROLLED_BACK, "the limit from the steps before"),
    "corrupt-checkpoint": (EventKind.CHECKPOINT_REFUSED, ""),
}


def judge(run: FaultyRun, reference: Callable[[str, tuple[str, ...]], Path]) -> Outcome:
    """What became of a run, once its agents have left."""
    plan = run.plan
    ended = run.to_its_end()
    strikes = [strike for strike, _ in (*plan.injected, *plan.outside)]
    injected = {str(event["fault"]): event for event in run.events(EventKind.INJECTED)}
    for strike, text in plan.injected:
        event = next((injected[said] for said in injected if _fault_of(said) == _fault_of(text)), None)
        strike.happened = event is not None
        strike.at = float(event["time"]) if event is not None else 0.0
    for mark in plan.marks:
        strikes.append(Strike(mark, 0, happened=any(text.startswith(mark) for text in injected)))
    happened = [strike for strike in strikes if strike.happened]
    blamed = _causes(run, happened)
    _dead_times(run, happened)
    same = ended
    if ended and not plan.alone:
        same = same_weights(run.paths, RunPaths(reference(plan.shape, plan.marks)), not plan.re_cut)
    # Two nodes that are lost at once, or one after the other before there is a replica again, take the run to the disk.
    both = plan.nodes > 1 and sum(strike.kind.endswith("agent") for strike in happened) > 1
    excused = (both and any(strike.during for strike in happened)) or plan.overrides
    lost = 0 if excused or any(strike.kind == "corrupt-checkpoint" for strike in happened) else sum(_lost_steps(run))
    return Outcome(plan, happened, ended, same, lost, blamed, run.paths.root)


def _fault_of(text: str) -> tuple[str, frozenset[str]]:
    """A fault as a user wrote it and as the run says it: without what is so anyway."""
    (fault,) = faults.parse_faults([text])
    kind, _, rest = fault.text.partition(":")
    return kind, frozenset(rest.split(","))


def _causes(run: FaultyRun, strikes: list[Strike]) -> list[str]:
    """Fill in which strikes were named right; what was said against others."""
    expected = EXPECTED | (EXPECTED_ALONE if run.plan.alone else {})
    left = run.events(*{kind for kind, _ in expected.values()})
    ordered = sorted(strikes, key=lambda each: each.at)
    pairs = zip(ordered, [*ordered, None][1:], strict=True)
    for strike, following in sorted(pairs, key=lambda pair: pair[0].during):  # first those that have to be named
        lone_agent = run.plan.nodes == 1 and strike.kind.endswith("agent")
        if strike.kind not in expected or lone_agent:
            continue
        kind, words = expected[strike.kind]
        fitting = [
            event
            for event in left
            if event["kind"] == kind and words in str(event.get("reason", "")) and event["time"] >= strike.at
            and event.get("node", event.get("rank", strike.victim)) == strike.victim
        ]  # fmt: skip
        # What hits a run that is ending its ranks already may find nobody, and is no incident of its own; nor is a rank
        # that does nothing found to, where another fault ends it before.
        overtaken = strike.during or (following is not None and following.during and "SIGSTOP" in strike.kind)
        strike.right = True if fitting else None if overtaken else False
        if fitting:
            left.remove(fitting[0])
    blaming = (EventKind.WORKER_DIED, EventKind.NODE_LOST) if strikes else tuple(EventKind)
    against = [event for event in left if event["kind"] in blaming]
    return [f"{event['kind']}: {event.get('host', '')} rank {event.get('rank')} node {event.get('node')}: "
            f"{event.get('reason')}" for event in against if not _explained(run, event, strikes)]  # fmt: skip


def _explained(run: FaultyRun, event: dict[str, Any], strikes: Sequence[Strike]) -> bool:
    """Whether an event speaks of somebody who was hit, in other words than were expected."""
    number = event.get("node", event.get("rank"))
    of_node = event["kind"] == EventKind.NODE_LOST
    return any(
        strike.victim == number and strike.kind.endswith("agent") == of_node and event["time"] >= strike.at - 1.0
        for strike in strikes
    )


def _dead_times(run: FaultyRun, strikes: Sequence[Strike]) -> None:
    """From a fault to the first step after it, less a step, where an attempt ended by it."""
    steps = read_steps(run.paths.metrics)
    lines = [line for line in read_lines(run.paths.metrics) if "step_s" in line]
    if not steps:
        return
    step_s = statistics.median(float(step["step_s"]) for step in steps)
    starts = [float(event["time"]) for event in run.events(EventKind.ATTEMPT_STARTED)]
    for strike in strikes:
        begun = next((at for at in starts if at > strike.at), None)
        if strike.at == 0.0 or strike.attempt < 0 or begun is None or strike.kind in HARMLESS or strike.during:
            continue
        first = next((float(line["time"]) for line in lines if float(line["time"]) > begun), None)
        if first is not None:
            strike.dead_s = max(0.0, first - strike.at - 2 * step_s)  # a line is written a step late


def _lost_steps(run: FaultyRun) -> list[int]:
    """Steps that had been committed when an attempt ended, and that the next one did not begin with."""
    began = {int(event["attempt"]): int(event["step"]) for event in run.events(EventKind.RESUMED)}
    lost = []
    for attempt, step in sorted(run.safe.items()):
        following = [number for number in began if number > attempt]
        if following and step > began[min(following)]:
            lost.append(step - began[min(following)])
    return lost


def same_weights(run: RunPaths, other: RunPaths, bitwise: bool) -> bool:
    """Whether two runs ended with the same state: by the checksums of the files, else to SAME in float64."""
    found = [_manifest(paths) for paths in (run, other)]
    if any(each is None for each in found):
        return False
    mine, theirs = ({name: tuple(facts.values()) for name, facts in each["files"].items()} for each in found if each)
    if bitwise:
        return sorted(mine.values(), key=str) == sorted(theirs.values(), key=str)
    import torch

    with torch.no_grad():
        one, two = (_parameters(paths) for paths in (run, other))
        return one.keys() == two.keys() and all(
            bool(torch.allclose(one[name], two[name], rtol=SAME, atol=SAME)) for name in one
        )


def _manifest(paths: RunPaths) -> dict[str, Any] | None:
    try:
        text = (paths.has_checkpoints / f"step-{STEPS:08d}" / "manifest.json").read_text()
    except OSError:
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def _parameters(paths: RunPaths) -> dict[str, Any]:
    import torch

    from phalanx.checkpoint.disk.load import Checkpoint, step_folder

    checkpoint = Checkpoint(step_folder(paths.has_checkpoints, STEPS))
    found = {}
    try:
        for name, (shape, _) in checkpoint.parameters.items():
            found[name] = torch.empty(math.prod(shape), dtype=torch.float64)
            checkpoint.read_into(name, "param", 0, found[name].numel(), found[name])
    finally:
        checkpoint.close()
    return found
