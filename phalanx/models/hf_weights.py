"""Read the weights of Hugging Face folders by byte range: safetensors, and pickled .bin files of old folders."""

import json
import math
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec
from phalanx.models import mxfp4
from phalanx.models.hf_layout import Place, find_places, find_stacks
from phalanx.models.llama import Llama
from phalanx.models.model import Architecture
from phalanx.models.user_model import hf_name, shapes_of

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# By the names of safetensors.
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Kind of file -> the name of a single file, of the index of several, and the pattern of several without an index.
_KINDS = {
    "safetensors": ("model.safetensors", "model.safetensors.index.json", "*.safetensors"),
    "bin": ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"),
}


# Bytes of a file converted at a time, few enough for the processor's cache.
_CHUNK_BYTES = 2 << 20


class _File(Protocol):
    """The tensors of one file, read from disk on demand."""

    def keys(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, by the name of safetensors where it has one."""

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Read elements of the flattened tensor from `start` on into `out`."""


class _Safetensors:
    """A safetensors file, read and not mapped: a mapped file counts as memory of the process, and is read in small
    parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with safe_open(path, framework="pt", device="cpu"):  # checks the header, and that no bytes are missing
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (open as long as this object)
        size = int.from_bytes(self._file.read(8), "little")
        self._header = {name: at for name, at in json.loads(self._file.read(size)).items() if name != "__metadata__"}
        self._first = 8 + size

    def keys(self) -> Iterable[str]:
        return self._header.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> str:
        return str(self._header[name]["dtype"])

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        stored = torch.uint8 if self.dtype(name) == "U8" else STORED_DTYPES[self.dtype(name)]
        at = self._first + int(self._header[name]["data_offsets"][0]) + start * stored.itemsize
        if out.dtype == stored and out.device.type == "cpu" and out.stride(0) == 1:
            self._read(at, out)
            return
        chunk = torch.empty(min(out.numel(), _CHUNK_BYTES // stored.itemsize), dtype=stored)
        for part in out.split(max(1, chunk.numel())):
            self._read(at, chunk[: part.numel()])
            part.copy_(chunk[: part.numel()])
            at += part.numel() * stored.itemsize

    def _read(self, at: int, out: Tensor) -> None:
        raw = out.detach().view(torch.uint8).numpy().data
        done = 0
        while done < len(raw):
            try:
                count = os.preadv(self._file.fileno(), [raw[done:]], at + done)
            except OSError as error:
                raise ConfigError(f"{self.path} cannot be read ({error.strerror}); fetch the file again.") from error
            if not count:
                raise ConfigError(f"{self.path} was truncated while it was read; fetch the file again.")
            done += count


class _Pickled:
    """A pickled .bin file, mapped."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        names = {dtype: name for name, dtype in STORED_DTYPES.items()}
        return names.get(self._tensors[name].dtype, str(self._tensors[name].dtype))

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        out.copy_(self._tensors[name].reshape(-1)[start : start + out.numel()])


class Weights:
    """The tensors of a local Hugging Face folder by our names, read by byte range: a rank reads only what it keeps.

    Takes `model.safetensors`, shards with `model.safetensors.index.json`, or shards without an index; without these,
    `pytorch_model.bin` in the same three forms. Names are mapped by `model_class`; if it fuses parameters in one
    tensor, call `check` with the model's shape before reading. Raises ConfigError if there are no weights, or if a file
    is missing or damaged.
    """

    def __init__(self, folder: Path, model_class: type[Architecture] = Llama) -> None:
        self.folder, self.model_class = Path(folder), model_class
        self._places: dict[str, Place] = {}
        self._stacks: dict[str, dict[str, tuple[int, ...]]] = {}  # our name -> theirs and their shapes
        self._shapes: dict[str, tuple[int, ...]] = {}  # of these parameters
        self._last: tuple[str, Tensor] | None = None  # a transposed tensor
        paths = _files(self.folder)
        self._files = {path: _open(path) for path in paths}
        self._path_of = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118 (not a dict)
        self._unpack_stacks()

    def _unpack_stacks(self) -> None:
        """Take stacks in MXFP4, which are two tensors each, as tensors in bfloat16."""
        packed = {name.removesuffix(mxfp4.BLOCKS) for name in self._path_of if name.endswith(mxfp4.BLOCKS)}
        packed = {name for name in packed if name + mxfp4.SCALES in self._path_of}
        for name in packed:
            blocks, scales = (self._path_of.pop(name + end) for end in (mxfp4.BLOCKS, mxfp4.SCALES))
            self._path_of[name] = blocks / name  # a file of its own
            self._files[blocks / name] = mxfp4.PackedStack(name, self._files[blocks], self._files[scales])
        if packed:
            warnings.warn(f"{self.folder} has weights in MXFP4, which are read as bfloat16", stacklevel=3)

    def _theirs(self, name: str) -> str:
        return hf_name(name, self.model_class)

    def _names(self, name: str) -> list[str]:
        theirs = self._theirs(name)
        return [theirs, *self.model_class.other_hf_names(theirs)]

    def _has(self, name: str) -> bool:
        return any(theirs in self._path_of for theirs in self._names(name))

    def _find(self, name: str) -> str:
        """Find the stored name of our parameter; a tied matrix may have either of its two names."""
        wanted = self._theirs(name)
        for known in self._names(name):
            if known in self._path_of:
                return known
        other = {"embed.weight": "head.weight", "head.weight": "embed.weight"}.get(name)
        if wanted not in self._path_of and other is not None and self._theirs(other) in self._path_of:
            return self._theirs(other)
        if wanted not in self._path_of:
            raise ConfigError(
                f"{self.folder} has no tensor {wanted}, so the model cannot be read; fetch the folder's files again."
            )
        return wanted

    def _place(self, name: str) -> tuple[_File, str]:
        """The file with our parameter, and its name there."""
        theirs = self._find(name)
        return self._files[self._path_of[theirs]], theirs

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of our parameter `name`. Raises ConfigError if the folder does not have it."""
        if name in self._stacks:
            return self._shapes[name]
        file, theirs = self._place(name)
        stored, place = file.shape(theirs), self._places.get(name)
        return place.shape if place is not None and stored == place.stored else stored

    def _stored(self, name: str) -> str:
        if name in self._stacks:
            theirs = next(iter(self._stacks[name]))
            return self._files[self._path_of[theirs]].dtype(theirs)
        file, theirs = self._place(name)
        return file.dtype(theirs)

    def dtype(self) -> torch.dtype:
        """The dtype of the stored embedding. Raises ConfigError if it is unsupported."""
        stored = self._stored(next(name for name in self.model_class.hf_names if name.startswith("embed.")))
        if stored not in STORED_DTYPES:
            raise ConfigError(
                f"{self.folder} stores its weights as {stored}, which cannot be trained from; use a folder that stores "
                f"one of: {', '.join(DTYPES)}."
            )
        return STORED_DTYPES[stored]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of the row-major flattened parameter, 1-D, in the stored dtype.

        Raises ConfigError if the parameter is missing or its file damaged, and ValueError for a range out of bounds.
        """
        out = torch.empty(max(0, stop - start), dtype=STORED_DTYPES[self._stored(name)])
        self.read_into(name, start, stop, out)
        return out

    def read_into(self, name: str, start: int, stop: int, out: Tensor) -> None:
        """Read into `out`, 1-D, of any dtype and on any device, without a temporary copy of the whole."""
        place, count = self._places.get(name), math.prod(self.shape(name))
        if not 0 <= start <= stop <= count:
            raise ValueError(f"{name} has {count} elements, but [{start}, {stop}) was asked for")
        assert out.shape == (stop - start,), (name, start, stop, tuple(out.shape))
        if start >= stop:
            return
        if name in self._stacks:
            self._read_stack(self._stacks[name], start, stop, out)
            return
        file, theirs = self._place(name)
        if place is None or place.alone:
            file.read_into(theirs, start, out)
        elif place.transposed:
            out.copy_(place.find_in(self._whole(file, theirs)).reshape(-1)[start:stop])
        else:
            at = 0
            for first, last in place.runs(start, stop):
                file.read_into(theirs, first, out[at : at + last - first])
                at += last - first

    def _read_stack(self, stack: dict[str, tuple[int, ...]], start: int, stop: int, out: Tensor) -> None:
        names, each = list(stack), math.prod(next(iter(stack.values())))
        for number in range(start // each, -(-stop // each)):
            first, last = max(start, number * each), min(stop, (number + 1) * each)
            theirs = names[number]
            file = self._files[self._path_of[theirs]]
            file.read_into(theirs, first - number * each, out[first - start : last - start])

    def _whole(self, file: _File, theirs: str) -> Tensor:
        """A whole stored tensor; the last one is cached, since its parts are read one after another."""
        if self._last is None or self._last[0] != theirs:
            whole = torch.empty(file.shape(theirs), dtype=STORED_DTYPES[file.dtype(theirs)])
            file.read_into(theirs, 0, whole.view(-1))
            self._last = theirs, whole
        return self._last[1]

    def missing_parameters(self, spec: ModelSpec) -> list[str]:
        """Our names of missing parameters, or ones of another shape, that may be drawn instead."""
        shapes = shapes_of(self.model_class, spec)
        may = {name: shape for name, shape in shapes.items() if name.startswith(self.model_class.may_draw)}
        return [name for name, shape in may.items() if not self._has(name) or self.shape(name) != shape]

    def check(self, spec: ModelSpec) -> None:
        """Check that the weights are exactly those of a model of `spec`. Raises ConfigError that names tensors and
        files."""
        shapes = shapes_of(self.model_class, spec)
        stacks = find_stacks(self.model_class, shapes)
        self._check_stacks(stacks)
        self._stacks, self._shapes = stacks, {name: shapes[name] for name in stacks}
        shapes = {name: shape for name, shape in shapes.items() if name not in stacks}
        self._places = find_places(self.model_class, spec, shapes)
        drawn = set(self.missing_parameters(spec))
        needed = {name: shape for name, shape in shapes.items() if name not in drawn}
        missing = [self._theirs(name) for name in needed if not self._has(name)]
        tied = "head.weight" in self.model_class.hf_names
        if tied and spec.tie_embeddings and self._theirs("head.weight") in self._path_of:
            missing = [name for name in missing if name != self._theirs("embed.weight")]
        if missing:
            raise ConfigError(
                f"{self.folder} lacks {_few(missing)}, which its config.json promises; fetch the folder's files again."
            )
        for name, shape in needed.items():
            theirs = self._find(name)
            if self.shape(name) != shape:
                self._refuse_shape(theirs, self.shape(name), self._places[name].stored)
            self._check_dtype(theirs)
        known = {theirs for name in shapes for theirs in self._names(name)}
        known |= {theirs for stack in stacks.values() for theirs in stack}
        known |= {self._theirs("head.weight")} if tied else set()
        # Old versions of transformers stored rotary frequencies, which follow from the config.
        extra = [name for name in self._path_of if name not in known and not name.endswith("rotary_emb.inv_freq")]
        extra = self._without_layers_ahead(spec, [n for n in extra if not self.model_class.ignores_hf_name(n)])
        if extra:
            raise ConfigError(
                f"{self._path_of[extra[0]]} holds {_few(extra)}, which a model of this config.json does not have; use "
                "weights and a config.json of one model."
            )

    def _without_layers_ahead(self, spec: ModelSpec, extra: list[str]) -> list[str]:
        """Names of tensors without those of layers behind the last that predict further tokens."""
        end = self.model_class.hf_ahead
        marks = (re.fullmatch(r"(.*\.layers\.)(\d+)" + re.escape(end), name) for name in (extra if end else ()))
        ahead = tuple(f"{mark[1]}{mark[2]}." for mark in marks if mark is not None and int(mark[2]) >= spec.layers)
        if ahead:
            warnings.warn(
                f"{self.folder} has layers that predict further tokens ({_few(list(ahead))}), which are not read",
                stacklevel=3,
            )
        return [name for name in extra if not name.startswith(ahead)] if ahead else extra

    def _check_stacks(self, stacks: dict[str, dict[str, tuple[int, ...]]]) -> None:
        """Raises ConfigError unless all matrices of experts are there, of the shapes and types that they should be."""
        if missing := [theirs for stack in stacks.values() for theirs in stack if theirs not in self._path_of]:
            raise ConfigError(
                f"{self.folder} lacks {_few(missing)}, which its config.json promises; fetch the folder's files again."
            )
        for stack in stacks.values():
            for theirs, shape in stack.items():
                file = self._files[self._path_of[theirs]]
                if file.shape(theirs) != shape:
                    self._refuse_shape(theirs, file.shape(theirs), shape)
                self._check_dtype(theirs)

    def _refuse_shape(self, theirs: str, found: tuple[int, ...], promised: tuple[int, ...]) -> None:
        raise ConfigError(
            f"{self._path_of[theirs]} holds {theirs} of shape {found}, but config.json makes it {promised}; use "
            "weights and a config.json of one model."
        )

    def _check_dtype(self, theirs: str) -> None:
        stored = self._files[self._path_of[theirs]].dtype(theirs)
        if stored not in STORED_DTYPES:
            raise ConfigError(
                f"{self._path_of[theirs]} stores {theirs} as {stored}, which cannot be trained from; use a folder that "
                f"stores one of: {', '.join(DTYPES)}."
            )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder with weights; give a local Hugging Face folder.")
    for single, index, pattern in _KINDS.values():
        if (folder / index).is_file():
            return _listed(folder, index)
        if (folder / single).is_file():
            return [folder / single]
        if paths := sorted(folder.glob(pattern)):
            return paths
    raise ConfigError(
        f"{folder} has no .safetensors file and no pytorch_model.bin, the supported formats of weights; fetch "
        "the folder's files again."
    )


def _listed(folder: Path, index: str) -> list[Path]:
    try:
        names = sorted(set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / index} is no index of weights ({error!r}); fetch the file again.") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder} lacks {_few(missing)}, which {index} lists; fetch the missing files.")
    return [folder / name for name in names]


def _open(path: Path) -> _File:
    if path.suffix == ".bin":
        return _open_pickled(path)
    try:
        return _Safetensors(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors ({error}); fetch the file again.") from error


def _open_pickled(path: Path) -> _Pickled:
    """Open a .bin file with torch's weights-only unpickler, which refuses anything but tensors, and so any code."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a file that is no pickle can raise anything
        first = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise ConfigError(
            f"{path} cannot be read as tensors alone ({type(error).__name__}: {first}); fetch the file again, or "
            "convert it to safetensors."
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{path} holds no dictionary of tensors, so no weights can be read; fetch the file again.")
    return _Pickled(tensors)
