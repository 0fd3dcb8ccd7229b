"""Export a Hugging Face folder tensor by tensor: weights, config.json and tokenizer."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from phalanx.core.errors import ConfigError, StorageError
from phalanx.core.run_paths import TOKENIZER_FILES
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.hf_config import config_from_spec
from phalanx.models.hf_layout import Matrix, Place, find_places, find_stacks
from phalanx.models.hf_weights import STORED_DTYPES
from phalanx.models.llama import Llama
from phalanx.models.model import Architecture
from phalanx.models.user_model import shapes_of

Parts = dict[str, dict[str, Place | Matrix]]  # the name of a tensor there -> what of ours it holds, and where
_INDEX = "model.safetensors.index.json"
_CHUNK_ELEMENTS = 1 << 20  # converted and written at a time, so that no tensor is in memory twice


Dtypes = Mapping[str, torch.dtype]  # by the name of a tensor there


def plan_shards(shapes: dict[str, tuple[int, ...]], dtypes: Dtypes, max_shard_bytes: int) -> list[list[str]]:
    """Plan the files of an export: names of `shapes` by file, in order; no file of several tensors exceeds
    `max_shard_bytes`."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = dtypes[name].itemsize * math.prod(shape)
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def export(
    folder: Path,
    spec: ModelSpec,
    tensor_of: Callable[[str], Tensor],
    dtype: torch.dtype,
    *,
    max_shard_bytes: int = 5_000_000_000,
    original_config: dict[str, Any] | None = None,
    tokenizer_folder: Path | None = None,
    bos_id: int | None = None,
    eos_id: int | list[int] | None = None,
    progress: Callable[[int], None] | None = None,
    model_class: type[Architecture] = Llama,
    finished: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face folder that transformers and `AutoTokenizer` can load; one tensor at a time is in memory,
    with the parameters that it consists of.

    `tensor_of(our_name)` returns a parameter, flat or shaped, in any dtype and on any device; it is called once for
    each, in order, and may reuse the previous one's memory. `progress` gets the bytes of each finished tensor,
    `finished` each file of weights, which it may move. Tokenizer files, and a generation_config.json, are copied from
    `tokenizer_folder`. The folder appears complete or not at all. Raises ConfigError if it exists and is not empty, or
    cannot be written, or if a custom class does not name a parameter.
    """
    config = config_from_spec(spec, dtype, original_config, bos_id, eos_id, model_class.hf_config)
    shapes = shapes_of(model_class, spec)
    places, stacks = find_places(model_class, spec, shapes), find_stacks(model_class, shapes)
    parts: Parts = {}
    for name in shapes:
        if name in stacks:
            at = 0
            for theirs, shape in stacks[name].items():
                parts[theirs] = {name: Matrix(shape, at)}
                at += math.prod(shape)
        else:
            parts.setdefault(places[name].name, {})[name] = places[name]
    at_least_32 = torch.promote_types(dtype, torch.float32)
    dtypes = {theirs: at_least_32 if theirs.endswith(model_class.hf_wide) else dtype for theirs in parts}
    with new_folder(Path(folder)) as temporary:
        _write_weights(temporary, parts, tensor_of, dtypes, max_shard_bytes, progress, finished)
        _write_json(temporary / "config.json", config)
        copy_tokenizer(tokenizer_folder, temporary)
        _write_generation_config(temporary, config)


def export_plain(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    tensor_of: Callable[[str], Tensor],
    dtype: torch.dtype,
    texts: dict[str, str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    progress: Callable[[int], None] | None = None,
    finished: Callable[[Path], None] | None = None,
) -> None:
    """Write safetensors files of parameters by our names, and `texts` by file name; otherwise as `export`."""
    with new_folder(Path(folder)) as temporary:
        parts: Parts = {name: {name: Place(name, shape, shape)} for name, shape in shapes.items()}
        dtypes = dict.fromkeys(parts, dtype)
        _write_weights(temporary, parts, tensor_of, dtypes, max_shard_bytes, progress, finished)
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `folder` once written, so that it appears complete or not at all.

    Raises ConfigError if `folder` exists and is not empty, or cannot be written.
    """
    temporary = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} exists and is not empty, so an export would mix with what is there; name a new folder."
            )
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            _flush(path)
        os.replace(temporary, folder)
    except StorageError:  # of reads meanwhile, or of the files' destination
        raise
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} cannot be written ({error}), so nothing was exported; free space or name a folder that you may "
            "write to."
        ) from error
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def _write_weights(
    folder: Path,
    parts: Parts,
    tensor_of: Callable[[str], Tensor],
    dtypes: Dtypes,
    max_shard_bytes: int,
    progress: Callable[[int], None] | None,
    finished: Callable[[Path], None] | None,
) -> None:
    tensor_of = _asked_once(tensor_of)
    stored = {theirs: next(iter(held.values())).stored for theirs, held in parts.items()}
    shards = plan_shards(stored, dtypes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        held = {theirs: parts[theirs] for theirs in names}
        total_bytes += _write_file(folder / file, held, tensor_of, dtypes, progress)
        if finished is not None:
            finished(folder / file)
        weight_map |= dict.fromkeys(held, file)
    if len(shards) > 1:
        _write_json(folder / _INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _write_file(
    path: Path,
    tensors: Parts,
    tensor_of: Callable[[str], Tensor],
    dtypes: Dtypes,
    progress: Callable[[int], None] | None,
) -> int:
    """Write a safetensors file and return the bytes of its tensors. `tensors`: name in the file -> places of our
    parameters in it.

    The library's function needs all tensors in memory at once.
    """
    called = {dtype: name for name, dtype in STORED_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for theirs, parts in tensors.items():
        shape = next(iter(parts.values())).stored
        stop = at + math.prod(shape) * dtypes[theirs].itemsize
        header[theirs] = {"dtype": called[dtypes[theirs]], "shape": shape, "data_offsets": [at, stop]}
        at = stop
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the tensors begin at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for theirs, parts in tensors.items():
            dtype = dtypes[theirs]
            flat = _whole_tensor(parts, tensor_of, dtype)
            for part in flat.split(_CHUNK_ELEMENTS):
                file.write(part.to(device="cpu", dtype=dtype).contiguous().view(torch.uint8).numpy().data)
            if progress is not None:
                progress(flat.numel() * dtype.itemsize)
    return at


def _asked_once(tensor_of: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """`tensor_of` that keeps the last tensor: what it stacks is written to one tensor of the folder after another."""
    last: tuple[str, Tensor] | None = None

    def keep(name: str) -> Tensor:
        nonlocal last
        if last is None or last[0] != name:
            last = None  # not two at a time
            last = name, tensor_of(name)
        return last[1]

    return keep


def _whole_tensor(
    parts: Mapping[str, Place | Matrix], tensor_of: Callable[[str], Tensor], dtype: torch.dtype
) -> Tensor:
    """Assemble a tensor of the folder from our parameters, flat."""
    whole = None
    for name, place in parts.items():
        flat = tensor_of(name).detach().reshape(-1)
        if isinstance(place, Matrix):
            return flat[place.start : place.start + math.prod(place.stored)]
        assert flat.numel() == math.prod(place.shape), (name, tuple(flat.shape), place.shape)
        if place.alone:
            return flat
        whole = torch.empty(place.stored, dtype=dtype) if whole is None else whole
        into = place.find_in(whole)
        into.copy_(flat.view(into.shape))
    assert whole is not None
    return whole.view(-1)


def copy_tokenizer(tokenizer_folder: Path | None, folder: Path) -> None:
    """Copy the files of a tokenizer, if any."""
    for name in TOKENIZER_FILES:
        if tokenizer_folder is not None and (Path(tokenizer_folder) / name).is_file():
            shutil.copyfile(Path(tokenizer_folder) / name, folder / name)


def _write_generation_config(folder: Path, config: dict[str, Any]) -> None:
    if "eos_token_id" in config and not (folder / "generation_config.json").exists():  # BERT does not generate text
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config[name] is not None}
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
