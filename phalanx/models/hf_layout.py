"""The layout of parameters in the tensors of Hugging Face folders: one or several per tensor, or one in many.

Experts, which are one parameter here, have a tensor each there. Some models fuse queries, keys and values in one
matrix, or gate and up projection; and some store matrices (in, out). Here each is a separate parameter (out, in), so
that all other code has one layout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from phalanx.layout.model_shape import ADAPTED_MODULES, ModelSpec
from phalanx.models.model import Architecture
from phalanx.models.user_model import hf_name, hf_stack, shapes_of

_HEADS = (".attention.q.", ".attention.k.", ".attention.v.")  # in names of parameters


@dataclass(frozen=True)
class Place:
    """The place of a parameter of `shape` in the tensor `name` of shape `whole`: an equal number of rows in each of its
    `groups` parts, from row `first` of the part on. A `transposed` tensor is stored (in, out)."""

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    groups: int = 1
    first: int = 0
    transposed: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in the folder."""
        return self.whole[::-1] if self.transposed else self.whole

    @property
    def alone(self) -> bool:
        """Whether the tensor has no other parameter."""
        return self.shape == self.whole and not self.transposed

    def find_in(self, tensor: Tensor) -> Tensor:
        """View this parameter in a stored tensor: (groups, rows of a group, ...)."""
        whole = tensor.T if self.transposed else tensor
        part = self.shape[0] // self.groups
        return whole.unflatten(0, (self.groups, -1))[:, self.first : self.first + part]

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Convert elements [start, stop) of the flattened parameter to ranges of the flattened tensor, unless
        `transposed`."""
        inner = 1
        for size in self.shape[1:]:
            inner *= size
        mine, theirs = (each[0] // self.groups * inner for each in (self.shape, self.whole))
        while start < stop:
            group, at = divmod(start, mine)
            count = min(mine - at, stop - start)
            begin = group * theirs + self.first * inner + at
            yield begin, begin + count
            start += count


@dataclass(frozen=True)
class Matrix:
    """A matrix of the folder, of the shape `stored`, that is elements from `start` on of a parameter that stacks
    them."""

    stored: tuple[int, ...]
    start: int


def find_places(
    model_class: type[Architecture], spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Place]:
    """Find the place of each parameter of `shapes` that is no stack of experts, by our names."""
    names = {
        name: hf_name(name, model_class) for name, shape in shapes.items() if not hf_stack(name, shape, model_class)
    }
    parts: dict[str, list[str]] = {}
    for name, theirs in names.items():
        parts.setdefault(theirs, []).append(name)
    found = {}
    for theirs, together in parts.items():
        rows = sum(shapes[name][0] for name in together)
        grouped = model_class.hf_grouped and len(together) > 1 and all(each in _around(together) for each in _HEADS)
        groups, first = spec.kv_heads if grouped else 1, 0
        for name in together:
            shape = shapes[name]
            transposed = name.endswith(model_class.hf_transposed) and len(shape) > 1
            found[name] = Place(theirs, shape, (rows, *shape[1:]), groups, first, transposed)
            first += shape[0] // groups
    return found


def find_adapter_places(model_class: type[Architecture], spec: ModelSpec) -> dict[str, Place]:
    """The places of the matrices that adapters are for, where they share a tensor with others, or are transposed."""
    ends = tuple(f".{path}.weight" for path in ADAPTED_MODULES.values())
    shapes = {name: shape for name, shape in shapes_of(model_class, spec).items() if name.endswith(ends)}
    return {name: place for name, place in find_places(model_class, spec, shapes).items() if not place.alone}


def find_stacks(
    model_class: type[Architecture], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Of each parameter of `shapes` that stacks matrices of experts, by our names: theirs, in order, with the shape of
    each."""
    found = {}
    for name, shape in shapes.items():
        if theirs := hf_stack(name, shape, model_class):
            rows = shape[0] * shape[1] // len(theirs)
            found[name] = dict.fromkeys(theirs, (rows, *shape[2:]))
    return found


def _around(names: list[str]) -> set[str]:
    return {each for each in _HEADS for name in names if each in name}
