"""Chunked point-to-point transfers of two-level collectives: sends and receives between the ranks of a group, with
tags, receive buffers and byte counts."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from phalanx.comm.rendezvous import Topology

CHUNK_BYTES = 256 * 1024  # long enough that a step of Python per piece costs little, short enough to fill a slow link
# Pieces of short ranges are not cut below that: on a rank that has a tenth of a core, ranges of 320 KiB in eight pieces
# held a step up by 2.6 s of 11, in two by 1.5 s.
MIN_CHUNK_BYTES = 64 * 1024
CHUNKS = 4  # of a range, at least, where they are not that short
WINDOW_BYTES = 16 * 2**20  # of arriving parts of sums that are given memory at the same time
TAGS = 2**30 - 1  # tags below it are used here; a group's others are free

# A collective: runs to the next place where another may take over; it ends when it is done.
CollectiveSteps = Iterator[None]


class P2PGroup(Protocol):
    """What a group, or a backend of one, has to offer. Messages of one size to a rank arrive in order, by tag."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> dist.Work: ...
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int, /) -> dist.Work: ...


@dataclass
class SentBytes:
    """Bytes that this rank has sent to other ranks, by the kind of link."""

    within_bytes: int = 0  # to ranks of its node
    between_bytes: int = 0  # to other nodes


def even_cuts(count: int, world: int) -> list[int]:
    """Where `world` ranges of `count` elements begin and end that are as equal as can be."""
    return [count * rank // world for rank in range(world + 1)]


class PeerError(RuntimeError):
    """A rank did not send, or take, what it was to."""

    def __init__(self, peer: int, name: int, cause: RuntimeError) -> None:
        """`peer` in its group, which is rank `name` of all."""
        # gloo's message, without source location and guesses.
        words = re.sub(r"^\[[^\]]*\] | This is typically .*", "", str(cause).splitlines()[0])
        super().__init__(f"gloo, rank {name}: {words}")
        self.peer = peer


@dataclass(frozen=True)
class ChunkTransfer:
    """A piece in transfer to or from a rank."""

    peer: int
    name: int  # of the peer, among all ranks
    work: dist.Work

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise PeerError(self.peer, self.name, error) from None


@dataclass(frozen=True)
class TransferChunk:
    start: int  # elements of the tensor
    stop: int
    tag: int


@dataclass(order=True)
class ChunkTask:
    """A piece that this rank waits for and does something with; in order of when it is likely to be there."""

    stage: int
    number: int
    owner: int
    chunk: TransferChunk = field(compare=False)
    sources: tuple[int, ...] = field(compare=False)
    is_sum: bool = field(compare=False)  # else it is passed on as it is
    result: TransferChunk | None = field(compare=False, default=None)  # a finished sum that goes to all: as what
    transfers: list[ChunkTransfer] = field(compare=False, default_factory=list)
    buffers: list[torch.Tensor] = field(compare=False, default_factory=list)  # for the parts of a sum


class ChunkLink:
    """A rank's connections to the others of its group. `sent` counts what was sent, exactly."""

    def __init__(self, group: P2PGroup, topology: Topology, chunk_bytes: int, names: Sequence[int] | None) -> None:
        """`names` of the group's ranks among all, for error messages."""
        self._group, self.topology, self._chunk_bytes = group, topology, chunk_bytes
        self.rank, self.world = group.rank(), group.size()
        assert self.world == len(topology.node_of), f"{len(topology.node_of)} hosts of {self.world} ranks"
        self.sent = SentBytes()
        self.node = topology.node_of[self.rank]
        self.local_peers = tuple(rank for rank in topology.nodes[self.node] if rank != self.rank)
        self._names = list(names or range(self.world))
        self._tag = 0
        self.free_buffers: list[torch.Tensor] = []  # memory for parts of sums

    def take_tag(self) -> int:
        """A tag for one message to each rank, the same on all ranks."""
        tag, self._tag = self._tag, (self._tag + 1) % TAGS
        return tag

    def split_chunks(
        self, tensor: torch.Tensor, cuts: Sequence[int], granule: int = 1, pieces: int = CHUNKS
    ) -> list[list[TransferChunk]]:
        """The pieces of every rank's range, each with its own tag, the same on all ranks; at least so many of the
        longest range, and all but the last of a range with a multiple of `granule` elements."""
        assert tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.is_contiguous(), tuple(tensor.shape)
        assert len(cuts) == self.world + 1 and cuts[0] == 0 and cuts[-1] == tensor.numel(), (cuts, tensor.numel())
        longest = max(stop - start for start, stop in pairwise(cuts))
        item_bytes = tensor.element_size()
        piece_bytes = min(self._chunk_bytes, max(MIN_CHUNK_BYTES, longest * item_bytes // pieces))
        length = max(1, piece_bytes // item_bytes // granule) * granule
        blocks = []
        for start, stop in pairwise(cuts):
            starts = range(start, stop, length)
            blocks.append(
                [TransferChunk(at, min(at + length, stop), (self._tag + i) % TAGS) for i, at in enumerate(starts)]
            )
            self._tag = (self._tag + len(starts)) % TAGS
        return blocks

    def allocate_buffers(self, tasks: Sequence[ChunkTask], item_bytes: int) -> list[torch.Tensor]:
        """Memory for the parts of the first sums; the later ones get it when these have been added."""
        each = max(self._chunk_bytes, item_bytes)
        wanted = sum(len(event.sources) for event in tasks)
        count = min(wanted, max(WINDOW_BYTES // each, max((len(event.sources) for event in tasks), default=0)))
        return [
            self.free_buffers.pop() if self.free_buffers else torch.empty(each, dtype=torch.uint8) for _ in range(count)
        ]

    def interleave(
        self, ranks: Sequence[int], tensors: Sequence[torch.Tensor | None]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The pieces of the tensors of these ranks, which take turns."""
        cut = {rank: _cut(tensors[rank], self._chunk_bytes) for rank in ranks}
        for number in range(max((len(parts) for parts in cut.values()), default=0)):
            yield from ((rank, parts[number]) for rank, parts in cut.items() if number < len(parts))

    def send(self, part: torch.Tensor, target: int, tag: int) -> ChunkTransfer:
        self.count_bytes(target, part.numel() * part.element_size())
        return ChunkTransfer(target, self._names[target], self._start(self._group.send, part, target, tag))

    def receive(self, part: torch.Tensor, source: int, tag: int) -> ChunkTransfer:
        return ChunkTransfer(source, self._names[source], self._start(self._group.recv, part, source, tag))

    def _start(self, way: Callable[..., dist.Work], part: torch.Tensor, peer: int, tag: int) -> dist.Work:
        try:
            return way([part], peer, tag)
        except RuntimeError as error:  # its connection is closed
            raise PeerError(peer, self._names[peer], error) from None

    def post_receives(
        self, tasks: "deque[ChunkTask]", buffers: list[torch.Tensor], tensor: torch.Tensor
    ) -> "deque[ChunkTask]":
        """Post the receives of the next sums for which there is memory; returns those that have to wait."""
        while tasks and len(tasks[0].sources) <= len(buffers):
            event = tasks.popleft()
            for source in event.sources:
                event.buffers.append(buffers.pop())
                part = view_chunk(event.buffers[-1], event.chunk, tensor)
                event.transfers.append(self.receive(part, source, event.chunk.tag))
        return tasks

    def count_bytes(self, target: int, sent_bytes: int) -> None:
        """Take note of what is sent to a rank."""
        if self.topology.node_of[target] == self.node:
            self.sent.within_bytes += sent_bytes
        else:
            self.sent.between_bytes += sent_bytes


def remote_bytes(tensor: torch.Tensor, cuts: Sequence[int], rank: int) -> int:
    """Of a tensor that is cut into ranges, the bytes that other ranks own."""
    return (cuts[-1] - cuts[rank + 1] + cuts[rank]) * tensor.element_size()


def wait_steps(works: Iterable[ChunkTransfer]) -> CollectiveSteps:
    """Wait for one after the other."""
    for work in works:
        work.wait()
        yield


def view_chunk(memory: torch.Tensor, chunk: TransferChunk, like: torch.Tensor) -> torch.Tensor:
    """As much of a piece of memory as a piece of `like` takes."""
    return memory[: (chunk.stop - chunk.start) * like.element_size()].view(like.dtype)


def _cut(tensor: torch.Tensor | None, piece_bytes: int) -> Sequence[torch.Tensor]:
    if tensor is None or tensor.numel() == 0:
        return ()
    return tensor.split(max(1, piece_bytes // tensor.element_size()))
