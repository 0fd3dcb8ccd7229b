"""`DelayedScaling` of scripts: FP8 products whose scales follow from the steps before (parallel/fp8_delayed.py).

As in recipes with `train.fp8=delayed`, a history has one entry for each step of the optimizer, the largest magnitude
over all its micro-batches and all ranks. A layer that is made, or transformed, while there is a recipe keeps its
history in its state dict, so that the script's own checkpoints bring it to a new model. For a layer that was there
before, none could: a script loads before it trains.

Magnitudes are recorded in the backward pass: evaluation has none, and what a reentrant checkpoint first computes looks
like evaluation. Those of gradients are kept over the number of ranks that see different data, by which a mean over
ranks divides them.
"""

import functools
import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from phalanx.api.fsdp.session import current_session
from phalanx.comm.collectives import Traffic, all_reduce, device_for_group
from phalanx.core.errors import ConfigError
from phalanx.parallel import fp8_delayed
from phalanx.parallel.fp8_delayed import GRADIENT, INPUT, TENSORS, WEIGHT

KEY = "fp8_history"  # of a layer's state and attributes
NOTHING = -1.0  # the largest magnitude of a tensor that there was not
_ALGORITHMS = ("max", "most_recent")
# Further arguments of a recipe that change its scales, and what they are by default.
_OTHERS = {"scaling_factor_compute_algo": None, "reduce_amax": True, "override_linear_precision": (False,) * 3}


class _Scaling(fp8_delayed.DelayedScaling):
    """Records in any backward pass; what is not finite does not count, since the step may be skipped."""

    def note(self, which: int, x: Tensor, again: bool = False) -> None:
        if x.numel():
            largest = x.detach().abs().amax().float().nan_to_num(nan=0.0, posinf=0.0)
            known = self._maxima[which]
            self._maxima[which] = largest if known is None else torch.maximum(known, largest)


class _Product(fp8_delayed.DelayedProduct):
    """Records all three tensors in the backward pass."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, _ = ctx.saved_tensors
        ctx.scaling.note(INPUT, x)
        ctx.scaling.note(WEIGHT, weight)
        return fp8_delayed.DelayedProduct.backward(ctx, *grads)


class LayerHistory:
    """The histories of a layer's FP8 products, `table` (products, 3, entries) float32 on the host, and their scales by
    `recipe`."""

    def __init__(self, products: int, recipe: SimpleNamespace, joins: bool = True) -> None:
        self.recipe = SimpleNamespace(**vars(recipe))  # a layer keeps no recipe alive
        self.scalings = [_Scaling() for _ in range(products)]
        self.table = torch.zeros(
            products, len(TENSORS), _setting(recipe, "amax_history_len"), dtype=torch.float32, device="cpu"
        )
        self.steps = False  # whether its entries are agreed on after each step, which all ranks must do alike
        if joins:
            self.join()

    def join(self) -> None:
        """Take part in the steps from here on."""
        self.steps = True
        _places.append((len(self.scalings), weakref.ref(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerHistory":
        # An average of weights may be a copy on one rank alone: a copy joins when it is trained.
        copied = LayerHistory(len(self.scalings), self.recipe, joins=False)
        copied.set_table(self.table.clone())
        return copied

    def linear(self, product: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear(x, weight, bias) in FP8, of the layer's product of this number."""
        if torch.is_grad_enabled() and not self.steps:
            self.join()
        scaling, kernel = self.scalings[product], not fp8_delayed.find_kernel_problem(x.device)
        if torch.is_grad_enabled() and not (x.requires_grad or weight.requires_grad):  # there is no backward pass
            scaling.note(INPUT, x)
            scaling.note(WEIGHT, weight)
        found: Tensor = _Product.apply(x, weight, None, scaling, kernel)
        return found if bias is None else found + bias

    def take_maxima(self) -> Tensor:
        """(products, 3): the largest magnitudes since the last call; NOTHING of what there was not."""
        each = [largest for scaling in self.scalings for largest in scaling.end()[0]]
        for scaling in self.scalings:
            scaling.begin()
        device = next((one.device for one in each if one is not None), None)
        none = torch.tensor(NOTHING, dtype=torch.float32, device=device)
        return torch.stack([none if one is None else one for one in each]).to("cpu").view(-1, len(TENSORS))

    def append(self, largest: Tensor) -> None:
        """Append an entry (products, 3) to the histories of those tensors that there were."""
        entry = largest.clone()
        entry[:, GRADIENT] /= _data_ranks()
        longer = torch.cat((self.table[..., 1:], entry[..., None]), -1)
        self.set_table(torch.where((largest > NOTHING)[..., None], longer, self.table))

    def set_table(self, table: Tensor) -> None:
        """Go by these histories from here on."""
        self.table = table
        newest = _setting(self.recipe, "amax_compute_algo") == "most_recent"
        largest = table[..., -1].clone() if newest else table.amax(-1)
        largest[:, GRADIENT] *= _data_ranks()
        for scaling, scales in zip(
            self.scalings, fp8_delayed.find_scales(largest, _setting(self.recipe, "margin")), strict=True
        ):
            scaling.scales = scales


# The products of all histories that ever joined, which are the same on every rank, and those that still live, which
# may differ while garbage is collected.
_places: list[tuple[int, weakref.ref[LayerHistory]]] = []
_DEFAULTS = {"amax_history_len": 1024, "amax_compute_algo": "max", "margin": 0}  # Transformer Engine's


def _setting(recipe: SimpleNamespace, name: str) -> Any:
    return getattr(recipe, name, _DEFAULTS[name])


def find_recipe_problem(recipe: SimpleNamespace) -> str:
    """Why products cannot be scaled as a DelayedScaling says; "" where they can."""
    given = getattr(recipe, "fp8_format", None)
    if given is not None and given.name != "HYBRID":
        return f"the recipe's format is {given.name}, and delayed scaling here is of HYBRID"
    if _setting(recipe, "amax_compute_algo") not in _ALGORITHMS:
        return "the recipe has a custom amax_compute_algo"
    for name, usual in _OTHERS.items():
        value = getattr(recipe, name, usual)
        if (tuple(value) if isinstance(value, tuple) else value) != usual:
            return f"the recipe's {name} is not supported"
    return ""


def attach_history(layer: nn.Module, products: int, recipe: SimpleNamespace | None) -> LayerHistory | None:
    """Give a layer of so many FP8 products a history, if a `recipe` was made before it that can be followed."""
    vars(layer)[KEY] = None
    layer.register_load_state_dict_pre_hook(_load)
    if recipe is None or find_recipe_problem(recipe):
        return None
    _close_steps()
    history = vars(layer)[KEY] = LayerHistory(products, recipe)
    layer.register_state_dict_post_hook(_save)
    return history


def check_recipe(history: LayerHistory, recipe: SimpleNamespace) -> None:
    """Raise ConfigError where `fp8_autocast` has another recipe than the layers were made with."""
    for name in _DEFAULTS:
        here, there = _setting(recipe, name), _setting(history.recipe, name)
        if here != there:
            raise ConfigError(
                f"fp8_autocast got a DelayedScaling with {name}={here!r}, but when its layers were made the newest had "
                f"{there!r}; make one recipe, before the model"
            )


def _save(layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[prefix + KEY] = vars(layer)[KEY].table.clone()


def _load(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Without one in the state, as in one that was never trained so, the layer keeps its own; a layer without one, as
    where the model is only evaluated, takes none."""
    found, history = state.pop(prefix + KEY, None), vars(layer)[KEY]
    if found is None or history is None:
        return
    if found.shape != history.table.shape:
        raise ConfigError(
            f"{prefix}{KEY} of the checkpoint has the shape {tuple(found.shape)}, but the layer's is "
            f"{tuple(history.table.shape)}; give DelayedScaling the amax_history_len that it was saved with"
        )
    history.set_table(found.detach().to("cpu", torch.float32, copy=True))


def _data_ranks() -> int:
    """Ranks that see different data."""
    if not dist.is_initialized():
        return 1
    session = current_session()
    return dist.get_world_size() // (1 if session is None else session.ranks.tensor)


@functools.cache
def _close_steps() -> None:
    """Have each step of an optimizer end one of the histories."""
    register_optimizer_step_post_hook(lambda *_: end_step())


def end_step() -> None:
    """Append what the ranks have recorded since the last step. Collective over all ranks."""
    histories = [living() for _, living in _places]
    if not _places or (not dist.is_initialized() and not any(histories)):
        return
    largest = torch.cat(
        [
            torch.full((products, len(TENSORS)), NOTHING, dtype=torch.float32, device="cpu")
            if history is None
            else history.take_maxima()
            for (products, _), history in zip(_places, histories, strict=True)
        ]
    )
    if (group := dist.group.WORLD) is not None and dist.get_world_size() > 1:
        largest = largest.to(device_for_group(group, largest.device))  # NCCL has none for the host
        all_reduce(largest, group, Traffic(), dist.ReduceOp.MAX).wait()
        largest = largest.to("cpu")
    for history, part in zip(histories, largest.split([products for products, _ in _places]), strict=True):
        if history is not None and bool((part > NOTHING).any()):
            history.append(part)
