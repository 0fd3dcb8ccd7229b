"""The benchmark of pipelines in miniature: both runtimes do the same, and what is written."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, pipeline
from benchmarks.pipeline import OURS, TORCH, Size
from phalanx.core.placement import Placement
from tests.helpers import run_ranks

TINY = Size(ranks=2, layers=4, micro_batches=(4,), forward_s=0.001, steps=1, layers_unequal=6, micro_batches_unequal=4)


def miniature(placement: Placement, unequal: bool) -> dict[str, Any]:
    return pipeline.on_a_rank(placement, asdict(TINY), unequal)


def test_compares_and_writes_the_agreed_json(tmp_path: Path) -> None:
    rows, checks = pipeline.table(TINY, run_ranks(miniature, 2, unequal=False)[0])
    more_rows, more_checks = pipeline.table_unequal(TINY, run_ranks(miniature, 2, unequal=True)[0])
    harness.report(harness.result("pipeline", {}, rows + more_rows, checks + more_checks), tmp_path / "result.json")
    written = json.loads((tmp_path / "result.json").read_text())
    alike, unequal = written["rows"][:8], written["rows"][8:]
    assert [(row["schedule"], row["by"]) for row in alike] == [
        (schedule, by) for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble") for by in (OURS, TORCH)
    ]
    # Two layers of 1 ms forward and 2 ms back: 6 ms a micro-batch, of which 4 and one more for the other rank.
    assert [row["theory s"] for row in alike[:6:2]] == pytest.approx([0.030, 0.030, 0.027])
    assert [row["by formula"] for row in alike[:6:2]] == pytest.approx([1 / 5, 1 / 5, 1 / 9])
    assert alike[6]["waiting, theory"] < 1 / 9 and alike[6]["by formula"] is None
    assert all(row["step s"] >= row["theory s"] for row in alike)
    assert [row["layers"] for row in unequal] == ["4:2", "4:2", "3:3"]
    # 6 layers of 3 ms, 4 times, by 3 speeds: 24 ms.
    assert all(row["of both speeds together"] == pytest.approx(0.024 / row["step s"]) for row in unequal)
    assert [check["target"] for check in written["checks"]] == [1.05] * 4 + [1e-6] + [0.9] * 2
    assert written["checks"][4]["holds"], written["checks"][4]
