"""The learning rate: a pure function of the step."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pydantic is not needed to follow a schedule
    from phalanx.config import OptimSection


def learning_rate(optim: "OptimSection", step: int) -> float:
    """Learning rate of step number `step`; the first step is 1.

    Linear warm-up reaches `lr` at step `warmup_steps`; then cosine (Loshchilov and Hutter 2017), linear or constant,
    reaching `lr * min_lr_ratio` at step `decay_steps` and staying there. `decay_steps` must have been resolved.
    """
    assert optim.decay_steps != "auto"
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    span = max(optim.decay_steps - optim.warmup_steps, 1)
    done = min((step - optim.warmup_steps) / span, 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1 - done
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left)
