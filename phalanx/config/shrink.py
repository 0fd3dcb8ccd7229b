"""Shrink a recipe (`--shrink`): a tiny copy that runs through the same code, in seconds on a few CPU ranks."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from phalanx.config.load import update_config
from phalanx.config.model import MoESection, RopeScalingSection, SourceSection
from phalanx.config.model_spec import MOE_SHAPE_FIELDS, SHAPE_FIELDS, build_model_spec
from phalanx.config.schema import Config, get_knob, iter_knobs
from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import EncoderSpec, LatentSpec, ModelSpec, MoESpec

STEPS, GLOBAL_BATCH, EVERY = 10, 8, 5
SEQ_LEN, CHAT_SEQ_LEN = 64, 256  # a conversation needs room for its roles
LAYERS, HEAD_DIM, MOST_GROUPS = 2, 16, 4
VOCAB, EXPERTS = 512, 4
HELD_OUT = 0.1  # a small share of little data would be empty
SAMPLES = {"text": "stdlib", "chat": "stdlib-chat"}  # replace sources that are not here
STANDIN_BERT = ModelSpec(  # for a BERT folder that is not here
    architecture="bert", vocab_size=VOCAB, hidden=64, layers=LAYERS, heads=4, kv_heads=4, head_dim=16, intermediate=256,
    max_seq_len=512, norm_eps=1e-12, tie_embeddings=True, encoder=EncoderSpec(),
)  # fmt: skip
STANDIN = ModelSpec(  # for a Hugging Face folder that is not here
    vocab_size=VOCAB, hidden=64, layers=LAYERS, heads=4, kv_heads=2, head_dim=16, intermediate=176, max_seq_len=4096
)  # fmt: skip
STANDIN_EXPERTS = replace(  # where the recipe speaks of experts
    STANDIN,
    architecture="mixtral",
    moe=MoESpec(experts=EXPERTS, experts_per_token=EXPERTS // 2, intermediate=STANDIN.intermediate),
)


def choose_stand_in(config: Config) -> ModelSpec:
    """The tiny model in the place of a Hugging Face folder that is not here: a Llama, a Mixtral if the recipe has keys
    of experts, or a BERT if its task needs one."""
    if config.task.kind not in ("auto", "language"):
        return STANDIN_BERT
    has_experts = config.model.moe != MoESection() or config.parallel.expert > 1
    return STANDIN_EXPERTS if has_experts else STANDIN


def shrink_spec(spec: ModelSpec, seq_len: int) -> ModelSpec:
    """A tiny model of the same family: keeps all options, and ratios of heads, key heads and widths if possible."""
    groups = spec.heads // spec.kv_heads
    kv_heads = min(spec.kv_heads, 2 if groups > 1 else 4)
    heads = kv_heads * min(groups, MOST_GROUPS)
    head_dim = min(spec.head_dim, HEAD_DIM)
    ratio = spec.hidden / (spec.heads * spec.head_dim)  # not 1 in Qwen3 and Gemma 3
    each = max(2, 2 * round(head_dim * ratio / 2))
    hidden = heads * (each if each != head_dim or ratio == 1 else head_dim + (2 if ratio > 1 or head_dim == 2 else -2))
    layers = min(spec.layers, LAYERS)
    intermediate = max(8, 8 * round(hidden * spec.intermediate / spec.hidden / 8))
    return replace(
        spec,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        sliding_window=None if spec.sliding_window is None else max(1, min(spec.sliding_window, seq_len // 4)),
        full_attention_layers=tuple(layer for layer in spec.full_attention_layers if layer < layers),
        block=replace(
            spec.block,
            query_scalar=None,  # which goes by the width of heads
            embedding_width=hidden // 2 if spec.embedding_width != spec.hidden else None,
        ),
        # LongRoPE's numbers go by it, too.
        rope_scaling=None if spec.rope_scaling and spec.rope_scaling.short_factors else spec.rope_scaling,
        moe=None if spec.moe is None else _shrink_experts(spec.moe, spec.intermediate, intermediate, layers),
        latent=None
        if spec.latent is None
        else LatentSpec(
            query_rank=min(spec.latent.query_rank, hidden),
            key_rank=max(2, hidden // 2),
            plain_dim=head_dim,
            value_dim=head_dim,
        ),
    )


def _shrink_experts(moe: MoESpec, intermediate: int, tiny: int, layers: int) -> MoESpec:
    dense = tuple(layer for layer in moe.dense_layers if layer < layers)
    return replace(
        moe,
        experts=min(moe.experts, EXPERTS),
        experts_per_token=min(moe.experts_per_token, EXPERTS // 2),
        groups=min(moe.groups, EXPERTS // 2),
        groups_per_token=min(moe.groups_per_token, EXPERTS // 2),
        intermediate=tiny
        if moe.intermediate == intermediate
        else max(8, 8 * (tiny * moe.intermediate // intermediate // 8)),
        dense_layers=dense if len(dense) < layers else dense[:-1],
    )


def shrink_config(config: Config, here: Callable[[str], bool], tiny_hf: tuple[str, bool] | None = None) -> Config:
    """Shrink `config`. `here(source)` tells whether a data source or folder is on this machine. A missing source is
    replaced by a sample of Python's standard library, a missing tokenizer by a trained one. `tiny_hf` replaces
    `model.from_hf`: a folder with a tiny model of its family, and whether the original has a tokenizer. Raises
    ConfigError if the result is invalid.
    """
    if config.task.code is not None:
        raise ConfigError(
            "--shrink cannot make the network of task.code smaller; write options for a small one, such as "
            "'task.options={width: 8}'"
        )
    model, data, train = config.model, config.data, config.train
    seq_len = min(data.seq_len, SEQ_LEN if data.format == "text" else CHAT_SEQ_LEN)
    if data.format == "masked":
        seq_len = data.seq_len  # its rows are as long as they are
    holds = config.task.kind if config.task.kind in ("tag", "classify") else data.format
    steps = min(train.steps, STEPS)
    batch = min(train.global_batch, GLOBAL_BATCH)
    validation = {name: paths for name, paths in data.validation.items() if all(map(here, paths))}
    kept_back = data.held_out > 0 or (data.validation and not validation)  # evaluation needs documents
    new: dict[str, Any] = {
        "data.seq_len": seq_len,
        "data.source": [_source(source, holds, here) for source in data.source],
        "data.validation": validation,
        "data.held_out": max(data.held_out, HELD_OUT) if kept_back else 0.0,
        "data.tokenizer_vocab": min(data.tokenizer_vocab, VOCAB),
        "train.steps": steps,
        "train.epochs": None,
        "train.global_batch": batch,
        "train.rampup_batch": [1, batch - 1, 2 * batch] if train.rampup_batch and batch > 1 else None,
        "train.micro_batch": train.micro_batch if train.micro_batch == "auto" else min(train.micro_batch, batch),
        "train.eval_every": min(train.eval_every, EVERY),
        "train.eval_sequences": min(train.eval_sequences, GLOBAL_BATCH),
        "train.memory_snapshot": min(train.memory_snapshot, max(steps - 1, 0)),
        "train.profile": _profile(train.profile, steps),
        "optim.warmup_steps": min(config.optim.warmup_steps, steps // 5),
        "optim.decay_steps": config.optim.decay_steps
        if config.optim.decay_steps == "auto"
        else min(config.optim.decay_steps, max(steps, 1)),
        "checkpoint.every": min(config.checkpoint.every, EVERY),
    }
    if config.memory.activations == "offload":  # with more, so few blocks would all stay on the device
        new["memory.offload_prefetch_blocks"] = min(config.memory.offload_prefetch_blocks, LAYERS - 1)
    if new["data.source"] != [_plain(source) for source in data.source]:
        new |= {"data.text_key": "text", "data.messages_key": "messages"}
    if tiny_hf is not None:
        folder, has_tokenizer = tiny_hf
        new["model.from_hf"] = folder
        if data.tokenizer == "auto":
            new["data.tokenizer"] = model.from_hf if has_tokenizer else "train"
    if data.tokenizer not in ("auto", "train") and not here(data.tokenizer):
        new["data.tokenizer"] = "train"
    trains = new.get("data.tokenizer", data.tokenizer) in ("auto", "train")
    if trains and data.format != "text" and (data.chat_template is None or not here(data.chat_template)):
        new["data.chat_template"] = "chatml"  # a trained tokenizer has none
    if model.lora is not None and model.lora.adapter is not None:
        new["model.lora.adapter"] = None  # its matrices are those of the large model
    if tiny_hf is None:
        new |= _shapes(config, seq_len, new["data.tokenizer_vocab"] if trains else None)
    return update_config(config, new)


def list_changes(before: Config, after: Config) -> list[str]:
    """Differences of two configurations, a line for each key."""
    found = []
    for key, _ in iter_knobs():
        old, now = get_knob(before, key), get_knob(after, key)
        if old != now:
            found.append(f"{key}: {_shown(old)} -> {_shown(now)}")
    return found


def _shapes(config: Config, seq_len: int, trained_vocab: int | None) -> dict[str, Any]:
    """Tiny shapes of a recipe with a preset or shapes, all set; a preset stays, for what of it no key says."""
    model = config.model
    known = config if model.preset or model.vocab_size != "auto" else update_config(config, {"model.vocab_size": VOCAB})
    spec = shrink_spec(build_model_spec(known), seq_len)
    given = {name: getattr(spec, name) for name in SHAPE_FIELDS}
    if spec.rope_scaling is not None:
        fields = RopeScalingSection.model_fields
        given["rope_scaling"] = {name: value for name, value in asdict(spec.rope_scaling).items() if name in fields}
    if spec.latent is not None:
        given["latent"] = list(asdict(spec.latent).values())
    if spec.moe is not None:
        given |= {f"moe.{name}": getattr(spec.moe, name) for name in MOE_SHAPE_FIELDS}
    rows = spec.vocab_size if model.preset else model.vocab_size
    given["vocab_size"] = rows if trained_vocab is None or rows == "auto" else min(rows, trained_vocab)
    if model.max_seq_len is None and model.preset is None:
        given["max_seq_len"] = None  # data.seq_len, as before
    return {f"model.{name}": value for name, value in given.items()}


def _plain(source: str | SourceSection) -> Any:
    return source if isinstance(source, str) else source.model_dump(mode="json")


def _source(source: str | SourceSection, form: str, here: Callable[[str], bool]) -> Any:
    """The source if all of it is here or has no replacement, else the sample."""
    paths = [source] if isinstance(source, str) else source.path
    if all(map(here, paths)) or form not in SAMPLES:
        return _plain(source)
    return SAMPLES[form] if isinstance(source, str) else {"path": [SAMPLES[form]], "weight": source.weight}


def _profile(window: str | None, steps: int) -> str | None:
    """The window if it fits, else the second and third step."""
    if window is None or int(window.partition("-")[2]) <= steps:
        return window
    return "2-3" if steps >= 3 else None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value)
    if isinstance(value, SourceSection):
        return f"{', '.join(value.path)} ({value.weight:g})"
    return "null" if value is None else str(value)
