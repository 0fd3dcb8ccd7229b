"""What checks of nodes have found, and which nodes a run or Slurm has, as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

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
