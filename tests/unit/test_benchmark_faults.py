"""The benchmarks of faults and of heartbeats: what is drawn can happen, and what went wrong is counted."""

import argparse
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import faults as benchmark
from benchmarks import faulty_runs, heartbeats
from benchmarks.faulty_runs import CHANGING, OUTSIDE, STEPS, Outcome, Plan, Strike
from phalanx.core import faults
from phalanx.core.faults import KINDS

INSIDE = KINDS.keys() - {"node-down"}  # for which an agent is killed from outside


@given(seed=st.integers(0, 10_000), most=st.integers(1, 9))
def test_what_is_drawn_can_happen(seed: int, most: int) -> None:
    plan = faulty_runs.draw_plan(random.Random(seed), most)
    assert plan == faulty_runs.draw_plan(random.Random(seed), most)
    texts = [text for _, text in plan.injected] + [CHANGING[mark] for mark in plan.marks]
    found = faults.parse_faults(texts)
    faults.check_faults(found, 2, STEPS, local=True)
    assert len(plan.injected) + len(plan.outside) <= most
    injected = found[: len(plan.injected)]
    assert [(each.kind, each.rank, each.attempt) for each in injected] == [
        (strike.kind, strike.victim, strike.attempt) for strike, _ in plan.injected
    ]
    places = [(each.attempt, each.step) for each in injected]
    assert places == sorted(places)
    assert all(strike.kind in OUTSIDE for strike, _ in plan.outside)
    assert plan.nodes == 2 or not (plan.spares or plan.shrinks)


def test_every_kind_of_fault_is_drawn() -> None:
    plans = [faulty_runs.draw_plan(random.Random(seed), 9) for seed in range(200)]
    drawn = {strike.kind for plan in plans for strike, _ in (*plan.injected, *plan.outside)}
    assert drawn | {mark for plan in plans for mark in plan.marks} == {*INSIDE, *OUTSIDE}
    assert any(plan.shrinks for plan in plans) and any(plan.spares for plan in plans)


@given(st.integers(0, 10_000))
def test_a_fault_is_known_by_how_the_run_writes_it(seed: int) -> None:
    texts = [text for _, text in faulty_runs.draw_plan(random.Random(seed), 9).injected]
    for text in texts:
        (parsed,) = faults.parse_faults([text])
        assert faulty_runs._fault_of(parsed.text) == faulty_runs._fault_of(text)
        assert [each for each in texts if faulty_runs._fault_of(each) == faulty_runs._fault_of(text)] == [text]


@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 2), kind=st.sampled_from(sorted({*INSIDE, *OUTSIDE})))
def test_a_fault_that_comes_alone_can_happen_and_is_to_be_named(seed: int, nodes: int, kind: str) -> None:
    plan = faulty_runs.plan_alone(kind, nodes, random.Random(seed))
    strikes = [strike for strike, _ in (*plan.injected, *plan.outside)]
    assert strikes[0].kind == kind
    assert len(strikes) == 1 + (kind == "corrupt-checkpoint")
    found = faults.parse_faults([text for _, text in plan.injected])
    faults.check_faults(found, 2, STEPS, local=True)
    assert [(each.kind, each.rank) for each in found] == [(each.kind, each.victim) for each, _ in plan.injected]
    named = faulty_runs.EXPECTED | faulty_runs.EXPECTED_ALONE
    assert all(strike.kind in named or strike.kind == "slow" for strike in strikes)


def test_the_diagnosis_has_runs_of_every_kind_and_undisturbed_ones() -> None:
    given = argparse.Namespace(quick=False, diagnosis=2, seed=1, clean=None)
    plans = list(benchmark.alone(given))
    kinds = Counter(plan.injected[0][0].kind if plan.injected else plan.outside[0][0].kind if plan.outside else None
                    for plan in plans)  # fmt: skip
    assert kinds == Counter(dict.fromkeys((*INSIDE, *OUTSIDE), 2)) + Counter({None: 10})


GOOD = Outcome(Plan(1, 0), [Strike("kill", 0, right=True, dead_s=0.5)], True, True, 0, [], Path())


@pytest.mark.parametrize(
    ("bad", "which"),
    [
        (replace(GOOD, ended=False), "last step"),
        (replace(GOOD, same=False), "weights"),
        (replace(GOOD, steps_lost=1), "steps lost"),
        (replace(GOOD, blamed=["rank 1"]), "blamed"),
        (replace(GOOD, strikes=[Strike("kill", 0, right=False)]), "causes"),
    ],
)
def test_what_went_wrong_does_not_hold(bad: Outcome, which: str) -> None:
    assert all(check.holds for check in benchmark.checks_of([GOOD] * 3))
    failed = [check.name for check in benchmark.checks_of([GOOD, bad]) if not check.holds]
    assert len(failed) == 1
    assert which in failed[0]


def test_a_row_for_each_kind_and_one_for_all() -> None:
    rows = benchmark.tables([GOOD, replace(GOOD, strikes=[Strike("kill", 1, right=None, during=True)])])
    assert [rows[0][key] for key in ("fault", "times", "in a recovery", "to be named", "named right")] == [
        "kill", 2, 1, 1, 1
    ]  # fmt: skip
    assert (rows[0]["dead, s"], rows[-1]["runs"], rows[-1]["faults"]) == (0.5, 2, 2)


def test_gaps_are_counted() -> None:
    found = heartbeats.row("between", heartbeats.gaps([0.0, 0.1, 0.35, 0.45, 1.0]))
    assert (found["gaps"], found["> 0.2 s"], found["> 0.5 s"]) == (4, 2, 1)
    assert found["longest, s"] == pytest.approx(0.55)


def test_an_agent_that_is_alone_has_nobody_to_be_heard_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["heartbeats.py", "--nodes", "1"])
    with pytest.raises(SystemExit, match="2"):
        heartbeats.main()
    assert "--nodes is at least 2" in capsys.readouterr().err
