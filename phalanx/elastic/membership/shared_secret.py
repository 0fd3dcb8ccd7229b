"""The shared secret that authenticates the nodes of a job at a TCP address: that of PHALANX_SECRET, or one in a file of
the user, made by the first node and found by the others.

There is a file for each rendezvous, in a folder in the user's home: nodes on one machine share it, and so do machines
that share the home folder. A file is complete before it has its name. It is trusted only where no other user can have
written or read it, and it stays when a job ends, as nodes of a job may join at any time.
"""

import contextlib
import ctypes
import os
import platform
import pwd
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from phalanx.core.errors import ConfigError

VARIABLE = "PHALANX_SECRET"
LEAST = 16  # characters of one that a user gives
FOLDER = Path(".local/state/phalanx/rendezvous")  # in the user's home
PASSING = ".passing-"  # how the names of files begin that are not complete yet
PASSED_S = 3600.0  # such a file of that age was left by a process that was killed
UNUSED_DAYS = 90  # after which a file is removed
TRIES, PAUSE_S = 20, 0.05  # to read what another node has just made, in a folder that a network file system keeps
_TEXT = re.compile(rb"[0-9a-f]{64}\n")
_REMEDY = f"or set the same {VARIABLE} on all nodes (`export {VARIABLE}=$(openssl rand -hex 32)`)"


def take_from_environment() -> dict[str, str]:
    """Return a copy of this process's environment, and remove the secret from it, also from /proc, for this
    process and those that it forks or starts from now on."""
    before = dict(os.environ)
    if VARIABLE in before:
        del os.environ[VARIABLE]
        _overwrite(VARIABLE.encode() + b"=")
    return before


def _overwrite(name: bytes) -> None:
    """Overwrite the values of a variable, whose name ends in =, in the memory where this process was given it."""
    try:
        told = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(told[47]), int(told[48])  # env_start and env_end, as proc(5) counts, from the third field on
    except (OSError, ValueError, IndexError):
        return
    if not 0 < begin < end:  # the kernel does not say
        return
    at = begin
    for text in ctypes.string_at(begin, end - begin).split(b"\0"):
        if text.startswith(name):
            ctypes.memset(at + len(name), 0, len(text) - len(name))
        at += len(text) + 1


def read_user_secret(environment: Mapping[str, str]) -> str | None:
    """The secret that a user has set; None for none. Raises ConfigError for one that could be guessed."""
    text = environment.get(VARIABLE, "")
    if text and len(text) < LEAST:
        raise ConfigError(
            f"{VARIABLE} has {len(text)} characters and could be guessed; use at least {LEAST}, for example from "
            "`openssl rand -hex 32`"
        )
    return text or None


def file_of(host: str | None, port: int, environment: Mapping[str, str]) -> Path:
    """Path of the secret of a rendezvous; one without a `host` is on loopback, and this machine's alone. Raises
    ConfigError for a user without a home folder."""
    home = environment.get("HOME", "")
    if not home:
        with contextlib.suppress(KeyError):
            home = pwd.getpwuid(os.geteuid()).pw_dir
    if not home.startswith("/"):
        raise ConfigError(f"this user has no home folder for the secret of a rendezvous; set HOME, {_REMEDY}")
    place = f"loopback-{_machine()}" if host is None else re.sub(r"[^0-9a-z.]", "_", host.lower())
    return Path(home) / FOLDER / f"{place}-{port}"


def _machine() -> str:
    """What this machine is known by until it starts again, in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().partition("-")[0].strip()
    except OSError:
        return platform.node()


def load_or_create_secret(file: Path) -> str:
    """The secret in a file, which is made where it is missing. Nodes that come at the same moment find the same one.

    Raises ConfigError for a file, or a folder, that somebody else may have written or can read, and where none can be
    made.
    """
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _open_folder(file.parent) as folder:
            for _ in range(TRIES):
                if (text := _read(file, folder)) is not None:
                    return text
                if _create_secret(file.name, folder):
                    continue
                time.sleep(PAUSE_S)  # another node was faster, and this one may not be shown its file yet
    except OSError as error:
        raise _creation_error(file, error) from None
    raise ConfigError(f"{file} exists but cannot be read; remove it, {_REMEDY}")


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """The folder, which is this user's alone to write, by its descriptor: what its path leads to may change, where
    others can write further up. Raises ConfigError and OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(folder, os.fstat(descriptor), 0o022, "written")
        yield descriptor
    finally:
        os.close(descriptor)


def _read(file: Path, folder: int) -> str | None:
    """Contents of the file; None if it is missing. Raises ConfigError and OSError."""
    try:
        descriptor = os.open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError:  # a link, or not readable: checked below by its metadata, if it exists
        _check(file, os.stat(file.name, dir_fd=folder, follow_symlinks=False), 0o077, "read")
        raise
    try:
        _check(file, os.fstat(descriptor), 0o077, "read")
        text = os.read(descriptor, 4096)
        if not _TEXT.fullmatch(text):
            raise ConfigError(f"{file} is not a rendezvous secret; remove it, {_REMEDY}")
        with contextlib.suppress(OSError):
            os.utime(descriptor)  # it is used
        return text.decode().strip()
    finally:
        os.close(descriptor)


def _check(path: Path, seen: os.stat_result, others: int, what: str) -> None:
    """Raises ConfigError where other users can access a file or folder; `others` are the forbidden permission bits."""
    wrong = None
    if seen.st_uid != os.geteuid():
        wrong = f"belongs to another user (uid {seen.st_uid})"
    elif what == "read" and not stat.S_ISREG(seen.st_mode):
        wrong = "is not a regular file"
    elif seen.st_mode & others:
        wrong = f"may be {what} by others (mode {stat.S_IMODE(seen.st_mode):o})"
    if wrong is not None:
        raise ConfigError(f"{path} {wrong}, so the secret of the rendezvous is not stored there; remove it, {_REMEDY}")


def _create_secret(name: str, folder: int) -> bool:
    """Make a file with a new secret; False where there is one by now. It has its name only when it is complete."""
    _remove_passed(folder)
    passing = f"{PASSING}{secrets.token_hex(8)}"
    descriptor = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(passing, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except (FileExistsError, FileNotFoundError):  # or a node whose clock is ahead took the file for an old one
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(passing, dir_fd=folder)
    return True


def _remove_passed(folder: int) -> None:
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # another node was faster
            if name.startswith(PASSING) and time.time() - os.stat(name, dir_fd=folder).st_mtime > PASSED_S:
                os.unlink(name, dir_fd=folder)


def _creation_error(file: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the secret of the rendezvous cannot be stored in {file} ({error.strerror}); use a folder that all nodes "
        f"share (--rendezvous file:///FOLDER), {_REMEDY}"
    )


def remove_unused_secrets(file: Path | None) -> list[Path]:
    """Remove the files beside this one that no node has looked for in UNUSED_DAYS; returns which. A job that still runs
    knows its secret without them."""
    gone: list[Path] = []
    if file is None:
        return gone
    with contextlib.suppress(OSError, ConfigError), _open_folder(file.parent) as folder:
        for name in sorted(os.listdir(folder)):
            with contextlib.suppress(OSError):
                seen = os.stat(name, dir_fd=folder, follow_symlinks=False)
                old = time.time() - seen.st_mtime > UNUSED_DAYS * 86400
                if old and stat.S_ISREG(seen.st_mode) and name != file.name and not name.startswith(PASSING):
                    os.unlink(name, dir_fd=folder)
                    gone.append(file.parent / name)
    return gone
