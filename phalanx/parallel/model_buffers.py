"""Buffers of a custom task's network: constants, and the running statistics of batch norm layers, which checkpoints
keep."""

import array
import base64
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.comm import collectives
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import CheckpointError
from phalanx.engine.interface import Precision
from phalanx.models.batch_norm import GatherRanks, GlobalBatchNorm, batch_norms, gather_alone
from phalanx.models.model import Model
from phalanx.system import accelerator

HEADER_KEY = "running_statistics"
RUNNING = ("running_mean", "running_var")
COUNT = "num_batches_tracked"


def prepare_buffers(model: nn.Module, mesh: Mesh, precision: Precision) -> None:
    """Before an engine takes over a network on meta: constants are of the compute type, and batch norm layers take the
    rows of all ranks of `mesh` together, in the masters' type. Collective where there are such layers."""
    norms = batch_norms(model)
    gather = _make_gather(mesh) if norms and mesh.world > 1 else gather_alone
    for layer in norms.values():
        layer.gather, layer.master = gather, precision.master
    for module, leaf, buffer in list_constants(model).values():
        if buffer.is_floating_point():
            module._buffers[leaf] = buffer.to(precision.compute)


def _make_gather(mesh: Mesh) -> GatherRanks:
    mesh.open_group("statistics")
    here = weakref.ref(mesh)  # a model may outlive its mesh, whose groups must not live on

    def gather(vector: Tensor) -> Tensor:
        mesh = here()
        assert mesh is not None, "a model is used whose mesh is gone"
        out = vector.new_empty((mesh.world, vector.numel()))
        collectives.all_gather(out.view(-1), vector.contiguous(), mesh.open_group("statistics"), mesh.traffic).wait()
        return out

    return gather


def fill_buffers(model: Model, device: torch.device | str, master: torch.dtype | None = None) -> None:
    """Give the buffers their first values: constants those that the model names. `master`: the type of running
    statistics, where `prepare_buffers` has not set it."""
    for layer in batch_norms(model).values():
        layer.master = layer.master if master is None else master
        layer.reset_statistics(device)
    with torch.no_grad():
        for name, (module, leaf, buffer) in list_constants(model).items():
            values = model.constant(name, tuple(buffer.shape))
            module._buffers[leaf] = values.to(device=device, dtype=buffer.dtype).contiguous()


def list_constants(model: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """The buffers that are no running statistics, by name: the module, the name there, and the buffer."""
    found = {}
    for prefix, module in model.named_modules():
        for leaf, buffer in () if isinstance(module, GlobalBatchNorm) else module._buffers.items():
            if buffer is not None:
                found[f"{prefix}.{leaf}" if prefix else leaf] = module, leaf, buffer
    return found


def count_statistics_bytes(model: nn.Module, itemsize: int) -> int:
    """What the running statistics take in the header of a step, of so many bytes each."""
    return sum(2 * itemsize * layer.num_features * 4 // 3 + 200 for layer in batch_norms(model).values())


class RunningStatistics:
    """The running statistics of a model step by step; all ranks hold the same. A model without batch norm layers has
    none."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = batch_norms(model)
        self._copies: dict[int, accelerator.HostCopy] = {}  # by step, of the last two

    def snapshot(self, step: int) -> None:
        """The forward passes of `step` are over, and nothing has changed the statistics since."""
        if not self._layers:
            return
        values = [each for layer in self._layers.values() for each in (*_running(layer), layer._buffers[COUNT])]
        self._copies[step] = accelerator.HostCopy([cast(Tensor, each) for each in values])
        for old in [number for number in self._copies if number < step - 1]:
            del self._copies[old]

    def to_header(self, step: int) -> dict[str, Any]:
        """What a checkpoint of `step` keeps; any thread may ask. Waits for the copy."""
        if not self._layers:
            return {}
        numbers = self._copies[step].get()
        told, at = {}, 0
        for name, layer in self._layers.items():
            code, end = "d" if layer.master == torch.float64 else "f", at + 2 * layer.num_features
            data = base64.b64encode(array.array(code, numbers[at:end]).tobytes()).decode()
            told[name] = [code, data, int(numbers[end])]
            at = end + 1
        return {HEADER_KEY: told}

    def restore(self, header: Mapping[str, Any]) -> None:
        """Resume from what `to_header` returned. Raises CheckpointError where it belongs to another network."""
        if not self._layers:
            return
        told = header.get(HEADER_KEY)
        for name, layer in self._layers.items():
            values, count = _parse(told, name, 2 * layer.num_features)
            for running, part in zip(_running(layer), values.chunk(2), strict=True):
                running.copy_(part)
            cast(Tensor, layer.num_batches_tracked).fill_(count)


def read_statistics(header: Mapping[str, Any]) -> dict[str, Tensor]:
    """The running statistics in the header of a checkpoint, by names of buffers, in float64; empty without any."""
    told, found = header.get(HEADER_KEY, {}), dict[str, Tensor]()
    for name in told:
        values, _ = _parse(told, name, None)
        found |= {f"{name}.{leaf}": part for leaf, part in zip(RUNNING, values.chunk(2), strict=True)}
    return found


def _parse(told: Any, name: str, elements: int | None) -> tuple[Tensor, int]:
    try:
        code, data, count = told[name]
        values = array.array({"d": "d", "f": "f"}[code], base64.b64decode(data, validate=True))
        if len(values) % 2 or len(values) != (elements or len(values)) or type(count) is not int:
            raise ValueError(name)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint holds no running statistics of the channels of the batch norm layer {name}, so "
            "it does not fit this network; resume with the task that wrote it"
        ) from error
    return torch.tensor(values.tolist(), dtype=torch.float64), count


def _running(layer: GlobalBatchNorm) -> list[Tensor]:
    return [cast(Tensor, layer._buffers[name]) for name in RUNNING]
