"""When the link counts as another: not for one odd step, nor for what steps differ by anyway."""

import math
import random

import pytest

from phalanx.comm.rendezvous import Topology
from phalanx.engine.schedule import network_rate
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.layout.link_rate import LinkRate, adopt_estimate, is_outdated, observe_rate, step_rate

MB = 1e6


def walk(rates: LinkRate, steps: list[float]) -> tuple[LinkRate, list[int]]:
    """The steps after which another order would be made, and what is known then."""
    made = []
    for number, rate in enumerate(steps):
        rates = observe_rate(rates, rate)
        if is_outdated(rates):
            rates = adopt_estimate(rates)
            made.append(number)
    return rates, made


def test_the_rate_of_a_step_is_that_of_operations_that_waited_for_nobody() -> None:
    # Three of four operations of the same size waited for a late rank; a small one looks fast by chance.
    moved = [(1_000_000, 0.1), (1_000_000, 0.2), (1_000_000, 0.5), (1_000_000, 0.9), (10_000, 0.0001)]
    assert step_rate(moved) == 10 * MB
    assert step_rate([(2_000_000, 0.1), (0, 0.1), (5, 0.0)]) == 20 * MB
    assert step_rate([]) is None and step_rate([(0, 1.0)]) is None


def test_two_steps_give_a_first_rate() -> None:
    rates = observe_rate(observe_rate(LinkRate(), None), 50 * MB)
    assert not is_outdated(rates)
    rates = observe_rate(rates, 50 * MB)
    assert is_outdated(rates) and not is_outdated(adopt_estimate(rates))
    assert adopt_estimate(rates).in_use == pytest.approx(50 * MB)


def test_one_odd_step_changes_nothing_and_two_do() -> None:
    start, _ = walk(LinkRate(), [50 * MB] * 6)
    assert walk(start, [25 * MB, *[50 * MB] * 5, 100 * MB, *[50 * MB] * 5])[1] == []
    assert walk(start, [25 * MB, 100 * MB] * 3)[1] == []  # odd in both directions is no change in either
    rates, made = walk(start, [25 * MB] * 6)
    assert made == [1] and rates.in_use == pytest.approx(25 * MB)
    rates, made = walk(rates, [50 * MB] * 6)
    assert made == [1] and rates.in_use == pytest.approx(50 * MB)


def test_a_change_in_the_middle_of_a_step_counts_as_what_came_after_it() -> None:
    start, _ = walk(LinkRate(), [50 * MB] * 6)
    rates, made = walk(start, [38 * MB, *[25 * MB] * 5])
    assert made == [1] and rates.in_use == pytest.approx(25 * MB)


def test_what_is_less_than_a_fifth_off_is_left() -> None:
    start, _ = walk(LinkRate(), [50 * MB] * 6)
    assert walk(start, [43 * MB] * 10)[1] == [] == walk(start, [58 * MB] * 10)[1]


@pytest.mark.parametrize("jitter", [0.02, 0.05, 0.1])
def test_noise_is_no_change_and_half_the_rate_is_one(jitter: float) -> None:
    draws = random.Random(3)

    def noisy(rate: float, count: int) -> list[float]:
        return [rate * math.exp(draws.gauss(0, jitter)) for _ in range(count)]

    rates, _ = walk(LinkRate(), noisy(50 * MB, 20))
    rates, made = walk(rates, noisy(50 * MB, 200))
    assert len(made) <= 1  # what the first steps gave may have been off
    rates, made = walk(rates, noisy(25 * MB, 6))
    assert made in ([1], [2]) and rates.in_use is not None
    assert abs(math.log(rates.in_use / (25 * MB))) < 3 * jitter


def test_a_rate_is_called_the_networks_only_where_it_is() -> None:
    apart, pairs, together = Topology.from_hosts("abcd"), Topology.from_hosts("aabb"), Topology.from_hosts("aaaa")
    assert network_rate(MB, apart, ShardingSpec(2, "per_step")) == MB
    assert network_rate(MB, apart, ShardingSpec(1, "per_step", degree=4)) == MB
    assert network_rate(MB, pairs, ShardingSpec(2, "per_step")) is None
    assert network_rate(MB, together, ShardingSpec(2, "per_step")) is None
    assert network_rate(MB, apart, ShardingSpec(1, "per_step", degree=2)) is None
    assert network_rate(MB, apart, ShardingSpec(3, "per_micro_batch")) is None
