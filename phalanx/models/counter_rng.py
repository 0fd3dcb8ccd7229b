"""Counter-based random numbers: a draw depends on its coordinates, not on rank, order or repetition.

Every draw is a hash of integers in plain tensor operations, so that layout, batch split, restart and recomputation
change no number, and `torch.compile` supports all of it. The hash is the finaliser of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014) on int64 with wrap-around.
"""

import hashlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

# The constants of SplitMix64 as signed 64-bit numbers: 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB.
_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685
# A CPU kernel splits a tensor of more than 32768 elements over threads, and a vectorized logarithm may differ from the
# scalar one in the last bit at such a boundary, and behind the last whole vector; blocks of at most so many pairs, and
# of whole units, avoid both.
_PAIRS_PER_BLOCK = 32768
_PAIRS_PER_UNIT = 512
_PAIRS_PER_BLOCK_ACCELERATOR = 1 << 22
_SCORES = 1 << 40  # sites of attention's probabilities, beside those of dropout


def derive_key(seed: int, *coordinates: int | str) -> int:
    """Derive a signed 64-bit key from a seed and any coordinates; the same on every machine and Python version."""
    digest = hashlib.sha256(repr((int(seed), *coordinates)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def random_bits(key: int | Tensor, counters: Tensor) -> Tensor:
    """64 random bits (int64) for each int64 counter: SplitMix64's output number `key ^ counter`, started at 0.

    `key` is a Python integer or an int64 tensor that broadcasts with `counters`.
    """
    # Combine the counter with the key before multiplying: a compiled `arange * constant` overflows, which gcc treats as
    # undefined behaviour and drops the end of the loop (seen with torch 2.13).
    z = (counters ^ key) * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, places: int) -> Tensor:
    return (z >> places) & ((1 << (64 - places)) - 1)  # >> on int64 extends the sign


def normal(key: int, start: int, stop: int, *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Standard normal draws for elements [start, stop) of a flat parameter: a 1-D tensor of `stop - start` elements.

    Element i depends on (key, i) only, so any slicing gives the same numbers. Box-Muller in float64 (Box and Muller,
    1958), block by block, so that the extra memory is a few MiB on a CPU. Raises ValueError if the range is negative or
    reversed.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"normal() got the range [{start}, {stop})")
    out = torch.empty(stop - start, device=device, dtype=dtype)
    unit = 2 * _PAIRS_PER_UNIT
    most = 2 * (_PAIRS_PER_BLOCK if out.device.type == "cpu" else _PAIRS_PER_BLOCK_ACCELERATOR)
    first = start - start % unit
    while first < stop:
        count = min(most, math.ceil((stop - first) / unit) * unit)
        low, high = max(start, first), min(stop, first + count)
        out[low - start : high - start] = _normal_block(key, first, count, out.device)[low - first : high - first]
        first += count
    return out


def _normal_block(key: int, first: int, count: int, device: torch.device) -> Tensor:
    counters = torch.arange(first, first + count, device=device).view(-1, 2)
    uniform = _shift_right(random_bits(key, counters), 11).double()  # 53 bits, the precision of float64
    radius = torch.sqrt(-2.0 * torch.log((uniform[:, 0] + 1.0) * 2.0**-53))  # the logarithm's argument is never 0
    angle = uniform[:, 1] * (2.0 * math.pi * 2.0**-53)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1).flatten()


def uniform(key: int, start: int, stop: int, *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Uniform draws from [0, 1) for elements [start, stop) of a flat parameter: a 1-D tensor of `stop - start`
    elements.

    Element i depends on (key, i) only; it is a multiple of 2^-24, exact in float32.
    """
    counters = torch.arange(start, stop, device=device)
    return _shift_right(random_bits(key, counters), 40).to(dtype).mul_(2.0**-24)


def dropout_mask(key: int | Tensor, samples: Tensor, positions: Tensor, width: int, p: float) -> Tensor:
    """The dropout mask of the elements to keep: bool (B, S, width) for samples (B,) and positions (S,).

    Element (b, s, c) depends on (key, samples[b], positions[s], c) only. `p` is rounded to a multiple of 2^-32.
    """
    rows = random_bits(random_bits(key, samples)[:, None], positions[None, :])
    words = random_bits(rows[..., None], torch.arange((width + 1) // 2, device=rows.device))
    # One 64-bit word serves two channels, which halves the hashing; 32 bits are enough for a probability.
    halves = torch.stack((words & 0xFFFFFFFF, _shift_right(words, 32)), dim=-1)
    return halves.flatten(-2)[..., :width] >= _threshold(p)


def _threshold(p: float) -> int:
    """The threshold of probability `p` among 32-bit numbers."""
    return round(p * 2**32)


@dataclass
class CounterRNG:
    """Counter-based random numbers for the dropout of a micro-batch: the same on any ranks and in any order.

    A task's `loss_sum` gets one, and passes it on to the model. Compiled code sees `step_key`, a 0-dim tensor,
    so another step or seed never recompiles anything.

    Args:
        seed: `train.seed` of the recipe.
        step: Number of the step, or a 0-dim int64 tensor of it.
        samples: Position of each row's sample in the run, (B,) int64.
        first: Position in its row of the first that a tensor holds, where sequences are split over ranks.
        positions: Positions in its row of those that a tensor holds, (S,) int64, where they do not follow one another.

    Examples:
        >>> draws = phalanx.CounterRNG(seed=0, step=1, samples=torch.tensor([5, 6]))
        >>> x = torch.ones(2, 4, 3)
        >>> torch.equal(draws.dropout(x, site=0, p=0.5), draws.dropout(x, site=0, p=0.5))
        True
    """

    seed: int
    step: int | Tensor
    samples: Tensor
    first: int = 0
    positions: Tensor | None = None
    step_key: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        step = self.step
        if isinstance(step, int):
            step = torch.full((), step, dtype=torch.int64, device=self.samples.device)
        self.step_key = random_bits(derive_key(self.seed, "dropout"), step)

    def dropout(self, x: Tensor, site: int | Tensor, p: float) -> Tensor:
        """Zero elements with probability `p` and scale the others by 1 / (1 - p).

        A draw depends on the seed, the step, the site, the sample, the position and the channel alone.

        Args:
            x: A tensor (B, S, D) of samples, positions and channels.
            site: A number for each place of dropout in the model; as a 0-dim int64 tensor it is not compiled into code.
            p: The probability; 0 returns `x` itself.
        """
        if p == 0.0:
            return x
        if isinstance(site, int):
            site = torch.full((), site, dtype=torch.int64, device=x.device)
        positions = self.positions
        if positions is None:
            positions = torch.arange(self.first, self.first + x.shape[1], device=x.device)
        kept = dropout_mask(random_bits(self.step_key, site), self.samples, positions, x.shape[2], p)
        return torch.where(kept, x * (1.0 / (1.0 - p)), 0.0)

    def keep_scores(
        self, site: Tensor, heads: range, queries: range, keys: range, p: float, rows: slice = slice(None)
    ) -> Tensor:
        """Draw which probabilities of attention survive a dropout of probability `p`.

        A draw depends on the seed, the step, the site, the sample, the head and both positions alone.

        Args:
            site: A number for each place of dropout in the model, a 0-dim int64 tensor.
            heads: Numbers of the heads in the whole model.
            queries, keys: Positions in the row.
            p: The probability.
            rows: The rows of the micro-batch that it is asked for.

        Returns:
            bool (B, heads, queries, keys)
        """

        def count(numbers: range) -> Tensor:
            return torch.arange(numbers.start, numbers.stop, device=site.device)

        hashed = random_bits(random_bits(self.step_key, site + _SCORES), self.samples[rows])
        hashed = random_bits(random_bits(hashed[:, None], count(heads))[..., None], count(queries))
        words = random_bits(hashed[..., None], count(range(keys.start // 2, (keys.stop + 1) // 2)))
        halves = torch.stack((words & 0xFFFFFFFF, _shift_right(words, 32)), dim=-1).flatten(-2)
        odd = keys.start % 2
        return halves[..., odd : odd + len(keys)] >= _threshold(p)
