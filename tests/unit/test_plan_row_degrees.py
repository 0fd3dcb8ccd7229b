"""Plans with context and expert parallelism: seconds by hand, and what a search chooses where memory asks for it."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from phalanx.config import load
from phalanx.core.errors import ConfigError
from phalanx.layout.context_exchange import AttentionShape, count_exchanged_elements
from phalanx.layout.context_slices import slice_in_pairs
from phalanx.layout.model_shape import MoESpec, list_timing_shapes
from phalanx.models.families.catalog import PRESETS, flops_per_token
from phalanx.planner import choose_layout, compute_cost, measured_cluster, parse_cluster
from phalanx.planner.advice import PlanQuery
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.cost import CostModel, estimate_step
from phalanx.planner.layer_exchanges import LayerRings, expert_bytes, find_layer_cost
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.link_cost import RingPlacement
from phalanx.planner.predict import predict_recipe_step
from phalanx.planner.recipe_keys import apply_plan, free_layout, keys_of, space_of
from phalanx.planner.search import search_layouts
from phalanx.planner.search_space import SearchSpace, list_degrees, list_row_degrees
from phalanx.planner.work import StepWork, find_ffn_widths
from tests.helpers import ROOT
from tests.unit.test_plan_cost import ALIKE, FULL, PLAIN, alone
from tests.unit.test_plan_layout import A100, SMALL, asked

ROWS = replace(ALIKE, seq_len=4096, global_batch=4, kv_heads=4)
MIXTURE = StepWork(
    layers=8, hidden=1024, heads=16, kv_heads=16, vocabulary=32000, seq_len=1024, global_batch=64,
    **find_ffn_widths(8, 2816, MoESpec(experts=8, experts_per_token=2, intermediate=2816)),
)  # fmt: skip
LLAMA_8B = StepWork(32, 4096, 32, 8, 14336, 128256, seq_len=131072, global_batch=8)
MIXTRAL = StepWork(
    layers=32, hidden=4096, heads=32, kv_heads=8, vocabulary=32000, seq_len=4096, global_batch=256,
    **find_ffn_widths(32, 14336, MoESpec(experts=8, experts_per_token=2, intermediate=14336)),
)  # fmt: skip


def space(work: StepWork, cluster: ClusterSpec, **pins: object) -> SearchSpace:
    usual = {**list_row_degrees(work, cluster)}
    usual |= {axis: (pins.pop(axis),) for axis in usual if axis in pins}  # type: ignore[misc]
    return SearchSpace(tuple(list_degrees(work, cluster)), usual["context"], usual["expert"], pins)


# -------------------------------------------------------------------------------------------------------------- seconds


@pytest.mark.parametrize("by", ["gather", "heads", "ring"])
def test_what_ranks_that_share_rows_wait_for(by: str) -> None:
    """Two ranks: what one sends the other, by the bytes that a run counts, at 1 GB/s."""
    work, choice = replace(ROWS, context_by=by), LayoutChoice(context=2)
    rings = LayerRings(context=RingPlacement(2, 1, 1, PLAIN))
    even, shape = (1.0, 1.0), AttentionShape(8, 4, 64, 512)
    sent = count_exchanged_elements(by, slice_in_pairs(4096, even), shape, even)
    # The outer rank sees all keys, and gets 2,048 of 3,072 that travel; heads are even.
    most = 0.5 if by == "heads" else 2 / 3
    forward, backward = (4 * 2 * most * elements / 1e9 for elements in sent)
    if by == "ring":  # while the last keys are used
        attends = compute_cost.attention_s(work, PLAIN, choice, 2, FULL)
        forward, backward = (max(0.0, one - each / 2) for one, each in zip((forward, backward), attends, strict=True))
    for recompute, times in (("none", 1), ("full", 2)):
        layout = replace(choice, recompute=recompute)
        found = find_layer_cost(work, PLAIN, layout, rings, 2, alone(2), FULL)
        assert found.waits_s == pytest.approx(times * forward + backward)


def test_what_ranks_that_divide_experts_wait_for() -> None:
    """Each token's two rows of 1,024 numbers leave for another of four ranks in three of four cases, and come back."""
    rings = LayerRings(expert=RingPlacement(4, 1, 1, PLAIN))
    found = find_layer_cost(MIXTURE, PLAIN, LayoutChoice(expert=4), rings, 16, alone(4), FULL)
    rows, row_bytes, count_bytes = 16 * 1024 * 2 * 0.75, 1024 * 2, 8 * 0.75 * 8
    assert found.waits_s == pytest.approx((4 * rows * row_bytes + count_bytes) / 1e9)


def test_rows_are_divided_within_a_group_that_divides_experts() -> None:
    """As `balance.batch` lists them: of the last ranks of a group, too, whose exchange is that of the first."""
    choice = LayoutChoice(expert=4, micro_batch=1)
    even, listed = (
        estimate_step(MIXTURE, alone(4), replace(choice, shares=shares), FULL) for shares in ((), (16, 16, 16, 16))
    )
    assert listed.step_s == pytest.approx(even.step_s)
    uneven = estimate_step(MIXTURE, alone(4), replace(choice, shares=(8, 16, 16, 24)), FULL)
    assert uneven.terms["communication"] == pytest.approx(1.5 * even.terms["communication"], rel=0.1)


def test_tensor_ranks_exchange_tokens_that_are_theirs() -> None:
    """Of two copies on two ranks each, each rank sends those of its half."""
    bytes_of = {
        choice: expert_bytes(MIXTURE, choice, 16)
        for choice in (LayoutChoice(expert=4), LayoutChoice(expert=2, tensor=2))
    }
    (_, alone_), (counts, divided) = bytes_of.values()
    assert divided == alone_ / 2 and counts == divided + 0.75 * 8 * 8
    rings = LayerRings(tensor=RingPlacement(2, 1, 1, PLAIN))
    waits = {
        sequence: find_layer_cost(MIXTURE, PLAIN, LayoutChoice(tensor=2, sequence=sequence), rings, 1, alone(4), FULL)
        for sequence in (False, True)
    }
    # Around attention, and around experts where each rank has all tokens: two passes of each.
    assert waits[True].exchange_s == pytest.approx(waits[False].exchange_s / 2)


def test_gathers_in_fp8_are_of_what_travels() -> None:
    """Of experts that are on one rank alone nothing is gathered; norms, router and tables are in bf16."""
    work = replace(MIXTURE, fp8_blocks=True)
    attention = work.layers * 4 * work.hidden**2
    small = work.parameters() - attention - work.layers * work.expert_parameters
    for moving in (1.0, 0.25, 0.0):
        matrices = attention + moving * work.layers * work.expert_parameters
        assert work.zero3_gather_bytes(moving) == pytest.approx((matrices + 2 * small) / (matrices + small))


def test_state_of_divided_experts_does_not_travel() -> None:
    """Where each expert is on one rank alone, only the rest of the model is reduced and gathered."""
    work = replace(MIXTURE, routed=0.0)  # no tokens, to see the state alone
    whole, divided = (
        estimate_step(work, alone(4), LayoutChoice(expert=expert, micro_batch=1, zero=1), FULL).terms["communication"]
        for expert in (1, 4)
    )
    assert divided < 0.6 * whole


def test_a_pass_that_counts_choices_ahead_takes_as_long_as_a_forward_pass() -> None:
    """A third of a step, of which a backward pass takes two."""
    for zero in (1, 3):
        plain, counted = (
            estimate_step(replace(MIXTURE, counts_ahead=ahead), alone(4), LayoutChoice(micro_batch=1, zero=zero), FULL)
            for ahead in (False, True)
        )
        assert 1.28 < counted.terms["compute"] / plain.terms["compute"] < 1.36
    assert counted.terms["communication"] >= plain.terms["communication"]
    for balance in ("step", "sequence"):
        config = load.build_config({"model": {"preset": "mixtral-8x7b", "moe": {"balance": balance}}}, "a recipe")
        work = PlanQuery(config, None, ()).work(parse_cluster.parse_cluster("8xH100-80GB"))
        assert work.counts_ahead == (balance == "step")


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "qwen3-30b-a3b", "moonlight-16b-a3b", "deepseek-v3"])
def test_a_hardware_file_has_the_work_of_what_was_measured(preset: str) -> None:
    spec = PRESETS[preset]
    record = {**list_timing_shapes(spec), "positions": 512, "dtype": "bf16"}
    assert measured_cluster._work_of(record).flops_per_token() == pytest.approx(flops_per_token(spec, 512)[0], rel=1e-3)


def test_a_part_of_a_row_takes_its_part_of_a_block() -> None:
    """Without exchanges to speak of, four ranks that share rows are as fast as four with rows of their own."""
    fast = replace(PLAIN, link_bytes_per_s=1e30)
    cluster = ClusterSpec((NodeGroup(1, 4, fast),), 1e30, 0.0)
    work = replace(ROWS, context_by="heads")
    own, shared = (
        estimate_step(work, cluster, LayoutChoice(context=context, micro_batch=1), FULL) for context in (1, 4)
    )
    assert shared.terms["compute"] == pytest.approx(own.terms["compute"], rel=1e-6)
    # One row at a time on four ranks: a fourth of the activations.
    parts = [each.memory[0].parts for each in (own, shared)]
    assert parts[1]["activations"] < 0.27 * parts[0]["activations"]


# --------------------------------------------------------------------------------------------------------------- search


def choices(work: StepWork, cluster: ClusterSpec) -> list[LayoutChoice]:
    """Whatever degrees there are, one by one, with the shardings that the search tries."""
    usual, found = list_row_degrees(work, cluster), []
    ways = ((1, "per_step"), (2, "per_micro_batch"), (3, "per_step"), (3, "per_micro_batch"))
    sizes = [1, 2, 4, 8, 16, 32, 64]
    for degrees, context, expert, (zero, reduce), recompute, size in itertools.product(
        list_degrees(work, cluster), usual["context"], usual["expert"], ways, ("none", "full"), sizes
    ):
        tensor, pipeline = degrees
        groups, rest = divmod(cluster.devices, tensor * pipeline * context)
        refused = rest or groups % expert or (pipeline > 1 and zero > 1) or expert * tensor > work.experts > 0
        if refused or not groups or groups > work.global_batch or size > -(-work.global_batch // groups):
            continue
        found.append(
            LayoutChoice(
                zero=zero, reduce=reduce, tensor=tensor, sequence=tensor > 1, pipeline=pipeline, context=context,
                expert=expert, micro_batch=size, recompute=recompute,
            )  # type: ignore[arg-type]
        )  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("text", "work"),
    [
        ("4xT4", replace(ROWS, precision="fp16", hidden=2048, layers=8, ffn=8192, heads=16, seq_len=16384)),
        ("2x(4xA100-40GB), 100Gb/s", replace(ROWS, seq_len=8192, global_batch=2)),  # more devices than rows
        ("2x(2xV100-16GB), 10Gb/s", replace(MIXTURE, precision="fp16")),
        ("4xT4", replace(MIXTURE, precision="fp16", global_batch=4)),
    ],
)
def test_within_two_hundredths_of_brute_force(text: str, work: StepWork) -> None:
    cluster = parse_cluster.parse_cluster(text)
    model = CostModel(work, cluster)
    every = [(model.estimate(choice), choice) for choice in choices(work, cluster)]
    best = min(((each.step_s, choice) for each, choice in every if each.fits), key=lambda pair: pair[0], default=None)
    found = search_layouts(work, cluster, space(work, cluster))
    assert best is not None and found.plans
    assert found.best.estimate.step_s <= 1.02 * best[0], (found.best.choice, best[1])


def test_rows_of_128k_are_shared_where_none_fits_alone() -> None:
    cluster = parse_cluster.parse_cluster("8xA100-40GB, 100Gb/s")
    alone_, found = (
        search_layouts(LLAMA_8B, cluster, space(LLAMA_8B, cluster, tensor=1, pipeline=1, **pins))
        for pins in ({"context": 1}, {})
    )
    assert not alone_.plans and alone_.shortfall is not None
    assert found.best.choice.context >= 4 and found.best.estimate.fits
    short = replace(LLAMA_8B, seq_len=4096, global_batch=256)
    assert search_layouts(short, cluster, space(short, cluster)).best.choice.context == 1


def test_experts_are_divided_where_all_of_them_do_not_fit() -> None:
    cluster = parse_cluster.parse_cluster("4x(8xA100-80GB), 400Gb/s")
    whole, found = (
        search_layouts(MIXTRAL, cluster, space(MIXTRAL, cluster, tensor=1, pipeline=1, zero=1, **pins))
        for pins in ({"expert": 1}, {})
    )
    assert not whole.plans
    assert found.best.choice.expert >= 4 and found.best.estimate.fits


# ---------------------------------------------------------------------------------------------------------- whole plans


def test_a_plan_for_long_rows_is_a_recipe_that_starts() -> None:
    long = ["data.seq_len=131072", "model.max_seq_len=131072", "train.global_batch=8"]
    config = free_layout(load.load_recipe(ROOT / "recipes" / "llama-3-8b.yaml", long), ())
    cluster = parse_cluster.parse_cluster("8xA100-40GB")
    found = PlanQuery(config, None, ()).with_keys("parallel.tensor=1", "parallel.pipeline=1").search(cluster)
    assert found.best.choice.context > 1
    for plan in found.plans:
        chosen = apply_plan(config, plan)
        assert chosen.parallel.context == plan.choice.context
        if plan.devices == cluster.devices:
            assert predict_recipe_step(chosen, plan.cluster).estimate.step_s == pytest.approx(plan.estimate.step_s)
    held = PlanQuery(config, None, ()).with_keys("parallel.context=4", "parallel.context_by=ring")
    ring = held.search(cluster).best
    assert (ring.choice.context, keys_of(ring, held.config)["parallel.context_by"]) == (4, "ring")


def test_a_run_may_leave_the_rest_of_its_layout_open() -> None:
    tree = {
        "model": SMALL, "train": {"global_batch": 8}, "data": {"seq_len": 256},
        "parallel": {"context": 2, "layout": "auto"},
    }  # fmt: skip
    told = choose_layout.choose_layout(asked(load.build_config(tree, "the test's recipe"), (A100,) * 4), None)
    assert told["keys"]["parallel.context"] == 2 and "rows shared by 2 ranks" in told["layout"]


def test_unlike_devices_that_would_share_rows_are_refused() -> None:
    mixed = parse_cluster.parse_cluster("1xA100-80GB, 1xV100-16GB")
    with pytest.raises(ConfigError, match="a plan does not know how heterogeneous devices share rows"):
        estimate_step(ROWS, mixed, LayoutChoice(context=2))
    with pytest.raises(ConfigError, match=r"2 copies of a model do not form groups of 4"):
        estimate_step(MIXTURE, alone(2), LayoutChoice(expert=4))
    tree = {"model": SMALL, "parallel": {"context": 2}, "balance": {"context": [3, 1]}, "data": {"seq_len": 256}}
    with pytest.raises(ConfigError, match=r"balance.context is \[3.0, 1.0\]; set balance.context=even"):
        predict_recipe_step(load.build_config(tree, "a recipe"), parse_cluster.parse_cluster("2xA100-80GB"))


@pytest.mark.parametrize(
    ("name", "contexts"), [("baichuan2-13b", (1,)), ("gpt-oss-20b", (1,)), ("llama-3-8b", (1, 2, 4))]
)
def test_degrees_of_a_folders_model_are_those_that_a_start_takes(name: str, contexts: tuple[int, ...]) -> None:
    """Neither ALiBi nor sinks go over shared rows, and only the folder says that there are such."""
    config = load.build_config({"model": {"from_hf": "folder"}, "data": {"seq_len": 4096}}, "a recipe")
    question, there = PlanQuery(config, PRESETS[name], ()), parse_cluster.parse_cluster("8xH100-80GB")
    work = question.work(there)
    assert space_of(config, PRESETS[name], work, there, {}).contexts == contexts
    if contexts == (1,):
        with pytest.raises(ConfigError, match="shares no attention with"):
            space_of(config, PRESETS[name], work, there, {"context": 2})


@pytest.mark.parametrize(
    ("name", "targets", "says"),
    [
        ("deepseek-v3", "auto", "a plan does not know adapters of latent attention"),
        ("mixtral-8x7b", ["experts.down"], "a plan does not know adapters of experts"),
    ],
)
def test_adapters_that_a_plan_does_not_know_are_refused(name: str, targets: Any, says: str) -> None:
    model = {"from_hf": "folder", "lora": {"rank": 8, "targets": targets}}
    config = load.build_config({"model": model, "data": {"seq_len": 1024}}, "a recipe")
    with pytest.raises(ConfigError, match=says):
        PlanQuery(config, PRESETS[name], ()).work(parse_cluster.parse_cluster("8xH100-80GB"))
