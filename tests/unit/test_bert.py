"""BERT is transformers' BERT: the same logits, the same files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertModel,
)

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import EncoderSpec, ModelSpec
from phalanx.models.bert import Bert, attention_with_dropout
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.families.bert import encoder_of, labels_of
from phalanx.models.families.catalog import PRESETS, flops_per_token, parameter_shapes
from phalanx.models.hf_config import config_from_spec, read_config, spec_from_config
from phalanx.models.hf_export import export
from phalanx.models.hf_weights import Weights
from phalanx.models.layers import cross_entropy_sum, reference_cross_entropy_sum
from phalanx.models.user_model import check_model_class, hf_name
from phalanx.workload.bert import find_missing_parameters

LABELS = ("O", "B-X", "I-X")
TINY = replace(
    PRESETS["bert-tiny"], vocab_size=97, hidden=32, heads=2, kv_heads=2, head_dim=16, intermediate=44, max_seq_len=32
)
HEADS: dict[str, Any] = {
    "masked": AutoModelForMaskedLM,
    "masked-next": AutoModelForPreTraining,
    "tags": AutoModelForTokenClassification,
    "classes": AutoModelForSequenceClassification,
}


def spec_for(objective: str) -> ModelSpec:
    labels = LABELS if objective in ("tags", "classes") else ()
    return replace(TINY, encoder=EncoderSpec(objective=objective, labels=labels))


def values(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(spec).items()}
    return {name: value * 0.2 for name, value in draw.items()}


def ours(spec: ModelSpec, parameters: dict[str, Tensor], dtype: torch.dtype) -> Bert:
    model = Bert(spec).to(dtype)
    model.load_state_dict(parameters)
    return model


def write(folder: Path, spec: ModelSpec, parameters: dict[str, Tensor]) -> Path:
    export(folder, spec, parameters.__getitem__, torch.float32, model_class=Bert)
    return folder


def read(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    weights = Weights(folder, Bert)
    weights.check(spec)
    shapes = parameter_shapes(spec)
    return {name: weights.read(name, 0, torch.Size(shape).numel()).view(shape) for name, shape in shapes.items()}


BATCH = 4
LENGTHS = torch.tensor([20, 13, 1, 7])


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 97, (BATCH, 20), generator=generator)
    return tokens, torch.randint(0, 2, tokens.shape, generator=generator), torch.arange(20) < LENGTHS[:, None]


@pytest.mark.parametrize("objective", HEADS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_logits_are_those_of_transformers(objective: str, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    spec = spec_for(objective)
    parameters = values(spec)
    theirs = HEADS[objective].from_pretrained(write(tmp_path / "model", spec, parameters)).eval().to(dtype)
    model = ours(spec, parameters, dtype)
    tokens, segments, seen = inputs()
    with torch.no_grad():
        out = theirs(tokens, attention_mask=seen.long(), token_type_ids=segments)
        found = model(tokens, segments=segments, lengths=LENGTHS)
    if objective.startswith("masked"):
        pairs = [(found[0][seen], (out.logits if objective == "masked" else out.prediction_logits)[seen])]
        pairs += [(found[1], out.seq_relationship_logits)] if objective == "masked-next" else []
    else:
        pairs = [(found[seen], out.logits[seen]) if objective == "tags" else (found, out.logits)]
    for one, other in pairs:
        assert float(other.abs().max()) > 0.1
        assert float((one - other).abs().max()) < tolerance


@pytest.mark.parametrize("objective", HEADS)
def test_what_is_exported_is_read_back_to_the_bit(objective: str, tmp_path: Path) -> None:
    spec = spec_for(objective)
    parameters = values(spec)
    folder = write(tmp_path / "model", spec, parameters)
    again = read(folder, spec)
    assert all(torch.equal(again[name], value) for name, value in parameters.items())
    config = read_config(folder)
    assert spec_from_config(config, "it") == replace(spec, encoder=EncoderSpec())
    theirs = HEADS[objective].from_pretrained(folder)  # what transformers saves is read as well
    theirs.save_pretrained(tmp_path / "theirs")
    resaved = read(tmp_path / "theirs", spec)
    assert all(torch.equal(resaved[name], value) for name, value in parameters.items())
    if encoder_of(spec).labels:
        assert theirs.config.id2label == dict(enumerate(LABELS))
        assert labels_of(read_config(tmp_path / "theirs")) == list(LABELS)


def test_names_of_the_first_programs_are_read(tmp_path: Path) -> None:
    spec = spec_for("masked-next")
    parameters = values(spec)
    folder = write(tmp_path / "model", spec, parameters)
    tensors = load_file(folder / "model.safetensors")
    old = {}
    for name, tensor in tensors.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[name] = tensor
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    old["bert.embeddings.position_ids"] = torch.arange(32)[None]
    (folder / "model.safetensors").unlink()
    torch.save(old, folder / "pytorch_model.bin")
    again = read(folder, spec)
    assert all(torch.equal(again[name], value) for name, value in parameters.items())


def test_a_bare_model_is_a_start_for_any_task(tmp_path: Path) -> None:
    masked = spec_for("masked")
    parameters = values(masked)
    whole = AutoModelForMaskedLM.from_pretrained(write(tmp_path / "whole", masked, parameters))
    bare = BertModel(whole.config)
    bare.load_state_dict(whole.bert.state_dict(), strict=False)
    bare.save_pretrained(tmp_path / "bare")
    for objective, drawn in (
        ("masked", {"bias", "transform.weight", "transform.bias", "norm.weight", "norm.bias"}),
        ("tags", {"classifier.weight", "classifier.bias"}),
        ("classes", {"classifier.weight", "classifier.bias"}),  # a BertModel has a pooler
    ):
        spec = spec_for(objective)
        weights = Weights(tmp_path / "bare", Bert)
        weights.check(spec)
        assert {name.removeprefix("head.") for name in find_missing_parameters(tmp_path / "bare", spec)} == drawn
        name = "layers.1.mlp.up.weight"
        assert torch.equal(weights.read(name, 0, 44 * 32), parameters[name].flatten())
    # A masked model has heads that a tagger has no use for, and none that it needs.
    assert len(find_missing_parameters(tmp_path / "whole", spec_for("tags"))) == 2


def test_a_head_for_other_labels_is_drawn(tmp_path: Path) -> None:
    spec = spec_for("tags")
    folder = write(tmp_path / "model", spec, values(spec))
    assert find_missing_parameters(folder, spec) == []
    for labels in (("O", "B-Y", "I-Y"), ("O", "B-X", "I-X", "B-Y")):
        assert (
            len(find_missing_parameters(folder, replace(spec, encoder=EncoderSpec(objective="tags", labels=labels))))
            == 2
        )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_size": 33}, "model.hidden"),
        ({"type_vocab_size": 1}, "segments"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ],
)
def test_a_config_that_is_something_else_is_refused(change: dict[str, Any], named: str) -> None:
    config = config_from_spec(spec_for("masked"), torch.float32) | change
    with pytest.raises(ConfigError, match=named):
        spec_from_config(config, "config.json")


def test_a_folder_that_lacks_more_than_a_head_is_refused(tmp_path: Path) -> None:
    spec = spec_for("tags")
    folder = write(tmp_path / "model", spec, values(spec))
    tensors = load_file(folder / "model.safetensors")
    del tensors[hf_name("layers.1.attention.q.bias", Bert)]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks bert.encoder.layer.1.attention.self.query.bias"):
        Weights(folder, Bert).check(spec)
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"] == ["BertForTokenClassification"]


def test_the_class_fits_the_trainer() -> None:
    for objective in ("masked-next", "tags"):
        spec = spec_for(objective)
        assert check_model_class(Bert, spec) == sum(
            torch.Size(shape).numel() for shape in parameter_shapes(spec).values()
        )
        with torch.device("meta"):
            model = Bert(spec)
        inside = [f"{unit}.{name}" for unit, part in model.units() for name, _ in part.named_parameters()]
        assert inside == list(parameter_shapes(spec)), "units in order of use hold everything once"


def test_operations_are_counted_by_hand() -> None:
    spec, seq_len = TINY, 16
    d, inner = 32, 44
    block = 4 * d * d + 4 * d + 2 * d * inner + inner + d + 4 * d
    by_hand = 2 * (6 * block + 12 * d * seq_len) + 6 * 0.15 * (d * d + 97 * d)
    assert flops_per_token(spec, seq_len) == (int(by_hand), int(by_hand))


# ------------------------------------------------------------------------------------------------------------- dropout


def test_dropout_is_that_of_a_sample_and_not_of_its_batch() -> None:
    spec = replace(spec_for("masked"), dropout=0.3, encoder=EncoderSpec(), attention_dropout=0.3)
    model = ours(spec, values(spec), torch.float64)
    tokens, segments, _ = inputs()
    samples = torch.tensor([7, 3, 12, 5])
    with torch.no_grad():
        together = model(tokens, segments=segments, lengths=LENGTHS, draws=CounterRNG(0, 3, samples))[0]
        plain = model(tokens, segments=segments, lengths=LENGTHS)[0]
        for row, length in enumerate(LENGTHS.tolist()):
            part = (tokens[row : row + 1, :length], segments[row : row + 1, :length])
            draws = CounterRNG(0, 3, samples[row : row + 1])
            alone = model(part[0], segments=part[1], lengths=LENGTHS[row : row + 1], draws=draws)[0]
            assert float((alone[0] - together[row, :length]).abs().max()) < 1e-12
    assert float((together - plain).abs().max()) > 0.1


def test_attention_with_dropout_is_attention() -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 3, 9, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    seen = (torch.arange(9) < torch.tensor([9, 4])[:, None])[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    draws, place = CounterRNG(0, 1, torch.arange(2)), torch.tensor(1)
    assert torch.allclose(attention_with_dropout(q, k, v, seen, draws, place, 0.0), expected, atol=1e-12)
    count = 3000
    rows = (part[:1].expand(count, -1, -1, -1) for part in (q, k, v))
    many = attention_with_dropout(*rows, None, CounterRNG(0, 1, torch.arange(count)), place, 0.5)
    unseen = torch.nn.functional.scaled_dot_product_attention(q[:1], k[:1], v[:1])
    assert float((many.mean(0) - unseen[0]).abs().max()) < 0.15, "its mean is what it is without dropout"
    assert float(many.std(0).min()) > 0.01


# --------------------------------------------------------------------------------------------------------- the loss


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 40), chunk=st.integers(1, 40), seed=st.integers(0, 2**16))
def test_the_chunked_loss_with_a_bias_is_the_plain_one(tokens: int, chunk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((tokens, 6), (11, 6), (11,))
    )
    labels = torch.randint(0, 11, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    chunked = cross_entropy_sum(hidden, weight, labels, bias, chunk=chunk)
    plain = reference_cross_entropy_sum(hidden, weight, labels, bias)
    torch.testing.assert_close(chunked, plain)
    found = torch.autograd.grad(chunked * 0.5, (hidden, weight, bias))
    expected = torch.autograd.grad(plain * 0.5, (hidden, weight, bias))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy_sum(hidden, weight, labels, bias, chunk=chunk), plain)
