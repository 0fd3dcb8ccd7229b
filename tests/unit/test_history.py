import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import RunError
from phalanx.core.json_lines import append_line
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.report import history


def records(*pairs: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"step": step, "attempt": attempt, "time": float(i)} for i, (step, attempt) in enumerate(pairs)]


def steps(found: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(record["step"], record["attempt"]) for record in found]


def test_steps_walked_again_replace_the_lost_ones() -> None:
    kept, lost = history.split_attempts(records((1, 1), (2, 1), (3, 1), (4, 1), (3, 2)))
    assert steps(kept) == [(1, 1), (2, 1), (3, 2)]
    assert steps(lost) == [(3, 1), (4, 1)]  # step 4 is gone although nobody has walked it again yet


def test_a_late_writer_of_an_older_attempt_changes_nothing() -> None:
    kept, lost = history.split_attempts(records((1, 1), (2, 1), (2, 2), (3, 1)))
    assert steps(kept) == [(1, 1), (2, 2)]
    assert steps(lost) == [(2, 1), (3, 1)]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), max_size=60))
def test_split_loses_no_record_and_keeps_steps_rising(pairs: list[tuple[int, int]]) -> None:
    given_records = records(*pairs)
    kept, lost = history.split_attempts(given_records)
    assert sorted(map(json.dumps, [*kept, *lost])) == sorted(map(json.dumps, given_records))
    walked = [step for step, _ in steps(kept)]
    assert walked == sorted(set(walked))
    tried = [attempt for _, attempt in steps(kept)]
    assert tried == sorted(tried)


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=200))
def test_smooth_stays_between_the_extremes_and_keeps_gaps(values: list[float | None]) -> None:
    averaged = history.smooth(values)
    known = [value for value in values if value is not None]
    assert [value is None for value in averaged] == [value is None for value in values]
    assert all(min(known) - 1e-6 <= value <= max(known) + 1e-6 for value in averaged if value is not None)


def test_smooth_does_not_lag_behind_a_slope() -> None:
    line = [float(i) for i in range(500)]
    averaged = history.smooth(line)
    assert averaged[250] == pytest.approx(250, abs=1e-3)


@given(st.integers(0, 3000), st.integers(20, 400))
def test_thin_keeps_ends_extremes_and_the_limit(count: int, points: int) -> None:
    losses = [float((i * 7919) % 1009) for i in range(count)]
    times = [float((i * 104729) % 997) for i in range(count)]
    drawn = history.thin(losses, times, points)
    assert drawn == sorted(set(drawn))
    assert len(drawn) <= points + 6
    if count:
        assert {0, count - 1} <= set(drawn)
        assert max(losses[i] for i in drawn) == max(losses)
        assert max(times[i] for i in drawn) == max(times)


def write_run(folder: Path, *kinds: tuple[EventKind, int]) -> history.RunHistory:
    paths = RunPaths(folder)
    for moment, (kind, attempt) in enumerate(kinds):
        append_line(paths.events, {"kind": str(kind), "attempt": attempt, "time": 100.0 + moment})
    return history.read_run_history(paths)


@pytest.mark.parametrize(
    ("kinds", "now", "expected"),
    [
        ([(EventKind.RUN_STARTED, 1)], 110, "running"),
        ([(EventKind.RUN_STARTED, 1)], 1000, "not finished"),
        ([(EventKind.RUN_STARTED, 1), (EventKind.WORKER_DIED, 1)], 101, "died"),
        ([(EventKind.WORKER_DIED, 1), (EventKind.RESTARTED, 2), (EventKind.CHECKPOINT_SAVED, 2)], 110, "running"),
        ([(EventKind.STOPPED, 1)], 101, "stopped"),
        ([(EventKind.STOPPED, 1), (EventKind.RESUMED, 2)], 102, "running"),
        (
            [(EventKind.WORKER_DIED, 1), (EventKind.RESTARTED, 2), (EventKind.FINISHED, 2), (EventKind.EXPORTED, 2)],
            1000,
            "finished",
        ),
    ],
)
def test_status(tmp_path: Path, kinds: list[tuple[EventKind, int]], now: float, expected: str) -> None:
    assert history.run_status(write_run(tmp_path, *kinds), now)[0] == expected


def test_events_know_the_step_they_came_after(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    append_line(paths.metrics, {"step": 1, "attempt": 1, "time": 10.0})
    append_line(paths.metrics, {"step": 2, "attempt": 1, "time": 20.0})
    for moment in (5.0, 15.0, 25.0):
        append_line(paths.events, {"kind": "warning", "time": moment})
    assert [step for _, step in history.events_with_steps(history.read_run_history(paths))] == [None, 1, 2]


def test_a_clock_that_is_set_back_between_attempts_changes_no_order(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for number, moment in enumerate((5000.0, 5010.0, 1000.0, 1010.0)):
        append_line(paths.metrics, {"step": number + 1, "attempt": 1 + number // 2, "time": moment})
    for kind, attempt, moment in (
        (EventKind.WORKER_DIED, 1, 5011.0),
        (EventKind.RESUMED, 2, 999.0),
        (EventKind.FINISHED, 2, 1011.0),
    ):
        append_line(paths.events, {"kind": str(kind), "attempt": attempt, "time": moment})
    run = history.read_run_history(paths)
    assert [event["kind"] for event in run.events] == ["worker_died", "resumed", "finished"]
    assert history.run_status(run, 9999.0) == ("finished", "good")
    assert [step for _, step in history.events_with_steps(run)] == [2, 2, 4]
    assert [record["time"] for record in run.counted_steps] == [5000.0, 5010.0, 5012.0, 5022.0]
    assert (run.began, run.ended, run.last_line) == (5000.0, 5023.0, 1011.0)


def test_events_without_an_attempt_stay_where_they_are(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for record in ({"kind": "resumed", "attempt": 2}, {"kind": "warning"}, {"kind": "stopped", "attempt": "x"}):
        append_line(paths.events, record)
    run = history.read_run_history(paths)
    assert [event["kind"] for event in run.events] == ["resumed", "warning", "stopped"]
    assert history.run_status(run, 0.0)[0] == "stopped"


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"neither metrics\.jsonl nor events\.jsonl.*give the folder of a run"):
        history.read_run_history(RunPaths(tmp_path))


def test_damaged_side_files_are_shown_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: [")
    (tmp_path / "versions.json").write_text('{"torch":')
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "attempt": 1}\n\xff\xfe\n[1]\n{"step": "x"}\n{"step": 2, "att'
    )
    run = history.read_run_history(RunPaths(tmp_path))
    assert (run.facts.config, run.facts.versions, run.facts.config_text) == ({}, {}, "model: [")
    assert steps(run.counted_steps) == [(1, 1)]
