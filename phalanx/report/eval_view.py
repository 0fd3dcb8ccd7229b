"""What the events say about the sets that a run is evaluated on: one curve and one row of a table for each."""

import html
from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.core.events import EventKind
from phalanx.report import event_text


def group_by_set(events: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The evaluations of each set, by the name that is shown, in order of step and the last of each step."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for event in events:
        if event.get("kind") == EventKind.EVALUATED and isinstance(event.get("step"), int):
            found.setdefault(event_text.set_name(event), {})[event["step"]] = dict(event)
    return {name: [steps[step] for step in sorted(steps)] for name, steps in found.items()}


def render_eval_card(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """The table of the sets in the report, where there are several; a row each, with its last and its best loss."""
    sets = group_by_set(events)
    if len(sets) < 2:
        return []
    last_of = [evaluations[-1] for evaluations in sets.values()]
    named = list(dict.fromkeys(name for event in last_of for name in event_text.eval_scores(event)))
    unit = str(last_of[0].get("unit", "tokens"))
    beside = named or (["perplexity"] if unit == "tokens" else [])
    counted = "tokens" if unit == "tokens" else "losses"
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in ("set", "step", "loss", *beside, "best", counted))
    rows = []
    for name, evaluations in sets.items():
        last = evaluations[-1]
        loss, tokens = event_text.finite_number(last, "loss"), event_text.finite_number(last, "tokens")
        losses = [
            (value, event["step"])
            for event in evaluations
            if (value := event_text.finite_number(event, "loss")) is not None
        ]
        best = "{:.4f} at step {}".format(*min(losses)) if losses else "-"
        cells = (
            name,
            str(last["step"]),
            "-" if loss is None else f"{loss:.4f}",
            *(_beside(last, title) for title in beside),
            best,
            "-" if tokens is None else f"{tokens:,.0f}",
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    table = f'<table class="events"><thead><tr>{titles}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return [f'<section class="card"><h3>Evaluations</h3><div class="scroll">{table}</div></section>']


def _beside(event: dict[str, Any], title: str) -> str:
    found, loss = event_text.eval_scores(event), event_text.finite_number(event, "loss")
    if title in found:
        return f"{found[title]:.4f}"
    return event_text.format_perplexity(loss) if title == "perplexity" and loss is not None else "-"


def score_curves(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[dict[str, Any]], str]]:
    """(name that is shown, evaluations, the score's own name) of each score of each set."""
    found = []
    sets = group_by_set(events)
    for name, evaluations in sets.items():
        for score in dict.fromkeys(score for event in evaluations for score in event_text.eval_scores(event)):
            have = [event for event in evaluations if score in event_text.eval_scores(event)]
            found.append((f"{name} {score}" if len(sets) > 1 else score, have, score))
    return found
