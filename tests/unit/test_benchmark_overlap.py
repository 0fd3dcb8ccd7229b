"""The benchmark of overlap in miniature, on this machine's loopback: all ways train the same, and what is written."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import harness, overlap
from benchmarks.overlap import Size
from phalanx.core.placement import Placement
from tests.helpers import run_ranks

TINY = Size(
    blocks=(3,), ratios=(1.0,), together=((3, 1.0),), side=32, mbit=4.0, nodes=2, rounds=1, steps=2, real=2,
    interface="lo", slower=False,
)  # fmt: skip


def miniature(placement: Placement) -> dict[str, object]:
    return overlap.on_a_rank(placement, asdict(TINY))


def test_compares_and_writes_the_agreed_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_ranks(miniature, 2, timeout_s=240)
    rows, checks = overlap.table(TINY, found[0])
    harness.report(harness.result("overlap", {}, rows, checks), tmp_path / "result.json")
    written = json.loads((tmp_path / "result.json").read_text())
    rows, checks = written["rows"], written["checks"]
    ways = ["Phalanx", "DDP", "DDP + ZeRO", "FSDP2", "FSDP2 tuned", "FSDP2 on phalanx", "FSDP2 tuned on phalanx",
            "Phalanx, zero 3", "FSDP2, gathering ahead", "FSDP2, gathering ahead, on phalanx"]  # fmt: skip
    assert [row["way"] for row in rows[:10]] == ways
    # Each of three blocks takes 1/3 of computation: a step is a third longer than that at the least.
    link = overlap.block_s(TINY)
    assert rows[0]["bound or theory"] == pytest.approx(8 * link)
    assert rows[1]["bound or theory"] == pytest.approx((4 / 3 + 1 / 4.5) * 6 * link)
    assert all(row["step s"] >= 6 * link and row["MiB sent a step"] > 0 for row in rows[:10])
    assert [row["clipping"] for row in rows[10:14]] == list(overlap.CLIPPING)
    assert [row["matrix products"] for row in rows[14:]] == ways
    assert [check["target"] for check in checks] == [1.05, 0.98, 1.8, 2.4, 2.0, 1.2] + 4 * [1.0] + [1.05, 1.03, 1e-5]
    assert checks[-1]["holds"], checks[-1]  # whichever way trains: the same weights
    assert "DOES NOT HOLD" in capsys.readouterr().out or all(check["holds"] for check in checks)
