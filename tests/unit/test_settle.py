"""Waiting for the node that holds a replica: nobody is to take that for work, nor for a hang."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from phalanx.checkpoint.memory.interval import Thinning
from phalanx.checkpoint.memory.store import Memory
from phalanx.comm.collectives import Traffic
from phalanx.core.progress_page import Pulse, read

WAIT_S = 0.05


@pytest.mark.parametrize("in_a_lane", [False, True])
def test_who_waits_for_its_replica_neither_works_nor_hangs(in_a_lane: bool) -> None:
    pulse, seen = Pulse(), []
    traffic = Traffic(pulse=pulse)

    def acknowledged() -> None:
        beat = read(bytes(pulse._words), 0, 1, time.monotonic_ns())
        assert beat is not None
        seen.append(beat.waits_for)
        time.sleep(WAIT_S)

    memory = Memory.__new__(Memory)
    memory._lane, memory._settled, memory._last, memory._replicates = None, 4, 5, True
    memory._thinning = Thinning(torch.device("cpu"), wanted=False, unit=None)
    memory._mesh = SimpleNamespace(bookkeeping=traffic)  # type: ignore[assignment]
    memory.replicas = SimpleNamespace(acknowledged=acknowledged)  # type: ignore[assignment]
    if in_a_lane:
        lane = threading.Thread(target=memory.settle)
        lane.start()
        lane.join()
    else:
        memory.settle()
    assert seen == ["" if in_a_lane else "message"]
    assert (traffic.waited_s >= WAIT_S) is not in_a_lane
    memory.settle()
    assert len(seen) == 1, "what is settled is not waited for again"
