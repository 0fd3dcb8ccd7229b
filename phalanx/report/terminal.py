"""The terminal, or whatever the output goes to: when nobody takes it any more the program goes on without a word."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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


# ------------------------------------ progress bars for work before and after training: tokenising, exporting, loading


# Those whose progress is counted in bytes: their bar shows a rate as well.
IN_BYTES = ("tokenizer", "tokens", "records")
PHASES = {
    "tokenizer": "training the tokenizer",
    "tokens": "tokenising",
    "records": "reading records",
    "files": "joining token files",
    "export": "exporting",
    "load": "loading the model",
}


@contextlib.contextmanager
def phase_progress(aside: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A function `(phase, done, total)` that shows a bar per phase; without a terminal, a line when a phase begins.

    `aside`: beside an output that is the result itself: on standard error, gone at the end, and only on a terminal.
    """
    console = open_terminal(sys.stderr if aside else None)
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TextColumn("{task.fields[rate]}"),
    )
    bars: dict[str, TaskID] = {}
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=aside,
    ) as shown:

        def report(phase: str, done: int, total: int) -> None:
            if phase not in bars:
                name = PHASES.get(phase, phase)
                bars[phase] = shown.add_task(name, total=total, rate="")
                if not console.is_terminal and not aside:
                    console.print(name)
            shown.update(bars[phase], completed=done, total=total)
            task = shown.tasks[bars[phase]]
            if phase in IN_BYTES and task.speed:
                shown.update(bars[phase], rate=f"{task.speed / 1e6:.1f} MB/s")

        yield report
