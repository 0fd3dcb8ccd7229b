"""A lab of borrowed machines, as a story: three unlike nodes, an equal share that is too much for one, and a plan.

    sudo python3 benchmarks/borrowed_lab.py [--quick] [--json FILE] [--html FILE]

The nodes are this machine's (lab.py): a quarter, a half and the whole of a core, each with a limit of memory and a
cable of 1 Gbit/s. First each trains by itself, as if it had the memory: the sum of their speeds is all that there is to
be had. Then all of them together, each with the same share of a step, as most scripts would have it: the kernel kills
the node that cannot hold it. In smaller micro-batches it lives, and all wait for the slowest. Then `phalanx hardware`
measures them, `phalanx plan` divides the work, and `phalanx train` runs it. `--html` draws what came of it. Needs root.
"""

import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.harness import Check, Row
from benchmarks.lab import Ended, Lab, Node, lab, why_not, write_text
from benchmarks.planner_here import NAME, keys, middle, prepare, ranks_of
from phalanx.config import load
from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.layout import hardware
from phalanx.layout.balance import split_evenly
from phalanx.planner import measured_cluster, plan_file, tables
from phalanx.planner.advice import PlanQuery
from phalanx.planner.plan import Plan
from phalanx.planner.recipe_keys import free_layout

GIB = 2**30
TARGET = 0.97
SHARDED = ("parallel.engine=sharded", "parallel.zero=1", "balance.optimizer_state=even")
ALONE, EQUAL = "each alone, their sum", "equal shares"
SMALL, PLANNED = "equal shares, smaller micro-batches", "as planned"


@dataclass(frozen=True)
class Size:
    """The nodes and what they train; `warm` steps do not count."""

    cores: tuple[float, ...] = (1.0, 0.5, 0.25)
    memory: tuple[int, ...] = (6 * GIB, 4 * GIB, 2 * GIB)
    mbit: float = 1000.0
    model: dict[str, int] = field(
        default_factory=lambda: {
            "hidden": 192, "layers": 8, "heads": 4, "intermediate": 512, "vocabulary": 512, "seq_len": 256,
            "global_batch": 252,
        }
    )  # fmt: skip
    surveys: int = 3
    turns: int = 2
    warm: int = 1
    steps: int = 3

    @property
    def third(self) -> int:
        """Sequences of each node in a step, the same for all."""
        return self.model["global_batch"] // len(self.cores)

    @property
    def fewer(self) -> int:
        """A micro-batch that all can hold."""
        return max(1, self.third // 4)

    @property
    def shares(self) -> list[int]:
        """Sequences of each node in a step, by its part of all cores."""
        ideal = [self.model["global_batch"] * part / sum(self.cores) for part in self.cores]
        assert all(abs(share - round(share)) < 1e-6 for share in ideal), "ideal shares are whole numbers"
        return [round(share) for share in ideal]


QUICK = Size(
    memory=(round(3.5 * GIB), round(2.2 * GIB), round(1.28 * GIB)),
    model={"hidden": 96, "layers": 8, "heads": 4, "intermediate": 256, "vocabulary": 512, "seq_len": 256,
           "global_batch": 252},
    surveys=1, turns=1, steps=2,
)  # fmt: skip


class Teller:
    """What a person watches: in colours where rich is installed and there is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console()
        if not self.console.is_terminal:
            self.console = Console(width=120)

    def act(self, number: int, title: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{number}. {title}", align="left")

    def say(self, text: Any) -> None:
        self.console.print(text)


# ---------------------------------------------------------------------------------------------------------- the runs


def rate(paths: RunPaths, warm: int) -> float:
    """Tokens a second of a run's steps but the first."""
    steps = read_steps(paths.metrics)[warm:]
    return sum(step["tokens"] for step in steps) / sum(step["step_s"] for step in steps)


def alone(place: Lab, size: Size, turn: int) -> list[float]:
    """Tokens a second of each node by itself, with batches of its share, so that its step takes as long as with the
    others. All train at once, each for itself: what they take from each other as parts of one machine (its memory, its
    caches) is no matter of the plan."""
    words = [
        (f"train.global_batch={share}", f"train.micro_batch={share}", "parallel.engine=single") for share in size.shares
    ]
    found = []
    for node, (paths, ended) in enumerate(place.train_apart(f"alone-{turn}", NAME, words)):
        _well(ended, f"node {node} alone")
        found.append(rate(paths, size.warm))
    return found


def equal(place: Lab, size: Size, name: str, micro_batch: int) -> tuple[RunPaths, Ended]:
    """The same share for every node."""
    return place.train(NAME, name, *SHARDED, "balance.batch=even", f"train.micro_batch={micro_batch}")


def planned(place: Lab, size: Size, file: Path) -> tuple[Plan, dict[str, Any], Any]:
    """The plan for what `phalanx hardware` finds, its record, and the nodes as they were measured."""
    # Measured as large as they all can hold: what a sequence takes of a small micro-batch says little of a large one.
    words = f"train.micro_batch={size.fewer}"
    surveys = [hardware.read_hardware(place.hardware(NAME, words)) for _ in range(size.surveys)]
    cluster = measured_cluster.cluster_from_hardware(middle(surveys))
    question = PlanQuery(free_layout(load.load_recipe(file, []), []), None, ())
    found = question.search(cluster)
    told = plan_file.plan_record(question, cluster, found, plan_file.PlanOptions(), NAME)
    return found.best, told, cluster


def cause(paths: RunPaths) -> str:
    """What a run says of the rank that died in it."""
    died = [event for event in read_lines(paths.events) if event["kind"] == EventKind.WORKER_DIED]
    return "; ".join(f"rank {event['rank']}: {event['reason']}" for event in died)


def _well(ended: Ended, what: str) -> None:
    assert ended.well, f"{what} ended with {ended.codes}:\n{''.join(ended.said)[-3000:]}"


# --------------------------------------------------------------------------------------------------------- the story


def story(size: Size, folder: Path, teller: Teller) -> tuple[list[Row], list[Check], dict[str, Any]]:
    """All acts; rows, checks, and what a picture is drawn from."""
    file = prepare(folder, {**size.model, "steps": size.steps})
    with lab([Node((part,), size.mbit) for part in size.cores], folder) as place:
        limits = dict(enumerate(size.memory))
        teller.act(1, "Three borrowed machines")
        for node, (part, memory) in enumerate(zip(size.cores, size.memory, strict=True)):
            teller.say(
                f"node {node}: {part:g} of a core, {memory / GIB:.1f} GiB, {size.mbit / 1e3:g} Gbit/s to the others"
            )

        teller.act(2, "Each by itself, as if it had the memory")
        sums, ours = [], []
        by_node = alone(place, size, 0)
        sums.append(sum(by_node))
        for node, found in enumerate(by_node):
            teller.say(f"node {node}: {found:,.0f} tokens/s")
        teller.say(f"[bold]all that there is to be had: {sums[0]:,.0f} tokens/s")

        place.memory = limits
        teller.act(3, f"All together, {size.third} sequences for everyone")
        paths, ended = equal(place, size, "equal", size.third)
        kills = [place.limits.memory_kills(node) for node in limits]
        why, killed = cause(paths), not ended.well and any(kills)
        if killed:
            why += f": the kernel, at the {limits[kills.index(max(kills))] / GIB:.1f} GiB of its control group"
        teller.say(f"[red]{why or 'it ended'}" if killed else "[yellow]everyone lived")

        teller.act(4, "The same in micro-batches that all can hold")
        paths, ended = equal(place, size, "smaller", size.fewer)
        _well(ended, "equal shares in smaller micro-batches")
        waiting = rate(paths, size.warm)
        teller.say(f"{waiting:,.0f} tokens/s, {waiting / sums[0]:.0%} of the sum: all wait for the slowest")

        teller.act(5, "phalanx hardware, phalanx plan")
        plan, told, cluster = planned(place, size, file)
        teller.say(tables.render_plan({**told, "out": "plan.json"}))

        teller.act(6, "phalanx train, as planned")
        peaks: dict[int, int] = {}
        for turn in range(size.turns):
            if turn:
                place.memory = {}
                sums.append(sum(alone(place, size, turn)))
                place.memory = limits
            words = keys(plan, load.load_recipe(file))
            paths, ended = place.train(NAME, f"planned-{turn}", *words, ranks=ranks_of(plan, cluster, place.nodes))
            _well(ended, "the plan")
            ours.append(rate(paths, size.warm))
            peaks = ended.peaks
            teller.say(f"{ours[-1]:,.0f} tokens/s, [bold green]{ours[-1] / sums[-1]:.1%} of the sum")
    ratio = statistics.median(mine / whole for mine, whole in zip(ours, sums, strict=True))
    rows = _rows(statistics.median(sums), waiting, statistics.median(ours), ratio, why)
    order = [node for node, _ in ranks_of(plan, cluster, place.nodes)]
    shares = list(plan.choice.shares or split_evenly(size.model["global_batch"], plan.copies))
    rows += [
        {"node": node, "cores": size.cores[node], "limit, GiB": size.memory[node] / GIB,
         "held, GiB": peaks.get(rank, 0) / GIB, "sequences": shares[rank],
         "predicted step, s": plan.estimate.step_s}
        for rank, node in enumerate(order)
    ]  # fmt: skip
    checks = [
        harness.at_least("an equal share is killed by its memory limit (1: yes)", float(killed), 1.0),
        harness.at_least("the plan's tokens/s over the sum of the nodes alone", ratio, TARGET),
    ]
    drawn = {"rates": {ALONE: sums[0], EQUAL: 0.0, SMALL: waiting, PLANNED: statistics.median(ours)},
             "nodes": by_node, "order": order, "shares": shares, "peaks": peaks, "limits": size.memory}  # fmt: skip
    return rows, checks, drawn


def _rows(whole: float, waiting: float, ours: float, ratio: float, why: str) -> list[Row]:
    return [
        {"trained by": ALONE, "tokens/s": whole, "of the sum": 1.0, "what happened": ""},
        {"trained by": EQUAL, "tokens/s": 0.0, "of the sum": 0.0, "what happened": why},
        {"trained by": SMALL, "tokens/s": waiting, "of the sum": waiting / whole, "what happened": ""},
        {"trained by": PLANNED, "tokens/s": ours, "of the sum": ratio, "what happened": ""},
    ]


def draw(found: dict[str, Any], file: Path) -> None:
    """Speeds of all ways beside each other, and what each node holds of what it may."""
    from bokeh.embed import file_html
    from bokeh.layouts import row
    from bokeh.models import FactorRange, Range1d
    from bokeh.plotting import figure
    from bokeh.resources import INLINE

    # Colours that are told apart with weak colour vision as well (Okabe and Ito, 2008).
    colours = ("#0072B2", "#D55E00", "#E69F00", "#009E73")
    size: dict[str, Any] = {"height": 500, "sizing_mode": "stretch_width", "toolbar_location": None}
    names, rates = list(found["rates"]), list(found["rates"].values())
    text = ["killed" if not each else f"{each:,.0f}" for each in rates]
    speeds = figure(
        title="Three borrowed machines: tokens a second",
        x_range=FactorRange(factors=names),
        y_range=Range1d(start=0, end=1.1 * max(rates)),
        **size,
    )
    speeds.vbar(names, top=rates, width=0.8, color=list(colours))
    speeds.text(names, rates, text=text, text_align="center", text_baseline="bottom", y_offset=-3)
    speeds.xaxis.major_label_orientation = 0.4
    nodes = [f"node {node}, {share} sequences" for node, share in zip(found["order"], found["shares"], strict=True)]
    held = [found["peaks"].get(rank, 0) / GIB for rank in range(len(nodes))]
    limits = [found["limits"][node] / GIB for node in found["order"]]
    top = 1.25 * max(*held, *limits)  # with room for the legend
    memory = figure(
        title="memory of each node under the plan, GiB",
        x_range=FactorRange(factors=nodes),
        y_range=Range1d(start=0, end=top),
        **size,
    )
    memory.vbar(nodes, top=held, width=0.8, color=colours[0], legend_label="held")
    memory.scatter(nodes, limits, marker="dash", size=60, line_width=3, color=colours[1], legend_label="limit")
    page = file_html(row(speeds, memory, sizing_mode="stretch_width"), INLINE, "Three borrowed machines")
    file.write_text(page, encoding="utf-8")


def main() -> None:
    parser = harness.options(__doc__.splitlines()[0])
    parser.add_argument("--html", type=Path, metavar="FILE", help="also draw what came of it into this file")
    given = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"borrowed_lab: not told; {reason}")
        return
    size = QUICK if given.quick else Size()
    with tempfile.TemporaryDirectory(prefix="phalanx-borrowed-") as folder:
        write_text(Path(folder, "text.jsonl"))
        rows, checks, found = story(size, Path(folder), Teller())
    if given.html is not None:
        draw(found, given.html)
    harness.report(harness.result("borrowed lab", harness.machine(None, 1), rows, checks), given.json)


if __name__ == "__main__":
    main()
