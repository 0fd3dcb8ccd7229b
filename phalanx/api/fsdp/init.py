"""`phalanx.init` and `phalanx.transform`: hybrid sharding and tensor parallelism for an FSDP script, in two lines."""

import difflib
import json
from collections.abc import Callable, Mapping
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
from phalanx.parallel import hf_transform

KEYS = {"tensor": 1, "shard_degree": None}


def init(config: Mapping[str, Any] | str | Path | None = None) -> None:
    """Set the tensor-parallel and sharding degrees of a script whose model is then wrapped in FSDP or FSDP2.

    Call it on all ranks, before the model is wrapped. It initializes the default process group, if there is none, with
    the ranks that torchrun, Slurm or `phalanx run` started.

    Args:
        config: A mapping, or the path of a JSON file, with at most two keys. `tensor`: how many neighboring ranks
            hold slices of the same tensors, once `phalanx.transform` is called; default 1. `shard_degree`: how
            many ranks FSDP shards one copy of the model over, the others holding further copies; default None, over
            all; 1 over none. None: FSDP shards as the script says.

    Raises:
        errors.ConfigError: a key is unknown, the degrees do not divide the ranks, or they were set differently before.

    Examples:
        >>> phalanx.init({"tensor": 1, "shard_degree": 1})
        >>> model = phalanx.transform(torch.nn.Linear(3, 1))  # then FSDP(model) or fully_shard(model)
    """
    settings = _read(config)
    world = sessions.world_size()
    tensor, degree = settings["tensor"], settings["shard_degree"]
    sessions.check_degrees(world, tensor, degree)
    before = sessions.current_session()
    if before is not None:
        if before.settings == settings:
            return
        raise ConfigError(f"this script was already initialized with {before.settings}; call phalanx.init once")
    rank = sessions.join_default_group()
    ranks = RankLayout(world, tensor, degree or world // tensor)
    start_session(FsdpSession(rank, ranks, degree, settings=settings, names={"transform": "phalanx.transform"}))


def start_session(session: FsdpSession) -> None:
    """Start a session: create its process groups, and patch FSDP to use them. Collective."""
    patch_fsdp()
    if not session.native:
        for kind in ("tensor", "data", "shard", "copy", "whole"):
            session.group(kind)
    if session.ranks.expert > 1:
        session.group("expert")
        session.group("dense")
    if session.ranks.context > 1:
        session.group("context")
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
            raise ConfigError(f"phalanx.init got {key}={value!r}; give an integer")
    return settings


def transform(
    model: nn.Module,
    *,
    load_state_dict_from_rank0: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Split a model's tensors over the tensor-parallel ranks of `phalanx.init`. Collective.

    Args:
        model: A model of transformers, whose layers are split in place. With `tensor` 1 any module, left as it is.
        load_state_dict_from_rank0: Whether rank 0 alone has the weights to keep. They are sent to the ranks that split
            tensors; without tensor parallelism give FSDP `sync_module_states=True`.
        device: Where the parameters are moved to. Default: they stay.
        dtype: The type of the parameters. Default: as it is.

    Returns:
        The same model.

    Raises:
        errors.ConfigError: called before `phalanx.init`, or for a model that cannot be split.

    Examples:
        >>> phalanx.init({"tensor": 1, "shard_degree": 1})
        >>> model = phalanx.transform(torch.nn.Linear(3, 1), dtype=torch.float64)
        >>> model.weight.dtype
        torch.float64
    """
    session = sessions.current_session()
    if session is None:
        raise ConfigError("phalanx.transform shards a model over ranks; call phalanx.init first")
    return split_model(model, session, hf_transform.transform, load_state_dict_from_rank0, device, dtype)


def split_model(
    model: nn.Module,
    session: FsdpSession,
    split: Callable[..., nn.Module],
    from_rank0: bool,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> nn.Module:
    """`transform`, where the session's ranks hold slices by `split`, a function like `hf_transform.transform`."""
    session.layers |= _layers(model)
    session.experts |= {type(each) for each in model.modules() if "experts" in dict(each.named_children())}
    if session.sliced is not None:
        _cut(model, session, split, from_rank0, device, dtype)
    else:
        _cast(model, device, dtype)
        session.needs_sync |= from_rank0 and session.ranks.world > 1
    session.done.add("transform")
    session.models.append(id(model))
    return model


def _cut(
    model: nn.Module,
    session: FsdpSession,
    split: Callable[..., nn.Module],
    from_rank0: bool,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> None:
    """Split a model's tensors or experts in place. Ranks that share slices begin with the values of the first of them,
    or all with those of rank 0."""
    assert session.sliced is not None
    axis = session.axis(session.sliced)
    if not from_rank0:
        for parameter in model.parameters():
            if not parameter.is_meta:
                sent = parameter.data.to(device_for_group(axis.group, parameter.device))
                dist.broadcast(sent, axis.ranks[0], group=axis.group)
                parameter.data.copy_(sent)
    split(model, axis, load_state_dict_from_rank0=from_rank0, device=device, dtype=dtype)


def _cast(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        device = None
    if device is not None or dtype is not None:
        model.to(device=device, dtype=dtype)


def _layers(model: nn.Module) -> frozenset[type]:
    """Classes of the model's layers: as declared by Hugging Face models, else the classes in its lists of modules."""
    names = getattr(model, "_no_split_modules", None) or ()
    named = {type(each) for each in model.modules() if type(each).__name__ in names}
    lists = {type(each) for many in model.modules() if isinstance(many, nn.ModuleList) for each in many}
    return frozenset(named or lists)
