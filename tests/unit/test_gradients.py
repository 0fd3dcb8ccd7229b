"""Weights, norms and clipping folded into one divisor."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import join
from phalanx.core.placement import Placement
from phalanx.optim import gradients

CPU = torch.device("cpu")


def folded(squares: float, nominal: int, total: int, clip: float | None) -> tuple[float, float, float]:
    tensor = torch.tensor(squares, dtype=torch.float64)
    norm, divisor, skip = gradients.compute_norm_and_divisor(
        tensor, nominal_weight=nominal, total_weight=total, clip=clip
    )
    return norm.item(), divisor.item(), skip.item()


@given(st.floats(1e-6, 1e6), st.integers(1, 10**6), st.integers(1, 10**6), st.one_of(st.none(), st.floats(1e-3, 1e3)))
def test_the_divisor_makes_the_mean_and_then_clips(raw: float, nominal: int, total: int, clip: float | None) -> None:
    norm, divisor, skip = folded(raw**2, nominal, total, clip)
    mean = raw * nominal / total
    assert norm == pytest.approx(mean, rel=1e-12)
    assert skip == 0.0
    applied = raw / divisor
    if clip is None or mean + 1e-6 <= clip:
        assert applied == pytest.approx(mean, rel=1e-12), "never scaled up"
    else:
        assert applied == pytest.approx(clip * mean / (mean + 1e-6), rel=1e-9)
        assert applied <= clip * (1 + 1e-9)


@pytest.mark.parametrize("squares", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_norm_that_is_not_finite_skips_with_a_divisor_that_is(squares: float, clip: float | None) -> None:
    norm, divisor, skip = folded(squares, 10, 10, clip)
    assert not math.isfinite(norm)
    assert (divisor, skip) == (1.0, 1.0)


def test_no_weight_skips() -> None:
    norm, divisor, skip = folded(0.0, 10, 0, 1.0)
    assert (norm, divisor, skip) == (0.0, 1.0, 1.0)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=9), max_size=4))
@settings(deadline=None)
def test_sum_of_squares(values: list[list[float]]) -> None:
    tensors = [torch.tensor(part, dtype=torch.float64) for part in values]
    expected = sum(x * x for part in values for x in part)
    found = gradients.sum_of_squares(tensors, torch.float64, CPU)
    assert found.shape == ()
    assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_bf16_gradients_are_squared_and_summed_wide() -> None:
    # In bf16 256 + 1 is 256: a sum of 4097 ones would stop growing. And its root, 64.008, would be rounded to 64.
    ones = [torch.ones(4097, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)]
    assert gradients.sum_of_squares(ones, torch.float32, CPU).item() == pytest.approx(4098, rel=1e-6)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(n, generator=generator).bfloat16() for n in (3000, 700, 5)]
    exact = sum(grad.double().square().sum().item() for grad in drawn)
    assert gradients.sum_of_squares(drawn, torch.float32, CPU).item() == pytest.approx(exact, rel=1e-6)


def test_backward_divides_by_the_nominal_weight_only() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    gradients.backward((x * x).sum(), 4)
    gradients.backward((x * x).sum(), 4)
    assert x.grad is not None
    assert x.grad.item() == 3.0  # 2 * 6 / 4: sums add up over micro-batches


def test_the_total_weight_of_one_rank_is_its_own() -> None:
    placement = Placement(rank=0, world=1, local_rank=0, local_world=1, node=0, device="cpu", store=None)
    with join(placement, 10) as mesh:
        assert gradients.TotalWeight(2**40 + 1, mesh.control, Traffic()).get() == 2**40 + 1


def skips(scale: gradients.LossScale, *flags: float) -> list[float]:
    found = []
    for flag in flags:
        scale.update(torch.tensor(flag))
        found.append(scale.factor.item())
    return found


def test_the_loss_scale_falls_at_once_and_rises_after_a_while() -> None:
    scale = gradients.LossScale(64.0, 3, CPU)
    assert skips(scale, 0, 0, 0, 0, 0) == [64, 64, 128, 128, 128]
    assert skips(scale, 1, 0, 0, 1, 0, 0, 0) == [64, 64, 64, 32, 32, 32, 64]
    saved = scale.state()
    assert saved == {"factor": 64.0, "taken": 0}
    other = gradients.LossScale(2.0, 3, CPU)
    assert skips(scale, 0) == [64]
    other.restore(scale.state())
    assert skips(other, 0, 0, 1) == skips(scale, 0, 0, 1) == [64, 128, 64]


def test_the_loss_scale_has_a_floor_and_stays_a_number() -> None:
    assert skips(gradients.LossScale(3.0, 9, CPU), 1, 1, 1) == [1.5, 1.0, 1.0]
    assert skips(gradients.LossScale(0.25, 9, CPU), 1, 1) == [0.25, 0.25]
    assert skips(gradients.LossScale(2.0**127, 1, CPU), 0) == [2.0**127]


def test_the_loss_scale_is_taken_out_again() -> None:
    scale = gradients.LossScale(2.0**10, 1, CPU)
    x = torch.tensor([3.0], requires_grad=True)
    gradients.backward((x * x).sum(), 4, scale)
    assert x.grad is not None
    squares = x.grad.double().square().sum()
    norm, divisor, skip = gradients.compute_norm_and_divisor(
        squares, nominal_weight=4, total_weight=2, clip=None, scale=scale
    )
    assert norm.item() == 3.0  # 6 / 2, as without a scale
    assert (x.grad / divisor).item() == 3.0
    assert skip.item() == 0.0
    assert scale.factor.item() == 2.0**11
    gradients.compute_norm_and_divisor(squares * math.nan, nominal_weight=4, total_weight=0, clip=None, scale=scale)
    assert scale.factor.item() == 2.0**11, "a step without weight says nothing of the scale"


def test_what_several_ranks_hold_alike_counts_once() -> None:
    grads = [(torch.tensor([3.0]), 1), (torch.tensor([4.0]), 4), (torch.tensor([2.0]), 4)]
    assert float(gradients.sum_of_squares_once(grads, torch.float64, CPU)) == 9 + (16 + 4) / 4


def test_without_other_parts_of_the_model_nothing_is_added() -> None:
    squares = torch.tensor([2.0])
    assert gradients.sum_over_model(squares, None, Traffic()) is squares
