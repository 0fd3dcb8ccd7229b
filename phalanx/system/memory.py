"""Free host memory, within the limits of this process's control groups. No torch here: agents ask too."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from phalanx.system.cgroups import GROUPS, OWN, iter_groups, read_group_lines

# Of each version of control groups: the limit, the usage, and the part of it that is inactive file cache,
# which the kernel gives back before it lets anybody die.
NAMES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
EVENTS = {2: "memory.events", 1: "memory.oom_control"}


def free_bytes() -> int:
    """Bytes that this machine and the control groups leave, as far as Linux says; no bound where it does not."""
    available = [
        int(line.split()[1]) * 1024 for line in read_group_lines(Path("/proc/meminfo")) if "MemAvailable" in line
    ]
    return min([*available, *cgroup_free_bytes()], default=1 << 62)


def limit_bytes() -> int:
    """Bytes that all processes here may take together: the machine's memory and swap, or less by a control group."""
    told = dict(line.split(":", 1) for line in read_group_lines(Path("/proc/meminfo")) if ":" in line)
    total = [sum(int(told[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal") if name in told)]
    return min([each for each in total if each] + [most for most, _ in _limits(GROUPS, OWN)], default=1 << 62)


def cgroup_free_bytes(groups: Path = GROUPS, own: Path = OWN) -> list[int]:
    """What each control group with a limit leaves, this process's own and all above it, in bytes. `groups`: where they
    are mounted; `own` says which is this one's, and in a container may name one that is not seen from here."""
    return [max(0, most - used) for most, used in _limits(groups, own)]


def cgroup_oom_kills(groups: Path = GROUPS, own: Path = OWN) -> int:
    """The number of out-of-memory kills in this process's control group; 0 if unknown."""
    for place, version in iter_groups("memory", groups, own):
        for words in map(str.split, read_group_lines(place / EVENTS[version])):
            if words[:1] == ["oom_kill"]:
                return int(words[1])
    return 0


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """(the limit, what is used of it), in bytes, of each control group that has one."""
    for place, version in iter_groups("memory", groups, own):
        limit, usage, files = NAMES[version]
        with contextlib.suppress(OSError, ValueError):  # `max` means no limit
            most, used = (int((place / name).read_text()) for name in (limit, usage))
            stat = [line.split() for line in read_group_lines(place / "memory.stat")]
            yield most, used - sum(int(words[1]) for words in stat if words[:1] == [files])


def pinned_bytes(size: int) -> int:
    """Bytes that torch takes for `size` bytes of page-locked memory: the next power of two."""
    return 1 << max(0, size - 1).bit_length()
