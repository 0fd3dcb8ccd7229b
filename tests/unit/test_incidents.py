"""What failed, and how long it took until training went on, as one line."""

import platform
import time
from typing import Any

from phalanx.core.events import EventKind
from phalanx.core.incidents import IncidentConsole


class Silent:
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_step(self, record: dict[str, Any]) -> None:
        self.seen.append(record)

    def on_event(self, event: dict[str, Any]) -> None:
        self.seen.append(event)

    def tick(self) -> None:
        self.seen.append({})


def test_a_death_is_over_with_the_first_step_of_a_later_attempt() -> None:
    console, written = Silent(), list[dict[str, Any]]()
    told = IncidentConsole(console, written.append)
    told.on_agent_event(EventKind.WORKER_DIED, {"attempt": 1, "rank": 3, "reason": "killed by SIGKILL"})
    told.on_step({"step": 8, "attempt": 1, "time": 1.0})  # a line that came late
    assert not written
    told.on_agent_event(EventKind.RESTARTED, {"attempt": 2})
    told.on_step({"step": 8, "attempt": 1, "time": 1.0})
    told.on_agent_event(
        EventKind.WORKER_DIED, {"attempt": 2, "rank": 0, "reason": "ran out of memory"}
    )  # while it is not over yet
    told.on_agent_event(EventKind.RESTARTED, {"attempt": 3, "reason": "with smaller micro-batches"})
    told.on_step({"step": 8, "attempt": 2, "time": 1.0})
    assert not written
    told.on_step({"step": 9, "attempt": 3})
    told.on_step({"step": 10, "attempt": 3})
    [incident] = written
    assert 0 <= incident.pop("seconds") < 60
    here = platform.node()
    assert incident == {
        "attempt": 3, "step": 9, "done": "all ranks start again, with smaller micro-batches",
        "what": f"rank 3 on {here}: killed by SIGKILL; rank 0 on {here}: ran out of memory",
    }  # fmt: skip
    told.on_event({"kind": "x"})
    told.tick()
    assert [each.get("step", each.get("kind")) for each in console.seen] == [8, 8, 8, 9, 10, "x", None]


def test_clocks_that_differ_make_no_time_of_their_own() -> None:
    for wrong_s in (-1000.0, 1000.0):
        written = list[dict[str, Any]]()
        told = IncidentConsole(Silent(), written.append)
        told.incidents.begin({"attempt": 2, "what": "a", "done": "b", "began": time.time() - 5, "phases": {}})
        told.incidents.on_event({"kind": EventKind.RESUMED, "attempt": 2, "time": time.time() + wrong_s})
        told.on_step({"step": 8, "attempt": 2, "time": time.time() + wrong_s})
        [incident] = written
        assert 5 <= incident["phases"]["restored"] <= incident["seconds"] < 60


def test_what_is_never_overcome_is_told_at_the_end() -> None:
    written = list[dict[str, Any]]()
    told = IncidentConsole(Silent(), written.append)
    told.incidents.end({})
    told.on_agent_event(EventKind.WORKER_DIED, {"attempt": 1, "rank": 0, "reason": "killed"})
    told.incidents.end({})  # nothing was done about it, which the death's own event says
    assert not written
    told.on_agent_event(EventKind.RESTARTED, {"attempt": 2})
    told.incidents.end({})
    assert [(each["attempt"], "step" in each) for each in written] == [(2, False)]
