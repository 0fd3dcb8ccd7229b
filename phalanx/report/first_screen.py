"""The first screen of a run: four lines with its model, devices, folder and batch split, before the first step."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from phalanx.core.records import EventKind
from phalanx.report import event_text

# Events about what was resolved, measured and scheduled: the report has them, and a console with `verbose`.
DETAILS = frozenset(
    {
        EventKind.AUTO_RESOLVED,
        EventKind.LAYOUT_CHOSEN,
        EventKind.ATTEMPT_STARTED,
        EventKind.MEASURING,
        EventKind.MEASURED,
        EventKind.WORK_SPLIT,
        EventKind.COMM_SCHEDULE_CHANGED,
    }
)
SHOWN_MODELS = 4  # device models that the line of devices names


def format_line(name: str, text: str) -> str:
    """One line of the screen."""
    return f"{name:9}{text}"


def start_lines(event: Mapping[str, Any], folder: str) -> list[str]:
    """The lines of model, devices and folder, from a `run_started` event."""
    model = [event_text.describe_parameters(dict(event)), *(str(event[key]) for key in ("dtype",) if event.get(key))]
    model += [f"{event['engine']} engine"] if event.get("engine") else []
    model += [f"{event['steps']} steps"] if event.get("steps") else []
    return [
        format_line("model", ", ".join(part for part in model if part) or "unknown"),
        format_line("devices", _devices(event)),
        format_line("folder", folder),
    ]


def _devices(event: Mapping[str, Any]) -> str:
    models, world, hosts = event.get("models"), event.get("world", "?"), event.get("hosts")
    if isinstance(models, list) and models:
        counted = Counter(map(str, models)).most_common()
        named = ", ".join(f"{count} x {model}" for model, count in counted[:SHOWN_MODELS])
        named += ", ..." if len(counted) > SHOWN_MODELS else ""
    else:
        named = f"{world} x {event.get('device', 'device')}"
    nodes = f" on {len(hosts)} nodes" if isinstance(hosts, list) and len(hosts) > 1 else ""
    spares = event.get("spares")
    spare = f", {len(spares)} spare" if isinstance(spares, list) and spares else ""
    return named + nodes + spare


def split_line(started: Mapping[str, Any], split: Mapping[str, Any] | None) -> str:
    """The line of the batch split, from the `run_started` event and the `work_split` event; without the latter one copy
    of the model takes the whole batch, or the record of an earlier start has the split."""
    axes = [f", {name} {degree}" for name in ("tensor", "pipeline") if (degree := started.get(name) or 1) != 1]
    axes = [f"; layout: {started['layout']}"] if started.get("layout") else axes
    shares = split.get("shares") if split is not None else None
    numbers = event_text.format_shares(shares) if isinstance(shares, list) and shares else started.get("global_batch")
    unit = "sequences" if started.get("unit", "tokens") == "tokens" else started["unit"]
    text = f"{numbers if numbers is not None else '?'} {unit} a step"
    why = split.get("why") if split is not None else None
    return format_line("split", text + (f" ({why})" if why else "") + "".join(axes))
