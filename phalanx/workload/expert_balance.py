"""The load of experts over the steps of a run: what a step's tokens have chosen, on all ranks, and what comes of it.

Loads are whole numbers, so their sum over ranks and micro-batches is exact in any order, and what training goes by is
the same, bit for bit, on any layout. `step_before` makes loads state, and `bias` the corrections of the routers' scores
that they move: they are in the header of a step that is kept or saved, a skipped step leaves them as they were, and
evaluation does not count.

Engines round parameters to the compute type, in which a correction would stand still after a few hundred steps. So
routers go by a table in float32 or better, and what is saved or handed out as a weight comes from there.
"""

import base64
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm import collectives
from phalanx.comm.collectives import PendingCollective
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.engine.interface import Engine, StepOutcome
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.moe import ExpertLoad, MoEDecoder
from phalanx.optim.update import StatePiece
from phalanx.tasks.task import Batch, Task

KEY, BIAS_KEY = "expert_load", "expert_bias"  # in headers
WAIT_S = 60.0  # who commits a step waits so long for its passes to end, which they have


@dataclass
class _StepLoad:
    """Choices of one step, (layers, E) int64 on the host, while their sum over ranks is under way; `before`: what the
    step went by."""

    step: int
    before: Tensor
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
        # Loads of the last step that was taken, or corrections, (layers, E).
        self._before = torch.zeros(spec.layers, spec.moe.experts, dtype=torch.int64)
        self._corrected = {
            f"layers.{number}.mlp.router.correction": number for number in self._layers if spec.moe.scores == "sigmoid"
        }
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
        self.use_last_step()
        if self._moe.balance == "step_before":
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
            self._previous, self._last = self._last, _StepLoad(step, self._before, table, pending)
            self._changed.notify_all()

    def note_outcome(self, outcome: StepOutcome) -> None:
        """What came of the step, as soon as it is known."""
        assert self._last is not None
        self._last.outcome = outcome

    def use_last_step(self) -> None:
        """Go by the last step from here on, in evaluation too. Waits for its outcome, if what it was is state."""
        if self._last is not None and self._moe.balance in ("step_before", "bias"):
            self._before = self._after(self._last)
        if self._moe.balance == "bias":
            self.load.corrections = self._before.to(self._mesh.device)

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
        """What the step after `of` goes by."""
        outcome = outcome or of.outcome
        assert outcome is not None
        if outcome.get()[1]:
            return of.before
        loads = self._sum(of)
        return loads if self._moe.balance == "step_before" else self._move(of.before, loads)

    def _move(self, corrections: Tensor, loads: Tensor) -> Tensor:
        """`corrections` one step on: up by the rate where the load is below the layer's mean, down where above."""
        below = torch.sign(loads.sum(1, keepdim=True) - loads * loads.shape[1])  # whole numbers, so exact
        return corrections + below.to(corrections.dtype) * self._moe.bias_rate

    def to_header(self, step: int, outcome: StepOutcome | None) -> dict[str, Any]:
        """What a checkpoint of `step`, of which came `outcome`, keeps; any thread may ask. Without an `outcome` the
        step is over, or was begun with."""
        if self._moe.balance not in ("step_before", "bias"):
            return {}
        if outcome is not None:
            with self._changed:
                there = self._changed.wait_for(lambda: self._last is not None and self._last.step >= step, WAIT_S)
            assert there, f"the passes of step {step} have not ended"
        last = self._last
        if last is None:
            found = self._before
        else:
            found = self._after(last, outcome) if last.step == step else last.before
        if self._moe.balance == "step_before":
            return {KEY: encode_counts(found)}
        return {BIAS_KEY: encode_counts(found.double().view(torch.int64))}  # their bits

    def restore(self, header: Mapping[str, Any]) -> None:
        """Restore loads or corrections from the header of a step whose state is loaded; without any there, corrections
        are those of the parameters. Collective. Raises ConfigError for a header that is damaged."""
        self._last = self._previous = None
        shape = tuple(self._before.shape)
        self._before = torch.zeros(shape, dtype=torch.int64)
        if self._moe.balance == "step_before" and KEY in header:
            self._before = decode_counts(header[KEY], shape)
        if self._corrected:
            dtype = torch.promote_types(next(self._model.parameters()).dtype, torch.float32)
            held = self._moe.balance == "bias" and BIAS_KEY in header
            found = decode_counts(header[BIAS_KEY], shape).view(torch.float64) if held else self._read_parameters()
            self.load.corrections = found.to(self._mesh.device, dtype)
            self._before = found.to(dtype) if self._moe.balance == "bias" else self._before

    def _read_parameters(self) -> Tensor:
        """The routers' corrections, (layers, E) float64, as the engines' masters hold them. Collective."""
        table = torch.full(self._before.shape, -torch.inf, dtype=torch.float64)
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
        return {name: self._before[layer] for name, layer in self._corrected.items()}

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
