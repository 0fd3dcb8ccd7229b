"""The benchmark of two-level collectives in miniature, on this machine's loopback."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, hierarchical
from benchmarks.hierarchical import LAYOUTS, OPERATIONS, OURS, QUICK, parts_through_a_link
from phalanx.core.placement import Placement
from tests.helpers import run_ranks


def exchange(placement: Placement) -> list[Any]:
    return hierarchical.exchange(placement, (0, 1), 0.1, 1)


def test_compares_and_writes_the_agreed_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_ranks(exchange, 2)
    assert {one["form"] for ranks in found for one in ranks} == {"direct"}  # both on this machine, as they notice
    rows, checks = hierarchical.compare(found, "2 x 1", (0, 1), QUICK.mbit, 0.1)
    harness.report(harness.result("hierarchical", {}, rows, checks), tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["operation"] for row in written["rows"] if row["by"] == OURS] == list(OPERATIONS)
    assert len(written["checks"]) == 3 * len(OPERATIONS)
    counted = [check for check in written["checks"] if "counted" in check["name"]]
    assert not any(check["holds"] for check in counted)  # nothing has passed between nodes here
    assert "hierarchical" in capsys.readouterr().out


def test_what_the_bytes_allow() -> None:
    allowed = [flat / least for flat, least in map(parts_through_a_link, LAYOUTS.values())]
    assert allowed == pytest.approx([1.5, 3.0, 1.75, 7.0])
