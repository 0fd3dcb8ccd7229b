"""Ranks with devices of one kind, of which something else had slowed some: that they are alike is seen at once."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from phalanx.layout import rebalance
from phalanx.layout.balance import Division, Speed, divide
from phalanx.layout.rank_speed import RankSpeed, count_work
from phalanx.layout.rebalance import EQUAL, SpeedHistory, begin_history, decide, observe_step

LINE = Speed(0.01, 0.004)


def seconds(division: Division, rank: int, factor: float = 1.0) -> float:
    parts, pieces = count_work(division, rank)
    return (parts * LINE.fixed_s + pieces * LINE.sequence_s) * factor


def thought(*factors: float, kinds: str = "") -> SpeedHistory:
    """Ranks that were thought to be so many times as slow, after a step that was no measure."""
    names = kinds or "a" * len(factors)
    speeds = [
        Speed(LINE.sequence_s * each, LINE.fixed_s * each, kind=kind.strip())
        for each, kind in zip(factors, names, strict=True)
    ]
    history = begin_history(speeds, divide(48 * len(factors), speeds))
    return observe_step(history, history.division, [1.0] * len(factors))


def walk(history: SpeedHistory, steps: list[tuple[float, ...]]) -> list[tuple[int, ...]]:
    """The shares behind each step in which the ranks are so many times as slow."""
    found = []
    for factors in steps:
        busy = [seconds(history.division, rank, each) for rank, each in enumerate(factors)]
        history, _ = decide(observe_step(history, history.division, busy))
        found.append(history.division.shares)
    return found


def test_devices_of_one_kind_that_look_alike_twice_share_alike() -> None:
    wrong = thought(1.0, 2.4).division.shares
    assert walk(thought(1.0, 2.4), [(1.0, 1.02), (1.01, 1.0)]) == [wrong, (48, 48)]


def test_what_other_processes_did_to_the_steps_before_is_forgotten() -> None:
    steps = [(2.1, 1.0), (1.2, 2.9), (3.0, 1.0), (1.1, 1.7), (1.0, 1.02), (1.01, 1.0), (1.0, 1.0)]
    assert (48, 48) in walk(thought(1.0, 1.5), steps)[5:]


def test_of_three_the_one_that_is_slower_stays_so() -> None:
    shares = walk(thought(1.0, 2.0, 3.0), [(1.0, 1.01, 3.0), (1.0, 1.0, 3.02)])[-1]
    assert abs(shares[0] - shares[1]) <= 1
    assert shares[2] < 0.4 * shares[0]


@pytest.mark.parametrize(
    ("kinds", "steps"),
    [
        ("ab", [(1.0, 1.02), (1.01, 1.0)]),  # of two kinds, as they were measured
        ("  ", [(1.0, 1.02), (1.01, 1.0)]),  # of none that is known
        ("aa", [(1.0, 1.02), (1.0, 1.3)]),
        ("aa", [(1.0, 1.3), (1.3, 1.0)]),  # alike in the mean alone
        ("aa", [(1.0, 1.02), (math.inf, 1.0)]),
        ("aa", [(1.0, 1.02), (1.0, 0.0)]),
    ],
)
def test_others_do_not_count_as_equal(kinds: str, steps: list[tuple[float, ...]]) -> None:
    history = thought(1.0, 2.4, kinds=kinds)
    for factors in steps:
        busy = [seconds(history.division, rank, each) for rank, each in enumerate(factors)]
        history = observe_step(history, history.division, busy)
    assert history.equalized == 0


def test_those_that_hardly_differ_are_left_as_they_were_measured() -> None:
    history = thought(1.0, 1.08)
    walk(history, [(1.0, 1.0), (1.0, 1.0)])
    found = observe_step(history, history.division, [seconds(history.division, rank) for rank in (0, 1)])
    assert found.equalized == 0


def test_where_they_differ_after_all_they_are_found_equal_ever_more_rarely() -> None:
    history, when = thought(1.0, 2.0), []
    for step in range(200):  # alike in two steps of four
        busy = [seconds(history.division, rank, 2.0 if rank and step % 4 > 1 else 1.0) for rank in (0, 1)]
        found, _ = decide(observe_step(history, history.division, busy))
        if found.equalized > history.equalized:
            when.append(step)
        history = found
    between = [after - before for before, after in itertools.pairwise(when)]
    assert len(when) <= 4
    assert all(steps >= rebalance.ALIKE_WAIT_FACTOR ** (1 + number) for number, steps in enumerate(between)), when


def test_devices_of_one_kind_that_differ_by_no_more_than_noise_share_alike() -> None:
    def looks(ratio: float, kinds: str, noise: float = 0.1) -> SpeedHistory:
        """Of two ranks with shares 60 and 36 the second looks slower by `ratio`."""
        speeds = [Speed(LINE.sequence_s, LINE.fixed_s, kind=kind.strip()) for kind in kinds]
        lines = [RankSpeed(LINE.fixed_s * each, LINE.sequence_s * each, seen=5) for each in (1.0, ratio)]
        begun = begin_history(speeds, Division((60, 36), 1))
        return replace(begun, warm=True, noise=noise, rank_speeds=tuple(lines))

    within = math.exp(2 * EQUAL * 0.1 / math.sqrt(4))
    found, decision = decide(looks(0.99 * within, "aa"))
    assert decision is not None and decision.division.shares == (48, 48) == found.division.shares
    assert decide(found)[1] is None
    assert decision.after_s < decision.before_s
    assert decide(looks(1.01 * within, "aa"))[1] is None  # that much is more than noise, and too little to be sure of
    assert decide(looks(0.99 * within, "ab"))[1] is None
    assert decide(looks(0.99 * within, "  "))[1] is None
    assert decide(looks(0.99 * within, "aa", noise=0.05))[0].division.shares == (51, 45)  # as fast as they look


def loaded_start(seed: int, noise: float) -> int:
    """Steps after other processes have gone until two like ranks have like shares for good: these slow each rank by
    what comes, for two to eight steps and before them; `noise` stays."""
    drawn = random.Random(seed)
    until, levels = drawn.randint(2, 8), [1.0, 1.0, 1.5, 2.0, 2.0, 3.0][: 3 + drawn.randint(1, 3)]

    def slowed() -> float:
        return drawn.choice(levels) * math.exp(drawn.gauss(0, 0.1))

    now, measured = [slowed(), slowed()], [slowed(), slowed()]
    speeds = [
        Speed(LINE.sequence_s * each, LINE.fixed_s * each * math.exp(drawn.gauss(0, 0.3)), 24, "a") for each in measured
    ]
    history, walked = begin_history(speeds, divide(96, speeds)), []
    for step in range(until + 13):
        walked.append(max(history.division.shares))
        busy = []
        for rank in (0, 1):
            if step <= until and drawn.random() < 0.4:
                now[rank] = slowed()
            factor = now[rank] * math.exp(drawn.gauss(0, 0.15)) if step <= until else math.exp(drawn.gauss(0, noise))
            busy.append(seconds(history.division, rank, factor))
        history, _ = decide(observe_step(history, history.division, busy))
    calm = [most <= 1.1 * 48 for most in walked[until + 1 :]]
    return next((count for count in range(len(calm)) if all(calm[count:])), len(calm))


@pytest.mark.parametrize(("noise", "part"), [(0.02, 0.98), (0.08, 0.9)])
def test_a_start_on_a_busy_machine_is_corrected_within_three_steps_after_it(noise: float, part: float) -> None:
    late = [loaded_start(seed, noise) for seed in range(200)]
    assert sum(each <= 3 for each in late) >= part * len(late), late
