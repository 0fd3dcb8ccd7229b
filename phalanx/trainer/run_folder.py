"""The run folder: one run at a time, one configuration for good."""

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
from phalanx.core.run_paths import BASE_WEIGHTS, TOKENIZER_FILES, RunPaths
from phalanx.core.version import __version__
from phalanx.data.chat import load_template
from phalanx.data.record_files import TokenFile
from phalanx.storage import local_copies
from phalanx.system import locks

LOCK_TRIES = 100
SETTLE_S = 0.2  # after a lock was taken back from another user
REMOVE_TRIES = 20


@contextlib.contextmanager
def hold_run_folder(paths: RunPaths) -> Iterator[None]:
    """Hold a run folder for this process. One that was made for a start that was then refused is taken away again.

    Raises RunError when the folder is in use or cannot be written.
    """
    lock, created = lock_run_folder(paths)
    try:
        yield
    finally:
        remove_empty_run_folder(paths, created)
        os.close(lock)


@contextlib.contextmanager
def report_disk_errors(paths: RunPaths) -> Iterator[None]:
    """Turn what a disk refuses into a RunError that names the run folder."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the run folder {paths.root} cannot be written ({error.strerror or error}); free space there, change its "
            "rights, or choose another with --run-dir"
        ) from None


def lock_run_folder(paths: RunPaths, holder: int | None = None) -> tuple[int, bool]:
    """Create the run folder if need be and lock it for this process, or in the name of another one, its `holder`.

    Returns the lock's descriptor, which keeps it, and whether the folder is new. Raises RunError when the folder is in
    use, cannot be written, was written by a later release, or has links that lead out of it.
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
                continue  # a start that was refused took its folder away in between
            raise RunError(
                f"the run folder {paths.root} cannot be written ({error.strerror}); choose another with --run-dir"
            ) from None
        strangers = _try_lock(lock, paths)
        if taken_back and not strangers:  # another start may have taken it back in the same moment, and this file away
            time.sleep(SETTLE_S)
        taken_back = taken_back or strangers
        if not strangers and _is_at(lock, paths.lock):
            break
        os.close(lock)  # whoever held it before took the file away: another process may lock a new one
    else:
        raise RunError(
            f"the lock {paths.lock} was taken away again and again by other starts; wait for them or choose another "
            "--run-dir"
        )
    try:
        with report_disk_errors(paths):
            os.fchmod(lock, 0o600)  # earlier versions let everybody open it, and who can may lock it
            os.truncate(lock, 0)
            os.write(lock, f"{holder or os.getpid()} on {platform.node()}\n".encode())
    except RunError:
        remove_empty_run_folder(paths, created)
        os.close(lock)
        raise
    return lock, created


def _make(folder: Path) -> bool:
    """Make a folder with its parents; False where it exists."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return True


def _try_lock(lock: int, paths: RunPaths) -> bool:
    """Raises RunError where a process of this user holds a lock, which is closed then. What only another user's holds,
    who has opened it when that was allowed, is no lock of a run: the file is taken away, and True returned."""
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
    by = f"another process than the one that it names ({holder}), which has ended" if gone else f"process {holder}"
    raise RunError(
        f"the run folder {paths.display_name} is in use by {by}; wait for it, stop it"
        + (f" (`fuser -v {paths.lock}` says which it is)" if gone else "")
        + ", or choose another --run-dir"
    )


def _is_at(lock: int, path: Path) -> bool:
    """Whether an open file is the one that a path leads to."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except OSError:
        return False


def read_run_config(paths: RunPaths) -> Config | None:
    """The resolved configuration of the run that the folder holds, or None when it holds none.

    A run that ended before its first step has nothing to go on with: its recipe may still be mended.
    """
    if not paths.has_checkpoints.exists() and not paths.metrics.exists():
        return None
    if not paths.config.exists():
        if paths.has_checkpoints.exists():
            raise RunError(
                f"the run folder {paths.display_name} has checkpoints but no {paths.config.name} to say whose they "
                "are; restore that file or choose another --run-dir"
            )
        return None
    format_versions.check_run_version(
        paths
    )  # of a run at a URL, whose records have only come after the folder was opened
    return load.load_saved_recipe(paths.config)


def next_attempt(paths: RunPaths) -> int:
    """One more than the last attempt that left a trace; of a run at a URL one that left nothing but logs here, since it
    was killed before its records were copied and another machine went on."""
    traces = [*_numbers(read_events(paths.events), "attempt"), *_numbers(read_lines(paths.metrics), "attempt")]
    traces += paths.list_logged_attempts()
    return 1 + max(traces, default=0)


def last_devices(paths: RunPaths) -> tuple[Any, Any] | None:
    """How many ranks the last start had and on what devices; None before the first."""
    starts = [event for event in read_events(paths.events) if event.get("kind") == EventKind.RUN_STARTED]
    return (starts[-1].get("world"), starts[-1].get("device_names")) if starts else None


def find_final_step(paths: RunPaths) -> int | None:
    """The last step of a run that came to its end, or None."""
    finished = (event for event in read_events(paths.events) if event.get("kind") == EventKind.FINISHED)
    return max(_numbers(finished, "step"), default=None)


def _numbers(records: Iterable[dict[str, Any]], key: str) -> list[int]:
    """The values of a key, where they are whole numbers: a line may have come from anywhere."""
    return [record[key] for record in records if type(record.get(key)) is int]


def fingerprint_tokens(file: TokenFile) -> dict[str, Any]:
    """What a token set is known by."""
    return {"tokens": file.tokens, "crc32": file.checksum}


def check_run_data(paths: RunPaths, data: dict[str, dict[str, Any]], resuming: bool, base: str | None = None) -> None:
    """Note what a new run is trained on, or raise RunError when a run that goes on would not find the same.

    `data` says by name what each set is known by; `base` is the fingerprint of the frozen weights of a run that trains
    adapters, which must stay the same too.
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
            f"{paths.data} does not say what the run is trained on, so nobody can tell whether the data has changed; "
            "restore it or choose another --run-dir"
        )
    changed = [name for name in now if then.get(name) != now[name]]
    if BASE_WEIGHTS in changed:
        raise RunError(
            f"the weights in model.from_hf have changed since the run in {paths.display_name} began, and its "
            "checkpoints hold only what was trained beside them; restore that folder, or choose another --run-dir"
        )
    if changed:
        own = "samples" in now[changed[0]]
        what, where = ("samples", "what it reads") if own else ("tokens", "data.source and the tokenizer")
        raise RunError(
            f"the data of the run in {paths.display_name} has changed since it began ({' and '.join(changed)} {what} "
            f"differ), so its curve could not go on; restore {where}, or choose another --run-dir"
        )


def check_run_code(paths: RunPaths, config: Config, resuming: bool) -> None:
    """Raises RunError when a run that goes on would not find the model's or task's code that it began with."""
    for key, code, kept in _codes(paths, config):
        then = kept.read_text(encoding="utf-8") if kept.is_file() else None
        if resuming and then != _code(code):
            raise RunError(
                f"{key} {code} is not what the run in {paths.display_name} began with (its {kept.name}"
                f"{' is gone' if then is None else ''}), so its curve could not go on; restore the file, or choose "
                f"another --run-dir, or copy it to {paths.display_name}/{kept.name} if what has changed in it changes "
                "nothing that is computed"
            )


def _codes(paths: RunPaths, config: Config) -> list[tuple[str, str, Path]]:
    """Files of the user's that the run needs: the key, its value, and where the copy is."""
    found = [("model.code", config.model.code, paths.model_code), ("task.code", config.task.code, paths.task_code)]
    return [(key, code, kept) for key, code, kept in found if code is not None]


def _code(path: str) -> str:
    return Path(path).expanduser().read_text(encoding="utf-8")


def remove_empty_run_folder(paths: RunPaths, created: bool) -> None:
    """Take the lock out of a run folder that holds nothing else, and the folder itself where this start `created` it.

    For a start that was refused; only its holder may take a lock away. Never raises: the refusal has more to say.
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
        except OSError:  # another node has put a file there for a moment, to see what is new
            time.sleep(0.01)


def write_start(paths: RunPaths, config: Config, tokenizer: Path | str | None) -> None:
    """Write what makes the run repeatable: configuration, versions, tokenizer, code of the user's."""
    write_atomic(paths.config, load.render_saved_recipe(config))
    write_atomic(
        paths.versions, json.dumps({format_versions.KEY: format_versions.RUN_FOLDER, **_versions()}, indent=2) + "\n"
    )
    for _, code, kept in _codes(paths, config):
        write_atomic(kept, _code(code))
    if config.callback.code is not None:  # no part of what is computed: it may be another at the next start
        write_atomic(paths.callback_code, _code(config.callback.code))
    if tokenizer is None:
        return
    paths.tokenizer.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (Path(tokenizer) / name).is_file():
            shutil.copyfile(Path(tokenizer) / name, paths.tokenizer / name)
    if (template := load_template(config.data.chat_template)) is not None:  # what it was tuned with is asked with
        write_atomic(paths.tokenizer / "chat_template.jinja", template)
    if config.model.from_hf:
        # Atomic, as ranks that something else started may read it already.
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
