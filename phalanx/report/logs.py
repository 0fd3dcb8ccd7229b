"""Logs of a run: of its nodes, of its ranks, and of the first error."""

import codecs
import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from phalanx.core.errors import RunError
from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import RunPaths
from phalanx.report import event_text

TAIL_BYTES = 64 * 1024  # shown of the end of a log
LAST_LINES = 40  # of the log of a failed rank
LOOK_S = 0.25
NOTHING = "no logs yet"
ELSEWHERE = (  # for an empty log, such as that of a rank without errors
    "only `phalanx launch` logs the progress of a run; that of other runs went to the terminal; see `phalanx "
    "status` and `phalanx report`"
)


def find_log(paths: RunPaths, rank: int | None, node: int | None) -> Path:
    """Log file of a rank (newest attempt), of a node, or of the run. Raises RunError with the logs that exist."""
    if rank is not None:
        numbers = sorted(number for number in paths.list_logged_attempts() if paths.log(number, rank).exists())
        if not numbers:
            raise RunError(f"{paths.display_name} has no log of rank {rank}; {_describe_logs(paths)}")
        return paths.log(numbers[-1], rank)
    if node is not None:
        if not paths.node_log(node).exists():
            raise RunError(f"{paths.display_name} has no log of node {node}; {_describe_logs(paths)}")
        return paths.node_log(node)
    for path in (paths.node_log(0), *_job_logs(paths)):
        if path.exists():
            return path
    return find_log(paths, 0, None)


def _job_logs(paths: RunPaths) -> list[Path]:
    found = paths.node_log(0).parent.glob(paths.job_log("*", "*").name)
    return sorted(
        (path for path in found if not path.name.startswith("node-")),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )


def _describe_logs(paths: RunPaths) -> str:
    folder = paths.node_log(0).parent
    nodes = sorted(
        int(digits[1]) for path in folder.glob("node-*.log") if (digits := re.search(r"-(\d+)\.log$", path.name))
    )
    attempts = paths.list_logged_attempts()
    ranks = sorted(
        {
            int(digits[1])
            for path in (paths.log(max(attempts), 0).parent.glob("rank-*.log") if attempts else ())
            if (digits := re.search(r"-(\d+)\.log$", path.name))
        }
    )
    said = [f"nodes {_few(nodes)}"] if nodes else []
    said += [f"ranks {_few(ranks)}"] if ranks else []
    return f"it has logs of {' and '.join(said)}" if said else NOTHING


def has_no_output(paths: RunPaths) -> bool:
    """Whether a run has no output yet: its job is queued or starting."""
    return not _job_logs(paths) and _describe_logs(paths) == NOTHING


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")


def read_tail(path: Path) -> str:
    """The last TAIL_BYTES of a file, from the beginning of a line; a shorter file whole."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        data = file.read()
    if size > TAIL_BYTES:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")


def follow_file(find: Callable[[], Path], show: Callable[[str], None], ends: Callable[[], bool]) -> None:
    """Follow a growing file from near its end, and its successor when `find` names another, until `ends` is true and
    all is shown."""
    path = find()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character
    show(read_tail(path))
    offset = path.stat().st_size
    while True:
        over = ends()
        newer = find()
        if newer != path:
            path, offset = newer, 0
            show(f"\n==> {path} <==\n")
        with open(path, "rb") as file:
            if offset > file.seek(0, 2):
                offset = 0  # the file was truncated
            file.seek(offset)
            data = file.read()
        offset += len(data)
        if data:
            show(decoder.decode(data))
        elif over:
            return
        time.sleep(LOOK_S)


def explain_first_error(paths: RunPaths, fetch: Callable[[Path], None]) -> Iterator[str]:
    """Root cause of the newest incident: lines with the event, the traceback and the end of the log. Calls `fetch` with
    each file before reading it. Raises RunError if no rank has died.
    """
    died = [event for event in read_events(paths.events) if event.get("kind") == EventKind.WORKER_DIED]
    attempts = {event.get("attempt") for event in died}
    numbers = sorted(number for number in attempts if isinstance(number, int))
    causes = sorted(
        path
        for number in paths.list_logged_attempts()
        for path in paths.exit_cause(number, 0).parent.glob("rank-*.cause.json")
    )
    if not numbers and not causes:
        raise RunError(f"no rank of {paths.display_name} has died; run `phalanx logs` without --first-error")
    if numbers:
        event = next(event for event in died if event.get("attempt") == numbers[-1])
        yield f"attempt {numbers[-1]}: {event_text.describe_event(event)}"
        if event.get("signal"):
            yield from _recorded_cause(paths, event)
        rank = event.get("rank")
        found = [(numbers[-1], rank)] if isinstance(rank, int) else []
    else:
        match = re.search(r"attempt-(\d+)/rank-(\d+)", causes[-1].as_posix())
        found = [(int(match[1]), int(match[2]))] if match else []
    for attempt, rank in found:
        yield from _rank_error_lines(paths, attempt, rank, fetch)


def _recorded_cause(paths: RunPaths, died: dict[str, Any]) -> Iterator[str]:
    """Recorded facts of a rank that was killed by a signal and could not report its cause."""
    attempt, rank = died.get("attempt"), died.get("rank")
    if died.get("doing"):
        yield f"  operation: {died['doing']}"
    steps = [record.get("step") for record in read_lines(paths.metrics) if record.get("attempt") == attempt]
    yield f"  last step of the attempt: {steps[-1] if steps else 'none'}"
    events = list(read_events(paths.events))
    for event in events[: events.index(died)]:
        if event.get("kind") == EventKind.INJECTED and (event.get("attempt"), event.get("rank")) == (attempt, rank):
            yield f"  {event_text.describe_event(event)}"
    for event in events[events.index(died) :]:
        after = event.get("kind") == EventKind.HEALTH and event.get("after") == f"the death of rank {rank}"
        if after or event.get("kind") in (EventKind.INCIDENT, EventKind.GAVE_UP):
            yield f"  {event_text.describe_event(event)}"
    if died.get("signal") == "SIGKILL":
        yield (
            "  SIGKILL comes from outside, and the process cannot log it. Senders are the kernel when memory runs "
            "out (see `dmesg -T` on that machine), schedulers, container limits and users"
        )


def _rank_error_lines(paths: RunPaths, attempt: int, rank: int, fetch: Callable[[Path], None]) -> Iterator[str]:
    cause, log = paths.exit_cause(attempt, rank), paths.log(attempt, rank)
    for file in (cause, log):
        if file.exists():
            fetch(file)
    if cause.exists():
        try:
            tree = json.loads(cause.read_text(encoding="utf-8"))
            yield str(tree.get("traceback") or tree.get("message") or "")
        except (OSError, ValueError, AttributeError):
            yield f"{cause} cannot be read"
    if log.exists():
        lines = read_tail(log).splitlines()[-LAST_LINES:]
        yield f"==> {log} <==" if lines else f"==> {log} is empty <=="
        yield from lines


# ------------------------------------------------------------------------------------------------------------ terminal
# The output stream: once it is closed, the program continues silently.


class QuietStream:
    """Text stream that drops its output, instead of raising, once its reader, terminal or disk is gone (`| head`, EIO).
    Its descriptor then points to /dev/null, since buffered text would raise at the next flush.
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
        """Write, unless the stream is closed."""
        if not self._lost:
            try:
                return self._stream.write(text)
            except OSError:
                self._lose()
        return len(text)

    def flush(self) -> None:
        """Flush, unless the stream is closed."""
        if not self._lost:
            try:
                self._stream.flush()
            except OSError:
                self._lose()

    def _lose(self) -> None:
        self._lost = True
        null = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):  # a stream without a descriptor
            os.dup2(null, self._stream.fileno())
        os.close(null)


def open_terminal(stream: TextIO | None = None, width: int | None = None) -> Console:
    """A rich console on a stream (standard output if None), which drops its output once the stream is closed."""
    output = QuietStream(sys.stdout if stream is None else stream)
    return Console(file=cast(TextIO, output), width=width, highlight=False, emoji=False)


# ------------------------------------ progress bars for work before and after training: tokenising, exporting, loading


SLOW_S = 5.0  # without a terminal, a phase that takes longer prints a line
# Phases counted in bytes: their bar also shows a rate.
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
    """Progress bars of phases: yields a function `(phase, done, total)`. The bars vanish at the end; without a
    terminal, a phase prints one line once it has run for SLOW_S seconds.

    `aside` is for a command whose standard output is its result: bars on standard error, and no lines.
    """
    console = open_terminal(sys.stderr if aside else None)
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TextColumn("{task.fields[rate]}"),
    )
    bars: dict[str, TaskID] = {}
    slow_at: dict[str, float] = {}  # when a phase without a terminal gets its line
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as shown:

        def report(phase: str, done: int, total: int) -> None:
            if phase not in bars:
                name = PHASES.get(phase, phase)
                bars[phase] = shown.add_task(name, total=total, rate="")
                slow_at[phase] = math.inf if console.is_terminal or aside else time.monotonic() + SLOW_S
            if time.monotonic() >= slow_at[phase]:
                slow_at[phase] = math.inf
                console.print(f"{PHASES.get(phase, phase)}: {100 * done / max(1, total):.0f} %")
            shown.update(bars[phase], completed=done, total=total)
            task = shown.tasks[bars[phase]]
            if phase in IN_BYTES and task.speed:
                shown.update(bars[phase], rate=f"{task.speed / 1e6:.1f} MB/s")

        yield report
