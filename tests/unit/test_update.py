"""The update rule: slot to slot bitwise equal to in place, skipping, and the same numbers as torch.optim.AdamW."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.optim import gradients
from phalanx.optim.update import AdamW, Slot, StepUpdate, allocate_zeros

RULE = AdamW(0.9, 0.95, 1e-8, 0.1)
KINDS = ("param", *RULE.state_kinds)
sizes = st.lists(st.integers(0, 300), min_size=1, max_size=5)
dtypes = st.sampled_from([torch.float32, torch.float64])


def a_slot(sizes: list[int], dtype: torch.dtype, seed: int) -> Slot:
    generator = torch.Generator().manual_seed(seed)
    slot: Slot = {}
    for i, size in enumerate(sizes):
        state = RULE.make_state(f"p{i}", (size,), size, dtype, torch.device("cpu"), allocate_zeros)
        slot[f"p{i}"] = {"param": torch.zeros(size, dtype=dtype)} | state
    for kinds in slot.values():
        for kind, tensor in kinds.items():
            tensor.copy_(torch.randn(tensor.numel(), generator=generator, dtype=torch.float64))
            if kind == "exp_avg_sq":
                tensor.square_()
    return slot


def some_grads(slot: Slot, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(k["param"].numel(), generator=generator, dtype=torch.float64).to(k["param"].dtype)
        for name, k in slot.items()
    }


def same(one: Slot, other: Slot) -> bool:
    return all(torch.equal(one[name][kind], other[name][kind]) for name in other for kind in KINDS)


def apply(
    source: Slot, target: Slot, *, step: int = 3, divisor: float = 1.0, skip: bool = False, seed: int = 1
) -> None:
    wide = next(iter(source.values()))["param"].dtype
    RULE.apply(
        source,
        target,
        some_grads(source, seed),
        StepUpdate(
            step=step,
            lr=1e-2,
            no_decay=frozenset(["p1"]),
            divisor=torch.tensor(divisor, dtype=wide),
            skip=torch.tensor(float(skip)),
        ),
    )


@given(sizes, dtypes, st.integers(1, 10_000), st.floats(0.01, 100), st.booleans())
@settings(deadline=None, max_examples=60)
def test_slot_to_slot_gives_the_bits_of_in_place_and_leaves_the_source(
    sizes: list[int], dtype: torch.dtype, step: int, divisor: float, skip: bool
) -> None:
    source, target = a_slot(sizes, dtype, seed=0), a_slot(sizes, dtype, seed=9)
    untouched, in_place = copy.deepcopy(source), copy.deepcopy(source)
    apply(source, target, step=step, divisor=divisor, skip=skip)
    apply(in_place, in_place, step=step, divisor=divisor, skip=skip)
    assert same(source, untouched)
    assert same(target, in_place)
    assert same(target, untouched) is (skip or not any(sizes))


@given(sizes, dtypes, st.integers(0, 300))
@settings(deadline=None, max_examples=40)
def test_a_shard_is_updated_as_its_part_of_the_whole(sizes: list[int], dtype: torch.dtype, cut: int) -> None:
    # Not to the bit: vectorised kernels treat the ends of a tensor with scalar code that may round otherwise.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-15
    whole = a_slot(sizes, dtype, seed=0)
    parts = []
    for take in (lambda t: t[: min(cut, t.numel())], lambda t: t[min(cut, t.numel()) :]):
        shard = {name: {kind: take(tensor).clone() for kind, tensor in kinds.items()} for name, kinds in whole.items()}
        grads = {name: take(grad).clone() for name, grad in some_grads(whole, 1).items()}
        one, no = torch.ones((), dtype=dtype), torch.zeros(())
        RULE.apply(shard, shard, grads, StepUpdate(step=3, lr=1e-2, no_decay=frozenset(["p1"]), divisor=one, skip=no))
        parts.append(shard)
    apply(whole, whole)
    for name, kinds in whole.items():
        for kind, tensor in kinds.items():
            joined = torch.cat([part[name][kind] for part in parts])
            torch.testing.assert_close(joined, tensor, rtol=tolerance, atol=tolerance)


def test_a_skipped_step_leaves_even_what_is_not_finite_alone() -> None:
    slot = a_slot([7], torch.float32, seed=0)
    before = copy.deepcopy(slot)
    grads = {"p0": torch.full((7,), float("nan"))}
    one = torch.ones(())
    RULE.apply(slot, slot, grads, StepUpdate(step=1, lr=1.0, no_decay=frozenset(), divisor=one, skip=torch.ones(())))
    assert same(slot, before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("clip", [None, 1.0, 1e9])
def test_twenty_steps_equal_torch_with_its_own_clipping(
    dtype: torch.dtype, tolerance: float, clip: float | None
) -> None:
    slot = a_slot([40, 13, 1], dtype, seed=0)
    for kinds in slot.values():
        kinds["exp_avg"].zero_()
        kinds["exp_avg_sq"].zero_()
    theirs = {name: torch.nn.Parameter(kinds["param"].clone()) for name, kinds in slot.items()}
    groups: list[dict[str, Any]] = [
        {"params": [theirs["p0"], theirs["p2"]], "weight_decay": RULE.weight_decay},
        {"params": [theirs["p1"]], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(RULE.beta1, RULE.beta2), eps=RULE.eps)
    nominal, weight = 1000, 640  # our gradients are of sums over the nominal weight, theirs of means
    for step in range(1, 21):
        lr = 1e-2 / step
        grads = some_grads(slot, seed=100 + step)
        for name, parameter in theirs.items():
            parameter.grad = grads[name] * (nominal / weight)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip or float("inf"))
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        squares = gradients.sum_of_squares(grads.values(), dtype, torch.device("cpu"))
        ours, divisor, skip = gradients.compute_norm_and_divisor(
            squares, nominal_weight=nominal, total_weight=weight, clip=clip
        )
        assert ours.item() == pytest.approx(norm.item(), rel=tolerance)
        RULE.apply(
            slot, slot, grads, StepUpdate(step=step, lr=lr, no_decay=frozenset(["p1"]), divisor=divisor, skip=skip)
        )
    for name, parameter in theirs.items():
        apart = (slot[name]["param"] - parameter.detach()).abs().max() / parameter.detach().abs().max()
        print(f"{name}: {apart.item():.1e}")
        assert apart < tolerance
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(slot[name][kind], adam.state[parameter][kind], rtol=tolerance, atol=tolerance)


def test_what_has_no_gradient_is_carried_over() -> None:
    source, target = a_slot([4, 3], torch.float64, seed=0), a_slot([4, 3], torch.float64, seed=9)
    one, no = torch.ones((), dtype=torch.float64), torch.zeros(())
    grads = {"p0": torch.ones(4, dtype=torch.float64)}
    RULE.apply(source, target, grads, StepUpdate(step=1, lr=1e-2, no_decay=frozenset(), divisor=one, skip=no))
    assert all(torch.equal(target["p1"][kind], source["p1"][kind]) for kind in KINDS)
    assert not torch.equal(target["p0"]["param"], source["p0"]["param"])


def test_only_named_parameters_are_spared_the_decay() -> None:
    slot = a_slot([5, 5], torch.float64, seed=0)
    for kinds in slot.values():
        kinds["exp_avg"].zero_()
    before = copy.deepcopy(slot)
    grads = {name: torch.zeros(5, dtype=torch.float64) for name in slot}
    one, no = torch.ones((), dtype=torch.float64), torch.zeros(())
    RULE.apply(slot, slot, grads, StepUpdate(step=1, lr=0.5, no_decay=frozenset(["p1"]), divisor=one, skip=no))
    torch.testing.assert_close(slot["p0"]["param"], before["p0"]["param"] * (1 - 0.5 * 0.1), rtol=1e-15, atol=0)
    assert torch.equal(slot["p1"]["param"], before["p1"]["param"])


def test_state_comes_from_the_callers_allocator() -> None:
    asked = []

    def allocate(name: str, kind: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append((name, kind, elements, dtype))
        return torch.zeros(elements, dtype=dtype, device=device)

    state = RULE.make_state("a", (3,), 3, torch.float64, torch.device("cpu"), allocate)
    assert asked == [("a", kind, 3, torch.float64) for kind in RULE.state_kinds]
    assert tuple(state) == RULE.state_kinds
