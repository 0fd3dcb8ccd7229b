"""What is written to a run folder: whole lines, whole files, readers that pass over what is torn."""

import json
import os
import threading
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.json_lines import append_line, read_last_line, read_lines, write_atomic
from phalanx.core.records import StepRecord, read_steps, split_attempts, write_event
from phalanx.core.run_paths import RunPaths


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert list(read_lines(path)) == []
    assert read_last_line(path) is None
    records = [{"n": 1, "text": "naïve\n試し"}, {"n": 2, "path": "x"}, {}]
    for record in records:
        append_line(path, record)
    assert list(read_lines(path)) == records
    append_line(path, {"path": Path("/x")})  # what JSON does not know is written as text
    assert list(read_lines(path))[-1] == {"path": "/x"}
    append_line(path, {"loss": float("nan"), "lr": float("inf"), "step": 3})
    assert list(read_lines(path))[-1] == {"loss": None, "lr": None, "step": 3}


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "lo', b"\xff\xfe\n", b"[1]\n", b"5\n", b"\n", b"[" * 10**5 + b"\n", b"\0" * 100]
)
def test_a_torn_line_costs_nothing_but_itself(tmp_path: Path, torn: bytes) -> None:
    """A writer died, or the disk was full, in the middle of a line; then another attempt went on."""
    path = tmp_path / "a.jsonl"
    append_line(path, {"n": 1})
    with open(path, "ab") as file:
        file.write(torn)
    assert read_last_line(path) == {"n": 1}
    append_line(path, {"n": 2})
    append_line(path, {"n": 3})
    assert [record["n"] for record in read_lines(path)] == [1, 2, 3]
    assert read_last_line(path) == {"n": 3}


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def write(who: int) -> None:
        for number in range(200):
            append_line(path, {"who": who, "number": number, "text": "x" * 500})

    writers = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = path.read_text().splitlines()
    assert len(lines) == len(list(read_lines(path))) == 800


def test_an_event_says_what_when_and_in_which_attempt(tmp_path: Path) -> None:
    event = write_event(tmp_path / "events.jsonl", "auto_resolved", 3, key="train.dtype", value=None)
    assert list(read_lines(tmp_path / "events.jsonl")) == [event]
    assert {"kind": "auto_resolved", "attempt": 3, "key": "train.dtype", "value": None}.items() <= event.items()


def test_an_atomic_write_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_atomic(path, "old")
    write_atomic(path, "naïve")
    assert path.read_text(encoding="utf-8") == "naïve"
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "naïve"
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    """Such as /dev/null, by root."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in ((pipe, "device or a pipe"), (tmp_path, "directory")):
        with pytest.raises(OSError, match=why):
            write_atomic(path, "text")
    assert os.listdir(tmp_path) == ["pipe"]
    assert pipe.is_fifo()


def test_two_writers_whose_processes_have_one_number_leave_a_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two nodes, in containers of their own: one writes while the other one forces its file to the disk."""
    path, sync = tmp_path / "over", os.fsync

    def meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        write_atomic(path, "of the other node")
        assert path.read_text() == "of the other node"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    write_atomic(path, "of this one")
    assert path.read_text() == "of this one"
    assert os.listdir(tmp_path) == ["over"]


STEPS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), max_size=30)


@given(STEPS)
def test_the_trajectory_that_counts_walks_upwards_and_nothing_disappears(steps: list[tuple[int, int]]) -> None:
    records = [{"step": step, "attempt": attempt, "id": number} for number, (step, attempt) in enumerate(steps)]
    kept, lost = split_attempts(records)
    numbers = [record["step"] for record in kept]
    assert numbers == sorted(set(numbers))
    assert sorted(record["id"] for record in [*kept, *lost]) == list(range(len(records)))
    attempts = [record["attempt"] for record in kept]
    assert attempts == sorted(attempts)


def test_steps_that_were_walked_again_count_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, attempt, loss in ((1, 1, 5.0), (2, 1, 4.0), (3, 1, 3.0), (2, 2, 4.5), (3, 2, 3.5), (4, 1, 9.0)):
        append_line(path, {"step": step, "attempt": attempt, "loss": loss})
    append_line(path, {"step": "four", "attempt": 2})
    append_line(path, {"no": "step"})
    assert [(record["step"], record["loss"]) for record in read_steps(path)] == [(1, 5.0), (2, 4.5), (3, 3.5)]


def test_a_step_record_has_what_a_report_needs() -> None:
    names = {field.name for field in fields(StepRecord)}
    assert {"step", "attempt", "loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s", "mfu", "mfu_causal",
            "memory_bytes", "wait_s", "time"} <= names  # fmt: skip


def test_file_names_are_the_ones_that_others_rely_on() -> None:
    paths = RunPaths(Path("r"))
    assert [str(path) for path in (paths.config, paths.metrics, paths.events, paths.report, paths.checkpoints)] == [
        "r/config.yaml",
        "r/metrics.jsonl",
        "r/events.jsonl",
        "r/report.html",
        "r/checkpoints",
    ]
    logs = {paths.log(attempt, rank) for attempt in range(3) for rank in range(3)}
    causes = {paths.exit_cause(attempt, rank) for attempt in range(3) for rank in range(3)}
    assert len(logs | causes) == 18
    assert json.dumps(str(paths.log(12, 3))) == '"r/logs/attempt-012/rank-00003.log"'
