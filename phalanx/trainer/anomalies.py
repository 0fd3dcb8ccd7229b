"""Training health: non-finite gradients and loss spikes.

All ranks see the same records, so all decide alike. The reactions are `resilience.on_nan` and `resilience.on_spike`.
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

MAX_NOT_FINITE_STEPS = 20  # consecutive steps; a single one is skipped without further action
WINDOW, MIN_LOSSES = 64, 20  # number of losses that a spike bound is computed from, at most and at least
# Minimum spread as a share of the median: losses that hardly differ would give too tight a bound
MIN_SPREAD_SHARE = 0.01
LINE_BYTES = 4096  # more than a record takes, except with very many ranks
NORMAL = 1.4826  # ratio of standard deviation to median absolute deviation of a normal distribution


@dataclass(frozen=True)
class RollbackRequest:
    """A request to roll back, with the step and the reason as the end of a sentence; `good_step`: the last healthy
    step, if the data did not cause the failure."""

    step: int
    reason: str
    good_step: int | None = None


def compute_spike_bound(losses: Sequence[float], factor: float) -> float:
    """The threshold of a loss spike: `factor` spreads above the median of earlier losses. The spread is the median
    absolute deviation, scaled to a standard deviation, and at least 1 % of the median. Infinite while there are
    too few losses."""
    if len(losses) < MIN_LOSSES:
        return math.inf
    middle = statistics.median(losses)
    spread = NORMAL * statistics.median(abs(loss - middle) for loss in losses)
    return middle + factor * max(spread, MIN_SPREAD_SHARE * abs(middle))


class AnomalyDetector:
    """Loss history of one rank: `losses` are those of applied steps, with their steps."""

    def __init__(self, config: "ResilienceSection", losses: Iterable[tuple[int, float]] = ()) -> None:
        self._config = config
        self._losses = deque(losses, maxlen=WINDOW + 1)
        self._consecutive_skips = 0  # consecutive skipped steps
        self._vetoed: set[int] = set()

    def skip_reason(self, record: StepRecord) -> str | None:
        """Why a step was skipped, other than for a non-finite gradient or for having no weight."""
        return "its loss is a spike (resilience.on_spike)" if record.step in self._vetoed else None

    def check_record(self, record: StepRecord, scale_floor: float | None) -> RollbackRequest | None:
        """Add the record of a step; returns a rollback request, if any. `scale_floor`: the loss scale that is not
        halved further. Raises Diverged if training must stop."""
        if record.skipped and record.tokens and record.step not in self._vetoed:
            if scale_floor is not None and record.loss_scale is not None and record.loss_scale > scale_floor:
                # The loss scale was too high: it is halved until gradients are finite, or down to the floor
                return None
            if self._config.on_nan != "skip":
                return self._roll_back_or_stop(record.step, self._config.on_nan, "the gradient is not finite", "on_nan")
        self._consecutive_skips = self._consecutive_skips + 1 if record.skipped and record.tokens else 0
        if self._consecutive_skips >= MAX_NOT_FINITE_STEPS:
            what = "loss has been a spike" if record.step in self._vetoed else "gradient has not been finite"
            raise Diverged(
                f"the {what} since step {record.step - MAX_NOT_FINITE_STEPS + 1}; start a new run with a lower "
                "optim.lr or a longer optim.warmup_steps, or check the data of these steps"
            )
        if record.skipped or record.loss is None:
            return None
        if self._config.on_spike in ("stop", "rollback") and record.loss > (limit := self.loss_bound(record.step)):
            reason = f"the loss is {record.loss:.4g}, above {limit:.4g}, the limit from the steps before"
            return self._roll_back_or_stop(record.step, self._config.on_spike, reason, "on_spike")
        self._losses.append((record.step, record.loss))
        return None

    def loss_bound(self, step: int, late: int = 1) -> float:
        """The spike bound for the loss of a step, from the steps up to `late` before it."""
        known = [loss for of, loss in self._losses if of <= step - late]
        return compute_spike_bound(known[-WINDOW:], self._config.spike_factor)

    def _roll_back_or_stop(self, step: int, action: str, reason: str, key: str) -> RollbackRequest:
        if action == "rollback":
            return RollbackRequest(step, reason)
        raise Diverged(
            f"in step {step} {reason}, so training stopped (resilience.{key} is stop); earlier checkpoints are "
            "untouched: check the data of this step, or continue with resilience." + key + "=rollback"
        )

    def make_spike_veto(
        self, step: int, weight: int, mesh: Mesh, reports_loss: bool
    ) -> Callable[[torch.Tensor], bool] | None:
        """Make a function that returns whether a step's loss over all ranks is a spike, so that the step is skipped; it
        takes this rank's loss sum and the `weight` of its labels. Collective; it waits for the device. None if the
        recipe does not ask for it."""
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
    """Applied steps up to `step` and their losses, as many as a spike bound needs."""
    kept, _ = split_attempts(read_recent_lines(paths.metrics, (WINDOW + 2) * LINE_BYTES))
    known = [each for each in kept if each["step"] <= step and not each.get("skipped")]
    return [(each["step"], each["loss"]) for each in known if isinstance(each.get("loss"), float)][-WINDOW - 1 :]
