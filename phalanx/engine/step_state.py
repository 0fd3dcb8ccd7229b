"""What the sharded engine knows of a step while its lane works on it, and what others are told of it."""

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from phalanx.comm import collectives
from phalanx.comm.collectives import Traffic
from phalanx.comm.comm_thread import StreamEvent
from phalanx.engine.bucket import RankBucket
from phalanx.engine.timing import PassTimer
from phalanx.optim import gradients
from phalanx.optim.update import StepUpdate

# ------------------------------------------------------------------------------------------------------ step consensus
# What all ranks agree on once a step's gradients are summed: their norm, who has one, and how fast the links were.


class StepConsensus:
    """A sum over the ranks that is under way. Collective."""

    def __init__(
        self, squares: float, rates: Sequence[float], names: Sequence[str], local_names: Set[str],
        group: dist.ProcessGroup, traffic: Traffic,
    ) -> None:  # fmt: skip
        """`squares` of what this rank owns of the gradients, `rates` as `TransferSchedule.local_rates` gives them, and
        which of the parameters of these `names` have a gradient here (`local_names`)."""
        self._names, self._rates = names, len(rates)
        told = [squares, *rates, *(float(name in local_names) for name in names)]
        self._table = torch.tensor(told, dtype=torch.float64)
        self._pending = collectives.all_reduce(self._table, group, traffic)

    def finish(self) -> tuple[torch.Tensor, list[float], set[str]]:
        """(the sum of squares, everyone's rates, names of parameters that have a gradient on any rank)."""
        self._pending.wait()
        rates, counts = self._table[1:].split([self._rates, len(self._names)])
        used = {name for name, count in zip(self._names, counts.tolist(), strict=True) if count}
        return self._table[0], rates.tolist(), used


# --------------------------------------------------------------------------------------------------- grad accumulation
# Gradients of several micro-batches whose passes mix, as in a pipeline: kept until a unit's last backward pass.


class GradAccumulation:
    """What one who runs such passes tells the engine within its `micro_batch`."""

    def __init__(self, trained: Sequence[RankBucket], pass_timer: PassTimer) -> None:
        self._trained, self._pass_timer = list(trained), pass_timer

    def expect_last_backward(self, units: Collection[str]) -> None:
        """The next backward pass is the last that gives these units gradients: each is sent when it is complete."""
        self._pass_timer.start()
        for held in self._trained:
            if held.bucket.unit in units:
                held.expect_last_backward()

    def gradient_sum(self, name: str) -> torch.Tensor:
        """What this rank has added up of a parameter's gradient, flat, before it is sent; may be added to."""
        held = next(held for held in self._trained if name in held.names)
        return held.gradient_sum(held.names.index(name))


# ----------------------------------------------------------------------------------------------------- state of a step


@dataclass
class StepState:
    """What is known of the step that the lane works on."""

    number: int
    lr: float
    clip: float | None
    weight: gradients.TotalWeight
    agreed: StreamEvent
    agreement: StepConsensus | None = None  # while it is under way
    optimistic: bool = False  # a unit is updated as soon as it is reduced, by a divisor that is likely
    names_with_grad: list[set[str]] = field(default_factory=list)  # parameters that have a gradient on this rank
    change: StepUpdate | None = None  # what updates go by
    updated: set[int] = field(default_factory=set)  # units
    gathered: set[int] = field(default_factory=set)  # units, wholly or in part
    again: set[int] = field(default_factory=set)  # units that were gathered a second time, and wholly
    pending_gathered: list[StreamEvent] = field(default_factory=list)  # to be set when the ranks have agreed
    norm: float = 0.0
    skipped: float = 0.0
    loss_scale: float | None = None  # of its losses
    needs_schedule: bool = False  # the link is another than the order was made for


class ShardedStepOutcome:
    """What came of a step, as soon as the lane knows."""

    def __init__(self, step: StepState, traffic: Traffic) -> None:
        self._step, self._traffic = step, traffic
        self.weight = step.weight.get()
        self.loss_scale: float | None = None

    def get(self) -> tuple[float, float]:
        self._step.agreed.wait(self._traffic)
        self.loss_scale = self._step.loss_scale
        return self._step.norm, self._step.skipped
