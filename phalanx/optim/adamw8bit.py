"""8-bit AdamW: two quantized moments, 2 bytes of optimizer state per element instead of 8.

A moment is dequantized, updated by the same kernel as AdamW's, and quantized again, in chunks. A block lies within one
row, and sharding never cuts a row, so the codes are the same on any number of ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from phalanx.optim.quantized import QuantizedShard, split_row, zero_code
from phalanx.optim.update import MOMENTS, AdamW, Allocator, Slot, State, StepUpdate, copy_slot

MIN_ELEMENTS = 4096  # of a matrix, also in a stack; smaller ones and vectors keep unquantized moments


@dataclass(frozen=True)
class AdamW8bit:
    """8-bit AdamW: `AdamW` with quantized moments for matrices of at least MIN_ELEMENTS elements."""

    adamw: AdamW
    state_kinds: ClassVar[tuple[str, ...]] = MOMENTS

    def make_state(
        self, name: str, shape: Sequence[int], elements: int, dtype: torch.dtype, device: torch.device,
        allocate: Allocator,
    ) -> State:  # fmt: skip
        if not _is_quantized(shape):
            return self.adamw.make_state(name, shape, elements, dtype, device, allocate)
        rows, (count, length) = elements // shape[-1], split_row(shape[-1])
        state = {}
        for kind in MOMENTS:
            codes = allocate(name, f"{kind}.codes", rows * count * length, torch.uint8, device)
            scales = allocate(name, f"{kind}.scales", rows * count, dtype, device)
            state[f"{kind}.codes"], state[f"{kind}.scales"] = codes.view(rows, count, length), scales.view(rows, count)
            state[f"{kind}.codes"].fill_(zero_code(kind))
        return state

    def elements_together(self, shape: Sequence[int]) -> int:
        return shape[-1] if _is_quantized(shape) else 1

    def apply(self, source: Slot, target: Slot, grads: dict[str, torch.Tensor], change: StepUpdate) -> None:
        copy_slot(source, target)
        change = self.adamw.divide_grads(grads, change)
        plain = {name: grad for name, grad in grads.items() if "exp_avg" in target[name]}
        self.adamw.update_in_place(target, plain, change)
        for name in grads.keys() - plain.keys():
            mean, square = (QuantizedShard.from_state(target[name], kind, grads[name].numel()) for kind in MOMENTS)
            for first, last in mean.row_chunks():
                part = slice(first * mean.columns, last * mean.columns)
                decoded = {
                    "param": target[name]["param"][part],
                    "exp_avg": mean.dequantize_rows(first, last),
                    "exp_avg_sq": square.dequantize_rows(first, last),
                }
                gradient = {name: grads[name][part]}
                self.adamw.update_in_place({name: decoded}, gradient, change)
                # A skipped step quantizes the same numbers again, which gives the same codes.
                mean.quantize_rows(first, last, decoded["exp_avg"])
                square.quantize_rows(first, last, decoded["exp_avg_sq"])


def _is_quantized(shape: Sequence[int]) -> bool:
    return len(shape) > 1 and math.prod(shape[-2:]) >= MIN_ELEMENTS
