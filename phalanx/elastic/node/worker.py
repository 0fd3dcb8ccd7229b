"""The life of one rank inside its forked process: output to a log, the worker function, a cause of death on disk.

A worker ends in one of three ways: its function returns an exit code, it raises (the exception goes to the cause file
and the log), or a signal kills it (the agent sees which). No torch here.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.run_paths import RunPaths
from phalanx.system.exit_causes import describe_exception

STACKS_SIGNAL = signal.SIGUSR2  # a worker that gets it writes the stacks of its threads to its log


def run_worker(
    worker: Callable[[Placement], int],
    placement: Placement,
    paths: RunPaths | None,
    interface: str | None = "lo",
    logs: bool = True,
) -> int:
    """Run one rank to its end and return its exit code; an exception is written to the cause file and the log.
    `interface` is the network interface that leads to the other ranks, unless the environment names one; of threads the
    environment may say how many, too.

    A PhalanxError leaves its sentence in the log, anything else its traceback. With `paths` None, or without
    `logs`, both go to the inherited standard error; with None no cause file is written.
    """
    if paths is not None:
        if logs:
            _redirect_output(paths.log(placement.attempt, placement.rank))
        faulthandler.enable(file=2, all_threads=True)
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
        if placement.shared is not None:
            _record_flights(paths.flight_records(placement.attempt), _pipes(Path(placement.shared)))
    # Without this gloo asks the resolver for the host's own name, maybe in vain.
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface not in (None, "lo"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    chosen = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if chosen.isdecimal():
        placement = dataclasses.replace(placement, threads=int(chosen))
    try:
        return int(worker(placement))
    except SystemExit as error:
        return _code_of(error)
    except BaseException as error:
        cause = describe_exception(error) | {"rank": placement.rank, "attempt": placement.attempt}
        if paths is not None:
            _write_cause(paths.exit_cause(placement.attempt, placement.rank), cause)
        sys.stderr.write(cause["reason"] + "\n" if isinstance(error, PhalanxError) else cause["traceback"])
        return int(cause["exit_code"])


def _redirect_output(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _record_flights(records: Path, pipes: Path) -> None:
    """Have NCCL, if it is used, keep its last collectives, and write them to a file when that is asked for or a
    collective runs out of time. It adds the rank to these names, and reads them when its groups are made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(records))
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(pipes))


def ask_flight_recorder(shared: Path, rank: int) -> None:
    """Ask NCCL of a rank to write down what it has recorded; without NCCL nobody listens there."""
    pipe = f"{_pipes(shared)}{rank}.pipe"
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):  # it has just died, or does not read what it is asked
            os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)


def _pipes(shared: Path) -> Path:
    return shared / "flight-"


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return int(ExitCode.DONE)
    if isinstance(error.code, int):
        return error.code
    sys.stderr.write(f"{error.code}\n")
    return int(ExitCode.FAILED)


def _write_cause(path: Path, cause: dict[str, Any]) -> None:
    try:
        write_atomic(path, json.dumps(cause))
    except OSError as error:  # a full disk must not hide why the worker ended: the log and the exit code still say it
        sys.stderr.write(f"the cause of death could not be written to {path}: {error}\n")
