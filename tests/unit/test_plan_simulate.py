"""A simulated job equals closed forms where there are any, decides as a run does, and accounts for every second."""

import functools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import ConfigError
from phalanx.elastic.supervisor.state import RecoveryPolicy
from phalanx.planner import checkpoint_interval, simulate
from phalanx.planner.checkpoint_interval import CheckpointCosts
from phalanx.planner.simulate import Scenario, SimulationResult, Stalls, Stragglers
from tests.helpers import ALL, some

DAY_S = 86400.0
LLAMA_3_S = 54 * DAY_S / 419  # between unexpected interruptions, on 16,384 GPUs (Dubey et al. 2024)
PATIENT = RecoveryPolicy(0, max_restarts=10**6, same_crash=10**6)  # never gives up
# 54 days as Llama 3's, on fewer nodes: the failures are of the whole job, however many nodes have them.
LLAMA_3 = Scenario(
    nodes=16, span_s=54 * DAY_S, mtbf_s=LLAMA_3_S, step_s=5, restart_s=119, detect_s=1, checkpoint_steps=90,
    checkpoint_s=10, spares=4, repair_s=7200.0, policy=PATIENT,
)  # fmt: skip


simulated = functools.cache(simulate.simulate)


def goodput(scenario: Scenario, seeds: int = 2) -> float:
    return sum(simulated(scenario, seed).goodput for seed in range(seeds)) / seeds


def saving(scenario: Scenario) -> CheckpointCosts:
    return CheckpointCosts(
        scenario.step_s, scenario.mtbf_s, scenario.detect_s + scenario.restart_s, scenario.checkpoint_s,
        scenario.commit_s, scenario.hard,
    )  # fmt: skip


def test_with_llama_3s_failures_goodput_is_that_of_the_closed_form() -> None:
    found = goodput(LLAMA_3)
    assert found == pytest.approx(checkpoint_interval.goodput(saving(LLAMA_3), 1, 90), rel=0.01)
    assert found > 0.9  # as that run had


@pytest.mark.parametrize("hard", some([0.3, 0.78], 1))
def test_some_failures_leave_memory_as_it_is(hard: float) -> None:
    scenario = replace(LLAMA_3, hard=hard, commit_s=0.02)
    assert goodput(scenario) == pytest.approx(checkpoint_interval.goodput(saving(scenario), 1, 90), rel=0.01)


def test_with_copies_on_other_nodes_nothing_goes_back_to_a_checkpoint() -> None:
    scenario = replace(LLAMA_3, copied=1, checkpoint_s=0.0)
    outcome = simulated(scenario, 0)
    assert goodput(scenario) == pytest.approx(checkpoint_interval.goodput(saving(scenario), 1, None), rel=0.01)
    # What is walked again is less than a step for each failure.
    assert outcome.seconds["replaying"] < scenario.step_s * (outcome.hard + outcome.soft)


@pytest.mark.parametrize("hard", some([0.78, 1.0], 0))
def test_with_copies_of_some_steps_a_lost_node_goes_back_to_the_last_of_these(hard: float) -> None:
    scenario = replace(LLAMA_3, hard=hard, copied=200, checkpoint_steps=0, checkpoint_s=0.0, commit_s=0.05)
    outcome = simulated(scenario, 0)
    # As to a checkpoint each 200 steps that costs nothing.
    assert goodput(scenario) == pytest.approx(checkpoint_interval.goodput(saving(scenario), 1, 200), rel=0.01)
    # A lost node costs at most 199 steps more than the one that was under way; on average about half of that.
    again, most = outcome.seconds["replaying"], outcome.hard * 200 * scenario.step_s
    assert 0.3 * most < again < 0.7 * most + outcome.soft * scenario.step_s
    assert outcome.seconds["commits"] / outcome.seconds["working"] == pytest.approx(0.01, rel=0.2)


def test_without_memory_every_failure_goes_back_to_a_checkpoint() -> None:
    with_memory = simulate.simulate(replace(LLAMA_3, hard=0.0))
    without = simulate.simulate(replace(LLAMA_3, hard=0.0, memory=False))
    assert with_memory.seconds["replaying"] < 5 * 450
    assert without.seconds["replaying"] > 20 * with_memory.seconds["replaying"]


def test_without_failures_only_the_start_and_checkpoints_take_time() -> None:
    outcome = simulate.simulate(replace(LLAMA_3, mtbf_s=1e15))
    # By hand: 119 s to start, then 450 s of work and 10 s of saving in turns.
    work_s = (54 * DAY_S - 119) * 450 / 460
    assert outcome.seconds["working"] == pytest.approx(work_s, abs=450)
    assert outcome.seconds["restarting"] == 119
    assert outcome.attempts == 1
    assert outcome.steps == math.floor(outcome.seconds["working"] / 5)


def test_a_straggler_holds_all_up_where_work_is_not_shared_anew() -> None:
    quiet = replace(LLAMA_3, mtbf_s=1e15, stragglers=Stragglers(6 * 3600.0, 0.5, 3600.0))
    shared = simulate.simulate(quiet)
    alone = simulate.simulate(replace(quiet, stragglers=replace(quiet.stragglers, shared=False)))
    slow = shared.stragglers * 3600.0
    # One of 16 nodes at half its speed: 1/32 of the work is missing, or half of it.
    assert shared.seconds["slower"] == pytest.approx(slow / 32, rel=0.1)
    assert alone.seconds["slower"] == pytest.approx(slow / 2, rel=0.15)


def test_a_long_stall_counts_as_a_failure_and_a_short_one_passes() -> None:
    calm = replace(LLAMA_3, mtbf_s=1e15, stalls=Stalls(6 * 3600.0, 30.0, 100.0))
    short = simulate.simulate(calm)
    assert short.soft == 0
    assert short.seconds["stalled"] == pytest.approx(30 * short.stalls, rel=0.1)
    long = simulate.simulate(replace(calm, stalls=replace(calm.stalls, for_s=300.0)))
    assert long.soft == pytest.approx(long.stalls, rel=0.1)
    assert long.attempts == long.soft + 1


def test_it_is_the_running_systems_own_decision_to_give_up() -> None:
    hopeless = replace(LLAMA_3, mtbf_s=100.0, policy=RecoveryPolicy(0, max_restarts=3))
    outcome = simulate.simulate(hopeless)
    assert outcome.ended is not None
    assert outcome.ended[1].startswith("4 attempts in a row made no progress beyond step ")
    assert outcome.seconds["given up"] > 53 * DAY_S


def test_without_spares_it_goes_on_with_fewer_nodes_and_takes_them_back() -> None:
    few = replace(LLAMA_3, spares=0, repair_s=DAY_S / 2)
    outcome = simulate.simulate(few)
    assert 2 < outcome.fewest < 16
    # By Little's law: so many nodes are away on average, each a 16th of the speed.
    away = DAY_S / 2 / LLAMA_3_S / 16
    assert outcome.seconds["slower"] / outcome.span_s == pytest.approx(away * 0.94, rel=0.15)
    rare = replace(few, mtbf_s=4 * DAY_S)
    waits = simulate.simulate(replace(rare, policy=replace(PATIENT, on_lost_node=("wait",), wait_s=9 * DAY_S)))
    assert 0.05 < waits.seconds["waiting"] / waits.span_s < 0.2  # about half a day of four and a half
    assert waits.fewest == 16


def test_a_node_that_nobody_replaces_ends_it() -> None:
    outcome = simulate.simulate(replace(LLAMA_3, spares=0, policy=replace(PATIENT, on_lost_node=())))
    assert outcome.ended is not None
    assert "lost" in outcome.ended[1]


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every node say for itself that its ranks have ended, and that it is ready."""
    from phalanx.elastic.supervisor import state as supervisor_state

    def all_end(job: "simulate._SimulatedJob", code: int) -> None:
        for node in job.state.seats:
            if (
                job.state.phase == supervisor_state.JobPhase.ENDING
                and node not in job.state.codes
                and node not in job.state.lost_with_ranks
            ):
                job.decide_on(supervisor_state.RanksEnded(job.now, node, job.state.attempt, int(code)))

    def all_ready(job: "simulate._SimulatedJob", division: int, node: int | None) -> None:
        for each in [each for each in job.state.nodes if node in (None, each.node)]:
            job.decide_on(supervisor_state.NodeReady(job.now, each.node, division))

    monkeypatch.setattr(simulate._SimulatedJob, "all_end", all_end)
    monkeypatch.setattr(simulate._SimulatedJob, "all_ready", all_ready)


@pytest.mark.parametrize("spares", [0, 3])
def test_telling_of_all_nodes_at_once_is_telling_of_each(spares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = replace(LLAMA_3, nodes=6, spares=spares, hard=0.6, repair_s=20_000.0, copied=40)
    at_once = simulate.simulate(scenario)
    one_by_one(monkeypatch)
    assert simulate.simulate(scenario) == at_once


scenarios = st.builds(
    Scenario,
    nodes=st.integers(1, 12),
    span_s=st.floats(1.0, 5 * DAY_S),
    mtbf_s=st.floats(200.0, 1e6),
    step_s=st.floats(0.1, 60.0),
    hard=st.floats(0, 1),
    detect_s=st.floats(0, 60),
    restart_s=st.floats(0, 600),
    commit_steps=st.integers(1, 20),
    commit_s=st.floats(0, 5),
    memory=st.booleans(),
    copied=st.integers(0, 30),
    checkpoint_steps=st.integers(0, 1).flatmap(lambda any_: st.just(0) if not any_ else st.integers(50, 2000)),
    checkpoint_s=st.floats(0, 100),
    spares=st.integers(0, 3),
    repair_s=st.floats(1.0, 1e6),
    stragglers=st.builds(Stragglers, every_s=st.one_of(st.just(math.inf), st.floats(500, 1e5)), shared=st.booleans()),
    stalls=st.builds(
        Stalls,
        every_s=st.one_of(st.just(math.inf), st.floats(500, 1e5)),
        hang_s=st.one_of(st.just(math.inf), st.floats(1, 100)),
    ),
    policy=st.one_of(st.none(), st.just(PATIENT)),
)


@given(scenarios, st.integers(0, 2**32))
@settings(max_examples=60 if ALL else 15, deadline=None)
def test_every_second_is_accounted_for(scenario: Scenario, seed: int) -> None:
    outcome: SimulationResult = simulate.simulate(scenario, seed)
    assert sum(outcome.seconds.values()) == pytest.approx(scenario.span_s)
    assert min(outcome.seconds.values()) >= -1e-6 * scenario.span_s
    assert 0 <= outcome.goodput <= 1
    assert outcome.fewest <= scenario.nodes
    assert simulate.simulate(scenario, seed) == outcome


def test_what_would_take_hours_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 5,000,000 events"):
        replace(LLAMA_3, mtbf_s=0.1)
