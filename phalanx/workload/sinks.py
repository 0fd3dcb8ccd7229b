"""Sinks of step records and events: the run folder's files, TensorBoard, and those of the caller."""

import contextlib
import dataclasses
import errno
import functools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import append_line
from phalanx.core.records import EventKind, StepRecord, read_events
from phalanx.core.run_paths import RunPaths

SCALARS = ("loss", "grad_norm", "lr", "tokens_per_s", "step_s", "wait_s", "memory_bytes", "mfu", "loss_scale")
MAX_RANKS = 64  # with separate curves; more are not readable
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, quota or file

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives records as mappings, in order; may be called from more than one thread, but never at the same time."""

    def on_step(self, record: dict[str, Any]) -> None: ...

    def on_event(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class RecordWriter:
    """The record writer of rank 0: writes `metrics.jsonl` and `events.jsonl` and passes each record on to the sinks.

    On other ranks it does nothing. A full disk does not stop training: lines wait in memory, in order, until there is
    room again.
    """

    def __init__(self, paths: RunPaths, attempt: int, sinks: Sequence[Sink], active: bool) -> None:
        self._paths, self._attempt, self._sinks, self._active = paths, attempt, sinks, active
        self._lock = threading.Lock()  # a checkpoint's thread reports its end
        self._unwritten: list[tuple[Path, dict[str, Any]]] = []  # lines that found no room

    def write_step(self, record: StepRecord, why: str | None = None) -> None:
        """Write a step's record, and an event if its update was skipped, and `why`, where that is not for its norm or
        weight."""
        if not self._active:
            return
        plain = dataclasses.asdict(record)
        with self._lock:
            self._write(self._paths.metrics, plain)
            for sink in self._sinks:
                sink.on_step(plain)
        if record.skipped:
            reason = "the gradient norm is not finite" if record.tokens else "the batch has no valid token"
            self.write_event(EventKind.STEP_SKIPPED, {"step": record.step, "reason": why or reason})

    def write_event(self, kind: str, details: dict[str, Any]) -> None:
        if not self._active:
            return
        with self._lock:
            event = {"kind": str(kind), "time": time.time(), "attempt": self._attempt, **details}
            self._write(self._paths.events, event)
            for sink in self._sinks:
                sink.on_event(event)

    def _write(self, path: Path, record: dict[str, Any]) -> None:
        self._unwritten.append((path, record))
        try:
            while self._unwritten:
                append_line(*self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS:
                raise
            log.warning("%s: %s; %d lines wait for room", path, error.strerror, len(self._unwritten))

    def close(self) -> None:
        with self._lock:
            for path, record in self._unwritten:  # the log then has the lines that no file could take
                log.error("no room in %s for %s", path, record)
            for sink in self._sinks:
                sink.close()


def find_resolved_value(paths: RunPaths, key: str, of: dict[str, Any]) -> Any:
    """What was found last for `key` in a run folder under the same circumstances `of`; None where nothing was."""
    found = None
    for event in read_events(paths.events):
        if event.get("kind") == EventKind.AUTO_RESOLVED and event.get("key") == key and event.get("of") == of:
            found = event.get("value")
    return found


def evaluation_scalars(event: dict[str, Any]) -> dict[str, float | None]:
    """The scalars of an evaluation by the names that they are shown by: the loss of the set, and each score."""
    name = f"eval/{event['set']}"
    return {name: event["loss"]} | {f"{name} {score}": value for score, value in event.get("scores", {}).items()}


def step_scalars(record: dict[str, Any]) -> dict[str, float | None]:
    """The scalars of a step: the common ones, and each rank's share and busy time, where these are known."""
    scalars: dict[str, float | None] = {f"train/{name}": record[name] for name in SCALARS}
    for what in ("shares", "busy_s"):
        of_ranks = record.get(what) or []
        if len(of_ranks) <= MAX_RANKS:
            scalars |= {f"{what}/rank {rank:02d}": value for rank, value in enumerate(of_ranks)}
    return scalars


class TensorBoardSink:
    """Scalars for TensorBoard, by its own library. What a full disk does not take is missing there, and only there."""

    def __init__(self, paths: RunPaths) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "report.tensorboard needs the package tensorboard, which is not installed; "
                "install it, or set report.tensorboard=false"
            ) from None
        self._make_writer = functools.partial(SummaryWriter, str(paths.tensorboard))
        self._writer: Any = None

    def on_step(self, record: dict[str, Any]) -> None:
        self._add(step_scalars(record), record)

    def on_event(self, event: dict[str, Any]) -> None:
        if event["kind"] == EventKind.EVALUATED:
            self._add(evaluation_scalars(event), event)

    def _add(self, scalars: dict[str, float | None], record: dict[str, Any]) -> None:
        with self._tolerate_full_disk():
            if self._writer is None:
                self._writer = self._make_writer()
            for name, value in scalars.items():
                if value is not None:
                    self._writer.add_scalar(name, value, record["step"], record["time"])

    @contextlib.contextmanager
    def _tolerate_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS:
                raise
            log.warning("TensorBoard's file took no more: %s", error.strerror)
            self._writer = None  # its thread has died of this; the next scalar tries a new file

    def close(self) -> None:
        with self._tolerate_full_disk():
            if self._writer is not None:
                self._writer.close()
