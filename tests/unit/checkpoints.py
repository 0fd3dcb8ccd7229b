"""What the tests of checkpoints share: a small state, ranks that are threads, and ways to save and to damage."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.disk.load import Checkpoint, Parameters
from phalanx.checkpoint.disk.save import CheckpointSaver, StatePiece
from phalanx.core.run_paths import Url

Events = list[tuple[str, dict[str, Any]]]
SHAPES: Parameters = {"layers.0.weight": ((7, 11), "float32"), "norm": ((5,), "float32"), "scalar": ((1,), "float32")}
KINDS = ("param", "exp_avg", "exp_avg_sq")


class Room:
    """Where the threads of one test meet; each rank has a ThreadGroup onto it."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=20)
        self.slots: list[Any] = [None] * world


class ThreadGroup:
    """A Group over threads; what passes goes through JSON, as over a real wire."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room = room
        self.rank = rank

    def gather_objects(self, obj: Any) -> list[Any] | None:
        self.room.slots[self.rank] = json.dumps(obj)
        self.room.barrier.wait()
        result = [json.loads(item) for item in self.room.slots] if self.rank == 0 else None
        self.room.barrier.wait()
        return result

    def broadcast_object(self, obj: Any) -> Any:
        if self.rank == 0:
            self.room.slots[0] = json.dumps(obj)
        self.room.barrier.wait()
        result = json.loads(self.room.slots[0])
        self.room.barrier.wait()
        return result


def state(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[tuple[str, str], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        (name, kind): torch.randn(torch.Size(shape).numel(), generator=generator, dtype=torch.float64).to(dtype)
        for name, (shape, _) in SHAPES.items()
        for kind in KINDS
    }


def cut(values: dict[tuple[str, str], Tensor], rank: int, world: int) -> list[StatePiece]:
    """Rank's even cut of everything; small parameters leave some ranks with empty pieces."""
    pieces = []
    for (name, kind), flat in values.items():
        start, stop = flat.numel() * rank // world, flat.numel() * (rank + 1) // world
        pieces.append(StatePiece(name, kind, start, stop, flat[start:stop]))
    return pieces


def make_savers(folder: Path | Url, world: int, keep: int = 3) -> tuple[list[CheckpointSaver], Events]:
    room = Room(world)
    events: Events = []
    sink = lambda kind, details: events.append((kind, details))  # noqa: E731
    return [CheckpointSaver(folder, rank, ThreadGroup(room, rank), keep, sink) for rank in range(world)], events


def save_all(
    savers: list[CheckpointSaver], values: dict[tuple[str, str], Tensor], step: int, attempt: int = 1, **more: Any
) -> None:
    world = len(savers)
    for rank, saver in enumerate(savers):
        saver.save({"step": step, "attempt": attempt, **more}, SHAPES, cut(values, rank, world), attempt)
    for saver in savers:
        saver.wait()


def save_alone(folder: Path | Url, step: int, seed: int = 0, attempt: int = 1, keep: int = 3, **more: Any) -> Events:
    savers, events = make_savers(folder, 1, keep)
    save_all(savers, state(seed), step, attempt, **more)
    return events


def assert_holds(checkpoint: Checkpoint, values: dict[tuple[str, str], Tensor], world: int = 1) -> None:
    for (name, kind), flat in values.items():
        for rank in range(world):
            start, stop = flat.numel() * rank // world, flat.numel() * (rank + 1) // world
            out = torch.full((stop - start,), float("nan"), dtype=flat.dtype)
            checkpoint.read_into(name, kind, start, stop, out)
            assert torch.equal(out, flat[start:stop]), (name, kind, start, stop)


def flip(path: Path, position: int, mask: int = 1) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ mask]))


def hidden(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("."))
