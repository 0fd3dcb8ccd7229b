"""Progress bars for work before and after training: tokenising, exporting."""

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from phalanx.report.terminal import open_terminal

PHASES = {
    "tokenizer": "training the tokenizer",
    "tokens": "tokenising",
    "files": "joining token files",
    "export": "exporting",
}


@contextlib.contextmanager
def phases() -> Iterator[Callable[[str, int, int], None]]:
    """A function `(phase, done, total)` that shows a bar per phase; without a terminal, a line when a phase begins."""
    console = open_terminal()
    columns = (TextColumn("{task.description:24}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    bars: dict[str, TaskID] = {}
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as shown:

        def report(phase: str, done: int, total: int) -> None:
            if phase not in bars:
                name = PHASES.get(phase, phase)
                bars[phase] = shown.add_task(name, total=total)
                if not console.is_terminal:
                    console.print(name)
            shown.update(bars[phase], completed=done, total=total)

        yield report
