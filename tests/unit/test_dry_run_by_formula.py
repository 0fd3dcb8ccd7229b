"""Dry runs without torch, beside those that walk a pass: every size that is told is nearly the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.autotune import dry_run as walk
from phalanx.autotune import fake_passes
from phalanx.autotune import run_size as sizes_of_run
from phalanx.config import load, resolve
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.launch.dry_run_estimate import dry_run, estimate_by_formula
from phalanx.models.families.catalog import PRESETS
from phalanx.models.hf_config import config_from_spec
from phalanx.models.layers import default_chunk
from phalanx.report import run_size
from tests.helpers import ALL, ROOT, some

NEAR, NEAR_ACTIVATIONS = 0.02, 0.06  # of each total, and of each mode's activations; the docs say so
# The preset whose folder stands in for the one that a recipe names.
FOLDERS = {"continue-from-hf": "llama-3-8b", "llama-3.2-1b-chat": "llama-3.2-1b", "mistral-7b-chat": "mistral-7b-v0.3"}
FOLDERS |= {"qwen3-1.7b-chat": "qwen3-1.7b"}
ADAPTED = {"llama-3.2-3b-lora": "llama-3.2-3b", "mistral-7b-lora": "mistral-7b-v0.3", "qwen3-8b-lora": "qwen3-8b"}


def shipped(name: str, place: Path, *overrides: str) -> Config:
    """A shipped recipe, whose Hugging Face folder is there."""
    if preset := (FOLDERS | ADAPTED).get(name):
        (place / "config.json").write_text(json.dumps(config_from_spec(PRESETS[preset], torch.bfloat16)))
        overrides = (f"model.from_hf={place}", *overrides)
    return load.load_recipe(ROOT / "recipes" / f"{name}.yaml", list(overrides))


def same(config: Config, ranks: int) -> None:
    """What both tell is the same: exactly, where it is no memory."""
    found, walked = estimate_by_formula(config, ranks), walk.dry_run(config, ranks)
    assert found is not None
    for table in ("model", "work", "disk", "layout"):
        assert found[table] == walked[table], table
    assert found["memory"].keys() == walked["memory"].keys()
    assert found["memory_total"] == pytest.approx(walked["memory_total"], rel=NEAR)
    told = {mode: found["sequence"][mode] for mode in walked["sequence"]}
    assert told == pytest.approx(walked["sequence"], rel=NEAR_ACTIVATIONS)
    assert found["host_memory"] == pytest.approx(walked["host_memory"], rel=0.005)
    inexact = {"activations", "loss and the head's gradient"}
    state, theirs = ({k: v for k, v in each["memory"].items() if k not in inexact} for each in (found, walked))
    assert state == pytest.approx(theirs, rel=0.005 if ranks > 1 else 0.0)
    said, needs = found["assumed"], walked["assumed"].pop("zero_needs")
    assert said.pop("zero_needs") == pytest.approx(needs, rel=0.005)
    assert (said.pop("by_formula"), walked["assumed"].pop("by_formula")) == (True, False)
    assert said == walked["assumed"]


NAMES = ["demo", "llama-3-8b", "llama-3.2-1b", "mistral-7b", "qwen3-1.7b", *FOLDERS]


@pytest.mark.parametrize("name", some(NAMES, 0, 4, -2))
def test_a_shipped_recipe_is_told_as_a_walk_tells_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = shipped(name, tmp_path)
    monkeypatch.setattr(walk, "MODES", (sizes_of_run.activation_mode_to_assume(config),))  # the others below
    same(config, 1)


@pytest.mark.skipif(not ALL, reason="make test-all: each mode of another recipe is told below")
def test_all_modes_are_told_as_a_walk_tells_them(tmp_path: Path) -> None:
    same(shipped("mistral-7b", tmp_path), 8)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ["train.dtype=fp32", "data.isolate_documents=true"]),
        (4, ["train.dtype=fp16", "memory.activations=selective", "optim.double_buffer=true"]),
        (4, ["train.dtype=mixed", "parallel.zero=3", "memory.activations=offload"]),
        (8, ["parallel.zero=2", "parallel.shard_degree=4", "train.micro_batch=1", "memory.activations=full"]),
    ],
)
def test_so_is_a_changed_one(ranks: int, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = shipped("demo", tmp_path, "model.hidden=768", *overrides)
    monkeypatch.setattr(walk, "MODES", (sizes_of_run.activation_mode_to_assume(config),))
    same(config, ranks)


ADAPTERS = [
    # At their height in the loss; in a backward pass; while dropout is drawn for `down`, for `up`.
    ("llama-3.2-3b-lora", 8, "auto", 64, 0.1, ["activations=none", "zero=3", "dtype=mixed"]),
    ("qwen3-8b-lora", 8, "[q,k,v,o]", 8, 0, ["activations=none"]),
    ("mistral-7b-lora", 2, "[q,v,gate]", 256, 0.1, ["activations=selective", "zero=2"]),
    ("mistral-7b-lora", 1, "auto", 8, 0.1, ["activations=full", "dtype=fp32"]),
    ("mistral-7b-lora", 2, "[q,v,up]", 64, 0.1, ["activations=offload", "zero=1", "micro_batch=2"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "targets", "rank", "dropout", "overrides"), some(ADAPTERS, 2))
def test_so_are_adapters(
    name: str, ranks: int, targets: str, rank: int, dropout: float, overrides: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sections = {"activations": "memory", "zero": "parallel", "dtype": "train", "micro_batch": "train"}
    values = [f"{sections[value.partition('=')[0]]}.{value}" for value in overrides]
    lora = {"targets": targets, "rank": rank, "alpha": 16, "dropout": dropout}
    config = shipped(name, tmp_path, *values, *(f"model.lora.{key}={value}" for key, value in lora.items()))
    monkeypatch.setattr(walk, "MODES", (sizes_of_run.activation_mode_to_assume(config),))
    same(config, ranks)


@pytest.mark.parametrize("mode", ["full", "offload"] if ALL else ["full"])
def test_a_walk_of_few_layers_under_adapters_tells_what_many_take(mode: str, tmp_path: Path) -> None:
    """At the height of a backward pass, which the first layer has no whole one of."""
    targets = "auto" if ALL else "[q,v]"
    config = shipped("mistral-7b-lora", tmp_path, f"memory.activations={mode}", f"model.lora.targets={targets}")
    config, workload, _ = walk._make_workload(resolve.resolve_autos(config, device="accelerator", world=1)[0])
    once, ends, block = walk.compute_activation_bytes(config, workload)
    chunk = default_chunk(workload.spec.vocab_size, torch.device("meta"))
    layers = 6 if ALL else 4
    for batch in some((1, 3), 0):
        direct = fake_passes._measure_peak_with_fakes(config, workload, layers, batch, chunk)
        assert once + batch * (ends + layers * block) == pytest.approx(direct, rel=0.001)


@pytest.mark.parametrize("override", ["model.lora.targets=[gate,down]", "model.lora.adapter=folder"])
def test_adapters_of_the_feed_forward_part_alone_or_of_a_folder_are_walked(override: str, tmp_path: Path) -> None:
    assert estimate_by_formula(shipped("mistral-7b-lora", tmp_path, override), 1) is None


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.pipeline=2"], ["optim.name=adamw8bit"], ["train.dtype=fp64"], ["model.dropout=0.1"],
        ["model.architecture=mistral", "model.sliding_window=64"], ["parallel.engine=fsdp2"], ["comm.compress=bf16"],
        ["memory.activations=offload", "memory.offload_prefetch_blocks=4"], ["balance.optimizer_state=[1, 2]"],
    ],
)  # fmt: skip
def test_what_no_formula_was_compared_for_is_walked(overrides: list[str], tmp_path: Path) -> None:
    assert estimate_by_formula(shipped("demo", tmp_path, *overrides), 2) is None


@pytest.mark.parametrize("name", ["bert-base-pretrain", "digits"])
def test_so_are_other_kinds_of_models(name: str, tmp_path: Path) -> None:
    assert estimate_by_formula(shipped(name, tmp_path), 1) is None


def test_a_folder_that_is_not_there_has_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load.load_recipe(ROOT / "recipes" / "qwen3-1.7b-chat.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"cannot be reached .* hf download Qwen/Qwen3-1\.7B-Base --local-dir Qwen/Qwen3-1\.7B-Base"
    ):
        dry_run(config, 1)


def test_an_estimate_says_that_it_is_one(tmp_path: Path) -> None:
    told = {ranks: dry_run(shipped("demo", tmp_path), ranks)["assumed"] for ranks in (1, 2)}
    notes = {ranks: run_size.size_notes(assumed) for ranks, assumed in told.items()}
    assert "Activations and loss are estimates from the planner's formulas." in notes[1]
    assert "Activations and loss, as the shares of the state, are estimates from the planner's formulas." in notes[2]
    assert not any("estimates" in note for note in run_size.size_notes(told[1] | {"by_formula": False}))


SCRIPT = """
import contextlib, json, sys
from phalanx.cli.root import main
for place, ranks in json.loads(sys.argv.pop()):
    sys.argv[1:] = ["train", place + "/recipe.yaml", "--ranks", str(ranks), "--dry-run"]
    with contextlib.suppress(SystemExit):
        main()
    print("imported:", sorted({"torch", "transformers", "safetensors"} & set(sys.modules)))
"""


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    asked = {"demo": 1, "qwen3-1.7b": 8, "mistral-7b-chat": 1, "qwen3-8b-lora": 8}
    for name in asked:
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(load.to_yaml(shipped(name, tmp_path / name)))
    command = [sys.executable, "-c", SCRIPT, json.dumps(list(asked.items()))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    told = done.stdout.split("imported: []")
    assert len(told) == 5 and all("together" in each for each in told[:4]), done.stdout + done.stderr
