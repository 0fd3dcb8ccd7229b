"""One file of a source, wherever it lies."""

from dataclasses import dataclass

HUB = "hub:"
REMOTE = "a hub dataset"


@dataclass(frozen=True)
class SourceFile:
    """One file of a source: an absolute path, a URL or a hub id.

    `version` changes when its contents do. `lenient`: bytes that are not UTF-8 are replaced (nobody can mend the
    standard library).
    """

    path: str
    kind: str
    size_bytes: int
    version: str
    lenient: bool = False
