"""The load of experts as a heat map, layers by experts, from the newest evaluation's event."""

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.core.records import EventKind
from phalanx.report import formats

CELL = 12  # pixels
FULL_COLOUR = 3.0  # times the mean load: what is above has no stronger colour


def read_expert_loads(event: Mapping[str, Any]) -> tuple[list[int], list[list[float]]]:
    """Of an evaluation's event the numbers of layers with experts, and the load of each of their experts as a multiple
    of the mean; empty where it has none, or something else."""
    found = event.get("experts")
    if not isinstance(found, Mapping):
        return [], []
    layers, rows = found.get("layers"), found.get("load")
    if not (isinstance(layers, list) and isinstance(rows, list) and len(layers) == len(rows)):
        return [], []
    loads = [formats.finite_numbers(row) for row in rows]
    whole = all(isinstance(row, list) and len(row) == len(load) > 0 for row, load in zip(rows, loads, strict=True))
    if not whole or not all(type(layer) is int for layer in layers) or len({len(load) for load in loads}) != 1:
        return [], []
    return layers, loads


def find_newest_loads(events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The newest loads of experts: `layers` and `load` as of `read_expert_loads`, a `note`, and the load of the `full`
    colour; None for a model without experts."""
    found = (read_expert_loads(event) for event in reversed(events) if event.get("kind") == EventKind.EVALUATED)
    layers, loads = next((each for each in found if each[0]), ([], []))
    if not layers:
        return None
    most, least = max(map(max, loads)), min(map(min, loads))
    note = f"rows are layers, columns are experts; the busiest has {most:.2f} times the mean, the idlest {least:.2f}"
    return {"layers": layers, "load": loads, "note": note, "full": FULL_COLOUR}


def render_expert_card(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Card of the heat map; none for a model without experts."""
    found = find_newest_loads(events)
    if found is None:
        return []
    layers, loads = found["layers"], found["load"]
    width, height = CELL * len(loads[0]), CELL * len(loads)
    cells = "".join(
        f'<rect x="{CELL * expert}" y="{CELL * row}" width="{CELL}" height="{CELL}" '
        f'fill-opacity="{min(1.0, max(0.0, load) / FULL_COLOUR):.2f}">'
        f"<title>layer {layer}, expert {expert}: {load:.2f} times the mean</title></rect>"
        for row, (layer, of_layer) in enumerate(zip(layers, loads, strict=True))
        for expert, load in enumerate(of_layer)
    )
    drawn = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="load of each expert" fill="var(--orange)">{cells}</svg>'
    )
    head = f"<h3>Load of experts<span>{found['note']}</span></h3>"
    return [f'<section class="card">{head}<div class="scroll">{drawn}</div></section>']
