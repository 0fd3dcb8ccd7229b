"""Topology-aware (two-level) collectives: each byte crosses the links between nodes once.

Ranks are placed by the name of their host, never by their numbers. Every range of a tensor has an owner. On each other
node one rank is that range's relay: the one with the owner's index within its node, wrapped around where a node has
fewer ranks. So the ranks of a node share the work between nodes, whatever numbers of ranks the nodes have.

An all-gather sends a range once around the nodes, from relay to relay, and each relay hands it to the ranks beside it.
A reduce-scatter is the same backwards: the ranks of a node hand their parts of a sum to its relay, and the sum grows on
its way from relay to relay to the owner. An all-reduce is both, piece by piece. Everything is cut into pieces, and a
piece is forwarded as soon as it is there, so that the stages of different pieces overlap. With one rank per node this
is the streaming ring, with one node alone it is a direct exchange: there is nothing to choose.

The sum of an element is taken in an order that only the topology and the owner fix, so it is the same at every call and
for any size of the pieces; and it is taken in one place, so that every rank has the same bits.
`uneven_collectives.PaddedCollectives` is the reference implementation.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from phalanx.comm.chunk_link import (
    CHUNK_BYTES,
    ChunkLink,
    ChunkTask,
    ChunkTransfer,
    CollectiveSteps,
    P2PGroup,
    TransferChunk,
    even_cuts,
    remote_bytes,
    view_chunk,
    wait_steps,
)  # fmt: skip
from phalanx.comm.collectives import Traffic
from phalanx.comm.rendezvous import Topology
from phalanx.system.trace import phase

Combine = Callable[..., torch.Tensor]  # (a, b, out=) -> out, such as torch.add
Finish = Callable[[torch.Tensor], object] | None  # what is done in place with each piece of a result, once


class TwoLevelCollectives:
    """Collectives of one group, over host tensors. Every rank begins the same ones in the same order, from one thread;
    several may be under way, and they end in the order in which they were begun.

    Nothing else on `group` uses tags below `TAGS`. `traffic` counts as that of `RingCollectives`.
    """

    def __init__(
        self,
        group: P2PGroup,
        topology: Topology,
        chunk_bytes: int = CHUNK_BYTES,
        traffic: Traffic | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        """`names` of the group's ranks among all, for error messages."""
        self.link = ChunkLink(group, topology, chunk_bytes, names)
        self.rank, self.world, self._traffic = self.link.rank, self.link.world, traffic or Traffic()
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
        """Advance the oldest transfer in progress by one piece.

        Raises:
            PeerError: a rank is gone, or sent nothing within the group's timeout; this object cannot be used any more.
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
        blocks = self.link.split_chunks(tensor, cuts)
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
        blocks = self.link.split_chunks(tensor, cuts)
        events = self._list_sums(blocks, [])
        room = self.link.allocate_buffers(events, tensor.element_size())
        waiting = self.link.post_receives(deque(events), room, tensor)
        sent = self._send_parts(tensor, blocks)
        yield
        scratch = torch.empty_like(tensor) if keep else tensor

        def place(event: ChunkTask) -> torch.Tensor:
            one, begin = (into, cuts[self.rank]) if event.owner == self.rank else (scratch, 0)
            return one[event.chunk.start - begin : event.chunk.stop - begin]

        yield from self._run_tasks(tensor, events, sent, room, combine, finish, waiting, place)
        self.link.free_buffers.extend(room)
        yield from wait_steps(sent)

    def all_reduce_steps(self, tensor: torch.Tensor, combine: Combine, finish: Finish = None) -> CollectiveSteps:
        """Combine `tensor` in place: each rank makes a range of the result, and sends its pieces to all when ready."""
        cuts = even_cuts(tensor.numel(), self.world)
        blocks, results = self.link.split_chunks(tensor, cuts), self.link.split_chunks(tensor, cuts)
        sums = self._list_sums(blocks, results[self.rank])
        room = self.link.allocate_buffers(sums, tensor.element_size())
        waiting = self.link.post_receives(deque(sums), room, tensor)
        sent = self._send_parts(tensor, blocks)
        # What is gathered overwrites what was sent from there. It cannot come too early: it is a sum with this rank's
        # part in it, so that has left.
        events, rest = self._post_gather(tensor, results, len(self.link.topology.nodes) - 1)
        yield
        yield from self._run_tasks(tensor, sorted([*sums, *events]), sent, room, combine, finish, waiting)
        self.link.free_buffers.extend(room)
        yield from wait_steps([*rest, *sent])

    def exchange_steps(
        self, outgoing: Sequence[torch.Tensor | None], incoming: Sequence[torch.Tensor | None]
    ) -> CollectiveSteps:
        """Send a flat tensor to each rank and receive one from each, of sizes that the two sides agree on; None or an
        empty one: nothing. All-to-all, gather and scatter."""
        tag = self.link.take_tag()
        # The directions take turns piece by piece, and each rank begins at another one: one direction after the other,
        # all ranks would send to the same rank at the same time.
        ahead = [(self.rank + away) % self.world for away in range(1, self.world)]
        received = [self.link.receive(part, rank, tag) for rank, part in self.link.interleave(ahead[::-1], incoming)]
        sent = [self.link.send(part, rank, tag) for rank, part in self.link.interleave(ahead, outgoing)]
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
            relay = self.link.topology.relay(self.link.node, owner)
            stage = first_stage + (self.link.node - self.link.topology.node_of[owner]) % len(self.link.topology.nodes)
            source = self.link.topology.relay(self.link.node - 1, owner) if relay == self.rank else relay
            events = [ChunkTask(stage, number, owner, piece, (source,), False) for number, piece in enumerate(pieces)]
            (passed_on if relay == self.rank else kept).extend(events)
        for event in (*sorted(passed_on), *sorted(kept)):
            part = tensor[event.chunk.start : event.chunk.stop]
            event.transfers.append(self.link.receive(part, event.sources[0], event.chunk.tag))
        return sorted(passed_on), [event.transfers[0] for event in sorted(kept)]

    def _list_sums(
        self, blocks: Sequence[Sequence[TransferChunk]], results: Sequence[TransferChunk]
    ) -> list[ChunkTask]:
        """The pieces to which this rank adds, as a relay or as the owner, in order."""
        events = []
        for owner, pieces in enumerate(blocks):
            if self.link.topology.relay(self.link.node, owner) != self.rank:
                continue
            stage = self._stage(owner)
            sources = self.link.local_peers + (
                (self.link.topology.relay(self.link.node - 1, owner),) if stage > 0 else ()
            )
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
            target, stage = self.link.topology.relay(self.link.node, owner), self._stage(owner)
            if target == self.rank:
                if self.link.local_peers or stage > 0 or owner == self.rank:
                    continue
                target = self.link.topology.relay(self.link.node + 1, owner)
            parts.extend((stage, number, owner, target, piece) for number, piece in enumerate(pieces))
        parts.sort(key=lambda part: part[:3])
        return [self.link.send(tensor[piece.start : piece.stop], target, piece.tag) for *_, target, piece in parts]

    def _stage(self, owner: int) -> int:
        """How many nodes the sum of a range has passed when it comes to this one; it ends at its owner's."""
        return (self.link.node - self.link.topology.node_of[owner] - 1) % len(self.link.topology.nodes)

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
                sent.append(self.link.send(mine, self.link.topology.relay(self.link.node + 1, event.owner), piece.tag))
            else:
                if finish is not None:
                    finish(total)
                if event.result is not None:
                    sent.extend(self._forward(tensor, [event.result], self.rank))
            room.extend(event.buffers)
            if waiting:
                self.link.post_receives(waiting, room, tensor)
            yield

    def _forward(self, tensor: torch.Tensor, pieces: Sequence[TransferChunk], owner: int) -> list[ChunkTransfer]:
        """Send complete pieces to the next node, unless they come from there, and then to the ranks beside."""
        onward = (self.link.node + 1) % len(self.link.topology.nodes)
        targets = [] if onward == self.link.topology.node_of[owner] else [self.link.topology.relay(onward, owner)]
        return [
            self.link.send(tensor[piece.start : piece.stop], target, piece.tag)
            for some in (targets, self.link.local_peers)
            for piece in pieces
            for target in some
        ]

    def add_wait(self, seconds: float) -> None:
        """Take note that the calling thread was held up."""
        self._traffic.add_wait(seconds)


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
