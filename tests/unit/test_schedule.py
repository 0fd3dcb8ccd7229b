"""The learning rate as a function of the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import OptimSection
from phalanx.optim.schedule import learning_rate

shapes = st.sampled_from(["cosine", "linear", "constant"])


@st.composite
def sections(draw: st.DrawFn) -> OptimSection:
    warmup = draw(st.integers(0, 50))
    return OptimSection(
        lr=draw(st.floats(1e-6, 10)),
        schedule=draw(shapes),
        warmup_steps=warmup,
        decay_steps=draw(st.integers(max(1, warmup), 300)),
        min_lr_ratio=draw(st.floats(0, 1)),
    )


@given(sections(), st.integers(1, 400))
def test_it_rises_to_the_peak_and_never_again(optim: OptimSection, step: int) -> None:
    here, after = learning_rate(optim, step), learning_rate(optim, step + 1)
    assert 0 <= here <= optim.lr * (1 + 1e-12)
    if step < optim.warmup_steps:
        assert here < after
        assert here == pytest.approx(optim.lr * step / optim.warmup_steps)
    elif step >= max(1, optim.warmup_steps):
        assert after <= here * (1 + 1e-12)


@given(sections())
def test_its_ends(optim: OptimSection) -> None:
    assert isinstance(optim.decay_steps, int)
    if optim.warmup_steps:
        assert learning_rate(optim, optim.warmup_steps) == pytest.approx(optim.lr, rel=1e-15)
    if optim.schedule == "constant":
        assert learning_rate(optim, 1000) == optim.lr
    elif optim.decay_steps > optim.warmup_steps:
        for step in (optim.decay_steps, optim.decay_steps + 1, 10_000):
            assert learning_rate(optim, step) == pytest.approx(optim.lr * optim.min_lr_ratio, abs=1e-15)


def test_half_way_down() -> None:
    for schedule in ("cosine", "linear"):
        optim = OptimSection(lr=1.0, schedule=schedule, warmup_steps=10, decay_steps=110, min_lr_ratio=0.2)
        assert learning_rate(optim, 60) == pytest.approx(0.6)
    quarter = OptimSection(lr=1.0, schedule="cosine", warmup_steps=0, decay_steps=100, min_lr_ratio=0.0)
    assert learning_rate(quarter, 25) == pytest.approx(0.5 * (1 + 2**-0.5))
    straight = quarter.model_copy(update={"schedule": "linear"})
    assert learning_rate(straight, 25) == pytest.approx(0.75)


def test_it_depends_on_nothing_but_the_step() -> None:
    optim = OptimSection(warmup_steps=5, decay_steps=20)
    assert [learning_rate(optim, step) for step in range(1, 30)] == [
        learning_rate(optim, step) for step in reversed(range(1, 30))
    ][::-1]
