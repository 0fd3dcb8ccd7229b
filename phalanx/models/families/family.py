"""The record of a model family (ModelFamily), and helpers to read a config.json. No torch here."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import EXPERT_TARGETS, ModelSpec, Shapes
from phalanx.layout.tensor_shards import EXPERTS

MAX_COUNT = 2**31 - 1  # of any count in a config.json
NONE: Mapping[str, Any] = MappingProxyType({})
POSITIONS = "embed.positions.weight"  # a decoder's learned position embedding
ConfigJson = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The differences between families in attention and positions.

    `qk_norm`: queries and keys have a norm, over each of the `heads`, or over the `whole`. `rotary_share` of a head's
    channels are rotated, in pairs of neighbours with `rotary_pairs`. A learned position embedding has `position_offset`
    unused first rows; None: there is none. `alibi` lowers scores by distance: plain, or scaled (attention.py); with
    `sinks` each head has a score without a key. `score_cap` is a soft cap of scores (0: none).
    """

    causal: bool = True
    qk_norm: str = ""
    qkv_bias: bool = False
    o_bias: bool = False
    position_offset: int | None = None
    rotary_share: float = 1.0
    rotary_pairs: bool = False
    alibi: str = ""
    sinks: bool = False
    score_cap: float = 0.0

    @property
    def learnt_positions(self) -> bool:
        """Whether the model has a learned position embedding."""
        return self.position_offset is not None

    @property
    def needs_scores(self) -> bool:
        """Whether attention materializes its scores, for which torch has no kernel."""
        return self.score_cap > 0 or bool(self.alibi) or self.sinks


@dataclass(frozen=True, kw_only=True)
class BlockOptions(AttentionOptions):
    """The differences between families of decoders, which the network and the planner read.

    `norm` is rms or layer, the latter with a bias. Of the two halves of a block, attention and MLP, each has a norm
    before it (`pre_norms`), after it (`post_norms`), or both; with `norm_sums` that before it is of its sum with the
    residual instead, and the head has none. `parallel` halves have the same input, and with `shared_norm` one norm for
    both. `unit_offset`: norms multiply by 1 + weight. `gated`: the MLP has a gate.
    `logit_cap` is a soft cap of logits (0: none). `head` is plain, has a bias, or has normalized rows. `experts` are
    plain, or clamped, with biases (moe.py).
    """

    norm: str = "rms"
    pre_norms: bool = True
    post_norms: bool = False
    norm_sums: bool = False
    unit_offset: bool = False
    parallel: bool = False
    shared_norm: bool = False
    mlp_bias: bool = False
    gated: bool = True
    activation: str = "silu"  # or gelu, gelu_tanh, relu
    scaled_embedding: bool = False  # multiplied by the square root of the width
    logit_cap: float = 0.0
    head: str = "plain"
    experts: str = "plain"

    @property
    def biases(self) -> bool:
        """Whether all matrices and norms have biases."""
        return self.norm == "layer" and self.qkv_bias and self.o_bias and self.mlp_bias


@dataclass(frozen=True)
class TaskChoice:
    """The task of a recipe that a model is built for: `task.kind`, and its keys on masked pairs and labels."""

    kind: str
    next_sentence: bool = False
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HuggingFaceMapping:
    """The mapping of a family to Hugging Face folders: config.json and parameter names.

    `classes`: architecture in config.json -> objective of the head (EncoderSpec.objective, or language). `names`: our
    parameter name -> theirs; {i} is the layer. `keys`: field of a ModelSpec -> its key in config.json, the function
    that reads it, and the default. `read`: a config.json with its `defaults` (transformers' own), the fields of a
    ModelSpec read so far, and its name in errors -> more fields; `write`: a shape and the config.json of the weights ->
    more keys, without `forgotten` ones of the latter. `accepted`: keys of unsupported features, with the values that
    disable them. `cut_by_transform`: phalanx.transform cuts the class of transformers.

    `stacks`: our name of a parameter that stacks one or more matrices per expert -> theirs, in order; {e} is the
    expert.

    Several of `names` may map to one tensor, which then holds these parameters one after another; with `grouped`
    queries, keys and values are ordered by key head, each with its queries first. `transposed`: suffixes of our names
    whose matrices are stored (in, out). `prefix`: optional prefix of their names; `other_names`: alternative names;
    `ignored`: suffixes of unused tensors; `ahead`: suffix of a tensor in each layer behind the last that predicts
    further tokens, which is not read; `wide`: suffixes of those that are stored in float32 at least. `matches`
    tells families of one architecture in config.json apart.
    """

    model_type: str
    classes: Mapping[str, str]
    names: Mapping[str, str]
    keys: Mapping[str, tuple[str, Callable[..., Any], Any]]
    read: Callable[[dict[str, Any], dict[str, Any], str], dict[str, Any]]
    write: Callable[[ModelSpec, dict[str, Any]], dict[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    headless: tuple[str, ...] = ()  # more architectures, read as initial weights without their head
    forgotten: tuple[str, ...] = ()
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cut_by_transform: bool = True
    grouped: bool = False
    transposed: tuple[str, ...] = ()
    prefix: str = ""
    other_names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    ahead: str = ""
    wide: tuple[str, ...] = ()
    matches: Callable[[Mapping[str, Any]], bool] = lambda config: True


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A model family: everything that differs between families; FAMILIES (catalog.py) has one for each.

    `network` is "module:class", imported when a model is built. `tasks`: supported values of task.kind, the default
    first. `tensor_plan`: how parameters of a module are cut over ranks (layout/tensor_shards.py), experts aside; empty:
    no tensor or pipeline parallelism. `flops`: as `catalog.flops_per_token`, from a shape, a length and the shapes of
    parameters. `start`: defaults of a model without a preset; `complete`: derives fields from a recipe's keys and task.
    """

    name: str  # in recipes: model.architecture
    title: str
    network: str
    hf: HuggingFaceMapping
    shapes: Callable[[ModelSpec, BlockOptions], Shapes]
    flops: Callable[[ModelSpec, int, Shapes], tuple[int, int]]
    find_problems: Callable[[ModelSpec], list[str]] = lambda spec: []
    options: BlockOptions = BlockOptions()
    tasks: tuple[str, ...] = ("language",)
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, ModelSpec] = field(default_factory=dict)
    start: Callable[[ModelSpec], ModelSpec] = lambda spec: spec
    complete: Callable[[ModelSpec, Mapping[str, Any], TaskChoice], ModelSpec] = lambda spec, given, task: spec

    def options_of(self, spec: ModelSpec) -> BlockOptions:
        """The block options of a model of the family."""
        own = {name: value for name, value in vars(spec.block).items() if value is not None}
        return replace(self.options, **{name: own[name] for name in own.keys() & vars(self.options).keys()})

    @property
    def has_experts(self) -> bool:
        """Whether its models are mixtures of experts."""
        return any(".mlp.router." in name for name in self.hf.names)

    @property
    def writes_text(self) -> bool:
        """Whether it is a language model, which can generate text."""
        return "language" in self.tasks


def count_elements(spec: ModelSpec, shapes: Shapes, embedding: bool = True) -> int:
    """Number of parameters of `shapes`; without `embedding`, those that multiply: includes the head even if tied."""
    total = sum(math.prod(shape) for shape in shapes.values())
    if embedding:
        return total
    total -= math.prod(shapes.get(POSITIONS, (0,)))
    return total if spec.tie_embeddings else total - spec.vocab_size * spec.embedding_width


def active_shapes(spec: ModelSpec, shapes: Shapes) -> Shapes:
    """`shapes` with as many experts as a token goes through."""
    if spec.moe is None:
        return shapes
    chosen = spec.moe.experts_per_token
    return {name: (chosen, *shape[1:]) if EXPERTS in name else shape for name, shape in shapes.items()}


def count_adapter_elements(spec: ModelSpec, shapes: Shapes) -> int:
    """Number of parameters of the adapters beside `shapes`; 0 without them."""
    if spec.lora is None:
        return 0
    adapted = tuple(f".{target}.weight" for target in spec.lora.targets)
    stacks = tuple(f".{target}" for target in spec.lora.targets if target in EXPERT_TARGETS)
    per_rank = sum(sum(shape) for name, shape in shapes.items() if name.endswith(adapted))
    per_rank += sum(shape[0] * sum(shape[1:]) for name, shape in shapes.items() if name.endswith(stacks))
    return spec.lora.rank * per_rank


# -------------------------------------------------------------------------------------------------- reading config.json


def check_accepted(config: ConfigJson, accepted: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raises ConfigError for an unsupported feature in a config.json."""
    for name, values in accepted.items():
        if config.get(name) not in values:
            raise ConfigError(
                f"{where} sets {name}: {json.dumps(config[name])}, which is not supported and would change the model's "
                f"output; use a model with {name}: {json.dumps(values[0])}."
            )


def read_number(config: ConfigJson, name: str, where: str, default: float | None = None) -> float:
    """Read a key's number. Raises ConfigError where it is missing or no number."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        state = "does not set" if value is None else f"sets {json.dumps(value)} as"
        raise ConfigError(f"{where} {state} {name}, without which the model's shape is unknown; give it a number.")
    return value


def read_count(config: ConfigJson, name: str, where: str, default: int | None = None) -> int:
    """Read a key's count. Raises ConfigError where it is missing or no whole number >= 0."""
    value = read_number(config, name, where, default)
    if value != int(value) or not 0 <= value <= MAX_COUNT:
        raise ConfigError(f"{where} sets {json.dumps(value)} as {name}, which no model has; give it a whole number.")
    return int(value)


def read_flag(config: ConfigJson, name: str, where: str, default: bool) -> bool:
    """Read a key's boolean. Raises ConfigError for anything else."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{where} sets {json.dumps(value)} as {name}, which is neither true nor false; choose one.")
    return value


def shorten(value: Any) -> str:
    """JSON of a value, shortened for an error message."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def name_both(modules: Mapping[str, str]) -> dict[str, str]:
    """Entries of HuggingFaceMapping.names for the weight and the bias of each of `modules`."""
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")}


# Entries of HuggingFaceMapping.keys that all families have.
KEYS: dict[str, tuple[str, Callable[..., Any], Any]] = {
    "vocab_size": ("vocab_size", read_count, None),
    "hidden": ("hidden_size", read_count, None),
    "layers": ("num_hidden_layers", read_count, None),
    "heads": ("num_attention_heads", read_count, None),
    "intermediate": ("intermediate_size", read_count, None),
    "max_seq_len": ("max_position_embeddings", read_count, 2048),
    "init_std": ("initializer_range", read_number, 0.02),
}
