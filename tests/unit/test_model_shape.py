import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.layout.model_shape import EncoderSpec, LoraSpec, ModelSpec, RopeScaling
from phalanx.models.families.catalog import (
    PRESETS,
    find_shape_problems,
    flops_per_token,
    parameter_count,
    parameter_shapes,
)
from phalanx.models.llama import Llama

NO_SEGMENTS = EncoderSpec(segment_kinds=0)
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
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    # Of the larger ones the published number less that of the vision tower and its projection.
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-rw-1b": 1_311_625_216,
    "falcon-rw-7b": 7_516_020_736,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-j-6b": 6_050_882_784,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_419_200,
    "moonlight-16b-a3b": 15_960_110_208,
    "qwen-1.8b": 1_836_828_672,
    "qwen-7b": 7_721_324_544,
    "qwen-14b": 14_167_290_880,
    "internlm2-1.8b": 1_889_110_016,
    "internlm2-7b": 7_737_708_544,
    "internlm2-20b": 19_861_149_696,
    "baichuan-7b": 7_000_559_616,
    "baichuan2-7b": 7_505_973_248,
    "baichuan-13b": 13_264_901_120,
    "baichuan2-13b": 13_896_668_160,
    "bert-tiny": 4_416_698,
    "bert-mini": 11_201_594,
    "bert-small": 28_795_194,
    "bert-medium": 41_404_730,
    "bert-base-uncased": 109_514_298,
    "bert-base-cased": 108_340_804,
    "bert-large-uncased": 335_174_458,
    "bert-large-cased": 333_610_308,
}
TINY = ModelSpec(vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48, max_seq_len=128)


def test_every_preset_has_a_published_count() -> None:
    assert PUBLISHED.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_possible_and_have_the_published_size(name: str) -> None:
    spec = PRESETS[name]
    assert find_shape_problems(spec) == []
    assert parameter_count(spec) == PUBLISHED[name]
    # The heads fill the width, but for these.
    others = ("qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt_oss", "deepseek_v3")
    assert spec.heads * spec.head_dim == spec.hidden or spec.architecture in others


@pytest.mark.parametrize(
    "name", ["llama-1-7b", "llama-3.1-405b", "llama-3.2-1b", "mistral-7b-v0.1", "qwen2.5-72b", "qwen3-4b"]
)
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
        "gemma-3-4b": 8.0,
        "gemma-3-12b": 8.0,
        "gemma-3-27b": 8.0,
        "gpt-oss-20b": 32.0,
        "gpt-oss-120b": 32.0,
        "deepseek-v3": 40.0,
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architecture": "gpt"}, "model.architecture"),
        ({"sliding_window": 8}, "model.architecture to mistral"),
        ({"sliding_window": 0, "architecture": "qwen2"}, "model.sliding_window"),
        ({"rope_scaling": RopeScaling(rule="longrope", factor=2.0)}, "longrope"),
        ({"rope_scaling": RopeScaling(rule="linear", factor=0.0)}, "factor"),
        ({"rope_scaling": RopeScaling(rule="yarn", factor=2.0, beta_fast=1.0, beta_slow=2.0)}, "beta_fast"),
        ({"rope_scaling": RopeScaling(rule="yarn", factor=2.0, attention_factor=-1.0)}, "attention_factor"),
        ({"rope_scaling": RopeScaling(rule="yarn", factor=2.0), "rope_theta": 1.0}, "rope_theta"),
        ({"rope_scaling": RopeScaling(rule="dynamic", factor=2.0), "head_dim": 2}, "head_dim"),
        ({"kv_heads": 3}, "model.kv_heads"),
        ({"attention_dropout": 1.0}, "model.attention_dropout"),
        ({"architecture": "bert", "encoder": EncoderSpec(), "tie_embeddings": True}, "share nothing"),
        ({"architecture": "bert", "kv_heads": 4, "encoder": EncoderSpec()}, "model.tie_embeddings"),
        ({"architecture": "bert", "kv_heads": 4, "tie_embeddings": True, "encoder": NO_SEGMENTS}, "table of segments"),
        ({"hidden": 2**56}, "model.hidden"),
        ({"vocab_size": 2**60}, "model.vocab_size"),
        ({"lora": LoraSpec(rank=2**60, alpha=1.0, targets=("q",))}, "model.lora.rank"),
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
    found = find_shape_problems(replace(TINY, **change))  # type: ignore[arg-type]
    assert len(found) == 1
    assert named in found[0]
    assert found[0].endswith(".")


def test_all_problems_at_once() -> None:
    assert len(find_shape_problems(replace(TINY, kv_heads=3, head_dim=7, dropout=2.0))) == 3


counts = st.integers(-1, 40)


@given(counts, counts, counts, counts)
def test_a_shape_without_problems_can_be_built(heads: int, kv_heads: int, head_dim: int, hidden: int) -> None:
    spec = replace(TINY, heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden)
    if find_shape_problems(spec):
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


def test_flops_count_only_what_a_window_shows() -> None:
    spec = replace(TINY, architecture="mistral")
    windowed = replace(spec, sliding_window=10)
    half = replace(windowed, full_attention_layers=(1,))
    plain, seen = flops_per_token(spec, 100), 10 * 10 // 2 + 90 * 10  # pairs of a layer, the diagonal counted by half
    weights = plain[0] - 12 * 2 * 32 * 100
    assert flops_per_token(windowed, 100) == (plain[0], weights + 12 * 32 * 2 * seen // 100)
    assert flops_per_token(half, 100) == (plain[0], weights + 12 * 32 * (seen + 5000) // 100)
    assert flops_per_token(replace(spec, sliding_window=100), 100) == plain


def test_flops_of_a_model_of_ones_own_count_its_parameters() -> None:
    shapes = parameter_shapes(TINY)
    more = shapes | {"layers.0.extra.weight": (10, 20)}
    plain = flops_per_token(TINY, 100)
    assert flops_per_token(TINY, 100, shapes) == plain
    assert flops_per_token(TINY, 100, more) == (plain[0] + 1200, plain[1] + 1200)
