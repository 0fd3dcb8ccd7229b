"""What failures take of a plan counts in its rank, by what outlives them: beside closed forms and brute force."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import load
from phalanx.planner import advice, large_jobs, parse_cluster, tables
from phalanx.planner.advice import PlanQuery
from phalanx.planner.checkpoint_interval import CheckpointCosts, best_intervals, daly_s
from phalanx.planner.checkpoint_interval import goodput as by_formula
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.cost import CostModel
from phalanx.planner.failures import DEVICE_MTBF_S, HARDWARE_SHARE, LEAST_GOODPUT, FailureModel
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.plan import SearchResult
from phalanx.planner.recipe_keys import free_layout
from phalanx.planner.search import search_layouts
from phalanx.planner.search_space import SearchSpace, list_degrees
from phalanx.planner.work import StepWork
from tests.helpers import ROOT
from tests.unit.test_plan_command import LLAMA, NODES, failing, phalanx, planned, rendered
from tests.unit.test_plan_search import SMALL, all_choices

# Seven layers are no two equal stages: of the longer one there is no room for two steps in 4.8 GiB.
TIGHT = replace(SMALL, layers=7, seq_len=256, global_batch=16, precision="fp32", memory="auto", replicate="off")
OFTEN = FailureModel(600.0, recovery_s=10.0, checkpoint_s=20.0)
ESTIMATE = CostModel(SMALL, parse_cluster.parse_cluster("2xA100-40GB")).estimate(LayoutChoice(micro_batch=4))


def with_memory(text: str, gib: float) -> ClusterSpec:
    there = parse_cluster.parse_cluster(text)
    kind = replace(there.groups[0].kind, memory_bytes=int(gib * 2**30))
    return replace(there, groups=tuple(replace(group, kind=kind) for group in there.groups))


def found_on(work: StepWork, there: ClusterSpec, failures: FailureModel | None) -> SearchResult:
    return search_layouts(work, there, SearchSpace(tuple(list_degrees(work, there))), failures=failures)


# -------------------------------------------------------------------------------------------------------------- by hand


def test_what_lasts_by_what_is_kept() -> None:
    failures, step_s = FailureModel(10_000.0, recovery_s=60.0, checkpoint_s=20.0), ESTIMATE.step_s
    kept = {keep: failures.goodput(replace(ESTIMATE, recovers_from=keep), 2) for keep in large_jobs.RECOVERY_SOURCES}
    assert kept["checkpoints"] == best_intervals(CheckpointCosts(step_s, 10_000, 60, 20)).goodput
    assert kept["memory"] == best_intervals(CheckpointCosts(step_s, 10_000, 60, 20, hard=HARDWARE_SHARE)).goodput
    # A failure takes a recovery and half a step; and there is a checkpoint as often as without copies.
    each = 1 / (1 + math.expm1(60 / 10_000) + step_s / 2 / 10_000)
    every_s = round(daly_s(20, 10_000 / HARDWARE_SHARE) / step_s) * step_s
    assert kept["copies"] == pytest.approx(each * every_s / (every_s + 20))
    assert kept["checkpoints"] < kept["memory"] < kept["copies"]


def test_without_a_rate_devices_fail_as_llama_3s() -> None:
    saving = FailureModel().checkpoint_costs(ESTIMATE, 16384)
    assert saving.mtbf_s == pytest.approx(54 * 86400 / 419) == DEVICE_MTBF_S / 16384
    assert FailureModel(5.0).checkpoint_costs(ESTIMATE, 16384).mtbf_s == 5.0


def test_an_interval_that_is_held_fixed_counts() -> None:
    failures = FailureModel(10_000.0, checkpoint_s=20.0)
    seldom = replace(failures, checkpoint_steps=100_000)
    saving = failures.checkpoint_costs(ESTIMATE, 2)
    assert seldom.checkpoint_interval(saving) == 100_000
    assert seldom.goodput(ESTIMATE, 2) == by_formula(saving, 1, 100_000) < failures.goodput(ESTIMATE, 2)


def test_a_job_that_fails_all_the_time_has_hardly_a_goodput() -> None:
    """No power of what a float cannot hold, whatever is kept."""
    for keep in large_jobs.RECOVERY_SOURCES:
        assert FailureModel(0.01).goodput(replace(ESTIMATE, recovers_from=keep), 2) == LEAST_GOODPUT
    assert by_formula(CheckpointCosts(5, 0.01, 60, 10, hard=0.0), 1, None) == 0.0


# --------------------------------------------------------------------------------------------------------------- ranked


def test_a_layout_without_room_for_steps_in_memory_loses_what_failures_take_of_it() -> None:
    there = with_memory("2x(1xCPU), 1.9Gb/s", 4.8)
    plain, often = found_on(TIGHT, there, None), found_on(TIGHT, there, OFTEN)
    fastest, chosen = plain.best, often.best
    assert (fastest.choice.pipeline, fastest.estimate.recovers_from) == (2, "checkpoints")
    assert (chosen.choice.pipeline, chosen.estimate.recovers_from) == (1, "memory")
    assert chosen.estimate.step_s > fastest.estimate.step_s
    lost = next(plan for plan in often.plans if plan.choice == fastest.choice)
    assert lost.effective_step_s > chosen.effective_step_s
    why = advice.why_slower(lost, chosen)
    assert why.startswith("it keeps no step in memory: failures take ") and " of the time instead of " in why
    assert "it keeps steps in memory: " in advice.why_slower(chosen, lost, faster=True)
    # Where it hardly ever fails nothing changes.
    assert [plan.choice for plan in found_on(TIGHT, there, FailureModel()).plans] == [
        plan.choice for plan in plain.plans
    ]


@pytest.mark.parametrize("gib", [4.8, 7.0, 12.0])
def test_steps_that_last_are_within_two_hundredths_of_brute_force(gib: float) -> None:
    work, there = replace(TIGHT, replicate="auto"), with_memory("2x(2xCPU), 2Gb/s", gib)
    model, lasting = CostModel(work, there), []
    for choice in all_choices(work, there):
        estimate = model.estimate(choice)
        if estimate.fits and not choice.offload:
            lasting.append(estimate.step_s / OFTEN.goodput(estimate, choice.devices))
    found = found_on(work, there, OFTEN)
    assert found.best.effective_step_s <= 1.02 * min(lasting)
    assert [plan.effective_step_s for plan in found.plans] == sorted(plan.effective_step_s for plan in found.plans)


@pytest.mark.parametrize("name", ["demo", "llama-3.2-1b", "llama-3-8b"])
def test_on_a_few_devices_that_fail_as_they_do_plans_are_the_fastest(name: str) -> None:
    question = PlanQuery(free_layout(load.load_recipe(ROOT / "recipes" / f"{name}.yaml"), []), None, ())
    there = parse_cluster.parse_cluster("8xH100-80GB")
    work = question.work(there)
    best_s = search_layouts(work, there, SearchSpace(tuple(list_degrees(work, there)))).best.estimate.step_s
    assert question.search(there).best.estimate.step_s == pytest.approx(best_s, rel=1e-3)


# ----------------------------------------------------------------------------------------------------------------- said


def test_a_plan_says_what_failures_take(tmp_path: Path) -> None:
    words = (LLAMA, "--cluster", NODES, "--mtbf", "1h")
    told = planned(tmp_path / "plan.json", *words)
    saving = told["saving"]
    assert (saving["kept"], saving["mtbf_s"]) == ("copies", 3600.0)
    lasting = [row["step_s"] / row["goodput"] for row in told["runners_up"]]
    assert lasting == sorted(lasting)
    assert lasting[0] >= told["expected"]["step_s"] / saving["goodput"]
    few = (LLAMA, "parallel.tensor=1", "parallel.pipeline=1", "--cluster", NODES)
    often = planned(tmp_path / "plan.json", *few, "checkpoint.every=1")
    seldom = planned(tmp_path / "plan.json", *few)
    assert often["keys"]["checkpoint.every"] == often["saving"]["checkpoint_steps"] == 1
    assert seldom["keys"]["checkpoint.every"] > 1
    assert often["saving"]["goodput"] < seldom["saving"]["goodput"]
    assert "hardly any step would last" in failing(*few, "--mtbf", "1s")


def test_what_steps_in_memory_are_worth_is_said_for_steps_that_last(tmp_path: Path) -> None:
    words = (LLAMA, "--cluster", NODES, "--mtbf", "20min", "--explain", "resilience.in_memory_checkpoints=false")
    whole = planned(tmp_path / "plan.json", *words)
    told = whole["explain"]
    assert told["slower"] > 0 and told["goodput"] < 0.97
    shown = " ".join(rendered(tables.render_plan({**whole, "out": "plan.json"})).split())
    assert "it keeps no step in memory: failures take" in shown
    assert "lost to failures" in shown


# ------------------------------------------------------------------------------------------------------------ simulated


@pytest.fixture
def two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further size of the cluster is a search of its own."""
    monkeypatch.setattr(large_jobs, "SIZES", (8, 32))


def job(*words: object) -> dict[str, Any]:
    done = phalanx("plan", *words, "--simulate", "--mtbf", "1d", "--days", 2, "--json")
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.output)
    return told


@pytest.mark.usefixtures("two_sizes")
def test_a_simulated_step_pays_for_what_is_kept_and_no_more() -> None:
    """On a slow network nodes wait for each other's copies, which a job that keeps none does not."""
    slow = (LLAMA, "parallel.shard_degree=8", "--cluster", "2x(4xA100-80GB), 1Gb/s", "parallel.tensor=1",
            "parallel.pipeline=1")  # fmt: skip
    copies, memory, alone = (job(*slow, "--keep", keep) for keep in ("copies", "memory", "checkpoints"))
    assert copies["job"]["commit_s"] > 1.0
    assert memory["job"]["commit_s"] == alone["job"]["commit_s"] == 0.0
    # The layouts are the same, and so are their steps without what is kept.
    steps = [told["job"]["step_s"] for told in (copies, memory, alone)]
    assert steps == pytest.approx([steps[0]] * 3, rel=0.02)
    for told in (copies, memory, alone):
        assert set(told["if_kept"]) == set(large_jobs.RECOVERY_SOURCES)
        assert told["if_kept"] == pytest.approx(copies["if_kept"], rel=0.02)
        assert told["goodput"] == pytest.approx(told["closed_form"], rel=0.03)
    assert copies["goodput"] < memory["goodput"]


@pytest.mark.usefixtures("two_sizes")
def test_one_node_has_no_copies() -> None:
    words = (LLAMA, "--cluster", "8xA100-80GB")
    assert set(job(*words)["if_kept"]) == {"checkpoints", "memory"}
    assert "--keep copies is not possible on 8xA100-80GB" in failing(*words, "--simulate", "--keep", "copies")
    assert "whose plan has" in failing(*words, "--simulate", "--commit-time", "1s")
    assert "resilience.replicate_every sets it" in failing(*words, "--simulate", "--copies-every", "2")


@pytest.mark.usefixtures("two_sizes")
def test_an_interval_that_is_held_fixed_is_simulated() -> None:
    words = (LLAMA, "--cluster", NODES, "--checkpoint-time", "20s", "parallel.tensor=1", "parallel.pipeline=1")
    for keep in large_jobs.RECOVERY_SOURCES:
        best_of, often = job(*words, "--keep", keep), job(*words, "--keep", keep, "checkpoint.every=1")
        for told in (best_of, often):
            assert told["goodput"] == pytest.approx(told["closed_form"], rel=0.03)
        assert often["job"]["checkpoint_steps"] == 1
        assert (best_of["job"]["checkpoint_held"], often["job"]["checkpoint_held"]) == (False, True)
        # Twenty seconds after each step, whatever they are needed for.
        step_s = often["job"]["step_s"] + often["job"]["commit_s"]
        assert often["closed_form"] == pytest.approx(best_of["closed_form"] * step_s / (step_s + 20), rel=0.03)
        assert often["seconds"]["checkpoints"] > 10 * best_of["seconds"]["checkpoints"]
        for row, rare in zip(often["scaling"], best_of["scaling"], strict=True):
            if row["tokens_per_s"] is not None:
                assert row["checkpoint_every_s"] < (rare["checkpoint_every_s"] or math.inf)
                assert row["goodput"] < rare["goodput"]


@pytest.mark.parametrize(("gib", "kept"), [(40.0, False), (200.0, True)])
def test_what_there_is_no_room_for_is_not_said_to_be_kept(gib: float, kept: bool) -> None:
    """Copies of each Nth step take five times a rank's state, and a CPU's ranks have no other memory."""
    config = free_layout(load.load_recipe(ROOT / "recipes" / "llama-3.2-1b.yaml"), [])
    config = load.update_config(config, {"resilience.replicate_every": 4})
    question, there = PlanQuery(config, None, ("parallel.pipeline=1",)), with_memory("2x(1xCPU), 10Gb/s", gib)
    alone = (
        question.with_keys("resilience.in_memory_checkpoints=false", "resilience.replicate_every=off")
        .search(there)
        .best
    )
    found = large_jobs.estimate_by_source(alone, question)
    assert all(estimate.fits for estimate in found.values())
    assert "checkpoints" in found and ("copies" in found) is kept
