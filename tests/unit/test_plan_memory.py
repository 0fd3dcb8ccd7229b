"""Bytes that a device holds: published formulas by hand, and this project's own engine as a dry run counts it."""

from dataclasses import replace

import pytest
import torch

from phalanx.autotune.dry_run import _dry_run
from phalanx.config import load
from phalanx.models.attention import attention
from phalanx.models.families.catalog import PRESETS
from phalanx.planner import compute_cost
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.cost import estimate_step
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS, DEVICE_KINDS
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.memory import (
    CHECKPOINT_COPY,
    IN_MEMORY_STEPS,
    OTHER_KEYS,
    REPLICAS,
    TILE_SCORES,
    band_bytes,
    block_activations,
    estimate_device_memory,
    loss_bytes,
    parameters_of,
)
from phalanx.planner.work import StepWork, find_ffn_widths, find_head_widths
from tests.helpers import some

# GPT-3's block as Korthikanti et al. 2022 count it: fp16, dropout, scores written.
GPT = StepWork(
    layers=96, hidden=12288, heads=96, kv_heads=96, ffn=4 * 12288, vocabulary=51200, seq_len=2048, global_batch=8,
    tied=True, gated=False, biases=True, dropout=True, positions=2048, precision="fp16", reduce_bytes=2,
)  # fmt: skip
A100 = DEVICE_KINDS["A100-80GB"]


def megatron(**choice: object) -> LayoutChoice:
    return LayoutChoice(engine="megatron", attention="plain", **choice)  # type: ignore[arg-type]


def test_activations_are_those_of_korthikanti() -> None:
    tokens_hidden, scores = 2048 * 12288, 96 * 2048**2
    assert block_activations(GPT, megatron())[0] == 34 * tokens_hidden + 5 * scores
    assert block_activations(GPT, megatron(tensor=8))[0] == (10 + 24 / 8) * tokens_hidden + 5 * scores / 8
    assert block_activations(GPT, megatron(tensor=8, sequence=True))[0] == (34 * tokens_hidden + 5 * scores) / 8
    kept, again = block_activations(GPT, megatron(tensor=8, sequence=True, recompute="selective"))
    assert (kept, again) == (34 * tokens_hidden / 8, 5 * scores / 8)
    assert block_activations(GPT, megatron(recompute="full")) == (2 * tokens_hidden, 34 * tokens_hidden + 5 * scores)


def test_a_kernel_that_writes_no_scores_keeps_none_and_one_without_dropout_no_masks() -> None:
    flash = LayoutChoice(engine="megatron")
    assert block_activations(GPT, flash)[0] == 34 * 2048 * 12288
    assert block_activations(replace(GPT, dropout=False), flash)[0] == 32 * 2048 * 12288


def test_scores_that_are_dropped_are_written_whatever_the_layout_has() -> None:
    flash, scores = LayoutChoice(), 96 * 2048**2
    work = replace(GPT, attention_dropout=True)
    # Exponents in fp32, what is left of them in fp16, and a byte for which; more of fp32 alone.
    assert block_activations(work, flash)[0] - block_activations(GPT, flash)[0] == (4 + 2 + 1) * scores
    fp32 = replace(work, precision="fp32")
    assert block_activations(fp32, flash)[0] - block_activations(replace(fp32, attention_dropout=False), flash)[0] == (
        9 * scores
    )
    assert block_activations(replace(GPT, dropout=False, attention_dropout=True), megatron())[0] == (
        block_activations(replace(GPT, dropout=False), megatron())[0] + (5 - 2) * scores
    )
    slower, before = (compute_cost.block_pass(each, A100, flash, 1, DEFAULT_CONSTANTS) for each in (work, GPT))
    assert slower.forward_s > before.forward_s and slower.backward_s > before.backward_s


def test_a_window_without_a_kernel_keeps_bands() -> None:
    # 4096 positions in bands of 1024, each with its results: three have the keys and values of the band before them,
    # and masks are of 1024 x 1024 pairs once and of 1024 x 2048 three times; shared by two sequences.
    work = replace(GPT, seq_len=4096, window=1024, kv_heads=8, precision="fp32")
    each, pairs = 4096 * 12288 + 2 * 3 * 1024 * 8 * 128, 1024 * 1024 + 3 * 1024 * 2048
    bands = 4 * (each + pairs / 2)
    assert band_bytes(work, A100, 1, 2) == bands == band_bytes(work, DEVICE_KINDS["CPU"], 1, 2)
    assert band_bytes(work, A100, 2, 2) == 4 * (each / 2 + pairs / 2)
    assert band_bytes(replace(work, full_layers=24), A100, 1, 2) == 0.75 * bands
    # A kernel for it keeps nothing, and a window as long as the sequence is none.
    assert band_bytes(replace(work, precision="bf16"), A100, 1, 2) == 0.0
    assert band_bytes(replace(work, window=4096), A100, 1, 2) == 0.0
    for recompute, kept in (("none", 1), ("selective", 0), ("full", 0)):
        choice = LayoutChoice(recompute=recompute)  # type: ignore[arg-type]
        with_, without = block_activations(work, choice, bands), block_activations(work, choice)
        assert (with_[0] - without[0], with_[1] - without[1]) == (kept * bands, (1 - kept) * bands)


@pytest.mark.parametrize("window", [0, 32, 256])
def test_attention_keeps_what_is_said_of_its_bands(window: int) -> None:
    torch.manual_seed(0)
    work = StepWork(
        layers=1, hidden=128, heads=4, kv_heads=2, ffn=1, vocabulary=8, seq_len=1024, global_batch=2, window=window,
        precision="fp32",
    )  # fmt: skip
    q, k, v = (torch.randn(2, heads, 1024, 32, requires_grad=True) * 1.0 for heads in (4, 2, 2))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = attention(q, k, v, window=window or None)
    kept[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
    usual = 4 * 2 * 1024 * (work.query_channels + 2 * work.key_channels + work.query_channels)
    sums = 4 * 2 * 4 * 1024  # of each row's exponents, which no count of activations has
    assert sum(kept.values()) == usual + sums + 2 * band_bytes(work, DEVICE_KINDS["CPU"], 1, 2)


def test_the_state_of_each_engine_by_hand() -> None:
    # Two ranks, 2-byte weights: bytes of a parameter.
    whole = parameters_of(GPT, 1, 96, True, True)[0]

    def each(**choice: object) -> dict[str, float]:
        parts = estimate_device_memory(GPT, A100, LayoutChoice(**choice), 2, 0, 96, 1, 2, 0.5, DEFAULT_CONSTANTS).parts  # type: ignore[arg-type]
        names = ("weights in use", "master weights", "optimizer state", "gradients")
        return {name: parts[name] / whole for name in names}

    assert each(zero=0, engine="megatron") == pytest.approx(
        {"weights in use": 2, "master weights": 4, "optimizer state": 8, "gradients": 2}
    )
    assert each(zero=1, engine="megatron")["optimizer state"] == pytest.approx(4)  # Rajbhandari et al. 2020
    assert each(zero=1) == pytest.approx(
        {"weights in use": 2, "master weights": 2, "optimizer state": 4, "gradients": 4}
    )
    assert each(zero=1, slots=2)["optimizer state"] == pytest.approx(8)
    assert each(zero=2, reduce="per_step")["gradients"] == pytest.approx(4 * 1.5)  # several micro-batches: own and all
    assert each(zero=2, reduce="per_micro_batch")["gradients"] == pytest.approx(4 * (0.5 + 3 / 96), rel=0.02)
    sharded = each(zero=3, engine="fsdp")
    assert sharded["master weights"] == pytest.approx(2) and sharded["weights in use"] < 0.1


def test_one_forward_one_backward_holds_a_micro_batch_for_each_stage_behind() -> None:
    def activations(stage: int, **choice: object) -> float:
        layout = megatron(pipeline=4, tensor=8, sequence=True, **choice)
        parts = estimate_device_memory(GPT, A100, layout, 1, stage, 24, 1, 16, 1.0, DEFAULT_CONSTANTS).parts
        return parts["activations"] / 24 / block_activations(GPT, layout)[0]

    assert [activations(stage) for stage in range(4)] == pytest.approx([4, 3, 2, 1])
    # Interleaved: 1 + (p - 1) / (p m) times as many as there are stages, Korthikanti et al. 2022.
    assert activations(0, virtual=2) == pytest.approx(4 * (1 + 3 / 8))
    # All forward passes first: of all micro-batches. Folded chunks: as many of either on every stage, Qi et al. 2024.
    assert [activations(stage, order="gpipe") for stage in range(4)] == pytest.approx([16] * 4)
    folded = [activations(stage, virtual=2, order="zero_bubble") for stage in range(1, 4)]
    assert folded == pytest.approx([4, 4, 4])


def test_offload_keeps_two_inputs_of_blocks_on_the_device() -> None:
    def activations(offload: bool) -> float:
        layout = megatron(recompute="full", offload=offload)
        return estimate_device_memory(GPT, A100, layout, 1, 0, 96, 1, 1, 1.0, DEFAULT_CONSTANTS).parts["activations"]

    assert activations(False) - activations(True) == pytest.approx(94 * 2 * 2048 * 12288)


@pytest.mark.parametrize(("horizon", "kept"), [(1, 1), (5, 5), (200, 96)])
def test_offload_keeps_as_many_inputs_as_the_horizon_says(horizon: int, kept: int) -> None:
    layout = megatron(recompute="full", offload=True)
    there, without = (
        estimate_device_memory(
            replace(GPT, horizon=blocks), A100, layout, 1, 0, 96, 1, 1, 1.0, DEFAULT_CONSTANTS
        ).parts["activations"]
        for blocks in (horizon, 0)
    )
    assert there - without == pytest.approx(kept * 2 * 2048 * 12288)


def test_our_own_loss_holds_a_chunk_of_logits() -> None:
    work = replace(GPT, vocabulary=32000, hidden=1000, precision="bf16", seq_len=4096)
    # 4096 tokens in one chunk: logits in bf16 and fp32 and their logarithms, 10 bytes; and the head's gradient.
    assert loss_bytes(work, A100, 1, 1) == 4096 * 32000 * 10 + 32000 * 1000 * 4 + 4096 * 1000 * 2
    fp64 = replace(work, precision="fp64")  # logits and their logarithms, and the gradient
    assert loss_bytes(fp64, A100, 1, 1) == 4096 * 32000 * 16 + 32000 * 1000 * 8 + 4096 * 1000 * 8
    # In two chunks the gradient to the first one's logits is beside.
    assert loss_bytes(work, A100, 1, 2) == 4096 * 32000 * 12 + 32000 * 1000 * 4 + 8192 * 1000 * 2


def test_a_cpu_has_room_for_a_checkpoint_beside_what_rests_between_steps() -> None:
    cpu = replace(DEVICE_KINDS["CPU"], memory_bytes=2**40)
    work = replace(GPT, layers=2, hidden=1024, heads=8, kv_heads=8, ffn=4096, dropout=False, precision="fp32")
    work = replace(work, seq_len=8, global_batch=2, reduce_bytes=4, gather_bytes=4)
    whole = parameters_of(work, 1, 2, True, True)[0]

    def each(**choice: object) -> float:
        parts = estimate_device_memory(work, cpu, LayoutChoice(**choice), 2, 0, 2, 1, 1, 0.5, DEFAULT_CONSTANTS).parts  # type: ignore[arg-type]
        return sum(parts.values()) - parts["reserved"]

    # Weights, gradients and half of the moments; and half of the masters and moments once more.
    assert each(zero=1) == pytest.approx(whole * (4 + 4 + 4 + 6), rel=1e-6)
    # Half of the masters, gradients and moments, and the copy; nothing else rests.
    assert each(zero=3, reduce="per_micro_batch") >= whole * (2 + 2 + 4 + 6)
    accelerated = estimate_device_memory(work, A100, LayoutChoice(zero=1), 2, 0, 2, 1, 1, 0.5, DEFAULT_CONSTANTS).parts
    assert CHECKPOINT_COPY not in accelerated


def test_what_does_not_fit_says_by_how_much() -> None:
    cluster = ClusterSpec((NodeGroup(1, 8, A100),))
    small, large = (estimate_step(replace(GPT, layers=layers), cluster, LayoutChoice(zero=3)) for layers in (2, 96))
    assert small.fits and not large.fits
    fullest = large.memory[0]
    assert fullest.free_bytes == fullest.kind.memory_bytes - fullest.total_bytes < 0


@pytest.mark.parametrize(
    ("preset", "parallel", "activations", "micro_batch", "dtype"),
    some([
        ("llama-2-7b", {"zero": 1, "grad_reduce": "per_step"}, "none", 1, "bf16"),
        ("llama-3.2-1b", {"zero": 2, "grad_reduce": "per_micro_batch"}, "full", 4, "bf16"),
        ("llama-2-7b", {"zero": 3, "grad_reduce": "per_micro_batch"}, "selective", 2, "bf16"),
        (
            "llama-3.2-1b",
            {"zero": 2, "grad_reduce": "per_micro_batch", "tensor": 2, "sequence_parallel": True},
            "none",
            2,
            "bf16",
        ),
        ("llama-2-7b", {"zero": 1, "grad_reduce": "per_step"}, "full", 1, "mixed"),
        ("llama-2-7b", {"zero": 3, "grad_reduce": "per_step", "context": 4, "context_by": "ring"}, "full", 2, "bf16"),
        ("llama-2-7b", {"zero": 2, "grad_reduce": "per_step", "context": 2, "context_by": "gather"}, "none", 2, "bf16"),
        ("mixtral-8x7b", {"zero": 1, "grad_reduce": "per_step", "expert": 4}, "full", 1, "bf16"),
        ("mixtral-8x7b", {"expert": 2, "tensor": 2, "sequence_parallel": True}, "full", 1, "bf16"),
        ("deepseek-v3", {"tensor": 2, "sequence_parallel": True}, "full", 1, "bf16"),
        ("qwen3-30b-a3b", {"zero": 2, "grad_reduce": "per_micro_batch", "expert": 8}, "full", 1, "bf16"),
    ], 2, 3, 4, 5, 6, 7, 9),
)  # fmt: skip
def test_our_own_engine_holds_what_a_dry_run_counts(
    preset: str,
    parallel: dict[str, object],
    activations: str,
    micro_batch: int,
    dtype: str,
) -> None:
    """Tied and untied, within a few hundredths: of every part that is state exactly, of activations nearly."""
    spec = PRESETS[preset]
    config = load.build_config(
        {
            "model": {"preset": preset, "layers": 4},
            "data": {"seq_len": 1024},
            "train": {"global_batch": 64, "micro_batch": micro_batch, "dtype": dtype},
            "parallel": {"engine": "sharded", **parallel},
            "memory": {"activations": activations},
        },
        "a recipe",
    )
    counted = _dry_run(config, 8, [activations])
    work = StepWork(
        layers=4, hidden=spec.hidden, heads=spec.heads, kv_heads=spec.kv_heads, **find_head_widths(spec),
        **find_ffn_widths(4, spec.intermediate, spec.moe), qk_norm=spec.architecture.startswith("qwen3"),
        vocabulary=spec.vocab_size, seq_len=1024, global_batch=64, tied=spec.tie_embeddings,
        gather_bytes=4 if dtype == "mixed" else 2, context_by=str(parallel.get("context_by", "auto")),
    )  # fmt: skip
    fields = {"grad_reduce": "reduce", "sequence_parallel": "sequence"}  # of these keys
    chosen = {fields.get(key, key): value for key, value in parallel.items() if key != "context_by"}
    choice = LayoutChoice(micro_batch=micro_batch, recompute=activations, **chosen)  # type: ignore[arg-type]
    choice = replace(choice, tensor=int(str(parallel.get("tensor", 1))))
    found = estimate_step(work, ClusterSpec((NodeGroup(1, 8, A100),)), choice).memory[0]
    same = ["weights in use", "gradients", "master weights", "optimizer state"]
    same += ["weights on their way"] if dtype == "mixed" else []
    same += [OTHER_KEYS, TILE_SCORES] if "context" in parallel else []
    for name in same:
        assert found.parts[name] == pytest.approx(counted["memory"][name], rel=0.005), name
    # More over tensor ranks; less of divided experts, of which a dry run counts one gradient of them all.
    least = 0.94 if "expert" in parallel else 0.97
    assert least <= (found.total_bytes - found.parts["reserved"]) / counted["memory_total"] <= 1.06


@pytest.mark.parametrize(
    ("asked", "choice", "kept", "replicas"),
    [
        # Beside moments of 8 bytes, where the parameters are the masters: all of two steps, and a gradient.
        ({"memory": False}, {"zero": 1}, None, None),
        ({"memory": True}, {"zero": 1}, 24 - 8, None),
        ({"memory": True, "replicate": "every_step", "replays": True}, {"zero": 1}, 24 + 4 - 8, 24 + 4),
        ({"memory": True, "replicate": "every_step"}, {"zero": 3}, 24 - 12, 24),
        ({"memory": True, "replicate": 8, "replays": True}, {"zero": 1, "slots": 2}, 36 - 24, 24),
        ({"memory": "auto", "replicate": "auto"}, {"zero": 1}, 24 - 8, 24),
        ({"memory": True, "replicate": "auto"}, {"zero": 1, "shard_degree": 1}, 24 - 8, None),  # each node has all
    ],
)
def test_on_a_cpu_steps_that_are_kept_lie_in_the_same_memory(
    asked: dict[str, object], choice: dict[str, object], kept: float | None, replicas: float | None
) -> None:
    cpu = replace(DEVICE_KINDS["CPU"], memory_bytes=2**40)
    work = replace(GPT, layers=2, hidden=1024, heads=8, kv_heads=8, ffn=4096, dropout=False, precision="fp32")
    work = replace(work, seq_len=8, global_batch=2, reduce_bytes=4, gather_bytes=4, **asked)  # type: ignore[arg-type]
    layout = LayoutChoice(**choice)  # type: ignore[arg-type]
    own = parameters_of(work, 1, 2, True, True)[0] / (1 if layout.shard_degree else 2)
    found = estimate_step(work, ClusterSpec((NodeGroup(2, 1, cpu),)), layout).memory[0]
    assert found.parts.get(IN_MEMORY_STEPS) == (None if kept is None else pytest.approx(own * kept))
    assert found.parts.get(REPLICAS) == (None if replicas is None else pytest.approx(own * replicas))
    assert (
        IN_MEMORY_STEPS
        not in estimate_step(replace(work, precision="bf16"), ClusterSpec((NodeGroup(2, 1, A100),)), layout)
        .memory[0]
        .parts
    )


def test_auto_keeps_no_steps_where_they_take_more_than_half() -> None:
    work = replace(GPT, layers=2, hidden=1024, heads=8, kv_heads=8, ffn=4096, dropout=False, precision="fp32")
    work = replace(work, seq_len=8, global_batch=2, reduce_bytes=4, gather_bytes=4, memory="auto", replicate="auto")
    own = parameters_of(work, 1, 2, True, True)[0] / 2
    for free, there in ((97, {IN_MEMORY_STEPS, REPLICAS}), (71, {IN_MEMORY_STEPS}), (47, set())):
        cpu = replace(DEVICE_KINDS["CPU"], memory_bytes=int(own * free), reserved_bytes=0)
        parts = estimate_step(work, ClusterSpec((NodeGroup(2, 1, cpu),)), LayoutChoice(zero=1)).memory[0].parts
        assert {IN_MEMORY_STEPS, REPLICAS} & parts.keys() == there
