"""Conversion of torch.distributed tensors to flat host tensors for the backend, and their reduction."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.two_level import Combine, Finish

Tensors = Sequence[torch.Tensor]
_COMBINE: dict[dist.ReduceOp.RedOpType, Combine] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_ORDER = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_BITS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def find_reduction(opts: Any, tensors: Tensors, world: int) -> tuple[Combine, Finish, Any]:
    """How to combine two parts, what to do with the whole, and what each part is multiplied by first."""
    chosen: Any = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    kind = getattr(chosen, "op", chosen)
    dtype = tensors[0].dtype
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return torch.add, None, chosen.factor
    if kind not in _COMBINE or any(tensor.is_sparse for tensor in tensors):
        raise ValueError(f"the backend phalanx has no {kind} of {tensors[0].layout} tensors; use another operation")
    if (kind in _BITS and not whole) or (kind == dist.ReduceOp.AVG and whole):
        raise ValueError(f"{kind} is not defined for {dtype}; use another operation, or convert the tensor")
    if (kind in _ORDER and dtype.is_complex) or (dtype.itemsize == 1 and not whole):  # no sums of 8-bit floats
        raise ValueError(f"{kind} is not defined for {dtype}; convert the tensor")
    return _COMBINE[kind], (lambda part: part.div_(world)) if kind == dist.ReduceOp.AVG else None, None


def iterate_tensors(args: Any) -> Iterator[torch.Tensor]:
    """All tensors among arguments, in lists, too."""
    for each in args:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from iterate_tensors(each)


def to_list(tensors: Any) -> list[torch.Tensor]:
    """A list of one tensor, or of several."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def to_flat_host(tensor: torch.Tensor, fill: bool = True) -> torch.Tensor:
    """The tensor itself as a flat one of the host, where it is that already; else memory for it, or a copy of it.

    Of its data alone: what autograd keeps must not take a collective for a change that it was not told of.
    """
    data = tensor.data
    if data.device.type == "cpu" and data.is_contiguous():
        return data.view(-1)
    if not fill:
        return torch.empty(data.numel(), dtype=data.dtype)
    return data.to("cpu").contiguous().view(-1)


def copy_from_host(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Bring a result back that `to_flat_host` has made memory for."""
    if tensor.device.type != "cpu" or tensor.data_ptr() != host.data_ptr():
        tensor.data.copy_(host.view(tensor.shape))


def fill_tensors(targets: Sequence[torch.Tensor], one: torch.Tensor) -> None:
    """Copy what lies one behind the other."""
    for target, part in zip(targets, one.split([target.numel() for target in targets]), strict=True):
        target.copy_(part)


def single_owner_cuts(owner: int, count: int, world: int) -> list[int]:
    """Ranges of which one rank has all."""
    return [0] * (owner + 1) + [count] * (world - owner)


def consecutive_cuts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where tensors begin and end that lie one behind the other."""
    return [0, *itertools.accumulate(tensor.numel() for tensor in tensors)]


def split_rows(flat: torch.Tensor, shaped: torch.Tensor, splits: Sequence[int], world: int) -> list[torch.Tensor]:
    """The part of each rank, flat."""
    if not splits:
        if flat.numel() % world:
            raise ValueError(f"{tuple(shaped.shape)} does not divide into equal parts for {world} ranks; give splits")
        return list(flat.view(world, -1).unbind()) if flat.numel() else [flat] * world
    return list(flat.split([count * (flat.numel() // max(1, shaped.shape[0])) for count in splits]))
