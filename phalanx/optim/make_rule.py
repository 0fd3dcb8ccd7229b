"""The update rule of a name."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from phalanx.config.optimizers import OPTIMIZERS
from phalanx.optim.adamw8bit import AdamW8bit
from phalanx.optim.torch_optimizers import make_torch_rule
from phalanx.optim.update import AdamW, UpdateRule

if TYPE_CHECKING:  # pydantic is not needed to follow a rule
    from phalanx.config.schema import OptimSection

# Made of AdamW's numbers, of which some are the rule's own, and of `optim.options`.
OWN_RULES: dict[str, Callable[[AdamW, Mapping[str, bool | int | float]], UpdateRule]] = {
    "adamw": lambda adamw, _: adamw,
    "adamw8bit": lambda adamw, _: AdamW8bit(adamw),
}


def make_named_rule(
    name: str, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
    options: Mapping[str, bool | int | float],
) -> UpdateRule:  # fmt: skip
    """The rule that is called `name` in `OPTIMIZERS`. Raises ConfigError where its class refuses a value."""
    if OPTIMIZERS[name].torch_class is None:
        return OWN_RULES[name](AdamW(*betas, eps, weight_decay), options)
    return make_torch_rule(name, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, options=options)


def make_rule(optim: "OptimSection") -> UpdateRule:
    """The rule of a resolved configuration. Raises ConfigError where its class refuses a value."""
    assert optim.weight_decay != "auto"
    return make_named_rule(
        optim.name,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        options=optim.options,
    )
