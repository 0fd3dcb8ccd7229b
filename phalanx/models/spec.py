"""The shape of a model as plain numbers: presets, parameter shapes, counts and operations. No torch here."""

import math
from dataclasses import dataclass, replace

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_RULES = ("linear", "dynamic", "yarn", "llama3")
MOST_LAYERS = 10_000  # beyond any model: a slip of the pen must not cost minutes of counting
MOST_ELEMENTS = 2**59  # of one tensor: its bytes are counted in 64 bits, and torch allocates none of more


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

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values add a bias."""
        return self.architecture == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised before they are turned."""
        return self.architecture == "qwen3"

    def window_of(self, layer: int) -> int | None:
        """How many positions a position of layer number `layer` sees; None: all before it."""
        return None if layer in self.full_attention_layers else self.sliding_window


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
    found += _window_problems(spec)
    if spec.layers > MOST_LAYERS:
        found.append(f"model.layers is {spec.layers}, more than any model has ({MOST_LAYERS}); lower it.")
    if not not_positive:
        found += _head_problems(spec) + _size_problems(spec)
    if not 0.0 <= spec.dropout < 1.0:
        found.append(f"model.dropout is {spec.dropout}, but it is a probability below 1; set it to 0 or more, below 1.")
    if not (spec.init_std >= 0 and math.isfinite(spec.init_std)):
        found.append(f"model.init_std is {spec.init_std}, but a standard deviation is 0 or more; set it to 0.02, say.")
    return found + (_rope_problems(spec, spec.rope_scaling) if spec.rope_scaling else [])


def _window_problems(spec: ModelSpec) -> list[str]:
    if spec.sliding_window is None:
        return []
    if spec.sliding_window < 1:
        return [f"model.sliding_window is {spec.sliding_window}, but a position sees at least itself; raise it."]
    if spec.architecture == "llama":
        return [
            f"model.sliding_window is {spec.sliding_window}, which model.architecture llama has no place for, so that "
            "no export could say it; set model.architecture to mistral, which is the same model with a window."
        ]
    return []


def _head_problems(spec: ModelSpec) -> list[str]:
    found = []
    if spec.heads % spec.kv_heads:
        found.append(
            f"model.heads is {spec.heads} and model.kv_heads is {spec.kv_heads}, so query heads cannot share key heads "
            "evenly; set model.kv_heads to a divisor of model.heads."
        )
    if spec.hidden % spec.heads and spec.architecture == "llama":
        found.append(
            f"model.hidden is {spec.hidden} and model.heads is {spec.heads}, a shape that Hugging Face's Llama refuses "
            "and no export could be loaded; set model.hidden to a multiple of model.heads."
        )
    if spec.head_dim % 2:
        found.append(
            f"model.head_dim is {spec.head_dim}, but rotary positions turn pairs of channels; set an even one."
        )
    return found


def _size_problems(spec: ModelSpec) -> list[str]:
    shapes = parameter_shapes(replace(spec, layers=1))
    name, shape = max(shapes.items(), key=lambda item: math.prod(item[1]))
    if math.prod(shape) > MOST_ELEMENTS:
        return [
            f"the shapes make {name.replace('layers.0.', '')} a matrix of {' x '.join(map(str, shape))}, more elements "
            "than a tensor can have; lower model.hidden, model.intermediate, model.heads or model.vocab_size."
        ]
    if spec.lora is not None and spec.lora.rank * max(max(shape) for shape in shapes.values()) > MOST_ELEMENTS:
        return [f"model.lora.rank is {spec.lora.rank}, more than any matrix can have; lower it."]
    return []


def _rope_problems(spec: ModelSpec, scaling: RopeScaling) -> list[str]:
    if scaling.rule not in ROPE_RULES:
        return [
            f"model.rope_scaling.rule is {scaling.rule!r}, which is not known; use one of: {', '.join(ROPE_RULES)}."
        ]
    found = []
    used = ["factor"]
    if scaling.rule == "llama3":
        used += ["low_freq_factor", "high_freq_factor", "original_max_seq_len"]
    if scaling.rule == "yarn":
        used += ["beta_fast", "beta_slow", "original_max_seq_len"]
        used += [
            name for name in ("attention_factor", "mscale", "mscale_all_dim") if getattr(scaling, name) is not None
        ]
    for name in used:
        value = getattr(scaling, name)
        if not (value > 0 and math.isfinite(value)):
            found.append(f"model.rope_scaling.{name} is {value}, but it must be a finite number above 0; raise it.")
    if scaling.rule == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        found.append(
            f"model.rope_scaling.high_freq_factor is {scaling.high_freq_factor} and low_freq_factor is "
            f"{scaling.low_freq_factor}, which leaves no band to blend; set high_freq_factor above low_freq_factor."
        )
    if scaling.rule == "yarn" and scaling.beta_fast < scaling.beta_slow:
        found.append(
            f"model.rope_scaling.beta_fast is {scaling.beta_fast} and beta_slow is {scaling.beta_slow}, so the ramp "
            "would run backwards; set beta_fast above beta_slow."
        )
    if scaling.rule == "yarn" and spec.rope_theta == 1:
        found.append("model.rope_theta is 1, at which yarn finds no channel to begin at; raise it.")
    if scaling.rule == "dynamic" and spec.head_dim == 2:
        found.append(
            "model.head_dim is 2, whose one wave model.rope_scaling.rule dynamic cannot stretch; set a larger one."
        )
    return found


Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, in order of use in the forward pass; a tied head has no entry of its own."""
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
}
