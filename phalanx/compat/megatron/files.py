"""The files of a Megatron checkpoint: found, and read without running anything that they hold."""

import argparse
import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.core.errors import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_dp_000)?")
# Names in a pickle for which an empty shell stands in, so that nothing of theirs is looked up, let alone called: enums
# of Megatron's in its arguments, the state of random generators, and what kernels keep.
_SHELLS = re.compile(
    r"(megatron|transformer_engine)\..+|_io\.BytesIO|_codecs\.encode|"
    r"numpy\.(dtype|ndarray|(_)?core\.multiarray\.(_reconstruct|scalar)|dtypes\.\w+)"
)
_NAMESPACES = {"argparse.Namespace": argparse.Namespace, "types.SimpleNamespace": types.SimpleNamespace}
_PLAIN = bool | int | float | str | None
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


class _Shell:
    """Takes whatever an object is made of, and is nothing."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __new__(cls, *_: Any) -> "_Shell":
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        return


@dataclass(frozen=True)
class RankFile:
    """One rank's file: `args` (None: not stored) and the tensors of each of its virtual stages by their whole names."""

    args: dict[str, Any] | None
    iteration: int | None
    chunks: list[dict[str, Tensor]]


def rank_files(folder: Path) -> list[list[Path]]:
    """The files of a checkpoint, by pipeline rank and tensor rank. Raises ConfigError if one of them is missing."""
    folder = _iteration_folder(folder)
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
                f"{path} is no folder of a tensor and a pipeline rank, but of experts, say, which a LLaMA does not "
                "have; use a checkpoint of a LLaMA."
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
                    f"{folder} lacks {name}/{MODEL_FILES[0]}, though there are {ranks} tensor and {stages} pipeline "
                    "ranks; fetch all mp_rank folders of the checkpoint."
                )
    return [[found[stage, rank] for rank in range(ranks)] for stage in range(stages)]


def _iteration_folder(folder: Path) -> Path:
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
            f"{folder} is in Megatron-core's distributed format (torch_dist), which is not read here; save it once "
            "with Megatron's own ckpt-convert-format torch."
        )
    return ConfigError(
        f"{folder} holds no mp_rank_00/{MODEL_FILES[0]}, so there is no Megatron checkpoint; name the folder with "
        f"{TRACKER}, or one of its iterations."
    )


def read_file(path: Path) -> RankFile:
    """Tensors (mapped, where the file is new enough) and arguments. Raises ConfigError for a damaged or unsafe file."""
    try:
        content = _load(path)
    except ConfigError:
        raise
    except Exception as error:  # whatever a file that is none makes of the unpickler
        text = " ".join(str(error).split())
        asked = re.search(r"GLOBAL (\S+)", text)  # torch says at length what else could be done, and this last
        reason = f"it asks for {asked[1]}" if asked else text.partition(". ")[0][:200]
        raise ConfigError(
            f"{path} cannot be read as plain weights ({type(error).__name__}: {reason}); fetch the file again, or save "
            "it without other objects."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no dictionary, so it is no Megatron checkpoint; fetch the file again.")
    version = content.get("checkpoint_version", 3.0)
    if not isinstance(version, int | float) or version < 2:
        raise ConfigError(
            f"{path} has checkpoint_version {version!r}, in which queries, keys and values lie in an order of its own; "
            "save it once with a Megatron-LM that writes version 3.0."
        )
    names = ["model"] if "model" in content else []
    while f"model{len(names)}" in content and names != ["model"]:
        names.append(f"model{len(names)}")
    if not names:
        raise ConfigError(f"{path} holds no model (no key model or model0); name a checkpoint with weights.")
    chunks = [dict(_flat(content[name], "", path)) for name in names]
    args, iteration = content.get("args"), content.get("iteration")
    given = None
    if isinstance(args, argparse.Namespace | types.SimpleNamespace):
        given = {name: value if isinstance(value, _PLAIN) else "an object" for name, value in vars(args).items()}
    return RankFile(given, iteration if isinstance(iteration, int) else None, chunks)


def _load(path: Path) -> Any:
    """Nothing but tensors, plain values and namespaces comes out; any name that is not known is refused by torch."""
    shells: list[Any] = [(known, name) for name, known in _NAMESPACES.items()]
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        mapped = True
    except ValueError:  # from before torch 1.6: no archive of files, and so nothing to map
        names, mapped = list(_OLD_SHELLS), False
    foreign = [name for name in names if name not in _NAMESPACES and not _SHELLS.fullmatch(name)]
    if foreign:
        raise ConfigError(
            f"{path} asks for {foreign[0]}, which is no part of weights and could run code, so that it was not read; "
            "save the checkpoint without it, where you trust it."
        )
    shells += [(_Shell, name) for name in names if _SHELLS.fullmatch(name)]
    with torch.serialization.safe_globals(shells):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _flat(tree: Any, prefix: str, path: Path) -> list[tuple[str, Tensor]]:
    """Tensors of nested dictionaries by their names joined with dots, without the wrappers' `module`."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no dictionary under {prefix or 'model'}; fetch the file again.")
    found: list[tuple[str, Tensor]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}".removeprefix("module.")
        if isinstance(value, dict):
            found += _flat(value, f"{name}.", path)
        elif isinstance(value, Tensor):
            found.append((name, value))
        elif value is not None and not isinstance(value, _Shell):
            raise ConfigError(f"{path} holds {name}, which is no tensor; fetch the file again.")
    return found
