"""A Hugging Face folder written tensor by tensor: weights, config.json and tokenizer."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from phalanx.core.errors import ConfigError, StorageError
from phalanx.core.run_paths import TOKENIZER_FILES
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.hf_config import config_from_spec
from phalanx.models.hf_weights import STORED_DTYPES
from phalanx.models.llama import Llama
from phalanx.models.model import Architecture
from phalanx.models.user_model import hf_name, shapes_of

_INDEX = "model.safetensors.index.json"
_CHUNK_ELEMENTS = 1 << 20  # rounded and written at a time, so that no tensor is in memory twice


def plan_shards(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, max_shard_bytes: int) -> list[list[str]]:
    """The names of `shapes` file by file, in order, so that no file of several tensors exceeds `max_shard_bytes`."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = dtype.itemsize * math.prod(shape)
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
    """Writes a folder that transformers' class for its config.json and `AutoTokenizer` load; one tensor is in memory.

    `tensor_of(our_name)` gives a parameter, flat or shaped, in any dtype and on any device; it is asked once for
    each, in order, and may use the memory of the one before again. `progress` gets the bytes of each tensor as it is
    done,
    `finished` each file of weights, which it may take away. Tokenizer files, and a generation_config.json, are copied
    from `tokenizer_folder`. The folder appears complete or not at all. Raises ConfigError if it exists and is not
    empty, or cannot be written, or if a class of one's own names no parameter there.
    """
    config = config_from_spec(spec, dtype, original_config, bos_id, eos_id, model_class.hf_config)
    shapes = {name: (hf_name(name, model_class), shape) for name, shape in shapes_of(model_class, spec).items()}
    with new_folder(Path(folder)) as temporary:
        _write_weights(temporary, shapes, tensor_of, dtype, max_shard_bytes, progress, finished)
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
    """Writes safetensors files of parameters by their own names, and `texts` by the names of their files; all else is
    as in `export`."""
    with new_folder(Path(folder)) as temporary:
        named = {name: (name, shape) for name, shape in shapes.items()}
        _write_weights(temporary, named, tensor_of, dtype, max_shard_bytes, progress, finished)
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when all is written to it, so that it appears complete or not at all.

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
        for path in temporary.iterdir():
            _flush(path)
        os.replace(temporary, folder)
    except StorageError:  # of what is read meanwhile, or of where the files go from here
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
    parameters: dict[str, tuple[str, tuple[int, ...]]],
    tensor_of: Callable[[str], Tensor],
    dtype: torch.dtype,
    max_shard_bytes: int,
    progress: Callable[[int], None] | None,
    finished: Callable[[Path], None] | None,
) -> None:
    """`parameters`: our name -> the name there and the shape."""
    shards = plan_shards({name: shape for name, (_, shape) in parameters.items()}, dtype, max_shard_bytes)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        held = {parameters[name][0]: (name, parameters[name][1]) for name in names}
        total_bytes += _write_file(folder / file, held, tensor_of, dtype, progress)
        if finished is not None:
            finished(folder / file)
        weight_map |= dict.fromkeys(held, file)
    if len(shards) > 1:
        _write_json(folder / _INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _write_file(
    path: Path,
    parameters: dict[str, tuple[str, tuple[int, ...]]],
    tensor_of: Callable[[str], Tensor],
    dtype: torch.dtype,
    progress: Callable[[int], None] | None,
) -> int:
    """Write a safetensors file and return the bytes of its tensors. `parameters`: the name there -> ours and the shape.

    The library's own function wants all of them in memory at once.
    """
    called = next(name for name, known in STORED_DTYPES.items() if known == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for theirs, (_, shape) in parameters.items():
        stop = at + math.prod(shape) * dtype.itemsize
        header[theirs] = {"dtype": called, "shape": shape, "data_offsets": [at, stop]}
        at = stop
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the tensors begin at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, shape in parameters.values():
            flat = tensor_of(name).detach().reshape(-1)
            assert flat.numel() == math.prod(shape), (name, tuple(flat.shape), shape)
            for part in flat.split(_CHUNK_ELEMENTS):
                file.write(part.to(device="cpu", dtype=dtype).contiguous().view(torch.uint8).numpy().data)
            if progress is not None:
                progress(flat.numel() * dtype.itemsize)
    return at


def copy_tokenizer(tokenizer_folder: Path | None, folder: Path) -> None:
    """Copy the files of a tokenizer, as far as there are any."""
    for name in TOKENIZER_FILES:
        if tokenizer_folder is not None and (Path(tokenizer_folder) / name).is_file():
            shutil.copyfile(Path(tokenizer_folder) / name, folder / name)


def _write_generation_config(folder: Path, config: dict[str, Any]) -> None:
    if "eos_token_id" in config and not (folder / "generation_config.json").exists():  # BERT writes no text
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
