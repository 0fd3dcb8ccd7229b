"""The update rule that a recipe names."""

from typing import TYPE_CHECKING

from phalanx.optim.adamw8bit import AdamW8bit
from phalanx.optim.torch_optimizers import from_torch
from phalanx.optim.update import AdamW, Rule

if TYPE_CHECKING:  # pydantic is not needed to follow a rule
    from phalanx.config.schema import OptimSection


def make_rule(optim: "OptimSection") -> Rule:
    """The rule of a resolved configuration. Raises ConfigError where its class refuses a value."""
    assert optim.weight_decay != "auto"
    adamw = AdamW(optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
    if optim.rule == "adamw":
        return adamw
    if optim.rule == "adamw8bit":
        return AdamW8bit(adamw)
    return from_torch(
        optim.rule,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        options=optim.options,
    )
