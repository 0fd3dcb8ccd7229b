"""A bucket of ZeRO 3: whole parameters have memory only while a pass uses them."""

from collections.abc import Iterator

import torch

from phalanx.comm.comm_thread import CommThread
from phalanx.engine.bucket import AllocateWorkingMemory, GradientBufferPool, RankBucket
from phalanx.engine.interface import Precision
from phalanx.layout.buckets import FP8_GATHERED, Bucket, Fragment
from phalanx.optim.update import Shard


class ReleasedBucket(RankBucket):
    """A bucket whose whole parameters have memory only between `unshard` and `reshard`."""

    def __init__(
        self, bucket: Bucket, rank: int, device: torch.device, precision: Precision, comm_thread: CommThread,
        pool: GradientBufferPool | None, working_memory: AllocateWorkingMemory,
    ) -> None:  # fmt: skip
        super().__init__(bucket, rank, device, precision, comm_thread, pool)  # nothing of it is persistent
        self.gathered_dtype = torch.uint8 if bucket.dtype == FP8_GATHERED else precision.transport
        self._bytes = self.values.untyped_storage().nbytes()
        self._placeholder: torch.Tensor | None = None  # replaces parameters that are resharded
        own = () if bucket.trained else self.values.new_zeros(bucket.count_elements(rank), dtype=precision.transport)
        self._frozen_shard = self._by_part(own) if isinstance(own, torch.Tensor) else []

    def frozen_shards(self) -> Iterator[Shard]:
        for each, values in self._frozen_fragments():
            whole = each.parameter
            yield Shard(whole.name, each.start, each.stop, whole.shape, values, trainable=False)

    def _frozen_fragments(self) -> Iterator[tuple[Fragment, torch.Tensor]]:
        return ((each, self._of(self._frozen_shard, each)) for each in self.fragments)

    def reshard(self) -> None:
        """Free the memory of the whole parameters; a read of a resharded parameter, which is an error, returns NaN."""
        nothing = self.values.new_full((), torch.nan) if self._placeholder is None else self._placeholder
        self._placeholder = nothing
        for parameter in self._parameters:
            parameter.data = nothing.expand(parameter.shape)
        self.values.untyped_storage().resize_(0)

    def unshard(self) -> None:
        """Allocate that memory again, uninitialized but for a frozen bucket's own range."""
        self.values.untyped_storage().resize_(self._bytes)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view
        if self._frozen_shard:
            self._stage(self._frozen_fragments())

    @property
    def memory_ids(self) -> tuple[int, ...]:
        released = () if self._placeholder is None else (int(self._placeholder.untyped_storage()._cdata),)
        return (*super().memory_ids, *released)
