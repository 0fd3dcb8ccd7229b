"""Asynchronous point-to-point transfers of tensors between pipeline stages."""

import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.comm.collectives import Traffic, all_reduce, start_transfers


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect the ranks of a group before its first message, which else, where collectives are an accelerator's, would
    wait for all ranks, also those that have nothing to send or receive. Collective."""
    if dist.get_backend(group) != "gloo":
        all_reduce(torch.zeros((), device=device), group, Traffic())


class PendingReceive:
    """A receive in progress."""

    def __init__(self, buffer: torch.Tensor, work: dist.Work | None, device: torch.device, traffic: Traffic) -> None:
        self._buffer, self._work, self._device, self._traffic = buffer, work, device, traffic

    def get(self) -> torch.Tensor:
        """Wait for the tensor. Raises RuntimeError where its sender is gone, or too late."""
        _wait(self._work, self._traffic)
        self._work = None
        return self._buffer.to(self._device)


class P2PChannel:
    """Sends and receives of one group, by one thread.

    Two ranks must send and receive the same tensors in the same order in each direction; a group of an accelerator's
    collectives has one queue for both directions, so there both directions together must be in the same order, too.
    Where the group does not support the device, tensors go through host memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, traffic: Traffic, max_in_flight: int) -> None:
        """`max_in_flight`: tensors that may be in transfer from here; a further send waits until the first has arrived.
        Collective over the group."""
        self._group, self._device, self._traffic, self._max_in_flight = group, device, traffic, max_in_flight
        self.full_duplex = dist.get_backend(group) == "gloo"  # each direction has a separate queue
        self._via = torch.device("cpu") if self.full_duplex else device
        self._sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
        connect(group, device)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor, which must not change before it has left, to rank `to` of the group."""
        leaving = tensor.to(self._via).contiguous()
        self._traffic.await_turn(leaving)
        self._traffic.count(leaving.nbytes)
        self._sent.append((dist.isend(leaving, group=self._group, group_dst=to), leaving))
        while len(self._sent) > self._max_in_flight:
            _wait(self._sent.popleft()[0], self._traffic)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, of: int) -> PendingReceive:
        """Post the receive of the next tensor from rank `of` of the group."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._via)
        self._traffic.await_turn(buffer)
        work = dist.irecv(buffer, group=self._group, group_src=of)
        return PendingReceive(buffer, work, self._device, self._traffic)

    def exchange(self, tensor: torch.Tensor, other: int) -> torch.Tensor:
        """Exchange `tensor` with `other`, for one of the same shape and type."""
        mine, theirs = tensor.to(self._via).contiguous(), torch.empty_like(tensor, device=self._via)
        self._traffic.count(mine.nbytes)
        for work in start_transfers([(theirs, other)], [(mine, other)], self._group):
            _wait(work, self._traffic)
        return theirs.to(self._device)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._sent:
            _wait(self._sent.popleft()[0], self._traffic)

    def close(self) -> None:
        """Drop the reference to the group, whose threads would otherwise continue."""
        self._sent.clear()
        self.__dict__.pop("_group", None)


def _wait(work: dist.Work | None, traffic: Traffic) -> None:
    if work is not None:
        begun = time.perf_counter()
        with traffic.report_wait("message"):
            work.wait()
        traffic.add_wait(time.perf_counter() - begun)


class PendingExchange:
    """A send and a receive in progress, either of which may be missing; `wait` blocks until what was received may be
    used, and what was sent may be changed, by work queued after it."""

    def __init__(
        self, works: Sequence[dist.Work], traffic: Traffic, kept: Sequence[torch.Tensor],
        copy_back: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:  # fmt: skip
        self._works, self._traffic, self._kept, self._copy_back = works, traffic, kept, copy_back

    def wait(self) -> None:
        for work in self._works:
            _wait(work, self._traffic)
        if self._copy_back is not None:
            target, host = self._copy_back
            target.copy_(host)
        self._works, self._kept, self._copy_back = (), (), None


def exchange_around(
    sent: torch.Tensor, to: int, received: torch.Tensor, of: int, group: dist.ProcessGroup, traffic: Traffic
) -> PendingExchange:
    """Start sending a tensor to rank `to` of the group and receiving one from rank `of`, both contiguous; of an empty
    one nothing is sent. All ranks of the group, which are connected, call this in the same order. Where the group is of
    gloo alone, tensors of an accelerator go through host memory, for which the host waits until they are computed."""
    assert sent.is_contiguous() and received.is_contiguous()
    via_host = received.device.type != "cpu" and dist.get_backend(group) == "gloo"
    leaving, landed = sent, received
    if via_host:
        leaving = torch.empty_like(sent, device="cpu", pin_memory=True).copy_(sent)
        landed = torch.empty_like(received, device="cpu", pin_memory=True)
    if sent.numel():
        traffic.count(sent.nbytes)
    traffic.await_turn(leaving)
    works = start_transfers([(landed, of)], [(leaving, to)], group)
    return PendingExchange(works, traffic, (leaving, landed), (received, landed) if via_host else None)
