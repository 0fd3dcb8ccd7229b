"""Slices of parameters: every element has its owners, and runs of a part are runs of the whole."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.load import build_config
from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import LoraSpec, ModelSpec
from phalanx.layout.tensor_shards import (
    CUT_KINDS,
    TensorShard,
    count_copies,
    find_cut_kind,
    plan_tensor_shards,
    whole_shapes,
)
from phalanx.models.families.catalog import PRESETS, family_of, find_tensor_problems, parameter_shapes
from phalanx.models.families.decoder import TENSOR_PLAN

SMALL = ModelSpec(
    architecture="qwen2", vocab_size=61, hidden=32, layers=2, heads=8, kv_heads=2, head_dim=4, intermediate=48,
    max_seq_len=64,
)  # fmt: skip


@st.composite
def parts(draw: st.DrawFn) -> TensorShard:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=2)))
    dim = draw(st.sampled_from(sorted({0, len(shape) - 1})))
    start = draw(st.integers(0, shape[dim] - 1))
    return TensorShard(shape, dim, start, draw(st.integers(start + 1, shape[dim])))


@given(parts(), st.data())
def test_runs_of_a_part_are_its_elements_in_the_whole(part: TensorShard, data: st.DataObject) -> None:
    whole = torch.arange(math.prod(part.shape)).view(part.shape)
    flat = whole.narrow(part.dim, part.start, part.stop - part.start).flatten()
    assert part.local_shape == tuple(whole.narrow(part.dim, part.start, part.stop - part.start).shape)
    stop = data.draw(st.integers(0, flat.numel()))
    start = data.draw(st.integers(0, stop))
    found = [whole.flatten()[first:last] for first, last in part.runs(start, stop)]
    assert torch.equal(torch.cat([*found, whole.flatten()[:0]]), flat[start:stop])
    if part.window is None:
        assert list(part.runs(0, flat.numel())) == [(part.offset, part.offset + flat.numel())]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_all_ranks_together_hold_every_element_as_often_as_they_say(size: int) -> None:
    shapes = parameter_shapes(SMALL)
    times = {name: torch.zeros(shape) for name, shape in shapes.items()}
    firsts = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for rank in range(size):
        held = plan_tensor_shards(shapes, TENSOR_PLAN, SMALL.kv_heads, size, rank)
        assert whole_shapes({name: part.local_shape for name, part in held.items()}, held).items() <= shapes.items()
        for name, part in held.items():
            times[name].narrow(part.dim, part.start, part.stop - part.start).add_(1 / part.copies)
            firsts[name].narrow(part.dim, part.start, part.stop - part.start).add_(part.first)
    whole = {name for name in shapes if name not in held}
    assert {name.split(".")[-2] for name in whole} == {"attention_norm", "mlp_norm", "norm"}
    for name in held:
        assert torch.equal(times[name], torch.ones(shapes[name])), name
        assert torch.equal(firsts[name], torch.ones(shapes[name])), name
    copies = Counter(count_copies(shapes, held, size).values())
    assert copies[size] >= len(whole)


def test_fewer_key_heads_than_ranks_are_held_by_neighbours() -> None:
    held = [
        plan_tensor_shards(parameter_shapes(SMALL), TENSOR_PLAN, 2, 8, rank)["layers.0.attention.k.weight"]
        for rank in range(8)
    ]
    assert [(part.start, part.stop, part.copies, part.first) for part in held] == [
        (4 * (rank // 4), 4 * (rank // 4) + 4, 4, rank % 4 == 0) for rank in range(8)
    ]


def test_the_table_names_modules_of_the_model_and_kinds_that_there_are() -> None:
    kinds: set[str | None] = set()
    for spec in (SMALL, PRESETS["deepseek-v3"]):
        plan, modules = family_of(spec).tensor_plan, {name.rpartition(".")[0] for name in parameter_shapes(spec)}
        kinds |= {find_cut_kind(module, plan) for module in modules}
        assert set(plan.values()) <= set(CUT_KINDS)
    assert kinds == {*CUT_KINDS, None}


def test_what_divides_has_no_problems() -> None:
    for name in ("llama-3-70b", "qwen2.5-7b", "qwen3-8b"):
        sizes = [size for size in (1, 2, 4) if not find_tensor_problems(PRESETS[name], size, 4096, sequence=True)]
        assert sizes == [1, 2, 4], name


@pytest.mark.parametrize(
    ("changes", "tensor", "says"),
    [
        ({}, 3, "model.heads"),
        ({"kv_heads": 6, "heads": 12}, 4, "model.kv_heads"),
        ({"intermediate": 45}, 2, "model.intermediate=45"),
        ({"vocab_size": 3}, 4, "vocabulary of 3"),
        ({}, 4, "data.seq_len=18"),
        ({"architecture": "bert"}, 2, "model.architecture is bert"),
        ({"lora": LoraSpec(rank=2, alpha=4.0, targets=("q",))}, 2, "model.lora"),
    ],
)
def test_problems_say_the_numbers(changes: dict[str, object], tensor: int, says: str) -> None:
    (found, *_) = [
        each for each in find_tensor_problems(replace(SMALL, **changes), tensor, 18, sequence=True) if says in each
    ]  # type: ignore[arg-type]
    assert f"parallel.tensor={tensor}" in found or f"{tensor} parts (parallel.tensor)" in found
    assert not find_tensor_problems(replace(SMALL, **changes), 1, 18, sequence=True)  # type: ignore[arg-type]


def test_slices_keep_whole_tiles_of_fp8() -> None:
    assert not find_tensor_problems(PRESETS["llama-3-70b"], 8, 4096, sequence=True, fp8=True)
    (found,) = find_tensor_problems(PRESETS["llama-3.2-1b"], 8, 4096, sequence=True, fp8=True)
    assert "model.kv_heads x model.head_dim 64 channels" in found and "set parallel.tensor=1" in found


@pytest.mark.parametrize("fp8", ["block", "delayed", "none"])
def test_gradients_that_are_rounded_are_whole(fp8: str) -> None:
    """Ranks with the same key and value head have the gradients of their own queries."""
    shape = {"hidden": 256, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 128, "vocab_size": 61}
    shape["intermediate"] = 256
    tree = {"model": shape, "parallel": {"tensor": 2}, "train": {"fp8": fp8}, "data": {"seq_len": 16}}
    if fp8 == "none":
        assert build_config(tree, "here").parallel.tensor == 2
        return
    with pytest.raises(ConfigError, match=f"train.fp8 {fp8} rounds the gradients of keys .* set parallel.tensor=1 or"):
        build_config(tree, "here")


def test_a_class_of_ones_own_is_not_cut() -> None:
    (found,) = find_tensor_problems(SMALL, 2, 16, sequence=True, custom_code=True)
    assert "model.code" in found
