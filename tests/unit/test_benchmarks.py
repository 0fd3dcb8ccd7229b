"""The single-device benchmark in miniature: what it prints and writes, and that all it compares do the same work."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import harness, single_device
from benchmarks.peers import Case
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import PRESETS, parameter_count

SPEC = ModelSpec(
    vocab_size=128, hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, intermediate=64, max_seq_len=32,
    tie_embeddings=True,
)  # fmt: skip
CPU = torch.device("cpu")
SCRIPT = Path(single_device.__file__)


def written(outcome: dict[str, object], folder: Path) -> dict[str, object]:
    harness.report(outcome, folder / "result.json")
    return json.loads((folder / "result.json").read_text())


def test_compares_the_same_training_and_writes_the_agreed_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(SPEC, 16, 2, 2, "fp32", False, CPU)
    rows, checks = single_device.compare(case, single_device.Effort(cycles=3, block=2))
    outcome = written(harness.result("single_device", harness.machine(None, 1), rows, checks), tmp_path)

    assert set(outcome) == {"name", "machine", "versions", "rows", "checks"}
    assert outcome["name"] == "single_device"
    names = [row["trained by"] for row in outcome["rows"]]
    assert sorted(names) == ["Phalanx", "Trainer", "plain loop, our model", "plain loop, transformers' model"]
    assert all(row["turns x steps"] == "3 x 2" and row["tokens/s"] > 0 for row in outcome["rows"])
    assert all(set(check) == {"name", "value", "target", "holds"} for check in outcome["checks"])
    same, *speeds = outcome["checks"]
    assert same["holds"] and same["value"] < 1e-5, same
    assert [(check["target"], check["holds"]) for check in speeds] == [
        (target, check["value"] >= target) for target, check in zip((0.98, 1.0), speeds, strict=True)
    ]
    printed = capsys.readouterr().out
    assert printed.rstrip().splitlines()[-1].lstrip().startswith(("holds", "DOES NOT HOLD"))


def test_what_a_hypervisor_took_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        harness.stolen([5, 0, 0, 70, 9, 0, 0, 1], [85, 5, 5, 990, 9, 0, 0, 11]) == 0.1
    )  # of what was wanted, not idle
    assert harness.stolen([5] * 8, [5] * 8) is None and harness.stolen([], []) is None
    assert 0 <= (harness.machine(None, 1)["stolen"] or 0) < 1
    written(harness.result("some", {"stolen": 0.1}, [], []), tmp_path)
    assert "Other virtual machines took 10%" in capsys.readouterr().out
    written(harness.result("some", {"stolen": 0.01}, [], []), tmp_path)
    assert "took" not in capsys.readouterr().out


def test_a_slow_machine_stops_early_and_compares_what_it_has() -> None:
    case = Case(SPEC, 16, 2, 2, "fp32", False, CPU)
    rows, _ = single_device.compare(case, single_device.Effort(cycles=50, block=1, seconds=0.0))
    assert [row["turns x steps"] for row in rows] == ["2 x 1"] * 4


def test_walks_the_accelerators_path(tmp_path: Path) -> None:
    chip = single_device.Chip(
        {"tiny": SPEC}, (16, 32), step_tokens=64, matmul_size=64, memory_bytes=single_device.STATE_BYTES * 40_000,
        compile=False,
    )  # fmt: skip
    rows, checks = single_device.against_the_chip(CPU, chip, single_device.Effort(cycles=2, block=1))
    outcome = written(harness.result("single_device", harness.machine("none", 1), rows, checks), tmp_path)
    matmul, short, long = outcome["rows"]
    assert matmul["TFLOP/s, median"] > 0
    assert [(row["sequence"], row["tokens a step"]) for row in (short, long)] == [(16, 64), (32, 64)]
    assert short["layers"] == "2 of 4"  # as many as leave room
    assert short["of matmul rate"] > 0
    # No peak is known of a CPU: nothing is claimed.
    assert short["MFU"] is None and not any(check["holds"] for check in outcome["checks"])
    assert len(outcome["checks"]) == 4


@given(
    name=st.sampled_from(single_device.MODELS),
    gib=st.integers(min_value=8, max_value=400),
    seq_len=st.sampled_from(single_device.SEQUENCES),
)
def test_sizes_fit_the_memory(name: str, gib: int, seq_len: int) -> None:
    published, memory_bytes = PRESETS[name], gib * 2**30
    spec = single_device.fitting(published, memory_bytes)
    room = memory_bytes * single_device.STATE_SHARE
    assert spec.layers == 1 or parameter_count(spec) * single_device.STATE_BYTES <= room
    more = replace(spec, layers=spec.layers + 1)
    assert spec.layers == published.layers or parameter_count(more) * single_device.STATE_BYTES > room
    micro_batch = single_device.first_micro_batch(spec, seq_len, memory_bytes)
    assert micro_batch == 1 or micro_batch * seq_len <= single_device.MICRO_TOKENS
    assert micro_batch & (micro_batch - 1) == 0


def test_full_shapes_fit_the_largest_single_chips() -> None:
    memory_bytes = 139 * 2**30
    layers = [single_device.fitting(PRESETS[name], memory_bytes).layers for name in single_device.MODELS]
    assert layers[:2] == [16, 28] and 8 <= layers[2] < 32, layers


def test_what_was_not_measured_does_not_hold() -> None:
    assert not harness.at_least("speed", None, 0.5).holds
    assert not harness.at_most("error", None, 0.5).holds
    assert harness.at_least("speed", 0.5, 0.5).holds
    assert not harness.at_most("error", 0.6, 0.5).holds


def test_a_ratio_near_one_is_not_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"over": 0.99981}, {"over": 1.0}, {"over": 1234.56}]
    harness.report({"name": "n", "machine": {}, "versions": {}, "rows": rows, "checks": []}, None)
    assert {"0.9998", "1", "1235"} <= set(capsys.readouterr().out.split())


def test_spread_of_one_and_of_many() -> None:
    assert harness.spread([2.0]) == (2.0, 2.0, 2.0)
    assert harness.spread([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 3.0, 4.0)


def test_prints_plain_columns_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    harness.print_table(["who", "tokens/s"], [["Phalanx", "1464"], ["me", "9"]])
    assert capsys.readouterr().out.splitlines() == ["    who  tokens/s", "Phalanx      1464", "     me         9"]


MISSING = ("pydantic", "typer", "tensorboard")  # on a GPU machine without a registry
RUN = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({MISSING}))  # None makes an import fail
sys.path[0], sys.argv = {str(SCRIPT.parent)!r}, [{str(SCRIPT)!r}, "--models", "llama-9"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_runs_as_a_script_from_anywhere_and_needs_only_torch_and_transformers(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "llama-9" in done.stderr and "llama-3.2-1b" in done.stderr and "Traceback" not in done.stderr
