"""Mistral, Qwen2 and Qwen3 and every rule of rotary positions beside transformers' own models, with random weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec, RopeScaling
from phalanx.models.families.catalog import parameter_count, parameter_shapes
from phalanx.models.hf_config import config_from_spec, read_config, spec_from_config
from phalanx.models.hf_export import export
from phalanx.models.hf_weights import Weights
from phalanx.models.llama import Llama, init_slice
from phalanx.models.rotary import rope_frequencies, rope_table
from phalanx.models.user_model import hf_name
from tests.helpers import some

LENGTH = 96
LLAMA = ModelSpec(vocab_size=96, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=48, max_seq_len=128)
MISTRAL = replace(LLAMA, architecture="mistral")
QWEN2 = replace(LLAMA, architecture="qwen2", norm_eps=1e-6)
QWEN3 = replace(LLAMA, architecture="qwen3", head_dim=16)
YARN = RopeScaling(rule="yarn", factor=4.0, original_max_seq_len=32)
SPECS = {
    "mistral": MISTRAL,
    "mistral, window": replace(MISTRAL, sliding_window=7, kv_heads=1),
    "mistral, odd width": replace(MISTRAL, hidden=30, head_dim=4),
    "qwen2": QWEN2,
    "qwen2, tied": replace(QWEN2, tie_embeddings=True, head_dim=16),
    "qwen2, last windowed": replace(QWEN2, sliding_window=9, full_attention_layers=(0, 1)),
    "qwen3": QWEN3,
    "qwen3, tied": replace(QWEN3, tie_embeddings=True, kv_heads=4),
    "qwen3, some windowed": replace(QWEN3, sliding_window=11, full_attention_layers=(1,)),
    "linear": replace(LLAMA, rope_scaling=RopeScaling(rule="linear", factor=2.5)),
    "dynamic": replace(LLAMA, rope_scaling=RopeScaling(rule="dynamic", factor=1.7)),
    "yarn": replace(QWEN2, rope_scaling=YARN, rope_theta=1e6),
    "yarn, all said": replace(
        LLAMA, head_dim=32,
        rope_scaling=replace(YARN, beta_fast=20.0, beta_slow=2.0, truncate=False, mscale=0.8, mscale_all_dim=1.1),
    ),
    "yarn, attention factor": replace(QWEN3, rope_scaling=replace(YARN, attention_factor=1.25)),
    "llama3": replace(MISTRAL, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=64), rope_theta=5e5),
}  # fmt: skip
WINDOWED = {"use_sliding_window": True, "sliding_window": 4}
TOKENS = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def values(spec: ModelSpec, name: str) -> torch.Tensor:
    """Far from those at the start of training: attention is sharp, and biases and norms do something."""
    shape = parameter_shapes(spec)[name]
    drawn = init_slice(spec, 0, f"{name} drawn", 0, torch.Size(shape).numel(), "cpu", torch.float64).view(shape)
    return 1 + 5 * drawn if "norm" in name else 10 * drawn


def beside(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> tuple[Llama, Any]:
    """Our model and theirs, of the same weights."""
    ours = Llama(spec).to(dtype)
    config = transformers.AutoConfig.for_model(**config_from_spec(spec, dtype))
    config._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(values(spec, name))
            theirs.get_parameter(hf_name(name)).copy_(parameter)
    theirs.tie_weights()
    return ours, theirs


@pytest.mark.parametrize("kind", SPECS)
def test_logits_are_those_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {dtype: beside(SPECS[kind], dtype) for dtype in (torch.float32, torch.float64)}
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        ours, theirs = models[dtype]
        monkeypatch.setattr(torch, "float32", dtype)  # in which transformers takes norms and softmax, and we at least
        with torch.no_grad():
            mine, expected = ours(TOKENS), theirs(TOKENS).logits
        assert (mine - expected).norm() <= tolerance * expected.norm()
        assert sum(p.numel() for p in theirs.parameters()) == parameter_count(SPECS[kind])


@pytest.mark.parametrize("kind", SPECS)
def test_angles_are_those_of_transformers_to_the_last_bit(kind: str) -> None:
    spec = SPECS[kind]
    rotary = beside(spec)[1].model.rotary_emb
    frequencies, scale = rope_frequencies(spec, LENGTH)
    assert torch.equal(frequencies, rotary.inv_freq)
    assert scale == rotary.attention_scaling
    positions = torch.arange(LENGTH)
    cos, sin = rope_table(spec, positions)
    for ours, theirs in zip((cos, sin), rotary(torch.zeros(1), positions[None]), strict=True):
        assert torch.equal(torch.cat((ours, ours), -1), theirs[0])


def test_a_dynamic_rule_grows_beyond_the_declared_length() -> None:
    spec = replace(SPECS["dynamic"], max_seq_len=40)
    ours, theirs = beside(spec, torch.float32)
    with torch.no_grad():
        shorter, longer = theirs(TOKENS[:, :40]).logits, theirs(TOKENS).logits
    assert (ours(TOKENS) - longer).norm() <= 1e-5 * longer.norm()
    assert (ours(TOKENS[:, :40]) - shorter).norm() <= 1e-5 * shorter.norm()
    assert (ours(TOKENS)[:, :40] - shorter).norm() > 1e-3 * shorter.norm()


@pytest.mark.parametrize("kind", ["mistral, window", "qwen2, tied", "qwen3, some windowed", "yarn"])
def test_five_steps_are_those_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW in float64 on both; their model is made to take norms and softmax in float64 too, as ours does."""
    ours, theirs = beside(SPECS[kind])
    monkeypatch.setattr(torch, "float32", torch.float64)
    models = [ours, theirs]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1) for m in models]
    curves: list[list[float]] = [[], []]
    for step in range(5):
        tokens = torch.randint(0, 96, (4, 33), generator=torch.Generator().manual_seed(step))
        for model, optimizer, curve in zip(models, optimizers, curves, strict=True):
            optimizer.zero_grad()
            if model is ours:
                loss = ours(tokens[:, :-1], tokens[:, 1:].contiguous()) / (4 * 32)
            else:
                logits = theirs(tokens[:, :-1]).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    assert curves[0] == pytest.approx(curves[1], rel=1e-11)
    assert curves[0][4] != pytest.approx(curves[0][0], rel=1e-3)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs.get_parameter(hf_name(name)), rtol=1e-6, atol=1e-8)


# Of each family one; windows, tied weights, and each rule of positions.
@pytest.mark.parametrize("kind", some(SPECS, 1, 4, 8, 9, 10, 12, 13, 14))
def test_a_folder_comes_back_as_it_went(kind: str, tmp_path: Path) -> None:
    spec = SPECS[kind]
    export(tmp_path / "a", spec, lambda name: values(spec, name), torch.float32, max_shard_bytes=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    assert theirs.config.architectures == read_config(tmp_path / "a")["architectures"]
    assert type(theirs).__name__ == theirs.config.architectures[0]
    ours = beside(spec, torch.float32)[0]
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert (ours(TOKENS) - expected).norm() <= 1e-5 * expected.norm()
    # What transformers makes of it is read as the same model, tensors and all.
    theirs.save_pretrained(tmp_path / "b", max_shard_size="30KB")
    again = spec_from_config(read_config(tmp_path / "b"), "b")
    assert again == spec
    weights = Weights(tmp_path / "b")
    weights.check(spec)
    export(
        tmp_path / "c", again, lambda name: weights.read(name, 0, values(spec, name).numel()), weights.dtype(),
        max_shard_bytes=20_000, original_config=read_config(tmp_path / "a"),
    )  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(
        path.name for path in (tmp_path / "c").iterdir()
    )
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "c" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
def test_a_config_that_says_little_means_what_transformers_means(architecture: str) -> None:
    keys = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    full = config_from_spec(replace(LLAMA, architecture=architecture, hidden=256, heads=32), torch.float32)
    config = {key: full[key] for key in (*keys, "intermediate_size", "model_type")}
    theirs = transformers.AutoConfig.for_model(**config)
    ours = spec_from_config({key: config[key] for key in config if key != "architectures"}, "config.json")
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.architecture, ours.kv_heads, ours.head_dim, ours.max_seq_len, ours.sliding_window) == (
        architecture, theirs.num_key_value_heads, head_dim, theirs.max_position_embeddings, theirs.sliding_window,
    )  # fmt: skip
    assert (ours.norm_eps, ours.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("spec", "changes", "window", "full"),
    [
        (MISTRAL, {"sliding_window": 4}, 4, ()),
        (MISTRAL, {"sliding_window": None}, None, ()),
        (QWEN2, {"use_sliding_window": False, "sliding_window": 4, "layer_types": None}, None, ()),
        (QWEN2, WINDOWED | {"max_window_layers": 1, "layer_types": None}, 4, (0,)),
        (QWEN2, WINDOWED | {"max_window_layers": 9, "layer_types": None}, None, ()),
        (QWEN3, WINDOWED | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, 4, (1,)),
    ],
)  # fmt: skip
def test_windows_are_read_as_transformers_reads_them(
    spec: ModelSpec, changes: dict[str, Any], window: int | None, full: tuple[int, ...]
) -> None:
    config = config_from_spec(spec, torch.float32) | changes
    ours = spec_from_config(config, "config.json")
    assert (ours.sliding_window, ours.full_attention_layers) == (window, full)
    theirs = transformers.AutoConfig.for_model(**config)
    told = (
        getattr(theirs, "layer_types", None) or ["sliding_attention" if theirs.sliding_window else "full_attention"] * 3
    )
    assert told == ["full_attention" if ours.window_of(layer) is None else "sliding_attention" for layer in range(3)]


@pytest.mark.parametrize(
    ("spec", "changes", "named"),
    [
        (QWEN3, {"attention_bias": True}, "attention_bias"),
        (MISTRAL, {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN2, {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 3}, "contradict"),
        (QWEN3, {"use_sliding_window": 1, "sliding_window": 4}, "use_sliding_window"),
        (MISTRAL, {"sliding_window": 0}, "model.sliding_window"),
        (MISTRAL, {"sliding_window": "4"}, "sliding_window"),
    ],
)
def test_what_cannot_be_meant_is_refused(spec: ModelSpec, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=r"here/config\.json") as caught:
        spec_from_config(config_from_spec(spec, torch.float32) | changes, "here/config.json")
    assert named in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- .bin files


def pickled(folder: Path, spec: ModelSpec, size: str) -> None:
    """A folder as old versions of transformers wrote it."""
    import json

    theirs = beside(spec, torch.float32)[1]
    theirs.config.save_pretrained(folder)
    state = theirs.state_dict()
    if size == "one":
        torch.save(state, folder / "pytorch_model.bin")
        return
    names = list(state)
    files = {f"pytorch_model-{i + 1:05d}-of-00002.bin": names[i::2] for i in range(2)}
    for file, part in files.items():
        torch.save({name: state[name] for name in part}, folder / file)
    where = {name: file for file, part in files.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("size", ["one", "two"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3, tied"])
def test_bin_files_are_read_by_range(kind: str, size: str, tmp_path: Path) -> None:
    spec = SPECS[kind]
    pickled(tmp_path, spec, size)
    weights = Weights(tmp_path)
    weights.check(spec_from_config(read_config(tmp_path), "config.json"))
    assert weights.dtype() == torch.float32
    for name in parameter_shapes(spec):
        expected = values(spec, name).float().flatten()
        assert torch.equal(weights.read(name, 0, expected.numel()), expected)
        part = weights.read(name, 3, expected.numel() - 2)
        assert torch.equal(part, expected[3:-2])
        assert part.untyped_storage().nbytes() == part.nbytes
        wide = torch.zeros(expected.numel() - 5, dtype=torch.float64)
        weights.read_into(name, 3, expected.numel() - 2, wide)
        assert torch.equal(wide, expected[3:-2].double())


class Unwanted:
    """Its unpickling would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path("ran"), "code"))


def test_a_bin_file_runs_nothing_and_a_bad_one_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickled(tmp_path, QWEN2, "one")
    path = tmp_path / "pytorch_model.bin"
    good = path.read_bytes()
    for content in ({"model.norm.weight": Unwanted()}, [torch.ones(3)], {"model.norm.weight": 3}):
        torch.save(content, path)
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
            Weights(tmp_path)
    for damaged in (good[:-200], b"", b"not a pickle at all"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin cannot be read") as caught:
            Weights(tmp_path)
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)
    assert not Path("ran").exists()
    torch.save({"model.norm.weight": torch.ones(3)}, path)
    with pytest.raises(ConfigError, match=r"lacks model\.embed_tokens\.weight"):
        Weights(tmp_path).check(QWEN2)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors file and no pytorch_model\.bin"):
        Weights(tmp_path)
