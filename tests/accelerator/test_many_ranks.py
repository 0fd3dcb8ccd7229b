"""Several ranks on simulated devices with collectives of their own, whose streams come late at random."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import join
from phalanx.comm.p2p import P2PChannel
from phalanx.core.placement import Placement
from tests.accelerator.curves import EVERYTHING, References, assert_near, on_device, paired
from tests.accelerator.device import needs_device, run_on_device
from tests.helpers import some

pytestmark = needs_device
FEW = {"train__steps": 3, "optim__decay_steps": 3}
SHARDED = {"parallel__engine": "sharded"} | FEW
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 3": (2, SHARDED | {"parallel__zero": 3, "train__micro_batch": 2}),
    "tensor x data": (4, SHARDED | {"parallel__zero": 1, "parallel__tensor": 2, "train__micro_batch": 4}),
    "tied pipeline": (
        2,
        SHARDED | {"parallel__pipeline": 2, "model__tie_embeddings": True, "train__micro_batch": 2},
    ),
    "delayed FP8": (2, SHARDED | {"train__fp8": "delayed", "train__micro_batch": 2}),
    "zero 3 in FP8": (2, SHARDED | {"parallel__zero": 3, "train__fp8": "block", "train__steps": 2}),  # many kernels
}
SEEDS = (1, 2, 3)


# The matrix and test_order.py have tensor-parallel ranks and pipelines as well.
@pytest.mark.parametrize(("layout", "delay_ms"), some(paired(LAYOUTS, [2, 0, 20]), 0, 3, 4))
def test_layouts_compute_what_one_cpu_rank_does(
    layout: str, delay_ms: int, references: References, tokens: Path, tmp_path: Path
) -> None:
    ranks, changes = LAYOUTS[layout]
    alone = {key: value for key, value in changes.items() if not key.startswith("parallel")}
    alone |= {"parallel__engine": "single"}
    for seed in SEEDS if EVERYTHING else SEEDS[:1]:
        how = {"order": "threads", "delay_ms": delay_ms, "seed": seed}
        found = on_device(ranks, tmp_path / str(seed), tokens, how, **changes)
        assert_near(found, references.of(1, *alone.items()), 2e-7)


def ends(placement: Placement) -> list[float]:
    """What the first and the last of three ranks exchange first of all, as those of a pipeline do. The one between them
    has nothing to say, and goes on when they are through."""
    with join(placement, 20) as mesh:
        messages, found = P2PChannel(mesh.transfers, mesh.device, Traffic(), max_in_flight=1), []
        if mesh.rank != 1:
            mine = torch.full((3,), float(mesh.rank), device=mesh.device)
            found = messages.exchange(mine, 2 - mesh.rank).tolist()
        messages.close()
        mesh.sum([0.0])
    return found


def test_two_ranks_of_a_pipeline_exchange_without_the_others() -> None:
    assert run_on_device(ends, 3, order="threads") == [[2.0] * 3, [], [0.0] * 3]
