"""Modes of what a run writes: as the umask says, and with `storage.private` for nobody else."""

import os
import stat
from pathlib import Path

import pytest

from phalanx.storage import permissions
from tests.another_user import as_root, begin, open_path
from tests.dist.command import phalanx, write_place

__all__ = ["open_path"]
TRAIN = ("train", "recipe.yaml", "--run-dir", "run", "checkpoint.every=1")


def modes(*folders: Path) -> dict[str, int]:
    """Of all that lies in folders, and of these."""
    found = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    return {str(path): stat.S_IMODE(path.lstat().st_mode) for path in found if not path.is_symlink()}


def closed(*folders: Path) -> bool:
    return all(mode == (0o700 if Path(path).is_dir() else 0o600) for path, mode in modes(*folders).items())


def test_a_private_run_writes_for_its_user_alone(tmp_path: Path) -> None:
    write_place(tmp_path)
    run, cache = tmp_path / "run", tmp_path / "cache"
    more = ("--ranks", "2", "report.tensorboard=true")
    assert phalanx(tmp_path, *TRAIN, *more, "storage.private=true")[0] == 0
    assert closed(run, cache)
    assert phalanx(tmp_path, "export", "run", "exported")[0] == 0  # commands that come later keep to it
    assert phalanx(tmp_path, "report", "run")[0] == 0
    assert closed(run, tmp_path / "exported")


def test_what_was_readable_is_closed_and_stays_so(tmp_path: Path) -> None:
    write_place(tmp_path)
    run = tmp_path / "run"
    assert phalanx(tmp_path, *TRAIN)[0] == 0
    # As documented: all but the lock may be read by others.
    assert {Path(path).name for path, mode in modes(run).items() if not mode & 0o004} == {".lock"}
    assert phalanx(tmp_path, *TRAIN, "train.steps=3", "storage.private=true")[0] == 0
    assert closed(run)
    assert phalanx(tmp_path, *TRAIN, "train.steps=4")[0] == 0
    assert closed(run)  # a folder that is private says so itself


@as_root
def test_others_can_read_nothing_of_it(open_path: Path) -> None:
    (open_path / "run").mkdir()
    (open_path / "run" / "metrics.jsonl").touch()
    before = permissions.current_umask()
    try:
        assert begin(os.listdir, str(open_path / "run"))() == ["metrics.jsonl"]
        permissions.restrict_permissions(open_path / "run", private=True)
        assert permissions.current_umask() & 0o077 == 0o077
        assert "PermissionError" in begin(os.listdir, str(open_path / "run"))()
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_only_a_folder_that_is_private_says_so(tmp_path: Path, mode: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    before = permissions.current_umask()
    try:
        permissions.restrict_permissions(tmp_path / "run")
        assert permissions.current_umask() == before | (0o077 if mode == 0o700 else 0)
    finally:
        os.umask(before)
