"""Checks of a model before sharding: its dtype and device, its units, its ranks."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm.mesh import Mesh, attach_mesh, join
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.engine.hooks import find_unit_hooks
from phalanx.engine.interface import Precision
from phalanx.layout.mesh_axes import ALONE, MeshAxes
from phalanx.models.model import Model
from phalanx.optim.update import Shard
from phalanx.parallel.hf_state import find_tensor_axis
from phalanx.system import accelerator
from phalanx.system.torchrun_env import from_environment

LISTS = (nn.ModuleList, nn.ModuleDict)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def check_model(model: nn.Module, fill: Callable[[Shard], None] | None) -> tuple[Precision, torch.device]:
    """The dtype and the device of a model's parameters. Raises ConfigError if it cannot be sharded."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError("the model is in DistributedDataParallel, which would reduce its gradients too; pass .module")
    if "_orig_mod" in dict(model.named_children()):
        raise ConfigError(
            "the model was compiled as a whole, so its parts cannot be overlapped; compile its parts (block.forward "
            "= torch.compile(block.forward)) and pass the plain module"
        )
    if (known := next(find_unit_hooks(model), None)) is not None:
        if known.closed:
            raise ConfigError(
                "the model, or a part of it, was sharded with zero=3 and closed, which left it without parameters; "
                "build it again, shard it, and load() a checkpoint"
            )
        raise ConfigError("the model, or a part of it, is already sharded; close() it first")
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
            raise ConfigError(f"parameter {name} holds a {kind}, which cannot be sharded again; pass the plain module")
        if parameter.dtype not in DTYPES:
            raise ConfigError(
                f"parameter {name} is of {parameter.dtype}, which cannot be summed precisely; make the model "
                "bfloat16 or float32, and make constants buffers"
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
                f"buffer {name} is on meta, so it has no values; fill it first (for a transformers model, with "
                "phalanx.rebuild_buffers(model))"
            )
    places = {name: p.device for name, p in parameters.items() if not p.is_meta}
    return Precision(like.dtype, like.dtype), _device_of(places)


def _device_of(places: Mapping[str, torch.device]) -> torch.device:
    """The device of all parameters; meta if all are on meta."""
    if not places:
        return torch.device("meta")
    first, device = next(iter(places.items()))
    for name, other in places.items():
        if other != device:
            raise ConfigError(f"parameter {name} is on {other}, but {first} on {device}; move the model to one device")
    return device


# --------------------------------------------------------------------------------------------------------------- units


def find_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Units of a model, which are gathered as one, by name in order of declaration: members of lists, and the
    modules beside the lists. Other parameters belong to the model itself."""
    if isinstance(model, Model):
        return [(name, unit) for name, unit in model.units() if name not in model.shared_units()]
    return [(name, unit) for name, unit in _parts(model, "") if next(unit.parameters(), None) is not None]


def _parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for short, child in module.named_children():
        name = prefix + short
        members = [(f"{name}.{key}", member) for key, member in child.named_children()]
        if isinstance(child, LISTS):
            for key, member in members:  # a list within a list is never called either
                yield from _parts(member, f"{key}.") if isinstance(member, LISTS) else [(key, member)]
        elif any(isinstance(each, nn.ModuleList) for each in child.modules()):
            yield from _parts(child, f"{name}.")
        elif isinstance(child, nn.Sequential) and not prefix:
            yield from members
        else:
            yield name, child


def resolve_units(model: nn.Module, units: Sequence[str | nn.Module]) -> list[tuple[str, nn.Module]]:
    """Chosen units with their names. Raises ConfigError for one that is not part of the model, or part of another
    unit."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[tuple[str, nn.Module]] = []
    for unit in units:
        if isinstance(unit, nn.Module):
            if id(unit) not in names:
                raise ConfigError(f"a {type(unit).__name__} of units is not a part of the model; name its parts")
            found.append((names[id(unit)], unit))
        else:
            if unit not in names.values():
                raise ConfigError(f"units has {unit!r}, but the model has no such part; name its parts")
            found.append((unit, model.get_submodule(unit)))
    for name, unit in found:
        if isinstance(unit, LISTS):
            raise ConfigError(f"unit {name} is a list, which is never called; name its members")
        for other, inner in found:
            if inner is not unit and any(inner is each for each in unit.modules()):
                raise ConfigError(
                    f"unit {other} lies within unit {name or 'of the whole model'}; name only one of them"
                )
    if len(dict(found)) < len(found) or any(not name for name, _ in found):
        raise ConfigError("units has a part twice, or the model itself; name each part once, and not the whole model")
    return found


# ------------------------------------------------------------------------------------------------------------ ranks


def find_axes(model: nn.Module) -> MeshAxes:
    """How many ranks hold a copy of the model. Raises ConfigError if these are not consecutive."""
    axis = find_tensor_axis(model)
    if axis is None:
        return ALONE
    axes = MeshAxes(tensor=axis.size)
    if axis.ranks not in set(axes.groups("tensor", dist.get_world_size())):
        raise ConfigError(
            f"the model was transformed over the ranks {', '.join(map(str, axis.ranks))}, but phalanx.shard needs "
            f"{axis.size} neighbours that begin at a multiple of {axis.size}; transform it over such ranks"
        )
    return axes


@contextlib.contextmanager
def join_mesh(device: torch.device, timeout_s: float, axes: MeshAxes = ALONE) -> Iterator[Mesh]:
    """Create process groups for this model; `device` is the parameters', or meta."""
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
