"""What attention of a context group exchanges, in numbers, and which exchange is chosen. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from phalanx.layout.context_slices import (
    ContextSlices,
    Documents,
    count_keys_received,
    slice_in_pairs,
    split_in_proportion,
)

ACTIVATIONS = 4  # hidden states of a token that gathered keys may take as much as: less than a block's own activations

# Of attention by tiles: queries whose scores are materialized at a time, and bytes of one at the height of the backward
# pass: scores, shares, gradients, and one in 16 bits.
TILE_QUERIES, TILE_SCORE_BYTES = 256, 26


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a rank's attention, and the widths of a head and of the residual stream."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int


def count_exchanged_elements(
    by: str,
    slices: ContextSlices,
    shape: AttentionShape,
    shares: Sequence[float],
    documents: Documents | None = None,
    window: int | None = None,
) -> tuple[int, int]:
    """Elements that the ranks of a group send each other in one layer for one row of a micro-batch: in the forward and
    in the backward pass. `shares` are those of the heads with `heads`."""
    if by != "heads":
        keys = sum(count_keys_received(slices, rank, documents, window) for rank in range(slices.ranks))
        there = keys * 2 * shape.kv_heads * shape.head_dim
        return there, there * (2 if by == "ring" else 1)
    counts, groups = split_in_proportion(shape.kv_heads, shares), shape.heads // shape.kv_heads
    # Pairs of a position and a key head that are on different ranks.
    apart = sum(own * (shape.kv_heads - counts[rank]) for rank, own in enumerate(slices.counts)) * shape.head_dim
    return apart * (2 * groups + 2), apart * (2 * groups + 2)


def count_held_keys(by: str, parts: Sequence[float], length: int) -> int:
    """Keys of other ranks that the rank with the largest of the `parts` of a row of `length` holds at once in a layer:
    of a ring those of one rank and what it gets back of another."""
    largest, *others = sorted(split_in_proportion(length, parts), reverse=True)
    if by == "heads":
        return 0
    return 2 * max(others, default=0) if by == "ring" else length - largest


@lru_cache
def choose_exchange(shape: AttentionShape, ranks: int, length: int) -> tuple[str, str]:
    """`parallel.context_by: auto` for rows of one document of `length` positions: the choice and its reason."""
    slices, even = slice_in_pairs(length, (1.0,) * ranks), (1.0,) * ranks
    keys = count_exchanged_elements("gather", slices, shape, even)
    if shape.kv_heads >= ranks and shape.kv_heads % ranks == 0:
        heads = count_exchanged_elements("heads", slices, shape, even)
        if sum(heads) <= sum(keys):
            return "heads", f"{ranks} ranks divide the {shape.kv_heads} key heads, and heads move fewer bytes than keys"
    if 2 * shape.kv_heads * shape.head_dim * ranks <= ACTIVATIONS * shape.hidden:
        return "gather", "keys and values of a whole row take less memory than the other activations of a part of it"
    return "ring", "keys and values of a whole row take more memory than the other activations of a part of it"
