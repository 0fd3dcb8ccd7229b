"""What `phalanx.shard` makes of a model before any rank is asked, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.api.model_checks import check_device, check_model, find_units, resolve_units
from phalanx.core.errors import ConfigError
from phalanx.models.model import Model


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        self.experts = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)])])
        self.norm = nn.LayerNorm(4)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.nothing = nn.ReLU()
        self.head = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.ones(1))


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(5, 4), nn.Linear(4, 4)

    def shared_units(self) -> tuple[str, ...]:
        return ("embed",)


def test_units_are_members_of_lists_and_what_lies_beside_them() -> None:
    names = ["inner.embed", "inner.layers.0", "inner.layers.1", "inner.experts.0.0", "inner.norm", "head"]
    assert [name for name, _ in find_units(Outer())] == names
    assert [name for name, _ in find_units(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))] == ["0", "2"]
    assert [name for name, _ in find_units(Tied())] == ["body"]


def test_units_by_name_or_as_modules() -> None:
    model = Outer()
    assert resolve_units(model, ["head", model.inner]) == [("head", model.head), ("inner", model.inner)]


@pytest.mark.parametrize(
    ("units", "sentence"),
    [
        (["tail"], "units has 'tail', but the model has no such part"),
        ([nn.Linear(4, 5)], "a Linear of units is not a part of the model"),
        (["inner.layers"], "unit inner.layers is a list, which is never called"),
        (["inner", "inner.norm"], "unit inner.norm lies within unit inner"),
        (["head", "head"], "units has a part twice"),
        ([""], "units has a part twice, or the model itself"),
    ],
)
def test_units_that_cannot_be(units: list[Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve_units(Outer(), units)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"rule": "muon"},
            "^rule muon is not supported: it needs whole matrices, which ranks may shard",
        ),
        ({"rule": "adamv"}, "^rule 'adamv' is not known; did you mean adam"),
        ({"rule": "sgd", "betas": (0.9, 0.9)}, "^betas has no effect with rule sgd"),
        ({"rule": "sgd", "options": {"momentun": 0.9}}, "^options.momentun is not known to sgd; did you mean momentum"),
        ({"rule": "sgd", "options": {"momentum": -1.0}}, "^rule sgd refuses its options .* correct options"),
        ({"betas": (0.9, 1.0)}, "give two betas from 0 to below 1"),
        ({"clip_norm": 0.0}, "clip_norm is 0, which would stop training"),
        ({"zero": 4}, "zero is 4, which is not supported; choose one of 1, 2, 3"),
        ({"shard_degree": 0}, "shard_degree is 0, which is not a number of ranks"),
        ({"shard_degree": 1.5}, "shard_degree is 1.5, which is not a number of ranks"),
        ({"weights": "even"}, "weights is 'even', which is not a list of numbers; give one for each rank"),
        ({"weights": [1, None]}, "weights is .1, None., which is not a list of numbers"),
        ({"lr": "fast"}, "phalanx.shard has the learning rate .fast.; give a finite one"),
        ({"lr": float("nan")}, "phalanx.shard has the learning rate nan; give a finite one"),
        ({"slots": 3}, "slots is 3, which is not supported; choose one of 1, 2"),
        ({"compress": "int4"}, "compress is 'int4', which is not supported; choose one of none, bf16, int8"),
        (
            {"reduce": "sometimes"},
            "reduce is 'sometimes', which is not supported; choose one of auto, per_step, per_micro_batch",
        ),
    ],
)
def test_what_cannot_be_asked_for(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        phalanx.shard(nn.Linear(2, 2), **{"lr": 0.1, **asked})


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def compiled() -> nn.Module:
    return torch.compile(nn.Linear(2, 2))  # type: ignore[return-value]


def of_two_types() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())


def half_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def with_a_buffer_on_meta() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("angles", torch.ones(2, device="meta"))
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (nn.ReLU, "the model has no parameter that needs gradients, so there is nothing to train"),
        (frozen, "the model has no parameter that needs gradients"),
        (compiled, "the model was compiled as a whole"),
        (of_two_types, "parameter 1.weight is of torch.bfloat16, but 0.weight of torch.float32; make all of one type"),
        (lambda: nn.Linear(2, 2).half(), "parameter weight is of torch.float16, which cannot be summed precisely"),
        (lambda: nn.LazyLinear(2), "parameter weight has no shape yet"),
        (half_on_meta, "parameter 1.weight is on meta, where it has no values; pass fill="),
        (with_a_buffer_on_meta, "buffer angles is on meta, so it has no values"),
    ],
)
def test_models_that_cannot_be_sharded(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_model(make(), None)


def test_parameters_must_be_on_the_device_of_the_rank() -> None:
    check_device(torch.device("meta"), torch.device("cpu"))
    check_device(torch.device("cuda:1"), torch.device("cuda:1"))
    with pytest.raises(ConfigError, match=r"are on cuda:0, but this rank's device is cuda:1; move the model there"):
        check_device(torch.device("cuda:0"), torch.device("cuda:1"))


def test_the_package_has_what_it_names_and_nothing_else() -> None:
    assert "shard" in dir(phalanx)
    with pytest.raises(AttributeError, match="module 'phalanx' has no attribute 'shart'"):
        _ = phalanx.shart
