"""Whether a rank may still write: files of epochs in the run folder say which attempt goes on (`cluster/epochs.py`).

A node that was cut off from the others ends its ranks within a second or so; until then they could still complete a
checkpoint beside the one of those who go on. No torch here.
"""

import contextlib
import json
from typing import Any

from phalanx.errors import CutOff
from phalanx.records import RunPaths


def newest(paths: RunPaths) -> dict[str, Any] | None:
    """What the file of the newest epoch says, or its number alone where it is being written; None without any."""
    numbers = _epochs(paths)
    return told(paths, numbers[-1]) if numbers else None


def _epochs(paths: RunPaths) -> list[int]:
    return sorted(int(path.stem) for path in paths.epoch(1).parent.glob("*.json") if path.stem.isdecimal())


def told(paths: RunPaths, epoch: int) -> dict[str, Any]:
    """What the file of an epoch says, or its number alone where it is being written."""
    said: Any = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        said = json.loads(paths.epoch(epoch).read_text(encoding="utf-8"))
    return {**(said if isinstance(said, dict) else {}), "epoch": epoch}


def before_commit(paths: RunPaths, attempt: int) -> None:
    """Raises CutOff where the run goes on elsewhere, with a later attempt than this."""
    # Of a file that is being written it is not known yet; then by what the one before it says.
    attempts = (told(paths, epoch).get("attempt") for epoch in reversed(_epochs(paths)))
    oldest = next((each for each in attempts if type(each) is int), 0)
    if oldest > attempt:
        raise CutOff(
            f"this rank belongs to attempt {attempt}, and the run goes on with attempt {oldest}, so nothing more is "
            "written by this one"
        )
