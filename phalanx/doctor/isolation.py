"""Carrying a check out in a process of its own: whatever happens there, a crash or a hang too, becomes a line."""

import contextlib
import dataclasses
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.doctor.results import CheckResult, CheckState, DoctorCheck, result_from_json
from phalanx.system.exit_causes import describe_exception
from phalanx.system.fork import fork_call

LOG_BYTES, RANK_LOG_BYTES = 8000, 1500  # of the end of what a check printed, which go into the report
_END = re.compile(r"was killed by \S+|ended with exit code \d+")


def run_isolated(check: DoctorCheck, folder: Path) -> list[CheckResult]:
    """The lines of a check; what it prints goes into a file in `folder`. This process must have one thread."""
    log, begun = folder / f"{check.name}.log", time.monotonic()
    try:
        answer = fork_call(_answer, check, str(log), timeout_s=check.limit_s)
        lines = [result_from_json(tree) for tree in answer["lines"]]
        if answer["failed"] is not None:
            lines = [make_failure(check, answer["failed"])]
    except PhalanxError as error:  # of `fork_call` itself: the time was up, or the kernel had no memory for it
        late = f"no answer within {check.limit_s:g} s, so it was ended"
        lines = [
            make_failure(check, late if type(error) is PhalanxError else "it was killed: the machine ran out of memory")
        ]
    except (RuntimeError, OSError) as error:
        lines = [make_failure(check, describe_exit(error))]
    return add_time_and_log(lines, time.monotonic() - begun, log)


def make_failure(check: DoctorCheck, how: str) -> CheckResult:
    """The line of a check that has not come to its end."""
    return CheckResult(check.name, CheckState.WRONG, f"{how}; {check.remedy}")


def error_reason(error: Exception) -> str:
    """An exception in one line; of one that `fork_call` hands on with its traceback, the line below that."""
    below = str(error).rpartition("\n  File ")[2] if isinstance(error, RuntimeError) else ""
    handed_on = re.findall(r"^\w[\w.]*: .*$", below, re.M)
    return handed_on[0] if handed_on else str(describe_exception(error)["reason"])


def describe_exit(error: Exception) -> str:
    """How a process ended, in the words of `fork_call`."""
    found = _END.search(str(error))
    return f"its process {found[0]}" if found else f"it could not be started ({error})"


def add_time_and_log(lines: Sequence[CheckResult], seconds: float, log: Path) -> list[CheckResult]:
    """The lines with the time that they took, and with what was printed, where there is something to look for."""
    said = _tail(log)
    return [
        dataclasses.replace(line, seconds=round(seconds, 2), log=said if line.state == CheckState.WRONG else line.log)
        for line in lines
    ]


def redirect_output(log: str) -> None:
    """Have all that this process and libraries in it print go into a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115


def append_log_tail(log: Path) -> None:
    """Put the end of a rank's log into this check's own."""
    with open(1, "ab", closefd=False) as out:
        out.write(f"--- {log.name}\n".encode() + log.read_bytes()[-RANK_LOG_BYTES:])


def _answer(check: DoctorCheck, log: str) -> dict[str, Any]:
    """In the child. An exception is an answer, too; its traceback is in the log."""
    redirect_output(log)
    try:
        return {"lines": [line.to_json() for line in check.run()], "failed": None}
    except Exception as error:
        traceback.print_exc()
        return {"lines": [], "failed": error_reason(error)}


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace")
    return ""
