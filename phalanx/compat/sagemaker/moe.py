"""Settings of experts, `MoEConfig`, and what they have in effect."""

import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from phalanx.api.fsdp.session import current_session
from phalanx.core.errors import ConfigError
from phalanx.parallel.hf_experts import check_experts


@dataclass
class MoEConfig:
    """Settings of experts, see `heed_experts`. Weights begin where the model has them, so `use_cpu_initialization` asks
    for nothing."""

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False


def heed_experts(experts: MoEConfig | None, model: nn.Module) -> None:
    """Put into effect what of a script's settings is transformers' own code: balancing by an auxiliary loss, that of a
    rank's rows. What a MoEConfig has by default is left to the model's code, with a warning.

    Raises ConfigError for a model without experts, for what is not the default and would have no effect, and for a
    model whose experts cannot be divided as `tsm.init` was asked to.
    """
    session = current_session()
    assert session is not None
    if session.ranks.expert > 1:
        if experts is None or not experts.smp_moe:
            raise ConfigError(
                f"expert_parallel_degree is {session.ranks.expert}, but tsm.transform got no MoEConfig with "
                "smp_moe=True, so no experts would be divided; pass config=MoEConfig()"
            )
        check_experts(model, session.ranks.expert)
    if experts is None:
        return
    config: Any = getattr(model, "config", None)
    if getattr(config, "num_local_experts", None) is None:
        raise ConfigError(
            f"tsm.transform got a MoEConfig, but {type(model).__name__} has no experts, so it would have no effect; "
            "leave out config"
        )
    if not experts.smp_moe:
        return
    defaults, balancing = MoEConfig(), experts.moe_load_balancing
    without_effect = ["global_token_shuffle", "moe_all_to_all_dispatcher", "moe_z_loss_coeff"]
    without_effect += [] if balancing == "aux_loss" else ["moe_aux_loss_coeff"]
    for name in without_effect:
        value = getattr(experts, name)
        if value != getattr(defaults, name) and (value or name == "moe_all_to_all_dispatcher"):
            raise ConfigError(
                f"MoEConfig has {name}={value!r}, which has no effect: the model's own code routes tokens and "
                f"moe_load_balancing is {balancing!r}; remove it"
            )
    if experts.random_seed != defaults.random_seed:
        _seed(experts.random_seed)
    match balancing:
        case "aux_loss":
            config.output_router_logits = True
            config.router_aux_loss_coef = vars(model)["router_aux_loss_coef"] = experts.moe_aux_loss_coeff
        case "none":
            config.output_router_logits = False
        case "sinkhorn":
            _warn(
                "MoEConfig balances experts with sinkhorn, which is not supported: the model's own code routes "
                'tokens; moe_load_balancing="aux_loss" adds an auxiliary loss that balances them'
            )
        case other:
            raise ConfigError(
                f"MoEConfig has moe_load_balancing={other!r}, which is not supported; use 'aux_loss' or 'none'"
            )
    if experts.moe_z_loss_coeff:
        _warn(
            f"MoEConfig has moe_z_loss_coeff={experts.moe_z_loss_coeff:g} by default, but this router loss is not "
            "supported; set it to 0"
        )


def _seed(seed: int) -> None:
    """Delayed initialisation draws by this seed. Raises ConfigError where `tsm.init` has set another."""
    session = current_session()
    assert session is not None
    if session.seed not in (None, seed):
        raise ConfigError(
            f"MoEConfig has random_seed={seed}, and tsm.init was given random_seed={session.seed}; use one of them"
        )
    session.seed = seed


def _warn(sentence: str) -> None:
    session = current_session()
    if session is not None and session.rank == 0:
        warnings.warn(sentence, stacklevel=4)
