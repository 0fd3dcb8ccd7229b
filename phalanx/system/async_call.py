"""An asynchronous function call in a forked child: shared file systems may hang, but an agent must not."""

import json
import os
import time
from collections.abc import Callable
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.placement import ExitCode
from phalanx.system.fork import answer_into, drain, end_child, error_of, fork


class AsyncCall:
    """`function(*args)`, whose result must be JSON-able, in a child that has `timeout_s` seconds."""

    def __init__(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> None:
        self._name = getattr(function, "__qualname__", repr(function))
        self._reader, writer = os.pipe()
        try:
            self._pid, self._pidfd = fork(lambda: answer_into(writer, function, args), keep=[writer])
        finally:
            os.close(writer)
        os.set_blocking(self._reader, False)
        self._until, self._timeout_s = time.monotonic() + timeout_s, timeout_s
        self._received = bytearray()
        self._over = False

    def fileno(self) -> int:
        """Is readable when the child has ended."""
        return self._pidfd

    def result(self) -> tuple[Any] | None:
        """The result, alone in a tuple; None while there is none yet.

        Raises PhalanxError as the child did, or when the time is up; RuntimeError for any other end without a result.
        """
        assert not self._over
        drain(self._reader, self._received)
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if not ended and time.monotonic() < self._until:
            return None
        drain(self._reader, self._received)
        status = self.cancel()
        text = self._received.decode()
        if not ended:
            raise PhalanxError(f"{self._name} had not finished after {self._timeout_s:g} s")
        if status == ExitCode.DONE and text:
            return (json.loads(text),)
        if status == ExitCode.FAILED and text:
            raise error_of(json.loads(text))
        raise RuntimeError(f"{self._name}, called in its own process, ended with {status} and no result")

    def cancel(self) -> int | None:
        """Kill the child; returns its exit code, or minus a signal. None: it was over, or does not end."""
        if self._over:
            return None
        self._over = True
        status = end_child(self._pid, self._pidfd)
        os.close(self._reader)
        return status
