"""A rank's state in shared memory, committed step by step, and reading what ranks before have left there.

Where ranks compute on the CPU with the sharded engine the state lives in the file's two slots, and nothing is copied.
Otherwise it is copied into them; from an accelerator beside the computation, by a thread and a stream of its own.
"""

import functools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx import accelerator, state_file
from phalanx.checkpoint.assemble import Where, assemble
from phalanx.checkpoint.files import DTYPES
from phalanx.checkpoint.read import all_columns, first_missing
from phalanx.checkpoint.snapshot import DTYPE_NAMES
from phalanx.comm.mesh import Mesh
from phalanx.errors import CheckpointError, ConfigError
from phalanx.kept import Kept
from phalanx.optim.coded import Coded
from phalanx.optim.engine import Outcome, Piece, Slot
from phalanx.optim.lane import Lane
from phalanx.records import Kind
from phalanx.state_file import ALIGNED, Facts, StateFile, up

KEY = "resilience.memory"
OF_SHARED, OF_HOST = 0.9, 0.5  # of what is free, that state may take where nobody has asked for it

Whole = Callable[[Iterable[Piece]], Iterable[Piece]]  # an engine's pieces in coordinates of whole parameters
Header = Callable[[int, int], dict[str, Any]]  # of a step and the tokens since step 1
Record = Callable[[int, Outcome], dict[str, Any] | None]  # what this rank has measured of a step
Say = Callable[[str, dict[str, Any]], None]


def _nothing(step: int) -> None:
    return None


class Memory:
    """This rank's slots, as an engine knows them (`phalanx.optim.engine.Keeper`).

    `acknowledged(step)` is called before this rank tells the others that it is through with a step, and returns when
    the step is safe wherever else it is kept.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        generation: int,
        run: bytes,
        say: Say,
        kept: Kept | None = None,
        wanted: bool | Literal["auto"] = "auto",
        in_place: bool = True,
        background: bool = False,
        acknowledged: Callable[[int], None] = _nothing,
    ) -> None:
        """Files are made in `folder`, as those of attempt `generation` of a `run`. `kept`: what the attempt begins
        with. `in_place`: engines may work in the slots; else states are copied, in the `background` or not."""
        assert not (in_place and background), "what is not copied is not copied in the background"
        self.in_place, self.late, self.attached = in_place, False, False
        self.slots: list[Slot] = []
        self.current, self.tokens = 0, 0
        self._folder, self._mesh, self._generation, self._run = folder, mesh, generation, run
        self._say, self._kept, self._wanted, self._acknowledged = say, kept, wanted, acknowledged
        self._lane = Lane(mesh.device) if background else None
        self._alive = state_file.live_in(folder)
        self._file: StateFile | None = None
        self._settled = self._last = 0  # the step that was confirmed, and the one that was given to `commit`
        self.whole: Whole = iter  # gives an engine's pieces in coordinates of whole parameters
        self._header: Header = lambda step, tokens: {"step": step, "tokens": tokens}
        self._record: Record = lambda step, outcome: None

    def describe(self, header: Header, record: Record) -> None:
        """What is said of a step besides its state. `header` is asked by the thread that commits, `record` by the one
        that copies."""
        self._header, self._record = header, record

    @property
    def file(self) -> StateFile:
        assert self._file is not None, "the slots are not open"
        return self._file

    def open(self, like: Slot, pieces: Callable[[Slot], Iterable[Piece]]) -> bool:
        """As the engine's interface has it; the slots are those of a file that was kept if on every rank it looks just
        as it would be made. Raises ConfigError where there is no room for what was asked for."""
        index, slot_bytes = self._index(like, self.whole(pieces(like)))
        mine = self._found(state_file.digest(index))
        (attached,) = self._mesh.min([float(mine is not None)])
        if attached and mine is not None and self._kept is not None:
            self._file = StateFile(mine.path, writable=True)
            self.current, self.attached = mine.steps[self._kept.step], True
        elif not self._make(index, slot_bytes):
            return False
        self.slots = [_views(self.file, slot, index) for slot in (0, 1)]
        (late,) = self._mesh.max([float(self._lane is not None or self._acknowledged is not _nothing)])
        self.late = bool(late)
        return True

    def _found(self, layout: bytes) -> Facts | None:
        """This rank's file of the attempt before, if it holds the step that is to be gone on from in that layout."""
        files = {file.rank: file.path for file in self._kept.files} if self._kept is not None else {}
        if self._kept is None or len(files) != self._mesh.world or self._mesh.rank not in files:
            return None
        facts = state_file.facts_of(Path(files[self._mesh.rank]))
        return facts if facts is not None and facts.layout == layout and self._kept.step in facts.steps else None

    def _index(self, like: Slot, pieces: Iterable[Piece]) -> tuple[dict[str, Any], int]:
        """What lies where in a slot, and its bytes. It holds all that must be alike for a slot to be used as it is."""
        tensors: list[list[Any]] = []
        places: dict[int, int] = {}
        end = 0
        for key, state in like.items():
            for kind, tensor in state.items():
                tensors.append([key, kind, DTYPE_NAMES[tensor.dtype], list(tensor.shape), end])
                places[id(tensor)] = end
                end += up(tensor.numel() * tensor.dtype.itemsize, ALIGNED)
        mesh = self._mesh
        who = [mesh.rank, mesh.world, mesh.axes.tensor, mesh.axes.pipeline]
        return {"rank": who, "tensors": tensors, "pieces": [_row(piece, places) for piece in pieces]}, end

    def _make(self, index: dict[str, Any], slot_bytes: int) -> bool:
        """Make this rank's file. False, on all ranks, where it would not fit on one of them."""
        mesh, found = self._mesh, os.statvfs(self._folder)
        # Asked before any rank of this node takes some of it.
        shared, host = found.f_bavail * found.f_frsize, accelerator.host_memory_free()
        needs = mesh.gather(float(state_file.file_bytes(index, slot_bytes)))
        node = mesh.topology.node_of
        need = sum(each for rank, each in enumerate(needs) if node[rank] == node[mesh.rank])
        short = too_large(need, shared, host, self._wanted is True)
        if short is None:
            try:
                who = state_file.Who(self._generation, mesh.rank, mesh.world, self._run)
                self._file = state_file.create(self._folder, who, index, slot_bytes)
            except OSError as error:
                short = (
                    f"{self._folder} does not take {_gib(need)} ({error.strerror}), of which {_gib(shared)} are free"
                )
        (made,) = mesh.min([float(self._file is not None)])
        if not made:
            if self._file is not None:
                self._file.facts.path.unlink(missing_ok=True)
                self._file, short = None, short or "another node has no room for it"
            if self._wanted is True:
                raise ConfigError(
                    f"{KEY} is true, but the state of the ranks does not fit into shared memory: {short}; set "
                    f"{KEY}=auto or false, or give this machine or container a larger /dev/shm"
                )
        if self._kept is None or not made:
            why = f"the two newest steps of this node's ranks take {_gib(need)} of {_gib(shared)} in shared memory"
            reason = why if made else f"after a failure the run goes back to a checkpoint, since {short}"
            self._say(Kind.RESOLVED, {"key": KEY, "value": bool(made), "reason": reason})
        return bool(made)

    # ------------------------------------------------------------------------------------------------------ every step

    def begin(self) -> None:
        if self.in_place:
            self.file.void(1 - self.current)

    def commit(self, step: int, outcome: Outcome, state: Slot) -> None:
        self.tokens += outcome.weight
        self._last, self.current = step, 1 - self.current
        keep = functools.partial(self._keep, self.current, self._header(step, self.tokens), state, outcome)
        if self._lane is None:
            keep()
        else:
            self._lane.follow()  # behind what computes the state
            self._lane.put(keep)

    def _keep(self, slot: int, header: dict[str, Any], state: Slot, outcome: Outcome | None = None) -> None:
        self.file.void(slot)
        if not self.in_place:
            pairs = [
                (self.slots[slot][key][kind], each) for key, kinds in state.items() for kind, each in kinds.items()
            ]
            if pairs:  # a rank may hold nothing
                torch._foreach_copy_([into for into, _ in pairs], [each for _, each in pairs], non_blocking=True)
            accelerator.wait_here(self._mesh.device)
        record = self._record(header["step"], outcome) if outcome is not None else None
        self.file.commit(slot, header["step"], json.dumps(header | {"record": record}).encode())

    def settle(self) -> None:
        if self._lane is not None:
            self._lane.drain()
        if self._settled != self._last:
            self._settled = self._last
            self._acknowledged(self._last)

    def loaded(self, step: int, state: Slot) -> None:
        """The state is that of `step`; of the starting weights nothing is kept, since they can be made again."""
        self.file.void(1 - self.current)
        if not self.attached and step > 0:
            self._keep(self.current, self._header(step, self.tokens), state)

    def forget(self) -> None:
        """What is kept is not to be gone on from: another state is about to be loaded in its place. Collective."""
        self.settle()
        self.attached = False
        if self._file is not None:
            self._file.void(0)
            self._file.void(1)
        self._mesh.min([1.0])

    def forget_others(self) -> None:
        """All ranks have loaded what they go on from: remove what else lies in the folder. Collective."""
        self._mesh.min([1.0])
        mine = None if self._file is None else self._file.facts.generation
        for path in state_file.files_in(self._folder) if self._mesh.rank == 0 and mine is not None else ():
            facts = state_file.facts_of(path)
            if facts is None or facts.generation != mine:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()
        # What says that this process lives stays: buffers of its engine may still be there.


def too_large(need: float, shared: float, host: float, asked: bool) -> str | None:
    """Why state of `need` bytes does not fit into what is free of shared memory and of the host's; None: it does. What
    nobody has `asked` for must leave more."""
    of_shared, of_host = (1.0, 1.0) if asked else (OF_SHARED, OF_HOST)
    if need > of_shared * shared:
        return f"the state of this node's ranks takes {_gib(need)}, and shared memory has {_gib(shared)} free"
    if need > of_host * host:
        return f"the state of this node's ranks takes {_gib(need)}, and this machine has {_gib(host)} of memory free"
    return None


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def _row(piece: Piece, places: Mapping[int, int]) -> dict[str, Any]:
    """A piece in the index, by where in a slot its tensors lie."""
    row: dict[str, Any] = {"name": piece.name, "kind": piece.kind, "start": piece.start, "stop": piece.stop}
    if piece.window is not None:
        row["window"] = list(piece.window)
    row["dtype"] = DTYPE_NAMES[piece.dtype]
    if isinstance(piece.held, Coded):
        codes, scales = piece.held.codes, piece.held.scales
        row |= {"codes": places[id(codes)], "shape": list(codes.shape), "signed": piece.held.signed}
        return row | {"at": places[id(scales)]}
    return row | {"at": places[id(piece.held)]}


def _views(file: StateFile, slot: int, index: Mapping[str, Any]) -> Slot:
    """The tensors of a slot."""
    views: Slot = {}
    for key, kind, dtype, shape, at in index["tensors"]:
        views.setdefault(key, {})[kind] = _tensor(file, slot, at, dtype, shape)
    return views


def _tensor(file: StateFile, slot: int, at: int, dtype: str, shape: list[int]) -> Tensor:
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=DTYPES[dtype])
    flat = torch.frombuffer(file.map, dtype=DTYPES[dtype], count=count, offset=file.at(slot) + at)
    return flat.view(shape)


class KeptState:
    """A step in the state files of an attempt before, to be read by coordinates as a checkpoint is. `header` is what
    was said of it by rank 0; `shapes` are those of whole parameters.

    Raises CheckpointError where a file does not hold the step any more.
    """

    def __init__(self, kept: Kept, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._kept, self._shapes = kept, shapes
        file, slot = self._open(kept.files[0].path)
        self.header = file.header(slot)

    def records(self) -> list[dict[str, Any]]:
        """What each rank had measured of the step, in order of rank; empty where one has not."""
        headers = (file.header(slot) for file, slot in (self._open(kept.path) for kept in self._kept.files))
        found = [header.get("record") for header in headers]
        return [record for record in found if isinstance(record, dict)] if all(found) else []

    def _open(self, path: str) -> tuple[StateFile, int]:
        """A file, and the slot of the step."""
        file = StateFile(Path(path))
        slot = file.facts.steps.get(self._kept.step)
        if slot is None:
            raise CheckpointError(f"the state file {path} does not hold step {self._kept.step} any more; start again")
        return file, slot

    @functools.cached_property
    def _values(self) -> dict[str, tuple[StateFile, int, dict[str, Any]]]:
        """Every piece by a name of its own: the file and slot that it lies in, and its row in the index."""
        found = {}
        for kept in self._kept.files:
            file, slot = self._open(kept.path)
            for number, row in enumerate(file.index()["pieces"]):
                found[f"{kept.rank}:{number}"] = file, slot, row
        return found

    @functools.cached_property
    def _pieces(self) -> dict[tuple[str, str], list[Where]]:
        found: defaultdict[tuple[str, str], list[Where]] = defaultdict(list)
        for named, (_, _, row) in self._values.items():
            whole = all_columns(self._shapes.get(row["name"], ()))
            first, last = row.get("window", whole)
            found[row["name"], row["kind"]].append((row["start"], row["stop"], (first, last), named))
        return found

    def read(
        self, name: str, kind: str, start: int, stop: int, out: Tensor, window: tuple[int, int] | None = None
    ) -> None:
        """As `Checkpoint.read`. Raises CheckpointError where no piece covers the range."""
        pieces = self._pieces.get((name, kind), [])
        asked = all_columns(self._shapes.get(name, ())) if window is None else window
        if first_missing([(low, high, w) for low, high, w, _ in pieces], start, stop, asked) is not None:
            raise CheckpointError(
                f"the state files of step {self._kept.step} do not hold all of {kind} of parameter {name}, so they do "
                "not fit this model; resume with the configuration that wrote them"
            )
        assemble(out, start, stop, asked, pieces, self._elements)

    def _elements(self, piece: Where, first: int, last: int) -> Tensor:
        return self._whole(piece[3])[first:last]

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def _whole(self, named: str) -> Tensor:
        """A piece, decoded where it is coded."""
        file, slot, row = self._values[named]
        count = row["stop"] - row["start"]
        if "codes" not in row:
            return _tensor(file, slot, row["at"], row["dtype"], [count])
        codes = _tensor(file, slot, row["codes"], "U8", row["shape"])
        scales = _tensor(file, slot, row["at"], row["dtype"], row["shape"][:2])
        return Coded(codes, scales, count, row["signed"]).decoded()
