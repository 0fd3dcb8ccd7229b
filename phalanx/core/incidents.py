"""One line for each thing that broke: what, where, what was done about it, and how long until training went on.

The parts come one after another: what failed, that the ranks start again, and the first step that is done again. No
torch here.
"""

import time
from collections.abc import Callable
from typing import Any

from phalanx.core.records import EventKind

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
