"""The model shape of a Megatron checkpoint, from its arguments, the user's options and its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec, RopeScaling
from phalanx.models.families.catalog import find_shape_problems

GROUPS, BLOCKS = "groups", "blocks"
# Arguments of Megatron's that change the mathematics, and the values under which it is a LLaMA's.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "multi_latent_attention": (None, False),
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (None, 0),
    "is_hybrid_model": (None, False),
    "heterogeneous_layers_config_path": (None,),
    "position_embedding_type": (
        None,
        "learned_absolute",
        "rope",
    ),  # the first of the two may be a mere default of old versions
    "rope_type": (None, "rope"),
    "no_rope_freq": (None,),
    "rotary_percent": (None, 1),
    "rotary_interleaved": (None, False),
    "normalization": (None, "RMSNorm"),
    "RMSNorm": (None, True),
    "apply_layernorm_1p": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "swiglu": (None, True),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (None, 0),
    "window_size": (None,),
    "softmax_type": (None, "vanilla"),
    "attention_output_gate": (None, False),
    "qk_layernorm": (None, False),
    "qk_l2_norm": (None, False),
    "add_qkv_bias": (None, False),
    "add_bias_linear": (None, False),
    "num_attention_heads_kv": (None,),  # of a fork with another order of rotary channels
}
_MEGATRON_LLAMA = ("causal_lm", "overlapped_distributed_optimizer")  # arguments that only this fork has
_ROTARY_BASE = 10000.0  # fixed where there is no argument for it


@dataclass(frozen=True, kw_only=True)
class MegatronOverrides:
    """The user's options for a checkpoint; None: from its arguments. Each corresponds to the flag of its name.

    `seq_len` in tokens; `rope_scaling_factor` is that of Llama 3.1's rule; `vocab_size` counts no padding; `qkv` is
    `groups` (each group of heads with its key and value, as Megatron-LM has it) or `blocks` (queries, keys and values
    of a rank one after the other, as Megatron-LLaMA has it). `tokenizer_size` is that of the tokenizer beside the
    checkpoint, whose ids must all have a row.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    seq_len: int | None = None
    vocab_size: int | None = None
    norm_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling_factor: float | None = None
    qkv: str | None = None
    tokenizer_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class MegatronTensorFacts:
    """What a checkpoint's tensors show of all ranks together; `intermediate` and `qkv_rows` in rows, `rows` of the
    embedding with its padding; `core`: named as Megatron-core does; `lm_head`: a head that is not divided."""

    hidden: int
    layers: int
    rows: int
    intermediate: int
    qkv_rows: int
    tied: bool
    core: bool
    lm_head: bool


def _first(*values: Any) -> Any:
    """The first that is not None, if any."""
    return next((value for value in values if value is not None), None)


def build_spec(
    args: Mapping[str, Any] | None, overrides: MegatronOverrides, facts: MegatronTensorFacts, where: str
) -> tuple[ModelSpec, str]:
    """The model's shape, and how its queries, keys and values lie. `where` names the file of `args` in errors.

    Raises ConfigError for what no LLaMA computes, for what neither `args` nor `overrides` says, and for a
    contradiction.
    """
    given = dict(args or {})
    _check_accepted(given, where)
    lacking: list[str] = []

    def of(flag: str, *names: str) -> Any:
        """The user's option, else the first Megatron argument that is set, else an error."""
        value = _first(getattr(overrides, flag), *(given.get(name) for name in names))
        if value is None:
            lacking.append(f"--{flag.replace('_', '-')}")
        return value

    heads = of("heads", "num_attention_heads")
    seq_len = of("seq_len", "max_position_embeddings", "seq_length")
    norm_eps = of("norm_eps", "norm_epsilon", "layernorm_epsilon")
    if args is None:
        rope_theta = of("rope_theta")
    else:
        rope_theta = _first(overrides.rope_theta, given.get("rotary_base"), _ROTARY_BASE)
    # A NullTokenizer's vocab_size leaves out the end of a document.
    stated = () if given.get("tokenizer_type") == "NullTokenizer" else ("vocab_size", "orig_vocab_size")
    sizes = [
        size for size in (overrides.tokenizer_size, *(given.get(name) for name in stated)) if isinstance(size, int)
    ]
    vocab_size = max(sizes) if sizes and overrides.vocab_size is None else of("vocab_size")
    qkv = overrides.qkv or _layout(given, facts)
    if qkv is None:
        lacking.append("--qkv")
    if lacking:
        raise ConfigError(
            f"{where} does not give all model settings ({facts.rows} rows of the vocabulary, padding included, "
            f"{facts.layers} layers of width {facts.hidden}); give {', '.join(lacking)}."
        )
    assert qkv is not None
    groups = given.get("num_query_groups") if given.get("group_query_attention") else None  # else it is 1 and idle
    kv_heads = _first(overrides.kv_heads, groups, heads)
    _check_numbers(where, True, heads=heads, kv_heads=kv_heads, vocab_size=vocab_size, seq_len=seq_len)
    _check_numbers(where, False, norm_eps=norm_eps, rope_theta=rope_theta)
    head_dim = _first(overrides.head_dim, given.get("kv_channels"), facts.hidden // heads)
    _check_numbers(where, True, head_dim=head_dim)
    _check(given, facts, where, vocab_size)
    if (heads + 2 * kv_heads) * head_dim != facts.qkv_rows:
        raise ConfigError(
            f"{where} describes a model with {heads} heads of width {head_dim} and {kv_heads} of keys, which make "
            f"{(heads + 2 * kv_heads) * head_dim} rows of queries, keys and values, but {facts.qkv_rows} are stored; "
            "give --heads, --kv-heads and --head-dim as used in training."
        )
    spec = ModelSpec(
        vocab_size=vocab_size,
        hidden=facts.hidden,
        layers=facts.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=facts.intermediate,
        max_seq_len=seq_len,
        rope_theta=float(rope_theta),
        rope_scaling=_scaling(given, overrides, where),
        norm_eps=float(norm_eps),
        tie_embeddings=facts.tied,
    )
    if found := find_shape_problems(spec):
        raise ConfigError(f"{where} describes an impossible model: {' '.join(found)}")
    return spec, qkv


def _check_accepted(given: Mapping[str, Any], where: str) -> None:
    for name, accepted in ACCEPTED.items():
        if given.get(name) not in accepted:
            raise ConfigError(
                f"{where} was trained with {name} {given[name]!r}, which LLaMA models do not have and Phalanx cannot "
                f"import; use a checkpoint trained with {name} {accepted[-1]!r}."
            )
    kind, rotary = given.get("position_embedding_type"), given.get("use_rotary_position_embeddings")
    if kind != "rope" and not rotary and (kind is not None or rotary is not None):
        raise ConfigError(
            f"{where} was trained without rotary positions, which LLaMA models need; use a checkpoint trained with "
            "position_embedding_type 'rope'."
        )


def _check_numbers(where: str, whole: bool, **values: Any) -> None:
    for name, value in values.items():
        number = isinstance(value, int) or (isinstance(value, float) and not whole)
        if isinstance(value, bool) or not number or not 0 < value < 2**31:
            raise ConfigError(
                f"{where} is of a model with {name} {value!r}, which is not possible; give --{name.replace('_', '-')}."
            )


def _check(given: Mapping[str, Any], facts: MegatronTensorFacts, where: str, vocab_size: int) -> None:
    """Raises ConfigError where the arguments contradict the tensors."""
    sizes = {"num_layers": facts.layers, "hidden_size": facts.hidden, "ffn_hidden_size": facts.intermediate}
    for name, stored in (sizes | {"padded_vocab_size": facts.rows}).items():
        if given.get(name) not in (None, stored):
            raise ConfigError(
                f"{where} says {name} {given[name]!r}, but its tensors imply {stored}; use all files of one checkpoint."
            )
    if vocab_size > facts.rows:
        raise ConfigError(
            f"{where} has a vocabulary of {vocab_size} (--vocab-size), but only {facts.rows} rows are stored; give "
            "the vocabulary size of its tokenizer."
        )


def _layout(given: Mapping[str, Any], facts: MegatronTensorFacts) -> str | None:
    """How queries, keys and values lie; None: neither names nor arguments tell."""
    if facts.core:
        return GROUPS
    if facts.lm_head or any(name in given for name in _MEGATRON_LLAMA):
        return BLOCKS
    return GROUPS if "normalization" in given else None


def _scaling(given: Mapping[str, Any], overrides: MegatronOverrides, where: str) -> RopeScaling | None:
    linear = given.get("rotary_seq_len_interpolation_factor")
    factor = overrides.rope_scaling_factor
    if factor is None and given.get("use_rope_scaling"):
        factor = given.get("rope_scaling_factor") or 8.0  # Megatron-core's own default
    for name, value in (("rope_scaling_factor", factor), ("rotary_seq_len_interpolation_factor", linear)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 1):
            raise ConfigError(
                f"{where} says {name} {value!r}, which is not a factor of 1 or more; download the file again."
            )
    if factor is not None and linear not in (None, 1):
        raise ConfigError(
            f"{where} scales rotary positions by two rules (use_rope_scaling and "
            "rotary_seq_len_interpolation_factor), which a Hugging Face config cannot express; use a checkpoint "
            "trained with one of them."
        )
    if factor is not None:  # the other numbers are fixed in Megatron-core, and those of Llama 3.1
        return RopeScaling(factor=float(factor), low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    return RopeScaling(rule="linear", factor=float(linear)) if linear is not None and linear != 1 else None
