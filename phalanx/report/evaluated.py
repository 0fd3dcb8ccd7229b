"""What the events say about the sets that a run is evaluated on: one curve and one row of a table for each."""

import html
from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.records import Kind
from phalanx.report import words


def by_set(events: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The evaluations of each set, by the name that is shown, in order of step and the last of each step."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for event in events:
        if event.get("kind") == Kind.EVALUATED and isinstance(event.get("step"), int):
            found.setdefault(words.set_name(event), {})[event["step"]] = dict(event)
    return {name: [steps[step] for step in sorted(steps)] for name, steps in found.items()}


def card(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """The table of the sets in the report, where there are several; a row each, with its last and its best loss."""
    sets = by_set(events)
    if len(sets) < 2:
        return []
    titles = "".join(f"<th>{title}</th>" for title in ("set", "step", "loss", "perplexity", "best", "tokens"))
    rows = []
    for name, evaluations in sets.items():
        last = evaluations[-1]
        loss, tokens = words.number(last, "loss"), words.number(last, "tokens")
        losses = [(value, event["step"]) for event in evaluations if (value := words.number(event, "loss")) is not None]
        best = "{:.4f} at step {}".format(*min(losses)) if losses else "-"
        cells = (
            name,
            str(last["step"]),
            "-" if loss is None else f"{loss:.4f}",
            "-" if loss is None else words.perplexity(loss),
            best,
            "-" if tokens is None else f"{tokens:,.0f}",
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    table = f'<table class="events"><thead><tr>{titles}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return [f'<section class="card"><h3>Evaluations</h3><div class="scroll">{table}</div></section>']
