"""Progress bars for work before and after training: tokenising, exporting, loading."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from phalanx.report.terminal import open_terminal

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
