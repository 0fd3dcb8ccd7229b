"""Gemma 3 beside transformers' own model, with random weights: in, out, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import BlockSpec, ModelSpec, RopeScaling
from phalanx.models.families.catalog import FAMILIES, parameter_count, parameter_shapes
from phalanx.models.hf_config import config_from_spec, read_config, spec_from_config
from phalanx.models.hf_export import export
from phalanx.models.hf_weights import Weights
from phalanx.models.model import Architecture
from phalanx.models.rotary import rope_frequencies
from phalanx.models.user_model import hf_name, load_family_class

LENGTH = 48
TOKENS = torch.randint(1, 96, (2, LENGTH), generator=torch.Generator().manual_seed(0))
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 40, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "intermediate_size": 56, "max_position_embeddings": 128, "sliding_window": 6,
}  # fmt: skip
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "as 4B": {"query_pre_attn_scalar": 12, "rope_parameters": LINEAR},
    "as 27B": {"query_pre_attn_scalar": 10, "num_hidden_layers": 6},
    "untied, every second": {"sliding_window_pattern": 2, "tie_word_embeddings": False, "num_hidden_layers": 4},
}
Model = load_family_class("gemma3")


def theirs_of(kind: str) -> Any:
    """Their model, far from the start of training: attention is sharp, and norms do something."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**SHAPE | CONFIGS[kind], pad_token_id=None, attn_implementation="eager")
    model = transformers.Gemma3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3 if parameter.dim() == 1 else 0.1)
    return model


def ours_of(folder: Path) -> Architecture:
    """Our model of a folder's config.json and weights."""
    spec = spec_from_config(read_config(folder), str(folder))
    weights, model = Weights(folder, Model), Model(spec)
    weights.check(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name, 0, parameter.numel()).view(parameter.shape))
    return model


def close(mine: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((mine - expected).norm() <= 1e-5 * expected.norm())


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_and_gradients_are_those_of_transformers_in_and_out(kind: str, tmp_path: Path) -> None:
    theirs = theirs_of(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = ours_of(tmp_path / "theirs")
    assert parameter_count(ours.spec) == sum(each.numel() for each in theirs.parameters())
    assert {name: tuple(each.shape) for name, each in ours.named_parameters()} == parameter_shapes(ours.spec)
    expected = theirs(TOKENS).logits
    assert close(ours(TOKENS), expected)

    labels = TOKENS.roll(-1, 1)
    ours(TOKENS, labels).backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert close(parameter.grad, theirs.get_parameter(hf_name(name, Model)).grad), name

    held = dict(ours.named_parameters())
    export(tmp_path / "ours", ours.spec, held.__getitem__, torch.float32, model_class=Model)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager"
    )
    assert type(again) is transformers.Gemma3ForCausalLM
    assert torch.equal(again(TOKENS).logits, expected)
    assert spec_from_config(read_config(tmp_path / "ours"), "it") == ours.spec


def test_in_half_precision_the_embedding_and_norms_are_rounded_as_theirs() -> None:
    torch.manual_seed(0)
    theirs = theirs_of("as 27B").to(torch.bfloat16)
    inside = theirs.model
    spec = spec_from_config(theirs.config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]}, "it")
    ours: Any = Model(replace(spec, layers=1)).to(torch.bfloat16)
    with torch.no_grad():
        ours.embed.weight.copy_(inside.embed_tokens.weight)
        ours.head.norm.weight.copy_(inside.norm.weight)
        ours.layers = torch.nn.ModuleList()
        expected = theirs.lm_head(inside.norm(inside.embed_tokens(TOKENS)))
        assert torch.equal(ours(TOKENS), expected)


def test_rotary_angles_are_those_of_transformers_for_both_kinds_of_layers() -> None:
    rotary = theirs_of("as 4B").model.rotary_emb
    block = BlockSpec(window_rope_theta=2e4)
    spec = replace(plain(), rope_theta=1e6, rope_scaling=RopeScaling(rule="linear", factor=8.0), block=block)
    assert torch.equal(rope_frequencies(spec, LENGTH)[0], rotary.full_attention_inv_freq)
    assert torch.equal(rope_frequencies(spec, LENGTH, windowed=True)[0], rotary.sliding_attention_inv_freq)


def plain() -> ModelSpec:
    shape = ModelSpec(
        architecture="gemma3", vocab_size=96, hidden=40, layers=7, heads=4, kv_heads=2, head_dim=12, intermediate=56,
        max_seq_len=128, block=BlockSpec(window_rope_theta=1e4),
    )  # fmt: skip
    return FAMILIES["gemma3"].start(shape)


def test_the_form_of_transformers_4_is_read_as_the_same_model() -> None:
    spec = replace(plain(), rope_scaling=RopeScaling(rule="linear", factor=8.0))
    config = config_from_spec(spec, torch.bfloat16)
    assert config["sliding_window_pattern"] == 6
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
    assert spec_from_config(old, "it") == spec_from_config(config, "it") == spec
    assert (spec.window_of(4), spec.window_of(5), spec.window_of(6)) == (1024, None, 1024)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0, which is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0, which is not supported"),
        ({"hidden_activation": "relu"}, 'use a model with hidden_activation: "gelu_pytorch_tanh"'),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: true, which is not supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar to 0"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration, which cannot be"),
        ({"layer_types": ["full_attention"]}, "must be a list of 7"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
            "layers with a sliding window",
        ),
        ({"num_attention_heads": 6}, "refuses and no export could be loaded"),
    ],
)
def test_what_would_compute_something_else_is_refused_in_a_sentence(changes: dict[str, Any], says: str) -> None:
    config = config_from_spec(plain(), torch.float32) | changes
    with pytest.raises(ConfigError) as refused:
        spec_from_config(config, "here/config.json")
    assert says in str(refused.value)
