"""The history of delayed scaling (`train.fp8: delayed`): largest magnitudes of the inputs, weights and gradients of FP8
products in the last steps.

A step adds one entry, the maximum over its micro-batches and all ranks, which is exact in any order; the scales of a
step are those of the entries before it (parallel/fp8_delayed.py). Entries are float32, and those of gradients are
without the factor of a loss scale. The history is state (step_table.py): a skipped step adds no entry.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.engine.interface import Engine, StepOutcome
from phalanx.parallel.fp8_delayed import GRADIENT, TENSORS, find_scales, find_scalings
from phalanx.workload.step_table import StepTable, decode_table, encode_table

if TYPE_CHECKING:
    from phalanx.config.schema import Config

KEY = "fp8_history"  # in headers


class Fp8History:
    """Sets the scales that a step's products go by, and keeps what it finds of their tensors."""

    def __init__(self, model: nn.Module, mesh: Mesh, engine: Engine, entries: int, margin: int) -> None:
        """Keep so many `entries`. Collective."""
        self._engine, self._device, self._margin = engine, mesh.device, margin
        self._scalings = find_scalings(model)
        # Of stages of a pipeline each rank has some products.
        everyones = JsonGroup(mesh.control).all_gather_objects(list(self._scalings))
        names = sorted({name for each in everyones for name in each})
        self._rows = [names.index(name) for name in self._scalings]
        self._table = StepTable(mesh, torch.zeros(len(names), len(TENSORS), entries), _append, dist.ReduceOp.MAX)
        self._clipped = StepTable(mesh, torch.zeros((), dtype=torch.int64), lambda _, clipped: clipped)
        self._factor = torch.ones(())

    def settle(self) -> None:
        """Set the scales by all steps until now; waits for what came of the last one."""
        largest = self._table.settle().amax(-1)
        scale = self._engine.loss_scale
        if scale is not None:
            self._factor = scale.factor.to("cpu", copy=True)
        largest[:, GRADIENT] *= self._factor
        scales = find_scales(largest, self._margin)
        for row, scaling in zip(self._rows, self._scalings.values(), strict=True):
            scaling.scales = scales[row]

    def begin(self) -> None:
        """Before the first pass of a step."""
        self.settle()
        for scaling in self._scalings.values():
            scaling.begin()

    def end(self, step: int) -> None:
        """After the last pass: reduce over the ranks what the products were given."""
        zero = torch.zeros((), device=self._device)
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        maxima, counts = [], []
        for scaling in self._scalings.values():
            largest, clipped = scaling.end()
            maxima += [zero if each is None else each for each in largest]
            counts.append(none if clipped is None else clipped)
        entry = torch.zeros(self._table.before.shape[:2])
        entry[self._rows] = torch.stack(maxima).to("cpu").view(-1, len(TENSORS))
        entry[:, GRADIENT] /= self._factor
        self._table.end(step, entry.nan_to_num(nan=torch.inf))  # which a maximum keeps
        self._clipped.end(step, torch.stack([none, *counts]).sum().to("cpu", copy=True))

    def note_outcome(self, outcome: StepOutcome) -> None:
        """What came of the step, as soon as it is known."""
        self._table.note_outcome(outcome)

    def to_header(self, step: int, outcome: StepOutcome | None) -> dict[str, Any]:
        """What a checkpoint of `step`, of which came `outcome`, keeps; any thread may ask. Without an `outcome` the
        step is over, or was begun with."""
        return {KEY: encode_table(self._table.after(step, outcome))}

    def restore(self, header: Mapping[str, Any]) -> None:
        """Restore the history from the header of a step; one without is an empty one. Raises ConfigError for that of
        another model or length."""
        self._table.restore(decode_table(header[KEY], self._table.before, KEY) if KEY in header else None)

    def count_clipped(self, step: int) -> int | None:
        """Inputs and gradients that were clipped in the step before or the last one; None of others."""
        found = self._clipped.find(step)
        return None if found is None else int(found)


def _append(history: Tensor, entry: Tensor) -> Tensor:
    """A history (products, 3, entries) with a newest entry, which is zero where it is not finite: the update may have
    been taken nonetheless, where nothing depends on that product."""
    newest = torch.where(entry.isfinite(), entry, 0.0)
    return torch.cat((history[..., 1:], newest[..., None]), -1)


def make_fp8_history(model: nn.Module, config: "Config", mesh: Mesh, engine: Engine) -> Fp8History | None:
    """None without delayed scaling. Collective."""
    train = config.train
    return Fp8History(model, mesh, engine, train.fp8_history, train.fp8_margin) if train.fp8 == "delayed" else None
