"""Who owns which element: every element once, whatever the shapes, the units and the weights are."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import ConfigError
from phalanx.layout.buckets import GRANULE, Bucket, BucketPart, ParameterSpec, check_whole_rows, make_buckets

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(1, 40), st.integers(1, 300)),
    st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 70)),
)


@st.composite
def parameters(draw: st.DrawFn, rows: bool = False) -> list[ParameterSpec]:
    found = []
    for number, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=12))):
        unit, dtype = draw(st.sampled_from(["", "a", "b"])), draw(st.sampled_from(["bf16", "fp32"]))
        trained, whole = draw(st.booleans()), rows and len(shape) > 1 and draw(st.booleans())
        found.append(ParameterSpec(f"p{number}", shape, unit, dtype, trained, shape[-1] if whole else 1))
    return found


EVEN = st.integers(1, 7).map(lambda ranks: [2.5] * ranks)
UNEVEN = st.lists(st.one_of(st.just(0.0), st.integers(1, 9), st.floats(1e-3, 1e3)), min_size=1, max_size=7).filter(any)


PARTS = st.tuples(st.integers(1, 5), st.sampled_from([1, 100, 3000]))  # how many, of how many elements at least


def check_bucket(bucket: Bucket, ranks: int) -> None:
    """The parts follow one another, the ranges of a part, too, and the fragments cover every parameter once."""
    end = 0
    for part in bucket.parts:
        assert len(part.cuts) == ranks + 1
        assert part.cuts[0] == 0
        assert list(part.cuts) == sorted(part.cuts)
        assert not part.elements or part.start == end
        end = max(end, part.stop)
    assert (
        bucket.elements
        == end
        >= bucket.parameter_elements
        == sum(member.parameter.elements for member in bucket.members)
    )
    # The members lie end to end.
    assert [member.offset for member in bucket.members] == [0, *(member.end for member in bucket.members)][:-1]
    covered: dict[str, list[tuple[int, int]]] = {member.parameter.name: [] for member in bucket.members}
    places = {member.parameter.name: member.offset for member in bucket.members}
    for rank in range(ranks):
        ranges = [part.range(rank) for part in bucket.parts]
        assert bucket.count_elements(rank) == sum(stop - start for start, stop in ranges)
        keys = [fragment.key for fragment in bucket.fragments(rank)]
        assert len(set(keys)) == len(keys)
        for fragment in bucket.fragments(rank):
            name = fragment.parameter.name
            at = places[name]
            assert any(start <= at + fragment.start < at + fragment.stop <= stop for start, stop in ranges)
            covered[name].append((fragment.start, fragment.stop))
    for member in bucket.members:
        edges = sorted(covered[member.parameter.name])
        assert all(first < last for first, last in edges)
        assert [first for first, _ in edges] == [0, *(last for _, last in edges[:-1])]
        assert edges[-1][1] == member.parameter.elements


PARTS = st.tuples(st.integers(1, 5), st.sampled_from([1, 100, 1000]))


@settings(deadline=None)
@given(parameters(), st.one_of(EVEN, UNEVEN), PARTS)
def test_every_element_has_one_owner(given_: list[ParameterSpec], weights: list[float], cut: tuple[int, int]) -> None:
    buckets = make_buckets(given_, weights, *cut)
    laid = [member.parameter for bucket in buckets for member in bucket.members]
    assert sorted(p.name for p in laid) == sorted(p.name for p in given_ if p.elements)
    kinds = [(bucket.unit, bucket.dtype, bucket.trained) for bucket in buckets]
    assert len(set(kinds)) == len(kinds)
    assert len({len(bucket.parts) for bucket in buckets}) <= 1
    assert not buckets or any(bucket.parts[-1].elements for bucket in buckets), "a part that nobody needs"
    for bucket in buckets:
        check_bucket(bucket, len(weights))
        for p in (member.parameter for member in bucket.members):
            assert (p.unit, p.dtype, p.trained) == (bucket.unit, bucket.dtype, bucket.trained)
        assert len(bucket.parts) <= cut[0]
        assert all(each % GRANULE == 0 for part in bucket.parts for each in (part.start, *part.cuts))
        even = len(set(weights)) == 1
        assert bucket.elements - bucket.parameter_elements < GRANULE * (len(weights) if even else 1)
        for part in bucket.parts:
            lengths = [stop - start for start, stop in itertools.pairwise(part.cuts)]
            if even:
                assert len(set(lengths)) == 1
            else:
                assert not any(length for length, weight in zip(lengths, weights, strict=True) if not weight)
        longest = max(part.elements for part in bucket.parts)
        step = GRANULE * len(weights)
        assert longest <= step * math.ceil(max(math.ceil(bucket.parameter_elements / cut[0]), cut[1]) / step)
        assert all(part.elements in (0, longest) or part.stop == bucket.elements for part in bucket.parts)


@settings(deadline=None)
@given(parameters(), UNEVEN, PARTS)
def test_over_all_buckets_each_rank_owns_its_part(
    given_: list[ParameterSpec], weights: list[float], cut: tuple[int, int]
) -> None:
    buckets = make_buckets(given_, weights, *cut)
    if len(set(weights)) == 1:
        return
    total = sum(bucket.elements for bucket in buckets)
    for rank, weight in enumerate(weights):
        assert abs(sum(bucket.count_elements(rank) for bucket in buckets) - total * weight / sum(weights)) < 2 * GRANULE


@settings(deadline=None)
@given(parameters(rows=True), st.one_of(EVEN, UNEVEN), PARTS)
def test_no_range_cuts_a_row_that_must_stay_whole(
    given_: list[ParameterSpec], weights: list[float], cut: tuple[int, int]
) -> None:
    for bucket in make_buckets(given_, weights, *cut):
        check_bucket(bucket, len(weights))
        edges = {edge for part in bucket.parts for rank in range(len(weights)) for edge in part.range(rank)}
        for member, edge in itertools.product(bucket.members, edges):
            if member.parameter.together > 1 and member.offset < edge < member.end:
                assert (edge - member.offset) % member.parameter.together == 0
        if len(set(weights)) > 1:
            assert not any(bucket.count_elements(rank) for rank, weight in enumerate(weights) if not weight)


def test_a_cut_within_a_row_moves_to_the_nearest_end_of_one() -> None:
    # 1064 elements, halved at 576, which is 5.12 rows behind where the rows begin at 64.
    first, rows = (
        ParameterSpec("a", (64,), "", "fp32", True),
        ParameterSpec("b", (10, 100), "", "fp32", True, 100),
    )
    [bucket] = make_buckets([first, rows], [1.0, 1.0])
    assert [part.cuts[1] for part in bucket.parts] == [64 + 5 * 100]


def test_a_link_carries_all_but_the_smallest_range() -> None:
    """By hand: 64 and 128 elements; 64, none, 64."""
    two, three = BucketPart(0, (0, 64, 192)), BucketPart(192, (0, 64, 64, 128))
    assert (two.link_elements, three.link_elements) == (128, 128)
    assert Bucket("", "fp32", True, (), (two, three)).link_elements == 256


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -0.5], [1.0, math.nan], [1.0, math.inf]])
def test_weights_that_make_no_shares_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="give each rank a number that is not negative"):
        make_buckets([ParameterSpec("p", (3,), "", "fp32")], weights)


def test_gaps_are_where_something_is_padded() -> None:
    (padded,) = make_buckets([ParameterSpec("a", (GRANULE + 1,), "", "fp32", True)], [1.0])
    assert padded.gaps == (slice(GRANULE + 1, padded.elements),)
    (full,) = make_buckets([ParameterSpec("a", (GRANULE,), "", "fp32", True)], [1.0])
    assert full.gaps == ()


def test_rows_that_stay_whole_are_rounded_whole() -> None:
    check_whole_rows([ParameterSpec("a", (3, GRANULE), "", "fp32", True, GRANULE)])
    check_whole_rows([ParameterSpec("a", (GRANULE, 3), "", "fp32", True)])
    with pytest.raises(ConfigError, match="keeps rows of a whole, which have 3;"):
        check_whole_rows([ParameterSpec("a", (GRANULE, 3), "", "fp32", True, 3)])


def test_stacks_of_biases_are_vectors_and_other_names_say_nothing() -> None:
    shapes = {
        name: ParameterSpec(name, (5, 8), "a", "fp32").update_shape
        for name in ("layers.0.mlp.experts.down_bias", "layers.0.mlp.experts.down", "net.position_bias")
    }
    assert list(shapes.values()) == [(40,), (5, 8), (5, 8)]
