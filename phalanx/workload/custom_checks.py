"""Checks of a custom task before a run: its network, its data, its loss.

What would make the curve depend on how a batch is cut into shares is refused: batch statistics, random numbers of the
process, a loss that is a mean. Where the network is small enough it is tried: the loss of two samples together must be
the sum of the losses of each alone.
"""

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phalanx.core.errors import ConfigError, DataError
from phalanx.data.loader import Loader
from phalanx.models.batch_norm import GlobalBatchNorm, batch_norms
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.model import Model, draw_init_slice
from phalanx.parallel.model_buffers import count_statistics_bytes, fill_buffers, list_constants
from phalanx.tasks.task import Batch
from phalanx.workload.custom import CustomWorkload

if TYPE_CHECKING:
    from phalanx.config.schema import Config

MOST_PARAMETERS = 2**26  # of a network that is tried on the CPU: a quarter of a GiB, a second or so
MAX_STATISTICS_BYTES = 900 << 10  # of a step's header, which has room for 1 MiB (recovery/state_file.py)
RELATIVE_TOLERANCE = 1e-3  # relative: float32 adds up in another order, a mean is off by a factor


def check_custom_task(workload: CustomWorkload, config: "Config") -> int:
    """Raises ConfigError or DataError for a task that could be trained only to fail later, or to learn something else
    on each cluster; returns the number of parameters."""
    file, model = workload.file, workload.model()
    count = _check_network(workload, model, 8 if config.train.dtype == "fp64" else 4)
    workload.task().nominal_weight(config.train.global_batch)
    Loader(workload.train_data(), config.train.global_batch, config.train.seed, rank=0)
    held_out = workload.eval_data()
    for name, rows in held_out.items():
        if not rows.count:
            raise DataError(f"{rows.describe()}, nothing to evaluate on; remove {name} from held_out()")
    if not held_out and config.train.eval_every and config.train.eval_sequences:
        raise ConfigError(
            f"train.eval_every asks for evaluations, but held_out() of task.code {file} gives no samples; write that "
            "method, or set train.eval_every=0"
        )
    for rows in held_out.values():
        workload.task().collate([rows.sample(0, 0)])
    _check_loss(workload, model, count)
    return count


# -------------------------------------------------------------------------------------------------------------- network


def _check_network(workload: CustomWorkload, model: Model, statistics_itemsize: int) -> int:
    said = f"task.code {workload.file}: the network"
    for name, module in model.named_modules():
        if why := _depends_on_the_split(module):
            raise ConfigError(f"{said} has {name or 'itself'}, a {type(module).__name__.removeprefix('Global')}: {why}")
    for name, (_, _, buffer) in list_constants(model).items():
        shape = tuple(buffer.shape)
        if type(model).constant is Model.constant:
            raise ConfigError(f"{said} has the buffer {name}; override its method constant, which returns the values")
        values = workload.call_user_code(f"constant({name!r}, {shape})", functools.partial(model.constant, name, shape))
        if not isinstance(values, Tensor) or values.shape != buffer.shape or values.is_meta:
            raise ConfigError(f"{said} returns no tensor of shape {shape} from constant({name!r}, {shape}); return one")
    if (taken := count_statistics_bytes(model, statistics_itemsize)) > MAX_STATISTICS_BYTES:
        raise ConfigError(
            f"{said} has batch norm layers whose running statistics take {taken >> 10} KiB, more than the "
            f"{MAX_STATISTICS_BYTES >> 10} KiB that are kept of each step; use fewer channels, or nn.GroupNorm"
        )
    named = dict(model.named_parameters())
    if not named:
        raise ConfigError(f"{said} has no parameters, so there is nothing to train; fix model()")
    if twice := [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in named]:
        raise ConfigError(
            f"{said} has one parameter under several names ({twice[0]} is the second), which would part when they get "
            "memory; give each part its own, or hand the one on in the forward pass"
        )
    for name, parameter in named.items():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"{said} has {name}, whose shape is not set (a Lazy layer), so that nothing could be sharded or "
                "initialized; name the layer's sizes"
            )
        if not parameter.is_meta:
            raise ConfigError(
                f"{said} has the parameter {name} on {parameter.device}, though it is built under torch.device('meta')"
                "; leave the device to that, and name starting values in its method start"
            )
        if not parameter.requires_grad or not parameter.is_floating_point():
            raise ConfigError(
                f"{said} has {name}, which takes no gradient, so that it would be in no checkpoint; do not change "
                "requires_grad, and do not keep constants as parameters"
            )
        if not parameter.dim():
            raise ConfigError(f"{said} has {name}, a parameter without dims, which cannot be sharded; make it of one")
        workload.call_user_code(f"start({name!r}, ...)", lambda name=name, p=parameter: _try_start(model, name, p))  # type: ignore[misc]
    return sum(parameter.numel() for parameter in named.values())


def _try_start(model: Model, name: str, parameter: Tensor) -> None:
    draw_init_slice(model.start(name, tuple(parameter.shape)), 0, name, 0, 1, "cpu", torch.float32)


def _depends_on_the_split(module: nn.Module) -> str | None:
    """Why a layer computes something else when a batch is cut in another way, or None."""
    if isinstance(module, GlobalBatchNorm) and not module.track_running_stats:
        return (
            "an evaluation would depend on how its samples are divided, since the layer has no running statistics; "
            "leave track_running_stats on"
        )
    rate = 0.0
    if isinstance(module, nn.modules.dropout._DropoutNd):
        rate = module.p
    elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        rate = float(module.dropout)
    elif isinstance(module, nn.RReLU):
        rate = 1.0
    if rate:
        return (
            "its random numbers are the process's, so the cluster would change the result; use draws.dropout, which "
            "draws by coordinates"
        )
    return None


# ----------------------------------------------------------------------------------------------------------------- loss


def _check_loss(workload: CustomWorkload, model: Model, count: int) -> None:
    """One pass: that every unit is called, and what comes out is a sum."""
    few = count <= MOST_PARAMETERS
    device = torch.device("cpu" if few else "meta")
    if few:
        model = model.to_empty(device=device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                start = model.start(name, tuple(parameter.shape))
                parameter.copy_(
                    draw_init_slice(start, 0, name, 0, parameter.numel(), "cpu", torch.float32).view_as(parameter)
                )
        fill_buffers(model, device)
    samples = workload.make_probe_samples(2)
    constants = {name: buffer.clone() for name, (_, _, buffer) in list_constants(model).items()}
    once = dict([("", model), *batch_norms(model).items(), *model.units()])
    calls = dict.fromkeys(once, 0)
    for name, unit in once.items():
        unit.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    _loss(workload, model, samples, device)
    if not calls[""]:
        raise ConfigError(
            f"task.code {workload.file}: loss_sum does not call the model that it is given, so that nothing would be "
            "gathered for it; call model(...), and give its forward what else it should do"
        )
    if wrong := [name for name, times in calls.items() if times != calls[""]]:
        raise ConfigError(
            f"task.code {workload.file}: the network's unit {wrong[0]} is called {calls[wrong[0]]} times in a pass, "
            "but its parameters are gathered, and batch norm measures, for one call; call each unit once, or name "
            "other units in its method units"
        )
    both = _counts(workload, model, samples, device)
    if both:  # of two samples, since one alone need not make a score: it has no variance, say
        workload.task().scores(both)
    _loss(workload, model, samples, device, dropout=True)
    if not few:
        return
    for name, (_, _, buffer) in list_constants(model).items():
        if not _same(buffer, constants[name]):
            raise ConfigError(
                f"task.code {workload.file}: a pass changes the buffer {name}, so that each rank would have another; "
                "only the running statistics of batch norm layers may change"
            )
    batches = [workload.task().collate([sample]) for sample in samples]
    again = workload.task().collate(workload.make_probe_samples(1)).inputs
    if changed := [name for name, each in batches[0].inputs.items() if not _same(each, again.get(name))]:
        raise ConfigError(
            f"task.code {workload.file}: the first sample makes other {changed[0]} when it is asked for again, so the "
            "curve would depend on which rank reads it, and when; train() and collate must not use random numbers"
        )
    weight = workload.task().collate(samples).weight
    if weight != sum(batch.weight for batch in batches):
        raise ConfigError(
            f"task.code {workload.file}: collate gives two samples the weight {weight}, but one by one they weigh "
            f"{' and '.join(str(batch.weight) for batch in batches)}; a weight is a count, which adds up"
        )
    for drawn, where in ((False, ""), (True, " with dropout")):
        together = _loss(workload, model, samples, device, drawn)
        for layer in batch_norms(model).values():  # by the statistics of both a sample's loss is its own
            layer.keeps_statistics = True
        alone = [_loss(workload, model, [sample], device, drawn) for sample in samples]
        if not _adds_up(together, alone):
            drawing = ", and only draws.dropout draw at random" if drawn else ""
            raise ConfigError(
                f"task.code {workload.file}: the loss of two samples{where} is {together:.6g}, but one by one they "
                f"give {' and '.join(f'{loss:.6g}' for loss in alone)}; loss_sum must be a sum over samples "
                f"(reduction='sum'), and no sample may depend on another{drawing}"
            )
    each = [_counts(workload, model, [sample], device) for sample in samples]
    for name, count_of_both in both.items():
        parts = [counts.get(name, 0.0) for counts in each]
        if not _adds_up(count_of_both, parts):
            raise ConfigError(
                f"task.code {workload.file}: counts gives {count_of_both:.6g} for {name} of two samples, but one by "
                f"one {' and '.join(f'{part:.6g}' for part in parts)}; they are added up over batches and ranks, so "
                "give sums and let scores divide them"
            )


def _adds_up(together: float, alone: list[float]) -> bool:
    """Whether a figure of several samples is the sum of those of each; non-finite values pass here."""
    scale = max(abs(together), *map(abs, alone))
    return not math.isfinite(scale) or math.isclose(together, math.fsum(alone), abs_tol=RELATIVE_TOLERANCE * scale)


def _loss(
    workload: CustomWorkload, model: Model, samples: list[Any], device: torch.device, dropout: bool = False
) -> float:
    """The loss sum; as in training, backward too, if dropout is `dropout`. Of a network on meta nothing but that it can
    be computed."""
    batch: Batch = workload.task().collate(samples).to(device)
    draws = CounterRNG(0, 1, batch.samples) if dropout else None

    def run() -> Tensor:
        with torch.set_grad_enabled(dropout):
            return workload.task().loss_sum(model, _in_float32(batch), draws)

    loss = workload.call_user_code("loss_sum(model, batch, draws)", run)
    if dropout and not loss.requires_grad:
        raise ConfigError(
            f"task.code {workload.file}: the loss does not depend on the network as far as gradients go, so nothing "
            "would be learnt; remove detach() and no_grad() from loss_sum and the network"
        )
    if dropout:
        workload.call_user_code("the backward pass of loss_sum(model, batch, draws)", loss.backward)
    if device.type == "meta":
        return 0.0
    value = float(loss.detach())
    if not math.isfinite(value):
        raise ConfigError(
            f"task.code {workload.file}: the first loss is {value}, before the first update; "
            "check the samples, and the initial values of the parameters"
        )
    return value


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _in_float32(batch: Batch) -> Batch:
    """As the trainer's hooks at the model's edges would hand it on."""
    inputs = {name: each.float() if each.is_floating_point() else each for name, each in batch.inputs.items()}
    return Batch(inputs, batch.weight, batch.samples)


def _counts(workload: CustomWorkload, model: Model, samples: list[Any], device: torch.device) -> dict[str, float]:
    """What counts says of these samples; nothing for a network on meta."""
    batch: Batch = workload.task().collate(samples).to(device)
    with torch.no_grad():
        counts = workload.call_user_code(
            "counts(model, batch)", lambda: workload.task().counts(model, _in_float32(batch))
        )
    if not isinstance(counts, dict) or any(not isinstance(n, Tensor) or n.numel() != 1 for n in counts.values()):
        raise ConfigError(f"task.code {workload.file}: counts returns no dictionary of one-element tensors; fix it")
    if device.type == "meta":
        return {}
    return {name: float(count) for name, count in counts.items()}
