"""Durations as users write them: 90s, 45min, 3h."""

import math
import re

from phalanx.core.errors import ConfigError

LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e15  # thirty million years
DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d|days?|w|weeks?)\s*", re.I)
SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "day": 86400.0, "days": 86400.0,
           "w": 604800.0, "week": 604800.0, "weeks": 604800.0}  # fmt: skip


def parse_duration(text: str, what: str) -> float:
    """Parse a duration such as `90s`, `45min`, `3h` or `2d`, above 0, into seconds. Raises ConfigError, which names
    `what` it is for."""
    match = DURATION.fullmatch(text)
    value = float(match[1]) * SECONDS[match[2].casefold()] if match else math.nan
    if not value > 0 or math.isinf(value):
        raise ConfigError(f"{what} {text!r} is not a duration above zero; write it as 90s, 45min, 3h or 2d")
    if not LEAST_SECONDS <= value <= MOST_SECONDS:
        raise ConfigError(f"{what} {text!r} is {value:.3g} s, which no job can have; write it as 90s, 45min, 3h or 2d")
    return value
