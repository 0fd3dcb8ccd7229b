"""Why no model of some shape can exist, in sentences. No torch here."""

import math
from dataclasses import replace

from phalanx.layout.model_shape import (
    ARCHITECTURES,
    MAX_ELEMENTS,
    MAX_LAYERS,
    ROPE_RULES,
    ModelSpec,
    RopeScaling,
    parameter_shapes,
)


def find_shape_problems(spec: ModelSpec) -> list[str]:
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
    found += _window_problems(spec) + _objective_problems(spec)
    if spec.layers > MAX_LAYERS:
        found.append(f"model.layers is {spec.layers}, more than any model has ({MAX_LAYERS}); lower it.")
    if not not_positive:
        found += _head_problems(spec) + _size_problems(spec)
    for name in ("dropout", "attention_dropout"):
        if not 0.0 <= (p := getattr(spec, name)) < 1.0:
            found.append(f"model.{name} is {p}, but it is a probability below 1; set it to 0 or more, below 1.")
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


def _objective_problems(spec: ModelSpec) -> list[str]:
    """What BERT must have and what it has no place for."""
    if spec.architecture != "bert":
        if spec.attention_dropout:
            return [
                f"model.attention_dropout is {spec.attention_dropout}, which only model.architecture bert has; take it "
                "out."
            ]
        return []
    found = []
    if spec.sliding_window is not None:
        found.append(f"model.sliding_window is {spec.sliding_window}, but each position of BERT sees all; remove it.")
    if spec.rope_scaling is not None:
        found.append("model.rope_scaling stretches rotary positions, which BERT does not have; remove it.")
    if spec.kv_heads != spec.heads or spec.head_dim * spec.heads != spec.hidden:
        found.append(
            f"model.heads is {spec.heads}, kv_heads {spec.kv_heads} and head_dim {spec.head_dim}, but BERT's heads "
            f"share nothing and divide its width of {spec.hidden}; leave model.kv_heads and model.head_dim out, and "
            "set model.hidden to a multiple of model.heads."
        )
    if not spec.tie_embeddings:
        found.append("model.tie_embeddings is false, but BERT's head is its embedding; leave it out.")
    if spec.segment_kinds < 2:
        found.append(
            f"the table of segments has {spec.segment_kinds} rows, but a pair of texts needs 2; use another model."
        )
    return found


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
    if math.prod(shape) > MAX_ELEMENTS:
        return [
            f"the shapes make {name.replace('layers.0.', '')} a matrix of {' x '.join(map(str, shape))}, more elements "
            "than a tensor can have; lower model.hidden, model.intermediate, model.heads or model.vocab_size."
        ]
    if spec.lora is not None and spec.lora.rank * max(max(shape) for shape in shapes.values()) > MAX_ELEMENTS:
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
