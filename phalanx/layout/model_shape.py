"""The shape of a model as plain numbers: presets, parameter shapes, counts and operations. No torch here."""

import math
from dataclasses import dataclass, replace

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "bert")
# What a head is for: next tokens; masked tokens, also with whether the second segment follows the first; a label for
# each token; one for the whole.
OBJECTIVES = ("language", "masked", "masked-next", "tags", "classes")
ROPE_RULES = ("linear", "dynamic", "yarn", "llama3")
MASKED_FRACTION = 0.15  # of the tokens that are predicted, of those of a sequence: BERT's own (Devlin et al. 2018)
MAX_LAYERS = 10_000  # beyond any model: a slip of the pen must not cost minutes of counting
MAX_ELEMENTS = 2**59  # of one tensor: its bytes are counted in 64 bits, and torch allocates none of more


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than `original_max_seq_len` positions; see rope.py.

    `linear` slows all waves by `factor`; `dynamic` only when a sequence is longer than the model's `max_seq_len`.
    `llama3` slows waves longer than `original_max_seq_len / low_freq_factor`, keeps those shorter than
    `original_max_seq_len / high_freq_factor`, and blends those between. `yarn` slows waves that turn less than
    `beta_slow` times in `original_max_seq_len`, keeps those that turn more than `beta_fast` times, and multiplies
    cosines and sines by `attention_factor` (None: from `factor` and, where both are given, the two `mscale`s).
    """

    rule: str = "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn: the ends of its ramp are whole channels


LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # the matrices of a block that may get an adapter


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Adapters beside frozen weights: `targets` of each block compute with W + alpha / rank * B A; see models/lora.py.

    `dropout` is the probability of zeroing an element of A's input. `targets` are of LORA_TARGETS, in its order.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """What the product B A is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that fixes a model's parameters and its mathematics; lengths in elements, `max_seq_len` in tokens."""

    architecture: str = "llama"
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_seq_len: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    sliding_window: int | None = None  # positions that a position sees, itself included
    full_attention_layers: tuple[int, ...] = ()  # layers that see everything despite the window
    lora: LoraSpec | None = None
    # Of BERT alone:
    objective: str = "language"  # one of OBJECTIVES
    segment_kinds: int = 0  # rows of the table of segments (Hugging Face: type_vocab_size)
    labels: tuple[str, ...] = ()  # what tokens or sequences are told apart as
    attention_dropout: float = 0.0  # of attention's probabilities

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values add a bias."""
        return self.architecture in ("qwen2", "bert")

    @property
    def bidirectional(self) -> bool:
        """Whether a position sees those behind it too."""
        return self.architecture == "bert"

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised before they are turned."""
        return self.architecture == "qwen3"

    def window_of(self, layer: int) -> int | None:
        """How many positions a position of layer number `layer` sees; None: all before it."""
        return None if layer in self.full_attention_layers else self.sliding_window


Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, in order of use in the forward pass; a tied head has no entry of its own."""
    if spec.architecture == "bert":
        return _bert_shapes(spec)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, spec.hidden)}
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (spec.hidden,),
    }
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        block[f"attention.{name}.weight"] = (width, spec.hidden)
        if spec.qkv_bias:
            block[f"attention.{name}.bias"] = (width,)
    if spec.qk_norm:
        block |= {f"attention.{name}_norm.weight": (spec.head_dim,) for name in "qk"}
    block |= {
        "attention.o.weight": (spec.hidden, queries),
        "mlp_norm.weight": (spec.hidden,),
        "mlp.gate.weight": (spec.intermediate, spec.hidden),
        "mlp.up.weight": (spec.intermediate, spec.hidden),
        "mlp.down.weight": (spec.hidden, spec.intermediate),
    }
    for layer in range(spec.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes["head.norm.weight"] = (spec.hidden,)
    if not spec.tie_embeddings:
        shapes["head.weight"] = (spec.vocab_size, spec.hidden)
    return shapes


def _bert_shapes(spec: ModelSpec) -> Shapes:
    width = spec.hidden

    def dense(name: str, out: int, inner: int) -> Shapes:
        return {f"{name}.weight": (out, inner), f"{name}.bias": (out,)}

    def norm(name: str) -> Shapes:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    shapes: Shapes = {
        "embed.words.weight": (spec.vocab_size, width),
        "embed.positions.weight": (spec.max_seq_len, width),
        "embed.segments.weight": (spec.segment_kinds, width),
        **norm("embed.norm"),
    }
    block: Shapes = {}
    for name in "qkvo":
        block |= dense(f"attention.{name}", width, width)
    block |= norm("attention_norm")
    block |= dense("mlp.up", spec.intermediate, width) | dense("mlp.down", width, spec.intermediate) | norm("mlp_norm")
    for layer in range(spec.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    masks = spec.objective in ("masked", "masked-next")
    shapes |= {"head.bias": (spec.vocab_size,)} if masks else {}
    if spec.objective in ("masked-next", "classes"):
        shapes |= dense("head.pooler", width, width)
    if masks:
        shapes |= dense("head.transform", width, width) | norm("head.norm")
    if spec.objective == "masked-next":
        shapes |= dense("head.next", 2, width)
    if spec.objective in ("tags", "classes"):
        shapes |= dense("head.classifier", len(spec.labels), width)
    return shapes


def parameter_count(spec: ModelSpec, embedding: bool = True, shapes: Shapes | None = None) -> int:
    """Number of parameters; without `embedding`, those that multiply: no embedding table, but the head even if tied.

    `shapes` are those of a model of a user's own.
    """
    total = sum(math.prod(shape) for shape in (shapes or parameter_shapes(spec)).values())
    if embedding or spec.tie_embeddings:
        return total
    return total - spec.vocab_size * spec.hidden


def adapter_count(spec: ModelSpec) -> int:
    """Number of parameters of the adapters; 0 without them."""
    if spec.lora is None:
        return 0
    adapted = tuple(f".{target}.weight" for target in spec.lora.targets)
    shapes = (shape for name, shape in parameter_shapes(spec).items() if name.endswith(adapted))
    return spec.lora.rank * sum(sum(shape) for shape in shapes)


def flops_per_token(spec: ModelSpec, seq_len: int, shapes: Shapes | None = None) -> tuple[int, int]:
    """Floating-point operations of forward and backward per token of a sequence of `seq_len`: (full, causal).

    `full` is 6 per multiplying parameter (4 per frozen one, which gets no gradient) plus 12 * width * seq_len for each
    layer's attention, as the PaLM paper (appendix B) counts; `causal` takes half of the attention term, which is what a
    causal kernel really computes, and in a layer with a window only the positions that are seen. `shapes` are those of
    a model of a user's own, whose parameters are taken to multiply, and its attention to be the built-in one.
    """
    if spec.architecture == "bert":
        total = _bert_flops(spec, seq_len)
        return total, total
    each = 6 if spec.lora is None else 4
    weights = each * parameter_count(spec, embedding=False, shapes=shapes) + 6 * adapter_count(spec)
    per_pair = 12 * spec.heads * spec.head_dim
    seen = 0
    for layer in range(spec.layers):
        window = spec.window_of(layer)
        if window is None or window >= seq_len:
            seen += seq_len * seq_len // 2
        else:
            seen += window * window // 2 + (seq_len - window) * window
    return weights + per_pair * spec.layers * seq_len, weights + per_pair * seen // seq_len


def _bert_flops(spec: ModelSpec, seq_len: int) -> int:
    """As `flops_per_token`, where nothing is causal. A head works on a part of the positions: on MASKED_SHARE of them
    where masked tokens are predicted, and on one where there is a pooler."""
    shapes = parameter_shapes(replace(spec, layers=1))
    blocks = spec.layers * sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers."))
    flops = 6.0 * blocks + 12.0 * spec.hidden * spec.layers * seq_len
    for name, shape in shapes.items():
        if name.startswith("head.") and len(shape) == 2:
            pooled = name.startswith(("head.pooler", "head.next")) or spec.objective == "classes"
            each = MASKED_FRACTION if name.startswith("head.transform") else 1.0
            flops += 6.0 * math.prod(shape) * (1.0 / seq_len if pooled else each)
    if spec.objective.startswith("masked"):
        flops += 6.0 * MASKED_FRACTION * spec.vocab_size * spec.hidden  # the embedding, as the head's last matrix
    return int(flops)


_LLAMA_1_7B = ModelSpec(
    vocab_size=32000,
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_dim=128,
    intermediate=11008,
    max_seq_len=2048,
    norm_eps=1e-6,
)
_LLAMA_1_13B = replace(_LLAMA_1_7B, hidden=5120, layers=40, heads=40, kv_heads=40, intermediate=13824)
_LLAMA_1_30B = replace(_LLAMA_1_7B, hidden=6656, layers=60, heads=52, kv_heads=52, intermediate=17920)
_LLAMA_1_65B = replace(_LLAMA_1_7B, hidden=8192, layers=80, heads=64, kv_heads=64, intermediate=22016)
_LLAMA_2_70B = replace(_LLAMA_1_65B, kv_heads=8, intermediate=28672, max_seq_len=4096, norm_eps=1e-5)
_LLAMA_3_8B = replace(
    _LLAMA_1_7B,
    vocab_size=128256,
    kv_heads=8,
    intermediate=14336,
    max_seq_len=8192,
    rope_theta=500000.0,
    norm_eps=1e-5,
)
_LLAMA_3_70B = replace(_LLAMA_3_8B, hidden=8192, layers=80, heads=64, intermediate=28672)
_ROPE_3_1 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
_ROPE_3_2 = replace(_ROPE_3_1, factor=32.0)
_LLAMA_3_1_8B = replace(_LLAMA_3_8B, max_seq_len=131072, rope_scaling=_ROPE_3_1)
_LLAMA_3_1_70B = replace(_LLAMA_3_70B, max_seq_len=131072, rope_scaling=_ROPE_3_1)
_LLAMA_3_2_3B = replace(
    _LLAMA_3_1_8B, hidden=3072, layers=28, heads=24, intermediate=8192, rope_scaling=_ROPE_3_2, tie_embeddings=True
)

# Shapes as the config.json of the repository of that name says them (Qwen2.5: of the base models).
_MISTRAL_7B = replace(
    _LLAMA_3_8B, architecture="mistral", vocab_size=32000, max_seq_len=32768, rope_theta=10000.0, sliding_window=4096
)
_QWEN_2_5_7B = ModelSpec(
    architecture="qwen2",
    vocab_size=152064,
    hidden=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    intermediate=18944,
    max_seq_len=131072,
    rope_theta=1e6,
    norm_eps=1e-6,
)
_QWEN_2_5_SMALL = replace(_QWEN_2_5_7B, vocab_size=151936, kv_heads=2, tie_embeddings=True)
_QWEN_2_5_14B = replace(_QWEN_2_5_7B, hidden=5120, layers=48, heads=40, kv_heads=8, intermediate=13824, norm_eps=1e-5)
_QWEN_3_8B = ModelSpec(
    architecture="qwen3",
    vocab_size=151936,
    hidden=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=12288,
    max_seq_len=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
)
_QWEN_3_1_7B = replace(_QWEN_3_8B, hidden=2048, layers=28, heads=16, intermediate=6144, tie_embeddings=True)

_BERT_BASE = ModelSpec(
    architecture="bert",
    vocab_size=30522,
    hidden=768,
    layers=12,
    heads=12,
    kv_heads=12,
    head_dim=64,
    intermediate=3072,
    max_seq_len=512,
    norm_eps=1e-12,
    tie_embeddings=True,
    objective="masked",
    segment_kinds=2,
)
_BERT_LARGE = replace(_BERT_BASE, hidden=1024, layers=24, heads=16, kv_heads=16, intermediate=4096)

PRESETS: dict[str, ModelSpec] = {
    "llama-1-7b": _LLAMA_1_7B,
    "llama-1-13b": _LLAMA_1_13B,
    "llama-1-30b": _LLAMA_1_30B,
    "llama-1-65b": _LLAMA_1_65B,
    "llama-2-7b": replace(_LLAMA_1_7B, max_seq_len=4096, norm_eps=1e-5),
    "llama-2-13b": replace(_LLAMA_1_13B, max_seq_len=4096, norm_eps=1e-5),
    "llama-2-70b": _LLAMA_2_70B,
    "llama-3-8b": _LLAMA_3_8B,
    "llama-3-70b": _LLAMA_3_70B,
    "llama-3.1-8b": _LLAMA_3_1_8B,
    "llama-3.1-70b": _LLAMA_3_1_70B,
    "llama-3.1-405b": replace(_LLAMA_3_1_70B, hidden=16384, layers=126, heads=128, intermediate=53248),
    "llama-3.2-1b": replace(_LLAMA_3_2_3B, hidden=2048, layers=16, heads=32, head_dim=64),
    "llama-3.2-3b": _LLAMA_3_2_3B,
    "llama-3.3-70b": _LLAMA_3_1_70B,
    "mistral-7b-v0.1": _MISTRAL_7B,
    "mistral-7b-v0.3": replace(_MISTRAL_7B, vocab_size=32768, rope_theta=1e6, sliding_window=None),
    "qwen2.5-0.5b": replace(
        _QWEN_2_5_SMALL, hidden=896, layers=24, heads=14, head_dim=64, intermediate=4864, max_seq_len=32768
    ),
    "qwen2.5-1.5b": replace(_QWEN_2_5_SMALL, hidden=1536, heads=12, intermediate=8960),
    "qwen2.5-3b": replace(_QWEN_2_5_SMALL, hidden=2048, layers=36, heads=16, intermediate=11008, max_seq_len=32768),
    "qwen2.5-7b": _QWEN_2_5_7B,
    "qwen2.5-14b": _QWEN_2_5_14B,
    "qwen2.5-32b": replace(_QWEN_2_5_14B, layers=64, intermediate=27648),
    "qwen2.5-72b": replace(_QWEN_2_5_14B, hidden=8192, layers=80, heads=64, intermediate=29568),
    "qwen3-0.6b": replace(_QWEN_3_1_7B, hidden=1024, intermediate=3072),
    "qwen3-1.7b": _QWEN_3_1_7B,
    "qwen3-4b": replace(_QWEN_3_8B, hidden=2560, intermediate=9728, tie_embeddings=True),
    "qwen3-8b": _QWEN_3_8B,
    "qwen3-14b": replace(_QWEN_3_8B, hidden=5120, layers=40, heads=40, intermediate=17408),
    "qwen3-32b": replace(_QWEN_3_8B, hidden=5120, layers=64, heads=64, intermediate=25600),
    "bert-tiny": replace(_BERT_BASE, hidden=128, layers=2, heads=2, kv_heads=2, intermediate=512),
    "bert-mini": replace(_BERT_BASE, hidden=256, layers=4, heads=4, kv_heads=4, intermediate=1024),
    "bert-small": replace(_BERT_BASE, hidden=512, layers=4, heads=8, kv_heads=8, intermediate=2048),
    "bert-medium": replace(_BERT_BASE, hidden=512, layers=8, heads=8, kv_heads=8, intermediate=2048),
    "bert-base-uncased": _BERT_BASE,
    "bert-base-cased": replace(_BERT_BASE, vocab_size=28996),
    "bert-large-uncased": _BERT_LARGE,
    "bert-large-cased": replace(_BERT_LARGE, vocab_size=28996),
}
