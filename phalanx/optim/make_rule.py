"""Create the update rule (optimizer) that a recipe names."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from phalanx.config.optimizers import OPTIMIZERS
from phalanx.core.user_code import split_reference
from phalanx.optim.adamw8bit import AdamW8bit
from phalanx.optim.own_class import make_own_class_rule
from phalanx.optim.torch_optimizers import make_torch_rule
from phalanx.optim.update import AdamW, UpdateRule

if TYPE_CHECKING:  # avoids the import of pydantic
    from phalanx.config.schema import OptimSection

# The arguments are those of AdamW, some with the rule's own values, and `optim.options`.
OWN_RULES: dict[str, Callable[[AdamW, Mapping[str, bool | int | float]], UpdateRule]] = {
    "adamw": lambda adamw, _: adamw,
    "adamw8bit": lambda adamw, _: AdamW8bit(adamw),
}


def make_named_rule(
    name: str, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
    options: Mapping[str, bool | int | float],
) -> UpdateRule:  # fmt: skip
    """Create the update rule `name` of `OPTIMIZERS`, or that of a custom optimizer class, `my.py:Class`.

    Raises ConfigError where its class refuses a value.
    """
    if (own := split_reference(name)) is not None:
        return make_own_class_rule(name, *own, lr, betas, eps, weight_decay, options)
    if OPTIMIZERS[name].torch_class is None:
        return OWN_RULES[name](AdamW(*betas, eps, weight_decay), options)
    return make_torch_rule(name, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, options=options)


def make_rule(optim: "OptimSection") -> UpdateRule:
    """Create the update rule of a resolved configuration. Raises ConfigError where its class refuses a value."""
    assert optim.weight_decay != "auto"
    return make_named_rule(
        optim.name,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        options=optim.options,
    )
