"""Live display of a run in a notebook: a progress bar with figures, and the loss curve."""

import html
import io
import sys
import time
from typing import Any

from phalanx.core.records import EventKind
from phalanx.report import formats
from phalanx.report.console import Console

REDRAW_S = 0.5
MOST_POINTS = 400
WIDTH, HEIGHT = 480, 90  # of the curve, in pixels


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook (Jupyter, Colab, VS Code)."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookBar(Console):
    """Progress bar of a run as an element of a notebook's page. It does not show events: the caller prints them as
    lines."""

    def __init__(self, total_steps: int, description: str, unit: str = "tokens") -> None:
        from IPython.display import display

        super().__init__(total_steps, description, io.StringIO(), unit)
        self._points: list[tuple[int, float]] = []  # step and loss
        self._every = 1  # steps to a point
        self._changed_at = time.monotonic()
        self._handle = display(self, display_id=True)

    def on_step(self, record: dict[str, Any]) -> None:
        super().on_step(record)
        loss = formats.finite_number(record, "loss")
        if loss is not None and self.step % self._every == 0:
            while self._points and self._points[-1][0] >= self.step:  # replayed
                self._points.pop()
            self._points.append((self.step, loss))
        if len(self._points) > MOST_POINTS:
            self._every *= 2
            self._points = [point for point in self._points if point[0] % self._every == 0]

    def on_event(self, event: dict[str, Any]) -> None:
        if event.get("kind") == EventKind.RESUMED and isinstance(event.get("step"), int):
            self.step = event["step"]

    def tick(self) -> None:
        if time.monotonic() - self._changed_at >= REDRAW_S:
            self._redraw()

    def close(self) -> None:
        self._redraw()

    def _step_line(self) -> None:
        """Prints no line; `tick` draws."""

    def _redraw(self) -> None:
        self._changed_at = time.monotonic()
        self._handle.update(self)

    def __repr__(self) -> str:
        return "  ".join([f"{self.description} step {self.step}/{self.total_steps}", *self._figures()])

    def _repr_html_(self) -> str:
        """HTML of the bar and the curve; called by IPython."""
        figures = html.escape("  ".join([f"{self.step}/{self.total_steps}", *self._figures()]))
        bar = (
            f'<div style="white-space: pre"><b>{html.escape(self.description)}</b>  '
            f'<progress value="{self.step}" max="{max(1, self.total_steps)}" style="width: 16em"></progress>  '
            f"{figures}</div>"
        )
        return bar + (self._curve() if len(self._points) > 1 else "")

    def _curve(self) -> str:
        steps, losses = zip(*self._points, strict=True)
        low, span = min(losses), (max(losses) - min(losses)) or 1.0
        first, length = steps[0], max(1, steps[-1] - steps[0])
        points = " ".join(
            f"{(step - first) / length * WIDTH:.1f},{HEIGHT - (loss - low) / span * HEIGHT:.1f}"
            for step, loss in self._points
        )
        return (
            f'<svg width="{WIDTH + 70}" height="{HEIGHT + 20}" viewBox="-5 -10 {WIDTH + 70} {HEIGHT + 20}" '
            f'role="img" aria-label="loss"><polyline points="{points}" fill="none" stroke="#3f6fd1" '
            f'stroke-width="1.5"/><text x="{WIDTH + 6}" y="4" font-size="11" fill="gray">{low + span:.3g}</text>'
            f'<text x="{WIDTH + 6}" y="{HEIGHT + 4}" font-size="11" fill="gray">{low:.3g}</text></svg>'
        )
