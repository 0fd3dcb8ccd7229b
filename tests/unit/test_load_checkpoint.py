"""Reading checkpoints: any cut of what any ranks saved, and never a damaged one."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.disk.load import (
    MANIFEST,
    Checkpoint,
    agree_on_newest,
    find_gap,
    find_newest_valid,
    open_and_verify,
    step_folder,
)
from phalanx.checkpoint.disk.save import StatePiece
from phalanx.core.errors import CheckpointError
from tests.unit.checkpoints import (
    Events,
    Room,
    ThreadGroup,
    assert_holds,
    flip,
    make_savers,
    save_all,
    save_alone,
    state,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_are_kept_and_converted_on_reading(tmp_path: Path, dtype: torch.dtype) -> None:
    values = state(dtype=dtype)
    savers, _ = make_savers(tmp_path, 2)
    save_all(savers, values, 1)
    checkpoint = Checkpoint(step_folder(tmp_path, 1))
    assert_holds(checkpoint, values, 3)
    wide = torch.zeros(77, dtype=torch.float64)
    checkpoint.read_into("layers.0.weight", "param", 0, 77, wide)
    assert torch.equal(wide, values["layers.0.weight", "param"].double())


def test_reads_into_a_parameter_and_a_strided_view(tmp_path: Path) -> None:
    values = state()
    save_alone(tmp_path, 1)
    checkpoint = Checkpoint(step_folder(tmp_path, 1))
    weight = torch.nn.Parameter(torch.zeros(7, 11))
    checkpoint.read_into("layers.0.weight", "param", 0, 77, weight.view(-1))
    assert torch.equal(weight.detach().view(-1), values["layers.0.weight", "param"])
    wide = torch.zeros(10)
    checkpoint.read_into("norm", "param", 0, 5, wide[::2])
    assert torch.equal(wide[::2], values["norm", "param"])
    assert not wide[1::2].any()


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: (min(p), max(p))), max_size=6),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_first_gap_equals_counting_elements(spans: list[tuple[int, int]], start: int, stop: int) -> None:
    covered = {element for low, high in spans for element in range(low, high)}
    missing = [element for element in range(start, stop) if element not in covered]
    gap = find_gap(spans, start, stop)
    assert (gap is None) == (not missing)
    if gap is not None:
        assert gap[0] == missing[0]
        assert start <= gap[0] < gap[1] <= stop
        assert covered.isdisjoint(range(*gap))


def test_reading_what_is_not_there_names_parameter_and_range(tmp_path: Path) -> None:
    save_alone(tmp_path, 1)
    checkpoint = Checkpoint(step_folder(tmp_path, 1))
    with pytest.raises(CheckpointError, match=r"\[5, 9\) of param of parameter norm"):
        checkpoint.read_into("norm", "param", 3, 9, torch.zeros(6))
    with pytest.raises(CheckpointError, match="param of parameter other"):
        checkpoint.read_into("other", "param", 0, 1, torch.zeros(1))


def test_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    savers, _ = make_savers(tmp_path, 2)
    for rank, saver in enumerate(savers):
        piece = StatePiece("p", "param", 3 * rank, 3 * rank + 3, torch.randn(3))
        saver.save({"step": 1, "ratio": 1e-5}, {"p": ((6,), "float32")}, [piece], 1)
    for saver in savers:
        saver.wait()
    path = step_folder(tmp_path, 1)
    assert open_and_verify(path)[1] is None
    refused = 0
    for file in sorted(path.iterdir()):
        for position in range(file.stat().st_size):
            for mask in (0x01, 0x20, 0x80):  # 0x20 changes the case of letters, which JSON may not care about
                flip(file, position, mask)
                checkpoint, reason = open_and_verify(path)
                assert checkpoint is None, (file.name, position)
                assert file.name in str(reason)
                flip(file, position, mask)
                refused += 1
    assert refused == 3 * sum(file.stat().st_size for file in path.iterdir()) > 1500
    assert open_and_verify(path)[1] is None


@pytest.mark.parametrize("file", ["rank-00001.safetensors", MANIFEST])
@pytest.mark.parametrize("damage", ["missing", "short", "long", "empty"])
def test_missing_and_torn_files_fall_back_and_stay_as_they_are(tmp_path: Path, file: str, damage: str) -> None:
    savers, _ = make_savers(tmp_path, 3)
    save_all(savers, state(1), 10)
    save_all(savers, state(2), 20)
    victim = step_folder(tmp_path, 20) / file
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes({"short": content[:-1], "long": content + b"x", "empty": b""}[damage])
    before = {entry.name: entry.stat().st_size for entry in victim.parent.iterdir()}
    events: Events = []
    checkpoint = find_newest_valid(tmp_path, None, lambda kind, details: events.append((kind, details)))
    assert checkpoint is not None
    assert checkpoint.header["step"] == 10
    assert_holds(checkpoint, state(1))
    assert [(kind, details["step"]) for kind, details in events] == [("checkpoint_refused", 20)]
    assert file in events[0][1]["reason"]
    assert str(victim.parent) in events[0][1]["reason"]
    assert {entry.name: entry.stat().st_size for entry in victim.parent.iterdir()} == before


def test_manifests_of_other_formats_are_refused(tmp_path: Path) -> None:
    save_alone(tmp_path, 1)
    manifest = step_folder(tmp_path, 1) / MANIFEST
    for content in (b"[]", b"{}", b'{"format":"phalanx-pieces","version":2}', b"\xff\xfe", b"[" * 100_000):
        manifest.write_bytes(content)
        with pytest.raises(CheckpointError, match=MANIFEST):
            Checkpoint(manifest.parent)


def test_check_can_refuse(tmp_path: Path) -> None:
    save_alone(tmp_path, 1)
    save_alone(tmp_path, 2)
    events: Events = []
    found = find_newest_valid(
        tmp_path, lambda c: c.header["step"] < 2, lambda kind, details: events.append((kind, details))
    )
    assert found is not None
    assert found.header["step"] == 1
    assert len(events) == 1
    assert find_newest_valid(tmp_path, lambda c: False, lambda kind, details: None) is None
    assert find_newest_valid(tmp_path / "nothing", None, lambda kind, details: None) is None


def test_ranks_agree_although_one_of_them_alone_sees_the_damage(tmp_path: Path) -> None:
    savers, _ = make_savers(tmp_path, 3)
    save_all(savers, state(1), 10)
    save_all(savers, state(2), 20)
    flip(step_folder(tmp_path, 20) / "rank-00002.safetensors", -1)  # with 3 readers only rank 2 reads this file
    room = Room(3)
    events: list[Events] = [[], [], []]

    def load(rank: int) -> int:
        sink = lambda kind, details: events[rank].append((kind, details))  # noqa: E731
        found = agree_on_newest(tmp_path, rank, ThreadGroup(room, rank), None, sink)
        assert found is not None
        return int(found.header["step"])

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(load, range(3))) == [10, 10, 10]
    assert [len(of_rank) for of_rank in events] == [1, 0, 0]


def test_verify_shares_the_files(tmp_path: Path) -> None:
    savers, _ = make_savers(tmp_path, 3)
    save_all(savers, state(), 1)
    checkpoint = Checkpoint(step_folder(tmp_path, 1))
    flip(checkpoint.path / "rank-00001.safetensors", 100)
    checkpoint.verify(0, 2)
    checkpoint.verify(5, 6)
    for rank, world in ((1, 2), (1, 3), (0, 1)):
        with pytest.raises(CheckpointError, match="rank-00001"):
            checkpoint.verify(rank, world)
