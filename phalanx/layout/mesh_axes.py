"""How ranks are numbered along the axes of model parallelism. Pure.

`rank = (stage * data + copy) * tensor + slice`: the ranks that hold slices of the same layers are neighbours, since
they exchange most and so belong on one node; stages lie farthest apart, since they exchange least. As in Narayanan et
al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.core.errors import ConfigError


@dataclass(frozen=True)
class MeshCoordinates:
    """Where a rank stands: its stage of the pipeline, its copy of the model, its slice of the layers."""

    pipe: int
    data: int
    tensor: int


@dataclass(frozen=True)
class MeshAxes:
    """Degrees of model parallelism: `tensor` ranks share each layer, `pipeline` ranks follow one another."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor * self.pipeline

    def data_parallel_size(self, world: int) -> int:
        """Copies of the model on `world` ranks. Raises ConfigError where they do not come out even."""
        if world % self.model_parallel_size:
            what = " x ".join(
                f"parallel.{name}={degree}"
                for name, degree in (("tensor", self.tensor), ("pipeline", self.pipeline))
                if degree > 1
            )
            raise ConfigError(
                f"{world} rank{'s' * (world != 1)} cannot hold copies of a model on {self.model_parallel_size} ranks "
                f"each ({what}); start a multiple of {self.model_parallel_size} ranks, or choose degrees whose product "
                f"divides {world}"
            )
        return world // self.model_parallel_size

    def coordinates(self, rank: int, world: int) -> MeshCoordinates:
        """Where `rank` of `world` stands."""
        beyond, tensor = divmod(rank, self.tensor)
        pipe, data = divmod(beyond, self.data_parallel_size(world))
        return MeshCoordinates(pipe, data, tensor)

    def state_parts(self, world: int, shard_degree: int | None) -> list[MeshCoordinates]:
        """Of each rank which part of the state it holds, where a copy of it is sharded over so many copies of the model
        (None: over all): ranks with equal ones hold the same."""
        places = [self.coordinates(rank, world) for rank in range(world)]
        degree = shard_degree or self.data_parallel_size(world)
        return [MeshCoordinates(each.pipe, each.data % degree, each.tensor) for each in places]

    def rank_at(self, place: MeshCoordinates, world: int) -> int:
        """Who stands there."""
        return (place.pipe * self.data_parallel_size(world) + place.data) * self.tensor + place.tensor

    def groups(self, axis: str, world: int) -> Iterator[tuple[int, ...]]:
        """All groups of ranks that differ along one axis alone ("data", "tensor" or "pipe"), or in both of the model's
        ("model"), each in order of rank: every rank is in one of them."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(world):
            place = self.coordinates(rank, world)
            alike = {
                "data": (place.pipe, place.tensor),
                "tensor": (place.pipe, place.data),
                "pipe": (place.data, place.tensor),
                "model": (place.data,),
            }[axis]
            members.setdefault(alike, []).append(rank)
        yield from (tuple(ranks) for ranks in members.values())


ALONE = MeshAxes()  # every rank holds a whole copy
