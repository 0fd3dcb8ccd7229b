"""Faults by the hundred: whatever happens to a run, it ends as one that nothing has happened to.

    python3 benchmarks/faults.py [--quick] [--json FILE] [--faults N] [--seed S] [--minutes M] [--clean N]

A small LLaMA trains on the CPU by `phalanx train`, again and again: on two ranks of one node, and on two nodes, which
are agents of their own on this machine. Each run gets a few faults, drawn by a seed: some that it is asked to make
itself (`--inject`), others from outside by signals to ranks and agents, and some of both while it is still recovering
from the one before. Each run has to come to its last step, to lose no step that was committed, and to end with the
weights of an undisturbed run: the same files where the layout stayed, the same to 1e-9 in float64 where it did not.
Then there is what the run said of each fault. docs/benchmarks.md says how to read the figures.
"""

import json
import math
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phalanx.cluster import agent

if __name__ == "__main__":  # first of all: whoever forks agents must have no thread of a numerical library
    agent.preload(("numpy", "torch", "torch._dynamo", "phalanx.cli", "phalanx.train.trainer", "phalanx.nodes"))

from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result
from phalanx import shared_memory, state_file
from phalanx.cluster.fork import fork
from phalanx.records import Kind, RunPaths, read_lines, read_steps

STEPS = 40
EVERY = 3  # steps between checkpoints, and between comparisons of the ranks' parameters
HANG_S = 4.0
RECIPE = """
model: {hidden: 32, layers: 1, heads: 2, intermediate: 64, dropout: 0.1}
data: {source: text.jsonl, tokenizer_vocab: 280, seq_len: 16, held_out: 0.2, cache: cache}
train: {steps: 40, global_batch: 4, micro_batch: 2, eval_sequences: 0, dtype: fp64, compile: false}
optim: {lr: 1e-2}
balance: {work: even}
checkpoint: {every: 3, keep: 4}
comm: {timeout_s: 30}
resilience: {max_restarts: 1000, same_crash: 50, hang_s: 4, checksum_every: 3, health: "off", on_spike: "off"}
report: {tensorboard: false}
"""
PATIENCE_S = 180.0
LOOK_S = 0.004
RIGHT = 0.95  # what is asked of the causes that are named
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
    CHANGING."""

    nodes: int
    spares: int
    shrinks: bool = False
    marks: tuple[str, ...] = ()
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


# -------------------------------------------------------------------------------------------------------------- one run


class Run:
    """A run's folder and its agents, each in a process of its own."""

    def __init__(self, place: Path, name: str, plan: Plan) -> None:
        self.place, self.name, self.plan = place, name, plan
        self.paths = RunPaths(place / name)
        self.agents: dict[int, tuple[int, int]] = {}  # pid and pidfd, by node
        self.codes: dict[int, int] = {}
        self.committed: dict[int, int] = {}  # the newest step that was seen to be committed, by attempt
        self.begun = time.monotonic()

    def arguments(self, node: int) -> list[str]:
        plan = self.plan
        words = ["train", "recipe.yaml", "--run-dir", self.name, "--ranks", str(2 // plan.nodes)]
        if plan.nodes > 1:
            words += ["--nodes", str(plan.nodes), "--node-rank", str(node), "--rendezvous-timeout", "100"]
            words += ["--rendezvous", f"file://{self.place}/meet-{self.name}"]
            words += ["--spares", str(plan.spares)] if plan.spares else []
            ways = "[shrink]" if plan.shrinks else "[replace, wait]"
            words += [f"resilience.on_lost_node={ways}"]
        else:
            words += ["resilience.memory=true"]
        faults = [CHANGING[mark] for mark in plan.marks] + [text for _, text in plan.injected]
        return words + (["--inject", "; ".join(faults)] if faults else [])

    def start(self, node: int) -> None:
        """Start a node's command, or start it again."""
        pid, pidfd = fork(partial(_command, self.place, self.name, node, self.arguments(node)))
        self.agents[node] = pid, pidfd

    def ranks(self, node: int) -> dict[int, int]:
        """Pid by rank, of those that live on a node, as their logs say which they are."""
        found = {}
        if node in self.agents:
            for child in _children(self.agents[node][0]):
                log = re.search(r"/rank-(\d+)\.log$", _link(f"/proc/{child}/fd/1"))
                if log is not None:
                    found[int(log[1])] = child
        return found

    def look(self) -> None:
        """Note what is committed, and who has ended."""
        for node, (pid, pidfd) in list(self.agents.items()):
            if os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self.codes[node] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(pidfd)
                del self.agents[node]
        attempt = self.attempt()
        self.committed[attempt] = max(self.step(), self.committed.get(attempt, 0))

    def step(self) -> int:
        """The newest step that is committed: in the memory of one node, else on the disk."""
        if self.plan.nodes > 1:
            saved = [path.parent.name for path in self.paths.has_checkpoints.glob("step-*/manifest.json")]
            return max((int(name.partition("-")[2]) for name in saved), default=0)
        return state_file.committed(shared_memory.folder_of(self.paths), state_file.run_of(self.paths.events))

    def attempt(self) -> int:
        return max((int(event["attempt"]) for event in self.events(Kind.ATTEMPT_STARTED)), default=0)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.paths.events) if event.get("kind") in kinds]

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Until something holds; False where the run has ended before, or nothing happens for too long."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            self.look()
            if not self.agents or time.monotonic() > until:
                return condition()
            time.sleep(LOOK_S)
        return True

    def to_its_end(self) -> bool:
        """Wait until the last agent has left; whether the last step was done."""
        ended = self.wait(lambda: not self.agents)
        for pid, pidfd in self.agents.values():  # hung
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pidfd)
        self.agents = {}
        return ended and bool(self.events(Kind.FINISHED))

    def remove(self) -> None:
        """What a run that was killed leaves in shared memory."""
        for node in range(self.plan.nodes + self.plan.spares):
            folder = shared_memory.folder_of(self.paths, node)
            if folder.is_dir():
                with shared_memory.held(folder) as memory:
                    memory.keeps = False


def _command(place: Path, name: str, node: int, arguments: Sequence[str]) -> int:
    from phalanx import cli

    os.chdir(place)
    sys.argv = ["phalanx", *arguments]
    descriptor = os.open(place / f"{name}-{node}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for each in (1, 2):
        os.dup2(descriptor, each)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def perform(place: Path, name: str, plan: Plan) -> Run:
    """Have a run happen, and all that is to happen to it."""
    run = Run(place, name, plan)
    for node in range(plan.nodes + plan.spares):
        run.start(node)
    for number, (strike, after) in enumerate(plan.outside):
        _strike(run, strike, after)
        following = [each for each, _ in plan.outside[number + 1 : number + 2]]
        if strike.happened and not (following and following[0].during):
            run.wait(lambda since=strike.attempt: run.attempt() > since or bool(run.events(Kind.FINISHED)))
    return run


def _strike(run: Run, strike: Strike, after: float) -> None:
    """Do something to a rank or an agent, and start an agent again that has ended by it."""
    if strike.during:
        time.sleep(after)
    there = run.wait(lambda: bool(_victims(run, strike)) and (strike.during or run.step() >= after))
    victims = _victims(run, strike)
    if not there or not victims or run.step() >= STEPS - 1:
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
        run.wait(lambda: time.monotonic() > until)
        os.kill(pid, signal.SIGCONT)
        if run.plan.nodes == 1:
            strike.attempt = -1  # nothing follows: its ranks went on meanwhile
            return
    # One that is given up leaves, and comes back as a new one; the job may be over by then.
    run.wait(lambda: node not in run.agents or bool(run.events(Kind.FINISHED)))
    if node not in run.agents and not run.events(Kind.FINISHED):
        run.start(node)


def _victims(run: Run, strike: Strike) -> list[tuple[int, int]]:
    """Pid and node of whoever is to be hit, if it is there."""
    if strike.kind.endswith("agent"):
        # Of two nodes one has to be there that goes on; which numbers the members have now is theirs to know.
        here = run.agents.get(strike.victim)
        enough = len(run.agents) == run.plan.nodes + run.plan.spares
        return [(here[0], strike.victim)] if here is not None and enough else []
    return [(pid, node) for node in run.agents for rank, pid in run.ranks(node).items() if rank == strike.victim]


# ------------------------------------------------------------------------------------------------------------ judgement

EXPECTED: dict[str, tuple[str, str]] = {
    "kill": (Kind.WORKER_DIED, "killed by SIGKILL"),
    "crash": (Kind.WORKER_DIED, "killed by SIGSEGV"),
    "exception": (Kind.WORKER_DIED, "RuntimeError: --inject exception"),
    "hang": (Kind.WORKER_DIED, "nothing has changed for"),
    "freeze": (Kind.WORKER_DIED, "stopped by a signal"),
    "oom": (Kind.WORKER_DIED, "ran out of memory"),
    "disk-full": (Kind.CHECKPOINT_FAILED, "No space left"),
    "bit-flip": (Kind.CORRUPTED, ""),
    "nan": (Kind.STEP_SKIPPED, ""),
    "SIGKILL to a rank": (Kind.WORKER_DIED, "killed by SIGKILL"),
    "SIGSTOP to a rank": (Kind.WORKER_DIED, "stopped by a signal"),
    "SIGKILL to an agent": (Kind.NODE_LOST, ""),
    "SIGSTOP to an agent": (Kind.NODE_LOST, ""),
}


def judge(run: Run, reference: Callable[[str, tuple[str, ...]], Path]) -> Outcome:
    """What became of a run, once its agents have left."""
    plan = run.plan
    ended = run.to_its_end()
    strikes = [strike for strike, _ in (*plan.injected, *plan.outside)]
    injected = {str(event["fault"]): event for event in run.events(Kind.INJECTED)}
    for strike, text in plan.injected:
        event = next((injected[said] for said in injected if _fault_of(said) == _fault_of(text)), None)
        strike.happened = event is not None
        strike.at = float(event["time"]) if event is not None else 0.0
    for mark in plan.marks:
        strikes.append(Strike(mark, 0, happened=any(text.startswith(mark) for text in injected)))
    happened = [strike for strike in strikes if strike.happened]
    blamed = _causes(run, happened)
    _dead_times(run, happened)
    same = ended and same_weights(run.paths, RunPaths(reference(plan.shape, plan.marks)), not plan.re_cut)
    lost = sum(_lost_steps(run)) if all(strike.kind != "corrupt-checkpoint" for strike in happened) else 0
    return Outcome(plan, happened, ended, same, lost, blamed, run.paths.root)


def _fault_of(text: str) -> tuple[str, frozenset[str]]:
    """A fault as a user wrote it and as the run says it: without what is so anyway."""
    kind, _, rest = text.partition(":")
    return kind, frozenset(rest.split(",")) - {"attempt=1", "phase=forward", "rank=0"}


def _causes(run: Run, strikes: list[Strike]) -> list[str]:
    """Fill in which strikes were named right; what was said against others."""
    said = run.events(Kind.WORKER_DIED, Kind.NODE_LOST, Kind.CHECKPOINT_FAILED, Kind.CORRUPTED, Kind.STEP_SKIPPED)
    left = list(said)
    ordered = sorted(strikes, key=lambda each: each.at)
    pairs = zip(ordered, [*ordered, None][1:], strict=True)
    for strike, following in sorted(pairs, key=lambda pair: pair[0].during):  # first those that have to be named
        lone_agent = run.plan.nodes == 1 and strike.kind.endswith("agent")
        if strike.kind not in EXPECTED or lone_agent:
            continue
        kind, words = EXPECTED[strike.kind]
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
    against = [event for event in left if event["kind"] in (Kind.WORKER_DIED, Kind.NODE_LOST)]
    return [f"{event['kind']}: {event.get('host', '')} rank {event.get('rank')} node {event.get('node')}: "
            f"{event['reason']}" for event in against if not _explained(run, event, strikes)]  # fmt: skip


def _explained(run: Run, event: dict[str, Any], strikes: Sequence[Strike]) -> bool:
    """Whether an event speaks of somebody who was hit, in other words than were expected."""
    number = event.get("node", event.get("rank"))
    of_node = event["kind"] == Kind.NODE_LOST
    return any(
        strike.victim == number and strike.kind.endswith("agent") == of_node and event["time"] >= strike.at - 1.0
        for strike in strikes
    )


def _dead_times(run: Run, strikes: Sequence[Strike]) -> None:
    """From a fault to the first step after it, less a step, where an attempt ended by it."""
    steps = read_steps(run.paths.metrics)
    lines = [line for line in read_lines(run.paths.metrics) if "step_s" in line]
    if not steps:
        return
    step_s = statistics.median(float(step["step_s"]) for step in steps)
    starts = [float(event["time"]) for event in run.events(Kind.ATTEMPT_STARTED)]
    for strike in strikes:
        begun = next((at for at in starts if at > strike.at), None)
        if strike.at == 0.0 or strike.attempt < 0 or begun is None or strike.kind in HARMLESS or strike.during:
            continue
        first = next((float(line["time"]) for line in lines if float(line["time"]) > begun), None)
        if first is not None:
            strike.dead_s = max(0.0, first - strike.at - 2 * step_s)  # a line is written a step late


def _lost_steps(run: Run) -> list[int]:
    """Steps that had been committed when an attempt ended, and that the next one did not begin with."""
    began = {int(event["attempt"]): int(event["step"]) for event in run.events(Kind.RESUMED)}
    lost = []
    for attempt, step in sorted(run.committed.items()):
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

    from phalanx.checkpoint.read import Checkpoint, step_folder

    checkpoint = Checkpoint(step_folder(paths.has_checkpoints, STEPS))
    found = {}
    try:
        for name, (shape, _) in checkpoint.parameters.items():
            found[name] = torch.empty(math.prod(shape), dtype=torch.float64)
            checkpoint.read(name, "param", 0, found[name].numel(), found[name])
    finally:
        checkpoint.close()
    return found


# ------------------------------------------------------------------------------------------------------------------ all


class Series:
    """Runs one after the other in a folder; undisturbed ones are made when they are first compared with."""

    def __init__(self, place: Path) -> None:
        self.place, self.count = place, 0
        self.references: dict[tuple[str, tuple[str, ...]], Path] = {}
        lines = [json.dumps({"text": f"document {i} says hello " * (i % 5 + 6)}) for i in range(200)]
        (place / "text.jsonl").write_text("\n".join(lines) + "\n")
        (place / "recipe.yaml").write_text(RECIPE)

    def reference(self, shape: str, marks: tuple[str, ...]) -> Path:
        if (shape, marks) not in self.references:
            plan = Plan(1 if shape == "1 node" else 2, 0, marks=marks)
            name = "-".join(["calm", shape[0], *marks])
            run = perform(self.place, name, plan)
            assert run.to_its_end(), f"the undisturbed run failed; see {self.place / name}"
            self.references[shape, marks] = run.paths.root
        return self.references[shape, marks]

    def outcome(self, plan: Plan) -> Outcome:
        self.count += 1
        run = perform(self.place, f"run-{self.count:03d}", plan)
        try:
            return judge(run, self.reference)
        finally:
            run.remove()


def is_good(outcome: Outcome) -> bool:
    return outcome.ended and outcome.same and not outcome.steps_lost and not outcome.blamed


def tables(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for each kind of fault and kind of run, then one for all."""
    rows: list[Row] = []
    strikes = [(outcome.plan.shape, strike) for outcome in outcomes for strike in outcome.strikes]
    for shape, kind in sorted({(shape, strike.kind) for shape, strike in strikes}):
        mine = [strike for of, strike in strikes if (of, strike.kind) == (shape, kind)]
        named = [strike.right for strike in mine if strike.right is not None]
        dead = [strike.dead_s for strike in mine if strike.dead_s is not None]
        rows.append(
            {"fault": kind, "on": shape, "times": len(mine), "in a recovery": sum(strike.during for strike in mine),
             "to be named": len(named), "named right": sum(named),
             "dead, s": statistics.median(dead) if dead else None, "longest, s": max(dead, default=None)}
        )  # fmt: skip
    calm = sum(not outcome.strikes for outcome in outcomes)
    rows.append(
        {"runs": len(outcomes), "undisturbed": calm, "faults": len(strikes),
         "came to the last step": sum(outcome.ended for outcome in outcomes),
         "same weights": sum(outcome.same for outcome in outcomes),
         "committed steps lost": sum(outcome.steps_lost for outcome in outcomes),
         "wrongly blamed": sum(len(outcome.blamed) for outcome in outcomes)}
    )  # fmt: skip
    return rows


def checks_of(outcomes: Sequence[Outcome]) -> list[Check]:
    runs = float(len(outcomes))
    named = [strike.right for each in outcomes for strike in each.strikes if strike.right is not None]
    return [
        at_least("runs that came to their last step", sum(each.ended for each in outcomes), runs),
        at_least("runs with the weights of an undisturbed one", sum(each.same for each in outcomes), runs),
        at_most("committed steps lost", float(sum(each.steps_lost for each in outcomes)), 0.0),
        at_most("ranks and nodes wrongly blamed", float(sum(len(each.blamed) for each in outcomes)), 0.0),
        at_least("causes named right", statistics.mean(named) if named else None, RIGHT),
    ]


def main() -> None:
    parser = options("Runs that faults happen to, again and again; what becomes of them, and what they say of it.")
    parser.add_argument("--faults", type=int, help="how many in all (default 200; 10 with --quick)")
    parser.add_argument("--seed", type=int, default=1, help="what is drawn (default 1)")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run is begun after so many (default 60)")
    parser.add_argument("--clean", type=int, help="undisturbed runs, for false alarms (default 10; none with --quick)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder, in which all runs stay")
    given = parser.parse_args()
    faults = given.faults or (10 if given.quick else 200)
    clean = given.clean if given.clean is not None else (0 if given.quick else 10)
    draw, until = random.Random(given.seed), time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="phalanx-faults-") as name:
        if given.keep is not None:
            given.keep.mkdir(parents=True)
        series, outcomes, done = Series(given.keep or Path(name)), [], 0
        plans = [Plan(1 + number % 2, 0) for number in range(clean)]
        while (plans or done < faults) and time.monotonic() < until:
            plan = plans.pop() if plans else draw_plan(draw, faults - done)
            outcome = series.outcome(plan)
            outcomes.append(outcome)
            done += len(outcome.strikes)
            _tell(outcome, done)
    report(result("faults", machine(None, 1), tables(outcomes), checks := checks_of(outcomes)), given.json)
    sys.exit(0 if all(check.holds for check in checks) else 1)


def _tell(outcome: Outcome, done: int) -> None:
    verdict = "well" if is_good(outcome) else "NOT WELL"
    kinds = ", ".join(f"{strike.kind} {strike.victim}" + " (recovering)" * strike.during for strike in outcome.strikes)
    print(f"{done:5} {verdict:8} {outcome.where.name} on {outcome.plan.shape}: {kinds or 'nothing'}", flush=True)
    for strike in outcome.strikes:
        if strike.right is False:
            print(f"      not named: {strike}", flush=True)
    if not is_good(outcome):
        print(f"      ended {outcome.ended}, same {outcome.same}, lost {outcome.steps_lost}, blamed {outcome.blamed}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
