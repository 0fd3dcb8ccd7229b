"""Tables on the terminal: health checks, the doctor, devices and data sets."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.layout.balance import Division
from phalanx.layout.hardware import Hardware, MeasuredDevice
from phalanx.report import formats
from phalanx.report.page_script import PAGE_SCRIPT

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
    """Findings of a node, a row each, as in its results file; `show_ok=False` omits those that are ok."""
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


def render_rows(rows: Sequence[Mapping[str, str]]) -> Table:
    """Rows with the same keys, which head the columns; columns without a value are omitted."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    columns = [key for key in rows[0] if any(row[key] for row in rows)]
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(row[column], STYLES.get(row[column], "")) for column in columns))
    return shown


def render_node_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Nodes, a row each: name, state, health, and the request or the reason it is drained."""
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
    """Measured devices, a row for each rank: speed by size of micro-batch, and its share of a step under `division`."""
    positions = known.work.get("positions")
    positions = positions if type(positions) is int and positions > 1 else 1
    unit = "tokens/s" if positions > 1 else "samples/s"
    each = "sequence" if positions > 1 else "sample"
    several = len({device.host for device in known.devices}) > 1
    copies = any(device.host_to_device_bytes_per_s for device in known.devices)
    # Fits 80 columns: names and speeds wrap.
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
        speeds = [f"{size}:{formats.format_count(positions * size / seconds)}" for size, seconds in device.times]
        best = max((size / seconds for size, seconds in device.times), default=None)
        bandwidth = device.host_to_device_bytes_per_s
        shown.add_row(
            str(device.rank),
            _called(device, several),
            formats.format_bytes(device.memory_bytes),
            str(device.most),
            "  ".join(speeds) or "-",
            *(["-" if best is None else formats.format_count(best)] if positions > 1 else []),
            *(["-" if bandwidth is None else f"{formats.format_bytes(bandwidth)}/s"] if copies else []),
            str(share),
        )
    return shown


def _called(device: MeasuredDevice, several: bool) -> str:
    name = device.name if device.name == device.model else f"{device.name} {device.model}"
    return f"{name} on {device.host}" if several else name


def _caption(known: Hardware, division: Division, each: str) -> str:
    parts = [f"speeds by {each}s of a micro-batch: forward and backward passes only, not compiled"]
    if known.link is not None:
        rate, latency = formats.format_bytes(known.link.bytes_per_s), formats.format_seconds(known.link.latency_s)
        parts.append(f"an all-reduce over all ranks: {rate}/s, and {latency} for one number")
    plural = "es" if division.parts > 1 else ""
    few = f"{min(division.own)} to {division.parts}" if division.own else str(division.parts)
    parts.append(f"each rank takes its share of a step in {few} micro-batch{plural}")
    return "; ".join(parts)


# ---------------------------------------------------------------------- what is in token sets, as tables in a terminal


WIDEST_BAR = 40


def print_datasets(console: Console, found: Sequence[Any]) -> None:
    """Print token sets: a table of all, then the lengths and samples of each; `found` are
    `data.inspect.TokenSetStats`."""
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
    ("95 % are at most", lambda one: f"{one.p95:,.0f}"),
    ("longest", lambda one: f"{one.longest:,}"),
    ("vocabulary used", lambda one: f"{one.used:,} of {one.vocab_size:,}"),
    ("target tokens", lambda one: _share(one.learnt, one.tokens)),
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
    """Target tokens are in double brackets if not all tokens are targets: a file has no colours."""
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


# ------------------------------------ the page of a report: its markup and style; the script is `page_script.py`
# The numbers come from `html.py`. Nothing is fetched. Everything here is ASCII, and a content policy in the page
# forbids any request, so that it always opens offline.


def render_page(**parts: str) -> str:
    """The page with its parts. Substituted in one pass: text of a part is never a placeholder."""
    return re.sub(r"@@(\w+)@@", lambda place: parts[place[1]], _PAGE)


PALETTE = """
:root { color-scheme: light dark;
  --back: #f4f5f7; --card: #ffffff; --ink: #171a21; --soft: #667085; --line: #e3e6eb; --grid: #eef0f3;
  --blue: #2f6fde; --orange: #d9730d; --teal: #0f8f7f; --violet: #7a5af8; --red: #d92d20; --green: #12905a;
  --amber: #b7791f; --grey: #98a2b3; }
@media screen and (prefers-color-scheme: dark) { :root {
  --back: #0e1116; --card: #161b22; --ink: #e6e9ef; --soft: #8b95a5; --line: #272e38; --grid: #212832;
  --blue: #6ea8fe; --orange: #f5a55a; --teal: #4cc9b0; --violet: #a78bfa; --red: #ff6b61; --green: #4cc38a;
  --amber: #e3b341; --grey: #6b7686; } }
"""

_STYLE = (
    PALETTE
    + """* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 48px; }
.brand { display: flex; align-items: flex-end; gap: 8px; color: var(--soft); font-size: 12px; letter-spacing: .08em;
  text-transform: uppercase; line-height: 1; }
.brand i { display: inline-flex; align-items: flex-end; gap: 2px; }
.brand b { width: 4px; border-radius: 1px; background: var(--blue); }
h1 { margin: 10px 0 2px; font-size: 28px; line-height: 1.25; font-weight: 650; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 17px; font-weight: 650; }
h3 { margin: 0 0 6px; font-size: 14px; font-weight: 650; }
h3 span, summary span { margin-left: 8px; color: var(--soft); font-weight: 400; font-size: 12.5px; }
.pill { display: inline-block; margin-left: 6px; padding: 3px 10px; border-radius: 99px; font-size: 13px;
  font-weight: 600; line-height: 1.3; vertical-align: 4px; color: var(--tone); border: 1px solid var(--tone); }
.good { --tone: var(--green); } .bad { --tone: var(--red); } .warn { --tone: var(--amber); }
.info { --tone: var(--blue); } .quiet { --tone: var(--soft); }
.facts { margin: 0 0 20px; color: var(--soft); }
.facts span { display: inline-block; } .facts span + span::before { content: "\\00b7"; margin: 0 8px; }
.tiles { display: flex; flex-wrap: wrap; gap: 1px; margin: 0; background: var(--line);
  border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
.tile { flex: 1 1 205px; background: var(--card); padding: 12px 16px 10px; }
.tile dt { color: var(--soft); font-size: 12.5px; }
.tile dd { margin: 1px 0 0; font-size: 22px; font-weight: 620; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile p { margin: 0; min-height: 19px; color: var(--soft); font-size: 12.5px; }
.incidents { list-style: none; margin: 16px 0 0; padding: 0; display: grid; gap: 8px; }
.incidents li { padding: 10px 16px; background: var(--card); border: 1px solid var(--line);
  border-left: 4px solid var(--red); border-radius: 8px; overflow-wrap: anywhere; }
.incidents b { font-weight: 600; } .incidents span { display: block; color: var(--soft); }
.bar { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 18px; margin: 28px 0 12px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; color: var(--soft); font-size: 12.5px; }
.hint { margin-left: auto; color: var(--soft); font-size: 12.5px; }
.legend i { font-style: normal; font-weight: 700; margin-right: 5px; }
.switch { display: inline-flex; padding: 3px; background: var(--line); border-radius: 9px; }
.switch button { border: 0; padding: 4px 13px; border-radius: 7px; font: inherit; font-size: 13px; color: var(--soft);
  background: none; cursor: pointer; }
.switch button[aria-pressed=true] { background: var(--card); color: var(--ink); box-shadow: 0 1px 2px #0002; }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.card { min-width: 0; background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; }
.grid .wide, .grid .card:last-child:nth-child(even) { grid-column: 1 / -1; }
.grid .card { display: flex; flex-direction: column; }
.head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 16px; margin-bottom: 6px; }
.head h3 { margin: 0; }
.keys { display: flex; flex-wrap: wrap; gap: 0 12px; }
.keys button { border: 0; padding: 0; font: inherit; font-size: 12.5px; text-align: left; color: var(--ink);
  background: none; cursor: pointer; } .keys button[aria-pressed=false] { opacity: .4; }
.key { display: inline-block; width: 18px; margin-right: 6px; vertical-align: 3px; border-top: 2px solid var(--tone); }
.key.faint { border-top-width: 1px; opacity: .6; } .key.dashed { border-top-style: dashed; }
.key.bold { border-top-width: 3px; }
.key.area { height: 9px; vertical-align: -1px; border-top-width: 1px;
  background: color-mix(in srgb, var(--tone) 35%, transparent); }
.plot { position: relative; flex: 1 0 auto; height: 250px; overflow: hidden; } .wide .plot { height: 350px; }
.rule { position: absolute; width: 0; border-left: 1px dotted var(--soft); pointer-events: none; }
.tip { position: fixed; z-index: 9; max-width: min(420px, calc(100vw - 16px)); padding: 7px 11px; font-size: 12.5px;
  color: var(--ink); background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  box-shadow: 0 4px 14px #0003; pointer-events: none; }
.tip b { font-weight: 600; } .tip div { display: flex; align-items: center; } .tip span { overflow-wrap: anywhere; }
.tip em { margin-left: auto; padding-left: 16px; font-style: normal; font-variant-numeric: tabular-nums; }
.tip .told { align-items: baseline; } .told i { flex: 0 0 24px; font-style: normal; font-weight: 700; }
.tip .key { flex: none; }
.below { display: grid; gap: 14px; margin-top: 14px; } .below .card { overflow: hidden; }
.empty { color: var(--soft); }
.scroll { max-height: 460px; overflow: auto; margin: 0 -16px -14px; border-top: 1px solid var(--line); }
.scroll:not(:last-child) { margin-bottom: 14px; }
table { width: 100%; border-collapse: collapse; font-size: 13px; }
td, th { padding: 6px 16px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
.events th { position: sticky; top: 0; background: var(--card); color: var(--soft); font-weight: 500; }
.events td { white-space: nowrap; font-variant-numeric: tabular-nums; color: var(--soft); }
.events td:last-child { width: 100%; min-width: 240px; white-space: normal; overflow-wrap: anywhere;
  color: var(--ink); }
.events .quiet td:last-child { color: var(--soft); }
.inside .warn td { color: var(--tone); font-weight: 600; }
.events i { display: inline-block; width: 20px; font-style: normal; font-weight: 700; color: var(--tone); }
.versions th { width: 1%; white-space: nowrap; font-weight: 500; color: var(--soft); }
summary { cursor: pointer; font-weight: 650; } details[open] summary { margin-bottom: 10px; }
pre { margin: 0 -16px -14px; padding: 12px 16px; border-top: 1px solid var(--line); overflow: auto; max-height: 560px;
  font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { margin-top: 22px; color: var(--soft); font-size: 12.5px; }
@media (max-width: 560px) { main { padding: 18px 12px 32px; } h1 { font-size: 22px; } .tile { flex-basis: 40%; }
  .timed :is(td, th):is(:nth-child(2), :nth-child(3)) { display: none; } .hint { margin-left: 0; }
  td, th { padding: 6px 4px; font-size: 12px; } .inside td:not(:first-child, :nth-child(2)) { white-space: nowrap; }
  :is(td, th):first-child { padding-left: 12px; } .events td:last-child { min-width: 0; } }
main.paper { width: 800px; padding: 0; } .paper .grid { grid-template-columns: 1fr 1fr; }
@media print { body { background: none; } .switch, .hint, .tip { display: none; } .scroll, pre { max-height: none; }
  .grid .card, .incidents li { break-inside: avoid; } }
"""
)

_PAGE = (
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<title>@@title@@ - Phalanx</title>
<style>"""
    + _STYLE
    + """</style>
</head>
<body>
<main>
<header>
<div class="brand"><i><b style="height:9px"></b><b style="height:14px"></b><b style="height:6px"></b>
<b style="height:12px"></b></i>Phalanx run report</div>
@@header@@
<dl class="tiles">@@tiles@@</dl>
@@incidents@@
</header>
@@curves@@
<div class="below">@@records@@</div>
<footer>@@footer@@</footer>
</main>
<script type="application/json" id="data">@@payload@@</script>
<script type="text/plain" id="bokeh">@@bokeh@@</script>
<script>"""
    + PAGE_SCRIPT
    + """</script>
</body>
</html>
"""
)
