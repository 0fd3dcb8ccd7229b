"""Silent corruption: whether ranks that must hold the same parameters do, to the bit; who does not; and its repair.

Compared are the parameters as the ranks compute with them, of those that hold the same part of the model; where these
are released between uses, the shards that they are gathered from, of ranks that hold the same ones. Of a sum of all
bits as whole numbers no order of adding matters, and any one bit that flips changes it. What only one rank holds has no
twin to be compared with.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.codec import PLAIN
from phalanx.comm.collectives import all_reduce
from phalanx.comm.json_objects import JsonGroup
from phalanx.comm.mesh import Mesh
from phalanx.comm.topology import this_host
from phalanx.core.errors import Corrupted
from phalanx.core.events import Kind
from phalanx.core.json_lines import append_line
from phalanx.core.run_paths import RunPaths
from phalanx.engine.interface import Engine
from phalanx.engine.sharded import Sharded
from phalanx.recovery.state_file import digest
from phalanx.system import accelerator
from phalanx.trainer.anomalies import Wrong
from phalanx.workload.master_weights import as_integers, is_kept_whole, masters_of
from phalanx.workload.sinks import Records

NAMED = 3  # parameters that an event names
MOST = 3  # times that a step is gone back behind


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as whole numbers of 64 of them, modulo 2**64, on its device."""
    flat = tensor.detach().reshape(-1)
    together = max(1, 8 // flat.element_size())
    # From the first element that begins such a number to the last that ends one; what is beside them one by one.
    first = min(-flat.storage_offset() % together, flat.numel())
    last = first + (flat.numel() - first) // together * together
    ends = as_integers(torch.cat([flat[:first], flat[last:]])).sum(dtype=torch.int64)
    return ends if first == last else ends + flat[first:last].view(torch.int64).sum()


@dataclass(frozen=True)
class Verdict:
    """Ranks (of those compared) that deviate, and the parameters they deviate in; `healthy` has for each of these a
    rank to take it from. Without a majority `ranks` are all that may be wrong, and nobody is known to be healthy."""

    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    healthy: Mapping[str, int]


def verdict(table: Sequence[Sequence[int]], names: Sequence[str]) -> Verdict | None:
    """What checksums say, one row for each rank with a sum for each parameter; None: all agree.

    More than half of the ranks are believed. Where in some parameter there is no such half, all are named that do not
    agree with the others.
    """
    wrong: set[int] = set()
    healthy: dict[str, int] = {}
    differing = [index for index in range(len(names)) if len({row[index] for row in table}) > 1]
    if not differing:
        return None
    unclear = False
    for index in differing:
        column = [row[index] for row in table]
        value, count = Counter(column).most_common(1)[0]
        if 2 * count > len(column):
            healthy[names[index]] = column.index(value)
            wrong |= {rank for rank, other in enumerate(column) if other != value}
        else:
            unclear = True
            wrong |= set(range(len(column)))
    named = tuple(names[index] for index in differing)
    return Verdict(tuple(sorted(wrong)), named, {} if unclear else healthy)


def compare(engine: Engine, mesh: Mesh) -> Verdict | None:
    """Compare the parameters of all ranks of `mesh`. Collective; all get the same verdict. None: they agree."""
    with engine.full_parameters() as parameters:
        names = [name for name, each in parameters.items() if each.numel()]
        mine = torch.stack([checksum(parameters[name]) for name in names]).cpu()
    # One number first, which is all there is as a rule: the sums, each with a weight of its own, modulo 2**64.
    weights = torch.arange(1, 2 * len(names), 2, dtype=torch.int64) * 0x9E3779B97F4A7C1 + 1
    if len(set(_everyones((mine * weights).sum().view(1), mesh)[:, 0].tolist())) == 1:
        return None
    return verdict(_everyones(mine, mesh).tolist(), names)


def shards_of(engine: Engine, mesh: Mesh) -> list[int]:
    """For each rank of `mesh` a number that ranks which keep the same of the parameters have in common, and no others;
    0: it keeps nothing of them. Collective."""
    rows = [[piece.name, piece.start, piece.stop] for piece in masters_of(engine)]
    mine = int.from_bytes(digest(rows)[:6], "little") if rows else 0
    return [int(known) for known in mesh.gather(float(mine))]


def compare_shards(engine: Engine, mesh: Mesh, shards: Sequence[int]) -> Verdict | None:
    """Compare what ranks of `mesh` keep of the parameters with those that keep the same, by `shards_of`. Collective;
    the verdict is that of the ranks with the same as this one. None: they agree."""
    pieces = masters_of(engine)
    names = [piece.name for piece in pieces]
    mine = torch.tensor([int(checksum(piece.tensor)) for piece in pieces], dtype=torch.int64)
    (most,) = mesh.max([float(len(pieces))])
    rows = _everyones(torch.nn.functional.pad(mine, (0, int(most) - len(mine))), mesh).tolist()
    twins = [rank for rank, known in enumerate(shards) if known == shards[mesh.rank]]
    found = verdict([rows[rank][: len(names)] for rank in twins], names)
    if found is None:
        return None
    healthy = {name: twins[rank] for name, rank in found.healthy.items()}
    return Verdict(tuple(twins[rank] for rank in found.ranks), found.parameters, healthy)


def _everyones(mine: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The row of each rank."""
    table = torch.zeros(mesh.world, mine.numel(), dtype=torch.int64)
    table[mesh.rank] = mine
    all_reduce(table, mesh.control, mesh.bookkeeping).wait()
    return table


@torch.no_grad()
def repair(engine: Engine, mesh: Mesh, found: Verdict) -> bool:
    """Give the ranks that deviate the parameters of healthy ones, and see whether their masters agree with these; what
    the masters of a rank differ in cannot be repaired. Collective; all get the same answer."""
    with engine.full_parameters() as parameters:
        for name, source in found.healthy.items():
            values = parameters[name].view(-1)
            travelling = values.cpu().view(torch.uint8).clone()
            if mesh.rank != source:
                travelling.zero_()
            all_reduce(travelling, mesh.control, mesh.bookkeeping).wait()
            if mesh.rank in found.ranks:
                values.copy_(travelling.view(values.dtype))
        agree = all(_agrees(engine, name, parameters[name]) for name in found.healthy)
    return not any(mesh.gather(float(not agree)))


def _agrees(engine: Engine, name: str, values: torch.Tensor) -> bool:
    """Whether this rank's part of the masters gives these values. Of weights that are compressed on their way nobody
    can say."""
    if isinstance(engine, Sharded) and engine.sharding.compress != PLAIN:
        return True
    flat = values.view(-1)
    for piece in engine.pieces():
        if piece.name == name and piece.kind == "param":
            rounded = piece.tensor.to(flat.dtype)
            if not torch.equal(as_integers(rounded), as_integers(flat[piece.start : piece.stop])):
                return False
    return True


class Checks:
    """Compares every so many steps, and says what came of it. `step`: up to it all is taken to be well."""

    def __init__(self, every: int, engine: Engine, mesh: Mesh, paths: RunPaths, records: Records, step: int) -> None:
        self._engine, self._mesh, self._paths, self._records = engine, mesh, paths, records
        self._good, self._before = step, frozenset[int]()
        self._bad, self._backs = 0, 0  # the last step that was gone back behind, and how often without getting past it
        self.every = every
        self._shards: list[int] | None = None  # by which twins are known, where parameters are not kept whole
        if every and not is_kept_whole(engine):
            self._shards = shards_of(engine, mesh.data)
        if every and (why := self._useless()) is not None:
            self.every = 0
            records.event(Kind.WARNING, {"message": f"resilience.checksum_every compares nothing here: {why}"})

    def _useless(self) -> str | None:
        if self._mesh.data.world == 1:
            return "no two ranks hold the same parameters"
        holding = [known for known in self._shards or () if known]
        if self._shards is not None and len(set(holding)) == len(holding):
            return (
                "each rank holds its own shard of the parameters between steps (parallel.zero 3 and fsdp2), which no "
                "other one has; with parallel.shard_degree below the number of ranks some do, with parallel.zero 1 or "
                "2 all hold the same"
            )
        return None

    def _compare(self) -> Verdict | None:
        if self._shards is None:
            return compare(self._engine, self._mesh.data)
        return compare_shards(self._engine, self._mesh.data, self._shards)

    def look(self, step: int) -> Wrong | None:
        """Compare now, behind `step`; repair what can be repaired. What is to be gone back behind else. Collective.
        Raises Corrupted where that has not helped."""
        found = self._compare()
        if not any(self._mesh.gather(float(found is not None))):  # in any part of the model
            self._good, self._before = step, frozenset()
            self._backs = 0 if step > self._bad else self._backs
            return None
        ranks = frozenset(found.ranks if found is not None else ())
        # Whoever deviates again has kept what is wrong where nothing can be compared; of a shard that is wrong that
        # which the rule keeps of it may be so, too.
        again = bool(ranks & self._before) or self._shards is not None
        hopeless = found is not None and (not found.healthy or again)
        if found is not None and not hopeless:
            hopeless = not repair(self._engine, self._mesh.data, found)
        repaired = not any(self._mesh.gather(float(hopeless)))
        self._before = ranks
        known, parameters = self._tell(step, found, repaired)
        if repaired:
            return None
        names = ", ".join(str(row["rank"]) for row in known)
        sure = "" if all(row["certain"] for row in known) else "one of "
        reason = f"{sure}rank{'s' if len(known) > 1 else ''} {names} held other parameters than it must ({parameters})"
        self._bad, self._backs = max(self._bad, step), self._backs + 1
        if self._backs > MOST:
            raise Corrupted(
                f"behind step {step} {reason}, and going back {MOST} times has not helped; look at the devices that "
                f"{self._paths.suspects} names"
            )
        return Wrong(step, reason, good=self._good)

    def _tell(self, step: int, found: Verdict | None, repaired: bool) -> tuple[list[dict[str, Any]], str]:
        """Write down who may be wrong, and in what; both are the same on all ranks."""
        mine = None
        if found is not None:
            mine = {
                "wrong": self._mesh.data.rank in found.ranks,
                "certain": bool(found.healthy),
                "names": found.parameters[:NAMED],
                "count": len(found.parameters),
                "host": this_host().split()[0],
                "device": accelerator.name(self._mesh.device),
                "identity": accelerator.identity(self._mesh.device),
            }
        said = list(enumerate(JsonGroup(self._mesh.control).all_objects(mine)))
        kept = ("certain", "host", "device", "identity")
        rows = [{"rank": rank, **{key: one[key] for key in kept}} for rank, one in said if one and one["wrong"]]
        first = next(one for _, one in said if one)
        more = first["count"] - len(first["names"])
        parameters = ", ".join(first["names"]) + (f" and {more} more" if more else "")
        self._records.event(
            Kind.CORRUPTED, {"step": step, "devices": rows, "parameters": parameters, "repaired": repaired}
        )
        if self._mesh.rank == 0:
            self._mark([{"time": time.time(), "step": step, **row} for row in rows])
        return rows, parameters

    def _mark(self, rows: list[dict[str, Any]]) -> None:
        try:
            for row in rows:
                append_line(self._paths.suspects, row)
        except OSError as error:  # the event says the same
            self._records.event(Kind.WARNING, {"message": f"{self._paths.suspects}: {error.strerror}"})
