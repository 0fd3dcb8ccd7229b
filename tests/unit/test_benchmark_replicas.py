"""The benchmarks of commits and replicas in miniature: what they compare is done, and judged by what has to be."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import replicas, slot_to_slot
from benchmarks.replicas import GRADIENTS, ITEM_BYTES, PART, STATE
from phalanx.core.placement import Placement
from tests.helpers import run_ranks


def commits(placement: Placement, folder: str, way: str) -> Any:
    return replicas.commits(placement, folder, ["127.0.0.1", "127.0.0.1"], way, PART, 2)


@pytest.mark.parametrize("way", [GRADIENTS, STATE])
def test_each_step_is_committed_on_both_nodes(way: str, tmp_path: Path) -> None:
    both = run_ranks(commits, 2, folder=str(tmp_path), way=way)
    assert [len(each) for each in both] == [2, 2]
    # Nothing of it leaves this machine, whatever else it sends.
    assert all(seconds > 0 and sent < ITEM_BYTES[way] * PART / 2 for each in both for seconds, sent in each)


def test_bytes_are_judged_by_what_has_to_be_sent() -> None:
    must = ITEM_BYTES[GRADIENTS] * PART
    row, check = replicas.judged(GRADIENTS, [[(0.2, must), (0.4, must)], [(0.2, 1.4 * must)]], PART + 7, 1000.0)
    assert row["a step's replica, s"] == pytest.approx(0.3)
    assert check.value == pytest.approx(3.4 / 3) and not check.holds


def test_an_update_is_measured_in_place_and_from_slot_to_slot() -> None:
    row = slot_to_slot.measure(1, 1)
    assert all(row[f"{way}, ms"] > 0 for way in (slot_to_slot.IN_PLACE, slot_to_slot.SLOT_TO_SLOT, slot_to_slot.COPY))
    assert row["slot to slot over in place"] == pytest.approx(row["from slot to slot, ms"] / row["in place, ms"])
