"""A parallel layout of a training step on a cluster, as the search enumerates it and the cost model takes it."""

from dataclasses import dataclass
from typing import Literal

from phalanx.layout.balance import in_lockstep, split_evenly

EngineName = Literal["sharded", "fsdp", "ddp", "megatron"]
PipelineSchedule = Literal["1f1b", "gpipe", "zero_bubble"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class LayoutChoice:
    """`tensor` ranks share each layer, `pipeline` stages follow one another, and the rest of `devices` are copies, of
    which `context` neighbours share each row, and all tensor ranks of `expert` neighbours the experts of each layer.

    `stages` are layers of each stage and `shares` sequences of each row group in a step: of a copy, or of `context`
    copies together; () divides evenly. `micro_batch` is
    in sequences. `zero` and `shard_degree` (0: over all copies) say what of the state is kept by whom, `slots` how many
    times. `virtual` chunks of each stage are interleaved, and `stages` are then layers of each chunk, in the model's
    order; with `order` "zero_bubble" they are folded: a stage has the nth chunk from either end. `engine`: "sharded" is
    this project's own, which moves parameters and gradients in a planned order; the others are its peers: "fsdp"
    fetches one layer ahead, "ddp" hides all-reduces behind the last backward pass, "megatron" sends everything after
    it. `devices` are the first ones of the cluster; 0 takes all. `attention` is "plain" where scores are written to
    memory.
    """

    zero: int = 1
    shard_degree: int = 0
    tensor: int = 1
    sequence: bool = False  # tensor ranks also divide what lies between matrices, along the sequence
    pipeline: int = 1
    stages: tuple[int, ...] = ()
    virtual: int = 1
    order: PipelineSchedule = "1f1b"  # interleaved chunks run in that of 1f1b
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    shares: tuple[int, ...] = ()
    reduce: Literal["per_step", "per_micro_batch"] = "per_step"
    recompute: Recompute = "none"
    offload: bool = False  # blocks' inputs wait in the host's memory; with recompute "full"
    slots: int = 1
    engine: EngineName = "sharded"
    devices: int = 0
    attention: Literal["flash", "plain"] = "flash"
    state: tuple[float, ...] = ()  # how much of the state each rank owns of those that share a copy; () evenly

    @property
    def lockstep(self) -> bool:
        """Whether all copies run the same number of micro-batches, some empty, since each has collectives."""
        return self.engine == "fsdp" or in_lockstep(self.zero, self.reduce) or self.expert > 1

    @property
    def expert_ranks(self) -> int:
        """Devices that divide the experts of a layer."""
        return self.expert * self.tensor

    @property
    def row_devices(self) -> int:
        """Neighbouring devices of a stage that take rows together."""
        return self.tensor * self.context

    @property
    def group_devices(self) -> int:
        """Devices that take rows together, of all stages."""
        return self.row_devices * self.pipeline

    def layers_of(self, layers: int) -> tuple[int, ...]:
        """Layers of each stage: with interleaved chunks every `pipeline`th chunk, with folded ones the nth from
        either end."""
        if not self.stages:
            return tuple(split_evenly(layers, self.pipeline))
        if self.order == "zero_bubble":
            half = self.stages[: self.pipeline]
            return tuple(down + up for down, up in zip(half, reversed(self.stages), strict=False))
        return tuple(sum(self.stages[stage :: self.pipeline]) for stage in range(self.pipeline))

    def ends(self, stage: int) -> tuple[bool, bool]:
        """Whether a stage has the embedding, and whether it has the head."""
        return stage == 0, stage == (0 if self.order == "zero_bubble" else self.pipeline - 1)

    def micro_batches(self, share: int, most: int, fits: bool = True) -> int:
        """Micro-batches of a copy with `share` sequences of a step, if the largest share is `most`: all run equally
        many in lockstep, otherwise at most one per sequence. A copy on one device runs as few as possible if whole
        micro-batches `fits`, as a run measures."""
        together = max(1, -(-most // self.micro_batch))
        if self.lockstep:
            return together
        if self.tensor * self.pipeline > 1 or not fits:
            return max(1, min(share, together))
        return max(1, -(-share // self.micro_batch))
