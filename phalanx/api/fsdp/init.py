"""`phalanx.init` and `phalanx.transform`: sharding and tensor parallelism for a script of one's own, in two lines.

    phalanx.init({"tensor": 2, "shard_degree": 4})
    model = phalanx.transform(model)

Then `FSDP(model)` or `fully_shard(model)`, as without: they shard over the ranks that see different data.
"""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.api.fsdp import session as sessions
from phalanx.api.fsdp.patches import patch_fsdp
from phalanx.api.fsdp.rank_layout import RankLayout
from phalanx.api.fsdp.session import FsdpSession
from phalanx.comm.collectives import device_for_group
from phalanx.core.errors import ConfigError
from phalanx.parallel import hf_transform as cut

KEYS = {"tensor": 1, "shard_degree": None}


def init(config: Mapping[str, Any] | str | Path | None = None) -> None:
    """Divide the ranks of this script, and let FSDP know.

    `config`, or the JSON file that it names, may have two keys. `tensor`: neighbouring ranks that hold slices of the
    same tensors, once `phalanx.transform` was called. `shard_degree`: ranks over which FSDP shards one copy of the
    model, the others holding further copies; None shards over all, 1 over none. Without `config` nothing is divided,
    and FSDP shards as the script says.

    Makes the default process group where there is none yet, of the ranks that torchrun, Slurm or `phalanx run` has
    started. To be called on all ranks, before the model is wrapped. Raises ConfigError for what cannot be.
    """
    settings = _read(config)
    world = sessions.world_size()
    tensor, degree = settings["tensor"], settings["shard_degree"]
    sessions.check_degrees(world, tensor, degree)
    before = sessions.current_session()
    if before is not None:
        if before.settings == settings:
            return
        raise ConfigError(f"this script was initialised with {before.settings} before; call phalanx.init once")
    rank = sessions.join_default_group()
    ranks = RankLayout(world, tensor, degree or world // tensor)
    start_session(FsdpSession(rank, ranks, degree, settings=settings, names={"transform": "phalanx.transform"}))


def start_session(session: FsdpSession) -> None:
    """Begin a session, whoever asked for it: its groups are made, and FSDP heeds them. Collective."""
    patch_fsdp()
    if not session.native:
        for kind in ("tensor", "data", "shard", "copy", "whole"):
            session.group(kind)
    sessions.begin_session(session)


def _read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if isinstance(config, str | Path):
        try:
            given: Any = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"phalanx.init cannot read {config} ({error}); name a JSON file") from None
    else:
        given = {} if config is None else config
    if not isinstance(given, Mapping):
        raise ConfigError(f"phalanx.init takes a mapping or a JSON file of one, not {type(given).__name__}")
    for key in given:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, 1)
            what = f"did you mean {near[0]}?" if near else f"there are {' and '.join(KEYS)}"
            raise ConfigError(f"phalanx.init has no key {key!r}; {what}")
    settings = KEYS | dict(given)
    for key, value in settings.items():
        if type(value) is not int and not (value is None and KEYS[key] is None):
            raise ConfigError(f"phalanx.init got {key}={value!r}; give a whole number")
    return settings


def transform(
    model: nn.Module,
    *,
    load_state_dict_from_rank0: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Divide a model's tensors over the ranks that `phalanx.init` has set aside for it; gives the same model back.

    Without such ranks the model stays as it is. `load_state_dict_from_rank0`: rank 0 alone has weights worth keeping;
    they are sent where tensors are divided, and else FSDP must have `sync_module_states=True`. Raises ConfigError
    before `phalanx.init`, and for a model that cannot be divided. Collective.
    """
    session = sessions.current_session()
    if session is None:
        raise ConfigError(
            "phalanx.transform divides a model over ranks, which are not known yet; call phalanx.init first"
        )
    session.layers |= _layers(model)
    session.experts |= {type(each) for each in model.modules() if "experts" in dict(each.named_children())}
    if session.ranks.tensor > 1:
        _cut(model, session, load_state_dict_from_rank0, device, dtype)
    else:
        _cast(model, device, dtype)
        session.needs_sync |= load_state_dict_from_rank0 and session.ranks.world > 1
    session.done.add("transform")
    session.models.append(id(model))
    return model


def _cut(
    model: nn.Module, session: FsdpSession, from_rank0: bool, device: torch.device | None, dtype: torch.dtype | None
) -> None:
    """Divide a model, whose ranks begin with the values of the first of them; from rank 0 all ranks get theirs."""
    axis = session.axis()
    if not from_rank0:
        for parameter in model.parameters():
            if not parameter.is_meta:
                sent = parameter.data.to(device_for_group(axis.group, parameter.device))
                dist.broadcast(sent, axis.ranks[0], group=axis.group)
                parameter.data.copy_(sent)
    cut.transform(model, axis, load_state_dict_from_rank0=from_rank0, device=device, dtype=dtype)
    session.shards |= cut.find_tensor_shards(model)


def _cast(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        device = None
    if device is not None or dtype is not None:
        model.to(device=device, dtype=dtype)


def _layers(model: nn.Module) -> frozenset[type]:
    """Classes of the model's layers: those of Hugging Face models say which they are; of others, of its lists."""
    names = getattr(model, "_no_split_modules", None) or ()
    named = {type(each) for each in model.modules() if type(each).__name__ in names}
    lists = {type(each) for many in model.modules() if isinstance(many, nn.ModuleList) for each in many}
    return frozenset(named or lists)
