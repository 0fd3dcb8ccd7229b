"""The writing half of checkpoints: snapshot pieces, write them behind training's back, commit all or nothing.

Every rank writes its file into a hidden folder that carries the attempt in its name, so that a late writer of a dead
attempt harms nothing. When all files are safely on disk, rank 0 adds the manifest and renames the folder into place: a
`step-N` folder is whole or does not exist. `checkpoint/read.py` reads what this file writes.
"""

import json
import os
import re
import shutil
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.read import (
    CHUNK_BYTES,
    FORMAT,
    MANIFEST,
    VERSION,
    Checkpoint,
    Group,
    OnEvent,
    Parameters,
    agree,
    canonical,
    examine,
    find,
    first_gap,
    manifest_checksum,
    step_folder,
    tensor_name,
)
from phalanx.errors import CheckpointError
from phalanx.optim.engine import Piece
from phalanx.records import Kind

SEGMENT_BYTES = 64 << 20
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class Stored:
    """A piece in the snapshot: what `Piece` says, without the tensor."""

    name: str
    kind: str
    start: int
    stop: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Outcome:
    """How a save ended, the same on every rank. `rank` is the one that failed; `seconds` is the whole save's."""

    step: int
    saved: bool
    reason: str | None
    rank: int | None
    bytes: int
    seconds: float


class HostBuffer:
    """Host memory that holds a rank's pieces back to back, exactly as the data section of a safetensors file.

    It is made of equal segments that are kept from one snapshot to the next: touching fresh pages costs far more than
    the copy, and a pinned allocation is rounded up to a power of two, which would waste up to half of one large buffer.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        assert segment_bytes % 8 == 0, segment_bytes
        self._segment_bytes = segment_bytes
        self._segments: list[Tensor] = []
        self._pinned = False

    def store(self, pieces: Iterable[Piece]) -> list[Stored]:
        """Copy the pieces, widest dtype first (which aligns each one without gaps), and return them in that order.

        When it returns, the tensors may be changed: copies from an accelerator are waited for, once for all of them.
        """
        # A rank may own no element of a parameter; safetensors has no use for an empty tensor here.
        ordered = sorted(
            (piece for piece in pieces if piece.stop > piece.start), key=lambda p: -p.tensor.element_size()
        )
        devices = {piece.tensor.device for piece in ordered if piece.tensor.device.type != "cpu"}
        if self._pinned != bool(devices):
            self._segments, self._pinned = [], bool(devices)
        offset_bytes = 0
        with torch.no_grad():
            for piece in ordered:
                assert piece.tensor.shape == (piece.stop - piece.start,), (piece.name, piece.kind, piece.tensor.shape)
                offset_bytes = self._copy(piece.tensor, offset_bytes)
        for device in devices:
            torch.accelerator.synchronize(device)  # the one place of a save where the host waits for the device
        return [Stored(p.name, p.kind, p.start, p.stop, p.tensor.dtype) for p in ordered]

    def chunks(self, total_bytes: int) -> Iterator[memoryview]:
        """The first `total_bytes` of the buffer in order, in chunks of at most CHUNK_BYTES."""
        for segment in self._segments[: -(-total_bytes // self._segment_bytes)]:
            view = memoryview(segment.numpy().data)[:total_bytes]
            total_bytes -= len(view)
            for start in range(0, len(view), CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]

    def clear(self) -> None:
        """Give the memory back."""
        self._segments = []

    def _copy(self, source: Tensor, offset_bytes: int) -> int:
        width = source.element_size()
        done = 0
        while done < source.numel():
            index, inside = divmod(offset_bytes, self._segment_bytes)
            if index == len(self._segments):
                self._segments.append(torch.empty(self._segment_bytes, dtype=torch.uint8, pin_memory=self._pinned))
            count = min(source.numel() - done, (self._segment_bytes - inside) // width)
            target = self._segments[index][inside : inside + count * width].view(source.dtype)
            target.copy_(source[done : done + count], non_blocking=self._pinned)
            done += count
            offset_bytes += count * width
        return offset_bytes


def write_file(path: Path, stored: list[Stored], buffer: HostBuffer) -> dict[str, Any]:
    """Write a snapshot as a safetensors file, force it to disk and return its manifest entry (bytes, crc32, pieces).

    The format (8 bytes of header length, a JSON header, the data) is written directly, because the snapshot already is
    the data and the CRC-32 is then taken on the way instead of by reading the file again. Raises OSError.
    """
    header: dict[str, Any] = {}
    data_bytes = 0
    for piece in stored:
        key = tensor_name(piece.name, piece.kind, piece.start, piece.stop)
        assert key not in header, f"piece {key} was given twice by one rank"
        end = data_bytes + (piece.stop - piece.start) * piece.dtype.itemsize
        shape = [piece.stop - piece.start]
        header[key] = {"dtype": SAFETENSORS_DTYPES[piece.dtype], "shape": shape, "data_offsets": [data_bytes, end]}
        data_bytes = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # readers map the data, which should start aligned
    head = len(head).to_bytes(8, "little") + head
    crc = zlib.crc32(head)
    with open(path, "wb") as file:
        file.write(head)
        for chunk in buffer.chunks(data_bytes):
            crc = zlib.crc32(chunk, crc)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    rows = [[p.name, p.kind, p.start, p.stop, str(p.dtype).removeprefix("torch.")] for p in stored]
    return {"bytes": len(head) + data_bytes, "crc32": f"{crc:08x}", "pieces": rows}


@dataclass(frozen=True)
class Job:
    """One save as the background thread needs it."""

    step: int
    attempt: int
    header: dict[str, Any]
    parameters: Parameters
    stored: list[Stored]


class Saver:
    """Saves checkpoints into `folder`, asynchronously.

    Every rank has one and calls the same methods in the same order. `group` must not be used by anything else. `keep`
    (at least 1) is how many valid checkpoints stay. `on_event(kind, details)` is called on rank 0 only, from the
    saver's thread: "checkpoint_saved" (step, bytes, seconds), "checkpoint_failed" (step, reason, rank), "warning"
    (message). After each `save`: `blocked_s` is how long it waited for the save before it, `snapshot_s` how long the
    copy took. After `wait`: `outcome` is how the last save ended, the same on all ranks.
    """

    def __init__(self, folder: Path, rank: int, group: Group, keep: int, on_event: OnEvent) -> None:
        assert keep >= 1, keep
        self.folder = folder
        self.blocked_s = 0.0
        self.snapshot_s = 0.0
        self.outcome: Outcome | None = None
        self._rank = rank
        self._group = group
        self._keep = keep
        self._on_event = on_event
        self._buffer = HostBuffer()
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def save(self, header: dict[str, Any], parameters: Parameters, pieces: Iterable[Piece], attempt: int) -> None:
        """Copy the pieces and return; the rest happens in the background. They may be changed as soon as this returns.

        `header` is JSON-able and holds "step"; `parameters` is the same on all ranks and maps every name to its (shape,
        dtype). The pieces of all ranks together must cover every parameter. A full disk is no error here: it is an
        event and an `outcome`. Raises whatever unexpected error ended the save before this one.
        """
        started = time.perf_counter()
        self.wait()
        self.blocked_s = time.perf_counter() - started
        stored = self._buffer.store(pieces)
        self.snapshot_s = time.perf_counter() - started - self.blocked_s
        plain = json.loads(canonical(header))  # a header that is not JSON fails here, where the mistake is
        shapes = {name: (tuple(shape), dtype) for name, (shape, dtype) in parameters.items()}
        job = Job(int(plain["step"]), attempt, plain, shapes, stored)
        # A daemon: a process that fails leaves at once, and the next attempt clears what it left behind.
        self._thread = Thread(target=self._run, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when no save is running; raise the unexpected error of the last one, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for a running save and give the snapshot's memory back. Raises like `wait`."""
        try:
            self.wait()
        finally:
            self._buffer.clear()

    def _run(self, job: Job) -> None:
        try:
            self._save(job)
        except Exception as error:
            self._error = error

    def _save(self, job: Job) -> None:
        started = time.perf_counter()
        present, replaced = self._present(job)
        unexpected: Exception | None = None
        if present is not None:
            verdict: dict[str, Any] = {"reason": None, "rank": None, "bytes": present.bytes}
        else:
            verdict, unexpected = self._write(job)
        seconds = time.perf_counter() - started
        saved = verdict["reason"] is None
        self.outcome = Outcome(job.step, saved, verdict["reason"], verdict["rank"], verdict["bytes"], seconds)
        if self._rank == 0:
            self._report(job, self.outcome, present is not None, replaced)
        if unexpected is not None:
            raise unexpected

    def _present(self, job: Job) -> tuple[Checkpoint | None, str | None]:
        """The valid checkpoint of this step if there is one, else None and why the one that is there does not count.

        A run that went back to an older checkpoint meets its steps a second time. An intact checkpoint is the same
        then, unless data was skipped in between, so it stays; a damaged one is the reason for going back and must not.
        """
        final = step_folder(self.folder, job.step)
        members = self._group.gather_objects(None)
        plan = None
        if members is not None:
            clear_leftovers(self.folder, job.attempt)  # before anything is written: they may be what fills the disk
            plan = {"world": len(members), "exists": os.path.isdir(final)}
        plan = self._group.broadcast_object(plan)
        if not plan["exists"]:
            return None, None

        def same_trajectory(found: Checkpoint) -> bool:
            return found.parameters == job.parameters and found.header.get("skipped") == job.header.get("skipped")

        checkpoint, reason = examine(final, self._rank, plan["world"], same_trajectory)
        reason = agree(self._group, reason)
        return (checkpoint, None) if reason is None else (None, reason)

    def _write(self, job: Job) -> tuple[dict[str, Any], Exception | None]:
        """Write this rank's file; rank 0 commits if all did.

        Returns the verdict, the same on all ranks, and the unexpected error of this one.
        """
        temporary = self.folder / f".step-{job.step:08d}.attempt-{job.attempt}"
        file = f"rank-{self._rank:05d}.safetensors"
        entry, error = None, None
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            entry = write_file(temporary / file, job.stored, self._buffer)
        except Exception as caught:  # whatever it is, the other ranks wait for an answer
            error = caught
        answer = {"file": file, "entry": entry, "reason": None if error is None else sentence(error, temporary / file)}
        answers = self._group.gather_objects(answer)
        verdict = None
        if answers is not None:
            failed = [rank for rank, other in enumerate(answers) if other["reason"] is not None]
            if failed:
                verdict = {"reason": answers[failed[0]]["reason"], "rank": failed[0], "bytes": 0}
            else:
                files = {other["file"]: other["entry"] for other in answers}
                try:
                    commit(temporary, step_folder(self.folder, job.step), build_manifest(job, files))
                    verdict = {"reason": None, "rank": None, "bytes": sum(item["bytes"] for item in files.values())}
                except Exception as caught:
                    error = caught
                    verdict = {"reason": sentence(caught, temporary), "rank": 0, "bytes": 0}
        verdict = self._group.broadcast_object(verdict)
        if verdict["reason"] is not None:
            # Best effort on every rank, since the ranks may see different disks; the next save tries again.
            shutil.rmtree(temporary, ignore_errors=True)
        return verdict, None if isinstance(error, OSError | CheckpointError) else error

    def _report(self, job: Job, outcome: Outcome, already_there: bool, replaced: str | None) -> None:
        if not outcome.saved:
            failure = {"step": job.step, "reason": outcome.reason, "rank": outcome.rank}
            self._on_event(Kind.CHECKPOINT_FAILED, failure)
            return
        details: dict[str, Any] = {"step": job.step, "bytes": outcome.bytes, "seconds": outcome.seconds}
        if already_there:
            details["already_there"] = True
        if replaced is not None:
            details["replaced"] = replaced
        self._on_event(Kind.CHECKPOINT_SAVED, details)
        try:
            retain(self.folder, self._keep, job.step)
        except OSError as error:
            message = f"old checkpoints in {self.folder} cannot be removed ({error}), so the disk may fill"
            self._on_event(Kind.WARNING, {"message": f"{message}; remove them by hand"})


def sentence(error: Exception, path: Path) -> str:
    """What went wrong with a save, for the event."""
    if isinstance(error, CheckpointError):
        return str(error)
    problem = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
    return f"{path} cannot be written ({problem}), so this step has no checkpoint; make room there before the next one"


def build_manifest(job: Job, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The manifest of a checkpoint, checksum included. Raises ValueError where the pieces of all ranks leave a gap."""
    spans: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for entry in files.values():
        for name, kind, start, stop, _dtype in entry["pieces"]:
            spans[name, kind].append((start, stop))
    sizes = {name: torch.Size(shape).numel() for name, (shape, _dtype) in job.parameters.items()}
    for name, kind in [*spans, *((name, "param") for name in sizes)]:
        if name not in sizes:
            raise ValueError(f"pieces of {name} were saved, but it is not among the parameters")
        gap = first_gap(spans[name, kind], 0, sizes[name])
        if gap is not None:
            raise ValueError(f"no rank saved elements [{gap[0]}, {gap[1]}) of {kind} of parameter {name}")
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "header": job.header,
        "parameters": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in job.parameters.items()},
        "files": files,
    }
    return {**manifest, "checksum": manifest_checksum(manifest)}


def commit(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Add the manifest to a folder of finished files and rename it into place, every step forced to disk.

    An invalid checkpoint in that place is removed. Raises CheckpointError when this rank does not see a file of another
    one, OSError.
    """
    for file, entry in manifest["files"].items():
        path = temporary / file
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{path} was written by another rank but rank 0 does not see all of it, so this step has no checkpoint;"
                " put the run folder on a file system that all nodes share"
            )
    with open(temporary / MANIFEST, "wb") as target:
        target.write(canonical(manifest))
        target.flush()
        os.fsync(target.fileno())
    sync_folder(temporary)
    if final.exists():
        remove_folder(final)
    os.rename(temporary, final)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Force a folder's own entries (names, renames) to disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_folder(path: Path) -> None:
    """Remove a checkpoint so that a kill on the way leaves no half of it under its name."""
    aside = path.with_name(f".{path.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)  # left by a kill at this very place, or not there at all
    os.rename(path, aside)
    shutil.rmtree(aside)


def clear_leftovers(folder: Path, attempt: int) -> None:
    """Remove what killed writers left: half-removed folders and unfinished ones of this attempt and older ones."""
    for path in folder.glob(".step-*"):
        match = re.fullmatch(r"\.step-\d+\.(?:attempt-(\d+)|removed)", path.name)
        if match and (match[1] is None or int(match[1]) <= attempt):
            # Best effort: a writer that is still dying may add a file meanwhile, and the next save comes by again.
            shutil.rmtree(path, ignore_errors=True)


def retain(folder: Path, keep: int, step: int) -> None:
    """Remove checkpoints older than the `keep` newest valid ones, counted from the just saved `step`.

    Newer ones were left behind by a run that went back, damaged ones among the kept are evidence: both stay. Raises
    OSError.
    """
    kept = 1
    for other in find(folder):
        path = step_folder(folder, other)
        if other >= step:
            continue
        if kept >= keep:
            remove_folder(path)
        elif is_whole(path):
            kept += 1


def is_whole(path: Path) -> bool:
    """Whether a checkpoint's manifest is valid and its files have the right sizes; contents are not read."""
    try:
        Checkpoint(path)
    except CheckpointError:
        return False
    return True
