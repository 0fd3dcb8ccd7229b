"""From a run's newest checkpoint to a Hugging Face folder, tensor by tensor."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch

from phalanx.checkpoint.read import Checkpoint, newest_valid
from phalanx.config import Config
from phalanx.errors import CheckpointError, ConfigError, RunError
from phalanx.models import hf
from phalanx.models.spec import parameter_count
from phalanx.parallel.apply import DTYPES
from phalanx.records import Kind, RunPaths, write_event
from phalanx.train.build import spec_from_run
from phalanx.train.folder import next_attempt, saved_config

EXPORT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def export_run(
    paths: RunPaths,
    folder: Path,
    dtype: str | None,
    progress: Callable[[int, int], None] | None = None,
    note: bool = True,
) -> int:
    """Write the newest valid checkpoint of a run as a Hugging Face folder; returns its step.

    `dtype`: bf16, fp16, fp32 or fp64; None: that of the folder the run started from, else the recipe's compute type.
    `progress(done, total)` in bytes; `note` leaves an event in the run's records. At most one output shard is in
    memory. Raises RunError when `paths` holds no run, CheckpointError when it has no checkpoint to export.
    """
    config = saved_config(paths)
    if config is None:
        raise RunError(f"{paths.root} holds no run (it has no {paths.config.name}); name a run folder")
    original = hf.read_config(paths.hf_config.parent) if config.model.from_hf else None
    spec = spec_from_run(config, paths)
    out_dtype = EXPORT_DTYPES[dtype] if dtype is not None else _natural_dtype(config)
    refused: list[str] = []
    checkpoint = newest_valid(paths.checkpoints, None, lambda kind, details: refused.append(details["reason"]))
    if checkpoint is None:
        why = f" ({refused[0]})" if refused else ""
        raise CheckpointError(f"{paths.root} has no usable checkpoint to export{why}; train it first")
    total = parameter_count(spec) * out_dtype.itemsize
    done = 0

    def report(count_bytes: int) -> None:
        nonlocal done
        done += count_bytes
        if progress is not None:
            progress(done, total)

    ids = _special_ids(paths.tokenizer)
    hf.export(
        folder,
        spec,
        lambda name: _read(checkpoint, name),
        out_dtype,
        original_config=original,
        tokenizer_folder=paths.tokenizer,
        bos_id=ids.get("bos"),
        eos_id=ids.get("eos"),
        progress=report,
    )
    step = int(checkpoint.header["step"])
    checkpoint.close()
    if note:
        write_event(paths.events, Kind.EXPORTED, max(1, next_attempt(paths) - 1), folder=str(folder), step=step)
    return step


def _natural_dtype(config: Config) -> torch.dtype:
    """What the weights were imported as, else the compute type."""
    if not config.model.from_hf:
        return DTYPES[config.train.dtype]
    folder = Path(config.model.from_hf).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"model.from_hf {folder} is gone, so nobody knows in which dtype it stored its weights; choose one with "
            f"--dtype {'|'.join(EXPORT_DTYPES)}"
        )
    return hf.Weights(folder).dtype()


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    shape, dtype = checkpoint.parameters[name]
    out = torch.empty(math.prod(shape), dtype=getattr(torch, dtype))
    checkpoint.read(name, "param", 0, out.numel(), out)
    return out


def _special_ids(tokenizer: Path) -> dict[str, int]:
    """Ids of the beginning and end of a text, as far as the run's tokenizer names them."""
    try:
        config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
        added = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        tokens = {entry["content"]: int(entry["id"]) for entry in added}
        named = {key: config.get(f"{key}_token") for key in ("bos", "eos")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    ids = {}
    for key, token in named.items():
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in tokens:
            ids[key] = tokens[text]
    return ids
