"""What is measured on a device has been done when the clock is read."""

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from phalanx.autotune import activations, link_speed, probe_model
from phalanx.comm.mesh import join
from phalanx.config import load, resolve
from phalanx.config.model_spec import build_model_spec
from phalanx.core.placement import Placement
from phalanx.health import burn_in
from phalanx.system.event_times import EventTimes, record_time, seconds_between
from phalanx.trainer import profile
from phalanx.workload.workload import make_workload
from tests.accelerator.device import needs_device, run_on_device
from tests.numerics import runs

pytestmark = needs_device
NOTHING = burn_in.BurnInResult(0, "here", "sim:0", "simulated")


def waiting() -> int:
    """Tasks that the device has been given and has not done."""
    from tests.accelerator import torch_sim

    return sum(torch_sim.pending().values())


def when_read(module: Any, work: Callable[[], object], look: Callable[[], Any] = waiting) -> list[Any]:
    """What is `waiting`, or what else one looks at, each time that a module reads the clock."""
    found, inner = [], time.perf_counter

    def noted() -> float:
        if sys._getframe(1).f_globals["__name__"] == module.__name__:
            found.append(look())
        return inner()

    time.perf_counter = noted
    try:
        work()
    finally:
        time.perf_counter = inner
    return found


def within(placement: Placement) -> list[int]:
    device = torch.device(placement.device)
    source, target = torch.zeros(1000, device=device), torch.empty(1000, device=device)
    return when_read(link_speed, lambda: link_speed.measure_copy_rate(source, target, device))


def multiplied(placement: Placement) -> list[int]:
    burn_in.SIZE = 32
    return when_read(burn_in, lambda: burn_in.check_products(NOTHING, torch.device(placement.device), 0.0))


def passes(placement: Placement, of: str) -> list[int]:
    """Those of a small model, all of whose work is queued when they begin."""
    tree = runs.RECIPE | {"train": {"dtype": "fp32", "micro_batch": 4}}
    config, _ = resolve.resolve_autos(load.build_config(tree, "a recipe"), device="cpu", world=1)
    with (
        join(placement, 20) as mesh,
        probe_model.open_probe_model(config, make_workload(config, build_model_spec(config)), mesh, None) as small,
    ):
        if of == "steps":
            return when_read(probe_model, lambda: small.measure_seconds(2))
        return when_read(activations, lambda: activations.time_forward(small))


def reduced(placement: Placement) -> list[Any]:
    """And whether what was begun is over."""
    begun, inner = [], link_speed.all_reduce

    def noted(*args: Any) -> Any:
        begun.append(inner(*args))
        return begun[-1]

    def look() -> list[Any]:
        return [waiting(), [all(work is None or work.is_completed() for work in each._works) for each in begun]]

    link_speed.all_reduce = noted
    with join(placement, 20) as mesh:
        return when_read(link_speed, lambda: link_speed._time_all_reduce(mesh, 4_000_000), look)


def exchanged(placement: Placement) -> list[int]:
    """Between two ranks whose group is one of the host."""
    burn_in.PAIR_BYTES, burn_in.measure_link = 4000, lambda mesh: (None, None)
    with join(placement, 20) as mesh:
        return when_read(burn_in, lambda: burn_in.time_exchanges(NOTHING, mesh))


def profiled(placement: Placement) -> list[int]:
    """What waits when the profiler stops."""
    with join(placement, 20) as mesh:
        trace: Any = profile.TraceCapture(1, 1, profile.CaptureContext(None, mesh, None))  # type: ignore[arg-type]
        inner, found = trace._profiler, []
        inner.start()
        torch.zeros(1000, device=mesh.device).add_(1)

        class Stopped(Exception):
            pass

        def stop() -> None:
            found.append(waiting())
            inner.stop()
            raise Stopped

        trace._profiler = type("Profiler", (), {"stop": staticmethod(stop)})
        with pytest.raises(Stopped):
            trace.finish(1, True)
        return found


def test_a_copy_is_over() -> None:
    (found,) = run_on_device(within)
    assert found[1::2] == [0] * 4
    assert found[0] > 0  # it can be seen


def test_products_are_there() -> None:
    (found,) = run_on_device(multiplied)
    begun, _, over = found[:3]
    assert (begun, over) == (0, 0)
    assert max(found) > 0


def test_a_step_begins_with_nothing_to_do_and_is_over() -> None:
    (found,) = run_on_device(passes, of="steps")
    assert found == [0, 0]


def test_a_forward_pass_is_over() -> None:
    (found,) = run_on_device(passes, of="forward")
    assert len(found) == 2 * (activations.PASSES + 1)
    assert found[1:] == [0] * (len(found) - 1)


def test_an_all_reduce_begins_with_nothing_to_do_and_is_over() -> None:
    for found in (*run_on_device(reduced), *run_on_device(reduced, 2, collectives=False)):
        assert found == [[0, []], [0, [True]]]


def test_what_two_ranks_exchange_has_arrived() -> None:
    for found in run_on_device(exchanged, 2, collectives=False):
        assert found[1::2] == [0] * burn_in.TRIES


def test_a_profile_has_all_kernels() -> None:
    assert run_on_device(profiled) == [[0]]


def between(placement: Placement) -> list[Any]:
    """The time between two marks of which the device has passed none."""
    device = torch.device(placement.device)
    clock = EventTimes(device)
    first = clock.record()
    torch.zeros(1000, device=device).add_(1)
    last = clock.record()
    found = [waiting() > 0, seconds_between(first, last) >= 0, waiting()]
    begun = record_time(device)
    torch.zeros(1000, device=device).add_(1)
    return [*found, seconds_between(begun, record_time(device)) >= 0, waiting()]


def test_the_time_between_two_marks_is_asked_for_behind_both() -> None:
    assert run_on_device(between) == [[True, True, 0, True, 0]]
