"""Reading a step from the state files of an earlier attempt by coordinates, like a checkpoint, on any node."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.disk.files import DTYPES, PieceSpan, assemble
from phalanx.checkpoint.disk.load import find_missing, full_window
from phalanx.core.errors import CheckpointError
from phalanx.core.placement import InMemoryCheckpoint, StateFileLocation
from phalanx.optim.quantized import QuantizedShard
from phalanx.optim.update import Slot
from phalanx.recovery.replica_client import RemoteStateFile, ReplicaClient
from phalanx.recovery.state_file import StateFile

AnyStateFile = StateFile | RemoteStateFile


def open_state_file(kept: StateFileLocation, step: int, replicas: ReplicaClient | None) -> tuple[AnyStateFile, int]:
    """A file that was kept, here or on another node, and its slot with a step. Raises CheckpointError where it does not
    hold that any more."""
    file: AnyStateFile
    if kept.address is None:
        file = StateFile(Path(kept.path))
    else:
        assert replicas is not None, "files on other nodes are read through this node's"
        file = RemoteStateFile(kept.path, functools.partial(replicas.read_bytes, kept.address, kept.path))
    slot = file.metadata.steps.get(step)
    if slot is None:
        raise CheckpointError(f"the state file {kept.path} no longer holds step {step}; restart")
    return file, slot


def read_tensor(file: AnyStateFile, slot: int, at: int, dtype: str, shape: list[int]) -> Tensor:
    """A tensor of a slot, of which byte `at` is the first: a view where the file is on this node."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=DTYPES[dtype])
    offset = file.metadata.slot_offset(slot) + at
    if isinstance(file, StateFile):
        return torch.frombuffer(file.map, dtype=DTYPES[dtype], count=count, offset=offset).view(shape)
    data = file.read_bytes(offset, count * DTYPES[dtype].itemsize)
    return torch.frombuffer(data, dtype=DTYPES[dtype], count=count).view(shape)


def map_slot(file: StateFile, slot: int, tensors: Iterable[Sequence[Any]]) -> Slot:
    """The tensors of a slot, of which an index says `tensors`."""
    found: Slot = {}
    for key, kind, dtype, shape, at in tensors:
        found.setdefault(key, {})[kind] = read_tensor(file, slot, at, dtype, shape)
    return found


class InMemoryCheckpointReader:
    """A step in the state files of an earlier attempt, read by coordinates like a checkpoint. `header` is what was said
    of it by rank 0; `shapes` are those of whole parameters. A file is opened when it is asked for.

    Raises CheckpointError where one does not hold the step any more.
    """

    def __init__(
        self, kept: InMemoryCheckpoint, shapes: Mapping[str, tuple[int, ...]], replicas: ReplicaClient | None = None
    ) -> None:
        self._checkpoint, self._shapes = kept, shapes
        self._files = {file.rank: functools.partial(open_state_file, file, kept.step, replicas) for file in kept.files}

    @functools.cached_property
    def header(self) -> dict[str, Any]:
        file, slot = self._open(self._checkpoint.files[0].rank)
        return file.header(slot)

    def records(self) -> list[dict[str, Any]]:
        """Each rank's measurements of the step, in order of rank; empty where one is missing."""
        file, _ = self._open(self._checkpoint.files[0].rank)
        if len(self._files) < file.metadata.world:
            return []
        headers = (file.header(slot) for file, slot in map(self._open, self._files))
        found = [header.get("record") for header in headers]
        return [record for record in found if isinstance(record, dict)] if all(found) else []

    @functools.cache  # noqa: B019
    def _open(self, rank: int) -> tuple[AnyStateFile, int]:
        """A rank's file, and the slot of the step."""
        return self._files[rank]()

    @functools.cached_property
    def _values(self) -> dict[str, tuple[AnyStateFile, int, dict[str, Any]]]:
        """Every piece by a unique name: its file and slot, and its row in the index."""
        found = {}
        for kept in self._checkpoint.files:
            file, slot = self._open(kept.rank)
            for number, row in enumerate(file.index()["pieces"]):
                found[f"{kept.rank}:{number}"] = file, slot, row
        return found

    @functools.cached_property
    def _pieces(self) -> dict[tuple[str, str], list[PieceSpan]]:
        found: defaultdict[tuple[str, str], list[PieceSpan]] = defaultdict(list)
        for named, (_, _, row) in self._values.items():
            whole = full_window(self._shapes.get(row["name"], ()), row["kind"])
            first, last = row.get("window", whole)
            found[row["name"], row["kind"]].append((row["start"], row["stop"], (first, last), named))
        return found

    def read_into(
        self, name: str, kind: str, start: int, stop: int, out: Tensor, window: tuple[int, int] | None = None
    ) -> None:
        """As `Checkpoint.read_into`. Raises CheckpointError where no piece covers the range."""
        pieces = self._pieces.get((name, kind), [])
        asked = full_window(self._shapes.get(name, ()), kind) if window is None else window
        if find_missing(pieces, start, stop, asked) is not None:
            raise CheckpointError(
                f"the state files of step {self._checkpoint.step} do not hold all of {kind} of parameter {name}, so "
                "they do not fit this model; resume with the configuration that wrote them"
            )
        assemble(out, start, stop, asked, pieces, self._elements)

    def _elements(self, piece: PieceSpan, first: int, last: int) -> Tensor:
        file, slot, row = self._values[piece[3]]
        if "codes" in row:
            return self._dequantize(piece[3])[first:last]
        return read_tensor(file, slot, row["at"] + first * DTYPES[row["dtype"]].itemsize, row["dtype"], [last - first])

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def _dequantize(self, named: str) -> Tensor:
        """A piece that is coded."""
        file, slot, row = self._values[named]
        codes = read_tensor(file, slot, row["codes"], "U8", row["shape"])
        scales = read_tensor(file, slot, row["at"], row["dtype"], row["shape"][:2])
        return QuantizedShard(codes, scales, row["stop"] - row["start"], row["signed"]).dequantize()
