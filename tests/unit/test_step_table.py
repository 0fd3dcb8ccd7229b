"""Tables that steps change and go by: which steps count, and what a thread that commits a step is told."""

import threading
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from phalanx.comm import collectives
from phalanx.core.errors import ConfigError
from phalanx.workload.step_table import StepTable, decode_table, encode_table


def outcome(skipped: bool) -> Any:
    return SimpleNamespace(get=lambda: (1.0, float(skipped)))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> StepTable:
    """A table of the numbers of the steps so far, with one rank."""
    monkeypatch.setattr(collectives, "all_reduce", lambda *_: SimpleNamespace(wait=lambda: None))
    mesh = cast(Any, mock.Mock())
    return StepTable(mesh, torch.zeros(0), lambda before, numbers: torch.cat((before, numbers)))


def step(table: StepTable, number: int, skipped: bool = False) -> list[float]:
    """A step that goes by what is returned."""
    went_by: list[float] = table.settle().tolist()
    table.end(number, torch.full((1,), float(number)))
    table.note_outcome(outcome(skipped))
    return went_by


def test_a_skipped_step_leaves_the_table_as_it_was(table: StepTable) -> None:
    assert [step(table, number, skipped=number in (2, 3)) for number in (1, 2, 3, 4, 5)] == [[], [1], [1], [1], [1, 4]]
    assert table.after(5, None).tolist() == [1, 4, 5]
    table.settle()  # as before an evaluation; the next step does so again
    assert step(table, 6) == [1, 4, 5]


def test_a_step_is_committed_while_the_next_one_runs(table: StepTable) -> None:
    step(table, 1)
    step(table, 2, skipped=True)
    assert table.settle().tolist() == [1]
    assert table.after(2, outcome(True)).tolist() == [1]
    assert table.after(1, outcome(False)).tolist() == [1]
    step(table, 3)
    assert table.after(2, outcome(True)).tolist() == [1]
    assert table.after(3, outcome(False)).tolist() == [1, 3]
    found: list[list[float]] = []
    early = threading.Thread(target=lambda: found.append(table.after(4, outcome(False)).tolist()))
    early.start()  # before the passes have ended
    step(table, 4)
    early.join(10)
    assert found == [[1, 3, 4]]
    numbers = table.find(4)
    assert numbers is not None and numbers.tolist() == [4]
    assert table.find(2) is None


def test_it_begins_with_what_a_checkpoint_has(table: StepTable) -> None:
    step(table, 1)
    table.restore(torch.tensor([7.0]))
    assert step(table, 5) == [7]
    assert table.after(5, None).tolist() == [7, 5]
    table.restore(None)
    assert step(table, 1) == []


def test_bits_go_through_a_header() -> None:
    values = torch.tensor([[0.1, 1e-42, torch.inf], [0.0, -0.0, 3e38]])
    found = decode_table(encode_table(values), torch.zeros(2, 3), "x")
    assert torch.equal(found.view(torch.int32), values.view(torch.int32))
    for bad in ("no base64", encode_table(values[:1]), encode_table(torch.zeros(1 << 12, 3)), 5, None):
        with pytest.raises(ConfigError, match="x does not hold a table of 2 x 3, so it is damaged or"):
            decode_table(bad, values, "x")
