"""Causes of process exits: the record of an exception, and the root cause among several exits.

When one rank dies, the others fail a moment later because their collectives lost a peer; sometimes the agent even sees
them first. Pure functions, no torch.
"""

import os
import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import PhalanxError, is_out_of_memory
from phalanx.core.placement import ExitCode

# What gloo, NCCL, the TCP store and sockets say when the other side has gone.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|connectFullMesh|pair closure|"
    r"timed out (waiting|after)|(socket|wait) timeout|failed to recv|recvValue failed|sendBytes failed|"
    r"remote process exited|ncclRemoteError|unhandled system error|process group .*(abort|timeout)",
    re.IGNORECASE,
)
# The message of a rank whose replica, or initial state, is on a lost node.
_LOST_COPY = re.compile(r"state could not be (read|replicated|copied) (to|from) another node")
FROM_ELSE = "from other saved state"  # why there is another attempt after damage
HANG, DEADLOCK = "Hang", "Deadlock"  # types of causes that an agent finds for a rank
# Exceptions that speak of something outside the program.
_OF_OTHERS = ("CollectiveError", "StorageError", "DamagedState")
_LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "CutOff")


def describe_exception(error: BaseException) -> dict[str, Any]:
    """A JSON-able record of an exception: exit_code, type, message, reason (one line), traceback, step, time.

    `step` is taken from a note that says "step N" (`error.add_note(f"step {n}")`), None without one. An exception that
    says that memory ran out gets exit code OUT_OF_MEMORY whatever its class.
    """
    if isinstance(error, PhalanxError):
        code, reason = int(error.exit_code), str(error)
    else:
        code = int(ExitCode.OUT_OF_MEMORY if is_out_of_memory(error) else ExitCode.FAILED)
        reason = traceback.format_exception_only(error)[0].partition("\n")[0]
    steps = re.findall(r"\bstep (\d+)", "\n".join(getattr(error, "__notes__", [])))
    return {
        "pid": os.getpid(),
        "exit_code": code,
        "type": type(error).__name__,
        "message": str(error),
        "reason": reason,
        "traceback": "".join(traceback.format_exception(error)),
        "step": int(steps[-1]) if steps else None,
        "time": time.time(),
    }


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended: by `signal` or with `exit_code` (the other is None), and what it left in its cause file."""

    rank: int
    pid: int
    signal: int | None
    exit_code: int | None
    cause: dict[str, Any] | None = None
    host: str | None = None  # where it ran, if that was another node
    doing: str | None = None  # what it was last known to do, if a signal ended it
    starved: bool = False  # whether the kernel killed a process because memory ran out at that time

    @property
    def abnormal(self) -> bool:
        return self.exit_code not in (ExitCode.DONE, ExitCode.STOPPED)

    def details(self) -> dict[str, Any]:
        """Fields of the event: rank, pid, signal or exit_code, reason; type, step and host where known."""
        how: dict[str, Any] = {"exit_code": self.exit_code}
        if self.signal is not None:
            how = {"signal": signal_name(self.signal)}
        if self.signal is not None:
            reason = f"killed by {signal_name(self.signal)}" if self.cause is None else self.cause["reason"]
        elif self.cause is None:
            reason = f"ended with exit code {self.exit_code} and no exception; its log may say why"
        else:
            reason = self.cause["reason"]
            how["type"] = self.cause["type"]
        if self.cause is not None and self.cause["step"] is not None:
            how["step"] = self.cause["step"]
        if self.starved:
            reason += "; the kernel killed a process because memory ran out at that time"
        how |= {name: value for name, value in (("doing", self.doing), ("host", self.host)) if value is not None}
        return {"rank": self.rank, "pid": self.pid, **how, "reason": reason}


def signal_name(number: int) -> str:
    """The name of a signal, SIGKILL for 9; real-time signals have no separate names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_secondary_failure(end: WorkerExit) -> bool:
    """Whether an end looks like the consequence of another rank's: a lost peer, or an abort (gloo's answer to one)."""
    return root_cause_priority(end) >= 2


def root_cause_priority(end: WorkerExit) -> int:
    """Rank of an end as a cause. 0: a death by signal; 1: a direct exception; 2: an abort, or state that did not come
    to another node; 3: an exception that speaks of a lost peer."""
    if end.signal is not None:
        return 2 if end.signal == signal.SIGABRT else 0
    if end.cause is None:
        return 1
    if end.cause.get("exit_code") == ExitCode.OUT_OF_MEMORY:  # NCCL says so in the same exception as a lost peer
        return 1
    if _LOST_COPY.search(end.cause["message"]):  # whoever keeps it ends with its node's ranks, whatever ended those
        return 2
    lost = end.cause["type"] in _LOST_PEER_TYPES or _LOST_PEER.search(end.cause["message"])
    return 3 if lost else 1


def is_state_damage(end: WorkerExit | None) -> bool:
    """Whether a rank found its saved state damaged and voided it: the next attempt resumes from other state."""
    return end is not None and end.cause is not None and end.cause["type"] == "DamagedState"


def find_root_cause(ends: Sequence[WorkerExit]) -> WorkerExit:
    """The end that brought down the others, out of a non-empty sequence in order of detection."""
    return min(ends, key=root_cause_priority)


def fingerprint_failure(end: WorkerExit) -> str:
    """The fingerprint of a failure, equal for the same mistake on any rank: the class of its exception, the step and
    the last line of code in its traceback; or the signal of a crash.

    Empty for failures that say nothing about the next attempt: a kill from outside, an exit code alone, a lost peer,
    and causes outside the program.
    """
    if end.signal is not None:
        return "" if end.signal in (signal.SIGKILL, signal.SIGTERM) else f"death by {signal_name(end.signal)}"
    if end.cause is None or root_cause_priority(end) != 1 or end.cause["type"] in _OF_OTHERS:
        return ""
    step, lines = end.cause["step"], [line.strip() for line in str(end.cause.get("traceback", "")).splitlines()]
    where = "before the first step" if step is None else f"in step {step}"
    files = [line for line in lines if line.startswith("File ")]
    return f"{end.cause['type']} {where}" + (f" ({files[-1]})" if files else "")
