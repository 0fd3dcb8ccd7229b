"""The sharded engine driven by hand: whatever its parameters are and however they are used, it is AdamW on one rank."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx.comm.comm_thread import StreamEvent
from phalanx.comm.mesh import Mesh, join
from phalanx.core.placement import Placement
from phalanx.engine import sharded
from phalanx.engine.sharding_spec import CommSchedules, ShardingSpec
from phalanx.layout.comm_simulation import TransferOp
from tests.dist.engine_cases import WIDTH, Batch, Driven, Mix, Net, batches, mix
from tests.helpers import ALL, cover, run_ranks

SHAPES: st.SearchStrategy[Any] = st.one_of(
    st.just([]), st.lists(st.integers(1, 7), min_size=1, max_size=3), st.tuples(st.integers(1, 30), st.integers(1, 20))
)


@st.composite
def drawn(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.integers(1, 5))
    cases = []
    for zero in (1, 2, 3):
        degree = draw(st.sampled_from([each for each in range(1, ranks + 1) if ranks % each == 0]))
        weights = st.lists(st.integers(0, 4), min_size=degree, max_size=degree).filter(any)
        cases.append(
            {
                "units": draw(st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=4)),
                "own": draw(st.booleans()),
                "meta": draw(st.booleans()),
                "micro_batches": draw(st.integers(1, 2)),
                "clip": draw(st.sampled_from([None, 0.5, 2.0])),
                "sharding": {
                    "zero": zero,
                    "weights": draw(st.one_of(st.none(), weights)),
                    "reduce": draw(st.sampled_from(["per_step", "per_micro_batch"])),
                    "slots": draw(st.integers(1, 2)),
                    "degree": degree,
                    "parts": draw(st.integers(1, 4)),
                },
            }
        )
    return {"ranks": ranks, "cases": cases}


def random_cases(placement: Placement, cases: list[dict[str, Any]]) -> list[float]:
    torch.manual_seed(0)
    sharded.PART_BYTES = 8  # or nothing here would travel in parts
    with join(placement, 20) as mesh:
        return [random_case(mesh, **case) for case in cases]


def random_case(
    mesh: Mesh, units: list[Any], own: bool, meta: bool, micro_batches: int, clip: float | None, sharding: Any
) -> float:
    model = Net([Mix(shapes) for shapes in units], own)
    driven = Driven(mesh, model, model.units(), ShardingSpec(**sharding), clip, meta=meta)
    driven.walk(50 if ALL else 8, lambda step, rank: batches(step, rank, micro_batches))
    found = driven.apart()
    driven.engine.close()
    return found


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn())
def test_any_shapes_walk_as_adamw_does(case: dict[str, Any]) -> None:
    for found in run_ranks(random_cases, case["ranks"], cases=case["cases"]):
        # A gradient that cancels to nothing but rounding is divided by eps, 1e-8: of shapes drawn at random, some do.
        assert max(found) < 1e-7, found


def seven(placement: Placement) -> list[float]:
    found = []
    with join(placement, 20) as mesh:
        for zero, weights in cover((1, 2, 3), ((4.0, 2.0, 1.0, 0.0, 1.0, 0.0, 3.0), None)):
            model = Net([Mix([[5, 3], []]), Mix([[40]]), Mix([[2, 2, 2], [7]])], own=True)
            driven = Driven(mesh, model, model.units(), ShardingSpec(zero, "per_step", weights, slots=2), 0.5)
            driven.walk(3, lambda step, rank: batches(step, rank, 2))
            found.append(driven.apart())
            driven.engine.close()
    return found


@pytest.mark.skipif(not ALL, reason="make test-all")
def test_seven_ranks_walk_as_one_does() -> None:
    for found in run_ranks(seven, 7):
        assert max(found) < 1e-9, found


class Part(nn.Module):
    """A unit of many kinds of parameters; what others share with it is given."""

    def __init__(self, seed: int, tied: nn.Parameter | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def values(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.3 * torch.randn(shape, generator=generator, dtype=torch.float64))

        self.plain, self.scalar, self.twice = values(4, WIDTH), values(), values(3, 3)
        self.frozen = values(2, 3).requires_grad_(False)
        self.never, self.seldom, self.here = values(70), values(2, 50), values(3, 7)
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.tied = values(3, 5) if tied is None else tied

    def forward(self, hidden: torch.Tensor, seldom: bool, here: bool) -> torch.Tensor:
        used = [self.twice, self.plain, self.scalar, self.twice, self.frozen, self.tied, self.empty]
        for weight in used + [self.seldom] * seldom + [self.here] * here:
            hidden = mix(hidden, weight)
        return hidden


class Whole(nn.Module):
    """Units of which two share a parameter, one is frozen, and one is left out in some passes if that is allowed."""

    def __init__(self, all_used: bool) -> None:
        super().__init__()
        self.first = Part(1)
        self.frozen = Part(2).requires_grad_(False)
        self.idle = Mix([[3, 4]])
        self.last = Part(3, tied=self.first.tied)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.all_used = all_used

    def forward(self, hidden: torch.Tensor, seldom: bool, here: bool) -> torch.Tensor:
        hidden = self.frozen(self.first(hidden, seldom, here), seldom, here)
        if self.all_used or seldom:
            hidden = self.idle(hidden)
        return self.last(hidden, seldom, here) * self.scale

    def units(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), ("frozen", self.frozen), ("idle", self.idle), ("last", self.last)]


def oddly_used(step: int, rank: int) -> list[Batch]:
    """In step 3 nobody has anything that counts; some parameters are used in some steps, some on rank 1 alone, some in
    one micro-batch alone."""
    found = batches(step, rank, 3, none=step == 3)
    for number, batch in enumerate(found):
        batch.extra = (step % 3 == 1 and number == step % 2, rank == 1)
    return found


ODD = (
    ShardingSpec(1, "per_step", None, slots=2),
    ShardingSpec(1, "per_micro_batch", (2.0, 0.0, 1.0)),
    ShardingSpec(2, "per_step", (0.0, 1.0, 1.0)),
    ShardingSpec(2, "per_micro_batch", None, slots=2),
    ShardingSpec(3, "per_step", (2.0, 0.0, 1.0)),
    ShardingSpec(3, "per_micro_batch"),
)


def odd_parameters(placement: Placement) -> dict[str, float]:
    found = {}
    with join(placement, 20) as mesh:
        for sharding, clip in zip(ODD, (None, 3.0, None, 3.0, 3.0, None), strict=True):
            model = Whole(all_used=sharding.zero == 3)
            untouched = model.first.never.detach().clone()
            driven = Driven(mesh, model, model.units(), sharding, clip)
            driven.walk(4, oddly_used)
            found[str(sharding)] = driven.apart()
            assert driven.skipped == [0.0, 0.0, 1.0, 0.0]
            with driven.engine.full_parameters() as whole:
                assert torch.equal(whole["first.never"], untouched), "what is never used is not decayed either"
            driven.engine.close()
    return found


def test_parameters_that_are_shared_or_frozen_or_seldom_used() -> None:
    for found in run_ranks(odd_parameters, 3, timeout_s=180):
        assert max(found.values()) < 1e-9, found


class Growing:
    """Data of which every third step's is so large that its gradient is clipped, or not a number on rank 1 alone."""

    def __init__(self, bad: float) -> None:
        self.bad = bad

    def __call__(self, step: int, rank: int) -> list[Batch]:
        found = batches(step, rank, 2, size=30.0 if step % 3 == 0 and self.bad == self.bad else 1.0)
        if self.bad != self.bad and step % 3 == 0 and rank == 1:
            found[-1].rows[0, 0] = self.bad
        return found


def clipped(placement: Placement, zero: int, bad: str) -> list[Any]:
    """Steps of which two in three are taken early: what the engine has done, and whether it is bitwise the same as
    with one slot."""
    sharded.PART_BYTES = 8
    found = []
    with join(placement, 20) as mesh:
        states = []
        for slots in (1, 2):
            torch.manual_seed(0)
            model = Net([Mix([[4, 20], [3], []]), Mix([[130]]), Mix([[2, 3], [64]])])
            sharding = ShardingSpec(zero, weights=(3.0, 1.0), slots=slots)
            driven = Driven(mesh, model, model.units(), sharding, clip=40.0)
            done: list[str] = []
            watch(driven.engine._update, "update_unit", done)
            watch(driven.engine._parameters, "redo", done)
            history = []
            for _ in range(6):
                driven.walk(1, Growing(float(bad)))
                with driven.engine.full_parameters() as whole:
                    history.append(driven.state() | {name: tensor.clone() for name, tensor in whole.items()})
            states.append(history)
            if bad != "nan":
                assert [norm > 40 for norm in driven.norms] == [False, False, True] * 2
                assert driven.apart() < 1e-9
            else:
                assert driven.skipped == [0.0, 0.0, 1.0] * 2
            found.append([done.count("update_unit"), done.count("redo")])
            driven.engine.close()
        same = [one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
                for one, other in zip(*states, strict=True)]  # fmt: skip
        moved = [any(not torch.equal(one[key], other[key]) for key in one)
                 for history in states for one, other in itertools.pairwise(history)]  # fmt: skip
    return [found, same, moved]


def watch(part: Any, name: str, done: list[str]) -> None:
    """Note each call of a method of a part of an engine."""
    method = getattr(part, name)

    def noting(*args: Any) -> Any:
        done.append(name)
        return method(*args)

    setattr(part, name, noting)


@pytest.mark.parametrize(("zero", "bad"), cover([1, 2], [1.0, float("nan")]))
def test_what_was_updated_early_is_put_back_when_it_is_clipped_or_skipped(zero: int, bad: float) -> None:
    for (one, two), same, moved in run_ranks(clipped, 2, timeout_s=180, zero=zero, bad=str(bad)):
        units = 4
        assert one == [units * 6, 0]
        assert same == [True] * 6
        # Steps 3 and 6 are begun early and done again; so are those that follow a norm that is too near, not early.
        assert two == [units * 8, 2]
        skipped = [False, True, False, False, True]  # between which steps nothing may change, from the first pair on
        assert moved == ([True] * 5 if bad == bad else [not each for each in skipped]) * 2


def with_a_frozen_unit(placement: Placement) -> list[float]:
    """Units are updated early, but for one that is not trained: its parts are gathered as soon as may be, or before and
    behind the last gradient."""
    sharded.PART_BYTES = 8
    found = []
    with join(placement, 20) as mesh:
        parts = range(4)
        order = (
            *(TransferOp("reduce", unit, part) for unit in (2, 1, 0) for part in parts if (unit, part) != (0, 3)),
            TransferOp("gather", 2, 0), TransferOp("reduce", 0, 3),
            *(TransferOp("gather", 2, part) for part in parts[1:]),
            *(TransferOp("gather", unit, part) for unit in (0, 1) for part in parts),
        )  # fmt: skip
        for given in (None, CommSchedules(order, order, (), ())):
            torch.manual_seed(0)
            model = Net([Mix([[4, 200]]), Mix([[130]]), Mix([[9, 300]])], own=False)
            model.blocks[2].requires_grad_(False)
            driven = Driven(mesh, model, model.units(), ShardingSpec(1, slots=2), clip=1e6)
            assert driven.engine._units[0].parts == len(parts)
            if given is not None:
                driven.engine._update.schedule.orders_for = lambda step, given=given: given  # type: ignore[method-assign]
            driven.walk(4)
            found.append(driven.apart())
            driven.engine.close()
    return found


def test_what_is_not_trained_neither_waits_for_an_update_nor_hides_that_a_sum_is_not_there() -> None:
    for found in run_ranks(with_a_frozen_unit, 2):
        assert max(found) < 1e-9, found


def brought(placement: Placement) -> list[bool]:
    """Whether a unit's parameters are all there when it is told so, where what the ranks own is brought to all."""
    sharded.PART_BYTES = 8
    whole: list[bool] = []
    with join(placement, 20) as mesh:
        model = Net([Mix([[4, 200]]), Mix([[130]])], own=False)
        driven = Driven(mesh, model, model.units(), ShardingSpec(1, slots=2), clip=None)
        engine: Any = driven.engine
        engine._comm_thread.drain()

        class Noting(StreamEvent):
            def record(self) -> None:
                number = engine._parameters.gathered.index(self)
                held = [each for unit in engine._units[number : number + 1] for each in unit.buckets]
                whole.append(not any(values.isnan().any() for each in held for _, values in each.members()))
                super().record()

        for unit in engine._units:
            for held in unit.buckets:
                held.values.fill_(torch.nan)
        engine._parameters.gathered = [Noting(engine._comm_thread) for _ in engine._units]
        engine._parameters.publish_masters()
        engine.close()
    return whole


def test_a_unit_is_told_of_its_parameters_when_all_parts_are_there() -> None:
    assert run_ranks(brought, 2) == [[True, True]] * 2
