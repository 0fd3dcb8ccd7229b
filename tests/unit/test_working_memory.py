"""Memory that ranks work in stays for the next ones, and is never had twice."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.checkpoint.memory import slots
from phalanx.checkpoint.memory.slots import WorkingMemory, remove_stale


def test_who_comes_next_gets_the_same_memory(tmp_path: Path) -> None:
    first = WorkingMemory(tmp_path, 3)
    one, other = first.allocate(5000, torch.float32), first.allocate(7, torch.float64)
    assert one is not None and other is not None
    one.fill_(1.0)
    other.fill_(2.0)
    assert one.sum() == 5000 and first.allocate(0, torch.float32) is None
    [file] = tmp_path.iterdir()
    size = file.stat().st_size
    again = WorkingMemory(tmp_path, 3)
    same, longer = again.allocate(5000, torch.float32), again.allocate(7000, torch.float64)
    assert same is not None and longer is not None
    assert same.sum() == 5000 and longer[:7].sum() == 14  # what lies there means nothing, but it is there
    longer.fill_(0.0)
    assert file.stat().st_size > size and file.stat().st_mode & 0o777 == 0o600
    assert same.sum() == 5000


def test_without_room_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots.os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4096))
    mine = WorkingMemory(tmp_path, 0)
    assert mine.allocate(10 * 1024, torch.float32) is None
    assert mine.allocate(9 * 1024, torch.float32) is not None
    assert WorkingMemory(tmp_path / "is not there", 0).allocate(1, torch.float32) is None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"private" * 1000)
    os.symlink(tmp_path / "elsewhere", tmp_path / slots.NAME.format(0))
    assert WorkingMemory(tmp_path, 0).allocate(10, torch.float32) is None


def test_what_ranks_leave_that_are_no_more_is_removed(tmp_path: Path) -> None:
    for rank in range(4):
        WorkingMemory(tmp_path, rank).allocate(1, torch.float32)
    (tmp_path / "working-hours").touch()
    remove_stale(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["working-00000", "working-00001", "working-hours"]
