"""The global order is a shuffle; a step's samples do not depend on how they are shared."""

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import DataError
from phalanx.data.loader import Loader
from phalanx.data.packing import PackingOptions, Sample, make_rows
from phalanx.data.record_files import TokenFile
from phalanx.data.shuffle import ORDER_BLOCK, random_bits, shuffle_by_blocks, shuffle_indices
from phalanx.layout import balance
from phalanx.layout.balance import Division, cut_into_micro_batches
from tests.token_sets import TokenWriter

SEQ_LEN = 4
WINDOWS = 37
BATCH = 10
FROZEN_MIXTURE = [12585, 153, 181, 109, 89, 37, 1, 53, 141, 101]  # first tokens of the first batch
FROZEN = [9, 6, 7, 1, 0, 10, 3, 8, 4, 5, 2]  # order(seed=42, epoch=3, n=11)
FROZEN_BITS = [8053682633584427252, 13518390527432820127, 16103268029155050672]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Tokens 0, 1, 2, ...: a window tells where it was cut."""
    folder = tmp_path_factory.mktemp("tokens") / "set"
    count = WINDOWS * SEQ_LEN + 3  # two tokens at the end make no sequence
    writer = TokenWriter(folder, count, count - 1, "key")
    writer.extend(np.arange(count), np.array([count]))
    writer.finish()
    return TokenFile(folder)


WHOLE = Division((BATCH,), 4)


def loader(token_file: TokenFile, rank: int = 0, seed: int = 1, held_out: bool = False) -> Loader:
    return Loader([(make_rows(token_file, PackingOptions(SEQ_LEN), seed), 1.0)], BATCH, seed, rank, held_out)


def windows(batches: list[list[Sample]]) -> list[int]:
    return [int(sample.tokens[0]) // SEQ_LEN for batch in batches for sample in batch]


def positions(batches: list[list[Sample]]) -> list[int]:
    return [sample.position for batch in batches for sample in batch]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 10**6), n=st.integers(1, 3000))
def test_order_is_a_permutation(seed: int, epoch: int, n: int) -> None:
    assert sorted(shuffle_indices(seed, epoch, n, np.arange(n)).tolist()) == list(range(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 2**62), data=st.data())
def test_order_is_element_wise_and_one_to_one_for_huge_n(n: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=30)), np.int64)
    together = shuffle_indices(5, 2, n, index)
    assert len(set(together.tolist())) == len(index)
    assert ((together >= 0) & (together < n)).all()
    assert together.tolist() == [int(shuffle_indices(5, 2, n, index[i : i + 1])[0]) for i in range(len(index))]


@pytest.mark.parametrize("n", [1, ORDER_BLOCK, 3 * ORDER_BLOCK + 5])
def test_an_order_that_is_remembered_in_blocks_is_the_same(n: int) -> None:
    for index in (np.arange(n), np.arange(n // 3, n), np.arange(n)[::-7], np.empty(0, np.int64)):
        for epoch, name in ((0, ""), (1, "source 1")):
            assert (
                shuffle_by_blocks(5, epoch, n, index, name).tolist()
                == shuffle_indices(5, epoch, n, index, name).tolist()
            )


def test_order_looks_shuffled_and_differs_by_seed_and_epoch() -> None:
    n = 10_000
    base = np.arange(n)
    one, other_epoch, other_seed = (
        shuffle_indices(0, 0, n, base),
        shuffle_indices(0, 1, n, base),
        shuffle_indices(1, 0, n, base),
    )
    for a, b in [(base, one), (one, other_epoch), (one, other_seed), (one[:-1], one[1:])]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.04  # the standard deviation of chance is 0.01
        assert (a == b).sum() < 8  # chance: one
    # Each tenth of the order is spread evenly over all tenths of the data.
    counts = np.histogram2d(base, one, bins=10)[0]
    assert ((counts - 100) ** 2 / 100).sum() < 150  # chi-square with 81 degrees of freedom


def test_order_is_the_same_in_every_version() -> None:
    """A resumed run may be another release: this order must never change."""
    assert shuffle_indices(42, 3, 11, np.arange(11)).tolist() == FROZEN


def test_draws_of_a_sample_are_the_same_in_every_version() -> None:
    assert [int(drawn) for drawn in random_bits(3, "masks", 5, 3)] == FROZEN_BITS


def test_small_orders_reach_every_permutation() -> None:
    seen = {tuple(shuffle_indices(seed, 0, 3, np.arange(3)).tolist()) for seed in range(100)}
    assert len(seen) == 6


shares_strategy = st.lists(st.integers(0, BATCH), min_size=0, max_size=5).map(
    lambda cuts: np.diff([0, *sorted(cuts), BATCH]).tolist()
)


@settings(max_examples=100, deadline=None)
@given(shares=shares_strategy, step=st.integers(0, 20), skipped=st.integers(0, 3), parts=st.integers(1, 12))
def test_any_shares_make_up_the_batch_of_one_rank(
    token_file: TokenFile, shares: list[int], step: int, skipped: int, parts: int
) -> None:
    division = Division(tuple(shares), parts)
    alone = loader(token_file).batches(step, WHOLE, skipped)
    ranks = [loader(token_file, rank).batches(step, division, skipped) for rank in range(len(shares))]
    assert [w for rank in ranks for w in windows(rank)] == windows(alone)
    assert [p for rank in ranks for p in positions(rank)] == positions(alone)
    assert positions(alone) == [(step + skipped) * BATCH + i for i in range(BATCH)]
    assert {len(rank) for rank in ranks} == {parts}
    for number, (rank, share) in enumerate(zip(ranks, shares, strict=True)):
        sizes = [len(batch) for batch in rank]
        assert sum(sizes) == share
        assert max(*sizes, 1) == division.largest_micro_batch(number)
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=30, deadline=None)
@given(shares=shares_strategy, step=st.integers(0, 20), most=st.integers(1, 4))
def test_a_rank_may_cut_its_share_into_a_number_of_its_own(
    token_file: TokenFile, shares: list[int], step: int, most: int
) -> None:
    division = cut_into_micro_batches(shares, [most + rank % 2 for rank in range(len(shares))], lockstep=False)
    ranks = [loader(token_file, rank).batches(step, division) for rank in range(len(shares))]
    assert [w for rank in ranks for w in windows(rank)] == windows(loader(token_file).batches(step, WHOLE))
    for number, (rank, share) in enumerate(zip(ranks, shares, strict=True)):
        assert len(rank) == max(1, -(-share // (most + number % 2)))
        assert all(rank) == (share > 0)  # none is empty, but the one of a rank without a sequence


def test_changing_shares_between_steps_changes_nothing(token_file: TokenFile) -> None:
    fixed = [windows(loader(token_file).batches(step, WHOLE)) for step in range(6)]
    changing = [[10, 0, 0], [0, 10, 0], [3, 3, 4], [4, 3, 3], [1, 9, 0], [0, 0, 10]]
    loaders = [loader(token_file, rank) for rank in range(3)]
    for step in (4, 0, 5, 1, 3, 2):  # in any order: there is no state
        division = Division(tuple(changing[step]), 1 + step % 3)
        assert [w for one in loaders for w in windows(one.batches(step, division))] == fixed[step]


def test_each_epoch_has_every_window_once_in_another_order(token_file: TokenFile) -> None:
    stream = [w for step in range(12) for w in windows(loader(token_file).batches(step, WHOLE))]
    first, second, third = (stream[i * WINDOWS : (i + 1) * WINDOWS] for i in range(3))
    assert sorted(first) == sorted(second) == sorted(third) == list(range(WINDOWS))
    assert first != second != third != first
    other = [w for step in range(4) for w in windows(loader(token_file, seed=2).batches(step, WHOLE))]
    assert other[:WINDOWS] != first


def test_skipped_batches_are_passed_over(token_file: TokenFile) -> None:
    one = loader(token_file)
    assert windows(one.batches(3, WHOLE, skipped=2)) == windows(one.batches(5, WHOLE))


def test_windows_overlap_by_one_token(token_file: TokenFile) -> None:
    for batch in loader(token_file).batches(0, WHOLE):
        for sample in batch:
            start = int(sample.tokens[0])
            assert start % SEQ_LEN == 0
            assert sample.tokens.tolist() == list(range(start, start + SEQ_LEN + 1))
            assert sample.tokens.dtype == np.int64


def halves(count: int) -> Division:
    return Division((count // 2, count - count // 2), 3)


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (7, 7), (20, 20), (25, 25), (1000, WINDOWS)])
def test_evaluation_walks_the_same_windows_spread_over_the_file(
    token_file: TokenFile, limit: int, expected: int
) -> None:
    ranks = [list(loader(token_file, rank, held_out=True).evaluation_batches(halves, limit)) for rank in range(2)]
    walked = [w for batch in zip(*ranks, strict=True) for rank in batch for w in windows(rank)]
    assert len(walked) == expected
    assert walked == sorted(set(walked))
    if 5 < expected < WINDOWS:
        assert walked[-1] > WINDOWS // 2, "a few windows must not all come from the first documents"
    again = loader(token_file, held_out=True).evaluation_batches(lambda n: Division((n,), 2), limit)
    assert [w for batch in again for w in windows(batch)] == walked
    assert all(len(a) == len(b) for a, b in zip(*ranks, strict=True))


def test_a_held_out_file_may_be_smaller_than_a_batch_and_even_empty(tmp_path: Path) -> None:
    for count, expected in ((SEQ_LEN * 3 + 1, [0, 1, 2]), (SEQ_LEN, []), (0, [])):
        writer = TokenWriter(tmp_path / str(count), 100, 99, "key")
        writer.extend(np.array([*range(1, count), 99][:count]), np.array([count] if count else [], np.int64))
        writer.finish()
        file = TokenFile(tmp_path / str(count))
        batches = list(loader(file, held_out=True).evaluation_batches(lambda n: Division((n,), 2), 100))
        assert [sample.position for batch in batches for part in batch for sample in part] == expected
        with pytest.raises(DataError, match=r"fewer than one global batch of 10; add data") as caught:
            loader(file)
        assert str(file.folder) in str(caught.value)
        assert f"{count} tokens" in str(caught.value)


def test_shares_that_do_not_add_up_are_a_programming_error(token_file: TokenFile) -> None:
    for shares in ([BATCH, 1], [], [BATCH + 1, -1]):
        with pytest.raises(AssertionError):
            loader(token_file).batches(0, Division(tuple(shares), 1))


# ------------------------------------------------------------------------------------------------------------- mixtures


def numbered(folder: Path, windows: int, first: int) -> TokenFile:
    """A token set whose window number n begins with the token first + n * SEQ_LEN."""
    count = windows * SEQ_LEN + 1
    writer = TokenWriter(folder, 1 << 16, 0, "key")
    writer.extend(np.append(np.arange(first, first + count - 1), 0), np.array([count]))
    writer.finish()
    return TokenFile(folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[TokenFile, float]]:
    folder = tmp_path_factory.mktemp("mixture")
    sizes = (50, 1000, 7)
    return [
        (numbered(folder / str(number), windows, 1 + 10_000 * number), weight)
        for number, (windows, weight) in enumerate(zip(sizes, (5.0, 2.0, 0.01), strict=True))
    ]


def drawn(sources: list[tuple[TokenFile, float]], steps: range, shares: list[int], seed: int = 1) -> list[int]:
    """First tokens of all samples of these steps, of all ranks in order."""
    rows = [(make_rows(file, PackingOptions(SEQ_LEN), seed), weight) for file, weight in sources]
    ranks = [Loader(rows, sum(shares), seed, rank) for rank in range(len(shares))]
    division = Division(tuple(shares), 3)
    samples = [s for k in steps for rank in ranks for batch in rank.batches(k, division) for s in batch]
    assert [s.position for s in samples] == list(range(steps.start * sum(shares), steps.stop * sum(shares)))
    return [int(sample.tokens[0]) for sample in samples]


def test_each_source_has_its_exact_share_of_every_block(three: list[tuple[TokenFile, float]]) -> None:
    block = balance.MIXTURE_BLOCK
    quotas = balance.split_by_weights([5.0, 2.0, 0.01], block)
    assert quotas == [2921, 1169, 6]  # of 2921.5, 1168.6 and 5.8
    stream = np.array(drawn(three, range(12), [block // 4]))
    for number in range(3):
        within = np.bincount(stream[number * block : (number + 1) * block] // 10_000, minlength=3)
        assert within.tolist() == quotas
    # and nearly so of every part of a block
    assert abs((stream[:500] < 10_000).mean() - quotas[0] / block) < 0.07


def test_each_source_of_a_mixture_has_epochs_of_its_own(three: list[tuple[TokenFile, float]]) -> None:
    stream = drawn(three, range(8), [balance.MIXTURE_BLOCK // 4])
    for number, (file, _) in enumerate(three):
        mine = [token for token in stream if token // 10_000 == number]
        size = (file.tokens - 1) // SEQ_LEN
        epochs = [mine[start : start + size] for start in range(0, len(mine) - size + 1, size)]
        assert epochs
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert len(epochs) == 1 or epochs[0] != epochs[1]


@settings(max_examples=30, deadline=None)
@given(shares=shares_strategy, step=st.integers(0, 900))
def test_any_shares_make_up_the_batch_of_a_mixture(
    three: list[tuple[TokenFile, float]], shares: list[int], step: int
) -> None:
    steps = range(step, step + 2)
    assert drawn(three, steps, shares) == drawn(three, steps, [BATCH])


def test_a_mixture_differs_by_seed_and_a_source_alone_is_no_mixture(three: list[tuple[TokenFile, float]]) -> None:
    assert drawn(three, range(3), [BATCH], seed=2) != drawn(three, range(3), [BATCH])
    [(file, _), *_] = three
    assert drawn([(file, 0.3)], range(3), [BATCH]) == drawn([(file, 1.0)], range(3), [BATCH])


def test_the_mixture_is_the_same_in_every_version(three: list[tuple[TokenFile, float]]) -> None:
    assert drawn(three, range(1), [BATCH]) == FROZEN_MIXTURE


def test_a_source_that_makes_no_sequence_cannot_be_mixed(three: list[tuple[TokenFile, float]], tmp_path: Path) -> None:
    none = numbered(tmp_path / "none", 0, 1)
    with pytest.raises(
        DataError, match=r"has 1 tokens, which make 0 sequences of 4 \(data.seq_len\), so it cannot take its share"
    ):
        Loader([(make_rows(file, PackingOptions(SEQ_LEN), 0), 1.0) for file in (three[0][0], none)], BATCH, 0, 0)


@pytest.mark.parametrize(("weights", "total", "expected"), [
    ([1.0], 7, [7]), ([1.0, 1.0], 7, [4, 3]), ([3.0, 1.0], 8, [6, 2]), ([0.1, 0.2, 0.7], 10, [1, 2, 7]),
])  # fmt: skip
def test_quotas(weights: list[float], total: int, expected: list[int]) -> None:
    assert balance.split_by_weights(weights, total) == expected


class SlowSamples:
    """Samples that say when they are read, and by which thread; number 5 cannot be."""

    count = 12

    def __init__(self) -> None:
        self.read: list[tuple[int, bool]] = []
        self.changed = threading.Condition()

    def sample(self, number: int, position: int) -> tuple[int, int]:
        with self.changed:
            self.read.append((number, threading.current_thread() is threading.main_thread()))
            self.changed.notify_all()
        if number == 5:
            raise DataError("sample 5 is torn")
        return number, position

    def describe(self) -> str:
        return "twelve samples"

    def warnings(self) -> list[str]:
        return []

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.read) >= count, timeout=20)


def outcomes(each: Loader, division: Division, steps: list[int]) -> list[object]:
    found: list[object] = []
    for step in steps:
        try:
            found.append(each.batches(step, division))
        except DataError as error:
            found.append(str(error))
    return found


def test_samples_of_the_next_step_are_read_meanwhile() -> None:
    plain, division, steps = SlowSamples(), Division((3, 1), 3), [0, 1, 2, 3, 4, 5, 1, 2]
    expected = outcomes(Loader([(plain, 1.0)], 4, 4, rank=0), division, steps)
    assert isinstance(expected[0], list)
    assert "sample 5 is torn" in expected
    samples = SlowSamples()
    ahead = Loader([(samples, 1.0)], 4, 4, rank=0, read_ahead=2)
    assert ahead.batches(0, division) == expected[0]
    samples.wait_for(6)  # while the caller computes
    assert [in_main for _, in_main in samples.read] == [True] * 3 + [False] * 3
    # The same samples and errors, also where the run goes back, or is divided otherwise for a step.
    assert outcomes(ahead, division, steps[1:]) == expected[1:]
    other = Division((2, 2), 2)
    assert outcomes(ahead, other, [3]) == outcomes(Loader([(plain, 1.0)], 4, 4, rank=0), other, [3])
    ahead.close()
