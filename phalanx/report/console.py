"""Progress of a run in a terminal: a progress bar with events above it, or plain lines without a terminal.

Nothing here starts a thread (the process that shows the bar may also be the one that forks), hides the cursor, or
replaces `sys.stdout`: whatever kills the process, the terminal is left as it was.
"""

import json
import os
import re
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_events, read_steps
from phalanx.core.renamed import rename_event
from phalanx.core.run_paths import RunPaths, Url
from phalanx.report import devices, event_text, first_screen, formats, views
from phalanx.report.logs import open_terminal
from phalanx.report.status import RATE_STEPS, STYLES

REDRAW_S = 0.08
FOLDED = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))  # erases the last row of a folded line
LINE_S, LINE_MOST_S = 10.0, 60.0  # between two lines without a terminal; the gap grows on long runs


class Console:
    """Console display of one run's records, as they arrive.

    `total_steps` is where the bar ends (0: no bar), `description` the word at its left, `stream` a text stream
    (standard output if None), `unit` what the speed counts. With a `folder`, a run begins with four lines: model,
    devices, folder and batch split; events of `first_screen.DETAILS` are shown only if `verbose`. On a terminal a live
    bar follows; anywhere else a line at the first step, then about every ten seconds (a minute on long runs) or every
    twentieth of the run. A closed stream is ignored. Close the console, or use it as a context manager.
    """

    def __init__(
        self,
        total_steps: int,
        description: str = "training",
        stream: TextIO | None = None,
        unit: str = "tokens",
        folder: str | None = None,
        verbose: bool = False,
    ) -> None:
        self.total_steps = total_steps
        self._folder, self._verbose = folder, verbose
        self._start: dict[str, Any] | None = None  # the event of a start whose split is not shown yet
        self.description = description
        self.unit = unit
        stream = sys.stdout if stream is None else stream
        terminal = stream.isatty()
        # Without a terminal no line is folded: a log is read with other widths than the one guessed here.
        self.rich = open_terminal(stream, width=None if terminal else 400)
        self.step = 0
        self._width = self.rich.width  # of the bar, when it was drawn last
        self._pid = os.getpid()
        self._started = time.monotonic()
        self._drawn = 0.0
        self._line: tuple[int, float] | None = None  # step and time of the last line
        self._unprinted = False
        self._record: dict[str, Any] = {}  # of the last step
        self._step_s: deque[float] = deque(maxlen=RATE_STEPS)
        self._tokens_per_s: deque[float] = deque(maxlen=RATE_STEPS)
        self._work: deque[devices.DeviceStep] = deque(maxlen=RATE_STEPS)
        self._devices = ""  # their shares, in a few words
        self._live: Live | None = None
        if terminal and total_steps and not self.rich.is_dumb_terminal:
            self._live = Live(
                console=self.rich,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                get_renderable=self._bar,
                vertical_overflow="crop",
            )
            self._live.start()
            self.rich.show_cursor(True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def on_step(self, record: dict[str, Any]) -> None:
        """Show a step record; a replayed step moves the bar back."""
        step = record.get("step")
        if not isinstance(step, int):
            return
        self.step = step
        self._record = record
        for window, key in ((self._step_s, "step_s"), (self._tokens_per_s, "tokens_per_s")):
            value = formats.finite_number(record, key)
            if value is not None:
                window.append(value)
        work = devices.parse_device_step(record)
        if self._start is not None:  # the record of an earlier start has the split, or one copy takes the batch
            self._show_split({"shares": list(work.shares)} if work is not None and len(work.shares) > 1 else None)
        if work is not None and len(work.shares) > 1:
            self._work.append(work)
            self._devices = devices.format_shares(self._work)
        if self._live is None:
            self._step_line()
        else:
            self.tick()

    def on_event(self, event: dict[str, Any]) -> None:
        """Print an event as a line (above the bar, where there is one)."""
        kind = str(event.get("kind"))
        if self._folder is not None and self._on_first_screen(kind, event):
            return
        if kind == EventKind.WORKER_DIED and self._unprinted:
            self._print_step()  # the last step goes above the failure
        sentence = event_text.describe_event(event, self.step or None)
        if kind == EventKind.RESUMED and isinstance(event.get("step"), int):
            self.step = event["step"]
        self.say(sentence, kind, event.get("time"))

    def _on_first_screen(self, kind: str, event: dict[str, Any]) -> bool:
        """Show what an event adds to the first screen. Returns whether that is all that is shown of it."""
        assert self._folder is not None
        if kind == EventKind.RUN_STARTED:
            self._start = event
            self._print_lines(first_screen.start_lines(event, self._folder))
            return True
        if kind == EventKind.LAYOUT_CHOSEN and self._start is not None:
            self._start = {**self._start, "layout": event.get("layout")}
        if kind == EventKind.WORK_SPLIT and self._start is not None:
            self._show_split(event)
            return True
        joined = kind == EventKind.NODE_JOINED and self._start is not None  # the line of devices counts it
        return not self._verbose and (kind in first_screen.DETAILS or joined)

    def _show_split(self, split: dict[str, Any] | None) -> None:
        assert self._start is not None
        line, self._start = first_screen.split_line(self._start, split), None
        self._print_lines([line])

    def _print_lines(self, lines: list[str]) -> None:
        self._clear_folded()
        for line in lines:
            self.rich.print(Text(line), soft_wrap=self._live is None)
        self.tick()

    def say(self, text: str, kind: str = "", when: float | None = None) -> None:
        """Print a line of text with the mark of `kind`, at `when` (seconds since the epoch; now if None)."""
        mark = event_text.event_mark(kind)
        style = STYLES[mark.tone]
        line = Text(time.strftime("%H:%M:%S ", time.localtime(when)), style="dim")
        line.append(f"{mark.ascii if self.rich.options.ascii_only else mark.symbol} ", style=style)
        line.append(text, style=style if mark.tone in ("bad", "warn", "quiet") else "")
        self._clear_folded()
        self.rich.print(line, soft_wrap=self._live is None)
        self.tick()

    def tick(self) -> None:
        """Redraw the bar, at most every REDRAW_S; call it often, also between records."""
        now = time.monotonic()
        if self._live is not None and now - self._drawn >= REDRAW_S:
            self._drawn = now
            self._clear_folded()
            self._live.refresh()

    def _clear_folded(self) -> None:
        """Erase the rows into which a terminal that became narrower has folded the bar, except the last, which is
        redrawn."""
        if self._live is None:
            return
        before, self._width = self._width, max(1, self.rich.width)
        for _ in range(-(-before // self._width) - 1):
            self.rich.control(Control(*FOLDED))

    def close(self) -> None:
        """Draw the last state and clean the terminal up; no effect in a forked child."""
        if os.getpid() != self._pid:
            return
        if self._live is not None:
            self._clear_folded()
            self._live.stop()
            self._live = None
        elif self._unprinted:
            self._print_step()

    def show(self, renderable: RenderableType) -> None:
        """Print anything that rich can print, such as a summary."""
        self.rich.print(renderable)

    def _left_s(self) -> float | None:
        return (self.total_steps - self.step) * statistics.median(self._step_s) if self._step_s else None

    def _figures(self) -> list[str]:
        """Loss, rate, time left and time elapsed, in the order in which a narrow terminal keeps them."""
        rate, left = statistics.median(self._tokens_per_s) if self._tokens_per_s else None, self._left_s()
        loss = formats.finite_number(self._record, "loss")
        figures = [f"loss {loss:.4f}" if loss is not None else ""]
        figures.append(f"{formats.format_count(rate)} {self.unit}/s" if rate is not None else "")
        figures.append(
            f"{formats.format_clock(left)} left" if left is not None and self.step < self.total_steps else ""
        )
        figures.append(f"{formats.format_clock(time.monotonic() - self._started)} elapsed")
        figures.append(self._devices)
        return [figure for figure in figures if figure]

    def _bar(self) -> RenderableType:
        done = f"{self.step}/{self.total_steps}"
        figures = self._figures()
        room = self.rich.width - len(self.description) - len(done) - 4
        while figures and sum(len(figure) + 2 for figure in figures) + 10 > room:
            figures.pop()
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        cells: list[RenderableType] = [
            Text(self.description, style="bold"),
            ProgressBar(total=max(1, self.total_steps), completed=min(self.step, self.total_steps)),
            Text(done),
            *(Text(figure, style="cyan" if index == 0 else "") for index, figure in enumerate(figures)),
        ]
        for index, _ in enumerate(cells):
            grid.add_column(ratio=1 if index == 1 else None, no_wrap=True)
        grid.add_row(*cells)
        return grid

    def _step_line(self) -> None:
        now = time.monotonic()
        self._unprinted = True
        gap_s = min(LINE_MOST_S, max(LINE_S, (now - self._started) / 30))
        due = self._line is None or now - self._line[1] >= gap_s or self.step >= self.total_steps
        if due or (self._line is not None and abs(self.step - self._line[0]) * 20 >= self.total_steps):
            self._print_step()

    def _print_step(self) -> None:
        self._line = (self.step, time.monotonic())
        self._unprinted = False
        if self._live is None:
            parts = [f"{self.description} step {self.step}/{self.total_steps}", *self._figures()]
            self.say("  ".join(parts), when=formats.finite_number(self._record, "time"))


class _Tail:
    """Tail of a growing JSON-lines file, complete lines only; the file may not exist yet."""

    def __init__(self, path: Path, offset: int) -> None:
        self.path = path
        self.offset = offset

    def read_new_lines(self) -> list[dict[str, Any]]:
        try:
            if os.stat(self.path).st_size <= self.offset:
                return []
        except FileNotFoundError:
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            text = file.read()
        end = text.rfind(b"\n") + 1  # the rest is an unfinished line
        self.offset += end
        return [record for line in text[:end].splitlines() if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None  # a writer died in this line
    return record if isinstance(record, dict) else None


class RecordSink(Protocol):
    """Receiver of a follower's records."""

    def on_step(self, record: dict[str, Any]) -> None: ...

    def on_event(self, event: dict[str, Any]) -> None: ...

    def tick(self) -> None: ...


class Follower:
    """Follows the files of a run and feeds a console. `from_start` shows all records; otherwise only new ones, as a
    resumed run needs. It reads the folder only, so the run may die at any point.
    """

    def __init__(self, paths: RunPaths, console: RecordSink, from_start: bool = False) -> None:
        self.console = console
        self._held: list[tuple[float, bool, dict[str, Any]]] = []
        self._steps = _Tail(paths.metrics, 0 if from_start else _length(paths.metrics))
        self._events = _Tail(paths.events, 0 if from_start else _length(paths.events))

    def poll(self, final: bool = False) -> None:
        """Show the complete lines written since the last call, in order of time. Lines newer than this call wait for
        the next call, since the other file may get an older line meanwhile; no line waits twice, nor if `final`.
        """
        began, held = time.time(), self._held
        new = [(formats.finite_number(record, "time") or 0.0, True, record) for record in self._steps.read_new_lines()]
        new += [
            (formats.finite_number(record, "time") or 0.0, False, record) for record in self._events.read_new_lines()
        ]
        self._held = [] if final else [entry for entry in new if entry[0] > began]
        found = held + [entry for entry in new if final or entry[0] <= began]
        for _, is_step, record in sorted(found, key=lambda entry: entry[0]):
            if is_step:
                self.console.on_step(record)
            else:
                self.console.on_event(rename_event(record))
        self.console.tick()


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def render_run_summary(paths: RunPaths) -> RenderableType:
    """Summary of a finished run, from its records: folder, last step, losses, checkpoint, export and report."""
    # the last line, not the highest step: steps are replayed after a restart
    last: dict[str, Any] = next(iter(deque(read_lines(paths.metrics), maxlen=1)), {})
    events = {str(event.get("kind")): event for event in read_events(paths.events)}
    rows = [("run", paths.display_name)]
    if "step" in last:
        rows.append(("last step", str(last["step"])))
    if (loss := formats.finite_number(last, "loss")) is not None:
        rows.append(("loss", f"{loss:.4f}"))
    for name, evaluations in views.group_by_set(read_events(paths.events)).items():
        if (loss := formats.finite_number(evaluations[-1], "loss")) is not None:
            beside = formats.describe_scores(evaluations[-1])
            rows.append((f"{name} loss", f"{loss:.4f}" + (f"  ({beside})" if beside else "")))
    if (checkpoint := _checkpoint(paths, events.get(EventKind.CHECKPOINT_SAVED, {}).get("step"))) is not None:
        rows.append(("checkpoint", str(checkpoint)))
    if folder := events.get(EventKind.EXPORTED, {}).get("folder"):
        rows.append(("export", str(folder)))
    if paths.report.exists():
        rows.append(("report", f"{paths.display_name}/{paths.report.name}"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")  # do not truncate paths
    for name, value in rows:
        grid.add_row(name, Text(value))
    panel = Panel.fit(grid, title="phalanx", title_align="left", border_style="green", padding=(0, 1))
    found = devices.summarize_devices(
        read_steps(paths.metrics), devices.read_device_names(paths), devices.read_device_lines(paths)
    )
    return panel if found is None else Group(panel, devices.render_device_table(found))


def _checkpoint(paths: RunPaths, step: object) -> Path | Url | None:
    """The checkpoint folder of `step`, by its name; makes no request to a store."""
    if isinstance(paths.checkpoints, Url):
        return paths.checkpoints if isinstance(step, int) else None
    if not paths.checkpoints.is_dir():
        return None
    for folder in paths.checkpoints.iterdir():
        digits = re.search(r"(\d+)$", folder.name)
        if digits and int(digits[1]) == step:
            return folder
    return paths.checkpoints
