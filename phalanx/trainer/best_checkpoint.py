"""Which evaluation of a run was the best, and when none has been better for so long that training ends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.comm.json_objects import JsonGroup
from phalanx.core.events import Kind
from phalanx.core.json_lines import read_lines
from phalanx.core.run_paths import RunPaths


@dataclass
class Best:
    """What a run's evaluations have come to, the same on all ranks.

    The loss that counts is the mean over the held-out sets. `patience`: evaluations without a lower one after which
    training ends; 0: it never does.
    """

    patience: int
    step: int | None = None
    loss: float = math.inf
    since: int = 0  # evaluations

    def take(self, step: int, losses: Mapping[str, float]) -> bool:
        """Take in an evaluation; returns whether it is the best so far."""
        if not losses:
            return False
        loss = math.fsum(losses.values()) / len(losses)
        if not loss < self.loss:
            self.since += 1
            return False
        self.step, self.loss, self.since = step, loss, 0
        return True

    @property
    def over(self) -> str | None:
        """Why training ends, if it does."""
        if not 0 < self.patience <= self.since:
            return None
        best = "no loss was a number" if self.step is None else f"the best is {self.loss:.4f}, of step {self.step}"
        return f"{self.since} evaluations in a row were no better: {best} (train.patience)"


def of_events(paths: RunPaths, step: float = math.inf, patience: int = 0) -> Best:
    """What the evaluations up to `step` have come to, as the events tell."""
    found: dict[int, dict[str, float]] = {}
    for event in read_lines(paths.events):
        of, loss = event.get("step"), event.get("loss")
        if event.get("kind") == Kind.EVALUATED and type(of) is int and of <= step:
            # JSON has no NaN of its own.
            found.setdefault(of, {})[str(event.get("set"))] = float(loss) if isinstance(loss, int | float) else math.nan
    best = Best(patience)
    for of in sorted(found):
        best.take(of, found[of])
    return best


def recorded(patience: int, step: int, paths: RunPaths, group: JsonGroup) -> Best:
    """The same on all ranks, by what rank 0 reads: others may see the file later. Collective."""
    mine = of_events(paths, step, patience) if group.gather_objects(None) is not None else Best(patience)
    loss = mine.loss if math.isfinite(mine.loss) else None
    of, loss, since = group.broadcast_object([mine.step, loss, mine.since])
    return Best(patience, of, math.inf if loss is None else loss, since)
