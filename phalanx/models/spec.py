"""The shape of a model as plain numbers: presets, parameter shapes, counts and operations. No torch here."""

import math
from dataclasses import dataclass, replace

ARCHITECTURES = ("llama",)
MOST_LAYERS = 10_000  # beyond any model: a slip of the pen must not cost minutes of counting


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """The `llama3` rule that stretches rotary frequencies for contexts longer than `original_max_seq_len` positions.

    Waves longer than `original_max_seq_len / low_freq_factor` are slowed by `factor`, waves shorter than
    `original_max_seq_len / high_freq_factor` are kept, and those between are blended. Source: the Llama 3.1 release.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


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


def problems(spec: ModelSpec) -> list[str]:
    """Every reason why no model of this shape can exist, each a sentence naming configuration keys; empty if fine."""
    found = []
    if spec.architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        found.append(f"model.architecture is {spec.architecture!r}, which is not supported; use one of: {supported}.")
    counts = ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "max_seq_len")
    not_positive = [name for name in counts if getattr(spec, name) < 1]
    found += [
        f"model.{name} is {getattr(spec, name)}, but a model needs at least 1; raise it." for name in not_positive
    ]
    for name in ("rope_theta", "norm_eps"):
        value = getattr(spec, name)
        if not (value > 0 and math.isfinite(value)):
            found.append(f"model.{name} is {value}, but it must be a finite number above 0; set a positive one.")
    if spec.layers > MOST_LAYERS:
        found.append(f"model.layers is {spec.layers}, more than any model has ({MOST_LAYERS}); lower it.")
    if not not_positive:
        found += _head_problems(spec)
    if not 0.0 <= spec.dropout < 1.0:
        found.append(f"model.dropout is {spec.dropout}, but it is a probability below 1; set it to 0 or more, below 1.")
    if not (spec.init_std >= 0 and math.isfinite(spec.init_std)):
        found.append(f"model.init_std is {spec.init_std}, but a standard deviation is 0 or more; set it to 0.02, say.")
    return found + (_rope_problems(spec.rope_scaling) if spec.rope_scaling else [])


def _head_problems(spec: ModelSpec) -> list[str]:
    found = []
    if spec.heads % spec.kv_heads:
        found.append(
            f"model.heads is {spec.heads} and model.kv_heads is {spec.kv_heads}, so query heads cannot share key heads "
            "evenly; set model.kv_heads to a divisor of model.heads."
        )
    if spec.hidden % spec.heads:
        found.append(
            f"model.hidden is {spec.hidden} and model.heads is {spec.heads}, a shape that Hugging Face's Llama refuses "
            "and no export could be loaded; set model.hidden to a multiple of model.heads."
        )
    if spec.head_dim % 2:
        found.append(
            f"model.head_dim is {spec.head_dim}, but rotary positions turn pairs of channels; set an even one."
        )
    return found


def _rope_problems(scaling: RopeScaling) -> list[str]:
    found = []
    for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"):
        value = getattr(scaling, name)
        if not (value > 0 and math.isfinite(value)):
            found.append(f"model.rope_scaling.{name} is {value}, but it must be a finite number above 0; raise it.")
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        found.append(
            f"model.rope_scaling.high_freq_factor is {scaling.high_freq_factor} and low_freq_factor is "
            f"{scaling.low_freq_factor}, which leaves no band to blend; set high_freq_factor above low_freq_factor."
        )
    return found


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, in order of use in the forward pass; a tied head has no entry of its own."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, spec.hidden)}
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (spec.hidden,),
        "attention.q.weight": (queries, spec.hidden),
        "attention.k.weight": (keys, spec.hidden),
        "attention.v.weight": (keys, spec.hidden),
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


def parameter_count(spec: ModelSpec, embedding: bool = True) -> int:
    """Number of parameters; without `embedding`, those that multiply: no embedding table, but the head even if tied."""
    total = sum(math.prod(shape) for shape in parameter_shapes(spec).values())
    if embedding or spec.tie_embeddings:
        return total
    return total - spec.vocab_size * spec.hidden


def flops_per_token(spec: ModelSpec, seq_len: int) -> tuple[int, int]:
    """Floating-point operations of forward and backward per token of a sequence of `seq_len`: (full, causal).

    `full` is 6 per multiplying parameter plus 12 * layers * width * seq_len for attention, as the PaLM paper
    (appendix B) counts; `causal` takes half of the attention term, which is what a causal kernel really computes.
    """
    weights = 6 * parameter_count(spec, embedding=False)
    attention = 12 * spec.layers * spec.heads * spec.head_dim * seq_len
    return weights + attention, weights + attention // 2


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
}
