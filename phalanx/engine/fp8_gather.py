"""FP8 gathers of weights (ZeRO 3): a byte an element, in tiles whose scales all ranks know before.

The weights that FP8 products read are quantized by tiles of 128 x 128 anyway (parallel/fp8.py), and quantizing twice
changes nothing, so a gather in FP8 gives the same products, bit for bit, as a gather in the compute type. Scales change
once a step: ranks agree on them by one small all-reduce of maxima before its first gather.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from phalanx.comm import collectives
from phalanx.comm.collectives import Traffic
from phalanx.comm.fp8_tiles import FP8, TileGrid, power_of_two_scale
from phalanx.engine.released_bucket import ReleasedBucket
from phalanx.layout.buckets import Fragment
from phalanx.optim.update import Slot

Shards = Iterable[tuple[Fragment, torch.Tensor]]


class Fp8Bucket(ReleasedBucket):
    """A bucket of weights that is gathered in FP8, unless `exact` is set: for reads of the parameters themselves."""

    exact = False
    _scales: Mapping[str, torch.Tensor] = {}  # of each parameter's tiles
    _coded: torch.Tensor | None = None  # while it is gathered

    def local_maxima(self, slot: Slot) -> torch.Tensor:
        """The largest magnitude of each tile within this rank's shards, as they would be sent; members in order."""
        count = sum(grid.tiles for grid in self._grids.values())
        maxima = self.values.new_zeros(count, dtype=self._precision.master)
        tables = self._by_name(maxima)
        own = ((each, slot[each.key]["param"]) for each in self.fragments)
        for fragment, values in own if self.bucket.trained else self._frozen_fragments():
            name = fragment.parameter.name
            self._grids[name].largest(values.to(self._precision.transport), fragment.start, tables[name])
        return maxima

    def set_maxima(self, maxima: torch.Tensor) -> None:
        """Set the scales by the largest magnitude of each whole tile."""
        self._scales = self._by_name(power_of_two_scale(maxima))

    @functools.cached_property
    def _grids(self) -> dict[str, TileGrid]:
        return {member.parameter.name: TileGrid(member.parameter.shape) for member in self.bucket.members}

    def _by_name(self, of_tiles: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = of_tiles.split([grid.tiles for grid in self._grids.values()])
        return dict(zip(self._grids, parts, strict=True))

    def _stage(self, shards: Shards) -> None:
        if self.exact:
            super()._stage(shards)
            return
        self._coded = self.values.new_empty(self.bucket.elements, dtype=torch.uint8)  # gaps are never decoded
        for fragment, values in shards:
            name = fragment.parameter.name
            into = self._coded[fragment.offset : fragment.offset + values.numel()].view(FP8)
            own = values.to(self._precision.transport)
            self._grids[name].encode(own, fragment.start, self._scales[name], into)

    def prepare_gather(self, number: int) -> tuple[torch.Tensor, Callable[[], None]]:
        coded = self._coded
        if coded is None:
            return super().prepare_gather(number)
        part = self.bucket.parts[number]

        def arrived() -> None:
            for member, whole in self.members():
                start, stop = max(part.start, member.offset), min(part.stop, member.end)
                if start < stop:
                    name, first, last = member.parameter.name, start - member.offset, stop - member.offset
                    received = coded[start:stop].view(FP8)
                    self._grids[name].decode(received, first, self._scales[name], whole[first:last])
            if part is self.bucket.parts[-1]:
                self._coded = None

        return coded[part.start : part.stop], arrived


def agree_on_scales(
    buckets: Sequence[Fp8Bucket], slot: Slot, groups: Mapping[str, dist.ProcessGroup], traffic: Traffic
) -> None:
    """Set the scales of all `buckets` by the shards of all ranks that share them, the `groups` by axis. Collective."""
    for axis, group in groups.items():
        mine = [held for held in buckets if held.bucket.axis == axis]
        if not mine:
            continue
        each = [held.local_maxima(slot) for held in mine]
        maxima = torch.cat(each)
        collectives.all_reduce(maxima, group, traffic, dist.ReduceOp.MAX).wait()
        for held, part in zip(mine, maxima.split([len(one) for one in each]), strict=True):
            held.set_maxima(part)
