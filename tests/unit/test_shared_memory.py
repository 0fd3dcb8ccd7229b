"""The folder in shared memory: one holder, nobody else's, found again, and nothing left behind for ever."""

import contextlib
import fcntl
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.core.errors import RunError
from phalanx.core.run_paths import RunPaths
from phalanx.recovery import shared_memory
from phalanx.recovery.shared_memory import (
    LOCK,
    RUN,
    compute_run_key,
    find_folder,
    hold_folder,
    hold_orphaned_folders,
    remove_stale_folders,
)
from tests.another_user import as_root, begin, open_path

__all__ = ["open_path"]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place for temporary files."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


def made(run: RunPaths, node: int, place: Path) -> Path:
    with hold_folder(run, node, place) as memory:
        return memory.folder


def test_one_at_a_time_and_gone_when_it_need_not_stay(run: RunPaths, tmp_path: Path) -> None:
    with hold_folder(run, place=tmp_path) as memory:
        folder = memory.folder
        assert folder.parent == tmp_path and memory.state
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
        with pytest.raises(RunError, match="is already running on this machine"), hold_folder(run, place=tmp_path):
            pass
        (folder / "state").touch()
    with hold_folder(run, place=tmp_path) as memory:
        assert memory.folder == folder and (folder / "state").exists()  # found again
        memory.persists = False
    assert not folder.exists()
    assert made(run, 0, tmp_path) != folder  # by a name that nobody could foresee


def test_who_comes_while_a_folder_is_taken_away_makes_another(run: RunPaths, tmp_path: Path) -> None:
    def come() -> bool:
        with hold_folder(run, place=tmp_path) as memory:
            return (memory.folder / LOCK).exists()

    with ThreadPoolExecutor(1) as pool:
        with hold_folder(run, place=tmp_path) as memory:
            memory.persists = False
            comes = pool.submit(come)
            time.sleep(0.1)
        assert comes.result()


def test_of_many_who_begin_at_once_one_has_it(run: RunPaths, tmp_path: Path) -> None:
    def come(number: int) -> int:
        with contextlib.suppress(RunError), hold_folder(run, place=tmp_path):
            time.sleep(2 * shared_memory.PASSING_S)
            return 1
        return 0

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(come, range(8))) == 1
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("phalanx-")]) == 1


def test_of_two_that_were_left_the_one_with_state_is_gone_on_from(run: RunPaths, tmp_path: Path) -> None:
    first = made(run, 0, tmp_path)
    (first / "state-000001-00000").touch()
    for letter in "0z":  # of starts that were killed while they began
        shutil.copytree(first, tmp_path / f"phalanx-{letter}", ignore=shutil.ignore_patterns("state*"))
        (tmp_path / f"phalanx-{letter}").chmod(0o700)
    assert find_folder(run, 0, tmp_path) == made(run, 0, tmp_path) == first


def take_all(place: str, names: list[str]) -> None:
    """What somebody does who knows the run: make what might be its folder, and hold it."""
    for name in names:
        folder = Path(place) / name
        folder.mkdir(mode=0o777)
        for file in (LOCK, RUN):
            (folder / file).write_text(names[0])
        fcntl.flock(os.open(folder / LOCK, os.O_RDWR), fcntl.LOCK_EX)
    (Path(place) / "phalanx-link").symlink_to(place)


@as_root
def test_another_user_blocks_no_run(open_path: Path) -> None:
    open_path.chmod(0o1777)
    run = RunPaths(open_path / "run")
    name = f"{compute_run_key(run)}-0"
    names = [name, f"phalanx-{os.getuid()}-{name}", "phalanx-open", f"phalanx-{name}"]
    assert begin(take_all, str(open_path), names)() is None
    with hold_folder(run, place=open_path) as memory:
        assert memory.state and memory.folder.stat().st_uid == os.getuid()
        assert find_folder(run, 0, open_path) == memory.folder
    assert made(run, 0, open_path) == memory.folder
    assert remove_stale_folders((open_path,), old_s=-1.0) == [memory.folder]


@pytest.mark.parametrize("place", ["not there", "a file", "full"])
def test_where_shared_memory_cannot_be_used_a_run_has_a_folder_elsewhere(
    run: RunPaths, tmp_path: Path, elsewhere: Path, place: str
) -> None:
    there = tmp_path / "place"
    if place == "a file":
        there.touch()
    elif place == "full":
        there = Path("/proc")  # which takes no folder, whoever asks
    with hold_folder(run, place=there) as memory:
        assert not memory.state and not memory.persists
        assert memory.reason is not None and str(there) in memory.reason
        assert memory.folder.parent == elsewhere and memory.folder.stat().st_mode & 0o777 == 0o700
    assert list(elsewhere.iterdir()) == []


def test_with_nothing_kept_in_memory_nothing_is_made_there(run: RunPaths, tmp_path: Path, elsewhere: Path) -> None:
    other = made(run, 1, tmp_path)
    made(run, 0, tmp_path)
    with hold_folder(run, place=tmp_path, wanted=False) as memory:  # what had been kept is given up
        assert [path for path in tmp_path.iterdir() if path.name.startswith("phalanx-")] == [other]
        assert not memory.state and memory.reason is None and memory.folder.parent == elsewhere
    assert list(elsewhere.iterdir()) == []
    with hold_folder(run, 1, tmp_path), hold_folder(run, 1, tmp_path, wanted=False):
        assert other.exists()


def test_only_old_folders_that_nobody_holds_are_swept(tmp_path: Path) -> None:
    runs = {name: RunPaths(tmp_path / name) for name in ("held", "new", "old", "no lock")}
    folders = {name: made(run, 0, tmp_path) for name, run in runs.items()}
    for name, folder in folders.items():
        if name != "new":
            os.utime(folder / LOCK, (time.time() - 90_000,) * 2)
    (folders["no lock"] / LOCK).unlink()
    link = tmp_path / "phalanx-link"
    link.symlink_to(folders["new"])
    with hold_folder(runs["held"], 0, tmp_path):
        os.utime(folders["held"] / LOCK, (time.time() - 90_000,) * 2)
        assert remove_stale_folders((tmp_path,)) == [folders["old"]]
    assert [name for name, folder in folders.items() if folder.exists()] == ["held", "new", "no lock"]
    assert link.is_symlink()
    assert sorted(remove_stale_folders((tmp_path,), old_s=-1.0)) == sorted([folders["held"], folders["new"]])


def test_what_a_run_is_about_to_go_on_from_is_not_swept_however_long_it_ran(run: RunPaths, tmp_path: Path) -> None:
    other = RunPaths(tmp_path / "other")
    folders = [made(run, 0, tmp_path), made(run, 11, tmp_path), made(other, 0, tmp_path)]
    assert remove_stale_folders((tmp_path,), old_s=-1.0, but=run) == [folders[2]]
    assert folders[0].exists() and folders[1].exists()


def test_what_this_machine_kept_as_another_node_is_found_unless_somebody_holds_it(
    run: RunPaths, tmp_path: Path
) -> None:
    folders = [made(run, node, tmp_path) for node in range(3)]
    made(RunPaths(tmp_path / "other"), 1, tmp_path)
    with hold_folder(run, 0, tmp_path), hold_folder(run, 2, tmp_path):
        assert list(hold_orphaned_folders(run, 0, tmp_path)) == [(1, folders[1])]
        for node, _ in hold_orphaned_folders(run, 0, tmp_path):  # nobody else has it while it is looked at
            with pytest.raises(RunError, match="another process holds"), hold_folder(run, node, tmp_path):
                pass
    assert sorted(hold_orphaned_folders(run, 0, tmp_path)) == [(1, folders[1]), (2, folders[2])]


def test_who_holds_it_says_so_now_and_then(run: RunPaths, tmp_path: Path) -> None:
    with hold_folder(run, place=tmp_path) as memory:
        os.utime(memory.folder / LOCK, (0, 0))
        memory.touch()
        assert (memory.folder / LOCK).stat().st_mtime == 0  # it has just been said
        memory.touched -= 61
        memory.touch()
        assert time.time() - (memory.folder / LOCK).stat().st_mtime < 60
