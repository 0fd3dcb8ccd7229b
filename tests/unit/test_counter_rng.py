import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.models.counter_rng import CounterRNG, derive_key, dropout_mask, normal, random_bits

SAMPLES = torch.tensor([3, 1_000_000_007, 5])


def test_key_is_stable_and_tells_coordinates_apart() -> None:
    assert derive_key(7, "layers.0.attention.q.weight") == -226986701125975322
    assert (
        len(
            {
                derive_key(0),
                derive_key(1),
                derive_key(0, 1),
                derive_key(0, "1"),
                derive_key(0, "a", "b"),
                derive_key(0, "ab"),
                derive_key(0, 1, 2),
                derive_key(0, 12),
            }
        )
        == 8
    )
    code = "from phalanx.models.counter_rng import derive_key; print(derive_key(7, 'x', 2))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(out) == derive_key(7, "x", 2)


def test_bits_are_the_published_splitmix64_sequence() -> None:
    # The first three outputs of the reference C program for the seed 0.
    published = ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]
    assert [hex(x % 2**64) for x in random_bits(0, torch.arange(1, 4)).tolist()] == published
    assert [hex(x % 2**64) for x in random_bits(8, torch.arange(1, 4) ^ 8).tolist()] == published


def test_bits_take_a_tensor_as_key() -> None:
    counters = torch.arange(1000)
    assert torch.equal(random_bits(torch.tensor(-77), counters), random_bits(-77, counters))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 200_000), st.integers(0, 70_000), st.integers(0, 300))
def test_any_slice_of_a_normal_draw_is_the_same_bitwise(start: int, length: int, threads_and_cut: int) -> None:
    whole = normal(11, start, start + length, device="cpu", dtype=torch.float64)
    cut = start + min(length, threads_and_cut * 7)
    parts = [normal(11, a, b, device="cpu", dtype=torch.float64) for a, b in ((start, cut), (cut, start + length))]
    assert torch.equal(torch.cat(parts), whole)


def test_a_normal_draw_does_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = normal(3, 0, 200_001, device="cpu", dtype=torch.float64)
        torch.set_num_threads(3)
        assert torch.equal(normal(3, 0, 200_001, device="cpu", dtype=torch.float64), one)
    finally:
        torch.set_num_threads(before)


def test_normal_refuses_a_backward_range() -> None:
    with pytest.raises(ValueError, match=r"\[5, 4\)"):
        normal(0, 5, 4, device="cpu", dtype=torch.float32)


def test_normal_draws_are_normal() -> None:
    n = 1_000_000
    x = normal(derive_key(1, "a"), 0, n, device="cpu", dtype=torch.float64)
    y = normal(derive_key(1, "b"), 0, n, device="cpu", dtype=torch.float64)
    five_sigma = 5 / n**0.5
    assert abs(x.mean()) < five_sigma
    assert abs(x.var() - 1) < five_sigma * 2**0.5
    assert abs((x**3).mean()) < five_sigma * 15**0.5
    assert abs((x**4).mean() - 3) < five_sigma * 96**0.5
    assert abs((x.abs() < 1).double().mean() - 0.682689492) < five_sigma
    assert x.abs().max() < 6.5
    # Independent across keys, neighbours, and the two halves of a pair.
    for other in (y, x.roll(1), x.roll(2), (x**2).roll(1) - 1):
        assert abs((x * other).mean()) < five_sigma * 2**0.5
    pairs = x.view(-1, 2)
    assert abs((pairs[:, 0] ** 2 * pairs[:, 1] ** 2).mean() - 1) < 5 / (n / 2) ** 0.5 * 8**0.5


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_keep_drops_the_fraction_asked_for(p: float) -> None:
    kept = dropout_mask(5, torch.arange(8), torch.arange(256), 257, p)
    assert kept.shape == (8, 256, 257)
    n = kept.numel()
    assert abs(kept.double().mean() - (1 - p)) <= 5 * (p * (1 - p) / n) ** 0.5
    # Along each coordinate the fractions scatter as independent draws do: no stripe is favoured.
    for dim in (0, 1, 2):
        fractions = kept.double().mean([d for d in (0, 1, 2) if d != dim])
        sigma = (p * (1 - p) / (n / kept.shape[dim])) ** 0.5
        assert (fractions - (1 - p)).abs().max() <= 5 * sigma


def test_keep_of_everything_dropped() -> None:
    assert not dropout_mask(5, torch.arange(4), torch.arange(64), 64, 1.0 - 1e-12).any()


def test_a_mask_depends_on_its_coordinates_only() -> None:
    whole = dropout_mask(9, SAMPLES, torch.arange(40), 33, 0.5)
    assert torch.equal(dropout_mask(9, SAMPLES[[2, 0]], torch.arange(40), 33, 0.5), whole[[2, 0]])
    assert torch.equal(dropout_mask(9, SAMPLES, torch.arange(10, 20), 33, 0.5), whole[:, 10:20])
    assert torch.equal(dropout_mask(9, SAMPLES, torch.arange(40), 16, 0.5), whole[:, :, :16])


@pytest.mark.parametrize("place", ["seed", "step", "layer", "sample", "position", "channel"])
def test_masks_of_neighbouring_coordinates_are_independent(place: str) -> None:
    at = {"seed": 0, "step": 0, "layer": 0, "sample": 0}

    def mask(**change: int) -> torch.Tensor:
        where = at | change
        draws = CounterRNG(where["seed"], where["step"], torch.arange(32) + 32 * where["sample"])
        return draws.dropout(torch.ones(32, 64, 64), where["layer"], 0.5).sign() * 2 - 1

    a = mask()
    b = a.roll(1, 1) if place == "position" else a.roll(1, 2) if place == "channel" else mask(**{place: 1})
    assert abs((a * b).mean()) < 5 / a.numel() ** 0.5


def test_dropout_scales_what_it_keeps_and_leaves_x_alone_without() -> None:
    draws = CounterRNG(0, 3, SAMPLES)
    x = torch.randn(3, 50, 64, dtype=torch.float64)
    y = draws.dropout(x, 2, 0.25)
    assert torch.equal(y[y != 0], (x * (1 / 0.75))[y != 0])
    assert 0.2 < (y == 0).double().mean() < 0.3
    assert draws.dropout(x, 2, 0.0) is x
    assert draws.dropout(x.bfloat16(), 2, 0.25).dtype == torch.bfloat16


def test_steps_as_tensors_and_integers_agree() -> None:
    x = torch.ones(3, 8, 64)
    assert torch.equal(
        CounterRNG(1, 9, SAMPLES).dropout(x, 4, 0.5), CounterRNG(1, torch.tensor(9), SAMPLES).dropout(x, 4, 0.5)
    )
    place = torch.tensor(4)
    assert torch.equal(CounterRNG(1, 9, SAMPLES).dropout(x, place, 0.5), CounterRNG(1, 9, SAMPLES).dropout(x, 4, 0.5))


def test_compiled_dropout_is_bitwise_the_eager_one_and_never_recompiles() -> None:
    # Of all types at once: a compilation takes many seconds.
    x = torch.randn(3, 40, 33, dtype=torch.float64)
    several = [x, x.float(), x.bfloat16()]

    def run(draws: CounterRNG, place: torch.Tensor) -> list[torch.Tensor]:
        return [draws.dropout(each, place, 0.1) for each in several]

    def same(draws: CounterRNG, place: int) -> bool:
        found, expected = compiled(draws, torch.tensor(place)), run(draws, torch.tensor(place))
        return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    compiled = torch.compile(run, fullgraph=True)
    assert same(CounterRNG(0, 0, SAMPLES), 0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed, step, place in ((0, 1, 0), (0, 2, 5), (8, 3, 6)):
            assert same(CounterRNG(seed, step, SAMPLES + step), place)
