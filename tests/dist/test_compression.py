"""Compression: collectives beside a plain account of what is rounded when, and the engine beside AdamW that rounds."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm.compression import CODECS, Codec, CompressedCollectives
from phalanx.comm.mesh import join
from phalanx.comm.rendezvous import Topology
from phalanx.comm.two_level import TwoLevelCollectives
from phalanx.comm.uneven_collectives import HostStagedCollectives
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.engine import sharded
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.layout.buckets import Bucket, ParameterSpec, check_whole_rows
from tests.dist.engine_cases import BETAS, DECAY, EPS, NOMINAL, Batch, Driven, Mix, Net, batches, rate
from tests.helpers import ALL, process_group, run_ranks, some

HOSTS = ["a", "aaa", "abc", "abab", "abbcb", "aabb", "aab"]
STEPS = 4 if ALL else 2


def rounded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    coded, found = torch.empty(codec.byte_size(values.numel()), dtype=torch.uint8), torch.empty_like(values)
    codec.encode(values, coded)
    codec.decode(coded, found)
    return found


def summed(codec: Codec, topology: Topology, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sums of the nodes in their order, rounded where there are several, whoever owns the result."""
    sums = [torch.stack([parts[rank] for rank in ranks]).sum(0) for ranks in topology.nodes]
    if len(sums) == 1:
        return sums[0]
    total = rounded(codec, sums[0])
    for one in sums[1:]:
        total = total + rounded(codec, one)
    return total


def exchange(placement: Placement, hosts: str) -> list[list[int]]:
    """Transfers of whole numbers, so that nothing but the codec rounds; returns the bytes that left the node."""
    rank, world, topology, sent = placement.rank, placement.world, Topology.from_hosts(hosts), []
    with process_group(placement):
        group = dist.new_group()
        for seed, (name, dtype, piece_bytes) in enumerate(
            itertools.product(CODECS, (torch.float32, torch.float64), (2000, 2**18))
        ):
            codec, line = CODECS[name], TwoLevelCollectives(group, topology, piece_bytes)
            moves = CompressedCollectives(line, codec)
            for weights in ([1] * world, [(3 * other) % 4 for other in range(world)]):
                edges = [0, *itertools.accumulate(64 * 5 * weight for weight in weights)]
                cuts, count = edges, edges[-1]
                if not count:
                    continue
                draws = [torch.Generator().manual_seed(seed * 100 + other) for other in range(world)]
                parts = [torch.randint(-1000, 1000, (count,), generator=each).to(dtype) for each in draws]
                own = slice(cuts[rank], cuts[rank + 1])
                into, gathered, reduced = torch.empty_like(parts[0][own]), parts[rank].clone(), parts[rank].clone()
                exact = parts[rank].clone()
                under_way = [
                    moves.reduce_scatter(parts[rank].clone(), cuts, into),
                    moves.all_gather(gathered, cuts),
                    line.all_gather(exact, cuts),
                    moves.all_reduce(reduced),
                ]
                under_way[seed % 3].wait()
                under_way[-1].wait()
                ranges = list(itertools.pairwise(cuts))
                assert torch.equal(into, summed(codec, topology, [part[own] for part in parts]))
                assert torch.equal(exact, torch.cat([parts[r][a:b] for r, (a, b) in enumerate(ranges)]))
                whole = [rounded(codec, parts[r][a:b]) for r, (a, b) in enumerate(ranges)]
                assert torch.equal(gathered, torch.cat(whole))
                thirds = [count // 64 * other // world * 64 for other in range(world + 1)]
                sums = [
                    rounded(codec, summed(codec, topology, [part[a:b] for part in parts]))
                    for a, b in itertools.pairwise(thirds)
                ]
                assert torch.equal(reduced, torch.cat(sums))
        codec, line = CODECS["int8"], TwoLevelCollectives(group, topology)
        moves, tensor = CompressedCollectives(line, codec), torch.ones(64 * world)
        for act in (
            lambda: moves.reduce_scatter(tensor.clone(), list(range(0, 64 * world + 1, 64)), tensor[:64].clone()),
            lambda: moves.all_gather(tensor, list(range(0, 64 * world + 1, 64))),
        ):
            before = line.link.sent.between_bytes
            act().wait()
            sent.append(line.link.sent.between_bytes - before)
    return sent


@pytest.mark.parametrize("hosts", some(HOSTS, 0, 1, 2, 3, 4))
def test_what_is_rounded_is_rounded_once(hosts: str) -> None:
    sent = run_ranks(exchange, len(hosts), hosts=hosts)
    for host in set(hosts):
        mine = [each for each, name in zip(sent, hosts, strict=True) if name == host]
        elsewhere, nodes = len(hosts) - hosts.count(host), len(set(hosts))
        # 66 bytes for a block: of each range that is owned elsewhere, to be summed.
        assert sum(reduced for reduced, _ in mine) == 66 * elsewhere
        if hosts in ("aabb", "abab", "abc", "a", "aaa"):  # nodes alike: what is gathered goes round
            assert sum(gathered for _, gathered in mine) == 66 * len(hosts) // nodes * (nodes - 1)


# ------------------------------------------------------------------------------------------------------- the engine


class Rounding:
    """AdamW on one rank that computes with rounded weights, and adds up nodes' gradients as they are rounded."""

    def __init__(self, model: nn.Module, codec: Codec, hosts: str, sharding: ShardingSpec) -> None:
        self.model, self.codec, self.sharding = model, codec, sharding
        self.hosts, self.masters = hosts, {n: p.detach().clone() for n, p in model.named_parameters()}
        names = list(self.masters)
        masters = [nn.Parameter(self.masters[name]) for name in names]
        groups = [
            {"params": [p for p in masters if p.dim() >= 2], "weight_decay": DECAY},
            {"params": [p for p in masters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.trained = dict(zip(names, masters, strict=True))
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS, foreach=False)

    def write(self, buckets: Sequence[Bucket]) -> None:
        """Put what is left of the masters into the model."""
        for bucket in buckets:
            flat = self._flat(bucket, {name: p.detach() for name, p in self.trained.items()})
            for part in bucket.parts:
                for start, stop in itertools.pairwise(part.cuts):
                    a, b = part.start + start, part.start + stop
                    flat[a:b] = rounded(self.codec, flat[a:b])
            for member in bucket.members:
                whole = self.model.get_parameter(member.parameter.name)
                whole.data.copy_(flat[member.offset : member.end].view(whole.shape))

    def step(self, number: int, buckets: Sequence[Bucket], everyones: Sequence[Sequence[Batch]]) -> None:
        degree, world = self.sharding.degree or len(self.hosts), len(self.hosts)
        weight = sum(batch.weight for mine in everyones for batch in mine)
        total = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        often = self.sharding.reduce == "per_micro_batch"
        for sent in range(len(everyones[0])) if often else [None]:
            gradients = [self._gradients(mine if sent is None else [mine[sent]]) for mine in everyones]
            for bucket in buckets:
                flats = [self._flat(bucket, each) for each in gradients]
                found = torch.zeros_like(flats[0])
                for part in bucket.parts:
                    for owner, (start, stop) in enumerate(itertools.pairwise(part.cuts)):
                        a, b = part.start + start, part.start + stop
                        if a < b:
                            found[a:b] = self._summed([flat[a:b] for flat in flats], owner, degree, world)
                for member in bucket.members:
                    name = member.parameter.name
                    total[name] += found[member.offset : member.end].view(total[name].shape)
        for name, parameter in self.trained.items():
            parameter.grad = total[name] * (NOMINAL / weight)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(number)
        self.optimizer.step()
        self.write(buckets)

    def _summed(self, parts: Sequence[torch.Tensor], owner: int, degree: int, world: int) -> torch.Tensor:
        """Over the neighbours of each copy, then over the copies."""
        sums = []
        for first in range(0, world, degree):
            near = Topology.from_hosts(self.hosts[first : first + degree])
            sums.append(summed(self.codec, near, parts[first : first + degree]))
        if len(sums) == 1:
            return sums[0]
        far, count = Topology.from_hosts(self.hosts[owner::degree]), len(sums[0])
        blocks = -(-count // 64)
        cuts = [min(blocks * rank // len(sums) * 64, count) for rank in range(len(sums) + 1)]
        ranges = itertools.pairwise(cuts)
        return torch.cat([rounded(self.codec, summed(self.codec, far, [one[a:b] for one in sums])) for a, b in ranges])

    def _gradients(self, mine: Sequence[Batch]) -> dict[str, torch.Tensor]:
        self.model.zero_grad(set_to_none=True)
        for batch in mine:
            (batch.loss_sum(self.model) / NOMINAL).backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    @staticmethod
    def _flat(bucket: Bucket, values: dict[str, torch.Tensor]) -> torch.Tensor:
        flat = torch.zeros(bucket.elements, dtype=torch.float64)
        for member in bucket.members:
            flat[member.offset : member.end] = values[member.parameter.name].flatten()
        return flat


def beside_its_twin(placement: Placement, hosts: str, cases: list[dict[str, Any]]) -> list[list[float]]:
    """How far the engine is from that after some steps: in weights, and in masters."""
    sharded.PART_BYTES = 64 * 8
    found = []
    with join(placement, 20) as mesh:
        mesh = replace(mesh, topology=Topology.from_hosts(hosts))
        for case in cases:
            torch.manual_seed(1)
            sharding = ShardingSpec(**case)
            model = Net([Mix([[7, 20], [33], []]), Mix([[40, 11], [3]]), Mix([[150]])])
            driven = Driven(mesh, model, model.units(), sharding)
            twin = Rounding(driven.twin.model, CODECS[sharding.compress], hosts, sharding)
            twin.write(driven.engine.buckets)
            for number in range(1, STEPS + 1):
                driven.step(number, batches(number, mesh.rank, 2))
                if mesh.rank == 0:  # the twin knows all ranks' data, and takes longer than the engine
                    everyones = [batches(number, rank, 2) for rank in range(mesh.world)]
                    twin.step(number, driven.engine.buckets, everyones)
            for parameter in (*twin.model.parameters(), *twin.trained.values()):
                dist.broadcast(parameter.data, group_src=0, group=mesh.control)
            with driven.engine.full_parameters() as whole:
                apart = [(whole[name] - other).abs().max().item() for name, other in twin.model.named_parameters()]
            for piece in driven.engine.pieces():
                if piece.kind == "param":
                    master = twin.trained[piece.name].detach().flatten()[piece.start : piece.stop]
                    apart.append((piece.tensor - master).abs().max().item())
            found.append([max(apart)])
            driven.engine.close()
    return found


CASES: list[dict[str, Any]] = [
    {"zero": zero, "reduce": reduce, "weights": weights, "slots": slots, "compress": compress}
    for zero, reduce, weights, slots, compress in [
        (1, "per_step", (3.0, 1.0, 0.0, 2.0), 2, "int8"),
        (2, "per_micro_batch", (3.0, 1.0, 0.0, 2.0), 1, "int8"),
        (2, "per_step", None, 2, "bf16"),
        (3, "per_micro_batch", (1.0, 0.0, 1.0, 4.0), 1, "int8"),
        (1, "per_step", None, 1, "int8"),
    ]
]


@pytest.mark.parametrize("hosts", some(["aabb", "abcd", "abab", "aaaa"], 0))
def test_the_engine_is_adamw_that_rounds(hosts: str) -> None:
    for found in run_ranks(beside_its_twin, 4, hosts=hosts, cases=some(CASES, 0, 1, 2, 3)):
        assert max(itertools.chain(*found)) < 1e-9, found


@pytest.mark.parametrize("hosts", ["abab", "aabb", "abcd"] if ALL else ["abab"])
def test_copies_add_up_what_is_rounded(hosts: str) -> None:
    cases = [
        {"zero": zero, "reduce": "per_step", "weights": weights, "degree": 2, "compress": "int8"}
        for zero, weights in some([(2, (2.0, 1.0)), (3, None), (1, None)], 0, 1)
    ]
    for found in run_ranks(beside_its_twin, 4, hosts=hosts, cases=cases):
        assert max(itertools.chain(*found)) < 1e-9, found


def shared_out(placement: Placement, hosts: str) -> list[list[float]]:
    """Weights after some steps with state in unlike shares, and the bytes that orders are made for."""
    found, sizes = [], set()
    with join(placement, 20) as mesh:
        mesh = replace(mesh, topology=Topology.from_hosts(hosts))
        for weights, degree in ((None, None), ((1.0, 3.0, 0.0, 2.0), None), ((5.0, 1.0), 2)):
            torch.manual_seed(1)
            model = Net([Mix([[7, 20], [33], []]), Mix([[150]])])
            driven = Driven(
                mesh, model, model.units(), ShardingSpec(2, weights=weights, degree=degree, compress="int8")
            )
            for number in range(1, STEPS + 1):
                driven.step(number, batches(number, mesh.rank, 2))
            with driven.engine.full_parameters() as whole:
                found.append(torch.cat([value.flatten() for value in whole.values()]).tolist())
            ways = driven.engine._update.queue.routes["data"]
            sizes.add((ways.reduce_bytes(torch.float32), ways.gather_bytes(torch.float32)))
            driven.engine.close()
    return [*found, sorted(itertools.chain(*sizes))]


@pytest.mark.parametrize("hosts", ["aaab", "aabb", "abcd"] if ALL else ["aaab"])
def test_it_does_not_matter_who_keeps_what(hosts: str) -> None:
    ranks = run_ranks(shared_out, 4, hosts=hosts)
    for even, uneven, copies, sizes in ranks:
        assert even == pytest.approx(uneven, abs=1e-9)
        assert sizes == ranks[0][3], "ranks whose neighbours are on one node would make another order"
        assert max(abs(a - b) for a, b in zip(even, copies, strict=True)) < 0.05  # rounded once more


def staged(placement: Placement) -> list[bool]:
    """What an accelerator's ranks would be left with, by tensors of the host."""
    with process_group(placement):
        codec, values = CODECS["int8"], torch.randn(256, generator=torch.Generator().manual_seed(placement.rank))
        tensor = values.clone()
        moves = HostStagedCollectives(
            CompressedCollectives(TwoLevelCollectives(dist.new_group(), Topology.from_hosts("ab")), codec),
            overwrites_own=True,
        )
        moves.all_gather(tensor, [0, 128, 256]).wait()
        own = slice(128 * placement.rank, 128 * (placement.rank + 1))
        return [torch.equal(tensor[own], rounded(codec, values[own])), torch.equal(tensor[own], values[own])]


def test_an_accelerators_own_range_is_rounded_too() -> None:
    assert run_ranks(staged, 2) == [[True, False]] * 2


def beside_large_ones(placement: Placement) -> float:
    """How far small weights are from what they are in their own right, beside a scalar that is large."""
    with join(placement, 20) as mesh:
        torch.manual_seed(0)
        model = Net([nn.ParameterList([])], own=True)
        model.large, small = nn.Parameter(torch.full((), 100.0, dtype=torch.float64)), model.own.detach().clone()
        driven = Driven(mesh, model, [], ShardingSpec(1, compress="int8"))
        with driven.engine.full_parameters() as whole:
            apart = (whole["own"] - small).abs().max().item()
        driven.engine.close()
        return apart


def test_parameters_are_not_rounded_together() -> None:
    assert max(run_ranks(beside_large_ones, 2)) < 0.01


def test_whole_rows_that_blocks_do_not_fit_are_refused() -> None:
    check_whole_rows(
        [ParameterSpec("a", (70, 128), "", "x", True, together=128), ParameterSpec("b", (70, 65), "", "x")]
    )
    with pytest.raises(ConfigError, match="keeps rows of c whole, which have 65; compress by bf16, or use"):
        check_whole_rows([ParameterSpec("c", (70, 65), "", "x", True, together=65)])
