"""What the FP8 products of a model are given: the largest inputs of each block, and how many of them become zero.

Scales are rounded up, so nothing saturates; what a block of 128 channels with an outlier loses are its smallest
elements, below 2^-18 of its largest.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.comm.mesh import Mesh
from phalanx.models.model import Model, StagedArchitecture
from phalanx.parallel import fp8
from phalanx.parallel.tensor_layers import ColumnParallelLinear

T = TypeVar("T")


class Fp8Ranges:
    """Ranges of the inputs of FP8 products in forward passes, by block of `model`; `copies` ranks of a tensor axis have
    the same inputs of column-parallel layers, which count once."""

    def __init__(self, model: Model, device: torch.device, copies: int = 1) -> None:
        blocks = {id(block) for block in model.blocks()}
        units = [(name, unit) for name, unit in model.units() if id(unit) in blocks]
        if isinstance(model, StagedArchitecture):  # a stage of a pipeline has some of the blocks
            self._blocks = {int(name.rpartition(".")[2]): unit for name, unit in units}
            count = model.spec.layers
        else:
            self._blocks, count = dict(enumerate(unit for _, unit in units)), len(units)
        self._share = 1.0 / copies
        # Of each block: the largest magnitude, elements that become zero, elements that are not zero.
        self._counts = torch.zeros(count, 3, dtype=torch.float64, device=device)

    def during_first(self, steps: Iterable[T]) -> Iterator[T]:
        """`steps`, of which the passes over the first are watched; the others run as they always do."""
        each = iter(steps)
        with self._watch():
            for step in each:
                yield step
                break
        yield from each

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        """Watch passes; compiled blocks run uncompiled meanwhile."""
        self._counts.zero_()
        current, share = self._counts[0], 1.0

        def enter(number: int) -> Any:
            def hook(*_: object) -> None:
                nonlocal current
                current = self._counts[number]

            return hook

        def set_share(value: float) -> Any:
            def hook(*_: object) -> None:
                nonlocal share
                share = value

            return hook

        def note(inputs: Tensor, values: Tensor) -> None:
            if inputs.numel():
                there = inputs != 0
                current[0] = torch.maximum(current[0], inputs.abs().amax())
                current[1] += share * (there & (values.to(inputs.dtype) == 0)).sum()
                current[2] += share * there.sum()

        with contextlib.ExitStack() as stack:
            for number, block in self._blocks.items():
                stack.callback(block.register_forward_pre_hook(enter(number)).remove)
                for layer in block.modules():
                    if isinstance(layer, ColumnParallelLinear):
                        stack.callback(layer.register_forward_pre_hook(set_share(self._share)).remove)
                        stack.callback(layer.register_forward_hook(set_share(1.0)).remove)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(fp8.observe_rows(note))
            yield

    def describe(self, mesh: Mesh) -> dict[str, list[float]]:
        """Of each block, over all ranks: the `largest` magnitude, and the share of non-zero elements that become
        `zero`. Collective."""
        largest, zeroed, there = self._counts.T.tolist()
        largest, sums = mesh.max(largest), mesh.sum(zeroed + there)
        pairs = zip(sums[: len(largest)], sums[len(largest) :], strict=True)
        return {"largest": largest, "zero": [zero / max(1.0, count) for zero, count in pairs]}
