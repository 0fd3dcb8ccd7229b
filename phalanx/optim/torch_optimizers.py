"""Update rules of torch.optim, run by torch's own class on pieces of flat shards.

Tensors that the class keeps in the parameter's shape are kinds of state, which engines hold and checkpoints save.
Single numbers that it keeps must follow from the step and the learning rate, so that they need not be saved: the step
count, NAdam's product and ASGD's rates do. Every call creates the class again and hands it the state.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.config.optimizers import BETAS, OPTIMIZERS
from phalanx.core.errors import ConfigError
from phalanx.optim.update import Allocator, Slot, State, StepUpdate

CHUNK_ELEMENTS = 2**24  # updated at a time; old and new state coexist until a skip is ruled out
SCALARS = frozenset(["step", "mu_product", "eta", "mu"])


@dataclass(frozen=True)
class TorchRule:
    """The update rule of a torch.optim class, `name` in `OPTIMIZERS`, with its `arguments`; `initial`: initial values
    of state, where not 0."""

    name: str
    arguments: Mapping[str, object]
    weight_decay: float
    state_kinds: tuple[str, ...]
    initial: Mapping[str, float]

    def make_state(
        self, name: str, shape: Sequence[int], elements: int, dtype: torch.dtype, device: torch.device,
        allocate: Allocator,
    ) -> State:  # fmt: skip
        state = {kind: allocate(name, kind, elements, dtype, device) for kind in self.state_kinds}
        for kind, value in self.initial.items():
            state[kind].fill_(value)
        return state

    def elements_together(self, shape: Sequence[int]) -> int:
        return 1

    def apply(self, source: Slot, target: Slot, grads: dict[str, torch.Tensor], change: StepUpdate) -> None:
        if target is not source:
            for name in source.keys() - grads.keys():
                for kind, tensor in source[name].items():
                    target[name][kind].copy_(tensor)
        kinds = ("param", *self.state_kinds)
        for portion in _portions(grads):
            old = [{kind: source[name][kind][part] for kind in kinds} for name, part in portion]
            new = [{kind: tensor.clone() for kind, tensor in state.items()} for state in old]
            for (name, part), state in zip(portion, new, strict=True):
                state["param"].grad = grads[name][part] / change.divisor
            decayed = [name not in change.no_decay for name, _ in portion]
            self._step(new, decayed, change.step, change.lr)
            for (name, part), before, after in zip(portion, old, new, strict=True):
                for kind in kinds:
                    target[name][kind][part] = torch.where(change.skip > 0, before[kind], after[kind])

    def _step(self, states: Sequence[State], decayed: Sequence[bool], step: int, lr: float) -> None:
        """Run the class on parameters and state, in place."""
        groups = []
        for decay in (True, False):
            params = [state["param"] for state, wanted in zip(states, decayed, strict=True) if wanted is decay]
            if params:
                amount = {"weight_decay": self.weight_decay if decay else 0.0}
                groups.append({"params": params} | (amount if "weight_decay" in OPTIMIZERS[self.name].keys else {}))
        optimizer = _class_of(self.name)(groups, lr=lr, foreach=False, **self.arguments)
        scalars = self._scalars(step, lr)
        for state in states:
            kept: dict[str, torch.Tensor] = {kind: state[kind] for kind in self.state_kinds}
            if self.name == "sgd" and step == 1:
                kept.pop("momentum_buffer", None)  # the first gradient is not dampened
            optimizer.state[state["param"]] = kept | {name: value.clone() for name, value in scalars.items()}
        optimizer.step()
        for state in states:
            for kind in self.state_kinds:
                state[kind] = optimizer.state[state["param"]][kind]

    def _scalars(self, step: int, lr: float) -> dict[str, torch.Tensor]:
        """The single numbers that the class keeps after the previous step, on the host."""
        found: dict[str, float] = {} if self.name == "sgd" else {"step": step - 1}
        if self.name == "nadam":
            betas, decay = self.arguments["betas"], self.arguments.get("momentum_decay", 4e-3)
            assert isinstance(betas, tuple)
            assert isinstance(decay, float | int)
            found["mu_product"] = _mu_product(step - 1, betas[0], decay)
        if self.name == "asgd":
            # torch's class uses the previous step's rate; with a changing rate ours is one step ahead.
            lambd, alpha, t0 = (
                float(self.arguments.get(key, default))  # type: ignore[arg-type]
                for key, default in (("lambd", 1e-4), ("alpha", 0.75), ("t0", 1e6))
            )
            found["eta"] = lr / (1 + lambd * lr * (step - 1)) ** alpha
            found["mu"] = 1 / max(1.0, step - 1 - t0)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


def make_torch_rule(
    name: str, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
    options: Mapping[str, bool | int | float],
) -> TorchRule:  # fmt: skip
    """Create the update rule of a torch.optim class, by its `name` in `OPTIMIZERS`.

    Raises ConfigError where its class refuses a value, or keeps an unknown number.
    """
    arguments: dict[str, object] = dict(options)
    if BETAS[0] in OPTIMIZERS[name].keys:
        arguments |= {"betas": betas, "eps": eps}
    try:
        kinds = _kinds(name, lr, arguments)
    except ValueError as error:
        raise ConfigError(f"optim.name {name} refuses its options ({error}); correct optim.options") from None
    initial = {"step_size": lr, "sum": float(options.get("initial_accumulator_value", 0.0))}
    return TorchRule(name, arguments, weight_decay, kinds, {k: v for k, v in initial.items() if k in kinds})


def _kinds(name: str, lr: float, arguments: Mapping[str, object]) -> tuple[str, ...]:
    """The kinds of state that the class keeps in the parameter's shape, found by a step of three elements."""
    sample = torch.zeros(3)
    sample.grad = torch.ones(3)
    optimizer = _class_of(name)([sample], lr=lr, foreach=False, **arguments)
    optimizer.step()
    shaped = {key for key, value in optimizer.state[sample].items() if value.shape == sample.shape}
    unknown = optimizer.state[sample].keys() - shaped - SCALARS
    if unknown:
        raise ConfigError(
            f"optim.name {name} keeps {', '.join(sorted(unknown))} in this version of torch, which no checkpoint would "
            f"hold; choose one of {', '.join(rule for rule in OPTIMIZERS if rule != name)}"
        )
    return tuple(sorted(shaped))


def _class_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    torch_class = OPTIMIZERS[name].torch_class
    assert torch_class is not None, name
    found: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, torch_class)
    return found


@functools.lru_cache(maxsize=4)
def _mu_product(steps: int, beta1: float, decay: float) -> float:
    """NAdam's product of the momentum of steps 1 to `steps` (Dozat 2016)."""
    counts = torch.arange(1, steps + 1, dtype=torch.float64)
    return float((beta1 * (1 - 0.5 * 0.96 ** (counts * decay))).prod())


def _portions(grads: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[str, slice]]]:
    """Split the shards into lists of slices of at most CHUNK_ELEMENTS elements each."""
    batch: list[tuple[str, slice]] = []
    room = CHUNK_ELEMENTS
    for name, grad in grads.items():
        start = 0
        while start < grad.numel():
            stop = min(start + room, grad.numel())
            batch.append((name, slice(start, stop)))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], CHUNK_ELEMENTS
    if batch:
        yield batch
