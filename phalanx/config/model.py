"""Recipe keys of the model, the task and the data."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue

from phalanx.config.fields import (
    Auto,
    Count,
    CountOrZero,
    Fraction,
    Positive,
    Section,
    Text,
    as_list,
    as_sources,
    knob,
    reject_bool,
)
from phalanx.layout.model_shape import MAX_LAYERS
from phalanx.models.families.catalog import FAMILIES

LoraTarget = Literal[
    "q", "k", "v", "o", "gate", "up", "down", "q_down", "q_up", "kv_down", "kv_up", "experts.gate_up", "experts.down"
]  # fmt: skip


class RopeScalingSection(Section):
    """RoPE scaling: rotary frequencies for a longer context, as in transformers."""

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
        "which matrices of each block get an adapter: q, k, v, o, gate, up, down, of latent attention q_down, q_up, "
        "kv_down, kv_up, and of each expert experts.gate_up, experts.down; auto: the adapter's, else all that the "
        "model has beside experts",
        trajectory=True,
    )


class MoESection(Section):
    """Mixture of experts: how many there are, and how an even load is kept."""

    experts: Count | None = knob(None, "experts of a layer; default: the preset's", trajectory=True)
    experts_per_token: Count | None = knob(
        None, "experts that a token goes through; default: the preset's", trajectory=True
    )
    intermediate: Count | None = knob(
        None, "width of an expert; default: the preset's, else model.intermediate", trajectory=True
    )
    renormalize: bool | None = knob(
        None, "divide the weights of the chosen experts by their sum; default: the preset's, else true", trajectory=True
    )
    dense_layers: list[CountOrZero] | None = knob(
        None, "numbers of layers, from 0, without experts; default: the preset's, else none", trajectory=True
    )
    scale: Positive | None = knob(
        None, "factor of the experts' weights (deepseek_v3); default: the preset's, else 1", trajectory=True
    )
    shared: CountOrZero | None = knob(
        None, "experts that all tokens go through (deepseek_v3); default: the preset's, else 0", trajectory=True
    )
    groups: Count | None = knob(None, "groups of experts (deepseek_v3); default: the preset's, else 1", trajectory=True)
    groups_per_token: Count | None = knob(
        None, "groups that a token's experts are of (deepseek_v3); default: the preset's, else 1", trajectory=True
    )
    balance: Literal["sequence", "group", "step_before", "step", "bias", "none"] | Auto = knob(
        "auto",
        "load-balancing loss, by the load of experts in sequence: each sequence; group: model.moe.group sequences; "
        "step_before: the step before; step: the whole step (group and step take one more forward pass); bias: "
        "corrections of scores move with the load of each step (deepseek_v3), beside sequence; auto: sequence, with "
        "from_hf as its config.json says",
        trajectory=True,
    )
    group: Count | None = knob(
        None,
        "sequences of a group that follow one another in the order of training, with balance group",
        trajectory=True,
    )
    balance_weight: Annotated[float, Field(ge=0, le=1e6), BeforeValidator(reject_bool)] | None = knob(
        None,
        "factor of the load-balancing loss; default: that of the preset or folder, else 0.01, or 0 with balance bias",
        trajectory=True,
    )
    bias_rate: Positive | None = knob(
        None, "what a correction moves by in a step, with balance bias; default: 0.001", trajectory=True
    )
    over: Literal["layer", "model"] | Auto = knob(
        "auto",
        "layer: balance each layer by its own load; model: by the mean load of all layers, as transformers does; auto: "
        "layer, with from_hf as its config.json says",
        trajectory=True,
    )
    z_loss: Annotated[float, Field(ge=0, le=1e6), BeforeValidator(reject_bool)] = knob(
        0.0, "factor of the squared logarithm of the sum of exponentials of router logits", trajectory=True
    )


class ModelSourceSection(Section):
    """The model, by name, folder or file."""

    preset: Text | None = knob(
        None, "a published shape, such as llama-3.2-1b; see `phalanx config presets`", trajectory=True
    )
    from_hf: Text | None = knob(
        None, "a Hugging Face folder, or org/name@revision on the hub: its shapes and its weights", trajectory=True
    )
    architecture: Literal[tuple(FAMILIES)] | None = knob(  # type: ignore[valid-type]
        None,
        "qwen2 adds biases to q, k and v, qwen3 norms to q and k; mixtral, qwen3_moe, olmoe, gpt_oss and deepseek_v3 "
        "have experts; bert is "
        "bidirectional; default: the preset's, else llama",
        trajectory=True,
    )
    code: Text | None = knob(
        None, "a Python file whose class Model is trained instead of the built-in", trajectory=True
    )


class ModelSection(ModelSourceSection):
    """The model's shapes. They come from `preset` or `from_hf`; a shape set here replaces the preset's."""

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
        0.0,
        "probability that a position does not see another; no kernel has it, so scores are held",
        trajectory=True,
    )
    latent: Annotated[list[CountOrZero], Field(min_length=4, max_length=4)] | None = knob(
        None,
        "widths of latent attention (deepseek_v3): of narrow queries (0: none), of narrow keys, of a head's channels "
        "without positions and of its values; default: the preset's",
        trajectory=True,
    )
    moe: MoESection = MoESection()
    lora: LoraSection | None = knob(None, "train small adapters beside frozen weights", trajectory=True)


class TaskSection(Section):
    """The task: what a sample and its loss are."""

    kind: Literal["auto", "language", "masked", "tag", "classify", "custom"] = knob(
        "auto",
        "language: the next token; of a BERT masked: masked tokens, tag: a label for each word, classify: one for each "
        "text; custom: what task.code says; auto: custom where that is set, masked for a BERT, else language",
        trajectory=True,
    )
    mask_share: Fraction = knob(0.15, "masked: share of a sequence's tokens that are predicted", trajectory=True)
    whole_word: bool = knob(False, "masked: all pieces of a word are predicted, or none", trajectory=True)
    next_sentence: bool = knob(
        False, "masked: also whether the second of two segments follows the first", trajectory=True
    )
    labels: Annotated[list[Text], Field(min_length=1)] | Auto = knob(
        "auto",
        "tag and classify: names of the labels, in their order in the model; auto: those of from_hf where they are "
        "enough, else all that the data has",
        trajectory=True,
    )
    code: Text | None = knob(
        None, "a Python file whose class Task defines a custom network, data and loss", trajectory=True
    )
    options: dict[Text, JsonValue] = knob({}, "arguments of that class", trajectory=True)


class SourceSection(Section):
    """One source of a mixture."""

    path: Annotated[list[Text], Field(min_length=1), BeforeValidator(as_list)] = knob(
        ..., "files, folders, globs, URLs or hub: ids, as in data.source", trajectory=True
    )
    weight: Positive = knob(1.0, "its share of the sequences, relative to the other sources' weights", trajectory=True)


class DocumentSection(Section):
    """Data sources, the tokenizer, and the keys of records."""

    source: Annotated[list[Text | SourceSection], Field(min_length=1), BeforeValidator(as_sources)] = knob(
        ["stdlib"],
        "files, folders, globs, URLs or hub: ids; stdlib: Python's standard library; with path: and weight: a mixture",
        trajectory=True,
    )
    validation: dict[Text, Annotated[list[Text], Field(min_length=1), BeforeValidator(as_list)]] = knob(
        {}, "further sets to evaluate on, by name; all of their documents are held out", trajectory=True
    )
    format: Literal["text", "chat", "prompt", "masked"] = knob(
        "text",
        "text: running text; chat: conversations; prompt: prompts and completions; masked: HDF5 shards of sequences "
        "that are masked already",
        trajectory=True,
    )
    tokenizer: Text = knob(
        "auto", "a tokenizer folder; train: byte-level BPE on the source; auto: from_hf's, else train", trajectory=True
    )
    tokenizer_vocab: Annotated[int, Field(ge=257, le=2**20), BeforeValidator(reject_bool)] = knob(
        4096, "vocabulary of a trained tokenizer, tokens", trajectory=True
    )
    text_key: Text = knob("text", "the key of a JSONL line or Parquet row that holds the text", trajectory=True)
    messages_key: Text = knob("messages", "the key that holds the messages of a conversation", trajectory=True)
    prompt_key: Text = knob("prompt", "the key that holds a prompt", trajectory=True)
    completion_key: Text = knob("completion", "the key that holds its completion", trajectory=True)
    tokens_key: Text = knob("tokens", "tag: the key that holds the words of a sentence", trajectory=True)
    tags_key: Text = knob("ner_tags", "tag: the key that holds their tags", trajectory=True)
    label_key: Text = knob("label", "classify: the key or column that holds the label of a text", trajectory=True)
    pair_key: Text | None = knob(
        None, "classify: the key or column that holds a second text; default: none", trajectory=True
    )


class DataSection(DocumentSection):
    """The training data."""

    chat_template: Text | None = knob(
        None, "a Jinja file, or chatml, to use instead of the tokenizer's", trajectory=True
    )
    loss_on: Literal["assistant", "all"] = knob(
        "assistant", "chat and prompt: target tokens of the loss: the answers, or all", trajectory=True
    )
    too_long: Literal["truncate", "drop"] = knob(
        "truncate", "chat, prompt, tag, classify: what happens to a document longer than seq_len", trajectory=True
    )
    isolate_documents: bool = knob(
        False, "text: no attention across documents (always so with chat and prompt)", trajectory=True
    )
    mask_document_end: bool = knob(
        False,
        "text: the first token of a document is not learnt from the end of the one before, as isolate_documents and "
        "packed rows always have it",
        trajectory=True,
    )
    held_out: Fraction = knob(0.02, "share of documents kept for evaluation, chosen by their hash", trajectory=True)
    seq_len: Count = knob(512, "tokens of one sequence", trajectory=True)
    cache: Text = knob("~/.cache/phalanx", "folder or URL for token files; safe to delete")
    workers: Count | Auto = knob("auto", "processes that tokenise; auto: one per core")
    read_ahead: CountOrZero = knob(0, "threads of each rank that read samples of the next step, if reading is slow")
