"""Checkpoints at a URL: the same bytes and promises as in a folder, whatever the store does."""

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.disk.folders import RemoteCheckpoints
from phalanx.checkpoint.disk.load import (
    MANIFEST,
    Checkpoint,
    find_newest_valid,
    list_steps,
    open_and_verify,
    step_folder,
)
from phalanx.core.errors import RunError, StorageError
from phalanx.core.run_paths import Url
from phalanx.storage import files as storage
from phalanx.storage import retry
from tests.helpers import wait_until
from tests.hostile import examples
from tests.stores import Faults, register
from tests.unit.checkpoints import SHAPES, assert_holds, cut, flip, make_savers, save_all, save_alone, state


@pytest.fixture
def folder(faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Url:
    """A folder of checkpoints in a store whose faults are on cue; `local` is where its files really lie."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    return Url(f"faulty://{tmp_path}/run/checkpoints", 20)


def local(url: Url) -> Path:
    return Path(url.text.removeprefix("faulty://"))


def names(folder: Path) -> list[str]:
    """Of all files, without the words that writers draw."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"-[0-9a-f]{8}(?=\.safetensors)", "", name) for name in found)


def file_of(step: Path, attempt: int = 1) -> Path:
    (found,) = step.glob(f"rank-00000.attempt-{attempt}-*.safetensors")
    return found


@pytest.mark.parametrize("store", ["faulty", "s3"])
def test_saved_on_4_is_read_on_1_3_and_8(request: pytest.FixtureRequest, store: str) -> None:
    url = request.getfixturevalue("folder") if store == "faulty" else Url(request.getfixturevalue("bucket"), 20)
    savers, events = make_savers(url, 4)
    values = state()
    save_all(savers, values, 50, skipped=[[3, 4]])
    assert [kind for kind, _ in events] == ["checkpoint_saved"]
    assert list_steps(url) == [50]
    checkpoint = find_newest_valid(url, None, lambda kind, details: None)
    assert checkpoint is not None
    assert checkpoint.header == {"step": 50, "attempt": 1, "skipped": [[3, 4]]}
    assert checkpoint.bytes == events[0][1]["bytes"]
    for world in (1, 3, 8):
        assert_holds(checkpoint, values, world)


def test_what_is_in_a_store_is_what_is_in_a_folder(folder: Url, tmp_path: Path) -> None:
    """But for the files' names; and it may be copied out of the store and read there."""
    save_alone(tmp_path / "twin", 5)
    save_alone(folder, 5)
    twin, there = tmp_path / "twin" / "step-00000005", local(folder) / "step-00000005"
    assert names(there) == [MANIFEST, "rank-00000.attempt-1.safetensors"]
    assert file_of(there).read_bytes() == (twin / "rank-00000.safetensors").read_bytes()
    manifests = [
        re.sub(r"\.attempt-1-[0-9a-f]{8}|[0-9a-f]{64}", "", (one / MANIFEST).read_text()) for one in (there, twin)
    ]
    assert manifests[0] == manifests[1]
    shutil.copytree(there, tmp_path / "copy")
    assert_holds(Checkpoint(tmp_path / "copy"), state())


def test_a_store_that_fails_now_and_then(faults: Faults, folder: Url) -> None:
    faults.rate = 0.1
    savers, events = make_savers(folder, 3, keep=2)
    for step in (1, 2, 3):
        save_all(savers, state(step), step)
    assert [kind for kind, _ in events] == ["checkpoint_saved"] * 3
    assert list_steps(folder) == [3, 2]
    checkpoint = find_newest_valid(folder, None, lambda kind, details: None)
    assert checkpoint is not None
    assert_holds(checkpoint, state(3), 2)


FAILURES = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.ETIMEDOUT, errno.ENOENT)


@examples(8)
@given(
    rate=st.sampled_from([0.0, 0.05, 0.3]), fails_at=st.integers(0, 60), dies_at=st.integers(0, 80),
    tear=st.lists(st.integers(0, 900), max_size=3), swallow=st.lists(st.integers(0, 900), max_size=2),
    error=st.sampled_from(FAILURES), seed=st.integers(0, 99),
)  # fmt: skip
def test_however_a_store_fails_what_is_read_is_what_was_saved(
    rate: float, fails_at: int, dies_at: int, tear: list[int], swallow: list[int], error: int, seed: int
) -> None:
    """And what was said to be saved is there, unless the store has lost it in silence."""
    faults = register()
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(retry, "FIRST_PAUSE_S", 0.0005)
        url = Url(f"faulty://{place}/run/checkpoints", 0.2)
        savers, events = make_savers(url, 2)
        save_all(savers, state(1), 1)
        faults.dice.seed(seed)
        faults.rate, faults.tear, faults.swallow = rate, list(tear), list(swallow)
        faults.fails_at, faults.dies_at = (len(faults.calls) + at if at else 0 for at in (fails_at, dies_at))
        faults.error = lambda: OSError(error, os.strerror(error))
        for step in (2, 3):
            save_all(savers, state(step), step)
        faults.rate, faults.fails_at, faults.dies_at, faults.dead = 0.0, 0, 0, False
        said = [details["step"] for kind, details in events if kind == "checkpoint_saved"]
        assert {kind for kind, _ in events} <= {"checkpoint_saved", "checkpoint_failed", "warning"}
        reasons: list[str] = []
        found = find_newest_valid(url, None, lambda kind, details: reasons.append(details["reason"]))
        assert found is not None
        assert_holds(found, state(found.header["step"]))
        assert found.header["step"] >= max(said) or swallow


def test_a_store_that_is_gone_costs_that_checkpoint_alone(faults: Faults, folder: Url) -> None:
    """The next one is saved as if nothing had been, and what was left of the failed one is cleared."""
    url = Url(folder.text, 0.3)
    savers, events = make_savers(url, 2)
    save_all(savers, state(1), 10)
    faults.tear = [50, 50]  # both ranks get somewhere before it goes
    faults.error = lambda: OSError(errno.ENOSPC, "No space left on device")
    save_all(savers, state(2), 20)
    assert all(saver.outcome is not None and not saver.outcome.saved for saver in savers)
    faults.dead, faults.error = True, lambda: OSError(errno.EIO, "the store is out of order")
    save_all(savers, state(2), 30)
    assert [kind for kind, _ in events] == ["checkpoint_saved", "checkpoint_failed", "checkpoint_failed"]
    assert "free space there" in events[1][1]["reason"]
    assert "could not be listed for 0.3 s" in events[2][1]["reason"]
    faults.dead = False
    left = local(url) / "step-00000030"
    left.mkdir()
    for name in ("rank-00001.attempt-1.safetensors", ".rank-00000.attempt-1.safetensors.0a1b.partial",
                 "rank-00000.attempt-2.safetensors", "notes.txt"):  # fmt: skip
        (left / name).write_bytes(b"half")
    assert list_steps(url) == [10]
    save_all(savers, state(2), 40)
    assert list_steps(url) == [40, 10]
    assert names(left) == [
        "notes.txt",
        "rank-00000.attempt-2.safetensors",
    ]  # neither is a dead writer's of this attempt


def test_a_stalled_store_stalls_nobody(faults: Faults, folder: Url) -> None:
    savers, events = make_savers(Url(folder.text, 0.6), 1)
    faults.stalled = {"write"}
    values = state()
    savers[0].save({"step": 1}, SHAPES, cut(values, 0, 1), 1)
    wait_until(lambda: "write" in faults.calls)
    assert savers[0].busy()
    savers[0].wait()
    assert not savers[0].busy()
    assert events[0][0] == "checkpoint_failed"
    assert "nothing moved for 0.2 s" in events[0][1]["reason"]
    faults.stalled = set()
    save_all(savers, state(2), 2)
    faults.release.set()  # the writers that were left behind wake up, and add nothing
    wait_until(
        lambda: names(local(folder)) == [f"step-00000002/{MANIFEST}", "step-00000002/rank-00000.attempt-1.safetensors"]
    )
    assert list_steps(folder) == [2]
    assert_holds(Checkpoint(step_folder(folder, 2)), state(2))


def test_two_machines_that_count_the_same_attempt_write_different_files(folder: Url) -> None:
    """One slept while the other took the run over: what it still writes is not what the other's manifest names."""
    ours, theirs = RemoteCheckpoints(folder), RemoteCheckpoints(folder)
    assert ours.rank_file(2, 3, 0) != theirs.rank_file(2, 3, 0)
    assert ours.rank_file(2, 3, 0) == ours.rank_file(2, 3, 0)
    save_alone(folder, 2, attempt=3)
    kept = file_of(local(folder) / "step-00000002", attempt=3).read_bytes()
    storage.write_bytes(theirs.rank_file(2, 3, 0).text, b"late", timeout_s=20)
    assert kept in [path.read_bytes() for path in (local(folder) / "step-00000002").glob("rank-*")]
    assert_holds(Checkpoint(step_folder(folder, 2)), state())


def test_retention_and_replacement(folder: Url) -> None:
    for step in (1, 2, 3):
        save_alone(folder, step, keep=2)
    assert list_steps(folder) == [3, 2]
    assert not names(local(folder) / "step-00000001")
    flip(file_of(local(folder) / "step-00000003"), -1)
    events = save_alone(folder, 3, seed=4, attempt=2, keep=2)
    assert "CRC-32" in events[0][1]["replaced"]
    assert names(local(folder) / "step-00000003") == [MANIFEST, "rank-00000.attempt-2.safetensors"]
    assert_holds(Checkpoint(step_folder(folder, 3)), state(4))
    assert save_alone(folder, 3, seed=5, attempt=3, keep=2)[0][1]["already_there"]
    assert_holds(Checkpoint(step_folder(folder, 3)), state(4))


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest", "header"])
def test_a_damaged_checkpoint_is_passed_over(folder: Url, damage: str) -> None:
    for step in (1, 2):
        save_alone(folder, step, seed=step)
    path = file_of(local(folder) / "step-00000002")
    if damage == "flip":
        flip(path, -1)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "gone":
        path.unlink()
    elif damage == "manifest":
        flip(path.with_name(MANIFEST), 30)
    else:
        flip(path, 9)
    reasons: list[str] = []
    found = find_newest_valid(folder, None, lambda kind, details: reasons.append(details["reason"]))
    assert found is not None
    assert found.header["step"] == 1
    assert len(reasons) == 1
    assert (MANIFEST if damage == "manifest" else path.name) in reasons[0]


def test_a_store_that_does_not_answer_says_nothing_about_a_checkpoint(faults: Faults, folder: Url) -> None:
    """Going back to an older checkpoint because the network is away would lose work for nothing."""
    save_alone(folder, 1)
    checkpoint = Checkpoint(step_folder(Url(folder.text, 0.2), 1))
    faults.dead = True
    with pytest.raises(StorageError):
        open_and_verify(checkpoint.path)
    with pytest.raises(StorageError):
        checkpoint.verify()
    with pytest.raises(StorageError):
        list_steps(Url(folder.text, 0.2))


def test_nothing_is_committed_before_the_records_are_there_or_for_a_run_that_is_lost(folder: Url) -> None:
    savers, events = make_savers(folder, 1)
    answers: list[Exception | None] = [None, StorageError("the records wait"), RunError("taken over")]
    seen: list[list[int]] = []

    def before_commit() -> None:
        seen.append(list_steps(folder))
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    savers[0]._before_commit = before_commit
    for step in (1, 2, 3):
        savers[0].save({"step": step}, SHAPES, cut(state(), 0, 1), 1)
        if step == 3:
            with pytest.raises(RunError, match="taken over"):
                savers[0].wait()
        savers[0].wait()
    assert seen == [[], [1], [1]]
    assert [kind for kind, _ in events] == ["checkpoint_saved", "checkpoint_failed", "checkpoint_failed"]
    assert list_steps(folder) == [1]
