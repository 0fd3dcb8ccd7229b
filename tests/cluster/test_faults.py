"""Two minutes of benchmarks/faults.py. Some faults are always the same: signals to ranks and agents from outside, some
while the run recovers, and faults that it is asked to make. Others are drawn: on CI always by the same seeds, elsewhere
by new ones, and what fails says its seed."""

import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import faults, faulty_runs
from benchmarks.faults import Series
from benchmarks.faulty_runs import OUTSIDE, Outcome, Plan, Strike, draw_plan
from phalanx.core.faults import parse_faults
from phalanx.core.placement import Placement
from tests.helpers import ALL, run_ranks, some

KILL_RANK, _, KILL_AGENT, _ = OUTSIDE
DRAWN = 8  # runs, of about five faults each
AT_A_TIME = 2  # since they wait for most of their time


def struck(kind: str, victim: int, after: float, during: bool = False) -> tuple[Strike, float]:
    return Strike(kind, victim, during=during), after


def asked(text: str, during: bool = False) -> tuple[Strike, str]:
    (fault,) = parse_faults([text])
    return Strike(fault.kind, fault.rank, attempt=fault.attempt, during=during), text


PLANS = {
    "signals on one node": Plan(
        1,
        0,
        outside=[
            struck(KILL_RANK, 1, 4),
            struck(KILL_RANK, 0, 0.05, during=True),
            struck(KILL_AGENT, 0, 12),
            struck(KILL_RANK, 0, 20),
        ],
    ),
    "signals on two nodes": Plan(2, 0, outside=[struck(KILL_AGENT, 0, 4), struck(KILL_RANK, 1, 14)]),
    "on request": Plan(
        1,
        0,
        marks=("nan",),
        injected=[
            asked("crash:rank=1,step=7,phase=update"),
            asked("exception:rank=0,attempt=2,step=8,phase=data", during=True),  # step 7 may just have been committed
            asked("disk-full:rank=1,attempt=3,step=9"),
            asked("corrupt-checkpoint:rank=0,attempt=3,step=12"),
            asked("bit-flip:rank=1,attempt=3,step=15"),
            asked("oom:rank=0,attempt=3,step=20,phase=backward"),
        ],
    ),
}


def series(folder: str) -> Series:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # this process is a rank of the harness
        os.environ.pop(variable, None)
    faulty_runs.LOOK_S = 0.02  # a step; who looks more often takes a core from what it looks at
    return Series(Path(folder))


def told(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "plan": None, "where": str(outcome.where), "good": faults.is_good(outcome)}


def happen(placement: Placement, folder: str, name: str) -> dict[str, Any]:
    """One run and what became of it, and the undisturbed one that it is compared with."""
    return told(series(folder).outcome(PLANS[name]))


def happen_drawn(placement: Placement, folder: str, seeds: list[int]) -> list[dict[str, Any]]:
    """The runs of this rank's part of the seeds, one after the other, and what became of them."""
    mine = Path(folder, str(placement.rank))
    mine.mkdir()
    made = series(str(mine))
    found = []
    for seed in seeds[placement.rank :: placement.world]:
        plan = draw_plan(random.Random(seed), 9)
        found.append({"seed": seed, **told(made.outcome(plan)), "drawn": len(plan.injected or plan.outside)})
    return found


# What is asked for, tests/dist/test_injection.py has as well, and nodes that are lost, test_losses.py.
@pytest.mark.parametrize("name", some(PLANS, 0))
def test_whatever_happens_the_run_ends_as_if_it_had_not(name: str, tmp_path: Path) -> None:
    (found,) = run_ranks(happen, 1, timeout_s=240, folder=str(tmp_path), name=name)
    plan = PLANS[name]
    assert found["good"], found
    assert len(found["strikes"]) >= len(plan.outside or [*plan.injected, *plan.marks]) - 1, found  # one may come late
    assert all(strike["right"] is not False for strike in found["strikes"]), found
    assert sum(strike["right"] is True for strike in found["strikes"]) >= 2, found


@pytest.mark.skipif(not ALL, reason="it takes minutes: make test-all")
def test_whatever_is_drawn_the_run_ends_as_if_it_had_not(tmp_path: Path) -> None:
    """A seed's run again: `draw_plan(random.Random(seed), 9)`."""
    first = 0 if os.environ.get("CI") else random.SystemRandom().randrange(2**31)
    seeds = list(range(first, first + DRAWN))
    parts = run_ranks(happen_drawn, AT_A_TIME, timeout_s=480, folder=str(tmp_path), seeds=seeds)
    found = [each for part in parts for each in part]
    assert sorted(each["seed"] for each in found) == seeds
    assert [each for each in found if not each["good"]] == []
    strikes = [{"seed": each["seed"], **strike} for each in found for strike in each["strikes"]]
    print(f"{len(strikes)} faults in {DRAWN} runs, seeds {first} to {seeds[-1]}")
    # Some come late: the run is done, or whom they would hit is not there.
    assert len(strikes) >= sum(each["drawn"] for each in found) / 2, found
    named = [strike for strike in strikes if strike["right"] is not None]
    wrong = [strike for strike in named if not strike["right"]]
    assert len(wrong) <= (1 - faults.RIGHT) * len(named), wrong
