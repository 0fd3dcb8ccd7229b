"""How many processors this process may use: those that it may run on, or fewer by the quota of a control group, where a
container or a scheduler has set one. No torch here: agents ask too.
"""

import contextlib
import os
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def count(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Whole processors, at least one. More threads than a quota has time for are all stopped as soon as it is used up,
    often while others wait for them: a rank with half a processor trained at half the speed with two threads."""
    allowed = quota(groups, own)
    seen = len(os.sched_getaffinity(0))
    return seen if allowed is None else max(1, min(seen, int(allowed)))


def quota(groups: Path = GROUPS, own: Path = OWN) -> float | None:
    """Processors' worth of time that the control groups of this process allow: the least of its own and all above, None
    without any. `groups`: where they are mounted; `own` says which is this one's."""
    found = []
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        top = groups if not controllers else groups / controllers if (groups / controllers).is_dir() else groups / "cpu"
        place = top / path.lstrip("/")
        while True:
            with contextlib.suppress(OSError, ValueError):
                if controllers:
                    most, period = ((place / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    most, period = (place / "cpu.max").read_text().split()
                if most.strip() not in ("max", "-1"):
                    found.append(int(most) / int(period))
            if place == top or top not in place.parents:
                break
            place = place.parent
    return min(found, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
