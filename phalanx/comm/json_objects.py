"""Small JSON objects between ranks. JSON and not pickle: whoever could write to the network must not run code here."""

import json
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.collectives import Traffic, all_gather, all_reduce


class JsonGroup:
    """Exchanges JSON-able objects over a process group for host tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)

    def gather_objects(self, obj: Any) -> list[Any] | None:
        """The objects of all ranks in order of rank on rank 0; None elsewhere."""
        everyones = self.all_gather_objects(obj)
        return everyones if self._rank == 0 else None

    def broadcast_object(self, obj: Any) -> Any:
        """Rank 0's object, on every rank."""
        return self.all_gather_objects(obj if self._rank == 0 else None)[0]

    def all_gather_objects(self, obj: Any) -> list[Any]:
        """The objects of all ranks in order of rank, on every rank."""
        mine = torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self._world, dtype=torch.int64)
        sizes[self._rank] = mine.numel()
        all_reduce(sizes, self._group, Traffic()).wait()
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        gathered = torch.empty(self._world * longest, dtype=torch.uint8)
        all_gather(gathered, padded, self._group, Traffic()).wait()
        rows = gathered.view(self._world, longest).numpy()
        return [json.loads(rows[rank, : int(sizes[rank])].tobytes()) for rank in range(self._world)]
