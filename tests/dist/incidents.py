"""Things that happen to runs, each on cue: a sink of rank 0 sees a step's record and acts."""

import contextlib
import os
import resource
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.placement import Placement
from phalanx.trainer import train_rank
from phalanx.workload.sinks import Sink, TensorBoardSink
from tests.numerics.runs import job, on_one_thread


@dataclass
class SignalAt:
    """Sends a signal to ranks, from outside of all but rank 0, when the record of a step is written."""

    folder: Path
    step: int
    number: int
    ranks: Sequence[int]

    def on_step(self, record: dict[str, Any]) -> None:
        if record["step"] == self.step:
            for rank in self.ranks:
                os.kill(int((self.folder / f"pid-{rank}").read_text()), self.number)

    def on_event(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass
class FullDisk:
    """Fills the file system of a folder to the last byte between two steps."""

    folder: Path
    begin: int
    end: int

    def on_step(self, record: dict[str, Any]) -> None:
        ballast = self.folder / "ballast"
        if record["step"] == self.begin:
            with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 12))
            assert shutil.disk_usage(self.folder).free == 0
        if record["step"] == self.end:
            ballast.unlink()

    def on_event(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass
class SmallFiles:
    """Lets no file grow beyond a size between two steps: the kernel's answer is that of a full disk, for anybody."""

    size_bytes: int
    begin: int
    end: int
    before: tuple[int, int] = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_FSIZE))

    def on_step(self, record: dict[str, Any]) -> None:
        if record["step"] == self.begin:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size_bytes, self.before[1]))
        if record["step"] == self.end:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.before)

    def on_event(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def train_with_signal(
    placement: Placement, run: str, data: str, changes: dict[str, Any], step: int, number: int, ranks: Sequence[int]
) -> int:
    """A run whose first attempt gets a signal; returns the exit code."""
    described = job(run, data, changes, placement.world)
    (Path(run) / f"pid-{placement.rank}").write_text(str(os.getpid()))
    sinks = [SignalAt(Path(run), step, number, ranks)] if placement.attempt == 1 else []
    return int(train_rank.run_training(described, on_one_thread(placement), sinks))


def train_with_full_disk(
    placement: Placement, run: str, data: str, changes: dict[str, Any], begin: int, end: int, size_bytes: int | None
) -> int:
    """A run that finds no room on the disk (no room for files above `size_bytes`) between two steps."""
    described = job(run, data, changes, placement.world)
    sinks: list[Sink] = [FullDisk(Path(run), begin, end) if size_bytes is None else SmallFiles(size_bytes, begin, end)]
    if placement.rank == 0 and described.config.report.tensorboard:
        sinks.append(TensorBoardSink(described.paths))
    return int(train_rank.run_training(described, on_one_thread(placement), sinks))
