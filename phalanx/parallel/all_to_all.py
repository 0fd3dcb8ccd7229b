"""All-to-all of rows as a function of autograd: the gradient takes the way back."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.comm import collectives
from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Axis


class Exchanger(Protocol):
    """A rank's place among those that it exchanges with."""

    traffic: Traffic

    @property
    def axis(self) -> Axis: ...


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], ranks: Exchanger) -> Tensor:
        ctx.way_back = received, sent, ranks
        return _exchange(x, sent, received, ranks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], *ctx.way_back), None, None, None


def _exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], ranks: Exchanger) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    collectives.all_to_all(out, x.contiguous(), received, sent, ranks.axis.group, ranks.traffic).wait()
    return out


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], ranks: Exchanger) -> Tensor:
    """Send `sent[r]` rows of `x` (sum(sent), ...) to rank r, in order -> (sum(received), ...), `received[r]` of rank r.

    All ranks take part, also those that have no rows, in this pass and in the backward pass.
    """
    out: Tensor = _AllToAll.apply(x, sent, received, ranks)
    return out
