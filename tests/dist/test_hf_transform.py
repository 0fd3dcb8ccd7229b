"""Models of transformers cut over ranks in place: logits, losses and gradients stay, and so does what is saved."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import phalanx
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.models.families.catalog import TRANSFORM_PLANS
from phalanx.parallel.hf_state import find_tensor_shards, full_state_dict
from phalanx.parallel.hf_transform import transform
from tests.dist.tensor_cases import among, taken
from tests.helpers import run_ranks, some

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2, "attention_bias": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 4, "sliding_window": 5, "head_dim": 8, "pad_token_id": 3}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 12}),
    "neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "neox not parallel": ("GPTNeoX", {"use_parallel_residual": False}),
    "falcon": (
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_attention_heads": 8,
            "num_kv_heads": 4,
            "bias": True,
            "ffn_hidden_size": 48,
        },
    ),
    "gemma2": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 10}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2, "pad_token_id": 3}),
    "gptj": ("GPTJ", {"rotary_dim": 4, "n_inner": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt2": ("GPT2", {"n_inner": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "phi3": ("Phi3", {"num_key_value_heads": 4, "pad_token_id": 3, "sliding_window": 5}),
    "falcon, one key head": ("Falcon", {"bias": True, "ffn_hidden_size": 48}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 3, "pad_token_id": 3}),
    "opt": (
        "OPT",
        {"ffn_dim": 48, "word_embed_proj_dim": 20, "do_layer_norm_before": False, "dropout": 0.0, "pad_token_id": 3},
    ),
}


def made(kind: str, seed: int = 0, **more: Any) -> nn.Module:
    import transformers

    name, changes = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SHAPE | changes | more)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).double()
    if kind == "mixtral":  # torch's grouped product has no float64
        model.config._experts_implementation = "eager"
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # nothing is told of a bias by zeros, nor of a norm's gradient by ones
                parameter += torch.linspace(-0.3, 0.4, parameter.numel(), dtype=parameter.dtype)
    return model


def batch(left: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 61, (2, 12), generator=generator)
    tokens[0, 2] = 3  # whose row gets no gradient where it pads
    mask = torch.ones_like(tokens)
    mask[1, slice(3) if left else slice(-3, None)] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 5:7] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def apart(mine: nn.Module, other: nn.Module) -> list[float]:
    """How far losses, logits and gradients are apart."""
    left = type(mine).__name__ != "Gemma2ForCausalLM"  # whose own attention gives NaN where everything is masked
    one, two = mine(**batch(left)), other(**batch(left))
    for model, out in ((mine, one), (other, two)):
        model.zero_grad()
        out.loss.backward()
    parts, theirs = find_tensor_shards(mine), dict(other.named_parameters())
    square = total = 0.0
    for name, parameter in mine.named_parameters():
        assert parameter.grad is not None, name
        grad = theirs[name].grad
        assert grad is not None
        square += float((parameter.grad - taken(grad, parts.get(name))).square().sum())
        total += float(grad.square().sum())
    return [float((one.loss - two.loss).abs()), float((one.logits - two.logits).abs().max()), math.sqrt(square / total)]


def transformed(placement: Placement, kinds: list[str]) -> dict[str, list[float]]:
    found = {}
    with among(placement, placement.world) as mesh:
        assert mesh.tensor is not None
        for kind in kinds:
            other = made(kind)
            mine = transform(copy.deepcopy(other), mesh.tensor)
            assert sum(p.numel() for p in mine.parameters()) < 0.7 * sum(p.numel() for p in other.parameters())
            found[kind] = apart(mine, other)
            state = full_state_dict(mine, mesh.tensor)
            if mesh.rank:
                assert state == {}
                continue
            again = made(kind, seed=5)
            again.load_state_dict(state)
            assert all(torch.equal(a, b) for a, b in zip(again.parameters(), other.parameters(), strict=True))
            assert (state.keys() - other.state_dict().keys()) == set()
    return found


@pytest.mark.parametrize("world", some([2, 4], 1))
def test_a_cut_model_is_the_same_model(world: int) -> None:
    for found in run_ranks(transformed, world, 120, kinds=list(KINDS)):
        assert found.keys() == KINDS.keys()
        for kind, (loss, logits, gradients) in found.items():
            assert loss < 1e-6, (kind, loss)  # transformers takes its logarithms in float32
            # And the norms of queries and keys: ours are as wide as what they are given.
            assert logits < (1e-7 if kind in ("qwen3", "olmo2") else 1e-12), (kind, logits)
            assert gradients < 1e-6, (kind, gradients)


def from_rank0(placement: Placement, kinds: list[str]) -> dict[str, list[float]]:
    """Two groups of two; only one rank of all has the weights."""
    found = {}
    with among(placement, 2) as mesh:
        assert mesh.tensor is not None
        for kind in kinds:
            other = made(kind)
            if mesh.rank == 0:
                mine = copy.deepcopy(other)
            elif mesh.rank == 1:
                mine = made(kind, seed=9)
            else:
                with torch.device("meta"):
                    mine = made(kind)
            transform(mine, mesh.tensor, load_state_dict_from_rank0=True)
            assert not any(each.is_meta for each in (*mine.parameters(), *mine.buffers()))
            found[kind] = apart(mine, other)
    return found


def test_weights_of_rank_0_reach_everybody() -> None:
    for found in run_ranks(from_rank0, 4, 120, kinds=["qwen2", "neox"]):
        for kind, (loss, logits, gradients) in found.items():
            assert max(loss, gradients) < 1e-6, kind
            assert logits < 1e-12, (kind, logits)


def fully_sharded(placement: Placement) -> float:
    """Cut over two ranks, then sharded by PyTorch over the two copies; both of them see the same batch."""
    with among(placement, 2) as mesh:
        assert mesh.tensor is not None
        other = made("qwen2")
        mine = transform(copy.deepcopy(other), mesh.tensor)
        parts = find_tensor_shards(mine)
        for block in mine.get_submodule("model.layers").children():
            fully_shard(block, mesh=mesh.data.shard)
        fully_shard(mine, mesh=mesh.data.shard)
        for model in (mine, other):
            model(**batch()).loss.backward()
        whole = {name: p.full_tensor().detach() for name, p in mine.state_dict().items()}
        state = full_state_dict(mine, mesh.tensor, whole)
        assert all(torch.equal(state[name], tensor) for name, tensor in other.state_dict().items() if state)
        theirs, found = dict(other.named_parameters()), []
        for name, parameter in mine.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            grad = theirs[name].grad
            assert grad is not None
            found.append(float((parameter.grad.full_tensor() - taken(grad, parts.get(name))).abs().max()))
        return max(found)


def test_a_cut_model_is_sharded_by_pytorch_over_its_copies() -> None:
    assert max(run_ranks(fully_sharded, 4, 120)) < 1e-6


def on_meta(placement: Placement) -> list[list[Any]]:
    """A model on meta stays there, in local shapes and the type asked for."""
    with among(placement, placement.world) as mesh:
        assert mesh.tensor is not None
        with torch.device("meta"):
            mine = made("llama")
        transform(mine, mesh.tensor, dtype=torch.bfloat16)
        block = mine.get_submodule("model.layers.0")
        names = ("self_attn.q_proj.weight", "self_attn.k_proj.bias", "mlp.down_proj.weight", "input_layernorm.weight")
        assert all(each.is_meta and each.dtype == torch.bfloat16 for each in mine.parameters())
        return [list(block.get_parameter(name).shape) for name in names]


def test_a_model_on_meta_stays_there() -> None:
    assert run_ranks(on_meta, 4) == [[[8, 32], [8], [32, 12], [32]]] * 4


def generated(placement: Placement) -> bool:
    with among(placement, placement.world) as mesh:
        assert mesh.tensor is not None
        other = made("qwen3").eval()
        mine: Any = transform(copy.deepcopy(other), mesh.tensor)
        prompt = {"input_ids": batch()["input_ids"], "max_new_tokens": 6, "do_sample": False}
        return torch.equal(mine.generate(**prompt), other.generate(**prompt))  # type: ignore[operator]


def test_text_is_generated_as_before() -> None:
    assert run_ranks(generated, 2) == [True, True]


def refusals(placement: Placement) -> list[str]:
    said = []
    with among(placement, placement.world) as mesh:
        axis = mesh.tensor
        assert axis is not None
        models = [
            nn.Linear(2, 2),
            made("llama", num_attention_heads=1, num_key_value_heads=1),
            made("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3),
            made("neox", vocab_size=1),
            made("phi3", num_key_value_heads=1, num_attention_heads=2, hidden_size=6),
            made("phi3", num_attention_heads=6, num_key_value_heads=3, hidden_size=48),
            made("falcon", alibi=True),
            made("mixtral", router_jitter_noise=0.1),
        ]
        for model in models:
            before = [tuple(each.shape) for each in model.parameters()]
            with pytest.raises(ConfigError) as error:
                transform(model, axis)
            assert [tuple(each.shape) for each in model.parameters()] == before
            said.append(str(error.value))
        with pytest.raises(ConfigError) as error:
            phalanx.shard(transform(made("gpt2"), axis), lr=1e-3)
        said.append(str(error.value))
        with torch.device("meta"):
            empty = made("llama")
        with pytest.raises(ConfigError) as error:
            transform(empty, axis, load_state_dict_from_rank0=True)
        said.append(str(error.value))
    return said


def test_what_cannot_be_cut_is_refused_with_a_sentence() -> None:
    first, *others = run_ranks(refusals, 2)
    assert others == [first]
    known, heads, kv_heads, vocabulary, one_key, keys, distance, noise, fused, empty = first
    assert all(name in known for name in TRANSFORM_PLANS)
    assert "1 attention heads" in heads
    assert "3 key and value heads" in kv_heads
    assert "vocabulary of 1" in vocabulary
    assert "must divide the 3 channels of the key head, which share a matrix with the queries" in one_key
    assert "must divide the 3 key heads, which share a matrix with the queries" in keys
    assert "does not divide attention by distance (alibi)" in distance
    assert "router_jitter_noise is 0.1" in noise
    assert "transformer.h.0.attn.c_attn.weight, a slice of several matrices in one" in fused
    assert "weights on rank 0" in empty


def dropped(placement: Placement, cases: list[tuple[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """What a rank with a seed of its own computes while it trains; gradients with recomputation and without."""
    found = []
    with among(placement, placement.world) as mesh:
        axis = mesh.tensor
        assert axis is not None
        for kind, more in cases:
            model: Any = transform(made(kind, **more), axis).train()
            seeds: list[int] = []
            for name, each in model.named_modules():
                if name.endswith((".attention", ".self_attn", ".attn")):
                    each.register_forward_pre_hook(lambda *_, seeds=seeds: seeds.append(torch.initial_seed()))
            torch.manual_seed(placement.rank)
            passes = [model(**batch(), output_hidden_states=True).hidden_states[-1].detach() for _ in range(2)]
            after = int(torch.randint(2**40, ()))
            gradients = []
            for recomputing in (False, True):
                if recomputing:
                    model.gradient_checkpointing_enable()
                torch.manual_seed(5 + placement.rank)
                model.zero_grad()
                model(**batch()).loss.backward()
                gradients.append(
                    torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
                )
            torch.testing.assert_close(*gradients)
            model.eval()
            plain = made(kind, **more).eval()
            torch.testing.assert_close(model(**batch()).logits, plain(**batch()).logits)
            unlike = not torch.allclose(*passes)
            found.append({"first": passes[0].tolist(), "unlike": unlike, "seeds": seeds[:4], "after": after})
    return found


def test_dropout_is_alike_where_ranks_hold_the_same_and_their_own_where_not() -> None:
    cases = [
        ("llama", {"attention_dropout": 0.3}),
        ("neox", {"attention_dropout": 0.2, "hidden_dropout": 0.2}),
        ("gpt2", {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.1}),
    ]
    for (kind, _), one, two in zip(cases, *run_ranks(dropped, 2, cases=cases), strict=True):
        assert one["unlike"], f"something is dropped in {kind}, and not the same each time"
        assert two["first"] == one["first"], kind
        assert two["after"] == one["after"], f"generators of {kind} go on together"
        assert len({*one["seeds"], *two["seeds"]}) == 8, f"each attention of {kind}, rank and pass has its own draws"
