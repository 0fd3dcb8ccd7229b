"""The checkpoint folder for saving: a local one, or one at a URL, where files cannot be renamed.

Locally every rank writes its file into a hidden folder with the attempt in its name, so that a late writer of a dead
attempt does no harm. When all files are safely on disk, rank 0 adds the manifest and renames the folder into place.

At a URL a step's manifest, written last, makes its checkpoint exist. Every rank streams its file straight from the
snapshot. Files carry the attempt in their names, and a word that each writer draws, since a machine that slept may have
counted the same attempt: so a late writer harms nothing, and a checkpoint that replaces another of its step does so in
one write, of the manifest.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from phalanx.checkpoint.disk.load import MANIFEST, canonical_json, is_complete, list_steps, step_folder
from phalanx.checkpoint.disk.snapshot import SnapshotFile
from phalanx.core.errors import CheckpointError, PhalanxError
from phalanx.core.json_lines import sync_folder
from phalanx.core.run_paths import Url
from phalanx.storage import files as storage

# A rank's file at a URL, or what a killed writer to a store without whole objects left of it.
_FILE = re.compile(r"\.?rank-\d+\.attempt-(\d+)(?:-[0-9a-f]+)?\.safetensors(?:\.[0-9a-f]+\.partial)?")


class LocalCheckpoints:
    """A local folder of checkpoints. Everything raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear_leftovers(self, attempt: int) -> None:
        """Remove leftovers of killed writers of this attempt and older ones: unfinished and half-removed folders."""
        for path in self._folder.glob(".step-*"):
            match = re.fullmatch(r"\.step-\d+\.(?:attempt-(\d+)|removed)", path.name)
            if match and (match[1] is None or int(match[1]) <= attempt):
                # Best effort: a writer that is still dying may add a file meanwhile, and the next save comes by again.
                shutil.rmtree(path, ignore_errors=True)

    def has_step(self, step: int) -> bool:
        """Whether there is a checkpoint of a step, valid or not."""
        return os.path.isdir(step_folder(self._folder, step))

    def rank_file(self, step: int, attempt: int, rank: int) -> Path:
        """Where a rank's file of an attempt is written to."""
        return self._unfinished(step, attempt) / f"rank-{rank:05d}.safetensors"

    def write(self, step: int, attempt: int, rank: int, content: SnapshotFile) -> None:
        """Write a rank's file and force it to disk."""
        path = self.rank_file(step, attempt, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)

    def commit(self, step: int, attempt: int, manifest: dict[str, Any]) -> None:
        """Add the manifest to a folder of finished files and rename it into place, every step forced to disk.

        An invalid checkpoint in that place is removed. Raises CheckpointError when this rank does not see a file of
        another one.
        """
        temporary, final = self._unfinished(step, attempt), step_folder(self._folder, step)
        for file, entry in manifest["files"].items():
            path = temporary / file
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise CheckpointError(
                    f"{path} was written by another rank but rank 0 cannot see all of it, so this step has no "
                    "checkpoint; put the run folder on a file system that all nodes share"
                )
        with open(temporary / MANIFEST, "wb") as target:
            target.write(canonical_json(manifest))
            target.flush()
            os.fsync(target.fileno())
        sync_folder(temporary)
        if final.exists():
            self.remove(step)
        os.rename(temporary, final)
        sync_folder(final.parent)

    def abandon(self, step: int, attempt: int) -> None:
        """Remove the files of a failed save; best effort, since the next save removes them, too."""
        shutil.rmtree(self._unfinished(step, attempt), ignore_errors=True)

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step so that a kill meanwhile leaves no part of it under its name."""
        path = step_folder(self._folder, step)
        aside = path.with_name(f".{path.name}.removed")
        shutil.rmtree(aside, ignore_errors=True)  # left by a kill at this very place, or not there at all
        os.rename(path, aside)
        shutil.rmtree(aside)

    def _unfinished(self, step: int, attempt: int) -> Path:
        return self._folder / f".step-{step:08d}.attempt-{attempt}"


def write_file(path: Path, content: SnapshotFile) -> None:
    """Write a file and force it to disk. Raises OSError."""
    with open(path, "wb") as file:
        for chunk in content.chunks():
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


class RemoteCheckpoints:
    """A folder of checkpoints at a URL. Everything raises StorageError or ConfigError."""

    def __init__(self, folder: Url) -> None:
        self._folder, self._token = folder, secrets.token_hex(4)

    def clear_leftovers(self, attempt: int) -> None:
        """Remove what killed or failed writers of this attempt and older ones left in steps without a manifest."""
        steps: defaultdict[str, list[storage.Entry]] = defaultdict(list)
        for entry in storage.list_folder(self._folder.text, recursive=True, timeout_s=self._folder.timeout_s):
            steps[entry.url.rpartition("/")[0]].append(entry)
        for entries in steps.values():
            if any(entry.name == MANIFEST for entry in entries):
                continue
            matches = [(entry, _FILE.fullmatch(entry.name)) for entry in entries]
            storage.remove(
                (entry.url for entry, match in matches if match and int(match[1]) <= attempt),
                timeout_s=self._folder.timeout_s,
            )

    def has_step(self, step: int) -> bool:
        """Whether there is a checkpoint of a step, valid or not."""
        return storage.exists((step_folder(self._folder, step) / MANIFEST).text, timeout_s=self._folder.timeout_s)

    def rank_file(self, step: int, attempt: int, rank: int) -> Url:
        """Where a rank's file of an attempt is written to."""
        return step_folder(self._folder, step) / f"rank-{rank:05d}.attempt-{attempt}-{self._token}.safetensors"

    def write(self, step: int, attempt: int, rank: int, content: SnapshotFile) -> None:
        """Stream a rank's file."""
        path = self.rank_file(step, attempt, rank)
        storage.write_chunks(path.text, content.chunks, timeout_s=path.timeout_s)

    def commit(self, step: int, attempt: int, manifest: dict[str, Any]) -> None:
        """Make a checkpoint of the files that the manifest names. Raises CheckpointError when one is not there."""
        final = step_folder(self._folder, step)
        found = storage.list_folder(final.text, timeout_s=final.timeout_s)
        sizes = {entry.name: entry.size for entry in found}
        for file, entry in manifest["files"].items():
            if sizes.get(file) != entry["bytes"]:
                raise CheckpointError(
                    f"{final / file} was written by another rank but rank 0 cannot see all of it, so this step has "
                    "no checkpoint; give all ranks the same URL and store"
                )
        storage.write_bytes((final / MANIFEST).text, canonical_json(manifest), timeout_s=final.timeout_s)
        others = [one.url for one in found if one.name != MANIFEST and one.name not in manifest["files"]]
        with contextlib.suppress(PhalanxError):  # of a checkpoint that this one replaced; they go with the step
            storage.remove(others, timeout_s=final.timeout_s)

    def abandon(self, step: int, attempt: int) -> None:
        """Keep the files of a failed save: the failing store would only cost another wait, and `clear_leftovers` runs
        before the next save."""

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step, its manifest first."""
        path = step_folder(self._folder, step)
        files = storage.list_folder(path.text, timeout_s=path.timeout_s)
        storage.remove(
            (entry.url for entry in sorted(files, key=lambda entry: entry.name != MANIFEST)),
            timeout_s=path.timeout_s,
        )


def retain(folder: Path | Url, keep: int, step: int, protected: int | None = None) -> None:
    """Remove checkpoints older than the `keep` newest valid ones, counted from the just saved `step`; not `protected`.

    Newer ones of an abandoned branch, and damaged ones among the kept, stay. Raises as the folder does.
    """
    checkpoints, kept = open_folder(folder), 1
    for other in (other for other in list_steps(folder) if other < step):
        if kept >= keep and other != protected:
            checkpoints.remove(other)
        elif is_complete(step_folder(folder, other)):
            kept += 1


def open_folder(folder: Path | Url) -> LocalCheckpoints | RemoteCheckpoints:
    """Open a folder of checkpoints, local or at a URL."""
    return RemoteCheckpoints(folder) if isinstance(folder, Url) else LocalCheckpoints(folder)
