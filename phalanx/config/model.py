"""The knobs of the built-in models: their shapes, what they start from, and adapters beside them."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from phalanx.config.fields import Auto, Count, Fraction, Positive, Section, Text, as_list, knob, reject_bool
from phalanx.layout.model_shape import MAX_LAYERS
from phalanx.models.families.catalog import FAMILIES

LoraTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]


class RopeScalingSection(Section):
    """Rotary frequencies stretched beyond the context they were trained for, as transformers does it."""

    rule: Literal["linear", "dynamic", "yarn", "llama3"] = knob(
        "llama3", "which frequencies are stretched; dynamic: none up to model.max_seq_len", trajectory=True
    )
    factor: Positive = knob(8.0, "how many times longer the context becomes", trajectory=True)
    low_freq_factor: Positive = knob(
        1.0, "llama3: wavelengths above original_max_seq_len / this are stretched", trajectory=True
    )
    high_freq_factor: Positive = knob(
        4.0, "llama3: wavelengths below original_max_seq_len / this are kept", trajectory=True
    )
    original_max_seq_len: Count = knob(
        8192, "llama3 and yarn: the context length before stretching, tokens", trajectory=True
    )
    beta_fast: Positive = knob(
        32.0, "yarn: waves that turn more often than this in original_max_seq_len are kept", trajectory=True
    )
    beta_slow: Positive = knob(1.0, "yarn: waves that turn less often than this are stretched", trajectory=True)
    attention_factor: Positive | None = knob(
        None, "yarn: scale of cosines and sines; default: 0.1 ln(factor) + 1", trajectory=True
    )


class LoraSection(Section):
    """Low-rank adapters: each chosen matrix W becomes W + alpha / rank * B A, and only A and B are trained."""

    adapter: Text | None = knob(None, "a PEFT adapter folder to start from; default: A drawn, B zero", trajectory=True)
    rank: Count | Auto = knob("auto", "rows of A, columns of B; auto: the adapter's, else 16", trajectory=True)
    alpha: Positive | Auto = knob(
        "auto", "the product is scaled by alpha / rank; auto: the adapter's, else twice the rank", trajectory=True
    )
    dropout: Fraction = knob(0.0, "probability of zeroing an input element of A", trajectory=True)
    targets: Annotated[list[LoraTarget], Field(min_length=1), BeforeValidator(as_list)] | Auto = knob(
        "auto",
        "which matrices of each block get an adapter: q, k, v, o, gate, up, down; auto: the adapter's, else all that "
        "the model has",
        trajectory=True,
    )


class ModelSection(Section):
    """What is trained. Shapes come from `preset` or `from_hf`; a shape set here replaces the preset's."""

    preset: Text | None = knob(
        None, "a published shape, such as llama-3.2-1b; see `phalanx config presets`", trajectory=True
    )
    from_hf: Text | None = knob(None, "a Hugging Face folder: its shapes and its weights", trajectory=True)
    architecture: Literal[tuple(FAMILIES)] | None = knob(  # type: ignore[valid-type]
        None,
        "qwen2 adds biases to q, k and v, qwen3 norms to q and k; bert sees both sides; default: the preset's, else "
        "llama",
        trajectory=True,
    )
    code: Text | None = knob(
        None, "a Python file whose class Model is trained instead of the built-in", trajectory=True
    )
    vocab_size: Count | Auto = knob(
        "auto", "rows of the embedding; auto: the preset's, else the tokenizer's", trajectory=True
    )
    hidden: Count | None = knob(None, "width of the residual stream", trajectory=True)
    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS), BeforeValidator(reject_bool)] | None = knob(
        None, "number of blocks", trajectory=True
    )
    heads: Count | None = knob(None, "attention heads", trajectory=True)
    kv_heads: Count | None = knob(None, "key and value heads; default: as many as heads", trajectory=True)
    head_dim: Count | None = knob(None, "width of one head; default: hidden / heads", trajectory=True)
    intermediate: Count | None = knob(
        None,
        "width of the feed-forward layer; default: 8/3 hidden, up to a multiple of 64; bert: 4 hidden",
        trajectory=True,
    )
    sliding_window: Count | None = knob(
        None, "tokens back that a position attends to, itself included (not for llama); default: all", trajectory=True
    )
    max_seq_len: Count | None = knob(
        None, "longest sequence the model is declared for, tokens; default: data.seq_len", trajectory=True
    )
    rope_theta: Positive | None = knob(None, "base of the rotary frequencies; default: 10000", trajectory=True)
    rope_scaling: RopeScalingSection | None = knob(
        None, "stretched rotary frequencies (Llama 3.1 and later)", trajectory=True
    )
    norm_eps: Positive | None = knob(None, "epsilon inside norms; default: 1e-5; bert: 1e-12", trajectory=True)
    tie_embeddings: bool | None = knob(
        None, "the head shares the embedding's weights; default: false; bert: always", trajectory=True
    )
    init_std: Positive | None = knob(None, "standard deviation of initial weights; default: 0.02", trajectory=True)
    dropout: Fraction = knob(0.0, "probability of zeroing a residual branch's output element", trajectory=True)
    attention_dropout: Fraction = knob(
        0.0, "bert: probability that a position does not see another; holds all of attention's scores", trajectory=True
    )
    lora: LoraSection | None = knob(None, "train small adapters beside frozen weights", trajectory=True)
