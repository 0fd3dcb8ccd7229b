"""What a lane measures of its transfers and updates, and the order that is made of it."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from phalanx.comm.collectives import Traffic
from phalanx.comm.comm_thread import CommThread, StreamEvent
from phalanx.engine.schedule import TransferSchedule
from phalanx.engine.sharding_spec import CommSchedules
from phalanx.engine.timing import LinkTimer
from phalanx.layout.comm_schedule import plan_order
from phalanx.layout.comm_simulation import TransferOp
from phalanx.system import event_times

CPU = torch.device("cpu")
RATE, SIZE = 50e6, 1e6  # a transfer takes 20 ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is."""
    now = [0.0]
    monkeypatch.setattr(event_times.time, "perf_counter", lambda: now[0])
    return now


def moved(measured: LinkTimer, clock: list[float], begun: float, ended: float) -> None:
    clock[0] = ended
    measured.record_transfer(SIZE, begun)


def test_what_a_transfer_takes_longer_behind_a_pause_is_the_least_that_was_seen(clock: list[float]) -> None:
    measured = LinkTimer(1, CPU)
    moved(measured, clock, 1.000, 1.024)  # 4 ms longer: nothing was under way
    moved(measured, clock, 1.010, 1.044)  # begun beside the one before
    moved(measured, clock, 2.000, 2.050)  # this rank has waited for another one, too
    assert measured.measure_rate() > 0
    for _ in range(2):
        measured.observe_rates([RATE])
    assert measured.restart_s() == pytest.approx(0.004)


def test_an_order_knows_how_long_updates_take(clock: list[float]) -> None:
    measured = LinkTimer(4, CPU)
    for unit in range(4):
        for seconds in (0.001, 0.003, 0.009):
            begun = measured.record_time()
            clock[0] += seconds
            measured.record_update(unit, begun)
    assert measured.measure_rate() == 0.0  # nothing was moved
    assert measured.update_seconds() == pytest.approx([0.003] * 4)
    for _ in range(2):
        measured.observe_rates([RATE])
    passes_s = [0.013] * 4 + [0.026] * 4
    work, rate = measured.make_timings(passes_s, measured.update_seconds(), 0.004, [(SIZE, SIZE)] * 4, parts=4)
    assert work.update_s == pytest.approx((0.007,) * 4) and rate == pytest.approx(RATE)
    order = plan_order(work)
    at = {(op.kind, op.bucket, op.part): number for number, op in enumerate(order)}
    # The link has something else to do behind the last gradient of a unit; without updates nothing says so.
    assert all(order[at["reduce", unit, 3] + 1].bucket != unit for unit in (2, 1))


def test_the_order_of_a_step_is_asked_for_when_the_lane_may_have_made_another() -> None:
    """By what two ranks of unlike speed have come to alike: the end of the second step before."""
    table, lane = object.__new__(TransferSchedule), CommThread(CPU)
    old, new = (CommSchedules((TransferOp("reduce", 0, part),), (), (), ()) for part in range(2))
    table._orders, table._end_events, table._mesh = {1: old}, {1: StreamEvent(lane)}, SimpleNamespace(traffic=Traffic())  # type: ignore[assignment]
    asked = threading.Event()

    def make() -> None:
        asked.wait()
        time.sleep(0.05)
        table._orders = {1: old, 3: new}
        ended.record()

    ended = table._end_events[1]
    lane.submit(make)
    assert table.orders_for(2) is old
    asked.set()
    assert table.orders_for(3) is new
    lane.close()
