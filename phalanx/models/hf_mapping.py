"""config.json of Hugging Face folders, in (hf_config.py) and out, and what our parameters are called there."""

import re
from typing import Any

import torch

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec, RopeScaling
from phalanx.models import hf_bert
from phalanx.models.hf_config import ARCHITECTURES, BASE_KEY, LAYER_TYPES
from phalanx.models.llama import Llama
from phalanx.models.model import Architecture

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    words = {windows: word for word, windows in LAYER_TYPES.items()}
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
