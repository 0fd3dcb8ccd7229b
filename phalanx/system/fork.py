"""Safe forks of a warm process: a child process, and one function call in such a child."""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from phalanx.core.errors import OutOfMemory, PhalanxError
from phalanx.core.placement import ExitCode
from phalanx.system.cgroups import read_group_lines
from phalanx.system.exit_causes import describe_exception, signal_name

LEAVE_SIGNAL = signal.SIGPWR  # this machine will soon be gone: its node leaves the run, which stops without others
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, LEAVE_SIGNAL)
MEANWHILE_MS = 100.0
DEVICES_TIMEOUT_S = 120.0  # of a call that finds devices, or imports large libraries
UNKILLABLE_S = 1.0  # time for a killed child to end
_PR_SET_PDEATHSIG = 1


def active_stop_signals() -> list[signal.Signals]:
    """The stop signals that this process acts on: all, but for a SIGHUP that its starter wants ignored (nohup)."""
    hung_up_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not hung_up_ignored]


def thread_names() -> list[str]:
    """Names of this process's threads as the kernel knows them, native ones included."""
    return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]


def out_of_memory_kills() -> int:
    """The number of out-of-memory kills by the kernel of this machine since boot."""
    for line in read_group_lines(Path("/proc/vmstat")):
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def fork(
    child: Callable[[], int], keep: Collection[int] = (), session: bool = False, blocked_signals: Collection[int] = ()
) -> tuple[int, int]:
    """Fork a child that runs `child()` and exits with its return value; give back (pid, pidfd).

    The child leads a new process group, with `session` a new session, which Linux serves as it does all others,
    however busy the parent's is (sched_autogroup). It dies with its parent, and holds of the parent's descriptors only
    output, error (standard input is empty) and those in `keep`. Signals that are `blocked_signals` wait until it
    unblocks them. It never returns into the caller's frames.

    Raises:
        AssertionError: this process has more than one thread; the child could hang on a lock that is never released.
        OSError: the system has no room for another process.
    """
    threads = thread_names()
    assert len(threads) == 1, (
        f"the process that forks has {len(threads)} threads ({', '.join(threads)}), so its children could hang on a "
        "lock held by one of them; do multi-threaded work, and work that opens an accelerator, inside fork_call"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # A signal that lands in the child before it has dropped the parent's wake-up descriptor would wake the parent.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _live(child, parent, keep, {*old_mask, *blocked_signals}, session)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    # Here as well as in the child: whoever comes first, kill_group works from now on. The child may have ended already.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not session:  # who leads a group already can begin no session
            os.setpgid(pid, pid)
    try:
        return pid, os.pidfd_open(pid)
    except OSError:  # no descriptor left: a child that cannot be watched must not live on
        kill_group(pid)
        os.waitpid(pid, 0)
        raise


def _live(
    child: Callable[[], int], parent: int, keep: Collection[int], mask: Collection[int], session: bool
) -> NoReturn:
    code = int(ExitCode.FAILED)
    try:
        _leave_parent(parent, keep, mask, session)
        code = child()
    except BaseException:  # the last line of defence: nothing may unwind into the copied frames of the parent
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _leave_parent(parent: int, keep: Collection[int], mask: Collection[int], session: bool) -> None:
    die_with(parent)
    if session:
        os.setsid()
    else:
        os.setpgid(0, 0)  # Ctrl-C at a terminal reaches the parent alone, which knows what to do about it
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *active_stop_signals()):
        signal.signal(number, signal.SIG_DFL)
    _drop_descriptors(keep)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def die_with(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends."""
    signal_at_parent_death(parent, signal.SIGKILL)


def signal_at_parent_death(parent: int, number: signal.Signals) -> None:
    """Have the kernel send a signal to this process when its parent ends, however it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(ExitCode.FAILED)  # the parent died before prctl: no signal will ever come


def _drop_descriptors(keep: Collection[int]) -> None:
    # Each is pointed at /dev/null rather than closed: objects copied from the parent still own the numbers, and their
    # destructors would close whatever file of the child had got the same number since.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number > 2 and number != null and number not in keep:
            try:
                os.dup2(null, number, inheritable=False)
            except OSError:  # above the limit of open files, where nothing else can be opened
                os.close(number)
    os.close(null)


def kill_group(pid: int) -> None:
    """SIGKILL a child that is not yet reaped, and whatever it started itself (compilers, loaders)."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # not yet the leader of its group


def end_child(pid: int, pidfd: int) -> int | None:
    """SIGKILL a child and whatever it started, and reap it; its exit code, or minus a signal. None where the kernel
    does not end it within UNKILLABLE_S, as a file system or a device holds it there: then it ends when that lets it."""
    kill_group(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(UNKILLABLE_S * 1000))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ended else None
    os.close(pidfd)
    return status


def fork_call(
    function: Callable[..., Any], *args: Any, timeout_s: float | None, meanwhile: Callable[[], None] | None = None
) -> Any:
    """Call `function(*args)` in a forked child and return its JSON-able result.

    For work that would leave threads, memory or an opened accelerator behind. The child writes to this process's
    output; whatever it started is killed when it ends, and it is killed when this process is interrupted. One that the
    kernel does not end, for a device or a file system that hangs, is not waited for.

    Args:
        timeout_s: seconds the call may take; None for no limit.
        meanwhile: called about every 0.1 s while the call lasts; what it raises ends the call.

    Raises:
        PhalanxError: the same class and sentence as in the child; OutOfMemory also for an exception, or a kill by the
            kernel, that says that memory ran out; PhalanxError itself for a call that took too long.
        RuntimeError: any other exception, with the child's traceback; or the child died without an answer.
    """
    name = getattr(function, "__qualname__", repr(function))
    kills_before = out_of_memory_kills()
    reader, writer = os.pipe()
    try:
        pid, pidfd = fork(lambda: answer_into(writer, function, args), keep=[writer])
    finally:
        os.close(writer)
    try:
        text = _listen(reader, pidfd, timeout_s, meanwhile)
    finally:
        status = end_child(pid, pidfd)
        os.close(reader)
    if text is None:
        raise PhalanxError(f"{name} was stopped: it had not finished after {timeout_s:g} s in its own process")
    if status == 0 and text:
        return json.loads(text)
    if status == ExitCode.FAILED and text:
        raise error_of(json.loads(text))
    if status == -signal.SIGKILL and out_of_memory_kills() > kills_before:
        raise OutOfMemory(
            f"{name} was killed because this machine ran out of memory; lower its memory use, or free memory"
        )
    assert status is not None, "what has said its last word has ended"
    how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
    raise RuntimeError(f"{name}, called in its own process, {how} before it returned a result")


def answer_into(writer: int, function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """In a child: write the result of a call, or what it raised, into a pipe; returns the exit code."""
    code = int(ExitCode.DONE)
    try:
        text = json.dumps(function(*args))
    except BaseException as error:
        code, text = int(ExitCode.FAILED), json.dumps(describe_exception(error))
    with open(writer, "wb") as pipe:
        pipe.write(text.encode())
    return code


def _listen(reader: int, pidfd: int, timeout_s: float | None, meanwhile: Callable[[], None] | None) -> str | None:
    """What the child wrote until it ended; None when the time was up first."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    os.set_blocking(reader, False)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(reader, select.POLLIN)
    received = bytearray()
    while True:
        left = None if until is None else max(0.0, (until - time.monotonic()) * 1000)
        if meanwhile is not None:
            meanwhile()
            left = MEANWHILE_MS if left is None else min(MEANWHILE_MS, left)
        ready = dict(poll.poll(left))
        if not ready and (until is None or time.monotonic() < until):
            continue
        if not ready:
            return None
        # The end is taken from the process, not from the pipe: a grandchild may hold the pipe open for ever.
        if reader in ready and drain(reader, received):
            poll.unregister(reader)
        if pidfd in ready:
            drain(reader, received)
            return received.decode()


def drain(reader: int, received: bytearray) -> bool:
    """Move what lies in the pipe; True at its end."""
    while True:
        try:
            part = os.read(reader, 1 << 16)
        except BlockingIOError:
            return False
        if not part:
            return True
        received += part


def error_of(cause: dict[str, Any]) -> Exception:
    """Rebuild a child's error from its description."""
    classes: dict[str, type[PhalanxError]] = {cls.__name__: cls for cls in PhalanxError.__subclasses__()}
    classes[PhalanxError.__name__] = PhalanxError
    if cause["type"] in classes:
        return classes[cause["type"]](cause["message"])
    if cause["exit_code"] == ExitCode.OUT_OF_MEMORY:
        return OutOfMemory(cause["reason"])
    return RuntimeError(f"in its own process:\n{cause['traceback']}")
