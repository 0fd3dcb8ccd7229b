"""How often to save, from what steps and saves were measured to take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.comm.collectives import device_for_group


@dataclass
class Interval:
    """Times in seconds, over all ranks. `interval`: steps from one save to the next."""

    interval: int
    step_s: float = 0.0
    step_with_save_s: float = 0.0
    preprocessing_s: float = 0.0
    writing_s: float = 0.0


def compute_auto_checkpoint_interval(
    step_durations: Sequence[float],
    step_ckpt_durations: Sequence[float],
    ckpt_preprocessing_durations: Sequence[float],
    ckpt_io_durations: Sequence[float],
) -> Interval:
    """The least number of steps between saves in which the slowest rank's writing is done, whatever its length, while
    the fastest rank's steps go on. Each argument has one number of seconds a step, the second and those of saves from
    steps with one. Collective over all ranks."""
    fastest = _over_ranks(min(step_durations), dist.ReduceOp.MIN)
    slowest = [_over_ranks(max(each, default=0.0), dist.ReduceOp.MAX) for each in (
        step_ckpt_durations, ckpt_preprocessing_durations, ckpt_io_durations
    )]  # fmt: skip
    steps = max(1, math.ceil((slowest[1] + slowest[2]) / max(fastest, 1e-9)))
    return Interval(steps, fastest, *slowest)


def _over_ranks(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    if not dist.is_initialized():
        return value
    device = device_for_group(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    tensor = torch.tensor([value], dtype=torch.float32, device=device)
    dist.all_reduce(tensor, op=operation)
    return float(tensor)
