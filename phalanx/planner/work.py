"""The work of a training step as plain numbers: the shape of a decoder and of its batch. No torch here."""

import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Literal

from phalanx.layout.context_exchange import AttentionShape, choose_exchange
from phalanx.layout.model_shape import LoraSpec, ModelSpec, MoESpec

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp64": 8}  # bytes of an element that is kept; fp8 only multiplies


@dataclass(frozen=True, kw_only=True)
class VisiblePositions:
    """What a position sees: itself and those before it, with a `window` no more than so many, but in `full_layers` of
    the layers all the same, and `both_ways` all positions."""

    window: int = 0  # 0: none
    full_layers: int = 0
    both_ways: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertWidths:
    """Of a mixture of experts, as means over the layers: `idle_ffn`, the width of the experts that a token does not go
    through, `router_rows`, `expert_ffn` of all experts that are chosen among, and the `routed` rows of a token. A layer
    has `experts` of them (0: no mixture). `cut_share` of the layers have a feed-forward part that tensor ranks cut,
    shared or instead of experts."""

    cut_share: float = 1.0
    idle_ffn: int = 0
    router_rows: int = 0
    expert_ffn: int = 0
    routed: float = 0.0
    experts: int = 0


@dataclass(frozen=True)
class DecoderShape(VisiblePositions, ExpertWidths):
    """A decoder of `layers` equal blocks, as plain numbers.

    `positions` are rows of a learnt table of positions; `embedding_width` is that of the table of tokens and of the
    head, with a matrix from and to `hidden` (0: it is `hidden`). `biases`: matrices add one and norms have two vectors,
    as in GPT-2; "qkv": the matrices of queries, keys and values alone add one, as in Qwen2. `qk_norm`: each head's
    queries and keys are normalised. With `lora` its adapters alone are trained.
    `ffn` is the width of the feed-forward part that a token goes through, as a mean over the layers.
    `attention`: parameters of attention's matrices that are not those of heads (0: they are), of which `narrow` lead to
    what all heads take.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    _: KW_ONLY
    tied: bool = False
    gated: bool = True
    biases: bool | Literal["qkv"] = False
    qk_norm: bool = False
    positions: int = 0
    embedding_width: int = 0
    head_dim: int = 0  # 0: hidden / heads
    lora: LoraSpec | None = None
    attention: int = 0
    narrow: int = 0

    @cached_property
    def head_channels(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.hidden // self.heads

    @cached_property
    def query_channels(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_channels

    @cached_property
    def key_channels(self) -> int:
        """Channels of all keys, and of all values."""
        return self.kv_heads * self.head_channels

    @cached_property
    def matrix_parameters(self) -> int:
        """Parameters of a block's matrices that a token goes through: queries, keys, values, output; and two of the
        feed-forward part, or three where it is gated (Shazeer 2020), and the router of experts."""
        usual = self.hidden * (self.query_channels + 2 * self.key_channels) + self.query_channels * self.hidden
        return (
            (self.attention or usual)
            + (3 if self.gated else 2) * self.hidden * self.ffn
            + self.hidden * self.router_rows
        )

    @cached_property
    def idle_parameters(self) -> int:
        """Parameters of a block's experts that a token does not go through."""
        return (3 if self.gated else 2) * self.hidden * self.idle_ffn

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of a block's experts that tokens choose among."""
        return (3 if self.gated else 2) * self.hidden * self.expert_ffn

    @cached_property
    def cut_parameters(self) -> int:
        """Parameters of a block that tensor ranks divide: of its matrices but the router and `narrow` ones, and whole
        experts."""
        return self.matrix_parameters + self.idle_parameters - self.hidden * self.router_rows - self.narrow

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of a block: its matrices, all experts among them, its two norms, its adapters, and biases where
        there are any."""
        small = 2 * self.hidden + count_adapter_parameters(self) + (2 * self.head_channels if self.qk_norm else 0)
        if self.biases:
            small += self.query_channels + 2 * self.key_channels
        if self.biases is True:
            small += 4 * self.hidden
            small += (2 if self.gated else 1) * self.ffn
        return self.matrix_parameters + self.idle_parameters + small

    @cached_property
    def table_parameters(self) -> int:
        """Parameters of the table of tokens, or of the head's matrix."""
        return self.vocabulary * (self.embedding_width or self.hidden)

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the tables of tokens and positions, and of the matrix between them."""
        return self.table_parameters + (self.positions + self.embedding_width) * self.hidden

    @cached_property
    def head_parameters(self) -> int:
        """Parameters after the last block: its norm, and the head's matrix unless it is the embedding's."""
        norm = 2 if self.biases is True else 1
        return (norm + self.embedding_width) * self.hidden + (0 if self.tied else self.table_parameters)

    def parameters(self) -> int:
        """All of them: for plain decoders 12 layers hidden^2 and the embedding (Narayanan et al. 2021, equation 2)."""
        return self.embedding_parameters + self.layers * self.block_parameters + self.head_parameters


def find_head_widths(spec: ModelSpec) -> dict[str, Any]:
    """`head_dim`, `attention` and `narrow` of a DecoderShape."""
    if spec.latent is None:
        return {"head_dim": spec.head_dim}
    sizes = {
        name: math.prod(shape) for name, shape in spec.latent.shapes(spec.hidden, spec.heads, spec.head_dim).items()
    }
    return {
        "head_dim": spec.latent.mean_width(spec.head_dim),
        "attention": sum(sizes.values()),
        "narrow": sum(size for name, size in sizes.items() if "_down" in name),
    }


def find_ffn_widths(layers: int, intermediate: int, moe: MoESpec | None) -> dict[str, Any]:
    """`ffn`, and what a DecoderShape has of experts."""
    if moe is None:
        return {"ffn": intermediate}
    dense = sum(layer < layers for layer in moe.dense_layers)
    routed = (layers - dense) / layers
    return {
        "ffn": round(routed * (moe.experts_per_token + moe.shared) * moe.intermediate + (1.0 - routed) * intermediate),
        "idle_ffn": round(routed * (moe.experts - moe.experts_per_token) * moe.intermediate),
        "router_rows": round(routed * moe.experts),
        "expert_ffn": round(routed * moe.experts * moe.intermediate),
        "routed": routed * moe.experts_per_token,
        "experts": moe.experts,
        "cut_share": 1.0 if moe.shared else 1.0 - routed,
    }


@dataclass(frozen=True)
class StepWork(DecoderShape):
    """The step that trains a decoder on `global_batch` sequences of `seq_len` tokens.

    `precision` is the type of matrix products; with `fp8_blocks` those of blocks, except gradients of weights, are in
    FP8 on devices that have a kernel for it, with `fp8_tensors` all of them; `master_bytes` and `state_bytes` are kept
    for each trained parameter (AdamW in fp32: 4 and 8), `reduce_bytes` and `gather_bytes` travel for each, `far_bytes`
    at most from node to node where that is compressed.
    With `attention_dropout` scores are written to memory, whatever a layout has for attention.
    `horizon` is a recipe's `memory.offload_prefetch_blocks`.
    `memory` and `replicate` are those of a recipe's `resilience`: on CPUs what they keep lies in the same memory;
    `replays`: other nodes can make updates again.
    `own_positions`: those of a row are not 0, 1, 2 ..., since it holds several documents. `context_by`: how ranks that
    share rows exchange keys; "auto" chooses as a run does. `counts_ahead`: a forward pass ahead counts the choices of
    experts.
    """

    seq_len: int
    global_batch: int
    _: KW_ONLY
    dropout: bool = False
    attention_dropout: bool = False
    precision: str = "bf16"
    fp8_blocks: bool = False
    fp8_tensors: bool = False
    master_bytes: int = 4
    state_bytes: float = 8.0
    reduce_bytes: int = 4
    gather_bytes: int = 2
    far_bytes: float | None = None
    horizon: int = 2
    memory: bool | str = False
    replicate: int | str = "off"
    replays: bool = False
    own_positions: bool = False
    context_by: str = "auto"
    counts_ahead: bool = False

    @cached_property
    def width(self) -> int:
        """Bytes of an activation's element."""
        return WIDTH[self.precision]

    @cached_property
    def windowed_share(self) -> float:
        """The share of layers whose window is shorter than a sequence."""
        return 1.0 - self.full_layers / self.layers if 0 < self.window < self.seq_len else 0.0

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq_len

    def zero3_gather_bytes(self, moving: float = 1.0) -> float:
        """Bytes that travel for each parameter under ZeRO 3, where FP8 matrices of blocks travel in one; of experts the
        part `moving` travels."""
        if not self.fp8_blocks or self.far_bytes is not None:
            return float(self.gather_bytes)
        still = self.layers * self.expert_parameters * (1.0 - moving)
        share = (self.layers * (self.cut_parameters + self.narrow) - still) / (self.parameters() - still)
        return share + (1.0 - share) * self.gather_bytes

    def attention_shape(self, tensor: int) -> AttentionShape:
        """The attention of one of `tensor` ranks."""
        return AttentionShape(self.heads // tensor, max(1, self.kv_heads // tensor), self.head_channels, self.hidden)

    def find_exchange(self, tensor: int, context: int) -> str:
        """`context_by` of a layout, as a run resolves it; of one that shares no rows `heads`, as attention is whole."""
        if context == 1:
            return "heads"
        if self.context_by != "auto":
            return self.context_by
        return choose_exchange(self.attention_shape(tensor), context, self.seq_len)[0]

    def flops_per_token(self) -> float:
        """Forward and backward, without recomputing: 6 for each multiplying parameter (of frozen ones 4, beside 6
        for adapters), and 12 channels seq_len a layer for attention, all counted (Chowdhery et al. 2022,
        appendix B). This is what MFU is measured by."""
        multiplying = self.layers * self.matrix_parameters + self.table_parameters
        multiplying += 2 * self.embedding_width * self.hidden
        products = 4.0 * multiplying + 6.0 * self.layers * count_adapter_parameters(self)
        products = products if self.lora is not None else 6.0 * multiplying
        return products + 12.0 * self.query_channels * self.seq_len * self.layers


def adapter_widths(work: DecoderShape) -> dict[str, tuple[int, int]]:
    """(columns, rows) of each of a block's matrices with an adapter: A is rank x columns, B rows x rank (Hu 2021)."""
    if work.lora is None:
        return {}
    hidden, queries, keys, ffn = work.hidden, work.query_channels, work.key_channels, work.ffn
    widths = {
        "q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "o": (queries, hidden),
        "gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden),
    }  # fmt: skip
    return {name: widths[name] for name in work.lora.targets}


def count_adapter_parameters(work: DecoderShape) -> int:
    """Parameters of a block's adapters."""
    return work.lora.rank * sum(map(sum, adapter_widths(work).values())) if work.lora is not None else 0


def find_trained_share(work: DecoderShape) -> float:
    """The share of parameters that are trained; with adapters a few hundredths."""
    return work.layers * count_adapter_parameters(work) / work.parameters() if work.lora is not None else 1.0
