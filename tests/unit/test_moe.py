"""Experts in one process: the grouped product and routing beside their plain twins, and the balancing loss beside
autograd on a whole batch."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.layout.model_shape import EXPERT_TARGETS, LoraSpec, ModelSpec, MoESpec
from phalanx.models.families.catalog import PRESETS, find_shape_problems, flops_per_token, parameter_count
from phalanx.models.grouped_mm import multiply_groups, reference_multiply_groups
from phalanx.models.lora import adapter_shapes, merge_adapter
from phalanx.models.moe import ExpertLoad, Experts, MoEBlock, MoEDecoder, MoELayer, reference_experts
from phalanx.models.router import Router
from phalanx.parallel.activations import recompute
from phalanx.workload.expert_balance import describe_load
from tests.helpers import some

SPEC = ModelSpec(
    architecture="mixtral", vocab_size=31, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=24,
    max_seq_len=16, moe=MoESpec(experts=5, experts_per_token=2, intermediate=24, balance_weight=0.3, z_loss=0.1),
)  # fmt: skip
ENDS = {
    "some empty": [0, 3, 3, 60, 64],
    "a tail": [10, 10, 12, 40, 50],
    "none": [0, 0, 0, 0, 0],
    "all in the last": [0, 0, 0, 0, 64],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("widths", [(32, 48), (7, 9)])  # those that torch's own operator takes, and others
def test_the_grouped_product_is_that_of_a_loop(dtype: torch.dtype, ends: str, widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, widths[0], dtype=dtype, requires_grad=True)
    weight = torch.randn(5, widths[1], widths[0], dtype=dtype, requires_grad=True)
    grad, behind = torch.randn(64, widths[1], dtype=dtype), torch.tensor(ENDS[ends])
    found = []
    for product in (multiply_groups, reference_multiply_groups):
        out = product(x, weight, behind)
        found.append((out, *torch.autograd.grad(out, (x, weight), grad)))
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-12 if dtype == torch.float64 else 2e-2, atol=1e-5)
    assert not found[0][0][ENDS[ends][-1] :].any()


def test_the_grouped_product_has_the_gradient_that_it_should() -> None:
    x, weight = torch.randn(6, 3, dtype=torch.float64), torch.randn(3, 4, 3, dtype=torch.float64)
    ends = torch.tensor([2, 2, 5])
    given = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda *args: multiply_groups(*args, ends), given)
    # A frozen stack gets none, and what is multiplied still does.
    (alone,) = torch.autograd.grad(multiply_groups(x, weight.detach(), ends).sum(), x)
    assert alone.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_of_tensors_without_values_has_shapes(dtype: torch.dtype) -> None:
    """As a dry run walks a model."""
    with FakeTensorMode():
        x, weight = torch.empty(8, 16, dtype=dtype, requires_grad=True), torch.empty(3, 32, 16, dtype=dtype)
        out = multiply_groups(x, weight.requires_grad_(), torch.empty(3, dtype=torch.int64))
        given = torch.autograd.grad(out.sum(), (x, weight))
    assert [tuple(each.shape) for each in (out, *given)] == [(8, 32), (8, 16), (3, 32, 16)]


class Called(TorchDispatchMode):
    """Counts what operators compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "operator"), [(torch.float32, "aten._grouped_mm.default"), (torch.float64, "phalanx.grouped_mm.default")]
)
@pytest.mark.parametrize("selective", [True, False])
def test_what_is_recomputed_selectively_keeps_the_grouped_product(
    dtype: torch.dtype, operator: str, selective: bool
) -> None:
    """Whether torch's kernel is called by itself or by our operator."""
    unit = nn.Module()
    unit.forward = lambda x, weight, ends: multiply_groups(x.sin(), weight, ends).sin().sin()  # type: ignore[assignment]
    recompute([unit], selective)
    x, weight = torch.randn(8, 16, dtype=dtype, requires_grad=True), torch.randn(2, 16, 16, dtype=dtype)
    with Called() as called:
        unit(x, weight, torch.tensor([3, 8])).sum().backward()
    assert called.names[operator] == (2 if selective else 3)  # with the one of the gradient
    assert called.names["aten.sin.default"] == 5  # the last is not needed again


def layer_of(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> MoELayer:
    torch.manual_seed(1)
    layer = MoELayer(spec).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def test_experts_are_their_plain_twin() -> None:
    layer, x = layer_of(SPEC), torch.randn(17, 32, dtype=torch.float64, requires_grad=True)
    _, chosen, weights = layer.router(x)
    assert isinstance(layer.experts, Experts)
    found = [layer.experts(x, chosen, weights), reference_experts(layer.experts, x, chosen, weights)]
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-14)
    grads = [torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], retain_graph=True) for out in found]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_of_experts_are_what_they_are_merged_to(family: str) -> None:
    lora = LoraSpec(rank=3, alpha=2.0, targets=EXPERT_TARGETS)
    spec = replace(SPEC, architecture=family, hidden=24)  # as wide as an expert: what is transposed shows in values
    layer, x = layer_of(spec), torch.randn(17, 24, dtype=torch.float64)
    _, chosen, weights = layer.router(x)
    experts = layer.experts
    for stack in ("gate_up", "down"):
        experts.add_adapter(stack, lora)
    torch.manual_seed(4)
    shapes = {name: tuple(each.shape) for name, each in layer.named_parameters()}
    for stack in ("gate_up", "down"):
        a, b = (experts.get_parameter(f"{stack}_adapter.lora_{kind}") for kind in "ab")
        assert (tuple(a.shape), tuple(b.shape)) == adapter_shapes(shapes[f"experts.{stack}"], 3, experts.transposed)
        torch.nn.init.normal_(a), torch.nn.init.normal_(b)
    found, before = experts(x, chosen, weights), layer_of(spec).experts(x, chosen, weights)
    with torch.no_grad():
        for stack in ("gate_up", "down"):
            weight, adapter = experts.get_parameter(stack), getattr(experts, f"{stack}_adapter")
            weight.copy_(merge_adapter(weight, adapter.lora_a, adapter.lora_b, lora.scale, experts.transposed))
            setattr(experts, f"{stack}_adapter", None)
    torch.testing.assert_close(experts(x, chosen, weights), found, rtol=1e-12, atol=1e-12)
    assert (found - before).abs().max() > 0.1


def test_of_equal_scores_the_first_expert_is_chosen() -> None:
    router = Router(replace(SPEC, moe=replace(SPEC.moe, experts=64, experts_per_token=8)))  # type: ignore[type-var]
    logits, chosen, weights = router(torch.randn(3, 32, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert chosen.tolist() == [list(range(8))] * 3
    assert torch.equal(weights, torch.full((3, 8), 1 / 8))


def test_corrections_are_in_the_choice_alone() -> None:
    router = layer_of(changed(scores="sigmoid", renormalize=False), torch.bfloat16).router
    x, fine = torch.zeros(1, 32, dtype=torch.bfloat16), torch.tensor([0.1, 0.2, 1.0001, 0.9999, 1.0002])
    for correction, wanted in ((fine, [4, 2]), (torch.arange(5.0), [4, 3])):  # in bfloat16 three are equal
        _, chosen, weights = router(x, correction)
        assert (chosen.tolist(), weights.tolist()) == ([wanted], [[0.5, 0.5]])


def test_routing_of_a_token_depends_on_no_other() -> None:
    layer, x = layer_of(SPEC), torch.randn(40, 32, dtype=torch.float64)
    _, chosen, weights = layer.router(x)
    whole = layer.experts(x, chosen, weights)
    for part in (slice(0, 1), slice(3, 20), slice(39, 40)):
        _, mine, shares = layer.router(x[part])
        assert torch.equal(mine, chosen[part])
        torch.testing.assert_close(layer.experts(x[part], mine, shares), whole[part], rtol=1e-13, atol=1e-14)


def model_of(spec: ModelSpec) -> MoEDecoder:
    torch.manual_seed(2)
    model = MoEDecoder(spec).double()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    tokens, labels = torch.randint(0, 31, (6, 12)), torch.randint(0, 31, (6, 12))
    labels[0, 3:], labels[2] = -100, -100  # rows weigh unlike
    return tokens, labels


def plain_loss(model: MoEDecoder, kind: str, over: str = "layer", before: Tensor | None = None) -> Tensor:
    """Cross-entropy and what is added, of the whole batch at once, by the formulas and with the routers' own logits."""
    moe, (tokens, labels) = model.spec.moe, batch()
    assert moe is not None
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, args, out: seen.append(out[0]))
        for module in model.modules()
        if isinstance(module, Router)
    ]
    loss = model(tokens, labels)
    for hook in hooks:
        hook.remove()
    here = (labels != -100).double()
    loads, odds, squares = [], [], loss.new_zeros(())
    for logits in seen:
        logits = logits.view(6, 12, -1)
        hit = torch.zeros_like(logits).scatter(-1, logits.topk(moe.experts_per_token).indices, 1.0) * here[..., None]
        loads.append(hit)
        odds.append(logits.softmax(-1) * here[..., None])
        squares = squares + (logits.logsumexp(-1).square() * here).sum() / len(seen)
    added = loss.new_zeros(())
    for number, (hit, odd) in enumerate(zip(loads, odds, strict=True)):
        if kind == "sequence":
            shares = hit.sum(1, keepdim=True) / here.sum(1).clamp(min=1)[:, None, None]
        elif before is not None:
            shares = before[number]
        else:
            pooled = [each.sum((0, 1)) / here.sum() for each in loads]
            shares = sum(pooled) / len(pooled) if over == "model" else pooled[number]
        added = added + moe.experts * (odd * shares).sum() / len(seen)
    if kind != "none":
        loss = loss + moe.balance_weight * added
    return loss + moe.z_loss * squares


def divided_loss(model: MoEDecoder, rows: list[int], shares: Tensor | None) -> tuple[Tensor, Tensor]:
    """Passes over parts of the batch; returns the sum of cross-entropies and the counts. Gradients are accumulated."""
    load = model.load = ExpertLoad(model.spec, torch.device("cpu"))
    load.seed, load.shares, load.active = torch.tensor(0.25, dtype=torch.float64), shares, True
    total, (tokens, labels) = torch.zeros((), dtype=torch.float64), batch()
    for part, learnt in zip(tokens.split(rows), labels.split(rows), strict=True):
        loss = model(part, learnt)
        (loss * 0.25).backward()
        total += loss.detach()
    model.load = None
    return total, load.counts


@pytest.mark.parametrize("kind", ["sequence", "step", "step, over the model", "step_before", "none"])
@pytest.mark.parametrize("rows", some([[6], [1, 2, 3], [5, 1], [1] * 6], 1))
def test_the_loss_of_any_division_is_that_of_the_whole_batch(kind: str, rows: list[int]) -> None:
    kind, _, over = kind.partition(", ")
    moe = replace(SPEC.moe, balance=kind, over="model" if over else "layer")  # type: ignore[type-var]
    model = model_of(replace(SPEC, moe=moe))
    shares: Tensor | None = None
    if kind == "step":
        counts = divided_loss(model, [6], None)[1].double()
        shares = counts / counts.sum(1, keepdim=True) * moe.experts_per_token
        shares = shares.mean(0, keepdim=True).expand_as(shares) if over else shares
        model.zero_grad()
    elif kind == "step_before":
        shares = torch.rand(3, 5, dtype=torch.float64)
    found, counts = divided_loss(model, rows, shares)
    mine = {name: each.grad.clone() / 0.25 for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    whole = plain_loss(model, kind, moe.over, shares if kind == "step_before" else None)
    whole.backward()
    assert mine.keys() == {name for name, each in model.named_parameters() if each.grad is not None}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(found, model(*batch()), rtol=1e-12, atol=0)
    assert counts.sum(1).tolist() == [2 * int((batch()[1] != -100).sum())] * 3


def test_evaluation_counts_nothing() -> None:
    model = model_of(SPEC)
    load = model.load = ExpertLoad(SPEC, torch.device("cpu"))
    model(*batch())
    assert not load.counts.any()


@pytest.mark.parametrize("dtype", some([torch.float64, torch.float32], 1))
def test_a_block_compiles_in_one_graph(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    block = MoEBlock(SPEC, 0).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x, cos, sin = torch.randn(2, 6, 32, dtype=dtype), torch.ones(6, 4, dtype=dtype), torch.zeros(6, 4, dtype=dtype)
    counted, seed = torch.ones(2, 6, 1, dtype=torch.int64), torch.ones((), dtype=dtype)
    results = []
    for run in (block, compiled):
        out, counts = run(x, cos, sin, counted=counted, seed=seed)
        results.append((out, counts, *torch.autograd.grad(out.square().sum(), list(block.mlp.parameters()))))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("preset", "billions", "active"),
    [
        ("mixtral-8x7b", 46.70, 12.88),
        ("mixtral-8x22b", 140.62, 39.15),
        ("qwen3-30b-a3b", 30.53, 3.35),
        ("qwen3-235b-a22b", 235.09, 22.19),
        ("olmoe-1b-7b", 6.92, 1.28),
        ("gpt-oss-20b", 20.91, 4.19),
        ("gpt-oss-120b", 116.83, 5.71),
        ("deepseek-v3", 671.03, 37.55),
        ("moonlight-16b-a3b", 15.96, 2.91),
    ],
)
def test_sizes_are_those_of_the_published_models(preset: str, billions: float, active: float) -> None:
    spec = PRESETS[preset]
    assert parameter_count(spec) / 1e9 == pytest.approx(billions, abs=0.006)
    embedding = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden
    full, _ = flops_per_token(spec, 1)
    width = spec.latent.mean_width(spec.head_dim) if spec.latent else spec.head_dim
    attention = 12 * spec.heads * width * spec.layers
    assert ((full - attention) / 6 + embedding) / 1e9 == pytest.approx(active, abs=0.006)
    assert not find_shape_problems(spec)


def changed(**changes: Any) -> ModelSpec:
    assert SPEC.moe is not None
    return replace(SPEC, moe=replace(SPEC.moe, **changes))


def deepseek(moe: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    spec = PRESETS["moonlight-16b-a3b"]
    assert spec.moe is not None
    return replace(spec, moe=replace(spec.moe, **moe or {}), **changes)


ADAPTED = LoraSpec(rank=2, alpha=2, targets=("experts.down",))
QWEN = PRESETS["qwen3-30b-a3b"]
assert QWEN.moe is not None
LATENT = PRESETS["moonlight-16b-a3b"].latent
assert LATENT is not None


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (replace(SPEC, moe=None), "has experts, and model.moe does not say how many"),
        (changed(experts_per_token=6), "at least one of them and at most all"),
        (changed(intermediate=8), "no export could say model.moe.intermediate"),
        (changed(renormalize=False), "which Mixtral does not support"),
        (changed(over="model"), "set model.moe.balance to step_before or step"),
        (replace(SPEC, lora=LoraSpec(rank=2, alpha=2, targets=("up",))), "names up, but experts are stacks"),
        (replace(SPEC, lora=replace(ADAPTED, dropout=0.1)), "PEFT has no dropout of adapters of experts"),
        (replace(QWEN, lora=ADAPTED, moe=replace(QWEN.moe, dense_layers=(0, 2))), "but layers 0, 2 have no experts"),
        (changed(balance="bias"), "moves corrections of scores, and Mixtral has none"),
        (replace(SPEC, architecture="llama"), "model.architecture llama has no experts"),
        (changed(shared=1), "model.moe.scale, shared or groups is set, which Mixtral does not support"),
        (replace(SPEC, latent=LATENT), "model.latent is set, which only deepseek_v3 has"),
        (deepseek(latent=None), "model.latent does not say of which widths"),
        (deepseek(latent=replace(LATENT, value_dim=200)), "gives values 200 channels and queries 192"),
        (deepseek(lora=LoraSpec(rank=2, alpha=2, targets=("up",))), "some of q, o, q_down, q_up, kv_down, kv_up, exp"),
        (deepseek(moe={"dense_layers": (1,)}), "those of a DeepSeek-V3 are its first"),
        (deepseek(moe={"groups": 7}), "does not make 7 groups of two or more"),
        (deepseek(moe={"groups": 32, "groups_per_token": 2}), "more than 2 of 32 groups have"),
    ],
)
def test_a_bad_shape_is_a_sentence(spec: ModelSpec, says: str) -> None:
    (problem,) = find_shape_problems(spec)
    assert says in problem


def test_how_even_a_load_is() -> None:
    entropy, most = describe_load(torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [0, 0, 0, 0]]))
    assert (entropy, most) == ([1.0, 0.0, 0.0], [1.0, 4.0, 0.0])
