"""Versions of file and message formats, and the error for an unknown version.

Each format has a separate number, which is raised when an older release would misread the new format; adding a field
does not raise it. A table in docs/runs.md lists the numbers.
"""

import json
from collections.abc import Collection
from typing import Any

from phalanx.core.errors import RunError
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import RunPaths

MAX_VERSION = 10**6  # larger numbers are not versions
RUN_FOLDER = 1  # version of a run folder's records; records without a version are of version 1
KEY = "run_folder"  # in versions.json, and in the event `run_started`


def describe_version_problem(found: Any, known: Collection[int], remedy: str) -> str | None:
    """The problem of a version that was `found`, as the end of a sentence about its file; None if it is one of the
    `known`. `remedy`: an alternative to installing the release that wrote it."""
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
    """Raises RunError if a later release of Phalanx has continued a run in a format that this one cannot read."""
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
