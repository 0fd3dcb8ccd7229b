"""`tsm.transform`, and the names of that library that a script uses to speak of what it gives."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.api.fsdp import init
from phalanx.api.fsdp.session import current_session
from phalanx.core.errors import ConfigError

COMMUNICATIONS = ("p2p", "all_gather")


@dataclass
class MoEConfig:
    """Settings of experts. Each rank here computes all of them, by the model's own code: see `_heed`. Weights begin
    where the model has them, so `use_cpu_initialization` asks for nothing."""

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False


def transform(
    model: nn.Module,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    config: MoEConfig | Mapping[str, Any] | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """Divide a model's tensors over the ranks of a tensor parallel group, in place; gives the model back, to be wrapped
    in FSDP. It keeps its classes, its names and its weights.

    A model with a parameter on the meta device stays there, whatever `device` says. `load_state_dict_from_rank0`: rank
    0's weights count, and FSDP must have sync_module_states=True. Collective. Raises ConfigError before `tsm.init`, for
    a configuration of experts, and for a model that cannot be divided.
    """
    if current_session() is None:
        raise ConfigError("tsm.transform divides a model over ranks, which are not known yet; call tsm.init() first")
    if cp_comm_type not in COMMUNICATIONS:
        raise ConfigError(f"cp_comm_type is {cp_comm_type!r}; give {' or '.join(map(repr, COMMUNICATIONS))}")
    if isinstance(config, MoEConfig):
        _heed(config, model)
    elif config:
        raise ConfigError(f"tsm.transform got config={config!r}, of which nothing is known here; leave it out")
    return init.transform(model, load_state_dict_from_rank0=load_state_dict_from_rank0, device=device, dtype=dtype)


def _heed(experts: MoEConfig, model: nn.Module) -> None:
    """Put into effect what can be with experts that are not divided over ranks: transformers' own balancing by an
    auxiliary loss. What a MoEConfig has by default is left to the model's code, with a warning.

    Raises ConfigError for a model without experts, and for what is not the default and would have no effect.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "num_local_experts", None) is None:
        raise ConfigError(
            f"tsm.transform got a MoEConfig, but {type(model).__name__} has no experts, so nothing would use it; leave "
            "config out"
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
                f"MoEConfig has {name}={value!r}, which nothing would use here, where experts are the model's own code "
                f"and moe_load_balancing is {balancing!r}; leave it out"
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
                "MoEConfig balances experts by sinkhorn, which is not done here: the model routes tokens as its own "
                'code does; moe_load_balancing="aux_loss" adds an auxiliary loss that balances them'
            )
        case other:
            raise ConfigError(
                f"MoEConfig has moe_load_balancing={other!r}, which is not done here; give 'aux_loss' or 'none'"
            )
    if experts.moe_z_loss_coeff:
        _warn(
            f"MoEConfig has moe_z_loss_coeff={experts.moe_z_loss_coeff:g} by default, but no such loss of routers is "
            "added here; set it to 0"
        )


def _seed(seed: int) -> None:
    """Delayed initialisation draws by this seed. Raises ConfigError where `tsm.init` has set another."""
    session = current_session()
    assert session is not None
    if session.seed not in (None, seed):
        raise ConfigError(
            f"MoEConfig has random_seed={seed}, and tsm.init was given random_seed={session.seed}; leave one of them "
            "out"
        )
    session.seed = seed


def _warn(sentence: str) -> None:
    session = current_session()
    if session is not None and session.rank == 0:
        warnings.warn(sentence, stacklevel=4)


def setup_transformer_engine_cp_groups(*args: Any, **options: Any) -> None:
    """Of context parallelism, which Phalanx does not have. Raises ConfigError."""
    raise ConfigError("Phalanx has no context parallelism; set context_parallel_degree to 1")


class _OfTransformed(type):
    """Makes `isinstance(x, TransformerLayer)` and the like true for parts of a transformed model, of any class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        session = current_session()
        if session is None:
            return False
        match cls.__name__:
            case "TransformerLMHead":
                return id(instance) in session.models
            case "MoELayer":
                return type(instance) in session.experts
        return type(instance) in session.layers


class TransformerLMHead(metaclass=_OfTransformed):
    """Any model that `tsm.transform` has given back."""


class TransformerLayer(metaclass=_OfTransformed):
    """Any layer of a model that `tsm.transform` has given back, such as for an `auto_wrap_policy`."""


class MoELayer(metaclass=_OfTransformed):
    """Any module of a model that `tsm.transform` has given back that has experts, and chooses among them."""
