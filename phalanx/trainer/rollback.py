"""Rollback to a checkpoint before a training failure, in the same processes, skipping the data involved.

The checkpoint is saved again with the skipped batches, and later ones are removed: they belong to an abandoned branch
of the run, and a resumed run continues from this one.
"""

from typing import Any

import torch

from phalanx.checkpoint.disk.load import agree_on_newest
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import Corrupted, Diverged
from phalanx.core.records import EventKind
from phalanx.trainer.anomalies import RollbackRequest
from phalanx.trainer.loop import TrainingLoop

MAX_ROLLBACKS, WITHIN_BATCHES = 3, 1000  # at most so many rollbacks within so many batches: more do not help


def roll_back(loop: TrainingLoop, request: RollbackRequest) -> int:
    """Roll back all ranks; returns the step that they are at then. Collective. With `request.good_step`, the last
    healthy step, later steps are repeated on the same data. Raises Diverged if there is no earlier checkpoint, or after
    too many rollbacks, and Corrupted in the same cases after corruption.
    """
    setup = loop.setup
    first = request.step - setup.job.config.resilience.rollback_steps + 1
    target = max(0, first - 1) if request.good_step is None else request.good_step
    skips = loop.skipped_batches
    if request.good_step is None:
        if skips.count_recent(request.step, WITHIN_BATCHES) >= MAX_ROLLBACKS:
            raise Diverged(
                f"in step {request.step} {request.reason}, and training was already rolled back {MAX_ROLLBACKS} "
                f"times within {WITHIN_BATCHES} steps; start a new run with a lower optim.lr, or check the data of "
                "these steps"
            )
        skips = skips.with_steps(max(1, first), request.step)
    setup.step_hooks.enter_phase("restore")
    setup.saver.wait()
    if setup.in_memory_store is not None:  # first: a rank killed from here on resumes from the disk
        setup.in_memory_store.discard_previous()
    group = JsonGroup(setup.mesh.checkpoint)  # no save is running
    folder, reason = setup.job.paths.checkpoints, request.reason
    checkpoint = agree_on_newest(folder, setup.mesh.rank, group, None, setup.records.write_event, at_most=target)
    # All are younger; one that may contain the error is better than none
    if checkpoint is None and request.good_step is not None:
        checkpoint = agree_on_newest(
            folder, setup.mesh.rank, group, None, setup.records.write_event, at_most=request.step
        )
        reason += f"; no checkpoint of step {target} or before is left, so this one may contain the error"
    if checkpoint is None:
        said = (
            f"in step {request.step} {request.reason}, and no checkpoint of step {target} or before is left to go "
            "back to"
        )
        if request.good_step is not None:
            raise Corrupted(f"{said}; the next attempt starts over")
        raise Diverged(f"{said}; lower optim.lr, or save more often (checkpoint.every) and keep more (checkpoint.keep)")
    step = int(checkpoint.header["step"])
    setup.saver.remove_after(step)
    with torch.no_grad():
        setup.components.engine.load(
            setup.components.model_part.make_reader(setup.step_hooks.wrap_with_progress_touch(checkpoint.read_into))
        )
    header: dict[str, Any] = checkpoint.header
    checkpoint.close()
    details: dict[str, Any] = {"step": step, "from_step": request.step, "reason": reason}
    if skips is not loop.skipped_batches:
        details |= {"first": max(1, first), "last": request.step}
    setup.records.write_event(EventKind.ROLLED_BACK, details)
    loop.skipped_batches = skips
    loop.resume_at(step, header)
    if details.get("first"):
        loop.save(step)
        setup.saver.wait()  # a rank that dies from here on follows the new branch
    return step
