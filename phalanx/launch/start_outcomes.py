"""How the starts of a launched run ended, in a file each beside what `phalanx launch` wrote."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.run_paths import RunPaths


@dataclass(frozen=True)
class StartOutcome:
    """How one start of a launched run ended: by `code`, with `next_action` another one or not, at the saved `step`, as
    `node` says."""

    code: int
    next_action: str
    step: int
    node: int = 0


def read_start_outcome(path: Path) -> StartOutcome | None:
    try:
        words = path.read_text(encoding="utf-8").split()
        return StartOutcome(int(words[0]), words[1], int(words[2]), int(words[3]))
    except (OSError, ValueError, IndexError):
        return None


def read_start_outcomes(paths: RunPaths) -> list[StartOutcome]:
    """Outcomes of earlier starts, oldest first."""
    return [over for path in list_outcome_files(paths) if (over := read_start_outcome(path)) is not None]


def list_outcome_files(paths: RunPaths) -> list[Path]:
    """Files of how starts ended, oldest first, but for those that another launch is just removing."""
    found: list[tuple[float, Path]] = []
    for path in paths.launch.glob("over-*"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]
