"""A random LLaMA of transformers, laid out as Megatron does, comes back bit for bit; what is damaged is refused."""

import functools
import io
import os
import re
import runpy
import shutil
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor

from phalanx.compat.megatron.args import MegatronOverrides
from phalanx.compat.megatron.weights import MegatronCheckpoint
from phalanx.core.errors import ConfigError
from phalanx.models.hf_weights import Weights
from tests.helpers import ROOT

main = runpy.run_path(str(ROOT / "examples" / "import_megatron.py"))["main"]
VOCAB, PADDED, HIDDEN, FFN, HEADS, LAYERS, TOKENS = 90, 96, 32, 48, 4, 4, torch.arange(2 * 40).view(2, 40) % 90
Tensors = dict[str, Tensor]


class ModelType:
    """An enum of Megatron's: whoever reads the file has no module of that name."""

    __module__ = "megatron.core.enums"

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelType, (1,)


def save(content: Any, path: Path, new: bool = True) -> None:
    """Where Megatron is, as it were."""
    modules = {name: types.ModuleType(name) for name in ("megatron", "megatron.core", "megatron.core.enums")}
    vars(modules["megatron.core.enums"])["ModelType"] = ModelType
    sys.modules.update(modules)
    try:
        torch.save(content, path, _use_new_zipfile_serialization=new)
    finally:
        for name in modules:
            del sys.modules[name]


def llama(kv_heads: int = 4, tied: bool = False, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, rms_norm_eps=1e-6,
        num_attention_heads=HEADS, num_key_value_heads=kv_heads, max_position_embeddings=64, tie_word_embeddings=tied,
        initializer_range=0.2, **more,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype)  # and no buffer: rotary frequencies stay as they are
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def arguments(kv_heads: int, tied: bool, llama_fork: bool, **more: Any) -> Namespace:
    """As the two write them; a few of several hundred."""
    both = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": HEADS,
        "kv_channels": HIDDEN // HEADS, "max_position_embeddings": 64, "padded_vocab_size": PADDED, "swiglu": True,
        "layernorm_epsilon": 1e-6, "untie_embeddings_and_output_weights": not tied, "add_bias_linear": False,
        "use_rotary_position_embeddings": True, "vocab_size": VOCAB, "params_dtype": torch.float32,
        "model_type": ModelType(),
    }  # fmt: skip
    if llama_fork:
        return Namespace(**both, RMSNorm=True, causal_lm=True, overlapped_distributed_optimizer=True, **more)
    groups = {"group_query_attention": kv_heads != HEADS, "num_query_groups": kv_heads if kv_heads != HEADS else 1}
    rest = {"normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_base": 10000, "num_experts": None}
    return Namespace(**both, **groups, **rest | more)


def part_of(tensor: Tensor, rank: int, ranks: int, dim: int = 0) -> Tensor:
    return tensor.chunk(ranks, dim)[rank].clone()


def padded(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, torch.full((PADDED - VOCAB, HIDDEN), 7.0, dtype=tensor.dtype)])


def layer_of(
    model: Any, number: int, rank: int, ranks: int, core: bool, fork: bool, fused_norms: bool
) -> dict[str, Any]:
    """One tensor rank's part of a layer, by Megatron's names behind the layer's number."""
    kv_heads = model.config.num_key_value_heads
    ours: Tensors = model.model.layers[number].state_dict()
    q, k, v = (part_of(ours[f"self_attn.{name}_proj.weight"], rank, ranks) for name in "qkv")
    groups = torch.cat([part.view(kv_heads // ranks, -1, HIDDEN) for part in (q, k, v)], 1).reshape(-1, HIDDEN)
    qkv = torch.cat([q, k, v]) if fork else groups
    gated = torch.cat([part_of(ours[f"mlp.{name}_proj.weight"], rank, ranks) for name in ("gate", "up")])
    o = part_of(ours["self_attn.o_proj.weight"], rank, ranks, 1)
    down = part_of(ours["mlp.down_proj.weight"], rank, ranks, 1)
    norms = [ours[f"{name}_layernorm.weight"] for name in ("input", "post_attention")]
    if not core:
        return {
            "input_layernorm.weight": norms[0],
            "self_attention.query_key_value.weight": qkv,
            "self_attention.dense.weight": o,
            "post_attention_layernorm.weight": norms[1],
            "mlp.dense_h_to_4h.weight": gated,
            "mlp.dense_4h_to_h.weight": down,
        }
    fused = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    plain = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    return {
        **dict(zip(fused if fused_norms else plain, norms, strict=True)),
        "self_attention.linear_qkv.weight": qkv,
        "self_attention.linear_qkv._extra_state": io.BytesIO(b"state"),
        "self_attention.linear_proj.weight": o,
        "mlp.linear_fc1.weight": gated,
        "mlp.linear_fc2.weight": down,
    }


def lay_out(
    folder: Path,
    model: Any,
    ranks: int = 1,
    stages: int = 1,
    *,
    chunks: int = 1,
    core: bool = False,
    fork: bool = False,
    args: Namespace | types.SimpleNamespace | None = None,
    counts: list[int] | None = None,
    fused_norms: bool = True,
    change: Callable[[dict[str, Any], int, int], Any] = lambda content, rank, stage: None,
    file: str = "model_optim_rng.pt",
) -> Path:
    """Write `model` as Megatron would; `counts` are the layers of its stages, in order of the model's layers."""
    weights: Tensors = model.state_dict()
    tied = model.config.tie_word_embeddings
    layer = functools.partial(layer_of, model, ranks=ranks, core=core, fork=fork, fused_norms=fused_norms)
    counts = counts or [LAYERS // (stages * chunks)] * (stages * chunks)
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    for rank in range(ranks):
        for stage in range(stages):
            content: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 100}
            content["rng_state"] = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}]
            if args is None:
                del content["args"]
            for chunk in range(chunks):
                number = chunk * stages + stage
                stack: dict[str, Any] = {}
                for own in range(counts[number]):
                    stack |= {f"layers.{own}.{name}": t for name, t in layer(sum(counts[:number]) + own, rank).items()}
                first, last = number == 0, number == stages * chunks - 1
                if last:
                    stack["final_layernorm.weight"] = weights["model.norm.weight"]
                embed = {
                    "word_embeddings": {"weight": part_of(padded(weights["model.embed_tokens.weight"]), rank, ranks)}
                }
                head = part_of(padded(weights["lm_head.weight"]), rank, ranks)
                if core:
                    part: dict[str, Any] = {f"decoder.{name}": tensor for name, tensor in stack.items()}
                    part |= {"embedding.word_embeddings.weight": embed["word_embeddings"]["weight"]} if first else {}
                    part |= {"output_layer.weight": head} if last and not (tied and first) else {}
                else:
                    part = {"language_model": {"encoder": stack} | ({"embedding": embed} if first else {})}
                    if last and fork:
                        part["lm_head"] = {"weight": padded(weights["lm_head.weight"])}
                    elif last and not tied:
                        part["language_model"]["output_layer"] = {"weight": head}
                    elif last and not first:
                        part["word_embeddings_for_head"] = {"weight": head}
                content["model" if chunks == 1 else f"model{chunk}"] = part
            if change(content, rank, stage) == "leave out":
                continue
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            (folder / "iter_0000100" / name).mkdir(parents=True)
            path = folder / "iter_0000100" / name / file
            save(content, path)
    return folder


def check(source: Path, target: Path, model: Any, *flags: str) -> None:
    """Import, and compare every tensor bitwise, the configuration, and logits."""
    assert main([str(source), str(target), *flags]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=model.dtype).eval()
    wanted, found = model.state_dict(), loaded.state_dict()
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


# ranks, stages, virtual stages, heads of keys, tied, and how it is written
def as_at_first(content: dict[str, Any], rank: int, stage: int) -> None:
    """The names of the first versions, below the wrapper for training, with frequencies that follow from the base."""
    model = content["model"]["language_model"]
    stack = {name.replace("self_attention", "attention"): tensor for name, tensor in model.pop("encoder").items()}
    model["transformer"] = stack | {"rotary_emb.inv_freq": torch.ones(4)}
    content["model"] = {"module": content["model"]}


UPSTREAM: list[tuple[int, int, int, int, bool, dict[str, Any]]] = [
    (1, 1, 1, 4, False, {}),
    (2, 1, 1, 2, True, {}),
    (4, 2, 1, 4, True, {}),
    (2, 2, 2, 2, False, {}),
    (2, 2, 1, 2, True, {"change": as_at_first}),
    (1, 1, 1, 2, True, {"core": True}),
    (4, 1, 1, 4, False, {"core": True, "fused_norms": False}),
    (2, 2, 1, 2, True, {"core": True, "file": "model_rng.pt"}),
    (2, 2, 2, 2, False, {"core": True}),
    (1, 3, 1, 1, False, {"core": True, "counts": [1, 2, 1]}),
]


@pytest.mark.parametrize(("ranks", "stages", "chunks", "kv_heads", "tied", "how"), UPSTREAM)
def test_megatron_lm(
    ranks: int, stages: int, chunks: int, kv_heads: int, tied: bool, how: dict[str, Any], tmp_path: Path
) -> None:
    model = llama(kv_heads, tied)
    args = arguments(kv_heads, tied, False)
    source = lay_out(tmp_path / "megatron", model, ranks, stages, chunks=chunks, args=args, **how)
    check(source, tmp_path / "hf", model)


@pytest.mark.parametrize(("ranks", "stages", "kv_heads"), [(1, 1, 4), (2, 2, 4), (4, 1, 4), (2, 1, 2)])
def test_megatron_llama(
    ranks: int, stages: int, kv_heads: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama(kv_heads)
    grouped = {"group_query_attention": True, "num_query_groups": kv_heads} if kv_heads != HEADS else {}
    args = arguments(kv_heads, False, True, **grouped)
    source = lay_out(tmp_path / "m", model, ranks, stages, fork=True, args=args)
    check(source, tmp_path / "hf", model)
    assert "step before" in capsys.readouterr().out


def test_what_megatron_llama_made_of_a_hugging_face_folder(tmp_path: Path) -> None:
    """Its converter writes `release`, with few arguments in another class; the rest is said."""
    model = llama(dtype=torch.bfloat16)
    args = types.SimpleNamespace(
        orig_vocab_size=VOCAB, max_position_embeddings=64, hidden_size=HIDDEN, num_layers=LAYERS, ffn_hidden_size=FFN,
        num_attention_heads=HEADS, tensor_model_parallel_size=2, pipeline_model_parallel_size=1, rank=0,
        padded_vocab_size=PADDED, params_dtype=torch.bfloat16, tokenizer_type="GPT2BPETokenizer",
    )  # fmt: skip
    source = lay_out(tmp_path / "m", model, 2, fork=True, args=args)
    (source / "iter_0000100").rename(source / "release")
    (source / "latest_checkpointed_iteration.txt").write_text("release\n")
    (source / "release" / "mp_rank_00").rename(source / "release" / "mp_rank_00_dp_000")
    (source / "release" / "mp_rank_00_000").mkdir()  # of the optimizer
    with pytest.raises(ConfigError, match=r"give --norm-eps\."):
        MegatronCheckpoint(source)
    check(source / "release", tmp_path / "hf", model, "--norm-eps", "1e-6", "--max-shard-gb", "2e-5")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2


def test_without_arguments_flags_say_the_shape(tmp_path: Path) -> None:
    model = llama(2)
    source = lay_out(tmp_path / "m", model, 2)
    with pytest.raises(ConfigError, match="give --heads, --seq-len, --norm-eps, --rope-theta, --vocab-size, --qkv"):
        MegatronCheckpoint(source)
    flags = ["--heads", "4", "--seq-len", "64", "--norm-eps", "1e-6", "--rope-theta", "1e4", "--vocab-size", str(VOCAB)]
    with pytest.raises(ConfigError, match="kv_heads 0, which is not possible"):
        MegatronCheckpoint(
            source,
            MegatronOverrides(
                heads=4, kv_heads=0, seq_len=64, norm_eps=1e-6, rope_theta=1e4, vocab_size=90, qkv="groups"
            ),
        )
    with pytest.raises(ConfigError, match="--kv-heads"):  # four of keys would need more rows
        MegatronCheckpoint(
            source, MegatronOverrides(heads=4, seq_len=64, norm_eps=1e-6, rope_theta=1e4, vocab_size=90, qkv="groups")
        )
    check(source, tmp_path / "hf", model, *flags, "--kv-heads", "2", "--qkv", "groups")


def test_rotary_positions_and_the_tokenizer(tmp_path: Path, wordless: Path) -> None:
    rule = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = llama(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **rule}, head_dim=16)
    scaled = {"use_rope_scaling": True, "rope_scaling_factor": 4.0, "rotary_base": 500000, "tokenizer_type": "HF"}
    args = arguments(4, False, False, **scaled)
    args.kv_channels, args.vocab_size = 16, None
    source = lay_out(tmp_path / "m", model, 2, args=args, core=True)
    with pytest.raises(ConfigError, match="give --vocab-size"):
        MegatronCheckpoint(source)
    check(source, tmp_path / "hf", model, "--tokenizer", str(wordless))
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    args.use_rope_scaling, args.rotary_seq_len_interpolation_factor = False, 2
    linear = MegatronCheckpoint(
        lay_out(tmp_path / "l", model, args=args, core=True), MegatronOverrides(vocab_size=VOCAB)
    ).spec
    assert linear.rope_scaling is not None
    assert (linear.rope_scaling.rule, linear.rope_scaling.factor, linear.vocab_size) == ("linear", 2.0, VOCAB)


@pytest.fixture
def wordless(tmp_path: Path) -> Path:
    """A tokenizer of 90 ids."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB - 1)} | {"<eos>": VOCAB - 1}, "w0"))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return folder


def test_mixed_types_are_written_in_the_wider(tmp_path: Path) -> None:
    model = llama(dtype=torch.bfloat16)

    def widen(content: dict[str, Any], rank: int, stage: int) -> None:
        content["model"]["language_model"]["encoder"]["final_layernorm.weight"] = torch.full((HIDDEN,), 1 / 3)

    source = lay_out(tmp_path / "m", model, args=arguments(4, False, False), change=widen)
    assert MegatronCheckpoint(source).dtype == torch.float32
    main([str(source), str(tmp_path / "hf")])
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["model.norm.weight"], torch.full((32,), 1 / 3))
    assert Weights(tmp_path / "hf").dtype() == torch.float32


# --------------------------------------------------------------------------------------------------------- bad input


def _drop(*names: str) -> Callable[[dict[str, Any], int, int], Any]:
    def change(content: dict[str, Any], rank: int, stage: int) -> None:
        if (rank, stage) == (1, 1):
            tree = content["model"]
            for name in names[:-1]:
                tree = tree[name]
            del tree[names[-1]]

    return change


def _put(key: str, value: Any) -> Callable[[dict[str, Any], int, int], Any]:
    def change(content: dict[str, Any], rank: int, stage: int) -> None:
        if (rank, stage) == (1, 1):
            content["model"]["language_model"]["encoder"][key] = value

    return change


def _set(key: str, value: Any) -> Callable[[dict[str, Any], int, int], Any]:
    return lambda content, rank, stage: content.__setitem__(key, value) if (rank, stage) == (1, 1) else None


QKV = "layers.1.self_attention.query_key_value"
BAD: list[tuple[Callable[[dict[str, Any], int, int], Any], str]] = [
    (_drop("language_model", "encoder", f"{QKV}.weight"), r"mp_rank_01_001.*lacks .*query_key_value.weight of layer 3"),
    (_drop("language_model", "encoder", "final_layernorm.weight"), r"mp_rank_01_001.*lacks .*final_layernorm"),
    (_drop("language_model", "output_layer"), r"mp_rank_01_001.*lacks language_model.output_layer.weight"),
    (_put(f"{QKV}.bias", torch.ones(4)), r"mp_rank_01_001.*query_key_value.bias, a bias, which"),
    (_put("layers.1.mlp.router.weight", torch.ones(4)), "a mixture of experts"),
    (_put(f"{QKV}.weight", torch.ones(4, HIDDEN)), rf"mp_rank_01_001.*{QKV}.weight of shape \(4, 32\)"),
    (_put(f"{QKV}.weight", torch.ones(48, HIDDEN, dtype=torch.int8)), rf"mp_rank_01_001.*{QKV}.weight as torch.int8"),
    (_put("layers.1.note", "text"), "layers.1.note, which is not a tensor"),
    (_set("iteration", 50), "mp_rank_01_001.*iteration 50"),
    (_set("checkpoint_version", 1.0), "checkpoint_version 1.0"),
    (_set("model", [1]), "no dictionary under model"),
    (lambda content, rank, stage: content.pop("model") and None, "no model"),
    (lambda content, rank, stage: "leave out" if (rank, stage) == (0, 1) else None, "lacks mp_rank_00_001"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD)
def test_what_does_not_fit_is_one_sentence(
    change: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = lay_out(tmp_path / "m", llama(), 2, 2, args=arguments(4, False, False), change=change)
    assert main([str(source), str(tmp_path / "hf")]) == 2
    error = capsys.readouterr().err
    assert re.search(sentence, error), error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"num_experts": 8}, "num_experts 8"),
        ({"normalization": "LayerNorm"}, "normalization 'LayerNorm'"),
        ({"rotary_percent": 0.5}, "rotary_percent 0.5"),
        ({"tensor_model_parallel_size": 4}, "tensor_model_parallel_size 4, but 1"),
        ({"position_embedding_type": "none"}, "position_embedding_type 'none'"),
        ({"window_size": (128, 0)}, "window_size 'an object'"),
        ({"rotary_base": "x"}, "rope_theta 'x'"),
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}, "two rules"),
    ],
)
def test_arguments_of_another_model(more: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    source = lay_out(tmp_path / "m", llama(), args=arguments(4, False, False, **more))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        MegatronCheckpoint(source)


def test_a_head_that_should_be_the_embedding_and_is_not(tmp_path: Path) -> None:
    def change(content: dict[str, Any], rank: int, stage: int) -> None:
        if stage == 1:
            content["model"]["word_embeddings_for_head"]["weight"][0, 0] += 1

    source = lay_out(tmp_path / "m", llama(tied=True), 1, 2, args=arguments(4, True, False), change=change)
    with pytest.raises(ConfigError, match=r"mp_rank_00_001.*word_embeddings_for_head"):
        MegatronCheckpoint(source)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    args = arguments(4, False, False, extra=Bomb(harm))
    source = lay_out(tmp_path / "m", llama(), args=args)
    with pytest.raises(ConfigError, match=r"asks for (posix|os)\.mkdir, which is not part of the weights"):
        MegatronCheckpoint(source)
    assert not harm.exists()
    path = source / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    save({"model": {}, "args": Bomb(harm)}, path, new=False)  # of an old torch
    with pytest.raises(ConfigError, match=r"cannot be read as plain weights .*mkdir"):
        MegatronCheckpoint(source)
    assert not harm.exists()


def test_files_of_an_old_torch_are_read(tmp_path: Path) -> None:
    model = llama()
    content: dict[str, Any] = {}
    args = arguments(4, False, False)
    source = lay_out(tmp_path / "m", model, args=args, change=lambda given, rank, stage: content.update(given))
    path = source / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    save(content, path, new=False)
    check(source, tmp_path / "hf", model)


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    source = lay_out(tmp_path / "m", llama(), args=arguments(4, False, False))
    path = source / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:20000])
    with pytest.raises(ConfigError, match=r"model_optim_rng\.pt cannot be read as plain weights"):
        MegatronCheckpoint(source)
    (source / "latest_checkpointed_iteration.txt").write_text("../elsewhere")
    with pytest.raises(ConfigError, match="neither a number nor release"):
        MegatronCheckpoint(source)
    (source / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ConfigError, match="iter_0000007 holds no mp_rank_00"):
        MegatronCheckpoint(source)
    shutil.rmtree(source / "iter_0000100")
    (source / "iter_0000007").mkdir()
    (source / "iter_0000007" / "__0_0.distcp").touch()
    with pytest.raises(ConfigError, match=r"distributed checkpoint without common\.pt"):
        MegatronCheckpoint(source)
