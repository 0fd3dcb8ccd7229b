"""`phalanx.shard`: the sharded engine for a custom training loop.

This module checks the arguments and compares them between ranks, with `model_checks`; `sharded_model` has the methods
for the loop.
"""

import contextlib
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.api.model_checks import check_model, find_axes, find_units, join_mesh, resolve_units
from phalanx.api.sharded_model import Rate, ShardedModel
from phalanx.api.sharded_step import finite_rate
from phalanx.comm.collectives import device_for_group
from phalanx.comm.compression import CODECS, NO_COMPRESSION
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.config import optimizers
from phalanx.core.errors import ConfigError
from phalanx.engine.schedule import NO_GAIN
from phalanx.engine.sharded import ShardedEngine
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.layout.tensor_shards import TensorShard, count_copies, whole_shapes
from phalanx.optim.make_rule import make_named_rule
from phalanx.optim.update import Shard, UpdateRule
from phalanx.parallel.hf_state import find_tensor_shards
from phalanx.parallel.model_part import fill_by_rows

BETAS, EPS = (0.9, 0.95), 1e-8


def shard(
    model: nn.Module,
    *,
    lr: Rate,
    rule: str = "adamw",
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    options: Mapping[str, bool | int | float] | None = None,
    clip_norm: float | None = None,
    zero: int = 1,
    reduce: str = "auto",
    weights: Sequence[float] | None = None,
    shard_degree: int | None = None,
    slots: int = 1,
    compress: str = NO_COMPRESSION,
    units: Sequence[str | nn.Module] | None = None,
    fill: Callable[[Shard], None] | None = None,
    timeout_s: float = 600.0,
) -> ShardedModel:
    """Shard a model's optimizer state, gradients and parameters over the ranks, in parts of any size.

    Every rank makes the same call. The ranks are those of `torch.distributed` if it is initialized, else those that
    torchrun or `srun` started, else this process alone. All ranks begin with the values of rank 0. Parameters stay
    the same objects, but become views of the engine's buffers: read them by calling the model or within
    `ShardedModel.full_parameters` only. A parameter that needs no gradient now stays frozen.

    A model that `transform` divided is sharded over its copies: the ranks of one copy see the same micro-batches
    and count the same weight. Such a group counts as one in `weights` and `shard_degree`.

    Args:
        model: The module to train, all of one floating-point type and on one device, or on meta (see `fill`).
        lr: Learning rate, or a function from the number of a step (the first is 1) to it.
        rule: Optimizer: "adamw", "adamw8bit", or an element-wise class of `torch.optim` in lower case.
        betas: Of the Adam family. Default: (0.9, 0.95).
        eps: Of the Adam family. Default: 1e-8.
        weight_decay: Of parameters with two dimensions or more. Default: 0.1 for adamw and adamw8bit, else 0.
        options: Further arguments of the optimizer, such as `{"momentum": 0.9}` for "sgd".
        clip_norm: Largest norm of the mean gradient of all parameters. Default: no clipping.
        zero: What is sharded between uses. 1: optimizer state; 2: gradients, too; 3: parameters, too.
        reduce: "per_step" sums the gradients of micro-batches on each rank first, "per_micro_batch" sends each;
            "auto" is per_step with zero 1, else per_micro_batch.
        weights: Relative size of each rank's shard, in order of rank; 0: none. Default: equal shards.
        shard_degree: Number of neighboring ranks that hold one sharded copy; `weights` are theirs. Default: all.
        slots: 2 keeps the state of the previous step, so that updates begin before all gradients are reduced.
        compress: "bf16" or "int8" rounds all weights, and gradients that cross nodes, to send fewer bytes; this
            changes the loss curve. "none" rounds nothing.
        units: Modules, or their names, that are gathered as one, in order of use. Default: the members of
            `nn.ModuleList` and what lies beside them.
        fill: Writes the initial values of its argument, a part of a parameter on meta (see `start_of`).
        timeout_s: Seconds that ranks wait for one another in a collective.

    Returns:
        ShardedModel: a context manager with the training step, checkpoints and evaluation.

    Raises:
        errors.ConfigError: the model or an argument cannot be used, or ranks made different calls.

    Examples:
        >>> net = torch.nn.Linear(3, 1)
        >>> with phalanx.shard(net, lr=1e-2, zero=2, clip_norm=1.0) as sharded:
        ...     batch = torch.ones(4, 3)
        ...     with sharded.step([batch], weight=len(batch)) as step:
        ...         for micro_batch in step:
        ...             step.backward(net(micro_batch).square().sum())
        ...     sharded.steps
        1
    """
    if not callable(lr):
        finite_rate(lr, "phalanx.shard")
    chosen = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    update, settings = _rule(
        rule, lr, {key: value for key, value in chosen.items() if value is not None}, options or {}
    )
    sharding = _sharding(zero, reduce, weights, shard_degree, slots, compress)
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(
            f"clip_norm is {clip_norm:g}, which would stop training; give a norm above 0, or None to disable clipping"
        )
    precision, device = check_model(model, fill)
    parts = find_units(model) if units is None else resolve_units(model, units)
    left = contextlib.ExitStack()
    try:
        slices = find_tensor_shards(model)
        if fused := [name for name, each in slices.items() if each.sections]:
            raise ConfigError(
                f"phalanx.shard does not take {fused[0]}, a slice of several matrices in one, of which a checkpoint "
                "could not say where it belongs; wrap the transformed model in FSDP, or do not transform it"
            )
        mesh = left.enter_context(join_mesh(device, timeout_s, find_axes(model)))
        copies = count_copies(dict(model.named_parameters()), slices, mesh.axes.tensor)
        shared = {"zero": zero, "reduce": sharding.reduce, "weights": sharding.weights, "shard_degree": shard_degree}
        own = {"slots": slots, "compress": compress, "clip_norm": clip_norm, "units": [name for name, _ in parts]}
        asked = {**shared, **own, **settings}
        _check_same_call(JsonGroup(mesh.checkpoint), asked, model, slices)
        sync_initial_values(model, mesh, slices)
        if compress != NO_COMPRESSION and len(mesh.topology.nodes) == 1:
            warnings.warn(f"compress={compress!r} {NO_GAIN}", stacklevel=2)
        engine = ShardedEngine(
            model, parts, mesh=mesh.data, rule=update, nominal_weight=1, precision=precision, sharding=sharding,
            copies={name: count for name, count in copies.items() if count > 1},
        )  # fmt: skip
        if fill is not None and slices:
            fill = fill_by_rows(fill, slices)
        with torch.no_grad():
            engine.initialise(_make_current_fill(model, fill))
        return ShardedModel(
            model, engine, mesh, left.pop_all(), master=precision.master, lr=lr, clip_norm=clip_norm, slices=slices
        )
    finally:
        left.close()


# ------------------------------------------------------------------------------------------------------ arguments


def _rule(
    name: str, lr: Rate, chosen: Mapping[str, Any], options: Mapping[str, bool | int | float]
) -> tuple[UpdateRule, dict[str, Any]]:
    """The update rule and its options. Raises ConfigError for one that cannot be sharded, or is unknown."""
    keys = [key for key, value in chosen.items() if value or key != "weight_decay"]
    found = optimizers.find_rule_problems(name, options, ["beta1" if key == "betas" else key for key in keys])
    if found:
        raise ConfigError(_as_argument(found[0]))
    betas, eps = chosen.get("betas", BETAS), chosen.get("eps", EPS)
    decay = chosen.get("weight_decay", optimizers.default_weight_decay(name))
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas) or not (eps >= 0 and decay >= 0):
        raise ConfigError(
            f"betas={betas}, eps={eps}, weight_decay={decay} is invalid; give two betas from 0 to below 1, and eps "
            "and weight_decay of 0 or more"
        )
    settings = {"rule": name, "betas": list(betas), "eps": eps, "weight_decay": decay, "options": dict(options)}
    try:
        first = lr(1) if callable(lr) else lr
        return make_named_rule(name, lr=first, betas=betas, eps=eps, weight_decay=decay, options=options), settings
    except ConfigError as error:
        raise ConfigError(_as_argument(str(error))) from None


def _as_argument(sentence: str) -> str:
    """Reword a sentence about recipe keys for arguments."""
    return (
        sentence.replace("optim.name", "rule")
        .replace("optim.", "")
        .replace("beta1 has no effect", "betas has no effect")
        .replace("beta1 and beta2", "betas")
    )


def _sharding(
    zero: int, reduce: str, weights: Sequence[float] | None, shard_degree: int | None, slots: int, compress: str
) -> ShardingSpec:
    for name, value, allowed in (
        ("zero", zero, (1, 2, 3)),
        ("reduce", reduce, ("auto", "per_step", "per_micro_batch")),
        ("slots", slots, (1, 2)),
        ("compress", compress, (NO_COMPRESSION, *CODECS)),
    ):
        if value not in allowed:
            raise ConfigError(
                f"{name} is {value!r}, which is not supported; choose one of {', '.join(map(str, allowed))}"
            )
    if zero == 3 and slots == 2:
        raise ConfigError("slots=2 has no effect with zero=3, which gathers parameters again; remove it")
    if shard_degree is not None and not (isinstance(shard_degree, int) and shard_degree >= 1):
        raise ConfigError(
            f"shard_degree is {shard_degree!r}, which is not a number of ranks; give a divisor of the number of "
            "ranks, or None"
        )
    if reduce == "auto":
        reduce = "per_step" if zero == 1 else "per_micro_batch"
    try:
        shares = None if weights is None else tuple(map(float, weights))
    except (TypeError, ValueError):
        raise ConfigError(
            f"weights is {weights!r}, which is not a list of numbers; give one for each rank, or None"
        ) from None
    return ShardingSpec(zero, reduce, shares, slots, degree=shard_degree, compress=compress)


def _check_same_call(
    group: JsonGroup, asked: Mapping[str, Any], model: nn.Module, slices: Mapping[str, TensorShard]
) -> None:
    """Raise ConfigError on all ranks if one passes other arguments than rank 0, or another model, of which it may
    have `slices`."""
    whole = whole_shapes({name: tuple(p.shape) for name, p in model.named_parameters()}, slices)
    shapes = {name: [list(whole[name]), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()}
    everyones = group.all_gather_objects({"asked": asked, "parameters": shapes})
    first = everyones[0]
    for other, theirs in enumerate(everyones):
        for key, value in theirs["asked"].items():
            if value != first["asked"][key]:
                raise ConfigError(
                    f"rank {other} calls phalanx.shard with {key}={value}, but rank 0 with "
                    f"{key}={first['asked'][key]}; pass the same arguments on all ranks"
                )
        if theirs["parameters"] != first["parameters"]:
            names = [*theirs["parameters"], *first["parameters"]]
            unlike = next(n for n in names if theirs["parameters"].get(n) != first["parameters"].get(n))
            raise ConfigError(
                f"rank {other} has a different model than rank 0 (they differ in {unlike}); build the same model on "
                "all ranks"
            )


def sync_initial_values(model: nn.Module, mesh: Mesh, shards: Mapping[str, TensorShard]) -> None:
    """Copy parameters and buffers from rank 0 where they differ; `shards` from the first rank that holds the same
    slice."""
    if mesh.world == 1:
        return
    if odd := next((name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)), None):
        warnings.warn(
            f"{odd} is a BatchNorm, whose statistics cover one rank's samples only, so the number of ranks changes "
            "the result; use nn.GroupNorm or nn.LayerNorm to avoid that",
            stacklevel=3,
        )
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: each.detach() for name, each in named.items() if not each.is_meta}
    _send_unlike([each for name, each in values.items() if name not in shards], mesh)
    if mesh.data.world > 1:
        _send_unlike([each for name, each in values.items() if name in shards], mesh.data)


def _send_unlike(tensors: Sequence[torch.Tensor], mesh: Mesh) -> None:
    prints = JsonGroup(mesh.checkpoint).all_gather_objects([_checksum(each) for each in tensors])
    for tensor, *found in zip(tensors, *prints, strict=True):
        if len(set(found)) > 1:
            flat = tensor.contiguous().view(-1).view(torch.uint8).to(device_for_group(mesh.transfers, tensor.device))
            dist.broadcast(flat, group=mesh.transfers, group_src=0)
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous().view(-1).view(torch.uint8).cpu()
    return zlib.crc32(flat.numpy().data) if flat.numel() else 0


def _make_current_fill(model: nn.Module, fill: Callable[[Shard], None] | None) -> Callable[[Shard], None]:
    """Function that fills the masters with the current values of the parameters."""
    parameters = dict(model.named_parameters())
    without = {name for name, parameter in parameters.items() if parameter.is_meta}

    def write(part: Shard) -> None:
        if part.name not in without:
            part.tensor.copy_(parameters[part.name].detach().view(-1)[part.start : part.stop])
        elif fill is not None:
            fill(part)

    return write
