"""The catalog of model families (FAMILIES), and what follows from a shape by its family. No torch here."""

import difflib
import math
from dataclasses import replace

from phalanx.layout.model_shape import (
    ADAPTED_MODULES,
    LONGROPE,
    MAX_ELEMENTS,
    MAX_LAYERS,
    ROPE_RULES,
    ModelSpec,
    RopeScaling,
    Shapes,
)
from phalanx.models.families.baichuan import BAICHUAN, BAICHUAN2
from phalanx.models.families.bert import BERT
from phalanx.models.families.deepseek import DEEPSEEK_V3
from phalanx.models.families.falcon import FALCON, FALCON_RW
from phalanx.models.families.family import BlockOptions, ModelFamily, count_adapter_elements, count_elements
from phalanx.models.families.gemma2 import GEMMA2
from phalanx.models.families.gemma3 import GEMMA3
from phalanx.models.families.gpt import GPT2, GPTJ, OPT
from phalanx.models.families.gpt_neox import GPT_NEOX
from phalanx.models.families.gpt_oss import GPT_OSS
from phalanx.models.families.internlm2 import INTERNLM2
from phalanx.models.families.llama import LLAMA, MISTRAL
from phalanx.models.families.moe import MIXTRAL, OLMOE, QWEN3_MOE
from phalanx.models.families.olmo2 import OLMO2
from phalanx.models.families.phi3 import PHI3
from phalanx.models.families.qwen import QWEN1, QWEN2, QWEN3

_ALL = (
    LLAMA, MISTRAL, QWEN1, QWEN2, QWEN3, GEMMA2, GEMMA3, GPT_NEOX, FALCON, FALCON_RW, PHI3, GPT2, GPTJ, OPT, OLMO2,
    INTERNLM2, BAICHUAN, BAICHUAN2, MIXTRAL, QWEN3_MOE, OLMOE, GPT_OSS, DEEPSEEK_V3, BERT,
)  # fmt: skip
FAMILIES: dict[str, ModelFamily] = {each.name: each for each in _ALL}
PRESETS: dict[str, ModelSpec] = {name: spec for each in FAMILIES.values() for name, spec in each.presets.items()}
DEFAULT_FAMILY = LLAMA


def _plan_transform(family: ModelFamily) -> dict[str, str]:
    """The family's tensor plan by the names of transformers' modules. Modules that hold several of our matrices have
    the kinds column_pair, column_qkv, and column_grouped where queries, keys and values are in order of key
    heads."""
    modules = {name.removesuffix(".weight"): theirs.removesuffix(".weight") for name, theirs in family.hf.names.items()}
    held: dict[str, list[str]] = {}
    for module, kind in family.tensor_plan.items():
        theirs = modules[module] if module in modules else modules[f"layers.{{i}}.{module}"]
        held.setdefault(theirs.partition(".{i}.")[2] or theirs, []).append(kind)
    several = {2: "column_pair", 3: "column_grouped" if family.hf.grouped else "column_qkv"}
    found = {theirs: several.get(len(kinds), kinds[0]) for theirs, kinds in held.items()}
    others = {
        theirs.removesuffix(".weight"): more.removesuffix(".weight") for theirs, more in family.hf.other_names.items()
    }
    return found | {more: found[theirs] for theirs, more in others.items()}


# A class of transformers -> how its modules, of a block or outside of them, are cut by phalanx.transform.
TRANSFORM_PLANS: dict[str, dict[str, str]] = {
    hf_class: _plan_transform(each)
    for each in FAMILIES.values()
    if each.hf.cut_by_transform
    for hf_class in each.hf.classes
}


def family_of(spec: ModelSpec) -> ModelFamily:
    """The model family of a shape."""
    return FAMILIES[spec.architecture]


def block_options(spec: ModelSpec) -> BlockOptions:
    """The block options of a model: those of its family and of its shape."""
    return family_of(spec).options_of(spec)


def describe_unknown_preset(name: str) -> str:
    """The error message for an unknown preset."""
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else "see `phalanx config presets`"
    return f"model.preset {name!r} is not known; {hint}"


def default_intermediate(hidden: int) -> int:
    """Feed-forward width when none is given: 8/3 of the hidden width (Shazeer 2020), up to a multiple of 64."""
    return math.ceil(8 * hidden / 3 / 64) * 64


def parameter_shapes(spec: ModelSpec) -> Shapes:
    """Shape of every parameter, in order of use in the forward pass; a tied head has no separate entry."""
    family = FAMILIES.get(spec.architecture, DEFAULT_FAMILY)
    return family.shapes(spec, family.options_of(spec))


def parameter_count(spec: ModelSpec, embedding: bool = True, shapes: Shapes | None = None) -> int:
    """Number of parameters; without `embedding`, those that multiply: no embedding table, but the head even if tied.

    `shapes`: of a custom model.
    """
    return count_elements(spec, shapes or parameter_shapes(spec), embedding)


def find_adapter_targets(spec: ModelSpec) -> tuple[str, ...]:
    """Those of ADAPTED_MODULES that are a matrix of every block."""
    shapes = parameter_shapes(spec)
    return tuple(
        name
        for name, module in ADAPTED_MODULES.items()
        if all(f"layers.{layer}.{module}.weight" in shapes for layer in range(spec.layers))
    )


def adapter_count(spec: ModelSpec) -> int:
    """Number of parameters of the adapters; 0 without them."""
    return count_adapter_elements(spec, parameter_shapes(spec))


def flops_per_token(spec: ModelSpec, seq_len: int, shapes: Shapes | None = None) -> tuple[int, int]:
    """Floating-point operations of forward and backward per token of a sequence of `seq_len`: (full, causal).

    `full` is 6 per multiplying parameter (4 per frozen one, which gets no gradient) plus 12 * width * seq_len for each
    layer's attention, as the PaLM paper (appendix B) counts; `causal` takes half of the attention term, which is what a
    causal kernel computes, and in a layer with a window only the positions within it. `shapes`: of a custom model,
    whose parameters are all counted as multiplying, with the built-in attention.
    """
    return family_of(spec).flops(spec, seq_len, shapes or parameter_shapes(spec))


def find_tensor_problems(
    spec: ModelSpec, tensor: int, seq_len: int, sequence: bool, custom_code: bool = False, fp8: bool = False
) -> list[str]:
    """Problems of tensor parallelism over `tensor` ranks, a sentence each; `sequence`: with sequence parallelism.

    `custom_code`: the model is custom (model.code). `fp8`: products are scaled in tiles of 128 x 128.
    """
    if tensor == 1:
        return []
    set_ = f"parallel.tensor={tensor}"
    if custom_code:
        return [f"{set_} cuts the built-in families, and model.code is a custom model; set parallel.tensor=1"]
    if not family_of(spec).tensor_plan:
        return [f"{set_} cuts decoders, and model.architecture is {spec.architecture}; set parallel.tensor=1"]
    if spec.lora is not None:
        return [f"{set_} does not cut adapters, which model.lora asks for; set parallel.tensor=1, or train all weights"]
    found = []
    if spec.heads % tensor:
        found.append(
            f"{set_} gives each rank as many attention heads, and there are {spec.heads} (model.heads); "
            f"set parallel.tensor to a divisor of {spec.heads}"
        )
    if spec.kv_heads % tensor and tensor % spec.kv_heads:
        found.append(
            f"{set_} and the {spec.kv_heads} key and value heads of model.kv_heads do not divide one another; set "
            f"parallel.tensor to a divisor or a multiple of {spec.kv_heads}"
        )
    inner = {"model.intermediate": spec.intermediate}
    if spec.moe is not None:  # experts are not cut
        shared = {"model.moe.shared x model.moe.intermediate": spec.moe.shared * spec.moe.intermediate}
        inner = (inner if spec.moe.dense_layers else {}) | shared
    found += [
        f"{set_} does not divide {name}={width}; set parallel.tensor to a divisor of it"
        for name, width in inner.items()
        if width % tensor
    ]
    widths = {
        "model.heads x model.head_dim": spec.heads * spec.head_dim // tensor,
        "model.kv_heads x model.head_dim": spec.kv_heads * spec.head_dim // min(tensor, spec.kv_heads),
        "model.intermediate": spec.intermediate // tensor,
    }
    if fp8 and not found and (cut := [f"{name} {width}" for name, width in widths.items() if width % 128]):
        found.append(
            f"train.fp8 block scales tiles of 128 x 128, and {set_} gives a rank {', '.join(cut)} channels, which cuts "
            "tiles; choose sizes that are multiples of 128 on each rank, or set parallel.tensor=1 or train.fp8=none"
        )
    if 1 < spec.vocab_size < tensor:  # 1: not known yet
        found.append(f"{set_} leaves ranks without a row of the vocabulary of {spec.vocab_size}; set fewer ranks")
    if sequence and seq_len % tensor:
        found.append(
            f"parallel.sequence_parallel cuts sequences into {tensor} parts (parallel.tensor), and "
            f"data.seq_len={seq_len} does not divide; set data.seq_len to a multiple of {tensor}, or "
            "parallel.sequence_parallel=false"
        )
    return found


# ---------------------------------------------------------------------------------------------------- impossible shapes


def find_shape_problems(spec: ModelSpec) -> list[str]:
    """All problems of a model shape, each a sentence naming configuration keys; empty if it is valid."""
    found = []
    if spec.architecture not in FAMILIES:
        supported = ", ".join(FAMILIES)
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
    if spec.sliding_window is not None and spec.sliding_window < 1:
        found.append(f"model.sliding_window is {spec.sliding_window}, but a position sees at least itself; raise it.")
    if spec.layers > MAX_LAYERS:
        found.append(f"model.layers is {spec.layers}, more than any model has ({MAX_LAYERS}); lower it.")
    if not not_positive:
        found += _head_problems(spec) + _size_problems(spec)
    family = FAMILIES.get(spec.architecture, DEFAULT_FAMILY)
    if spec.moe is not None and not family.has_experts:
        able = ", ".join(each.name for each in FAMILIES.values() if each.has_experts)
        found.append(
            f"model.moe is set, but model.architecture {spec.architecture} has no experts; use one of {able}, or "
            "remove model.moe."
        )
    if spec.latent is not None and family is not DEEPSEEK_V3:
        found.append("model.latent is set, which only deepseek_v3 has; set model.architecture to it, or remove it.")
    found += family.find_problems(spec)
    for name, p in (("dropout", spec.dropout), ("attention_dropout", spec.attention_dropout)):
        if not 0.0 <= p < 1.0:
            found.append(f"model.{name} is {p}, but it is a probability below 1; set it to 0 or more, below 1.")
    if not (spec.init_std >= 0 and math.isfinite(spec.init_std)):
        found.append(f"model.init_std is {spec.init_std}, but a standard deviation is 0 or more; set it to 0.02, say.")
    return found + (_rope_problems(spec, spec.rope_scaling) if spec.rope_scaling else [])


def _head_problems(spec: ModelSpec) -> list[str]:
    found = []
    if spec.heads % spec.kv_heads:
        found.append(
            f"model.heads is {spec.heads} and model.kv_heads is {spec.kv_heads}, so query heads cannot share key heads "
            "evenly; set model.kv_heads to a divisor of model.heads."
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
    if scaling.rule == LONGROPE:
        pairs = int(spec.head_dim * block_options(spec).rotary_share + 1e-6) // 2
        if pairs == len(scaling.short_factors) == len(scaling.long_factors) and scaling.original_max_seq_len > 1:
            return []
        return [
            f"model.rope_scaling.rule longrope has {len(scaling.short_factors)} short and {len(scaling.long_factors)} "
            f"long factors for {pairs} rotated pairs of channels; start from a folder that has as many (model.from_hf)."
        ]
    if scaling.rule not in ROPE_RULES:
        return [f"model.rope_scaling.rule is {scaling.rule!r}, which is unknown; use one of: {', '.join(ROPE_RULES)}."]
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
        found.append("model.rope_theta is 1, which model.rope_scaling.rule yarn does not support; raise it.")
    if scaling.rule == "dynamic" and spec.head_dim == 2:
        found.append("model.head_dim is 2, which model.rope_scaling.rule dynamic does not support; set a larger one.")
    return found
