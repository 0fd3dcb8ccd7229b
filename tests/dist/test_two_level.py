"""Two-level collectives: exact on any topology, the same bits on every rank, each byte between nodes sent once."""

import hashlib
import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.chunk_link import PeerError, even_cuts
from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import _choose_backend, join
from phalanx.comm.rendezvous import Topology
from phalanx.comm.two_level import TwoLevelCollectives
from phalanx.comm.uneven_collectives import make_uneven_collectives
from phalanx.core.placement import Placement
from tests.helpers import process_group, run_ranks, some


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_every_node_has_one_relay_for_every_owner(hosts: list[str]) -> None:
    topology = Topology.from_hosts(hosts)
    assert sorted(rank for ranks in topology.nodes for rank in ranks) == list(range(len(hosts)))
    for owner, host in enumerate(hosts):
        assert topology.relay(topology.node_of[owner], owner) == owner
        for node, ranks in enumerate(topology.nodes):
            assert topology.relay(node, owner) in ranks
            assert {hosts[rank] == host for rank in ranks} == {node == topology.node_of[owner]}


def test_the_form_follows_from_the_hosts() -> None:
    forms = {hosts: Topology.from_hosts(hosts).form for hosts in ("a", "aaa", "abc", "aab", "abab")}
    assert forms == {"a": "alone", "aaa": "direct", "abc": "ring", "aab": "two-level", "abab": "two-level"}


def test_a_part_of_the_ranks_has_a_topology_of_its_own() -> None:
    whole = Topology.from_hosts("abcab")
    assert whole.subset([0, 3]) == Topology.from_hosts("aa")
    assert whole.subset([4, 2, 1]) == Topology.from_hosts("bcb")


def test_which_groups_the_devices_of_all_ranks_allow() -> None:
    native = "cpu:gloo,gpu:native"
    assert _choose_backend([f"{native}\t1\there", f"{native}\t2\there"]) == native
    assert _choose_backend([f"{native}\t1\there", f"{native}\t1\there"]) == "gloo"  # they share a device
    assert _choose_backend([f"{native}\t1\there", "gloo\t\tthere"]) == "gloo"
    assert _choose_backend(["gloo\t\there", "gloo\t\there"]) == "gloo"


def chosen(placement: Placement) -> list[Any]:
    """What moves the shards of a group, by where its ranks are; and what it counts."""
    cpu, forms = torch.device("cpu"), []
    with join(placement, 30) as mesh:
        assert mesh.topology.form == "direct"
        for topology in (None, mesh.topology, Topology.from_hosts("abc"), Topology.from_hosts("aba")):
            traffic = Traffic()
            moves, tensor = make_uneven_collectives(mesh.transfers, traffic, cpu, topology), torch.ones(12)
            moves.reduce_scatter(tensor.clone(), [0, 2, 2, 12], tensor[: [2, 0, 10][mesh.rank]].clone()).wait()
            moves.all_gather(tensor, [0, 2, 2, 12]).wait()
            taken = traffic.take()
            forms.append([type(moves).__name__, taken.calls, taken.payload_bytes])
            assert taken.wait_s > 0
    return forms


def test_the_engine_moves_its_shards_in_two_levels_where_there_are_two() -> None:
    for rank, forms in enumerate(run_ranks(chosen, 3)):
        counted = [2, 2 * 4 * [10, 12, 2][rank]]
        assert forms == [[name, *counted] for name in (*["RingCollectives"] * 3, "TwoLevelCollectives")]


def drawn(placement: Placement, hosts: str) -> None:
    """Transfers of drawn sizes, ranges and pieces, all under way at once, against sums and copies of whole numbers."""
    rank, world = placement.rank, placement.world
    with process_group(placement):
        group = dist.new_group()
        for seed in range(16):
            draw = random.Random(seed)
            if seed % 4 == 0:
                line = TwoLevelCollectives(group, Topology.from_hosts(hosts), draw.choice([2000, 2**20]))
            count = draw.choice([0, 1, 3, 17, 900, 5000])
            cuts = [0, *sorted(draw.randrange(count + 1) for _ in range(world - 1)), count]
            dtype = draw.choice([torch.float64, torch.int64, torch.float32])
            seeds = [torch.Generator().manual_seed(seed * 100 + other) for other in range(world)]
            parts = [torch.randint(-1000, 1000, (count,), generator=each).to(dtype) for each in seeds]
            total = torch.stack(parts).sum(0, dtype=dtype)
            own = slice(cuts[rank], cuts[rank + 1])
            into, gathered, reduced = torch.empty_like(total[own]), torch.zeros_like(total), parts[rank].clone()
            gathered[own] = total[own]
            outgoing = [parts[rank][: (rank + 2 * other) * 7] for other in range(world)]
            expected = [parts[other][: (other + 2 * rank) * 7] for other in range(world)]
            arriving = [torch.empty_like(part) for part in expected]
            under_way = [
                line.reduce_scatter(parts[rank].clone(), cuts, into),
                line.all_gather(gathered, cuts),
                line.begin(line.exchange_steps(outgoing, arriving)),
                line.all_reduce(reduced),
            ]
            under_way[draw.randrange(4)].wait()
            under_way[-1].wait()
            assert torch.equal(into, total[own])
            assert torch.equal(gathered, total)
            assert torch.equal(reduced, total)
            assert all(map(torch.equal, arriving, expected))


@pytest.mark.parametrize("hosts", some(["a", "aaa", "abc", "abba", "aab", "abbcb"], 0, 1, 2, 5))
def test_exact_on_any_topology(hosts: str) -> None:
    run_ranks(drawn, len(hosts), hosts=hosts)


def counted(placement: Placement, hosts: str) -> list[list[int]]:
    """What this rank sends within its node and between nodes in a gather, a reduce-scatter and an all-reduce."""
    sent = []
    with process_group(placement):
        count = 5000
        cuts = even_cuts(count, placement.world)
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            line = TwoLevelCollectives(dist.new_group(), Topology.from_hosts(hosts), 700)
            tensor = torch.ones(count)
            into = tensor[cuts[placement.rank] : cuts[placement.rank + 1]].clone()
            arguments = {"all_gather": (cuts,), "reduce_scatter": (cuts, into), "all_reduce": ()}[name]
            getattr(line, name)(tensor, *arguments).wait()
            sent.append([line.link.sent.within_bytes, line.link.sent.between_bytes])
    return sent


@pytest.mark.parametrize("hosts", ["abab", "aaab"])
def test_each_byte_between_nodes_is_sent_once(hosts: str) -> None:
    topology = Topology.from_hosts(hosts)
    total = torch.tensor(run_ranks(counted, len(hosts), hosts=hosts)).sum(0).tolist()
    whole = 5000 * 4
    within, between = whole * (len(hosts) - len(topology.nodes)), whole * (len(topology.nodes) - 1)
    assert total == [[within, between], [within, between], [2 * within, 2 * between]]


def summed(placement: Placement, hosts: str) -> dict[str, Any]:
    """An all-reduce of numbers that do not add up exactly, with two sizes of pieces, and gloo's."""
    mine = torch.randn(9000, generator=torch.Generator().manual_seed(placement.rank))
    with process_group(placement):
        flat, results = mine.clone(), []
        for piece_bytes in (1000, 2**20):
            line = TwoLevelCollectives(dist.new_group(), Topology.from_hosts(hosts), piece_bytes)
            results.append(mine.clone())
            line.all_reduce(results[-1]).wait()
        dist.all_reduce(flat)
    return {
        "bits": [hashlib.sha256(result.numpy().tobytes()).hexdigest() for result in results],
        "off": ((results[0] - flat).norm() / flat.norm()).item(),
    }


def test_one_result_in_bits_on_every_rank_for_any_pieces() -> None:
    found = run_ranks(summed, 5, hosts="abbab")
    assert len({bits for each in found for bits in each["bits"]}) == 1
    assert max(each["off"] for each in found) < 1e-6


def abandoned(placement: Placement) -> str:
    """Rank 0 waits for a rank that never begins; the group's time runs out."""
    with process_group(placement):
        group = dist.new_group(timeout=timedelta(seconds=0.5))
        if placement.rank == 0:
            line = TwoLevelCollectives(group, Topology.from_hosts("ab"))
            with pytest.raises(PeerError, match=r"rank 1: Timed out waiting 500ms") as caught:
                line.all_reduce(torch.ones(3)).wait()
            with pytest.raises(PeerError):  # and is of no more use
                line.all_reduce(torch.ones(3))
            dist.barrier()
            return str(caught.value)
        dist.barrier()
    return ""


def test_a_rank_that_is_late_is_named() -> None:
    assert "rank 1" in run_ranks(abandoned, 2)[0]
