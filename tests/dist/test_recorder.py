"""The process that writes what a leading agent says: one that something has killed is replaced."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.json_lines import append_line, read_lines
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.launch import recorder as recording
from phalanx.launch.recorder import EventRecorder
from tests.helpers import run_ranks, wait_until


def killed_in_between(placement: Placement, folder: str) -> list[str]:
    """What is written of two messages, between which the process that writes is killed."""
    paths = RunPaths(Path(folder))
    recorder = EventRecorder(paths, 10, "tokens")
    recorder.record(EventKind.WARNING, {"attempt": 1, "message": "one"})
    wait_until(lambda: messages(paths) == ["one"], timeout_s=60)
    first = recorder._pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: recorder.take_committed_steps() == [] and recorder._pid != first, timeout_s=60)
    recorder.record(EventKind.WARNING, {"attempt": 1, "message": "two"})
    recorder.close()
    return messages(paths)


def messages(paths: RunPaths) -> list[str]:
    return [str(event["message"]) for event in read_lines(paths.events) if event["kind"] == EventKind.WARNING]


def test_one_that_is_killed_is_replaced(tmp_path: Path) -> None:
    assert run_ranks(killed_in_between, 1, folder=str(tmp_path)) == [["one", "two"]]


def said_again(placement: Placement, folder: str) -> list[list[Any]]:
    """What is written of stops that a next leader is told again: the one before had written that of attempt 1."""
    paths = RunPaths(Path(folder))
    append_line(
        paths.events, {"kind": EventKind.STOP_REQUESTED, "time": time.time(), "attempt": 1, "signal": "SIGTERM"}
    )
    recorder = EventRecorder(paths, 10, "tokens")
    for attempt in (1, 2):
        recorder.record(EventKind.STOP_REQUESTED, {"attempt": attempt, "signal": "SIGINT", "unless_written": True})
    recorder.record(EventKind.STOP_REQUESTED, {"attempt": 2, "signal": "SIGHUP"})
    recorder.close()
    return [[event["attempt"], event["signal"], "unless_written" in event] for event in read_lines(paths.events)]


def test_what_is_said_again_is_written_once_an_attempt(tmp_path: Path) -> None:
    found = run_ranks(said_again, 1, folder=str(tmp_path))[0]
    assert found == [[1, "SIGTERM", False], [2, "SIGINT", False], [2, "SIGHUP", False]]


def killed_before_it_wrote(placement: Placement, folder: str, revived: bool) -> list[list[Any]]:
    """What is written of messages that were told to a process that is killed before it reads them; `revived`: before
    the end."""
    paths = RunPaths(Path(folder))
    recorder = EventRecorder(paths, 10, "tokens")
    recorder.record(EventKind.WARNING, {"attempt": 1, "message": "one"})
    wait_until(
        lambda: messages(paths) == ["one"] and recorder.take_committed_steps() == [] and not recorder._unwritten,
        timeout_s=60,
    )
    first = recorder._pid
    os.kill(first, signal.SIGSTOP)
    failed = {"attempt": 2, "what": "rank 1 died", "done": "all again", "began": time.time()}
    recorder.record(EventKind.INCIDENT, failed)
    for number in range(2000):  # more than a pipe takes
        recorder.record(EventKind.WARNING, {"attempt": 1, "message": f"{number} {'x' * 50}"})
    append_line(paths.metrics, {"step": 7, "attempt": 2, "time": time.time()})
    append_line(paths.events, {"kind": EventKind.CHECKPOINT_SAVED, "time": time.time(), "attempt": 2, "step": 5})
    os.kill(first, signal.SIGKILL)
    saved: list[int] = []
    if revived:
        wait_until(lambda: bool(saved.extend(recorder.take_committed_steps()) or saved), timeout_s=60)
    recorder.close()
    incidents = [
        [event["what"], event["step"]] for event in read_lines(paths.events) if event["kind"] == EventKind.INCIDENT
    ]
    return [[message.split()[0] for message in messages(paths)], incidents, saved]


@pytest.mark.parametrize("revived", [False, True])
def test_what_one_that_is_killed_has_not_written_is_written_by_the_next(revived: bool, tmp_path: Path) -> None:
    [[written, incidents, saved]] = run_ranks(killed_before_it_wrote, 1, folder=str(tmp_path), revived=revived)
    assert written == ["one", *map(str, range(2000))]
    assert incidents == [["rank 1 died", 7]]
    assert saved == ([5] if revived else [])


def killed_before_it_said_so(placement: Placement, folder: str) -> list[str]:
    """What is written of messages where a process is killed behind the first of them, and its incident."""
    paths, died = RunPaths(Path(folder)), Path(folder) / "died"
    tell = recording._RecorderView._reply

    def dies_once(self: Any, what: Any) -> None:
        if not died.exists() and any(event["kind"] == EventKind.INCIDENT for event in read_lines(paths.events)):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if died.exists() or what != {"written": 2}:
            tell(self, what)

    recording._RecorderView._reply = dies_once  # type: ignore[method-assign]
    recorder = EventRecorder(paths, 10, "tokens")
    recorder.record(EventKind.WARNING, {"attempt": 1, "message": "one"})
    recorder.record(EventKind.WARNING, {"attempt": 1, "message": "two"})  # nobody hears that it is written
    recorder.record(
        EventKind.INCIDENT, {"attempt": 2, "what": "rank 1 died", "done": "all again", "began": time.time()}
    )
    wait_until(lambda: messages(paths) == ["one", "two"], timeout_s=60)
    append_line(paths.metrics, {"step": 7, "attempt": 2, "time": time.time()})
    wait_until(died.exists, timeout_s=60)
    recorder.record(EventKind.WARNING, {"attempt": 1, "message": "three"})
    recorder.close()
    return [str(event.get("message") or event["what"]) for event in read_lines(paths.events)]


def test_what_one_that_is_killed_has_written_is_not_written_again(tmp_path: Path) -> None:
    written = run_ranks(killed_before_it_said_so, 1, folder=str(tmp_path))
    assert written == [["one", "two", "rank 1 died", "three"]]


def killed_behind_two_failures(placement: Placement, folder: str, between: bool) -> list[list[Any]]:
    """The incidents of two failures that a process was told of when it was killed; `between`: a step was done between
    them."""
    paths = RunPaths(Path(folder))
    recorder = EventRecorder(paths, 10, "tokens")
    recorder.record(EventKind.WARNING, {"attempt": 1, "message": "one"})
    wait_until(
        lambda: messages(paths) == ["one"] and recorder.take_committed_steps() == [] and not recorder._unwritten,
        timeout_s=60,
    )
    os.kill(recorder._pid, signal.SIGSTOP)
    for attempt in (2, 3):
        failed = {"attempt": attempt, "what": f"rank {attempt} died", "done": "all again", "began": time.time()}
        recorder.record(EventKind.INCIDENT, failed)
        if between or attempt == 3:
            append_line(paths.metrics, {"step": 5 + attempt, "attempt": attempt, "time": time.time()})
    os.kill(recorder._pid, signal.SIGKILL)
    recorder.close()
    return [[event["what"], event["step"]] for event in read_lines(paths.events) if event["kind"] == EventKind.INCIDENT]


@pytest.mark.parametrize(
    ("between", "incidents"),
    [(False, [["rank 2 died; rank 3 died", 8]]), (True, [["rank 2 died", 7], ["rank 3 died", 8]])],
)
def test_failures_are_as_many_incidents_as_without_a_killed_process(
    between: bool, incidents: list[list[Any]], tmp_path: Path
) -> None:
    assert run_ranks(killed_behind_two_failures, 1, folder=str(tmp_path), between=between) == [incidents]


def without_steps(placement: Placement, folder: str) -> list[Any]:
    """What is written of an incident of a job whose steps nobody tells of, before the job is over."""
    paths = RunPaths(Path(folder))
    recorder = EventRecorder(paths, 0, "")
    recorder.record(
        EventKind.INCIDENT, {"attempt": 2, "what": "node 1 was lost", "done": "others go on", "began": time.time()}
    )
    wait_until(lambda: any(event["kind"] == EventKind.INCIDENT for event in read_lines(paths.events)), timeout_s=60)
    recorder.close()
    return [[event["kind"], event["attempt"], event["seconds"] < 60] for event in read_lines(paths.events)]


def test_an_incident_is_over_at_once_where_nobody_tells_of_steps(tmp_path: Path) -> None:
    assert run_ranks(without_steps, 1, folder=str(tmp_path)) == [[[EventKind.INCIDENT, 2, True]]]
