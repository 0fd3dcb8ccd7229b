"""Shuffling by a stateless permutation, computed element by element, the same on every machine and in every version."""

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
ORDER_BLOCK = 1024


def shuffle_indices(seed: int, epoch: int, n: int, index: NDArray[np.integer], name: str = "") -> NDArray[np.int64]:
    """The shuffled order of `n` things: where each of `index` (any shape, values in [0, n)) goes, as int64.

    A bijection of range(n) for each (seed, epoch, name), computed element by element, so that no rank ever holds the
    order; `name` keeps the orders of several things with the same seed apart.
    Source: a Feistel network on the next power of two (Luby and Rackoff 1988) with cycle walking (Black and Rogaway
    2002); its round function is the finaliser of splitmix64 (Steele et al. 2014).
    """
    assert not index.size or 0 <= index.min() <= index.max() < n, f"an index outside [0, {n})"
    bits = (n - 1).bit_length()
    right_bits = np.uint64((bits + 1) // 2)
    left_mask, right_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << (bits + 1) // 2) - 1)
    digest = hashlib.shake_256(f"phalanx order {seed} {epoch}{' ' * bool(name)}{name}".encode()).digest(8 * ROUNDS)
    keys = np.frombuffer(digest, "<u8").astype(np.uint64)
    result = index.astype(np.uint64).reshape(-1)
    pending = np.arange(result.size)  # those still outside [0, n): the walk continues for them only
    while pending.size:
        value = result[pending]
        left, right = value >> right_bits, value & right_mask
        for number in range(0, ROUNDS, 2):
            left ^= _mix(right + keys[number]) & left_mask
            right ^= _mix(left + keys[number + 1]) & right_mask
        value = (left << right_bits) | right
        result[pending] = value
        pending = pending[value >= n]
    return result.astype(np.int64).reshape(index.shape)


def shuffle_by_blocks(seed: int, epoch: int, n: int, index: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """`shuffle_indices`, remembered in blocks: of a few elements it costs nearly as much as of a thousand."""
    result = np.empty_like(index)
    blocks, within = np.divmod(index, ORDER_BLOCK)
    for block in range(int(blocks.min(initial=0)), int(blocks.max(initial=-1)) + 1):
        here = blocks == block
        result[here] = shuffle_block(seed, epoch, n, block, name)[within[here]]
    return result


@functools.lru_cache(maxsize=64)
def shuffle_block(seed: int, epoch: int, n: int, block: int, name: str) -> NDArray[np.int64]:
    """The order of the elements [block * ORDER_BLOCK, (block + 1) * ORDER_BLOCK) of `n`."""
    start = block * ORDER_BLOCK
    return shuffle_indices(seed, epoch, n, np.arange(start, min(start + ORDER_BLOCK, n)), name)


@functools.lru_cache(maxsize=4)
def mixture_block(seed: int, block: int, quotas: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each sequence of a block of a mixture, its source and how many of the block before it have the same one."""
    slots = shuffle_indices(seed, block, sum(quotas), np.arange(sum(quotas)), "mixture")
    takes = np.searchsorted(np.cumsum(quotas), slots, side="right").astype(np.int64)
    nth = np.empty_like(takes)
    for source, quota in enumerate(quotas):
        nth[takes == source] = np.arange(quota)
    return takes, nth


def random_bits(seed: int, name: str, sample: int, count: int) -> NDArray[np.uint64]:
    """`count` draws of 64 random bits that belong to a sample: a function of (seed, name, sample) alone.

    Source: SplitMix64 (Steele et al. 2014), begun at a hash of the three.
    """
    digest = hashlib.sha256(f"phalanx bits {seed} {sample} {name}".encode()).digest()
    start = np.frombuffer(digest[:8], "<u8").astype(np.uint64)
    return _mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
