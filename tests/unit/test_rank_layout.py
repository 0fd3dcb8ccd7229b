"""Who is where among the ranks of a script."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.api.fsdp.rank_layout import RankLayout


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_each_kind_of_group_has_every_rank_once_and_agrees_with_the_places(
    tensor: int, shard: int, copies: int
) -> None:
    ranks = RankLayout(tensor * shard * copies, tensor, shard)
    assert ranks.copies == copies
    everyone = list(range(ranks.world))
    for groups, size in (
        (ranks.tensor_groups(), tensor),
        (ranks.data_groups(), shard * copies),
        (ranks.shard_groups(), shard),
        (ranks.copy_groups(), copies),
        (ranks.whole_groups(), tensor * shard),
    ):
        assert sorted(rank for group in groups for rank in group) == everyone
        assert {len(group) for group in groups} == {size}
        assert all(group == sorted(group) for group in groups)

    def places(rank: int) -> tuple[int, int, int]:
        return ranks.copy(rank), ranks.shard_rank(rank), ranks.tensor_rank(rank)

    assert len({places(rank) for rank in everyone}) == ranks.world
    for group in ranks.tensor_groups():
        assert [places(rank)[2] for rank in group] == list(range(tensor))
        assert len({places(rank)[:2] for rank in group}) == 1
    for group in ranks.shard_groups():
        assert [places(rank)[1] for rank in group] == list(range(shard))
        assert len({places(rank)[::2] for rank in group}) == 1
    for group in ranks.copy_groups():
        assert [places(rank)[0] for rank in group] == list(range(copies))
        assert len({places(rank)[1:] for rank in group}) == 1
    for group in ranks.whole_groups():
        assert len({places(rank)[0] for rank in group}) == 1
    for group in ranks.data_groups():
        assert len({places(rank)[2] for rank in group}) == 1


def test_tensor_neighbours_are_next_to_each_other_and_shards_next() -> None:
    ranks = RankLayout(8, tensor=2, shard=2)
    assert ranks.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks.shard_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert ranks.copy_groups() == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert ranks.whole_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ranks.data_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
