"""Where step records and events go: the run folder's files, TensorBoard, and whatever else the caller hands in."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from phalanx.errors import ConfigError
from phalanx.records import Kind, RunPaths, StepRecord, append_line, write_event


class Sink(Protocol):
    """Receives records as mappings, in order; may be called from more than one thread, but never at the same time."""

    def on_step(self, record: dict[str, Any]) -> None: ...

    def on_event(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Records:
    """Rank 0's way out: writes `metrics.jsonl` and `events.jsonl` and passes each record on to the sinks.

    On other ranks it does nothing, so that the trainer need not ask who it is.
    """

    def __init__(self, paths: RunPaths, attempt: int, sinks: Sequence[Sink], active: bool) -> None:
        self._paths, self._attempt, self._sinks, self._active = paths, attempt, sinks, active
        self._lock = threading.Lock()  # a checkpoint's thread reports its end

    def step(self, record: StepRecord | None) -> None:
        """Write a step's record, and an event if its update was skipped; None is the record of no step."""
        if record is None or not self._active:
            return
        plain = dataclasses.asdict(record)
        with self._lock:
            append_line(self._paths.metrics, plain)
            for sink in self._sinks:
                sink.on_step(plain)
        if record.skipped:
            reason = "the gradient norm is not finite" if record.tokens else "the batch has no valid token"
            self.event(Kind.STEP_SKIPPED, {"step": record.step, "reason": reason})

    def event(self, kind: str, details: dict[str, Any]) -> None:
        if not self._active:
            return
        with self._lock:
            event = write_event(self._paths.events, kind, self._attempt, **details)
            for sink in self._sinks:
                sink.on_event(event)

    def close(self) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.close()


class TensorBoard:
    """Scalars for TensorBoard, by its own library."""

    def __init__(self, paths: RunPaths) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "report.tensorboard needs the package tensorboard, which is not installed; "
                "install it, or set report.tensorboard=false"
            ) from None
        self._writer = SummaryWriter(str(paths.tensorboard))

    def on_step(self, record: dict[str, Any]) -> None:
        names = ("loss", "grad_norm", "lr", "tokens_per_s", "step_s", "wait_s", "memory_bytes", "mfu")
        for name in names:
            if record[name] is not None:
                self._writer.add_scalar(f"train/{name}", record[name], record["step"], record["time"])

    def on_event(self, event: dict[str, Any]) -> None:
        if event["kind"] == Kind.EVALUATED and event["loss"] is not None:
            self._writer.add_scalar("eval/loss", event["loss"], event["step"], event["time"])

    def close(self) -> None:
        self._writer.close()
