"""The process that writes what a leading agent says: one that something has killed is replaced."""

import os
import signal
from pathlib import Path

from phalanx.records import Kind, Placement, RunPaths, read_lines
from phalanx.recorder import Recorder
from tests.helpers import run_ranks, wait_until


def killed_in_between(placement: Placement, folder: str) -> list[str]:
    """What is written of two messages, between which the process that writes is killed."""
    paths = RunPaths(Path(folder))
    recorder = Recorder(paths, 10, "tokens")
    recorder.note(Kind.WARNING, {"attempt": 1, "message": "one"})
    wait_until(lambda: messages(paths) == ["one"], timeout_s=60)
    first = recorder._pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: recorder.safe() == [] and recorder._pid != first, timeout_s=60)
    recorder.note(Kind.WARNING, {"attempt": 1, "message": "two"})
    recorder.close()
    return messages(paths)


def messages(paths: RunPaths) -> list[str]:
    return [str(event["message"]) for event in read_lines(paths.events)]


def test_one_that_is_killed_is_replaced(tmp_path: Path) -> None:
    assert run_ranks(killed_in_between, 1, folder=str(tmp_path)) == [["one", "two"]]
