"""Detection and repair of silent data corruption: ranks that must hold the same parameters are compared bit by bit.

The parameters are compared as the ranks compute with them, between ranks that hold the same part of the model; if
parameters are released between uses, their shards are compared, between ranks that hold the same ones. A checksum is a
sum of all bits as integers, so it does not depend on the order of addition, and any single flipped bit changes it.
Parameters that only one rank holds cannot be compared.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.collectives import all_reduce
from phalanx.comm.compression import NO_COMPRESSION
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup, this_host
from phalanx.core.errors import Corrupted
from phalanx.core.json_lines import append_line
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.engine.interface import Engine
from phalanx.engine.sharded import ShardedEngine
from phalanx.recovery.state_file import digest_json
from phalanx.system import accelerator
from phalanx.trainer.anomalies import RollbackRequest
from phalanx.workload.master_weights import find_master_pieces, keeps_whole_parameters, view_as_integers
from phalanx.workload.sinks import RecordWriter

MAX_NAMED_PARAMETERS = 3  # parameters named in an event
MAX_ROLLBACKS = 3  # rollbacks behind the same step


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Checksum of a tensor: the sum of its bits as 64-bit integers modulo 2**64, on its device."""
    flat = tensor.detach().reshape(-1)
    together = max(1, 8 // flat.element_size())
    # The aligned middle as 64-bit integers; the elements before and after it one by one.
    first = min(-flat.storage_offset() % together, flat.numel())
    last = first + (flat.numel() - first) // together * together
    ends = view_as_integers(torch.cat([flat[:first], flat[last:]])).sum(dtype=torch.int64)
    return ends if first == last else ends + flat[first:last].view(torch.int64).sum()


@dataclass(frozen=True)
class ChecksumVerdict:
    """Deviating ranks (of those compared) and the parameters in which they deviate; `healthy` has for each of
    these a rank with the correct value. Without a majority, `ranks` are all candidates and `healthy` is empty."""

    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    healthy: Mapping[str, int]


def find_deviating_ranks(table: Sequence[Sequence[int]], names: Sequence[str]) -> ChecksumVerdict | None:
    """Find deviating ranks from checksums, one row for each rank with a sum for each parameter; None: all agree.

    A value held by more than half of the ranks is correct. If a parameter has no such majority, all ranks that do not
    agree with the others are returned.
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
    return ChecksumVerdict(tuple(sorted(wrong)), named, {} if unclear else healthy)


def compare_parameters(engine: Engine, mesh: Mesh) -> ChecksumVerdict | None:
    """Compare the parameters of all ranks of `mesh`. Collective; all get the same verdict. None: they agree."""
    with engine.full_parameters() as parameters:
        names = [name for name, each in parameters.items() if each.numel()]
        mine = torch.stack([checksum(parameters[name]) for name in names]).cpu()
    # First a single number, which is usually enough: the sum of the checksums modulo 2**64, each with a different
    # weight.
    weights = torch.arange(1, 2 * len(names), 2, dtype=torch.int64) * 0x9E3779B97F4A7C1 + 1
    if len(set(_gather_rows((mine * weights).sum().view(1), mesh)[:, 0].tolist())) == 1:
        return None
    return find_deviating_ranks(_gather_rows(mine, mesh).tolist(), names)


def fingerprint_shards(engine: Engine, mesh: Mesh) -> list[int]:
    """Fingerprint the parameter shards of each rank of `mesh`: equal for ranks that hold the same shards,
    different for others; 0 for a rank without shards. Collective."""
    rows = [[piece.name, piece.start, piece.stop] for piece in find_master_pieces(engine)]
    mine = int.from_bytes(digest_json(rows)[:6], "little") if rows else 0
    return [int(known) for known in mesh.gather(float(mine))]


def compare_shards(engine: Engine, mesh: Mesh, shards: Sequence[int]) -> ChecksumVerdict | None:
    """Compare this rank's parameter shards with those of the ranks with the same `fingerprint_shards`. Collective;
    the verdict covers these ranks. None: they agree."""
    pieces = find_master_pieces(engine)
    names = [piece.name for piece in pieces]
    mine = torch.tensor([int(checksum(piece.tensor)) for piece in pieces], dtype=torch.int64)
    (most,) = mesh.max([float(len(pieces))])
    rows = _gather_rows(torch.nn.functional.pad(mine, (0, int(most) - len(mine))), mesh).tolist()
    twins = [rank for rank, known in enumerate(shards) if known == shards[mesh.rank]]
    found = find_deviating_ranks([rows[rank][: len(names)] for rank in twins], names)
    if found is None:
        return None
    healthy = {name: twins[rank] for name, rank in found.healthy.items()}
    return ChecksumVerdict(tuple(twins[rank] for rank in found.ranks), found.parameters, healthy)


def _gather_rows(mine: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Gather the rows of all ranks."""
    table = torch.zeros(mesh.world, mine.numel(), dtype=torch.int64)
    table[mesh.rank] = mine
    all_reduce(table, mesh.control, mesh.bookkeeping).wait()
    return table


@torch.no_grad()
def repair_parameters(engine: Engine, mesh: Mesh, verdict: ChecksumVerdict) -> bool:
    """Copy parameters from healthy ranks to deviating ones, and check that these ranks' master parameters match.
    Wrong masters cannot be repaired. Collective; all get the same answer."""
    with engine.full_parameters() as parameters:
        for name, source in verdict.healthy.items():
            values = parameters[name].view(-1)
            travelling = values.cpu().view(torch.uint8).clone()
            if mesh.rank != source:
                travelling.zero_()
            all_reduce(travelling, mesh.control, mesh.bookkeeping).wait()
            if mesh.rank in verdict.ranks:
                values.copy_(travelling.view(values.dtype))
        agree = all(_agrees_with_masters(engine, name, parameters[name]) for name in verdict.healthy)
    return not any(mesh.gather(float(not agree)))


def _agrees_with_masters(engine: Engine, name: str, values: torch.Tensor) -> bool:
    """Whether this rank's part of the masters matches the values. With compressed weights this cannot be decided."""
    if isinstance(engine, ShardedEngine) and engine.sharding.compress != NO_COMPRESSION:
        return True
    flat = values.view(-1)
    for piece in engine.pieces():
        if piece.name == name and piece.kind == "param":
            rounded = piece.tensor.to(flat.dtype)
            if not torch.equal(view_as_integers(rounded), view_as_integers(flat[piece.start : piece.stop])):
                return False
    return True


class ChecksumMonitor:
    """Compares checksums periodically and reports the result. `step`: assumed to be healthy."""

    def __init__(
        self, every: int, engine: Engine, mesh: Mesh, paths: RunPaths, records: RecordWriter, step: int
    ) -> None:
        self._engine, self._mesh, self._paths, self._records = engine, mesh, paths, records
        self._last_good_step, self._deviated_before = step, frozenset[int]()
        self._last_bad_step, self._rollbacks = (
            0,
            0,
        )  # the last step rolled back to, and how often without getting past it
        self.every = every
        self._shards: list[int] | None = None  # fingerprints of the shards, if parameters are sharded between uses
        if every and not keeps_whole_parameters(engine):
            self._shards = fingerprint_shards(engine, mesh.data)
        if every and (why := self._why_useless()) is not None:
            self.every = 0
            records.write_event(
                EventKind.WARNING, {"message": f"resilience.checksum_every has nothing to compare: {why}"}
            )

    def _why_useless(self) -> str | None:
        if self._mesh.data.world == 1:
            return "no two ranks hold the same parameters"
        holding = [known for known in self._shards or () if known]
        if self._shards is not None and len(set(holding)) == len(holding):
            return (
                "each rank holds its own shard of the parameters between steps (parallel.zero 3 and fsdp2), which "
                "no other rank has; with parallel.shard_degree below the number of ranks some ranks share one, with "
                "parallel.zero 1 or 2 all do"
            )
        return None

    def _compare(self) -> ChecksumVerdict | None:
        if self._shards is None:
            return compare_parameters(self._engine, self._mesh.data)
        return compare_shards(self._engine, self._mesh.data, self._shards)

    def check_step(self, step: int) -> RollbackRequest | None:
        """Compare now, after `step`; repair if possible. Returns a rollback request otherwise. Collective. Raises
        Corrupted if rollbacks did not help."""
        found = self._compare()
        if not any(self._mesh.gather(float(found is not None))):  # in any part of the model
            self._last_good_step, self._deviated_before = step, frozenset()
            self._rollbacks = 0 if step > self._last_bad_step else self._rollbacks
            return None
        ranks = frozenset(found.ranks if found is not None else ())
        # A rank that deviates again has wrong state that cannot be compared; a wrong shard may also have reached the
        # optimizer state.
        again = bool(ranks & self._deviated_before) or self._shards is not None
        hopeless = found is not None and (not found.healthy or again)
        if found is not None and not hopeless:
            hopeless = not repair_parameters(self._engine, self._mesh.data, found)
        repaired = not any(self._mesh.gather(float(hopeless)))
        self._deviated_before = ranks
        known, parameters = self._report(step, found, repaired)
        if repaired:
            return None
        names = ", ".join(str(row["rank"]) for row in known)
        sure = "" if all(row["certain"] for row in known) else "one of "
        reason = f"{sure}rank{'s' if len(known) > 1 else ''} {names} held wrong parameters ({parameters})"
        self._last_bad_step, self._rollbacks = max(self._last_bad_step, step), self._rollbacks + 1
        if self._rollbacks > MAX_ROLLBACKS:
            raise Corrupted(
                f"after step {step} {reason}, and {MAX_ROLLBACKS} rollbacks did not help; check the devices listed "
                f"in {self._paths.suspects}"
            )
        return RollbackRequest(step, reason, good_step=self._last_good_step)

    def _report(self, step: int, found: ChecksumVerdict | None, repaired: bool) -> tuple[list[dict[str, Any]], str]:
        """Record the suspected ranks and parameters; both are the same on all ranks."""
        mine = None
        if found is not None:
            mine = {
                "wrong": self._mesh.data.rank in found.ranks,
                "certain": bool(found.healthy),
                "names": found.parameters[:MAX_NAMED_PARAMETERS],
                "count": len(found.parameters),
                "host": this_host().split()[0],
                "device": accelerator.get_device_name(self._mesh.device),
                "identity": accelerator.device_uuid(self._mesh.device),
            }
        said = list(enumerate(JsonGroup(self._mesh.control).all_gather_objects(mine)))
        kept = ("certain", "host", "device", "identity")
        rows = [{"rank": rank, **{key: one[key] for key in kept}} for rank, one in said if one and one["wrong"]]
        first = next(one for _, one in said if one)
        more = first["count"] - len(first["names"])
        parameters = ", ".join(first["names"]) + (f" and {more} more" if more else "")
        self._records.write_event(
            EventKind.CORRUPTED, {"step": step, "devices": rows, "parameters": parameters, "repaired": repaired}
        )
        if self._mesh.rank == 0:
            self._write_suspects([{"time": time.time(), "step": step, **row} for row in rows])
        return rows, parameters

    def _write_suspects(self, rows: list[dict[str, Any]]) -> None:
        try:
            for row in rows:
                append_line(self._paths.suspects, row)
        except OSError as error:  # the event has the same contents
            self._records.write_event(EventKind.WARNING, {"message": f"{self._paths.suspects}: {error.strerror}"})
