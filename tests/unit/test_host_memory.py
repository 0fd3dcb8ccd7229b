"""What a machine and the control groups of a process leave of memory."""

from pathlib import Path

import pytest

from phalanx.system import memory as host_memory


def group(place: Path, limit: str, used: int, files: int, names: tuple[str, str, str]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / names[0]).write_text(f"{limit}\n")
    (place / names[1]).write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 5\n{names[2]} {files}\nshmem 1\n")


@pytest.mark.parametrize("version", [2, 1])
def test_every_group_from_the_own_one_up_has_a_say(version: int, tmp_path: Path) -> None:
    names = host_memory.NAMES[version]
    top = tmp_path / "groups" / ("" if version == 2 else "memory")
    unlimited = "max" if version == 2 else str(2**63 - 4096)
    group(top / "job" / "step", unlimited, 300, 0, names)
    group(top / "job", "1000", 700, 100, names)
    group(top, "5000", 900, 0, names)
    own = tmp_path / "own"
    own.write_text("9:cpu:/elsewhere\n" + ("0::/job/step\n" if version == 2 else "4:memory:/job/step\n"))
    found = host_memory.cgroup_free_bytes(tmp_path / "groups", own)
    assert min(found) == 400  # files that nobody has used of late are given back
    assert 4100 in found
    assert all(each in (400, 4100) or each > 2**62 for each in found)


def test_a_group_that_is_not_seen_from_here_is_that_of_the_container(tmp_path: Path) -> None:
    names = host_memory.NAMES[2]
    group(tmp_path / "groups", "1000", 1500, 0, names)
    (tmp_path / "own").write_text("0::/../../of/the/host\n")
    assert set(host_memory.cgroup_free_bytes(tmp_path / "groups", tmp_path / "own")) == {0}
    assert host_memory.cgroup_free_bytes(tmp_path / "nothing", tmp_path / "nowhere") == []


def test_here_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < host_memory.free_bytes() < 1 << 62
    monkeypatch.setattr(host_memory, "cgroup_free_bytes", lambda: [7])
    assert host_memory.free_bytes() == 7


def test_processes_here_may_take_what_the_least_limit_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = host_memory.limit_bytes()
    assert host_memory.free_bytes() < whole < 1 << 62
    group(tmp_path / "groups", "9000", 100, 0, host_memory.NAMES[2])
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
    assert host_memory.limit_bytes() == 9000


@pytest.mark.parametrize("version", [1, 2])
def test_whom_the_kernel_has_killed_in_this_group(tmp_path: Path, version: int) -> None:
    place = tmp_path / "groups" / ("memory" if version == 1 else "") / "job"
    place.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("4:memory:/job\n" if version == 1 else "0::/job\n")
    assert host_memory.cgroup_oom_kills(tmp_path / "groups", own) == 0  # nothing says
    (place / ("memory.oom_control" if version == 1 else "memory.events")).write_text("under_oom 0\noom_kill 3\n")
    (place.parent / "memory.events").write_text("oom_kill 7\n")  # of others, too
    assert host_memory.cgroup_oom_kills(tmp_path / "groups", own) == 3
