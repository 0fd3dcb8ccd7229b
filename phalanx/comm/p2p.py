"""Tensors that go from one rank of a group to another, while both compute: what a pipeline's stages hand on."""

import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.comm.collectives import Traffic, all_reduce


class PendingReceive:
    """A tensor on its way here."""

    def __init__(self, buffer: torch.Tensor, work: dist.Work | None, device: torch.device, traffic: Traffic) -> None:
        self._buffer, self._work, self._device, self._traffic = buffer, work, device, traffic

    def get(self) -> torch.Tensor:
        """The tensor, when it is there. Raises RuntimeError where its sender is gone, or too late."""
        _wait(self._work, self._traffic)
        self._work = None
        return self._buffer.to(self._device)


class P2PChannel:
    """Sends and receives of one group, by one thread.

    Two ranks must send and receive the same tensors in the same order in each direction; a group of an accelerator's
    own kind has but one queue for both directions, so there the two together must be in the same order, too. Where the
    device is none of the group's, tensors go through the host's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, traffic: Traffic, max_in_flight: int) -> None:
        """`max_in_flight`: tensors that may be on their way from here; who sends more waits until the first has
        arrived. Collective over the group."""
        self._group, self._device, self._traffic, self._max_in_flight = group, device, traffic, max_in_flight
        self.full_duplex = dist.get_backend(group) == "gloo"  # each direction has a queue of its own
        self._via = torch.device("cpu") if self.full_duplex else device
        self._sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
        if (
            not self.full_duplex
        ):  # else what two ranks `exchange`, if nothing was sent to all before, waits for the others
            all_reduce(torch.zeros((), device=device), group, Traffic())

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor, which must not change before it has left, to rank `to` of the group."""
        leaving = tensor.to(self._via).contiguous()
        self._traffic.await_turn(leaving)
        self._traffic.count(leaving.nbytes)
        self._sent.append((dist.isend(leaving, group=self._group, group_dst=to), leaving))
        while len(self._sent) > self._max_in_flight:
            _wait(self._sent.popleft()[0], self._traffic)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, of: int) -> PendingReceive:
        """Be ready for the next tensor from rank `of` of the group."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._via)
        self._traffic.await_turn(buffer)
        work = dist.irecv(buffer, group=self._group, group_src=of)
        return PendingReceive(buffer, work, self._device, self._traffic)

    def exchange(self, tensor: torch.Tensor, other: int) -> torch.Tensor:
        """What `other` gives here for `tensor`, of the same shape and type."""
        mine, theirs = tensor.to(self._via).contiguous(), torch.empty_like(tensor, device=self._via)
        self._traffic.count(mine.nbytes)
        both = [
            dist.P2POp(dist.isend, mine, group=self._group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(both):
            _wait(work, self._traffic)
        return theirs.to(self._device)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._sent:
            _wait(self._sent.popleft()[0], self._traffic)

    def close(self) -> None:
        """Let go of the group: its threads would run on as long as anything holds it."""
        self._sent.clear()
        self.__dict__.pop("_group", None)


def _wait(work: dist.Work | None, traffic: Traffic) -> None:
    if work is not None:
        begun = time.perf_counter()
        with traffic.report_wait("message"):
            work.wait()
        traffic.add_wait(time.perf_counter() - begun)
