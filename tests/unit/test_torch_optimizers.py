"""Rules of torch.optim on flat shards: the same numbers as the class itself on whole tensors, and what is refused."""

import copy
import inspect
import math
from typing import Any

import pytest
import torch

from phalanx.config import optimizers
from phalanx.config.load import build_config
from phalanx.config.resolve import resolve_autos
from phalanx.config.schema import OptimSection
from phalanx.core.errors import ConfigError
from phalanx.optim.make_rule import make_rule
from phalanx.optim.torch_optimizers import TorchRule
from phalanx.optim.update import Slot, StepUpdate, allocate_zeros, count_state_bytes

CPU = torch.device("cpu")
SHAPES = {"a": (6, 7), "norm": (5,)}
CASES: list[tuple[str, dict[str, Any], float]] = [
    ("adam", {}, 0.1),
    ("adam", {"amsgrad": True, "decoupled_weight_decay": True}, 0.1),
    ("sgd", {}, 0.1),
    ("sgd", {"momentum": 0.9, "dampening": 0.3}, 0.0),
    ("sgd", {"momentum": 0.9, "nesterov": True}, 0.1),
    ("adadelta", {"rho": 0.8, "eps": 1e-5}, 0.1),
    ("adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}, 0.1),
    ("adamax", {}, 0.1),
    ("nadam", {"momentum_decay": 0.01}, 0.1),
    ("nadam", {"decoupled_weight_decay": True}, 0.1),
    ("radam", {"decoupled_weight_decay": True}, 0.1),
    ("rmsprop", {"alpha": 0.9, "momentum": 0.5, "centered": True}, 0.1),
    ("rmsprop", {}, 0.0),
    ("rprop", {}, 0.0),
    ("asgd", {"t0": 3, "lambd": 0.1}, 0.1),
]
IDS = [f"{name}-{'-'.join(options)}" for name, options, _ in CASES]


def rule_of(name: str, options: dict[str, Any], decay: float) -> TorchRule:
    rule = make_rule(OptimSection(name=name, options=options, lr=0.05, weight_decay=decay, beta1=0.8, eps=1e-7))
    assert isinstance(rule, TorchRule)
    return rule


def start(rule: TorchRule, dtype: torch.dtype) -> Slot:
    slot, generator = {}, torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        values = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        slot[name] = {"param": values} | rule.make_state(name, shape, size, dtype, CPU, allocate_zeros)
    return slot


def grads_of(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(torch.Size(shape).numel(), generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def take(rule: TorchRule, source: Slot, target: Slot, step: int, skip: float = 0.0, lr: float = 0.05) -> None:
    dtype = source["a"]["param"].dtype
    grads = {name: grad * 3 for name, grad in grads_of(step, dtype).items()}
    divisor = torch.tensor(3.0, dtype=dtype)
    if skip:
        grads = {name: grad * float("nan") for name, grad in grads.items()}
    rule.apply(
        source,
        target,
        grads,
        StepUpdate(step=step, lr=lr, no_decay=frozenset(["norm"]), divisor=divisor, skip=torch.tensor(skip)),
    )


@pytest.mark.parametrize(("name", "options", "decay"), CASES, ids=IDS)
def test_flat_shards_are_updated_as_torch_updates_the_whole(
    name: str, options: dict[str, Any], decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "phalanx.optim.torch_optimizers.CHUNK_ELEMENTS", 19
    )  # cuts the first and joins it to the second
    rule = rule_of(name, options, decay)
    slot = start(rule, torch.float64)
    theirs = {name: slot[name]["param"].clone().view(shape) for name, shape in SHAPES.items()}
    known = optimizers.OPTIMIZERS[name]
    given: dict[str, Any] = dict(options) | ({"betas": (0.8, 0.95), "eps": 1e-7} if "beta1" in known.keys else {})
    groups: list[dict[str, Any]] = [{"params": [theirs["a"]]}, {"params": [theirs["norm"]]}]
    if "weight_decay" in known.keys:
        groups[0]["weight_decay"], groups[1]["weight_decay"] = decay, 0.0
    assert known.torch_class is not None
    optimizer = getattr(torch.optim, known.torch_class)(groups, lr=0.05, **given)
    for step in range(1, 13):
        lr = 0.05 if name in ("asgd", "rprop") else 0.05 / step  # the one lags a step behind it, the other has none
        for group in optimizer.param_groups:
            group["lr"] = lr
        for key, grad in grads_of(step, torch.float64).items():
            theirs[key].grad = grad.view(SHAPES[key]).clone()
        optimizer.step()
        take(rule, slot, slot, step, lr=lr)
    for key, tensor in theirs.items():
        # NAdam's and ASGD's single numbers are float32 in torch and float64 here.
        near = 1e-6 if name in ("nadam", "asgd") else 1e-13
        torch.testing.assert_close(slot[key]["param"], tensor.flatten(), rtol=near, atol=near)
        for kind in rule.state_kinds:
            torch.testing.assert_close(slot[key][kind], optimizer.state[tensor][kind].flatten(), rtol=near, atol=near)


@pytest.mark.parametrize(("name", "options", "decay"), CASES, ids=IDS)
def test_slot_to_slot_in_place_and_skipped(name: str, options: dict[str, Any], decay: float) -> None:
    rule = rule_of(name, options, decay)
    source = start(rule, torch.float32)
    take(rule, source, source, 1, skip=1.0)  # the first step of all may be one
    fresh = start(rule, torch.float32)
    assert all(torch.equal(source[key][kind], value) for key in fresh for kind, value in fresh[key].items())
    for step in (2, 3):
        take(rule, source, source, step)
    untouched, target, in_place = (copy.deepcopy(source) for _ in range(3))
    for state in target.values():
        for tensor in state.values():
            tensor.fill_(9.0)
    take(rule, source, target, 4)
    take(rule, in_place, in_place, 4)
    for key, state in untouched.items():
        for kind, tensor in state.items():
            assert torch.equal(source[key][kind], tensor)
            assert torch.equal(target[key][kind], in_place[key][kind])
        assert not torch.equal(target[key]["param"], state["param"])
    take(rule, in_place, in_place, 5, skip=1.0)
    assert all(torch.equal(in_place[key][kind], value) for key in target for kind, value in target[key].items())


@pytest.mark.parametrize("number", [4, 8])
@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_the_table_knows_how_much_a_rule_keeps_and_what_a_rank_must_hold_whole(name: str, number: int) -> None:
    known, shape = optimizers.OPTIMIZERS[name], (64, 1024)
    stateful = [key for key in optimizers.STATE_OPTIONS if key in known.options]
    for chosen in ([], stateful):
        options = {key: 0.9 if known.options[key] is float else True for key in chosen}
        rule = make_rule(OptimSection(name=name, options=options, weight_decay=0.0))
        dtype = {4: torch.float32, 8: torch.float64}[number]
        held = count_state_bytes(rule, shape, 64 * 1024, dtype)
        assert known.state_bytes(options, number, shape[-1]) == held / (64 * 1024)
        assert (known.granularity == "row") is (rule.elements_together(shape) > 1)


@pytest.mark.parametrize("name", [name for name, known in optimizers.OPTIMIZERS.items() if known.torch_class])
def test_the_table_is_what_torch_takes(name: str) -> None:
    known = optimizers.OPTIMIZERS[name]
    parameters = dict(inspect.signature(getattr(torch.optim, str(known.torch_class)).__init__).parameters)
    for key in ("self", "params", "lr", *optimizers.FORBIDDEN_OPTIONS):
        parameters.pop(key, None)
    assert ("weight_decay" in known.keys) is (parameters.pop("weight_decay", None) is not None)
    if "beta1" in known.keys:
        assert parameters.pop("betas").default[0] == 0.9
        parameters.pop("eps")
    numbers = {key: value for key, value in parameters.items() if not isinstance(value.default, tuple)}
    assert set(numbers) == set(known.options)
    for key, value in numbers.items():
        assert isinstance(value.default, bool) is (known.options[key] is bool), key


def test_every_class_of_torch_is_known_or_refused_by_name() -> None:
    names = {name.lower() for name, value in vars(torch.optim).items() if inspect.isclass(value)} - {"optimizer"}
    assert names == {*(name for name in optimizers.OPTIMIZERS if name != "adamw8bit"), *optimizers.UNSUPPORTED}


@pytest.mark.parametrize(
    ("optim", "sentence"),
    [
        ({"name": "muon"}, "optim.name muon is not supported: it needs whole matrices"),
        ({"name": "lbfgs"}, "it evaluates the loss several times in a step"),
        ({"name": "adafactor"}, "it needs whole rows and columns"),
        ({"name": "sparseadam"}, "it requires sparse gradients"),
        ({"name": "LBFGS"}, "optim.name LBFGS is not supported: it evaluates the loss several times"),
        ({"name": "AdamW"}, "optim.name 'AdamW' is not known; did you mean adamw?"),
        ({"name": "lion9"}, "optim.name 'lion9' is not known; choose one of adamw, adamw8bit, adam, sgd"),
        ({"name": "sgd", "options": {"momentun": 0.9}}, "optim.options.momentun is not known to sgd; did you mean mom"),
        ({"name": "sgd", "options": {"z": 1}}, "is not known to sgd; the options of sgd are momentum, dampening"),
        ({"name": "sgd", "options": {"nesterov": 1}}, "optim.options.nesterov must be true or false, not 1"),
        ({"name": "sgd", "options": {"momentum": True}}, "optim.options.momentum must be a number, not true"),
        ({"name": "sgd", "options": {"maximize": True}}, "optim.options.maximize is not supported"),
        ({"name": "adam", "options": {"eps": 1e-8}}, "optim.options.eps is a key of optim; set optim.eps"),
        ({"name": "adam", "options": {"weight_decay": 1}}, "set optim.weight_decay"),
        ({"name": "adam", "options": {"betas": 1}}, "set optim.beta1 and optim.beta2"),
        ({"name": "sgd", "options": {"eps": 1e-8}}, "optim.options.eps is not known to sgd; the options of sgd are"),
        ({"name": "rprop", "options": {"weight_decay": 1}}, "is unknown: rprop has no further options"),
        ({"name": "sgd", "options": {"momentum": math.inf}}, "optim.options.momentum must be a finite number, not inf"),
        ({"options": {"amsgrad": True}}, "optim.options.amsgrad is unknown: adamw has no further options"),
        ({"name": "sgd", "beta1": 0.8}, "optim.beta1 has no effect with optim.name sgd"),
        ({"name": "rprop", "weight_decay": 0.1}, "optim.weight_decay has no effect with optim.name rprop"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(optim: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=None) as caught:
        build_config({"model": {"hidden": 16, "layers": 1, "heads": 2}, "optim": optim}, "the recipe")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"momentum": -1}, {"nesterov": True}])
def test_values_that_the_class_refuses_are_a_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"optim.name sgd refuses its options \(.*\); correct optim.options"):
        rule_of("sgd", options, 0.0)


@pytest.mark.parametrize(("rule", "decay"), [("adamw", 0.1), ("adamw8bit", 0.1), ("sgd", 0.0), ("rprop", 0.0)])
def test_the_default_decay_is_the_rules(rule: str, decay: float) -> None:
    config = build_config({"model": {"hidden": 16, "layers": 1, "heads": 2}, "optim": {"name": rule}}, "the recipe")
    assert resolve_autos(config, device="cpu", world=1)[0].optim.weight_decay == decay


def test_a_number_of_which_nothing_is_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.optim.torch_optimizers.SCALARS", frozenset(["step"]))
    with pytest.raises(ConfigError, match=r"optim\.name nadam keeps mu_product in this version"):
        rule_of("nadam", {}, 0.0)
