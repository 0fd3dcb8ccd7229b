"""config.json of Hugging Face folders, in and out, and what our parameters are called there."""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from phalanx.errors import ConfigError, fetch_hint
from phalanx.models import hf_bert
from phalanx.models.llama import Llama
from phalanx.models.model import Architecture
from phalanx.models.spec import MOST_LAYERS, ROPE_RULES, ModelSpec, RopeScaling
from phalanx.models.spec_problems import problems

# What a config.json calls its architecture -> what a ModelSpec does, which is also its model_type.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST = 2**31 - 1  # of anything that a config counts
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
_KINDS = {"full_attention": False, "sliding_attention": True}  # transformers' words for a layer, and if it has a window


def hf_name(name: str, model_class: type[Architecture] = Llama) -> str:
    """The Hugging Face name of our parameter `name`. Raises ConfigError where a class of one's own says none."""
    found = re.fullmatch(r"(layers\.)(\d+)(\..+)", name)
    pattern = name if found is None else f"layers.{{i}}{found[3]}"
    if pattern not in model_class.hf_names:
        raise ConfigError(
            f"the class {model_class.__name__} of model.code says no Hugging Face name for its parameter {name}, so no "
            f"export could name it; add {pattern!r} to its hf_names"
        )
    return model_class.hf_names[pattern].replace("{i}", found[2] if found else "")


# -------------------------------------------------------------------------------------------------------- reading


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


def spec_from_config(config: dict[str, Any], where: str, model_class: type[Architecture] = Llama) -> ModelSpec:
    """The ModelSpec of a config.json's content, in the form of transformers 4 or 5; `where` names it in errors.

    A class of one's own reads its own architecture too, with its own keys. Raises ConfigError for an architecture or a
    feature that is not supported, or for an impossible shape.
    """
    if hf_bert.is_bert(config):
        return _bert(config, where)
    architecture = _architecture(config, where, model_class)
    for name, accepted in _UNSUPPORTED.items():
        ours = name in model_class.hf_config or (architecture == "qwen2" and name == "attention_bias")  # has it always
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
    found = problems(spec)
    if found:
        raise ConfigError(f"{where} describes an impossible model: {' '.join(found)}")
    return spec


def _bert(config: dict[str, Any], where: str) -> ModelSpec:
    """The shape of a BERT, without a head: that depends on what it is to be trained for."""
    hf_bert.check_supported(config, where)
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
    if found := problems(spec):
        raise ConfigError(f"{where} describes an impossible model: {' '.join(found)}")
    return spec


def _architecture(config: dict[str, Any], where: str, model_class: type[Architecture]) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        kind = config.get("model_type")
        named = [next((theirs for theirs, ours in ARCHITECTURES.items() if ours == kind), str(kind))]
    own = model_class.hf_config.get("architectures")
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
    if value != int(value) or not 0 <= value <= MOST:
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
    slides = [window is not None] * layers if layers <= MOST_LAYERS else []
    if window is not None and architecture != "mistral":
        first = _count(config, "max_window_layers", where)
        slides = [layer >= first for layer in range(len(slides))]
    kinds = config.get("layer_types")
    if kinds is not None and architecture != "llama":
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
            raise ConfigError(
                f"{where} sets layer_types to {_brief(kinds)}, which is no list of {layers} of {', '.join(_KINDS)}; "
                "give each layer one of them."
            )
        told = [_KINDS[kind] for kind in kinds]
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


# -------------------------------------------------------------------------------------------------------- writing


def config_from_spec(
    spec: ModelSpec,
    dtype: torch.dtype,
    original: dict[str, Any] | None = None,
    bos_id: int | None = None,
    eos_id: int | list[int] | None = None,
    model_class: type[Architecture] = Llama,
) -> dict[str, Any]:
    """The config.json of a model, readable by transformers 4.4x and 5.

    Keys of `original` that do not describe the shape are kept; token ids that are None are taken from `original`. A
    class of one's own adds its `hf_config`.
    """
    original = original or {}
    if spec.architecture == "bert":
        return hf_bert.config_of(spec, _dtype_name(dtype), original)
    rule = _rope_rule(spec.rope_scaling)
    dtype_name = _dtype_name(dtype)
    own = model_class.hf_config
    return {
        **original,
        "architectures": [next(theirs for theirs, ours in ARCHITECTURES.items() if ours == spec.architecture)],
        "model_type": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "initializer_range": spec.init_std,
        "hidden_act": "silu",
        **_architecture_keys(spec),
        # transformers 4 reads the first two keys, 5 the third; both agree.
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if spec.rope_scaling is None else rule,
        "rope_parameters": {**rule, "rope_theta": spec.rope_theta},
        # Explicit nulls: transformers would otherwise put in the ids of its own default vocabulary.
        "bos_token_id": original.get("bos_token_id") if bos_id is None else bos_id,
        "eos_token_id": original.get("eos_token_id") if eos_id is None else eos_id,
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
        **({BASE_KEY: spec.architecture} if "architectures" in own else {}),
        **own,
    }


def _architecture_keys(spec: ModelSpec) -> dict[str, Any]:
    """The keys that only some of transformers' models read."""
    if spec.architecture == "llama":
        return {"attention_bias": False, "mlp_bias": False}
    if spec.architecture == "mistral":
        return {"sliding_window": spec.sliding_window}
    windowed = [spec.window_of(layer) is not None for layer in range(spec.layers)]
    words = {windows: word for word, windows in _KINDS.items()}
    return {
        "use_sliding_window": any(windowed),
        "sliding_window": spec.sliding_window,
        # transformers 4 before layer_types reads the first key alone: right where the windowed layers are the last.
        "max_window_layers": windowed.index(True) if any(windowed) else spec.layers,
        "layer_types": [words[windows] for windows in windowed],
        **({"attention_bias": False} if spec.architecture == "qwen3" else {}),
    }


def _rope_rule(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    rule: dict[str, Any] = {"rope_type": scaling.rule, "factor": scaling.factor}
    if scaling.rule == "llama3":
        rule |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.rule == "yarn":
        rule |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        extras = {name: getattr(scaling, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        rule |= {name: float(value) for name, value in extras.items() if value is not None}
    if scaling.rule in ("llama3", "yarn"):
        rule["original_max_position_embeddings"] = scaling.original_max_seq_len
    return rule


def _dtype_name(dtype: torch.dtype) -> str:
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ConfigError(f"The dtype {dtype} cannot be written for Hugging Face; use one of: {', '.join(DTYPES)}.")
