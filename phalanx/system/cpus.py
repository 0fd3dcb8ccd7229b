"""The number of processors for this process: its CPU affinity, or fewer by a control group's quota. No torch here:
agents ask too.
"""

import contextlib
import os
from pathlib import Path

from phalanx.system import cgroups
from phalanx.system.cgroups import GROUPS, OWN


def count_cpus(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Whole processors, at least one. More threads than a quota has time for are all stopped as soon as it is used up,
    often while others wait for them: a rank with half a processor trained at half the speed with two threads."""
    allowed = cpu_quota(groups, own)
    seen = len(os.sched_getaffinity(0))
    return seen if allowed is None else max(1, min(seen, int(allowed)))


def cpu_quota(groups: Path = GROUPS, own: Path = OWN) -> float | None:
    """Processors' worth of time that the control groups of this process allow: the least of its group and all above,
    None without any. `groups` and `own` as for `cgroups.iter_groups`."""
    found = []
    for place, version in cgroups.iter_groups("cpu", groups, own):
        with contextlib.suppress(OSError, ValueError):
            if version == 1:
                most, period = ((place / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                most, period = (place / "cpu.max").read_text().split()
            if most.strip() not in ("max", "-1"):
                found.append(int(most) / int(period))
    return min(found, default=None)


def use_batch_scheduling(device: str) -> None:
    """On a CPU rank, have threads that are woken not preempt those that wake them: Linux's SCHED_BATCH, which threads
    made later inherit. Else one that sends over gloo is stopped while it holds a lock for which gloo's own thread
    spins: with two ranks on two cores, a quarter of a step. A policy that somebody has chosen stays."""
    if device == "cpu" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
