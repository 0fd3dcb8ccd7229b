"""Pipeline stages: their layers and ranks, and the time of a schedule. Pure, without torch.

A stage is some consecutive layers; each rank of a pipeline holds one, or two with the schedules that wait less.
Sources: GPipe (Huang et al. 2019); 1F1B and interleaved stages (Narayanan et al. 2021); zero bubble (Qi et al. 2024).
The orders themselves are PyTorch's (parallel/pipeline.py).
"""

import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.core.errors import ConfigError
from phalanx.layout import balance
from phalanx.layout.balance import CostLine

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}  # schedule -> stages of a rank
V_SHAPED = ("zero_bubble",)  # the stages go down the ranks and back up: the first rank has the first and the last

# F forward; B backward; I backward to the stage's input alone; W to its weights alone.
Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """A pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def result(self) -> "Result":
        """The result of the action that a neighbouring stage needs."""
        return Result("F" if self.kind == "F" else "G", self.stage, self.micro_batch)


class Result(NamedTuple):
    """What a stage has computed of a micro-batch: F its output, G the gradient of its input."""

    kind: Literal["F", "G"]
    stage: int
    micro_batch: int


class ActionSpan(NamedTuple):
    """An action with the seconds of its beginning and end."""

    action: Action
    start: float
    stop: float


class Move(NamedTuple):
    """What a rank does next: an action, or sending or receiving the result of one."""

    kind: Literal["do", "send", "receive"]
    action: Action


ActionsByRank = Sequence[Sequence[Action]]  # by rank


@dataclass(frozen=True)
class PipelineStages:
    """The layers of each stage, in order, on `ranks` ranks."""

    layers: tuple[range, ...]
    ranks: int
    v_shaped: bool = False

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.layers) - 1

    def owner(self, stage: int) -> int:
        """The rank of the pipeline that holds a stage."""
        return min(stage, 2 * self.ranks - 1 - stage) if self.v_shaped else stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds."""
        return tuple(stage for stage in range(len(self.layers)) if self.owner(stage) == rank)

    def receiver_of(self, result: Result) -> int | None:
        """The rank that needs a result; None: no stage does."""
        stage = result.stage + (1 if result.kind == "F" else -1)
        return self.owner(stage) if 0 <= stage <= self.last else None


# ----------------------------------------------------------------------------------------------------- layers to stages


def divide_layers(
    layers: int, ranks: int, schedule: str, *, speeds: Sequence[float] | None = None, head: float = 0.0
) -> PipelineStages:
    """Stages whose slowest rank is the fastest possible, each with a layer at least.

    `speeds` of the ranks (None: all alike); `head`: layers that the head takes as long as. Raises ConfigError where
    there are too few layers.
    """
    _refuse(find_stage_problems(layers, ranks, schedule))
    count, folded = STAGES_PER_RANK[schedule], schedule in V_SHAPED
    shape = PipelineStages((range(0),) * (ranks * count), ranks, folded)
    extra = [head if stage == shape.last else 0.0 for stage in range(shape.last + 1)]
    pace = [1.0 / speed for speed in speeds or [1.0] * ranks]
    room = layers - ranks * count  # each stage has one already
    lines = [
        CostLine((count + sum(extra[stage] for stage in shape.stages_of(rank))) * pace[rank], pace[rank], room)
        for rank in range(ranks)
    ]
    numbers = [1] * (ranks * count)
    for rank, more in enumerate(balance.split_by_cost(room, lines)):
        mine = shape.stages_of(rank)
        for stage, some in zip(
            mine, balance.split_by_cost(more, [CostLine(extra[each], 1.0, more) for each in mine]), strict=True
        ):
            numbers[stage] += some
    return _placed(numbers, ranks, folded)


def stages_from_counts(layers: int, ranks: int, schedule: str, numbers: Sequence[int]) -> PipelineStages:
    """Stages of so many layers each. Raises ConfigError where these are not the model's."""
    _refuse(find_stage_problems(layers, ranks, schedule, numbers))
    return _placed(numbers, ranks, schedule in V_SHAPED)


def _placed(numbers: Sequence[int], ranks: int, folded: bool) -> PipelineStages:
    starts = [sum(numbers[:stage]) for stage in range(len(numbers))]
    return PipelineStages(tuple(range(a, a + n) for a, n in zip(starts, numbers, strict=True)), ranks, folded)


def _refuse(found: Sequence[str]) -> None:
    if found:
        raise ConfigError(found[0])


def find_stage_problems(
    layers: int,
    ranks: int,
    schedule: str,
    numbers: Sequence[int] | None = None,
    *,
    activations: str = "none",
    compiled: bool = False,
) -> list[str]:
    """What cannot be done, a sentence each. `numbers`: parallel.layers_per_stage, None if that is auto; `activations`:
    memory.activations; `compiled`: train.compile."""
    found = []
    stages = ranks * STAGES_PER_RANK[schedule]
    each = f"parallel.pipeline {ranks}" + (f" with schedule {schedule}" if STAGES_PER_RANK[schedule] > 1 else "")
    if numbers is not None and len(numbers) != stages:
        found.append(
            f"parallel.layers_per_stage has {len(numbers)} numbers, but {each} makes {stages} stages; give one for each"
        )
    elif numbers is not None and (sum(numbers) != layers or min(numbers) < 1):
        found.append(
            f"parallel.layers_per_stage gives the stages {sum(numbers)} layers together, but the model has {layers}; "
            "give each stage one at least, and all of them together"
        )
    elif layers < stages:
        instead = f"set parallel.pipeline={layers // STAGES_PER_RANK[schedule]} at most"
        if layers >= ranks:
            instead = "set parallel.schedule=1f1b, which needs half as many"
        found.append(f"{each} makes {stages} stages, and each needs a layer, but the model has {layers}; {instead}")
    if schedule == "zero_bubble" and activations in ("full", "selective"):
        found.append(
            f"parallel.schedule zero_bubble runs a backward pass in two halves, and with memory.activations "
            f"{activations} both would compute the activations again, matrix by matrix; set memory.activations=none, "
            "or parallel.schedule=1f1b"
        )
    if activations == "offload":
        found.append(
            "memory.activations offload knows of one micro-batch at a time, but a pipeline has several under way; set "
            "memory.activations=full"
        )
    if schedule == "zero_bubble" and compiled:
        found.append(
            "parallel.schedule zero_bubble runs a backward pass in two halves, but a compiled one cannot be taken "
            "apart; set train.compile=false, or parallel.schedule=1f1b"
        )
    return found


# ----------------------------------------------------------------------------------------------------- what orders take


def simulate_schedule(
    orders: ActionsByRank, stages: PipelineStages, seconds: Callable[[Action], float], hop_s: float = 0.0
) -> list[list[ActionSpan]]:
    """When each rank does what, if a result takes `hop_s` from rank to rank; ValueError if they wait for ever."""
    made: dict[tuple[str, int, int], float] = {}
    spans: list[list[ActionSpan]] = [[] for _ in orders]
    left = [deque(order) for order in orders]
    free, moved = [0.0] * len(orders), True
    while moved:
        moved = False
        for rank, order in enumerate(left):
            while order and (ready := _ready(order[0], made, stages, hop_s)) is not None:
                action = order.popleft()
                start = max(free[rank], ready)
                free[rank] = start + seconds(action)
                made["W" if action.kind == "W" else action.result.kind, action.stage, action.micro_batch] = free[rank]
                spans[rank].append(ActionSpan(action, start, free[rank]))
                moved = True
    if any(left):
        raise ValueError(f"these orders wait for each other: {[order[0] for order in left if order]}")
    return spans


def _ready(
    action: Action, made: dict[tuple[str, int, int], float], stages: PipelineStages, hop_s: float
) -> float | None:
    """When an action may begin; None: what it needs is not made yet."""
    kind, stage, number = action
    needs: list[tuple[str, int, int]] = []
    if kind == "F":
        needs += [("F", stage - 1, number)] * (stage > 0)
    elif kind == "W":
        needs.append(("G", stage, number))
    else:
        needs.append(("F", stage, number))
        needs += [("G", stage + 1, number)] * (stage < stages.last)
    found = 0.0
    for need in needs:
        if need not in made:
            return None
        found = max(found, made[need] + (hop_s if stages.owner(need[1]) != stages.owner(stage) else 0.0))
    return found


def step_s(spans: Sequence[Sequence[ActionSpan]]) -> float:
    """Seconds that all of it takes."""
    return max(span.stop for mine in spans for span in mine)


def bubble_fraction(spans: Sequence[Sequence[ActionSpan]]) -> float:
    """The part of the ranks' time in which they wait."""
    busy = sum(span.stop - span.start for mine in spans for span in mine)
    return 1.0 - busy / (len(spans) * step_s(spans))


def ideal_bubble_fraction(ranks: int, micro_batches: int, held: int = 1) -> float:
    """The same by formula, where stages are alike and nothing is split: p - 1 slots of v m + p - 1."""
    return (ranks - 1) / (held * micro_batches + ranks - 1)


TYPICAL_COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # what actions take, in proportion


def plan_moves(orders: ActionsByRank, stages: PipelineStages, ahead: int = 0) -> list[list[Move]]:
    """What each rank does, with sends and receives between its actions.

    Any two ranks send and receive the same results in the same order, that of a simulated time, so that no rank waits
    for a result that is sent after one which itself waits. A rank posts receives `ahead` actions earlier; then the two
    directions are ordered differently, which the link must allow.
    """
    spans = simulate_schedule(orders, stages, lambda action: TYPICAL_COST[action.kind])
    found: list[list[tuple[tuple[float, int, float, Action], Move]]] = [[] for _ in orders]
    starts = [[span.start for span in mine] for mine in spans]

    def put(rank: int, kind: Literal["send", "receive"], span: ActionSpan, early: int) -> None:
        before = bisect.bisect_left(starts[rank], span.stop)  # actions that have begun by then
        found[rank].append(((max(0, before - early), 0, span.stop, span.action), Move(kind, span.action)))

    for rank, mine in enumerate(spans):
        for number, span in enumerate(mine):
            found[rank].append(((number, 1, 0.0, span.action), Move("do", span.action)))
            other = stages.receiver_of(span.action.result) if span.action.kind != "W" else None
            if other is not None and other != rank:
                put(rank, "send", span, 0)
                put(other, "receive", span, ahead)
    return [[move for _, move in sorted(mine)] for mine in found]
