"""Devices send in an order that is made of what they have taken themselves, not of the host's calls."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.placement import Placement
from phalanx.engine import schedule
from phalanx.engine.timing import LEAST_S, DevicePassTimer
from phalanx.layout.comm_schedule import StepTimings
from tests.accelerator.curves import References, _arguments, _outcome, assert_near
from tests.accelerator.device import needs_device, run_on_device
from tests.numerics import runs

pytestmark = needs_device


def trained(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> int:
    """`runs.train`, of which each order that follows the first guess is noted."""
    inner, works = schedule.plan_schedules, []

    def noting(work: StepTimings, *others: Any) -> Any:
        works.append(work)
        return inner(work, *others)

    schedule.plan_schedules = noting  # type: ignore[assignment]
    assert runs.train(placement, run, data, changes) == 0
    guess, *measured = works
    assert guess.forward_s[-1] >= 1  # elements
    assert measured, "no order was made of what was measured"
    for work in measured:
        for seconds in (*work.forward_s[1:], *work.backward_s[1:]):
            assert LEAST_S < seconds < 5, work
        assert 0 < sum(work.reduce_s) < 5, work  # here they may be as short as any
        assert changes["parallel.zero"] == 3 or max(work.update_s) > LEAST_S, work
    return 0


@pytest.mark.parametrize("sharded", [{"parallel__zero": 3}, {"parallel__zero": 1, "optim__double_buffer": True}])
def test_orders_are_made_of_the_times_of_devices(
    sharded: dict[str, Any], references: References, tokens: Path, tmp_path: Path
) -> None:
    changes = {"parallel__engine": "sharded", "train__steps": 6, "optim__decay_steps": 6} | sharded
    arguments = _arguments(tmp_path, tokens, changes)
    found = _outcome(run_on_device(trained, 2, order="threads", timeout_s=240, **arguments), tmp_path)
    alone = {key: value for key, value in changes.items() if not key.startswith("parallel")}
    assert_near(found, references.of(1, *(alone | {"parallel__engine": "single"}).items()), 2e-7)


def laps(placement: Placement) -> list[float]:
    """Seconds of a pass that waits for a long kernel of another stream, then runs a short one; and of the long one."""
    device = torch.device(placement.device)
    side, matrix = torch.Stream(device), torch.ones(1200, 1200, device=device)
    timed, long = DevicePassTimer(1, device), DevicePassTimer(1, device)
    torch.accelerator.synchronize()
    timed.start()
    with side:
        long.start()
        for _ in range(3):
            matrix @ matrix
        long.end_forward(0)
        there = torch.Event(device)
        there.record()
    torch.accelerator.current_stream(device).wait_event(there)
    timed.exclude_wait()
    matrix[:10] @ matrix
    timed.end_forward(0)
    behind = timed.median_seconds()  # of what the device has still to do nothing is known, and nobody waits for it
    torch.accelerator.synchronize()
    return [behind[0], timed.median_seconds()[0], long.median_seconds()[0]]


@pytest.mark.parametrize("order", ["threads", "lazy"])
def test_a_pass_is_timed_from_where_the_device_has_waited_for_others(order: str) -> None:
    ((behind, short, long),) = run_on_device(laps, order=order)
    assert behind == LEAST_S
    assert LEAST_S < short < long / 3
