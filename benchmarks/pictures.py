"""The pictures of the README, drawn as SVG from the records of real runs.

    python3 benchmarks/one_curve.py --quick --svg docs/pictures/one-curve.svg
    make demo && python3 benchmarks/pictures.py runs/demo docs/pictures/kill.svg

The first draws the losses of one recipe on five clusters, the second a run with a kill: loss and throughput over time.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths

# Okabe and Ito, 2008: told apart with weak colour vision as well.
COLOURS = ("#000000", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00")
GREY, WIDTH, LEFT, RIGHT = "#5a5a5a", 760, 64, 16


@dataclass(frozen=True)
class Line:
    """A curve: points, and how it is drawn."""

    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1.5
    dash: str = ""
    name: str = ""


@dataclass(frozen=True)
class Panel:
    """A chart: its lines, the ranges of its axes, and what is marked at which x."""

    title: str
    lines: Sequence[Line]
    top: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    y_ticks: Sequence[tuple[float, str]]
    x_ticks: Sequence[float] = ()
    log: bool = False
    marks: Sequence[tuple[float, str]] = ()

    def at(self, x: float, y: float) -> tuple[float, float]:
        value, (low, high) = y, self.y
        if self.log:
            value, low, high = (math.log10(each) for each in (value, low, high))
        across = LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)
        return across, self.top + self.height - (value - low) / (high - low) * self.height

    def render(self) -> str:
        left, right, bottom = LEFT, WIDTH - RIGHT, self.top + self.height
        parts = [text(left, self.top - 8, self.title, weight="bold")]
        for value, label in self.y_ticks:
            y = self.at(self.x[0], value)[1]
            parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#e3e3e3" fill="none"/>')
            parts.append(text(left - 6, y + 4, label, anchor="end"))
        for value in self.x_ticks:
            parts.append(text(self.at(value, self.y[0])[0], bottom + 16, f"{value:g}", anchor="middle"))
        for value, label in self.marks:
            x = self.at(value, self.y[0])[0]
            path = f"M{x:.1f} {self.top}V{bottom}"
            parts.append(f'<path d="{path}" stroke="#D55E00" stroke-dasharray="4 3" fill="none"/>')
            parts.append(text(x + 5, self.top + 14, label, fill="#b34700"))
        for line in self.lines:
            inside = [self.at(x, min(max(y, self.y[0]), self.y[1])) for x, y in line.points]
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in inside)
            dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
            parts.append(
                f'<path d="{path}" stroke="{line.colour}" stroke-width="{line.width}"{dash} '
                'fill="none" stroke-linejoin="round"/>'
            )
        return "\n".join(parts)


def text(x: float, y: float, words: str, anchor: str = "start", fill: str = GREY, weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{fill}" font-weight="{weight}">{escape(words)}</text>'


def render_picture(title: str, panels: Sequence[Panel], x_label: str, legend: Sequence[Line] = ()) -> str:
    """The SVG of some charts, one above the other, on white, so that it shows on any page."""
    bottom = max(panel.top + panel.height for panel in panels) + 36
    parts = [panel.render() for panel in panels]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, bottom - 4, x_label, anchor="middle"))
    for place, line in enumerate(legend):
        x, y = LEFT + 4 + (place % 3) * 215, bottom + 18 + (place // 3) * 19
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        parts.append(f'<path d="M{x} {y}h22" stroke="{line.colour}" stroke-width="{line.width}"{dash}/>')
        parts.append(text(x + 28, y + 4, line.name))
    height = bottom + 12 + 19 * math.ceil(len(legend) / 3) + (8 if legend else 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def choose_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two values."""
    step = (high - low) / most
    unit = 10 ** math.floor(math.log10(step))
    step = next(each * unit for each in (1, 2, 5, 10) if each * unit >= step)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def draw_curves(curves: dict[str, list[float]], control: str, file: Path) -> None:
    """The losses of all clusters, and below how far each is from the first."""
    first, steps = next(iter(curves.values())), len(next(iter(curves.values())))
    widths = (11.0, 8.5, 6.0, 4.0, 2.0, 1.0)  # one on top of the other, so that each shows
    style = [
        Line((), colour, 1.6 if name == control else widths[min(place, 5)], "5 3" if name == control else "", name)
        for place, (name, colour) in enumerate(zip(curves, COLOURS, strict=False))
    ]
    numbers = range(1, steps + 1)
    losses = [Line(list(zip(numbers, curves[each.name], strict=True)), each.colour, each.width, each.dash)
              for each in style]  # fmt: skip
    beside = []
    for each in style[1:]:
        pairs = zip(curves[each.name], first, strict=True)
        distances = [(step, max(abs(one - two) / two, 1e-17)) for step, (one, two) in zip(numbers, pairs, strict=True)]
        beside.append(Line(distances, each.colour, 1.5, each.dash))
    every = [loss for curve in curves.values() for loss in curve]
    low, high = math.floor(min(every)), math.ceil(max(every))
    x, x_ticks = (1.0, float(steps)), [each for each in choose_ticks(0, steps) if each >= 1]
    panels = [
        Panel("loss", losses, 28, 230, x, (low, high), [(each, f"{each:g}") for each in choose_ticks(low, high)]),
        Panel("relative difference to one rank (0 at the bottom)", beside, 290, 130, x, (1e-17, 1.0),
              [(10.0**power, f"1e{power}") for power in (-16, -12, -8, -4, 0)], x_ticks, log=True),
    ]  # fmt: skip
    title = "One recipe on five clusters: the same loss curve"
    file.write_text(render_picture(title, panels, "step", style), encoding="utf-8")


def draw_run(run: Path, file: Path) -> None:
    """Loss and throughput of a run over time, with each death of a rank and how long the run took to continue."""
    paths = RunPaths(run)
    steps, events = read_steps(paths.metrics), list(read_lines(paths.events))
    begin = steps[0]["time"] - steps[0]["step_s"]
    times = [record["time"] - begin for record in steps]
    deaths = [event for event in events if event["kind"] == EventKind.WORKER_DIED]
    incidents = [event for event in events if event["kind"] == EventKind.INCIDENT]
    marks = [
        (death["time"] - begin, f"rank {death['rank']} killed; next step done after {incident['seconds']:.2f} s")
        for death, incident in zip(deaths, incidents, strict=True)
    ]
    losses = [record["loss"] for record in steps]
    speeds = [record["tokens_per_s"] / 1000 for record in steps]
    x, x_ticks = (0.0, times[-1]), choose_ticks(0, times[-1], 8)
    low, high, fast = math.floor(min(losses)), math.ceil(max(losses)), max(speeds) * 1.15
    panels = [
        Panel("loss", [Line(list(zip(times, losses, strict=True)), "#0072B2", 2.0)], 28, 170, x, (low, high),
              [(each, f"{each:g}") for each in choose_ticks(low, high)], marks=marks),
        Panel("thousand tokens/s", [Line(list(zip(times, speeds, strict=True)), "#009E73")], 230, 110, x, (0, fast),
              [(each, f"{each:g}") for each in choose_ticks(0, fast, 4)], x_ticks,
              marks=[(at, "") for at, _ in marks]),
    ]  # fmt: skip
    title = "A run with a kill: loss and throughput over time"
    file.write_text(render_picture(title, panels, "seconds since the first step began"), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw loss and throughput of a run over time as SVG.")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("svg", type=Path, help="the file to write")
    given = parser.parse_args()
    draw_run(given.run, given.svg)


if __name__ == "__main__":
    main()
