"""The update rule that a recipe names."""

from typing import TYPE_CHECKING

from phalanx.optim.adamw8bit import AdamW8bit
from phalanx.optim.torch_optimizers import make_torch_rule
from phalanx.optim.update import AdamW, UpdateRule

if TYPE_CHECKING:  # pydantic is not needed to follow a rule
    from phalanx.config.schema import OptimSection


def make_rule(optim: "OptimSection") -> UpdateRule:
    """The rule of a resolved configuration. Raises ConfigError where its class refuses a value."""
    assert optim.weight_decay != "auto"
    adamw = AdamW(optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
    if optim.name == "adamw":
        return adamw
    if optim.name == "adamw8bit":
        return AdamW8bit(adamw)
    return make_torch_rule(
        optim.name,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        options=optim.options,
    )
