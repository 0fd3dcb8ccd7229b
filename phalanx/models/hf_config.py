"""config.json of Hugging Face folders, read: which model it describes. No torch here."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.core.errors import ConfigError, fetch_hint
from phalanx.layout.model_shape import MAX_LAYERS, ROPE_RULES, ModelSpec, RopeScaling
from phalanx.layout.model_shape_checks import find_shape_problems
from phalanx.models import hf_bert

# What a config.json calls its architecture -> what a ModelSpec does, which is also its model_type.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MAX_COUNT = 2**31 - 1  # of anything that a config counts
# The key by which a config.json with an architecture of a user's own says which of ours it is built on.
BASE_KEY = "phalanx_architecture"
# What transformers takes for a key that is not there, where that differs from Llama's.
_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
# Config keys that would change the mathematics in a way that is not built here, and the values that do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "attention_dropout": (0, 0.0, None),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, 1.0, None),
}
LAYER_TYPES = {
    "full_attention": False,
    "sliding_attention": True,
}  # transformers' words for a layer, and if it has a window
NONE: Mapping[str, Any] = MappingProxyType({})


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ConfigError if the folder or the file is missing or no JSON."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}), so the model's shape is unknown; give a Hugging Face folder, "
            f"such as `phalanx export` makes of a run{fetch_hint(folder)}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object, so the model's shape is unknown; fetch the file again.")
    return config


def spec_from_config(config: dict[str, Any], where: str, own: Mapping[str, Any] = NONE) -> ModelSpec:
    """The ModelSpec of a config.json's content, in the form of transformers 4 or 5; `where` names it in errors.

    `own`: the keys that a class of one's own writes (`Architecture.hf_config`), which with its architecture are read,
    too. Raises ConfigError for an architecture or a feature that is not supported, or for an impossible shape.
    """
    if hf_bert.is_bert(config):
        return _bert(config, where)
    architecture = _architecture(config, where, own)
    for name, accepted in _UNSUPPORTED.items():
        ours = name in own or (architecture == "qwen2" and name == "attention_bias")  # has it always
        if config.get(name) not in accepted and not ours:
            raise ConfigError(
                f"{where} sets {name}: {json.dumps(config[name])}, which is not supported and would change the model's "
                f"output; use a model with {name}: {json.dumps(accepted[0])}."
            )
    config = _DEFAULTS[architecture] | config
    hidden = _count(config, "hidden_size", where)
    heads = _count(config, "num_attention_heads", where)
    layers = _count(config, "num_hidden_layers", where)
    theta, scaling = _rope(config, where)
    window, full = _window(config, architecture, layers, where)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=_count(config, "vocab_size", where),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", where, heads),
        head_dim=_count(config, "head_dim", where, hidden // max(1, heads)),
        intermediate=_count(config, "intermediate_size", where),
        max_seq_len=_count(config, "max_position_embeddings", where, 2048),
        sliding_window=window,
        full_attention_layers=full,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(config, "rms_norm_eps", where, 1e-6),
        tie_embeddings=_flag(config, "tie_word_embeddings", where, False),
        init_std=_number(config, "initializer_range", where, 0.02),
    )
    found = find_shape_problems(spec)
    if found:
        raise ConfigError(f"{where} describes an impossible model: {' '.join(found)}")
    return spec


def _bert(config: dict[str, Any], where: str) -> ModelSpec:
    """The shape of a BERT, without a head: that depends on what it is to be trained for."""
    hf_bert.check_bert_config(config, where)
    config = hf_bert.DEFAULTS | config
    heads = _count(config, "num_attention_heads", where)
    hidden = _count(config, "hidden_size", where)
    spec = ModelSpec(
        architecture="bert",
        vocab_size=_count(config, "vocab_size", where),
        hidden=hidden,
        layers=_count(config, "num_hidden_layers", where),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // max(1, heads),
        intermediate=_count(config, "intermediate_size", where),
        max_seq_len=_count(config, "max_position_embeddings", where),
        norm_eps=_number(config, "layer_norm_eps", where, 1e-12),
        tie_embeddings=True,
        init_std=_number(config, "initializer_range", where, 0.02),
        objective="masked",
        segment_kinds=_count(config, "type_vocab_size", where),
    )
    if found := find_shape_problems(spec):
        raise ConfigError(f"{where} describes an impossible model: {' '.join(found)}")
    return spec


def _architecture(config: dict[str, Any], where: str, keys: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        kind = config.get("model_type")
        named = [next((theirs for theirs, ours in ARCHITECTURES.items() if ours == kind), str(kind))]
    own = keys.get("architectures")
    if own is not None and named == own:
        base = config.get(BASE_KEY, "llama")
        if base in ARCHITECTURES.values():
            return str(base)
        raise ConfigError(
            f"{where} sets {BASE_KEY}: {json.dumps(base)}, which is not known; set it to one of: "
            f"{', '.join(ARCHITECTURES.values())}."
        )
    if not isinstance(named[0], str) or named[0] not in ARCHITECTURES:
        raise ConfigError(
            f"{where} has the architecture {named[0]}, which cannot be trained here; use a folder of a "
            f"supported one: {', '.join([*(own or []), *ARCHITECTURES, *hf_bert.ARCHITECTURES])}"
            f"{'; or set model.code to the file that defines its class' if BASE_KEY in config else ''}."
        )
    return ARCHITECTURES[named[0]]


def _number(config: dict[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        state = "does not set" if value is None else f"sets {json.dumps(value)} as"
        raise ConfigError(f"{where} {state} {name}, without which the model's shape is unknown; give it a number.")
    return value


def _count(config: dict[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = _number(config, name, where, default)
    if value != int(value) or not 0 <= value <= MAX_COUNT:
        raise ConfigError(f"{where} sets {json.dumps(value)} as {name}, which no model has; give it a whole number.")
    return int(value)


def _flag(config: dict[str, Any], name: str, where: str, default: bool) -> bool:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{where} sets {json.dumps(value)} as {name}, which is neither true nor false; choose one.")
    return value


def _window(config: dict[str, Any], architecture: str, layers: int, where: str) -> tuple[int | None, tuple[int, ...]]:
    """The width of the sliding window and the layers that do without, as each of transformers' models reads them."""
    if architecture == "llama" or config.get("sliding_window") is None:
        window = None
    elif architecture == "mistral" or _flag(config, "use_sliding_window", where, False):
        window = _count(config, "sliding_window", where)
    else:
        window = None
    slides = [window is not None] * layers if layers <= MAX_LAYERS else []
    if window is not None and architecture != "mistral":
        first = _count(config, "max_window_layers", where)
        slides = [layer >= first for layer in range(len(slides))]
    kinds = config.get("layer_types")
    if kinds is not None and architecture != "llama":
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
            raise ConfigError(
                f"{where} sets layer_types to {_brief(kinds)}, which is no list of {layers} of "
                f"{', '.join(LAYER_TYPES)}; give each layer one of them."
            )
        told = [LAYER_TYPES[kind] for kind in kinds]
        if told != slides and (architecture == "mistral" or window is None):
            raise ConfigError(
                f"{where} sets layer_types to {_brief(kinds)}, which its other keys about the sliding window "
                f"contradict for a {architecture} model; take layer_types out."
            )
        slides = told
    if window is None or not any(slides):
        return None, ()
    return window, tuple(layer for layer, windowed in enumerate(slides) if not windowed)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _rope(config: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    # transformers 4 has rope_theta beside an optional rope_scaling; 5 has both in rope_parameters.
    rule = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rule, dict):
        raise ConfigError(
            f"{where} sets rope_scaling to {json.dumps(rule)}, which is no JSON object; give null or a rule."
        )
    if any(isinstance(value, dict) for value in rule.values()):
        raise ConfigError(
            f"{where} gives each kind of layer rotary positions of its own, which is not supported and would change "
            "the model's output; use a model with one rule for all."
        )
    if rule.get("partial_rotary_factor") not in _UNSUPPORTED["partial_rotary_factor"]:
        raise ConfigError(
            f"{where} sets partial_rotary_factor: {json.dumps(rule['partial_rotary_factor'])}, which is not supported "
            "and would change the model's output; use a model that turns all channels."
        )
    theta = _number(rule, "rope_theta", where, _number(config, "rope_theta", where, 10000.0))
    kind = str(rule.get("rope_type") or rule.get("type") or "default")
    if kind == "default":
        return theta, None
    if kind not in ROPE_RULES:
        raise ConfigError(
            f"{where} scales rotary positions by the rule {kind!r}, which is not supported and would change the "
            f"model's output; use a model with one of the supported rules: default, {', '.join(ROPE_RULES)}."
        )
    if kind in ("linear", "dynamic"):
        return theta, RopeScaling(rule=kind, factor=_number(rule, "factor", where))
    longest = _count(config, "max_position_embeddings", where, 2048)
    original = _count(config, "original_max_position_embeddings", where, 0) or _count(
        rule, "original_max_position_embeddings", where, longest
    )
    if kind == "llama3":
        return theta, RopeScaling(
            factor=_number(rule, "factor", where),
            low_freq_factor=_number(rule, "low_freq_factor", where),
            high_freq_factor=_number(rule, "high_freq_factor", where),
            original_max_seq_len=original,
        )
    extras = ("attention_factor", "mscale", "mscale_all_dim")
    return theta, RopeScaling(
        rule=kind,
        factor=_number(rule, "factor", where, longest / max(1, original)),
        original_max_seq_len=original,
        beta_fast=_number(rule, "beta_fast", where, 32.0) or 32.0,  # transformers takes 0 for nothing
        beta_slow=_number(rule, "beta_slow", where, 1.0) or 1.0,
        truncate=_flag(rule, "truncate", where, True),
        **{name: _number(rule, name, where) for name in extras if rule.get(name) is not None},
    )
