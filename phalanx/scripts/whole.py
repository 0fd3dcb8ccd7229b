"""Full state dicts of models in FSDP whose tensors are divided: put together again, as the model was before."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp._common_utils import clean_tensor_name

from phalanx.errors import ConfigError
from phalanx.parallel.transform import full_state_dict, parts_of
from phalanx.scripts.session import current


def put_together(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook behind FSDP's own: the slices of all ranks become whole tensors on the first of them, in place, and the
    dicts of the others are emptied. `translate_on_save=False` leaves each rank its slices. Collective over these ranks.

    Raises ConfigError where every rank is to have the whole.
    """
    session = current()
    assert isinstance(module, FullyShardedDataParallel)
    if session is None or session.ranks.tensor == 1 or not module._is_root:
        return
    config: Any = module._state_dict_config
    if module._state_dict_type != StateDictType.FULL_STATE_DICT or not getattr(config, "translate_on_save", True):
        return
    if not config.rank0_only:
        raise ConfigError(
            "a full state dict of a model whose tensors are divided is put together on one rank; pass "
            "FullStateDictConfig(rank0_only=True)"
        )
    if not state:
        return  # this rank is not the first that holds these slices
    wrapped = {clean_tensor_name(name): name for name in parts_of(module)}
    own = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    found = full_state_dict(module, session.axis(), {wrapped.get(name, name): own[name] for name in own})
    state.clear()
    state.update({prefix + clean_tensor_name(name): tensor for name, tensor in found.items()})
