"""Update rules (optimizers) by name: their keys, options and state. Plain data, without torch.

A new rule is a record here, a class of `optim/update.UpdateRule`, and its line in `optim/make_rule.py`.
"""

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.core.user_code import split_reference

BETAS = ("beta1", "beta2", "eps")


@dataclass(frozen=True)
class OptimizerInfo:
    """An update rule: its class in torch.optim (None: our own), the keys of `optim` that it reads, its further options.
    State of an element of a parameter: `numbers` in the type of the master weights, one more for each option of
    STATE_OPTIONS, and `coded_bytes`; of a row of a matrix: `row_numbers`. `granularity`: the smallest part of a
    parameter that a rank can update alone. `replays`: a replica on another node can repeat the update from the
    gradient, bit for bit.
    """

    torch_class: str | None
    keys: tuple[str, ...] = ("weight_decay",)
    options: Mapping[str, type] = field(default_factory=dict)  # float: any number; bool: true or false
    numbers: float = 2.0
    coded_bytes: float = 0.0
    row_numbers: float = 0.0
    granularity: Literal["element", "row"] = "element"
    replays: bool = False
    weight_decay: float = 0.0  # what `auto` means
    smaller: str | None = None  # nearly the same rule with less state

    def state_bytes(self, options: Mapping[str, bool | int | float], number_bytes: int, columns: int) -> float:
        """Bytes of state of an element, beside the parameter; numbers take `number_bytes` each, rows have `columns`."""
        more = sum(bool(options.get(name)) for name in STATE_OPTIONS)
        return (self.numbers + more + self.row_numbers / columns) * number_bytes + self.coded_bytes


STATE_OPTIONS = ("amsgrad", "momentum", "centered")
ADAM = (*BETAS, "weight_decay")
# A class of the user's, of which only its file knows more: as much state as Adam's is assumed where none can be asked.
OWN_CLASS = OptimizerInfo(None, ADAM)
OPTIMIZERS: dict[str, OptimizerInfo] = {
    "adamw": OptimizerInfo(None, ADAM, replays=True, weight_decay=0.1, smaller="adamw8bit"),
    # Two codes of a byte, and two scales for 256 of them.
    "adamw8bit": OptimizerInfo(None, ADAM, numbers=2 / 256, coded_bytes=2.0, granularity="row", weight_decay=0.1),
    "adam": OptimizerInfo("Adam", ADAM, {"amsgrad": bool, "decoupled_weight_decay": bool}),
    "sgd": OptimizerInfo("SGD", options={"momentum": float, "dampening": float, "nesterov": bool}, numbers=0.0),
    "adadelta": OptimizerInfo("Adadelta", options={"rho": float, "eps": float}),
    "adagrad": OptimizerInfo(
        "Adagrad", options={"lr_decay": float, "initial_accumulator_value": float, "eps": float}, numbers=1.0
    ),
    "adamax": OptimizerInfo("Adamax", ADAM),
    "nadam": OptimizerInfo("NAdam", ADAM, {"momentum_decay": float, "decoupled_weight_decay": bool}),
    "radam": OptimizerInfo("RAdam", ADAM, {"decoupled_weight_decay": bool}),
    "rmsprop": OptimizerInfo(
        "RMSprop", options={"alpha": float, "eps": float, "momentum": float, "centered": bool}, numbers=1.0
    ),
    "rprop": OptimizerInfo("Rprop", keys=()),
    "asgd": OptimizerInfo("ASGD", options={"lambd": float, "alpha": float, "t0": float}, numbers=1.0),
}
UNSUPPORTED = {
    "lbfgs": "it evaluates the loss several times in a step",
    "adafactor": "it needs whole rows and columns, which ranks may shard",
    "muon": "it needs whole matrices, which ranks may shard",
    "sparseadam": "it requires sparse gradients, which no model here has",
}
SET_BY_KEYS = {"lr": ("lr",), "weight_decay": ("weight_decay",), "betas": ("beta1", "beta2"), "eps": ("eps",)}
FORBIDDEN_OPTIONS = ("foreach", "fused", "maximize", "capturable", "differentiable")
READ_BY_SCHEDULE = {"power": "polynomial", "decay_share": "wsd", "decay_shape": "wsd"}  # keys of one schedule alone


def find_optimizer(name: str) -> OptimizerInfo:
    """The record of `optim.name`, which is legal."""
    return OWN_CLASS if split_reference(name) else OPTIMIZERS[name]


def default_weight_decay(rule: str) -> float:
    """Resolve `optim.weight_decay: auto`."""
    return OPTIMIZERS[rule].weight_decay if rule in OPTIMIZERS else 0.0


def default_decay_steps(optim: Mapping[str, Any], steps: int) -> int:
    """Resolve `optim.decay_steps: auto` for a run of `steps`, at least 1; a run that ends within its warm-up gets a
    longer decay."""
    if steps > optim["warmup_steps"]:
        return steps
    stable = 1 - optim["decay_share"] if optim["schedule"] == "wsd" else 1.0
    return max(steps, math.ceil(optim["warmup_steps"] / stable - 1e-9) if stable else optim["warmup_steps"])


def find_optim_problems(optim: Mapping[str, Any], changed: Collection[str]) -> list[str]:
    """Problems of the section `optim`, as sentences; `changed`: its keys that differ from their default. A weight decay
    of 0 does not count as set.
    """
    chosen = [key for key in changed if key != "weight_decay" or optim[key]]
    own = split_reference(optim["schedule"]) is not None
    unread = [
        f"optim.{key} has no effect with optim.schedule {optim['schedule']}; remove it, or choose another"
        for key in ("warmup_steps", "min_lr_ratio")
        if own and key in chosen
    ]
    unread += [
        f"optim.{key} has no effect with optim.schedule {optim['schedule']}; remove it, or choose {schedule}"
        for key, schedule in READ_BY_SCHEDULE.items()
        if key in chosen and optim["schedule"] != schedule
    ]
    return [*find_rule_problems(optim["name"], optim["options"], chosen), *unread, *_schedule_problems(optim)]


def _schedule_problems(optim: Mapping[str, Any]) -> list[str]:
    warmup, decay, share = (optim[key] for key in ("warmup_steps", "decay_steps", "decay_share"))
    if decay == "auto":
        return []
    if warmup > decay:
        return [f"optim.warmup_steps {warmup} exceeds optim.decay_steps {decay}; lower it"]
    stable = math.floor(decay * (1 - share) + 1e-9)  # 10 steps of 100 at a share of 0.9, not 9
    if optim["schedule"] == "wsd" and warmup > stable:
        return [
            f"optim.warmup_steps {warmup} ends after step {stable}, where the last {share:g} of optim.decay_steps "
            f"{decay} begins to decay; lower it, or optim.decay_share"
        ]
    return []


def find_rule_problems(rule: str, options: Mapping[str, bool | int | float], changed: Collection[str]) -> list[str]:
    """Problems of a rule, its options and the `changed` keys of its section, as sentences."""
    if split_reference(rule):
        return []  # its class checks its arguments
    if reason := UNSUPPORTED.get(rule.lower()):  # torch's names are LBFGS and Muon
        return [f"optim.name {rule} is not supported: {reason}; choose one of {', '.join(OPTIMIZERS)}"]
    if rule not in OPTIMIZERS and ".py" in rule:
        return [f"optim.name {rule!r} names no class; write it as my.py:Class"]
    if rule not in OPTIMIZERS:
        near = difflib.get_close_matches(rule.lower(), OPTIMIZERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(OPTIMIZERS)}"
        return [f"optim.name {rule!r} is not known; {hint}"]
    known = OPTIMIZERS[rule]
    found = [
        f"optim.{key} has no effect with optim.name {rule}; remove it, or choose another rule"
        for key in (*BETAS, "weight_decay")
        if key in changed and key not in known.keys
    ]
    return found + [sentence for name, value in options.items() if (sentence := _option_problem(rule, name, value))]


def _option_problem(rule: str, name: str, value: bool | int | float) -> str | None:
    known = OPTIMIZERS[rule].options
    if isinstance(value, float) and not math.isfinite(value):
        return f"optim.options.{name} must be a finite number, not {value}"
    if name in known:
        if known[name] is bool and not isinstance(value, bool):
            return f"optim.options.{name} must be true or false, not {value!r}"
        if known[name] is float and isinstance(value, bool):
            return f"optim.options.{name} must be a number, not {str(value).lower()}"
        return None
    keys = [f"optim.{key}" for key in SET_BY_KEYS.get(name, ()) if key == "lr" or key in OPTIMIZERS[rule].keys]
    if keys:
        return f"optim.options.{name} is a key of optim; set {' and '.join(keys)}"
    if name in FORBIDDEN_OPTIONS:
        return f"optim.options.{name} is not supported; remove it"
    if not known:
        return f"optim.options.{name} is unknown: {rule} has no further options; remove it"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the options of {rule} are {', '.join(known)}"
    return f"optim.options.{name} is not known to {rule}; {hint}"
