"""After some steps of an attempt: what they took beside what was expected of them. A sink of rank 0's records."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

from phalanx.config.schema import Config
from phalanx.core.events import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.launch import auto_layout
from phalanx.layout.model_shape import ModelSpec
from phalanx.planner import comparison, present_cluster


class PredictionCheck:
    """Reads what was expected in the run folder's plan.json, and writes one event in an attempt.

    Where the attempt has measured its devices since plan.json was written, the same layout is foretold once more for
    these. `say` is told of the event.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec | None,
        paths: RunPaths,
        attempt: int,
        say: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._config, self._spec, self._paths, self._attempt, self._say = config, spec, paths, attempt, say
        self._steps: list[dict[str, Any]] = []
        self._expected: tuple[dict[str, Any], str] | None = None

    def on_step(self, record: dict[str, Any]) -> None:
        if len(self._steps) >= comparison.ENOUGH:
            return
        if not self._steps:  # before any step of it is known
            self._expected = self._read_prediction()
        self._steps.append(record)
        if self._expected is None or len(self._steps) < comparison.ENOUGH:
            return
        expected, basis = self._expected
        beside = self._config.parallel.engine == "sharded"
        found = comparison.compare_steps(expected, self._steps, beside, basis)
        if found is None:
            return
        with contextlib.suppress(OSError):  # a full disk stops no training
            event = write_event(self._paths.events, EventKind.PREDICTION_CHECKED, self._attempt, **found)
            if self._say is not None:
                self._say(event)

    def on_event(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...

    def _read_prediction(self) -> tuple[dict[str, Any], str] | None:
        """What is expected of a step, and what that rests on; None where nobody has said."""
        try:
            told = json.loads(self._paths.plan.read_text(encoding="utf-8"))
            expected, basis = dict(told["expected"]), str(told["basis"])
            nodes = present_cluster.parse_node_devices(told["for"]["nodes"])
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None
        again = auto_layout.predict_layout(self._config, self._paths, nodes, self._spec)
        if again is not None and again["basis"] != basis:
            return again["expected"], again["basis"]
        return expected, basis
