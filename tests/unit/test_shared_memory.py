"""The folder in shared memory: one holder, nobody else's, and nothing left behind for ever."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.errors import RunError
from phalanx.records import RunPaths
from phalanx.shared_memory import LOCK, folder_of, held, left_behind, sweep


def test_one_at_a_time_and_gone_when_it_need_not_stay(tmp_path: Path) -> None:
    folder = folder_of(RunPaths(tmp_path / "run"), place=tmp_path)
    with held(folder) as memory:
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(RunError, match="already goes on on this machine"), held(folder):
            pass
        (folder / "state").touch()
    assert (folder / "state").exists()
    with held(folder) as memory:
        memory.keeps = False
    assert not folder.exists()


def test_who_comes_while_a_folder_is_taken_away_makes_another(tmp_path: Path) -> None:
    folder = tmp_path / "folder"

    def come() -> bool:
        with held(folder):
            return (folder / LOCK).exists()

    with ThreadPoolExecutor(1) as pool:
        with held(folder) as memory:
            memory.keeps = False
            comes = pool.submit(come)
            time.sleep(0.1)
        assert comes.result()


def test_only_old_folders_that_nobody_holds_are_swept(tmp_path: Path) -> None:
    folders = {name: tmp_path / f"phalanx-{os.getuid()}-{name}" for name in ("held", "new", "old", "no lock")}
    for name, folder in folders.items():
        with held(folder):
            (folder / "state").touch()
        if name != "new":
            os.utime(folder / LOCK, (time.time() - 90_000,) * 2)
    (folders["no lock"] / LOCK).unlink()
    other = tmp_path / "phalanx-999999-0"
    other.mkdir()
    link = tmp_path / f"phalanx-{os.getuid()}-link"
    link.symlink_to(folders["new"])
    with held(folders["held"]):
        os.utime(folders["held"] / LOCK, (time.time() - 90_000,) * 2)
        assert sweep(tmp_path) == [folders["old"]]
    assert [name for name, folder in folders.items() if folder.exists()] == ["held", "new", "no lock"]
    assert other.exists()
    assert link.is_symlink()
    assert sweep(tmp_path, old_s=-1.0) == [folders["held"], folders["new"]]


def test_what_a_run_is_about_to_go_on_from_is_not_swept_however_long_it_ran(tmp_path: Path) -> None:
    run, other = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "other")
    folders = [folder_of(run, 0, tmp_path), folder_of(run, 11, tmp_path), folder_of(other, 0, tmp_path)]
    for folder in folders:
        with held(folder):
            pass
    assert sweep(tmp_path, old_s=-1.0, but=folders[1]) == [folders[2]]
    assert folders[0].exists() and folders[1].exists()


def test_what_this_machine_kept_as_another_node_is_found_unless_somebody_holds_it(tmp_path: Path) -> None:
    run, other = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "other")
    folders = [folder_of(run, node, tmp_path) for node in range(4)]
    for folder in (*folders[:3], folder_of(other, 1, tmp_path)):
        with held(folder):
            pass
    folders[3].symlink_to(folders[0])
    with held(folders[0]), held(folders[2]):
        assert list(left_behind(folders[0])) == [folders[1]]
        for found in left_behind(folders[0]):  # nobody else has it while it is looked at
            with pytest.raises(RunError, match="another process holds"), held(found):
                pass
    assert list(left_behind(folders[0])) == [folders[1], folders[2]]


def test_who_holds_it_says_so_now_and_then(tmp_path: Path) -> None:
    with held(tmp_path / "folder") as memory:
        os.utime(memory.folder / LOCK, (0, 0))
        memory.touch()
        assert (memory.folder / LOCK).stat().st_mtime == 0  # it has just been said
        memory.touched -= 61
        memory.touch()
        assert time.time() - (memory.folder / LOCK).stat().st_mtime < 60
