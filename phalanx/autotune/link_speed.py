"""Measure the link: all-reduces of all ranks, idle and while computing; and copies between device and host."""

import statistics
import threading
import time

import torch

from phalanx.comm.collectives import Traffic, all_reduce
from phalanx.comm.mesh import Mesh
from phalanx.layout.hardware import MeasuredLink
from phalanx.system import accelerator

LINK_BYTES = 2**20
LATENCIES, LATENCIES_S = 7, 1.0  # how often the latency is measured while ranks compute, and for how long
MATRIX = 192  # rows of what a rank multiplies meanwhile
COPY_BYTES = 64 * 2**20
LINK_S = 0.1  # a slow link is not given more to carry than it does in this time


def measure_link(mesh: Mesh) -> tuple[MeasuredLink | None, float | None]:
    """Of all-reduces over all ranks, among which gradients travel; and this rank's processor seconds for each byte that
    it sends in them, and gets. None of one rank."""
    if mesh.world == 1:
        return None, None
    _time_all_reduce(mesh, 1)  # connections are made at the first
    latency_s = min(_time_all_reduce(mesh, 1)[0] for _ in range(5))
    size = LINK_BYTES
    tried = [_time_all_reduce(mesh, size)]
    while size < 32 * LINK_BYTES and min(tried)[0] * 4 < LINK_S:
        size *= 4
        tried = [_time_all_reduce(mesh, size) for _ in range(2)]
    sent = 2.0 * size * (mesh.world - 1) / mesh.world  # round a ring (Thakur et al. 2005)
    return MeasuredLink(size / min(tried)[0], latency_s, _busy_latency_s(mesh)), max(
        1e-12, min(processor_s for _, processor_s in tried) / sent
    )


def _computes_itself(mesh: Mesh) -> bool:
    """Whether it is this rank's processor that computes, and carries what travels."""
    return mesh.device.type == "cpu"


def _busy_latency_s(mesh: Mesh) -> float | None:
    """Seconds of an all-reduce of one number, on the average, while each CPU computes in another thread; None where
    there are accelerators alone. The mean, not the minimum: each part of a transfer waits for the slowest rank.
    """
    if not mesh.max([float(_computes_itself(mesh))])[0]:  # all ranks take part, or CPUs would wait for accelerators
        return None
    over = threading.Event()

    def compute() -> None:
        matrix = torch.ones(MATRIX, MATRIX)
        while not over.is_set():
            torch.mm(matrix, matrix)

    thread = threading.Thread(target=compute)
    if _computes_itself(mesh):
        thread.start()
    try:
        taken: list[float] = []
        while len(taken) < LATENCIES and sum(taken) < LATENCIES_S:  # the same on all ranks, as what it took is
            taken.append(_time_all_reduce(mesh, 1)[0])
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
    return statistics.fmean(taken)


def _time_all_reduce(mesh: Mesh, size_bytes: int) -> tuple[float, float]:
    """Seconds of an all-reduce of so many bytes on the rank that waited longest, the same on all; and processor seconds
    of all threads of this process meanwhile."""
    tensor = torch.zeros(max(1, size_bytes // 4), dtype=torch.float32, device=mesh.device)
    accelerator.synchronize(mesh.device)
    mesh.sum([0.0])
    begun, processor = time.perf_counter(), time.process_time()
    all_reduce(tensor, mesh.shard.get_group(), Traffic()).wait()
    accelerator.synchronize(mesh.device)
    processor_s = time.process_time() - processor
    return mesh.max([time.perf_counter() - begun])[0], processor_s


def measure_host_to_device(device: torch.device) -> float | None:
    """Bytes per second of copies from the host's pinned memory; None for a CPU."""
    if device.type == "cpu":
        return None
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8).pin_memory()
    return measure_copy_rate(here, there, device)


def measure_copy_rate(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    """Bytes per second at which the first is copied into the second, one of which is on `device`: the fastest of
    four."""
    best = float("inf")
    for _ in range(4):  # the first of them may come behind what was queued before
        begun = time.perf_counter()
        target.copy_(source)
        accelerator.synchronize(device)  # a copy within the device does not hold the host
        best = min(best, time.perf_counter() - begun)
    return source.nbytes / best
