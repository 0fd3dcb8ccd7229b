"""Loading checkpoints: find the newest valid one and read any range of any parameter from its pieces.

A checkpoint is a folder `step-00000050/`, local or at a URL, of safetensors files and a `manifest.json`, which is
written last. A piece is
a run of elements [start, stop) of one row-major flattened parameter (`kind` "param") or of a state that has its shape
("exp_avg", ...) or a number for each of its rows ("row_..."), so a checkpoint written by any number of ranks is read on
any other number by coordinates alone.
With a window it is a run of elements of some columns (column_windows.py), which no reader need know of.
Nothing is unpickled.
"""

import contextlib
import hashlib
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from phalanx.checkpoint.disk.files import (
    LocalFiles,
    PieceSpan,
    RemoteFiles,
    Window,
    assemble,
    covers,
    project,
    split_bands,
)
from phalanx.core import format_versions
from phalanx.core.errors import CheckpointError, StorageError
from phalanx.core.records import EventKind
from phalanx.core.run_paths import MANIFEST, Url
from phalanx.optim.update import state_shape
from phalanx.storage import files as storage

FORMAT = "phalanx-pieces"
VERSION, WINDOWED = 1, 2  # without and with windows: older readers must not read those with windows

OnEvent = Callable[[str, dict[str, Any]], None]
Parameters = dict[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype such as "float32"
Span = tuple[int, int, Window]  # elements [start, stop) of a window

Place = TypeVar("Place", Path, Url, Path | Url)


class ObjectGroup(Protocol):
    """How the ranks that save or load together exchange small JSON-able objects.

    Every rank calls both functions in the same order. A saver calls them from its own thread, so they must not share a
    process group with the collectives of training.
    """

    def gather_objects(self, obj: Any) -> list[Any] | None:
        """The objects of all ranks in order of rank on rank 0; None elsewhere."""

    def broadcast_object(self, obj: Any) -> Any:
        """Rank 0's object, on every rank."""


class SingleRankGroup:
    """The group of one rank."""

    def gather_objects(self, obj: Any) -> list[Any] | None:
        """The one object there is."""
        return [obj]

    def broadcast_object(self, obj: Any) -> Any:
        """The object itself."""
        return obj


def step_folder(folder: Place, step: int) -> Place:
    """The folder of one step's checkpoint inside the folder of all checkpoints."""
    return folder / f"step-{step:08d}"


def tensor_name(name: str, kind: str, start: int, stop: int) -> str:
    """The name of a piece inside its safetensors file."""
    return f"{kind}/{name}/{start}-{stop}"


def canonical_json(obj: Any) -> bytes:
    """Canonical JSON for checksums: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """SHA-256 (hexadecimal) of a manifest without its own "checksum"."""
    return hashlib.sha256(
        canonical_json({key: value for key, value in manifest.items() if key != "checksum"})
    ).hexdigest()


def full_window(shape: tuple[int, ...], kind: str) -> Window:
    """The window that is all of a kind of state of a parameter of `shape`."""
    return 0, max(1, (1, *state_shape(shape, kind))[-1])


def find_missing(
    spans: Sequence[Span | PieceSpan], start: int, stop: int, columns: Window
) -> tuple[tuple[int, int], Window] | None:
    """The first elements of [start, stop) of a window that no span covers, and the columns they are numbered in."""
    for band in split_bands((span[2] for span in spans), columns):
        here = [(project(low, w, band), project(high, w, band)) for low, high, w, *_ in spans if covers(w, band)]
        gap = find_gap(here, project(start, columns, band), project(stop, columns, band))
        if gap is not None:
            return gap, band
    return None


def find_gap(spans: list[tuple[int, int]], start: int, stop: int) -> tuple[int, int] | None:
    """The first part of [start, stop) that no span covers; None when all of it is covered. Spans may overlap."""
    at = start
    for low, high in sorted(spans):
        if at >= stop or low > at:
            break
        at = max(at, high)
    if at >= stop:
        return None
    return at, min([low for low, _ in spans if low > at] + [stop])


class Checkpoint:
    """An open checkpoint: its manifest is valid and its files exist with the right sizes.

    What is in the files is checked by `verify`. `header` is what the saver was given (step, attempt, ...), `parameters`
    maps names to (shape, dtype), `bytes` is the size of all files without the manifest. Raises CheckpointError, naming
    the file and its problem.
    """

    def __init__(self, path: Path | Url) -> None:
        self.path = path
        self._source = RemoteFiles(path) if isinstance(path, Url) else LocalFiles(path)
        manifest = self._parse()
        try:
            self.header: dict[str, Any] = dict(manifest["header"])
            self.parameters: Parameters = {
                name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in manifest["parameters"].items()
            }
            self.files: dict[str, dict[str, Any]] = {
                Path(name).name: entry for name, entry in manifest["files"].items()
            }
            self.bytes = sum(int(entry["bytes"]) for entry in self.files.values())
            self._pieces: defaultdict[tuple[str, str], list[PieceSpan]] = defaultdict(list)
            for file, entry in self.files.items():
                for name, kind, start, stop, _dtype, *window in entry["pieces"]:
                    first, last = window[0] if window else full_window(self.parameters[name][0], kind)
                    self._pieces[name, kind].append((start, stop, (first, last), file))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._refuse(MANIFEST, f"does not have the fields of its version ({error!r})") from error
        for file, entry in self.files.items():
            with self._reading(file, "is missing"):
                size = self._source.size(file)
            if size != entry["bytes"]:
                raise self._refuse(file, f"has {size} bytes where {entry['bytes']} were written")

    def kinds(self, name: str) -> list[str]:
        """The kinds of state that are stored for a parameter, sorted."""
        return sorted(kind for other, kind in self._pieces if other == name)

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Read the files whose place in the sorted list is rank modulo world, and compare their CRC-32.

        `world` ranks that each call it check everything once. Raises CheckpointError, naming the file.
        """
        for file in sorted(self.files)[rank::world]:
            crc = 0
            with self._reading(file):
                for part in self._source.stream(file):
                    crc = zlib.crc32(part, crc)
            if f"{crc:08x}" != self.files[file]["crc32"]:
                raise self._refuse(file, f"has CRC-32 {crc:08x} where {self.files[file]['crc32']} was written")

    def read_into(
        self, name: str, kind: str, start: int, stop: int, out: Tensor, window: tuple[int, int] | None = None
    ) -> None:
        """Fill `out` with elements [start, stop) of a parameter's `kind`, or of a `window` of its columns.

        `out` is 1-D, of stop - start elements, of any dtype and on any device. Only the bytes asked for are read, and
        those between columns. Raises CheckpointError where no piece covers the range.
        """
        assert out.shape == (stop - start,), (name, kind, start, stop, tuple(out.shape))
        pieces = self._pieces.get((name, kind), [])
        whole = full_window(self.parameters[name][0] if name in self.parameters else (), kind)
        asked = whole if window is None else window
        missing = find_missing(pieces, start, stop, asked)
        if missing is not None:
            (first, last), band = missing
            columns = "" if band == whole else f" in columns {band[0]} to {band[1]}"
            raise CheckpointError(
                f"checkpoint {self.path} does not hold elements [{first}, {last}){columns} of {kind} of parameter "
                f"{name}, so it does not fit this model; resume with the configuration that wrote it"
            )

        def values(piece: PieceSpan, first: int, last: int) -> Tensor:
            low, high, _, file = piece
            with self._reading(file):
                return self._source.read_values(file, tensor_name(name, kind, low, high), first, last)

        assemble(out, start, stop, asked, pieces, values)

    def close(self) -> None:
        """Close the open files; a later `read` opens them again."""
        self._source.close()

    @contextlib.contextmanager
    def _reading(self, file: str, problem: str = "cannot be read") -> Iterator[None]:
        """Convert exceptions of reading a file into CheckpointError. The error of a store that does not answer is not
        converted: it says nothing about the checkpoint."""
        try:
            yield
        except StorageError:
            raise
        except (OSError, SafetensorError) as error:
            raise self._refuse(file, f"{problem} ({getattr(error, 'strerror', None) or error})") from error

    def _parse(self) -> dict[str, Any]:
        with self._reading(MANIFEST):
            raw = self._source.read_all(MANIFEST)
        try:
            manifest = json.loads(raw.decode("ascii"))
        except (ValueError, RecursionError) as error:
            raise self._refuse(MANIFEST, "is incomplete: it is not valid JSON") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise self._refuse(MANIFEST, f"is not of format {FORMAT}")
        wrong = format_versions.describe_version_problem(
            manifest.get("version"), (VERSION, WINDOWED), "resume from another checkpoint"
        )
        if wrong is not None:
            raise CheckpointError(f"checkpoint {self.path} cannot be used because its file {MANIFEST} {wrong}")
        # Comparing the spelling as well leaves no byte of the file that could change unnoticed.
        if manifest_checksum(manifest) != manifest.get("checksum") or canonical_json(manifest) != raw:
            raise self._refuse(MANIFEST, "does not match its checksum")
        return manifest

    def _refuse(self, file: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.path} cannot be used because its file {file} {problem}; restore an intact copy of the "
            "file or resume from another checkpoint"
        )


def list_steps(folder: Path | Url) -> list[int]:
    """Steps that have a checkpoint, valid or not, newest first: a folder of their name, or at a URL one that holds a
    manifest. Empty where `folder` does not exist."""
    if isinstance(folder, Url):
        files = storage.list_folder(folder.text, recursive=True, timeout_s=folder.timeout_s)
        found = (re.search(rf"/step-(\d{{8,}})/{re.escape(MANIFEST)}$", entry.url) for entry in files)
        return sorted((int(match[1]) for match in found if match), reverse=True)
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in folder.iterdir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def open_and_verify(
    path: Path | Url, rank: int = 0, world: int = 1, check: Callable[[Checkpoint], bool] | None = None
) -> tuple[Checkpoint | None, str | None]:
    """Open a checkpoint, verify this rank's part of the files, then ask `check` (False or CheckpointError: refused).

    Returns the checkpoint and None, or None and the reason it is refused for. Involves no other rank.
    """
    try:
        checkpoint = Checkpoint(path)
        checkpoint.verify(rank, world)
        if check is not None and not check(checkpoint):
            return None, f"checkpoint {path} is intact but does not fit this run"
    except CheckpointError as error:
        return None, str(error)
    return checkpoint, None


def agree_on_reason(group: ObjectGroup, reason: str | None) -> str | None:
    """The reason of the lowest rank that has one, on every rank; None when none has."""
    reasons = group.gather_objects(reason)
    return group.broadcast_object(next((found for found in reasons or [] if found is not None), None))


def agree_on_newest(
    folder: Path | Url,
    rank: int,
    group: ObjectGroup,
    check: Callable[[Checkpoint], bool] | None,
    on_event: OnEvent,
    at_most: int | None = None,
) -> Checkpoint | None:
    """The newest checkpoint that every rank finds valid, of step `at_most` or before if that is given.

    All ranks call it and share the work of reading the files. Refused ones are reported on rank 0 as
    "checkpoint_refused" (step, reason) and left untouched on disk.
    """
    members = group.gather_objects(None)
    # Rank 0 lists the folder for all: on a network file system two ranks may see different lists for a while.
    plan = group.broadcast_object(None if members is None else {"world": len(members), "steps": list_steps(folder)})
    for step in plan["steps"]:
        if at_most is not None and step > at_most:
            continue
        checkpoint, reason = open_and_verify(step_folder(folder, step), rank, plan["world"], check)
        reason = agree_on_reason(group, reason)
        if reason is None:
            return checkpoint
        if rank == 0:
            on_event(EventKind.CHECKPOINT_REFUSED, {"step": step, "reason": reason})
    return None


def find_newest_valid(
    folder: Path | Url, check: Callable[[Checkpoint], bool] | None, on_event: OnEvent
) -> Checkpoint | None:
    """`agree_on_newest` for one process: from newest to oldest, reads files completely, reports what it refuses."""
    return agree_on_newest(folder, 0, SingleRankGroup(), check, on_event)


def is_complete(path: Path | Url) -> bool:
    """Whether a checkpoint's manifest is valid and its files have the right sizes; contents are not read."""
    try:
        Checkpoint(path)
    except CheckpointError:
        return False
    return True
