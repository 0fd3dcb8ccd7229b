"""What a step's seconds make of a rank's line: as a Kalman filter in matrices has it, which is the plain twin."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.layout import rank_speed, rebalance
from phalanx.layout.balance import Division, Speed, slowest_s
from phalanx.layout.rank_speed import OutlierLimits, RankSpeed
from phalanx.layout.rebalance import SpeedHistory, begin_history, decide, observe_step

NOISE = 0.03
LIMITS = OutlierLimits(NOISE, 2)  # off and outlier: 0.12
PARTS = st.integers(1, 4)
SECONDS = st.floats(0.01, 10)
RATIOS = st.floats(-0.11, 0.11).map(math.exp)  # of what nobody calls far off
FAR = 1.6


def line(pace: RankSpeed) -> tuple[np.ndarray, np.ndarray]:
    ff, fs, ss = pace.covariance
    return np.array([pace.fixed_s, pace.sequence_s]), np.array([[ff, fs], [fs, ss]])


def doubted(x: np.ndarray, cover: np.ndarray, h: np.ndarray, variance: float, shape: float) -> np.ndarray:
    """With doubt of the line as a whole, and of how it is split where the step's seconds stay as they are."""
    turn = shape * (h @ x) * np.array([1 / h[0], -1 / h[1]])
    return cover + variance * np.outer(x, x) + np.outer(turn, turn)


def scaled(
    pace: RankSpeed, h: np.ndarray, factor: float, variance: float, shape: float
) -> tuple[np.ndarray, np.ndarray]:
    x, cover = line(pace)
    return factor * x, doubted(factor * x, factor**2 * cover, h, variance, shape)


def assert_line(found: RankSpeed, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    x, cover = line(found)
    assert x == pytest.approx(wanted[0], rel=1e-9)
    scale = float(np.abs(wanted[1]).max())
    assert cover == pytest.approx(wanted[1], rel=1e-7, abs=1e-9 * scale)


def begun(fixed_s: float, sequence_s: float, parts: int, pieces: int) -> tuple[RankSpeed, np.ndarray]:
    """A line that one step has confirmed, and what that step's seconds are made of."""
    pace, more = RankSpeed(fixed_s, sequence_s).update(parts, pieces, parts * fixed_s + pieces * sequence_s, LIMITS)
    assert (pace.seen, more) == (1, 0)
    return pace, np.array([float(parts), float(pieces)])


@given(fixed_s=SECONDS, sequence_s=SECONDS, parts=PARTS, each=PARTS, factor=st.floats(0.1, 10))
def test_the_first_step_scales_the_line(
    fixed_s: float, sequence_s: float, parts: int, each: int, factor: float
) -> None:
    pieces, foretold = parts * each, RankSpeed(fixed_s, sequence_s)
    found, more = foretold.update(parts, pieces, factor * (parts * fixed_s + pieces * sequence_s), LIMITS)
    wanted = scaled(foretold, np.array([float(parts), float(pieces)]), factor, NOISE**2, rank_speed.SHAPE)
    assert_line(found, wanted)
    assert (found.seen, found.outliers, found.changed, more) == (1, (), False, 0)


@given(
    fixed_s=SECONDS, sequence_s=SECONDS, parts=PARTS, each=PARTS,
    steps=st.lists(st.tuples(PARTS, PARTS, RATIOS), min_size=1, max_size=6),
)  # fmt: skip
def test_steps_are_taken_in_as_by_a_kalman_filter(
    fixed_s: float, sequence_s: float, parts: int, each: int, steps: list[tuple[int, int, float]]
) -> None:
    pace, _ = begun(fixed_s, sequence_s, parts, parts * each)
    for seen, (now, of_each, ratio) in enumerate(steps, 2):
        x, cover = line(pace)
        h = np.array([float(now), float(now * of_each)])
        expected = h @ x
        away, variance = pace.measure_deviation(now, now * of_each, ratio * expected)
        assert away == pytest.approx(math.log(ratio), abs=1e-9)
        assert variance == pytest.approx(h @ cover @ h / expected**2, rel=1e-6, abs=1e-12)
        cover = doubted(x, cover, h, (NOISE / rank_speed.MEMORY) ** 2, 0.0)
        gain = cover @ h / (h @ cover @ h + (NOISE * expected) ** 2)
        x = x + gain * (ratio * expected - expected)
        whole = h @ x
        fixed = min(max(x[0], 0.0), (1 - rank_speed.LEAST_SLOPE) * whole / h[0])
        x = np.array([fixed, (whole - h[0] * fixed) / h[1]])  # no line of a device falls
        pace, more = pace.update(now, now * of_each, ratio * expected, LIMITS)
        assert_line(pace, (x, cover - np.outer(gain, h @ cover)))
        assert (pace.seen, more) == (seen, 0)


def test_a_line_never_falls_nor_begins_below_nothing() -> None:
    pace, _ = begun(1.0, 1.0, 1, 1)
    for ratio, parts, pieces in ((0.9, 1, 1), (0.9, 1, 1), (1.11, 1, 8), (1.11, 1, 8)):
        pace, _ = pace.update(parts, pieces, ratio * pace.predict_s(parts, pieces), LIMITS)
        assert pace.fixed_s >= 0
    pace = replace(pace, fixed_s=0.98, sequence_s=0.02, covariance=(0.5, -0.5, 0.5), seen=3)
    found, _ = pace.update(1, 4, 0.9 * pace.predict_s(1, 4), LIMITS)
    assert found.sequence_s * 4 >= rank_speed.LEAST_SLOPE * found.predict_s(1, 4) * (1 - 1e-9)


def test_a_division_that_proved_right_leaves_the_same_doubt_of_a_step_and_none_of_who_is_to_blame() -> None:
    """From then on what a step takes more is divided between the terms as the step itself is."""
    h = np.array([2.0, 6.0])
    pace, _ = begun(0.7, 0.3, 2, 6)
    for _ in range(rank_speed.SETTLED - 2):
        pace, _ = pace.update(2, 6, pace.predict_s(2, 6), LIMITS)
    x, cover = line(pace)
    cover = doubted(x, cover, h, (NOISE / rank_speed.MEMORY) ** 2, 0.0)
    gain = cover @ h / (h @ cover @ h + (NOISE * (h @ x)) ** 2)
    before = cover - np.outer(gain, h @ cover)
    settled, _ = pace.update(2, 6, pace.predict_s(2, 6), LIMITS)
    assert settled.seen == rank_speed.SETTLED
    x, after = line(settled)
    assert h @ after @ h == pytest.approx(h @ before @ h, rel=1e-6)
    fixed, whole = np.array([2.0, 0.0]), h @ x

    def of_the_fixed_part(of: np.ndarray) -> float:
        """Its variance where the step's seconds are known."""
        return float(fixed @ of @ fixed - (fixed @ of @ h) ** 2 / (h @ of @ h))

    assert of_the_fixed_part(after) == pytest.approx(of_the_fixed_part(before), rel=1e-6)
    assert fixed @ after @ h / (h @ after @ h) == pytest.approx(2 * x[0] / whole, rel=1e-6)
    again, _ = settled.update(2, 6, 1.05 * whole, LIMITS)
    assert again.fixed_s / again.sequence_s == pytest.approx(x[0] / x[1], rel=1e-6)


def test_older_steps_count_no_more_than_the_memory() -> None:
    pace, _ = begun(0.5, 0.5, 1, 4)
    for _ in range(3 * rank_speed.MEMORY):
        pace, _ = pace.update(1, 4, 2.5, LIMITS)
    assert pace.seen == rank_speed.MEMORY


def test_sixteen_steps_later_an_old_measurement_counts_for_a_third() -> None:
    pace, _ = begun(0.5, 0.5, 1, 4)
    for _ in range(100):
        pace, _ = pace.update(1, 4, 2.5, LIMITS)
    for _ in range(16):
        pace, _ = pace.update(1, 4, 2.6, LIMITS)
    assert 0.58 < (pace.predict_s(1, 4) - 2.5) / (2.6 - 2.5) < 0.75


# ---------------------------------------------------------------------------------------------------------- what is odd


def test_one_odd_step_draws_as_little_as_one_that_is_barely_not() -> None:
    for ratio, sign in ((FAR, 1), (1 / FAR, -1)):
        pace, _ = begun(0.5, 0.5, 1, 4)
        odd, more = pace.update(1, 4, ratio * 2.5, LIMITS)
        assert (odd.fixed_s, odd.sequence_s, more) == (0.5, 0.5, 1)
        assert odd.outliers == pytest.approx((ratio,))
        drawn = math.exp(sign * LIMITS.threshold / rank_speed.MEMORY)
        wanted, _ = replace(pace, fixed_s=0.5 * drawn, sequence_s=0.5 * drawn).update(1, 4, 2.5, LIMITS)
        found, _ = odd.update(1, 4, 2.5, LIMITS)
        assert_line(found, line(wanted))
        assert found.outliers == ()


def test_two_odd_steps_that_were_dismissed_draw_twice_as_much() -> None:
    three = replace(LIMITS, needed=3)
    pace, _ = begun(0.5, 0.5, 1, 4)
    for _ in range(2):
        pace, _ = pace.update(1, 4, FAR * 2.5, three)
    assert len(pace.outliers) == 2
    drawn = math.exp(2 * three.threshold / rank_speed.MEMORY)
    wanted, _ = replace(pace, outliers=(), fixed_s=0.5 * drawn, sequence_s=0.5 * drawn).update(1, 4, 2.5, three)
    assert_line(pace.update(1, 4, 2.5, three)[0], line(wanted))


def test_odd_steps_to_either_side_are_no_change() -> None:
    pace, _ = begun(0.5, 0.5, 1, 4)
    for ratio in (FAR, 1 / FAR, FAR, 1 / FAR):
        pace, more = pace.update(1, 4, ratio * pace.predict_s(1, 4), LIMITS)
        assert more == 1
        assert len(pace.outliers) == 1
        assert not pace.changed


@pytest.mark.parametrize(
    ("ratios", "factor", "sure"),
    [
        ((1.6, 1.62), math.sqrt(1.6 * 1.62), 2),  # they agree: both count
        ((0.5, 0.51), math.sqrt(0.5 * 0.51), 2),
        ((1.56, 1.7), 1.7, 1),  # it changed within the first: the last counts
    ],
)
def test_two_odd_steps_are_a_change(ratios: tuple[float, float], factor: float, sure: int) -> None:
    pace, h = begun(0.5, 0.5, 1, 4)
    for _ in range(6):
        pace, _ = pace.update(1, 4, 2.5, LIMITS)
    odd, _ = pace.update(1, 4, ratios[0] * 2.5, LIMITS)
    found, more = odd.update(1, 4, ratios[1] * 2.5, LIMITS)
    assert (found.changed, found.seen, found.outliers, more) == (True, 2, (), -1)
    assert_line(found, scaled(pace, h, factor, NOISE**2 / sure, rank_speed.SHAPE_AFTER_CHANGE))


def test_three_odd_steps_are_a_change_by_their_median_where_accidents_are_frequent() -> None:
    limits = OutlierLimits(NOISE, 3)
    pace, h = begun(0.5, 0.5, 1, 4)
    for _ in range(6):
        pace, _ = pace.update(1, 4, 2.5, limits)
    found, more = pace, 0
    for ratio in (1.6, 1.7, 1.65):
        assert not found.changed
        found, more = found.update(1, 4, ratio * 2.5, limits)
    assert (found.changed, found.seen, more) == (True, 3, -2)
    assert_line(found, scaled(pace, h, 1.65, NOISE**2 / 3, rank_speed.SHAPE_AFTER_CHANGE))


def test_what_a_line_that_is_not_known_well_may_be_due_to_is_no_change() -> None:
    pace = replace(begun(0.5, 0.5, 1, 4)[0], covariance=(0.2, 0.0, 0.2), seen=2)
    odd, _ = pace.update(1, 4, 2.5 * FAR, LIMITS)
    found, more = odd.update(1, 4, 2.5 * FAR, LIMITS)
    assert (found.changed, more, found.seen) == (False, -1, 4)
    wanted, of_both = pace, 2.5
    wide = OutlierLimits(1.0, 2)  # nothing is off
    assert wide.threshold == rank_speed.OUTLIER_AT_MOST
    for _ in range(2):  # both are drawn in
        wanted = wanted._kalman_update(1, 4, FAR * of_both, NOISE)
    assert_line(found, line(wanted))


@pytest.mark.parametrize(
    ("noise", "needed", "odd", "believed"),
    [
        (0.03, 2, (1.2,), False),
        (0.03, 2, (1.2, 1.2), True),
        (0.03, 2, (1.2, 4.0), True),  # of two, each may be anything that is off
        (0.03, 3, (1.3, 1.3), False),
        (0.03, 3, (1.3, 1.3, 1.3), True),
        (0.03, 3, (9.0, 1.3, 1.3, 1.3), True),  # the last three count
        (0.03, 3, (1.3, 1.3, 1.5), False),  # they do not agree
        (0.03, 3, (1 / 1.3, 1 / 1.35, 1 / 1.3), True),
        (0.1, 3, (1.3, 1.3, 1.8), True),  # within three and a half deviations
        (0.1, 3, (1.3, 1.3, 1.9), False),
        (0.1, 3, (1.24, 1.2, 1.26), False),  # the middle one is not 2.2 deviations off
        (0.1, 3, (1.2, 1.25, 1.26), True),
        (0.5, 3, (1.6, 1.56, 1.58), True),  # whatever the noise, half and twice the speed are far off
        (0.5, 3, (1.6, 1.56, 1.56), False),
    ],
)
def test_what_is_believed(noise: float, needed: int, odd: tuple[float, ...], believed: bool) -> None:
    assert OutlierLimits(noise, needed).believes(odd) is believed


@pytest.mark.parametrize(
    ("noise", "needed", "outlier", "off"),
    [(0.0, 2, 0.12, 0.12), (0.1, 2, 0.3, 0.3), (0.3, 2, 0.5, 0.5), (0.0, 3, 0.12, 0.12), (0.2, 3, 0.5, 0.25)],
)
def test_how_far_is_far(noise: float, needed: int, outlier: float, off: float) -> None:
    limits = OutlierLimits(noise, needed)
    assert (limits.outlier, limits.threshold) == pytest.approx((outlier, off))


# ------------------------------------------------------------------------------------------------------------ a history


def history(fixed_s: float = 0.0, ranks: int = 2, share: int = 4, seen: int = 2, parts: int = 1) -> SpeedHistory:
    """Ranks of a second a sequence, of which so many steps were seen as they were foretold."""
    made = begin_history([Speed(1.0, fixed_s, 64)] * ranks, Division((share,) * ranks, parts))
    for _ in range(seen + 1):  # the first of an attempt counts for nothing
        made = observe_step(made, made.division, [share + parts * fixed_s] * ranks)
    assert all(pace.seen == seen for pace in made.rank_speeds)
    return made


def test_noise_is_the_root_of_the_mean_of_squares() -> None:
    before = history(seen=2)
    found = observe_step(before, before.division, [4 * 1.05, 4 / 1.02])
    away = [math.log(1.05) ** 2, math.log(1.02) ** 2]
    # The line that they are compared with comes from two steps, so a difference has 3/2 of one's variance.
    squares = before.noise**2 * before.noise_seen + sum(each * 2 / 3 for each in away)
    assert found.noise_seen == before.noise_seen + 2
    assert found.noise == pytest.approx(math.sqrt(squares / found.noise_seen))


def test_noise_takes_little_of_a_device_that_changes() -> None:
    before = replace(history(seen=2), noise=0.05, noise_seen=rebalance.NOISE_MEMORY)
    found = observe_step(before, before.division, [4.0, 40.0])
    squares = 0.05**2 * rebalance.NOISE_MEMORY + (3 * 0.05) ** 2 * 2 / 3
    assert found.noise == pytest.approx(math.sqrt(squares / (rebalance.NOISE_MEMORY + 2)))
    assert found.noise_seen == rebalance.NOISE_MEMORY
    early = observe_step(replace(before, noise_seen=5), before.division, [4.0, 40.0])
    assert early.noise == pytest.approx(math.sqrt((0.05**2 * 5 + 0.5**2 * 2 / 3) / 7))


def test_a_line_that_is_not_known_says_nothing_of_noise() -> None:
    before = history(seen=1)
    unsure = replace(before.rank_speeds[0], covariance=(0.0, 0.0, 1.0))
    found = observe_step(replace(before, rank_speeds=(unsure, before.rank_speeds[1])), before.division, [5.0, 4.0])
    assert found.noise_seen == before.noise_seen + 1


def test_accidents_are_counted_for_each_rank_and_step() -> None:
    before = history(seen=4)
    one, steps = observe_step(before, before.division, [4.0 * FAR, 4.0]), before.outlier_rate_steps + 1
    assert one.outlier_rate_steps == steps
    counted = before.outlier_rate * before.outlier_rate_steps * 2
    assert one.outlier_rate == pytest.approx((counted + 1) / (2 * steps))
    two = observe_step(one, before.division, [4.0 * FAR, 4.0])  # it was no accident: it is taken back
    assert two.rank_speeds[0].changed
    assert two.outlier_rate == pytest.approx(max(rebalance.OUTLIER_RATE, counted / (2 * (steps + 1))))


def test_where_accidents_are_frequent_a_third_step_must_say_so() -> None:
    for accidents, steps in ((0.001, 2), (0.1, 3)):
        now = replace(history(seen=6), outlier_rate=accidents)
        for step in range(1, 4):
            now = observe_step(now, now.division, [4.0 * FAR, 4.0])
            assert now.rank_speeds[0].changed is (step >= steps), (accidents, step)


def test_a_step_is_taken_to_last_as_long_as_noise_could_make_it() -> None:
    now = history(ranks=3, seen=5)
    speeds = now.current_speeds
    each = rebalance._slowest_s(now, Division((4, 4, 8), 1), speeds, 1.0)
    out = (1 + math.sqrt(2 * math.log(3))) * now.noise  # where the most extreme of three lies
    assert each == pytest.approx(8 * speeds[2].sequence_s * (1 + out / math.sqrt(4)))
    changed = replace(now, rank_speeds=(replace(now.rank_speeds[0], changed=True, seen=2), *now.rank_speeds[1:]))
    less = rebalance.DOUBT_OF_CHANGE * out
    assert rebalance._slowest_s(changed, Division((8, 4, 4), 1), speeds, 1.0) == pytest.approx(8 * (1 + less))
    settled = replace(
        now, rank_speeds=(replace(now.rank_speeds[0], changed=True, seen=5), *now.rank_speeds[1:]), part_s=0.5
    )
    found = rebalance._slowest_s(settled, Division((8, 4, 4), 2), speeds, -1.0)
    assert found == pytest.approx(2 * 0.5 + 8 * (1 - out / math.sqrt(4)))


def test_nothing_is_decided_before_each_rank_was_seen_twice() -> None:
    once = history(seen=1)
    slow = replace(once, rank_speeds=(replace(once.rank_speeds[0], sequence_s=9.0), once.rank_speeds[1]))
    assert decide(slow) == (slow, None)
    twice = replace(slow, rank_speeds=tuple(replace(pace, seen=2) for pace in slow.rank_speeds))
    assert decide(twice)[1] is not None
    alone = history(ranks=1, seen=9)
    assert decide(alone) == (alone, None)


@given(
    each=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=4),
    fixed_s=st.floats(0.0, 3.0),
    part_s=st.floats(0.0, 1.0),
    shares=st.lists(st.integers(1, 12), min_size=4, max_size=4),
)
def test_what_saves_the_trouble_of_dividing_decides_nothing(
    each: list[float], fixed_s: float, part_s: float, shares: list[int]
) -> None:
    """A change is made where a step in doubt is faster with the best division by a gain; and a second time is none."""
    division = Division(tuple(shares[: len(each)]), 1)
    now = begin_history([Speed(1.0, fixed_s, 64)] * len(each), division, part_s)
    now = replace(now, warm=True, rank_speeds=tuple(RankSpeed(fixed_s, sequence_s, seen=6) for sequence_s in each))
    best = rebalance.divide(sum(division.shares), now.current_speeds, part_s, True)
    sure_s = rebalance._slowest_s(now, division, now.current_speeds, -rebalance.DOUBT)
    gains = rebalance._slowest_s(now, best, now.current_speeds, rebalance.DOUBT) <= sure_s * (1 - rebalance.GAIN)
    found, decision = decide(now)
    assert (decision is not None) == gains
    if decision is None:
        assert decide(found)[1] is None
        return
    assert decision.division == found.division == best
    assert decision.before_s == slowest_s(division, now.current_speeds, part_s)
    assert decision.after_s == slowest_s(best, now.current_speeds, part_s)
    assert decide(found)[1] is None


def divisions_looked_for(monkeypatch: pytest.MonkeyPatch, history: SpeedHistory, steps: int) -> int:
    """How often a division is looked for while all stays as it is."""
    calls, search = [], rebalance.divide
    monkeypatch.setattr(rebalance, "divide", lambda *asked: calls.append(asked) or search(*asked))
    for _ in range(steps):
        history, decision = decide(history)
        assert decision is None
    return len(calls)


def test_no_division_is_looked_for_where_even_parts_of_sequences_would_gain_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert divisions_looked_for(monkeypatch, history(seen=9), 5) == 0


def test_a_division_that_gained_nothing_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # One sequence more on either rank: halves of one would gain, whole ones do not.
    coarse = begin_history([Speed(1.0, 0.0, 64)] * 2, Division((2, 1), 1))
    for _ in range(400):
        coarse = observe_step(coarse, coarse.division, [2.0, 1.0])
    assert divisions_looked_for(monkeypatch, coarse, 5) == 1


def test_reasons_name_at_most_three_ranks_that_changed_most() -> None:
    now = history(ranks=5, seen=9)
    used = now.rank_speeds
    moved = [replace(pace, sequence_s=factor, fixed_s=0.0) for pace, factor in zip(used, (4, 1, 5, 6, 3), strict=True)]
    said = rebalance._why(replace(now, speeds_at_division=used, rank_speeds=tuple(moved)))
    assert [part.split()[1] for part in said.split(", ")] == ["0", "2", "3"]
    assert all(part.endswith("as expected") for part in said.split(", "))
    moved[2] = replace(moved[2], sequence_s=1.0, changed=True)
    moved[3] = replace(moved[3], sequence_s=0.2, changed=True)
    moved[0] = replace(moved[0], sequence_s=1.1)
    assert rebalance._why(replace(now, speeds_at_division=used, rank_speeds=tuple(moved))) == (
        "rank 3 takes 0.20 times as long for its share as before, rank 4 takes 3.00 times as long for its share as "
        "expected"
    )
