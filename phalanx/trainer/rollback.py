"""Going back: to a checkpoint before something went wrong, in the same processes, past the data that it went wrong on.

The checkpoint is saved anew with what is passed over from then on, and those behind it are removed: they belong to a
way that was given up, and whoever goes on with the run goes on with this one.
"""

from typing import Any

import torch

from phalanx.checkpoint.disk.load import agree_on_newest
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import Corrupted, Diverged
from phalanx.core.records import EventKind
from phalanx.trainer.anomalies import RollbackRequest
from phalanx.trainer.loop import TrainingLoop

MAX_ROLLBACKS, WITHIN_BATCHES = 3, 1000  # rollbacks, within so many batches: more do not help


def roll_back(loop: TrainingLoop, request: RollbackRequest) -> int:
    """Have all ranks go back behind what went wrong; returns the step that they are at then. Collective.

    Where `request.good_step` names a step that was well, what came after it is done again with the same data. Raises
    Diverged where there is nothing to go back to, or it was done too often, and Corrupted for the same after
    corruption.
    """
    setup = loop.setup
    first = request.step - setup.job.config.resilience.rollback_steps + 1
    target = max(0, first - 1) if request.good_step is None else request.good_step
    skips = loop.skipped_batches
    if request.good_step is None:
        if skips.count_recent(request.step, WITHIN_BATCHES) >= MAX_ROLLBACKS:
            raise Diverged(
                f"in step {request.step} {request.reason}, and training has gone back {MAX_ROLLBACKS} times within "
                f"{WITHIN_BATCHES} steps already; start a new run with a lower optim.lr, "
                "or look at the data of these steps"
            )
        skips = skips.with_steps(max(1, first), request.step)
    setup.step_hooks.enter_phase("restore")
    setup.saver.wait()
    if setup.in_memory_store is not None:  # before anything else: whoever is killed from here on goes back to the disk
        setup.in_memory_store.discard_previous()
    group = JsonGroup(setup.mesh.checkpoint)  # nothing is being saved now
    folder, reason = setup.job.paths.checkpoints, request.reason
    checkpoint = agree_on_newest(folder, setup.mesh.rank, group, None, setup.records.write_event, at_most=target)
    if checkpoint is None and request.good_step is not None:  # all are younger: better one that may be wrong than none
        checkpoint = agree_on_newest(
            folder, setup.mesh.rank, group, None, setup.records.write_event, at_most=request.step
        )
        reason += f"; no checkpoint of step {target} or before is left, so this one may hold what was wrong"
    if checkpoint is None:
        said = (
            f"in step {request.step} {request.reason}, and no checkpoint of step {target} or before is there "
            "to go back to"
        )
        if request.good_step is not None:
            raise Corrupted(f"{said}; the next attempt begins again")
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
        setup.saver.wait()  # who dies from here on takes the way that was chosen
    return step
