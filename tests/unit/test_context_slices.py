"""Slices of context parallelism: every position has one owner, in proportion, and every key is where it is needed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.layout.context_slices import (
    ContextSlices,
    count_keys_received,
    plan_attention,
    slice_by_work,
    slice_in_pairs,
    split_in_proportion,
)

SHARES = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 7.5]), min_size=1, max_size=5).filter(any)


def positions_of(slices: ContextSlices, rank: int) -> Any:
    return np.array([position for each in slices.ranges_of(rank) for position in each], np.int64)


def packed(draw: Any, length: int, rows: int) -> list[list[int]]:
    """Offsets of documents in some rows."""
    cuts = [sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4))) for _ in range(rows)]
    return [[0, *(c for c in row if c < length), length] for row in cuts]


def check_partition(slices: ContextSlices) -> None:
    every = np.concatenate([positions_of(slices, rank) for rank in range(slices.ranks)])
    assert sorted(every.tolist()) == list(range(slices.length))
    assert sum(slices.counts) == slices.length


def pairs_of(slices: ContextSlices) -> list[int]:
    """(Query, key) pairs of causal attention of each rank."""
    return [int((positions_of(slices, rank) + 1).sum()) for rank in range(slices.ranks)]


@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 1.0), (5.0, 2.0, 1.0), (1.0, 1.0, 1.0, 1.0)])
def test_pairs_share_tokens_and_attention_in_exact_proportion(shares: tuple[float, ...]) -> None:
    slices = slice_in_pairs(256, shares)
    pairs = pairs_of(slices)
    for rank, share in enumerate(shares):
        assert slices.counts[rank] / 256 == share / sum(shares)
        assert pairs[rank] / sum(pairs) == share / sum(shares)


@given(st.integers(1, 70), SHARES, st.integers(1, 6))
def test_pairs_are_a_partition(length: int, shares: Sequence[float], multiple: int) -> None:
    slices = slice_in_pairs(length * multiple, tuple(shares), multiple)
    check_partition(slices)
    for rank, share in enumerate(shares):
        assert slices.count_of(rank) % multiple == 0
        assert share > 0 or slices.count_of(rank) == 0


@given(st.data(), st.integers(1, 60), SHARES, st.integers(1, 3), st.sampled_from([0.0, 3.0, 1000.0]), st.integers(1, 4))
def test_slices_by_work_are_contiguous_and_near_their_shares(
    data: Any, length: int, shares: Sequence[float], rows: int, work: float, multiple: int
) -> None:
    length *= multiple
    documents = packed(data.draw, length, rows)
    slices = slice_by_work(documents, work, shares, None, multiple)
    check_partition(slices)
    costs = np.zeros(length)
    for offsets in documents:
        begin = np.array(offsets)[np.searchsorted(offsets, np.arange(length), side="right") - 1]
        costs += work + np.arange(length) - begin + 1
    for rank, share in enumerate(shares):
        assert len(slices.ranges_of(rank)) <= 1
        assert share > 0 or slices.count_of(rank) == 0
        mine = costs[positions_of(slices, rank)].sum()
        assert abs(mine - share / sum(shares) * costs.sum()) <= 2 * multiple * costs.max() + 1e-9
        assert slices.count_of(rank) % multiple == 0


def test_splitting_gives_nothing_to_who_has_no_share() -> None:
    assert split_in_proportion(7, [1.0, 0.0, 1.0]) == [4, 0, 3]
    assert split_in_proportion(2, [5.0, 2.0, 1.0]) == [1, 1, 0]


@given(st.data(), st.integers(1, 40), SHARES, st.booleans(), st.sampled_from([None, 1, 3, 200]))
def test_tiles_are_all_pairs_that_attend_once(
    data: Any, length: int, shares: Sequence[float], whole: bool, window: int | None
) -> None:
    rows = data.draw(st.integers(1, 2))
    documents = None if whole else packed(data.draw, length, rows)
    slices = (
        slice_in_pairs(length, tuple(shares)) if whole else slice_by_work(packed_or(documents), 2.0, shares, window)
    )
    position = np.arange(length)
    for rank in range(slices.ranks):
        plan = plan_attention(slices, rank, rows, documents, window)
        mine = positions_of(slices, rank)
        found = np.zeros((rows, length, length), np.int64)
        for block in (plan.own, *plan.others):
            theirs = positions_of(slices, block.owner)
            keys = np.concatenate([theirs[:0], *(theirs[part] for part in block.parts)])
            assert len(keys) == block.count
            for tile in block.tiles:
                q, k = mine[tile.queries], keys[tile.keys]
                # Without gaps, from where the tile says.
                assert (np.diff(q) == 1).all() and (np.diff(k) == 1).all()
                assert (q[0], k[0]) == (tile.first_query, tile.first_key)
                back = q[:, None] - k[None, :]
                seen = np.ones_like(back, bool) if tile.kind == "full" else back >= 0
                if tile.kind == "band":
                    assert window is not None
                    seen &= back < window
                if tile.kind == "causal":
                    assert len(q) == len(k) and q[0] == k[0]
                found[tile.rows, q[:, None], k[None, :]] += seen
        wanted = np.zeros_like(found)
        for row in range(rows):
            offsets = np.array([0, length]) if documents is None else documents[row]
            document = np.searchsorted(offsets, position, side="right")
            back = position[:, None] - position[None, :]
            seen = (back >= 0) & (document[:, None] == document[None, :])
            wanted[row] = seen if window is None else seen & (back < window)
        others = np.setdiff1d(position, mine)
        wanted[:, others] = 0
        assert (found == wanted).all()
        # What is sent is what is received.
        for block in plan.others:
            theirs = plan_attention(slices, block.owner, rows, documents, window)
            assert theirs.sends[rank] == block.parts
        assert plan.received == count_keys_received(slices, rank, documents, window)


def packed_or(documents: Any) -> Any:
    assert documents is not None
    return documents
