"""Collectives that know which ranks share a node: each byte crosses the slow links between nodes once.

Ranks are placed by the name of their host, never by their numbers. Every range of a tensor has an owner. On each other
node one rank is that range's relay: the one with the owner's index within its node, wrapped around where a node has
fewer ranks. So the ranks of a node share the work between nodes, whatever numbers of ranks the nodes have.

An all-gather sends a range once around the nodes, from relay to relay, and each relay hands it to the ranks beside it.
A reduce-scatter is the same backwards: the ranks of a node hand their parts of a sum to its relay, and the sum grows on
its way from relay to relay to the owner. An all-reduce is both, piece by piece. Everything is cut into pieces, and a
piece goes on as soon as it is there, so that the stages of different pieces overlap. With one rank per node this is the
streaming ring, with one node alone it is a direct exchange: there is nothing to choose.

The sum of an element is taken in an order that only the topology and the owner fix, so it is the same at every call and
for any size of the pieces; and it is taken in one place, so that every rank has the same bits.
`uneven_collectives.PaddedCollectives` is the plain twin.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from phalanx.comm.collectives import Traffic
from phalanx.comm.topology import Topology
from phalanx.system.trace import phase

CHUNK_BYTES = 256 * 1024  # long enough that a step of Python per piece costs little, short enough to fill a slow link
# Pieces of short ranges are not cut below that: on a rank that has a tenth of a core, ranges of 320 KiB in eight pieces
# held a step up by 2.6 s of 11, in two by 1.5 s.
MIN_CHUNK_BYTES = 64 * 1024
CHUNKS = 4  # of a range, at least, where they are not that short
WINDOW_BYTES = 16 * 2**20  # of arriving parts of sums that are given memory at the same time
TAGS = 2**30 - 1  # tags below it are used here; a group's others are free

CollectiveSteps = Iterator[
    None
]  # a collective: runs to the next place where another may take over; it ends when it is done
Combine = Callable[..., torch.Tensor]  # (a, b, out=) -> out, such as torch.add
Finish = Callable[[torch.Tensor], object] | None  # what is done in place with each piece of a result, once


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
        # gloo's own words, without the place in its source and its guesses.
        words = re.sub(r"^\[[^\]]*\] | This is typically .*", "", str(cause).splitlines()[0])
        super().__init__(f"gloo, rank {name}: {words}")
        self.peer = peer


@dataclass(frozen=True)
class ChunkTransfer:
    """A piece on its way to a rank, or from one."""

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


class TwoLevelCollectives:
    """Collectives of one group, over host tensors. Every rank begins the same ones in the same order, from one thread;
    several may be under way, and they end in the order in which they were begun.

    Nothing else on `group` uses tags below `TAGS`. `sent` counts what was sent, exactly; `traffic` as `RingCollectives`
    does.
    """

    def __init__(
        self,
        group: P2PGroup,
        topology: Topology,
        chunk_bytes: int = CHUNK_BYTES,
        traffic: Traffic | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        """`names` of the group's ranks among all, for those who read of a failure."""
        self._group, self.topology, self._chunk_bytes = group, topology, chunk_bytes
        self.rank, self.world = group.rank(), group.size()
        assert self.world == len(topology.node_of), f"{len(topology.node_of)} hosts of {self.world} ranks"
        self.sent, self._traffic = SentBytes(), traffic or Traffic()
        self.node = topology.node_of[self.rank]
        self.local_peers = tuple(rank for rank in topology.nodes[self.node] if rank != self.rank)
        self._names = list(names or range(self.world))
        self._tag = 0
        self.free_buffers: list[torch.Tensor] = []  # memory for parts of sums
        self._under_way: deque[TwoLevelTransfer] = deque()
        self._broken: BaseException | None = None

    def reduce_scatter(self, tensor: torch.Tensor, cuts: Sequence[int], into: torch.Tensor) -> "TwoLevelTransfer":
        """Begin to sum `tensor`, flat, which is overwritten; `into` receives the range [cuts[rank], cuts[rank + 1])."""
        program = self.reduce_steps(tensor, cuts, into, torch.add)
        return self.begin_transfer(program, remote_bytes(tensor, cuts, self.rank), "reduce")

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[int]) -> "TwoLevelTransfer":
        """Begin to fill `tensor`, flat, of which this rank has the range [cuts[rank], cuts[rank + 1])."""
        return self.begin_transfer(self.gather_steps(tensor, cuts), remote_bytes(tensor, cuts, self.rank), "gather")

    def all_reduce(self, tensor: torch.Tensor) -> "TwoLevelTransfer":
        """Begin to sum `tensor`, flat, in place."""
        return self.begin(self.all_reduce_steps(tensor, torch.add))

    def begin_transfer(self, program: CollectiveSteps, payload_bytes: int, name: str) -> "TwoLevelTransfer":
        """Begin a program, and count it as a transfer of so many bytes."""
        self._traffic.count(payload_bytes)
        start = time.perf_counter()
        with phase(name):
            moving = self.begin(program, name)
        self._traffic.add_wait(time.perf_counter() - start)
        return moving

    def begin(self, program: CollectiveSteps, name: str = "reduce") -> "TwoLevelTransfer":
        """Begin a program made by a method of this class: receives are posted and own data is on its way."""
        moving = TwoLevelTransfer(self, program, name)
        self._under_way.append(moving)
        self._advance(moving)
        return moving

    def step(self) -> None:
        """Take the oldest transfer under way one piece further.

        Raises:
            PeerError: a rank is gone, or sent nothing within the group's timeout; this object is of no more use.
        """
        self._advance(self._under_way[0])
        if self._under_way[0].done:
            self._under_way.popleft()

    def _advance(self, moving: "TwoLevelTransfer") -> None:
        if self._broken is not None:
            raise self._broken
        try:
            with torch.no_grad():
                moving.done = next(moving.program, self) is self
        except BaseException as error:
            self._broken = error
            raise

    # ------------------------------------------------------------------------------------------------------- programs
    # Each runs to its first yield when it is begun.

    def gather_steps(self, tensor: torch.Tensor, cuts: Sequence[int]) -> CollectiveSteps:
        """Fill the ranges of the other ranks; each rank has its own. A broadcast: one rank owns everything."""
        blocks = self.split_chunks(tensor, cuts)
        events, rest = self._post_gather(tensor, blocks, 0)
        sent = self._forward(tensor, blocks[self.rank], self.rank)
        yield
        yield from self._run_tasks(tensor, events, sent, [], torch.add, None)
        yield from wait_steps([*rest, *sent])

    def reduce_steps(
        self,
        tensor: torch.Tensor,
        cuts: Sequence[int],
        into: torch.Tensor,
        combine: Combine,
        finish: Finish = None,
        keep: bool = False,
    ) -> CollectiveSteps:
        """Combine `tensor`, which is overwritten unless it is to `keep` its content, over the ranks; `into` receives
        the own range of the result. A reduction to one rank: it owns everything."""
        blocks = self.split_chunks(tensor, cuts)
        events = self._list_sums(blocks, [])
        room = self.allocate_buffers(events, tensor.element_size())
        waiting = self.post_receives(deque(events), room, tensor)
        sent = self._send_parts(tensor, blocks)
        yield
        scratch = torch.empty_like(tensor) if keep else tensor

        def place(event: ChunkTask) -> torch.Tensor:
            one, begin = (into, cuts[self.rank]) if event.owner == self.rank else (scratch, 0)
            return one[event.chunk.start - begin : event.chunk.stop - begin]

        yield from self._run_tasks(tensor, events, sent, room, combine, finish, waiting, place)
        self.free_buffers.extend(room)
        yield from wait_steps(sent)

    def all_reduce_steps(self, tensor: torch.Tensor, combine: Combine, finish: Finish = None) -> CollectiveSteps:
        """Combine `tensor` in place: each rank makes a range of the result, and sends its pieces to all when ready."""
        cuts = even_cuts(tensor.numel(), self.world)
        blocks, results = self.split_chunks(tensor, cuts), self.split_chunks(tensor, cuts)
        sums = self._list_sums(blocks, results[self.rank])
        room = self.allocate_buffers(sums, tensor.element_size())
        waiting = self.post_receives(deque(sums), room, tensor)
        sent = self._send_parts(tensor, blocks)
        # What is gathered overwrites what was sent from there. It cannot come too early: it is a sum with this rank's
        # part in it, so that has left.
        events, rest = self._post_gather(tensor, results, len(self.topology.nodes) - 1)
        yield
        yield from self._run_tasks(tensor, sorted([*sums, *events]), sent, room, combine, finish, waiting)
        self.free_buffers.extend(room)
        yield from wait_steps([*rest, *sent])

    def exchange_steps(
        self, outgoing: Sequence[torch.Tensor | None], incoming: Sequence[torch.Tensor | None]
    ) -> CollectiveSteps:
        """Send a flat tensor to each rank and receive one from each, of sizes that the two sides agree on; None or an
        empty one: nothing. All-to-all, gather and scatter."""
        tag, self._tag = self._tag, (self._tag + 1) % TAGS
        # The directions take turns piece by piece, and each rank begins at another one: one direction after the other,
        # all ranks would send to the same rank at the same time.
        ahead = [(self.rank + away) % self.world for away in range(1, self.world)]
        received = [self.receive(part, rank, tag) for rank, part in self._interleave(ahead[::-1], incoming)]
        sent = [self.send(part, rank, tag) for rank, part in self._interleave(ahead, outgoing)]
        mine, here = outgoing[self.rank], incoming[self.rank]
        if mine is not None and here is not None:
            here.copy_(mine)
        yield
        yield from wait_steps([*received, *sent])

    # ---------------------------------------------------------------------------------------------------------- stages

    def _post_gather(
        self, tensor: torch.Tensor, blocks: Sequence[Sequence[TransferChunk]], first_stage: int
    ) -> tuple[list[ChunkTask], list[ChunkTransfer]]:
        """Post the receives of all that is gathered. Returns what this rank is to pass on, in order, and the rest."""
        passed_on: list[ChunkTask] = []
        kept: list[ChunkTask] = []
        for owner, pieces in enumerate(blocks):
            if owner == self.rank:
                continue
            relay = self.topology.relay(self.node, owner)
            stage = first_stage + (self.node - self.topology.node_of[owner]) % len(self.topology.nodes)
            source = self.topology.relay(self.node - 1, owner) if relay == self.rank else relay
            events = [ChunkTask(stage, number, owner, piece, (source,), False) for number, piece in enumerate(pieces)]
            (passed_on if relay == self.rank else kept).extend(events)
        for event in (*sorted(passed_on), *sorted(kept)):
            part = tensor[event.chunk.start : event.chunk.stop]
            event.transfers.append(self.receive(part, event.sources[0], event.chunk.tag))
        return sorted(passed_on), [event.transfers[0] for event in sorted(kept)]

    def _list_sums(
        self, blocks: Sequence[Sequence[TransferChunk]], results: Sequence[TransferChunk]
    ) -> list[ChunkTask]:
        """The pieces to which this rank adds, as a relay or as the owner, in order."""
        events = []
        for owner, pieces in enumerate(blocks):
            if self.topology.relay(self.node, owner) != self.rank:
                continue
            stage = self._stage(owner)
            sources = self.local_peers + ((self.topology.relay(self.node - 1, owner),) if stage > 0 else ())
            if not sources and owner != self.rank:
                continue  # what begins its way here is sent as it is
            for number, piece in enumerate(pieces):
                result = results[number] if results and owner == self.rank else None
                events.append(ChunkTask(stage, number, owner, piece, sources, True, result))
        return sorted(events)

    def _send_parts(self, tensor: torch.Tensor, blocks: Sequence[Sequence[TransferChunk]]) -> list[ChunkTransfer]:
        """Send all that needs nothing of others: parts to the relays of this node; or to the next node, where no rank
        beside this one has a part."""
        parts: list[tuple[int, int, int, int, TransferChunk]] = []
        for owner, pieces in enumerate(blocks):
            target, stage = self.topology.relay(self.node, owner), self._stage(owner)
            if target == self.rank:
                if self.local_peers or stage > 0 or owner == self.rank:
                    continue
                target = self.topology.relay(self.node + 1, owner)
            parts.extend((stage, number, owner, target, piece) for number, piece in enumerate(pieces))
        parts.sort(key=lambda part: part[:3])
        return [self.send(tensor[piece.start : piece.stop], target, piece.tag) for *_, target, piece in parts]

    def _stage(self, owner: int) -> int:
        """How many nodes the sum of a range has passed when it comes to this one; it ends at its owner's."""
        return (self.node - self.topology.node_of[owner] - 1) % len(self.topology.nodes)

    def _run_tasks(
        self,
        tensor: torch.Tensor,
        events: Sequence[ChunkTask],
        sent: list[ChunkTransfer],
        room: list[torch.Tensor],
        combine: Combine,
        finish: Finish,
        waiting: "deque[ChunkTask] | None" = None,
        place: "Callable[[ChunkTask], torch.Tensor] | None" = None,
    ) -> CollectiveSteps:
        """Wait for the events in order; add what arrives, in its place, and send on what is complete."""
        for event in events:
            for work in event.transfers:
                work.wait()
            piece = event.chunk
            mine = tensor[piece.start : piece.stop]
            if not event.is_sum:
                sent.extend(self._forward(tensor, [piece], event.owner))
                yield
                continue
            total = mine if place is None else place(event)
            if not event.buffers:
                total.copy_(mine)  # there is no other rank
            for memory in event.buffers:
                combine(mine, view_chunk(memory, piece, tensor), out=total)
                mine = total
            if event.owner != self.rank:
                sent.append(self.send(mine, self.topology.relay(self.node + 1, event.owner), piece.tag))
            else:
                if finish is not None:
                    finish(total)
                if event.result is not None:
                    sent.extend(self._forward(tensor, [event.result], self.rank))
            room.extend(event.buffers)
            if waiting:
                self.post_receives(waiting, room, tensor)
            yield

    def _forward(self, tensor: torch.Tensor, pieces: Sequence[TransferChunk], owner: int) -> list[ChunkTransfer]:
        """Send complete pieces to the next node, unless they come from there, and then to the ranks beside."""
        onward = (self.node + 1) % len(self.topology.nodes)
        targets = [] if onward == self.topology.node_of[owner] else [self.topology.relay(onward, owner)]
        return [
            self.send(tensor[piece.start : piece.stop], target, piece.tag)
            for some in (targets, self.local_peers)
            for piece in pieces
            for target in some
        ]

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

    # ---------------------------------------------------------------------------------------------------------- pieces

    def split_chunks(
        self, tensor: torch.Tensor, cuts: Sequence[int], granule: int = 1, pieces: int = CHUNKS
    ) -> list[list[TransferChunk]]:
        """The pieces of every rank's range, each with a tag of its own, the same on all ranks; so many at least of the
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

    def _interleave(
        self, ranks: Sequence[int], tensors: Sequence[torch.Tensor | None]
    ) -> Iterator[tuple[int, torch.Tensor]]:
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

    def add_wait(self, seconds: float) -> None:
        """Take note that the calling thread was held up."""
        self._traffic.add_wait(seconds)

    def count_bytes(self, target: int, sent_bytes: int) -> None:
        """Take note of what is sent to a rank."""
        if self.topology.node_of[target] == self.node:
            self.sent.within_bytes += sent_bytes
        else:
            self.sent.between_bytes += sent_bytes


class TwoLevelTransfer:
    """A transfer under way. `wait` passes on what arrives, and returns when its tensors are ready and free again."""

    def __init__(self, two_level: TwoLevelCollectives, program: CollectiveSteps, name: str) -> None:
        self._two_level, self.program, self._name = two_level, program, name
        self.done = False

    def wait(self) -> None:
        """Finish this transfer, and before it those that were begun earlier; errors are those of
        `TwoLevelCollectives.step`."""
        start = time.perf_counter()
        with phase(self._name):
            while not self.done:
                self._two_level.step()
        self._two_level.add_wait(time.perf_counter() - start)


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
