"""Adapters beside frozen weights: names, initial values, dropout by coordinates, and what a user's block must do."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.autotune.rank_bytes import StateLayout, state_items
from phalanx.config import load, resolve
from phalanx.config.model import LoraSection
from phalanx.config.model_spec import build_model_spec
from phalanx.core.errors import ConfigError
from phalanx.engine.interface import Precision
from phalanx.layout.model_shape import LATENT_TARGETS, LORA_TARGETS, LoraSpec, ModelSpec
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.families.catalog import PRESETS, adapter_count, flops_per_token, parameter_count, parameter_shapes
from phalanx.models.layers import cross_entropy_sum
from phalanx.models.llama import Block, Llama, init_slice
from phalanx.models.lora import (
    LoraLinear,
    adapter_names,
    apply_lora,
    fingerprint_weights,
    init_adapter_slice,
    is_adapter,
    merge_adapter,
)
from phalanx.models.user_model import build_on_meta, load_family_class
from phalanx.optim.update import AdamW
from phalanx.parallel import activations
from phalanx.workload import adapters
from tests.helpers import some

SPEC = ModelSpec(vocab_size=31, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate=24, max_seq_len=64)
LORA = LoraSpec(rank=3, alpha=6.0, targets=LORA_TARGETS)
DROPPING = replace(LORA, dropout=0.3)
TOKENS = torch.randint(0, 31, (4, 10), generator=torch.Generator().manual_seed(0))
SAMPLES = torch.tensor([7, 3, 12, 5])


def adapted(lora: LoraSpec | None, spec: ModelSpec = SPEC, seed: int = 0, b: float = 0.0) -> Llama:
    """A model with values in float64; `b` is how large the adapters' B is (0: as at the start)."""
    with torch.device("meta"):
        model = Llama(replace(spec, lora=lora))
    if lora is not None:
        apply_lora(model, lora)
    model.to(torch.float64).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            n, shape = parameter.numel(), tuple(parameter.shape)
            if name.endswith("lora_b"):
                generator = torch.Generator().manual_seed(len(name) + n)
                values = torch.randn(n, generator=generator, dtype=torch.float64) * b
            elif is_adapter(name):
                values = init_adapter_slice(seed, name, 0, n, shape, "cpu", torch.float64)
            else:
                values = init_slice(spec, seed, name, 0, n, "cpu", torch.float64) * (1.0 if "norm" in name else 8.0)
            parameter.copy_(values.view(shape))
    return model


def gradients_of(model: nn.Module, draws: CounterRNG | None) -> dict[str, Tensor]:
    model.zero_grad()
    model(TOKENS, TOKENS, draws).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_adapters_are_added_and_everything_else_is_frozen_under_its_name() -> None:
    model = adapted(replace(LORA, targets=("q", "down")))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    added = {name: shape for name, shape in shapes.items() if is_adapter(name)}
    assert {name: shape for name, shape in shapes.items() if name not in added} == parameter_shapes(SPEC)
    assert added == {
        f"layers.{layer}.{name}": shape
        for layer in (0, 1)
        for name, shape in {
            "attention.q.lora_a": (3, 16), "attention.q.lora_b": (16, 3),
            "mlp.down.lora_a": (3, 24), "mlp.down.lora_b": (16, 3),
        }.items()
    }  # fmt: skip
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == set(added)
    assert set(gradients_of(model, None)) == set(added)
    named = [name for names in adapter_names(replace(LORA, targets=("q", "down")), 2) for name in names]
    assert set(named) - {f"layers.{i}.{m}.weight" for i in (0, 1) for m in ("attention.q", "mlp.down")} == set(added)


def test_a_fresh_adapter_changes_nothing_and_a_trained_one_what_merging_it_does() -> None:
    plain = adapted(None)
    assert torch.equal(adapted(LORA)(TOKENS), plain(TOKENS))
    model = adapted(LORA, b=0.5)
    state = dict(model.named_parameters())
    with torch.no_grad():
        for matrix, a, b in adapter_names(LORA, SPEC.layers):
            plain.get_parameter(matrix).copy_(merge_adapter(state[matrix], state[a], state[b], LORA.scale))
    assert not torch.allclose(model(TOKENS), adapted(None)(TOKENS))
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=1e-11, atol=1e-11)


def test_merging_is_done_in_float32() -> None:
    weight, a, b = (torch.full(shape, 1.0, dtype=torch.bfloat16) for shape in ((2, 3), (1, 3), (2, 1)))
    assert merge_adapter(weight, a, b, 2.0**-12).dtype == torch.float32
    assert merge_adapter(weight, a, b, 2.0**-12).eq(1.0 + 2.0**-12).all()


def test_initial_values_do_not_depend_on_how_they_are_cut() -> None:
    name, shape, n = "layers.0.attention.q.lora_a", (3, 400), 1200
    make = functools.partial(init_adapter_slice, shape=shape, device="cpu", dtype=torch.float32)
    whole = make(5, name, 0, n)
    assert torch.equal(torch.cat([make(5, name, start, min(start + 77, n)) for start in range(0, n, 77)]), whole)
    assert 0.049 < whole.abs().max() <= 0.05  # 1 / sqrt(400)
    assert abs(float(whole.mean())) < 0.003
    assert abs(float(whole.std()) - 0.05 / 3**0.5) < 0.002
    assert not torch.equal(make(6, name, 0, n), whole)
    assert not torch.equal(make(5, name.replace("q", "k"), 0, n), whole)
    assert (
        init_adapter_slice(5, "layers.0.attention.q.lora_b", 2, 9, (4, 3), "cpu", torch.float32).tolist() == [0.0] * 7
    )


def test_dropout_depends_on_coordinates_alone() -> None:
    model = adapted(DROPPING, b=0.5)
    whole = model(TOKENS, draws=CounterRNG(1, 2, SAMPLES))
    order = torch.tensor([2, 0, 3, 1])
    parts = [model(TOKENS[part], draws=CounterRNG(1, 2, SAMPLES[part])) for part in order.split(1)]
    torch.testing.assert_close(torch.cat(parts), whole[order], rtol=1e-12, atol=1e-12)
    assert torch.equal(model(TOKENS), adapted(LORA, b=0.5)(TOKENS)), "an evaluation drops nothing"
    for other in (CounterRNG(2, 2, SAMPLES), CounterRNG(1, 3, SAMPLES), CounterRNG(1, 2, SAMPLES + 1)):
        assert not torch.allclose(model(TOKENS, draws=other), whole)


def test_each_matrix_draws_for_itself() -> None:
    """The input of A, as it comes out of dropout, for the same x at every adapter of two layers."""
    seen: list[tuple[bool, ...]] = []
    x = torch.ones(1, 4, 24, dtype=torch.float64)
    for place in (1, 3):
        for number in range(len(LORA_TARGETS)):
            linear = LoraLinear(nn.Linear(24, 24, dtype=torch.float64), replace(DROPPING, rank=24, alpha=24.0), number)
            with torch.no_grad():
                for parameter, value in ((linear.weight, 0), (linear.bias, 0), (linear.lora_a, 1), (linear.lora_b, 1)):
                    parameter.copy_(torch.eye(24) if value and parameter.dim() == 2 else torch.zeros_like(parameter))
            out = linear(x, CounterRNG(1, 2, SAMPLES[:1]), torch.tensor(place))
            assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
            seen.append(tuple(out.flatten().ne(0).tolist()))
    assert len(set(seen)) == 14
    assert sum(map(sum, seen)) / (14 * 96) == pytest.approx(0.7, abs=0.05)


def test_dropout_of_adapters_is_apart_from_that_of_residual_branches() -> None:
    spec = replace(SPEC, dropout=0.2)
    draws = CounterRNG(1, 2, SAMPLES)
    both, one, other = (adapted(lora, s, b=0.5) for lora, s in ((DROPPING, spec), (LORA, spec), (DROPPING, SPEC)))
    outs = [model(TOKENS, draws=draws) for model in (both, one, other)]
    assert not any(torch.allclose(a, b) for a, b in ((outs[0], outs[1]), (outs[0], outs[2]), (outs[1], outs[2])))


@pytest.mark.parametrize("how", some(["recomputed", "selective", "selective and compiled"], 0, 1))
def test_recomputing_and_compiling_change_nothing(how: str) -> None:
    spec = replace(SPEC, layers=1)
    expected = gradients_of(adapted(DROPPING, spec, b=0.5), CounterRNG(1, 2, SAMPLES))
    model = adapted(DROPPING, spec, b=0.5)
    activations.recompute(list(model.layers), selective="selective" in how)
    if "compiled" in how:
        for block in model.layers:
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    found = gradients_of(model, CounterRNG(1, 2, SAMPLES))
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-12)


def test_a_frozen_head_costs_no_gradient_and_changes_none() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (9, 11))
    labels = torch.randint(0, 11, (9,), generator=generator)
    grads = []
    for trained in (True, False):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
        cross_entropy_sum(x, w, labels, chunk=4).backward()
        grads.append(x.grad)
        assert (w.grad is None) is not trained
    assert torch.equal(grads[0], grads[1])  # type: ignore[arg-type]


class _Deaf(Block):
    """A user's block that was written without adapters in mind."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *others: object) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class _Narrow(Block):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.mlp = _Gateless()


class _Gateless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


@pytest.mark.parametrize(
    ("block", "lora", "words"),
    [
        (_Deaf, DROPPING, ["model.lora.dropout", "reach 14 of the adapters", "layers.0.attention.k", "`draws`"]),
        (_Narrow, replace(DROPPING, targets=("q", "up")), ["model.lora.dropout", "passes `draws` and `site` on"]),
        (_Narrow, LORA, ["model.lora.targets names gate", "layers.0", "mlp.gate"]),
    ],
)
def test_a_block_of_ones_own_that_cannot_take_them_is_refused(
    block: type[Block], lora: LoraSpec, words: list[str]
) -> None:
    class Model(Llama):
        pass

    Model.block = block
    with torch.device("meta"):
        model = Model(replace(SPEC, lora=lora))
    with pytest.raises(ConfigError) as caught:
        apply_lora(model, lora)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("block", "lora"), [(_Deaf, LORA), (_Narrow, replace(LORA, targets=("q", "up"))), (Block, DROPPING)]
)
def test_a_block_of_ones_own_that_can_take_them_is_not(block: type[Block], lora: LoraSpec) -> None:
    class Model(Llama):
        pass

    Model.block = block
    with torch.device("meta"):
        model = Model(replace(SPEC, lora=lora))
    apply_lora(model, lora)
    assert sum(isinstance(module, LoraLinear) for module in model.modules()) == 2 * len(lora.targets)


def test_the_fingerprint_tells_models_apart() -> None:
    shapes = parameter_shapes(SPEC)

    def of(seed: int, dtype: torch.dtype = torch.float32) -> str:
        return fingerprint_weights(lambda name, a, b: init_slice(SPEC, seed, name, a, b, "cpu", dtype), shapes)

    assert of(0) == of(0)
    assert len({of(0), of(1), of(0, torch.bfloat16)}) == 3
    assert fingerprint_weights(lambda name, a, b: torch.zeros(b - a), {"x": (8, 9)}) != fingerprint_weights(
        lambda name, a, b: torch.zeros(b - a), {"x": (9, 8)}
    )


def test_what_is_kept_of_a_product_is_not_kept_again_of_the_adapter_beside_it() -> None:
    """Elements of the products of a backward pass, with nothing and with the rest computed again."""
    computed: list[int] = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                computed.append(made.numel())
            return made

    x = torch.ones(1, 5, 64, requires_grad=True)
    found = []
    for selective in (False, True):
        unit = nn.Sequential(LoraLinear(nn.Linear(64, 96), replace(LORA, rank=2), 0), nn.SiLU())
        if selective:
            activations.recompute([unit], selective=True)
        out = unit(x).sum()
        computed.clear()
        with Note():
            out.backward()
        found.append(sorted(computed))
    assert found[1] == sorted([*found[0], 5 * 96]), "B's product is computed again, and neither W's nor A's"


def test_frozen_weights_cost_their_own_bytes_and_no_gradient() -> None:
    spec = replace(SPEC, lora=replace(LORA, targets=("q", "down")))
    count = 3 * (16 + 16) * 2 + 3 * (24 + 16) * 2
    assert adapter_count(spec) == count
    plain, frozen = parameter_count(SPEC, embedding=False), parameter_count(SPEC)
    attention = flops_per_token(SPEC, 10)[0] - 6 * plain
    assert flops_per_token(spec, 10)[0] == 4 * plain + 6 * count + attention
    bf16, rule = Precision(torch.bfloat16, torch.bfloat16), AdamW(0.9, 0.95, 1e-8, 0.0)
    one = state_items(build_on_meta(spec), spec, StateLayout(bf16, 1, rule))
    assert one["frozen weights"] == 2 * frozen
    assert one["gradient of the head"] == 0
    assert sum(one.values()) == 2 * frozen + count * (4 + 8 + 2 + 2 + 4)  # master, moments, rounded, gradients
    two = state_items(build_on_meta(spec), spec, StateLayout(bf16, 2, rule))
    assert two["frozen weights"] == frozen
    # Both blocks at a time, and neither the embedding nor the head beside them.
    assert two["weights in use"] == 2 * (frozen + count - (2 * SPEC.vocab_size + 1) * SPEC.hidden)


def test_a_recipe_with_adapters() -> None:
    tree: dict[str, Any] = {"model": {"from_hf": "hf", "lora": {"rank": 8, "targets": "q"}}}
    config, chosen = resolve.resolve_autos(load.build_config(tree, "it"), device="cpu", world=1)
    assert ("model.lora.alpha", 16.0, "no adapter is given") in chosen
    assert config.model.lora == LoraSection(rank=8, alpha=16.0, targets=["q"])
    assert load.build_config(load.parse_yaml(load.to_yaml(config), "again"), "again") == config
    again = load.build_config({"model": {"from_hf": "hf", "lora": {"rank": 8, "alpha": "auto", "targets": "q"}}}, "it")
    assert resolve.continue_config(again, config, Path("run")).model == config.model
    with pytest.raises(ConfigError, match=r"model.lora.rank is 4 now and was 8"):
        resolve.continue_config(
            load.build_config({"model": {"from_hf": "hf", "lora": {"rank": 4}}}, "it"), config, Path("run")
        )
    open_yet, _ = resolve.resolve_autos(load.build_config({"model": {"from_hf": "hf", "lora": {"adapter": "a"}}}, "it"),
                                 device="cpu", world=1)  # fmt: skip
    assert open_yet.model.lora == LoraSection(adapter="a")
    own = {"from_hf": "hf", "code": "own.py", "lora": {}}
    of_own, _ = resolve.resolve_autos(load.build_config({"model": own}, "it"), device="cpu", world=1)
    assert of_own.model.lora == LoraSection(rank=16, alpha=32.0, targets="auto"), "those that the class has"
    for block, targets in ((_Narrow, ["q", "k", "v", "o", "up", "down"]), (Block, list(LORA_TARGETS))):
        model_class = type("Model", (Llama,), {"block": block})
        found = adapters.resolve_adapter_options(of_own, replace(SPEC, lora=None), model_class)
        assert found == [("model.lora.targets", targets, "the model's own")]
    with pytest.raises(ConfigError, match=r"frozen weights, which must be pre-trained; set model.from_hf"):
        load.build_config({"model": {"preset": "llama-3-8b", "lora": {}}}, "it")


@pytest.mark.parametrize(
    ("preset", "targets"),
    [
        ("gpt2", ["q", "k", "v", "o", "up", "down"]),
        ("falcon-7b", ["q", "k", "v", "o", "up", "down"]),
        ("mixtral-8x7b", ["q", "k", "v", "o"]),
        ("deepseek-v3", ["o", *LATENT_TARGETS]),
        ("moonlight-16b-a3b", ["q", "o", "kv_down", "kv_up"]),
        ("llama-3-8b", list(LORA_TARGETS)),
    ],
)
def test_matrices_that_a_family_lacks_get_no_adapter(preset: str, targets: list[str]) -> None:
    config, _ = resolve.resolve_autos(
        load.build_config({"model": {"from_hf": "hf", "lora": {}}}, "it"), device="cpu", world=1
    )
    assert config.model.lora == LoraSection(rank=16, alpha=32.0, targets="auto"), "those that the folder's model has"
    spec = build_model_spec(config, PRESETS[preset])
    assert spec.lora is not None
    assert list(spec.lora.targets) == targets
    dense = spec.moe.dense_layers if spec.moe is not None else ()
    small = replace(spec, lora=None, layers=1 + len(dense), vocab_size=61)
    found = adapters.resolve_adapter_options(config, small, load_family_class(spec.architecture))
    assert found == [("model.lora.targets", targets, "the model's own")]
