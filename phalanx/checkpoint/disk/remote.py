"""Checkpoints at a URL, where nothing can be renamed: a step's manifest, written last, makes its checkpoint exist.

Every rank streams its file straight from the snapshot. Files carry the attempt in their names, and a word that each
writer draws, since a machine that slept may have counted the same attempt: so a late writer harms nothing, and a
checkpoint that replaces another of its step does so in one write, of the manifest.
"""

import contextlib
import re
import secrets
from collections import defaultdict
from typing import Any

from phalanx.checkpoint.disk.load import MANIFEST, canonical_json, is_complete, list_steps, step_folder
from phalanx.checkpoint.disk.snapshot import SnapshotFile
from phalanx.core.errors import CheckpointError, PhalanxError
from phalanx.core.run_paths import Url
from phalanx.storage import files as storage

# A rank's file, or what a killed writer to a store without whole objects left of it.
_FILE = re.compile(r"\.?rank-\d+\.attempt-(\d+)(?:-[0-9a-f]+)?\.safetensors(?:\.[0-9a-f]+\.partial)?")


class RemoteCheckpoints:
    """The folder `folder` of checkpoints as the saver uses it. Everything raises StorageError or ConfigError."""

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
                    f"{final / file} was written by another rank but rank 0 does not see all of it, so this step has no"
                    " checkpoint; give all ranks the same URL and store"
                )
        storage.write_bytes((final / MANIFEST).text, canonical_json(manifest), timeout_s=final.timeout_s)
        others = [one.url for one in found if one.name != MANIFEST and one.name not in manifest["files"]]
        with contextlib.suppress(PhalanxError):  # of a checkpoint that this one replaced; they go with the step
            storage.remove(others, timeout_s=final.timeout_s)

    def abandon(self, step: int, attempt: int) -> None:
        """Leave the files of a save that failed: the store that failed would only be waited for once more, and
        `clear_leftovers` comes by before the next save."""

    def retain(self, keep: int, step: int, protected: int | None = None) -> None:
        """Remove old checkpoints, as `local.retain` does; manifests first, so that no half of one is left."""
        kept = 1
        for other in list_steps(self._folder):
            path = step_folder(self._folder, other)
            if other >= step:
                continue
            if kept < keep:
                kept += is_complete(path)
                continue
            if other != protected:
                self.remove(other)

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step, its manifest first."""
        path = step_folder(self._folder, step)
        files = storage.list_folder(path.text, timeout_s=path.timeout_s)
        storage.remove(
            (entry.url for entry in sorted(files, key=lambda entry: entry.name != MANIFEST)),
            timeout_s=path.timeout_s,
        )
