"""The part of a report that shows what steps took beside what was expected of them."""

import html
from typing import Any

from phalanx.core.events import EventKind
from phalanx.report import event_text
from phalanx.report.history import RunHistory


def render_prediction_card(run: RunHistory) -> list[str]:
    """One card of the newest comparison; none where there is none, or it is damaged."""
    found = [event for event in run.events if event.get("kind") == EventKind.PREDICTION_CHECKED]
    if not found:
        return []
    event = found[-1]
    thought, took = event_text.finite_number(event, "predicted_s"), event_text.finite_number(event, "measured_s")
    if thought is None or took is None:
        return []
    off = event.get("off")
    rows = [_row("a step", thought, took, whole=took)]
    for row in event.get("terms") or []:
        if not isinstance(row, dict):
            continue
        predicted, measured = event_text.finite_number(row, "predicted_s"), event_text.finite_number(row, "measured_s")
        if predicted is not None and measured is not None:
            name = str(row.get("name"))
            rows.append(_row(name, predicted, measured, whole=took, off=name == off))
    held, thought_of = (
        event_text.finite_number(event, "measured_bytes"),
        event_text.finite_number(event, "predicted_bytes"),
    )
    if held is not None and thought_of is not None:
        cells = (
            "memory of the fullest rank",
            event_text.format_bytes(thought_of),
            event_text.format_bytes(held),
            _apart(held, thought_of),
            "",
        )
        rows.append(_cells(cells))
    head = "".join(f"<th>{title}</th>" for title in ("", "predicted", "measured", "", "of a step"))
    note = f"medians of {event.get('steps', '?')} steps up to step {event.get('step', '?')}, predicted from "
    note += f"{event.get('basis', 'data-sheets')}"
    said = f"<p>{html.escape(event_text.describe_event(event))}</p>"
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    table = f'<div class="scroll"><table class="inside">{body}</table></div>'
    title = f"<summary>Predicted and measured <span>{html.escape(note)}</span></summary>"
    return [f'<details class="card" open>{title}{said}{table}</details>']


def _row(name: str, predicted: float, measured: float, whole: float, off: bool = False) -> str:
    share = f"{100 * measured / whole:.1f} %" if whole else ""
    cells = (
        name,
        event_text.format_seconds(predicted),
        event_text.format_seconds(measured),
        _apart(measured, predicted),
        share,
    )
    return _cells(cells, "warn" if off else "")


def _apart(measured: float, predicted: float) -> str:
    if predicted <= 0:
        return ""
    return f"{100 * (measured / predicted - 1):+.1f} %"


def _cells(cells: tuple[Any, ...], tone: str = "") -> str:
    head = f'<tr class="{tone}">' if tone else "<tr>"
    return head + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"
