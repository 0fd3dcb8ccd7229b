"""Checkpoints of other programs, made with torch itself, come back bit for bit; what is damaged is refused."""

import os
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from phalanx.checkpoint.disk.load import find_newest_valid
from phalanx.compat.convert import convert_checkpoint
from phalanx.compat.torch_checkpoints import open_torch_checkpoint
from phalanx.compat.trained_state import MOMENTS, ModelFolder
from phalanx.core.errors import ConfigError
from phalanx.models.user_model import hf_name
from tests.helpers import run_ranks

HEADS, KV_HEADS, STEPS = 4, 2, 3
TO_META = {
    "model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight", "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "model.layers": "layers",
}  # fmt: skip


def make_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(model: Any) -> Any:
    """Some steps of Adam, and what it keeps by the names of the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = torch.arange(40).view(2, 20)
    for _ in range(STEPS):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}


def meta_name(name: str) -> str:
    for theirs, meta in TO_META.items():
        name = name.replace(theirs, meta)
    return name


def to_neighbours(name: str, tensor: Tensor) -> Tensor:
    """As in the script of transformers, the other way round: written on its own, row by row."""
    heads = {"q": HEADS, "k": KV_HEADS}.get(name.partition("_proj")[0][-1:]) if "self_attn" in name else None
    if heads is None or tensor.dim() != 2 or "v_proj" in name or "o_proj" in name:
        return tensor
    width = tensor.shape[0] // heads
    rows = [
        head * width + pair + half * (width // 2)
        for head in range(heads)
        for pair in range(width // 2)
        for half in (0, 1)
    ]
    return tensor[rows]


def as_fsdp2(weights: dict[str, Tensor], state: Any) -> dict[str, Any]:
    """As the tutorial of PyTorch lays it out."""
    return {"app": {"model": weights, "optim": {"state": state, "param_groups": [{"lr": 0.01, "note": "text"}]}}}


def as_torchtitan(weights: dict[str, Tensor], state: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {meta_name(name): to_neighbours(name, tensor) for name, tensor in weights.items()}
    for name, held in state.items():
        flat |= {f"optimizer.state.{meta_name(name)}.{kind}": to_neighbours(name, one) for kind, one in held.items()}
    return flat | {"train_state": {"step": torch.tensor(STEPS)}, "lr_scheduler": {"last_epoch": STEPS}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """The model, its state, and a folder with its config.json."""
    folder = tmp_path_factory.mktemp("trained")
    model = make_llama()
    model.save_pretrained(folder / "config")
    state = train(model)
    (folder / "config" / "model.safetensors").unlink()
    dcp.save(as_fsdp2(model.state_dict(), state), checkpoint_id=folder / "fsdp2")
    dcp.save(as_torchtitan(model.state_dict(), state), checkpoint_id=folder / "titan")
    return model, state, folder


def hf_bits(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("layout", ["fsdp2", "titan"])
def test_a_folder_of_torch_becomes_a_run_and_a_hugging_face_folder(
    layout: str, trained: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    model, state, folder = trained
    wanted = model.state_dict()
    convert_checkpoint(folder / layout, tmp_path / "hf", config=folder / "config")
    found = hf_bits(tmp_path / "hf")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    tokens = torch.arange(20).view(1, 20)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    convert_checkpoint(folder / layout, tmp_path / "run", config=folder / "config", to_run=True)
    checkpoint = find_newest_valid(tmp_path / "run" / "checkpoints", None, lambda kind, details: None)
    assert checkpoint is not None and checkpoint.header["step"] == STEPS
    ours = {
        "embed.weight": "model.embed_tokens.weight",
        "layers.1.attention.k.weight": "model.layers.1.self_attn.k_proj.weight",
    }
    for name, theirs in ours.items():
        for kind, whole in (
            ("param", wanted[theirs]),
            *((kind, state[theirs][kind]) for kind in ("exp_avg", "exp_avg_sq")),
        ):
            held = torch.empty(whole.numel())
            checkpoint.read_into(name, kind, 0, held.numel(), held)
            assert torch.equal(held.view_as(whole), whole), (name, kind)
    with pytest.raises(ConfigError, match="holds a run already"):
        convert_checkpoint(folder / layout, tmp_path / "run", config=folder / "config", to_run=True)


def save_sharded(placement: Any, folder: str) -> None:
    """A rank of a script of its own with FSDP2, whose shards are uneven."""
    init = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=init, rank=placement.rank, world_size=placement.world)
    model = make_llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (placement.world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (placement.world,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = torch.arange(40).view(2, 20)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/fsdp2")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole, moments = get_state_dict(model, optimizer, options=options)
    if placement.rank == 0:
        flat = {f"{kind}/{name}": moments["state"][name][kind] for name in whole for kind in ("exp_avg", "exp_avg_sq")}
        save_file({**whole, **flat}, f"{folder}/whole.safetensors")
    dist.destroy_process_group()


def test_of_any_number_of_ranks(trained: tuple[Any, Any, Path], tmp_path: Path) -> None:
    run_ranks(save_sharded, 3, folder=tmp_path)
    model = ModelFolder.open(trained[2] / "config")
    state = open_torch_checkpoint(tmp_path / "fsdp2", model)
    wanted = load_file(tmp_path / "whole.safetensors")
    assert state.has_moments and state.step == 1
    for name in model.shapes():
        theirs = hf_name(name, model.model_class)
        assert torch.equal(state.read(name, "param"), wanted[theirs])
        assert all(torch.equal(state.read(name, kind), wanted[f"{kind}/{theirs}"]) for kind in MOMENTS)


def test_a_file_of_hetseq(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=90, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BertForPreTraining(config)
    model.save_pretrained(tmp_path / "config")
    weights = {
        re.sub(r"(intermediate|pooler|transform)\.dense\.", r"\1.dense_act.", name): tensor
        for name, tensor in model.state_dict().items()
        if "position_ids" not in name
    }
    content = {
        "args": Namespace(task="bert", lr=[1e-4]), "model": weights, "extra_state": {},
        "optimizer_history": [{"optimizer_name": "_Adam", "num_updates": 9}], "last_optimizer_state": {"state": {}},
    }  # fmt: skip
    torch.save(content, tmp_path / "checkpoint_last.pt")
    convert_checkpoint(tmp_path / "checkpoint_last.pt", tmp_path / "hf", config=tmp_path / "config")
    loaded = transformers.BertForPreTraining.from_pretrained(tmp_path / "hf")
    assert [name for name, one in model.state_dict().items() if not torch.equal(loaded.state_dict()[name], one)] == []
    for change, sentence in (
        ({"model": {**weights, "entity.weight": torch.ones(2)}}, "holds entity.weight, which does not fit"),
        (
            {"model": dict(list(weights.items())[1:])},
            "lacks bert.embeddings.word_embeddings.weight, which does not fit",
        ),
        ({"model": {**weights, "cls.predictions.bias": torch.ones(3)}}, r"cls.predictions.bias of shape \(3,\), but"),
        ({"args": Runs(tmp_path / "made")}, r"asks for posix.mkdir, which is not part of the weights"),
        ({"model": [1]}, "holds no dictionary of tensors under model"),
    ):
        torch.save({**content, **change}, tmp_path / "bad.pt")
        with pytest.raises(ConfigError, match=sentence):
            convert_checkpoint(tmp_path / "bad.pt", tmp_path / "other", config=tmp_path / "config")
    assert not (tmp_path / "made").exists() and not (tmp_path / "other").exists()


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _cut(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 16])


BAD: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / ".metadata").unlink(), r"\.metadata cannot be read .*No such file"),
    (lambda folder: next(folder.glob("*.distcp")).unlink(), r"lacks __0_0\.distcp, which its \.metadata lists"),
    (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Runs(folder / "made"))),
        "asks for posix.mkdir, wh",
    ),
    (_cut, r"has .* in a damaged file"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD)
def test_half_and_hostile_folders_are_refused(
    change: Callable[[Path], Any], sentence: str, trained: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(trained[2] / "fsdp2", tmp_path / "source")
    change(source)
    with pytest.raises(ConfigError, match=sentence) as caught:
        convert_checkpoint(source, tmp_path / "hf", config=trained[2] / "config")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"] and not (source / "made").exists()


def test_what_does_not_fit_is_one_sentence(trained: tuple[Any, Any, Path], tmp_path: Path) -> None:
    model, _, folder = trained
    weights, number = model.state_dict(), iter(range(99))

    def refusal(content: dict[str, Any], to_run: bool = False) -> str:
        source = tmp_path / f"source-{next(number)}"
        dcp.save(content, checkpoint_id=source)
        with pytest.raises(ConfigError) as caught:
            convert_checkpoint(source, tmp_path / "out", config=folder / "config", to_run=to_run)
        return str(caught.value)

    assert "holds no Adam state for every parameter" in refusal({"model": weights}, to_run=True)
    assert "holds model.more.weight, which a model of its" in refusal(
        {"model": {**weights, "more.weight": torch.ones(2)}}
    )
    assert "lacks model.lm_head.weight" in refusal({"model": dict(list(weights.items())[:-1])})
    smaller = {**weights, "model.norm.weight": torch.ones(16)}
    assert "model.norm.weight of shape (16,), but config.json makes it (32,)" in refusal(smaller)
    whole = {**weights, "model.norm.weight": torch.ones(32, dtype=torch.int8)}
    assert "model.norm.weight as torch.int8" in refusal(whole)
    assert "is a distributed checkpoint of Megatron-core without its common.pt" in refusal(
        {"decoder.layers.mlp.linear_fc1.weight": torch.ones(2)}
    )
    assert "holds no model by names that are known here" in refusal({"w": torch.ones(2)})
    for source, sentence in (
        (tmp_path / "gone", "gone does not exist"),
        (folder, "is not a folder of torch.distributed.checkpoint"),
        (folder / "fsdp2", "does not name its model; give --config"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            convert_checkpoint(source, tmp_path / "out", config=None)
    with pytest.raises(ConfigError, match="--dtype int8 is not for this"):
        convert_checkpoint(folder / "fsdp2", tmp_path / "out", config=folder / "config", dtype="int8")
