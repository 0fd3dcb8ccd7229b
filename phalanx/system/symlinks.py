"""Links in a run folder that lead out of it: whoever may write into a run folder must not have its owner write anywhere
else. No torch here."""

import os
from collections.abc import Iterator
from pathlib import Path

from phalanx.core.errors import RunError
from phalanx.core.run_paths import RunPaths

MAX_DEPTH = 3  # folders below the run folder: logs/attempt-001/rank-00000.log is looked at


def check_symlinks(paths: RunPaths) -> None:
    """Raises RunError for a link in a run folder that leads out of it. The folder itself may be behind links."""
    root = Path(os.path.realpath(paths.root))  # which takes a link to itself for what it is
    for link in _links(str(root), MAX_DEPTH):
        target = Path(os.path.realpath(link))
        if target != root and root not in target.parents:
            name = Path(link).relative_to(root)
            raise RunError(
                f"the run folder {paths.display_name} has a link, {name}, that leads out of it to {target}, and a run "
                "writes nowhere but into its own folder; remove the link, or have --run-dir name a folder in that place"
            )


def _links(folder: str, deeper: int) -> Iterator[str]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # gone meanwhile, or not to be read: whoever writes there says so
        return
    for entry in entries:
        if entry.is_symlink():
            yield entry.path
        elif deeper > 1 and entry.is_dir(follow_symlinks=False):
            yield from _links(entry.path, deeper - 1)
