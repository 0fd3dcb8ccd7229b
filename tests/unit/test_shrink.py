"""Tiny recipes: what shrinks, what stays, and that the recipes which come with Phalanx all have a legal tiny twin."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from phalanx.config import load
from phalanx.config.model_spec import build_model_spec
from phalanx.config.schema import Config, get_knob, iter_knobs
from phalanx.config.shrink import VOCAB, list_changes, shrink_config, shrink_spec
from phalanx.core.errors import ConfigError
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import PRESETS, find_shape_problems, parameter_count
from phalanx.workload.tiny_model import write_tiny_model
from tests.dist import command
from tests.helpers import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def nothing_here(source: str) -> bool:
    return source in ("stdlib", "stdlib-chat", "chatml")


def tiny(tree: dict[str, Any], here: bool = False) -> Config:
    return shrink_config(load.build_config(tree, "a recipe"), (lambda source: True) if here else nothing_here)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_have_tiny_twins(path: Path) -> None:
    config = load.load_recipe(path)
    if config.task.code is not None:
        with pytest.raises(ConfigError, match="cannot make the network of task"):
            shrink_config(config, nothing_here)
        return
    found = shrink_config(config, nothing_here, ("tiny-model", False) if config.model.from_hf else None)
    assert found.train.steps <= 10
    assert found.data.seq_len <= 256
    labelled = config.task.kind in ("tag", "classify")  # no sample of that is everywhere
    sources = [source if isinstance(source, str) else source.path[0] for source in found.data.source]
    assert labelled or all(nothing_here(source) for source in sources)
    kept = (
        "data.format",
        "data.loss_on",
        "optim.name",
        "optim.lr",
        "optim.schedule",
        "memory.activations",
        "model.lora",
    )
    for key, _ in iter_knobs():
        if key.startswith(kept) or key.split(".")[0] in ("parallel", "memory", "comm", "report"):
            assert get_knob(found, key) == get_knob(config, key), key
    assert shrink_config(found, nothing_here, ("tiny-model", False) if config.model.from_hf else None) == found


def test_offload_still_has_something_to_move() -> None:
    config = load.build_config({"model": {"preset": "llama-3-8b"}, "memory": {"activations": "offload"}}, "a recipe")
    found = shrink_config(config, nothing_here)
    assert found.memory.offload_prefetch_blocks < (found.model.layers or 0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_stay_of_their_kind(name: str) -> None:
    spec = PRESETS[name]
    small = shrink_spec(spec, 64)
    assert find_shape_problems(small) == []
    assert parameter_count(replace(small, vocab_size=1)) < 2_000_000
    assert (small.embedding_width < small.hidden) == (spec.embedding_width < spec.hidden)
    for field in (
        "architecture",
        "vocab_size",
        "rope_theta",
        "rope_scaling",
        "norm_eps",
        "tie_embeddings",
        "max_seq_len",
    ):
        assert getattr(small, field) == getattr(spec, field)
    assert (small.heads == small.kv_heads) == (spec.heads == spec.kv_heads)
    assert (small.hidden == small.heads * small.head_dim) == (spec.hidden == spec.heads * spec.head_dim)
    assert small.intermediate / small.hidden == pytest.approx(spec.intermediate / spec.hidden, rel=0.1)
    found = tiny({"model": {"preset": name}, "data": {"tokenizer": "a-folder"}}, here=True)
    again = load.build_config(found.model_dump(mode="json"), "it")
    assert replace(build_model_spec(again), dropout=small.dropout) == small
    trained = build_model_spec(tiny({"model": {"preset": name}}))
    assert (trained.block, trained.vocab_size) == (small.block, min(VOCAB, spec.vocab_size))


@given(
    kv_heads=st.integers(1, 20),
    groups=st.integers(1, 40),
    head_dim=st.integers(1, 130).map(lambda half: 2 * half),
    ratio=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    layers=st.integers(1, 200),
    window=st.none() | st.integers(1, 10_000),
)
def test_any_shape_that_is_possible_stays_so(
    kv_heads: int, groups: int, head_dim: int, ratio: float, layers: int, window: int | None
) -> None:
    heads = kv_heads * groups
    spec = ModelSpec(
        architecture="qwen3", vocab_size=100, hidden=max(1, int(heads * head_dim * ratio)), layers=layers, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, intermediate=3 * heads * head_dim, max_seq_len=4096,
        sliding_window=window, full_attention_layers=(layers - 1,),
    )  # fmt: skip
    small = shrink_spec(spec, 64)
    assert find_shape_problems(small) == []
    assert small.layers <= 2
    assert small.hidden <= 256
    assert all(layer < small.layers for layer in small.full_attention_layers)
    assert (small.sliding_window is None) == (window is None)


def test_a_mixture_keeps_its_weights_and_what_is_here() -> None:
    sources = ["stdlib", {"path": ["s3://far/away/*"], "weight": 3.0}]
    tree = {"model": {"preset": "llama-3-8b"}, "data": {"source": sources, "validation": {"far": ["gone.jsonl"]}}}
    found = tiny(tree)
    assert found.data.source[0] == "stdlib"
    assert found.data.source[1].model_dump() == {"path": ["stdlib"], "weight": 3.0}  # type: ignore[union-attr]
    assert found.data.validation == {}
    assert tiny(tree, here=True).data.source == load.build_config(tree, "it").data.source
    assert "data.source: stdlib, s3://far/away/* (3) -> stdlib, stdlib (3)" in list_changes(
        load.build_config(tree, "it"), found
    )


@pytest.mark.parametrize(
    ("change", "kind", "weight"),
    [
        ({}, "llama", "model.layers.0.mlp.up_proj.weight"),
        ({"model": {"moe": {"balance": "none"}}}, "mixtral", "model.layers.0.block_sparse_moe.experts.0.w1.weight"),
        ({"parallel": {"expert": 2}}, "mixtral", "model.layers.0.block_sparse_moe.experts.0.w1.weight"),
        (
            {"task": {"kind": "classify", "labels": ["a", "b"]}},
            "bert",
            "bert.encoder.layer.0.attention.self.query.weight",
        ),
    ],
    ids=["plain", "balance", "expert", "classify"],
)
def test_a_folder_that_is_not_here_is_replaced_by_a_model_that_takes_the_recipes_keys(
    change: dict[str, Any], kind: str, weight: str, tmp_path: Path
) -> None:
    model = {"from_hf": "not/here"} | change.get("model", {})
    config = load.build_config(change | {"model": model, "data": {"cache": str(tmp_path)}}, "a recipe")
    folder, has_tokenizer = write_tiny_model(config)
    assert json.loads(Path(folder, "config.json").read_text())["model_type"] == kind
    with safe_open(Path(folder, "model.safetensors"), "pt") as weights:
        assert weight in weights.keys()  # noqa: SIM118
    assert not has_tokenizer


def test_steps_to_look_into_move_into_the_run() -> None:
    base = {"hidden": 64, "layers": 1, "heads": 2}
    found = tiny({"model": base, "train": {"steps": 100, "profile": "50-60", "memory_snapshot": 70}})
    assert (found.train.profile, found.train.memory_snapshot) == ("2-3", 9)
    found = tiny({"model": base, "train": {"steps": 100, "profile": "4-5"}})
    assert found.train.profile == "4-5"


def test_a_recipe_for_a_model_that_is_not_here_trains_on_two_ranks(tmp_path: Path) -> None:
    words = ["train", str(ROOT / "recipes" / "continue-from-hf.yaml"), "--shrink", "--ranks", "2"]
    options = ["data.source=text.jsonl", "data.cache=cache", "train.steps=4", "report.tensorboard=false"]
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{"a few words " * (5 + i % 9)}"}}\n' for i in range(200)))
    code, out, err = command.phalanx(tmp_path, *words, *options, "--run-dir", "here")
    assert code == 0, out + err
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["cache", "here"]
    paths = RunPaths(tmp_path / "here")
    assert [step["step"] for step in read_steps(paths.metrics)] == list(range(1, 5))
    assert "train.global_batch: 64 -> 8" in out
    (model,) = (tmp_path / "cache").glob("tiny-*")
    assert f"model.from_hf: hf/model -> {Path('cache') / model.name}" in out
    assert (model / "model.safetensors").stat().st_size < 1_000_000
