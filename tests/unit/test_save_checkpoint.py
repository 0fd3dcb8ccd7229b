"""Saving checkpoints: all or nothing, whatever fails, and a copy of the state as it was."""

import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from phalanx.checkpoint.disk.folders import write_file
from phalanx.checkpoint.disk.load import (
    MANIFEST,
    Checkpoint,
    Parameters,
    SingleRankGroup,
    find_newest_valid,
    list_steps,
    open_and_verify,
    step_folder,
)
from phalanx.checkpoint.disk.save import CheckpointSaver, StatePiece
from phalanx.checkpoint.disk.snapshot import HostBuffer, SnapshotFile
from phalanx.core.placement import Placement
from tests.helpers import run_ranks
from tests.unit.checkpoints import (
    KINDS,
    SHAPES,
    Events,
    Room,
    ThreadGroup,
    assert_holds,
    cut,
    flip,
    hidden,
    make_savers,
    save_all,
    save_alone,
    state,
)


class Gate(SingleRankGroup):
    """One rank whose saves stop before they write, until the gate opens."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def gather_objects(self, obj: Any) -> list[Any] | None:
        assert self.open.wait(20)
        return super().gather_objects(obj)


def test_saved_on_4_is_read_on_1_3_and_8(tmp_path: Path) -> None:
    savers, events = make_savers(tmp_path, 4)
    values = state()
    save_all(savers, values, 50, shares_version=2, skipped=[[3, 4]])
    assert [kind for kind, _ in events] == ["checkpoint_saved"]  # rank 0 alone speaks
    assert events[0][1]["step"] == 50
    assert events[0][1]["seconds"] > 0
    assert all(saver.outcome is not None and saver.outcome.saved for saver in savers)
    assert hidden(tmp_path) == []
    assert list_steps(tmp_path) == [50]
    checkpoint = Checkpoint(tmp_path / "step-00000050")
    assert checkpoint.header == {"step": 50, "attempt": 1, "shares_version": 2, "skipped": [[3, 4]]}
    assert checkpoint.parameters == SHAPES
    assert checkpoint.kinds("norm") == sorted(KINDS)
    assert (
        checkpoint.bytes
        == events[0][1]["bytes"]
        == sum(f.stat().st_size for f in checkpoint.path.glob("*.safetensors"))
    )
    for world in (1, 3, 8):
        assert_holds(checkpoint, values, world)


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    values = state()
    save_alone(tmp_path, 1)
    path = tmp_path / "step-00000001" / "rank-00000.safetensors"
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # the data starts aligned
    tensors = load_file(path)
    assert len(tensors) == len(values)
    assert torch.equal(tensors["exp_avg/layers.0.weight/0-77"], values["layers.0.weight", "exp_avg"])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut_with_any_overlap_reads_back(data: st.DataObject) -> None:
    """Ranks own random, overlapping ranges of mixed dtypes, in segments so small that pieces straddle them."""
    size = data.draw(st.integers(1, 60))
    world = data.draw(st.integers(1, 4))
    ranges = st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda pair: (min(pair), max(pair)))
    dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
    param, state_dtype = data.draw(dtypes), data.draw(dtypes)
    full = {
        "param": torch.arange(size, dtype=torch.float64).to(param),
        "exp_avg": -torch.arange(size, dtype=torch.float64).to(state_dtype),
    }
    with TemporaryDirectory() as name:
        folder = Path(name)
        rooms = Room(world)
        events: Events = []
        savers = [
            CheckpointSaver(folder, r, ThreadGroup(rooms, r), 1, lambda k, d: events.append((k, d)))
            for r in range(world)
        ]
        spans = []
        for rank, saver in enumerate(savers):
            saver._buffer = HostBuffer(8 * data.draw(st.integers(1, 5)))
            own = data.draw(st.lists(ranges, max_size=3, unique=True)) + ([(0, size)] if rank == world - 1 else [])
            spans += own
            pieces = [StatePiece("p", k, low, high, t[low:high]) for low, high in set(own) for k, t in full.items()]
            saver.save({"step": 7}, {"p": ((size,), "float32")}, iter(pieces), 1)
        for saver in savers:
            saver.wait()
        checkpoint = find_newest_valid(folder, None, lambda kind, details: None)
        assert checkpoint is not None
        assert [kind for kind, _ in events] == ["checkpoint_saved"]
        for _ in range(5):
            low, high = data.draw(ranges)
            for kind, flat in full.items():
                out = torch.full((high - low,), -1.0, dtype=flat.dtype)
                checkpoint.read_into("p", kind, low, high, out)
                assert torch.equal(out, flat[low:high])


def test_the_snapshot_is_a_copy_and_saves_do_not_overlap(tmp_path: Path) -> None:
    gate = Gate()
    events: Events = []
    saver = CheckpointSaver(tmp_path, 0, gate, 3, lambda kind, details: events.append((kind, details)))
    values = state()
    original = {key: flat.clone() for key, flat in values.items()}
    saver.save({"step": 1}, SHAPES, cut(values, 0, 1), 1)
    for flat in values.values():
        flat.mul_(2)
    second = threading.Thread(target=saver.save, args=({"step": 2}, SHAPES, cut(values, 0, 1), 1))
    second.start()
    time.sleep(0.1)
    assert second.is_alive()
    assert list_steps(tmp_path) == []
    gate.open.set()
    second.join()
    saver.close()
    assert saver.blocked_s > 0.05
    assert [details["step"] for _, details in events] == [1, 2]
    assert_holds(Checkpoint(step_folder(tmp_path, 1)), original)
    assert_holds(Checkpoint(step_folder(tmp_path, 2)), values)


def test_the_buffer_is_reused_and_takes_strided_tensors(tmp_path: Path) -> None:
    buffer = HostBuffer(1024)
    big = torch.arange(1000.0, requires_grad=True)
    buffer.store([StatePiece("p", "param", 0, 1000, big)])
    first = [memory.__array_interface__["data"][0] for memory in (s.numpy() for s in buffer._segments)]
    strided = torch.arange(40.0)[1::2]
    stored = buffer.store([StatePiece("p", "param", 0, 20, strided), StatePiece("q", "param", 5, 5, torch.empty(0))])
    assert [s.numpy().__array_interface__["data"][0] for s in buffer._segments] == first
    assert [piece.name for piece in stored] == ["p"]
    write_file(tmp_path / "x", SnapshotFile(stored, buffer))
    assert torch.equal(load_file(tmp_path / "x")["param/p/0-20"], strided)


def test_retention_keeps_the_newest_valid_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_alone(tmp_path, step, keep=2)
    assert list_steps(tmp_path) == [3, 2]
    (step_folder(tmp_path, 3) / MANIFEST).unlink()  # does not count, so step 2 is the second valid one
    save_alone(tmp_path, 4, keep=2)
    assert list_steps(tmp_path) == [4, 3, 2]
    save_alone(tmp_path, 5, keep=2)
    assert list_steps(tmp_path) == [5, 4]
    save_alone(tmp_path, 6, keep=1)
    assert list_steps(tmp_path) == [6]


def test_retention_never_removes_what_was_just_saved(tmp_path: Path) -> None:
    """A run that fell back from a step 100 whose contents alone are damaged saves step 75."""
    save_alone(tmp_path, 50, keep=1)
    save_alone(tmp_path, 100, keep=2)
    flip(step_folder(tmp_path, 100) / "rank-00000.safetensors", -1)
    save_alone(tmp_path, 75, keep=1)
    assert list_steps(tmp_path) == [100, 75]
    found = find_newest_valid(tmp_path, None, lambda kind, details: None)
    assert found is not None
    assert found.header["step"] == 75


def test_a_step_that_is_there_is_kept_if_valid_and_replaced_if_not(tmp_path: Path) -> None:
    save_alone(tmp_path, 5, seed=1)
    inode = step_folder(tmp_path, 5).stat().st_ino
    events = save_alone(tmp_path, 5, seed=2, attempt=2)
    assert events[0][0] == "checkpoint_saved"
    assert events[0][1]["already_there"]
    assert step_folder(tmp_path, 5).stat().st_ino == inode
    assert_holds(Checkpoint(step_folder(tmp_path, 5)), state(1))
    flip(step_folder(tmp_path, 5) / "rank-00000.safetensors", -1)
    events = save_alone(tmp_path, 5, seed=3, attempt=2)
    assert "CRC-32" in events[0][1]["replaced"]
    assert_holds(Checkpoint(step_folder(tmp_path, 5)), state(3))
    save_alone(tmp_path, 5, seed=4, attempt=3, skipped=[[1, 2]])  # intact, but from before data was skipped
    assert_holds(Checkpoint(step_folder(tmp_path, 5)), state(4))
    assert hidden(tmp_path) == []


def test_leftovers_of_dead_attempts_are_cleared(tmp_path: Path) -> None:
    for name in (
        ".step-00000010.attempt-1",
        ".step-00000010.attempt-2",
        ".step-00000010.attempt-9",
        ".step-00000001.removed",
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "rank-00007.safetensors").write_bytes(b"half")
    save_alone(tmp_path, 10, attempt=2)
    assert hidden(tmp_path) == [".step-00000010.attempt-9"]  # of a newer attempt: this one is the late writer
    assert sorted(f.name for f in step_folder(tmp_path, 10).iterdir()) == [MANIFEST, "rank-00000.safetensors"]


def test_pieces_that_leave_a_gap_are_an_error_that_surfaces(tmp_path: Path) -> None:
    savers, events = make_savers(tmp_path, 1)
    values = state()
    pieces = [piece for piece in cut(values, 0, 1) if (piece.name, piece.kind) != ("norm", "param")]
    savers[0].save({"step": 1}, SHAPES, pieces, 1)
    with pytest.raises(ValueError, match=r"\[0, 5\) of param of parameter norm"):
        savers[0].wait()
    assert events[0][0] == "checkpoint_failed"
    assert os.listdir(tmp_path) == []
    save_all(savers, values, 2)  # the error is raised once; the saver goes on
    assert list_steps(tmp_path) == [2]


def test_rows_that_nobody_saved_are_a_gap_too(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, 0, SingleRankGroup(), 1, lambda kind, details: None)
    weight = StatePiece("weight", "param", 0, 12, torch.zeros(12))
    saver.save(
        {"step": 1},
        {"weight": ((4, 3), "float32")},
        [weight, StatePiece("weight", "row_square", 0, 3, torch.zeros(3))],
        1,
    )
    with pytest.raises(ValueError, match=r"\[3, 4\) of row_square of parameter weight"):
        saver.wait()


def test_an_error_of_the_group_surfaces_at_the_next_save(tmp_path: Path) -> None:
    class Broken(SingleRankGroup):
        def broadcast_object(self, obj: Any) -> Any:
            raise ConnectionError("rank 1 is gone")

    saver = CheckpointSaver(tmp_path, 0, Broken(), 1, lambda kind, details: None)
    saver.save({"step": 1}, SHAPES, cut(state(), 0, 1), 1)
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        saver.save({"step": 2}, SHAPES, cut(state(), 0, 1), 1)
    with pytest.raises(ValueError, match="JSON"):
        saver.save({"step": 3, "loss": float("nan")}, SHAPES, [], 1)


def test_one_rank_that_cannot_write_fails_the_save_on_all(tmp_path: Path) -> None:
    folder, blocked = tmp_path / "checkpoints", tmp_path / "file"
    blocked.write_text("in the way")
    savers, events = make_savers(folder, 3)
    save_all(savers, state(1), 10)
    savers[1].folder = blocked / "checkpoints"  # the disk of rank 1 alone breaks
    save_all(savers, state(2), 20)
    assert [saver.outcome is not None and saver.outcome.rank for saver in savers] == [1, 1, 1]
    kind, details = events[-1]
    assert kind == "checkpoint_failed"
    assert details["rank"] == 1
    assert "rank-00001.safetensors" in details["reason"]
    assert os.listdir(folder) == ["step-00000010"]
    savers[1].folder = folder
    save_all(savers, state(2), 20)
    assert list_steps(folder) == [20, 10]


def test_ranks_that_do_not_share_a_disk_are_told_so(tmp_path: Path) -> None:
    savers, events = make_savers(tmp_path / "a", 2)
    savers[1].folder = tmp_path / "b"
    save_all(savers, state(), 1)
    assert events[0][0] == "checkpoint_failed"
    assert "all nodes share" in events[0][1]["reason"]
    assert os.listdir(tmp_path / "a") == [] == os.listdir(tmp_path / "b")


def test_a_programming_error_on_one_rank_surfaces_there_and_blocks_nobody(tmp_path: Path) -> None:
    savers, events = make_savers(tmp_path, 2)
    for rank, saver in enumerate(savers):
        odd = [StatePiece("norm", "phase", 0, 5, torch.zeros(5, dtype=torch.complex64))] if rank == 1 else []
        saver.save({"step": 1}, SHAPES, cut(state(), rank, 2) + odd, 1)
    savers[0].wait()
    with pytest.raises(KeyError, match="complex64"):
        savers[1].wait()
    assert [(kind, details["rank"]) for kind, details in events] == [("checkpoint_failed", 1)]
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 3 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root; the file-size-limit test covers the same path")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def big_pieces(rank: int, value: float, mib: int = 1) -> tuple[Parameters, list[StatePiece]]:
    size = mib << 18
    return {"p": ((2 * size,), "float32")}, [
        StatePiece("p", "param", rank * size, (rank + 1) * size, torch.full((size,), value))
    ]


def save_big(savers: list[CheckpointSaver], step: int, value: float, mib: int) -> None:
    for rank, saver in enumerate(savers):
        parameters, pieces = big_pieces(rank, value, mib)
        saver.save({"step": step}, parameters, pieces, 1)
    for saver in savers:
        saver.wait()


def test_a_full_disk_loses_nothing_and_frees_its_space(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    savers, events = make_savers(folder, 2, keep=2)
    save_big(savers, 10, 1.0, 1)  # 2 of 3 MiB
    free = shutil.disk_usage(small_disk).free
    save_big(savers, 20, 2.0, 1)  # there is room for about one of the two files
    kind, details = events[-1]
    assert kind == "checkpoint_failed"
    assert details["step"] == 20
    assert "No space left" in details["reason"]
    assert all(saver.outcome is not None and not saver.outcome.saved for saver in savers)
    assert os.listdir(folder) == ["step-00000010"]
    assert shutil.disk_usage(small_disk).free == free
    assert find_newest_valid(folder, None, lambda kind, details: None) is not None
    shutil.rmtree(step_folder(folder, 10))  # somebody makes room, and saving goes on
    save_big(savers, 30, 3.0, 1)
    assert events[-1][0] == "checkpoint_saved"
    assert list_steps(folder) == [30]


def test_a_file_size_limit_fails_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    savers, events = make_savers(folder, 2)
    save_big(savers, 10, 1.0, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, hard))
    try:
        save_big(savers, 20, 2.0, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert events[-1][0] == "checkpoint_failed"
    assert "File too large" in events[-1][1]["reason"]
    assert os.listdir(folder) == ["step-00000010"]


def test_a_folder_that_cannot_be_made_is_a_failed_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    events = save_alone(tmp_path / "file" / "checkpoints", 1)
    assert events[0][0] == "checkpoint_failed"
    assert "Not a directory" in events[0][1]["reason"]


def kill_writers(placement: Placement, folder: str) -> list[int]:
    """Saves, in a child that is killed: how many hidden folders each round leaves."""
    place, size, left = Path(folder), 6 << 20, []
    torch.set_num_threads(1)
    for attempt in range(1, 5):
        child = os.fork()
        if child == 0:
            saver = CheckpointSaver(place, 0, SingleRankGroup(), 2, lambda kind, details: None)
            step = max(list_steps(place), default=0)
            while True:
                step += 1
                piece = StatePiece("p", "param", 0, size, torch.full((size,), float(step)))
                saver.save({"step": step}, {"p": ((size,), "float32")}, [piece], attempt)
                saver.wait()
        deadline = time.monotonic() + 20
        while not list(place.glob(f"*.attempt-{attempt}/rank-00000.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.04 * (attempt - 1))  # the first round dies in the middle of its first file, the others anywhere
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left.append(len(list(place.glob(f"*.attempt-{attempt}"))))
    return left


def test_killed_writers_leave_only_whole_checkpoints(tmp_path: Path) -> None:
    left = run_ranks(kill_writers, 1, folder=str(tmp_path))[0]
    assert 1 in left, "no writer was killed in the middle of a save"
    steps = list_steps(tmp_path)
    assert steps
    for step in steps:  # every folder with the name of a step is whole: killed saves only leave hidden ones
        checkpoint, reason = open_and_verify(step_folder(tmp_path, step))
        assert checkpoint is not None, reason
        out = torch.zeros(6 << 20)
        checkpoint.read_into("p", "param", 0, 6 << 20, out)
        assert bool((out == step).all())
    values = torch.ones(4)
    saver = CheckpointSaver(tmp_path, 0, SingleRankGroup(), 2, lambda kind, details: None)
    saver.save({"step": steps[0] + 1}, {"p": ((4,), "float32")}, [StatePiece("p", "param", 0, 4, values)], 7)
    saver.close()
    assert hidden(tmp_path) == []
