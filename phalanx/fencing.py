"""Whether a rank may still write: files of epochs in the run folder say which attempt goes on (`cluster/epochs.py`).

A node that was cut off from the others ends its ranks within a second or so; until then they could still complete a
checkpoint beside the one of those who go on. No torch here.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from phalanx.errors import RunError
from phalanx.records import RunPaths


def newest(paths: RunPaths) -> dict[str, Any] | None:
    """What the file of the newest epoch says, or its number alone where it is being written; None without any."""
    numbers = [int(path.stem) for path in paths.epoch(1).parent.glob("*.json") if path.stem.isdecimal()]
    return told(paths, max(numbers)) if numbers else None


def told(paths: RunPaths, epoch: int) -> dict[str, Any]:
    """What the file of an epoch says, or its number alone where it is being written."""
    said: Any = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        said = json.loads(paths.epoch(epoch).read_text(encoding="utf-8"))
    return {**(said if isinstance(said, dict) else {}), "epoch": epoch}


def is_over(told: Mapping[str, Any], attempt: int, epoch: int | None) -> bool:
    """Whether ranks of an attempt, ordered in an `epoch`, may not write any more, as the file of the newest one says:
    attempts of a later epoch have taken their place, or later ones of the same. None: one node had the run alone."""
    since, oldest = told.get("since"), told.get("attempt")
    if type(oldest) is not int:
        return False
    return oldest > attempt if epoch is None or type(since) is not int else (since, oldest) > (epoch, attempt)


def before_commit(paths: RunPaths, attempt: int, epoch: int | None = None) -> None:
    """Raises RunError where the run goes on elsewhere, with a later attempt than this."""
    told = newest(paths) or {}
    if is_over(told, attempt, epoch):
        raise RunError(
            f"this rank belongs to attempt {attempt}, and since epoch {told['epoch']} the run goes on with another one "
            "on other nodes; this node was cut off from them and ends"
        )
