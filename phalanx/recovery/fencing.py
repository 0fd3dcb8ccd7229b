"""Whether a rank may still write: files of epochs in the run folder say which attempt goes on
(`elastic/membership/election.py`).

A node that was cut off from the others ends its ranks within a second or so; until then they could still complete a
checkpoint beside the one of those who go on. No torch here.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import CutOff, RunError
from phalanx.core.run_paths import RunPaths


def read_newest_epoch(paths: RunPaths) -> dict[str, Any] | None:
    """What the file of the newest epoch says, or its number alone where it is being written; None without any."""
    numbers = _epochs(paths)
    return read_epoch(paths, numbers[-1]) if numbers else None


def _epochs(paths: RunPaths) -> list[int]:
    return sorted(int(path.stem) for path in paths.epoch(1).parent.glob("*.json") if path.stem.isdecimal())


def read_epoch(paths: RunPaths, epoch: int) -> dict[str, Any]:
    """What the file of an epoch says, or its number alone where it is being written."""
    said: Any = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        said = json.loads(paths.epoch(epoch).read_text(encoding="utf-8"))
    return {**(said if isinstance(said, dict) else {}), "epoch": epoch}


def is_fenced(file: Mapping[str, Any], attempt: int, epoch: int | None) -> bool:
    """Whether ranks of an attempt, ordered in an `epoch`, may not write any more, as the file of an epoch says:
    attempts of a later epoch have taken their place, or later ones of the same. None: one node had the run alone."""
    since, oldest = file.get("since"), file.get("attempt")
    if type(oldest) is not int:
        return False
    return oldest > attempt if epoch is None or type(since) is not int else (since, oldest) > (epoch, attempt)


def check_before_commit(paths: RunPaths, attempt: int, epoch: int | None = None) -> None:
    """Raises CutOff where the run goes on elsewhere, with a later attempt than this; RunError where one node had it."""
    # What a file says that is being written is not known yet; then what the one before it says counts.
    files = (read_epoch(paths, number) for number in reversed(_epochs(paths)))
    known = next((each for each in files if type(each.get("attempt")) is int), {})
    if is_fenced(known, attempt, epoch):
        # On one node alone its agent would try again, under a number that may write.
        raise (RunError if epoch is None else CutOff)(
            f"this rank belongs to attempt {attempt}, and since epoch {known['epoch']} the run goes on with another "
            "one on other nodes; this node was cut off from them and ends"
        )
