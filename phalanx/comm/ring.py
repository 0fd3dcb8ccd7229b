"""Reduce-scatter and all-gather of shards of any sizes: pieces that stream around a ring of sends and receives.

The ranks of a group form a ring; everything travels to the next rank. In an all-gather a rank sends its own shard and
passes on what arrives, but for the shard of the next rank, which has it. In a reduce-scatter the sum of rank b's range
starts at rank b + 1 and grows on its way round to b. What is passed on leaves as soon as it is there, piece by piece,
so that every link carries data in both directions all the time, whatever the sizes of the shards. With shares s of B
bytes a rank sends (1 - s)B in a reduce-scatter, and receives as much in an all-gather: the least possible, so both take
(1 - least s)B / rate. (Padding to the largest share, or gloo's own reduce-scatter, moves two to four times that.)

The sum of an element is taken in the order of the ring, the owner last: the same at every call, and the same whatever
the size of the pieces. It is kept in the tensor's own type, so bfloat16 rounds at every rank that it passes.
`uneven_collectives.PaddedCollectives` is the reference implementation.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.collectives import Traffic
from phalanx.system.trace import phase

CHUNK_BYTES = 512 * 1024  # long enough that a step of Python per piece costs little, short enough to fill a slow link
CHUNKS_PER_SHARD = 2  # at least, where shards are small: what is passed on must not wait for a whole shard
MIN_CHUNK_BYTES = 64 * 1024  # but pieces are not shorter than that
WINDOW_BYTES = 2 * 2**20  # of pieces that a rank is ready to receive: what may be on the way to it
_TAGS = 2**30


@dataclass(frozen=True)
class _RingChunk:
    start: int  # elements of the tensor
    stop: int
    tag: int


class RingTransfer:
    """A transfer in progress. `wait` forwards what arrives, and returns when its tensors are ready and free again."""

    def __init__(
        self, ring: "RingCollectives", tensor: torch.Tensor, own: list[_RingChunk], incoming: list[_RingChunk],
        kept_at_end: int, into: torch.Tensor | None, start: int,
    ) -> None:  # fmt: skip
        """`own` are sent first. Of what is `incoming` all but the last pieces is forwarded to the next rank.

        With `into` the pieces are added up: those that stay to there, where element `start` of the tensor comes first.
        """
        self._ring, self._tensor, self._own, self._incoming = ring, tensor, own, incoming
        self._forwarded = max(0, len(incoming) - kept_at_end)
        self._into, self._start = into, start
        self._expected: deque[tuple[torch.Tensor, dist.Work]] = deque()  # the next to arrive
        self._arrived = 0
        self._sent: list[dist.Work] = []
        self._begun = self._done = False

    def wait(self) -> None:
        """Finish this transfer, and before it those that were begun earlier.

        Raises:
            RuntimeError: a peer is gone, or sent nothing within the group's timeout; the ring cannot be used any more.
        """
        if not self._done:
            self._ring._finish(self)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._sent += [self._ring._send(self._tensor, piece) for piece in self._own]

    def _expect(self) -> int:
        """Be ready for one more piece; returns its bytes, 0 where there is none."""
        number = self._arrived + len(self._expected)
        if number == len(self._incoming):
            return 0
        piece = self._incoming[number]
        part = self._tensor[piece.start : piece.stop]
        part = part if self._into is None else torch.empty_like(part)
        self._expected.append((part, self._ring._receive(part, piece.tag)))
        return part.numel() * part.element_size()

    def _take(self) -> int:
        """Wait for the next piece, add it up, and forward it unless it is the last; returns its bytes."""
        part, work = self._expected.popleft()
        work.wait()
        piece, stays = self._incoming[self._arrived], self._arrived >= self._forwarded
        self._arrived += 1
        if self._into is not None:
            mine = self._tensor[piece.start : piece.stop]
            out = self._into[piece.start - self._start : piece.stop - self._start] if stays else mine
            torch.add(part, mine, out=out)
        if not stays:
            self._sent.append(self._ring._send(self._tensor, piece))
        return part.numel() * part.element_size()

    def _end(self) -> None:
        for work in self._sent:
            work.wait()
        self._done = True


class RingCollectives:
    """Transfers over the ranks of one group, which nothing else should use at the same time: a small collective would
    wait behind the pieces. All calls come from one thread, and every rank begins the same transfers in the same order.

    Several transfers may be in progress. They end in the order in which they were begun: the own data of one follows
    the forwarded data of the previous one, so that links are not idle between two, and no transfer delays an earlier
    one. So begin the next before waiting for one: at 400 Mbit/s transfers of 2 MiB took 1.05 times what they must one
    after the other, and 1.01 to 1.02 with two under way.

    `traffic` counts a call and (1 - s)B bytes for each, and as its wait the time that the calling thread was held up:
    give it a separate one where that thread does not delay the computation. Besides the tensors handed over,
    reduce-scatters need about WINDOW_BYTES of memory, all together.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._group, self._traffic, self._chunk_bytes = group, traffic, chunk_bytes
        # Without torch's own checks and bookkeeping around it, which take longer than the call: there are many pieces.
        self._backend: Any = group._get_backend(torch.device("cpu"))
        self.rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._next, self._previous = (self.rank + 1) % self._world, (self.rank - 1) % self._world
        self._tag = 0
        self._under_way: deque[RingTransfer] = deque()
        self._expected_bytes = 0
        self._broken: RuntimeError | None = None

    def reduce_scatter(self, tensor: torch.Tensor, cuts: Sequence[int], into: torch.Tensor) -> RingTransfer:
        """Begin to sum `tensor` over the ranks; `into` receives the range of this rank.

        Args:
            tensor: flat, on the host; it is overwritten, and must be left alone until `wait` has returned.
            cuts: where the ranges begin and end: rank r owns [cuts[r], cuts[r + 1]); the same on every rank.
            into: flat, as long as the own range; it may be that range of `tensor` itself.
        """
        self._check(tensor, cuts)
        start, stop = cuts[self.rank], cuts[self.rank + 1]
        assert into.is_contiguous() and into.shape == (stop - start,), f"a result of shape {tuple(into.shape)}"
        assert into.dtype == tensor.dtype, f"a sum of {tensor.dtype} in {into.dtype}"
        blocks = self._split_chunks(cuts, tensor.element_size())
        arriving = [piece for away in range(2, self._world + 1) for piece in blocks[self.rank - away]]
        own, stays = blocks[self.rank - 1], len(blocks[self.rank])
        if self._world == 1:
            into.copy_(tensor)
            own, arriving = [], []
        return self._begin(RingTransfer(self, tensor, own, arriving, stays, into, start), cuts, "reduce")

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[int]) -> RingTransfer:
        """Begin to fill `tensor`, of which this rank has its own range [cuts[rank], cuts[rank + 1]), with the others'.

        `tensor` is flat and on the host, `cuts` are the same on every rank; the own range may be read meanwhile.
        """
        self._check(tensor, cuts)
        blocks = self._split_chunks(cuts, tensor.element_size())
        arriving = [piece for away in range(1, self._world) for piece in blocks[self.rank - away]]
        own = blocks[self.rank] if self._world > 1 else []
        return self._begin(RingTransfer(self, tensor, own, arriving, len(blocks[self._next]), None, 0), cuts, "gather")

    def _check(self, tensor: torch.Tensor, cuts: Sequence[int]) -> None:
        assert tensor.device.type == "cpu", "the ring moves host tensors"
        assert tensor.dim() == 1 and tensor.is_contiguous(), f"not flat and contiguous: {tuple(tensor.shape)}"
        assert len(cuts) == self._world + 1, f"{len(cuts) - 1} ranges for {self._world} ranks"
        assert cuts[0] == 0 and cuts[-1] == tensor.numel(), f"ranges {list(cuts)} of {tensor.numel()} elements"
        assert all(a <= b for a, b in pairwise(cuts)), f"decreasing ranges: {list(cuts)}"

    def _begin(self, moving: RingTransfer, cuts: Sequence[int], name: str) -> RingTransfer:
        if self._broken is not None:
            raise self._broken
        own = cuts[self.rank + 1] - cuts[self.rank]
        self._traffic.count((cuts[-1] - own) * moving._tensor.element_size())
        start = time.perf_counter()
        self._under_way.append(moving)
        with phase(name), torch.no_grad():
            self._expect()
            self._send_own()
        self._traffic.add_wait(time.perf_counter() - start)
        return moving

    def _finish(self, last: RingTransfer) -> None:
        start = time.perf_counter()
        try:
            with torch.no_grad():
                while not last._done:
                    self._finish_first()
        except RuntimeError as error:
            self._broken = error
            raise
        finally:
            self._traffic.add_wait(time.perf_counter() - start)

    def _finish_first(self) -> None:
        if self._broken is not None:
            raise self._broken
        first = self._under_way[0]
        with phase("gather" if first._into is None else "reduce"):
            while first._arrived < len(first._incoming):
                self._expected_bytes -= first._take()
                self._expect()
                self._send_own()
            first._end()
        self._under_way.popleft()
        self._expect()
        self._send_own()

    def _expect(self) -> None:
        """Post the receives of the next pieces, in the order of the transfers: senders wait for that, so they arrive in
        this order."""
        for moving in self._under_way:
            while self._expected_bytes < WINDOW_BYTES and (more := moving._expect()):
                self._expected_bytes += more

    def _send_own(self) -> None:
        """Send what is this rank's own, of each transfer as soon as all has been passed on of those before it."""
        for moving in self._under_way:
            moving._begin()
            if moving._arrived < moving._forwarded:
                break

    def _split_chunks(self, cuts: Sequence[int], item_bytes: int) -> list[list[_RingChunk]]:
        """The pieces of every rank's range, each with its own tag, the same on all ranks."""
        shard_bytes = cuts[-1] * item_bytes // self._world
        wanted = max(MIN_CHUNK_BYTES, min(self._chunk_bytes, shard_bytes // CHUNKS_PER_SHARD))
        step = max(1, min(wanted, self._chunk_bytes) // item_bytes)
        blocks, tag = [], self._tag
        for start, stop in pairwise(cuts):
            starts = range(start, stop, step)
            blocks.append([_RingChunk(a, min(a + step, stop), (tag + i) % _TAGS) for i, a in enumerate(starts)])
            tag += len(starts)
        self._tag = tag % _TAGS
        return blocks

    def _send(self, tensor: torch.Tensor, piece: _RingChunk) -> dist.Work:
        work: dist.Work = self._backend.send([tensor[piece.start : piece.stop]], self._next, piece.tag)
        return work

    def _receive(self, part: torch.Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._backend.recv([part], self._previous, tag)
        return work
