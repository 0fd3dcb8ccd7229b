"""Errors that a user can act on: one sentence with what was found, what it breaks and what to do; never a traceback."""

import re
from pathlib import Path

from phalanx.core.placement import ExitCode

# Of torch's host allocator; of drivers (page-locked memory, modules, Triton) and collectives; of libraries of kernels.
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|_STATUS_\w*ALLOC\w*_FAILED")

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class PhalanxError(Exception):
    """Anything that ends a run for a reason a user can mend; `exit_code` is the process's exit code."""

    exit_code: int = ExitCode.FAILED


class ConfigError(PhalanxError):
    """The recipe, the command line or a model folder asks for something impossible."""

    exit_code = ExitCode.CONFIG


class DataError(PhalanxError):
    """A source, a token file or a tokenizer is missing, empty or damaged."""

    exit_code = ExitCode.CONFIG


class CheckpointError(PhalanxError):
    """A checkpoint is torn, damaged or does not fit; its files are left as they are."""

    exit_code = ExitCode.FAILED


class RunError(PhalanxError):
    """The run folder cannot be used: in use by another run, of another configuration, or not writable."""

    exit_code = ExitCode.CONFIG


class CutOff(PhalanxError):
    """The run goes on elsewhere, with a later attempt: what this one would still write is not written. No fault of the
    rank that finds it out."""

    exit_code = ExitCode.FAILED


class Unhealthy(PhalanxError):
    """A node is not fit to be trained on: a sick device, a disk that cannot be written. Found before the start."""

    exit_code = ExitCode.UNHEALTHY


class Diverged(PhalanxError):
    """Training has run away: the same steps would run away again, so it is not retried."""

    exit_code = ExitCode.CONFIG


class Corrupted(PhalanxError):
    """Ranks hold different parameters where they must hold the same, and none can be believed. Worth another attempt,
    from a checkpoint."""

    exit_code = ExitCode.FAILED


class DamagedState(PhalanxError):
    """State that was kept in memory is not what was written there. What is damaged has been made void, so that another
    attempt goes on from what else there is."""

    exit_code = ExitCode.FAILED


class CollectiveError(PhalanxError):
    """A collective failed or timed out; says which ranks were late. Worth another attempt."""

    exit_code = ExitCode.FAILED


class StorageError(PhalanxError, OSError):
    """A remote store has failed or stalled for too long. Worth another attempt; an OSError, as of a disk that fails."""

    exit_code = ExitCode.FAILED


class OutOfMemory(PhalanxError):
    """A device ran out of memory; not retried unchanged."""

    exit_code = ExitCode.OUT_OF_MEMORY


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of any library says that memory of a device or of the host ran out."""
    names = {cls.__name__ for cls in type(error).__mro__}  # by name, since only some processes have torch
    if names & {"MemoryError", "OutOfMemoryError", "OutOfMemory"}:
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def fetch_hint(folder: Path | str) -> str:
    """What to add to an error where a Hugging Face folder is not there: for what may be a name on the hub, the command
    that fetches it to the place where it is looked for. Empty for what is there, or cannot be such a name."""
    place = Path(folder)
    name = str(place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place)
    models = not place.parent.exists() or any(place.parent.glob("*/config.json"))  # else a folder of something else
    if place.exists() or not models or not _HUB_NAME.fullmatch(name):
        return ""
    command = f"hf download {name} --local-dir {name}"
    return f". Nothing is downloaded by itself: if this is a model of the Hugging Face hub, {command}"
