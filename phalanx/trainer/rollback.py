"""Going back: to a checkpoint before something went wrong, in the same processes, past the data that it went wrong on.

The checkpoint is saved anew with what is passed over from then on, and those behind it are removed: they belong to a
way that was given up, and whoever goes on with the run goes on with this one.
"""

from typing import Any

import torch

from phalanx.checkpoint.disk.load import newest_agreed
from phalanx.comm.json_objects import JsonGroup
from phalanx.core.errors import Corrupted, Diverged
from phalanx.core.events import Kind
from phalanx.trainer.anomalies import Wrong
from phalanx.trainer.loop import Loop

MOST, WITHIN = 3, 1000  # rollbacks, within so many batches: more do not help


def go_back(loop: Loop, wrong: Wrong) -> int:
    """Have all ranks go back behind what went wrong; returns the step that they are at then. Collective.

    Where `wrong.good` names a step that was well, what came after it is done again with the same data. Raises Diverged
    where there is nothing to go back to, or it was done too often, and Corrupted for the same after corruption.
    """
    first = wrong.step - loop.job.config.resilience.rollback_steps + 1
    target = max(0, first - 1) if wrong.good is None else wrong.good
    skips = loop.skips
    if wrong.good is None:
        if skips.recent(wrong.step, WITHIN) >= MOST:
            raise Diverged(
                f"in step {wrong.step} {wrong.reason}, and training has gone back {MOST} times within {WITHIN} steps "
                "already; start a new run with a lower optim.lr, or look at the data of these steps"
            )
        skips = skips.with_steps(max(1, first), wrong.step)
    loop.moments.at("restore")
    loop.saver.wait()
    if loop.memory is not None:  # before anything else: whoever is killed from here on goes back to the disk
        loop.memory.forget()
    group = JsonGroup(loop.mesh.checkpoint)  # nothing is being saved now
    folder, reason = loop.job.paths.checkpoints, wrong.reason
    checkpoint = newest_agreed(folder, loop.mesh.rank, group, None, loop.records.event, at_most=target)
    if checkpoint is None and wrong.good is not None:  # all are younger: better one that may be wrong than none
        checkpoint = newest_agreed(folder, loop.mesh.rank, group, None, loop.records.event, at_most=wrong.step)
        reason += f"; no checkpoint of step {target} or before is left, so this one may hold what was wrong"
    if checkpoint is None:
        said = (
            f"in step {wrong.step} {wrong.reason}, and no checkpoint of step {target} or before is there to go back to"
        )
        if wrong.good is not None:
            raise Corrupted(f"{said}; the next attempt begins again")
        raise Diverged(f"{said}; lower optim.lr, or save more often (checkpoint.every) and keep more (checkpoint.keep)")
    step = int(checkpoint.header["step"])
    loop.saver.remove_behind(step)
    with torch.no_grad():
        loop.parts.engine.load(loop.parts.parted.reading(loop.moments.beating(checkpoint.read)))
    header: dict[str, Any] = checkpoint.header
    checkpoint.close()
    details: dict[str, Any] = {"step": step, "from_step": wrong.step, "reason": reason}
    if skips is not loop.skips:
        details |= {"first": max(1, first), "last": wrong.step}
    loop.records.event(Kind.ROLLED_BACK, details)
    loop.skips = skips
    loop.begin_at(step, header)
    if details.get("first"):
        loop.save(step)
        loop.saver.wait()  # who dies from here on takes the way that was chosen
    return step
