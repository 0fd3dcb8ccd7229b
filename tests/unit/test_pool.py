"""Gradient buffers: so many and no more, but never a wait for a lane that itself waits for a gradient."""

import threading

import torch

from phalanx.comm.comm_thread import CommThread, StreamEvent
from phalanx.engine.bucket import GradientBufferPool
from phalanx.layout.memory_model import IN_FLIGHT


def test_more_buffers_are_there_only_while_the_lane_waits_for_one() -> None:
    lane, pool, like = CommThread(torch.device("cpu")), GradientBufferPool(), torch.zeros(1)
    taken = [pool.acquire(like, 64, lane, limited=True) for _ in range(IN_FLIGHT)]
    mark = StreamEvent(lane)
    with pool.report_blocked_thread(mark):
        taken.append(pool.acquire(like, 64, lane, limited=True))
        taken.append(pool.acquire(like, 64, lane, limited=False))
        mark.record()  # the lane has what it waits for, though its thread may be late to notice
        waiting = threading.Thread(target=lambda: taken.append(pool.acquire(like, 64, lane, limited=True)), daemon=True)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
    assert len({buffer.data_ptr() for buffer in taken}) == IN_FLIGHT + 2
    other = pool.acquire(like, 128, lane, limited=True)  # of another size
    assert len(other) == 128
    for buffer in taken[:3]:
        pool.release(buffer, lane)
    waiting.join(10)
    assert not waiting.is_alive()
    assert taken[-1].data_ptr() in {buffer.data_ptr() for buffer in taken[:3]}, "it is used again"
