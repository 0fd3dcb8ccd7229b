"""Tensor shards: the part of each parameter on a tensor-parallel rank, and its place in the whole. Pure: no torch.

The tensor plan of a family (`ModelFamily.tensor_plan`) maps modules, within a block or outside, to one of KINDS.
Source: Shoeybi et al., "Megatron-LM", 2019.
"""

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

# How the matrix (out, in) of a module is cut: by outputs; by outputs that are key and value heads, of which there may
# be fewer than ranks; by outputs, where the input is that of a narrow one; by inputs; by rows of the vocabulary, in
# ranges that may be unequal; not at all, as its few outputs are what all ranks' heads need.
CUT_KINDS = ("column", "column_kv", "column_entered", "row", "vocabulary", "narrow")
EXPERTS = ".mlp.experts."  # in the names of stacks (E, ...)
_BLOCK = re.compile(r"^(?:.*\.)?(?:layers|h)\.\d+\.")


@dataclass(frozen=True)
class TensorShard:
    """[start, stop) along `dim`, the first or the last, or with `sections` any, of a parameter of the whole `shape`.

    `copies` ranks of the tensor axis hold just this, neighbours; `first` says whether this one is the first of them.
    With `sections`, the lengths of matrices that follow one another along `dim`, it is the same share of each, [start,
    stop) of all of them; these are `ranges`, and `window`, `offset` and `runs` have no meaning.
    """

    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    copies: int = 1
    first: bool = True
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.dim in (0, len(self.shape) - 1) or self.sections, self
        assert 0 <= self.start <= self.stop <= self.shape[self.dim], self

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """What it is along `dim`, in order."""
        length, ends = self.shape[self.dim], itertools.accumulate(self.sections, initial=0)
        shares = [(self.start * each // length, self.stop * each // length) for each in self.sections]
        return tuple((at + low, at + high) for at, (low, high) in zip(ends, shares, strict=False)) or (
            (self.start, self.stop),
        )

    @property
    def window(self) -> tuple[int, int] | None:
        """The columns that it is; None where its elements follow one another in the flattened whole."""
        return (self.start, self.stop) if math.prod(self.shape[: self.dim]) > 1 else None

    @property
    def offset(self) -> int:
        """Of its first element in the flattened whole."""
        return self.start * math.prod(self.shape[self.dim + 1 :])

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Elements [start, stop) of the flattened part as runs of elements of the flattened whole, in order."""
        inner = math.prod(self.shape[self.dim + 1 :])
        mine, whole = (self.stop - self.start) * inner, self.shape[self.dim] * inner
        while start < stop:
            row, at = divmod(start, mine)
            count = min(mine - at, stop - start)
            first = row * whole + self.offset + at
            yield first, first + count
            start += count


def find_cut_kind(module: str, kinds: Mapping[str, str]) -> str | None:
    """How the matrix of `module` is cut; None where each rank holds all of it."""
    return kinds.get(_BLOCK.sub("", module))


def plan_tensor_shards(
    shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, str], kv_heads: int, size: int, rank: int,
    sections: Mapping[str, tuple[int, ...]] = MappingProxyType({}), transposed: Collection[str] = (),
) -> dict[str, TensorShard]:  # fmt: skip
    """The slice of each parameter that rank number `rank` of `size` holds; what is not named it holds whole.

    `shapes` are those of whole parameters, by name. That all of it divides is what `find_tensor_problems` says.
    `sections`: see TensorShard, by module; `transposed` modules have matrices (in, out).
    """
    found = {}
    for name, shape in shapes.items():
        module = name.rpartition(".")[0]
        kind = find_cut_kind(module, kinds)
        if kind in (None, "narrow") or (kind == "row" and len(shape) < 2):
            continue  # the bias of a sum over ranks is added once, by each
        last = len(shape) - 1 if (kind == "row") != (module in transposed) else 0
        cut = _cut(shape, kind, last, kv_heads, size, rank)
        found[name] = replace(cut, sections=sections.get(module, ()))
    return found


def plan_expert_shards(
    shapes: Mapping[str, tuple[int, ...]], counts: Sequence[int], rank: int
) -> dict[str, TensorShard]:
    """The experts that rank number `rank` holds of each stack, where ranks hold so many each, in order."""
    start = sum(counts[:rank])
    return {
        name: TensorShard(shape, 0, start, start + counts[rank]) for name, shape in shapes.items() if EXPERTS in name
    }


def _cut(shape: tuple[int, ...], kind: str, dim: int, kv_heads: int, size: int, rank: int) -> TensorShard:
    length, copies, among, place = shape[dim], 1, size, rank
    if kind == "column_kv" and kv_heads < size:
        # A rank holds the one head that its queries use, and so do its neighbours.
        copies = size // kv_heads
        among, place = kv_heads, rank // copies
    assert kind == "vocabulary" or length % among == 0, (shape, kind, among)
    start, stop = length * place // among, length * (place + 1) // among
    return TensorShard(shape, dim, start, stop, copies, rank % copies == 0)


def whole_shapes(
    shapes: Mapping[str, tuple[int, ...]], shards: Mapping[str, TensorShard]
) -> dict[str, tuple[int, ...]]:
    """The shapes of whole parameters, from those of the parts."""
    return {name: shards[name].shape if name in shards else tuple(shape) for name, shape in shapes.items()}


def count_copies(names: Mapping[str, object], shards: Mapping[str, TensorShard], size: int) -> dict[str, int]:
    """How many of the `size` ranks of the tensor axis hold just what this one holds of each parameter."""
    return {name: shards[name].copies if name in shards else size for name in names}
