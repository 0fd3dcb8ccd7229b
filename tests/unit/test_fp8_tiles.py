"""FP8 tiles of ranges of a flattened weight: as of the whole weight, wherever the ranges are cut."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.comm.fp8_tiles import FP8, TileGrid, power_of_two_scale
from phalanx.parallel.fp8 import round_tiles

SHAPES = [(128, 128), (200, 130), (3, 70, 260), (1, 1), (5, 300), (300, 5), (2, 129, 127)]


@settings(max_examples=60)
@given(st.sampled_from(SHAPES), st.lists(st.floats(0, 1), max_size=4), st.integers(0, 99))
def test_any_ranges_are_rounded_as_the_whole(shape: tuple[int, ...], places: list[float], seed: int) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight.flatten()[:: max(1, seed)] *= 40
    flat, grid = weight.flatten(), TileGrid(shape)
    cuts = [0, *sorted(int(place * flat.numel()) for place in places), flat.numel()]
    maxima = torch.zeros(grid.tiles)
    for start, stop in itertools.pairwise(cuts):
        grid.largest(flat[start:stop], start, maxima)
    scales, found = power_of_two_scale(maxima), torch.empty_like(flat)
    for start, stop in itertools.pairwise(cuts):
        coded = torch.empty(stop - start, dtype=FP8)
        grid.encode(flat[start:stop], start, scales, coded)
        grid.decode(coded, start, scales, found[start:stop])
    assert torch.equal(found.view(shape), round_tiles(weight))


def test_what_is_not_finite_makes_its_tile_nan() -> None:
    weight, grid = torch.ones(130, 130), TileGrid((130, 130))
    weight[0, 129] = torch.inf
    maxima, found = torch.zeros(grid.tiles), torch.empty(130 * 130)
    grid.largest(weight.flatten(), 0, maxima)
    coded = torch.empty(130 * 130, dtype=FP8)
    grid.encode(weight.flatten(), 0, power_of_two_scale(maxima), coded)
    grid.decode(coded, 0, power_of_two_scale(maxima), found)
    assert found.view(130, 130)[:128, 128:].isnan().all() and found.view(130, 130)[:, :128].isfinite().all()
