"""The shape of a model as plain numbers. What a family of models makes of it: models/families/catalog.py."""

from dataclasses import asdict, dataclass
from typing import Any

Shapes = dict[str, tuple[int, ...]]  # of parameters, by name
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
class AttentionSpec:
    """What few decoders say of their attention; None: what all others do.

    `window_rope_theta`: base of the rotary frequencies of layers with a window, which are not stretched.
    `query_scalar`: scores are divided by its square root, else by that of the head's width.
    """

    window_rope_theta: float | None = None
    query_scalar: float | None = None


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """What only encoders have. `objective` is one of OBJECTIVES, `segment_kinds` the rows of the table of segments
    (Hugging Face: type_vocab_size), `labels` what tokens or sequences are told apart as, and `attention_dropout` that
    of attention's probabilities."""

    objective: str = "masked"
    segment_kinds: int = 2
    labels: tuple[str, ...] = ()
    attention_dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of a language model: all that fixes its parameters and its mathematics.

    Lengths are in elements, `max_seq_len` in tokens. A recipe's section `model` has the same keys.

    Examples:
        >>> spec = phalanx.ModelSpec(vocab_size=64, hidden=16, layers=2, heads=2, kv_heads=2, head_dim=8,
        ...                          intermediate=32, max_seq_len=32)
        >>> spec.rope_theta
        10000.0
    """

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
    attention: AttentionSpec = AttentionSpec()
    lora: LoraSpec | None = None
    encoder: EncoderSpec | None = None

    def window_of(self, layer: int) -> int | None:
        """How many positions a position of layer number `layer` sees; None: all before it."""
        return None if layer in self.full_attention_layers else self.sliding_window


def list_timing_shapes(spec: ModelSpec) -> dict[str, Any]:
    """What of a shape makes a difference to a device, as records of measurements have it: those of encoders and of
    rare attention beside the others."""
    shapes = {name: value for name, value in asdict(spec).items() if name not in ("norm_eps", "init_std", "dropout")}
    rare, encoder = shapes.pop("attention"), shapes.pop("encoder")
    usual = {"objective": "language", "segment_kinds": 0, "labels": (), "attention_dropout": 0.0}
    return shapes | (encoder or usual) | {name: value for name, value in rare.items() if value is not None}
