"""Waits that no whole run depends on with certainty: each test fails without one line of the package."""

import copy
import threading
import time
from collections import deque
from functools import partial
from typing import Any, cast

import pytest
import torch

from phalanx.comm.collectives import Traffic, all_reduce
from phalanx.comm.comm_thread import CommThread, StreamEvent
from phalanx.comm.mesh import join
from phalanx.core.placement import Placement
from phalanx.engine.bucket import BucketGradient, GradientBufferPool
from phalanx.engine.schedule import CollectiveQueue, Unit
from phalanx.engine.sharded import ShardedEngine
from phalanx.engine.sharded_update import ShardedStepOutcome, ShardedUpdate, StepState
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.engine.timing import DevicePassTimer, HostPassTimer
from phalanx.engine.zero1_2 import KeptParameters
from phalanx.engine.zero3 import GatheredParameters, PassEvents, UnshardedUnit, UnshardedUnits
from phalanx.system import accelerator
from tests.accelerator.device import needs_device, run_on_device
from tests.dist.engine_cases import WIDTH, Driven, Net
from tests.helpers import run_ranks

pytestmark = needs_device
ELEMENTS = 1000


def filled(device: torch.device, value: float) -> torch.Tensor:
    return torch.full((ELEMENTS,), value, device=device)


def memory_of_a_closed_lane(placement: Placement) -> list[float]:
    """What is in memory that a lane had written to, and that was taken again when it was closed."""
    device = torch.device(placement.device)
    lane, target = CommThread(device), filled(device, 1.0)
    lane.wait_current_stream()
    lane.submit(partial(target.fill_, 2.0))
    lane.close()
    target.untyped_storage().resize_(0)
    later = filled(device, 3.0)
    accelerator.synchronize(device)
    return [later.min().item(), later.max().item()]


def test_memory_that_a_closed_lane_used_may_be_taken_at_once() -> None:
    assert run_on_device(memory_of_a_closed_lane, order="lazy") == [[3.0, 3.0]]


def a_mark_that_is_set_again(placement: Placement) -> list[float]:
    """What another stream reads behind a mark, while a thread is about to set that a second time."""
    device = torch.device(placement.device)
    source, mark, seen = filled(device, 1.0), StreamEvent(CommThread(device)), []
    accelerator.synchronize(device)

    class Slow(torch.Event):
        def record(self, stream: torch.Stream | None = None) -> None:
            if mark.is_recorded:
                other = threading.Thread(target=read)
                other.start()
                other.join(10)
            super().record(stream)

    def read() -> None:
        with torch.Stream(device):
            mark.wait()
            seen.append(source.clone())
            accelerator.synchronize_stream(device)

    plain, torch.Event = torch.Event, Slow  # type: ignore[misc]
    source.fill_(2.0)
    mark.record()
    mark.record()
    torch.Event = plain  # type: ignore[misc]
    return [each.min().item() for each in seen]


def test_a_mark_that_is_set_again_is_waited_for_all_the_time() -> None:
    assert run_on_device(a_mark_that_is_set_again, order="lazy") == [[2.0]]


def buffers_of_a_pool(placement: Placement, keeps: bool) -> list[float]:
    """What a lane reads of a buffer that it gave back and that the main thread has filled again since."""
    device = torch.device(placement.device)
    lane, pool = CommThread(device), GradientBufferPool(keeps=keeps)
    like = filled(device, 0.0)
    seen = []

    def send(buffer: torch.Tensor) -> None:
        seen.append(buffer.clone())
        pool.release(buffer, lane)

    for value in (1.0, 2.0, 3.0):
        buffer = pool.acquire(like, ELEMENTS, lane, limited=True)
        buffer.fill_(value)
        lane.wait_current_stream()
        lane.submit(lambda buffer=buffer: send(buffer))  # type: ignore[misc]
        del buffer
        let_go = threading.Event()
        lane.submit(let_go.set)
        assert let_go.wait(10)  # the lane's host is through with the buffer, and its device is not
    lane.drain()
    return [each.min().item() for each in seen]


def test_buffers_are_filled_again_only_when_the_lane_has_read_them() -> None:
    for keeps in (True, False):
        for order in ("lazy", "side_last"):
            assert run_on_device(buffers_of_a_pool, order=order, keeps=keeps) == [[1.0, 2.0, 3.0]], (keeps, order)


def summed_from_a_stream(placement: Placement) -> list[float]:
    """What a group of the host makes of a tensor that a stream beside the main one is still to compute."""
    device = torch.device(placement.device)
    with join(placement, 20) as mesh:
        mine, group = filled(device, 0.0), mesh.shard.get_group()
        accelerator.synchronize(device)
        with torch.Stream(device):
            mine.fill_(1.0 + mesh.rank)
            all_reduce(mine, group, Traffic()).wait()
            seen = mine.clone()
            accelerator.synchronize_stream(device)
        return [seen.min().item(), seen.max().item()]


def test_a_group_of_the_host_reads_what_any_stream_has_computed_and_that_reads_what_came() -> None:
    for order in ("lazy", "side_last", "main_last"):
        assert run_on_device(summed_from_a_stream, 2, order=order, collectives=False) == [[3.0, 3.0]] * 2, order


def behind_the_lane(placement: Placement, what: str) -> list[float]:
    """What the main stream reads of memory that the lane was to write, behind `what` a model's hooks do."""
    device, lane = torch.device(placement.device), CommThread(torch.device(placement.device))
    target, module = filled(device, 1.0), torch.nn.Module()
    units, nothing = [Unit(number, "", module, []) for number in range(2)], cast(ShardedUpdate, None)
    shared = module, units, nothing, lane, Traffic(), DevicePassTimer(2, device)
    kept, released = KeptParameters(*shared), GatheredParameters(*shared)
    released.begin_micro_batch(last=True)
    released._next = 1
    lane.wait_current_stream()
    for number in range(2):
        lane.submit(partial(target.add_, 1.0))
        for mark in (kept.gathered[number], released.events.regathered[number], released.events.gathered[number]):
            lane.submit(mark.record)
    match what:
        case "a state_dict":
            kept.check_state_dict(in_micro_batch=False)
        case "units that are not used":
            kept.wait_for_gathers()
        case "a unit" | "a released unit":
            (released if "released" in what else kept).pre_forward(units[1])
        case "a released unit's way back":
            released.events.regathered = [released.events.regathered[1], released.events.regathered[0]]
            released._pre_backward(units[0], released.events)
    seen = target.clone()
    accelerator.synchronize_stream(device)
    lane.close()
    return [seen.min().item(), seen.max().item()]


NEEDS = ["a state_dict", "units that are not used", "a unit", "a released unit", "a released unit's way back"]


@pytest.mark.parametrize("what", NEEDS)
def test_whoever_needs_parameters_comes_behind_the_lane(what: str) -> None:
    for order in ("lazy", "main_last"):
        assert run_on_device(behind_the_lane, order=order, what=what) == [[3.0, 3.0]], order


def norm_of_the_step_before(placement: Placement) -> list[Any]:
    """Whether units may be updated early, asked while the lane is about to write the norm that says so; and what a
    step came to, likewise."""
    update: Any = object.__new__(ShardedUpdate)
    lane, may = CommThread(torch.device("cpu")), threading.Event()
    update.state, update._last_norm = type("State", (), {"count": 2}), None
    update._mesh, update._previous_agreed = type("Mesh", (), {"traffic": Traffic()}), StreamEvent(lane)
    step = StepState(1, 0.1, None, Weight(), StreamEvent(lane))  # type: ignore[arg-type]

    def agree() -> None:
        may.wait(10)
        update._last_norm = step.norm = 0.25
        update._previous_agreed.record()
        step.agreed.record()

    found: list[Any] = []
    for asked in (lambda: update.may_update_early(1.0), ShardedStepOutcome(step, Traffic()).get):
        lane.submit(agree)
        threading.Timer(0.05, may.set).start()
        found.append(asked())
        lane.drain()
        may.clear()
        update._previous_agreed, step.agreed, step.norm = StreamEvent(lane), StreamEvent(lane), 0.0
    lane.close()
    return found


class Weight:
    """That of a step of seven labels."""

    def get(self) -> int:
        return 7


def test_what_the_lane_agrees_on_is_waited_for_where_it_is_read() -> None:
    assert run_ranks(norm_of_the_step_before, 1) == [[True, [0.25, 0.0]]]


def agreed_and_begun(placement: Placement) -> list[Any]:
    """Whether parameters that were gathered count as there, before and after the ranks have agreed on their step; and
    in which order the lane ends what it was given and a state is taken for that of a step."""
    engine: Any = object.__new__(ShardedEngine)
    lane, may = CommThread(torch.device("cpu")), threading.Event()
    engine._comm_thread, update = lane, type("Update", (), {"queue": CollectiveQueue(None, None, None)})  # type: ignore[arg-type]
    step = StepState(1, 0.1, None, Weight(), StreamEvent(lane))  # type: ignore[arg-type]
    unit, fresh = Unit(0, "", torch.nn.Module(), []), [StreamEvent(lane), StreamEvent(lane)]
    kept = KeptParameters(
        unit.module, [unit], cast(ShardedUpdate, update), lane, Traffic(), HostPassTimer(1, Traffic())
    )
    kept._gather_updated(step, unit, 0, fresh[0])
    step.agreed.record()
    kept._gather_updated(step, unit, 0, fresh[1])
    order: list[str] = []
    state = {"has_state": False, "adopt_state": lambda self, step: order.append(f"step {step}")}
    engine._state = type("State", (), state)()
    lane.submit(lambda: (may.wait(10), order.append("the lane"))[1])
    threading.Timer(0.05, may.set).start()
    engine.resume_after(5)
    lane.close()
    return [[each.is_recorded for each in fresh], step.pending_gathered == fresh[:1], order]


def test_parameters_count_as_there_when_the_ranks_have_agreed_and_a_state_when_the_lane_is_through() -> None:
    assert run_ranks(agreed_and_begun, 1) == [[[False, True], True, ["the lane", "step 5"]]]


def released_behind(placement: Placement, number: int, arrived: bool) -> bool:
    """Whether a unit's parameters are let go of behind its backward pass, which is late, whatever is sent then."""
    lane, done, model = CommThread(torch.device("cpu")), [], torch.nn.Module()
    unit: Any = type("Unit", (), {"number": number, "module": torch.nn.Module(), "buckets": []})()
    unit.buckets = [type("RankBucket", (), {"reshard": lambda self: done.append(number)})()]
    update: Any = type("Update", (), {"queue": CollectiveQueue(None, None, None)})  # type: ignore[arg-type]
    unsharded = UnshardedUnits(model, [unit, unit], update)
    marks, there, gradient = PassEvents(3, lane, True), StreamEvent(lane), BucketGradient(True, None, StreamEvent(lane))
    unsharded._units = deque([UnshardedUnit(unit, marks.backward_done[number], there)])
    if arrived:
        there.record()

    def backward() -> None:
        if number == 0:  # of which nothing but its gradient tells the end
            marks.backward_done[number].record()
        gradient.ready.record()
        time.sleep(0.05)
        marks.backward_done[number].record()

    lane.submit(partial(unsharded.reshard_after_backward, unit, gradient, marks))
    threading.Timer(0.05, backward).start()
    lane.drain()
    lane.close()
    return done == [number]


@pytest.mark.parametrize(("number", "arrived"), [(0, True), (1, True), (1, False)])
def test_parameters_are_let_go_of_behind_a_backward_pass_where_they_have_arrived(number: int, arrived: bool) -> None:
    assert run_ranks(released_behind, 1, number=number, arrived=arrived) == [arrived]


def between_steps(placement: Placement, what: str) -> list[str]:
    """In which order the lane ends what it was given and the state is read, or written."""
    lane, may, order = CommThread(torch.device("cpu")), threading.Event(), list[str]()
    engine: Any = object.__new__(ShardedEngine)
    engine._comm_thread, engine.model = lane, torch.nn.Linear(1, 1)
    shards = {name: staticmethod(lambda *args: order.append("read") or iter(())) for name in ("pieces", "load")}
    engine._state = type("State", (), {"source": {}, "shards": type("Shards", (), shards)})
    update: Any = object.__new__(ShardedUpdate)
    update.queue, update._comm_thread = CollectiveQueue(None, None, None), lane  # type: ignore[arg-type]
    shared = engine.model, [], update, lane, Traffic(), HostPassTimer(0, Traffic())
    engine._parameters = KeptParameters(*shared)
    lane.submit(lambda: (may.wait(10), order.append("the lane"))[1])
    threading.Timer(0.05, may.set).start()
    match what:
        case "full_parameters":
            with engine.full_parameters():
                order.append("read")
        case "pieces":
            list(engine.pieces(replicas=True))
        case "load":
            engine.load(lambda *args: None)
        case "masters":
            engine._parameters.publish_masters()
            order.append("read")
    lane.close()
    return order


@pytest.mark.parametrize("what", ["full_parameters", "pieces", "load", "masters"])
def test_what_is_read_or_written_between_steps_comes_behind_the_lane(what: str) -> None:
    assert run_ranks(between_steps, 1, what=what) == [["the lane", "read"]]


def released_between_steps(placement: Placement, what: str) -> float:
    """How far what is read of an engine that releases its parameters is from what it should be: the main stream is
    late, and the lane is not."""
    torch.manual_seed(0)
    model = Net([torch.nn.Linear(WIDTH, WIDTH).double() for _ in range(4)], own=False)
    twin = copy.deepcopy(model)
    with join(placement, 20) as mesh:
        engine = Driven(mesh, model, model.units(), ShardingSpec(3), meta=True).engine
        device = mesh.device
        rows = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH)
        there = rows.to(device)
        if what == "full_parameters":
            with engine.full_parameters() as whole:
                seen = {name: values + 0 for name, values in whole.items()}
            with torch.no_grad():
                model(there)  # the lane uses the memory again
            return max(float((seen[name].cpu() - values).abs().max()) for name, values in twin.named_parameters())
        with torch.no_grad():
            for values in twin.parameters():
                values *= 2
        twice = {name: values.detach().to(device).flatten() for name, values in twin.named_parameters()}
        engine.load(
            lambda name, kind, start, stop, out: out.copy_(twice[name][start:stop]) if kind == "param" else out.zero_()
        )
        with torch.no_grad():
            return float((model(there).cpu() - twin(rows)).abs().max())


@pytest.mark.parametrize("what", ["full_parameters", "load"])
def test_the_lane_comes_behind_what_is_read_and_written_of_released_parameters(what: str) -> None:
    assert run_on_device(released_between_steps, order="main_last", what=what) == [pytest.approx(0, abs=1e-12)]
