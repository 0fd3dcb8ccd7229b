"""The run folder: one run at a time, with one fixed configuration."""

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.core import format_versions
from phalanx.core.errors import RunError
from phalanx.core.json_lines import read_lines, write_atomic
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import BASE_WEIGHTS, IMPORTED, TOKENIZER_FILES, RunPaths
from phalanx.core.user_code import split_reference
from phalanx.core.version import __version__
from phalanx.data.chat import load_template
from phalanx.data.record_files import TokenFile
from phalanx.storage import local_copies
from phalanx.system import locks

LOCK_TRIES = 100
SETTLE_S = 0.2  # wait after taking a lock back from another user
REMOVE_TRIES = 20


@contextlib.contextmanager
def hold_run_folder(paths: RunPaths) -> Iterator[None]:
    """Hold a run folder for this process; if the start is refused, a folder created for it is removed. Raises
    RunError if the folder is in use or cannot be written.
    """
    lock, created = lock_run_folder(paths)
    try:
        yield
    finally:
        remove_empty_run_folder(paths, created)
        os.close(lock)


@contextlib.contextmanager
def report_disk_errors(paths: RunPaths) -> Iterator[None]:
    """Turn disk errors into a RunError that names the run folder."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the run folder {paths.root} cannot be written ({error.strerror or error}); free space there, change "
            "its permissions, or choose another with --run-dir"
        ) from None


def lock_run_folder(paths: RunPaths, holder: int | None = None) -> tuple[int, bool]:
    """Create the run folder if necessary and lock it, for this process or in the name of its `holder`. Returns the
    lock's descriptor, which must stay open, and whether the folder is new. Raises RunError if the folder is in use,
    cannot be written, was written by a later release, or has links that lead out of it.
    """
    locks.check_symlinks(paths)
    format_versions.check_run_version(paths)
    created = taken_back = False
    for _ in range(LOCK_TRIES):
        made = False
        try:
            created = _make(paths.root) or created
            made = True
            lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if made and isinstance(error, FileNotFoundError) and not paths.root.exists():
                continue  # a refused start has removed its folder meanwhile
            raise RunError(
                f"the run folder {paths.root} cannot be written ({error.strerror}); choose another with --run-dir"
            ) from None
        strangers = _try_lock(lock, paths)
        if taken_back and not strangers:  # another start may have taken it back at the same time and removed this file
            time.sleep(SETTLE_S)
        taken_back = taken_back or strangers
        if not strangers and _is_at(lock, paths.lock):
            break
        os.close(lock)  # an earlier holder removed the file: another process may lock a new one
    else:
        raise RunError(
            f"the lock {paths.lock} was repeatedly taken by other starts; wait for them or choose another --run-dir"
        )
    try:
        with report_disk_errors(paths):
            os.fchmod(lock, 0o600)  # earlier versions let every user open it, and whoever can open it can lock it
            os.truncate(lock, 0)
            os.write(lock, f"{holder or os.getpid()} on {platform.node()}\n".encode())
    except RunError:
        remove_empty_run_folder(paths, created)
        os.close(lock)
        raise
    return lock, created


def _make(folder: Path) -> bool:
    """Create a folder with its parents; False if it exists."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return True


def _try_lock(lock: int, paths: RunPaths) -> bool:
    """Lock a run folder's file; returns False. If only another user holds the lock, who opened it while that was
    permitted, the file is removed, and True returned. Raises RunError if a process of this user holds it; the
    descriptor is then closed."""
    if locks.try_lock(lock):
        return False
    if locks.is_locked_by_other_users(lock):
        if _is_at(lock, paths.lock):
            paths.lock.unlink()
        return True
    holder = os.read(lock, 64).decode(errors="replace").strip() or "unknown"
    os.close(lock)
    pid, _, host = holder.partition(" on ")
    gone = host == platform.node() and pid.isdecimal() and not Path("/proc", pid).exists()
    by = f"a process other than the one it names ({holder}), which has ended" if gone else f"process {holder}"
    raise RunError(
        f"the run folder {paths.display_name} is in use by {by}; wait for it, stop it"
        + (f" (`fuser -v {paths.lock}` shows which)" if gone else "")
        + ", or choose another --run-dir"
    )


def _is_at(lock: int, path: Path) -> bool:
    """Whether a descriptor and a path refer to the same file."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except OSError:
        return False


def read_run_config(paths: RunPaths) -> Config | None:
    """The resolved configuration of the run in the folder, or None without a run. A run that ended before its
    first step has nothing to resume, so its recipe may still change.
    """
    if not paths.has_checkpoints.exists() and not paths.metrics.exists():
        return None
    if not paths.config.exists():
        imported = (paths.root / IMPORTED).exists() and not paths.metrics.exists()  # no run has begun yet
        if paths.has_checkpoints.exists() and not imported:
            raise RunError(
                f"the run folder {paths.display_name} has checkpoints but no {paths.config.name}, so the run they "
                "belong to is unknown; restore that file or choose another --run-dir"
            )
        return None
    format_versions.check_run_version(paths)  # for a run at a URL, whose records arrived after the folder was opened
    return load.load_saved_recipe(paths.config)


def next_attempt(paths: RunPaths) -> int:
    """The next attempt number. For a run at a URL, an attempt may have left only local logs, if it was killed
    before its records were copied and another machine continued."""
    traces = [*_numbers(read_events(paths.events), "attempt"), *_numbers(read_lines(paths.metrics), "attempt")]
    traces += paths.list_logged_attempts()
    return 1 + max(traces, default=0)


def last_devices(paths: RunPaths) -> tuple[Any, Any] | None:
    """Number of ranks of the last start and their devices; None before the first."""
    starts = [event for event in read_events(paths.events) if event.get("kind") == EventKind.RUN_STARTED]
    return (starts[-1].get("world"), starts[-1].get("device_names")) if starts else None


def find_final_step(paths: RunPaths) -> int | None:
    """The last step of a finished run, or None."""
    finished = (event for event in read_events(paths.events) if event.get("kind") == EventKind.FINISHED)
    return max(_numbers(finished, "step"), default=None)


def _numbers(records: Iterable[dict[str, Any]], key: str) -> list[int]:
    """The integer values of a key; other types are ignored, as records are not trusted."""
    return [record[key] for record in records if type(record.get(key)) is int]


def fingerprint_tokens(file: TokenFile) -> dict[str, Any]:
    """Fingerprint of a token set."""
    return {"tokens": file.tokens, "crc32": file.checksum}


def check_run_data(paths: RunPaths, data: dict[str, dict[str, Any]], resuming: bool, base: str | None = None) -> None:
    """Record the data of a new run, or raise RunError if a resumed run would not find the same data.

    `data` has the fingerprint of each set by name; `base` is the fingerprint of the frozen weights of a run that trains
    adapters, which must not change either.
    """
    now = dict(data)
    if base is not None:
        now[BASE_WEIGHTS] = {"sha256": base}
    if not resuming:
        write_atomic(paths.data, json.dumps(now, indent=2) + "\n")
        return
    try:
        then = json.loads(paths.data.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{paths.data} cannot be read ({error}); restore it or choose another --run-dir") from None
    if not isinstance(then, dict) or any(not isinstance(then.get(name), dict) for name in now):
        raise RunError(
            f"{paths.data} does not say what the run is trained on, so changes of the data cannot be detected; "
            "restore it or choose another --run-dir"
        )
    changed = [name for name in now if then.get(name) != now[name]]
    if BASE_WEIGHTS in changed:
        raise RunError(
            f"the weights in model.from_hf have changed since the run in {paths.display_name} began, and its "
            "checkpoints hold only the weights trained beside them; restore that folder, or choose another --run-dir"
        )
    if changed:
        own = "samples" in now[changed[0]]
        what, where = ("samples", "what it reads") if own else ("tokens", "data.source and the tokenizer")
        raise RunError(
            f"the data of the run in {paths.display_name} has changed since it began ({' and '.join(changed)} {what} "
            f"differ), so its loss curve could not continue; restore {where}, or choose another --run-dir"
        )


def check_run_code(paths: RunPaths, config: Config, resuming: bool) -> None:
    """Raises RunError if a resumed run would not find the model's or task's code that it began with."""
    for key, code, kept in _codes(paths, config):
        then = kept.read_text(encoding="utf-8") if kept.is_file() else None
        if resuming and then != _code(code):
            raise RunError(
                f"{key} {code} is not what the run in {paths.display_name} began with (its "
                f"{kept.name}{' is gone' if then is None else ''}), so its loss curve could not continue; restore "
                f"the file, or choose another --run-dir, or copy it to {paths.display_name}/{kept.name} if its "
                "changes do not affect the computation"
            )


def _codes(paths: RunPaths, config: Config) -> list[tuple[str, str, Path]]:
    """The user's files that the run needs: key, file, and path of the copy."""
    found = [("model.code", config.model.code, paths.model_code), ("task.code", config.task.code, paths.task_code)]
    for key, value, kept in _references(paths, config):
        found.append((key, value[0] if value else None, kept))
    return [(key, code, kept) for key, code, kept in found if code is not None]


def _references(paths: RunPaths, config: Config) -> list[tuple[str, tuple[str, str] | None, Path]]:
    """Keys that may name a member of a file: key, file and name if so, and path of the file's copy."""
    optim = config.optim
    return [
        ("optim.name", split_reference(optim.name), paths.optimizer_code),
        ("optim.schedule", split_reference(optim.schedule), paths.schedule_code),
    ]


def use_kept_code(config: Config, paths: RunPaths) -> Config:
    """The configuration with the user's files replaced by the run folder's copies, if there are any."""
    kept = {key: f"{copy}:{value[1]}" for key, value, copy in _references(paths, config) if value and copy.is_file()}
    return load.update_config(config, kept) if kept else config


def _code(path: str) -> str:
    return Path(path).expanduser().read_text(encoding="utf-8")


def remove_empty_run_folder(paths: RunPaths, created: bool) -> None:
    """Remove the lock from a run folder that is otherwise empty, and the folder itself if this start `created` it.
    For a refused start; only the lock's holder may remove it. Never raises, so that the refusal is reported.
    """
    with contextlib.suppress(OSError):
        if os.listdir(paths.root) != [paths.lock.name]:
            return
        paths.lock.unlink()
    for _ in range(REMOVE_TRIES if created else 0):
        try:
            paths.root.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:  # another node has temporarily created a file there, to see changes
            time.sleep(0.01)


def write_start(paths: RunPaths, config: Config, tokenizer: Path | str | None) -> None:
    """Write what makes the run repeatable: configuration, versions, tokenizer, the user's code."""
    write_atomic(paths.config, load.render_saved_recipe(config))
    write_atomic(
        paths.versions, json.dumps({format_versions.KEY: format_versions.RUN_FOLDER, **_versions()}, indent=2) + "\n"
    )
    for _, code, kept in _codes(paths, config):
        write_atomic(kept, _code(code))
    if config.callback.code is not None:  # not part of the computation: it may change at the next start
        write_atomic(paths.callback_code, _code(config.callback.code))
    if tokenizer is None:
        return
    paths.tokenizer.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (Path(tokenizer) / name).is_file():
            shutil.copyfile(Path(tokenizer) / name, paths.tokenizer / name)
    # So that prompts use the template of training
    if (template := load_template(config.data.chat_template)) is not None:
        write_atomic(paths.tokenizer / "chat_template.jinja", template)
    if config.model.from_hf:
        # Atomic, as ranks started by another launcher may be reading it.
        original = local_copies.local_copy_path(config.model.from_hf, config.data.cache) / "config.json"
        write_atomic(paths.hf_config, original.read_text(encoding="utf-8"))


def _versions() -> dict[str, str]:
    found = {"phalanx": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "numpy", "tokenizers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
