"""Dropout in models of transformers whose tensors are divided: what all ranks hold is dropped alike on all of them, and
what each holds for itself, the probabilities of its heads, by draws of its own.

Before each pass the ranks take one seed, so that their generators go on together; around attention each takes a seed of
its own, drawn from there, and then goes on where all are. Recomputed layers draw what they drew: PyTorch's checkpoints
restore the generator, which is all that this depends on.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm.collectives import device_for_group
from phalanx.parallel.tensor_collectives import TensorParallelPeers

_SEEDS = 2**62  # how many there are


def sync_dropout(model: nn.Module, attention: list[nn.Module], peers: TensorParallelPeers) -> None:
    """Have a divided model's dropout agree over its ranks, while it trains; `attention`: its modules with heads."""
    model.register_forward_pre_hook(_SharedSeed(peers))
    for module in attention:
        own = _LocalRNG(peers.rank)
        module.register_forward_pre_hook(own.begin, with_kwargs=True)
        module.register_forward_hook(own.end, always_call=True)


class _SharedSeed:
    """Seeds the generators of all ranks alike, by a number that the first draws from its own."""

    def __init__(self, peers: TensorParallelPeers) -> None:
        self._peers = peers

    def __call__(self, model: nn.Module, _: Any) -> None:
        if not model.training:
            return
        axis = self._peers.axis
        seed = torch.randint(_SEEDS, (1,), device="cpu").to(device_for_group(axis.group, torch.device("cpu")))
        dist.broadcast(seed, axis.ranks[0], group=axis.group)
        torch.manual_seed(int(seed))


class _LocalRNG:
    """Around one module: draws of this rank's own."""

    def __init__(self, rank: int) -> None:
        self._rank, self._aside = rank, contextlib.ExitStack()

    def begin(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not module.training:
            return
        seed = int(torch.randint(_SEEDS, (), device="cpu"))  # the same on all ranks
        given = next(each for each in (*inputs, *named.values()) if isinstance(each, Tensor))
        if given.device.type == "cpu":
            self._aside.enter_context(torch.random.fork_rng(devices=[]))
        else:
            self._aside.enter_context(torch.random.fork_rng([given.device], device_type=given.device.type))
        torch.manual_seed((seed + self._rank) % _SEEDS)

    def end(self, *_: Any) -> None:
        self._aside.close()
