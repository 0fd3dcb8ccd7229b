"""Delayed initialisation: the model's own rules, every parameter and buffer, ties, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, GPTNeoXConfig, LlamaConfig

from phalanx.compat.sagemaker.small import empty_module_params
from phalanx.compat.sagemaker.transforming import DelayedParamIniter
from phalanx.core.errors import ConfigError

SMALL = {"vocab_size": 32, "use_cache": False}
CONFIGS = {
    "gpt2": GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=16, **SMALL),
    "gptj": GPTJConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=16, **SMALL),
    "gpt_neox": GPTNeoXConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **SMALL
    ),
    "llama": LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **SMALL),
}


def on_meta(config: Any) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def initialised(model: nn.Module, initer: DelayedParamIniter) -> None:
    """As FSDP goes through a model: from the outside to the inside."""
    fill, tie = initer.get_param_init_fn(), initer.get_post_param_init_fn()
    for module in model.modules():
        fill(module)
    tie(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_begins_as_it_would_without_delay(name: str) -> None:
    config = CONFIGS[name]
    torch.manual_seed(0)
    usual = AutoModelForCausalLM.from_config(config)
    model = on_meta(config)
    initer = DelayedParamIniter(model, verbose=True)
    with initer.validate_params_and_buffers_inited():
        initialised(model, initer)
    for (key, ours), theirs in zip(model.named_parameters(), usual.parameters(), strict=True):
        spread, expected = float(ours.detach().std(correction=0)), float(theirs.detach().std(correction=0))
        assert spread == pytest.approx(expected, rel=0.15, abs=1e-6), key
        assert float(ours.detach().mean()) == pytest.approx(float(theirs.detach().mean()), abs=0.01), key
    for (key, ours), theirs in zip(model.named_buffers(), usual.buffers(), strict=True):
        assert torch.equal(ours, theirs), key
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (usual.get_input_embeddings().weight is usual.get_output_embeddings().weight)
    ids = torch.arange(8).view(1, -1)
    model.load_state_dict(usual.state_dict())
    assert torch.equal(model.eval()(ids).logits, usual.eval()(ids).logits)


def test_draws_depend_on_seed_and_name_and_not_on_the_order() -> None:
    sums = []
    for seed, backwards in ((1, False), (1, True), (2, False)):
        torch.manual_seed(seed)
        model = on_meta(CONFIGS["gpt2"])
        initer = DelayedParamIniter(model)
        initer.get_post_param_init_fn()
        for module in list(model.modules())[:: -1 if backwards else 1]:
            initer.get_param_init_fn()(module)
        sums.append([float(parameter.detach().double().sum()) for parameter in model.parameters()])
    assert sums[0] == sums[1]
    assert sums[0] != sums[2]


def test_the_scripts_random_numbers_go_on_as_without() -> None:
    model = nn.Linear(3, 3, device="meta")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    DelayedParamIniter(model).get_param_init_fn()(model)
    assert torch.equal(torch.rand(1), expected)
    assert not model.weight.is_meta


def test_a_parameter_without_values_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))
    initer = DelayedParamIniter(model)
    with (
        pytest.raises(AssertionError, match=r"2 of 4 parameters got no values: 1\.bias, 1\.weight"),
        initer.validate_params_and_buffers_inited(),
    ):
        initer.get_param_init_fn()(model[0])
    with initer.validate_params_and_buffers_inited(enabled=False):
        pass
    initer.get_param_init_fn()(model[1])
    with initer.validate_params_and_buffers_inited():
        pass


def test_a_function_of_ones_own_takes_the_place_of_the_models() -> None:
    def fill(module: nn.Module) -> None:
        empty_module_params(module, device=torch.device("cpu"))
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(3.0)
            module.bias.data.zero_()

    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    initer = DelayedParamIniter(model, init_method_using_config=fill)
    with initer.validate_params_and_buffers_inited():
        for module in model.modules():
            initer.get_param_init_fn()(module)
    assert model[0].weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    lazy = DelayedParamIniter(
        nn.Sequential(nn.Linear(2, 2, device="meta")), init_method_using_config=lambda module: None
    )
    with pytest.raises(AssertionError, match="must call empty_module_params"):
        lazy.get_param_init_fn()(nn.Linear(2, 2, device="meta"))


def test_tied_weights_are_not_untied_in_silence() -> None:
    model = on_meta(CONFIGS["gpt2"])
    initer = DelayedParamIniter(model)
    with pytest.raises(ConfigError, match="are tied and would become two"):
        initer.get_param_init_fn()(model)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device="meta"))


class Table(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2, device="meta")
        self.register_buffer("table", torch.empty(2, device="meta"))


def test_what_nobody_knows_the_values_of_is_refused() -> None:
    for module, says in ((Odd(), "has no initialization"), (Table(), "does not define its values")):
        with pytest.raises(ConfigError, match=says):
            DelayedParamIniter(nn.Sequential(module)).get_param_init_fn()(module)
