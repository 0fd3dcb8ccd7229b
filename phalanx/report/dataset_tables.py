"""What is in token sets, as tables in a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

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
