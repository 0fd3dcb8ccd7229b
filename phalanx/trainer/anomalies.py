"""Whether training is well: steps whose gradient is no finite number, and losses far above those before.

All ranks know the same records, so that all decide alike. What is done about it is `resilience.on_nan` and
`resilience.on_spike`.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from phalanx.comm.mesh import Mesh
from phalanx.core.errors import Diverged
from phalanx.core.json_lines import read_recent_lines
from phalanx.core.records import StepRecord, split_attempts
from phalanx.core.run_paths import RunPaths

if TYPE_CHECKING:
    from phalanx.config.schema import ResilienceSection

MAX_NOT_FINITE_STEPS = 20  # in a row: a single one is skipped and forgotten
WINDOW, MIN_LOSSES = 64, 20  # losses that a bound is made of, at the most and at least
MIN_SPREAD_SHARE = 0.01  # of it a spread is taken to be at least: losses that hardly differ are no measure
LINE_BYTES = 4096  # more than a record takes, but for those that name very many ranks
NORMAL = 1.4826  # standard deviations of a normal distribution in a median absolute deviation


@dataclass(frozen=True)
class RollbackRequest:
    """A step after which training is to go back, and why, as the end of a sentence; `good_step`: a step up to which all
    was well, where the data are not to blame."""

    step: int
    reason: str
    good_step: int | None = None


def compute_spike_bound(losses: Sequence[float], factor: float) -> float:
    """Above what a loss is a spike: `factor` spreads above the median of the losses before. The spread is the median
    absolute deviation, as a standard deviation, and at least 1 % of the median. Infinite while there are too few."""
    if len(losses) < MIN_LOSSES:
        return math.inf
    middle = statistics.median(losses)
    spread = NORMAL * statistics.median(abs(loss - middle) for loss in losses)
    return middle + factor * max(spread, MIN_SPREAD_SHARE * abs(middle))


class AnomalyDetector:
    """What one rank knows of the losses so far: `losses` are those of steps that were taken, with their steps."""

    def __init__(self, config: "ResilienceSection", losses: Iterable[tuple[int, float]] = ()) -> None:
        self._config = config
        self._losses = deque(losses, maxlen=WINDOW + 1)
        self._consecutive_skips = 0  # steps that were not taken
        self._vetoed: set[int] = set()

    def skip_reason(self, record: StepRecord) -> str | None:
        """Why a step was not taken, where it was not because its gradient is no number, or it had no weight."""
        return "its loss is a spike (resilience.on_spike)" if record.step in self._vetoed else None

    def check_record(self, record: StepRecord, scale_floor: float | None) -> RollbackRequest | None:
        """Take in the record of a step; what is to be gone back behind, if anything. `scale_floor`: below which a loss
        scale is not halved. Raises Diverged where training shall stop."""
        if record.skipped and record.tokens and record.step not in self._vetoed:
            if scale_floor is not None and record.loss_scale is not None and record.loss_scale > scale_floor:
                return None  # the scale was too high: it is halved until it fits, or until it can be halved no more
            if self._config.on_nan != "skip":
                return self._roll_back_or_stop(record.step, self._config.on_nan, "the gradient is not finite", "on_nan")
        self._consecutive_skips = self._consecutive_skips + 1 if record.skipped and record.tokens else 0
        if self._consecutive_skips >= MAX_NOT_FINITE_STEPS:
            what = "loss has been a spike" if record.step in self._vetoed else "gradient has not been finite"
            raise Diverged(
                f"the {what} since step {record.step - MAX_NOT_FINITE_STEPS + 1}; start a new run "
                "with a lower optim.lr or a longer optim.warmup_steps, or look at the data of these steps"
            )
        if record.skipped or record.loss is None:
            return None
        if self._config.on_spike in ("stop", "rollback") and record.loss > (limit := self.loss_bound(record.step)):
            reason = f"the loss is {record.loss:.4g}, above {limit:.4g}, the bound of the steps before"
            return self._roll_back_or_stop(record.step, self._config.on_spike, reason, "on_spike")
        self._losses.append((record.step, record.loss))
        return None

    def loss_bound(self, step: int, late: int = 1) -> float:
        """The bound for the loss of a step, of the steps up to `late` before it."""
        known = [loss for of, loss in self._losses if of <= step - late]
        return compute_spike_bound(known[-WINDOW:], self._config.spike_factor)

    def _roll_back_or_stop(self, step: int, action: str, reason: str, key: str) -> RollbackRequest:
        if action == "rollback":
            return RollbackRequest(step, reason)
        raise Diverged(
            f"in step {step} {reason}, so training has stopped (resilience.{key} is stop); the checkpoints before it "
            "are untouched: look at the data of this step, or go on with resilience." + key + "=rollback"
        )

    def make_spike_veto(
        self, step: int, weight: int, mesh: Mesh, reports_loss: bool
    ) -> Callable[[torch.Tensor], bool] | None:
        """A function that says of this rank's loss sum of a step, of labels of that `weight`, whether the loss of all
        ranks is a spike, so that the step shall not be taken. Collective; it waits for the device. None where nobody
        asks for it."""
        if self._config.on_spike != "skip" or math.isinf(limit := self.loss_bound(step, late=2)):
            return None

        def is_spike(loss_sum: torch.Tensor) -> bool:
            total, whole = mesh.sum([loss_sum.item(), float(weight)] if reports_loss else [0.0, 0.0])
            found = whole > 0 and total / whole > limit
            if found:
                self._vetoed.add(step)
            return found

        return is_spike


def read_losses(paths: RunPaths, step: int) -> list[tuple[int, float]]:
    """Steps up to `step` that were taken, and their losses, as far as a bound needs them."""
    kept, _ = split_attempts(read_recent_lines(paths.metrics, (WINDOW + 2) * LINE_BYTES))
    known = [each for each in kept if each["step"] <= step and not each.get("skipped")]
    return [(each["step"], each["loss"]) for each in known if isinstance(each.get("loss"), float)][-WINDOW - 1 :]
