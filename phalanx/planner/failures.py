"""What failures take of a plan: how often a job of so many devices fails, how often it saves therefore, and which share
of its time goes into steps that last.

What outlives a failure is what the plan keeps (`StepEstimate.recovers_from`), so that a layout without room for steps
in memory is not thought to be faster than one that has it.
"""

from dataclasses import dataclass, replace

from phalanx.core.errors import ConfigError
from phalanx.planner import checkpoint_interval
from phalanx.planner.checkpoint_interval import CheckpointCosts
from phalanx.planner.cost import StepEstimate

# Failures of one device, seconds: 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, Dubey et al. 2024,
# table 5), of which so many were of hardware, or may have been.
DEVICE_MTBF_S = 54 * 86400 * 16384 / 419
HARDWARE_SHARE = 0.78
RECOVERY_S = 60.0  # until a large job steps again: reading a checkpoint, compiling, the first collectives
LEAST_S = 1e-3  # of a checkpoint: nothing is free
LEAST_GOODPUT = 1e-6  # with which a job does not get anywhere


@dataclass(frozen=True)
class FailureModel:
    """What is known of them. `mtbf_s` between those of the whole job, whatever part of the devices it uses; None: as
    often as Llama 3's on as many devices. `recovery_s` to the first new step; `checkpoint_s` for which a checkpoint
    holds training up, None: as the state's size has it; `checkpoint_steps` between checkpoints, None: as pays best."""

    mtbf_s: float | None = None
    recovery_s: float = RECOVERY_S
    checkpoint_s: float | None = None
    checkpoint_steps: int | None = None

    def checkpoint_costs(self, estimate: StepEstimate, devices: int) -> CheckpointCosts:
        """As the closed forms take it: failures of hardware go back to a checkpoint, and without steps in memory all
        do. A run keeps every step, and what that costs is in the step's seconds."""
        cost_s = self.checkpoint_s
        if cost_s is None:  # until the state has left the device; the rest is written while it goes on
            cost_s = max(held.state_bytes / held.kind.host_bytes_per_s for held in estimate.memory)
        mtbf_s = self.mtbf_s if self.mtbf_s is not None else DEVICE_MTBF_S / devices
        hard = 1.0 if estimate.recovers_from == "checkpoints" else HARDWARE_SHARE
        return CheckpointCosts(estimate.step_s, mtbf_s, self.recovery_s, max(LEAST_S, cost_s), hard=hard)

    def checkpoint_interval(self, saving: CheckpointCosts) -> int | None:
        """Steps between checkpoints; None: it fails so seldom that it needs none. Where nodes have copies of each
        other's steps it is for two that are lost at once, and as many."""
        if self.checkpoint_steps is not None:
            return self.checkpoint_steps
        return checkpoint_interval.best_intervals(saving).checkpoint_steps

    def goodput(self, estimate: StepEstimate, devices: int) -> float:
        """Which share of the time goes into steps that last; of less than LEAST_GOODPUT that."""
        return max(LEAST_GOODPUT, self._goodput(estimate, self.checkpoint_costs(estimate, devices)))

    def _goodput(self, estimate: StepEstimate, saving: CheckpointCosts) -> float:
        steps = self.checkpoint_interval(saving)
        if estimate.recovers_from != "copies":
            return checkpoint_interval.goodput(saving, 1, steps)
        # A lost node goes back to the last step that another one has, as to a checkpoint that costs nothing.
        copied = 1 if estimate.replicas is None else estimate.replicas.every
        free = replace(saving, checkpoint_s=0.0, hard=HARDWARE_SHARE if copied > 1 else 0.0)
        held_up_s = saving.checkpoint_s / steps if steps else 0.0
        found = checkpoint_interval.goodput(free, 1, copied if copied > 1 else None)
        return found * saving.step_s / (saving.step_s + held_up_s)


def check_goodput(found: float, saving: CheckpointCosts) -> None:
    """Raises ConfigError for a job that does not get anywhere."""
    if found <= LEAST_GOODPUT:
        raise ConfigError(
            f"with a failure every {saving.mtbf_s:.3g} s, recoveries of {saving.recovery_s:.3g} s and steps of "
            f"{saving.step_s:.3g} s hardly any step would last; give the time between failures of the job as --mtbf"
        )
