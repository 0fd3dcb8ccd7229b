"""The index of a growing run says what a whole reading of its records says, however they come in."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.run_paths import RunPaths
from phalanx.report.history import RunHistory, read_run_history, shift_clock
from phalanx.report.incidents import find_incidents
from phalanx.report.run_index import CHUNK_BYTES, RunIndex
from phalanx.report.status import describe_run

BEGAN = 1_700_000_000.0


def write_life(paths: RunPaths, seed: int, steps: int = 300) -> list[tuple[Path, dict[str, Any]]]:
    """Lines of a run with deaths and replayed steps, in the order in which they are written."""
    draw, lines, now, step, attempt = random.Random(seed), [], BEGAN, 0, 1

    def event(kind: str, **details: Any) -> None:
        lines.append((paths.events, {"kind": kind, "time": now, "attempt": attempt, **details}))

    event("run_started", world=2, steps=steps, device="cpu", again=False)
    while step < steps:
        step, now = step + 1, now + draw.uniform(0.1, 0.3)
        loss = None if draw.random() < 0.01 else 5 - step / 100
        record = {"step": step, "attempt": attempt, "loss": loss, "step_s": 0.1, "time": now, "tokens_per_s": 10.0}
        record |= {"memory_bytes": draw.randrange(1, 1 << 30), "shares": [3, 5], "busy_s": [0.05, 0.08]}
        lines.append((paths.metrics, record))
        if draw.random() < 0.03:
            now += 0.01
            event("checkpoint_saved", step=step)
        if draw.random() < 0.02:
            now += 0.5
            event("worker_died", rank=1, signal="SIGKILL")
            attempt += 1
            event("restarted")
            step = max(0, step - draw.randrange(12))
            event("resumed", step=step)
        if attempt > 1 and draw.random() < 0.02:  # a late writer of an attempt that is over
            lines.append((paths.metrics, {**record, "attempt": attempt - 1}))
    event("finished", step=steps)
    return lines


def append(path: Path, record: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def of_counted(run: RunHistory) -> list[tuple[int, int]]:
    return [(record["step"], record["attempt"]) for record in run.counted_steps]


def describe_incidents(run: RunHistory) -> list[Any]:
    return [(each.what, each.recovery, each.after_step, each.seconds) for each in find_incidents(run)]


@pytest.mark.parametrize("seed", range(6))
def test_an_index_that_follows_says_what_a_whole_reading_says(tmp_path: Path, seed: int) -> None:
    paths, draw = RunPaths(tmp_path), random.Random(seed)
    index = RunIndex(paths)
    for path, record in write_life(paths, seed):
        append(path, record)
        if draw.random() < 0.3:
            index.poll(most_bytes=draw.choice([700, CHUNK_BYTES]))
    while index.poll():
        continue
    whole, followed = read_run_history(paths), index.history()
    assert index.complete
    assert list(zip(index.columns.step, index.columns.attempt, strict=True)) == of_counted(whole)
    read = index.read_records(index.columns.offset)
    assert [shift_clock(record, whole.clock_moves) for record in read] == whole.counted_steps
    assert followed.clock_moves == whole.clock_moves
    assert followed.totals.counted_s == pytest.approx(whole.totals.counted_s)
    assert followed.totals.lost_by_attempt == whole.totals.lost_by_attempt
    assert len(index.lost_offsets) == whole.totals.lost_steps
    assert index.peak_memory_bytes == max(each["memory_bytes"] for each in [*whole.counted_steps, *whole.lost_steps])
    assert describe_incidents(followed) == describe_incidents(whole)
    now = BEGAN + 1000
    for fact, value in describe_run(whole, paths, now, None, []).items():
        near = pytest.approx(value) if fact == "goodput" else value  # sums in another order
        assert describe_run(followed, paths, now, None, [])[fact] == near, fact
    assert of_counted(followed) != of_counted(whole)  # it holds few of the records


def test_ranges_are_read_in_place_and_thinned(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step in range(1, 101):
        append(paths.metrics, {"step": step, "attempt": 1, "loss": 1.0, "step_s": 1.0, "time": BEGAN + step})
    index = RunIndex(paths)
    index.poll()
    assert [record["step"] for record in index.read_range(20, 24, 10)] == [20, 21, 22, 23, 24]
    assert [record["step"] for record in index.read_range(1, 100, 10)] == list(range(1, 101, 10))
    assert index.read_range(500, 900, 10) == []


def test_torn_foreign_and_endless_lines_are_passed_over(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    text = b'{"step": 1, "attempt": 1, "loss": 1.0}\n{"step": 2, "att\n[1]\n{"step": "x"}\n{"step": 99999999999}\n'
    paths.metrics.write_bytes(text + b"\xff\xfe\n" + b"x" * 5000 + b'\n{"step": 2, "attempt": 1}\n{"step": 3')
    index = RunIndex(paths)
    while index.poll(most_bytes=1024):
        continue
    assert list(index.columns.step) == [1, 2]
    with open(paths.metrics, "ab") as file:  # the rest of a line that was being written
        file.write(b', "attempt": 1}\n')
    assert index.poll() and list(index.columns.step) == [1, 2, 3]


def test_a_run_folder_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    index = RunIndex(paths)
    assert not index.poll() and index.complete
    for step in range(1, 9):
        append(paths.metrics, {"step": step, "attempt": 1, "step_s": 1.0})
    index.poll()
    paths.metrics.unlink()
    append(paths.metrics, {"step": 1, "attempt": 1, "step_s": 1.0})
    index.poll()
    assert list(index.columns.step) == [1] and index.history().totals.counted_s == 1.0


def test_a_long_run_is_sampled_before_it_is_read(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with open(paths.metrics, "w", encoding="utf-8") as file:
        for step in range(1, 20_001):
            file.write(json.dumps({"step": step, "attempt": 1, "loss": 1 / step, "time": BEGAN + step}) + "\n")
    index = RunIndex(paths)
    index.poll(most_bytes=4096)
    assert not index.complete and 0 < index.progress < 0.1
    kept, lost = index.sample(200)
    assert lost == [] and kept[0]["step"] == 1 and kept[-1]["step"] == 20_000 and 200 <= len(kept) < 1000
    assert index.history().counted_steps[-1]["step"] == 20_000  # the newest are told at once
