"""What the rest of Phalanx knows of a family of models, as one record; and how a config.json is read. No torch here."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec, Shapes

MAX_COUNT = 2**31 - 1  # of anything that a config counts
NONE: Mapping[str, Any] = MappingProxyType({})
ConfigJson = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """What a family's network computes, where families differ: its code and the planner go by these.

    `biases` are those of all matrices and norms, `qkv_bias` of queries, keys and values alone. `post_norms`: a norm
    behind each half of a block, too. `unit_offset`: norms multiply by 1 + weight. `activation` is that of the gate.
    """

    causal: bool = True
    gated: bool = True
    biases: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    learnt_positions: bool = False
    post_norms: bool = False
    unit_offset: bool = False
    scaled_embedding: bool = False  # by the square root of the width
    activation: str = "silu"  # or gelu_tanh


@dataclass(frozen=True)
class TaskChoice:
    """What a recipe trains a model for: `task.kind`, and what it says of masked pairs and of labels."""

    kind: str
    next_sentence: bool = False
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HuggingFaceMapping:
    """How a family is written in Hugging Face folders.

    `classes`: what config.json may call its architecture -> what the head is for (EncoderSpec.objective, or language).
    `names`: our name of a parameter -> theirs; {i} is the layer. `keys`: a number of a ModelSpec -> its key of
    config.json, how that is read, and what is taken where it says nothing. `read`: a config.json with its `defaults`
    (transformers' own), the fields of a ModelSpec that are read so far, and its name in errors -> more fields; `write`:
    a shape and the config.json that the weights came from -> more keys, but for `forgotten` ones of the latter.
    `accepted`: keys that would change the mathematics in a way that is not built here, and their values that do not.
    `cut_by_transform`: phalanx.transform cuts transformers' own class.
    """

    model_type: str
    classes: Mapping[str, str]
    names: Mapping[str, str]
    keys: Mapping[str, tuple[str, Callable[..., Any], Any]]
    read: Callable[[dict[str, Any], dict[str, Any], str], dict[str, Any]]
    write: Callable[[ModelSpec, dict[str, Any]], dict[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    headless: tuple[str, ...] = ()  # more classes of `architectures` that are read as a start, without their head
    forgotten: tuple[str, ...] = ()
    cut_by_transform: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Everything that differs between families of models; FAMILIES (catalog.py) has one for each.

    `network` is "module:class", which is imported when a model is built. `tasks`: values of task.kind that it can be
    trained for, the usual one first. `tensor_plan`: how the matrix of a module is cut over ranks
    (layout/tensor_shards.py); empty: neither slices nor stages. `flops`: as `catalog.flops_per_token`, from a shape, a
    length and the shapes of parameters. `start`: defaults of a model that a recipe describes without a preset;
    `complete`: what follows from the keys that a recipe gives and its task.
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

    @property
    def writes_text(self) -> bool:
        """Whether it is trained to predict the next token, so that text can be written with it."""
        return "language" in self.tasks


def count_elements(spec: ModelSpec, shapes: Shapes, embedding: bool = True) -> int:
    """Number of parameters of `shapes`; without `embedding`, those that multiply: the head's even if it is tied."""
    total = sum(math.prod(shape) for shape in shapes.values())
    return total if embedding or spec.tie_embeddings else total - spec.vocab_size * spec.hidden


def count_adapter_elements(spec: ModelSpec, shapes: Shapes) -> int:
    """Number of parameters of the adapters beside `shapes`; 0 without them."""
    if spec.lora is None:
        return 0
    adapted = tuple(f".{target}.weight" for target in spec.lora.targets)
    return spec.lora.rank * sum(sum(shape) for name, shape in shapes.items() if name.endswith(adapted))


# ------------------------------------------------------------------------------------------------ what config.json says


def check_accepted(config: ConfigJson, accepted: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raises ConfigError for a feature that is not built here."""
    for name, values in accepted.items():
        if config.get(name) not in values:
            raise ConfigError(
                f"{where} sets {name}: {json.dumps(config[name])}, which is not supported and would change the model's "
                f"output; use a model with {name}: {json.dumps(values[0])}."
            )


def read_number(config: ConfigJson, name: str, where: str, default: float | None = None) -> float:
    """A key's number. Raises ConfigError where there is none."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        state = "does not set" if value is None else f"sets {json.dumps(value)} as"
        raise ConfigError(f"{where} {state} {name}, without which the model's shape is unknown; give it a number.")
    return value


def read_count(config: ConfigJson, name: str, where: str, default: int | None = None) -> int:
    """A key's whole number of something. Raises ConfigError where there is none."""
    value = read_number(config, name, where, default)
    if value != int(value) or not 0 <= value <= MAX_COUNT:
        raise ConfigError(f"{where} sets {json.dumps(value)} as {name}, which no model has; give it a whole number.")
    return int(value)


def read_flag(config: ConfigJson, name: str, where: str, default: bool) -> bool:
    """A key's true or false. Raises ConfigError for anything else."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{where} sets {json.dumps(value)} as {name}, which is neither true nor false; choose one.")
    return value


# Of HuggingFaceMapping.keys, those that all families have.
KEYS: dict[str, tuple[str, Callable[..., Any], Any]] = {
    "vocab_size": ("vocab_size", read_count, None),
    "hidden": ("hidden_size", read_count, None),
    "layers": ("num_hidden_layers", read_count, None),
    "heads": ("num_attention_heads", read_count, None),
    "intermediate": ("intermediate_size", read_count, None),
    "max_seq_len": ("max_position_embeddings", read_count, 2048),
    "init_std": ("initializer_range", read_number, 0.02),
}
