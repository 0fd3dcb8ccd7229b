"""What all ranks agree on once a step's gradients are summed: their norm, who has one, and how fast the links were."""

from collections.abc import Sequence, Set

import torch
import torch.distributed as dist

from phalanx.comm import collectives
from phalanx.comm.collectives import Traffic


class StepConsensus:
    """A sum over the ranks that is under way. Collective."""

    def __init__(
        self, squares: float, rates: Sequence[float], names: Sequence[str], local_names: Set[str],
        group: dist.ProcessGroup, traffic: Traffic,
    ) -> None:  # fmt: skip
        """`squares` of what this rank owns of the gradients, `rates` as `TransferSchedule.local_rates` gives them, and
        which of the parameters of these `names` have a gradient here (`local_names`)."""
        self._names, self._rates = names, len(rates)
        told = [squares, *rates, *(float(name in local_names) for name in names)]
        self._table = torch.tensor(told, dtype=torch.float64)
        self._pending = collectives.all_reduce(self._table, group, traffic)

    def finish(self) -> tuple[torch.Tensor, list[float], set[str]]:
        """(the sum of squares, everyone's rates, names of parameters that have a gradient on any rank)."""
        self._pending.wait()
        rates, counts = self._table[1:].split([self._rates, len(self._names)])
        used = {name for name, count in zip(self._names, counts.tolist(), strict=True) if count}
        return self._table[0], rates.tolist(), used
