"""Layout of a script's ranks: slices innermost, of tensors or of stacks of experts, then shards, then copies. Pure.

rank = (copy * shard + place of the shard) * slices + place of the slice
"""

from dataclasses import dataclass

Groups = list[list[int]]


@dataclass(frozen=True)
class RankLayout:
    """Layout of ranks: `tensor` ranks hold slices of the same tensors, or `expert` ranks experts of the same layers;
    `shard` of those with the same slices hold shards of the same state; the rest are copies. `context` neighbours with
    the same slices share rows.

    Each list of groups has every rank in exactly one of them, and is the same on all ranks.
    """

    world: int
    tensor: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        assert self.tensor == 1 or self.expert == 1, self
        assert self.slices >= 1 and self.shard >= 1 and self.world % (self.slices * self.shard) == 0, self

    @property
    def slices(self) -> int:
        return self.tensor * self.expert

    @property
    def copies(self) -> int:
        return self.world // (self.slices * self.shard)

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor

    def expert_rank(self, rank: int) -> int:
        return rank % self.expert

    def shard_rank(self, rank: int) -> int:
        return rank // self.slices % self.shard

    def copy(self, rank: int) -> int:
        """The copy of the model that the rank holds a part of, from 0."""
        return rank // (self.slices * self.shard)

    def tensor_groups(self) -> Groups:
        """Groups of ranks that hold slices of the same tensors."""
        return [list(range(first, first + self.tensor)) for first in range(0, self.world, self.tensor)]

    def expert_groups(self) -> Groups:
        """Groups of ranks that divide the experts of a layer, and exchange tokens."""
        return [list(range(first, first + self.expert)) for first in range(0, self.world, self.expert)]

    def data_groups(self) -> Groups:
        """Groups of ranks that hold the same slices, and see different data."""
        return [list(range(slice_, self.world, self.slices)) for slice_ in range(self.slices)]

    def dense_groups(self) -> Groups:
        """Groups of ranks that hold the same shard of what is not an expert."""
        ranks = range(self.world)
        return [[rank for rank in ranks if self.shard_rank(rank) == place] for place in range(self.shard)]

    def context_rank(self, rank: int) -> int:
        return rank // self.tensor % self.context

    def context_groups(self) -> Groups:
        """Groups of ranks that share rows."""
        size = self.context
        return [ranks[at : at + size] for ranks in self.data_groups() for at in range(0, len(ranks), size)]

    def shard_groups(self) -> Groups:
        """Groups of ranks that hold the same slices of one copy, each a shard."""
        return [ranks[at : at + self.shard] for ranks in self.data_groups() for at in range(0, len(ranks), self.shard)]

    def copy_groups(self) -> Groups:
        """Groups of ranks that hold the same shard of the same slices, each of another copy."""
        return [ranks[place :: self.shard] for ranks in self.data_groups() for place in range(self.shard)]

    def whole_groups(self) -> Groups:
        """Groups of all ranks of a copy."""
        size = self.slices * self.shard
        return [list(range(first, first + size)) for first in range(0, self.world, size)]
