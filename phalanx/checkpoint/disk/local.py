"""Checkpoints in a local folder, written whole or not at all.

Every rank writes its file into a hidden folder that carries the attempt in its name, so that a late writer of a dead
attempt harms nothing. When all files are safely on disk, rank 0 adds the manifest and renames the folder into place.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from phalanx.checkpoint.disk.load import MANIFEST, canonical_json, is_complete, list_steps, step_folder
from phalanx.checkpoint.disk.snapshot import SnapshotFile
from phalanx.core.errors import CheckpointError
from phalanx.core.json_lines import sync_folder


class LocalCheckpoints:
    """The folder `folder` of checkpoints as the saver uses it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear_leftovers(self, attempt: int) -> None:
        """Remove what killed writers of this attempt and older ones left."""
        clear_leftovers(self._folder, attempt)

    def has_step(self, step: int) -> bool:
        """Whether there is a checkpoint of a step, valid or not."""
        return os.path.isdir(step_folder(self._folder, step))

    def rank_file(self, step: int, attempt: int, rank: int) -> Path:
        """Where a rank's file of an attempt is written to."""
        return self._unfinished(step, attempt) / f"rank-{rank:05d}.safetensors"

    def write(self, step: int, attempt: int, rank: int, content: SnapshotFile) -> None:
        """Write a rank's file and force it to disk. Raises OSError."""
        path = self.rank_file(step, attempt, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)

    def commit(self, step: int, attempt: int, manifest: dict[str, Any]) -> None:
        """Make a checkpoint of the files that the manifest names. Raises CheckpointError, OSError."""
        commit(self._unfinished(step, attempt), step_folder(self._folder, step), manifest)

    def abandon(self, step: int, attempt: int) -> None:
        """Remove the files of a save that failed; best effort, as the next save comes by again."""
        shutil.rmtree(self._unfinished(step, attempt), ignore_errors=True)

    def retain(self, keep: int, step: int, protected: int | None = None) -> None:
        """Remove old checkpoints. Raises OSError."""
        retain(self._folder, keep, step, protected)

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step. Raises OSError."""
        remove_folder(step_folder(self._folder, step))

    def _unfinished(self, step: int, attempt: int) -> Path:
        return self._folder / f".step-{step:08d}.attempt-{attempt}"


def write_file(path: Path, content: SnapshotFile) -> None:
    """Write a file and force it to disk. Raises OSError."""
    with open(path, "wb") as file:
        for chunk in content.chunks():
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


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
        target.write(canonical_json(manifest))
        target.flush()
        os.fsync(target.fileno())
    sync_folder(temporary)
    if final.exists():
        remove_folder(final)
    os.rename(temporary, final)
    sync_folder(final.parent)


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


def retain(folder: Path, keep: int, step: int, protected: int | None = None) -> None:
    """Remove checkpoints older than the `keep` newest valid ones, counted from the just saved `step`; not `protected`.

    Newer ones were left behind by a run that went back, damaged ones among the kept are evidence: both stay. Raises
    OSError.
    """
    kept = 1
    for other in list_steps(folder):
        path = step_folder(folder, other)
        if other >= step:
            continue
        if kept >= keep and other != protected:
            remove_folder(path)
        elif is_complete(path):
            kept += 1
