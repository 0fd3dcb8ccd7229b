"""Compressed collectives: traffic between nodes is encoded (see below), and so is gathered data.

A number must be rounded once, not at every hop. So a sum does not grow from node to node here: the ranks of
a node add up their parts exactly, at the relay of each range (two_level.py), which sends its node's sum, encoded,
straight to the owner. The owner rounds its own node's sum, too, and adds up what it decodes in the order of the nodes,
so that a sum does not depend on whose it is; on one node nothing is rounded. With even shards that takes no more bytes
than a ring; with uneven ones the owner of the share s receives (M - 1) s B from M nodes.

What is gathered is encoded by its owner and decoded by all, the owner included, and within a node, too: every rank has
the same bits, and they are the same for any number of nodes.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch

from phalanx.comm.chunk_link import (
    ChunkTask,
    ChunkTransfer,
    CollectiveSteps,
    TransferChunk,
    even_cuts,
    view_chunk,
    wait_steps,
)
from phalanx.comm.rendezvous import Topology
from phalanx.comm.two_level import TwoLevelCollectives, TwoLevelTransfer
from phalanx.layout.buckets import COMPRESSED_BYTES, GRANULE

# --------------------------------------------------------------------------------------------------------------- codec
# The codecs: bfloat16, or blocks of 8-bit integers.
# Rounding is to the nearest, without memory of what was rounded before, so the same numbers always become the same
# bytes. Anything that is not finite stays so. Blocks are counted from the beginning of what is encoded: where ranges
# begin and end at multiples of `BLOCK`, what becomes of an element does not depend on who owns it.


BLOCK = GRANULE  # elements with a common scale: shards are cut at multiples of it
INT8_MAX = 127


class Codec(Protocol):
    """A codec: the encoding of numbers in fewer bytes. Tensors are flat, and bytes are `torch.uint8`."""

    def byte_size(self, elements: int) -> int:
        """Bytes of so many elements."""
        ...

    def encode(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Write `values` as `byte_size(values.numel())` bytes."""
        ...

    def decode(self, coded: torch.Tensor, into: torch.Tensor) -> None:
        """Decode the bytes in the type of `into`."""
        ...


class BFloat16Codec:
    """8 bits of each number's mantissa, and its whole range."""

    def byte_size(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: torch.Tensor, into: torch.Tensor) -> None:
        into.view(torch.bfloat16).copy_(values)

    def decode(self, coded: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(coded.view(torch.bfloat16))


class Int8Codec:
    """Blocks of `BLOCK` numbers as multiples of a scale, from -127 to 127 of them; the scales, in bfloat16,
    come first.

    An error is at most half of 1/127 of the greatest number of its block: the greatest may be cut where its scale was
    rounded down, but by no more than a quarter of that.
    """

    def byte_size(self, elements: int) -> int:
        return 2 * -(-elements // BLOCK) + elements + elements % 2  # even, so that scales are never cut

    def encode(self, values: torch.Tensor, into: torch.Tensor) -> None:
        whole = values.numel() // BLOCK * BLOCK
        scales, numbers = self._parts(into, values.numel())
        self._encode(values[:whole].view(-1, BLOCK), scales[: whole // BLOCK], numbers[:whole].view(-1, BLOCK))
        if whole < values.numel():
            self._encode(values[None, whole:], scales[-1:], numbers[None, whole:])

    @staticmethod
    def _encode(blocks: torch.Tensor, scales: torch.Tensor, numbers: torch.Tensor) -> None:
        if not len(blocks):
            return
        blocks = blocks if blocks.dtype == torch.float64 else blocks.float()
        greatest = torch.maximum(blocks.amax(1), -blocks.amin(1))  # much faster than a norm
        scales.copy_(greatest / INT8_MAX)
        scales.masked_fill_(~scales.isfinite(), torch.nan)  # what is not finite makes its whole block NaN
        wide = scales.to(blocks.dtype)[:, None]
        # Nothing but zeros, or what is as good as zero, has the scale 0.
        numbers.copy_((blocks / wide).nan_to_num_(0.0).round_().clamp_(-INT8_MAX, INT8_MAX))

    def decode(self, coded: torch.Tensor, into: torch.Tensor) -> None:
        whole = into.numel() // BLOCK * BLOCK
        scales, numbers = self._parts(coded, into.numel())
        wide = into.dtype if into.dtype == torch.float64 else torch.float32
        scales = scales.to(wide)
        if whole:
            blocks, target = numbers[:whole].view(-1, BLOCK), into[:whole].view(-1, BLOCK)
            if into.dtype == wide:
                target.copy_(blocks).mul_(scales[: whole // BLOCK, None])
            else:
                target.copy_(blocks.to(wide).mul_(scales[: whole // BLOCK, None]))
        if whole < into.numel():
            into[whole:].copy_(numbers[whole:].to(wide).mul_(scales[-1]))

    @staticmethod
    def _parts(coded: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        heads = 2 * -(-elements // BLOCK)
        return coded[:heads].view(torch.bfloat16), coded[heads : heads + elements].view(torch.int8)


NO_COMPRESSION = "none"  # of codecs: numbers travel as they are
CODECS: dict[str, Codec] = {"bf16": BFloat16Codec(), "int8": Int8Codec()}


def wire_bytes_per_element(dtype: torch.dtype, compress: str) -> float:
    """Bytes in which an element of a dtype is sent with `comm.compress`."""
    return min(COMPRESSED_BYTES[compress] or dtype.itemsize, float(dtype.itemsize))


# ---------------------------------------------------------------------------------------------- compressed collectives


# What goes straight to its owner gains nothing by many pieces; those of an encoded tensor are short anyway.
CHUNK_BYTES = 2**20  # before it is encoded
CHUNKS = 4


class CompressedCollectives:
    """Transfers over `line`, which may be used for exact ones, too, in the same order on all ranks."""

    def __init__(self, two_level: TwoLevelCollectives, codec: Codec) -> None:
        self._two_level, self._codec = two_level, codec

    @property
    def rank(self) -> int:
        return self._two_level.rank

    def reduce_scatter(self, tensor: torch.Tensor, cuts: Sequence[int], into: torch.Tensor) -> TwoLevelTransfer:
        """Begin to sum `tensor`, flat, which is overwritten; `into` receives the range [cuts[rank], cuts[rank + 1])."""
        return self._two_level.begin_transfer(
            self._reduce_steps(tensor, cuts, into), self._remote_bytes(cuts), "reduce"
        )

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[int]) -> TwoLevelTransfer:
        """Begin to fill `tensor`, flat, with what decoding makes of all ranges, the own one among them."""
        return self._two_level.begin_transfer(self._gather_steps(tensor, cuts), self._remote_bytes(cuts), "gather")

    def all_reduce(self, tensor: torch.Tensor) -> TwoLevelTransfer:
        """Begin to sum `tensor`, flat, in place. What nodes have summed is rounded, and so is the sum of all."""
        blocks = even_cuts(-(-tensor.numel() // BLOCK), self._two_level.world)
        cuts = [min(block * BLOCK, tensor.numel()) for block in blocks]
        own = tensor[cuts[self.rank] : cuts[self.rank + 1]]

        def both() -> CollectiveSteps:
            yield from self._reduce_steps(tensor, cuts, own)
            yield from self._gather_steps(tensor, cuts)

        return self._two_level.begin_transfer(both(), 2 * self._remote_bytes(cuts), "reduce")

    # ------------------------------------------------------------------------------------------------------- programs

    def _reduce_steps(self, tensor: torch.Tensor, cuts: Sequence[int], into: torch.Tensor) -> CollectiveSteps:
        line = self._two_level.link
        blocks = line.split_chunks(tensor, cuts, BLOCK, CHUNKS)
        parts, sums = self._split_work(blocks)
        ready = [event for event in sums if not event.sources and event.owner != self.rank]
        arriving = [self._arriving(piece) for piece in blocks[self.rank]]
        room = line.allocate_buffers(sums, tensor.element_size())
        waiting = line.post_receives(deque(event for event in sums if event.sources), room, tensor)
        sent = [line.send(tensor[piece.start : piece.stop], target, piece.tag) for target, piece in parts]
        sent += [self._send(tensor[event.chunk.start : event.chunk.stop], event) for event in ready]
        yield
        for event in sums[len(ready) :]:
            piece, own = event.chunk, event.owner == self.rank
            mine = tensor[piece.start : piece.stop]
            total = into[piece.start - cuts[self.rank] : piece.stop - cuts[self.rank]] if own else mine
            for work, memory in zip(event.transfers, event.buffers, strict=True):
                work.wait()
                torch.add(mine, view_chunk(memory, piece, tensor), out=total)
                mine = total
            room.extend(event.buffers)
            line.post_receives(waiting, room, tensor)
            if own:
                if not event.buffers and total.data_ptr() != mine.data_ptr():
                    total.copy_(mine)
                if arriving[event.number]:
                    self._add_nodes(total, arriving[event.number])
            else:
                sent.append(self._send(total, event))
            yield
        line.free_buffers.extend(room)
        yield from wait_steps(sent)

    def _add_nodes(self, total: torch.Tensor, arriving: Sequence[tuple[int, ChunkTransfer, torch.Tensor]]) -> None:
        """Add the sums of all nodes, each rounded, in the order of the nodes, to `total`, which has this node's."""
        coded = {node: coded for node, _, coded in arriving}
        coded[self._two_level.link.node] = torch.empty(self._codec.byte_size(total.numel()), dtype=torch.uint8)
        self._codec.encode(total, coded[self._two_level.link.node])
        for _, way, _ in arriving:
            way.wait()
        decoded = torch.empty_like(total)
        for number, node in enumerate(sorted(coded)):
            self._codec.decode(coded[node], decoded if number else total)
            if number:
                total.add_(decoded)

    def _gather_steps(self, tensor: torch.Tensor, cuts: Sequence[int]) -> CollectiveSteps:
        ranges = list(pairwise(cuts))
        coded_cuts = list(accumulate((self._codec.byte_size(stop - start) for start, stop in ranges), initial=0))
        coded = torch.empty(coded_cuts[-1], dtype=torch.uint8)
        own = slice(*ranges[self.rank])
        self._codec.encode(tensor[own], coded[coded_cuts[self.rank] : coded_cuts[self.rank + 1]])
        yield from self._two_level.gather_steps(coded, coded_cuts)
        for (start, stop), (first, last) in zip(ranges, pairwise(coded_cuts), strict=True):
            self._codec.decode(coded[first:last], tensor[start:stop])

    def _split_work(
        self, blocks: Sequence[Sequence[TransferChunk]]
    ) -> tuple[list[tuple[int, TransferChunk]], list[ChunkTask]]:
        """The pieces that go to relays beside this rank, and to whom; and those of which this rank adds up its node's
        parts, in order: those of others, each beginning at another node, then its own."""
        line, topology = self._two_level.link, self._two_level.link.topology
        parts: list[tuple[int, int, int, TransferChunk]] = []
        sums: list[tuple[int, ChunkTask]] = []
        for owner, pieces in enumerate(blocks):
            relay = topology.relay(line.node, owner)
            away = (topology.node_of[owner] - line.node) % len(topology.nodes)
            for number, piece in enumerate(pieces):
                if relay == self.rank:
                    sums.append(
                        (away, ChunkTask(int(owner == self.rank), number, owner, piece, line.local_peers, True))
                    )
                else:
                    parts.append((number, away, relay, piece))
        parts.sort(key=lambda part: part[:3])
        sums.sort(key=lambda one: (one[1].stage, one[0], one[1].number, one[1].owner))
        return [(relay, piece) for _, _, relay, piece in parts], [event for _, event in sums]

    def _arriving(self, piece: TransferChunk) -> list[tuple[int, ChunkTransfer, torch.Tensor]]:
        """The encoded sums of the other nodes for a piece of the own range, with their numbers."""
        line, found = self._two_level.link, []
        for away in range(1, len(line.topology.nodes)):
            coded = torch.empty(self._codec.byte_size(piece.stop - piece.start), dtype=torch.uint8)
            node = (line.node + away) % len(line.topology.nodes)
            source = line.topology.relay(node, self.rank)
            found.append((node, line.receive(coded, source, piece.tag), coded))
        return found

    def _send(self, total: torch.Tensor, event: ChunkTask) -> ChunkTransfer:
        coded = torch.empty(self._codec.byte_size(total.numel()), dtype=torch.uint8)
        self._codec.encode(total, coded)
        return self._two_level.link.send(coded, event.owner, event.chunk.tag)

    def _remote_bytes(self, cuts: Sequence[int]) -> int:
        sizes = [self._codec.byte_size(stop - start) for start, stop in pairwise(cuts)]
        return sum(sizes) - sizes[self.rank]


def describe_node_change(compress: str, saved_node_of: Any, topology: Topology) -> str | None:
    """The warning for a resumed run whose ranks are placed on nodes differently than in `saved_node_of` (the node of
    each rank, as a checkpoint's header has it; None: not known); None where that changes nothing.

    The sum of each node is rounded, so which ranks share a node is part of the algorithm. On one node no sum is.
    """
    now = list(topology.node_of)
    if compress == NO_COMPRESSION or saved_node_of in (None, now) or max(*saved_node_of, *now) == 0:
        return None
    return (
        f"compress: {compress} rounds the sum of each node, and the ranks are placed on nodes differently than when "
        "the checkpoint was saved, so the loss curve may differ slightly from here on"
    )
