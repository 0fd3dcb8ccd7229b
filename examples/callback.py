"""A callback that stops training at a target loss, and evaluates whenever the mean loss has fallen by a tenth.

    phalanx train recipes/demo.yaml callback.code=examples/callback.py callback.options='{target_loss: 2.0}'

`state_dict` puts the moving mean into checkpoints, so a run that was killed and resumed ends at the same step.
"""

from collections.abc import Mapping
from typing import Any

import phalanx


class Callback(phalanx.Callback):
    def __init__(self, target_loss: float, smoothing: float = 0.9) -> None:
        self.target_loss, self.smoothing = target_loss, smoothing
        self.mean: float | None = None  # of the loss
        self.evaluated_at: float | None = None  # the mean at the last evaluation that was requested

    def on_step_end(self, run: phalanx.RunState, metrics: Mapping[str, Any]) -> None:
        loss = metrics["loss"]
        if loss is None:  # the step was skipped
            return
        self.mean = loss if self.mean is None else self.smoothing * self.mean + (1 - self.smoothing) * loss
        if self.evaluated_at is None or self.mean <= 0.9 * self.evaluated_at:
            self.evaluated_at = self.mean
            run.evaluate()
        if self.mean <= self.target_loss:
            run.stop(f"the mean loss {self.mean:.4f} has reached {self.target_loss}")

    def on_evaluate(self, run: phalanx.RunState, results: Mapping[str, Mapping[str, float | None]]) -> None:
        if not run.replayed:
            with open(run.folder / "evaluations.txt", "a") as file:
                file.write(f"step {run.step}: {results}\n")

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "evaluated_at": self.evaluated_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.evaluated_at = state["mean"], state["evaluated_at"]
