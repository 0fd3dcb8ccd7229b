"""The benchmark of compression in miniature, on this machine's loopback."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import compression, harness
from benchmarks.compression import BF16, INT8, OPERATIONS, PLAIN, WAYS, Training
from phalanx.config import load
from phalanx.core.placement import Placement
from tests.helpers import run_ranks

SMALL = Training(blocks=2, side=64, turns=1, steps=1)


def exchange(placement: Placement) -> list[dict[str, Any]]:
    return compression.exchange(placement, 1, 1, "lo")


def train(placement: Placement) -> dict[str, list[float]]:
    return compression.train(placement, asdict(SMALL))


def test_compares_and_writes_the_agreed_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, checks = compression.compare(run_ranks(exchange, 2), 100, 1)
    assert [(row["operation"], row["compress"]) for row in rows] == [(o, c) for o in OPERATIONS for c in WAYS]
    for more_rows, more_checks in (
        compression.compare_training(run_ranks(train, 2)[0], SMALL),
        compression.compare_learning(
            {
                PLAIN: {"losses": [3.0] * 60, "held_out": 3.0},
                BF16: {"losses": [3.0] * 60, "held_out": 3.003},
                INT8: {"losses": [3.0] * 10 + [3.1] * 50, "held_out": 3.1},
            },
            60,
        ),
    ):
        rows, checks = rows + more_rows, checks + more_checks
    harness.report(harness.result("compression", {}, rows, checks), tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["checks"]) == 4 + 2 + 4
    assert [check["holds"] for check in written["checks"][-4:]] == [True, True, False, False]
    assert "compression" in capsys.readouterr().out


def test_the_recipe_of_the_small_llama_is_one() -> None:
    config = load.build_config(yaml.safe_load(compression.RECIPE), "the benchmark's recipe")
    assert config.data.source == ["stdlib"]
