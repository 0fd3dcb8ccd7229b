"""What keeping steps takes of a host's memory, and what is left out where there is little."""

import pytest

from phalanx.recovery.catalog import NO_COPIES, StateCopies, choose_copies, describe_budget, list_copy_options

OWN, EVERY, SOME = StateCopies(2), StateCopies(2, 2, replays=True), StateCopies(3, 2)


@pytest.mark.parametrize(
    ("memory", "replicate", "several", "found"),
    [
        ("auto", "auto", True, (EVERY, OWN, NO_COPIES)),
        ("auto", "auto", False, (OWN, NO_COPIES)),
        (True, "auto", True, (EVERY, OWN)),
        (True, "off", True, (OWN,)),
        ("auto", "off", True, (OWN, NO_COPIES)),
        ("auto", "every_step", True, (EVERY,)),  # else the run is refused
        ("auto", 8, True, (SOME,)),
        ("auto", 8, False, (OWN, NO_COPIES)),
        (False, "off", True, (NO_COPIES,)),
    ],
)
def test_what_is_asked_for_and_what_is_done_without_room(
    memory: bool | str, replicate: int | str, several: bool, found: tuple[StateCopies, ...]
) -> None:
    assert list_copy_options(memory, replicate, several, replays=True) == found


def test_the_bytes_of_each_by_hand() -> None:
    # Of a state of 12 bytes and a gradient of 4: docs/fault-tolerance.md.
    assert [each.total_bytes(12, 4) for each in (NO_COPIES, OWN, EVERY, SOME)] == [0, 24, 24 + 24 + 8, 36 + 24]
    assert StateCopies(2, 2).total_bytes(12, 4) == 48
    assert (EVERY.own_bytes(12, 4), EVERY.replica_bytes(12, 4)) == (28, 28)


@pytest.mark.parametrize(("free", "found"), [(1000, EVERY), (84, EVERY), (83, OWN), (48, OWN), (47, NO_COPIES)])
def test_auto_leaves_half_of_what_is_free(free: float, found: StateCopies) -> None:
    assert choose_copies((EVERY, OWN, NO_COPIES), 12, 4, free) == found


def test_what_is_asked_for_is_counted_whatever_there_is() -> None:
    assert choose_copies((EVERY,), 12, 4, 1.0) == EVERY
    assert choose_copies((EVERY, OWN), 12, 4, 1.0) == OWN


def test_in_words() -> None:
    assert describe_budget(NO_COPIES, 12) == {}
    assert describe_budget(OWN, 12) == {"the two newest steps": 24}
    assert describe_budget(SOME, 12) == {
        "the two newest steps": 24,
        "a third, on several nodes": 12,
        "a replica, on several nodes": 24,
    }
