"""The load of experts over the steps of a run: what a step's tokens have chosen, on all ranks, and what comes of it.

Loads are whole numbers, so their sum over ranks and micro-batches is exact in any order, and what training goes by is
the same, bit for bit, on any layout. `step_before` makes them state: they are in the header of a step that is kept or
saved, a skipped step leaves them as they were, and evaluation does not count.
"""

import base64
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.comm import collectives
from phalanx.comm.collectives import PendingCollective
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.engine.interface import Engine, StepOutcome
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.moe import ExpertLoad, MoEDecoder
from phalanx.tasks.task import Batch, Task

KEY = "expert_load"  # in headers
WAIT_S = 60.0  # who commits a step waits so long for its passes to end, which they have


@dataclass
class _StepLoad:
    """Choices of one step, (layers, E) int64 on the host, while their sum over ranks is under way."""

    step: int
    table: Tensor
    pending: PendingCollective
    outcome: StepOutcome | None = None


class ExpertBalance:
    """Sets what a model's experts go by in a step, and counts what it chooses."""

    def __init__(self, model: MoEDecoder, mesh: Mesh, engine: Engine, nominal_weight: int) -> None:
        spec = model.spec
        assert spec.moe is not None
        self._model, self._mesh, self._engine, self._nominal_weight = model, mesh, engine, nominal_weight
        self._moe, self._layers = spec.moe, [n for n in range(spec.layers) if spec.has_experts(n)]
        self.load = model.load = ExpertLoad(spec, mesh.device)
        self._before = torch.zeros(spec.layers, spec.moe.experts, dtype=torch.int64)  # of the last step that was taken
        self._last: _StepLoad | None = None
        self._previous: _StepLoad | None = None
        self._changed = threading.Condition()

    # ------------------------------------------------------------------------------------------------- within a step

    def begin(self, step: int, batches: Sequence[Batch], task: Task, seed: int) -> None:
        """Before the first pass. Where loads of the step before matter this waits for its outcome."""
        load = self.load
        dtype = torch.promote_types(next(self._model.parameters()).dtype, torch.float32)
        scale = self._engine.loss_scale
        load.seed, load.shares, load.active = None, None, True
        if self._moe.balance == "step_before":
            if self._last is not None:
                self._before = self._after(self._last)
            load.shares = self._shares(self._before, dtype)
        elif self._moe.balance == "step":
            load.shares = self._shares(self._count_ahead(step, batches, task, seed), dtype)
        load.counts.zero_()
        seed_of_losses = torch.full((), 1.0 / self._nominal_weight, dtype=dtype, device=self._mesh.device)
        load.seed = seed_of_losses if scale is None else seed_of_losses * scale.factor

    def end(self, step: int) -> None:
        """After the last pass: add up over the ranks."""
        self.load.active = False
        table = self.load.counts.to("cpu", copy=True)
        pending = collectives.all_reduce(table, self._mesh.control, self._mesh.bookkeeping)
        with self._changed:
            self._previous, self._last = self._last, _StepLoad(step, table, pending)
            self._changed.notify_all()

    def note_outcome(self, outcome: StepOutcome) -> None:
        """What came of the step, as soon as it is known."""
        assert self._last is not None
        self._last.outcome = outcome

    def _count_ahead(self, step: int, batches: Sequence[Batch], task: Task, seed: int) -> Tensor:
        """The step's choices, by a pass without gradients over all that it is made of."""
        self.load.counts.zero_()
        with torch.no_grad():
            for batch in batches:
                task.loss_sum(self._model, batch, CounterRNG(seed, step, batch.samples))
        table = self.load.counts.to("cpu", copy=True)
        collectives.all_reduce(table, self._mesh.control, self._mesh.bookkeeping).wait()
        return table

    def _shares(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        """f_e of each layer, from its choices; even where there are none."""
        total = table.sum(1, keepdim=True)
        shares = (
            torch.where(total > 0, table.double() / total.clamp(min=1), 1.0 / self._moe.experts)
            * self._moe.experts_per_token
        )
        if self._moe.over == "model":
            shares = shares[self._layers].mean(0, keepdim=True).expand_as(shares)
        return shares.to(self._mesh.device, dtype)

    # ------------------------------------------------------------------------------------------------- between steps

    def _sum(self, of: _StepLoad) -> Tensor:
        with self._changed:  # of two threads that wait one at a time
            of.pending.wait()
        return of.table

    def _after(self, of: _StepLoad, outcome: StepOutcome | None = None) -> Tensor:
        """The choices that the step after `of` goes by."""
        outcome = outcome or of.outcome
        assert outcome is not None
        return self._before if outcome.get()[1] else self._sum(of)

    def to_header(self, step: int, outcome: StepOutcome | None) -> dict[str, Any]:
        """What a checkpoint of `step`, of which came `outcome`, keeps; any thread may ask. Without an `outcome` the
        step is over, or was begun with."""
        if self._moe.balance != "step_before":
            return {}
        if outcome is not None:
            with self._changed:
                there = self._changed.wait_for(lambda: self._last is not None and self._last.step >= step, WAIT_S)
            assert there, f"the passes of step {step} have not ended"
        last = self._last
        return {KEY: encode_counts(self._before if last is None or last.step != step else self._after(last, outcome))}

    def restore(self, header: Mapping[str, Any]) -> None:
        """Restore the loads from the header of a step. Raises ConfigError for one without them."""
        self._last = self._previous = None
        self._before = torch.zeros_like(self._before)
        if KEY in header:
            self._before = decode_counts(header[KEY], tuple(self._before.shape))

    def describe(self, step: int) -> tuple[list[float], list[float]] | None:
        """As `describe_load`, of the step before or the last one; None of others."""
        table = self._find(step)
        return None if table is None else describe_load(table)

    def describe_experts(self, step: int) -> dict[str, Any] | None:
        """For an event: `layers` with experts, and of each the `load` of every expert as a multiple of the mean, in
        steps as of `describe`."""
        table = self._find(step)
        if table is None:
            return None
        load = table.double() * table.shape[1] / table.sum(1, keepdim=True).clamp(min=1)
        return {"layers": self._layers, "load": [[round(each, 2) for each in row] for row in load.tolist()]}

    def _find(self, step: int) -> Tensor | None:
        """The choices (layers with experts, E) in the step before or the last one; None of others."""
        found = [each for each in (self._last, self._previous) if each is not None and each.step == step]
        return self._sum(found[0])[self._layers] if found else None


def describe_load(table: Tensor) -> tuple[list[float], list[float]]:
    """Of choices (layers, E), by layer: the entropy of the load (1: even, 0: all tokens choose one expert), and the
    load of the busiest expert as a multiple of the mean."""
    shares = table.double() / table.sum(1, keepdim=True).clamp(min=1)
    entropy = -(shares * shares.clamp(min=1e-300).log()).sum(1) / np.log(max(2, table.shape[1]))
    most = shares.amax(1) * table.shape[1]
    return [round(each, 4) for each in entropy.tolist()], [round(each, 3) for each in most.tolist()]


def encode_counts(table: Tensor) -> str:
    """Whole numbers as text for a header: little-endian int64, compressed, in base64."""
    return base64.b64encode(zlib.compress(table.numpy().astype("<i8").tobytes())).decode("ascii")


def decode_counts(text: Any, shape: tuple[int, ...]) -> Tensor:
    """What `encode_counts` wrote. Raises ConfigError for anything else."""
    size = 8 * int(np.prod(shape))
    try:
        raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except (ValueError, TypeError, zlib.error):
        raw = b""
    if len(raw) != size:
        raise ConfigError(
            f"the checkpoint's {KEY} does not hold loads of {' x '.join(map(str, shape))} experts, so it is damaged or "
            "of another model; resume from an older checkpoint"
        )
    return torch.from_numpy(np.frombuffer(raw, "<i8").astype(np.int64).reshape(shape))


def make_expert_balance(
    model: nn.Module, spec: ModelSpec | None, mesh: Mesh, engine: Engine, nominal_weight: int
) -> ExpertBalance | None:
    """None for a model without experts."""
    if spec is None or spec.moe is None:
        return None
    return ExpertBalance(cast(MoEDecoder, model), mesh, engine, nominal_weight)
