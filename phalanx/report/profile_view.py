"""The part of a report that shows what was seen inside steps: phases of a profile, memory by phase."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from phalanx.core.events import EventKind
from phalanx.report import event_text
from phalanx.report.history import RunHistory


def render_profile_cards(run: RunHistory) -> list[str]:
    """One card for each profile and for each memory record; rows whose numbers are damaged are left out."""
    found = []
    for event in run.events:
        if event.get("kind") == EventKind.PROFILED:
            steps = f"steps {event.get('first', '?')} to {event.get('last', '?')}"
            found.append(_card("Profile", f"{steps}, time of a step", _phases(event) + _operators(event)))
        elif event.get("kind") == EventKind.MEMORY_RECORDED and isinstance(event.get("phases"), dict):
            note = f"step {event.get('step', '?')}, rank 0, bytes above what was held when it began"
            found.append(_card("Memory by phase", note, _memory(event["phases"])))
    return found


def _phases(event: dict[str, Any]) -> str:
    phases = event.get("phases")
    known = {
        name: numbers
        for name, values in (phases.items() if isinstance(phases, dict) else ())
        if isinstance(values, list) and len(numbers := _numbers(values)) == 2
    }
    whole = sum(mine for name, (mine, *_) in known.items() if name not in event_text.WITHIN)
    rows = [
        (
            f"{name}, within the others" if name in event_text.WITHIN else name,
            event_text.format_seconds(mine),
            f"{100 * mine / whole:.1f} %" if whole else "",
            event_text.format_seconds(slowest),
        )
        for name, (mine, slowest) in known.items()
    ]
    return _table(("phase", "rank 0", "share", "slowest rank"), rows)


def _operators(event: dict[str, Any]) -> str:
    entries = event.get("operators")
    rows = [
        (str(entry[0]), event_text.format_seconds(numbers[0]), f"{numbers[1]:g}")
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, list) and entry and len(numbers := _numbers(entry[1:])) == 2
    ]
    return _table(("operator of rank 0", "in itself", "calls"), rows)


def _memory(phases: dict[str, Any]) -> str:
    rows = []
    for name, row in phases.items():
        if isinstance(row, dict):
            numbers = [event_text.finite_number(row, key) for key in ("allocated_bytes", "kept_bytes", "peak_bytes")]
            rows.append((str(name), *("" if value is None else _signed(value) for value in numbers)))
    return _table(("phase", "allocated", "kept at its end", "highest total"), rows)


def _numbers(values: list[Any]) -> list[float]:
    return [number for value in values if (number := event_text.finite_number({"value": value}, "value")) is not None]


def _signed(count_bytes: float) -> str:
    return f"-{event_text.format_bytes(-count_bytes)}" if count_bytes < 0 else event_text.format_bytes(count_bytes)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f"<th>{title}</th>" for title in titles)
    return (
        f'<div class="scroll"><table class="inside"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _card(title: str, note: str, body: str) -> str:
    return f'<details class="card" open><summary>{title} <span>{html.escape(note)}</span></summary>{body}</details>'
