"""The search returns what fits and is fastest: beside brute force, with monotony, and on clusters that people know."""

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import ConfigError
from phalanx.layout.balance import Speed, cut_into_micro_batches, divide, slowest_s
from phalanx.planner import parse_cluster
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.cost import CostModel
from phalanx.planner.heterogeneous import HeterogeneousDevices
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.plan import Plan, SearchResult
from phalanx.planner.search import Reduce, search_layouts
from phalanx.planner.search_space import SearchSpace, list_degrees
from phalanx.planner.work import StepWork
from tests.helpers import ALL, cover, some

SMALL = StepWork(
    layers=8, hidden=1024, heads=16, kv_heads=16, ffn=2816, vocabulary=32000, seq_len=1024, global_batch=64
)  # fmt: skip
LLAMA_7B = StepWork(32, 4096, 32, 32, 11008, 32000, seq_len=4096, global_batch=512)
LLAMA_13B = StepWork(40, 5120, 40, 40, 13824, 32000, seq_len=2048, global_batch=2048)
LLAMA_70B = StepWork(80, 8192, 64, 8, 28672, 128256, seq_len=8192, global_batch=512)
GPT_175B = StepWork(96, 12288, 96, 96, 49152, 51200, seq_len=2048, global_batch=1536, gated=False, biases=True)


def on(work: StepWork, cluster: ClusterSpec | str, **pins: object) -> SearchResult:
    there = parse_cluster.parse_cluster(cluster) if isinstance(cluster, str) else cluster
    return search_layouts(work, there, SearchSpace(tuple(list_degrees(work, there)), pins=pins))


def tokens_per_s(found: SearchResult) -> float:
    return found.best.estimate.tokens_per_s if found.plans else 0.0


def all_choices(work: StepWork, cluster: ClusterSpec) -> list[LayoutChoice]:
    """Everything that the engine can do on a cluster of one kind, one by one."""
    found = []
    sizes = [size for size in range(1, work.global_batch + 1) if size & (size - 1) == 0]
    for (tensor, pipeline), zero, reduce, slots, (recompute, offload), virtual, size in itertools.product(
        list_degrees(work, cluster),
        (1, 2, 3),
        ("per_step", "per_micro_batch"),
        (1, 2),
        (("none", False), ("selective", False), ("full", False), ("full", True)),
        (1, 2),
        sizes,
    ):
        refused = pipeline > 1 and (zero == 3 or reduce == "per_micro_batch")
        refused |= zero == 3 and slots == 2
        refused |= pipeline > 1 and offload  # which knows of one micro-batch at a time
        refused |= virtual > 1 and (pipeline == 1 or 2 * pipeline > work.layers)
        for devices in range(tensor * pipeline, cluster.devices + 1, tensor * pipeline):
            copies = devices // (tensor * pipeline)
            if refused or copies > work.global_batch or size > -(-work.global_batch // copies):
                continue
            if copies == 1 and (zero, reduce, slots) != (1, "per_step", 1):
                continue
            choice = LayoutChoice(zero=zero, tensor=tensor, sequence=tensor > 1, pipeline=pipeline, virtual=virtual)
            choice = replace(choice, micro_batch=size, reduce=reduce, slots=slots, devices=devices)
            found.append(replace(choice, recompute=recompute, offload=offload))
    return found


@pytest.mark.parametrize(
    ("text", "batch", "hidden"),
    [
        (*place, hidden)
        for place, hidden in cover(
            [("4xT4", 16), ("2x(4xA100-40GB), 100Gb/s", 32), ("2x(2xV100-16GB), 10Gb/s", 16),
             ("3x(2xRTX-4090), 25Gb/s", 13)],
            [1024, 4096],
        )
    ],
)  # fmt: skip
def test_within_two_hundredths_of_brute_force(text: str, batch: int, hidden: int) -> None:
    work = replace(SMALL, hidden=hidden, ffn=hidden * 11 // 4, global_batch=batch, precision="fp16")
    cluster = parse_cluster.parse_cluster(text)
    model = CostModel(work, cluster)
    every = [model.estimate(choice) for choice in all_choices(work, cluster)]
    best = min((estimate.step_s for estimate in every if estimate.fits), default=None)
    found = on(work, cluster)
    assert bool(found.plans) == (best is not None)
    if best is not None:
        assert found.best.estimate.step_s <= 1.02 * best


@pytest.mark.parametrize(
    ("text", "layers", "hidden", "batch"),
    [
        ("4x(2xRTX-4090), 10Gb/s", 2, 512, 256),  # with fewer, larger micro-batches only where nodes exchange less
        ("3x(2xA100-40GB), 25Gb/s", 8, 256, 256),  # on some of the nodes
        ("4x(3xRTX-4090), 25Gb/s", 8, 1024, 128),  # in even stages, since a large head takes less than its products
    ],
)
def test_degrees_of_sharding_are_within_two_hundredths_of_brute_force(
    text: str, layers: int, hidden: int, batch: int
) -> None:
    work = replace(SMALL, layers=layers, hidden=hidden, ffn=3 * hidden, global_batch=batch, precision="fp16")
    work = replace(work, seq_len=256 if hidden == 256 else 1024, memory="auto", replicate="auto")
    cluster = parse_cluster.parse_cluster(text)
    model, best_s = CostModel(work, cluster), []
    for choice in all_choices(work, cluster):
        copies = choice.devices // (choice.tensor * choice.pipeline)
        for degree in (0, *(each for each in range(2, copies) if copies % each == 0)) if choice.zero == 1 else ():
            estimate = model.estimate(replace(choice, shard_degree=degree))
            best_s += [estimate.step_s] if estimate.fits else []
    assert on(work, cluster, zero=1).best.estimate.step_s <= 1.02 * min(best_s)


def test_shares_and_stages_of_unlike_devices_are_within_two_hundredths_of_brute_force() -> None:
    work = replace(SMALL, global_batch=12, precision="fp16")
    there = parse_cluster.parse_cluster("2xA100-40GB, 1xV100-16GB, 100Gb/s")
    sizes, best_s = (1, 2, 4, 8, 12), []
    for groups in (there.groups, there.groups[:1], there.groups[1:]):
        part = replace(there, groups=groups)
        model, parts = CostModel(work, part), range(1, work.global_batch + 1)
        shared = [each for each in itertools.product(parts, repeat=part.devices) if sum(each) == work.global_batch]
        ways: list[tuple[int, Reduce]] = [
            (1, "per_step"),
            (2, "per_micro_batch"),
            (3, "per_step"),
            (3, "per_micro_batch"),
        ]
        for shares, (zero, reduce), size in itertools.product(shared, ways[: 4 if part.devices > 1 else 1], sizes):
            estimate = model.estimate(LayoutChoice(zero=zero, reduce=reduce, shares=shares, micro_batch=size))
            best_s += [estimate.step_s] if estimate.fits else []
    found = search_layouts(work, there, SearchSpace())
    assert found.best.estimate.step_s <= 1.02 * min(best_s)
    two, best_s = parse_cluster.parse_cluster("1xA100-40GB, 1xV100-16GB, 100Gb/s"), []
    for groups, first, size in itertools.product((two.groups, two.groups[::-1]), range(1, work.layers), sizes):
        choice = LayoutChoice(pipeline=2, stages=(first, work.layers - first), micro_batch=size)
        best_s.append(CostModel(work, replace(two, groups=groups)).estimate(choice).step_s)
    assert search_layouts(work, two, SearchSpace(((1, 2),))).best.estimate.step_s <= 1.02 * min(best_s)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 200),
    size=st.sampled_from([1, 2, 4, 16]),
    text=st.sampled_from(["2xA100-40GB, 1xV100-16GB, 100Gb/s", "3xT4, 2xH100-80GB, 4xV100-16GB, 10Gb/s"]),
)
def test_shares_in_numbers_of_their_own_are_those_of_a_run(batch: int, size: int, text: str) -> None:
    there = parse_cluster.parse_cluster(text)
    unlike, copies = HeterogeneousDevices(replace(SMALL, global_batch=batch, precision="fp16"), there), there.devices
    choice = LayoutChoice(micro_batch=size, devices=copies)
    speeds = [Speed(each, fixed, size) for count, fixed, each in unlike.classes(choice, copies) for _ in range(count)]
    best = divide(batch, speeds, lockstep=False)
    shares = unlike.divide_batch(choice, copies)
    if shares:
        found = cut_into_micro_batches(shares, [size] * copies, lockstep=False)
        assert slowest_s(found, speeds) == pytest.approx(slowest_s(best, speeds), rel=1e-9)
    else:  # one of them would have none: what it takes for one is all that a step takes, whoever has the others
        assert slowest_s(best, speeds) == pytest.approx(max(speed.seconds(1, 1) for speed in speeds), rel=1e-9)


def test_one_long_sequence_at_a_time_on_unlike_devices_goes_at_their_summed_speed() -> None:
    work = replace(SMALL, seq_len=16384, global_batch=60, precision="fp16")
    there = parse_cluster.parse_cluster("2xA100-40GB, 2xV100-32GB, 100Gb/s")
    alone = [replace(there, groups=groups) for groups in (there.groups[:1], there.groups[1:])]
    space = SearchSpace(pins={"micro_batch": 1, "zero": 1})
    both, *each = (search_layouts(work, cluster, space).best for cluster in (there, *alone))
    assert both.choice.reduce == "per_step" and not both.choice.lockstep
    assert both.estimate.tokens_per_s > 0.9 * sum(plan.estimate.tokens_per_s for plan in each)
    # Where all run as many, the slow ones hold up the fast ones in each.
    released = search_layouts(work, there, SearchSpace(pins={"micro_batch": 1, "zero": 3}, use_all_devices=True)).best
    assert released.choice.lockstep
    assert released.estimate.tokens_per_s < 0.8 * both.estimate.tokens_per_s


clusters = st.builds(
    "{}x({}x{}), {}Gb/s".format,
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["T4", "V100-16GB", "A100-40GB", "H100-80GB"]),
    st.sampled_from([1, 10, 100, 400]),
)
works = st.builds(
    replace,
    st.just(replace(SMALL, precision="fp16")),
    layers=st.integers(2, 12),
    hidden=st.sampled_from([512, 1024, 4096, 8192]),
    seq_len=st.sampled_from([256, 1024]),
    global_batch=st.integers(1, 40),
)


@given(works, clusters)
@settings(max_examples=15 if ALL else 8, deadline=None)
def test_what_is_returned_fits_and_comes_out_even(work: StepWork, text: str) -> None:
    found = on(work, text)
    assert bool(found.plans) == (found.shortfall is None)
    if found.shortfall is not None:
        assert found.shortfall.missing_bytes > 0
    steps = [plan.estimate.step_s for plan in found.plans]
    assert steps == sorted(steps)
    for plan in found.plans:
        again = CostModel(work, plan.cluster).estimate(plan.choice)
        assert again.fits
        assert again.step_s == pytest.approx(plan.estimate.step_s)
        shares, stages = plan.choice.shares, plan.choice.stages
        assert not shares or (sum(shares) == work.global_batch and len(shares) == plan.copies)
        assert not stages or (sum(stages) == work.layers and len(stages) == plan.choice.pipeline)
        assert plan.devices == plan.copies * plan.choice.tensor * plan.choice.pipeline <= plan.cluster.devices


@given(works, clusters)
@settings(max_examples=8 if ALL else 3, deadline=None)
def test_more_of_anything_never_makes_it_slower(work: StepWork, text: str) -> None:
    there = parse_cluster.parse_cluster(text)
    before = tokens_per_s(on(work, there))
    faster = replace(there, between_bits_per_s=2 * there.between_bits_per_s)
    kind = there.groups[0].kind
    roomier = replace(kind, memory_bytes=int(1.5 * kind.memory_bytes))
    larger = replace(there, groups=tuple(replace(group, kind=roomier) for group in there.groups))
    for other in (
        faster,
        larger,
        parse_cluster.add_nodes(there, 0, 1),
        parse_cluster.add_nodes(there, 0, there.nodes),
    ):
        assert tokens_per_s(on(work, other)) >= before * (1 - 1e-9)


def test_nodes_that_do_not_help_are_left_idle_by_a_layout_that_sends_less_between_them() -> None:
    """On two of the nodes each holds a whole copy of the state, as on all that there are."""
    work = StepWork(4, 192, 6, 3, 512, 2048, seq_len=256, global_batch=16, tied=True, head_dim=32, memory="auto")
    two, three = (
        on(replace(work, replicate="auto"), f"{nodes}x(3xRTX-4090), 15Gb/s", micro_batch=3) for nodes in (2, 3)
    )
    assert two.best.choice.shard_degree == 3
    assert tokens_per_s(three) >= tokens_per_s(two)


def test_some_of_few_slow_nodes_may_stay_idle() -> None:
    """The shares of micro-batches of 3 are whole ones beside two nodes of H200s, and not beside three."""
    work = StepWork(32, 4096, 32, 8, 14336, 128256, seq_len=8192, global_batch=512, memory="auto", replicate="auto")
    pins = {"micro_batch": 3, "tensor": 1, "pipeline": 1}
    before, after = (on(work, f"{nodes}x(8xH200), 4x(4xB200), 400Gb/s", **pins) for nodes in (2, 3))
    assert tokens_per_s(after) >= tokens_per_s(before) * (1 - 1e-9)
    assert [group.nodes for group in after.best.cluster.groups] == [2, 4]


@given(works, st.sampled_from(["4xA100-40GB, 2xV100-16GB, 50Gb/s", "2x(2xH100-80GB), 3x(2xT4), 10Gb/s"]))
@settings(max_examples=6 if ALL else 3, deadline=None)
def test_unlike_devices_get_shares_that_sum_and_are_never_worse_than_one_kind_alone(work: StepWork, text: str) -> None:
    there = parse_cluster.parse_cluster(text)
    found = on(work, there)
    for plan in found.plans:
        assert plan.estimate.fits
        assert not plan.choice.shares or sum(plan.choice.shares) == work.global_batch
        assert not plan.choice.state or sum(plan.choice.state) == pytest.approx(1)
    for group in there.groups:
        alone = on(work, replace(there, groups=(group,)))
        assert tokens_per_s(found) >= tokens_per_s(alone) * (1 - 1e-9)


def test_the_faster_kind_gets_more() -> None:
    work = replace(SMALL, global_batch=512, precision="fp16")
    best = on(work, "4xA100-40GB, 4xV100-16GB, 400Gb/s", pipeline=1, tensor=1).best
    assert best.cluster.devices == 8
    a100, v100 = best.choice.shares[0], best.choice.shares[-1]
    assert a100 > 1.5 * v100
    even = CostModel(work, best.cluster).estimate(replace(best.choice, shares=()))
    assert best.estimate.step_s < 0.8 * even.step_s


def test_a_stage_on_slower_devices_has_fewer_layers() -> None:
    work = replace(LLAMA_7B, precision="fp16", gather_bytes=4)
    best = on(work, "8xA100-80GB, 8xV100-32GB, 100Gb/s", pipeline=2, virtual=1).best
    names = [group.kind.name for group in best.cluster.groups]
    by_kind = dict(zip(names, best.choice.stages, strict=True))
    assert by_kind["A100-80GB"] > 1.5 * by_kind["V100-32GB"]


def test_a_device_that_costs_more_than_it_computes_stays_idle() -> None:
    work = replace(SMALL, precision="fp16")
    best = on(work, "8xH100-80GB, 1xT4, 1Gb/s").best
    assert best.devices == 8
    assert [group.kind.name for group in best.cluster.groups] == ["H100-80GB"]


def test_a_step_of_few_sequences_leaves_devices_idle() -> None:
    best = on(replace(SMALL, layers=2, hidden=512, global_batch=3), "8xA100-40GB", tensor=1, pipeline=1).best
    assert best.devices == 3


def test_what_is_pinned_stays() -> None:
    found = on(LLAMA_7B, "8xA100-80GB", zero=3, recompute="full", offload=False, micro_batch=2, tensor=1, pipeline=1)
    for plan in found.plans:
        choice = plan.choice
        assert (choice.zero, choice.recompute, choice.offload, choice.micro_batch) == (3, "full", False, 2)
        assert (choice.tensor, choice.pipeline) == (1, 1)


# --------------------------------------------------------------------------------------------------------------- golden


def used(plan: Plan) -> tuple[int, int, int]:
    return plan.choice.tensor, plan.choice.pipeline, plan.copies


def test_seven_billion_on_one_node_needs_hardly_a_cut() -> None:
    """112 GB of state over 8 devices are 14 GB each: nothing needs to be cut. Sharded data parallelism alone is what
    people run (Llama 2's own recipe, MosaicML's tables); two stages or slices make room to keep more activations, which
    may pay by a few hundredths, and more would be wrong."""
    found = on(LLAMA_7B, "8xA100-80GB")
    best = found.best
    assert best.choice.tensor * best.choice.pipeline <= 2
    assert best.choice.zero in (1, 2)
    assert best.choice.recompute in ("none", "selective")
    plain = min(plan.estimate.step_s for plan in found.plans if used(plan) == (1, 1, 8))
    assert plain <= 1.03 * best.estimate.step_s


def test_seventy_billion_on_32_nodes_is_not_replicated() -> None:
    """1.1 TB of state: a whole set of bf16 weights alone is 141 GB, so either each matrix is cut, or each is fetched
    (zero 3). At 32 nodes and 4 million tokens a step both are run; what would be wrong is a pipeline of dozens, or
    slices over more than a node."""
    best = on(LLAMA_70B, "32x(8xH100-80GB), 400Gb/s").best
    tensor, pipeline, _ = used(best)
    assert best.choice.zero == 3 or tensor * pipeline >= 4
    assert tensor <= 8
    assert pipeline <= 8
    assert best.devices == 256
    assert 0.25 < best.estimate.mfu < 0.6


def test_175_billion_on_64_nodes_is_cut_both_ways() -> None:
    """Gradients of 700 GB over 800 Gb/s would take longer each micro-batch than computing: Narayanan et al. 2021 ran
    tensor 8 x pipeline 12 to 16 with interleaved stages; within a node as many slices as pay, between nodes stages."""
    best = on(GPT_175B, "64x(8xA100-80GB), 800Gb/s").best
    tensor, pipeline, _ = used(best)
    assert 2 <= tensor <= 8
    assert 4 <= pipeline <= 32
    assert best.devices >= 0.95 * 512
    assert 0.35 < best.estimate.mfu < 0.65


def test_what_fits_nowhere_is_said_to_be_short() -> None:
    found = on(replace(GPT_175B, precision="fp16"), "2x(8xT4), 10Gb/s")
    assert found.plans == ()
    assert found.shortfall is not None
    assert found.shortfall.kind.name == "T4"
    assert found.shortfall.needed_bytes == pytest.approx(
        found.shortfall.kind.memory_bytes + found.shortfall.missing_bytes
    )
    with pytest.raises(IndexError):
        found.best  # noqa: B018


@pytest.mark.parametrize(
    ("work", "text", "cpu_s"),
    some(
        [
            (GPT_175B, "128x(8xA100-80GB), 800Gb/s", 2.0),
            (replace(LLAMA_13B, precision="fp16"), "8x(8xH100-80GB), 8x(8xA100-80GB), 8x(8xV100-32GB), 200Gb/s", 5.0),
        ],
        0,
    ),
)
def test_large_clusters_are_searched_in_seconds(work: StepWork, text: str, cpu_s: float) -> None:
    before = time.process_time()
    assert on(work, text).plans
    assert time.process_time() - before < 3 * cpu_s  # of this process alone; a loaded machine is slower at the same


def test_degrees_divide() -> None:
    for tensor, pipeline in list_degrees(LLAMA_70B, parse_cluster.parse_cluster("4x(8xH100-80GB)")):
        assert 64 % tensor == 0
        assert 8 % tensor == 0
        assert pipeline <= 32 // tensor


def test_few_stages_are_tried_in_every_number() -> None:
    assert {(1, 5), (1, 7)} <= set(list_degrees(LLAMA_7B, parse_cluster.parse_cluster("7xA100-80GB")))
    usual = list_degrees(GPT_175B, parse_cluster.parse_cluster("128x(8xA100-80GB)"))
    assert {pipeline for _, pipeline in usual} == {*range(1, 9), 12, 16, 24, 32, 48, 64, 96}
    assert (2, 11) in set(list_degrees(LLAMA_7B, parse_cluster.parse_cluster("8x(8xA100-80GB)"), 11))


@pytest.mark.parametrize(("layers", "nodes"), [(5, 5), (5, 6), (11, 12)])
def test_a_model_that_fits_only_with_a_layer_for_each_device_is_found(layers: int, nodes: int) -> None:
    work = replace(SMALL, layers=layers, hidden=8192, seq_len=256, global_batch=1, precision="fp16")
    best = on(work, f"{nodes}x(1xT4), 1Gb/s").best
    assert best.choice.pipeline == layers
    assert on(work, "4x(1xT4), 1Gb/s").plans == ()


def test_a_type_that_a_device_does_not_have_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="V100-16GB computes no bf16"):
        on(SMALL, "4xV100-16GB")


def test_a_fast_copy_may_have_its_whole_share_in_one_micro_batch() -> None:
    """An even share is 6 of 16; the fast ones get 8, which two micro-batches of 4 would take twice as long for."""
    work = replace(SMALL, hidden=256, ffn=704, global_batch=16, precision="fp16")
    there = parse_cluster.parse_cluster("2xA100-80GB, 1xT4")
    found = search_layouts(work, there, SearchSpace(((1, 1),), use_all_devices=True))
    assert max(found.best.choice.shares) > 6
    assert found.best.choice.micro_batch >= max(found.best.choice.shares)


def test_on_a_host_nothing_is_moved_to_the_host() -> None:
    found = on(replace(SMALL, precision="fp32"), "2xCPU")
    assert found.plans and not any(plan.choice.offload for plan in found.plans)
