"""Waiting for the node that holds a replica: nobody is to take that for work, nor for a hang."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from phalanx.checkpoint.memory.interval import SlotRotation, SnapshotInterval
from phalanx.checkpoint.memory.replication import Replication
from phalanx.checkpoint.memory.store import SharedMemoryStore
from phalanx.comm.collectives import Traffic
from phalanx.core.progress_page import ProgressPage, read_progress

WAIT_S = 0.05


@pytest.mark.parametrize("in_a_lane", [False, True])
def test_who_waits_for_its_replica_neither_works_nor_hangs(in_a_lane: bool) -> None:
    pulse, seen = ProgressPage(), []
    traffic = Traffic(progress_page=pulse)

    def acknowledged() -> None:
        beat = read_progress(bytes(pulse._words), 0, 1, time.monotonic_ns())
        assert beat is not None
        seen.append(beat.waits_for)
        time.sleep(WAIT_S)

    memory = SharedMemoryStore.__new__(SharedMemoryStore)
    memory._comm_thread, memory._confirmed_step, memory._last_step = None, 4, 5
    memory._interval = SnapshotInterval(torch.device("cpu"), wanted=False, unit=None)
    client, mesh = SimpleNamespace(wait_for_ack=acknowledged), SimpleNamespace(bookkeeping=traffic)
    memory._replication = Replication(client, mesh, "auto", SlotRotation(None), None, print)  # type: ignore[arg-type]
    memory._replication.active = True
    if in_a_lane:
        lane = threading.Thread(target=memory.wait_for_commit)
        lane.start()
        lane.join()
    else:
        memory.wait_for_commit()
    assert seen == ["" if in_a_lane else "message"]
    assert (traffic.total_wait_s >= WAIT_S) is not in_a_lane
    memory.wait_for_commit()
    assert len(seen) == 1, "what is settled is not waited for again"
