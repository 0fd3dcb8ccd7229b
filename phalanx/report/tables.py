"""Tables on the terminal: health checks, the doctor, devices and data sets."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.layout.balance import Division
from phalanx.layout.hardware import Hardware, MeasuredDevice
from phalanx.report import event_text

# -------------------------------------- what checks of nodes have found, and which nodes a run or Slurm has, as tables


STYLES: Mapping[str, str] = {
    "ok": "green",
    "unknown": "dim",
    "watch": "yellow",
    "reset": "red",
    "reboot": "red",
    "isolate": "bold red",
}


def render_findings_table(result: Mapping[str, Any], show_ok: bool = True) -> Table:
    """A row for each finding of a node, as in its results file; without those that are well where `show_ok` is
    false."""
    verdict = str(result["verdict"])
    shown = Table(
        title=Text.assemble(f"{result['host']}: ", (verdict, STYLES.get(verdict, ""))),
        title_justify="left",
        title_style="",
        box=None,
        padding=(0, 2, 0, 0),
    )
    shown.add_column("check", no_wrap=True)
    shown.add_column("", no_wrap=True)
    shown.add_column("", overflow="fold")
    for finding in result["findings"]:
        if not show_ok and finding["severity"] == "ok" and finding["check"] not in ("connection", "measured"):
            continue
        severity = str(finding["severity"])
        shown.add_row(str(finding["check"]), Text(severity, STYLES.get(severity, "")), Text(str(finding["sentence"])))
    return shown


def render_node_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """A row for each node: its name, its state, its health, what is asked of it or why it is out of use."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("node", "state", "health"):
        shown.add_column(column, no_wrap=True)
    shown.add_column("why", overflow="fold")
    for row in rows:
        health = row.get("health", "")
        shown.add_row(row["node"], row["state"], Text(health or "-", STYLES.get(health, "")), Text(row.get("why", "")))
    return shown


# -------------------------------------------------------------- the table of what was measured on the devices of a job


def render_hardware_table(known: Hardware, division: Division) -> Table:
    """A row for each rank: its device, its speed by size of micro-batch, and its share of a step under `division`."""
    positions = known.work.get("positions")
    positions = positions if type(positions) is int and positions > 1 else 1
    unit = "tokens/s" if positions > 1 else "samples/s"
    each = "sequence" if positions > 1 else "sample"
    several = len({device.host for device in known.devices}) > 1
    copies = any(device.host_to_device_bytes_per_s for device in known.devices)
    # Fits a terminal of 80 columns: the names and the speeds of a device take as many lines as they need.
    shown = Table(caption=_caption(known, division, each), caption_justify="left", box=None, padding=(0, 2, 0, 0))
    shown.add_column("rank", justify="right", no_wrap=True)
    shown.add_column("device", min_width=8, overflow="fold")
    shown.add_column("memory", justify="right", no_wrap=True)
    shown.add_column("largest\nmicro-\nbatch", justify="right", no_wrap=True)
    shown.add_column(f"{unit} by\nmicro-batch", min_width=12)
    if positions > 1:
        shown.add_column("sequences\na second\nat best", justify="right", no_wrap=True)
    if copies:
        shown.add_column("host to\ndevice", justify="right", no_wrap=True)
    shown.add_column(f"share\nof {sum(division.shares)}", justify="right", no_wrap=True)
    for device, share in zip(known.devices, division.shares, strict=True):
        speeds = [f"{size}:{event_text.format_count(positions * size / seconds)}" for size, seconds in device.times]
        best = max((size / seconds for size, seconds in device.times), default=None)
        bandwidth = device.host_to_device_bytes_per_s
        shown.add_row(
            str(device.rank),
            _called(device, several),
            event_text.format_bytes(device.memory_bytes),
            str(device.most),
            "  ".join(speeds) or "-",
            *(["-" if best is None else event_text.format_count(best)] if positions > 1 else []),
            *(["-" if bandwidth is None else f"{event_text.format_bytes(bandwidth)}/s"] if copies else []),
            str(share),
        )
    return shown


def _called(device: MeasuredDevice, several: bool) -> str:
    name = device.name if device.name == device.model else f"{device.name} {device.model}"
    return f"{name} on {device.host}" if several else name


def _caption(known: Hardware, division: Division, each: str) -> str:
    parts = [f"speeds by {each}s of a micro-batch, of forward and backward passes alone, not compiled"]
    if known.link is not None:
        rate, latency = event_text.format_bytes(known.link.bytes_per_s), event_text.format_seconds(known.link.latency_s)
        parts.append(f"an all-reduce over all ranks: {rate}/s, and {latency} for one number")
    plural = "es" if division.parts > 1 else ""
    few = f"{min(division.own)} to {division.parts}" if division.own else str(division.parts)
    parts.append(f"each rank would take its share of a step in {few} micro-batch{plural}")
    return "; ".join(parts)


# ---------------------------------------------------------------------- what is in token sets, as tables in a terminal


WIDEST_BAR = 40


def print_datasets(console: Console, found: Sequence[Any]) -> None:
    """Print a table of sets, and of each its lengths and samples; `found` are `data.inspect.TokenSetStats`."""
    table = Table("", *(escape(one.name) for one in found), title="token sets")
    for name, value in ROWS:
        cells = [value(one) for one in found]
        if any(cells):
            table.add_row(name, *(cell or "-" for cell in cells))
    console.print(table)
    for one in found:
        if one.lengths:
            _histogram(console, one)
        for number, runs in one.samples:
            _sample(console, one, number, runs)


ROWS: tuple[tuple[str, Any], ...] = (
    ("documents", lambda one: f"{one.documents:,}"),
    ("tokens", lambda one: f"{one.tokens:,}"),
    ("tokens of a document: mean", lambda one: f"{one.mean:,.1f}"),
    ("median", lambda one: f"{one.median:,.1f}"),
    ("95 % have at most", lambda one: f"{one.p95:,.0f}"),
    ("longest", lambda one: f"{one.longest:,}"),
    ("vocabulary that occurs", lambda one: f"{one.used:,} of {one.vocab_size:,}"),
    ("tokens that are learnt", lambda one: _share(one.learnt, one.tokens)),
    ("rows when packed", lambda one: "" if one.rows is None else f"{one.rows:,}, {one.filled:.1%} full"),
    ("longer than a row", lambda one: "" if one.too_long is None else f"{one.too_long:,}"),
)


def _share(part: int | None, whole: int) -> str:
    return "" if part is None or not whole else f"{part:,} ({part / whole:.1%})"


def _histogram(console: Console, one: Any) -> None:
    table = Table("tokens", "documents", "", title=f"{escape(one.name)}: lengths of documents", box=None)
    most = max(count for _, _, count in one.lengths)
    for low, high, count in one.lengths:
        bar = "█" * round(WIDEST_BAR * count / most) or ("▏" if count else "")
        table.add_row(f"{low:,}" if low == high else f"{low:,} to {high:,}", f"{count:,}", bar)
    console.print(table)


def _sample(console: Console, one: Any, number: int, runs: Sequence[tuple[str, bool]]) -> None:
    """Where not everything is learnt, what is stands in double brackets: colours are lost in a file."""
    console.print(f"[bold]{escape(one.name)}, document {number:,}[/bold]")
    text = Text()
    for content, learnt in runs:
        if one.learnt is None:
            text.append(content)
        else:
            text.append(f"⟦{content}⟧" if learnt else content, "green" if learnt else "dim")
    console.print(text)


def print_batch(
    console: Console, step: int, found: Sequence[Any], texts: Sequence[str], folders: Sequence[str]
) -> None:
    """Print the samples of a batch, `data.batch.BatchSample`, a line each."""
    table = Table(box=None, pad_edge=False)
    for name in ("position", "source", "epoch", "row", "which is", "and begins"):
        table.add_column(name, no_wrap=name != "and begins", overflow="ellipsis")
    for one, text in zip(found, texts, strict=True):
        cells = (f"{one.position}", f"{one.source}", f"{one.epoch}", f"{one.row}", one.place)
        table.add_row(*cells, Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
    console.print(f"[bold]step {step}: {len(found)} samples[/bold]")
    console.print(table)
    for number, folder in enumerate(folders):
        console.print(Text(f"source {number} is {folder}", style="dim"), soft_wrap=True)
