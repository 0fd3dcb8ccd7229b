"""The wrapper of collectives: contiguity, counts and results; small objects between ranks; sums in rank order."""

from typing import Any

import torch

from phalanx.comm.collectives import Traffic, all_gather, all_reduce, reduce_scatter
from phalanx.comm.mesh import join
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.placement import Placement
from tests.helpers import run_ranks


def counted(placement: Placement) -> dict[str, Any]:
    rank, world = placement.rank, placement.world
    with join(placement, 20) as mesh:
        traffic, group = Traffic(), mesh.shard.get_group()
        total = torch.full((3,), rank + 1.0)
        all_reduce(total, group, traffic).wait()
        gathered = torch.empty(2 * world, dtype=torch.float64)
        all_gather(gathered, torch.full((2,), float(rank), dtype=torch.float64), group, traffic).wait()
        part = torch.empty(2)
        pending = reduce_scatter(part, torch.arange(2.0 * world), group, traffic)
        pending.wait()
        pending.wait()  # twice is as good as once
        taken = traffic.take()
        return {
            "reduced": total.tolist(),
            "gathered": gathered.tolist(),
            "scattered": part.tolist(),
            "traffic": [taken.calls, taken.payload_bytes],
            "waited": taken.wait_s,
            "after": [traffic.calls, traffic.payload_bytes, traffic.wait_s],
            "sums": [mesh.sum([rank, 0.1]), mesh.max([rank]), mesh.min([rank])],
        }


def test_results_and_counts() -> None:
    for rank, found in enumerate(run_ranks(counted, 3)):
        assert found["reduced"] == [6.0] * 3
        assert found["gathered"] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        assert found["scattered"] == [3.0 * (2 * rank), 3.0 * (2 * rank + 1)]
        # Bytes of the largest tensor handed over: 3 floats, 6 doubles, 6 floats.
        assert found["traffic"] == [3, 12 + 48 + 24]
        assert found["waited"] > 0
        assert found["after"] == [0, 0, 0.0]
        assert found["sums"] == [[3.0, 0.1 + 0.1 + 0.1], [2.0], [0.0]]


def refused(placement: Placement) -> list[str]:
    """Strided tensors given to each collective on all ranks; nothing may be sent."""
    words = []
    with join(placement, 20) as mesh:
        group, traffic = mesh.shard.get_group(), Traffic()
        strided, flat = torch.zeros(8)[::2], torch.zeros(4)
        for call in (
            lambda: all_reduce(strided, group, traffic),
            lambda: all_gather(torch.zeros(8), strided, group, traffic),
            lambda: all_gather(torch.zeros(16)[::2], flat, group, traffic),
            lambda: reduce_scatter(torch.zeros(4)[::2], flat, group, traffic),
            lambda: reduce_scatter(torch.zeros(2), strided, group, traffic),
        ):
            try:
                call()
            except AssertionError as error:
                words.append(str(error))
        all_reduce(flat, group, traffic).wait()  # the group is as good as new
        assert traffic.calls == 1
    return words


def test_tensors_with_gaps_are_refused() -> None:
    for words in run_ranks(refused, 2):
        assert len(words) == 5
        assert all("non-contiguous tensor of shape" in text for text in words)


def passed_around(placement: Placement) -> list[Any]:
    with join(placement, 20) as mesh:
        group = JsonGroup(mesh.checkpoint)
        mine = {"rank": placement.rank, "text": "ü" * placement.rank * 100, "none": None}
        return [group.gather_objects(mine), group.broadcast_object(mine if placement.rank == 0 else "not this")]


def test_objects_of_unequal_length() -> None:
    results = run_ranks(passed_around, 3)
    everyone = [{"rank": rank, "text": "ü" * rank * 100, "none": None} for rank in range(3)]
    assert [gathered for gathered, _ in results] == [everyone, None, None]
    assert [broadcast for _, broadcast in results] == everyone[:1] * 3
