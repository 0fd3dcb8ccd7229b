"""A LLaMA as a checkpoint of Megatron's: classic (`torch`), one file for each tensor and pipeline rank, and another of
Adam's state; or distributed (`torch_dist`), of whole tensors.

The layout is that which `weights.py` reads; sources are named there. `te` and `local` are the names of Megatron-core
with and without Transformer Engine (which joins norms with the matrix behind them), `megatron-llama` those of
Megatron-LLaMA.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.compat.megatron.files import MODEL_FILES, TRACKER, LazyTensor
from phalanx.compat.megatron.optimizer_state import (
    KINDS,
    MASTER,
    OPTIMIZER_FILE,
    AdamSettings,
    describe_optimizer,
    pack_buffer,
)
from phalanx.compat.megatron.torch_dist import SHARDING, write_torch_dist
from phalanx.compat.trained_state import PARAM
from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec, RopeScaling
from phalanx.models.hf_config import read_config, spec_from_config
from phalanx.models.hf_export import copy_tokenizer, new_folder
from phalanx.models.hf_weights import Weights
from phalanx.models.user_model import load_family_class, shapes_of

LAYOUTS = ("te", "local", "megatron-llama")
FORMATS = ("torch", "torch_dist")  # of Megatron's --ckpt-format
VOCAB_MULTIPLE = 128  # Megatron's make_vocab_size_divisible_by, for each tensor rank
_LINEAR = "linear"
_RELEASE = "release"  # a checkpoint to begin with, of no iteration
_LLAMA_3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


@dataclass(frozen=True)
class MegatronSource:
    """What becomes a checkpoint of Megatron's: `read(name, kind, rows)` gives these rows of one of our parameters (kind
    `param`), or of what Adam keeps of it, in separate memory; `dtype` is that of the written weights, `adam` None
    where weights alone are written. `where` names it in errors, `tokenizer` is a folder of its files."""

    where: str
    spec: ModelSpec
    read: Callable[[str, str, slice], Tensor]
    dtype: torch.dtype
    tokenizer: Path | None = None
    adam: AdamSettings | None = None


def open_hf_source(folder: Path) -> MegatronSource:
    """The weights of a Hugging Face folder. Raises ConfigError for a folder that is not whole."""
    spec = spec_from_config(read_config(folder), str(folder / "config.json"))
    code = load_family_class(spec.architecture)
    weights = Weights(folder, code)
    weights.check(spec)
    names = shapes_of(code, spec).keys() - weights.missing_parameters(spec)
    stored = (weights.read(name, 0, 0).dtype for name in names)

    def read(name: str, kind: str, rows: slice) -> Tensor:
        count, *row = weights.shape(name)
        first, last, _ = rows.indices(count)
        return weights.read(name, first * math.prod(row), last * math.prod(row)).view(last - first, *row)

    return MegatronSource(str(folder), spec, read, functools.reduce(torch.promote_types, stored), folder)


def export_megatron(
    source: MegatronSource, target: Path, tensor: int = 1, pipeline: int | Sequence[int] = 1, layout: str = "te",
    ckpt_format: str = "torch",
) -> None:  # fmt: skip
    """Write a model for `tensor` and `pipeline` ranks of Megatron's; a sequence says how many layers each stage has.
    One file is in memory at a time, as it is written, beside the matrix that a part is cut from. The vocabulary is
    padded with zeros. With `ckpt_format` "torch_dist" it is for any ranks and both names of Megatron-core.

    With Adam's state it is a checkpoint of that step, for the distributed optimizer; else one to begin with. Raises
    ConfigError for a model that Megatron does not build from these arguments, for numbers of ranks that do not divide
    it, and if `target` is not empty.
    """
    if ckpt_format not in FORMATS:
        raise ConfigError(f"--ckpt-format {ckpt_format} is not known; choose one of {', '.join(FORMATS)}")
    whole = ckpt_format == "torch_dist"
    if whole and (tensor, pipeline, layout) != (1, 1, "te"):
        raise ConfigError(
            "--ckpt-format torch_dist has whole tensors, which Megatron divides as it loads them, with the same names "
            "in --layout te and local; remove --tensor, --pipeline, --layers-per-stage and --layout"
        )
    counts = _check(source, tensor, pipeline, layout)
    parts = _RankParts(source, tensor, layout == "megatron-llama")
    args = _arguments(source, tensor, counts, layout)
    adam, step = source.adam, source.adam.step if source.adam else 0
    begin = {"args": args, "checkpoint_version": 3.0, "iteration": step}
    begin |= describe_optimizer(adam) if adam else {}
    iteration = f"iter_{step:07d}" if adam else _RELEASE
    with new_folder(target) as temporary:
        if whole:
            _write_whole(temporary / iteration, source, begin, parts)
        else:
            _write_ranks(temporary / iteration, source, begin, parts, tensor, counts, layout)
        (temporary / TRACKER).write_text(str(step) if adam else _RELEASE, encoding="utf-8")
        copy_tokenizer(source.tokenizer, temporary)


def _write_whole(folder: Path, source: MegatronSource, begin: dict[str, Any], parts: "_RankParts") -> None:
    def list_tensors(kind: str, dtype: torch.dtype) -> dict[str, LazyTensor]:
        stage = functools.partial(_stage, kind=kind, rank=0, stage=0, counts=[layers], layout="te")
        shapes = {name: tuple(load().shape) for name, load in stage(parts.on_meta())}
        return {
            name: LazyTensor(shapes[name], dtype, functools.partial(_load_as, load, dtype))
            for name, load in stage(parts)
        }

    layers = source.spec.layers
    states = {kind: list_tensors(kind, torch.float32) for kind in KINDS} if source.adam else {}
    if states:
        begin = begin | {"optimizer": begin["optimizer"] | {"param_state_sharding_type": SHARDING}}
    write_torch_dist(folder, begin, list_tensors(PARAM, source.dtype), states, layers)


def _load_as(load: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return load().to(dtype)


def _write_ranks(
    iteration: Path, source: MegatronSource, begin: dict[str, Any], parts: "_RankParts", tensor: int,
    counts: Sequence[int], layout: str,
) -> None:  # fmt: skip
    for stage in range(len(counts)):
        for rank in range(tensor):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if len(counts) > 1 else "")
            folder = iteration / name
            folder.mkdir(parents=True)
            rank_of = functools.partial(_stage, parts, rank=rank, stage=stage, counts=counts, layout=layout)
            sizes = _write_model(folder, source, begin, rank_of(kind=PARAM), layout)
            if source.adam:
                tied = source.spec.tie_embeddings and len(counts) > 1
                packed = {
                    kind: pack_buffer(sizes, ((name, load()) for name, load in rank_of(kind=kind)), tied)
                    for kind in KINDS
                }
                _write_state(folder, source, packed)


# Functions of their own, so that what is in a file is freed before the next is made.
def _write_model(
    folder: Path, source: MegatronSource, begin: dict[str, Any], stage: "_Stage", layout: str
) -> list[tuple[str, int]]:
    model = {name: load().to(source.dtype) for name, load in stage}
    torch.save(begin | {"model": _nest(model, layout)}, folder / MODEL_FILES[0])
    return [(name, found.numel()) for name, found in model.items()]


def _write_state(folder: Path, source: MegatronSource, kinds: dict[str, Tensor]) -> None:
    buffers = kinds | {"numel_unpadded": kinds[MASTER].numel()}
    content = {"buckets_coalesced": True, 0: {(source.dtype, torch.float32): buffers}}
    torch.save(content, folder / OPTIMIZER_FILE)


_Stage = Iterator[tuple[str, Callable[[], Tensor]]]  # names and what reads the tensors


class _RankParts:
    """The parts of our parameters, or of a kind of their state, on one tensor rank of Megatron; of rows, only those of
    the rank are read."""

    def __init__(self, source: MegatronSource, ranks: int, blocks: bool) -> None:
        self._source, self.spec, self._read, self._ranks, self._blocks = source, source.spec, source.read, ranks, blocks
        self._shapes = shapes_of(load_family_class(source.spec.architecture), source.spec)

    def on_meta(self) -> "_RankParts":
        """The same without values, and without reading any."""
        source = replace(self._source, read=self._read_nothing)
        return _RankParts(source, self._ranks, self._blocks)

    def _read_nothing(self, name: str, kind: str, rows: slice) -> Tensor:
        return torch.empty(self._shapes[name], device="meta")[rows]

    def vocabulary(self, name: str, kind: str, rank: int | None) -> Tensor:
        """The rank's rows of a matrix of the vocabulary (None: all), with zeros up to a multiple of what all ranks
        divide it by."""
        count, rows = self.spec.vocab_size, padded_rows(self.spec, self._ranks)
        each = rows if rank is None else rows // self._ranks
        start = 0 if rank is None else rank * each
        found = self._read(name, kind, slice(min(start, count), min(start + each, count)))
        missing = each - len(found)
        return torch.cat([found, found.new_zeros(missing, found.shape[1])]) if missing else found

    def whole(self, name: str, kind: str) -> Tensor:
        """What every rank has."""
        return self._read(name, kind, slice(None))

    def rows(self, name: str, kind: str, rank: int) -> Tensor:
        """The rank's rows of a matrix that is divided evenly."""
        each = self._shapes[name][0] // self._ranks
        return self._read(name, kind, slice(rank * each, (rank + 1) * each))

    def columns(self, name: str, kind: str, rank: int) -> Tensor:
        """The rank's columns of a matrix that is divided evenly."""
        return self.whole(name, kind).chunk(self._ranks, 1)[rank].clone(memory_format=torch.contiguous_format)

    def qkv(self, layer: int, kind: str, rank: int) -> Tensor:
        """Queries, keys and values: by groups of heads that share a key, or one after the other."""
        parts = [self.rows(f"layers.{layer}.attention.{name}.weight", kind, rank) for name in "qkv"]
        if self._blocks:
            return torch.cat(parts)
        groups = self.spec.kv_heads // self._ranks
        return torch.cat([part.view(groups, -1, part.shape[1]) for part in parts], 1).reshape(-1, parts[0].shape[1])

    def gated(self, layer: int, kind: str, rank: int) -> Tensor:
        """The gate above what it gates."""
        return torch.cat([self.rows(f"layers.{layer}.mlp.{name}.weight", kind, rank) for name in ("gate", "up")])


def padded_rows(spec: ModelSpec, ranks: int) -> int:
    """Rows of the vocabulary with Megatron's padding."""
    multiple = VOCAB_MULTIPLE * ranks
    return -(-spec.vocab_size // multiple) * multiple


def _stage(parts: _RankParts, kind: str, rank: int, stage: int, counts: Sequence[int], layout: str) -> _Stage:
    """What a rank of a stage has, by Megatron's names and in the order of its modules."""
    spec, core, bind = parts.spec, layout != "megatron-llama", functools.partial
    stack = "decoder" if core else "language_model.encoder"
    embed = "embedding.word_embeddings.weight"
    if stage == 0:
        yield embed if core else f"language_model.{embed}", bind(parts.vocabulary, "embed.weight", kind, rank)
    first = sum(counts[:stage])
    for own, layer in enumerate(range(first, first + counts[stage])):
        place, ours = f"{stack}.layers.{own}", f"layers.{layer}"
        qkv, o, fc1, fc2 = (
            ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
            if core
            else (
                "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
            )
        )  # fmt: skip
        norms = {
            "te": (f"{qkv}.layer_norm_weight", f"{fc1}.layer_norm_weight"),
            "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
            "megatron-llama": ("input_layernorm.weight", "post_attention_layernorm.weight"),
        }[layout]
        norm = f"{place}.{norms[0]}", bind(parts.whole, f"{ours}.attention_norm.weight", kind)
        if layout != "te":
            yield norm
        yield f"{place}.{o}.weight", bind(parts.columns, f"{ours}.attention.o.weight", kind, rank)
        if layout == "te":
            yield norm
        yield f"{place}.{qkv}.weight", bind(parts.qkv, layer, kind, rank)
        yield f"{place}.{norms[1]}", bind(parts.whole, f"{ours}.mlp_norm.weight", kind)
        yield f"{place}.{fc1}.weight", bind(parts.gated, layer, kind, rank)
        yield f"{place}.{fc2}.weight", bind(parts.columns, f"{ours}.mlp.down.weight", kind, rank)
    if stage < len(counts) - 1:
        return
    yield f"{stack}.final_layernorm.weight", bind(parts.whole, "head.norm.weight", kind)
    head = "embed.weight" if spec.tie_embeddings else "head.weight"
    if not core:
        yield "lm_head.weight", bind(parts.vocabulary, head, kind, None)
    elif not spec.tie_embeddings or len(counts) > 1:  # a stage apart from the embedding has a copy of it
        yield "output_layer.weight", bind(parts.vocabulary, head, kind, rank)


def _nest(model: dict[str, Tensor], layout: str) -> dict[str, Any]:
    """Megatron-LLaMA keeps the parts of a model in separate dictionaries, Megatron-core all in one."""
    if layout != "megatron-llama":
        return model
    nested: dict[str, Any] = {}
    for name, found in model.items():
        keys = ("language_model.encoder.", "language_model.embedding.word_embeddings.", "lm_head.")
        path = next(key for key in keys if name.startswith(key))
        place = nested
        for word in path.split(".")[:-1]:
            place = place.setdefault(word, {})
        place[name.removeprefix(path)] = found
    return nested


def _arguments(source: MegatronSource, tensor: int, counts: Sequence[int], layout: str) -> argparse.Namespace:
    """What Megatron checks, or takes with `--use-checkpoint-args`."""
    spec, dtype, adam = source.spec, source.dtype, source.adam
    theta = int(spec.rope_theta) if spec.rope_theta == int(spec.rope_theta) else spec.rope_theta
    scaling = spec.rope_scaling
    linear = scaling is not None and scaling.rule == _LINEAR
    grouped = spec.kv_heads != spec.heads
    found: dict[str, Any] = {
        "num_layers": spec.layers, "hidden_size": spec.hidden, "ffn_hidden_size": spec.intermediate,
        "num_attention_heads": spec.heads, "kv_channels": spec.head_dim, "seq_length": spec.max_seq_len,
        "max_position_embeddings": spec.max_seq_len, "vocab_size": spec.vocab_size,
        "padded_vocab_size": padded_rows(spec, tensor), "make_vocab_size_divisible_by": VOCAB_MULTIPLE,
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": len(counts),
        "untie_embeddings_and_output_weights": not spec.tie_embeddings, "swiglu": True, "add_bias_linear": False,
        "layernorm_epsilon": spec.norm_eps, "norm_epsilon": spec.norm_eps, "use_rotary_position_embeddings": True,
        "rotary_base": theta, "rotary_percent": 1.0, "params_dtype": dtype, "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16, "use_distributed_optimizer": adam is not None,
        "iteration": adam.step if adam else 0,
        "consumed_train_samples": adam.done if adam else 0, "consumed_valid_samples": 0,
        **_uneven(counts),
    }  # fmt: skip
    if layout == "megatron-llama":
        return argparse.Namespace(**found, RMSNorm=True, causal_lm=True, tokenizer_type="PretrainedFromHF")
    return argparse.Namespace(
        **found,
        group_query_attention=grouped,
        num_query_groups=spec.kv_heads if grouped else 1,
        normalization="RMSNorm",
        position_embedding_type="rope",
        num_experts=None,
        use_rope_scaling=scaling is not None and not linear,
        rope_scaling_factor=scaling.factor if scaling is not None and not linear else 8.0,
        rotary_seq_len_interpolation_factor=scaling.factor if scaling is not None and linear else None,
        tokenizer_type="HuggingFaceTokenizer",
        transformer_impl="transformer_engine" if layout == "te" else "local",
    )


def _uneven(counts: Sequence[int]) -> dict[str, Any]:
    """The arguments of stages of different lengths: Megatron's own for the first and the last, else its layout."""
    if len(set(counts)) == 1:
        return {}
    if len(set(counts[1:-1])) <= 1:
        return {"decoder_first_pipeline_num_layers": counts[0], "decoder_last_pipeline_num_layers": counts[-1]}
    stages = "|".join(f"t*{count}" for count in counts)
    return {"pipeline_model_parallel_layout": f"E{stages}L"}


def _check(source: MegatronSource, tensor: int, pipeline: int | Sequence[int], layout: str) -> list[int]:
    """How many layers each stage has. Raises ConfigError."""
    where, spec = source.where, source.spec
    if layout not in LAYOUTS:
        raise ConfigError(f"--layout {layout} is not known; choose one of {', '.join(LAYOUTS)}")
    names = list(shapes_of(load_family_class(spec.architecture), spec))
    last = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
    known = {"embed", "norm", "head", "attention_norm", "mlp_norm", "q", "k", "v", "o", "gate", "up", "down"}
    if spec.architecture != ModelSpec.architecture or last - known or spec.sliding_window is not None:
        raise ConfigError(
            f"{where} is not a plain LLaMA, whose layout in Megatron's checkpoints is the only one that is known here"
        )
    shared = {"heads": spec.heads, "heads of keys": spec.kv_heads, "rows of the MLP": spec.intermediate}
    for what, count in shared.items():
        if tensor < 1 or count % tensor:
            raise ConfigError(f"{where} has {count} {what}, which {tensor} tensor ranks cannot share; give --tensor")
    if isinstance(pipeline, int) and (pipeline < 1 or spec.layers % pipeline):
        raise ConfigError(
            f"{where} has {spec.layers} layers, which {pipeline} stages cannot share evenly; give --pipeline, or how "
            "many each has with --layers-per-stage"
        )
    counts = [spec.layers // pipeline] * pipeline if isinstance(pipeline, int) else list(pipeline)
    if min(counts) < 1 or sum(counts) != spec.layers:
        raise ConfigError(
            f"{where} has {spec.layers} layers, and --layers-per-stage {','.join(map(str, counts))} is of "
            f"{sum(counts)}; give each stage one or more, {spec.layers} in all"
        )
    scaling = spec.rope_scaling
    if scaling is not None and scaling.rule != _LINEAR and scaling != replace(_LLAMA_3, factor=scaling.factor):
        raise ConfigError(
            f"{where} scales rotary positions by {scaling.rule} with numbers that Megatron has no argument for"
        )
    if layout == "megatron-llama" and (spec.kv_heads != spec.heads or scaling is not None or spec.tie_embeddings):
        raise ConfigError(
            f"{where} shares keys between heads, scales rotary positions or ties its head, none of which "
            "Megatron-LLaMA computes; choose --layout te or local"
        )
    if layout == "megatron-llama" and spec.rope_theta != 10000.0:
        raise ConfigError(f"{where} has the rotary base {spec.rope_theta:g}, and Megatron-LLaMA's is always 10000")
    if layout == "megatron-llama" and (source.adam is not None or len(set(counts)) > 1):
        raise ConfigError(
            f"--layout megatron-llama has even stages and weights alone, and {where} has Adam's state or "
            "different --layers-per-stage; choose --layout te or local, or convert a Hugging Face folder"
        )
    return counts
