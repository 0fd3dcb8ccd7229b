"""`tsm.transform`, and the names of that library that a script uses to speak of what it gives."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.errors import ConfigError
from phalanx.scripts import api
from phalanx.scripts.session import current

COMMUNICATIONS = ("p2p", "all_gather")


@dataclass
class MoEConfig:
    """Settings of experts' parallelism, which Phalanx does not have: `transform` refuses it."""

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
    if current() is None:
        raise ConfigError("tsm.transform divides a model over ranks, which are not known yet; call tsm.init() first")
    if cp_comm_type not in COMMUNICATIONS:
        raise ConfigError(f"cp_comm_type is {cp_comm_type!r}; give {' or '.join(map(repr, COMMUNICATIONS))}")
    if isinstance(config, MoEConfig):
        raise ConfigError(
            "tsm.transform got a MoEConfig, but Phalanx has no experts' parallelism; leave config out, and shard "
            "experts with hybrid_shard_degree"
        )
    if config:
        raise ConfigError(f"tsm.transform got config={config!r}, of which nothing is known here; leave it out")
    return api.transform(model, load_state_dict_from_rank0=load_state_dict_from_rank0, device=device, dtype=dtype)


def setup_transformer_engine_cp_groups(*args: Any, **options: Any) -> None:
    """Of context parallelism, which Phalanx does not have. Raises ConfigError."""
    raise ConfigError("Phalanx has no context parallelism; set context_parallel_degree to 1")


class _OfTransformed(type):
    """Makes `isinstance(x, TransformerLayer)` true for the layers of a transformed model, whatever their class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        session = current()
        if session is None:
            return False
        return (
            id(instance) in session.models if cls.__name__ == "TransformerLMHead" else type(instance) in session.layers
        )


class TransformerLMHead(metaclass=_OfTransformed):
    """Any model that `tsm.transform` has given back."""


class TransformerLayer(metaclass=_OfTransformed):
    """Any layer of a model that `tsm.transform` has given back, such as for an `auto_wrap_policy`."""
