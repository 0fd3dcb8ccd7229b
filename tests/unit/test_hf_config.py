import json
import math
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec, RopeScaling
from phalanx.models import hf_weights as weights_module
from phalanx.models.families.catalog import PRESETS, parameter_shapes
from phalanx.models.hf_config import config_from_spec, read_config, spec_from_config
from phalanx.models.hf_export import export, plan_shards
from phalanx.models.hf_weights import Weights
from phalanx.models.llama import Llama, init_slice
from phalanx.models.rotary import rope_table
from phalanx.models.user_model import hf_name

SPEC = ModelSpec(vocab_size=96, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=48, max_seq_len=256)
SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64)
SPECS = {
    "gqa": SPEC,
    "mha": replace(SPEC, kv_heads=4, norm_eps=1e-6),
    "tied": replace(SPEC, tie_embeddings=True),
    "llama3": replace(SPEC, rope_scaling=SCALED, rope_theta=500000.0),
    "wide heads": replace(SPEC, head_dim=16, kv_heads=1),
}
TOKENS = torch.randint(0, 96, (2, 200), generator=torch.Generator().manual_seed(0))


def read_model(folder: Path) -> Llama:
    spec = spec_from_config(read_config(folder), str(folder))
    weights = Weights(folder)
    weights.check(spec)
    with torch.device("meta"):
        model = Llama(spec)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name, 0, parameter.numel()).view_as(parameter))
    return model


def values(spec: ModelSpec, seed: int = 0, boost: float = 10.0) -> Callable[[str], torch.Tensor]:
    """Larger than at the start of training, so that attention is far from uniform and positions matter."""

    def tensor_of(name: str) -> torch.Tensor:
        shape = parameter_shapes(spec)[name]
        n = torch.Size(shape).numel()
        return init_slice(spec, seed, name, 0, n, "cpu", torch.float32) * (1.0 if "norm" in name else boost)

    return tensor_of


def write(folder: Path, spec: ModelSpec = SPEC, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    export(folder, spec, values(spec), dtype, **options)
    return folder


def rewrite_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))


def assert_same_model(ours: Llama, theirs: Any) -> None:
    labels = TOKENS.roll(-1, 1).clone()
    labels[:, -1] = -100
    logits = theirs(TOKENS).logits
    assert (ours(TOKENS) - logits).norm() <= 1e-5 * logits.norm()
    assert (ours(TOKENS) - logits).abs().max() <= 1e-5 * logits.abs().max()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    our_loss = ours(TOKENS, labels)
    our_loss.backward()
    assert abs(our_loss - loss) <= 1e-5 * loss
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    by_shape = sorted((tuple(g.shape), float(g.norm())) for g in grads.values())
    our_grads = sorted((tuple(p.grad.shape), float(p.grad.norm())) for p in ours.parameters() if p.grad is not None)
    assert [shape for shape, _ in our_grads] == [shape for shape, _ in by_shape]
    for (_, a), (_, b) in zip(our_grads, by_shape, strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    torch.testing.assert_close(ours.embed.weight.grad, grads["model.embed_tokens.weight"], rtol=1e-3, atol=1e-4)
    q = ours.layers[1].attention.q.weight.grad  # type: ignore[union-attr]
    torch.testing.assert_close(q, grads["model.layers.1.self_attn.q_proj.weight"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", SPECS)
def test_a_transformers_folder_gives_equal_logits_and_gradients(kind: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**config_from_spec(SPECS[kind], torch.float32), attn_implementation="eager")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    ours = read_model(tmp_path / "hf")
    assert ours.spec == SPECS[kind]
    assert_same_model(ours, theirs)


@pytest.mark.parametrize("kind", SPECS)
def test_transformers_loads_an_export_with_equal_logits_and_gradients(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "out", SPECS[kind], max_shard_bytes=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(theirs, transformers.LlamaForCausalLM)
    assert theirs.config.rope_parameters["rope_theta"] == SPECS[kind].rope_theta
    assert_same_model(read_model(folder), theirs)


def test_transformers_reads_the_exported_dtype_and_ids(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", dtype=torch.bfloat16, bos_id=None, eos_id=[5, 6])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.bfloat16
    assert theirs.config.bos_token_id is None
    assert theirs.generation_config.eos_token_id == [5, 6]
    assert transformers.LlamaConfig.from_pretrained(write(tmp_path / "none")).eos_token_id is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", [1, 20_000, 5_000_000_000])
def test_export_of_import_is_bit_exact(dtype: torch.dtype, shard: int, tmp_path: Path) -> None:
    first = write(tmp_path / "a", dtype=dtype, max_shard_bytes=shard)
    weights = Weights(first)
    assert weights.dtype() == dtype
    n = {name: torch.Size(shape).numel() for name, shape in parameter_shapes(SPEC).items()}
    config = read_config(first)
    export(
        tmp_path / "b",
        spec_from_config(config, "a"),
        lambda name: weights.read(name, 0, n[name]),
        dtype,
        max_shard_bytes=shard,
        original_config=config,
    )
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in files:
        assert (first / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert len([name for name in files if name.endswith(".safetensors")]) == {1: 30, 20_000: len(files) - 3}.get(
        shard, 1
    )


def test_no_shard_exceeds_its_limit_and_one_is_held_at_a_time(tmp_path: Path) -> None:
    done: list[int] = []
    folder = write(tmp_path / "out", max_shard_bytes=20_000, progress=done.append)
    shapes = parameter_shapes(SPEC)
    shards = plan_shards(shapes, dict.fromkeys(shapes, torch.float32), 20_000)
    files = sorted(folder.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(files) == len(shards) > 3
    for path in files:
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 20_000
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert (
        index["metadata"]["total_size"]
        == sum(done)
        == 4 * sum(torch.Size(s).numel() for s in parameter_shapes(SPEC).values())
    )
    assert len(index["weight_map"]) == len(parameter_shapes(SPEC))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hf") / "model", max_shard_bytes=20_000)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(parameter_shapes(SPEC))), st.floats(0, 1), st.floats(0, 1))
def test_any_range_is_read_as_written(folder: Path, name: str, a: float, b: float) -> None:
    expected = values(SPEC)(name).flatten()
    start, stop = sorted((round(a * len(expected)), round(b * len(expected))))
    got = Weights(folder).read(name, start, stop)
    assert torch.equal(got, expected[start:stop])


def test_only_the_needed_bytes_are_kept(tmp_path: Path) -> None:
    spec = replace(SPEC, vocab_size=50_000)
    part = Weights(write(tmp_path / "big", spec)).read("embed.weight", 33, 70)
    held_bytes = part.untyped_storage().nbytes()
    assert held_bytes == part.nbytes == 37 * 4


def test_a_range_outside_is_a_programming_error(folder: Path) -> None:
    with pytest.raises(ValueError, match="3072 elements"):
        Weights(folder).read("embed.weight", 0, 3073)


def test_shards_without_an_index_are_found(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors.index.json").unlink()
    assert torch.equal(read_model(tmp_path / "copy")(TOKENS), read_model(folder)(TOKENS))


def test_a_tied_matrix_may_be_stored_under_the_name_of_the_head(tmp_path: Path) -> None:
    spec = SPECS["tied"]
    model = write(tmp_path / "tied", spec) / "model.safetensors"
    tensors = load_file(model)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # of an old transformers
    save_file(tensors, model)
    assert torch.equal(read_model(model.parent).embed.weight, values(spec)("embed.weight").view(96, 32))


def test_presets_survive_config_json(tmp_path: Path) -> None:
    for name, spec in PRESETS.items():
        config = json.loads(json.dumps(config_from_spec(spec, torch.bfloat16)))
        if spec.moe is not None:  # the balance is what transformers would do
            assert spec_from_config(config, name).moe == replace(spec.moe, balance="step_before", over="model")
            spec = replace(spec, moe=spec_from_config(config, name).moe)
        assert spec_from_config(config, name) == spec
        for old in ({"rope_parameters": None}, {"rope_theta": None, "rope_scaling": None}):
            assert spec_from_config(config | old, name) == spec


def test_the_shortest_old_config_means_what_transformers_means() -> None:
    keys = (
        "architectures",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
    )
    config = {key: value for key, value in config_from_spec(SPEC, torch.float32).items() if key in keys}
    theirs = transformers.LlamaConfig(**config)
    ours = spec_from_config(config, "config.json")
    assert (ours.kv_heads, ours.head_dim, ours.norm_eps, ours.max_seq_len, ours.tie_embeddings, ours.rope_theta) == (
        theirs.num_key_value_heads,
        theirs.head_dim,
        theirs.rms_norm_eps,
        theirs.max_position_embeddings,
        theirs.tie_word_embeddings,
        theirs.rope_parameters["rope_theta"],
    )


def test_other_keys_of_the_original_config_are_kept() -> None:
    original = {"pretraining_tp": 1, "use_cache": False, "eos_token_id": 7, "vocab_size": 5, "torch_dtype": "float16"}
    config = config_from_spec(SPEC, torch.bfloat16, original, bos_id=3)
    kept = {key: config[key] for key in ("pretraining_tp", "use_cache", "eos_token_id", "bos_token_id")}
    assert kept == {"pretraining_tp": 1, "use_cache": False, "eos_token_id": 7, "bos_token_id": 3}
    assert (config["vocab_size"], config["torch_dtype"], config["dtype"]) == (96, "bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None, "model_type": "mamba"}, ["mamba", "LlamaForCausalLM"]),
        ({"attention_bias": "yes"}, ["attention_bias"]),
        ({"mlp_bias": 1}, ["mlp_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope", "llama3"]),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, ["su", "linear, dynamic, yarn, llama3"]),
        ({"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor", "0.25"]),
        ({"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["each kind of layer"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0.5}}, ["beta_fast"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "no"}}, ["truncate"]),
        ({"attention_dropout": 0.1}, ["attention_dropout"]),
        ({"is_causal": False}, ["is_causal"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ({"rope_scaling": "llama3"}, ["rope_scaling"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"vocab_size": "96"}, ["vocab_size"]),
        ({"num_attention_heads": 0}, ["model.heads"]),
        ({"num_key_value_heads": 3}, ["model.kv_heads"]),
    ],
)
def test_an_unsupported_config_is_named(changes: dict[str, Any], named: list[str]) -> None:
    config = config_from_spec(SPEC, torch.float32) | changes
    with pytest.raises(ConfigError) as caught:
        spec_from_config(config, "folder/config.json")
    assert all(word in str(caught.value) for word in ["folder/config.json", *named])


def _damage_header(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def _truncate(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def _edit(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "torn config": (lambda f: (f / "config.json").write_text('{"a'), "not valid JSON"),
    "list config": (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no .safetensors file"),
    "torn header": (_damage_header, "model.safetensors cannot be read"),
    "truncated": (_truncate, "model.safetensors cannot be read"),
    "missing": (_edit(lambda t: t.pop("model.norm.weight")), "lacks model.norm.weight"),
    "no head": (_edit(lambda t: t.pop("lm_head.weight")), "lacks lm_head.weight"),
    "no layer": (lambda f: rewrite_config(f, num_hidden_layers=4), "model.layers.3.input_layernorm.weight"),
    "more layers": (lambda f: rewrite_config(f, num_hidden_layers=2), "model.layers.2."),
    "other shape": (lambda f: rewrite_config(f, vocab_size=97), "holds model.embed_tokens.weight of shape (96, 32)"),
    "bias": (_edit(lambda t: t.update(b_proj=torch.ones(3))), "holds b_proj"),
    "integers": (_edit(lambda t: t.update({"model.norm.weight": torch.ones(32).int()})), "as I32"),
    "index of nothing": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "no index of weights"),
    "index lies": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
        "lacks gone.safetensors",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_is_one_sentence(kind: str, tmp_path: Path) -> None:
    damage, sentence = DAMAGE[kind]
    folder = write(tmp_path / "model")
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        read_model(folder)
    assert sentence in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("chunk_bytes", [2, 7, 64, 2 << 20])
def test_any_range_is_read_as_any_dtype(chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_CHUNK_BYTES", chunk_bytes)
    whole = values(SPEC)("layers.0.mlp.up.weight").to(torch.bfloat16)
    weights = Weights(write(tmp_path / "model", dtype=torch.bfloat16))
    for start, stop in ((0, whole.numel()), (33, 34), (5, 777), (9, 9)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            apart = torch.full((2 * (stop - start) + 1,), 7.0, dtype=dtype)
            for out in (apart[1 : stop - start + 1], apart[1::2]):
                weights.read_into("layers.0.mlp.up.weight", start, stop, out)
                assert torch.equal(out, whole[start:stop].to(dtype))
            assert apart[0] == 7.0
    for start, stop in ((-1, 3), (5, 4), (0, whole.numel() + 1)):
        with pytest.raises(ValueError, match="was asked for"):
            weights.read("layers.0.mlp.up.weight", start, stop)


def test_what_is_read_stays_no_part_of_the_process(tmp_path: Path) -> None:
    """A mapped file would be counted as its memory."""
    folder = write(tmp_path / "model")
    weights = Weights(folder)
    weights.check(SPEC)
    read = weights.read("embed.weight", 0, 100)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert read.shape == (100,)


def test_a_file_that_shrinks_meanwhile_is_one_sentence(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    weights = Weights(folder)
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 4)
    last = "head.norm.weight"  # they lie in the file as the model names them
    with pytest.raises(ConfigError, match=r"model\.safetensors was truncated while it was read"):
        weights.read(last, 0, math.prod(parameter_shapes(SPEC)[last]))


def test_an_export_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def tensor_of(name: str) -> torch.Tensor:
        assert not [each for each in alive if each() is not None]
        tensor = values(SPEC)(name).to(torch.bfloat16)
        alive.append(weakref.ref(tensor))
        return tensor

    export(tmp_path / "out", SPEC, tensor_of, torch.bfloat16)
    assert len(alive) == len(parameter_shapes(SPEC))
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name in parameter_shapes(SPEC):
        assert torch.equal(found[hf_name(name)].flatten(), values(SPEC)(name).to(torch.bfloat16))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    for read in (Weights, read_config):
        with pytest.raises(ConfigError, match="nowhere"):
            read(tmp_path / "nowhere")


def test_an_export_touches_nothing_that_exists(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(ConfigError, match=f"{name} exists"):
            write(tmp_path / name)
    assert (tmp_path / "full" / "a.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    assert len(list(write(tmp_path / "empty").iterdir())) == 3
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "file" / "below")


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    def failing(name: str) -> torch.Tensor:
        if name == "head.norm.weight":
            raise RuntimeError("gone")
        return values(SPEC)(name)

    with pytest.raises(RuntimeError, match="gone"):
        export(tmp_path / "out", SPEC, failing, torch.float32, max_shard_bytes=20_000)
    assert os.listdir(tmp_path) == []


def test_an_unwritable_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int8"):
        write(tmp_path / "out", dtype=torch.int8)


def test_tokenizer_files_come_along_and_load(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    source = tmp_path / "tokenizer"
    source.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "do_sample": True}))
    (source / "notes.txt").write_text("not copied")
    folder = write(tmp_path / "out", tokenizer_folder=source)
    assert transformers.AutoTokenizer.from_pretrained(folder)("b a")["input_ids"] == [1, 0]
    assert transformers.GenerationConfig.from_pretrained(folder).temperature == 0.6
    assert not (folder / "notes.txt").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", math.nan),
        ("hidden_size", math.inf),
        ("hidden_size", 16.5),
        ("num_hidden_layers", 1e12),
        ("num_hidden_layers", 10**9),
        ("tie_word_embeddings", "false"),
        ("architectures", [["LlamaForCausalLM"]]),
    ],
)
def test_a_config_that_no_model_has_is_refused_by_name(key: str, value: object) -> None:
    good = config_from_spec(PRESETS["llama-3.2-1b"], torch.float32)
    with pytest.raises(
        ConfigError, match="architecture" if key == "architectures" else "layers" if key == "num_hidden_layers" else key
    ):
        spec_from_config({**good, key: value}, "here/config.json")


def test_longrope_is_that_of_transformers_at_short_and_long_lengths() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
    config = {"num_attention_heads": 2, "hidden_size": 8, "max_position_embeddings": 64}
    theirs = transformers.Phi3Config(**config, rope_parameters=scaling, original_max_position_embeddings=16)
    layer = Phi3RotaryEmbedding(theirs)
    given_config = theirs.to_dict() | {
        "rope_parameters": None,
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "rope_scaling": scaling,
        "original_max_position_embeddings": 16,
    }
    spec = spec_from_config(given_config, "config.json")
    for length in (16, 17):
        cos, sin = layer(torch.zeros(1), torch.arange(length)[None])
        found = rope_table(spec, torch.arange(length)[None])
        assert torch.equal(found[0], cos[..., :2]) and torch.equal(found[1], sin[..., :2])
    for wrong in ({"short_factor": [1.0]}, {"long_factor": [0.0, 1.0]}, {"long_factor": "much"}):
        with pytest.raises(ConfigError, match=r"longrope has|no list of numbers above 0"):
            spec_from_config(given_config | {"rope_scaling": scaling | wrong}, "config.json")
