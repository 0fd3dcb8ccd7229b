"""Compute time of a device for one micro-batch: matrix products, attention, memory-bound kernels, and the host's calls.

A pass takes the device's time or the host's time to launch its kernels, whichever is longer: kernels are queued, and
the queue runs empty if they are shorter than their launches. Pure floats.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.planner.device_catalog import CostConstants, DeviceKind
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.work import WIDTH, StepWork

TILE_ROWS, TILE_COLUMNS = 256, 128  # tile of a matrix product that one multiprocessor computes at full speed
# Kernels that are called for a block, by hand of an eager profile of a pre-norm decoder: forward, backward.
KERNELS = (28, 52)
PLAIN_KERNELS = (6, 9)  # more of them where attention writes its scores
COLLECTIVE_CALLS = 4  # kernel launches that take the host as long as a collective
CALLS_OF_EDGE = (12, 20)  # of last norm, head and loss
# Minimum queries of a band of `models.attention`, without a kernel that skips the window's masked part
BAND_LEAST = 128
LOGITS_MOVED = (20.0, 16.0)  # bytes of an element of whole logits, forward and backward


@dataclass(frozen=True)
class PassTime:
    """Seconds of one block, or of one edge of the model: of the device, forward and backward, and of the host."""

    forward_s: float
    backward_s: float
    host_forward_s: float
    host_backward_s: float


def overlap_host_s(device_s: float, host_s: float, constants: CostConstants) -> float:
    """Seconds of a pass that the device needs `device_s` for and the host `host_s` to call: at least the longer one,
    and more where they are alike, since the queue between them runs dry in the stretches of short kernels."""
    if host_s <= 0.0:
        return device_s
    ratio = device_s / host_s
    if ratio > 1.0:
        return device_s * (1.0 + ratio**-constants.queueing) ** (1.0 / constants.queueing)
    return host_s * (1.0 + ratio**constants.queueing) ** (1.0 / constants.queueing)


def matmul_s(
    rows: float, columns: float, depth: float, kind: DeviceKind, dtype: str, constants: CostConstants
) -> float:
    """Seconds of a product (rows x depth) (depth x columns).

    A roofline (Williams et al. 2009) of the multiplications and the bytes, each operand moved once; the former longer
    by the tail of the last wave of tiles, on average over shapes (NVIDIA, Matrix Multiplication Background User's
    Guide, 2023: tile and wave quantisation).
    """
    rate = kind.peak_flop_per_s(dtype) * kind.sustained * constants.matmul_share
    waves = rows * columns / (TILE_ROWS * TILE_COLUMNS * kind.cores)
    longer = 1.0 + constants.matmul_tail / waves
    if columns % 8 or depth % 8:  # of two bytes each: NVIDIA's guide, tensor core requirements
        rate *= constants.unaligned_share
    moved = (rows * depth + depth * columns + rows * columns) * WIDTH[dtype]
    return max(2.0 * rows * columns * depth * longer / rate, moved / (kind.memory_bytes_per_s * constants.memory_share))


def writes_scores(work: StepWork, choice: LayoutChoice) -> bool:
    """Whether attention's scores are held in memory: without a kernel that never writes them, and where some of them
    are dropped (`models.bert.attention_with_dropout`)."""
    return choice.attention == "plain" or work.attention_dropout


def attention_band(work: StepWork, kind: DeviceKind) -> int:
    """Queries of a band, which sees the keys of itself and of the previous band, for a layer with a window if no
    kernel skips the masked part: on CPUs, on devices before Ampere, and in fp32. 0: there is such a kernel."""
    if not kind.on_host and "bf16" in kind.flop_per_s and work.width == 2:
        return 0
    return min(max(work.window, BAND_LEAST), work.seq_len)


def attention_density(work: StepWork, kind: DeviceKind) -> float:
    """The share of all pairs of positions that attention computes, on average over layers.

    Of s positions with a window of w the first w see 1, 2, ... w, and all others w (Beltagy et al. 2020). In bands of c
    the first sees c, and all others 2 c.
    """
    if work.both_ways:
        return 1.0
    near = work.window * (2.0 * work.seq_len - work.window) / 2.0
    if queries := attention_band(work, kind):
        near = queries * (2.0 * work.seq_len - queries)
    return 0.5 * (1.0 - work.windowed_share) + work.windowed_share * near / work.seq_len**2


def block_pass(
    work: StepWork, kind: DeviceKind, choice: LayoutChoice, sequences: float, constants: CostConstants
) -> PassTime:
    """One block on one of `choice.tensor` ranks, of `sequences` sequences, without recomputing.

    Forward products: 2 rows for each parameter; backward twice that (Kaplan et al. 2020). Attention: 4 seq_len^2
    queries forward, of which a kernel that skips what is masked computes what is `attention_density`; FlashAttention
    computes scores again and so takes 2.5 times as long backward (Dao 2023). Passes over activations are counted kernel
    by kernel, in units of tokens x hidden; those between tensor-parallel regions are divided only by sequence
    parallelism (Korthikanti et al. 2022).
    """
    tensor, dtype = choice.tensor, work.precision
    tokens = sequences * work.seq_len
    hidden, queries, keys = work.hidden, work.query_channels / tensor, work.key_channels / tensor
    ffn = work.ffn / tensor
    wide = ffn * (2 if work.gated else 1)
    kept = "bf16" if dtype == "fp8" and "fp8" not in kind.flop_per_s else dtype
    products = (
        (queries + 2 * keys, hidden),
        (hidden, queries),
        (wide, hidden),
        (hidden, ffn),
    )
    whole = "fp8" if work.fp8_tensors and "fp8" in kind.flop_per_s else kept
    blocks = "fp8" if work.fp8_blocks and kind.multiplies_fp8_blocks else whole
    forward = backward = quantized = 0.0
    for columns, depth in products:
        forward += matmul_s(tokens, columns, depth, kind, blocks, constants)
        backward += matmul_s(tokens, depth, columns, kind, blocks, constants)  # of the input
        quantized += 0.5 * tokens * (columns + depth) + columns * depth  # elements, in each direction
        if work.lora is None:
            backward += matmul_s(depth, columns, tokens, kind, whole, constants)  # of the weight
    moving = work.width / (kind.memory_bytes_per_s * constants.memory_share)
    # Forward: two norms (2 passes each), two residuals with their additions (3 each), and their dropout's mask.
    outside = tokens * hidden * (10.0 + (1.0 if work.dropout else 0.0)) / (tensor if choice.sequence else 1)
    # Queries, keys and values are rotated or transposed (2 passes each), the result once; activation in and out.
    inside = tokens * (2.0 * (queries + 2 * keys) + 2.0 * queries + (3.0 if work.gated else 2.0) * ffn)
    # Read as they are, written in a byte; with delayed scaling read once more, for the largest magnitude.
    reads = 2.0 if work.fp8_tensors else 1.0
    quantizing = quantized * (reads + 1.0 / work.width) if work.fp8_blocks or work.fp8_tensors else 0.0
    passes_forward, passes_backward = outside + inside + quantizing, 1.6 * (outside + inside) + quantizing
    dtype_attention = "bf16" if kept == "fp8" else kept
    rate = kind.peak_flop_per_s(dtype_attention) * kind.sustained
    pairs = 4.0 * sequences * work.seq_len * work.seq_len * queries
    kernels_forward, kernels_backward = KERNELS
    scores = sequences * work.seq_len * work.seq_len * work.heads / tensor
    if not writes_scores(work, choice):
        rate *= kind.attention * constants.attention_share
        forward += attention_density(work, kind) * pairs / rate
        backward += 2.5 * attention_density(work, kind) * pairs / rate
    else:
        # Library matrix products, one for each head: cost as any others, with the scores as output tiles.
        rate *= constants.matmul_share / (1.0 + constants.matmul_tail * TILE_ROWS * TILE_COLUMNS * kind.cores / scores)
        forward += pairs / rate
        backward += 2.0 * pairs / rate
        # Written, softmax in and out, dropout in and out and its mask, read: forward; all of it and more backward.
        dropped = 2.5 if work.dropout or work.attention_dropout else 0.0
        passes_forward += scores * (4.0 + dropped)
        passes_backward += scores * (7.0 + dropped)
        kernels_forward, kernels_backward = kernels_forward + PLAIN_KERNELS[0], kernels_backward + PLAIN_KERNELS[1]
    forward += constants.traffic * passes_forward * moving
    backward += constants.traffic * passes_backward * moving
    kernels_again = 0
    if choice.recompute == "full":
        backward, kernels_again = backward + forward, kernels_forward
    elif choice.recompute == "selective":
        # Where scores are written, attention is computed again; else all that only moves data.
        if writes_scores(work, choice):
            backward += pairs / rate
            dropped = 2.5 if work.dropout or work.attention_dropout else 0.0
            backward += constants.traffic * scores * (4.0 + dropped) * moving
        else:
            backward += constants.traffic * passes_forward * moving
        kernels_again = kernels_forward // 2
    kernels_backward += kernels_again
    if kind.on_host:
        return PassTime(forward + kernels_forward * kind.call_s, backward + kernels_backward * kind.call_s, 0.0, 0.0)
    return PassTime(forward, backward, kernels_forward * constants.launch_s, kernels_backward * constants.launch_s)


def embedding_pass(
    work: StepWork, kind: DeviceKind, choice: LayoutChoice, sequences: float, constants: CostConstants
) -> PassTime:
    """Looking tokens up, and adding their gradients into a table that is cleared: only data is moved."""
    moving = constants.traffic * work.width / (kind.memory_bytes_per_s * constants.memory_share)
    passes = sequences * work.seq_len * work.hidden * (5.0 if work.positions or work.dropout else 2.0)
    table = work.embedding_parameters / choice.tensor if work.lora is None else 0.0
    calls = (4 * constants.launch_s, 4 * constants.launch_s) if not kind.on_host else (0.0, 0.0)
    return PassTime(passes * moving, (1.5 * passes + table) * moving, *calls)


def head_pass(
    work: StepWork, kind: DeviceKind, choice: LayoutChoice, sequences: float, constants: CostConstants
) -> PassTime:
    """The last norm, the product with the vocabulary, and the loss.

    On logits, forward: cast to fp32, maximum, exponentials and sum, selection; backward: the gradient in fp32 and cast
    back. `LOGITS_MOVED` are bytes per element of each.
    """
    dtype = "bf16" if work.precision == "fp8" else work.precision
    tokens, columns = sequences * work.seq_len, work.vocabulary / choice.tensor
    width = work.embedding_width or work.hidden
    product = matmul_s(tokens, columns, width, kind, dtype, constants)
    backward = matmul_s(tokens, width, columns, kind, dtype, constants)
    if work.lora is None:
        backward += matmul_s(width, columns, tokens, kind, dtype, constants)
    moving = constants.traffic / (kind.memory_bytes_per_s * constants.memory_share)
    forward = product + tokens * columns * LOGITS_MOVED[0] * moving
    backward += tokens * columns * LOGITS_MOVED[1] * moving
    if kind.on_host:
        return PassTime(forward + CALLS_OF_EDGE[0] * kind.call_s, backward + CALLS_OF_EDGE[1] * kind.call_s, 0.0, 0.0)
    calls = constants.launch_s
    return PassTime(forward, backward, CALLS_OF_EDGE[0] * calls, CALLS_OF_EDGE[1] * calls)


@dataclass(frozen=True)
class CopyGroup:
    """Neighbouring copies whose devices are equal stage by stage, with equal shares."""

    first: int  # copy
    copies: int
    kinds: tuple[DeviceKind, ...]  # by stage; of a tensor group of several kinds the slowest
    share: int  # sequences of a step, of each of these copies
    parts: int  # micro-batches that it is cut into
    owns: float  # fraction of the sharded state of each


@dataclass(frozen=True)
class LayerCost:
    """Seconds of one micro-batch in one block: its passes, what of both is waiting for other tensor ranks, and their
    exchanges of one pass by themselves, of the device and of the host; and the passes of the embedding, and of the head
    and its loss."""

    forward_s: float
    backward_s: float
    waits_s: float
    exchange_s: float
    calls_s: float
    embedding: PassTime
    head: PassTime


@dataclass(frozen=True)
class StageCost:
    """Seconds of one micro-batch on one stage of one copy."""

    forward_s: float
    backward_s: float
    waits_s: float  # of both: for tensor-parallel exchanges and the neighbouring stages
    offload_s: float  # of both: for the host's memory

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def filling_s(choice: LayoutChoice, stages: Sequence[StageCost], micro_batches: int) -> float:
    """Idle seconds of the slowest stage in a step, while the pipeline fills and drains.

    It is the time of all other stages once, for interleaved chunks a fraction of that (Narayanan et al. 2021, 2.2) if
    there are as many micro-batches as stages; with fewer, the first goes through all, and the others follow by chunks.
    With a backward pass in two halves of equal time, it is half of the other stages' forward passes, if there are twice
    as many micro-batches as stages: weight gradients fill the rest (ZB-V, Qi et al. 2024); with fewer, more. Tests
    compare all with the schedules that run.
    """
    slowest = max(stages, key=lambda stage: stage.total_s)
    if choice.order != "zero_bubble":
        longest, whole = slowest.total_s, sum(stage.total_s for stage in stages)
        few = whole + (micro_batches - 1) * longest / choice.virtual
        return max((whole - longest) / choice.virtual, few - micro_batches * longest)
    before_s = sum(stage.forward_s for stage in stages) - slowest.forward_s
    return max(before_s / 2, before_s + (len(stages) - micro_batches) * slowest.backward_s / 2)


def peak_dtype(work: StepWork, kind: DeviceKind) -> str:
    """The dtype whose peak applies: that of the matrix products, if the device supports it."""
    return work.precision if work.precision in kind.flop_per_s else "bf16" if "bf16" in kind.flop_per_s else "fp16"
