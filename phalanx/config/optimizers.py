"""The update rules by name: which keys and options each takes, and what it keeps. Plain data, without torch.

A new rule is a record here, a class of `optim/update.UpdateRule`, and its line in `optim/make_rule.py`.
"""

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

BETAS = ("beta1", "beta2", "eps")


@dataclass(frozen=True)
class OptimizerInfo:
    """One rule: its class in torch.optim (None: our own), the keys of `optim` that it reads, its further options.

    Of each element of a parameter it keeps `numbers` in the type of the master weights, one more for each option of
    STATE_OPTIONS, and `coded_bytes`; of each row of a matrix `row_numbers`. `granularity`: what of a parameter a rank
    must hold whole to update it alone. `replays`: a replica on another node can repeat the update from the gradient,
    bit for bit.
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
        """Bytes that it keeps of an element beside the parameter, whose numbers take `number_bytes` each and whose rows
        have `columns`."""
        more = sum(bool(options.get(name)) for name in STATE_OPTIONS)
        return (self.numbers + more + self.row_numbers / columns) * number_bytes + self.coded_bytes


STATE_OPTIONS = ("amsgrad", "momentum", "centered")
ADAM = (*BETAS, "weight_decay")
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
    "lbfgs": "it computes the loss several times in one step",
    "adafactor": "it keeps sums of whole rows and columns, of which a rank may hold a part",
    "muon": "it works on whole matrices, of which a rank may hold a part",
    "sparseadam": "it is for sparse gradients, and there are none here",
}
SET_BY_KEYS = {"lr": ("lr",), "weight_decay": ("weight_decay",), "betas": ("beta1", "beta2"), "eps": ("eps",)}
FORBIDDEN_OPTIONS = ("foreach", "fused", "maximize", "capturable", "differentiable")
READ_BY_SCHEDULE = {"power": "polynomial", "decay_share": "wsd", "decay_shape": "wsd"}  # keys of one schedule alone


def default_weight_decay(rule: str) -> float:
    """What `optim.weight_decay: auto` means."""
    return OPTIMIZERS[rule].weight_decay if rule in OPTIMIZERS else 0.0


def default_decay_steps(optim: Mapping[str, Any], steps: int) -> int:
    """What `optim.decay_steps: auto` means for a run of `steps`, at least 1; one that ends within its warm-up, as when
    something is tried out, leaves room for the rest."""
    if steps > optim["warmup_steps"]:
        return steps
    stable = 1 - optim["decay_share"] if optim["schedule"] == "wsd" else 1.0
    return max(steps, math.ceil(optim["warmup_steps"] / stable - 1e-9) if stable else optim["warmup_steps"])


def find_optim_problems(optim: Mapping[str, Any], changed: Collection[str]) -> list[str]:
    """What of the section `optim` cannot work, as sentences; `changed`: its keys of another value than their default.

    Choosing a weight decay of 0 is choosing nothing.
    """
    chosen = [key for key in changed if key != "weight_decay" or optim[key]]
    unread = [
        f"optim.{key} is set, but optim.schedule {optim['schedule']} does not use it; remove it, or choose {schedule}"
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
            f"optim.warmup_steps {warmup} reaches beyond step {stable}, where the last {share:g} of optim.decay_steps "
            f"{decay} begins to decay; lower it, or optim.decay_share"
        ]
    return []


def find_rule_problems(rule: str, options: Mapping[str, bool | int | float], changed: Collection[str]) -> list[str]:
    """What of a rule, its options and the `changed` keys of its section cannot work, as sentences."""
    if reason := UNSUPPORTED.get(rule.lower()):  # torch writes LBFGS and Muon
        return [f"optim.name {rule} cannot be used, since {reason}; choose one of {', '.join(OPTIMIZERS)}"]
    if rule not in OPTIMIZERS:
        near = difflib.get_close_matches(rule.lower(), OPTIMIZERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(OPTIMIZERS)}"
        return [f"optim.name {rule!r} is not known; {hint}"]
    known = OPTIMIZERS[rule]
    found = [
        f"optim.{key} is set, but optim.name {rule} does not use it; remove it, or choose another rule"
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
        return f"optim.options.{name} is not where {rule} reads it; set {' and '.join(keys)}"
    if name in FORBIDDEN_OPTIONS:
        return f"optim.options.{name} cannot be chosen, since gradients are kept and summed in one way; remove it"
    if not known:
        return f"optim.options.{name} is not used, since {rule} has no further options; remove it"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the options of {rule} are {', '.join(known)}"
    return f"optim.options.{name} is not known to {rule}; {hint}"
