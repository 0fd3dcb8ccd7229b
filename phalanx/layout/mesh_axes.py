"""The mesh: numbering of ranks along the axes of data, context, tensor and pipeline parallelism. Pure.

`rank = (stage * data + copy) * tensor + slice`: the ranks that hold slices of the same layers are neighbours, since
they exchange most and so belong on one node; stages lie farthest apart, since they exchange least. As in Narayanan et
al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021.

Context parallelism is a part of the data axis: `context` neighbouring copies form a *row group*, which takes rows
together. Each of its ranks holds a whole copy and computes some positions of each row. Gradients are sums, so whatever
reduces or shards them treats these ranks as it does any others of the data axis.

Expert parallelism is another part of it: all ranks of a stage of `expert` neighbouring copies, those of tensor
parallelism too, divide the experts of each layer among them, and exchange tokens. Ranks with the same place in such a
group hold the same experts (`expert_copies`). With `expert` 1 the tensor axis is such a group.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.core.errors import ConfigError

EXPERT_COPIES = "expert_copies"  # the axis of ranks with the same experts


@dataclass(frozen=True)
class MeshCoordinates:
    """The coordinates of a rank: its pipeline stage, its copy of the model, its slice of the layers."""

    pipe: int
    data: int
    tensor: int


@dataclass(frozen=True)
class MeshAxes:
    """Degrees of parallelism: `tensor` ranks share each layer, `pipeline` ranks follow one another, the ranks of
    `context` copies share each row, and those of `expert` copies the experts of each layer."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor * self.pipeline

    @property
    def group_size(self) -> int:
        """Ranks that belong together on all axes: a run has a multiple of so many."""
        return self.model_parallel_size * self.context * self.expert

    @property
    def parts_of_data(self) -> tuple[str, ...]:
        """Axes of `groups` that are of parts of the data axis, where they are of several copies."""
        return ("context",) * (self.context > 1) + ("expert", EXPERT_COPIES) * (self.expert > 1)

    @property
    def expert_ranks(self) -> int:
        """Ranks that divide the experts of a layer among them."""
        return self.expert * self.tensor

    def expert_place(self, place: MeshCoordinates) -> int:
        """Which of them a rank is."""
        return place.data % self.expert * self.tensor + place.tensor

    def copies_with_experts_of(self, copy: int, copies: int) -> range:
        """Of so many copies of the model those that hold the same experts as number `copy`."""
        return range(copy % self.expert, copies, self.expert)

    def data_parallel_size(self, world: int) -> int:
        """Copies of the model on `world` ranks. Raises ConfigError where they do not come out even."""
        together = self.group_size
        if world % together:
            degrees = {
                axis: degree
                for axis in ("tensor", "pipeline", "context", "expert")
                if (degree := getattr(self, axis)) > 1
            }
            what = " x ".join(f"parallel.{axis}={degree}" for axis, degree in degrees.items())
            if self.context * self.expert > 1:
                share = "take rows together" if self.context > 1 else "hold all experts together"
                raise ConfigError(
                    f"{world} rank{'s' * (world != 1)} cannot form groups of {together} ranks that {share} "
                    f"({what}); start a multiple of {together} ranks, or choose degrees whose product divides {world}"
                )
            raise ConfigError(
                f"{world} rank{'s' * (world != 1)} cannot hold copies of a model on {self.model_parallel_size} ranks "
                f"each ({what}); start a multiple of {self.model_parallel_size} ranks, or choose degrees whose product "
                f"divides {world}"
            )
        return world // self.model_parallel_size

    def count_row_groups(self, world: int) -> int:
        """Groups of `world` ranks that take different rows: copies of the model, or `context` of them together."""
        return self.data_parallel_size(world) // self.context

    def row_group(self, rank: int, world: int) -> int:
        """Which of them `rank` belongs to."""
        return self.coordinates(rank, world).data // self.context

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
        """All groups of ranks that differ along one axis alone ("data", "context", "expert_copies", "tensor" or
        "pipe"), in both of the model's ("model"), or along the tensor axis and within a part of the data axis
        ("expert"), each in order of rank: every rank is in one of them."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(world):
            place = self.coordinates(rank, world)
            alike = {
                "data": (place.pipe, place.tensor),
                "context": (place.pipe, place.data // self.context, place.tensor),
                "expert": (place.pipe, place.data // self.expert),
                EXPERT_COPIES: (place.pipe, place.data % self.expert, place.tensor),
                "tensor": (place.pipe, place.data),
                "pipe": (place.data, place.tensor),
                "model": (place.data,),
            }[axis]
            members.setdefault(alike, []).append(rank)
        yield from (tuple(ranks) for ranks in members.values())


ALONE = MeshAxes()  # every rank holds a whole copy
