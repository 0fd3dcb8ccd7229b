"""Parts of the report's page: profiles, evaluations, and the comparison with the prediction."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phalanx.core.records import EventKind
from phalanx.report import event_text, formats
from phalanx.report.history import RunHistory

# -------------------------------------------------------------------------------------------------------- profile view
# Inside a step: phases of a profile, memory by phase.


def render_profile_cards(run: RunHistory) -> list[str]:
    """Cards of profiles and memory records; rows with damaged numbers are left out."""
    found = []
    for event in run.events:
        if event.get("kind") == EventKind.PROFILED:
            steps = f"steps {event.get('first', '?')} to {event.get('last', '?')}"
            found.append(_card("Profile", f"{steps}, time of a step", _phases(event) + _operators(event)))
        elif event.get("kind") == EventKind.MEMORY_RECORDED and isinstance(event.get("phases"), dict):
            note = f"step {event.get('step', '?')}, rank 0, bytes above its start"
            found.append(_card("Memory by phase", note, _memory(event["phases"])))
    return found


def _phases(event: dict[str, Any]) -> str:
    phases = event.get("phases")
    known = {
        name: numbers
        for name, values in (phases.items() if isinstance(phases, dict) else ())
        if len(numbers := formats.finite_numbers(values)) == 2
    }
    whole = sum(mine for name, (mine, *_) in known.items() if name not in event_text.WITHIN)
    rows = [
        (
            f"{name}, within the others" if name in event_text.WITHIN else name,
            formats.format_seconds(mine),
            f"{100 * mine / whole:.1f} %" if whole else "",
            formats.format_seconds(slowest),
        )
        for name, (mine, slowest) in known.items()
    ]
    return _table(("phase", "rank 0", "share", "slowest rank"), rows)


def _operators(event: dict[str, Any]) -> str:
    entries = event.get("operators")
    rows = [
        (str(entry[0]), formats.format_seconds(numbers[0]), f"{numbers[1]:g}")
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, list) and entry and len(numbers := formats.finite_numbers(entry[1:])) == 2
    ]
    return _table(("operator of rank 0", "in itself", "calls"), rows)


def _memory(phases: dict[str, Any]) -> str:
    rows = []
    for name, row in phases.items():
        if isinstance(row, dict):
            numbers = [formats.finite_number(row, key) for key in ("allocated_bytes", "kept_bytes", "peak_bytes")]
            rows.append((str(name), *("" if value is None else _signed(value) for value in numbers)))
    return _table(("phase", "allocated", "at its end", "highest total"), rows)


def _signed(count_bytes: float) -> str:
    return f"-{formats.format_bytes(-count_bytes)}" if count_bytes < 0 else formats.format_bytes(count_bytes)


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


# ----------------------------------------------------------------------------------------------------------- eval view
# Evaluation sets: one curve and one row of a table for each.


def group_by_set(events: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Evaluations by set name, in order of step; of a replayed step the last one."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for event in events:
        if event.get("kind") == EventKind.EVALUATED and isinstance(event.get("step"), int):
            found.setdefault(event_text.set_name(event), {})[event["step"]] = dict(event)
    return {name: [steps[step] for step in sorted(steps)] for name, steps in found.items()}


def render_eval_card(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Table of the evaluation sets, if there are several: a row each, with its last and its best loss."""
    sets = group_by_set(events)
    if len(sets) < 2:
        return []
    last_of = [evaluations[-1] for evaluations in sets.values()]
    named = list(dict.fromkeys(name for event in last_of for name in formats.eval_scores(event)))
    unit = str(last_of[0].get("unit", "tokens"))
    beside = named or (["perplexity"] if unit == "tokens" else [])
    counted = "tokens" if unit == "tokens" else "losses"
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in ("set", "step", "loss", *beside, "best", counted))
    rows = []
    for name, evaluations in sets.items():
        last = evaluations[-1]
        loss, tokens = formats.finite_number(last, "loss"), formats.finite_number(last, "tokens")
        losses = [
            (value, event["step"])
            for event in evaluations
            if (value := formats.finite_number(event, "loss")) is not None
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
    found, loss = formats.eval_scores(event), formats.finite_number(event, "loss")
    if title in found:
        return f"{found[title]:.4f}"
    return formats.format_perplexity(loss) if title == "perplexity" and loss is not None else "-"


def render_fp8_card(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Table of what the FP8 products of each block were given in the last evaluation; none without train.fp8."""
    found = [event for event in events if event.get("kind") == EventKind.EVALUATED]
    largest, zero = formats.fp8_ranges(found[-1]) if found else ([], [])
    rows = [
        (str(number), f"{most:.4g}", f"{share:.3%}")
        for number, (most, share) in enumerate(zip(largest, zero, strict=False))
    ]
    table = _table(("block", "largest input", "inputs that round to zero"), rows)
    return [_card("FP8 products", "in the last evaluation", table)] if table else []


def score_curves(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[dict[str, Any]], str]]:
    """(display name, evaluations, name of the score) of each score of each set."""
    found = []
    sets = group_by_set(events)
    for name, evaluations in sets.items():
        for score in dict.fromkeys(score for event in evaluations for score in formats.eval_scores(event)):
            have = [event for event in evaluations if score in formats.eval_scores(event)]
            found.append((f"{name} {score}" if len(sets) > 1 else score, have, score))
    return found


# ------------------------------------ measured and predicted step times


def render_prediction_card(run: RunHistory) -> list[str]:
    """Card of the newest comparison; none if it is missing or damaged."""
    found = [event for event in run.events if event.get("kind") == EventKind.PREDICTION_CHECKED]
    if not found:
        return []
    event = found[-1]
    thought, took = formats.finite_number(event, "predicted_s"), formats.finite_number(event, "measured_s")
    if thought is None or took is None:
        return []
    off = event.get("off")
    rows = [_row("a step", thought, took, whole=took)]
    for row in event.get("terms") or []:
        if not isinstance(row, dict):
            continue
        predicted, measured = formats.finite_number(row, "predicted_s"), formats.finite_number(row, "measured_s")
        if predicted is not None and measured is not None:
            name = str(row.get("name"))
            rows.append(_row(name, predicted, measured, whole=took, off=name == off))
    held, thought_of = (
        formats.finite_number(event, "measured_bytes"),
        formats.finite_number(event, "predicted_bytes"),
    )
    if held is not None and thought_of is not None:
        cells = (
            "memory of the fullest rank",
            formats.format_bytes(thought_of),
            formats.format_bytes(held),
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
        formats.format_seconds(predicted),
        formats.format_seconds(measured),
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
