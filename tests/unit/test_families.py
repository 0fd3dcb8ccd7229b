"""Each family of decoders beside transformers' own model with random weights: in, steps of training, and out."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from phalanx.core.errors import ConfigError
from phalanx.models.families.catalog import FAMILIES, parameter_count, parameter_shapes
from phalanx.models.hf_config import read_config, spec_from_config
from phalanx.models.hf_export import export
from phalanx.models.hf_weights import Weights
from phalanx.models.model import Architecture
from tests.family_cases import CONFIGS, LENGTH, PUBLISHED, VOCAB, attention_of, class_of, spec_of, theirs_of
from tests.helpers import ALL
from tests.published_models import load_published

TOKENS = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def read_model(folder: Path, kind: str) -> Architecture:
    """Our model of a folder's config.json and weights."""
    spec = spec_from_config(read_config(folder), str(folder))
    weights, model = Weights(folder, class_of(kind)), class_of(kind)(spec)
    weights.check(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name, 0, parameter.numel()).view(parameter.shape))
            if parameter.numel() > 7:  # a rank reads a part, from anywhere
                part = weights.read(name, 3, parameter.numel() - 2)
                assert torch.equal(part, parameter.flatten()[3:-2])
    return model


def write_model(folder: Path, model: Architecture, dtype: torch.dtype) -> None:
    held = dict(model.named_parameters())
    export(folder, model.spec, held.__getitem__, dtype, model_class=type(model), max_shard_bytes=20_000)


def close(mine: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((mine - expected).norm() <= tolerance * expected.norm())


def load_theirs(folder: Path, dtype: torch.dtype) -> Any:
    if read_config(folder)["model_type"] in PUBLISHED:
        return load_published(folder, dtype)
    config = transformers.AutoConfig.from_pretrained(folder)
    found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention_of(config), experts_implementation="eager"
    )
    with torch.no_grad():
        found(TOKENS)  # in which LongRoPE's frequencies are computed, in fp32
    return found


def keep_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers takes in fp32 it takes in fp64, if it is given that."""
    narrow = torch.Tensor.float
    monkeypatch.setattr(torch, "float32", torch.float64)
    softmax = torch.nn.functional.softmax
    kept = lambda x, dim=-1, dtype=None: softmax(x, dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "softmax", kept)
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x))


# The others of test_hf_architectures.py, which `make test` trains and writes there.
FIRST = [kind for kind in CONFIGS if ALL or kind not in ("llama", "mistral", "qwen2", "qwen3")]
STEPS = 5 if ALL else 2


@pytest.mark.parametrize("kind", FIRST)
def test_a_family_is_that_of_transformers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = theirs_of(kind)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    ours = read_model(tmp_path / "theirs", kind)
    held = [*theirs.parameters(), *(each for name, each in theirs.named_buffers() if "correction" in name)]
    assert parameter_count(ours.spec) == sum(each.numel() for each in held)
    assert {name: tuple(each.shape) for name, each in ours.named_parameters()} == parameter_shapes(ours.spec)
    with torch.no_grad():
        assert close(ours(TOKENS), theirs(TOKENS).logits, 1e-5)

    # In fp64, with the casts to fp32 of transformers replaced; and what was trained goes out and comes back.
    ours, theirs = ours.double(), load_theirs(tmp_path / "theirs", torch.float64).double()
    keep_fp64(monkeypatch)
    with torch.no_grad():
        assert close(ours(TOKENS), theirs(TOKENS).logits, 1e-9)
    losses = train_both(ours, theirs)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][-1] != pytest.approx(losses[0][0], rel=1e-5)
    monkeypatch.undo()
    write_model(tmp_path / "ours", ours, torch.float64)
    again = load_theirs(tmp_path / "ours", torch.float64)
    named = read_config(tmp_path / "ours")["architectures"][0]
    assert named == read_config(tmp_path / "theirs")["architectures"][0]
    assert type(again).__name__ in (named, "PublishedModel")
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), parameter, rtol=1e-6, atol=1e-8)
    assert spec_from_config(read_config(tmp_path / "ours"), "it") == ours.spec
    keep_fp64(monkeypatch)
    with torch.no_grad():
        assert close(ours(TOKENS), again(TOKENS).logits, 1e-9)


def test_corrections_go_out_in_float32(tmp_path: Path) -> None:
    """In bfloat16 a step's move would be lost."""
    theirs_of("deepseek_v3").save_pretrained(tmp_path / "theirs")
    ours = read_model(tmp_path / "theirs", "deepseek_v3")
    write_model(tmp_path / "ours", ours, torch.bfloat16)
    tensors = {
        name: each for file in (tmp_path / "ours").glob("*.safetensors") for name, each in load_file(file).items()
    }
    held = dict(ours.named_parameters())
    wide = {name for name, each in tensors.items() if each.dtype == torch.float32}
    assert wide == {name for name in tensors if name.endswith(".e_score_correction_bias")} != set()
    for name in wide:
        layer = name.split(".")[2]
        assert torch.equal(tensors[name], held[f"layers.{layer}.mlp.router.correction"])
    found = load_theirs(tmp_path / "ours", torch.bfloat16)
    assert {each.dtype for name, each in found.named_buffers() if "correction" in name} == {torch.float32}


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    theirs_of("deepseek_v3").save_pretrained(tmp_path)
    spec, file = spec_from_config(read_config(tmp_path), "it"), tmp_path / "model.safetensors"
    whole, two, inside = load_file(file), torch.ones(2), f"model.layers.{spec.layers}"
    ahead = {f"{inside}.eh_proj.weight": two, f"{inside}.mlp.experts.0.up_proj.weight": two.clone()}
    save_file(whole | ahead, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=rf"predict further tokens \({inside}.\), which are not read"):
        Weights(tmp_path, class_of("deepseek_v3")).check(spec)
    beyond = {f"model.layers.{spec.layers + 1}.mlp.up_proj.weight": two}
    for more in (beyond, {"model.layers.0.eh_proj.weight": two}):  # a layer as any other; and none behind the last
        save_file(whole | more, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"which a model of this config.json does not have"):
            Weights(tmp_path, class_of("deepseek_v3")).check(spec)


def test_every_family_of_decoders_is_among_them() -> None:
    assert {spec_of(kind).architecture for kind in CONFIGS} == {
        name for name, family in FAMILIES.items() if family.writes_text
    }


def train_both(ours: Architecture, theirs: Any) -> list[list[float]]:
    """The losses of some steps of AdamW."""
    curves: list[list[float]] = [[], []]
    for model, curve in zip((ours, theirs), curves, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        for step in range(STEPS):
            tokens = torch.randint(1, VOCAB, (3, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
            if model is ours:
                loss = ours(inputs, labels) / labels.numel()
            else:
                loss = torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    return curves


@pytest.mark.parametrize("kind", list(CONFIGS)[:: 1 if ALL else 3])
def test_a_bad_folder_is_one_sentence(kind: str, tmp_path: Path) -> None:
    """Half of it, one more tensor, and a tensor of another size."""
    theirs_of(kind).save_pretrained(tmp_path)
    spec, file = spec_from_config(read_config(tmp_path), "it"), tmp_path / "model.safetensors"
    whole = load_file(file)
    matrix = max((name for name in whole if whole[name].dim() == 2), key=lambda name: (len(name), name))
    half = {name: tensor for number, (name, tensor) in enumerate(sorted(whole.items())) if number % 2}
    larger = whole | {matrix: torch.cat((whole[matrix], whole[matrix]))}
    for tensors, says in (
        (half, "promises; fetch"),
        (whole | {"more.weight": torch.ones(2)}, "more.weight, which a model of this config.json does not have"),
        (larger, f"holds {matrix} of shape"),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError) as refused:
            Weights(tmp_path, class_of(kind)).check(spec)
        assert says in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt"])
def test_older_names_are_read(kind: str, tmp_path: Path) -> None:
    """Names without what all begin with, those of transformers 5, and causal masks that were stored."""
    theirs = theirs_of(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = read_model(tmp_path / "theirs", kind)
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "old").mkdir()
    mapping = FAMILIES[ours.spec.architecture].hf
    old = {mapping.other_names.get(name, name.removeprefix(mapping.prefix)): each for name, each in stored.items()}
    old |= {f"h.0{ending}": torch.ones(1) for ending in mapping.ignored}
    assert old.keys() != stored.keys()
    save_file(old, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "old" / "config.json").write_text((tmp_path / "theirs" / "config.json").read_text())
    assert torch.equal(read_model(tmp_path / "old", kind)(TOKENS), ours(TOKENS))


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    kind = "gpt_oss"
    theirs_of(kind).save_pretrained(tmp_path)
    file, generator = tmp_path / "model.safetensors", torch.Generator().manual_seed(0)
    stored, expected = load_file(file), {}
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = stored.pop(name).shape
        width -= width % 32  # in whole blocks
        stored[f"{name}_blocks"] = torch.randint(256, (experts, out, width // 32, 16), generator=generator).byte()
        stored[f"{name}_scales"] = torch.randint(115, 130, (experts, out, width // 32), generator=generator).byte()
        expected[name] = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="has weights in MXFP4, which are read as bfloat16"):
        weights = Weights(tmp_path, class_of(kind))
    for layer in range(3):
        for ours in ("gate_up", "down"):
            whole = expected[f"model.layers.{layer}.mlp.experts.{ours}_proj"]
            name = f"layers.{layer}.mlp.experts.{ours}"
            assert weights.shape(name) == whole.shape
            found = weights.read(name, 0, whole.numel())
            assert torch.equal(found, whole.flatten())
            assert torch.equal(weights.read(name, 77, 2000), found[77:2000])
    config = read_config(tmp_path) | {"quantization_config": {"quant_method": "mxfp4"}}
    assert spec_from_config(config, "it") == spec_of(kind)
    with pytest.raises(ConfigError, match="of quantized weights only those in MXFP4 are read"):
        spec_from_config(config | {"quantization_config": {"quant_method": "fp8"}}, "it")
