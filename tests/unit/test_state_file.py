"""State files: what is committed, what is torn, and what a run may go on from, whatever has been killed when."""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import CheckpointError, RunError
from phalanx.recovery import inventory, state_file
from phalanx.recovery.state_file import StateFile, StateFileMetadata, StateFileOwner
from tests.helpers import ROOT, find_committed_step, find_newest_checkpoint, is_alive

RUN = state_file.digest_json("a run")
INDEX = {"tensors": [["w", "param", "F32", [4], 0]], "pieces": []}


def made(folder: Path, generation: int = 1, rank: int = 0, world: int = 1, run: bytes = RUN) -> StateFile:
    return state_file.create_state_file(folder, StateFileOwner(generation, rank, world, run, rank, world), INDEX, 16)


def commit(file: StateFile, slot: int, step: int) -> None:
    file.invalidate(slot)
    file.commit(slot, step, file.make_header(slot, {"step": step}))


def test_a_new_file_holds_nothing_and_is_the_users_alone(tmp_path: Path) -> None:
    file = made(tmp_path, generation=3, rank=1, world=2)
    path = tmp_path / "state-000003-00001"
    assert file.metadata == state_file.read_metadata(path)
    assert (file.metadata.generation, file.metadata.rank, file.metadata.world, file.metadata.steps) == (3, 1, 2, {})
    assert file.index() == INDEX
    assert path.stat().st_mode & 0o777 == 0o600
    assert not any(file.map[file.slot_offset(0) : file.slot_offset(1) + 16])


def test_what_is_committed_is_found_by_others_with_its_header(tmp_path: Path) -> None:
    file = made(tmp_path)
    file.map[file.slot_offset(1) : file.slot_offset(1) + 4] = b"four"
    commit(file, 1, 7)
    commit(file, 0, 8)
    other = StateFile(file.metadata.path)
    assert other.metadata.steps == {7: 1, 8: 0}
    assert [other.header(slot)["step"] for slot in (1, 0)] == [7, 8]
    assert other.map[other.slot_offset(1) : other.slot_offset(1) + 4] == b"four"
    other.map[other.slot_offset(1)] = 0  # a reader changes nothing but its own copy
    assert file.map[file.slot_offset(1)] == ord("f")
    file.invalidate(1)
    assert StateFile(file.metadata.path).metadata.steps == {8: 0}
    with pytest.raises(CheckpointError, match=r"has 70000 bytes.*resilience\.in_memory_checkpoints=false"):
        file.commit(1, 9, b" " * 70_000)
    assert file.slot_step(1) == state_file.VOID


def test_of_three_slots_each_has_its_word_and_its_header(tmp_path: Path) -> None:
    file = state_file.create_state_file(tmp_path, StateFileOwner(1, 0, 1, RUN, 0, 1), INDEX, 16, slots=3)
    for slot, step in enumerate((4, 6, 7)):
        file.map[file.slot_offset(slot) : file.slot_offset(slot) + 4] = b"%04d" % step
        commit(file, slot, step)
    other = StateFile(file.metadata.path)
    assert other.metadata.steps == {4: 0, 6: 1, 7: 2} and other.metadata.way == 0
    assert [other.header(slot)["step"] for slot in range(3)] == [4, 6, 7]
    assert [bytes(other.read_bytes(other.slot_offset(slot), 4)) for slot in range(3)] == [b"0004", b"0006", b"0007"]
    assert file.metadata.path.stat().st_size == other.metadata.end == state_file.state_file_bytes(INDEX, 16, 3)
    file.invalidate_all()
    assert StateFile(file.metadata.path).metadata.steps == {} and StateFile(file.metadata.path).metadata.way == 1


@pytest.mark.parametrize("what", ["empty", "torn", "version", "slots", "shorter", "open to others", "link", "index"])
def test_what_is_no_whole_state_file_is_refused(tmp_path: Path, what: str) -> None:
    file = made(tmp_path)
    path = file.metadata.path
    raw = bytearray(path.read_bytes())
    match what:
        case "empty":
            path.write_bytes(b"")
        case "torn":  # killed while it was made: the magic word is written last
            path.write_bytes(bytes(8) + raw[8:])
        case "version":
            path.write_bytes(raw[:8] + b"\x09" + raw[9:])
        case "slots":  # the last number of the first page
            at = state_file._FIXED.size - 4
            path.write_bytes(raw[:at] + b"\x09" + raw[at + 1 :])
        case "shorter":
            path.write_bytes(raw[:-4096])
        case "open to others":
            path.chmod(0o644)
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        case "index":
            path.write_bytes(raw.replace(b'"param"', b'"other"'))
    with pytest.raises(CheckpointError, match="remove it; the run then resumes from its newest checkpoint"):
        StateFile(path).index()
    if what in ("shorter", "index"):  # seen by who maps it
        return
    assert state_file.read_metadata(path) is None
    assert inventory.read_state_files(tmp_path, RUN) == []


@pytest.fixture
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_where_there_is_no_room_nothing_is_left(tmp_path: Path, small_files: None) -> None:
    with pytest.raises(OSError, match="File too large"):
        made(tmp_path)
    assert list(tmp_path.iterdir()) == []


def facts(generation: int, rank: int, world: int, words: tuple[int, int]) -> StateFileMetadata:
    path = Path(state_file.state_file_name(generation, rank))
    return StateFileMetadata(path, generation, rank, world, 0, 0, 0, b"", RUN, words, rank, world, 0)


def test_the_newest_step_that_all_ranks_hold(tmp_path: Path) -> None:
    kept = find_newest_checkpoint([facts(1, 0, 2, (6, 5)), facts(1, 1, 2, (4, 5))])
    assert kept is not None
    assert kept.step == 5
    assert [(file.rank, file.path) for file in kept.files] == [(0, "state-000001-00000"), (1, "state-000001-00001")]
    assert find_newest_checkpoint([facts(1, 0, 2, (6, 5)), facts(1, 1, 2, (4, -1))]) is None
    assert find_newest_checkpoint([facts(1, 0, 2, (6, 5))]) is None  # a rank is missing
    assert find_newest_checkpoint([facts(1, 0, 2, (6, 5)), facts(1, 1, 3, (6, 5))]) is None
    assert find_newest_checkpoint([]) is None


def test_of_two_generations_the_newer_step_counts_and_of_one_step_the_newer_generation() -> None:
    old = [facts(1, rank, 2, (8, 7)) for rank in (0, 1)]
    taken_over = [facts(2, 0, 1, (8, -1))]
    assert [file.path for file in find_newest_checkpoint([*old, *taken_over]).files] == ["state-000002-00000"]  # type: ignore[union-attr]
    unfinished = [facts(2, 0, 1, (-1, -1))]
    assert len(find_newest_checkpoint([*old, *unfinished]).files) == 2  # type: ignore[union-attr]


def test_what_is_not_gone_on_from_is_removed(tmp_path: Path) -> None:
    for rank in (0, 1):
        commit(made(tmp_path, 1, rank, 2), 0, 5)
    made(tmp_path, 2)  # that nobody came to fill
    made(tmp_path, 3, run=state_file.digest_json("another run in the same folder"))
    (tmp_path / "lock").touch()
    assert find_committed_step(tmp_path, RUN) == 5
    kept = find_newest_checkpoint(inventory.read_state_files(tmp_path, RUN))
    assert kept is not None
    assert kept.step == 5
    inventory.remove_unused_files(tmp_path, {file.path for file in kept.files})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "lock", "state-000001-00000", "state-000001-00001"
    ]  # fmt: skip
    inventory.remove_unused_files(tmp_path, ())
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_run_is_known_by_how_its_records_begin(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    nothing = state_file.compute_run_id(events)
    events.write_text('{"kind": "run_started", "time": 1}\n')
    begun = state_file.compute_run_id(events)
    with open(events, "a") as file:
        file.write('{"kind": "restarted"}\n')
    assert state_file.compute_run_id(events) == begun != nothing
    events.write_text('{"kind": "run_started", "time": 2}\n')
    assert state_file.compute_run_id(events) != begun


def test_nothing_is_read_while_ranks_of_before_live(tmp_path: Path) -> None:
    """Of a rank that is killed, even while a process that it has started lives on."""
    script = (
        "import os, subprocess, sys; from pathlib import Path; from phalanx.recovery.inventory import "
        "hold_liveness_lock; hold_liveness_lock(Path(sys.argv[1])); "
        "child = subprocess.Popen(['sleep', '60'], close_fds=False); "
        "print(child.pid, flush=True); child.wait()"
    )
    rank = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    try:
        with pytest.raises(RunError, match="are still alive and hold"):
            inventory.wait_for_writers(tmp_path, timeout_s=0.05)
        rank.kill()
        inventory.wait_for_writers(tmp_path)
        assert is_alive(child)
    finally:
        rank.kill()
        rank.wait()
        os.kill(child, 9)


# ------------------------------------------------------------------------------------------------------ the protocol


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=200))
def test_whenever_all_are_killed_they_hold_a_step_in_common(world: int, turns: list[int]) -> None:
    """Ranks go on in any order, one instruction at a time: void, write (a turn without effect here), commit, confirm;
    who has confirmed a step waits for all others to have."""
    words = [[0, -1] for _ in range(world)]
    done = [0] * world  # confirmed steps
    phase = [0] * world
    for turn in turns:
        rank = turn % world
        step = done[rank] + 1
        if phase[rank] == 0:
            if min(done) < done[rank]:
                continue  # it waits for the confirmation of all
            words[rank][step % 2] = -1
        elif phase[rank] == 2:
            words[rank][step % 2] = step
        elif phase[rank] == 3:
            done[rank] = step
        phase[rank] = (phase[rank] + 1) % 4
        found = find_newest_checkpoint(
            [facts(1, each, world, (words[each][0], words[each][1])) for each in range(world)]
        )
        committed = [max(each) for each in words]
        assert found is not None
        assert found.step >= min(done)
        assert found.step == min(committed)


def test_a_file_that_is_replaced_by_the_same_attempt_is_new(tmp_path: Path) -> None:
    first = made(tmp_path)
    commit(first, 0, 3)
    second = made(tmp_path)
    assert second.metadata.steps == {}
    assert os.stat(second.metadata.path).st_nlink == 1
    assert replace(second.metadata, words=(0, 0)) == replace(first.metadata, words=(0, 0))


def test_what_was_not_there_when_training_went_back_is_removed(tmp_path: Path) -> None:
    """Who was there says how often it has made void what it held; attempts before and after have seen other times."""
    replicas = tmp_path / inventory.REPLICAS
    away, there = made(tmp_path, generation=1, rank=0), made(tmp_path, generation=1, rank=1)
    after, replica = made(tmp_path, generation=4, rank=0), made(replicas, generation=2, rank=1)
    for file in (away, there, after, replica):
        commit(file, 0, 50)
    there.invalidate_all()
    commit(there, 0, 41)
    other = made(tmp_path, generation=1, rank=2, run=state_file.digest_json("another run"))
    assert inventory.remove_rolled_back(tmp_path, RUN, []) == []
    # Training went back in attempt 3, whose ranks had taken up the files of attempt 1.
    passed = inventory.remove_rolled_back(tmp_path, RUN, [3])
    assert passed == [away.metadata.path, replica.metadata.path]
    left = [file.metadata.path for file in (there, after, other)]
    assert inventory.list_state_files(tmp_path) == sorted(left) and inventory.list_state_files(replicas) == []
    # And in attempt 5 once more: nobody says that he was there.
    assert inventory.remove_rolled_back(tmp_path, RUN, [3, 5]) == [there.metadata.path, after.metadata.path]


# ------------------------------------------------------------------------------------------------------------- damage


@given(st.integers(0, 1 << 30), st.booleans())
def test_no_flipped_bit_is_taken_for_what_was_written(draw: int, first_page: bool) -> None:
    """Wherever it is: what agents see of the file loses steps, or whoever reads it finds the damage; a step that was
    never committed is not seen, and the slot that is not damaged can still be gone on from."""
    with tempfile.TemporaryDirectory() as name:
        file = made(Path(name))
        for slot, step in enumerate((7, 8)):
            file.map[file.slot_offset(slot) : file.slot_offset(slot) + 16] = bytes([step] * 16)
            commit(file, slot, step)
        raw = bytearray(file.map[:])
        bit = draw % (8 * (state_file.WAY + 8 if first_page else len(raw)))
        raw[bit // 8] ^= 1 << bit % 8
        file.metadata.path.write_bytes(raw)
        facts = state_file.read_metadata(file.metadata.path)
        if facts is None:
            assert len(inventory.find_damage(Path(name))) == 1
            return
        assert facts.steps.items() <= {7: 0, 8: 1}.items()
        assert bool(inventory.find_damage(Path(name))) == (len(facts.steps) < 2)
        found = StateFile(file.metadata.path)
        whole = [step for step in found.metadata.steps if found.find_damage(step) is None]
        for step in whole:
            slot = found.metadata.steps[step]
            assert bytes(found.read_bytes(found.slot_offset(slot), 16)) == bytes([step] * 16)
            assert found.header(slot)["step"] == step and found.index() == INDEX
        in_slots = bit // 8 >= found.slot_offset(0) or state_file.HEADERS[0] <= bit // 8 < state_file.INDEX
        assert len(whole) >= 1 or not in_slots


def test_what_is_damaged_is_void_from_then_on(tmp_path: Path) -> None:
    file = made(tmp_path)
    for slot, step in enumerate((7, 8)):
        commit(file, slot, step)
    file.map[file.slot_offset(1) + 3] ^= 4
    assert "checksum of step 8" in (state_file.invalidate_damaged_step(file.metadata.path, 8) or "")
    assert state_file.invalidate_damaged_step(file.metadata.path, 7) is None
    assert StateFile(file.metadata.path).metadata.steps == {7: 0}
    assert "no longer holds step 8" in (StateFile(file.metadata.path).find_damage(8) or "")
    os.truncate(file.metadata.path, 4096)
    assert "shorter" in (state_file.invalidate_damaged_step(file.metadata.path, 7) or "")
    assert not file.metadata.path.exists()


def test_one_that_is_being_made_is_not_damaged(tmp_path: Path) -> None:
    path = made(tmp_path).metadata.path
    path.write_bytes(bytes(8) + path.read_bytes()[8:])
    assert inventory.find_damage(tmp_path) == []
