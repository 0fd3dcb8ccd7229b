"""Errors that a user can act on: one sentence with the observation, its effect and the remedy; never a traceback."""

import re

from phalanx.core.placement import ExitCode

# Messages of torch's host allocator; of drivers (page-locked memory, modules, Triton) and collectives; of kernel
# libraries.
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|_STATUS_\w*ALLOC\w*_FAILED")


class PhalanxError(Exception):
    """Base class of errors that end a run for a reason that a user can fix; `exit_code` is the process's exit code."""

    exit_code: int = ExitCode.FAILED


class ConfigError(PhalanxError):
    """Invalid configuration: the recipe, the command line or a model folder asks for something impossible."""

    exit_code = ExitCode.CONFIG


class DataError(PhalanxError):
    """Invalid data: a source, a token file or a tokenizer is missing, empty or damaged."""

    exit_code = ExitCode.CONFIG


class CheckpointError(PhalanxError):
    """Invalid checkpoint: incomplete, damaged, or of another model; its files are not changed."""

    exit_code = ExitCode.FAILED


class RunError(PhalanxError):
    """The run folder cannot be used: in use by another run, of another configuration, or not writable."""

    exit_code = ExitCode.CONFIG


class CutOff(PhalanxError):
    """The run continues on other nodes with a later attempt, so this one stops writing. Not a fault of the rank that
    raises it."""

    exit_code = ExitCode.FAILED


class Unhealthy(PhalanxError):
    """A node is unfit for training: a faulty device, or a disk that cannot be written. Raised before training
    starts."""

    exit_code = ExitCode.UNHEALTHY


class Diverged(PhalanxError):
    """Training has diverged; not retried, as the same steps would diverge again."""

    exit_code = ExitCode.CONFIG


class Corrupted(PhalanxError):
    """Silent data corruption: ranks hold different parameters where they must be equal, without a majority. Retried
    from a checkpoint."""

    exit_code = ExitCode.FAILED


class DamagedState(PhalanxError):
    """State in shared memory does not match its checksum. The damaged copies were voided, so the next attempt uses
    others."""

    exit_code = ExitCode.FAILED


class CollectiveError(PhalanxError):
    """A collective failed or timed out; the message names the late ranks. Retried."""

    exit_code = ExitCode.FAILED


class StorageError(PhalanxError, OSError):
    """A remote store failed or stalled for too long. Retried; an OSError, like the failure of a disk."""

    exit_code = ExitCode.FAILED


class OutOfMemory(PhalanxError):
    """A device ran out of memory; not retried with the same settings."""

    exit_code = ExitCode.OUT_OF_MEMORY


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of any library reports that device or host memory ran out."""
    names = {cls.__name__ for cls in type(error).__mro__}  # by name, since only some processes have imported torch
    if names & {"MemoryError", "OutOfMemoryError", "OutOfMemory"}:
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
