"""Context parallelism on the simulated accelerator: keys of other ranks, and gradients of the own ones, are used when
they are there; with collectives of the device, and through the host."""

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import join
from phalanx.core.placement import Placement
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.parallel.context import ContextParallel, positions_of
from tests.accelerator.device import needs_device, run_on_device
from tests.dist.test_context import make_case, one_process
from tests.helpers import some

pytestmark = needs_device
ROWS, LENGTH, WORDS = 3, 24, 11  # of what scripts for SageMaker's library share
WAYS = ("gather", "ring", "heads")


def case_of(by: str) -> dict[str, Any]:
    return {"by": by, "shares": [5.0, 2.0, 1.0], "dtype": "float32", "packed": by == "gather"}


def attend(placement: Placement) -> list[list[Any]]:
    """The result and the gradients of this rank's part, by way of exchange."""
    found = []
    with join(placement, 60, axes=MeshAxes(context=placement.world)) as mesh:
        assert mesh.context is not None
        for by in WAYS:
            case = case_of(by)
            rows, options, whole = make_case(case, placement.rank, mesh.device)
            context = ContextParallel(mesh.context, mesh.traffic, by, case["shares"])
            at = positions_of(rows.slices, placement.rank).to(mesh.device)
            q, k, v, grad = (each.to(mesh.device)[:, :, at] for each in whole)
            parts = [each.requires_grad_() for each in (q, k, v)]
            for _ in range(2):  # memory that the first pass has let go is used again
                out = context.attend(parts[0], parts[1], parts[2], segments=rows, **options)
                grads = torch.autograd.grad((out * grad).sum(), parts)
            found.append([each.tolist() for each in (out, *grads)])
    return found


def expected(by: str, rank: int) -> list[Tensor]:
    rows, options, (q, k, v, grad) = make_case(case_of(by), rank)
    return one_process(rows, options, (q, k, v, grad))


@pytest.mark.parametrize(("delay_ms", "collectives"), some([(0, True), (2, True), (2, False)], 1, 2))
def test_attention_waits_for_what_other_ranks_send(delay_ms: float, collectives: bool) -> None:
    everyones = run_on_device(attend, 3, order="threads", delay_ms=delay_ms, collectives=collectives)
    for rank, found in enumerate(everyones):
        for by, tensors in zip(WAYS, found, strict=True):
            for got, wanted in zip(tensors, expected(by, rank), strict=True):
                assert torch.allclose(torch.tensor(got).view(wanted.shape), wanted, atol=1e-5), (rank, by)


def logits_and_labels() -> tuple[Tensor, Tensor]:
    """(B, S, V) and (B, S), with labels that do not count."""
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn((ROWS, LENGTH, WORDS), generator=draws)
    return logits, torch.randint(0, WORDS, (ROWS, LENGTH), generator=draws).masked_fill_(
        torch.arange(LENGTH) == 7, -100
    )


def lose(placement: Placement) -> tuple[float, list[Any]]:
    """A script's loss of this rank's pieces of rows, and its gradient to the logits of whole rows."""
    from phalanx.compat.sagemaker.context import SharedRows, SharedRowsLoss

    with join(placement, 60, axes=MeshAxes(context=placement.world)) as mesh:
        assert mesh.context is not None
        size = mesh.context.size
        shared = SharedRows(ContextParallel(mesh.context, Traffic(), "ring", (1.0,) * size))
        whole, labels = (each.to(mesh.device) for each in logits_and_labels())
        whole.requires_grad_()
        at = positions_of(shared.slices_of(LENGTH // size), placement.rank).to(mesh.device)
        loss = SharedRowsLoss(shared)
        for _ in range(2):  # memory that the first pass has let go is used again
            whole.grad = None
            found = loss(whole[:, at], labels[:, at], WORDS)
            (found / size).backward()
        assert whole.grad is not None
        return float(found.detach()), whole.grad.tolist()


@pytest.mark.parametrize(("delay_ms", "collectives"), some([(0, True), (2, True), (2, False)], 1, 2))
def test_the_loss_of_a_slice_is_of_labels_that_have_arrived(delay_ms: float, collectives: bool) -> None:
    everyones = run_on_device(lose, 3, order="threads", delay_ms=delay_ms, collectives=collectives)
    logits, labels = logits_and_labels()
    expected_loss = torch.nn.functional.cross_entropy(
        logits.requires_grad_()[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    expected_loss.backward()
    assert logits.grad is not None
    assert sum(loss for loss, _ in everyones) / 3 == pytest.approx(float(expected_loss.detach()), abs=1e-5)
    assert torch.allclose(torch.tensor([grad for _, grad in everyones]).sum(0), logits.grad, atol=1e-6)
