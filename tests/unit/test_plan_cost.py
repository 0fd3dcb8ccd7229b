"""What a layout costs: each formula against a sum by hand, and the whole against what must hold of any cluster."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from phalanx.core.errors import ConfigError
from phalanx.layout import comm_schedule, pipeline_stages
from phalanx.layout.balance import split_evenly
from phalanx.layout.model_shape import LoraSpec
from phalanx.layout.pipeline_stages import STAGES_PER_RANK, divide_layers, simulate_schedule, step_s
from phalanx.models.families.catalog import PRESETS, flops_per_token, parameter_count
from phalanx.parallel.pipeline import build_actions
from phalanx.planner import compute_cost, link_cost, parse_cluster
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.compute_cost import StageCost, filling_s
from phalanx.planner.cost import TERMS, CostModel, StepEstimate, estimate_step
from phalanx.planner.device_catalog import DEVICE_KINDS, GIB, CostConstants, DeviceKind, find_kind, unknown_kind_message
from phalanx.planner.layout_choice import EngineName, LayoutChoice, PipelineSchedule
from phalanx.planner.link_cost import RingPlacement
from phalanx.planner.measured_cluster import match_device_name
from phalanx.planner.memory import DeviceMemory
from phalanx.planner.work import StepWork, find_ffn_widths, find_trained_share
from phalanx.system.accelerator import peak_flops

# Everything is reached in full, nothing is waited for: what is left can be summed by hand.
FULL = CostConstants(
    matmul_share=1.0, matmul_tail=0.0, unaligned_share=0.5, attention_share=1.0, memory_share=1.0, traffic=1.0,
    launch_s=0.0, queueing=2.0, skew_s=0.0, near_share=1.0, far_share=1.0, interference=0.0, step_s=0.0, jitter=0.0,
    slack=0.0,
)  # fmt: skip
# 1 Tflop/s, memory that moves data in no time, 1 GB/s to its neighbours.
PLAIN = DeviceKind(
    "plain", {"bf16": 1e12, "fp32": 1e11}, 10**12, 1e30, 1e9, 0.0, 1, "by hand", sustained=1.0, host_bytes_per_s=1e9,
    reserved_bytes=0,
)  # fmt: skip
SMALL = StepWork(
    layers=4, hidden=512, heads=8, kv_heads=8, ffn=2048, vocabulary=1024, seq_len=256, global_batch=16, gated=False,
    reduce_bytes=2,
)  # fmt: skip
ALIKE = replace(SMALL, vocabulary=8)  # no head to speak of: all stages are alike


def alone(devices: int = 1, per_node: int = 8, far: float = 8e9) -> ClusterSpec:
    nodes = -(-devices // per_node)
    return ClusterSpec((NodeGroup(nodes, min(devices, per_node), PLAIN),), far, 0.0)


# ----------------------------------------------------------------------------------------------------------------- work


@pytest.mark.parametrize("name", ["llama-1-7b", "llama-2-70b", "llama-3-8b"])
def test_parameters_and_operations_are_those_of_the_model_itself(name: str) -> None:
    spec = PRESETS[name]
    work = StepWork(
        layers=spec.layers, hidden=spec.hidden, heads=spec.heads, kv_heads=spec.kv_heads, ffn=spec.intermediate,
        vocabulary=spec.vocab_size, seq_len=2048, global_batch=1, tied=spec.tie_embeddings, head_dim=spec.head_dim,
    )  # fmt: skip
    assert work.parameters() == parameter_count(spec)
    # The model's own count takes the norms' vectors for matrices, a few millionths of it.
    assert work.flops_per_token() == pytest.approx(flops_per_token(spec, 2048)[0], rel=1e-4)


@pytest.mark.parametrize("dense_layers", [(), (0, 2)])
def test_layers_without_experts_count_as_they_are(dense_layers: tuple[int, ...]) -> None:
    spec = PRESETS["qwen3-30b-a3b"]
    assert spec.moe is not None
    spec = replace(spec, layers=8, moe=replace(spec.moe, dense_layers=dense_layers))
    work = StepWork(
        layers=8, hidden=spec.hidden, heads=spec.heads, kv_heads=spec.kv_heads, vocabulary=spec.vocab_size,
        seq_len=2048, global_batch=1, tied=spec.tie_embeddings, head_dim=spec.head_dim, qk_norm=True,
        **find_ffn_widths(spec.layers, spec.intermediate, spec.moe),
    )  # fmt: skip
    assert work.parameters() == parameter_count(spec)
    assert work.flops_per_token() == pytest.approx(flops_per_token(spec, 2048)[0], rel=1e-4)


def test_parameters_of_gpt_with_biases_and_positions() -> None:
    # 12 layers hidden^2 (1 + 13 / (12 hidden) + (vocabulary + positions) / (12 layers hidden)), Narayanan et al. 2021;
    # a last norm they leave out. This one is MPT-7B as it is published.
    work = StepWork(
        layers=32, hidden=4096, heads=32, kv_heads=32, ffn=16384, vocabulary=50368, seq_len=2048, global_batch=1,
        tied=True, gated=False, biases=True, positions=2048,
    )  # fmt: skip
    formula = 12 * 32 * 4096**2 * (1 + 13 / (12 * 4096) + (50368 + 2048) / (12 * 32 * 4096))
    assert work.parameters() == pytest.approx(formula + 2 * 4096, abs=1) and work.parameters() == 6_658_859_008


def test_frozen_parameters_get_no_gradient_of_their_own() -> None:
    attention = 12 * 512 * 256 * 4
    multiplying = 4 * 12 * 512**2 + 1024 * 512
    assert SMALL.flops_per_token() == 6 * multiplying + attention
    adapters = 4 * 8 * ((512 + 512) + (2048 + 512))  # q and down
    adapted = replace(SMALL, lora=LoraSpec(rank=8, alpha=16.0, targets=("q", "down")))
    assert adapted.flops_per_token() == pytest.approx(4 * multiplying + 6 * adapters + attention)
    assert (
        adapted.parameters() == SMALL.parameters() + adapters == pytest.approx(adapters / find_trained_share(adapted))
    )


# -------------------------------------------------------------------------------------------------------------- compute


def test_a_product_by_hand() -> None:
    # 2 x 1000 x 2000 x 3000 = 12 Gflop.
    assert compute_cost.matmul_s(1000, 2000, 3000, PLAIN, "bf16", FULL) == pytest.approx(0.012)
    # 2 x 10^6 / 32768 tiles are 61.04 waves of one core; half a wave more.
    tail = replace(FULL, matmul_tail=0.5)
    assert compute_cost.matmul_s(1000, 2000, 3000, PLAIN, "bf16", tail) == pytest.approx(
        0.012 * (1 + 0.5 / (2e6 / 32768))
    )
    assert compute_cost.matmul_s(1000, 2001, 3000, PLAIN, "bf16", FULL) == pytest.approx(2 * 0.012006)  # not aligned
    # One row: 3 x 10^6 + 2000 + 3000 elements of two bytes, at 1 GB/s.
    slow = replace(PLAIN, memory_bytes_per_s=1e9)
    assert compute_cost.matmul_s(1, 1000, 3000, slow, "bf16", FULL) == pytest.approx(
        2 * (3000 + 3_000_000 + 1000) / 1e9
    )


def test_a_pass_takes_the_longer_of_host_and_device_and_more_where_they_are_alike() -> None:
    assert compute_cost.overlap_host_s(3.0, 4.0, FULL) == pytest.approx(5.0)  # of exponent 2
    assert compute_cost.overlap_host_s(4.0, 3.0, FULL) == pytest.approx(5.0)
    assert compute_cost.overlap_host_s(3.0, 0.0, FULL) == 3.0
    assert compute_cost.overlap_host_s(1.0, 1e-12, replace(FULL, queueing=8.0)) == pytest.approx(1.0)
    assert compute_cost.overlap_host_s(0.0, 2.0, FULL) == 2.0


def test_a_block_by_hand() -> None:
    tokens = 2 * 256
    products = 2 * tokens * 12 * 512**2 / 1e12
    scores = 4 * 2 * 256**2 * 512 / 1e12
    found = compute_cost.block_pass(SMALL, PLAIN, LayoutChoice(attention="plain"), 2, FULL)
    assert found.forward_s == pytest.approx(products + scores)
    assert found.backward_s == pytest.approx(2 * (products + scores))
    # A causal kernel does half of it, and computes scores again.
    flash = compute_cost.block_pass(SMALL, PLAIN, LayoutChoice(), 2, FULL)
    assert flash.forward_s == pytest.approx(products + scores / 2)
    assert flash.backward_s == pytest.approx(2 * products + 2.5 * scores / 2)
    again = compute_cost.block_pass(SMALL, PLAIN, LayoutChoice(recompute="full"), 2, FULL)
    assert again.backward_s == pytest.approx(flash.backward_s + flash.forward_s)
    halved = compute_cost.block_pass(SMALL, PLAIN, LayoutChoice(tensor=2), 2, FULL)
    assert halved.forward_s == pytest.approx(flash.forward_s / 2)
    adapted = replace(SMALL, lora=LoraSpec(rank=8, alpha=16.0, targets=("q",)))
    frozen = compute_cost.block_pass(adapted, PLAIN, LayoutChoice(), 2, FULL)
    assert frozen.backward_s == pytest.approx(flash.backward_s - products)


def test_what_only_moves_data_takes_the_memory_by_hand() -> None:
    slow = replace(PLAIN, flop_per_s={"bf16": 1e30}, memory_bytes_per_s=1e9)
    found = compute_cost.block_pass(SMALL, slow, LayoutChoice(), 1, FULL)
    # Products read and write too: (rows depth + depth columns + rows columns) of each of the four.
    shapes = ((1536, 512), (512, 512), (2048, 512), (512, 2048))
    products = sum(256 * depth + depth * columns + 256 * columns for columns, depth in shapes)
    # Norms and residuals 10 passes of hidden, queries, keys, values and their result 2 each, activation in and out.
    passes = 256 * (10 * 512 + 2 * 1536 + 2 * 512 + 2 * 2048)
    assert found.forward_s == pytest.approx(2 * (products + passes) / 1e9)


def test_the_host_is_asked_for_each_kernel() -> None:
    calls = replace(FULL, launch_s=1e-3)
    found = compute_cost.block_pass(SMALL, PLAIN, LayoutChoice(), 1, calls)
    assert (found.host_forward_s, found.host_backward_s) == (
        pytest.approx(1e-3 * compute_cost.KERNELS[0]), pytest.approx(1e-3 * compute_cost.KERNELS[1]),
    )  # fmt: skip
    assert compute_cost.block_pass(SMALL, replace(PLAIN, on_host=True), LayoutChoice(), 1, calls).host_forward_s == 0.0


def test_attention_computes_what_is_seen() -> None:
    tensor_cores = replace(PLAIN, flop_per_s={"bf16": 1e12, "fp16": 1e12, "fp32": 1e11})
    assert compute_cost.attention_density(SMALL, tensor_cores) == 0.5
    assert compute_cost.attention_density(replace(SMALL, both_ways=True), tensor_cores) == 1.0
    # Of 256 positions the first 64 see 1 to 64, and 192 see 64 each: 64 x 64 / 2 + 192 x 64 of 256 x 256.
    narrow = replace(SMALL, window=64)
    assert compute_cost.attention_density(narrow, tensor_cores) == pytest.approx((2048 + 12288) / 65536)
    assert compute_cost.attention_density(replace(narrow, full_layers=1), tensor_cores) == pytest.approx(
        (3 * 0.21875 + 0.5) / 4
    )
    assert compute_cost.attention_density(replace(SMALL, window=256), tensor_cores) == 0.5
    # Without a kernel for it: 128 positions with 128, and 128 with 256; longer windows have bands as long as they are.
    assert compute_cost.attention_density(narrow, replace(tensor_cores, on_host=True)) == pytest.approx(
        (128 * 128 + 128 * 256) / 65536
    )
    assert compute_cost.attention_density(replace(narrow, precision="fp32"), tensor_cores) == pytest.approx(0.75)
    long = replace(narrow, seq_len=1024, window=256)
    before_ampere = replace(tensor_cores, flop_per_s={"fp16": 1e12, "fp32": 1e11})
    assert compute_cost.attention_density(long, before_ampere) == pytest.approx((256 * 256 + 3 * 256 * 512) / 1024**2)
    # Of a block only attention changes.
    whole, part = (compute_cost.block_pass(each, tensor_cores, LayoutChoice(), 2, FULL) for each in (SMALL, narrow))
    pairs = 4 * 2 * 256**2 * 512 / 1e12
    assert whole.forward_s - part.forward_s == pytest.approx((0.5 - 0.21875) * pairs)
    assert whole.backward_s - part.backward_s == pytest.approx(2.5 * (0.5 - 0.21875) * pairs)


def test_the_edges_of_a_model_by_hand() -> None:
    tokens, hidden, columns = 3 * 256, 512, 1024
    product = 2 * tokens * columns * hidden / 1e12
    found = compute_cost.head_pass(SMALL, PLAIN, LayoutChoice(), 3, FULL)
    assert (found.forward_s, found.backward_s) == (pytest.approx(product), pytest.approx(2 * product))
    assert compute_cost.head_pass(SMALL, PLAIN, LayoutChoice(tensor=2), 3, FULL).forward_s == pytest.approx(product / 2)
    slow = replace(PLAIN, flop_per_s={"bf16": 1e30}, memory_bytes_per_s=1e9)
    found = compute_cost.head_pass(SMALL, slow, LayoutChoice(), 3, FULL)
    moved = 2 * (tokens * hidden + hidden * columns + tokens * columns)
    # Logits in two bytes are read and written in four, read for their maximum, exponents and sum; gradients likewise.
    assert found.forward_s == pytest.approx((moved + 20 * tokens * columns) / 1e9)
    assert found.backward_s == pytest.approx((2 * moved + 16 * tokens * columns) / 1e9)
    # Rows of the table are read and written; backward half as much more, and the table is cleared.
    found = compute_cost.embedding_pass(SMALL, slow, LayoutChoice(), 3, FULL)
    assert found.forward_s == pytest.approx(2 * 2 * tokens * hidden / 1e9)
    assert found.backward_s == pytest.approx(2 * (3 * tokens * hidden + columns * hidden) / 1e9)


# ---------------------------------------------------------------------------------------------------------------- links


def test_rings_by_hand() -> None:
    near = RingPlacement(4, 1, 1, PLAIN)
    assert link_cost.reduce_scatter_s(1e9, near, alone(4), FULL) == pytest.approx(0.75)  # (n - 1) / n at 1 GB/s
    assert link_cost.all_reduce_s(1e9, near, alone(4), FULL) == pytest.approx(1.5)
    assert link_cost.reduce_scatter_s(1e9, RingPlacement(1, 1, 1, PLAIN), alone(), FULL) == 0.0
    # Two nodes of two at 0.5 GB/s: half of the bytes cross, twice as long as inside.
    cluster = alone(4, per_node=2, far=4e9)
    assert link_cost.reduce_scatter_s(1e9, RingPlacement(4, 2, 1, PLAIN), cluster, FULL) == pytest.approx(1.0)
    assert link_cost.reduce_scatter_s(1e9, RingPlacement(2, 2, 2, PLAIN), cluster, FULL) == pytest.approx(
        2.0
    )  # two rings share a cable
    assert link_cost.reduce_scatter_s(1e9, RingPlacement(4, 2, 1, PLAIN), cluster, FULL, shorter=0.75) == pytest.approx(
        0.75
    )
    assert link_cost.reduce_scatter_s(1e9, RingPlacement(4, 2, 1, PLAIN), cluster, FULL, shorter=0.25) == pytest.approx(
        0.5
    )  # of a node
    late = replace(PLAIN, link_latency_s=0.1)
    far = replace(cluster, between_latency_s=1.0)
    assert link_cost.reduce_scatter_s(1.0, RingPlacement(4, 2, 1, late), far, FULL) == pytest.approx(
        1.2
    )  # 1 step between nodes, 2 within


def test_rings_are_found_on_a_cluster() -> None:
    cluster = alone(32)  # 4 nodes of 8
    assert link_cost.ring_of(0, 4, 1, cluster) == RingPlacement(4, 1, 1, PLAIN)
    assert link_cost.ring_of(0, 8, 4, cluster) == RingPlacement(8, 4, 4, PLAIN)  # over tensor ranks: two of each node
    assert link_cost.ring_of(8, 16, 1, cluster) == RingPlacement(16, 2, 1, PLAIN)
    slow = replace(PLAIN, name="slow", link_bytes_per_s=1e8)
    mixed = ClusterSpec((NodeGroup(1, 4, PLAIN), NodeGroup(2, 4, slow)))
    assert link_cost.ring_of(0, 12, 1, mixed) == RingPlacement(12, 3, 1, slow)


def test_unlike_devices_of_one_node_are_near_each_other() -> None:
    other = replace(PLAIN, name="other")
    # Two nodes of two devices of a kind; the second one has another one, too, and a third node only that.
    cluster = ClusterSpec((NodeGroup(2, 2, PLAIN), NodeGroup(1, 1, other, shares_node=True), NodeGroup(1, 1, other)))
    assert [cluster.node_of(device) for device in range(6)] == [0, 0, 1, 1, 1, 2]
    assert cluster.nodes == 3
    assert link_cost.ring_of(0, 6, 1, cluster).nodes == 3
    assert link_cost.ring_of(2, 3, 1, cluster) == RingPlacement(3, 1, 1, PLAIN)
    turned = cluster.select_groups((1, 0))
    assert [(group.kind.name, group.shares_node) for group in turned.groups] == [("other", False), ("plain", True)]
    assert [group.shares_node for group in cluster.select_groups((0, 2)).groups] == [False, False]
    assert cluster.select_groups(range(3)) == cluster
    assert parse_cluster.format_cluster(cluster.select_groups((0, 1))) == "2x(2xplain) + 1xother, 100Gb/s"
    assert parse_cluster.add_nodes(cluster, 0, -2).groups == (NodeGroup(1, 1, other), NodeGroup(1, 1, other))


def test_the_slowest_copy_of_the_state_is_waited_for() -> None:
    """Two devices of a node share one, and two nodes of one device each the other, wherever they stand."""
    inside, between = NodeGroup(1, 2, PLAIN), NodeGroup(2, 1, PLAIN)
    waits = [
        step(SMALL, ClusterSpec(groups, 1e9, 0.0), micro_batch=4, shard_degree=2).terms["communication"]
        for groups in ((inside, between), (between, inside))
    ]
    assert waits[0] == pytest.approx(waits[1])
    # Where rings and nodes do not begin together: the second one of two has a device of each node.
    odd = ClusterSpec((NodeGroup(2, 3, PLAIN),), 1e9, 0.0)
    assert CostModel(SMALL, odd)._shard_ring(0, 2, 1, 3) == RingPlacement(2, 2, 1, PLAIN)


def test_slices_hand_on_their_part_of_the_sequence() -> None:
    slow = ClusterSpec((NodeGroup(1, 4, replace(PLAIN, link_bytes_per_s=1e8)),))
    whole, cut = (
        step(ALIKE, slow, tensor=2, pipeline=2, micro_batch=1, sequence=sequence).terms["communication"]
        for sequence in (False, True)
    )
    handed = 256 * 512 * 2 / 1e8  # of a micro-batch, to the next stage or back
    assert whole - cut == pytest.approx(16 * handed / 2, rel=0.05)


def test_one_rank_hands_to_the_next_by_hand() -> None:
    late = replace(PLAIN, link_latency_s=0.5)
    assert link_cost.send_s(1e9, True, late, alone(), 4, FULL) == pytest.approx(1.5)  # 1 GB/s
    cluster = replace(alone(4, per_node=2, far=4e9), between_latency_s=0.25)
    assert link_cost.send_s(1e9, False, late, cluster, 2, FULL) == pytest.approx(4.25)  # two share a cable of 0.5 GB/s
    # Of n that are late by chance the last one is waited for, as many times longer as there are doublings.
    assert link_cost.skew_s(RingPlacement(8, 1, 1, PLAIN), replace(FULL, skew_s=0.1)) == pytest.approx(0.3)
    assert link_cost.skew_s(RingPlacement(1, 1, 1, PLAIN), replace(FULL, skew_s=0.1)) == 0.0


# ------------------------------------------------------------------------------------------------------------ exchanges


def test_an_update_by_hand() -> None:
    # Gradient of 2 bytes 3 times, master weight and moments of 12 in and out, weight of 2 out.
    slow = replace(PLAIN, memory_bytes_per_s=1e9)
    assert link_cost.update_s(SMALL, slow, 1e6, FULL) == pytest.approx(1e6 * (6 + 24 + 2) / 1e9)


def travel(engine: str, passes: tuple[float, float], moved_s: float, **others: object) -> link_cost.CommTime:
    """Of 7 blocks and the edges as another, a reduce and a gather of `moved_s` each over four ranks."""
    parameters = moved_s * 1e9 / 0.75 / 2
    micro_batches = int(others.pop("micro_batches", 1))  # type: ignore[call-overload]
    cluster = replace(alone(4), busy_hop_s=others.pop("busy_hop_s", 0.0))  # type: ignore[arg-type]
    choice = LayoutChoice(engine=engine, **others)  # type: ignore[arg-type]
    rings = (RingPlacement(4, 1, 1, PLAIN), RingPlacement(1, 1, 1, PLAIN), 0.25)
    return link_cost.estimate_comm_time(
        SMALL, choice, parameters, 7, rings, 0.25, passes, micro_batches, cluster, FULL
    )  # fmt: skip


def alike(units: int, passes: tuple[float, float], moved_s: float, **others: object) -> comm_schedule.StepTimings:
    """The same for the project's own schedule."""
    forward, backward = ((seconds / units,) * units for seconds in passes)
    link = (moved_s / units,) * units
    return comm_schedule.StepTimings(forward, backward, link, link, (0.0,) * units, parts=8, **others)  # type: ignore[arg-type]


def test_the_serial_optimizer_waits_for_everything() -> None:
    found = travel("megatron", (1.0, 2.0), 0.5)
    assert (found.exposed_s, found.hidden_s) == (pytest.approx(1.0), 0.0)


@pytest.mark.parametrize("moved_s", [0.1, 0.5, 0.9, 1.5, 3.0])
def test_ddp_is_what_the_schedule_says_of_it(moved_s: float) -> None:
    step = 3.0 + travel("ddp", (1.0, 2.0), moved_s).exposed_s
    assert step == pytest.approx(comm_schedule.ddp_step_s(alike(8, (1.0, 2.0), moved_s)), rel=0.02)


@pytest.mark.parametrize("early", [False, True])
def test_what_waits_for_ranks_that_compute_hides_more_slowly(early: bool) -> None:
    """1 s of reduces and 1 s of gathers behind passes of 1 and 2 s, in 8 units of 4 parts, two of which are under way:
    16 times a part waits for one hop."""
    at_once = travel("sharded", (1.0, 2.0), 1.0, slots=2 if early else 1)
    later = travel("sharded", (1.0, 2.0), 1.0, slots=2 if early else 1, busy_hop_s=0.1)
    if early:  # 2 s take 2 + 2 x 1.6 s beside computation, of which there is 7/8 of 3 s
        assert later.exposed_s == pytest.approx(2.0 - 2.625 * 2.0 / 5.2)
    else:  # each of them takes 2.6 s beside computation: 7/8 of 2 s, and of 1 s
        assert later.exposed_s == pytest.approx((1.0 - 1.75 / 2.6) + (1.0 - 0.875 / 2.6))
    assert at_once.exposed_s < later.exposed_s and later.exposed_s + later.hidden_s == pytest.approx(2.0)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("reduce", ["per_step", "per_micro_batch"])
@pytest.mark.parametrize("moved_s", [0.1, 0.5, 0.9, 1.5, 3.0])
def test_our_own_order_is_what_its_schedule_reaches(moved_s: float, reduce: str, early: bool) -> None:
    slots = 2 if early else 1
    found = travel("sharded", (1.0, 2.0), moved_s, reduce=reduce, slots=slots, micro_batches=2)
    work = alike(8, (1.0, 2.0), moved_s, micro_batches=2, reduce=reduce, early=early)
    planned = comm_schedule.simulate_order(work, comm_schedule.plan_order(work)).step_s
    assert comm_schedule.lower_bound_s(work) <= planned * 1.001
    assert 6.0 + found.exposed_s == pytest.approx(planned, rel=0.05)


def test_only_what_crosses_nodes_is_compressed() -> None:
    """Of 4 bytes each a quarter; and masters are kept apart, from which parameters are rounded."""
    fp32 = replace(SMALL, precision="fp32", gather_bytes=4, reduce_bytes=4)
    inside, between = alone(4), alone(4, per_node=1, far=8e8)
    for cluster, part in ((inside, 1.0), (between, 0.25)):
        plain, short = (
            step(replace(fp32, far_bytes=far), cluster, micro_batch=4, engine="megatron") for far in (None, 1.0)
        )
        assert short.terms["communication"] == pytest.approx(part * plain.terms["communication"])
    held_, rounded = (step(replace(fp32, far_bytes=far), inside).memory[0].parts for far in (None, 1.0))
    assert held_["master weights"] == 0 < rounded["master weights"]


def test_blocks_fetched_ahead_take_what_is_longer() -> None:
    hidden = travel("fsdp", (1.0, 2.0), 0.4, zero=3, micro_batches=3)
    # The first fetch and the last reduce of 8 units each, in all three.
    assert hidden.exposed_s == pytest.approx(3 * (0.05 + 0.05)) and hidden.hidden_s == pytest.approx(3 * (1.2 - 0.1))
    # Gather 2 s: 1/8 first, then 7/8 behind 1 s forward; gather and reduce 4 s behind 2 s backward, the last 1/8 alone.
    shown = travel("fsdp", (1.0, 2.0), 2.0, zero=3)
    assert shown.exposed_s == pytest.approx(0.25 + (1.75 - 1.0) + (3.75 - 2.0) + 0.25)
    whole = travel("fsdp", (1.0, 2.0), 2.0, zero=2)  # kept until the backward pass
    assert whole.exposed_s == pytest.approx(0.25 + (1.75 - 1.0) + 0.0 + 0.25)
    once = travel("sharded", (1.0, 2.0), 0.4, zero=3, micro_batches=3)  # gradients only of the last
    assert once.exposed_s == pytest.approx(3 * 0.05 + 0.05)


# ---------------------------------------------------------------------------------------------------------- whole steps


def step(work: StepWork, cluster: ClusterSpec, constants: CostConstants = FULL, **choice: object) -> StepEstimate:
    return estimate_step(work, cluster, LayoutChoice(**choice), constants)  # type: ignore[arg-type]


def test_one_device_takes_its_operations() -> None:
    found = step(SMALL, alone(), micro_batch=4, attention="plain")
    assert found.step_s == pytest.approx(SMALL.tokens * SMALL.flops_per_token() / 1e12)
    assert found.mfu == pytest.approx(1.0) and found.tokens_per_s == pytest.approx(SMALL.tokens / found.step_s)


def test_a_device_that_was_measured_to_be_slower_is_used_less_of_what_was_promised() -> None:
    full, half = (
        step(SMALL, ClusterSpec((NodeGroup(1, 1, PLAIN.scale_speed(speed)),)), micro_batch=4) for speed in (1.0, 0.5)
    )
    assert half.step_s == pytest.approx(2 * full.step_s)
    assert half.mfu == pytest.approx(full.mfu / 2)


@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 4), (4, 4), (4, 16)])
def test_the_bubble_is_that_of_one_forward_one_backward(pipeline: int, micro_batches: int) -> None:
    # (p - 1) / m of the time computed, Narayanan et al. 2021; no time between stages.
    fast = ClusterSpec((NodeGroup(1, pipeline, replace(PLAIN, link_bytes_per_s=1e30)),))
    found = step(ALIKE, fast, pipeline=pipeline, micro_batch=16 // micro_batches)
    ideal = found.step_s - found.terms["bubble"] - found.terms["imbalance"]
    assert found.terms["bubble"] == pytest.approx(ideal * (pipeline - 1) / micro_batches, rel=0.02)
    halved = step(ALIKE, fast, pipeline=pipeline, micro_batch=16 // micro_batches, virtual=2)
    assert halved.terms["bubble"] == pytest.approx(found.terms["bubble"] / 2, rel=0.02)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
def test_a_pipeline_takes_what_its_orders_take_also_of_few_micro_batches(schedule: str, micro_batches: int) -> None:
    from phalanx.parallel.pipeline import build_actions

    virtual, plan = STAGES_PER_RANK[schedule], pipeline_stages.divide_layers(16, 4, schedule)
    spans = pipeline_stages.simulate_schedule(
        build_actions(schedule, plan, micro_batches), plan, lambda action: {"F": 1, "B": 2}[action.kind] / 3 / virtual
    )
    fast = ClusterSpec((NodeGroup(1, 4, replace(PLAIN, link_bytes_per_s=1e30)),))
    work = replace(ALIKE, layers=16, global_batch=micro_batches)
    found = step(work, fast, pipeline=4, virtual=virtual, micro_batch=1)
    pass_s = found.terms["compute"] / micro_batches
    assert found.step_s == pytest.approx(pipeline_stages.step_s(spans) * pass_s, rel=0.01)


@pytest.mark.parametrize(
    ("pipeline", "micro_batches"),
    [(2, 1), (2, 2), (2, 3), (2, 4), (3, 3), (4, 1), (4, 3), (4, 4), (4, 5), (4, 6), (4, 8), (4, 17), (8, 12), (8, 16)],
)
@pytest.mark.parametrize("order", ["1f1b", "gpipe", "zero_bubble"])
def test_stages_wait_as_their_orders_have_it(order: PipelineSchedule, pipeline: int, micro_batches: int) -> None:
    plan = divide_layers(2 * pipeline, pipeline, order)
    chunks = STAGES_PER_RANK[order]
    took = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    spans = simulate_schedule(
        build_actions(order, plan, micro_batches), plan, lambda action: took[action.kind] / chunks
    )
    choice = LayoutChoice(pipeline=pipeline, virtual=chunks, order=order)
    waits = filling_s(choice, [StageCost(1.0, 2.0, 0.0, 0.0)] * pipeline, micro_batches)
    assert waits == pytest.approx(step_s(spans) - 3.0 * micro_batches)


def test_folded_stages_have_both_ends_on_one_rank() -> None:
    folded = LayoutChoice(pipeline=2, virtual=2, order="zero_bubble", stages=(1, 2, 4, 3))
    assert folded.layers_of(10) == (4, 6) and replace(folded, order="1f1b").layers_of(10) == (5, 5)
    assert [folded.ends(stage) for stage in range(2)] == [(True, True), (False, False)]
    assert [replace(folded, order="1f1b").ends(stage) for stage in range(2)] == [(True, False), (False, True)]
    fast = ClusterSpec((NodeGroup(1, 2, replace(PLAIN, link_bytes_per_s=1e30)),))
    head = replace(ALIKE, layers=6, vocabulary=8 * 512)
    # Of six blocks and a head the first rank, which has the head too, is slowest with four and fastest with two.
    fewer, alike, more = (
        step(head, fast, pipeline=2, virtual=2, order="zero_bubble", stages=cut, micro_batch=1).step_s
        for cut in ((1, 2, 2, 1), (1, 1, 2, 2), (2, 1, 1, 2))
    )
    assert alike < fewer < more


def test_a_stage_with_more_layers_is_waited_for() -> None:
    fast = ClusterSpec((NodeGroup(1, 2, replace(PLAIN, link_bytes_per_s=1e30)),))
    even_, uneven = (step(ALIKE, fast, pipeline=2, stages=cut, micro_batch=1) for cut in ((2, 2), (3, 1)))
    layer = even_.terms["compute"] / 16 / 2
    assert even_.terms["imbalance"] == pytest.approx(0.0, abs=0.02 * layer)
    assert uneven.terms["imbalance"] == pytest.approx(16 * layer, rel=0.02)


def test_tensor_ranks_wait_for_four_all_reduces_of_a_block() -> None:
    found = step(ALIKE, alone(4), tensor=4, micro_batch=16)
    moved = 16 * 256 * 512 * 2
    # And one in each pass at the edges. An all-reduce over four at 1 GB/s takes 1.5 of the tensor.
    assert found.terms["communication"] == pytest.approx((4 * 4 + 2) * 1.5 * moved / 1e9)


def test_what_tensor_ranks_hand_to_the_next_stage() -> None:
    """Of two stages of two ranks each on nodes of their own, with a cable of 1 GB/s."""
    nodes, moved = alone(4, per_node=2), 4 * 256 * 512 * 2

    def handed_s(**choice: Any) -> float:
        """Seconds of a micro-batch that a stage waits for the other one, without what tensor ranks exchange."""
        found = step(ALIKE, nodes, tensor=2, pipeline=2, micro_batch=4, attention="plain", **choice)
        exchanged = (2 * 4 + 1) * moved / 1e9  # by two blocks and an edge, of an all-reduce at 1 GB/s each
        return found.terms["communication"] / 4 - exchanged

    whole_s = 2 * moved / 1e9  # both ranks send all they have over one cable
    assert handed_s() == pytest.approx(whole_s, rel=0.01)
    assert handed_s(sequence=True) == pytest.approx(whole_s / 2, rel=0.01)  # each its half of the sequence
    # Megatron's each a half, which the other one needs too: half of the bytes, over two ranks at 1 GB/s.
    assert handed_s(zero=0, engine="megatron") == pytest.approx(whole_s / 2 + 0.5 * moved / 1e9, rel=0.01)


def test_late_hosts_are_waited_for_where_the_device_has_nothing_to_do() -> None:
    late = replace(FULL, skew_s=1e-3)
    fast = replace(PLAIN, flop_per_s={"bf16": 1e30}, link_bytes_per_s=1e30)
    # Two all-reduces of four ranks in each pass of four blocks, and one in a pass at each edge: two doublings.
    idle = ClusterSpec((NodeGroup(1, 4, fast),))
    found = step(replace(ALIKE, global_batch=1), idle, late, tensor=4)
    assert found.step_s == pytest.approx((4 * 4 + 2) * 2e-3, rel=1e-3)
    # A device that is busy has its queue filled meanwhile.
    busy = step(ALIKE, alone(4), late, tensor=4, micro_batch=16)
    least = step(ALIKE, alone(4), tensor=4, micro_batch=16).step_s
    assert least < busy.step_s < least + 0.1 * 18 * 2e-3
    # A CPU has none.
    host = ClusterSpec((NodeGroup(1, 4, replace(PLAIN, on_host=True)),))
    waits = (
        step(ALIKE, host, late, tensor=4, micro_batch=16).step_s - step(ALIKE, host, tensor=4, micro_batch=16).step_s
    )
    assert waits == pytest.approx(18 * 2e-3)


def test_offload_shows_where_the_host_is_slower_than_the_block() -> None:
    block = compute_cost.block_pass(ALIKE, PLAIN, LayoutChoice(recompute="full"), 16, FULL)
    copy = 16 * 256 * 512 * 2 / 1e6
    slow = ClusterSpec((NodeGroup(1, 1, replace(PLAIN, host_bytes_per_s=1e6)),))
    found = step(ALIKE, slow, micro_batch=16, recompute="full", offload=True)
    # Of 4 inputs the last 2 stay. The last block waits until the others have left, while 3 were computed; and the first
    # one until they are back.
    assert found.terms["offload"] == pytest.approx(2 * 2 * copy - 3 * (block.forward_s + block.backward_s))
    further = step(replace(ALIKE, horizon=3), slow, micro_batch=16, recompute="full", offload=True)
    assert further.terms["offload"] == pytest.approx(found.terms["offload"] - 2 * copy)
    assert step(ALIKE, alone(), micro_batch=16, recompute="full", offload=True).terms["offload"] == 0.0


def test_unlike_devices_are_given_unlike_shares() -> None:
    fast, slow = PLAIN, replace(PLAIN, name="slow", flop_per_s={"bf16": 0.5e12})
    mixed = ClusterSpec((NodeGroup(1, 1, fast), NodeGroup(1, 1, slow)), 8e30, 0.0)
    evenly, fairly = (step(SMALL, mixed, shares=shares, micro_batch=8) for shares in ((9, 7), (11, 5)))
    assert fairly.step_s < evenly.step_s and fairly.terms["imbalance"] < evenly.terms["imbalance"]
    one = step(SMALL, alone(), micro_batch=8)
    assert fairly.step_s == pytest.approx(one.step_s * 11 / 16, rel=0.02)


def test_a_copy_with_fewer_sequences_than_micro_batches_runs_as_many() -> None:
    """Where something travels in each all ranks run equally many; an empty one costs as much as one of one."""
    slow = replace(PLAIN, name="slow", flop_per_s={"bf16": 0.25e12})
    mixed = ClusterSpec((NodeGroup(1, 1, PLAIN), NodeGroup(1, 1, slow)), 8e30, 0.0)
    both = ClusterSpec((NodeGroup(2, 1, slow),), 8e30, 0.0)
    ways: list[dict[str, Any]] = [{"zero": 2, "reduce": "per_micro_batch"}, {"zero": 3}]
    for way in ways:
        found = step(SMALL, mixed, shares=(14, 2), micro_batch=1, **way)
        passes = step(replace(SMALL, global_batch=28), both, shares=(14, 14), micro_batch=1, **way)
        assert found.terms["compute"] + found.terms["imbalance"] == pytest.approx(passes.terms["compute"])


@pytest.mark.parametrize("zero", [1, 2])
def test_a_copy_runs_its_own_number_of_micro_batches_where_nothing_travels_in_one(zero: int) -> None:
    slow = replace(PLAIN, name="slow", flop_per_s={"bf16": 0.25e12})
    mixed = ClusterSpec((NodeGroup(1, 1, PLAIN), NodeGroup(1, 1, slow)), 8e30, 0.0)
    alike = [ClusterSpec((NodeGroup(2, 1, kind),), 8e30, 0.0) for kind in (PLAIN, slow)]
    for shares in ((14, 2), (12, 4), (16, 0)):
        found = step(SMALL, mixed, shares=shares, micro_batch=1, zero=zero)
        each = [
            step(replace(SMALL, global_batch=2 * max(1, share)), both, micro_batch=1, zero=zero).terms["compute"]
            for share, both in zip(shares, alike, strict=True)
        ]
        assert found.terms["compute"] + found.terms["imbalance"] == pytest.approx(max(each))
        assert found.terms["compute"] == pytest.approx(sum(each) / 2)


def test_a_copy_without_room_for_whole_micro_batches_cuts_its_share_as_the_others_do() -> None:
    """Of 12 and 4 sequences, four at a time: three micro-batches there, here one, or three smaller ones."""
    cut = {"shares": (12, 4), "micro_batch": 4}

    def other_of(small: DeviceKind) -> DeviceMemory:
        both = ClusterSpec((NodeGroup(1, 1, PLAIN), NodeGroup(1, 1, small)), 8e30, 0.0)
        return next(held for held in step(SMALL, both, **cut).memory if held.kind == small)

    small = replace(PLAIN, name="small")
    whole = other_of(small)
    needed = whole.total_bytes - whole.parts["reserved"]
    slack = (whole.parts["reserved"] - small.reserved_bytes) / small.memory_bytes
    tight = replace(small, memory_bytes=int((needed * 0.99 + small.reserved_bytes) / (1.0 - slack)))
    smaller = other_of(tight)
    assert smaller.free_bytes >= 0
    assert smaller.parts["activations"] < 0.5 * whole.parts["activations"]
    assert [LayoutChoice(micro_batch=4).micro_batches(share, 12) for share in (12, 4, 0)] == [3, 1, 1]
    assert [LayoutChoice(micro_batch=4).micro_batches(share, 12, fits=False) for share in (12, 4, 2, 0)] == [3, 3, 2, 1]
    assert [LayoutChoice(micro_batch=4, tensor=2).micro_batches(share, 12) for share in (12, 4, 2, 0)] == [3, 3, 2, 1]
    assert [LayoutChoice(micro_batch=4, zero=3).micro_batches(share, 12) for share in (12, 4, 2, 0)] == [3] * 4


def test_a_device_that_waits_for_a_slow_one_in_its_tensor_group_is_as_slow() -> None:
    slow = replace(PLAIN, name="slow", flop_per_s={"bf16": 0.25e12})
    mixed = ClusterSpec((NodeGroup(1, 1, PLAIN), NodeGroup(1, 1, slow)), 8e30, 0.0)
    both = ClusterSpec((NodeGroup(2, 1, slow),), 8e30, 0.0)
    assert step(SMALL, mixed, tensor=2).step_s == pytest.approx(step(SMALL, both, tensor=2).step_s)


def test_devices_may_be_left_idle() -> None:
    assert step(SMALL, alone(8), devices=4).step_s == pytest.approx(step(SMALL, alone(4)).step_s)


# ----------------------------------------------------------------------------------------- steps that outlive the ranks

KEPT = replace(SMALL, memory=True, replays=True)


def test_a_commit_by_hand() -> None:
    state = 12 * SMALL.parameters()
    # A CPU writes the new state elsewhere: read, fetched and written, at 1 GB/s.
    host = ClusterSpec((NodeGroup(1, 1, replace(PLAIN, memory_bytes_per_s=1e9, on_host=True)),))
    found = step(KEPT, host, micro_batch=16)
    assert found.terms["commit"] == pytest.approx(3 * state / 1e9)
    assert found.step_s - found.terms["commit"] == pytest.approx(step(SMALL, host, micro_batch=16).step_s)
    # An accelerator's is copied while the next step computes, which waits for the rest of it.
    assert step(KEPT, alone(), micro_batch=16).terms["commit"] == 0.0
    slow = ClusterSpec((NodeGroup(1, 1, replace(PLAIN, host_bytes_per_s=1e7)),))
    assert step(KEPT, slow, micro_batch=16).step_s == pytest.approx(state / 1e7)


def test_where_there_is_no_room_nothing_is_committed() -> None:
    host = replace(PLAIN, memory_bytes_per_s=1e9, on_host=True, memory_bytes=20 * SMALL.parameters())
    for memory, commits in (("auto", False), (True, True)):
        found = step(replace(SMALL, memory=memory), ClusterSpec((NodeGroup(1, 1, host),)), micro_batch=16)
        assert (found.terms["commit"] > 0) == commits


@pytest.mark.parametrize(("replicate", "every"), [("every_step", 1), ("auto", 1), (4, 4)])
def test_a_replica_by_hand(replicate: int | str, every: int) -> None:
    """Of two stages on nodes of their own, the one with the head owns more: two blocks, 1024 x 512 and a norm."""
    nodes = alone(2, per_node=1, far=8e7)  # 10 MB/s
    state = 12 * (2 * SMALL.block_parameters + 1024 * 512 + 512)
    without = step(SMALL, nodes, pipeline=2, micro_batch=8)
    assert without.replicas is None and step(replace(KEPT, replicate="off"), nodes, pipeline=2).replicas is None
    found = step(replace(KEPT, replicate=replicate), nodes, pipeline=2, micro_batch=8)
    assert found.replicas is not None and (found.replicas.every, found.replicas.node_bytes) == (every, state)
    # It is sent while the next step passes, and the rest is waited for.
    assert found.replicas.waits_s == pytest.approx((state / 1e7 - without.step_s) / every)
    assert found.step_s == pytest.approx(without.step_s + found.replicas.waits_s)
    fast = step(replace(KEPT, replicate=replicate), alone(2, per_node=1, far=8e12), pipeline=2, micro_batch=8)
    assert fast.replicas is not None and fast.replicas.waits_s == 0.0


def test_a_cpus_replica_is_of_gradients_where_updates_can_be_made_again() -> None:
    host = replace(PLAIN, memory_bytes_per_s=1e9, on_host=True)
    nodes = ClusterSpec((NodeGroup(2, 1, host),), 8e12, 0.0)
    own = SMALL.parameters() / 2
    for work, sent in ((KEPT, 4), (replace(KEPT, replays=False), 12)):
        found = step(replace(work, replicate="every_step"), nodes, micro_batch=8)
        # It copies by itself what it sends and gets.
        assert found.replicas is not None and found.replicas.node_bytes == pytest.approx(sent * own)
        assert found.replicas.waits_s == pytest.approx(link_cost.MEMORY_PASSES * sent * own / 1e9)


def test_what_carrying_a_byte_costs_a_cpu_is_what_was_measured() -> None:
    host = replace(PLAIN, memory_bytes_per_s=1e9, on_host=True)
    measured = replace(host, carries_s_per_byte=3e-9)
    assert link_cost.cpu_transfer_s(1e6, host, FULL) == pytest.approx(link_cost.MEMORY_PASSES * 1e6 / 1e9)
    assert link_cost.cpu_transfer_s(1e6, measured, FULL) == pytest.approx(3e-3)
    # Of a second in which 10 MB travel 0.03 s are lost, whatever the memory does; never more than the second.
    nodes = ClusterSpec((NodeGroup(2, 1, measured),), 8e7, 0.0)
    assert link_cost.compute_slowdown(measured, True, nodes, FULL) == pytest.approx(0.03)
    assert link_cost.compute_slowdown(replace(measured, carries_s_per_byte=1.0), True, nodes, FULL) == 1.0


def test_the_last_of_unlike_cpus_is_the_one_that_has_computed_and_carried() -> None:
    """Two compute as long; of what travels meanwhile the slow one carries a byte in ten times the time."""
    host = replace(PLAIN, memory_bytes_per_s=1e30, on_host=True, carries_s_per_byte=1e-9)
    slow = replace(host, name="slow", carries_s_per_byte=1e-8)
    alike = step(SMALL, ClusterSpec((NodeGroup(2, 1, host),), 8e7, 0.0), micro_batch=8)
    for groups in ((NodeGroup(1, 1, host), NodeGroup(1, 1, slow)), (NodeGroup(1, 1, slow), NodeGroup(1, 1, host))):
        found = step(SMALL, ClusterSpec(groups, 8e7, 0.0), micro_batch=8)
        # At 10 MB/s the one loses a hundredth of the hidden time, and the other a tenth.
        hidden_s = (found.step_s - alike.step_s) / 0.09
        assert hidden_s > 0
        again = step(SMALL, ClusterSpec((NodeGroup(2, 1, slow),), 8e7, 0.0), micro_batch=8)
        assert found.step_s == pytest.approx(again.step_s)
        assert found.terms["communication"] == pytest.approx(alike.terms["communication"] + 0.09 * hidden_s)


def test_unlike_devices_of_a_node_share_its_cable() -> None:
    """Two nodes of eight are the same, whether or not half of each is told apart."""
    kind = replace(PLAIN, link_bytes_per_s=1e30)
    other = replace(kind, name="the same by another name")
    whole = ClusterSpec((NodeGroup(2, 8, kind),), 8e7, 0.0)
    halves = (NodeGroup(1, 4, kind), NodeGroup(1, 4, other, shares_node=True))
    apart = ClusterSpec((*halves, *halves), 8e7, 0.0)
    assert (apart.nodes, apart.devices, apart.node_sizes) == (2, 16, (8,) * 4)
    assert ClusterSpec((NodeGroup(3, 2, kind), NodeGroup(2, 1, other, shares_node=True))).node_sizes == (3, 3)
    for layout in ({"shard_degree": 8}, {}, {"pipeline": 2}, {"tensor": 2}):
        for work in (SMALL, replace(KEPT, replicate="every_step")):
            found, same = (step(work, cluster, micro_batch=1, **layout) for cluster in (apart, whole))
            assert found.step_s == pytest.approx(same.step_s), layout
            assert (found.replicas is None) == (same.replicas is None)
            if found.replicas is not None and same.replicas is not None:
                assert found.replicas.node_bytes == pytest.approx(same.replicas.node_bytes)


def test_what_devices_make_their_own_type_of_is_on_its_way_only_between_several() -> None:
    work = replace(SMALL, gather_bytes=4)
    (alone_,), (two, *_) = (step(work, alone(count), micro_batch=4).memory for count in (1, 2))
    assert "weights on their way" not in alone_.parts and two.parts["weights on their way"] > 0


def test_a_node_whose_state_others_have_anyway_sends_none() -> None:
    work = replace(KEPT, replicate="every_step")
    assert step(work, alone(4, per_node=2), micro_batch=4, shard_degree=2).replicas is None
    assert step(work, alone(8, per_node=4), micro_batch=2, shard_degree=2).replicas is None  # two copies a node
    assert step(work, alone(4, per_node=2), micro_batch=4).replicas is not None


def test_all_wait_for_the_update_of_those_that_own_the_state() -> None:
    kind = replace(PLAIN, memory_bytes_per_s=1e9)
    slow = replace(kind, name="slow", flop_per_s={"bf16": 1e9})
    mixed = ClusterSpec((NodeGroup(1, 1, slow), NodeGroup(1, 1, kind)), 8e30, 0.0)
    found = step(SMALL, mixed, shares=(8, 8), micro_batch=8, state=(0.0, 1.0))
    assert found.terms["imbalance"] > 0  # the one that owns nothing computes longest
    assert found.terms["optimizer"] == pytest.approx(link_cost.update_s(SMALL, kind, SMALL.parameters(), FULL))


@pytest.mark.parametrize(
    ("choice", "what"),
    [
        (LayoutChoice(tensor=3), "choose degrees whose product divides"),
        (LayoutChoice(devices=16), "16 of 8 devices"),
        (LayoutChoice(shard_degree=3), "choose a shard_degree"),
        (LayoutChoice(pipeline=2, stages=(4, 1)), "give each stage one layer"),
        (LayoutChoice(shares=(16,)), "give each copy its sequences"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_come_out_even(choice: LayoutChoice, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        estimate_step(SMALL, alone(8), choice)


def test_unknown_kinds_and_types_say_what_is_needed() -> None:
    assert (
        find_kind("a100 80gb") is DEVICE_KINDS["A100-80GB"]
        and find_kind("H100") is DEVICE_KINDS["H100-80GB"]
        and find_kind("A1000") is None
    )
    assert "seconds of passes of a model, bytes of memory, and bytes per second of its links" in unknown_kind_message(
        "A1000"
    )
    with pytest.raises(ConfigError, match="computes no bf16"):
        DEVICE_KINDS["V100-32GB"].peak_flop_per_s("bf16")
    with pytest.raises(ConfigError, match="needs one device at least"):
        ClusterSpec(())


def test_every_kind_says_where_its_numbers_are_from() -> None:
    for name, found in DEVICE_KINDS.items():
        assert found.name == name and len(found.source) > 20
        assert 0 < found.sustained <= 1 and found.memory_bytes > 0 and found.flop_per_s["fp32"] > 0
        assert found.scale_speed(2.0).peak_flop_per_s("fp32") == 2 * found.peak_flop_per_s("fp32")


def test_a_plan_and_a_runs_mfu_know_the_same_peaks() -> None:
    """Also of a card whose chip is clocked otherwise, and in fp64."""
    for name in ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "Tesla V100-PCIE-16GB", "NVIDIA A100-SXM4-40GB"):
        kind = match_device_name(name, False, 80 * GIB)
        for dtype in (torch.float64, torch.float32, torch.float16):
            assert kind.peak_flop_per_s(f"fp{torch.finfo(dtype).bits}") == peak_flops(name, dtype), name
    assert match_device_name("NVIDIA H100 PCIe", False, 80 * GIB).flop_per_s["bf16"] == pytest.approx(756e12)


@pytest.mark.parametrize("name", list(DEVICE_KINDS))
def test_every_kind_can_be_planned_for(name: str) -> None:
    precision = "bf16" if "bf16" in DEVICE_KINDS[name].flop_per_s else "fp16"
    found = estimate_step(
        replace(SMALL, precision=precision), ClusterSpec((NodeGroup(2, 4, DEVICE_KINDS[name]),)), LayoutChoice()
    )
    assert 0 < found.mfu < 1


def test_a_cpu_sends_with_its_own_hands_and_calls_each_operation() -> None:
    host = replace(PLAIN, memory_bytes_per_s=14e9, on_host=True)
    near, far = ClusterSpec((NodeGroup(1, 4, host),)), ClusterSpec((NodeGroup(4, 1, host),), 8e8, 0.0)
    assert link_cost.compute_slowdown(host, False, near, FULL) == pytest.approx(
        7 * 1e9 / 14e9
    )  # seven passes over what goes at 1 GB/s
    assert link_cost.compute_slowdown(host, True, far, FULL) == pytest.approx(7 * 1e8 / 14e9)
    assert link_cost.compute_slowdown(host, False, far, FULL) == link_cost.compute_slowdown(
        host, False, near, FULL
    )  # what stays within a node
    assert link_cost.compute_slowdown(PLAIN, True, far, replace(FULL, interference=0.3)) == 0.3
    slower = host.scale_speed(0.5)
    assert (slower.link_bytes_per_s, PLAIN.scale_speed(0.5).link_bytes_per_s) == (0.5e9, 1e9)
    calm, busy = (
        compute_cost.block_pass(SMALL, each, LayoutChoice(), 1, FULL) for each in (host, replace(host, call_s=1.0))
    )
    assert busy.forward_s - calm.forward_s == pytest.approx(28)
    assert busy.backward_s - calm.backward_s == pytest.approx(52)


# ---------------------------------------------------------------------------------------------------------- any cluster


@st.composite
def layouts(draw: st.DrawFn) -> tuple[StepWork, ClusterSpec, LayoutChoice]:
    work = StepWork(
        layers=draw(st.sampled_from([4, 8])), hidden=draw(st.sampled_from([512, 2048])), heads=8,
        kv_heads=draw(st.sampled_from([2, 8])), ffn=4096, vocabulary=32000,
        seq_len=draw(st.sampled_from([128, 2048])), global_batch=64, gated=draw(st.booleans()),
    )  # fmt: skip
    kinds = draw(st.lists(st.sampled_from(["A100-80GB", "H100-80GB", "RTX-4090"]), min_size=1, max_size=2))
    cluster = ClusterSpec(
        tuple(NodeGroup(draw(st.integers(1, 2)), 8, DEVICE_KINDS[name]) for name in kinds), draw(st.floats(1e9, 1e12))
    )
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    choice = LayoutChoice(
        zero=draw(st.integers(1, 3)), tensor=draw(st.sampled_from([1, 2, 8])), sequence=draw(st.booleans()),
        pipeline=draw(st.sampled_from([1, 2, 4])), micro_batch=draw(st.sampled_from([1, 2, 8])),
        reduce=draw(st.sampled_from(["per_step", "per_micro_batch"])), recompute=recompute,
        offload=recompute == "full" and draw(st.booleans()), slots=draw(st.integers(1, 2)),
        engine=draw(st.sampled_from(["sharded", "fsdp", "ddp", "megatron"])),
    )  # fmt: skip
    if choice.pipeline > 1:  # no pipeline here fetches parameters anew for each micro-batch, or reduces after each
        engine: EngineName = "sharded" if choice.engine == "fsdp" else choice.engine
        choice = replace(choice, zero=min(choice.zero, 2), reduce="per_step", engine=engine)
    devices = cluster.devices - cluster.devices % (choice.tensor * choice.pipeline)
    assume(devices)
    return work, cluster, replace(choice, devices=devices)


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_terms_add_up_and_none_is_negative(case: tuple[StepWork, ClusterSpec, LayoutChoice]) -> None:
    found = estimate_step(*case)
    assert tuple(found.terms) == TERMS and min(found.terms.values()) >= -1e-12
    assert sum(found.terms.values()) == pytest.approx(found.step_s)
    assert 0 < found.mfu < 1
    assert sum(held.devices for held in found.memory) == case[2].devices


# One stage travels within nodes, another one between them: which of the two takes longer changes with the links.
STAGES_APART = (
    StepWork(layers=4, hidden=512, heads=8, kv_heads=2, ffn=4096, vocabulary=32000, seq_len=128, global_batch=64),
    ClusterSpec((NodeGroup(1, 8, DEVICE_KINDS["A100-80GB"]), NodeGroup(2, 8, DEVICE_KINDS["A100-80GB"])), 6.3e11),
    LayoutChoice(zero=1, pipeline=4, reduce="per_step", devices=24),
)  # fmt: skip

# Who has two micro-batches computes longest, but hides less behind the last of them than who has one.
LAST_OTHERWISE = (
    StepWork(
        layers=4, hidden=2048, heads=8, kv_heads=2, ffn=4096, vocabulary=32000, seq_len=2048, global_batch=64,
        gated=False,
    ),
    ClusterSpec((NodeGroup(2, 8, DEVICE_KINDS["A100-80GB"]), NodeGroup(1, 8, DEVICE_KINDS["RTX-4090"])), 1e9),
    LayoutChoice(zero=1, micro_batch=2, reduce="per_step", devices=24),
)  # fmt: skip


@given(layouts(), st.floats(1.0, 10.0))
@example(STAGES_APART, 2.0)
@example(LAST_OTHERWISE, 2.0)
@settings(max_examples=150, deadline=None)
def test_more_bandwidth_is_never_slower(case: tuple[StepWork, ClusterSpec, LayoutChoice], more: float) -> None:
    work, cluster, choice = case
    before = estimate_step(*case).step_s
    assert estimate_step(
        work, replace(cluster, between_bits_per_s=more * cluster.between_bits_per_s), choice
    ).step_s <= (before * (1 + 1e-9))
    for field in ("link_bytes_per_s", "memory_bytes_per_s", "host_bytes_per_s"):
        faster = tuple(
            replace(group, kind=replace(group.kind, **{field: more * getattr(group.kind, field)}))
            for group in cluster.groups
        )
        assert estimate_step(work, replace(cluster, groups=faster), choice).step_s <= before * (1 + 1e-9)


@given(layouts(), st.floats(1.0, 10.0))
@settings(max_examples=100, deadline=None)
def test_more_memory_is_never_worse(case: tuple[StepWork, ClusterSpec, LayoutChoice], more: float) -> None:
    work, cluster, choice = case
    larger = tuple(
        replace(group, kind=replace(group.kind, memory_bytes=int(more * group.kind.memory_bytes)))
        for group in cluster.groups
    )
    before, after = estimate_step(*case), estimate_step(work, replace(cluster, groups=larger), choice)
    assert after.step_s == pytest.approx(before.step_s) and (after.fits or not before.fits)


@given(layouts())
@settings(max_examples=50, deadline=None)
def test_a_model_that_is_kept_says_the_same(case: tuple[StepWork, ClusterSpec, LayoutChoice]) -> None:
    work, cluster, choice = case
    kept = CostModel(work, cluster)
    for other in (choice, replace(choice, recompute="none", offload=False), choice):
        assert kept.estimate(other) == estimate_step(work, cluster, other)


@given(st.integers(1, 1000), st.integers(1, 50))
def test_even_parts_differ_by_one_at_most(total: int, parts: int) -> None:
    found = split_evenly(total, parts)
    assert sum(found) == total and len(found) == parts and max(found) - min(found) <= 1


def test_fp8_is_faster_where_a_kernel_multiplies_it() -> None:
    wide = replace(SMALL, hidden=8192, ffn=28672, heads=64, kv_heads=8, seq_len=4096)
    choice = LayoutChoice(micro_batch=1)
    for name, *faster in (("H100", True, True), ("A100", False, False), ("L40S", False, True)):
        plain, *found = (
            compute_cost.block_pass(work, find_kind(name), choice, 1.0, CostConstants())
            for work in (wide, replace(wide, fp8_blocks=True), replace(wide, fp8_tensors=True))
        )
        assert [fp8.forward_s < plain.forward_s for fp8 in found] == faster, name
        assert [fp8.backward_s < plain.backward_s for fp8 in found] == faster, name
        if all(faster):  # gradients of weights are in FP8, too
            assert found[1].backward_s < found[0].backward_s


def test_fp8_matrices_travel_in_a_byte() -> None:
    work = replace(SMALL, fp8_blocks=True)
    edges = 1 - work.layers * work.matrix_parameters / work.parameters()
    assert work.zero3_gather_bytes() == pytest.approx(1 + edges * (work.gather_bytes - 1))
    assert replace(work, fp8_blocks=False).zero3_gather_bytes() == work.gather_bytes
    assert replace(work, far_bytes=1.03).zero3_gather_bytes() == work.gather_bytes  # encoded otherwise
