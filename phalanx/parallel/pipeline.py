"""Pipeline parallelism on one rank: runs a schedule of passes through its stages, with sends and receives.

Every rank of a pipeline has the same micro-batches. The first stage reads their tokens, the last their labels; stages
exchange hidden states and their gradients. Receives start before the results are needed, and sends overlap the next
pass. With `zero_bubble` a backward pass has two halves: the gradient of the stage's input, which the previous stage
waits for, and the gradients of the weights, which no rank waits for (PyTorch's `stage_backward_input` and `_weight`).
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Axis
from phalanx.comm.p2p import P2PChannel, PendingReceive
from phalanx.engine.interface import Precision
from phalanx.layout import pipeline_stages
from phalanx.layout.pipeline_stages import STAGES_PER_RANK, Action, Kind, Move, PipelineStages, Result
from phalanx.system.trace import phase

RECEIVE_AHEAD = 2  # actions by which a receive starts early


class StageWork(Protocol):
    """The callbacks of a pipeline for the micro-batches 0, 1, ... of a step."""

    def hidden_shape(self, micro_batch: int) -> Sequence[int]:
        """The shape of the hidden states between two stages."""
        ...

    def forward(self, stage: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Run a stage: returns its hidden states, or of the last stage the scalar that the backward pass begins
        with."""
        ...

    def parameters(self, stage: int) -> Iterator[nn.Parameter]:
        """The trained parameters of a stage."""
        ...

    def before_last_backward(self, stage: int) -> None:
        """Called before the stage's last backward pass to its weights."""
        ...

    def after_weight_gradients(self, stage: int) -> None:
        """Called after the weight half of a backward pass, which sets `.grad` without calling hooks."""
        ...


class Pipeline:
    """Pipeline parallelism on this rank: its stages of one copy of a model, and the exchange with the other ranks."""

    def __init__(
        self, plan: PipelineStages, schedule: str, axis: Axis, device: torch.device, precision: Precision,
        traffic: Traffic, sequence: int = 1,
    ) -> None:  # fmt: skip
        """`traffic` counts bytes sent and the host's waits. `sequence`: the number of ranks that hidden states are cut
        over along the sequence."""
        assert axis.size == plan.ranks, (axis.size, plan.ranks)
        self.plan, self.rank = plan, axis.rank
        self.stages = plan.stages_of(axis.rank)
        self.precision, self.sequence = precision, sequence
        self._schedule = schedule
        # Twice as many as a rank may have in flight: completed sends keep memory until they are waited for.
        self.messages = P2PChannel(axis.group, device, traffic, max_in_flight=2 * (plan.last + 1))
        self._known: dict[tuple[int, bool], list[Move]] = {}

    @property
    def has_loss(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.plan.last in self.stages

    def train(self, count: int, work: StageWork) -> None:
        """Run the forward and backward passes of `count` micro-batches."""
        _PipelineRun(self, work, training=True).run(self._moves(count, training=True))

    def forward(self, count: int, work: StageWork) -> None:
        """Run forward passes only; `work` keeps the outputs of the last stage."""
        with torch.no_grad():
            _PipelineRun(self, work, training=False).run(self._moves(count, training=False))

    def sum_tied_gradient(self, gradient: Tensor) -> None:
        """Sum the gradients of a tied weight over the first and last stage, in place and bitwise the same on both. Only
        their ranks call this."""
        ends = [self.plan.owner(0), self.plan.owner(self.plan.last)]
        if ends[0] != ends[1]:
            gradient += self.messages.exchange(gradient, ends[self.rank == ends[0]])

    def close(self) -> None:
        """Close the channel; the pipeline cannot be used afterwards."""
        self.messages.close()

    def _moves(self, count: int, training: bool) -> list[Move]:
        if (count, training) not in self._known:
            orders = build_actions(self._schedule, self.plan, count)
            if not training:  # the forward passes of a valid order are in a valid order
                orders = [[action for action in mine if action.kind == "F"] for mine in orders]
            ahead = RECEIVE_AHEAD if self.messages.full_duplex else 0
            self._known[count, training] = pipeline_stages.plan_moves(orders, self.plan, ahead)[self.rank]
        return self._known[count, training]


class _PipelineRun:
    """One run of a pipeline's schedule: the micro-batches of a step in this rank's stages."""

    def __init__(self, pipeline: Pipeline, work: StageWork, training: bool) -> None:
        self._pipeline, self._plan, self._work, self._training = pipeline, pipeline.plan, work, training
        self._arriving: dict[Result, PendingReceive] = {}
        self._made: dict[Result, Tensor] = {}  # results of this rank, not yet used or sent
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # input and output, by stage and number
        self._halves: dict[tuple[int, int], Any] = {}  # inputs of the second half of a backward pass
        self._left: Counter[int] = Counter()  # backward passes to weights, by stage

    def run(self, moves: Sequence[Move]) -> None:
        self._left.update(move.action.stage for move in moves if move.kind == "do" and move.action.kind in "BW")
        do = {"F": self._forward, "B": self._backward, "I": self._to_input, "W": self._to_weights}
        for kind, action in moves:
            if kind == "do":
                do[action.kind](action.stage, action.micro_batch)
            elif kind == "send":
                self._send(action.result)
            else:
                self._receive(action.result)
        self._pipeline.messages.flush()
        assert not (self._arriving or self._made or self._kept or self._halves)

    # ----------------------------------------------------------------------------------------------------------- passes

    def _forward(self, stage: int, number: int) -> None:
        hidden = self._take(Result("F", stage - 1, number)) if stage else None
        if hidden is not None and self._training:
            hidden.requires_grad_()
        with phase("forward"):
            output = self._work.forward(stage, number, hidden)
        if self._training:
            self._kept[stage, number] = hidden, output
        if stage != self._plan.last:
            self._made[Result("F", stage, number)] = output.detach()

    def _backward(self, stage: int, number: int) -> None:
        hidden, output = self._kept.pop((stage, number))
        gradient = self._gradient(stage, number)
        self._before_weights(stage)
        with phase("backward"):
            if output.requires_grad:  # else no parameter before it is trained
                torch.autograd.backward(output, gradient)
        if hidden is not None:
            self._made[Result("G", stage, number)] = _input_gradient(hidden.grad, hidden)

    def _to_input(self, stage: int, number: int) -> None:
        from torch.distributed.pipelining._backward import stage_backward_input  # imported late, as below

        if stage == 0:  # no input gradient: the other half does everything
            return
        hidden, output = self._kept.pop((stage, number))
        gradient, parameters = self._gradient(stage, number), self._work.parameters(stage)
        with phase("backward"):
            given, self._halves[stage, number] = stage_backward_input(
                [output], None if gradient is None else [gradient], [hidden], parameters
            )
        self._made[Result("G", stage, number)] = _input_gradient(given[0], hidden)

    def _to_weights(self, stage: int, number: int) -> None:
        from torch.distributed.pipelining._backward import stage_backward_weight

        if stage == 0:
            self._backward(stage, number)
            return
        self._before_weights(stage)
        with phase("backward"):
            stage_backward_weight(self._work.parameters(stage), self._halves.pop((stage, number)))
        self._work.after_weight_gradients(stage)

    def _gradient(self, stage: int, number: int) -> Tensor | None:
        """The gradient of a stage's output; None for the last stage, whose output is a loss."""
        return None if stage == self._plan.last else self._take(Result("G", stage + 1, number))

    def _before_weights(self, stage: int) -> None:
        self._left[stage] -= 1
        if not self._left[stage]:
            self._work.before_last_backward(stage)

    # ---------------------------------------------------------------------------------------------------------- results

    def _take(self, result: Result) -> Tensor:
        """A result, from a stage here or from another rank."""
        if result in self._made:
            return self._made.pop(result)
        return self._arriving.pop(result).get().to(self._pipeline.precision.compute)

    def _send(self, result: Result) -> None:
        to = self._plan.receiver_of(result)
        assert to is not None
        # In the type of parameter exchange, the same on all ranks, while compute types may differ.
        self._pipeline.messages.send(self._made.pop(result).to(self._pipeline.precision.transport), to)

    def _receive(self, result: Result) -> None:
        shape, dtype = self._work.hidden_shape(result.micro_batch), self._pipeline.precision.transport
        of = self._plan.owner(result.stage)
        self._arriving[result] = self._pipeline.messages.receive(shape, dtype, of)


def _input_gradient(gradient: Tensor | None, like: Tensor | None) -> Tensor:
    """The gradient of a stage's input: zeros where its output does not depend on it."""
    if gradient is not None:
        return gradient
    assert like is not None
    return torch.zeros_like(like)


# -------------------------------------------------------------------------------------------------- pipeline schedules
# The schedules of torch.distributed.pipelining: which rank runs which micro-batch of which stage when. Only the tables
# are PyTorch's. Its runtime is not used: it needs a fixed number of micro-batches of one shape, while here their number
# changes from step to step and the last may be smaller; and it does not tell an engine which backward pass is a stage's
# last. It is imported only where a pipeline is created, since it imports all of torch._dynamo, more than a second of
# processor time.


# Classes of torch.distributed.pipelining: with one stage per rank, and with several.
SINGLE_STAGE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
MULTI_STAGE = {"interleaved": "ScheduleInterleaved1F1B", "zero_bubble": "ScheduleZBVZeroBubble"}
ACTIONS = ("F", "B", "I", "W")


class _StageStub:
    """A stand-in of a stage, with the attributes that a schedule reads to build its table."""

    def __init__(self, stage: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.group_rank, self.group_size = 0, ranks
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.has_backward, self.submod = True, None
        self.stage_index_to_group_rank: dict[int, int] = {}


def round_up_micro_batches(schedule: str, ranks: int, micro_batches: int) -> int:
    """Round `micro_batches` up to the next number that PyTorch builds a table for."""
    if schedule == "1f1b":
        return max(micro_batches, ranks)
    if schedule == "interleaved":  # in rounds of equal size
        return next(n for n in itertools.count(micro_batches) if n % max(1, n // ranks) == 0)
    return micro_batches


def make_schedule(schedule: str, stages: Sequence[Any], micro_batches: int, **options: Any) -> Any:
    """Create PyTorch's schedule of that name for the `stages` of a rank."""
    from torch.distributed import pipelining

    if schedule in SINGLE_STAGE:
        return getattr(pipelining, SINGLE_STAGE[schedule])(stages[0], micro_batches, **options)
    return getattr(pipelining, MULTI_STAGE[schedule])(stages, micro_batches, **options)


def build_actions(schedule: str, stages: PipelineStages, micro_batches: int) -> list[list[Action]]:
    """Build the pipeline schedule: the passes of each rank, in order.

    Where PyTorch builds no table for this number of micro-batches, a larger table is used without the surplus ones: the
    rest keep their order, so no pass waits for a missing one.
    """
    ranks, count = stages.ranks, round_up_micro_batches(schedule, stages.ranks, micro_batches)
    places = [_StageStub(stage, stages.last + 1, ranks) for stage in range(0, ranks * STAGES_PER_RANK[schedule], ranks)]
    table = make_schedule(schedule, places, count)
    return [_passes(table.pipeline_order[rank], micro_batches) for rank in range(ranks)]


def _passes(column: Sequence[Any], micro_batches: int) -> list[Action]:
    """A rank's passes of PyTorch's table.

    Every stage takes the micro-batches in turn, so they are counted here: the table of 1F1B in torch 2.13 numbers the
    forward passes of the last rank from 1 (PyTorch's own runtime of that schedule does not read it).
    """
    seen: Counter[tuple[str, int]] = Counter()
    found = []
    for action in column:
        if action is not None and (kind := action.computation_type.value) in ACTIONS:
            number = seen[kind, action.stage_index]
            seen[kind, action.stage_index] += 1
            if number < micro_batches:
                found.append(Action(cast(Kind, kind), action.stage_index, number))
    return found
