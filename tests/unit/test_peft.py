"""Adapters to and from the peft library: the same logits, the same training, and what is refused."""

import functools
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from phalanx.core.errors import ConfigError
from phalanx.generate.load_model import _merge
from phalanx.layout.model_shape import EXPERT_TARGETS, LATENT_TARGETS, LORA_TARGETS, LoraSpec, ModelSpec
from phalanx.models.hf_config import read_config, spec_from_config
from phalanx.models.hf_layout import find_adapter_places
from phalanx.models.hf_weights import Weights
from phalanx.models.llama import Llama
from phalanx.models.lora import apply_lora, init_adapter_slice, is_adapter
from phalanx.models.peft import CONFIG, WEIGHTS, WEIGHTS_BIN, Adapter, save_adapter
from phalanx.models.user_model import build_on_meta, hf_name
from tests.family_cases import class_of, theirs_of

TOKENS = torch.randint(0, 41, (3, 12), generator=torch.Generator().manual_seed(0))
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder in float64."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=41, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(shape).double().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' norm rounds to float32 whatever it is given, which would hide every smaller difference."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def theirs(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)


def spec_of(base: Path) -> ModelSpec:
    return spec_from_config(read_config(base), str(base))


def ours(base: Path, lora: LoraSpec, adapter: Adapter | None = None) -> Llama:
    """The model of the folder with an adapter, drawn or read, in float64."""
    weights = Weights(base)
    with torch.device("meta"):
        model = Llama(replace(spec_of(base), lora=lora))
    apply_lora(model, lora)
    model.to(torch.float64).to_empty(device="cpu")
    if adapter is not None:
        adapter.check_shapes({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            n = parameter.numel()
            if not is_adapter(name):
                values = weights.read(name, 0, n)
            elif adapter is not None:
                values = torch.cat([adapter.read(name, 0, 5), adapter.read(name, 5, n)])
            else:
                values = init_adapter_slice(3, name, 0, n, tuple(parameter.shape), "cpu", torch.float64)
            parameter.copy_(values.view(parameter.shape))
    return model


def saved_by_peft(base: Path, folder: Path, **options: Any) -> Any:
    """An adapter that is far from a fresh one, saved by the library; returns the model."""
    chosen: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": NAMES, "task_type": "CAUSAL_LM"} | options
    model = peft.get_peft_model(theirs(base), peft.LoraConfig(**chosen), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    model.save_pretrained(str(folder))
    return model.eval()


@pytest.mark.parametrize(
    ("options", "lora"),
    [
        ({}, LoraSpec(rank=4, alpha=6, targets=LORA_TARGETS)),
        ({"target_modules": "all-linear", "r": 3}, LoraSpec(rank=3, alpha=6, targets=LORA_TARGETS)),
        (
            {"target_modules": r".*\.(q|down)_proj", "use_rslora": True, "lora_dropout": 0.1},
            LoraSpec(rank=4, alpha=12, targets=("q", "down"), dropout=0.1),
        ),
        (
            {"layers_to_transform": [0, 1], "init_lora_weights": "gaussian"},
            LoraSpec(rank=4, alpha=6, targets=LORA_TARGETS),
        ),
    ],
)  # fmt: skip
def test_what_peft_saved_computes_the_same(base: Path, tmp_path: Path, options: dict[str, Any], lora: LoraSpec) -> None:
    model = saved_by_peft(base, tmp_path, **options)
    adapter = Adapter(tmp_path, 2, hf_name)
    assert adapter.lora == lora
    with torch.no_grad():
        expected = model(TOKENS).logits
        assert not torch.allclose(expected, theirs(base)(TOKENS).logits)
        torch.testing.assert_close(ours(base, lora, adapter)(TOKENS), expected, rtol=1e-10, atol=1e-10)


def test_a_matrix_with_a_bias_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen2RMSNorm, "forward", LlamaRMSNorm.forward)
    torch.manual_seed(1)
    shape = Qwen2Config(
        vocab_size=41, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    plain = Qwen2ForCausalLM(shape).double()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    plain.save_pretrained(tmp_path / "base")
    model = saved_by_peft(tmp_path / "base", tmp_path / "adapter")
    adapter = Adapter(tmp_path / "adapter", 2, hf_name)
    with torch.no_grad():
        found = ours(tmp_path / "base", adapter.lora, adapter)(TOKENS)
        torch.testing.assert_close(found, model(TOKENS).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("targets", [LORA_TARGETS, ("v", "up")])
def test_peft_loads_what_we_save(base: Path, tmp_path: Path, targets: tuple[str, ...]) -> None:
    lora = LoraSpec(rank=4, alpha=5.0, targets=targets)
    model = ours(base, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
        save_adapter(tmp_path, lora, 2, model.get_parameter, torch.float64, hf_name, (str(base), None), "known")
        loaded = peft.PeftModel.from_pretrained(theirs(base), str(tmp_path), autocast_adapter_dtype=False)
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS), rtol=1e-10, atol=1e-10)
        found = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float64)  # finds its base
        torch.testing.assert_close(found(TOKENS).logits, model(TOKENS), rtol=1e-5, atol=1e-5)
    again = Adapter(tmp_path, 2, hf_name)
    assert (again.lora, again.base) == (lora, "known")
    assert all(torch.equal(again.read(name, 0, parameter.numel()), parameter.flatten())
               for name, parameter in model.named_parameters() if is_adapter(name))  # fmt: skip


def test_three_steps_of_training_are_those_of_peft_and_transformers(base: Path, tmp_path: Path) -> None:
    reference = saved_by_peft(base, tmp_path).train()
    adapter = Adapter(tmp_path, 2, hf_name)
    model = ours(base, adapter.lora, adapter)
    labels = TOKENS.clone()
    labels[0, :4] = -100
    losses: dict[str, list[float]] = {"theirs": [], "ours": []}
    for who, trained in (("theirs", reference), ("ours", model)):
        chosen = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        assert len(chosen) == 2 * 2 * 7
        optimizer = torch.optim.AdamW(chosen, lr=1e-2, weight_decay=0.1)
        for _ in range(3):
            if who == "theirs":
                loss = F.cross_entropy(trained(TOKENS).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            else:
                loss = trained(TOKENS[:, :-1], labels[:, 1:]) / labels[:, 1:].ne(-100).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[who].append(float(loss.detach()))
    assert losses["ours"] == pytest.approx(losses["theirs"], rel=1e-10)
    assert losses["ours"][2] < losses["ours"][0]
    reference.save_pretrained(tmp_path / "after")
    after = Adapter(tmp_path / "after", 2, hf_name)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            torch.testing.assert_close(
                parameter.flatten(), after.read(name, 0, parameter.numel()), rtol=1e-9, atol=1e-10
            )


def test_weights_in_a_bin_file_are_read_and_programs_in_one_are_not_run(base: Path, tmp_path: Path) -> None:
    saved_by_peft(base, tmp_path)
    before = Adapter(tmp_path, 2, hf_name)
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    torch.save(tensors, tmp_path / WEIGHTS_BIN)
    after = Adapter(tmp_path, 2, hf_name)
    assert after.lora == before.lora
    assert torch.equal(after.read("layers.1.mlp.up.lora_b", 0, 96), before.read("layers.1.mlp.up.lora_b", 0, 96))

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "it ran"),)

    torch.save({"x": Evil()}, tmp_path / WEIGHTS_BIN)
    with pytest.raises(ConfigError, match="cannot be read as plain weights"):
        Adapter(tmp_path, 2, hf_name)
    assert not (tmp_path / "it ran").exists()


@pytest.fixture(scope="module")
def good(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    saved_by_peft(base, folder)
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"), ("task_type", "SEQ_CLS"), ("bias", "all"), ("init_lora_weights", "pissa"),
        ("use_dora", True), ("fan_in_fan_out", True), ("rank_pattern", {"q_proj": 2}), ("alpha_pattern", {"q_proj": 2}),
        ("modules_to_save", ["lm_head"]), ("lora_bias", True), ("layer_replication", [[0, 2]]), ("use_qalora", True),
        ("trainable_token_indices", [1]), ("a_key_of_tomorrow", 1), ("r", 0), ("r", 2.5), ("r", "4"),
        ("lora_alpha", None), ("lora_alpha", -1), ("lora_dropout", 1.0), ("lora_alpha", math.inf),
    ],
)  # fmt: skip
def test_what_would_compute_something_else_is_refused_by_name(good: Path, tmp_path: Path, key: str, value: Any) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(good, folder)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {key: value}))
    with pytest.raises(ConfigError, match=rf"{re.escape(str(folder / CONFIG))} .*{key}") as caught:
        Adapter(folder, 2, hf_name)
    assert "; " in str(caught.value)


def test_files_that_are_wrong_are_named(good: Path, tmp_path: Path) -> None:
    def attempt(change: Any, layers: int = 2) -> str:
        folder = tmp_path / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        change(folder)
        with pytest.raises(ConfigError) as caught:
            Adapter(folder, layers, hf_name)
        return str(caught.value)

    def tensors(change: Any) -> Any:
        def apply(folder: Path) -> None:
            content = load_file(folder / WEIGHTS)
            change(content)
            save_file(content, folder / WEIGHTS)

        return apply

    q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    head = {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 16)}
    assert "has neither" in attempt(lambda folder: (folder / WEIGHTS).unlink())
    assert "cannot be read" in attempt(lambda folder: (folder / CONFIG).unlink())
    assert "not valid JSON" in attempt(lambda folder: (folder / CONFIG).write_text("{"))
    assert "no JSON object" in attempt(lambda folder: (folder / CONFIG).write_text("[]"))
    assert f"{WEIGHTS} cannot be read" in attempt(lambda folder: os.truncate(folder / WEIGHTS, 999))
    assert f"lack {q}" in attempt(tensors(lambda content: content.pop(q)))
    assert "lm_head" in attempt(tensors(lambda content: content.update(head)))
    assert "layers.1.mlp" in attempt(lambda folder: None, layers=1)
    assert "lack" in attempt(lambda folder: None, layers=3)
    assert "contain no adapter" in attempt(tensors(dict.clear))
    assert "torch.int8" in attempt(tensors(lambda content: content.update({q: content[q].to(torch.int8)})))


def test_an_adapter_for_another_model_is_refused(good: Path, base: Path) -> None:
    adapter = Adapter(good, 2, hf_name)
    shapes: dict[str, Any] = {name: tuple(tensor.shape) for name, tensor in ours(base, adapter.lora).named_parameters()}
    adapter.check_shapes(shapes)
    with pytest.raises(ConfigError, match=r"q_proj.lora_A.weight in .* has the shape \(4, 16\), .* make it \(4, 32\)"):
        adapter.check_shapes(shapes | {"layers.0.attention.q.lora_a": (4, 32)})


def test_tensors_are_saved_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    def tensor_of(name: str) -> Tensor:
        return torch.full((2, 3) if name.endswith("a") else (3, 2), 1 / 3, dtype=torch.float64)

    lora = LoraSpec(rank=2, alpha=1.5, targets=("q",))
    save_adapter(tmp_path, lora, 1, tensor_of, torch.bfloat16, hf_name, ("org/id", None), None)
    assert {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS).values()} == {torch.bfloat16}
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["lora_alpha"], config["target_modules"], config["base_model_name_or_path"]) == (
        1.5,
        ["q_proj"],
        "org/id",
    )


# ------------------------------------------------------------------------- several matrices in one tensor, transposed

FUSED = {
    "phi3": ("q", "v", "up", "down"),
    "gpt2": ("q", "k", "v", "o"),
    "falcon, new decoder": ("q", "v", "down"),
    "mixtral": ("q", *EXPERT_TARGETS),
    "gpt_oss": EXPERT_TARGETS,
    "olmoe": ("v", "experts.down"),
    "deepseek_v3": ("o", *LATENT_TARGETS),
    "deepseek_v3, wide queries": ("q", "kv_up"),
}


def fused(folder: Path) -> Any:
    """transformers' model, with experts in float64."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")


@pytest.mark.parametrize("kind", FUSED)
def test_adapters_of_matrices_in_one_tensor_are_read_by_peft(kind: str, tmp_path: Path) -> None:
    theirs_of(kind).double().save_pretrained(tmp_path / "base")
    spec, code = spec_from_config(read_config(tmp_path / "base"), kind), class_of(kind)
    lora, names = LoraSpec(rank=2, alpha=3.0, targets=FUSED[kind]), functools.partial(hf_name, model_class=code)
    places, weights = find_adapter_places(code, spec), Weights(tmp_path / "base", code)
    model = build_on_meta(replace(spec, lora=lora), code).to(torch.float64).to_empty(device="cpu").eval()
    weights.check(spec)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn_like(parameter) * 0.3
            if not is_adapter(name):
                values = weights.read(name, 0, parameter.numel()).view(parameter.shape)
            parameter.copy_(values)
    (tmp_path / "adapter").mkdir()
    base = str(tmp_path / "base"), None
    layers = spec.layers
    save_adapter(tmp_path / "adapter", lora, layers, model.get_parameter, torch.float64, names, base, None, places)
    adapted = str(tmp_path / "adapter")
    tuned = peft.PeftModel.from_pretrained(fused(tmp_path / "base"), adapted, autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        expected = model(TOKENS)
        plain = fused(tmp_path / "base")(TOKENS).logits
        assert (tuned(TOKENS).logits - expected).norm() < 1e-5 * expected.norm() < 1e-2 * (plain - expected).norm()
        _merge(loaded := fused(tmp_path / "base"), *(tmp_path / each for each in ("base", "adapter")))
        assert (loaded(TOKENS).logits - expected).norm() < 1e-5 * expected.norm()
    again = Adapter(tmp_path / "adapter", layers, names, places)
    assert again.lora == lora
    again.check_shapes({name: tuple(each.shape) for name, each in model.named_parameters()})
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert torch.equal(again.read(name, 0, parameter.numel()).view(parameter.shape), parameter), name


def test_adapters_of_experts_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    theirs_of("mixtral").save_pretrained(tmp_path / "base")
    spec, names = spec_of(tmp_path / "base"), functools.partial(hf_name, model_class=class_of("mixtral"))
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    chosen = peft.LoraConfig(r=4, target_modules=[], target_parameters=stacks, task_type="CAUSAL_LM")
    peft.get_peft_model(theirs(tmp_path / "base"), chosen).save_pretrained(str(tmp_path / "adapter"))
    assert Adapter(tmp_path / "adapter", spec.layers, names).lora.targets == EXPERT_TARGETS
    file = tmp_path / "adapter" / CONFIG
    whole = json.loads(file.read_text())
    for more, says in (
        ({"target_parameters": ["mlp.gate.weight"]}, "sets target_parameters"),
        ({"target_parameters": stacks[:1]}, "lora_A.weight, but only adapters of the matrices"),
        ({"alpha_pattern": {"experts": 2}}, "sets target_parameters"),
        ({"r": 3}, "of no whole number of experts of rank 3"),
    ):
        file.write_text(json.dumps(whole | more))
        with pytest.raises(ConfigError, match=says):
            Adapter(tmp_path / "adapter", spec.layers, names)


def test_one_adapter_of_several_matrices_is_several_with_the_same_a(tmp_path: Path) -> None:
    theirs_of("phi3").double().save_pretrained(tmp_path / "base")
    spec, code = spec_from_config(read_config(tmp_path / "base"), "phi3"), class_of("phi3")
    saved_by_peft(tmp_path / "base", tmp_path / "adapter", target_modules=["qkv_proj"])
    names, places = functools.partial(hf_name, model_class=code), find_adapter_places(code, spec)
    adapter = Adapter(tmp_path / "adapter", 2, names, places)
    assert adapter.lora == LoraSpec(rank=4, alpha=6, targets=("q", "k", "v"))
    stored = load_file(tmp_path / "adapter" / WEIGHTS)
    module = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_"
    parts = [adapter.read(f"layers.1.attention.{each}.lora_b", 0, 1 << 20).view(-1, 4) for each in "qkv"]
    assert torch.equal(torch.cat(parts), stored[f"{module}B.weight"])
    for each in "qkv":
        assert torch.equal(
            adapter.read(f"layers.1.attention.{each}.lora_a", 0, 128).view(4, 32), stored[f"{module}A.weight"]
        )
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    for key, value, says in (
        ("rank_pattern", {"qkv_proj": 8}, "sets rank_pattern"),
        ("alpha_pattern", {"qkv_proj": 1}, "sets alpha_pattern"),
        ("alpha_pattern", {"qkv_proj": 18}, "sets alpha_pattern"),  # of a rank that is not so much larger
        ("alpha_pattern", {".*(q|k)kv_.*": 12}, "sets alpha_pattern"),
        ("r", 1, r"of shape|has the shape"),
    ):
        (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config | {key: value}))
        with pytest.raises(ConfigError, match=says):
            Adapter(tmp_path / "adapter", 2, names, places)
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    wide = {name: torch.cat([each] * 3, 0 if "lora_A" in name else 1) for name, each in tensors.items()}
    save_file(wide, tmp_path / "adapter" / WEIGHTS)
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config | {"rank_pattern": {"qkv_proj": 12}}))
    with pytest.raises(ConfigError, match="sets rank_pattern"):
        Adapter(tmp_path / "adapter", 2, names, places)
    more = {"rank_pattern": {"qkv_proj": 12}, "alpha_pattern": {"qkv_proj": 18}}
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config | more))
    with pytest.raises(ConfigError, match="is of one adapter of rank 12 for matrices that are trained apart here"):
        Adapter(tmp_path / "adapter", 2, names, places)
