"""The terminal, or whatever the output goes to: when nobody takes it any more the program goes on without a word."""

import contextlib
import os
import sys
from typing import TextIO, cast

from rich.console import Console


class QuietStream:
    """A text stream that goes quiet, instead of raising, once its reader, terminal or disk is gone (`| head`, EIO).

    Its descriptor is pointed at /dev/null then: what still lies in buffers would raise at the next flush, anywhere.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = False

    @property
    def encoding(self) -> str:
        """The encoding of the stream itself."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The descriptor of the stream."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write, as long as somebody takes it."""
        if not self._lost:
            try:
                return self._stream.write(text)
            except OSError:
                self._lose()
        return len(text)

    def flush(self) -> None:
        """Flush, as long as somebody takes it."""
        if not self._lost:
            try:
                self._stream.flush()
            except OSError:
                self._lose()

    def _lose(self) -> None:
        self._lost = True
        null = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):  # a stream without a descriptor has nothing to redirect
            os.dup2(null, self._stream.fileno())
        os.close(null)


def open_terminal(stream: TextIO | None = None, width: int | None = None) -> Console:
    """A rich console on a stream (standard output if None) that goes quiet when nobody takes its output any more."""
    output = QuietStream(sys.stdout if stream is None else stream)
    return Console(file=cast(TextIO, output), width=width, highlight=False, emoji=False)
