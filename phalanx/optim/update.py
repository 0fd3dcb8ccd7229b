"""Element-wise update rules, from slot to slot.

A slot holds the state of every shard, keyed by parameter name. An update reads one slot and writes another, or the same
one: with two slots the old state survives until the new one is complete. Both ways give the same bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from phalanx.optim.engine import Allocator

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("param", *MOMENTS)

Slot = dict[str, dict[str, torch.Tensor]]  # parameter name -> kind -> flat tensor


def zeros(name: str, kind: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The plain allocator: fresh zero-filled memory."""
    return torch.zeros(elements, dtype=dtype, device=device)


def make_slot(
    sizes: Iterable[tuple[str, int]],
    kinds: Iterable[str],
    dtype: torch.dtype,
    device: torch.device,
    allocate: Allocator,
) -> Slot:
    """Allocate the given kinds of state for shards of (name, elements)."""
    kinds = tuple(kinds)
    return {name: {kind: allocate(name, kind, elements, dtype, device) for kind in kinds} for name, elements in sizes}


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), by torch's fused kernel on every device."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def apply(
        self,
        source: Slot,
        target: Slot,
        grads: dict[str, torch.Tensor],
        *,
        step: int,
        lr: float,
        no_decay: frozenset[str],
        divisor: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """Write the state after `step` (the first is 1) into `target`.

        `grads` are flat gradients of the shards, divided by `divisor` before use (they may be overwritten); where
        `skip` is 1.0 the state is carried over as it is. Both are one-element tensors on the device, so that nothing
        waits for the host.
        """
        if target is not source:
            for name, kinds in source.items():  # those without a gradient too
                for kind in KINDS:
                    target[name][kind].copy_(kinds[kind])
        if any(grad.dtype == torch.float64 for grad in grads.values()):
            # The kernel reads its divisor in float32: too coarse for a proof in float64.
            torch._foreach_div_(list(grads.values()), divisor)
            divisor = torch.ones_like(divisor, dtype=torch.float32)
        for decay in (True, False):
            names = [name for name in grads if (name not in no_decay) is decay and grads[name].numel()]
            if not names:
                continue
            # One step count a tensor: the kernel takes a list and reads an entry for each.
            count = torch.full((), float(step), dtype=torch.float32, device=grads[names[0]].device)
            torch._fused_adamw_(
                [target[name]["param"] for name in names],
                [grads[name] for name in names],
                [target[name]["exp_avg"] for name in names],
                [target[name]["exp_avg_sq"] for name in names],
                [],
                [count] * len(names),
                lr=lr,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=self.weight_decay if decay else 0.0,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor.float(),
                found_inf=skip,
            )
