"""One line for each thing that broke: what, where, what was done about it, and how long until training went on.

The parts come one after another: what failed, that the ranks start again, and the first step that is done again. No
torch here.
"""

import platform
import time
from collections.abc import Callable
from typing import Any

from phalanx.core.events import EventKind

Details = dict[str, Any]


class IncidentTracker:
    """Keeps what has failed until a step is done again, and gives it to `write` then: details of an event, with `what`,
    `done`, `step` and `seconds`."""

    def __init__(self, write: Callable[[Details], None]) -> None:
        self._write = write
        self._open: Details | None = None

    def begin(self, details: Details) -> None:
        """Something has failed: `what`, what is `done`, when it `began`, and the `attempt` that follows. What failed
        before and is not overcome yet becomes a part of it."""
        if self._open is not None:
            details = {**details, "what": f"{self._open['what']}; {details['what']}"}
            details["began"] = min(details["began"], self._open["began"])
        self._open = details

    def on_step(self, record: Details) -> None:
        """A step is done."""
        attempt, when = record.get("attempt"), record.get("time")
        if self._open is not None and type(attempt) is int and attempt >= self._open["attempt"]:
            self.end({"step": record.get("step"), "seconds": _since(self._open["began"], when)})

    def on_event(self, event: Details) -> None:
        """Ranks have what they go on from: among the `phases` of what broke, where those are told."""
        attempt, when, open_one = event.get("attempt"), event.get("time"), self._open
        if event.get("kind") != EventKind.RESUMED or open_one is None or "phases" not in open_one:
            return
        if type(attempt) is int and attempt >= open_one["attempt"] and isinstance(when, float):
            restored = round(_since(open_one["began"], when), 3)
            open_one["phases"] = open_one["phases"] | {"restored": restored}

    def end(self, how: Details) -> None:
        """It is over, or never will be."""
        if self._open is not None:
            told = {name: value for name, value in self._open.items() if name != "began"}
            self._open = None
            self._write(told | how)


def _since(began: float, when: Any) -> float:
    """Seconds from when something began, by this node's clock, to when a line was written, by the clock of rank 0's
    node; where the two cannot both be right, to now."""
    now = time.time()
    return (when if isinstance(when, float) and began <= when <= now else now) - began


class IncidentConsole:
    """A console of a run on one node, which passes on what it is told; and what the incidents are made of, by what the
    agent says (`on_agent_event`) and the steps that are done."""

    def __init__(self, console: Any, write: Callable[[Details], None]) -> None:
        self._console = console
        self.incidents = IncidentTracker(write)
        self._failed: Details | None = None

    def on_agent_event(self, kind: str, details: Details) -> None:
        """Take what the agent says."""
        if kind == EventKind.WORKER_DIED:
            what = f"rank {details['rank']} on {platform.node()}: {details['reason']}"
            self._failed = {"what": what, "began": time.time()}
        elif kind == EventKind.RESTARTED and self._failed is not None:
            how = f", {details['reason']}" if details.get("reason") else ""
            done = f"all ranks start again{how}"
            self.incidents.begin({"attempt": details["attempt"], "done": done, **self._failed})
            self._failed = None

    def on_step(self, record: Details) -> None:
        self.incidents.on_step(record)
        self._console.on_step(record)

    def on_event(self, event: Details) -> None:
        self._console.on_event(event)

    def tick(self) -> None:
        self._console.tick()
