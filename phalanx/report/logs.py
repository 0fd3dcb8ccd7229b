"""Finding the words of a run: of its nodes, of its ranks, and of the first that went wrong."""

import codecs
import contextlib
import json
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

TAIL_BYTES = 64 * 1024  # of a log that is shown from near its end
LAST_LINES = 40  # of the log of a rank that went wrong
LOOK_S = 0.25
NOTHING = "there are no logs yet"
ELSEWHERE = (  # of an empty one, as a rank's is where nothing went wrong
    "the progress of a run is kept here where `phalanx launch` started it, and else went to the terminal of its "
    "command; `phalanx status` and `phalanx report` show what became of it"
)


def find_log(paths: RunPaths, rank: int | None, node: int | None) -> Path:
    """The file that holds what a rank, a node, or the run said: of a rank that of the newest attempt.

    Raises RunError with what there is instead.
    """
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
    return f"there are logs of {' and '.join(said)}" if said else NOTHING


def has_no_output(paths: RunPaths) -> bool:
    """Whether nothing of a run has said anything yet: its job waits, or it is just being started."""
    return not _job_logs(paths) and _describe_logs(paths) == NOTHING


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")


def read_tail(path: Path) -> str:
    """The end of a file, from the beginning of a line on; all of one that is short."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        data = file.read()
    if size > TAIL_BYTES:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")


def follow_file(find: Callable[[], Path], show: Callable[[str], None], ends: Callable[[], bool]) -> None:
    """Show a growing file from near its end on, and the one that takes its place when `find` names another, until
    `ends` says so and there is nothing more to show."""
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
                offset = 0  # it was begun anew
            file.seek(offset)
            data = file.read()
        offset += len(data)
        if data:
            show(decoder.decode(data))
        elif over:
            return
        time.sleep(LOOK_S)


def explain_first_error(paths: RunPaths, fetch: Callable[[Path], None]) -> Iterator[str]:
    """Lines that tell of the first real cause of the newest incident: the event, the traceback, the end of the log.

    `fetch` is called with each file before it is read. Raises RunError where nothing of the run has died.
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
        raise RunError(
            f"no rank of {paths.display_name} has died, so there is no first error; see `phalanx logs` without it"
        )
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
    """What the records know of a rank that a signal ended, which had no time to say anything itself."""
    attempt, rank = died.get("attempt"), died.get("rank")
    if died.get("doing"):
        yield f"  it was doing: {died['doing']}"
    steps = [record.get("step") for record in read_lines(paths.metrics) if record.get("attempt") == attempt]
    yield f"  the last step that the attempt has done: {steps[-1] if steps else 'none'}"
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
            "  SIGKILL comes from outside and leaves a process no time for a word: the kernel sends it where memory"
            " runs out (`dmesg -T` on that machine says so), and so do schedulers, container limits and people"
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
# The terminal, or whatever the output goes to: when nobody takes it any more the program goes on without a word.


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
