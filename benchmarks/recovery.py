"""How long a run takes until it goes on after something has failed, beside torchrun and torchft, and what that costs.

    python3 benchmarks/recovery.py [--quick] [--json FILE] [--on local nodes slurm] [--kinds KIND ...] [--mtbf S ...]

A LLaMA of 10 million parameters trains on the CPU by `phalanx train`, tokenizer, loader, checkpoints and all. On this
machine (`local`) ranks are killed by SIGKILL, and the same recipe runs under torchrun, which starts its ranks again
too, with a checkpoint every 10 steps; a trainer that uses torchft trains the same, where that is installed. On two
nodes with a spare, joined by 1 Gbit/s (`nodes`: network namespaces; `slurm`: a real Slurm in namespaces; both need
root), nodes crash, lose their power, freeze, and lose the one that leads. With `--mtbf` faults come by chance, so many
seconds apart, and what counts is how many steps are committed.
docs/benchmarks.md says how to read the figures.
"""

import argparse
import contextlib
import functools
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phalanx.elastic.node import agent

if __name__ == "__main__":  # first of all: whoever forks ranks must have no thread of a numerical library
    agent.preload(
        (
            "numpy",
            "torch",
            "torch._dynamo",
            "phalanx.cli.main",
            "phalanx.trainer.train_rank",
            "phalanx.launch.run",
        )
    )

from benchmarks import node_faults, torchft_peer
from benchmarks.committed_steps import cost
from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result, spread
from benchmarks.node_faults import MBIT, Place
from benchmarks.started import Run, children, start
from benchmarks.torchft_peer import TorchFt
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.recovery import inventory, state_file

RECIPE = """
model: {{hidden: {hidden}, layers: {layers}, heads: {heads}, intermediate: {intermediate}}}
data: {{source: stdlib, tokenizer_vocab: 4096, seq_len: 128, cache: {cache}}}
train: {{steps: 100000, global_batch: {batch}, micro_batch: 2, dtype: fp32, compile: false, eval_sequences: 0}}
balance: {{batch: even}}
checkpoint: {{every: {every}, keep: 1}}
resilience: {{max_restarts: 1000, in_memory_checkpoints: {memory}}}
report: {{tensorboard: false}}
"""
MODELS = {
    "10M": {"hidden": 288, "layers": 8, "heads": 6, "intermediate": 768},
    "100M": {"hidden": 800, "layers": 12, "heads": 10, "intermediate": 2136},
}
OURS, TORCHRUN, TORCHFT = "Phalanx", "torchrun", "torchft"
LOCAL = "local"
KILL, CRASH, POWER, FREEZE, LEADER, COST = KINDS = ("kill", "crash", "power-loss", "freeze", "leader", "cost")
ON = {LOCAL: (KILL, COST), "nodes": KINDS[:-1], "slurm": KINDS[:-1]}
RATED = (KILL, CRASH, POWER)  # those of which steps are counted with --mtbf

# What is asked.
DEAD_S, PART_OF_TORCHRUN, COST_RATIO, STALL_S, FENCED_S = 0.5, 1 / 8, 1.02, 0.05, 1.0
HEARTBEAT_S = 1.0  # the default of resilience.heartbeat_timeout_s
SAME_LOSSES, PART_OF_TORCHFT = 1e-4, 1 / 4
STEPS_COMMITTED = {60.0: {KILL: 0.98, CRASH: 0.96, POWER: 0.94}, 15.0: {KILL: 0.94, CRASH: 0.85, POWER: 0.78}}
LOADED = 3.0  # times as long, on a machine that does other work as well
LOOK_S = 0.02  # between two looks at what is done
BACK_S = 3.0  # after which a node that was lost is started again
SETTLED_S = 3.0  # what one that is a member again gets to prepare its part
THAWED_S = 3.0  # for which a node is frozen, beyond its recovery


@dataclass(frozen=True)
class Size:
    """`times` that each fault comes, so many steps `apart`; `pairs` of steps for the cost; `seconds` of faults by
    chance."""

    times: int = 10
    apart: int = 6
    pairs: int = 60
    seconds: float = 600.0


QUICK = Size(times=3, apart=4, pairs=15, seconds=45.0)


def tell(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def recipe(model: str, cache: Path, ranks: int, every: int, memory: str = "true") -> str:
    return RECIPE.format(cache=cache, batch=2 * ranks, every=every, memory=memory, **MODELS[model])


# --------------------------------------------------------------------------------------------------------- this machine


def begin(system: str, folder: Path, model: str, ranks: int) -> Run:
    """Start a run on this machine that would go on for ever; one of torchft behind another that has prepared it."""
    if system == TORCHFT:
        prepared = next(folder.parent.glob("*/run/config.yaml")).parent
        folder.mkdir()
        return torchft_peer.begin(folder, ranks, RunPaths(prepared), folder.parent / "cache")
    run, ours = Run(RunPaths(folder / "run")), system == OURS
    folder.mkdir(parents=True)
    text = recipe(model, folder.parent / "cache", ranks, 100 if ours else 10, "true" if ours else "auto")
    (folder / "recipe.yaml").write_text(text)
    words = ["train", "recipe.yaml", "--run-dir", str(run.paths.root)]
    if ours:
        run.commands[0] = start([*words, "--ranks", str(ranks)], folder, folder / "output.txt")
        return run
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000", "--monitor-interval", "0.1"]
    torchrun += ["--nproc-per-node", str(ranks), "-m", "phalanx", *words]
    # Without it torchrun's own restart fails where its store is kept.
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run.commands[0] = start(torchrun, folder, folder / "output.txt", warm=False, environment=own)
    return run


def kills(system: str, run: Run, size: Size, seed: int) -> Iterator[tuple[float, float, float]]:
    """Kill a rank again and again; (seconds until a step was committed that was not before, until a run that lost
    steps is as far as it was, until a step had all of its batch again), all without the steps themselves."""
    draw = random.Random(seed)
    for number in range(size.times):
        run.reach(run.recorded()[1] + size.apart)
        time.sleep(draw.uniform(0.0, 0.5))
        if system == OURS:
            victim = draw.choice(sorted(run.commands[0].ranks().values()))
            dead_s, _ = recover(run, functools.partial(os.kill, victim, signal.SIGKILL))
            again_s = whole_s = dead_s
        elif isinstance(run, TorchFt):
            dead_s, whole_s = torchft_peer.kill(run, draw)
            again_s = dead_s  # those that are left have all that was committed
        else:
            dead_s, again_s = by_torchrun(run, draw)
            whole_s = dead_s
        tell(f"{system}: kill {number + 1} of {size.times}: dead for {dead_s:.2f} s, whole after {whole_s:.2f} s")
        yield dead_s, again_s, whole_s


def by_torchrun(run: Run, draw: random.Random) -> tuple[float, float]:
    """Kill a rank; as above, of a run whose steps are known by their lines alone."""
    attempt, reached = run.recorded()
    begun = time.time()
    os.kill(draw.choice(children(run.commands[0].pid)), signal.SIGKILL)
    step_s = run.step_s()
    # A line is written when the next step has come to its backward pass.
    dead_s = run.wait(lambda: run.recorded()[0] > attempt) - begun - 2 * step_s
    assert run.recorded()[1] <= reached + 1, "the run has gone on as if nothing had happened"
    return dead_s, run.wait(lambda: run.recorded()[1] > reached) - begun - 2 * step_s


def recover(run: Run, harm: Callable[[], object]) -> tuple[float, int]:
    """Do some harm; seconds until a step is committed that was not before, less the step itself, and how many steps
    are lost that the harm found to be safe."""
    attempt, before = run.attempt(), run.committed()
    safe = min(before, run.replicated()) if run.nodes > 1 else before
    begun, step_s = time.time(), run.step_s()
    harm()
    # What was committed while it was on its way has not been lost.
    run.wait(lambda: run.attempt() > attempt)
    before = max(before, run.committed())
    if run.nodes > 1:  # a step that no second node had counts for nothing, and is the first new one if walked again
        run.wait(lambda: resumed(run, attempt))
        before = resumed(run, attempt)[0]
        # Until the files no longer hold the former, or, seen too late for that, until a line tells of the latter.
        run.wait(lambda: run.committed() <= before or run.recorded()[0] > attempt)
    took = run.wait(lambda: run.committed() > before) - begun - step_s
    began = resumed(run, attempt)
    return took, max(0, safe - (began[0] if began else 0))


def resumed(run: Run, attempt: int) -> list[int]:
    """The steps that attempts after this one have gone on from."""
    return [int(event["step"]) for event in run.events(EventKind.RESUMED) if int(event["attempt"]) > attempt]


def on_this_machine(folder: Path, systems: Sequence[str], given: argparse.Namespace, size: Size) -> list[Row]:
    """Kills of all systems, one after the other."""
    rows: list[Row] = []
    for system in systems:
        tell(f"{system} on this machine, {given.ranks} ranks")
        with begin(system, folder / system, given.parameters, given.ranks).ending() as run:
            run.reach(12 if system == TORCHRUN else 3)  # behind its first checkpoint
            before = RunPaths(folder / OURS / "run")
            differ = torchft_peer.differ(run, before) if isinstance(run, TorchFt) else None
            found = list(kills(system, run, size, given.seed))
            step_s = run.step_s()
        dead, again, whole = zip(*found, strict=True)
        low, middle, high = spread(dead)
        rows.append(
            {"after kill -9 of one rank": system, "parameters": given.parameters, "ranks": given.ranks,
             "step, s": step_s, "dead, s": middle, "lower": low, "upper": high, "longest": max(dead),
             "until as far as before, s": statistics.median(again), "until whole, s": statistics.median(whole),
             "losses differ by": differ}
        )  # fmt: skip
    return rows


# ---------------------------------------------------------------------------------------------------------------- nodes


def shard_s(run: Run) -> float:
    """What a cable takes to carry the state of a node's rank."""
    found = [
        facts
        for folder in run.folders()
        for facts in inventory.read_state_files(folder, state_file.compute_run_id(run.paths.events))
    ]
    return max(facts.slot_bytes for facts in found) * 8 / (MBIT * 1e6)


def strike(place: Place, kind: str, draw: random.Random, struck: list[int]) -> None:
    """Have something happen to a node that trains, which is noted in `struck` before."""
    leader, seated = place.leader(), place.seated()
    others = [node for node in seated if node != leader] or seated
    node = leader if kind == LEADER else draw.choice(others)
    struck.append(node)
    match kind:
        case "kill":
            os.kill(draw.choice(sorted(place.ranks(node).values())), signal.SIGKILL)
        case "crash":
            place.crash(node)
        case "freeze":
            place.signal_all(node, signal.SIGSTOP)
        case _:
            place.cut(node)
            place.crash(node)


def thaw(place: Place, node: int, ranks: Sequence[int]) -> float:
    """Let a frozen node go on: seconds until all of its ranks have been ended."""
    time.sleep(THAWED_S)
    begun = time.time()
    place.signal_all(node, signal.SIGCONT)
    return place.run.wait(lambda: not any(_lives(pid) for pid in ranks), patience_s=60.0) - begun


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def settle(place: Place, apart: int) -> None:
    """Wait until all nodes that there are have their part in the run, and some steps are done."""
    if place.returns:
        place.run.wait(place.whole)
        time.sleep(SETTLED_S)
    place.run.reach(place.run.recorded()[1] + apart)


def harm(place: Place, kinds: Sequence[str], times: int, size: Size, draw: random.Random) -> Iterator[Row]:
    """Each kind of fault so often; a row for each one that happened."""
    for kind in [kind for kind in kinds for _ in range(times)]:
        settle(place, size.apart)
        time.sleep(draw.uniform(0.0, 0.5))
        pids = {node: sorted(place.ranks(node).values()) for node in place.seated()}
        struck: list[int] = []
        dead_s, lost = recover(place.run, functools.partial(strike, place, kind, draw, struck))
        fenced_s = thaw(place, struck[0], pids[struck[0]]) if kind == FREEZE else None
        if kind != KILL and place.returns:
            place.bring_back(struck[0])
        told = "" if fenced_s is None else f", fenced {fenced_s:.2f} s after its thaw"
        tell(f"{place.name}: {kind} of node {struck[0]}: dead for {dead_s:.2f} s{told}")
        yield {"kind": kind, "dead_s": dead_s, "lost": lost, "fenced_s": fenced_s}


def on_nodes(
    where: str, folder: Path, model: str, kinds: Sequence[str], times: int, size: Size, draw: random.Random
) -> list[Row]:
    """What became of each kind of fault on nodes."""
    text = recipe(model, folder.parent / "cache", node_faults.TRAINING, 100)
    found: list[Row] = []
    if where == node_faults.Namespaces.name:
        with node_faults.namespaces(folder, text) as place:
            tell(f"{place.name}: {place.total} nodes begin")
            found += harm(place, kinds, times, size, draw)
            step_s, shard = place.run.step_s(), shard_s(place.run)
    else:  # a job of Slurm that loses a node has lost it for good, so each round is another job
        deadly = sum(kind != KILL for kind in kinds)
        for number in range(times):
            with node_faults.slurm(folder / str(number), text, max(1, deadly)) as of_slurm:
                tell(f"{of_slurm.name}: {of_slurm.total} nodes begin, job {number + 1} of {times}")
                found += harm(of_slurm, kinds, 1, size, draw)
                step_s, shard = of_slurm.run.step_s(), shard_s(of_slurm.run)
    rows: list[Row] = []
    for kind in kinds:
        mine = [each for each in found if each["kind"] == kind]
        low, middle, high = spread([each["dead_s"] for each in mine])
        fenced = [each["fenced_s"] for each in mine if each["fenced_s"] is not None]
        rows.append(
            {"after": kind, "on": where, "parameters": model, "times": len(mine), "step, s": step_s, "dead, s": middle,
             "lower": low, "upper": high, "longest": max(each["dead_s"] for each in mine),
             "asked, s": asked(kind, shard, model), "steps lost": sum(each["lost"] for each in mine),
             "fenced, s": max(fenced, default=None)}
        )  # fmt: skip
    return rows


def asked(kind: str, shard: float, model: str = "10M") -> float | None:
    """Seconds that a run on nodes may be dead, where a cable carries a node's state in `shard` seconds."""
    if kind == KILL or model != "10M":
        return None
    return 1.0 + shard + (0.0 if kind == CRASH else HEARTBEAT_S)


# ----------------------------------------------------------------------------------------------------- faults by chance


def times_of(mtbf_s: float, seconds: float, seed: int) -> list[float]:
    """When faults come: the same trace for all."""
    draw = random.Random(seed)
    at = itertools.accumulate(draw.expovariate(1 / mtbf_s) for _ in itertools.count())
    return list(itertools.takewhile(lambda each: each < seconds, at))


def under_faults(
    run: Run, size: Size, trace: Sequence[float], done: Callable[[], int], turn: Callable[[bool], bool]
) -> tuple[list[tuple[float, int]], list[float], tuple[float, float]]:
    """When which step was done first, and when faults happened, in seconds; and when that began and ended, in seconds
    since the epoch. `turn(due)` does what is to be done and says whether the fault that is due has happened."""
    begun, since, left, faults = time.monotonic(), time.time(), list(trace), list[float]()
    moments = [(0.0, done())]

    def another() -> bool:
        now = time.monotonic() - begun
        if turn(bool(left) and now >= left[0]):
            left.pop(0)
            faults.append(now)
        if (step := done()) > moments[-1][1]:
            moments.append((time.monotonic() - begun, step))
            return True
        return now > size.seconds

    while time.monotonic() - begun < size.seconds:
        run.wait(another, look_s=LOOK_S)
    return moments, faults, (since, time.time())


def part_of(
    moments: Sequence[tuple[float, int]], faults: Sequence[float], until: float, partial: Set[int] = frozenset()
) -> float:
    """The part of the steps that would have been done by `until` had nothing happened. Not all ranks had a part in
    those of `partial`.

    What a step takes undisturbed is the mean of all between whose end and that of the one before nothing happened, nor
    since the one before that, and that all ranks had a part in, as in the one before: those in the midst of the faults,
    so that a machine that is slower for a minute is so for both.
    """
    steps, undisturbed_s, undisturbed = moments[-1][1] - moments[0][1], 0.0, 0
    for (earlier, first), (before, at), (now, step) in zip(moments, moments[1:], moments[2:], strict=False):
        alone = not any(earlier <= fault < now for fault in faults)
        if alone and partial.isdisjoint(range(first + 1, step + 1)):
            undisturbed_s, undisturbed = undisturbed_s + now - before, undisturbed + step - at
    assert undisturbed, "faults came so fast that no two steps were left alone"
    return steps * undisturbed_s / undisturbed / until


def by_chance(where: str, system: str, kind: str, mtbf_s: float, folder: Path, given: argparse.Namespace) -> Row:
    """A run with faults of a kind by chance."""
    size: Size = given.size
    trace = times_of(mtbf_s, size.seconds, given.seed)
    draw, cache = random.Random(given.seed), folder.parent / "cache"
    tell(f"{system} on {where}: {kind}, {len(trace)} times in {size.seconds:g} s")
    with contextlib.ExitStack() as held:
        if where == LOCAL:
            run = held.enter_context(begin(system, folder, given.parameters, given.ranks).ending())
            done = run.committed if system != TORCHRUN else lambda: run.recorded()[1]

            def turn(due: bool) -> bool:
                ranks = run.commands[0].ranks()
                if system == TORCHRUN:
                    ranks = dict(enumerate(children(run.commands[0].pid)))
                if due and ranks:
                    os.kill(draw.choice(sorted(ranks.values())), signal.SIGKILL)
                return due and bool(ranks)
        else:
            text = recipe(given.parameters, cache, node_faults.TRAINING, 100)
            place = held.enter_context(node_faults.namespaces(folder, text))
            run, done, away = place.run, place.run.committed, dict[int, float]()

            def turn(due: bool) -> bool:
                for node, since in list(away.items()):
                    if time.monotonic() > since + BACK_S:
                        del away[node]
                        place.bring_back(node)
                if not (due and not away and place.whole() and len(place.seated()) == node_faults.TRAINING):
                    return False
                struck: list[int] = []
                strike(place, kind, draw, struck)
                if kind != KILL:
                    away[struck[0]] = time.monotonic()
                return True

        highest = 0

        def furthest() -> int:
            nonlocal highest
            highest = max(highest, done())
            return highest

        run.reach(5)
        moments, faults, window = under_faults(run, size, trace, furthest, turn)
        part, happened = part_of(moments, faults, size.seconds, run.partial()), len(faults)
        sequences = part * run.filled(*window)
    target = STEPS_COMMITTED.get(mtbf_s, {}).get(kind) if system == OURS else None
    tell(f"{system} on {where}: {kind} every {mtbf_s:g} s: {part:.1%} of the steps, {happened} faults")
    return {"steps committed by": system, "on": where, "fault": kind, "every, s": mtbf_s, "seconds": size.seconds,
            "faults": happened, "of an undisturbed run's": part, "asked": target,
            "of its sequences": sequences}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ all


def checks_of(rows: Sequence[Row], loaded: float) -> list[Check]:
    """What is asked of the figures; times on a loaded machine are `loaded` times as long."""
    checks: list[Check] = []
    local = {row["after kill -9 of one rank"]: row for row in rows if "after kill -9 of one rank" in row}
    if local and local[OURS]["parameters"] == "10M":
        checks.append(at_most("seconds dead after kill -9 of a rank", local[OURS]["dead, s"], loaded * DEAD_S))
        ratio = local[OURS]["dead, s"] / local[TORCHRUN]["dead, s"]
        checks.append(at_most("of torchrun's", ratio, PART_OF_TORCHRUN))
    if TORCHFT in local:
        same = local[TORCHFT]["losses differ by"]
        checks.append(at_most("relative difference of torchft's first losses", same, SAME_LOSSES))
        ratio = local[OURS]["until whole, s"] / local[TORCHFT]["until whole, s"]
        checks.append(at_most("of torchft's, until a step has all of its batch", ratio, PART_OF_TORCHFT))
    chances = {(row["on"], row["fault"], row["every, s"], row["steps committed by"]): row["of its sequences"]
               for row in rows if "steps committed by" in row}  # fmt: skip
    for (where, fault, every, system), part in chances.items():
        if system != OURS:
            what = f"of the sequences at a {fault} every {every:g} s on {where}, beside {system}"
            checks.append(at_least(what, chances[where, fault, every, OURS], part))
    for row in rows:
        if row.get("asked, s") is not None:
            what = f"seconds dead after {row['after']} on {row['on']}"
            checks.append(at_most(what, row["dead, s"], loaded * row["asked, s"]))
        if "steps lost" in row:
            checks.append(at_most(f"steps lost by {row['after']} on {row['on']}", float(row["steps lost"]), 0.0))
        if row.get("fenced, s") is not None:
            what = f"seconds until a thawed node has ended its ranks, on {row['on']}"
            checks.append(at_most(what, row["fenced, s"], loaded * FENCED_S))
        if row.get("asked") is not None:
            what = f"of the steps committed at a {row['fault']} every {row['every, s']:g} s on {row['on']}"
            checks.append(at_least(what, row["of an undisturbed run's"], row["asked"]))
        if "every step committed" in row:
            what = "a step with every step committed, over one without"
            checks.append(at_most(what, row["ratio"], COST_RATIO))
            what = "seconds that a checkpoint on the disk stalls training"
            checks.append(at_most(what, row["a save stalls, s"], STALL_S))
    return checks


def parsed() -> argparse.Namespace:
    parser = options("Time until a run goes on after something failed, and what it costs to be ready for it.")
    parser.add_argument("--on", nargs="+", choices=ON, help="where (default: wherever it can; local with --quick)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="what happens, or is measured (default: all)")
    parser.add_argument("--mtbf", nargs="+", type=float, metavar="S", help="instead: faults by chance, so far apart")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default 2)")
    parser.add_argument("--times", type=int, help="of each kind (default 10; 3 with --quick; on nodes 5 and 1)")
    parser.add_argument("--seconds", type=float, help="of faults by chance (default 600; 45 with --quick)")
    parser.add_argument("--parameters", choices=MODELS, default="10M", help="of the model (default 10M)")
    parser.add_argument("--seed", type=int, default=1, help="what is drawn (default 1)")
    parser.add_argument("--loaded", action="store_true", help="others compute too: ask for times three times as long")
    given = parser.parse_args()
    given.size = QUICK if given.quick else Size()
    if given.seconds is not None:
        given.size = Size(**{**vars(given.size), "seconds": given.seconds})
    missing = {where: why for where in ON if where != LOCAL and (why := node_faults.why_not(where)) is not None}
    if given.on is None:
        given.on = [LOCAL] if given.quick else [where for where in ON if where not in missing]
    if given.mtbf:
        given.on = [where for where in given.on if where != node_faults.Slurm.name] or parser.error(
            "--mtbf is for --on local and --on nodes: a job of Slurm that loses a node has lost it for good"
        )
    for where in given.on:
        if where in missing:
            parser.error(f"--on {where}: {missing[where]}")
    return given


def main() -> None:
    given = parsed()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # with all that was started
    size: Size = given.size
    rows: list[Row] = []
    systems, missing = [OURS, TORCHRUN, TORCHFT], torchft_peer.why_not()
    if missing is not None:
        systems.remove(TORCHFT)
        tell(f"not measured: {missing}")
    with tempfile.TemporaryDirectory(prefix="phalanx-recovery-") as name:
        folder, draw = Path(name), random.Random(given.seed)
        for mtbf_s in given.mtbf or ():
            kinds = [kind for kind in RATED if kind in (given.kinds or RATED)]
            places = [(where, kind) for where in given.on for kind in kinds if where == "nodes" or kind == KILL]
            for where, kind in places:
                for system in systems if where == LOCAL else (OURS,):
                    of = folder / f"{where}-{system}-{kind}-{mtbf_s:g}"
                    rows.append(by_chance(where, system, kind, mtbf_s, of, given))
        for where in given.on if not given.mtbf else ():
            kinds = [kind for kind in ON[where] if kind in (given.kinds or KINDS)]
            if where != LOCAL and kinds:
                times = given.times or (1 if given.quick else 5)
                rows += on_nodes(where, folder / where, given.parameters, kinds, times, size, draw)
                continue
            if KILL in kinds:
                counted = Size(**{**vars(size), "times": given.times or size.times})
                rows += on_this_machine(folder, systems, given, counted)
            if COST in kinds:
                tell("what a committed step costs")
                if not (folder / OURS).exists():
                    with begin(OURS, folder / OURS, given.parameters, given.ranks).ending() as run:
                        run.reach(2)
                rows += cost(folder, given.ranks, size.pairs, RunPaths(folder / OURS / "run"))
    checks = checks_of(rows, LOADED if given.loaded else 1.0)
    report(result("recovery", machine(None, 1), rows, checks), given.json)
    sys.exit(0 if all(check.holds for check in checks) else 1)


if __name__ == "__main__":
    main()
