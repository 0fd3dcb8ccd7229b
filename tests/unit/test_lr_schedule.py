"""The learning rate as a function of the step."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.load import build_config
from phalanx.config.resolve import resolve_autos
from phalanx.config.schema import OptimSection
from phalanx.core.errors import ConfigError
from phalanx.optim.lr_schedule import learning_rate

shapes = st.sampled_from(["cosine", "linear", "constant", "polynomial", "wsd"])


@st.composite
def sections(draw: st.DrawFn) -> OptimSection:
    warmup, share = draw(st.integers(0, 50)), draw(st.floats(0.01, 1))
    return OptimSection(
        power=draw(st.floats(0.1, 5)),
        decay_share=share,
        decay_shape=draw(st.sampled_from(["linear", "sqrt", "cosine"])),
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


@given(sections(), st.integers(1, 300))
def test_it_falls_without_jumps(optim: OptimSection, step: int) -> None:
    assert isinstance(optim.decay_steps, int)
    begin = float(optim.warmup_steps)
    if optim.schedule == "wsd":
        begin = max(begin, optim.decay_steps * (1 - optim.decay_share))
    span = max(optim.decay_steps - begin, 1.0)
    shape = optim.decay_shape if optim.schedule == "wsd" else optim.schedule
    steepest = {
        "constant": 0.0,
        "linear": 1 / span,
        "cosine": math.pi / 2 / span,
        "sqrt": span**-0.5,
        "polynomial": optim.power / span if optim.power > 1 else span**-optim.power,
    }[shape]
    if step >= max(1, optim.warmup_steps):
        fall = learning_rate(optim, step) - learning_rate(optim, step + 1)
        assert -1e-12 <= fall / optim.lr <= steepest + 1e-9


def test_wsd_is_stable_and_then_falls() -> None:
    optim = OptimSection(
        lr=1.0, schedule="wsd", warmup_steps=10, decay_steps=100, decay_share=0.4, min_lr_ratio=0.2,
    )  # fmt: skip
    assert [learning_rate(optim, step) for step in (5, 10, 35, 60)] == [0.5, 1.0, 1.0, 1.0]
    quarter = {"linear": 0.75, "sqrt": 0.5, "cosine": 0.5 * (1 + 2**-0.5)}
    for shape, left in quarter.items():
        shaped = optim.model_copy(update={"decay_shape": shape})
        assert learning_rate(shaped, 70) == pytest.approx(0.2 + 0.8 * left)
        assert learning_rate(shaped, 100) == learning_rate(shaped, 500) == pytest.approx(0.2)
    assert learning_rate(optim.model_copy(update={"decay_share": 1.0}), 55) == pytest.approx(0.6)


def test_the_exponent_of_the_polynomial() -> None:
    optim = OptimSection(lr=1.0, schedule="polynomial", warmup_steps=10, decay_steps=110, min_lr_ratio=0.0)
    assert learning_rate(optim, 60) == pytest.approx(0.25)
    assert learning_rate(optim.model_copy(update={"power": 3.0}), 60) == pytest.approx(0.125)


def test_a_warm_up_into_the_decay_is_refused() -> None:
    model = {"hidden": 16, "layers": 1, "heads": 2}
    optim = {"schedule": "wsd", "warmup_steps": 81, "decay_steps": 100}
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps 81 ends after step 80, where the last 0\.2 of"):
        build_config({"model": model, "optim": optim}, "the recipe")
    build_config({"model": model, "optim": optim | {"warmup_steps": 80}}, "the recipe")


@pytest.mark.parametrize(("steps", "share", "decay"), [(10, 0.2, 125), (100, 0.9, 1000), (101, 0.005, 101)])
def test_a_run_that_ends_within_its_warm_up_may_be_tried_out(steps: int, share: float, decay: int) -> None:
    tree = {
        "model": {"hidden": 16, "layers": 1, "heads": 2},
        "train": {"steps": steps},
        "optim": {"schedule": "wsd", "warmup_steps": 100, "decay_share": share},
    }
    assert resolve_autos(build_config(tree, "the recipe"), device="cpu", world=1)[0].optim.decay_steps == decay


@pytest.mark.parametrize(
    ("optim", "schedule"),
    [({"power": 3.0}, "polynomial"), ({"decay_share": 0.5}, "wsd"), ({"decay_shape": "sqrt"}, "wsd")],
)
def test_what_the_schedule_does_not_use_is_refused(optim: dict[str, Any], schedule: str) -> None:
    model = {"hidden": 16, "layers": 1, "heads": 2}
    with pytest.raises(
        ConfigError, match=rf"has no effect with optim.schedule cosine; remove it, or choose {schedule}"
    ):
        build_config({"model": model, "optim": optim}, "the recipe")
    build_config({"model": model, "optim": optim | {"schedule": schedule}}, "the recipe")


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
