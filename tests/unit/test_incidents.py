"""What failed, and how long it took until training went on, as one line."""

import time
from typing import Any

from phalanx.core.records import EventKind, IncidentTracker


def failure(attempt: int, what: str, done: str = "all ranks restart") -> dict[str, Any]:
    return {"attempt": attempt, "what": what, "done": done, "began": time.time()}


def test_a_death_is_over_with_the_first_step_of_a_later_attempt() -> None:
    written = list[dict[str, Any]]()
    told = IncidentTracker(written.append)
    told.begin(failure(2, "rank 3: killed by SIGKILL"))
    told.on_step({"step": 8, "attempt": 1, "time": 1.0})  # a line that came late
    told.begin(failure(3, "rank 0: ran out of memory", "with smaller micro-batches"))  # while it is not over yet
    told.on_step({"step": 8, "attempt": 2, "time": 1.0})
    assert not written
    told.on_step({"step": 9, "attempt": 3})
    told.on_step({"step": 10, "attempt": 3})
    [incident] = written
    assert 0 <= incident.pop("seconds") < 60
    assert incident == {
        "attempt": 3, "step": 9, "done": "with smaller micro-batches",
        "what": "rank 3: killed by SIGKILL; rank 0: ran out of memory",
    }  # fmt: skip


def test_clocks_that_differ_make_no_time_of_their_own() -> None:
    for wrong_s in (-1000.0, 1000.0):
        written = list[dict[str, Any]]()
        told = IncidentTracker(written.append)
        told.begin({**failure(2, "a", "b"), "began": time.time() - 5, "phases": {}})
        told.on_event({"kind": EventKind.RESUMED, "attempt": 2, "time": time.time() + wrong_s})
        told.on_step({"step": 8, "attempt": 2, "time": time.time() + wrong_s})
        [incident] = written
        assert 5 <= incident["phases"]["restored"] <= incident["seconds"] < 60


def test_what_is_never_overcome_is_told_at_the_end() -> None:
    written = list[dict[str, Any]]()
    told = IncidentTracker(written.append)
    told.end({})
    assert not written
    told.begin(failure(2, "rank 0: killed"))
    told.end({})
    assert [(each["attempt"], "step" in each) for each in written] == [(2, False)]
