"""The shape of a model as plain numbers. What a family of models makes of it: models/families/catalog.py."""

from dataclasses import asdict, dataclass
from typing import Any

Shapes = dict[str, tuple[int, ...]]  # of parameters, by name
# What a head is for: next tokens; masked tokens, also with whether the second segment follows the first; a label for
# each token; one for the whole.
OBJECTIVES = ("language", "masked", "masked-next", "tags", "classes")
ROPE_RULES = ("linear", "dynamic", "yarn", "llama3")
LONGROPE = "longrope"  # by numbers for each pair of channels, which come from a folder
MASKED_FRACTION = 0.15  # of the tokens that are predicted, of those of a sequence: BERT's own (Devlin et al. 2018)
IGNORE_INDEX = -100  # label without a loss
MAX_LAYERS = 10_000  # beyond any model: a slip of the pen must not cost minutes of counting
MAX_ELEMENTS = 2**59  # of one tensor: its bytes are counted in 64 bits, and torch allocates none of more


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than `original_max_seq_len` positions; see rotary.py.

    `linear` slows all waves by `factor`; `dynamic` only when a sequence is longer than the model's `max_seq_len`.
    `llama3` slows waves longer than `original_max_seq_len / low_freq_factor`, keeps those shorter than
    `original_max_seq_len / high_freq_factor`, and blends those between. `yarn` slows waves that turn less than
    `beta_slow` times in `original_max_seq_len`, keeps those that turn more than `beta_fast` times, and multiplies
    cosines and sines by `attention_factor` (None: from `factor` and, where both are given, the two `mscale`s).
    `longrope` slows each pair of rotated channels by its `short_factors`, in sequences longer than
    `original_max_seq_len` by its `long_factors`.
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # the matrices of a block that may get an adapter
LATENT_TARGETS = ("q_down", "q_up", "kv_down", "kv_up")  # those of latent attention that may, beside q and o
# Their modules in a block.
ADAPTED_MODULES = {
    name: f"{'mlp' if name in ('gate', 'up', 'down') else 'attention'}.{name}"
    for name in (*LORA_TARGETS, *LATENT_TARGETS)
}
EXPERT_TARGETS = ("experts.gate_up", "experts.down")  # the stacks of a layer's experts that may


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """LoRA adapters with frozen weights: `targets` of each block compute with W + alpha / rank * B A; see
    models/lora.py.

    `dropout` is the probability of zeroing an element of A's input. `targets` are of LORA_TARGETS, LATENT_TARGETS and
    EXPERT_TARGETS, in this order.
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
class BlockSpec:
    """Deviations of a model from its family, as fields of the family's BlockOptions (None: as the family); and
    `window_rope_theta`: base of the rotary frequencies of layers with a window, which are not stretched;
    `query_scalar`: scores are divided by its square root, else by that of the head's width; `embedding_width` of the
    embedding and the head where a matrix behind the one and before the other leads to the model's width and back.
    """

    window_rope_theta: float | None = None
    query_scalar: float | None = None
    embedding_width: int | None = None
    norm_sums: bool | None = None
    activation: str | None = None
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    parallel: bool | None = None
    shared_norm: bool | None = None
    rotary_share: float | None = None
    alibi: str | None = None
    score_cap: float | None = None
    logit_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Mixture of experts: each token goes through `experts_per_token` of a layer's `experts`, gated feed-forward layers
    of width `intermediate` each, and through no less however many choose one.

    `renormalize`: the weights of the chosen experts are divided by their sum; then they are multiplied by `scale`.
    `scores` are softmax or sigmoid, the latter with a correction of each expert in the choice, which is within the best
    `groups_per_token` of `groups` of experts. Each token goes through `shared` more experts. `dense_layers` have an
    ordinary feed-forward layer. Training balances their load by `balance` (sequence, group, step_before, step, bias or
    none), `group` (sequences), `balance_weight`, `bias_rate`, `z_loss` and `over` (layer or model); models/moe.py has
    the formulas.
    """

    experts: int
    experts_per_token: int
    intermediate: int
    renormalize: bool = True
    dense_layers: tuple[int, ...] = ()
    scores: str = "softmax"
    scale: float = 1.0
    shared: int = 0
    groups: int = 1
    groups_per_token: int = 1
    balance: str = "sequence"
    group: int = 1
    balance_weight: float = 0.01
    bias_rate: float = 0.001
    z_loss: float = 0.0
    over: str = "layer"


LATENT_WIDTHS = ("query_rank", "key_rank", "plain_dim", "value_dim")  # in a recipe's order


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Latent attention: keys and values come from `key_rank` numbers of a token, queries from `query_rank` (0: from all
    of its width). A head has `plain_dim` channels without positions beside `ModelSpec.head_dim` rotated ones, and
    values of `value_dim`; see models/latent_attention.py."""

    query_rank: int
    key_rank: int
    plain_dim: int
    value_dim: int

    def shapes(self, hidden: int, heads: int, turned: int) -> Shapes:
        """The shapes of attention's parameters, with `turned` rotated channels of each of `heads`."""
        queries, rank = heads * (self.plain_dim + turned), self.query_rank
        found: Shapes = {"q.weight": (queries, hidden)}
        if rank:
            found = {
                "q_down.weight": (rank, hidden),
                "q_down_norm.weight": (rank,),
                "q_up.weight": (queries, rank),
            }
        return found | {
            "kv_down.weight": (self.key_rank + turned, hidden),
            "kv_down_norm.weight": (self.key_rank,),
            "kv_up.weight": (heads * (self.plain_dim + self.value_dim), self.key_rank),
            "o.weight": (hidden, heads * self.value_dim),
        }

    def mean_width(self, turned: int) -> int:
        """The mean width of a head's keys and values, to which the cost of attention is proportional."""
        return (self.plain_dim + turned + self.value_dim) // 2


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """What only encoders have. `objective` is one of OBJECTIVES, `segment_kinds` the rows of the table of segments
    (Hugging Face: type_vocab_size), and `labels` what tokens or sequences are told apart as."""

    objective: str = "masked"
    segment_kinds: int = 2
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The counts and widths of a transformer: lengths are in elements, `max_seq_len` in tokens."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelSizes):
    """The shape of a language model: all that fixes its parameters and its mathematics.

    A recipe's section `model` has the same keys.

    Examples:
        >>> spec = phalanx.ModelSpec(vocab_size=64, hidden=16, layers=2, heads=2, kv_heads=2, head_dim=8,
        ...                          intermediate=32, max_seq_len=32)
        >>> spec.rope_theta
        10000.0
    """

    architecture: str = "llama"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0  # of attention's probabilities
    init_std: float = 0.02
    sliding_window: int | None = None  # positions that a position sees, itself included
    full_attention_layers: tuple[int, ...] = ()  # layers that see everything despite the window
    block: BlockSpec = BlockSpec()
    lora: LoraSpec | None = None
    encoder: EncoderSpec | None = None
    moe: MoESpec | None = None
    latent: LatentSpec | None = None

    @property
    def attention_width(self) -> int:
        """Channels of a head's queries, keys and values as attention takes them."""
        return self.head_dim + (self.latent.plain_dim if self.latent is not None else 0)

    @property
    def embedding_width(self) -> int:
        """Channels of the embedding of tokens, and of the head's matrix."""
        return self.block.embedding_width or self.hidden

    def has_experts(self, layer: int) -> bool:
        """Whether layer number `layer` has experts in the place of one feed-forward layer."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def window_of(self, layer: int) -> int | None:
        """How many positions a position of layer number `layer` sees; None: all before it."""
        return None if layer in self.full_attention_layers else self.sliding_window


_TIMED_OF_MOE = ("experts", "experts_per_token", "intermediate", "dense_layers", "shared", "balance")


def list_timing_shapes(spec: ModelSpec) -> dict[str, Any]:
    """What of a shape makes a difference to a device, as records of measurements have it: those of encoders and of
    rare blocks beside the others."""
    shapes = {name: value for name, value in asdict(spec).items() if name not in ("norm_eps", "init_std", "dropout")}
    rare, encoder, moe = shapes.pop("block") | (shapes.pop("latent") or {}), shapes.pop("encoder"), shapes.pop("moe")
    experts = {f"moe_{name}": moe[name] for name in _TIMED_OF_MOE} if moe else {}
    usual = {"objective": "language", "segment_kinds": 0, "labels": ()}
    return shapes | experts | (encoder or usual) | {name: value for name, value in rare.items() if value is not None}
