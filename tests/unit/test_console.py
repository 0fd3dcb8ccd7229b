import io
import os
import pty
import re
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from phalanx.core.json_lines import append_line
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.report import logs
from phalanx.report.console import Console, Follower, render_run_summary

DIED = {"kind": "worker_died", "time": 5.0, "attempt": 1, "rank": 1, "pid": 4242, "signal": 9}


def step(number: int, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "step": number, "attempt": attempt, "loss": 5 - number / 100, "step_s": 0.5, "tokens_per_s": 2000.0,
        "time": float(number), **changes,
    }  # fmt: skip


class Terminal:
    """A pseudo-terminal and all that was written to it."""

    def __init__(self) -> None:
        self.main, child = pty.openpty()
        self.stream = open(child, "w", encoding="utf-8")  # noqa: SIM115
        self.raw = ""

    def read(self) -> str:
        """What is new, without its colours."""
        self.stream.flush()
        found = b""
        while select.select([self.main], [], [], 0.1)[0]:  # the kernel hands it over a moment later
            found += os.read(self.main, 1 << 16)
        new = found.decode()
        self.raw += new
        return re.sub(r"\x1b\[[0-9;]*m", "", new)

    def close(self) -> None:
        self.stream.close()
        os.close(self.main)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    opened = Terminal()
    yield opened
    opened.close()


def test_bar_shows_the_step_and_moves_back_after_a_restart(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.report.console.REDRAW_S", 0.0)
    with Console(200, stream=terminal.stream) as console:
        for number in (1, 60, 120):  # few: a terminal that nobody reads blocks its writer
            console.on_step(step(number))
        shown = terminal.read().rsplit("training", 1)[1]
        assert re.search(r"120/200 +loss 3\.8000 +2k tokens/s +0:40 left +0:00 elapsed", shown)
        full = shown.count("━")
        console.on_event(DIED)
        console.on_event({"kind": "resumed", "time": 6.0, "step": 100})
        text = terminal.read()
        assert "✗ rank 1 (pid 4242) was killed by SIGKILL after step 120" in text
        assert "↻ resumed from the checkpoint of step 100" in text
        assert "100/200" in text.rsplit("training", 1)[1]
        console.on_step(step(101, 2))
        assert "101/200" in terminal.read()
    assert full > 25  # the bar takes the room that is left


def test_no_thread_is_started_and_stdout_is_left_alone(terminal: Terminal) -> None:
    before, stdout = len(os.listdir("/proc/self/task")), sys.stdout
    with Console(10, stream=terminal.stream) as console:
        console.on_step(step(1))
        assert len(os.listdir("/proc/self/task")) == before
        assert sys.stdout is stdout


def test_the_cursor_stays_visible_whatever_happens(terminal: Terminal) -> None:
    def interrupted() -> None:
        with Console(10, stream=terminal.stream) as console:
            console.on_step(step(1))
            terminal.read()
            assert terminal.raw.rfind("\x1b[?25h") > terminal.raw.rfind("\x1b[?25l")  # also while it runs
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert terminal.read().removesuffix("\x1b[?25h").endswith("\n")
    assert terminal.raw.rfind("\x1b[?25h") > terminal.raw.rfind("\x1b[?25l")


def test_a_forked_child_does_not_touch_the_terminal(terminal: Terminal) -> None:
    console = Console(10, stream=terminal.stream)
    console.on_step(step(1))
    terminal.read()
    pid = os.fork()
    if pid == 0:
        console.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert terminal.read() == ""
    console.close()


def test_a_narrow_terminal_drops_figures_but_not_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "44")
    monkeypatch.setattr("phalanx.report.console.REDRAW_S", 0.0)
    narrow = Terminal()
    with Console(200, stream=narrow.stream) as console:
        console.on_step(step(150))
        shown = narrow.read().rsplit("training", 1)[1]
        assert "150/200" in shown
        assert "loss 3.5000" in shown
        assert "elapsed" not in shown
    narrow.close()


def test_without_a_terminal_a_line_now_and_then_and_every_event() -> None:
    stream = io.StringIO()
    with Console(100, stream=stream) as console:
        for number in range(1, 38):
            console.on_step(step(number))
        console.on_event(DIED)
        console.on_event({"kind": "resumed", "step": 30})
        for number in range(31, 101):
            console.on_step(step(number, 2))
        console.on_event({"kind": "evaluated", "step": 100, "loss": 2.0})
        console.on_event({"kind": "finished", "step": 100, "seconds": 50})
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    shown = [int(found) for found in re.findall(r"training step (\d+)/100", text)]
    assert shown[:3] == [1, 6, 11]
    assert shown[shown.index(37) + 1] == 31 or shown[shown.index(37) + 1] == 32  # 37: where the run stood when it died
    assert shown[-1] == 100
    assert len(shown) < 30
    lines = text.splitlines()
    assert lines.index(next(line for line in lines if "step 37/100" in line)) + 1 == next(
        i for i, line in enumerate(lines) if "killed by SIGKILL after step 37" in line
    )
    assert "held-out loss 2.0000, perplexity 7.4 after step 100" in text


def test_a_reader_that_goes_away_silences_the_console_and_nothing_else() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream:
        with Console(10, stream=stream) as console:
            for number in range(1, 11):
                console.on_step(step(number))
            console.on_event(DIED)
        print("what others write to it is lost as quietly", file=stream)
        stream.flush()
        assert os.readlink(f"/proc/self/fd/{writer}") == "/dev/null"


def test_a_terminal_that_is_closed_silences_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("phalanx.report.console.REDRAW_S", 0.0)
    main, child = pty.openpty()
    with open(child, "w", encoding="utf-8") as stream, Console(10, stream=stream) as console:
        console.on_step(step(1))
        os.close(main)
        console.on_step(step(2))
        console.on_event(DIED)


def test_a_stream_without_unicode_gets_ascii_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Console(10, stream=stream) as console:
        console.on_event(DIED)
    stream.flush()
    assert b"X rank 1 (pid 4242) was killed" in raw.getvalue()


def test_text_of_events_is_not_read_as_markup_and_not_folded() -> None:
    stream = io.StringIO()
    with Console(10, stream=stream) as console:
        console.on_event({"kind": "warning", "message": "[bold]a[/bold] :smile: " + "x" * 500})
    assert "[bold]a[/bold] :smile: " + "x" * 500 + "\n" in stream.getvalue()


class Listener(Console):
    """A console that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(100, stream=io.StringIO())
        self.heard: list[Any] = []

    def on_step(self, record: dict[str, Any]) -> None:
        self.heard.append(record["step"])

    def on_event(self, event: dict[str, Any]) -> None:
        self.heard.append(event["kind"])


def test_follower_reads_both_files_in_order_of_time_and_waits_for_whole_lines(tmp_path: Path) -> None:
    paths, console = RunPaths(tmp_path), Listener()
    follower = Follower(paths, console)
    follower.poll()  # there are no files yet
    assert console.heard == []
    append_line(paths.metrics, step(1))
    append_line(paths.metrics, step(3))
    append_line(paths.events, {"kind": "warning", "time": 2.0})
    with open(paths.metrics, "a") as file:
        file.write('{"step": 4, "ti')
    follower.poll()
    assert console.heard == [1, "warning", 3]
    with open(paths.metrics, "a") as file:
        file.write('me": 4.0}\n{"torn {"step": 5}\n')
    append_line(paths.metrics, step(6))
    follower.poll()
    follower.poll()
    assert console.heard == [1, "warning", 3, 4, 6]


def test_a_line_that_is_newer_than_a_look_waits_for_an_older_one_of_the_other_file(tmp_path: Path) -> None:
    paths, console = RunPaths(tmp_path), Listener()
    follower = Follower(paths, console)
    late = time.time() + 3600
    append_line(paths.events, {"kind": "warning", "time": late})
    follower.poll()
    assert console.heard == []
    append_line(paths.metrics, step(1, time=late - 1))
    append_line(paths.metrics, step(2, time=late + 1))
    follower.poll(final=True)
    assert console.heard == [1, "warning", 2]
    append_line(paths.events, {"kind": "stopped", "time": late + 2})
    follower.poll()
    follower.poll()  # of a clock that is ahead: it waits for one look, not for an hour
    assert console.heard[-1] == "stopped"


def test_a_step_is_shown_at_the_time_when_it_was_done() -> None:
    stream = io.StringIO()
    with Console(10, stream=stream) as console:
        console.on_step(step(1, time=5.0))
        console.on_event(DIED | {"time": 6.0})
    times = [line[:8] for line in stream.getvalue().splitlines()]
    assert times[:2] == [time.strftime("%H:%M:%S", time.localtime(at)) for at in (5.0, 6.0)]


def test_a_bar_that_the_terminal_has_folded_is_taken_away(terminal: Terminal) -> None:
    with Console(100, stream=terminal.stream) as console:
        console.rich.width = 100
        console.on_step(step(1))
        terminal.read()
        for width, rows in ((40, 3), (40, 1), (80, 1), (79, 2)):
            console.rich.width, console._drawn = width, 0.0
            begun = len(terminal.raw)
            console.tick()
            terminal.read()
            assert terminal.raw[begun:].count("\x1b[1A") == rows - 1, width


@pytest.mark.parametrize(("from_start", "expected"), [(True, [1, "warning", 2]), (False, [2])])
def test_follower_starts_where_it_is_told(tmp_path: Path, from_start: bool, expected: list[Any]) -> None:
    paths, console = RunPaths(tmp_path), Listener()
    append_line(paths.metrics, step(1))
    append_line(paths.events, {"kind": "warning", "time": 1.5})
    follower = Follower(paths, console, from_start=from_start)
    append_line(paths.metrics, step(2))
    follower.poll()
    assert console.heard == expected


def shown(paths: RunPaths) -> str:
    stream = io.StringIO()
    RichConsole(file=stream, width=300).print(render_run_summary(paths))
    return stream.getvalue()


def test_summary_names_what_the_run_left(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert str(tmp_path) in shown(paths)  # nothing recorded: only the folder
    for record in (step(9), step(10), step(9, 2, loss=1.25)):
        append_line(paths.metrics, record)
    append_line(paths.events, {"kind": str(EventKind.EVALUATED), "step": 9, "loss": 2.0})
    append_line(paths.events, {"kind": str(EventKind.EVALUATED), "step": 8, "set": "math", "loss": 3.5})
    append_line(paths.events, {"kind": str(EventKind.EVALUATED), "step": 9, "set": "math", "loss": 3.0})
    append_line(paths.events, {"kind": str(EventKind.CHECKPOINT_SAVED), "step": 8})
    for name in ("step-7", "step-8", "step-18"):
        (paths.checkpoints / name).mkdir(parents=True)
    paths.report.touch()
    text = shown(paths)
    assert re.search(r"last step +9\b", text)
    assert re.search(r"\bloss +1\.2500", text)
    assert re.search(r"held-out loss +2\.0000  \(perplexity 7\.4\)", text)
    assert re.search(r"math loss +3\.0000  \(perplexity 20\.1\)", text)
    assert f"{paths.checkpoints / 'step-8'} " in text
    assert str(paths.report) in text


STARTED = {
    "kind": "run_started", "parameters": 2_020_000, "trainable": 2_020_000, "world": 2, "device": "cpu",
    "models": ["cpu", "cpu"], "dtype": "fp32", "engine": "sharded", "steps": 9, "global_batch": 16, "unit": "tokens",
}  # fmt: skip
RESOLVED = {"kind": "auto_resolved", "key": "optim.double_buffer", "value": True, "reason": "it fits"}
SPLIT = {"kind": "work_split", "step": 1, "shares": [10, 6], "why": "as measured"}
FIRST_SCREEN = ["model    2.02M parameters, fp32, sharded engine, 9 steps", "devices  2 x cpu", "folder   runs/a"]


def first_lines(*records: dict[str, Any], verbose: bool = False) -> list[str]:
    stream = io.StringIO()
    with Console(9, "a", stream, folder="runs/a", verbose=verbose) as console:
        for record in records:
            (console.on_event if "kind" in record else console.on_step)(record)
    return stream.getvalue().split(" a step 1/9")[0].splitlines()[:-1]


def test_a_run_begins_with_four_lines_and_the_rest_is_for_verbose() -> None:
    attempt = {"kind": "attempt_started", "attempt": 1, "pids": {"0": 8, "1": 9}}
    events = [STARTED, attempt, RESOLVED, {"kind": "measuring"}, {"kind": "node_joined", "node": 1}, SPLIT]
    split = "split    10+6 sequences a step (as measured)"
    assert first_lines(*events, step(1)) == [*FIRST_SCREEN, split]
    more = first_lines(*events, step(1), verbose=True)
    assert [line for line in more if line[0].isalpha()] == [*FIRST_SCREEN, split]
    assert len(more) == 8
    assert more[4].endswith("optim.double_buffer = True: it fits")


@pytest.mark.parametrize(
    ("started", "records", "line"),
    [
        ({}, [step(1)], "16 sequences a step"),  # one copy of the model
        ({"pipeline": 2, "unit": "samples"}, [step(1)], "16 samples a step, pipeline 2"),
        (
            {"tensor": 2},
            [{"kind": "layout_chosen", "layout": "data 1"}, step(1)],
            "16 sequences a step; layout: data 1",
        ),
        ({}, [step(1, shares=[9, 7], busy_s=[0.1, 0.1])], "9+7 sequences a step"),  # resumed: no event of a split
    ],
)
def test_the_split_is_shown_where_no_event_says_it(
    started: dict[str, Any], records: list[dict[str, Any]], line: str
) -> None:
    assert first_lines(STARTED | started, *records) == [*FIRST_SCREEN, f"split    {line}"]


def test_the_line_of_devices_counts_models_nodes_and_spares() -> None:
    mixed = {"models": ["H100", "T4", "T4"], "hosts": ["a", "b"], "spares": ["c"]}
    assert first_lines(STARTED | mixed, step(1))[1] == "devices  2 x T4, 1 x H100 on 2 nodes, 1 spare"
    assert first_lines(STARTED | {"models": None}, step(1))[1] == "devices  2 x cpu"


def test_what_goes_wrong_before_the_first_step_is_shown() -> None:
    lines = first_lines(STARTED, {"kind": "warning", "message": "no shared memory"}, DIED, SPLIT, step(1))
    assert [line[9:] for line in lines[3:5]] == ["! no shared memory", "✗ rank 1 (pid 4242) was killed by SIGKILL"]


def test_a_phase_without_a_terminal_has_a_line_only_if_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("phalanx.report.logs.time.monotonic", lambda: now[0])
    with logs.phase_progress() as progress:
        progress("tokens", 0, 200)
        progress("files", 0, 1)
        now[0] = logs.SLOW_S + 1
        progress("tokens", 50, 200)
        progress("tokens", 200, 200)
    assert capsys.readouterr().out == "tokenising: 25 %\n"
