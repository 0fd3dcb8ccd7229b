"""Burn-in test of a device: reproducible matrix products, intact memory, and the speed of compute, copies and
collectives.

Every rank tests its own device, all at the same time, as in training. A rank writes its results to its file after each
part, so that a timeout shows which device did not answer.
"""

import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from phalanx.autotune.link_speed import measure_copy_rate, measure_host_to_device, measure_link
from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Mesh, join
from phalanx.comm.p2p import P2PChannel
from phalanx.core import placement
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode, Placement
from phalanx.system import accelerator

SIZE, SIZE_ON_HOST = 8192, 512  # matrix sizes that keep a device busy
ROWS = 4  # rows of the product that the host computes too, in float64
CHUNK_BYTES = 2**28
MEMORY_SHARE = 0.5  # share of an accelerator's free memory that is filled and read again
COPY_BYTES = 2**28
PAIR_BYTES, PAIR_BYTES_ON_HOST = 2**26, 2**22
TRIES = 3
TIMEOUT_S = 120.0  # of a collective


@dataclass(frozen=True)
class BurnInResult:
    """Results of one rank; None for parts it has not reached."""

    rank: int
    host: str
    device: str
    model: str
    products: int | None = None  # how many were computed
    wrong: int | None = None  # products whose bits differ from the first
    checksum: int | None = None  # checksum of the first product's bits
    off: float | None = None  # greatest error of the first product against float64, relative to the greatest element
    tolerance: float | None = None  # of `off`, in this type
    flops_per_s: float | None = None
    memory_bytes: int | None = None  # bytes filled and read again
    memory_wrong: int | None = None  # words that had changed
    copied_bytes_per_s: float | None = None  # within the device's memory
    host_bytes_per_s: float | None = None  # from the host to the device
    all_reduce_bytes_per_s: float | None = None
    pairs: tuple[tuple[int, float], ...] = ()  # other rank, bytes per second in each direction


def _as_it_is(product: torch.Tensor, number: int) -> None:
    return None


def run_burn_in(
    seconds: float, folder: Path, placement: Placement, corrupt: Callable[[torch.Tensor, int], None] = _as_it_is
) -> int:
    """Test this rank's device and write rank-N.json into `folder`. `corrupt` may change a product, for tests."""
    device = torch.device(placement.device)
    accelerator.set_device(device, accelerator.threads_per_rank(placement.threads, placement.local_world))
    found = BurnInResult(placement.rank, socket.gethostname(), placement.device, accelerator.get_device_name(device))

    def keep() -> None:
        write_atomic(folder / f"rank-{placement.rank}.json", json.dumps(asdict(found)))

    keep()
    found = check_products(found, device, seconds, corrupt)
    keep()
    found = check_memory(found, device)
    keep()
    if placement.world > 1:
        with join(placement, TIMEOUT_S) as mesh:
            found = time_exchanges(found, mesh)
            keep()
    return ExitCode.DONE


def check_products(
    result: BurnInResult, device: torch.device, seconds: float, corrupt: Callable[[torch.Tensor, int], None] = _as_it_is
) -> BurnInResult:
    """Multiply the same two matrices for the given seconds, and compare the bits of each product with those of the
    first."""
    size = SIZE_ON_HOST if device.type == "cpu" else SIZE
    dtype = accelerator.best_dtype(device)
    whole = torch.int32 if dtype.itemsize == 4 else torch.int16
    random = torch.Generator().manual_seed(20)
    on_host = [torch.randn(size, size, generator=random, dtype=torch.float32).to(dtype) for _ in range(2)]
    left, right = (matrix.to(device) for matrix in on_host)
    first, again = torch.empty_like(left), torch.empty_like(left)
    torch.matmul(left, right, out=first)
    corrupt(first, 0)
    bits, wrong = first.view(whole), torch.zeros((), dtype=torch.int64, device=device)
    exact = on_host[0][:ROWS].double() @ on_host[1].double()
    # This waits for all queued work, so that the measurement starts on an idle device.
    off = float((first[:ROWS].cpu().double() - exact).abs().max() / exact.abs().max())
    begun, count, computed_s = time.perf_counter(), 0, 0.0
    while count == 0 or time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        torch.matmul(left, right, out=again)
        accelerator.synchronize(device)
        computed_s += time.perf_counter() - started
        count += 1
        corrupt(again, count)
        wrong += (again.view(whole) != bits).any()
    return replace(
        result,
        products=count,
        wrong=int(wrong),
        checksum=int(bits.to(torch.int64).sum()),
        off=off,
        tolerance=max(8 * torch.finfo(dtype).eps, 1e-5),
        flops_per_s=2.0 * size**3 * count / computed_s,
    )


def check_memory(result: BurnInResult, device: torch.device) -> BurnInResult:
    """Fill memory with a pattern without repetition, read it again, and time copies."""
    room = CHUNK_BYTES if device.type == "cpu" else int(MEMORY_SHARE * accelerator.memory_free(device, 1))
    count = max(1, room // CHUNK_BYTES)
    chunk = min(room, CHUNK_BYTES) // 4
    filled = [torch.arange(chunk, dtype=torch.int32, device=device).mul_(2654435 + 2 * at) for at in range(count)]
    wrong = 0
    for at, given in enumerate(filled):
        wanted = torch.arange(chunk, dtype=torch.int32, device=device).mul_(2654435 + 2 * at)
        wrong += int((given != wanted).sum())
    filled.clear()
    source = torch.zeros(COPY_BYTES // (8 if device.type == "cpu" else 1), dtype=torch.uint8, device=device)
    return replace(
        result,
        memory_bytes=count * chunk * 4,
        memory_wrong=wrong,
        copied_bytes_per_s=measure_copy_rate(source, torch.empty_like(source), device),
        host_bytes_per_s=measure_host_to_device(device),
    )


def time_exchanges(result: BurnInResult, mesh: Mesh) -> BurnInResult:
    """Time an all-reduce over all ranks, and exchanges of each pair of ranks while the other pairs exchange too.
    Collective."""
    link, _ = measure_link(mesh)
    size = PAIR_BYTES_ON_HOST if mesh.devices.on_host else PAIR_BYTES
    letters = P2PChannel(mesh.shard.get_group(), mesh.device, Traffic(), max_in_flight=1)
    tensor = torch.zeros(size, dtype=torch.uint8, device=mesh.device)
    pairs = []
    for other in placement.round_robin_partners(mesh.rank, mesh.world):
        best_s = float("inf")
        for _ in range(TRIES):
            mesh.sum([0.0])  # all begin together
            begun = time.perf_counter()
            if other is not None:
                letters.exchange(tensor, other)
                accelerator.synchronize(mesh.device)
            best_s = min(best_s, time.perf_counter() - begun)
        if other is not None:
            pairs.append((other, size / best_s))
    letters.close()
    return replace(
        result, all_reduce_bytes_per_s=None if link is None else link.bytes_per_s, pairs=tuple(sorted(pairs))
    )
