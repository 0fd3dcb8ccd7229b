"""AdamW that keeps its two moments in 8 bits each: 2 bytes of state an element instead of 8.

A moment is decoded, updated by the same kernel as AdamW's, and coded again, a portion at a time. A block of codes never
leaves its row, and sharding never cuts a row, so any number of ranks keeps the same codes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from phalanx.optim.quantized import QuantizedShard, split_row, zero_code
from phalanx.optim.update import MOMENTS, AdamW, Allocator, Slot, State, StepUpdate, copy_slot

MIN_ELEMENTS = 4096  # of a whole parameter; in smaller ones, and in vectors, moments stay as they are


@dataclass(frozen=True)
class AdamW8bit:
    """`AdamW` with coded moments, of matrices of LEAST_ELEMENTS elements and more."""

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

    def needs_whole_rows(self, shape: Sequence[int]) -> bool:
        return _is_quantized(shape)

    def state_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        if not _is_quantized(shape):
            return self.adamw.state_bytes(shape, itemsize)
        count, length = split_row(shape[-1])
        return 2 * math.prod(shape[:-1]) * count * (length + itemsize)

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
                # Of a skipped step the same numbers are coded again, and give the same codes.
                mean.quantize_rows(first, last, decoded["exp_avg"])
                square.quantize_rows(first, last, decoded["exp_avg_sq"])


def _is_quantized(shape: Sequence[int]) -> bool:
    return len(shape) > 1 and math.prod(shape) >= MIN_ELEMENTS
