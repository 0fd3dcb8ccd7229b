"""Faults by the hundred: whatever happens to a run, it ends as one that nothing has happened to.

    python3 benchmarks/faults.py [--quick] [--json FILE] [--faults N] [--seed S] [--minutes M] [--clean N]
                                 [--diagnosis [N]]

A small LLaMA trains on the CPU by `phalanx train`, again and again: on two ranks of one node, and on two nodes, which
are agents of their own on this machine. Each run gets a few faults, drawn by a seed: some that it is asked to make
itself (`--inject`), others from outside by signals to ranks and agents, and some of both while it is still recovering
from the one before. Each run has to come to its last step, to lose no step that was committed, and to end with the
weights of an undisturbed run: the same files where the layout stayed, the same to 1e-9 in float64 where it did not.
Then there is what the run said of each fault. With `--diagnosis` runs have one fault each, of every kind so often, or
none, and what they say is all that is looked at. docs/benchmarks.md says how to read the figures.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phalanx.elastic.node import agent

if __name__ == "__main__":  # first of all: whoever forks agents must have no thread of a numerical library
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

from benchmarks.faulty_runs import (
    CHANGING,
    DEADLY,
    HARMLESS,
    OUTSIDE,
    RECIPE,
    Outcome,
    Plan,
    draw_plan,
    judge,
    perform,
    plan_alone,
)
from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result
from phalanx.core.run_paths import RunPaths

RIGHT = 0.95  # what is asked of the causes that are named
CLEAN = 5  # undisturbed runs with --diagnosis, for each run of a kind


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
            run.end()


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
    parser.add_argument(
        "--clean",
        type=int,
        help="undisturbed runs, for false alarms (default 10; none with --quick; 100 with --diagnosis)",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder, in which all runs stay")
    parser.add_argument(
        "--diagnosis", type=int, nargs="?", const=20, metavar="N",
        help=f"instead: N runs (20) with one fault each, of every kind, and {CLEAN} times as many undisturbed ones",
    )  # fmt: skip
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # with all that was started
    with tempfile.TemporaryDirectory(prefix="phalanx-faults-") as name:
        if given.keep is not None:
            given.keep.mkdir(parents=True)
        series, outcomes, done = Series(given.keep or Path(name)), [], 0
        for plan in alone(given) if given.diagnosis is not None else mixed(given):
            if time.monotonic() > until:
                break
            outcomes.append(series.outcome(plan))
            done += len(outcomes[-1].strikes)
            _tell(outcomes[-1], done)
    report(result("faults", machine(None, 1), tables(outcomes), checks := checks_of(outcomes)), given.json)
    sys.exit(0 if all(check.holds for check in checks) else 1)


def mixed(given: argparse.Namespace) -> Iterator[Plan]:
    """Undisturbed runs, then runs with several faults each, as many as are asked for in all."""
    left = given.faults or (10 if given.quick else 200)
    clean = given.clean if given.clean is not None else (0 if given.quick else 10)
    draw = random.Random(given.seed)
    yield from [Plan(1 + number % 2, 0) for number in range(clean)]
    while left > 0:
        plan = draw_plan(draw, left)
        yield plan
        left -= sum(strike.happened for strike, _ in (*plan.injected, *plan.outside)) + len(plan.marks)


def alone(given: argparse.Namespace) -> Iterator[Plan]:
    """Runs with one fault each, of every kind so often, on one node and on two, among undisturbed ones."""
    times = 1 if given.quick else given.diagnosis
    draw = random.Random(given.seed)
    kinds = (*DEADLY, *HARMLESS, *CHANGING, *OUTSIDE)
    plans = [plan_alone(kind, 1 + number % 2, draw) for number in range(times) for kind in kinds]
    clean = given.clean if given.clean is not None else CLEAN * times
    plans += [Plan(1 + number % 2, 0, alone=True) for number in range(clean)]
    draw.shuffle(plans)
    yield from plans


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
        events = RunPaths(outcome.where).events
        for file in (*sorted(outcome.where.parent.glob(f"{outcome.where.name}-*.txt")), events):
            print(f"      the end of {file.name}:", *_last_lines(file), sep="\n        ", flush=True)


def _last_lines(file: Path, count: int = 8) -> list[str]:
    """What a command said last, or the last events of a run: of what ended badly the folder is gone afterwards."""
    return file.read_text(errors="replace").splitlines()[-count:] if file.exists() else ["there is no such file"]


if __name__ == "__main__":
    main()
