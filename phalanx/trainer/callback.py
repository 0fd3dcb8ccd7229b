"""The callback interface: what user code receives from a run while it trains, and what it can request."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class CallbackRequest(enum.IntFlag):
    """What a callback can request; all ranks agree on it at the end of the next step."""

    STOP = 1
    SAVE = 2
    EVALUATE = 4
    WEIGHTS = 8


@dataclass
class RunState:
    """The run as a `Callback` sees it, and the requests that it can make.

    A request takes effect at the end of the next step.

    Attributes:
        step: The step that the callback is called for.
        steps: Number of steps of the run (`train.steps`).
        folder: The run folder, on the machine of rank 0.
        world: Number of ranks.
        attempt: How often the ranks were started.
        replayed: Whether the callback was called for this step before: after a failure, a rollback or a restart.
    """

    request: Callable[[CallbackRequest, str], None]
    steps: int
    folder: Path
    world: int
    attempt: int
    step: int = 0
    replayed: bool = False

    def stop(self, reason: str = "requested by a callback") -> None:
        """End training as at the last step, with a checkpoint and an evaluation.

        Args:
            reason: A text that the run's display and records show.
        """
        self.request(CallbackRequest.STOP, reason)

    def save(self) -> None:
        """Save a checkpoint."""
        self.request(CallbackRequest.SAVE, "")

    def evaluate(self) -> None:
        """Evaluate on the held-out sets."""
        self.request(CallbackRequest.EVALUATE, "")

    def gather_weights(self) -> None:
        """Have `Callback.on_weights` called with a copy of all weights.

        Raises:
            errors.ConfigError: `parallel.tensor`, `parallel.pipeline` or `parallel.expert` is above 1: no rank can hold
                all weights.
        """
        self.request(CallbackRequest.WEIGHTS, "")


class Callback:
    """Base class of callbacks, which see each step's metrics, evaluations and checkpoints, and can stop a run.

    A recipe names a file (`callback.code`) whose class `Callback` derives from it; `train` takes objects. A
    method does nothing until it is overridden. Rank 0 calls them one at a time, on its main thread. A method must
    return within `comm.timeout_s`, and must not use collectives, the default random generators or PyTorch's global
    settings.

    Examples:
        >>> class StopAtLoss(phalanx.Callback):
        ...     def on_step_end(self, run, metrics):
        ...         if metrics["loss"] is not None and metrics["loss"] < 2.0:
        ...             run.stop("the loss is below 2")
    """

    def on_train_begin(self, run: RunState) -> None:
        """Ranks have started, and the run continues after `run.step` (0 for a new run)."""

    def on_step_end(self, run: RunState, metrics: Mapping[str, Any]) -> None:
        """Step `run.step` is complete; `metrics` is its line of metrics.jsonl.

        Called while the next step is computed.
        """

    def on_evaluate(self, run: RunState, results: Mapping[str, Mapping[str, float | None]]) -> None:
        """The evaluation after `run.step`: for each held-out set its `loss` and the task's scores."""

    def on_save(self, run: RunState, step: int) -> None:
        """The checkpoint of `step` is complete. Saving is asynchronous, so `run.step` may be later."""

    def on_weights(self, run: RunState, weights: Mapping[str, "Tensor"]) -> None:
        """The weights after `run.step` by parameter name, copied to the host: what `run.gather_weights()` requested."""

    def on_train_end(self, run: RunState, reason: str | None) -> None:
        """Training ends after `run.step`, whose checkpoint is saved; `reason` is None where all steps are done, else
        what ended it earlier: `train.patience`, a callback, `train.stop_after`, `train.stop_every`, or the name of a
        signal. Not called after a failure."""

    def state_dict(self) -> dict[str, Any]:
        """State of this callback for checkpoints: JSON values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned when the checkpoint was saved that the run continues from."""
