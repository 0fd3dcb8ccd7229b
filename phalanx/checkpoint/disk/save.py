"""Saving checkpoints: snapshot pieces, write them in the background, commit all or nothing.

Every rank writes its file; when all are on disk, rank 0 writes the manifest, which makes the checkpoint valid: it is
complete or absent. Folders and URLs differ (`checkpoint/disk/folders.py`). `checkpoint/disk/load.py` reads checkpoints.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from phalanx.checkpoint.disk.folders import LocalCheckpoints, RemoteCheckpoints, open_folder, retain
from phalanx.checkpoint.disk.load import (
    FORMAT,
    VERSION,
    WINDOWED,
    Checkpoint,
    ObjectGroup,
    OnEvent,
    Parameters,
    Span,
    agree_on_reason,
    canonical_json,
    find_missing,
    full_window,
    list_steps,
    manifest_checksum,
    open_and_verify,
    step_folder,
)
from phalanx.checkpoint.disk.snapshot import HostBuffer, SnapshotFile, StoredPiece
from phalanx.core.errors import CutOff, PhalanxError, RunError
from phalanx.core.records import EventKind
from phalanx.core.run_paths import Url
from phalanx.optim.update import StatePiece, state_shape


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, the same on every rank. `rank` is the one that failed; `seconds` is the whole save's."""

    step: int
    saved: bool
    reason: str | None
    rank: int | None
    bytes: int
    seconds: float


@dataclass(frozen=True)
class SaveJob:
    """One save as the background thread needs it."""

    step: int
    attempt: int
    header: dict[str, Any]
    parameters: Parameters
    stored: list[StoredPiece]
    protected: int | None = None  # a step whose checkpoint is kept besides the newest


class CheckpointSaver:
    """Saves checkpoints into `folder`, a local one or one at a URL, asynchronously.

    Every rank has one and calls the same methods in the same order. `group` must not be used by anything else. `keep`
    (at least 1) is how many valid checkpoints stay. `before_commit` is called on rank 0, from the saver's thread,
    when all files are written, `before_write` on every rank, with the step, before its own; what they raise fails the
    save.
    `on_event(kind, details)` is called on rank 0 only, from the
    saver's thread: "checkpoint_saved" (step, bytes, seconds), "checkpoint_failed" (step, reason, rank), "warning"
    (message). After each `save`: `blocked_s` is how long it waited for the save before it, `snapshot_s` how long the
    copy took. After `wait`: `outcome` is how the last save ended, the same on all ranks.
    """

    def __init__(
        self,
        folder: Path | Url,
        rank: int,
        group: ObjectGroup,
        keep: int,
        on_event: OnEvent,
        before_commit: Callable[[], None] | None = None,
        before_write: Callable[[int], None] | None = None,
    ) -> None:
        assert keep >= 1, keep
        self.folder = folder
        self.blocked_s = 0.0
        self.snapshot_s = 0.0
        self.outcome: SaveOutcome | None = None
        self._rank = rank
        self._group = group
        self._keep = keep
        self.protected: int | None = None  # a step whose checkpoint is kept besides the newest, from the next save on
        self._on_event = on_event
        self._before_commit, self._before_write = before_commit, before_write
        self._buffer = HostBuffer()
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def save(self, header: dict[str, Any], parameters: Parameters, pieces: Iterable[StatePiece], attempt: int) -> None:
        """Copy the pieces and return; the rest happens in the background. They may be changed as soon as this returns.

        `header` is JSON-able and holds "step"; `parameters` is the same on all ranks and maps every name to its (shape,
        dtype). The pieces of all ranks together must cover every parameter. A full disk or a store that does not answer
        is no error here: it is an event and an `outcome`. Raises whatever unexpected error ended the save before this.
        """
        started = time.perf_counter()
        self.wait()
        self.blocked_s = time.perf_counter() - started
        stored = self._buffer.store(pieces)
        self.snapshot_s = time.perf_counter() - started - self.blocked_s
        plain = json.loads(canonical_json(header))  # a header that is not JSON fails here, where the mistake is
        shapes = {name: (tuple(shape), dtype) for name, (shape, dtype) in parameters.items()}
        job = SaveJob(int(plain["step"]), attempt, plain, shapes, stored, self.protected)
        # A daemon thread: a failing process exits at once, and the next attempt removes leftovers.
        self._thread = Thread(target=self._run, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()

    def busy(self) -> bool:
        """Whether a save is running."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when no save is running; raise the unexpected error of the last one, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, which belong to an abandoned branch of the run. No save may be
        running. Collective. Raises RunError."""
        members, failure = self._group.gather_objects(None), None
        if members is not None:
            try:
                for later in [other for other in list_steps(self.folder) if other > step]:
                    open_folder(self.folder).remove(later)
            except (OSError, PhalanxError) as error:
                failure = f"checkpoints after step {step} in {self.folder} cannot be removed ({error})"
        failure = self._group.broadcast_object(failure)
        if failure is not None:
            raise RunError(f"{failure}, and a resumed run would start from them; remove them by hand")

    def close(self) -> None:
        """Wait for a running save and give the snapshot's memory back. Raises like `wait`."""
        try:
            self.wait()
        finally:
            self._buffer.clear()

    def _run(self, job: SaveJob) -> None:
        try:
            self._save(job)
        except Exception as error:
            self._error = error

    def _save(self, job: SaveJob) -> None:
        started = time.perf_counter()
        place = open_folder(self.folder)
        failure, present, replaced = self._find_existing(job, place)
        unexpected: Exception | None = None
        if failure is not None:
            verdict: dict[str, Any] = {"reason": failure, "rank": 0, "bytes": 0}
        elif present is not None:
            verdict = {"reason": None, "rank": None, "bytes": present.bytes}
        else:
            verdict, unexpected = self._write(job, place)
        seconds = time.perf_counter() - started
        saved = verdict["reason"] is None
        self.outcome = SaveOutcome(job.step, saved, verdict["reason"], verdict["rank"], verdict["bytes"], seconds)
        if self._rank == 0:
            self._report(job, self.outcome, present is not None, replaced)
        if unexpected is not None:
            raise unexpected

    def _find_existing(
        self, job: SaveJob, place: LocalCheckpoints | RemoteCheckpoints
    ) -> tuple[str | None, Checkpoint | None, str | None]:
        """Check before a save: why none should be tried; an existing valid checkpoint of this step; or why an existing
        one is invalid.

        A run that went back to an older checkpoint meets its steps a second time. An intact checkpoint is the same
        then, unless data was skipped in between, so it stays; a damaged one is the reason for going back and must not.
        """
        final = step_folder(self.folder, job.step)
        members = self._group.gather_objects(None)
        plan: dict[str, Any] | None = None
        if members is not None:
            plan = {"world": len(members), "exists": False, "failure": None}
            try:
                place.clear_leftovers(job.attempt)  # before anything is written: they may be what fills the disk
                plan["exists"] = place.has_step(job.step)
            except (OSError, PhalanxError) as error:
                plan["failure"] = describe_save_error(error, final)
        agreed = self._group.broadcast_object(plan)
        if agreed["failure"] is not None or not agreed["exists"]:
            return agreed["failure"], None, None

        def same_trajectory(found: Checkpoint) -> bool:
            skips = [(header.get("skipped"), header.get("skips") or []) for header in (found.header, job.header)]
            return found.parameters == job.parameters and skips[0] == skips[1]

        checkpoint = None
        try:
            checkpoint, reason = open_and_verify(final, self._rank, agreed["world"], same_trajectory)
        except (OSError, PhalanxError) as error:
            reason = str(error)  # the other ranks wait for an answer
        reason = agree_on_reason(self._group, reason)
        return (None, checkpoint, None) if reason is None else (None, None, reason)

    def _write(
        self, job: SaveJob, place: LocalCheckpoints | RemoteCheckpoints
    ) -> tuple[dict[str, Any], Exception | None]:
        """Write this rank's file; rank 0 commits if all did.

        Returns the verdict, the same on all ranks, and the unexpected error of this one.
        """
        path = place.rank_file(job.step, job.attempt, self._rank)
        entry, error = None, None
        try:
            if self._before_write is not None:
                self._before_write(job.step)
            content = SnapshotFile(job.stored, self._buffer)
            place.write(job.step, job.attempt, self._rank, content)
            entry = content.manifest_entry()
        except Exception as caught:  # whatever it is, the other ranks wait for an answer
            error = caught
        answer = {
            "file": path.name,
            "entry": entry,
            "reason": None if error is None else describe_save_error(error, path),
        }
        answers = self._group.gather_objects(answer)
        verdict = None
        if answers is not None:
            failed = [rank for rank, other in enumerate(answers) if other["reason"] is not None]
            if failed:
                verdict = {"reason": answers[failed[0]]["reason"], "rank": failed[0], "bytes": 0}
            else:
                files = {other["file"]: other["entry"] for other in answers}
                try:
                    if self._before_commit is not None:
                        self._before_commit()
                    place.commit(job.step, job.attempt, build_manifest(job, files))
                    verdict = {"reason": None, "rank": None, "bytes": sum(item["bytes"] for item in files.values())}
                except Exception as caught:
                    error = caught
                    verdict = {"reason": describe_save_error(caught, path.parent), "rank": 0, "bytes": 0}
        verdict = self._group.broadcast_object(verdict)
        if verdict["reason"] is not None:
            place.abandon(job.step, job.attempt)  # on every rank, since the ranks may see different disks
        # A run folder that belongs to another run now is not the failure of one save: training must stop.
        expected = isinstance(error, OSError | PhalanxError) and not isinstance(error, RunError | CutOff)
        return verdict, None if expected else error

    def _report(self, job: SaveJob, outcome: SaveOutcome, already_there: bool, replaced: str | None) -> None:
        if not outcome.saved:
            failure = {"step": job.step, "reason": outcome.reason, "rank": outcome.rank}
            self._on_event(EventKind.CHECKPOINT_FAILED, failure)
            return
        details: dict[str, Any] = {"step": job.step, "bytes": outcome.bytes, "seconds": outcome.seconds}
        if already_there:
            details["already_there"] = True
        if replaced is not None:
            details["replaced"] = replaced
        self._on_event(EventKind.CHECKPOINT_SAVED, details)
        try:
            retain(self.folder, self._keep, job.step, job.protected)
        except (OSError, PhalanxError) as error:
            message = f"old checkpoints in {self.folder} cannot be removed ({error}), so the disk may fill up"
            self._on_event(EventKind.WARNING, {"message": f"{message}; remove them by hand"})


def describe_save_error(error: Exception, path: Path | Url) -> str:
    """The reason of a failed save, for the event."""
    if isinstance(error, PhalanxError):
        return str(error)
    problem = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
    return (
        f"{path} cannot be written ({problem}), so this step has no checkpoint; free space there before the next "
        "checkpoint"
    )


def build_manifest(job: SaveJob, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The manifest of a checkpoint, checksum included. Raises ValueError where the pieces of all ranks leave a gap."""
    spans: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    shapes = {name: shape for name, (shape, _dtype) in job.parameters.items()}
    windowed = False
    for entry in files.values():
        for name, kind, start, stop, _dtype, *window in entry["pieces"]:
            if name not in shapes:
                raise ValueError(f"pieces of {name} were saved, but it is not among the parameters")
            first, last = window[0] if window else full_window(shapes[name], kind)
            spans[name, kind].append((start, stop, (first, last)))
            windowed = windowed or bool(window)
    for name, kind in [*spans, *((name, "param") for name in shapes)]:
        size = math.prod(state_shape(shapes[name], kind))
        missing = find_missing(spans[name, kind], 0, size, full_window(shapes[name], kind))
        if missing is not None:
            (first, last), _ = missing
            raise ValueError(f"no rank saved elements [{first}, {last}) of {kind} of parameter {name}")
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": WINDOWED if windowed else VERSION,
        "header": job.header,
        "parameters": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in job.parameters.items()},
        "files": files,
    }
    return {**manifest, "checksum": manifest_checksum(manifest)}
