"""The orders of torch.distributed.pipelining: which rank works on which micro-batch of which stage when.

Only the tables are PyTorch's. Its runtime is not used: it asks for as many micro-batches as it was made for, all of one
shape, where here their number changes from step to step and the last may be smaller; and it does not tell an engine
which backward pass is the last of a stage. `pipeline.py` carries the tables out. Both import it where a pipeline
is made: it imports all of torch._dynamo, more than a second of processor time that other runs are spared.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from phalanx.layout.pipeline_stages import STAGES_PER_RANK, Action, Kind, PipelineStages

# Classes of torch.distributed.pipelining: with one stage of a rank, and with several.
SINGLE_STAGE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
MULTI_STAGE = {"interleaved": "ScheduleInterleaved1F1B", "zero_bubble": "ScheduleZBVZeroBubble"}
ACTIONS = ("F", "B", "I", "W")


class _StageStub:
    """All that a schedule asks of a stage before it makes its table."""

    def __init__(self, stage: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.group_rank, self.group_size = 0, ranks
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.has_backward, self.submod = True, None
        self.stage_index_to_group_rank: dict[int, int] = {}


def round_up_micro_batches(schedule: str, ranks: int, micro_batches: int) -> int:
    """The least number of micro-batches, at least `micro_batches`, that PyTorch makes a table for."""
    if schedule == "1f1b":
        return max(micro_batches, ranks)
    if schedule == "interleaved":  # in rounds of one size
        return next(n for n in itertools.count(micro_batches) if n % max(1, n // ranks) == 0)
    return micro_batches


def make_schedule(schedule: str, stages: Sequence[Any], micro_batches: int, **options: Any) -> Any:
    """PyTorch's schedule of that name for the `stages` of a rank."""
    from torch.distributed import pipelining

    if schedule in SINGLE_STAGE:
        return getattr(pipelining, SINGLE_STAGE[schedule])(stages[0], micro_batches, **options)
    return getattr(pipelining, MULTI_STAGE[schedule])(stages, micro_batches, **options)


def build_actions(schedule: str, stages: PipelineStages, micro_batches: int) -> list[list[Action]]:
    """The passes of each rank, in order.

    Where PyTorch makes no table for so few micro-batches, or for such a number, it is that for a few more, without
    them: what is left keeps its order, so nothing waits for what is not there.
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
