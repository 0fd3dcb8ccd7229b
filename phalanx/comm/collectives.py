"""Collectives, in a thin wrapper that checks arguments, counts bytes and measures waits.

gloo returns wrong values, without an error, for non-contiguous tensors in some collectives: here that is an assertion.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from phalanx.core.progress_page import ProgressPage
from phalanx.system.trace import phase

# torch 2.13 renamed them.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Transfers = Sequence[tuple[torch.Tensor, int]]  # tensors and the ranks that they go to or come from


@dataclass
class Traffic:
    """This rank's collective traffic since the last `take`. Threads may share one."""

    calls: int = 0
    # Of the collectives here: bytes of the tensors handed over, not of what the algorithm sends. Of a transfer of
    # shards (`uneven_collectives.py`): the part of the tensor that is not this rank's own, (1 - s)B, which is what a
    # rank must send to have it summed elsewhere, and receive to have the whole.
    payload_bytes: int = 0
    wait_s: float = 0.0  # time the host was held up
    total_wait_s: float = 0.0  # the same since the beginning: `take` leaves it
    progress_page: ProgressPage | None = field(
        default=None, repr=False, compare=False
    )  # is told what the main thread waits for
    # Called before the main thread starts a collective of the device, where another one starts some, too.
    before_device_collective: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def report_wait(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Surrounds a wait for something of pulse.WAITS."""
        return contextlib.nullcontext() if self.progress_page is None else self.progress_page.waiting_for(what)

    def await_turn(self, tensor: torch.Tensor) -> None:
        """To be called before a collective of this tensor is started."""
        if self.before_device_collective is not None and tensor.device.type != "cpu":
            self.before_device_collective()

    def count(self, payload_bytes: int) -> None:
        """Count one call."""
        with self._lock:
            self.calls += 1
            self.payload_bytes += payload_bytes

    def add(self, other: "Traffic") -> None:
        """Count what another has counted, but for its waits."""
        with self._lock:
            self.calls += other.calls
            self.payload_bytes += other.payload_bytes

    def add_wait(self, seconds: float) -> None:
        """Count a wait of the host."""
        with self._lock:
            self.wait_s += seconds
            self.total_wait_s += seconds

    def take(self) -> "Traffic":
        """Return the counts so far and start again from zero."""
        with self._lock:
            taken = Traffic(self.calls, self.payload_bytes, self.wait_s, self.total_wait_s)
            self.calls, self.payload_bytes, self.wait_s = 0, 0, 0.0
        return taken


class PendingCollective:
    """A collective in progress; `wait` blocks until the result may be used by work queued after it."""

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        traffic: Traffic,
        name: str,
        copy_back: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """`copy_back`: a tensor of a device, and the one on the host that holds its values when the work is done."""
        self._works, self._traffic, self._name, self._copy_back = works, traffic, name, copy_back

    def wait(self) -> None:
        works = [work for work in self._works if work is not None]
        if works:
            start = time.perf_counter()
            with phase(self._name), self._traffic.report_wait(self._name):
                for work in works:
                    work.wait()
                if self._copy_back is not None:
                    target, host = self._copy_back
                    target.copy_(host)
            self._traffic.add_wait(time.perf_counter() - start)
        self._works, self._copy_back = (), None


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    traffic: Traffic,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> PendingCollective:
    """Start reducing `tensor` in place over `group`."""
    start = _begin(traffic, tensor)
    with phase("reduce"):
        sent = _sendable(tensor, group)
        work = dist.all_reduce(sent, op=op, group=group, async_op=True)
    return _issued([work], traffic, start, "reduce", tensor, sent)


def all_gather(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, traffic: Traffic
) -> PendingCollective:
    """Start gathering equal shards: `output` holds `shard` of every rank, in order of rank."""
    start = _begin(traffic, output, shard)
    with phase("gather"):
        gathered = _sendable(output, group, filled=False)
        work = ALL_GATHER(gathered, _sendable(shard, group), group=group, async_op=True)
    return _issued([work], traffic, start, "gather", output, gathered)


def reduce_scatter(
    shard: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, traffic: Traffic
) -> PendingCollective:
    """Start summing `tensor` over ranks; `shard` receives this rank's equal part of the sum."""
    start = _begin(traffic, tensor, shard)
    with phase("reduce"):
        summed = _sendable(shard, group, filled=False)
        work = REDUCE_SCATTER(summed, _sendable(tensor, group), op=dist.ReduceOp.SUM, group=group, async_op=True)
    return _issued([work], traffic, start, "reduce", shard, summed)


def all_to_all(
    output: torch.Tensor,
    tensor: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group: dist.ProcessGroup,
    traffic: Traffic,
) -> PendingCollective:
    """Start sending rows of `tensor` to every rank, `sent[r]` of them to rank r, in order; `output` receives
    `received[r]` rows of rank r, in order. Counts, which may be 0, must agree on both sides. Traffic counts the bytes
    that other ranks are sent."""
    assert output.is_contiguous() and tensor.is_contiguous(), (output.shape, tensor.shape)
    traffic.await_turn(tensor)
    traffic.count(tensor.nbytes // max(1, sum(sent)) * (sum(sent) - sent[dist.get_rank(group)]))
    start = time.perf_counter()
    with phase("gather"):
        landed = _sendable(output, group, filled=False)
        leaving = _sendable(tensor, group)
        if dist.get_backend(group) == "gloo":
            works = _exchange(landed.split(list(received)), leaving.split(list(sent)), group)
        else:
            works = [dist.all_to_all_single(landed, leaving, list(received), list(sent), group=group, async_op=True)]
    return _issued(works, traffic, start, "gather", output, landed)


def start_transfers(receives: Transfers, sends: Transfers, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start to receive each tensor of a rank of the group, and to send each to one; empty ones are left out.

    All receives are posted first: gloo tells a sender that its receiver is ready by the same connection, behind what it
    has begun to send, so that a receive after a long send would have the two directions take turns.
    """
    begun = [(dist.irecv, each) for each in receives] + [(dist.isend, each) for each in sends]
    ways = [dist.P2POp(way, part, group=group, group_peer=peer) for way, (part, peer) in begun if part.numel()]
    return dist.batch_isend_irecv(ways) if ways else []


def _exchange(
    landed: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """All-to-all by transfers, since gloo's own posts the sends first."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    others = [(rank + distance) % world for distance in range(1, world)]
    works = start_transfers(
        [(landed[each], each) for each in reversed(others)], [(leaving[each], each) for each in others], group
    )
    landed[rank].copy_(leaving[rank])
    return works


def device_for_group(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where a tensor must lie for `group` to send it: on `device`, else on the host or the accelerator, whichever the
    group is for."""
    kinds = [each.type for each in group._device_types]
    if device.type in kinds:
        return device
    if "cpu" in kinds:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, f"a group for {group._device_types}, and there is no accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _begin(traffic: Traffic, *tensors: torch.Tensor) -> float:
    for tensor in tensors:
        assert tensor.is_contiguous(), f"a collective was given a non-contiguous tensor of shape {tuple(tensor.shape)}"
    traffic.await_turn(tensors[0])
    traffic.count(max(tensor.numel() * tensor.element_size() for tensor in tensors))
    return time.perf_counter()


def _sendable(tensor: torch.Tensor, group: dist.ProcessGroup, filled: bool = True) -> torch.Tensor:
    """The tensor itself, or, for one of an accelerator in a group of gloo alone, page-locked host memory of its shape,
    `filled` with its values. Filling holds the host until the device has computed them."""
    if tensor.device.type == "cpu" or dist.get_backend(group) != "gloo":
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor) if filled else host


def _issued(
    works: Sequence[dist.Work | None], traffic: Traffic, start: float, name: str, target: torch.Tensor,
    sent: torch.Tensor,
) -> PendingCollective:  # fmt: skip
    traffic.add_wait(time.perf_counter() - start)
    return PendingCollective(works, traffic, name, None if sent is target else (target, sent))
