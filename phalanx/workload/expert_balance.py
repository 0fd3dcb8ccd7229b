"""The load of experts over the steps of a run: what a step's tokens have chosen, on all ranks, and what comes of it.

Loads are whole numbers, so their sum over ranks and micro-batches is exact in any order, and what training goes by is
the same, bit for bit, on any layout. `step_before` makes loads state, and `bias` the corrections of the routers' scores
that they move: they are in the header of a step that is kept or saved, a skipped step leaves them as they were, and
evaluation does not count.

Engines round parameters to the compute type, in which a correction would stand still after a few hundred steps. So
routers go by a table in float32 or better, and what is saved or handed out as a weight comes from there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm import collectives
from phalanx.comm.mesh import Mesh
from phalanx.engine.interface import Engine, StepOutcome
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.moe import ExpertLoad, MoEDecoder
from phalanx.optim.update import StatePiece
from phalanx.tasks.task import Batch, Task
from phalanx.workload.step_table import StepTable, decode_table, encode_table

KEY, BIAS_KEY = "expert_load", "expert_bias"  # in headers


class ExpertBalance:
    """Sets what a model's experts go by in a step, and counts what it chooses."""

    def __init__(self, model: MoEDecoder, mesh: Mesh, engine: Engine, nominal_weight: int) -> None:
        spec = model.spec
        assert spec.moe is not None
        self._model, self._mesh, self._engine, self._nominal_weight = model, mesh, engine, nominal_weight
        self._moe, self._layers = spec.moe, [n for n in range(spec.layers) if spec.has_experts(n)]
        self.load = model.load = ExpertLoad(spec, mesh.device)
        # Loads of the last step that was taken, or corrections, (layers, E).
        kind, advance = (torch.float64, self._move) if spec.moe.balance == "bias" else (torch.int64, _last_loads)
        self._table = StepTable(mesh, torch.zeros(spec.layers, spec.moe.experts, dtype=kind), advance)
        self._corrected = {
            f"layers.{number}.mlp.router.correction": number for number in self._layers if spec.moe.scores == "sigmoid"
        }

    @property
    def _dtype(self) -> torch.dtype:
        """Of losses and corrections: the compute type, which the engine sets, or float32."""
        return torch.promote_types(next(self._model.parameters()).dtype, torch.float32)

    # ------------------------------------------------------------------------------------------------- within a step

    def begin(self, step: int, batches: Sequence[Batch], task: Task, seed: int) -> None:
        """Before the first pass. Where loads of the step before matter this waits for its outcome."""
        load = self.load
        scale = self._engine.loss_scale
        load.seed, load.shares, load.active = None, None, True
        self.use_last_step()
        if self._moe.balance == "step_before":
            load.shares = self._shares(self._table.before)
        elif self._moe.balance == "step":
            load.shares = self._shares(self._count_ahead(step, batches, task, seed))
        load.counts.zero_()
        seed_of_losses = torch.full((), 1.0 / self._nominal_weight, dtype=self._dtype, device=self._mesh.device)
        load.seed = seed_of_losses if scale is None else seed_of_losses * scale.factor

    def end(self, step: int) -> None:
        """After the last pass: add up over the ranks."""
        self.load.active = False
        self._table.end(step, self.load.counts.to("cpu", copy=True))

    def note_outcome(self, outcome: StepOutcome) -> None:
        """What came of the step, as soon as it is known."""
        self._table.note_outcome(outcome)

    def use_last_step(self) -> None:
        """Go by the last step from here on, in evaluation too. Waits for its outcome, if what it was is state."""
        if self._moe.balance in ("step_before", "bias"):
            self._table.settle()
        if self._moe.balance == "bias":
            self.load.corrections = self._table.before.to(self._mesh.device)

    def _count_ahead(self, step: int, batches: Sequence[Batch], task: Task, seed: int) -> Tensor:
        """The step's choices, by a pass without gradients over all that it is made of."""
        self.load.counts.zero_()
        with torch.no_grad():
            for batch in batches:
                task.loss_sum(self._model, batch, CounterRNG(seed, step, batch.samples))
        return self._reduce_now(self.load.counts.to("cpu", copy=True), dist.ReduceOp.SUM)

    def _reduce_now(self, table: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        collectives.all_reduce(table, self._mesh.control, self._mesh.bookkeeping, how).wait()
        return table

    def _shares(self, table: Tensor) -> Tensor:
        """f_e of each layer, from its choices; even where there are none."""
        total = table.sum(1, keepdim=True)
        shares = (
            torch.where(total > 0, table.double() / total.clamp(min=1), 1.0 / self._moe.experts)
            * self._moe.experts_per_token
        )
        if self._moe.over == "model":
            shares = shares[self._layers].mean(0, keepdim=True).expand_as(shares)
        return shares.to(self._mesh.device, self._dtype)

    # ------------------------------------------------------------------------------------------------- between steps

    def _move(self, corrections: Tensor, loads: Tensor) -> Tensor:
        """`corrections` one step on: up by the rate where the load is below the layer's mean, down where above."""
        below = torch.sign(loads.sum(1, keepdim=True) - loads * loads.shape[1])  # whole numbers, so exact
        return corrections + below.to(corrections.dtype) * self._moe.bias_rate

    def to_header(self, step: int, outcome: StepOutcome | None) -> dict[str, Any]:
        """What a checkpoint of `step`, of which came `outcome`, keeps; any thread may ask. Without an `outcome` the
        step is over, or was begun with."""
        if self._moe.balance not in ("step_before", "bias"):
            return {}
        found = self._table.after(step, outcome)
        if self._moe.balance == "step_before":
            return {KEY: encode_table(found)}
        return {BIAS_KEY: encode_table(found.double())}

    def restore(self, header: Mapping[str, Any]) -> None:
        """Restore loads or corrections from the header of a step whose state is loaded; without any there, corrections
        are those of the parameters. Collective. Raises ConfigError for a header that is damaged."""
        table = self._table.before
        if self._moe.balance == "step_before":
            self._table.restore(decode_table(header[KEY], table, KEY) if KEY in header else None)
        if not self._corrected:
            return
        if self._moe.balance == "bias" and BIAS_KEY in header:
            found = decode_table(header[BIAS_KEY], table.double(), BIAS_KEY)
        else:
            found = self._read_parameters()
        self.load.corrections = found.to(self._mesh.device, self._dtype)
        if self._moe.balance == "bias":
            self._table.restore(found.to(self._dtype))

    def _read_parameters(self) -> Tensor:
        """The routers' corrections, (layers, E) float64, as the engines' masters hold them. Collective."""
        table = torch.full(self._table.before.shape, -torch.inf, dtype=torch.float64)
        for piece in self._engine.pieces():
            if piece.kind == "param" and piece.name in self._corrected:
                table[self._corrected[piece.name], piece.start : piece.stop] = piece.tensor.to("cpu", torch.float64)
        table = self._reduce_now(table, dist.ReduceOp.MAX)
        return table.masked_fill(torch.isneginf(table), 0.0)  # of layers without

    def corrections(self) -> dict[str, Tensor]:
        """The routers' corrections after the last step, (E,) by the name of the parameter that has their place in
        checkpoints and exports; empty where they do not move."""
        if self._moe.balance != "bias":
            return {}
        self.use_last_step()
        return {name: self._table.before[layer] for name, layer in self._corrected.items()}

    def put_into(self, pieces: Iterable[StatePiece]) -> Iterator[StatePiece]:
        """An engine's pieces with the corrections of the last step."""
        moved = self.corrections()
        for piece in pieces:
            found = moved.get(piece.name) if piece.kind == "param" else None
            yield piece if found is None else replace(piece, values=found[piece.start : piece.stop])

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
        table = self._table.find(step)
        return None if table is None else table[self._layers]


def _last_loads(_: Tensor, loads: Tensor) -> Tensor:
    return loads


def describe_load(table: Tensor) -> tuple[list[float], list[float]]:
    """Of choices (layers, E), by layer: the entropy of the load (1: even, 0: all tokens choose one expert), and the
    load of the busiest expert as a multiple of the mean."""
    shares = table.double() / table.sum(1, keepdim=True).clamp(min=1)
    entropy = -(shares * shares.clamp(min=1e-300).log()).sum(1) / np.log(max(2, table.shape[1]))
    most = shares.amax(1) * table.shape[1]
    return [round(each, 4) for each in entropy.tolist()], [round(each, 3) for each in most.tolist()]


def make_expert_balance(
    model: nn.Module, spec: ModelSpec | None, mesh: Mesh, engine: Engine, nominal_weight: int
) -> ExpertBalance | None:
    """None for a model without experts."""
    if spec is None or spec.moe is None:
        return None
    return ExpertBalance(cast(MoEDecoder, model), mesh, engine, nominal_weight)
