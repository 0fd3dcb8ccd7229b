"""Numbers of records as people write them, and other details of events."""

import math
import signal
from collections.abc import Mapping
from typing import Any


def format_seconds(value: float) -> str:
    """A duration given in seconds, in two units at most: `85 ms`, `4.2 s`, `3 min 05 s`, `2 h 10 min`, `3 d 04 h`."""
    if value < 0.9995:
        return f"{value * 1000:.3g} ms" if value > 0 else "0 s"
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(value / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def format_clock(value: float) -> str:
    """A duration given in seconds as a clock shows it: `1:05`, `2:03:09`."""
    whole = max(0, round(value))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def format_bytes(count_bytes: float) -> str:
    """A number of bytes in binary units: `512 B`, `1.5 MiB`, `79.6 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count_bytes < 999.5:
            return f"{count_bytes:.3g} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.4g} TiB"


def format_count(value: float) -> str:
    """A large number in three digits: `950`, `12.4k`, `1.24M`, `8.03B`, `15T`."""
    for unit in ("", "k", "M", "B"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.4g}T"


def format_perplexity(loss: float) -> str:
    """e to the loss (nats per token), as text; a loss too large for a double has none worth printing."""
    return f"{math.exp(loss):,.1f}" if loss < 20 else "over 1e8"


def format_difference(value: float, than: float) -> str:
    """`3.1 % more than`, or less; `as much as` where they differ by less than a thousandth."""
    more = value / than - 1
    if abs(more) < 0.0005:
        return "as much as"
    return f"{100 * abs(more):.3g} % {'more' if more > 0 else 'less'} than"


def finite_number(event: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a record, or None where it is missing, null, not finite or not a number."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def signal_name(value: object) -> str:
    """`SIGKILL` for 9, "9" or "SIGKILL"; a number without a name stays `signal 99`."""
    text = str(value)
    if not text.isdecimal():
        return text
    known = {int(member): member.name for member in signal.Signals}
    return known.get(int(text), f"signal {text}")


def finite_numbers(value: object) -> list[float]:
    """A list of finite numbers, empty where it is anything else."""
    if not isinstance(value, list) or any(type(each) not in (int, float) or not math.isfinite(each) for each in value):
        return []
    return [float(each) for each in value]


def fp8_ranges(event: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Of an evaluation with train.fp8, by block: the largest input, and the share of inputs that round to zero."""
    found = event.get("fp8")
    ranges = found if isinstance(found, dict) else {}
    largest, zero = (finite_numbers(ranges.get(name)) for name in ("largest", "zero"))
    return largest, zero


def eval_scores(event: dict[str, Any]) -> dict[str, float]:
    """The scores of an evaluation, such as its accuracy."""
    found = event.get("scores")
    return (
        {str(name): value for name in found if (value := finite_number(found, name)) is not None}
        if isinstance(found, dict)
        else {}
    )


def describe_scores(event: dict[str, Any]) -> str:
    """What an evaluation says beside its loss: its scores; without any, of tokens the perplexity."""
    if found := eval_scores(event):
        return ", ".join(f"{name} {value:.4f}" for name, value in found.items())
    loss = finite_number(event, "loss")
    return (
        f"perplexity {format_perplexity(loss)}" if loss is not None and event.get("unit", "tokens") == "tokens" else ""
    )
