"""The lane: in order, without gradients, and whatever ends it reaches everybody who waits for it or gives it work."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from phalanx.comm import comm_thread as lane_module
from phalanx.comm.collectives import Traffic
from phalanx.comm.comm_thread import CommThread, StreamEvent
from phalanx.engine.schedule import CollectiveQueue
from tests.helpers import wait_until

CPU = torch.device("cpu")


@pytest.fixture
def lane() -> Iterator[CommThread]:
    made = CommThread(CPU)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "POLL_S", 0.01)


def fail() -> None:
    raise ValueError("the task failed")


def test_tasks_run_one_after_the_other_in_order_in_a_thread_of_its_own(lane: CommThread) -> None:
    done: list[int] = []
    threads: set[int] = set()
    grads: set[bool] = set()
    may_begin = threading.Event()

    def task(number: int) -> Callable[[], None]:
        def run() -> None:
            may_begin.wait(10)
            done.append(number)
            threads.add(threading.get_ident())
            grads.add(torch.is_grad_enabled())

        return run

    for number in range(20):
        lane.submit(task(number))
    assert done == []
    may_begin.set()
    lane.drain()
    assert done == list(range(20))
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert grads == {False}


def test_no_thread_is_started_before_there_is_work() -> None:
    before = threading.active_count()
    lane = CommThread(CPU)
    lane.drain()
    lane.raise_error()
    lane.close()
    assert threading.active_count() == before


def test_drain_waits_for_the_task_that_runs(lane: CommThread) -> None:
    begun, may_end, ended, drained = (threading.Event() for _ in range(4))

    def task() -> None:
        begun.set()
        may_end.wait(10)
        ended.set()

    lane.submit(task)
    begun.wait(10)

    def drain() -> None:
        lane.drain()
        assert ended.is_set()
        drained.set()

    waiting = threading.Thread(target=drain, daemon=True)
    waiting.start()
    assert not drained.is_set()
    may_end.set()
    waiting.join(10)
    assert drained.is_set()


def test_an_error_reaches_whoever_waits_drains_or_puts(lane: CommThread) -> None:
    never, after = StreamEvent(lane), StreamEvent(lane)
    may_fail = threading.Event()
    found: list[str] = []

    def wait_for_it() -> None:
        try:
            never.wait()
        except ValueError as error:
            found.append(str(error))

    waiting = threading.Thread(target=wait_for_it, daemon=True)
    waiting.start()
    lane.submit(lambda: wait_until(may_fail.is_set))
    lane.submit(fail)
    lane.submit(never.record)
    may_fail.set()
    waiting.join(10)
    assert found == ["the task failed"]
    assert not never.is_recorded, "nothing is run behind what failed"
    for call in (lane.drain, lane.raise_error, lambda: lane.submit(after.record), never.wait, after.wait):
        with pytest.raises(ValueError, match="the task failed"):
            call()


def test_a_mark_that_was_reached_before_the_error_still_tells_of_it(lane: CommThread) -> None:
    mark = StreamEvent(lane)
    lane.submit(mark.record)
    lane.submit(fail)
    wait_until(lambda: lane.error is not None)
    assert mark.is_recorded
    with pytest.raises(ValueError, match="the task failed"):
        mark.wait()


def test_a_mark_joins_the_threads_and_counts_the_wait(lane: CommThread) -> None:
    mark, may_set = StreamEvent(lane), threading.Event()
    traffic, values = Traffic(), []

    def task() -> None:
        may_set.wait(10)
        values.append(1)
        mark.record()

    lane.submit(task)
    threading.Timer(0.02, may_set.set).start()
    mark.wait(traffic)
    assert values == [1]
    assert traffic.take().wait_s > 0
    mark.wait(traffic)
    assert traffic.take().wait_s == 0, "who comes later does not wait"


def test_the_lane_waits_for_the_main_thread(lane: CommThread) -> None:
    ready, seen = StreamEvent(lane), []

    def task() -> None:
        ready.wait()
        seen.append(True)

    lane.submit(task)
    assert seen == []
    ready.record()
    lane.drain()
    assert seen == [True]


def test_the_main_thread_takes_its_turn_when_the_lane_waits_for_it(lane: CommThread) -> None:
    """Whatever the threads' luck, all that the first mark lets the lane do comes before what the main thread does."""
    for _ in range(200):
        first, second, order = StreamEvent(lane), StreamEvent(lane), []
        lane.submit(first.wait)
        lane.submit(lambda order=order: order.append("lane"))
        lane.submit(second.wait)
        lane.submit(lambda order=order: order.append("lane, later"))
        lane.wait_until_idle()  # at once: it waits for the first mark
        first.record()
        lane.wait_until_idle()
        order.append("main")
        second.record()
        lane.drain()
        assert order == ["lane", "main", "lane, later"]


def test_a_lane_rests_while_others_need_the_main_thread_and_when_it_has_ended(lane: CommThread) -> None:
    over = threading.Event()

    def task() -> None:
        with lane.declare_wait(lambda: False):
            over.wait(10)

    lane.submit(task)
    lane.wait_until_idle()
    assert not over.is_set()
    over.set()
    lane.drain()
    lane.submit(fail)
    with pytest.raises(ValueError, match="the task failed"):
        lane.wait_until_idle()


def test_a_closed_lane_ends_its_thread_behind_what_it_was_given(lane: CommThread) -> None:
    done = []
    lane.submit(lambda: done.append(1))
    lane.close()
    assert lane._thread is not None
    lane._thread.join(10)
    assert not lane._thread.is_alive()
    assert done == [1]
    with pytest.raises(AssertionError, match="closed"):
        lane.submit(lambda: None)


class Sent:
    """A transfer that is over."""

    def wait(self) -> None:
        pass


def test_what_is_under_way_is_finished_before_the_lane_waits_for_the_main_thread(lane: CommThread) -> None:
    """Which may itself wait for that, before it reaches the mark."""
    carrier, mark, arrived = CollectiveQueue(None, None, None), StreamEvent(lane), threading.Event()  # type: ignore[arg-type]
    carrier._under_way = (Sent(), arrived.set)
    lane.submit(lambda: carrier.wait(mark))
    assert arrived.wait(10)
    mark.record()
    lane.drain()
    carrier._under_way = (Sent(), arrived.clear)
    lane.submit(lambda: carrier.wait(mark))  # which is reached: the next transfer is begun before this one is finished
    lane.drain()
    assert arrived.is_set()
