"""Restricted unpicklers for other programs' checkpoints: the only place that says which names are looked up."""

import argparse
import math
import pickle
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.remote_device import _remote_device

from phalanx.core.errors import CheckpointError, ConfigError

# Names in a file of weights that are replaced by empty shells: enums of Megatron's in its arguments, the state of
# random generators, and what kernels keep.
_SHELLS = re.compile(
    r"(megatron|transformer_engine)\..+|_io\.BytesIO|_codecs\.encode|"
    r"numpy\.(dtype|ndarray|(_)?core\.multiarray\.(_reconstruct|scalar)|dtypes\.\w+)"
)
_NAMESPACES = {"argparse.Namespace": argparse.Namespace, "types.SimpleNamespace": types.SimpleNamespace}
# In files older than zip archives names cannot be listed first.
_OLD_SHELLS = (
    "megatron.model.enums.ModelType",
    "megatron.enums.ModelType",
    "megatron.core.enums.ModelType",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
)


MAX_COMPARED = 4096  # chunks of a tensor: two and two, in memory
# What the metadata of a folder of torch.distributed.checkpoint is made of.
_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}  # fmt: skip
# What Megatron-core's writer adds to it: the plans of its ranks, of which nothing is needed.
_PLANS = re.compile(r"megatron\.core\.dist_checkpointing\.\S+|torch\.distributed\.checkpoint\.planner\.\w+")


class Shell:
    """Takes whatever an object is made of, and is nothing."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __new__(cls, *_: Any) -> "Shell":
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        return


def load_pickled(path: Path) -> Any:
    """What a file of torch.save holds: tensors (mapped, where the file is new enough), plain values, namespaces, and
    Shells for what is known to be harmless. Raises ConfigError for a damaged file, and for one that asks for more."""
    try:
        return _load(path)
    except ConfigError:
        raise
    except Exception as error:  # whatever a file that is none makes of the unpickler
        text = " ".join(str(error).split())
        asked = re.search(r"GLOBAL (\S+)", text)  # torch says at length what else could be done, and this last
        reason = f"it asks for {asked[1]}" if asked else text.partition(". ")[0][:200]
        raise ConfigError(
            f"{path} cannot be read as plain weights ({type(error).__name__}: {reason}); download the file again, or "
            "save it without other objects."
        ) from error


def _load(path: Path) -> Any:
    """Any name that is not known is refused by torch, too."""
    shells: list[Any] = [(known, name) for name, known in _NAMESPACES.items()]
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        mapped = True
    except ValueError:  # from before torch 1.6: no archive of files, and so nothing to map
        names, mapped = list(_OLD_SHELLS), False
    foreign = [name for name in names if name not in _NAMESPACES and not _SHELLS.fullmatch(name)]
    if foreign:
        raise ConfigError(
            f"{path} asks for {foreign[0]}, which is not part of the weights and could run code, so it was not read; "
            "if you trust it, save the checkpoint without it."
        )
    shells += [(Shell, name) for name in names if _SHELLS.fullmatch(name)]
    with torch.serialization.safe_globals(shells):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


class _MetadataUnpickler(pickle.Unpickler):
    """PyTorch's own reader runs whatever the file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if _PLANS.fullmatch(f"{module}.{name}"):
            return Shell
        if name not in _OF_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not part of a checkpoint")
        return super().find_class(module, name)


def load_metadata(file: Any) -> Metadata:
    """What `file`, the `.metadata` of a folder of torch.distributed.checkpoint, says of it. Raises almost anything for
    a file that is none, AssertionError for one that names other folders or does not cover its tensors."""
    found = _MetadataUnpickler(file).load()
    assert isinstance(found, Metadata) and isinstance(found.storage_data, dict), "it is not a checkpoint index"
    names = [str(each.relative_path) for each in found.storage_data.values()]
    assert not any(Path(name).name != name for name in names), "it names files of another folder"
    for name, each in found.state_dict_metadata.items():
        assert not isinstance(each, TensorStorageMetadata) or _is_covered(each), (
            f"{name} has different parts than the others"
        )
    return found


def _is_covered(tensor: TensorStorageMetadata) -> bool:
    """Whether its chunks cover a tensor and no element is in two: where there is none, PyTorch's reader leaves what was
    in memory before. (A chunk may be named twice, as copies of one tensor are.)"""
    chunks = {(tuple(each.offsets), tuple(each.sizes)) for each in tensor.chunks}
    if not chunks or sum(math.prod(sizes) for _, sizes in chunks) != math.prod(tensor.size):
        return not chunks and not math.prod(tensor.size)
    begins, sizes = np.array(list(chunks), np.int64).reshape(len(chunks), 2, len(tensor.size)).swapaxes(0, 1)
    if (begins < 0).any() or (sizes < 0).any() or (begins + sizes > np.array(tensor.size, np.int64)).any():
        return False
    if len(chunks) > MAX_COMPARED:
        return True
    before = (begins[:, None] + sizes[:, None] <= begins[None]).any(axis=-1)
    empty = (sizes == 0).any(axis=-1)
    return bool((before | before.T | np.eye(len(chunks), dtype=bool) | empty | empty[:, None]).all())


# ------------------------------------------------------------------------------------------ names for torch.load itself


# What the tensors of FSDP's LOCAL_STATE_DICT are made of.
_SHARDED = (ShardedTensor, ShardedTensorMetadata, TensorProperties, Shard, ShardMetadata, ChunkShardingSpec,
            EnumerableShardingSpec, ShardedTensor.ProcessGroupState, _remote_device, MEM_FORMAT_ENCODING)  # fmt: skip


def list_plain_names() -> list[Any]:
    """Plain values beside PyTorch's: namespaces, and arrays and numbers of NumPy's, as in the state of its random
    numbers."""
    made_by = [np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    kinds = (getattr(np.dtypes, name) for name in np.dtypes.__all__)
    return [argparse.Namespace, *made_by, np.ndarray, np.dtype, *kinds]


def list_sharded_names() -> list[Any]:
    """The same, with FSDP's shards as tensors of this process, and the configurations of a script's models."""
    return [*_SHARDED, *list_plain_names(), *_model_configs(), (_member, "builtins.getattr")]


def _member(kind: object, name: str) -> Any:
    """A value of an enumeration, or the class of the shards' group, which pickle writes as a call of getattr; no other
    attribute of anything."""
    if kind is MEM_FORMAT_ENCODING:
        return MEM_FORMAT_ENCODING[name]
    if kind is ShardedTensor and name == "ProcessGroupState":
        return ShardedTensor.ProcessGroupState
    raise CheckpointError(f"the requested state has {name} of {kind!r}, which cannot be loaded; load another")


def _model_configs() -> Iterator[type]:
    """The classes of transformers' configurations that the script has imported: plain values, and no code."""
    module = sys.modules.get("transformers.configuration_utils")
    waiting: list[type] = [] if module is None else [module.PreTrainedConfig]
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        yield one
