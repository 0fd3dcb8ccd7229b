"""The run folder: one run at a time, one configuration for good."""

import fcntl
import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import phalanx
from phalanx import recipe
from phalanx.config import Config
from phalanx.errors import RunError
from phalanx.records import Kind, RunPaths, read_lines, write_atomic

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def open_folder(paths: RunPaths) -> int:
    """Create the run folder if need be and lock it for this process; returns the lock's descriptor, which keeps it.

    Raises RunError when the folder is in use or cannot be written.
    """
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunError(
            f"the run folder {paths.root} cannot be written ({error.strerror}); choose another with --run-dir"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(lock, 64).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise RunError(
            f"the run folder {paths.root} is in use by process {holder}; wait for it, stop it, "
            "or choose another --run-dir"
        ) from None
    os.truncate(lock, 0)
    os.write(lock, f"{os.getpid()} on {platform.node()}\n".encode())
    return lock


def saved_config(paths: RunPaths) -> Config | None:
    """The resolved configuration of the run that the folder holds, or None when it holds none."""
    if not paths.config.exists():
        if paths.checkpoints.exists():
            raise RunError(
                f"the run folder {paths.root} has checkpoints but no {paths.config.name} to say whose they are; "
                "restore that file or choose another --run-dir"
            )
        return None
    return recipe.load(paths.config)


def next_attempt(paths: RunPaths) -> int:
    """One more than the last attempt that left a trace."""
    return 1 + max((int(event.get("attempt", 0)) for event in read_lines(paths.events)), default=0)


def finished_step(paths: RunPaths) -> int | None:
    """The last step of a run that came to its end, or None."""
    steps = [int(event["step"]) for event in read_lines(paths.events) if event.get("kind") == Kind.FINISHED]
    return max(steps, default=None)


def write_start(paths: RunPaths, config: Config, tokenizer: Path) -> None:
    """Write what makes the run repeatable: configuration, versions, tokenizer. Raises RunError if that fails."""
    try:
        write_atomic(paths.config, recipe.to_yaml(config))
        write_atomic(paths.versions, json.dumps(_versions(), indent=2) + "\n")
        paths.tokenizer.mkdir(exist_ok=True)
        for name in COPIED:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, paths.tokenizer / name)
        if config.model.from_hf:
            shutil.copyfile(Path(config.model.from_hf).expanduser() / "config.json", paths.hf_config)
    except OSError as error:
        raise RunError(
            f"the run folder {paths.root} cannot be written ({error}); free space or change its rights"
        ) from None


def _versions() -> dict[str, str]:
    found = {"phalanx": phalanx.__version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "numpy", "tokenizers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
