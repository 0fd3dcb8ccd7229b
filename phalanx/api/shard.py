"""`phalanx.shard`: the sharded engine for a training loop of one's own.

What is checked and agreed on before the first step is here; what a loop then calls is in `sharded_model`.
"""

import contextlib
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.api.sharded_model import Rate, ShardedModel, finite_rate
from phalanx.comm.collectives import device_for_group
from phalanx.comm.compression import CODECS, NO_COMPRESSION
from phalanx.comm.mesh import Mesh, attach_mesh, join
from phalanx.comm.rendezvous import JsonGroup
from phalanx.config import optimizers
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.engine.hooks import find_unit_hooks
from phalanx.engine.interface import Precision
from phalanx.engine.schedule import NO_GAIN
from phalanx.engine.sharded import ShardedEngine
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.layout.mesh_axes import ALONE, MeshAxes
from phalanx.layout.tensor_shards import TensorShard, count_copies, whole_shapes
from phalanx.models.model import Model
from phalanx.optim.make_rule import make_named_rule
from phalanx.optim.update import Shard, UpdateRule
from phalanx.parallel.hf_transform import find_tensor_axis, find_tensor_shards
from phalanx.parallel.model_part import fill_by_rows
from phalanx.system import accelerator
from phalanx.system.torchrun_env import from_environment

BETAS, EPS = (0.9, 0.95), 1e-8
LISTS = (nn.ModuleList, nn.ModuleDict)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


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
    """Put `model` on the sharded engine; every rank calls it alike.

    Ranks are those of `torch.distributed` if that has been set up, else those that torchrun or `srun` started, else
    this process alone. All begin with the values of rank 0. Parameters stay the same objects, but are views of the
    engine's buffers from here on: read them by calling the model, or within `full_parameters()`, and nowhere else.
    Those that need no gradient now are frozen for good.

    A model that was transformed (`parallel.transform`) is sharded over its copies alone: ranks that hold slices of one
    copy are given the same micro-batches and count the same weight. Such a group counts as one in `weights` and in
    `shard_degree`.

    Args:
        lr: Learning rate, or what gives it for the number of a step (the first is 1).
        rule: Update rule: "adamw", "adamw8bit" or an element-wise class of torch.optim in lower case.
        betas: Of Adam's family, by default (0.9, 0.95).
        eps: Of Adam's family, by default 1e-8.
        weight_decay: By default 0.1 for adamw and adamw8bit, else 0; of parameters with two dims or more.
        options: Further arguments of the rule's class, such as {"momentum": 0.9} for "sgd".
        clip_norm: Limit of the norm of the whole mean gradient.
        zero: What is kept in shards between uses; 1: the rule's state; 2: gradients, too; 3: parameters, too.
        reduce: "per_step": micro-batches' gradients are summed on each rank first; "per_micro_batch": sent each time;
            "auto": per_step with zero 1, else per_micro_batch.
        weights: How much each rank keeps, in order of rank; 0 keeps nothing. By default all the same.
        shard_degree: Over so many neighbouring ranks a copy of all that is sharded; `weights` are theirs then. By
            default over all.
        slots: 2 keeps the state of the step before, so that updates may begin before all is reduced.
        compress: "bf16" or "int8" rounds all weights that are computed with, and gradients that cross nodes, so that
            they are sent in fewer bytes; the curve is then another one. "none" rounds nothing.
        units: Modules, or their names, that are moved as one, in the order of their use. By default the members of
            ModuleLists and what lies beside these.
        fill: Writes the starting values of a part of a parameter that is on meta: of the whole one, where this rank has
            a slice.
        timeout_s: How long ranks wait for one another in a collective.

    Raises:
        ConfigError: what was asked for is impossible, or the ranks ask for unlike things.
    """
    if not callable(lr):
        finite_rate(lr, "phalanx.shard")
    chosen = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    update, settings = _rule(
        rule, lr, {key: value for key, value in chosen.items() if value is not None}, options or {}
    )
    sharding = _sharding(zero, reduce, weights, shard_degree, slots, compress)
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm is {clip_norm:g}, which would stop all training; give a norm above 0, or None")
    precision, device = check_model(model, fill)
    parts = find_units(model) if units is None else resolve_units(model, units)
    left = contextlib.ExitStack()
    try:
        slices = find_tensor_shards(model)
        mesh = left.enter_context(_join_mesh(device, timeout_s, _axes(model)))
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


# ------------------------------------------------------------------------------------------------------ what is asked


def _rule(
    name: str, lr: Rate, chosen: Mapping[str, Any], options: Mapping[str, bool | int | float]
) -> tuple[UpdateRule, dict[str, Any]]:
    """The update rule, and what it was made of. Raises ConfigError for one that cannot be sharded, or is not known."""
    keys = [key for key, value in chosen.items() if value or key != "weight_decay"]
    found = optimizers.find_rule_problems(name, options, ["beta1" if key == "betas" else key for key in keys])
    if found:
        raise ConfigError(_as_argument(found[0]))
    betas, eps = chosen.get("betas", BETAS), chosen.get("eps", EPS)
    decay = chosen.get("weight_decay", optimizers.default_weight_decay(name))
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas) or not (eps >= 0 and decay >= 0):
        raise ConfigError(
            f"betas={betas}, eps={eps}, weight_decay={decay} cannot be; give two betas from 0 to below 1, and neither "
            "of the others below 0"
        )
    settings = {"rule": name, "betas": list(betas), "eps": eps, "weight_decay": decay, "options": dict(options)}
    try:
        first = lr(1) if callable(lr) else lr
        return make_named_rule(name, lr=first, betas=betas, eps=eps, weight_decay=decay, options=options), settings
    except ConfigError as error:
        raise ConfigError(_as_argument(str(error))) from None


def _as_argument(sentence: str) -> str:
    """A sentence about keys of a recipe, said of arguments."""
    return (
        sentence.replace("optim.name", "rule")
        .replace("optim.", "")
        .replace("beta1 is set", "betas is set")
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
                f"{name} is {value!r}, which is none of {', '.join(map(str, allowed))}; choose one of these"
            )
    if zero == 3 and slots == 2:
        raise ConfigError("slots=2 has no effect with zero=3, whose parameters are gathered anew; leave it out")
    if shard_degree is not None and not (isinstance(shard_degree, int) and shard_degree >= 1):
        raise ConfigError(
            f"shard_degree is {shard_degree!r}, which is no number of ranks; give a divisor of theirs, or None"
        )
    if reduce == "auto":
        reduce = "per_step" if zero == 1 else "per_micro_batch"
    try:
        shares = None if weights is None else tuple(map(float, weights))
    except (TypeError, ValueError):
        raise ConfigError(f"weights is {weights!r}, which are no numbers; give one for each rank, or None") from None
    return ShardingSpec(zero, reduce, shares, slots, degree=shard_degree, compress=compress)


def check_model(model: nn.Module, fill: Callable[[Shard], None] | None) -> tuple[Precision, torch.device]:
    """The type and the device of a model's parameters. Raises ConfigError where it cannot be sharded."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "the model is in DistributedDataParallel, which would reduce its gradients, too; hand over .module"
        )
    if "_orig_mod" in dict(model.named_children()):
        raise ConfigError(
            "the model was compiled as a whole, so that nothing of it could be waited for; compile its parts "
            "(block.forward = torch.compile(block.forward)) and hand over the plain module"
        )
    if (known := next(find_unit_hooks(model), None)) is not None:
        if known.closed:
            raise ConfigError(
                "the model, or a part of it, was sharded with zero=3 and closed, which has left it without parameters; "
                "make it anew, shard that, and load() what was saved"
            )
        raise ConfigError("the model, or a part of it, is sharded already; close() that first")
    parameters = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "the model has no parameter that needs gradients, so there is nothing to train; unfreeze some"
        )
    for name, parameter in parameters.items():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter {name} has no shape yet (a Lazy layer); call the model once before it is sharded"
            )
        if type(parameter.data) is not torch.Tensor:
            kind = type(parameter.data).__name__
            raise ConfigError(
                f"parameter {name} holds a {kind}, which cannot be sharded again; hand over the plain module"
            )
        if parameter.dtype not in DTYPES:
            raise ConfigError(
                f"parameter {name} is of {parameter.dtype}, in which nothing is summed without losses; make the model "
                "bfloat16 or float32, and constants buffers"
            )
        if parameter.is_meta and fill is None:
            raise ConfigError(f"parameter {name} is on meta, where it has no values; pass fill=, which writes them")
    first, like = next(iter(parameters.items()))
    for name, parameter in parameters.items():
        if parameter.dtype != like.dtype:
            raise ConfigError(
                f"parameter {name} is of {parameter.dtype}, but {first} of {like.dtype}; make all of one type, such as "
                "model.to(torch.float32)"
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ConfigError(
                f"buffer {name} is on meta, where nobody would fill it; give it values before, of a model of "
                "transformers by phalanx.rebuild_buffers(model)"
            )
    places = {name: p.device for name, p in parameters.items() if not p.is_meta}
    return Precision(like.dtype, like.dtype), _device_of(places)


def _device_of(places: Mapping[str, torch.device]) -> torch.device:
    """The one device that parameters lie on; meta if they all do."""
    if not places:
        return torch.device("meta")
    first, device = next(iter(places.items()))
    for name, other in places.items():
        if other != device:
            raise ConfigError(f"parameter {name} is on {other}, but {first} on {device}; move the model to one device")
    return device


# --------------------------------------------------------------------------------------------------------------- units


def find_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Parts of a model that are moved as one, by name, in the order in which they were declared: members of lists, and
    what lies beside the lists. What one has besides belongs to the model itself."""
    if isinstance(model, Model):
        return [(name, unit) for name, unit in model.units() if name not in model.shared_units()]
    return [(name, unit) for name, unit in _parts(model, "") if next(unit.parameters(), None) is not None]


def _parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for short, child in module.named_children():
        name = prefix + short
        members = [(f"{name}.{key}", member) for key, member in child.named_children()]
        if isinstance(child, LISTS):
            for key, member in members:  # a list in a list is not called either
                yield from _parts(member, f"{key}.") if isinstance(member, LISTS) else [(key, member)]
        elif any(isinstance(each, nn.ModuleList) for each in child.modules()):
            yield from _parts(child, f"{name}.")
        elif isinstance(child, nn.Sequential) and not prefix:
            yield from members
        else:
            yield name, child


def resolve_units(model: nn.Module, units: Sequence[str | nn.Module]) -> list[tuple[str, nn.Module]]:
    """Chosen units with their names. Raises ConfigError for what is no part of the model, or part of another unit."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[tuple[str, nn.Module]] = []
    for unit in units:
        if isinstance(unit, nn.Module):
            if id(unit) not in names:
                raise ConfigError(f"a {type(unit).__name__} of units is no part of the model; name parts of it")
            found.append((names[id(unit)], unit))
        else:
            if unit not in names.values():
                raise ConfigError(f"units has {unit!r}, but the model has no part of this name; name parts of it")
            found.append((unit, model.get_submodule(unit)))
    for name, unit in found:
        if isinstance(unit, LISTS):
            raise ConfigError(f"unit {name} is a list, which is never called itself; name its members")
        for other, inner in found:
            if inner is not unit and any(inner is each for each in unit.modules()):
                raise ConfigError(f"unit {other} lies within unit {name or 'of the whole model'}; name one of the two")
    if len(dict(found)) < len(found) or any(not name for name, _ in found):
        raise ConfigError("units has a part twice, or the model itself; name each part once, and not the whole")
    return found


# ------------------------------------------------------------------------------------------------------------ ranks


def _axes(model: nn.Module) -> MeshAxes:
    """How many ranks hold a copy of the model. Raises ConfigError where these are no neighbours."""
    axis = find_tensor_axis(model)
    if axis is None:
        return ALONE
    axes = MeshAxes(tensor=axis.size)
    if axis.ranks not in set(axes.groups("tensor", dist.get_world_size())):
        raise ConfigError(
            f"the model was transformed over the ranks {', '.join(map(str, axis.ranks))}, but phalanx.shard needs "
            f"{axis.size} neighbours that begin at a multiple of {axis.size}; transform it over such"
        )
    return axes


@contextlib.contextmanager
def _join_mesh(device: torch.device, timeout_s: float, axes: MeshAxes = ALONE) -> Iterator[Mesh]:
    """Groups of this model's own; `device` is the parameters', or meta."""
    if dist.is_initialized():
        ours = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if ours is not None and device.type != "cpu":
            ours = torch.device(ours.type, torch.accelerator.current_device_index())
            check_device(device, ours)
            device = ours
        with attach_mesh(torch.device("cpu") if device.type == "meta" else device, timeout_s, axes) as mesh:
            yield mesh
        return
    devices = [] if device.type == "cpu" else accelerator.list_devices()
    first = (devices or ["cpu"])[0] if device.type == "meta" else str(device)
    placement = from_environment(os.environ, devices) or Placement(0, 1, 0, 1, 0, first, store=None)
    check_device(device, torch.device(placement.device))
    if devices:
        torch.accelerator.set_device_index(torch.device(placement.device).index or 0)
    with join(placement, timeout_s) as mesh:
        yield mesh


def check_device(device: torch.device, ours: torch.device) -> None:
    """Raise ConfigError unless parameters are on `ours`, this rank's device, or on meta."""
    if device.type != "meta" and device != ours:
        raise ConfigError(
            f"the model's parameters are on {device}, but this rank's device is {ours}; move the model there "
            f"(model.to({str(ours)!r})), or make {device} the current device"
        )


def _check_same_call(
    group: JsonGroup, asked: Mapping[str, Any], model: nn.Module, slices: Mapping[str, TensorShard]
) -> None:
    """Raise ConfigError on all ranks where one asks for something else than rank 0, or has another model, of which it
    may have `slices`."""
    whole = whole_shapes({name: tuple(p.shape) for name, p in model.named_parameters()}, slices)
    shapes = {name: [list(whole[name]), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()}
    everyones = group.all_gather_objects({"asked": asked, "parameters": shapes})
    first = everyones[0]
    for other, theirs in enumerate(everyones):
        for key, value in theirs["asked"].items():
            if value != first["asked"][key]:
                raise ConfigError(
                    f"rank {other} calls phalanx.shard with {key}={value}, but rank 0 with "
                    f"{key}={first['asked'][key]}; call it alike on all ranks"
                )
        if theirs["parameters"] != first["parameters"]:
            names = [*theirs["parameters"], *first["parameters"]]
            unlike = next(n for n in names if theirs["parameters"].get(n) != first["parameters"].get(n))
            raise ConfigError(
                f"rank {other} has another model than rank 0: they differ in {unlike}; build the same on all"
            )


def sync_initial_values(model: nn.Module, mesh: Mesh, shards: Mapping[str, TensorShard]) -> None:
    """Give parameters and buffers the values of rank 0, sending those that differ somewhere; of `shards` those of the
    first rank that holds the same."""
    if mesh.world == 1:
        return
    if odd := next((name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)), None):
        warnings.warn(
            f"{odd} is a BatchNorm, whose statistics are those of one rank's samples, so the number of ranks changes "
            "the result; nn.GroupNorm or nn.LayerNorm do not depend on it",
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
    """What writes the masters: the values that parameters have now."""
    parameters = dict(model.named_parameters())
    without = {name for name, parameter in parameters.items() if parameter.is_meta}

    def write(part: Shard) -> None:
        if part.name not in without:
            part.tensor.copy_(parameters[part.name].detach().view(-1)[part.start : part.stop])
        elif fill is not None:
            fill(part)

    return write
