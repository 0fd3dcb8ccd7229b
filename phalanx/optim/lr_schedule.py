"""Learning rate schedules: pure functions of the step."""

import functools
import math
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import ConfigError
from phalanx.core.user_code import describe_error, load_function, split_reference

if TYPE_CHECKING:  # avoids the import of pydantic
    from phalanx.config.schema import OptimSection

SAMPLES = 1000  # steps for which a custom schedule is checked


def learning_rate(optim: "OptimSection", step: int) -> float:
    """Learning rate of step number `step`; the first step is 1.

    Linear warm-up reaches `lr` at step `warmup_steps`; then cosine (Loshchilov and Hutter 2017), linear, polynomial,
    constant, or wsd: constant until the last `decay_share` of `decay_steps`, in which it falls (Hu et al., "MiniCPM",
    2024; the shape "sqrt" is that of Hägele et al. 2024). It reaches `lr * min_lr_ratio` at step `decay_steps` and
    stays there. `decay_steps` must have been resolved. A custom schedule returns the factor of `lr`. Raises ConfigError
    where it returns none.
    """
    if (own := split_reference(optim.schedule)) is not None:
        return optim.lr * _own_factor(optim.schedule, *own, step)
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


def check_schedule(optim: "OptimSection", steps: int) -> None:
    """Check a custom learning rate schedule for `steps` steps: it is called for up to a thousand of them, twice, and
    must return the same each time. Raises ConfigError."""
    own = split_reference(optim.schedule)
    if own is None:
        return
    for step in range(1, steps + 1, max(1, steps // SAMPLES)):
        first, second = (_own_factor(optim.schedule, *own, step) for _ in range(2))
        if first != second:
            raise ConfigError(
                f"optim.schedule {optim.schedule} returns {first} and then {second} for step {step}; make it a "
                "function of the step alone, or a resumed run would have another curve"
            )


def _own_factor(schedule: str, file: str, name: str, step: int) -> float:
    """The factor that a custom schedule returns. Raises ConfigError unless it is a finite number >= 0."""
    function = _load_schedule(file, name)
    try:
        factor = function(step)
    except Exception as error:
        told = describe_error(error, Path(file).expanduser().resolve())
        raise ConfigError(f"optim.schedule {schedule} fails in step {step}: {told}; correct it") from error
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        raise ConfigError(
            f"optim.schedule {schedule} returns {reprlib.repr(factor)} for step {step}; return the factor of optim.lr, "
            "a finite number from 0"
        )
    return float(factor)


@functools.cache  # a rank keeps the function that it has loaded
def _load_schedule(file: str, name: str) -> Callable[[int], Any]:
    return load_function("optim.schedule", file, name)


def _left(shape: str, done: float, power: float) -> float:
    """The decay factor, from 1 to 0, after the share `done` of the decay steps."""
    match shape:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        case "sqrt":
            return 1 - math.sqrt(done)
        case "polynomial":
            return float((1 - done) ** power)
        case _:
            return 1 - done
