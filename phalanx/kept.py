"""What an attempt begins with, where that is in shared memory: plain data, which a placement carries."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KeptFile:
    """The state file of a rank of an attempt before."""

    rank: int
    path: str


@dataclass(frozen=True)
class Kept:
    """A step that all ranks of an attempt before have committed to shared memory, and their files in order of rank."""

    step: int
    files: tuple[KeptFile, ...]
