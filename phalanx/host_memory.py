"""How much memory this machine leaves, and the control groups of this process, where a container or a scheduler has set
a limit. No torch here: agents ask too.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of version 2 of control groups, then of version 1: the limit, what is used, and what of that is files that nobody has
# used of late, which the kernel gives back before it lets anybody die.
NAMES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free() -> int:
    """Bytes that this machine and the control groups leave, as far as Linux says; no bound where it does not."""
    available = [int(line.split()[1]) * 1024 for line in _lines(Path("/proc/meminfo")) if "MemAvailable" in line]
    return min([*available, *group_room()], default=1 << 62)


def limit() -> int:
    """Bytes that all processes here may take together: the machine's memory and swap, or less by a control group."""
    told = dict(line.split(":", 1) for line in _lines(Path("/proc/meminfo")) if ":" in line)
    total = [sum(int(told[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal") if name in told)]
    return min([each for each in total if each] + [most for most, _ in _limits(GROUPS, OWN)], default=1 << 62)


def group_room(groups: Path = GROUPS, own: Path = OWN) -> list[int]:
    """What each control group with a limit leaves, this process's own and all above it, in bytes. `groups`: where they
    are mounted; `own` says which is this one's, and in a container may name one that is not seen from here."""
    return [max(0, most - used) for most, used in _limits(groups, own)]


def group_kills(groups: Path = GROUPS, own: Path = OWN) -> int:
    """How many processes of this one's control group the kernel has killed for want of memory; 0 where nothing says."""
    for place, (limit, _, _) in _places(groups, own):
        events = place / ("memory.events" if limit == "memory.max" else "memory.oom_control")
        for words in map(str.split, _lines(events)):
            if words[:1] == ["oom_kill"]:
                return int(words[1])
    return 0


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """(the limit, what is used of it), in bytes, of each control group that has one."""
    for place, (limit, usage, files) in _places(groups, own):
        with contextlib.suppress(OSError, ValueError):  # no limit is said as `max`
            most, used = (int((place / name).read_text()) for name in (limit, usage))
            lines = [line.split() for line in _lines(place / "memory.stat")]
            yield most, used - sum(int(words[1]) for words in lines if words[:1] == [files])


def _places(groups: Path, own: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    for line in [*_lines(own), "0::/", "1:memory:/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (groups / "memory", NAMES[1]) if controllers else (groups, NAMES[0])
        place = top / path.lstrip("/")
        yield place, names
        while place != top and top in place.parents:
            place = place.parent
            yield place, names


def _lines(path: Path) -> Sequence[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
