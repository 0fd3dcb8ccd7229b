"""Versions of what Phalanx writes or sends and reads again, and what is said of one that this release does not know.

Each format has a number of its own, which is raised when an older release would misread what is new, and not for
another field. Which has what number where is a table in docs/runs.md.
"""

import json
from collections.abc import Collection
from typing import Any

from phalanx.core.errors import RunError
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import RunPaths

MAX_VERSION = 10**6  # a number beyond is none of a version
RUN_FOLDER = 1  # of a run folder's records; one that does not say it is of 1
KEY = "run_folder"  # in versions.json, and in the event `run_started`


def describe_version_problem(found: Any, known: Collection[int], remedy: str) -> str | None:
    """What is wrong with a version that was `found`, as words that follow the name of what has it; None where it is one
    of the `known`. `remedy`: what helps beside the release that wrote it."""
    if type(found) is int and found in known:
        return None
    reads = " and ".join(map(str, sorted(known)))
    number = type(found) is int and 0 <= found < MAX_VERSION
    if number and found > max(known):
        wrote = f"is of format version {found}, which a later release of Phalanx has written (this one reads {reads})"
        return f"{wrote}; install that release, or {remedy}"
    said = f"{found}" if number else "unknown"
    return f"is of format version {said}, and this release of Phalanx reads {reads}; {remedy}"


def check_run_version(paths: RunPaths) -> None:
    """Raises RunError where a later release of Phalanx has gone on with a run in a way that this one cannot read."""
    try:
        versions = json.loads(paths.versions.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        versions = None
    said = [versions] if isinstance(versions, dict) else []
    said += [event for event in read_events(paths.events) if event.get("kind") == EventKind.RUN_STARTED]
    for each in said:
        wrong = describe_version_problem(each.get(KEY, RUN_FOLDER), (RUN_FOLDER,), "name another run folder")
        if wrong is not None:
            raise RunError(f"the run folder {paths.display_name} {wrong}")
