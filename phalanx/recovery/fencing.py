"""Fencing of stale ranks: epoch files in the run folder say which attempt may write (`elastic/membership/election.py`).

A node that is disconnected from the others ends its ranks within about a second; until then they could still complete a
checkpoint beside that of the continuing nodes. No torch here.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import CutOff, RunError
from phalanx.core.run_paths import RunPaths


def read_newest_epoch(paths: RunPaths) -> dict[str, Any] | None:
    """Contents of the newest epoch file, or only its number while it is being written; None if there is none."""
    numbers = _epochs(paths)
    return read_epoch(paths, numbers[-1]) if numbers else None


def _epochs(paths: RunPaths) -> list[int]:
    return sorted(int(path.stem) for path in paths.epoch(1).parent.glob("*.json") if path.stem.isdecimal())


def read_epoch(paths: RunPaths, epoch: int) -> dict[str, Any]:
    """Contents of an epoch file, or only its number while it is being written."""
    said: Any = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        said = json.loads(paths.epoch(epoch).read_text(encoding="utf-8"))
    return {**(said if isinstance(said, dict) else {}), "epoch": epoch}


def is_fenced(file: Mapping[str, Any], attempt: int, epoch: int | None) -> bool:
    """Whether ranks of an attempt, started in an `epoch` (None: by a single node), are fenced according to an epoch
    file: it names a later epoch, or a later attempt of the same epoch."""
    since, oldest = file.get("since"), file.get("attempt")
    if type(oldest) is not int:
        return False
    return oldest > attempt if epoch is None or type(since) is not int else (since, oldest) > (epoch, attempt)


def check_before_commit(paths: RunPaths, attempt: int, epoch: int | None = None) -> None:
    """Check before a commit that this attempt may write. Raises CutOff if the run continues elsewhere with a later
    attempt; RunError if this attempt was started by a single node."""
    # An epoch file that is being written is incomplete; then the previous one counts.
    files = (read_epoch(paths, number) for number in reversed(_epochs(paths)))
    known = next((each for each in files if type(each.get("attempt")) is int), {})
    if is_fenced(known, attempt, epoch):
        # The agent of a single node would retry with a higher attempt number, which is not fenced.
        raise (RunError if epoch is None else CutOff)(
            f"this rank belongs to attempt {attempt}, but since epoch {known['epoch']} the run continues on other "
            "nodes; this node was cut off from them and exits"
        )
