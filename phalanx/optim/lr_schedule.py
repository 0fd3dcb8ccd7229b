"""The learning rate: a pure function of the step."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pydantic is not needed to follow a schedule
    from phalanx.config.schema import OptimSection


def learning_rate(optim: "OptimSection", step: int) -> float:
    """Learning rate of step number `step`; the first step is 1.

    Linear warm-up reaches `lr` at step `warmup_steps`; then cosine (Loshchilov and Hutter 2017), linear, polynomial,
    constant, or wsd: constant until the last `decay_share` of `decay_steps`, in which it falls (Hu et al., "MiniCPM",
    2024; the shape "sqrt" is that of Hägele et al. 2024). It reaches `lr * min_lr_ratio` at step `decay_steps` and
    stays there. `decay_steps` must have been resolved.
    """
    assert optim.decay_steps != "auto"
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    begin = float(optim.warmup_steps)
    if optim.schedule == "wsd":
        begin = max(begin, optim.decay_steps * (1 - optim.decay_share))
    if step >= optim.decay_steps:
        done = 1.0
    else:
        done = max(step - begin, 0.0) / (optim.decay_steps - begin)
    left = _left(optim.decay_shape if optim.schedule == "wsd" else optim.schedule, done, optim.power)
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left)


def _left(shape: str, done: float, power: float) -> float:
    """What is left of the way down, from 1 to 0, when the share `done` of its steps is behind."""
    match shape:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        case "sqrt":
            return 1 - math.sqrt(done)
        case "polynomial":
            return float((1 - done) ** power)
        case _:
            return 1 - done
