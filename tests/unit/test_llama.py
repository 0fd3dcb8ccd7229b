from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from phalanx.layout.model_shape import BlockSpec, ModelSpec
from phalanx.models import attention as attention_module
from phalanx.models.attention import attention
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.families.catalog import FAMILIES, PRESETS, parameter_shapes
from phalanx.models.layers import RMSNorm, reference_cross_entropy_sum
from phalanx.models.llama import HF_NAMES, Block, Llama, init_slice, llama_init_rule
from phalanx.models.rotary import apply_rope, rope_table
from tests.helpers import some

SPEC = ModelSpec(vocab_size=96, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=48, max_seq_len=128)


def build(spec: ModelSpec, dtype: torch.dtype = torch.float64, seed: int = 0) -> Llama:
    with torch.device("meta"):
        model = Llama(spec).to(dtype)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            values = init_slice(spec, seed, name, 0, parameter.numel(), "cpu", dtype)
            parameter.copy_(values.view_as(parameter))
    return model


def batch(rows: int = 4, length: int = 24, vocab: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, vocab, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[0, :5] = -100
    return tokens[:, :-1], labels


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_units_cover_every_parameter_once_in_order_of_use() -> None:
    model = build(SPEC)
    assert [name for name, _ in model.units()] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    names = [f"{unit}.{name}" for unit, module in model.units() for name, _ in module.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert set(names) == set(parameter_shapes(SPEC))


def test_a_tied_head_is_one_parameter_that_gets_both_gradients() -> None:
    spec = replace(SPEC, tie_embeddings=True)
    model = build(spec)
    assert "head.weight" not in dict(model.named_parameters())
    assert "head.weight" not in model.state_dict()
    untied = build(SPEC)
    with torch.no_grad():
        untied.head.weight.copy_(model.embed.weight)
        for name, parameter in model.named_parameters():
            untied.get_parameter(name).copy_(parameter)
    tokens, labels = batch()
    losses = [m(tokens, labels) for m in (model, untied)]
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(model.embed.weight.grad, untied.embed.weight.grad + untied.head.weight.grad)


def test_initial_values_are_the_same_however_they_are_cut() -> None:
    for name, shape in parameter_shapes(SPEC).items():
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        whole = init_slice(SPEC, 5, name, 0, n, "cpu", torch.float32)
        parts = [init_slice(SPEC, 5, name, a, b, "cpu", torch.float32) for a, b in ((0, 7), (7, n - 3), (n - 3, n))]
        assert torch.equal(torch.cat(parts), whole)
        assert not torch.equal(init_slice(SPEC, 6, name, 0, n, "cpu", torch.float32), whole) or "norm" in name


def test_initial_distributions() -> None:
    spec = replace(SPEC, hidden=256, vocab_size=512, intermediate=300, layers=8)
    scaled = 0.02 / 4
    expected = {"embed.weight": 0.02, "layers.3.attention.q.weight": 0.02, "head.weight": 0.02}
    expected |= {"layers.3.attention.o.weight": scaled, "layers.0.mlp.down.weight": scaled}
    for name, std in expected.items():
        assert llama_init_rule(name, spec) == ("normal", std)
        assert abs(init_slice(spec, 0, name, 0, 8192, "cpu", torch.float64).std() / std - 1) < 0.05
    for name in ("head.norm.weight", "layers.1.mlp_norm.weight", "layers.1.attention_norm.weight"):
        assert llama_init_rule(name, spec) == ("ones",)
        assert torch.equal(init_slice(spec, 0, name, 3, 9, "cpu", torch.float32), torch.ones(6))


def test_every_parameter_has_a_hugging_face_name() -> None:
    found: set[str] = set()
    biases = BlockSpec(qkv_bias=True, o_bias=True, mlp_bias=True)
    latent = "deepseek_v3"  # whose names of attention are others
    for family in (each for each in FAMILIES.values() if each.tensor_plan and each.name != latent):
        block = biases if family.name == "llama" else BlockSpec()
        shapes = parameter_shapes(replace(SPEC, layers=1, architecture=family.name, block=block))
        ours = {name.replace("layers.0.", "layers.{i}.") for name in shapes}
        assert ours <= set(family.hf.names)
        found |= ours
    assert found >= set(HF_NAMES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_dtype_goes_through_unmixed(dtype: torch.dtype) -> None:
    model = build(replace(SPEC, dropout=0.1), dtype)
    tokens, labels = batch()
    assert model(tokens).dtype == dtype
    loss = model(tokens, labels, CounterRNG(0, 0, torch.arange(4)))
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
    exact = build(SPEC)(tokens)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert (model(tokens).double() - exact).norm() < tolerance * exact.norm()


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = build(SPEC)
    tokens, labels = batch()
    expected = reference_cross_entropy_sum(model(tokens).flatten(0, 1), torch.eye(96).double(), labels.flatten())
    torch.testing.assert_close(model(tokens, labels), expected, rtol=1e-12, atol=0)


def test_the_head_uses_the_loss_it_holds() -> None:
    model = build(SPEC)
    tokens, labels = batch()
    shapes = []
    model.head.cross_entropy_sum = lambda h, w, y: shapes.append((h.shape, w.shape, y.shape)) or h.sum()  # type: ignore
    model(tokens, labels)
    assert shapes == [((96, 32), (96, 32), (96,))]


def test_attention_is_causal_and_shares_key_heads() -> None:
    block = build(SPEC).layers[0]
    cos, sin = rope_table(SPEC, torch.arange(10))
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    got = block.attention(x, cos, sin)
    q, k, v = (getattr(block.attention, n)(x).unflatten(-1, (-1, 8)) for n in "qkv")
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    out = torch.empty(2, 10, 4, 8, dtype=torch.float64)
    for head in range(4):
        scores = q[:, :, head] @ k[:, :, head // 2].transpose(1, 2) / 8**0.5
        scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), float("-inf"))
        out[:, :, head] = scores.softmax(-1) @ v[:, :, head // 2]
    torch.testing.assert_close(got, block.attention.o(out.flatten(2)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_token_seen_often_is_summed_wide(dtype: torch.dtype) -> None:
    embed = build(SPEC, dtype).embed
    tokens = torch.zeros(4, 5000, dtype=torch.int64)
    tokens[:, ::7] = 95
    grad = (torch.rand(4, 5000, 32, generator=torch.Generator().manual_seed(0)) - 0.1).to(dtype)
    out = embed(tokens)
    assert torch.equal(out, F.embedding(tokens, embed.weight))
    out.backward(grad)
    exact = torch.zeros(96, 32, dtype=torch.float64).index_add_(0, tokens.flatten(), grad.double().flatten(0, 1))
    assert embed.weight.grad is not None
    assert embed.weight.grad.dtype == dtype
    torch.testing.assert_close(embed.weight.grad.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_embedding_is_torchs_own_in_wide_dtypes(dtype: torch.dtype) -> None:
    embed = build(SPEC, dtype).embed
    tokens, _ = batch()
    plain = embed.weight.detach().clone().requires_grad_()
    for out in (embed(tokens), F.embedding(tokens, plain)):
        (out * torch.arange(32)).sin().sum().backward()
    assert torch.equal(embed.weight.grad, plain.grad)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_repeated_key_heads_attend_as_shared_ones(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    results = []
    whole = [
        torch.randn(2, heads, 10, 8, generator=generator, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)
    ]
    for repeat in (False, True):
        parts = [part.clone().requires_grad_() for part in whole]
        out = attention_module._attend(*parts, repeat=repeat)
        out.pow(2).sum().backward()
        results.append([out.detach(), *(part.grad for part in parts)])
    for shared, repeated in zip(*results, strict=True):
        torch.testing.assert_close(shared, repeated, rtol=1e-12, atol=1e-12)


def test_key_heads_are_repeated_for_float32_on_accelerators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, asked = F.scaled_dot_product_attention, []

    def watched(q, k, v, **options):  # type: ignore[no-untyped-def]
        asked.append((k.shape[1], options["enable_gqa"]))
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for device, dtype in [("cpu", torch.float32), ("meta", torch.bfloat16), ("meta", torch.float32)]:
        q, k = (torch.empty(1, heads, 6, 8, dtype=dtype, device=device) for heads in (4, 2))
        assert attention(q, k, k).shape == q.shape
    assert asked == [(2, True), (2, True), (4, False)]


def test_rope_turns_by_relative_position() -> None:
    cos, sin = rope_table(SPEC, torch.arange(64))
    assert cos.dtype == torch.float32
    assert cos.shape == sin.shape == (64, 4)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 64, 1, 8)
    q, k = apply_rope(q, cos, sin)[0, :, 0], apply_rope(k, cos, sin)[0, :, 0]
    torch.testing.assert_close((q[10:] * k[:-10]).sum(-1), (q[10] * k[0]).sum().expand(54), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(apply_rope(q[None, :, None], cos, -sin).norm(), q.norm(), rtol=1e-5, atol=0)


def test_llama3_scaling_slows_long_waves_only() -> None:
    spec = PRESETS["llama-3.1-8b"]
    plain = rope_table(replace(spec, rope_scaling=None), torch.arange(2))
    scaled = rope_table(spec, torch.arange(2))
    ratio = torch.atan2(plain[1][1], plain[0][1]) / torch.atan2(scaled[1][1], scaled[0][1])
    assert ratio[0] == 1
    torch.testing.assert_close(ratio[-1].item(), 8.0, rtol=1e-3, atol=0)
    assert (ratio.diff() > -1e-3).all()


def test_norm_of_small_bfloat16_values_is_taken_in_float32() -> None:
    norm = RMSNorm(64, 1e-5).bfloat16()
    x = torch.randn(16, 64) * 1e-3
    exact = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x.bfloat16()).float(), exact, rtol=2e-2, atol=1e-3)


def test_dropout_follows_the_sample_not_the_batch() -> None:
    spec = replace(SPEC, dropout=0.2)
    model = build(spec)
    tokens, labels = batch()
    samples = torch.tensor([5, 17, 2, 99])
    model(tokens, labels, CounterRNG(3, 7, samples)).backward()
    whole = gradients(model)
    model.zero_grad()
    for rows in ([0], [3, 1, 2]):
        model(tokens[rows], labels[rows], CounterRNG(3, 7, samples[rows])).backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, whole[name], rtol=1e-10, atol=1e-13)
    one = model(tokens, labels, CounterRNG(3, 7, samples))
    assert torch.equal(one, model(tokens, labels, CounterRNG(3, 7, samples)))
    assert not torch.equal(one, model(tokens, labels, CounterRNG(3, 8, samples)))
    assert not torch.equal(one, model(tokens, labels))


def test_no_two_places_of_dropout_share_a_mask() -> None:
    seen: list[int] = []

    class Spy(CounterRNG):
        def dropout(self, x: torch.Tensor, layer: int | torch.Tensor, p: float) -> torch.Tensor:
            seen.append(int(layer))
            return super().dropout(x, layer, p)

    tokens, labels = batch()
    build(replace(SPEC, dropout=0.2))(tokens, labels, Spy(0, 0, torch.arange(4)))
    assert seen == list(range(7))


def test_a_recomputed_block_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(replace(SPEC, dropout=0.2))
    tokens, labels = batch()
    draws = CounterRNG(0, 1, torch.arange(4))
    model(tokens, labels, draws).backward()
    kept = gradients(model)
    model.zero_grad()
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, *a: checkpoint(forward, self, *a, use_reentrant=False))
    model(tokens, labels, draws).backward()
    for name, grad in gradients(model).items():
        assert torch.equal(grad, kept[name])


@pytest.mark.parametrize("p", some([0.0, 0.2], 1))
def test_one_compiled_block_serves_all_layers_and_steps(p: float) -> None:
    spec = replace(SPEC, dropout=p)
    model, eager = build(spec, torch.float32), build(spec, torch.float32)
    tokens, labels = batch()

    def step(model: Llama, step: int) -> torch.Tensor:
        model.zero_grad()
        loss = model(tokens, labels, CounterRNG(0, step, torch.arange(4) + step))
        loss.backward()
        return loss.detach()

    torch._dynamo.reset()
    for block in model.layers:
        block.compile(fullgraph=True, backend="aot_eager")  # guards are what is tested; inductor takes ten times longer
    first, *others = model.layers
    model.layers = torch.nn.ModuleList([first])
    step(model, 0)  # compiles
    model.layers = torch.nn.ModuleList([first, *others])
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in (1, 2):
            torch.testing.assert_close(step(model, number), step(eager, number), rtol=1e-5, atol=0)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, eager.get_parameter(name).grad, rtol=1e-3, atol=1e-4)
