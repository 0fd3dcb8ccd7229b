"""What the sharded engine knows of a step while its lane works on it, and what others are told of it."""

from dataclasses import dataclass, field

from phalanx.comm.collectives import Traffic
from phalanx.comm.comm_thread import StreamEvent
from phalanx.engine.step_consensus import StepConsensus
from phalanx.optim import gradients
from phalanx.optim.update import StepUpdate


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
