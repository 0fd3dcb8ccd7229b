"""The control groups of this process, of either version, in which a container or a scheduler may have set limits."""

from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def iter_groups(controller: str, groups: Path = GROUPS, own: Path = OWN) -> Iterator[tuple[Path, int]]:
    """(folder, version) of this process's group and all above it. `groups`: where they are mounted; `own` says which is
    this one's, and in a container may name one that is not seen from here."""
    for line in [*read_group_lines(own), "0::/", f"1:{controller}:/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = groups
        if controllers:  # those of one folder go by all their names, or by links of each
            top = groups / controllers if (groups / controllers).is_dir() else groups / controller
        place, version = top / path.lstrip("/"), 1 if controllers else 2
        yield place, version
        while place != top and top in place.parents:
            place = place.parent
            yield place, version


def read_group_lines(path: Path) -> list[str]:
    """Of a file; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
