"""Expert parallelism: the ranks of a group divide the experts of each layer among them, and exchange tokens.

A rank routes its own tokens, sends each chosen expert's rows to the rank that holds it, and gets back what the experts
give. Numbers of experts may differ, in proportion to the ranks' speeds, and be 0. Nothing is dropped: the exchange has
the sizes that the choices of this micro-batch have, which the ranks tell each other first. A gradient is a sum over
tokens, wherever they came from, so those of experts have no factor for the number of ranks. Source: Lepikhin et al.,
"GShard", 2020 (the exchange); unequal divisions are ours.

Tensor-parallel ranks have the same tokens. So each routes some positions of every row, and only those: a token is sent
to its experts, and counted in loads and in the loss that balances them, by one rank. They all belong to the group that
divides the experts, which have one gradient then as without; that of the router is summed over them (PartialRouter).
"""

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm import collectives
from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Axis
from phalanx.layout.tensor_shards import TensorShard, plan_expert_shards
from phalanx.models.grouped_mm import sort_rows, unsort_rows
from phalanx.models.moe import Experts
from phalanx.parallel.all_to_all import all_to_all
from phalanx.parallel.tensor_layers import TensorParallelContext, copy_shard


class ExpertParallel:
    """The ranks that divide experts with this one, held by its experts; number r of them holds `counts[r]` experts
    of each layer, in order. Rows travel as `transport` (None: as they are), since ranks may compute in different types.
    The reference to the axis is weak: a model may outlive its mesh, but must not keep the process group alive."""

    def __init__(
        self, axis: Axis, traffic: Traffic, counts: Sequence[int], transport: torch.dtype | None = None
    ) -> None:
        assert len(counts) == axis.size, (counts, axis.size)
        self.rank, self.size, self.counts, self.traffic = axis.rank, axis.size, tuple(counts), traffic
        self._transport = transport
        self._axis = weakref.ref(axis)

    @property
    def axis(self) -> Axis:
        """The axis; fails once its mesh is gone."""
        axis = self._axis()
        assert axis is not None, "a model is used whose mesh is gone"
        return axis

    def run(self, feed: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """What all experts give for `rows` (N, D), sorted by expert, of which each has `counts` (E,) int64 -> (N, D);
        `feed` does the same for the experts of this rank. Waits for the device, to know how much is exchanged."""
        sent_by_expert, mine = counts.split(list(self.counts)), self.counts[self.rank]
        received_by_expert = self._exchange_counts(counts)  # (ranks, mine)
        # Read together: the device is waited for once, not for each rank.
        sizes = torch.stack([each.sum() for each in (*sent_by_expert, *received_by_expert)]).tolist()
        sent, received = sizes[: self.size], sizes[self.size :]
        arrived = self._exchange(rows, sent, received)  # by sender, then by expert
        experts = torch.arange(mine, device=rows.device).repeat(self.size)
        of_rows = experts.repeat_interleave(received_by_expert.flatten(), output_size=sum(received))
        order = of_rows.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=rows.device))
        # Also with no experts or no rows: every rank's graph must have the two exchanges in it.
        given = feed(sort_rows(arrived, order, inverse, 1), received_by_expert.sum(0))
        return self._exchange(unsort_rows(given, order, inverse), received, sent)

    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """`all_to_all` in the type of `transport`, and so is the way back of the gradient."""
        return all_to_all(rows.to(self._transport or rows.dtype), sent, received, self).to(rows.dtype)

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """How many rows each rank sends to each expert of this one, (ranks, experts here), from `counts` (E,)."""
        mine = self.counts[self.rank]
        told = counts.new_empty(self.size * mine)
        received = [mine] * self.size
        collectives.all_to_all(told, counts, received, self.counts, self.axis.group, self.traffic).wait()
        return told.view(self.size, mine)


class TokenPositions:
    """The positions of every row that a tensor-parallel rank routes: an equal part, in order of rank, which is the one
    that it has anyway with sequence parallelism."""

    def __init__(self, cut: TensorParallelContext) -> None:
        self._cut = cut

    def enter(self, x: Tensor) -> Tensor:
        """Hidden states (B, S or its part, D) -> (B, own positions, D)."""
        return x if self._cut.sequence else self.select(self._cut.enter(x))

    def leave(self, fed: Tensor, x: Tensor) -> Tensor:
        """The way back: (B, own positions, D) -> the shape of `x`, which was entered."""
        if self._cut.sequence:
            return fed
        first = self._edges(x.shape[1])[0]
        return self._cut.leave(F.pad(fed, (0, 0, first, x.shape[1] - first - fed.shape[1])))

    def select(self, rows: Tensor) -> Tensor:
        """Of all positions (B, S, ...) the own ones."""
        return rows[:, slice(*self._edges(rows.shape[1]))]

    def _edges(self, length: int) -> tuple[int, int]:
        peers = self._cut.peers
        return length * peers.rank // peers.size, length * (peers.rank + 1) // peers.size

    def sum(self, counts: Tensor) -> Tensor:
        """The sum over the ranks, without a gradient."""
        return self._cut.peers.exchange(counts, "sum", "same")


def apply_expert_parallel(model: nn.Module, parallel: ExpertParallel) -> dict[str, TensorShard]:
    """Keep the experts of a model that this rank holds, and have the others' tokens exchanged; returns what it holds of
    each stack, by name."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    held = keep_experts(model, plan_expert_shards(shapes, parallel.counts, parallel.rank))
    for module in model.modules():
        if isinstance(module, Experts):
            module.exchange = parallel.run
    return held


def find_divided_experts(block: nn.Module) -> list[Experts]:
    """The experts of a block whose tokens are exchanged."""
    return [module for module in block.modules() if isinstance(module, Experts) and module.exchange is not None]


def keep_experts(
    model: nn.Module,
    held: dict[str, TensorShard],
    take: Callable[[Tensor, TensorShard], nn.Parameter] = copy_shard,
) -> dict[str, TensorShard]:
    """Replace stacks of experts by the parts `held`, which `take` makes of whole ones."""
    for name, shard in held.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, take(model.get_parameter(name), shard))
    return held
