"""Transfers of shards of any sizes: the ring beside its plain twin, what it counts, and what a lost peer does to it."""

import random
import time
from typing import Any

import pytest
import torch

from phalanx.comm import ring as ring_module
from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Mesh, join
from phalanx.comm.ring import RingCollectives
from phalanx.comm.uneven_collectives import (
    DeviceCollectives,
    HostStagedCollectives,
    PaddedCollectives,
    UnevenCollectives,
    make_uneven_collectives,
)
from phalanx.core.placement import Placement
from tests.helpers import run_ranks, some

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 0.1, torch.int64: 0}
PATIENCE_S = 3.0
Case = tuple[list[int], torch.dtype, int]


def drawn(world: int, count: int) -> list[Case]:
    """Cuts, types and sizes of pieces, the same on every rank: even, uneven, with empty shards, or all in one hand."""
    random.seed(world)
    cases = []
    for number in range(count):
        total = random.choice((0, 1, world - 1, 64 * world, 1000, 10_000))
        inner = sorted(random.randint(0, total) for _ in range(world - 1))
        if number % 5 == 0:
            inner = [total * rank // world for rank in range(1, world)]
        elif number % 5 == 1:
            inner = [random.choice((0, total))] * (world - 1)
        elif number % 5 == 2:
            inner = [total * min(4, 2 + rank) // 4 for rank in range(1, world)]  # the last ranks have nothing
        cases.append(([0, *inner, total], DTYPES[number % len(DTYPES)], random.choice((96, 1000, 2**17))))
    return cases


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**40), 2**40, (length,), generator=generator)


def unlike_twin(form: UnevenCollectives, mesh: Mesh, cuts: list[int], dtype: torch.dtype) -> list[str]:
    """What `form` does otherwise than the twin: sums to rounding, what is gathered bitwise."""
    twin = PaddedCollectives(mesh.shard.get_group(), Traffic())
    mine = slice(cuts[mesh.rank], cuts[mesh.rank + 1])
    tensor = values(mesh.rank, cuts[-1], dtype)
    own, again, wanted = (torch.empty_like(tensor[mine]) for _ in range(3))
    gathered, whole = torch.full_like(tensor, 7), torch.zeros_like(tensor)
    gathered[mine] = whole[mine] = tensor[mine]
    # Three under way, of both kinds; waited for out of order, and one of them twice.
    first = form.reduce_scatter(tensor.clone(), cuts, own)
    second = form.all_gather(gathered, cuts)
    third = form.reduce_scatter(tensor.clone(), cuts, again)
    for moving in (second, first, third, first):
        moving.wait()
    twin.reduce_scatter(tensor, cuts, wanted).wait()
    twin.all_gather(whole, cuts).wait()
    bound = ROUNDING[dtype]
    right = {
        "sum": torch.allclose(own.double(), wanted.double(), rtol=bound, atol=bound),
        "the same twice": torch.equal(own, again),
        "gathered": torch.equal(gathered, whole),
    }
    return [f"{name}, {cuts}, {dtype}" for name, holds in right.items() if not holds]


def moved(placement: Placement, count: int) -> dict[str, Any]:
    rank, wrong, expected = placement.rank, [], [0, 0]
    with join(placement, 20) as mesh:
        traffic = Traffic()
        for cuts, dtype, piece_bytes in drawn(placement.world, count):
            ring = RingCollectives(mesh.transfers, traffic, piece_bytes)
            ring._tag = ring_module._TAGS - 2  # tags start again in the middle
            wrong += unlike_twin(ring, mesh, cuts, dtype)
            expected[0] += 3
            expected[1] += 3 * (cuts[-1] - cuts[rank + 1] + cuts[rank]) * dtype.itemsize
        taken = traffic.take()
    return {"wrong": wrong, "counted": [taken.calls, taken.payload_bytes], "expected": expected}


@pytest.mark.parametrize("world", some([1, 2, 3, 4, 5, 7], 0, 1, 2, 4))
def test_the_ring_is_its_twin(world: int) -> None:
    for found in run_ranks(moved, world, count=12):
        assert found["wrong"] == []
        assert found["counted"] == found["expected"]


def long_stream(placement: Placement) -> list[Any]:
    """Many transfers one after the other, of more pieces than are expected at once, in their usual size."""
    with join(placement, 20) as mesh:
        ring = RingCollectives(mesh.transfers, Traffic())
        length = 3_000_000
        cuts = [0, length // 2, length // 2, length]
        tensor, own = torch.empty(length), torch.empty(cuts[mesh.rank + 1] - cuts[mesh.rank])
        seen = []
        for step in range(4):
            tensor.fill_(mesh.rank + step)
            ring.reduce_scatter(tensor, cuts, own).wait()
            tensor.fill_(-1)
            tensor[cuts[mesh.rank] : cuts[mesh.rank + 1]] = own
            ring.all_gather(tensor, cuts).wait()
            seen.append([tensor.min().item(), tensor.max().item()])
        return [seen, ring._expected_bytes]


def test_many_long_transfers() -> None:
    results = run_ranks(long_stream, 3)
    for seen, expected_bytes in results:
        assert seen == [[3.0 + 3 * step] * 2 for step in range(4)]
        assert expected_bytes == 0


def in_the_order_of_the_ring(placement: Placement) -> list[float]:
    """Own range of a sum that depends on the order: large numbers that cancel, and small ones that they swallow."""
    with join(placement, 20) as mesh:
        addends = [[1e8, 1.0, -1e8], [-1e8, 1e8, 1.0], [1.0, -1e8, 1e8]]
        tensor, own = torch.tensor(addends[mesh.rank]), torch.empty(1)
        RingCollectives(mesh.transfers, Traffic()).reduce_scatter(tensor, [0, 1, 2, 3], own).wait()
        return own.tolist()


def test_sums_are_taken_from_the_next_rank_round_to_the_owner() -> None:
    # Element b: ranks b + 1, b + 2, b. (-1e8 + 1) + 1e8, (-1e8 + 1) + 1e8 and (-1e8 + 1) + 1e8, where 1 is lost.
    assert run_ranks(in_the_order_of_the_ring, 3) == [[0.0], [0.0], [0.0]]


def other_forms(placement: Placement) -> Any:
    with join(placement, 20) as mesh:
        group, uneven = mesh.transfers, [0, 3, 10]
        traffic = Traffic()
        wrong = unlike_twin(HostStagedCollectives(RingCollectives(group, Traffic())), mesh, uneven, torch.float32)
        wrong += unlike_twin(DeviceCollectives(group, traffic), mesh, [0, 6, 12], torch.float32)
        # gloo gathers no list of unequal tensors, but it reduces one.
        own, tensor = torch.empty(3 if mesh.rank == 0 else 7), values(0, 10, torch.float32)
        DeviceCollectives(group, traffic).reduce_scatter(tensor, uneven, own).wait()
        if not torch.equal(own, 2 * tensor[uneven[mesh.rank] : uneven[mesh.rank + 1]]):
            wrong.append("a list")
        chosen = [make_uneven_collectives(group, traffic, torch.device(kind)) for kind in ("cpu", "cuda")]
        return [wrong, traffic.payload_bytes, [type(form).__name__ for form in chosen]]


def test_forms_for_accelerators_mean_the_same() -> None:
    results = run_ranks(other_forms, 2)
    for rank, (wrong, payload_bytes, chosen) in enumerate(results):
        assert wrong == []
        assert payload_bytes == (3 * 6 + (7, 3)[rank]) * 4
        assert chosen == ["RingCollectives", "HostStagedCollectives"]


def refused(placement: Placement) -> list[str]:
    words = []
    with join(placement, 20) as mesh:
        ring, flat = RingCollectives(mesh.transfers, Traffic()), torch.zeros(8)
        for call in (
            lambda: ring.all_gather(torch.zeros(16)[::2], [0, 4, 8]),
            lambda: ring.all_gather(flat.view(2, 4), [0, 4, 8]),
            lambda: ring.all_gather(flat, [0, 8]),
            lambda: ring.all_gather(flat, [0, 4, 7]),
            lambda: ring.all_gather(flat, [0, 9, 8]),
            lambda: ring.reduce_scatter(flat, [0, 4, 8], torch.zeros(3)),
            lambda: ring.reduce_scatter(flat, [0, 4, 8], torch.zeros(4, dtype=torch.float64)),
        ):
            try:
                call()
            except AssertionError as error:
                words.append(str(error))
        ring.all_gather(flat, [0, 4, 8]).wait()  # the ring is as good as new
    return words


def test_tensors_that_do_not_fit_their_cuts_are_refused() -> None:
    for words in run_ranks(refused, 2):
        assert len(words) == 7
        assert all(words)


def lose_a_peer(placement: Placement, lost: int, sleep: bool) -> list[Any]:
    """One rank leaves the ring, or sleeps, in the middle of many transfers: what the others raise, and again."""
    with join(placement, PATIENCE_S) as mesh:
        ring, tensor = RingCollectives(mesh.transfers, Traffic()), torch.zeros(400_000)
        cuts = [tensor.numel() * rank // mesh.world for rank in range(mesh.world + 1)]
        for step in range(1000):
            if placement.rank == lost and step == 5:
                time.sleep(PATIENCE_S + 4 if sleep else 0)
                return ["lost"]
            try:
                ring.all_gather(tensor, cuts).wait()
            except RuntimeError as error:
                first = error
                break
        answers = [str(mesh.roll_call.name_missing_ranks(first)) if sleep else str(first)]
        try:
            ring.all_gather(tensor, cuts).wait()
        except RuntimeError as error:
            answers.append("the same" if error is first else str(error))
        return answers


@pytest.mark.parametrize("world", [2, 4])
def test_a_lost_peer_ends_every_wait(world: int) -> None:
    results = run_ranks(lose_a_peer, world, lost=1, sleep=False)
    assert results.pop(1) == ["lost"]
    for first, again in results:
        assert "gloo" in first  # so that Mesh.blame looks who is late
        assert again == "the same"


def test_a_sleeping_peer_is_named() -> None:
    # Rank 0 keeps the store, at which the others ask who is late: asleep, it is there until they have an answer.
    results = run_ranks(lose_a_peer, 3, lost=0, sleep=True)
    assert results.pop(0) == ["lost"]
    for first, again in results:
        assert first.startswith("rank 0 of 3 did not respond after")
        assert again == "the same"
