"""Files of a Megatron checkpoint, read without running code in them."""

import argparse
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.compat.pickles import Shell, load_pickled
from phalanx.core.errors import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
# Names of what follows from the configuration, or belongs to a kernel and not to the model.
IDLE = re.compile(r"(.*\.)?(_extra_state.*|inv_freq)")
_RANK = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_dp_000)?")


@dataclass(frozen=True)
class LazyTensor:
    """A stored tensor: `load` reads it, or maps it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "LazyTensor":
        """One that is in memory, or mapped."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)


@dataclass(frozen=True)
class RankFile:
    """One rank's file: `args` (None: not stored) and the tensors of each of its virtual stages by their whole names;
    `states` has the optimizer's, by kind (None: not stored)."""

    args: dict[str, Any] | None
    iteration: int | None
    chunks: list[dict[str, LazyTensor]]
    states: dict[str, list[dict[str, LazyTensor]]] | None = None


def rank_files(folder: Path) -> list[list[Path]]:
    """The files of one iteration, by pipeline rank and tensor rank. Raises ConfigError if one of them is missing."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*"), reverse=True):  # plain names win over those with a data-parallel rank
        file = next((path / name for name in MODEL_FILES if (path / name).is_file()), None)
        if file is None:  # the optimizer's, or another data-parallel rank's
            continue
        match = _RANK.fullmatch(path.name)
        if match is None and re.search(r"_dp_\d{3}$", path.name):
            continue
        if match is None:
            raise ConfigError(
                f"{path} is not a folder of a tensor and a pipeline rank (it may hold experts, which LLaMA models do "
                "not have); use a LLaMA checkpoint."
            )
        found[int(match[2] or 0), int(match[1])] = file
    if not found:
        raise _unknown(folder)
    stages, ranks = (1 + max(key[axis] for key in found) for axis in (0, 1))
    for stage in range(stages):
        for rank in range(ranks):
            if (stage, rank) not in found:
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
                raise ConfigError(
                    f"{folder} lacks {name}/{MODEL_FILES[0]}, but there are {ranks} tensor and {stages} pipeline "
                    "ranks; download all mp_rank folders of the checkpoint."
                )
    return [[found[stage, rank] for rank in range(ranks)] for stage in range(stages)]


def find_iteration(folder: Path) -> Path:
    """The folder of the latest iteration of a checkpoint, or `folder` if it is one. Raises ConfigError."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    try:
        word = tracker.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tracker} cannot be read ({error}); name a folder such as iter_0000100 in it.") from error
    if word != "release" and not re.fullmatch(r"[0-9]{1,12}", word):
        raise ConfigError(
            f"{tracker} says {word[:40]!r}, which is neither a number nor release; name a folder such as iter_0000100 "
            "in it."
        )
    return folder / (word if word == "release" else f"iter_{int(word):07d}")


def _unknown(folder: Path) -> ConfigError:
    if (folder / ".metadata").exists() or any(folder.glob("*.distcp")) or any(folder.glob(".zmetadata")):
        return ConfigError(
            f"{folder} holds a distributed checkpoint without common.pt or .metadata, or in the zarr format; download "
            "all files, or save it once with Megatron's ckpt-convert-format torch."
        )
    return ConfigError(
        f"{folder} holds no mp_rank_00/{MODEL_FILES[0]}, so it is not a Megatron checkpoint; name the folder with "
        f"{TRACKER}, or one of its iterations."
    )


def read_file(path: Path) -> RankFile:
    """Tensors (mapped, where the file is new enough) and arguments. Raises ConfigError for a damaged or unsafe file."""
    content = load_pickled(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no dictionary, so it is not a Megatron checkpoint; download the file again.")
    version = content.get("checkpoint_version", 3.0)
    if not isinstance(version, int | float) or version < 2:
        raise ConfigError(
            f"{path} has checkpoint_version {version!r}, which orders queries, keys and values differently; save it "
            "once with a Megatron-LM that writes version 3.0."
        )
    names = ["model"] if "model" in content else []
    while f"model{len(names)}" in content and names != ["model"]:
        names.append(f"model{len(names)}")
    if not names:
        raise ConfigError(f"{path} holds no model (no key model or model0); name a checkpoint with weights.")
    chunks = [{key: LazyTensor.of(found) for key, found in _flat(content[name], "", path)} for name in names]
    iteration = content.get("iteration")
    return RankFile(plain_arguments(content.get("args")), iteration if isinstance(iteration, int) else None, chunks)


def plain_arguments(args: Any) -> dict[str, Any] | None:
    """The plain values of a namespace of arguments; None where it is none."""
    if not isinstance(args, argparse.Namespace | types.SimpleNamespace):
        return None
    return {
        name: value if isinstance(value, bool | int | float | str | None) else "an object"
        for name, value in vars(args).items()
    }


def _flat(tree: Any, prefix: str, path: Path) -> list[tuple[str, Tensor]]:
    """Tensors of nested dictionaries by their names joined with dots, without the wrappers' `module`."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no dictionary under {prefix or 'model'}; download the file again.")
    found: list[tuple[str, Tensor]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}".removeprefix("module.")
        if isinstance(value, dict):
            found += _flat(value, f"{name}.", path)
        elif isinstance(value, Tensor):
            found.append((name, value))
        elif value is not None and not isinstance(value, Shell):
            raise ConfigError(f"{path} holds {name}, which is not a tensor; download the file again.")
    return found
