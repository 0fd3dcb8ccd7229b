"""A LLaMA's Hugging Face folder goes to Megatron and comes back bit for bit; Megatron-core loads it, and computes the
same."""

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from phalanx.compat.megatron.export import export_megatron, open_hf_source
from phalanx.compat.megatron.files import find_iteration, rank_files, read_file
from phalanx.compat.megatron.import_folder import import_megatron
from phalanx.compat.megatron.weights import MegatronCheckpoint
from phalanx.core.errors import ConfigError
from tests.helpers import run_ranks
from tests.unit.test_import_megatron import HEADS, HIDDEN, LAYERS, TOKENS, llama

LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: list[tuple[int, int, str, int, bool, dict[str, Any]]] = [
    (1, 1, "te", 2, True, {}),
    (2, 2, "te", 2, True, {"dtype": torch.bfloat16}),
    (4, 2, "local", 4, False, {}),
    (1, 4, "te", 1, False, {"rope_parameters": {**LLAMA_3, "original_max_position_embeddings": 8192}}),
    (2, 1, "local", 2, False, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    (2, 2, "megatron-llama", 4, False, {}),
    (0, 0, "torch_dist", 2, False, {"dtype": torch.bfloat16}),
    (0, 0, "torch_dist", 4, True, {}),
]


@pytest.mark.parametrize(("tensor", "pipeline", "layout", "kv_heads", "tied", "more"), CASES)
def test_there_and_back(
    tensor: int, pipeline: int, layout: str, kv_heads: int, tied: bool, more: dict[str, Any], tmp_path: Path
) -> None:
    model = llama(kv_heads, tied, **more)
    model.save_pretrained(tmp_path / "hf")
    if layout == "torch_dist":
        export_megatron(open_hf_source(tmp_path / "hf"), tmp_path / "megatron", ckpt_format=layout)
        assert len(list((tmp_path / "megatron" / "release").glob("*.distcp"))) == LAYERS + (2 if tied else 3) + 1
    else:
        export_megatron(open_hf_source(tmp_path / "hf"), tmp_path / "megatron", tensor, pipeline, layout)
        assert len(list((tmp_path / "megatron" / "release").iterdir())) == tensor * pipeline
    found = import_megatron(tmp_path / "megatron", tmp_path / "back")
    assert found.dtype == model.dtype
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=model.dtype).eval()
    wanted, back = model.state_dict(), loaded.state_dict()
    assert wanted.keys() == back.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], back[name])] == []
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_a_folder_of_two_types_keeps_all_digits(tmp_path: Path) -> None:
    model = llama(2).bfloat16()
    norm = model.model.norm.float().weight
    torch.nn.init.normal_(norm)
    model.save_pretrained(tmp_path / "hf")
    export_megatron(open_hf_source(tmp_path / "hf"), tmp_path / "megatron")
    assert torch.equal(MegatronCheckpoint(tmp_path / "megatron").tensor("head.norm.weight"), norm)


def core_logits(placement: Any, folder: str) -> tuple[list[float], list[float]]:
    """What Megatron-core's own model computes with a rank's file, and with what its reader takes from `torch_dist`."""
    init = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=init, rank=placement.rank, world_size=placement.world)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]  # it asks for no other device
    random.get_cuda_rng_tracker().fork = lambda name="": contextlib.nullcontext()
    parallel_state.initialize_model_parallel(placement.world, 1)
    file = read_file(rank_files(find_iteration(Path(folder, "megatron")))[0][placement.rank])
    assert file.args is not None
    args = file.args
    config = TransformerConfig(
        num_layers=args["num_layers"], hidden_size=args["hidden_size"], ffn_hidden_size=args["ffn_hidden_size"],
        num_attention_heads=args["num_attention_heads"], num_query_groups=args["num_query_groups"],
        kv_channels=args["kv_channels"], use_cpu_initialization=True, add_bias_linear=args["add_bias_linear"],
        gated_linear_unit=args["swiglu"], activation_func=torch.nn.functional.silu, normalization=args["normalization"],
        layernorm_epsilon=args["norm_epsilon"], tensor_model_parallel_size=placement.world, hidden_dropout=0.0,
        attention_dropout=0.0, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"], position_embedding_type="rope",
        rotary_base=args["rotary_base"], parallel_output=False,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
    ).eval()  # fmt: skip
    wrong = model.load_state_dict({name: found.load() for name, found in file.chunks[0].items()}, strict=False)
    assert not wrong.unexpected_keys and all(name.endswith("_extra_state") for name in wrong.missing_keys), wrong
    mask = torch.ones(1, 1, TOKENS.shape[1], TOKENS.shape[1]).triu(1).bool()

    def compute() -> list[float]:
        with torch.no_grad():
            logits = model(TOKENS, torch.arange(TOKENS.shape[1])[None].expand_as(TOKENS), mask)
        numbers: list[float] = logits[..., : args["vocab_size"]].flatten().tolist()
        return numbers

    by_ranks = compute()
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    loaded = dist_checkpointing.load(
        {"model": model.sharded_state_dict(metadata={"singleton_local_shards": False})},
        str(Path(folder, "dist", "release")), strict="raise_unexpected",
    )  # fmt: skip
    assert vars(loaded["args"])["num_layers"] == args["num_layers"] and loaded["iteration"] == 0
    model.load_state_dict(loaded["model"])
    dist_logits = compute()
    dist.destroy_process_group()
    return by_ranks, dist_logits


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_megatron_core_computes_the_same(tmp_path: Path) -> None:
    model = llama(2)
    model.save_pretrained(tmp_path / "hf")
    export_megatron(open_hf_source(tmp_path / "hf"), tmp_path / "megatron", 2, 1, "local")
    export_megatron(open_hf_source(tmp_path / "hf"), tmp_path / "dist", ckpt_format="torch_dist")
    with torch.no_grad():
        wanted = model(TOKENS).logits
    for by_ranks, dist_logits in run_ranks(core_logits, 2, folder=tmp_path):
        torch.testing.assert_close(torch.tensor(by_ranks).view_as(wanted), wanted, rtol=1e-4, atol=1e-4)
        assert dist_logits == by_ranks


def test_what_megatron_cannot_take_is_one_sentence(tmp_path: Path) -> None:
    llama(2).save_pretrained(tmp_path / "hf")

    def refusal(source: Path, *arguments: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            export_megatron(open_hf_source(source), tmp_path / "out", *arguments)
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert "has 2 heads of keys, which 4 tensor ranks cannot share" in refusal(tmp_path / "hf", 4)
    assert f"has {LAYERS} layers, which 3 stages cannot share" in refusal(tmp_path / "hf", 1, 3)
    assert "none of which Megatron-LLaMA computes" in refusal(tmp_path / "hf", 1, 1, "megatron-llama")
    assert "--layout x is not known" in refusal(tmp_path / "hf", 1, 1, "x")
    assert "--ckpt-format zarr is not known" in refusal(tmp_path / "hf", 1, 1, "te", "zarr")
    assert "has whole tensors, which Megatron divides" in refusal(tmp_path / "hf", 2, 1, "te", "torch_dist")
    qwen = transformers.Qwen2Config(
        vocab_size=90, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(qwen).save_pretrained(tmp_path / "qwen")
    assert "is not a plain LLaMA" in refusal(tmp_path / "qwen")
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert "has no .safetensors file" in refusal(tmp_path / "hf")
