"""The constants: their ranges, and what fitting them to measured steps finds; and the benchmark that judges them."""

import csv
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import planner_accuracy
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.cost import CostModel
from phalanx.planner.device_catalog import (
    DEFAULT_CONSTANTS,
    DEVICE_KINDS,
    RANGES,
    UNITS,
    CostConstants,
    Row,
    fit_constants,
)
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.work import StepWork
from tests.helpers import ROOT

WORK = StepWork(
    layers=24, hidden=2048, heads=16, kv_heads=16, ffn=8192, vocabulary=51200, seq_len=1024, global_batch=64, tied=True,
    gated=False, biases=True, precision="fp16", reduce_bytes=2,
)  # fmt: skip
CLUSTER = ClusterSpec((NodeGroup(1, 8, DEVICE_KINDS["A100-80GB"]),))
CHOICES = [
    LayoutChoice(zero=0, tensor=tensor, pipeline=pipeline, micro_batch=size, engine="megatron", attention="plain")
    for tensor, pipeline in ((1, 1), (2, 1), (8, 1), (1, 4), (2, 2))
    for size in (1, 4, 8)
]


def rows(true: CostConstants) -> list[Row]:
    """Steps as they would be measured if `true` were the truth."""
    model = CostModel(WORK, CLUSTER, true)
    return [
        (lambda constants, choice=choice: CostModel(WORK, CLUSTER, constants).estimate(choice).step_s,
         model.estimate(choice).step_s)
        for choice in CHOICES
    ]  # fmt: skip


def error(constants: CostConstants, measured: list[Row]) -> float:
    return max(abs(math.log(predict(constants) / seconds)) for predict, seconds in measured)


def test_there_are_no_more_than_sixteen_and_each_has_a_range() -> None:
    assert set(RANGES) == set(asdict(DEFAULT_CONSTANTS)) and len(RANGES) <= 16 and set(UNITS) <= set(RANGES)
    for name, (low, high) in RANGES.items():
        assert low < high and low <= getattr(DEFAULT_CONSTANTS, name) <= high, name


def test_a_fit_finds_what_explains_the_steps() -> None:
    true = replace(DEFAULT_CONSTANTS, launch_s=40e-6, matmul_share=0.85, skew_s=1e-4, step_s=1e-2)
    measured = rows(true)
    found = fit_constants(measured)
    assert error(DEFAULT_CONSTANTS, measured) > 0.15 and error(found, measured) < 0.05
    assert found.slack == DEFAULT_CONSTANTS.slack  # no step speaks of memory
    assert found == fit_constants(measured)  # again the same


def test_one_bad_run_does_not_rule() -> None:
    true = replace(DEFAULT_CONSTANTS, launch_s=40e-6)
    measured = rows(true)
    predict, seconds = measured[0]
    found = fit_constants([(predict, 3 * seconds), *measured[1:]])
    assert error(found, measured[1:]) < 0.08


def test_nothing_measured_leaves_everything_as_it_is() -> None:
    for name, value in asdict(fit_constants([])).items():
        assert value == pytest.approx(getattr(DEFAULT_CONSTANTS, name))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_no_measurement_leads_out_of_the_ranges(seconds: list[float]) -> None:
    measured = [(predict, wild) for (predict, _), wild in zip(rows(DEFAULT_CONSTANTS), seconds, strict=False)]
    for name, value in asdict(fit_constants(measured)).items():
        low, high = RANGES[name]
        assert low - 1e-12 <= value <= high + 1e-12, name


# ------------------------------------------------------------------------------------------------------- the benchmark


NAMES = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq_len", "tensor", "data", "pipeline")


def written(path: Path) -> Path:
    """A file as vTrain's, of runs that take what the model says with other constants."""
    true = replace(DEFAULT_CONSTANTS, launch_s=35e-6)
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([*NAMES, "iteration_ms"])
        for layers in (12, 24):
            for tensor, data, pipeline in ((1, 8, 1), (2, 4, 1), (1, 4, 2), (8, 1, 1)):
                for size in (1, 2, 4):
                    row = [8, 64, size, 1024, 16, layers, 1024, tensor, data, pipeline]
                    run = planner_accuracy._vtrain(
                        {name: str(value) for name, value in zip(NAMES, row, strict=True)} | {"iteration_ms": "1"}
                    )
                    lines.writerow([*row, 1e3 * run.predicted(true)])
    return path


def test_runs_that_follow_the_model_are_predicted_and_the_fastest_is_picked(tmp_path: Path) -> None:
    runs = planner_accuracy.read(written(tmp_path / "made.csv"))
    assert len(runs) == 24 and {run.size for run in runs} == {"0.2B", "0.4B"}
    lines = {line["way"]: line for line in planner_accuracy.file_rows(runs, [0])}
    assert 0 < lines["5 %, seed 0"]["mean %"] < lines["data-sheets"]["mean %"] < 25
    assert lines["leave one size out"]["rows"] == 24 and "leave one kind out" not in lines
    assert planner_accuracy.regrets(runs, replace(DEFAULT_CONSTANTS, launch_s=35e-6)) == [0.0, 0.0]
    assert planner_accuracy.memory_row("made", runs)["called impossible"] == 0


def test_megatron_llama_needs_no_file() -> None:
    lines, off = planner_accuracy.llama_rows()
    assert len(off) == 2 and [line["GPUs"] for line in lines if line["optimizer"] == "this project's"] == [32, 256, 512]
    assert all(line["predicted"] > 0 for line in lines)


@pytest.mark.parametrize(("content", "what"), [(None, "cannot be read"), ("a,b\n1,2\n", "neither the columns")])
def test_a_file_that_is_none_is_said_to_be(content: str | None, what: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    if content is not None:
        path.write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner_accuracy", "--data", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and what in done.stderr and "Traceback" not in done.stderr
