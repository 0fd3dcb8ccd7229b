"""How ranks are numbered along the axes of model parallelism."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ConfigError
from phalanx.layout.mesh_axes import MeshAxes, MeshCoordinates

degrees = st.integers(1, 5)


def test_slices_are_neighbours_and_stages_lie_apart() -> None:
    axes = MeshAxes(tensor=2, pipeline=2)
    assert axes.coordinates(5, 8) == MeshCoordinates(pipe=1, data=0, tensor=1)
    assert list(axes.groups("tensor", 8)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(axes.groups("data", 8)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(axes.groups("pipe", 8)) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(axes.groups("model", 8)) == [(0, 1, 4, 5), (2, 3, 6, 7)]


@given(degrees, degrees, degrees)
def test_every_rank_has_one_place_and_is_in_one_group_of_each_axis(tensor: int, pipeline: int, data: int) -> None:
    axes, world = MeshAxes(tensor, pipeline), tensor * pipeline * data
    places = [axes.coordinates(rank, world) for rank in range(world)]
    assert [axes.rank_at(place, world) for place in places] == list(range(world))
    sizes = {"tensor": tensor, "pipe": pipeline, "data": data, "model": tensor * pipeline}
    for axis, size in sizes.items():
        groups = list(axes.groups(axis, world))
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {size}


def test_ranks_that_make_no_whole_copies_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"6 ranks cannot hold copies of a model on 4 ranks each \(parallel.tensor=2"):
        MeshAxes(tensor=2, pipeline=2).data_parallel_size(6)
    with pytest.raises(ConfigError, match=r"1 rank cannot .* \(parallel.pipeline=3\); start a multiple of 3 ranks"):
        MeshAxes(pipeline=3).data_parallel_size(1)
