"""The sharded engine around its steps: what it releases, what may be read, and what it answers to mistakes."""

import copy
import gc
import re
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from phalanx.comm.mesh import RankDevices, join
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.engine.zero1_2 import KeptParameters
from phalanx.layout.memory_model import IN_FLIGHT, PREFETCH
from tests.dist.engine_cases import WIDTH, Driven, Mix, Net, batches, mix
from tests.helpers import cover, run_ranks

PATIENCE_S = 3.0
CLIP = 2.0


def five_units(own: bool = True) -> Net:
    torch.manual_seed(0)
    return Net([Mix([[4, 9], [3]]) for _ in range(5)], own)


def whole_units(driven: Driven) -> int:
    """Units, but for the model's own parameters, that have memory for all of their parameters."""
    units = [unit for unit in driven.engine._units if unit.module is not driven.model]
    return sum(all(held.values.untyped_storage().nbytes() for held in unit.buckets) for unit in units)


def copies_on_unlike_devices(placement: Placement) -> str:
    with join(placement, 20) as mesh:
        model = five_units()
        with pytest.raises(ConfigError) as caught:
            Driven(
                replace(mesh, devices=RankDevices(True, homogeneous=False)),
                model,
                model.units(),
                ShardingSpec(1, degree=1),
            )
        return str(caught.value)


def test_copies_on_unlike_devices_are_refused() -> None:
    for said in run_ranks(copies_on_unlike_devices, 2):
        assert said.startswith("copies of the state on heterogeneous devices would drift apart")


def read_between_steps(placement: Placement, zero: int) -> list[Any]:
    with join(placement, 20) as mesh:
        model = five_units()
        driven = Driven(mesh, model, model.units(), ShardingSpec(zero, weights=(2.0, 1.0)))
        driven.walk(2)
        driven.engine._comm_thread.drain()
        read = model.blocks[1].weights[0].isnan()
        try:
            state = model.blocks[1].state_dict()
            with pytest.raises(TypeError, match="cannot be copied or pickled as a whole"):
                copy.deepcopy(model)
            driven.step(3, batches(3, mesh.rank))  # its updates are on their way when the next state is asked for
            driven.twin.step(3, [batch for rank in range(mesh.world) for batch in batches(3, rank)])
            state = {name: value.clone() for name, value in model.state_dict().items()}  # before step 4 changes them
            driven.engine.begin_step(4, 1, 1e-3, None)
            with driven.engine.micro_batch(True):
                with pytest.raises(RuntimeError, match="asked for within a step"):
                    model.state_dict()
                batches(4, mesh.rank)[0].loss_sum(model).backward()
            driven.engine.finish_step()
            apart = max(
                (state[name] - other).abs().max().item() for name, other in driven.twin.model.state_dict().items()
            )
        except RuntimeError as error:
            apart = str(error)
        with driven.engine.full_parameters():
            inside = not model.state_dict()["blocks.1.weights.0"].isnan().any()
        driven.engine.close()
        if zero == 3:
            for call in (model.state_dict, lambda: model(torch.ones(1, WIDTH)), lambda: model.load_state_dict({})):
                with pytest.raises(RuntimeError, match="zero 3"):
                    call()
        else:
            assert len(model.state_dict()) == len(list(model.parameters()))
        return [bool(read.all()), bool(read.any()), apart, inside]


@pytest.mark.parametrize("zero", [2, 3])
def test_what_is_read_between_steps_is_never_stale(zero: int) -> None:
    for all_nan, any_nan, apart, inside in run_ranks(read_between_steps, 2, zero=zero):
        assert inside
        if zero == 3:
            assert all_nan
            assert "zero 3" in apart and apart.endswith("ask within full_parameters()")
        else:
            assert not any_nan
            assert apart < 1e-9


# ------------------------------------------------------------------------------------------------ what is given back


def releases(placement: Placement, own: bool) -> list[int]:
    with join(placement, 20) as mesh:
        model = five_units(own)
        driven = Driven(mesh, model, model.units(), ShardingSpec(3, weights=(2.0, 1.0)))
        at_rest = [whole_units(driven)]
        seen: list[int] = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: seen.append(whole_units(driven)))
            block.register_full_backward_pre_hook(lambda *_: seen.append(whole_units(driven)))
        for _ in range(2):
            driven.walk(1, lambda step, rank: batches(step, rank, 1 + step % 2))
            driven.engine._comm_thread.drain()
            at_rest.append(whole_units(driven))
        with torch.no_grad():
            model(torch.ones(2, WIDTH, dtype=torch.float64))
        driven.engine._comm_thread.drain()
        at_rest.append(whole_units(driven))
        assert driven.apart() < 1e-9
        at_rest.append(whole_units(driven))
        assert len(seen) == 5 * (2 * 3 + 1)
        return [min(seen), max(seen), *at_rest]


@pytest.mark.parametrize("own", [True, False])
def test_units_are_whole_only_around_their_use(own: bool) -> None:
    for least, most, *at_rest in run_ranks(releases, 2, own=own):
        assert 1 <= least <= most <= PREFETCH + 2
        assert at_rest == [0] * 5


def buffers(placement: Placement, reduce: str) -> list[int]:
    """Gradient buffers that are taken after a step, and that there are."""
    with join(placement, 20) as mesh:
        model = five_units(own=False)
        driven = Driven(mesh, model, model.units(), ShardingSpec(2, reduce))
        driven.walk(3, lambda step, rank: batches(step, rank, 2))
        assert driven.apart() < 1e-9
        pool: Any = driven.engine._update.queue.pool
        return [sum(pool._taken.values()), sum(len(free) for free in pool._free.values())]


def test_gradient_buffers_are_given_back() -> None:
    assert [taken for taken, _ in run_ranks(buffers, 2, reduce="per_step")] == [0, 0]
    for taken, there in run_ranks(buffers, 2, reduce="per_micro_batch"):
        assert taken == 0
        assert there <= IN_FLIGHT


def bytes_moved(placement: Placement) -> list[list[int]]:
    """Counted and expected bytes of three steps, by sharding."""
    found = []
    with join(placement, 20) as mesh:
        for sharding, reduces, gathers in (
            (ShardingSpec(1), 1, 1),
            (ShardingSpec(1, weights=(3.0, 0.0, 1.0)), 1, 1),
            (ShardingSpec(2, "per_micro_batch", (3.0, 0.0, 1.0)), 2, 1),
            (ShardingSpec(1, "per_step", (3.0, 0.0, 1.0), slots=2), 1, 1),
            (ShardingSpec(3, "per_step", (3.0, 0.0, 1.0)), 1, None),
        ):
            model = five_units()
            driven = Driven(mesh, model, model.units(), sharding)
            engine = driven.engine
            moved = Moved(engine)
            driven.walk(3, lambda step, rank: batches(step, rank, 2), twin=False)
            engine._comm_thread.drain()
            elsewhere = [8 * (bucket.elements - bucket.count_elements(mesh.rank)) for bucket in engine.buckets]
            # Released: what is the model's own, and the last unit, is gathered once in a micro-batch, all else twice.
            twice = 2 * sum(elsewhere) - elsewhere[0] - elsewhere[-1]
            expected = 3 * (reduces * sum(elsewhere) + (gathers * sum(elsewhere) if gathers else 2 * twice))
            found.append([moved.payload_bytes, expected])
            engine.close()
    return found


class Moved:
    """Bytes that transfers of an engine count from here on; what the ranks agree on is counted beside them."""

    def __init__(self, engine: Any) -> None:
        self.payload_bytes, self._moving = 0, False
        for name in ("reduce_scatter", "all_gather"):
            self._watch(engine._update.queue.routes["data"].trained, name)
        count = engine.traffic.count

        def counting(payload_bytes: int) -> None:
            self.payload_bytes += payload_bytes * self._moving
            count(payload_bytes)

        engine.traffic.count = counting

    def _watch(self, moves: Any, name: str) -> None:
        begin = getattr(moves, name)

        def beginning(*args: Any) -> Any:
            self._moving = True
            moving = begin(*args)
            self._moving = False
            return moving

        setattr(moves, name, beginning)


def test_what_is_sent_is_what_is_not_one_s_own() -> None:
    for found in run_ranks(bytes_moved, 3):
        assert [counted for counted, _ in found] == [expected for _, expected in found]


# --------------------------------------------------------------------------------------------------------- whole passes


def looked_at(placement: Placement) -> list[list[bool]]:
    """Forward passes between steps and inside `full_parameters`, and what can be read there; of zero 1, 2 and 3."""
    found = []
    with join(placement, 20) as mesh:
        for zero in (1, 2, 3):
            model, same = five_units(), []
            driven = Driven(mesh, model, model.units(), ShardingSpec(zero, weights=(0.0, 2.0, 1.0)))
            rows = torch.ones(2, WIDTH, dtype=torch.float64)
            for _ in range(3):
                driven.walk(1)
                wanted = driven.twin.model(rows).detach()
                with torch.no_grad():
                    same += [torch.allclose(model(rows), wanted, rtol=0, atol=1e-9) for _ in range(2)]
                with driven.engine.full_parameters() as whole:
                    with torch.no_grad():
                        same.append(torch.allclose(model(rows), wanted, rtol=0, atol=1e-9))
                    same += [torch.allclose(whole[name], value, rtol=0, atol=1e-9)
                             for name, value in driven.twin.model.named_parameters()]  # fmt: skip
            found.append([*same, driven.apart() < 1e-9])
            driven.engine.close()
    return found


def test_evaluating_between_steps_and_reading_whole_parameters() -> None:
    for found in run_ranks(looked_at, 3):
        assert [all(same) for same in found] == [True] * 3, found


# ------------------------------------------------------------------------------------------------------------- misuse


class Out(Exception):
    """Of a unit."""


def answer(placement: Placement, mistake: str, zero: int) -> list[str]:
    """What a mistake is answered by, and then a call that waits for all that was begun."""
    with join(placement, 20) as mesh:
        model = MISTAKEN.get(mistake, five_units)()
        driven = Driven(mesh, model, model.units(), ShardingSpec(zero))
        if mistake not in MISTAKEN or "fails" in mistake:
            driven.walk(1, twin=False)
        engine, (batch,) = driven.engine, batches(2, 0)
        engine.begin_step(engine.step + 1, batch.weight, 1e-2, None)

        def blunder() -> None:
            if mistake == "no micro-batch":
                batch.loss_sum(model).backward()
            elif mistake == "backward after it":
                with engine.micro_batch(last=True):
                    loss = batch.loss_sum(model)
                loss.backward()
            elif mistake == "backward in the next":
                with engine.micro_batch(last=False):
                    loss = batch.loss_sum(model)
                with engine.micro_batch(last=True):
                    loss.backward()
            elif mistake == "a second backward":
                with engine.micro_batch(last=True):
                    loss = batch.loss_sum(model)
                    loss.backward(retain_graph=True)
                    loss.backward()
            else:
                with engine.micro_batch(last=True):
                    batch.loss_sum(model).backward()

        said = []
        for call in (blunder, engine._comm_thread.drain):
            try:
                call()
                said.append("nothing")
            except (RuntimeError, Out) as error:
                said.append(str(error))
        return said


class OutOfOrder(Net):
    def forward(self, hidden: torch.Tensor, *extra: bool) -> torch.Tensor:
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return hidden


class Twice(Net):
    def forward(self, hidden: torch.Tensor, *extra: bool) -> torch.Tensor:
        return super().forward(super().forward(hidden))


class Parts(Net):
    """Calls what is in a unit instead of the unit."""

    def forward(self, hidden: torch.Tensor, *extra: bool) -> torch.Tensor:
        for weight in self.blocks[0].parameters():
            hidden = mix(hidden, weight)
        return hidden @ self.own


class Holder:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Hiding(Mix):
    def forward(self, hidden: Any) -> Any:
        return Holder(super().forward(hidden))


class Hides(Net):
    def forward(self, hidden: torch.Tensor, *extra: bool) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](hidden).hidden)


class Failing(Mix):
    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise Out("this unit fails")
        return super().forward(hidden)


class FailsLate(Mix):
    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        self.calls += 1
        if self.calls == 2 and hidden.requires_grad:
            hidden.register_hook(self.fail)
        return hidden

    def fail(self, grad: torch.Tensor) -> None:
        raise Out("its backward pass fails")


MISTAKEN: dict[str, Any] = {
    "out of order": lambda: OutOfOrder([Mix([[3, 4]]) for _ in range(3)]),
    "twice": lambda: Twice([Mix([[3, 4]]) for _ in range(3)]),
    "a part of a unit": lambda: Parts([Mix([[3, 4]]) for _ in range(3)]),
    "hidden": lambda: Hides([Hiding([[3, 4]]), Mix([[3, 4]])]),
    "fails": lambda: Net([Mix([[3, 4]]), Failing([[2]]), Mix([[3, 4]])]),
    "fails late": lambda: Net([Mix([[3, 4]]), FailsLate([[2]]), Mix([[3, 4]])]),
}

LOST = "outside engine.micro_batch"


@pytest.mark.parametrize(
    ("mistake", "zero", "answered"),
    [
        ("no micro-batch", 1, LOST),
        ("no micro-batch", 2, LOST),
        ("no micro-batch", 3, LOST),
        ("backward after it", 1, LOST),
        ("backward after it", 3, LOST),
        ("backward in the next", 3, LOST),
        ("a second backward", 1, "call backward\\(\\) once"),
        ("a second backward", 2, "call backward\\(\\) once"),
        ("a second backward", 3, "call backward\\(\\) once"),
        ("out of order", 3, "blocks.2 was used when it was the turn of blocks.0"),
        ("twice", 3, "blocks.0 was used when it was the turn of none"),
        ("a part of a unit", 1, "call the unit itself"),
        ("hidden", 3, "returned a Holder"),
        ("fails", 1, "this unit fails"),
        ("fails", 3, "this unit fails"),
        ("fails late", 2, "its backward pass fails"),
        ("fails late", 3, "its backward pass fails"),
    ],
)
def test_a_mistake_is_answered_by_a_sentence_and_nothing_hangs(mistake: str, zero: int, answered: str) -> None:
    ((said, then),) = run_ranks(answer, 1, timeout_s=30, mistake=mistake, zero=zero)
    assert pytest.raises(AssertionError, match=answered).matches(AssertionError(said)), said
    assert then in (said, "nothing")


# -------------------------------------------------------------------------------------------------------- a rank fails


def lost(placement: Placement, mistake: str, zero: int) -> list[Any]:
    """Rank 1 fails, or is held up, in its second step: how each rank's loop ends, and what it holds to be the cause."""
    with join(placement, PATIENCE_S) as mesh:
        model = MISTAKEN[mistake]() if placement.rank == 1 else MISTAKEN["sound"]()
        driven = Driven(mesh, model, model.units(), ShardingSpec(zero))
        try:
            driven.walk(6, twin=False)
            ended = "walked on"
        except Out as error:
            ended = str(error)
        except RuntimeError as error:
            ended = str(mesh.roll_call.name_missing_ranks(error))
        driven.engine.close()
    return [ended, [each.name for each in threading.enumerate() if not each.daemon]]


class HeldUp(Failing):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.calls == 1:
            time.sleep(PATIENCE_S + 5)  # until after the others have said who is late
        self.calls += 1
        return Mix.forward(self, hidden)


MISTAKEN["sound"] = lambda: Net([Mix([[3, 4]]), Mix([[2]]), Mix([[3, 4]])])
MISTAKEN["held up"] = lambda: Net([Mix([[3, 4]]), HeldUp([[2]]), Mix([[3, 4]])])


@pytest.mark.parametrize(
    ("mistake", "zero", "said"),
    [
        ("fails", 1, "this unit fails"),
        ("fails late", 3, "its backward pass fails"),
        ("held up", 3, ""),
    ],
)
def test_the_others_end_when_a_rank_does(mistake: str, zero: int, said: str) -> None:
    found = run_ranks(lost, 4, timeout_s=180, mistake=mistake, zero=zero)
    for ended, threads in found:
        assert ended != "walked on"
        assert threads == ["MainThread"], "nothing keeps the process alive"
    if said:
        assert found[1][0] == said
    else:  # the store, which knows who is late, is rank 0's: the others may come when it is gone
        assert re.match(r"ranks? [\d, ]*\b1\b[\d, ]* of 4 did not respond", found[0][0]), found


# ---------------------------------------------------------------------------------------------- a lane that lags behind


def lagging(placement: Placement, zero: int) -> float:
    """A unit that is used in every other step, and that the lane is late to update."""
    with join(placement, 20) as mesh:
        torch.manual_seed(0)
        model = Skipping([Mix([[4, 9]]), Mix([[4, 9]]), Mix([[3, 5]])])
        driven = Driven(mesh, model, model.units(), ShardingSpec(zero))
        engine: Any = driven.engine
        update = engine._update.update_unit

        def late(now: Any, unit: Any) -> None:
            if unit.name == "blocks.2":
                time.sleep(0.05)
            update(now, unit)

        engine._update.update_unit = late
        driven.walk(4, with_last)
        return driven.apart()


class Skipping(Net):
    def forward(self, hidden: torch.Tensor, *extra: bool) -> torch.Tensor:
        for block in self.blocks if extra[0] else self.blocks[:2]:
            hidden = block(hidden @ self.own)
        return hidden


def with_last(step: int, rank: int) -> list[Any]:
    found = batches(step, rank)
    for batch in found:
        batch.extra = (step % 2 == 1,)
    return found


@pytest.mark.parametrize("zero", [1, 2])
def test_a_lane_that_lags_behind_is_waited_for(zero: int) -> None:
    assert max(run_ranks(lagging, 2, zero=zero)) < 1e-9


def given_back(placement: Placement, zero: int) -> list[bool]:
    """Whether anything is left of an engine, its model and their memory when nobody holds them."""
    with join(placement, 20) as mesh:
        model = five_units()
        driven = Driven(mesh, model, model.units(), ShardingSpec(zero))
        driven.walk(2)
        driven.engine.close()
        held = driven.engine._update.trained[0]
        things = [weakref.ref(each) for each in (driven.engine, model, held, held.values, model.blocks[0].weights[0])]
        del driven, model, held
        gc.collect()
        return [thing() is None for thing in things]


@pytest.mark.parametrize("zero", [1, 3])
def test_memory_is_given_back_with_the_model(zero: int) -> None:
    for gone in run_ranks(given_back, 2, zero=zero):
        assert all(gone), gone


def through(placement: Placement, sharding: dict[str, Any]) -> list[list[float]]:
    """When this rank was through with each step, and when it began the first update of each; rank 1 is slow."""
    with join(placement, 20) as mesh:
        model = five_units()
        driven = Driven(mesh, model, model.units(), ShardingSpec(**sharding))
        engine: Any = driven.engine
        advance, update = engine._state.advance, engine._update.update_unit
        ends: list[float] = []
        begins: dict[int, float] = {}

        def late(*arguments: Any) -> None:
            time.sleep(0.1 * mesh.rank)
            advance(*arguments)
            ends.append(time.monotonic())

        def noting(now: Any, *arguments: Any, **more: Any) -> None:
            begins.setdefault(now.number, time.monotonic())
            update(now, *arguments, **more)

        engine._state.advance, engine._update.update_unit = late, noting
        driven.walk(5)
        assert driven.apart() < 1e-9
        engine.close()
        return [ends, [begins[number] for number in sorted(begins)]]


@pytest.mark.parametrize(
    "sharding", [{"zero": 1, "weights": [1.0, 0.0]}, {"zero": 2, "slots": 2, "weights": [3.0, 1.0]}, {"zero": 3}]
)
def test_no_rank_updates_before_all_are_through_with_the_step_before(sharding: dict[str, Any]) -> None:
    (mine, begun), (others, _) = run_ranks(through, 2, sharding=sharding)
    assert len(mine) == len(others) == len(begun) == 5
    assert all(end < begin for end, begin in zip(others, begun[1:], strict=False))


def committed_late(placement: Placement, sharding: dict[str, Any]) -> list[list[float]]:
    """When this rank had committed each step, which goes on beside the next one, and when it began the update of each;
    rank 1 is slow to commit."""
    with join(placement, 20) as mesh:
        driven = Driven(mesh, model := five_units(), model.units(), ShardingSpec(**sharding))
        engine: Any = driven.engine
        update = engine._update.update_unit
        committed: list[float] = []
        begins: dict[int, float] = {}

        class Committing(type(engine._state)):  # type: ignore[misc]
            commits_async = True

        def commit() -> None:
            time.sleep(0.1 * mesh.rank)
            committed.append(time.monotonic())

        def noting(now: Any, *arguments: Any, **more: Any) -> None:
            begins.setdefault(now.number, time.monotonic())
            update(now, *arguments, **more)

        engine._state.__class__ = Committing
        engine._update.barrier._wait_for_commit, engine._update.update_unit = commit, noting
        driven.walk(5)
        assert driven.apart() < 1e-9
        engine.close()
        return [committed, [begins[number] for number in sorted(begins)]]


@pytest.mark.parametrize("sharding", [{"zero": 1}, {"zero": 2, "slots": 2}])
def test_no_rank_updates_before_all_have_committed_the_step_before(sharding: dict[str, Any]) -> None:
    """Or a rank that dies then would leave the others without a step that all have."""
    (_, begun), (late, _) = run_ranks(committed_late, 2, sharding=sharding)
    assert len(begun) == 5 and len(late) >= 4
    assert all(commit < begin for commit, begin in zip(late, begun[1:], strict=False))


def done_again(placement: Placement) -> list[float]:
    """A run whose norm comes to the limit all of a sudden, so that what was gathered early is done again, slowly."""

    def slowly(parameters: KeptParameters, now: Any) -> None:
        parameters._update.queue.flush()
        time.sleep(0.05)  # for who believes that the parameters are there
        known(parameters, now)
        again.append(now.number)

    known, again = KeptParameters.redo, []
    KeptParameters.redo = slowly  # type: ignore[method-assign]
    try:
        with join(placement, 20) as mesh:
            found = []
            for degree, units in cover((1, 2), (1, 5)):
                again.clear()
                torch.manual_seed(0)
                model = Net([Mix([[], [28, 16], [26, 5]]) for _ in range(units)], False)
                driven = Driven(mesh, model, model.units(), ShardingSpec(2, slots=2, degree=degree), CLIP)
                driven.walk(25, lambda step, rank: batches(step, rank, 2))
                found.append(driven.apart())
                driven.engine.close()
                assert again, f"nothing was done again with {units} units, so nothing was tested"
            return found
    finally:
        KeptParameters.redo = known  # type: ignore[method-assign]


def test_nobody_computes_with_what_is_about_to_be_done_again() -> None:
    for found in run_ranks(done_again, 2):
        assert max(found) < 1e-9, found
