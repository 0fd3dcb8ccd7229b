"""Folders of torch.distributed.checkpoint as torchtitan and scripts with FSDP2 save them, of any number of ranks.

A key is the path of a tensor in what was saved, joined with dots. Parameters are found by their names after a common
prefix (`model.`, `app.model.`, none), Adam's state as `....state.NAME.exp_avg`, both in Hugging Face's names or in
those of Meta's LLaMA, which torchtitan has. The rows of Meta's queries and keys are ordered for rotary positions of
neighbouring channels, and put into the order of Hugging Face's halves here.
Sources: torch.distributed.checkpoint.state_dict, torchtitan.models.llama3, transformers' convert_llama_weights_to_hf.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from phalanx.compat.pickles import load_metadata
from phalanx.compat.trained_state import (
    MOMENTS,
    PARAM,
    ModelFolder,
    TrainedState,
    check_parameter,
    list_few,
)
from phalanx.core.errors import ConfigError
from phalanx.models.user_model import hf_name

# Names of Meta's LLaMA, after the number of the layer if any, for ours.
_META = {
    "embed.weight": "tok_embeddings.weight", "head.norm.weight": "norm.weight", "head.weight": "output.weight",
    "attention.q.weight": "attention.wq.weight", "attention.k.weight": "attention.wk.weight",
    "attention.v.weight": "attention.wv.weight", "attention.o.weight": "attention.wo.weight",
    "mlp.gate.weight": "feed_forward.w1.weight", "mlp.up.weight": "feed_forward.w3.weight",
    "mlp.down.weight": "feed_forward.w2.weight", "attention_norm.weight": "attention_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
}  # fmt: skip
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|module)\.")
_STATE = re.compile(r"(?:.*\.)?state\.(.+)\.(exp_avg|exp_avg_sq|step)")
_IDLE = re.compile(r"(.*\.)?(freqs_cis|inv_freq|rope\.cache)")
# What stands beside the model in what is saved.
_OTHER = re.compile(
    r"(.*\.)?(optim(izer)?s?|lr_schedulers?|schedulers?|dataloader|train_state|rng_state)\..*|.*param_groups.*"
)


def is_torch_checkpoint(folder: Path) -> bool:
    """Whether a folder is one of torch.distributed.checkpoint, whole or without its metadata."""
    return folder.is_dir() and ((folder / ".metadata").exists() or any(folder.glob("*.distcp")))


class TorchCheckpointReader(FileSystemReader):
    """PyTorch's reader, by metadata that runs no code and is read once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / ".metadata"
        try:
            with open(path, "rb") as file:
                self.known = load_metadata(file)
        except Exception as error:  # whatever a file that is none makes of the unpickler
            reason = " ".join(str(error).split()).partition(". ")[0][:300] or type(error).__name__
            raise ConfigError(f"{path} cannot be read ({reason}); download the checkpoint again") from None
        self.known.storage_meta = getattr(self.known, "storage_meta", None) or StorageMeta()
        for name in sorted({str(each.relative_path) for each in self.known.storage_data.values()}):
            if not (folder / name).is_file():
                raise ConfigError(f"{folder} lacks {name}, which its .metadata lists; download the missing files")

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.known

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """What is known of each tensor, by its key."""
        known = self.known.state_dict_metadata
        return {key: about for key, about in known.items() if isinstance(about, TensorStorageMetadata)}

    def load(self, key: str, row: int | None = None) -> Tensor:
        """A tensor, or only its `row` along the first dimension; of its stored parts those are read that have some of
        it. Raises ConfigError for a damaged file."""
        about = self.known.state_dict_metadata[key]
        assert isinstance(about, TensorStorageMetadata), key
        offsets, sizes = [0] * len(about.size), list(about.size)
        if row is not None:
            offsets[0], sizes[0] = row, 1
        out = torch.empty(sizes, dtype=about.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, about, [wanted])
        self.set_up_storage_reader(self.known, True)
        try:
            self.read_data(LoadPlan(items), _OneTensor(out)).wait()
        except Exception as error:  # what a damaged file happens to raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(f"{self.path} has {key} in a damaged file ({reason}); fetch it again") from None
        return out if row is None else out[0]


class _OneTensor(DefaultLoadPlanner):
    """Reads into parts of one tensor."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out = out

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.out
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It has been read into its place."""


@dataclass(frozen=True)
class WrittenPart:
    """A part of a tensor to write: `load` gives it, in `sizes` and of `dtype`; it is at `offsets` of the tensor `key`,
    whose sizes are `whole`."""

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]


def write_torch_checkpoint(folder: Path, files: Sequence[Sequence[WrittenPart]], objects: Sequence[str]) -> None:
    """Write a folder of torch.distributed.checkpoint, with a file for each of `files`; each part is loaded when its
    file is written, so that one file's parts are in memory at a time. `objects` are keys that hold the list [None]."""
    loads: dict[MetadataIndex, Callable[[], Tensor | io.BytesIO]] = {}
    plans: list[SavePlan] = []
    for parts in files:
        items = []
        for part in parts:
            index = MetadataIndex(part.key, part.offsets)
            chunk = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
            about = TensorWriteData(chunk, TensorProperties(part.dtype), torch.Size(part.whole))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
            loads[index] = part.load
        plans.append(SavePlan(items))
    plans.append(SavePlan([WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects]))
    loads |= {item.index: _pack_nothing for item in plans[-1].items}
    writer, planner = FileSystemWriter(folder, per_thread_copy_ahead=0), _LazyData(loads)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    # A file's plan is that of a rank, so that the writer forgets its tensors before the next.
    written = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    writer.finish(metadata, written)


def _pack_nothing() -> io.BytesIO:
    packed = io.BytesIO()
    torch.save([None], packed)
    return packed


class _LazyData(DefaultSavePlanner):
    """Gives the data of an item when it is written."""

    def __init__(self, loads: dict[MetadataIndex, Callable[[], Tensor | io.BytesIO]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._loads = loads

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._loads[write_item.index]()


@dataclass(frozen=True)
class _StoredKey:
    """Where one tensor is: its whole key in the folder, and what is known of it."""

    key: str
    about: TensorStorageMetadata

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.about.size)

    @property
    def dtype(self) -> torch.dtype:
        return self.about.properties.dtype


def open_torch_checkpoint(folder: Path, model: ModelFolder, step: int | None = None) -> TrainedState:
    """The parameters and Adam's state in a folder of torch.distributed.checkpoint, by our names. `step` replaces what
    the folder says.

    Only tensors are read, and nothing but metadata unpickled. Raises ConfigError, with the folder and key, for a folder
    that is not whole, for parameters that are missing, unknown or of other sizes, and for metadata that asks for code.
    """
    reader = TorchCheckpointReader(folder)
    tensors = {_WRAPPERS.sub("", key): _StoredKey(key, about) for key, about in reader.tensors().items()}
    if any(key.startswith(("decoder.", "model.decoder.", "optimizer.state.exp_avg.")) for key in tensors):
        raise ConfigError(
            f"{folder} is a distributed checkpoint of Megatron-core without its common.pt, which names the model; "
            "download that file as well"
        )
    moments: dict[str, dict[str, _StoredKey]] = {}
    parameters: dict[str, _StoredKey] = {}
    for key, stored in tensors.items():
        if found := _STATE.fullmatch(key):
            moments.setdefault(found[2], {})[found[1]] = stored
        elif not _IDLE.fullmatch(key) and not _OTHER.fullmatch(key):
            parameters[key] = stored
    shapes = model.shapes()
    names, meta = _match(parameters, shapes, model, folder)
    has_moments = all(_of_parameter(moments.get(kind, {}), key) for kind in MOMENTS for key in names.values())
    for ours, key in names.items():
        check_parameter(parameters[key].key, parameters[key].shape, parameters[key].dtype, shapes[ours], folder)
    for kind in MOMENTS if has_moments else ():
        for ours, key in names.items():
            held = _of_parameter(moments[kind], key)
            assert held is not None
            check_parameter(held.key, held.shape, held.dtype, shapes[ours], folder)
    dtype = parameters[next(iter(names.values()))].dtype
    for key in names.values():
        dtype = torch.promote_types(dtype, parameters[key].dtype)

    def load(stored: _StoredKey) -> Tensor:
        return reader.load(stored.key)

    def read(name: str, kind: str) -> Tensor:
        stored = parameters[names[name]] if kind == PARAM else _of_parameter(moments[kind], names[name])
        assert stored is not None, (name, kind)
        found = load(stored)
        return _from_neighbours(found, model.spec.head_dim) if meta and re.search(r"\.[qk]\.weight$", name) else found

    return TrainedState(model, read, dtype, step or _find_step(tensors, moments, load), has_moments)


def _of_parameter(held: dict[str, _StoredKey], key: str) -> _StoredKey | None:
    """A state of the parameter `key`, which the optimizer may name without the model's prefix."""
    while key:
        if key in held:
            return held[key]
        key = key.partition(".")[2]
    return None


def _match(
    parameters: dict[str, _StoredKey], shapes: dict[str, tuple[int, ...]], model: ModelFolder, folder: Path
) -> tuple[dict[str, str], bool]:
    """Our names -> keys, and whether these are Meta's. Raises ConfigError unless each has its counterpart."""
    theirs = {name: hf_name(name, model.model_class) for name in shapes}
    metas = {name: _meta_name(name) for name in shapes}
    for called, meta in ((theirs, False), (metas, True)):
        first = called[next(iter(shapes))]
        if first is None or None in called.values():
            continue
        prefix = next((key.removesuffix(first) for key in parameters if f".{key}".endswith(f".{first}")), None)
        if prefix is None:
            continue
        names = {name: f"{prefix}{their}" for name, their in called.items()}
        missing = [key for key in names.values() if key not in parameters]
        if missing:
            raise ConfigError(
                f"{folder} lacks {list_few(missing)}, which a model of its config.json has; use a whole checkpoint, "
                "and the config.json of the model that was trained"
            )
        tied = (
            {f"{prefix}{name}" for name in ("lm_head.weight", "output.weight")} if model.spec.tie_embeddings else set()
        )
        extra = sorted(parameters.keys() - set(names.values()) - tied)
        if extra:
            raise ConfigError(
                f"{folder} holds {list_few(extra)}, which a model of its config.json does not have; use the "
                "config.json of the model that was trained"
            )
        return names, meta
    raise ConfigError(
        f"{folder} holds no model by names that are known here, Hugging Face's or torchtitan's "
        f"({list_few(sorted(parameters)) or 'it has no tensors'}); save it under one of these"
    )


def _meta_name(name: str) -> str | None:
    found = re.fullmatch(r"(layers\.\d+\.)(.+)", name)
    known = _META.get(found[2] if found else name)
    return None if known is None else (found[1] if found else "") + known


def _from_neighbours(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of queries or keys whose rotary pairs are neighbours, with the first of all pairs before the second."""
    heads = tensor.view(-1, head_dim // 2, 2, tensor.shape[1])
    return heads.transpose(1, 2).reshape(tensor.shape)


def _find_step(tensors: dict[str, _StoredKey], moments: dict[str, dict[str, _StoredKey]], load: Any) -> int | None:
    """The step that training came to: torchtitan's own, else the one that Adam has counted."""
    own = [stored for key, stored in tensors.items() if re.fullmatch(r"(.*\.)?train_state\.step", key)]
    for stored in (own or list(moments.get("step", {}).values()))[:1]:
        if not stored.shape or stored.shape == (1,):
            return int(load(stored).item())
    return None
