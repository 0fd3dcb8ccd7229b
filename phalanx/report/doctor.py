"""Terminal output of `phalanx doctor`: a line as soon as each check ends."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

STYLES: Mapping[str, str] = {"ok": "green", "slow": "yellow", "wrong": "bold red", "missing": "dim", "skipped": "dim"}
NARROW = 80  # below, a sentence stands under its check
STATE_WIDTH, CHECK_WIDTH = 7, 27


class DoctorConsole:
    """Prints results, and on a terminal the check that is running."""

    def __init__(self, terminal: Console) -> None:
        self._terminal = terminal

    def begin(self, name: str) -> None:
        """Show that a check begins."""
        if self._terminal.is_terminal:
            self._erase()
            self._terminal.print(Text(f"... {name}", style="dim"), end="\r")

    def line(self, state: str, check: str, sentence: str) -> None:
        """Print a result of a check."""
        if not self._terminal.is_terminal:  # a line of a file, to be searched
            self._terminal.out(f"{state:{STATE_WIDTH}} {check:{CHECK_WIDTH}} {sentence}", highlight=False)
            return
        self._erase()
        shown = Table.grid(padding=(0, 1, 0, 0))
        shown.add_column(width=STATE_WIDTH, no_wrap=True)
        style = STYLES.get(state, "")
        if self._terminal.width < NARROW:
            shown.add_column(overflow="fold")
            shown.add_row(Text(state, style), Text(check))
            shown.add_row("", Text(sentence, style="" if state in ("slow", "wrong") else "dim"))
        else:
            shown.add_column(width=CHECK_WIDTH, overflow="fold")
            shown.add_column(overflow="fold")
            shown.add_row(Text(state, style), Text(check), Text(sentence))
        self._terminal.print(shown)

    def end(self, report: Mapping[str, Any], file: str) -> None:
        """Print the summary of `report`, which was written to `file`."""
        if self._terminal.is_terminal:
            self._erase()
        counts = ", ".join(f"{count} {state}" for state, count in report["count"].items() if count)
        verdict = str(report["verdict"])
        text = Text.assemble((verdict, STYLES[verdict]), f": {counts}, in {report['seconds']:.0f} s. ")
        text.append(f"Report to share, without names, addresses and secrets: {file}")
        self._terminal.print(text)

    def _erase(self) -> None:
        self._terminal.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
