"""Moments in 8 bits: what coding loses and what it never does, and the rule that lives with it."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.optim.adamw8bit import MIN_ELEMENTS, AdamW8bit
from phalanx.optim.quantized import (
    BLOCK,
    QuantizedShard,
    dequantize,
    look_up_codes,
    make_codebook,
    quantize,
    search_codes,
    split_row,
    zero_code,
)
from phalanx.optim.update import AdamW, Slot, StepUpdate, allocate_zeros, count_state_bytes, load_state, state_pieces

CPU = torch.device("cpu")
RULE = AdamW8bit(AdamW(0.9, 0.95, 1e-8, 0.1))
dtypes = st.sampled_from([torch.float32, torch.float64])


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Numbers of very different sizes, rows of zeros, and rows too small to count, of a float32 or float64."""
    rows, columns, dtype = draw(st.integers(0, 4)), draw(st.integers(1, 2 * BLOCK + 3)), draw(dtypes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(rows, columns, generator=generator, dtype=dtype)
    values *= 10.0 ** torch.randint(-9, 3, (rows, columns), generator=generator)
    for row in values:
        row *= draw(st.sampled_from([0.0, 1.0, 1e-12, 1e-31, 1e-44, 1e20]))
    return values


@given(matrices(), st.booleans())
@settings(deadline=None, max_examples=150)
def test_coding_what_was_decoded_gives_the_same_codes(values: torch.Tensor, signed: bool) -> None:
    codes, scales = quantize(values if signed else values.abs(), signed)
    again = quantize(dequantize(codes, scales, signed, values.shape[1]), signed)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


@given(matrices(), st.booleans())
@settings(deadline=None, max_examples=100)
def test_each_number_becomes_the_nearest_that_its_scale_allows(values: torch.Tensor, signed: bool) -> None:
    values = values if signed else values.abs()
    codes, scales = quantize(values, signed)
    found = dequantize(codes, scales, signed, values.shape[1])
    numbers, _ = make_codebook(signed, values.dtype, CPU)
    _, length = split_row(values.shape[1])
    of_each = scales.repeat_interleave(length, dim=1)[:, : values.shape[1]]
    nearest = (values[..., None] - numbers * of_each[..., None]).abs().amin(-1)
    lost = (values - found).abs()
    counted = of_each > 0
    least_positive = numbers[numbers > 0].min()
    kept_above_zero = ~torch.tensor(signed) & (values > 0) & (values < least_positive * of_each)
    near = lost <= nearest * (1 + 1e-5) + of_each * 1e-7
    assert (near | kept_above_zero | ~counted).all()
    assert (found[~counted] == 0).all()
    if not signed:
        assert (found[counted & (values / of_each.clamp(min=1e-30) > 0)] > 0).all(), "a positive number became zero"


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_looked_up_as_they_are_searched(signed: bool) -> None:
    numbers, between = make_codebook(signed, torch.float32, CPU)
    upper = (torch.arange(1 << 16) << 16).to(torch.int32)
    ends = torch.cat((upper, upper | 0xFFFF)).view(torch.float32)  # of each run of numbers with the same upper half
    near = torch.cat((numbers, between, ends[ends.abs() <= 1]))
    near = torch.cat([near, *(torch.nextafter(near, torch.tensor(end)) for end in (-2.0, 2.0))])
    for shares in (near.clamp(-1.0, 1.0), torch.rand(100_000) * 2 - 1):
        found = look_up_codes(shares if signed else shares.abs(), signed)
        assert torch.equal(found, search_codes(shares if signed else shares.abs(), signed))


def test_the_table_is_that_of_the_paper_but_for_minus_one() -> None:
    for signed in (True, False):
        numbers, between = make_codebook(signed, torch.float64, CPU)
        assert len(numbers) == 256
        assert len(between) == 255
        assert (numbers[1:] > numbers[:-1]).all()
        assert numbers[-1] == 1.0
        assert numbers[0] == (-1.0 if signed else 0.0)
        assert numbers[numbers > 0].min() == pytest.approx(5.5e-7 if signed else 3.25e-7)
    assert (zero_code("exp_avg"), zero_code("exp_avg_sq")) == (127, 0)


def a_slot(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Slot:
    slot, generator = {}, torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        values = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        slot[name] = {"param": values} | RULE.make_state(name, shape, size, dtype, CPU, allocate_zeros)
    return slot


def some_grads(slot: Slot, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(state["param"].numel(), generator=generator, dtype=torch.float64).to(state["param"].dtype)
        for name, state in slot.items()
    }


def take(rule: AdamW | AdamW8bit, source: Slot, target: Slot, step: int, skip: float = 0.0) -> None:
    dtype = next(iter(source.values()))["param"].dtype
    change = StepUpdate(step, 1e-2, frozenset(["norm"]), torch.tensor(2.0, dtype=dtype), skip=torch.tensor(skip))
    rule.apply(source, target, some_grads(source, step), change)


SHAPES = {"matrix": (5, 1000), "small": (60, 60), "norm": (5000,), "odd": (9, 700)}


def test_only_large_matrices_are_coded_and_take_a_quarter() -> None:
    slot = a_slot(SHAPES, torch.float32)
    assert {name for name, state in slot.items() if "exp_avg" not in state} == {"matrix", "odd"}
    # However many matrices of a stack there are on a rank.
    assert [RULE.elements_together((count, 60, each)) for count in (1, 9) for each in (60, 70)] == [1, 70] * 2
    for name, shape in SHAPES.items():
        held = sum(tensor.numel() * tensor.element_size() for key, tensor in slot[name].items() if key != "param")
        assert held == count_state_bytes(RULE, shape, math.prod(shape), torch.float32)
    coded, plain = (count_state_bytes(rule, (64, 4096), 64 * 4096, torch.float32) for rule in (RULE, RULE.adamw))
    assert coded == 2 * 64 * (4096 + 16 * 4) < 0.26 * plain
    assert 60 * 60 < MIN_ELEMENTS < 5000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slot_to_slot_in_place_and_skipped(dtype: torch.dtype) -> None:
    source = a_slot(SHAPES, dtype)
    for step in (1, 2, 3):
        take(RULE, source, source, step)
    untouched, target, in_place = (copy.deepcopy(source) for _ in range(3))
    take(RULE, source, target, 4)
    take(RULE, in_place, in_place, 4)
    for name, state in untouched.items():
        for key, tensor in state.items():
            assert torch.equal(source[name][key], tensor)
            assert torch.equal(target[name][key], in_place[name][key])
        assert not torch.equal(target[name]["param"], state["param"])
    take(RULE, in_place, in_place, 5, skip=1.0)
    for name, state in target.items():
        assert all(torch.equal(in_place[name][key], tensor) for key, tensor in state.items())


def test_it_follows_adamw_and_a_row_is_updated_alike_wherever_it_lies() -> None:
    coded, exact = a_slot(SHAPES, torch.float64), a_slot(SHAPES, torch.float64)
    for state in exact.values():
        for kind in RULE.state_kinds:
            state[kind] = torch.zeros_like(state["param"])
    begin = exact["matrix"]["param"].clone()
    part = {"matrix": {"param": begin[2000:].clone()}}
    part["matrix"] |= RULE.make_state("matrix", (5, 1000), 3000, torch.float64, CPU, allocate_zeros)
    for step in range(1, 30):
        grads = {"matrix": some_grads(coded, step)["matrix"][2000:]}
        change = StepUpdate(step, 1e-2, frozenset(), torch.tensor(2.0, dtype=torch.float64), skip=torch.zeros(()))
        RULE.apply(part, part, grads, change)
        take(RULE, coded, coded, step)
        take(RULE.adamw, exact, exact, step)
    torch.testing.assert_close(part["matrix"]["param"], coded["matrix"]["param"][2000:], rtol=1e-12, atol=1e-12)
    for name in ("small", "norm"):
        torch.testing.assert_close(coded[name]["param"], exact[name]["param"], rtol=1e-12, atol=1e-12)
    moved = (exact["matrix"]["param"] - begin).norm()
    apart = (coded["matrix"]["param"] - exact["matrix"]["param"]).norm()
    print(f"8-bit moments: {apart / moved:.1e} of the way from AdamW's own")
    assert 0 < apart < 0.05 * moved


def test_pieces_are_decoded_and_read_back_to_the_bit() -> None:
    slot = a_slot({"matrix": (7, 650)}, torch.float32)
    for step in (1, 2):
        take(RULE, slot, slot, step)
    state, held = slot["matrix"], list(state_pieces(RULE, "matrix", slot["matrix"], 1300))
    assert [(p.kind, p.start, p.stop, p.dtype) for p in held] == [
        (kind, 1300, 1300 + 4550, torch.float32) for kind in ("param", "exp_avg", "exp_avg_sq")
    ]
    assert isinstance(held[1].values, QuantizedShard)
    kept = {piece.kind: piece.tensor.clone() for piece in held}
    again = a_slot({"matrix": (7, 650)}, torch.float32)["matrix"]

    def read(name: str, kind: str, start: int, stop: int, out: torch.Tensor) -> None:
        out.copy_(kept[kind][start - 1300 : stop - 1300])

    load_state(RULE, "matrix", again, 1300, read)
    assert all(torch.equal(again[key], tensor) for key, tensor in state.items())


def test_portions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = a_slot(SHAPES, torch.float64), a_slot(SHAPES, torch.float64)
    take(RULE, whole, whole, 1)
    monkeypatch.setattr("phalanx.optim.quantized.CHUNK_ELEMENTS", 2100)
    take(RULE, cut, cut, 1)
    assert len(QuantizedShard.from_state(cut["matrix"], "exp_avg", 5000).row_chunks()) == 3
    for name, state in whole.items():
        torch.testing.assert_close(cut[name]["param"], state["param"], rtol=1e-14, atol=1e-14)
