"""The best evaluation of a run, and early stopping after evaluations without improvement."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import RunPaths


@dataclass
class BestEvaluation:
    """The best evaluation so far, the same on all ranks. The loss that counts is the mean over the evaluation
    sets. `patience`: number of evaluations without improvement after which training ends; 0 disables early
    stopping.
    """

    patience: int
    step: int | None = None
    loss: float = math.inf
    evaluations_since: int = 0  # evaluations since the best

    def update(self, step: int, losses: Mapping[str, float]) -> bool:
        """Add an evaluation; returns whether it is the best so far."""
        if not losses:
            return False
        loss = math.fsum(losses.values()) / len(losses)
        if not loss < self.loss:
            self.evaluations_since += 1
            return False
        self.step, self.loss, self.evaluations_since = step, loss, 0
        return True

    @property
    def stop_reason(self) -> str | None:
        """Why training ends, or None."""
        if not 0 < self.patience <= self.evaluations_since:
            return None
        best = "no loss was a number" if self.step is None else f"the best is {self.loss:.4f}, of step {self.step}"
        return f"{self.evaluations_since} evaluations in a row did not improve: {best} (train.patience)"


def find_best_evaluation(paths: RunPaths, step: float = math.inf, patience: int = 0) -> BestEvaluation:
    """The best evaluation up to `step`, from the events."""
    found: dict[int, dict[str, float]] = {}
    for event in read_events(paths.events):
        of, loss = event.get("step"), event.get("loss")
        if event.get("kind") == EventKind.EVALUATED and type(of) is int and of <= step:
            # JSON has no NaN.
            found.setdefault(of, {})[str(event.get("set"))] = float(loss) if isinstance(loss, int | float) else math.nan
    best = BestEvaluation(patience)
    for of in sorted(found):
        best.update(of, found[of])
    return best


def agree_on_best_evaluation(patience: int, step: int, paths: RunPaths, group: JsonGroup) -> BestEvaluation:
    """The best evaluation, broadcast from rank 0, as other ranks may not see the events file yet. Collective."""
    mine = (
        find_best_evaluation(paths, step, patience)
        if group.gather_objects(None) is not None
        else BestEvaluation(patience)
    )
    loss = mine.loss if math.isfinite(mine.loss) else None
    of, loss, since = group.broadcast_object([mine.step, loss, mine.evaluations_since])
    return BestEvaluation(patience, of, math.inf if loss is None else loss, since)
