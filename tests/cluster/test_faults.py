"""A minute of benchmarks/faults.py, with faults that are always the same: signals to ranks and agents from outside,
some while the run recovers, and faults that it is asked to make."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import faults
from benchmarks.faults import Series
from benchmarks.faulty_runs import OUTSIDE, Plan, Strike
from phalanx.faults import parse
from phalanx.records import Placement
from tests.helpers import run_ranks

KILL_RANK, _, KILL_AGENT, _ = OUTSIDE


def struck(kind: str, victim: int, after: float, during: bool = False) -> tuple[Strike, float]:
    return Strike(kind, victim, during=during), after


def asked(text: str, during: bool = False) -> tuple[Strike, str]:
    (fault,) = parse([text])
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
            asked("exception:rank=0,attempt=2,step=7,phase=data", during=True),
            asked("disk-full:rank=1,attempt=3,step=9"),
            asked("corrupt-checkpoint:rank=0,attempt=3,step=12"),
            asked("bit-flip:rank=1,attempt=3,step=15"),
            asked("oom:rank=0,attempt=3,step=20,phase=backward"),
        ],
    ),
}


def happen(placement: Placement, folder: str, name: str) -> dict[str, Any]:
    """One run and what became of it, and the undisturbed one that it is compared with."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # this process is a rank of the harness
        os.environ.pop(variable, None)
    outcome = Series(Path(folder)).outcome(PLANS[name])
    return {**asdict(outcome), "plan": None, "where": str(outcome.where), "good": faults.is_good(outcome)}


@pytest.mark.parametrize("name", PLANS)
def test_whatever_happens_the_run_ends_as_if_it_had_not(name: str, tmp_path: Path) -> None:
    (found,) = run_ranks(happen, 1, timeout_s=240, folder=str(tmp_path), name=name)
    plan = PLANS[name]
    assert found["good"], found
    assert len(found["strikes"]) >= len(plan.outside or [*plan.injected, *plan.marks]) - 1, found  # one may come late
    assert all(strike["right"] is not False for strike in found["strikes"]), found
    assert sum(strike["right"] is True for strike in found["strikes"]) >= 2, found
