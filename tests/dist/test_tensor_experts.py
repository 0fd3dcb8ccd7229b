"""Tensor parallelism of models with experts: the ranks have the gradients and loads of one process, each token is
counted once, and they exchange what a plan says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm.mesh import join
from phalanx.core.placement import Placement
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.layout.model_shape import LatentSpec, ModelSpec, MoESpec
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.layers import IGNORE_INDEX
from phalanx.models.moe import ExpertLoad, MoEDecoder
from phalanx.models.user_model import load_family_class
from phalanx.parallel.experts import ExpertParallel, apply_expert_parallel
from phalanx.parallel.tensor import apply_tensor_parallel, make_tensor_context
from phalanx.planner.layer_exchanges import expert_bytes
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.work import StepWork, find_ffn_widths
from tests.dist.tensor_cases import taken
from tests.helpers import cover, run_ranks, some

ROWS, LENGTH = 3, 8
_BASE = ModelSpec(
    architecture="mixtral", vocab_size=31, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=24,
    max_seq_len=16, dropout=0.1, attention_dropout=0.1,
    moe=MoESpec(experts=5, experts_per_token=2, intermediate=24, balance_weight=0.3, z_loss=0.1),
)  # fmt: skip
_GROUPED = MoESpec(
    experts=6, experts_per_token=2, intermediate=24, scores="sigmoid", scale=1.5, shared=1, groups=3,
    groups_per_token=2, dense_layers=(0,), balance_weight=0.3,
)  # fmt: skip
_LATENT = LatentSpec(query_rank=10, key_rank=12, plain_dim=4, value_dim=6)
KINDS: dict[str, ModelSpec] = {
    "mixtral": _BASE,
    "qwen3_moe": replace(_BASE, architecture="qwen3_moe", head_dim=12),
    "olmoe": replace(_BASE, architecture="olmoe"),
    "gpt_oss": replace(_BASE, architecture="gpt_oss"),
    "deepseek_v3": replace(_BASE, architecture="deepseek_v3", kv_heads=4, moe=_GROUPED, latent=_LATENT),
    "deepseek_v3, wide queries": replace(
        _BASE, architecture="deepseek_v3", kv_heads=4, moe=_GROUPED, latent=replace(_LATENT, query_rank=0)
    ),
}


def make_model(spec: ModelSpec) -> MoEDecoder:
    """A model with values, in which nothing is 0 or 1, that adds losses of its loads."""
    torch.manual_seed(5)
    model = load_family_class(spec.architecture)(spec).double()
    assert isinstance(model, MoEDecoder)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.2 * (parameter.dim() == 1), std=0.3)
    model.load = load = ExpertLoad(spec, torch.device("cpu"))
    load.active, load.seed = True, torch.ones((), dtype=torch.float64)
    return model


def run_model(model: MoEDecoder, length: int) -> dict[str, Tensor]:
    """Gradients by name, and the loss, of some rows with many labels that do not count."""
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, 31, (ROWS, length), generator=generator)
    labels = torch.where(torch.rand(ROWS, length, generator=generator) < 0.4, IGNORE_INDEX, tokens.roll(1))
    loss = model(tokens, labels, CounterRNG(1, 1, torch.arange(ROWS)))
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(placement: Placement, counts: dict[str, list[int]], expert: int) -> dict[str, list[Any]]:
    """By kind of model and whether sequences are cut: the greatest difference from one process, and the loads."""
    found: dict[str, list[Any]] = {}
    with join(placement, 60, axes=MeshAxes(tensor=placement.world // expert, expert=expert)) as mesh:
        for kind, sequence in cover(KINDS, (expert > 1, expert == 1)):
            spec, length = KINDS[kind], LENGTH if sequence else LENGTH - 1
            assert spec.moe is not None
            whole, mine = make_model(spec), make_model(spec)
            wanted = run_model(whole, length)
            axis = mesh.expert or mesh.tensor
            assert axis is not None and mine.load is not None and whole.load is not None
            divided = ExpertParallel(axis, mesh.traffic, counts[str(spec.moe.experts)])
            held = apply_expert_parallel(mine, divided)
            held |= apply_tensor_parallel(mine, make_tensor_context(mesh, spec.kv_heads, sequence))
            got = run_model(mine, length)
            assert got.keys() == wanted.keys()
            # With several copies, which have the same rows here, experts have as many gradients.
            apart = max(
                float((got[name] - (expert if ".experts." in name else 1) * taken(each, held.get(name))).abs().max())
                for name, each in wanted.items()
                if got[name].numel()
            )
            found[f"{kind}, {sequence=}"] = [apart, mine.load.counts.tolist(), whole.load.counts.tolist()]
    return found


@pytest.mark.parametrize(
    ("world", "expert", "counts"),
    some(
        [
            (2, 1, {"5": [4, 1], "6": [2, 4]}),
            (4, 1, {"5": [2, 0, 2, 1], "6": [1, 3, 0, 2]}),
            (4, 2, {"5": [1, 2, 2, 0], "6": [2, 1, 2, 1]}),
        ],
        0,
        2,
    ),
)
def test_slices_of_each_family_have_the_gradients_of_one_process(
    world: int, expert: int, counts: dict[str, list[int]]
) -> None:
    everyones = run_ranks(compare, world, 120, counts=counts, expert=expert)
    for kind in everyones[0]:
        assert max(found[kind][0] for found in everyones) < 1e-11, kind
        # Each token is counted by one of the ranks of a copy.
        loads = torch.tensor([found[kind][1] for found in everyones]).sum(0)
        assert torch.equal(loads, expert * torch.tensor(everyones[0][kind][2])) and loads.any()


def count_balanced(placement: Placement) -> list[int]:
    """Bytes that a rank sends to others for the experts of a layer, forward and backward, of tokens whose choices are
    even."""
    spec = replace(_BASE, layers=1, moe=MoESpec(experts=4, experts_per_token=2, intermediate=24))
    with join(placement, 60, axes=MeshAxes(tensor=placement.world)) as mesh:
        assert mesh.tensor is not None
        layer = MoEDecoder(spec).layers[0].get_submodule("mlp.experts")
        whole = nn.ModuleDict({"layers": nn.ModuleDict({"mlp": nn.ModuleDict({"experts": layer})})})
        apply_expert_parallel(whole, ExpertParallel(mesh.tensor, mesh.traffic, (2, 2)))
        chosen = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2]])
        mesh.traffic.take()
        out = layer(torch.randn(6, 32, requires_grad=True), chosen, torch.rand(6, 2))
        forward = mesh.traffic.take().payload_bytes
        out.sum().backward()
        return [forward, mesh.traffic.take().payload_bytes]


def test_a_plan_has_the_bytes_of_a_ranks_own_tokens() -> None:
    """Six tokens are half of those of the two ranks."""
    work = StepWork(
        layers=1, hidden=32, heads=4, kv_heads=2, vocabulary=31, seq_len=6, global_batch=2, precision="fp32",
        gather_bytes=4, **find_ffn_widths(1, 24, MoESpec(experts=4, experts_per_token=2, intermediate=24)),
    )  # fmt: skip
    for sent in run_ranks(count_balanced, 2, 60):
        assert tuple(sent) == expert_bytes(work, LayoutChoice(tensor=2), rows=2)
