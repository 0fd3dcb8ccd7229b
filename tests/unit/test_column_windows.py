"""Pieces of columns: saved by ranks that hold a matrix cut by its last dim, read in any other division."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint.disk import files
from phalanx.checkpoint.disk.files import Window, covers, iter_rectangles, lift, project, split_bands
from phalanx.checkpoint.disk.load import MANIFEST, Checkpoint, find_missing, step_folder
from phalanx.checkpoint.disk.save import StatePiece
from phalanx.core.errors import CheckpointError
from tests.unit.checkpoints import make_savers

ROWS, COLUMNS = 5, 12
SHAPES = {"down": ((ROWS, COLUMNS), "float32"), "norm": ((3,), "float32")}
WHOLE = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
NORM = StatePiece("norm", "param", 0, 3, torch.ones(3))


def windows(most: int = COLUMNS) -> st.SearchStrategy[Window]:
    return st.tuples(st.integers(0, most - 1), st.integers(1, most)).filter(lambda pair: pair[0] < pair[1])


@given(windows(), windows(), st.data())
def test_a_run_of_a_window_is_a_run_of_each_of_its_bands(one: Window, other: Window, data: st.DataObject) -> None:
    elements = WHOLE[:, one[0] : one[1]].flatten()
    stop = data.draw(st.integers(0, elements.numel()))
    start = data.draw(st.integers(0, stop))
    inside = set(elements[start:stop].tolist())
    seen = []
    for band in split_bands([other], one):
        assert covers(one, band)
        assert covers(other, band) == (other[0] < band[1] and band[0] < other[1])
        mine = WHOLE[:, band[0] : band[1]].flatten()
        low, high = project(start, one, band), project(stop, one, band)
        assert set(mine[low:high].tolist()) == inside & set(mine.tolist())
        assert [elements[lift(at, band, one)] for at in range(low, high)] == mine[low:high].tolist()
        seen += mine[low:high].tolist()
    assert sorted(seen) == sorted(inside)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 7), st.integers(1, 3))
def test_rectangles_are_all_elements_in_order(start: int, stop: int, width: int, most: int) -> None:
    found = []
    for at, rows, columns in iter_rectangles(start, stop, width, most):
        assert rows <= most and (rows == 1 or columns == width)
        assert at % width + columns <= width
        found += range(at, at + (rows - 1) * width + columns)
    assert found == list(range(start, stop))


def cut_pieces(edges: list[int], shares: int) -> list[list[StatePiece]]:
    """Each window by `shares` ranks, each with an even part of it."""
    found = []
    for window in itertools.pairwise(edges):
        flat = WHOLE[:, window[0] : window[1]].reshape(-1)
        cuts = [flat.numel() * share // shares for share in range(shares + 1)]
        found += [
            [StatePiece("down", "param", low, high, flat[low:high], window)] for low, high in itertools.pairwise(cuts)
        ]
    return found


def save(folder: Path, by_rank: list[list[StatePiece]]) -> Path:
    savers, _ = make_savers(folder, len(by_rank))
    for rank, (saver, pieces) in enumerate(zip(savers, by_rank, strict=True)):
        saver.save({"step": 1}, SHAPES, [*pieces, *([NORM] if rank == 0 else [])], 1)  # type: ignore[arg-type]
    for saver in savers:
        saver.wait()
    return step_folder(folder, 1)


@settings(max_examples=25)
@given(st.data())
def test_columns_are_read_in_any_other_division(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    inner = data.draw(st.sets(st.integers(1, COLUMNS - 1), max_size=2))
    path = save(
        tmp_path_factory.mktemp("saved"), cut_pieces([0, *sorted(inner), COLUMNS], data.draw(st.integers(1, 2)))
    )
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    asked = data.draw(st.none() | windows())
    flat = WHOLE[:, slice(*asked)].reshape(-1) if asked is not None else WHOLE.flatten()
    stop = data.draw(st.integers(0, flat.numel()))
    start = data.draw(st.integers(0, stop))
    out = torch.full((stop - start + 2,), float("nan"))
    checkpoint.read_into("down", "param", start, stop, out[1:-1], asked)
    assert torch.equal(out[1:-1], flat[start:stop])
    assert out[[0, -1]].isnan().all()


def test_long_columns_are_read_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_ELEMENTS", 2 * COLUMNS)
    checkpoint = Checkpoint(save(tmp_path, cut_pieces([0, COLUMNS], 1)))
    out = torch.empty(ROWS * 4)
    checkpoint.read_into("down", "param", 0, ROWS * 4, out, (3, 7))
    assert torch.equal(out.view(ROWS, 4), WHOLE[:, 3:7])


def test_only_a_checkpoint_with_windows_is_of_the_newer_version(tmp_path: Path) -> None:
    plain = StatePiece("down", "param", 0, ROWS * COLUMNS, WHOLE.flatten())
    assert json.loads((save(tmp_path / "plain", [[plain]]) / MANIFEST).read_text())["version"] == 1
    assert json.loads((save(tmp_path / "cut", cut_pieces([0, 4, COLUMNS], 1)) / MANIFEST).read_text())["version"] == 2


def test_columns_that_nobody_saved_are_missed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no rank saved elements \[0, 20\) of param of parameter down"):
        save(tmp_path, cut_pieces([0, 4, COLUMNS], 1)[1:])
    spans = [(0, 2 * 4, (0, 4)), (0, ROWS * 8, (4, COLUMNS))]
    assert find_missing(spans, 0, 2 * COLUMNS, (0, COLUMNS)) is None
    assert find_missing(spans, 0, 2 * COLUMNS + 1, (0, COLUMNS)) == ((8, 9), (0, 4))


def test_a_row_too_many_is_refused_when_it_is_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint(save(tmp_path, cut_pieces([0, 4, COLUMNS], 1)))
    with pytest.raises(CheckpointError, match=r"elements \[20, 24\) in columns 0 to 4"):
        checkpoint.read_into("down", "param", 0, (ROWS + 1) * COLUMNS, torch.empty((ROWS + 1) * COLUMNS))
