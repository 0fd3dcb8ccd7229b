import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.models.llama import Llama
from phalanx.models.spec import (
    PRESETS,
    ModelSpec,
    RopeScaling,
    flops_per_token,
    parameter_count,
    parameter_shapes,
    problems,
)

PUBLISHED = {
    "llama-1-7b": 6_738_415_616,
    "llama-1-13b": 13_015_864_320,
    "llama-1-30b": 32_528_943_616,
    "llama-1-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
}
TINY = ModelSpec(vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48, max_seq_len=128)


def test_every_preset_has_a_published_count() -> None:
    assert PUBLISHED.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_possible_and_have_the_published_size(name: str) -> None:
    spec = PRESETS[name]
    assert problems(spec) == []
    assert parameter_count(spec) == PUBLISHED[name]
    # For all presets the heads fill the width, which the published shapes share.
    assert spec.heads * spec.head_dim == spec.hidden


@pytest.mark.parametrize("name", ["llama-1-7b", "llama-2-70b", "llama-3-8b", "llama-3.1-405b", "llama-3.2-1b"])
def test_a_model_built_on_meta_has_the_listed_parameters(name: str) -> None:
    with torch.device("meta"):
        model = Llama(PRESETS[name])
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert built == parameter_shapes(PRESETS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert list(model.buffers()) == []


def test_rope_scaling_only_from_3_1_on() -> None:
    scaled = {name: spec.rope_scaling.factor for name, spec in PRESETS.items() if spec.rope_scaling}
    assert scaled == {
        "llama-3.1-8b": 8.0,
        "llama-3.1-70b": 8.0,
        "llama-3.1-405b": 8.0,
        "llama-3.2-1b": 32.0,
        "llama-3.2-3b": 32.0,
        "llama-3.3-70b": 8.0,
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architecture": "gpt"}, "model.architecture"),
        ({"kv_heads": 3}, "model.kv_heads"),
        ({"hidden": 34}, "model.hidden"),
        ({"head_dim": 7}, "model.head_dim"),
        ({"layers": 0}, "model.layers"),
        ({"vocab_size": -5}, "model.vocab_size"),
        ({"heads": 0}, "model.heads"),
        ({"rope_theta": 0.0}, "model.rope_theta"),
        ({"norm_eps": math.nan}, "model.norm_eps"),
        ({"dropout": 1.0}, "model.dropout"),
        ({"init_std": -0.1}, "model.init_std"),
        (
            {"rope_scaling": RopeScaling(factor=8, low_freq_factor=4, high_freq_factor=1, original_max_seq_len=64)},
            "band",
        ),
        (
            {"rope_scaling": RopeScaling(factor=0, low_freq_factor=1, high_freq_factor=4, original_max_seq_len=64)},
            "factor",
        ),
    ],
)
def test_an_impossible_shape_is_one_sentence_that_names_the_key(change: dict[str, object], named: str) -> None:
    found = problems(replace(TINY, **change))  # type: ignore[arg-type]
    assert len(found) == 1
    assert named in found[0]
    assert found[0].endswith(".")


def test_all_problems_at_once() -> None:
    assert len(problems(replace(TINY, kv_heads=3, head_dim=7, dropout=2.0))) == 3


counts = st.integers(-1, 40)


@given(counts, counts, counts, counts)
def test_a_shape_without_problems_can_be_built(heads: int, kv_heads: int, head_dim: int, hidden: int) -> None:
    spec = replace(TINY, heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden)
    if problems(spec):
        return
    with torch.device("meta"):
        assert sum(p.numel() for p in Llama(spec).parameters()) == parameter_count(spec)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_count_the_head_but_not_the_embedding_table(tied: bool) -> None:
    spec = replace(TINY, tie_embeddings=tied)
    blocks = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32)
    assert parameter_count(spec, embedding=False) == blocks + 32 + 64 * 32
    assert flops_per_token(spec, 100) == (
        6 * (blocks + 32 + 64 * 32) + 12 * 2 * 32 * 100,
        6 * (blocks + 32 + 64 * 32) + 6 * 2 * 32 * 100,
    )
