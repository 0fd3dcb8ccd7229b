"""What keeping steps takes of a host's memory, and what is left out where there is little."""

import pytest

from phalanx.recovery.budget import NONE, Keeps, in_room, keeps_of, told

OWN, EVERY, SOME = Keeps(2), Keeps(2, 2, replays=True), Keeps(3, 2)


@pytest.mark.parametrize(
    ("memory", "replicate", "several", "found"),
    [
        ("auto", "auto", True, (EVERY, OWN, NONE)),
        ("auto", "auto", False, (OWN, NONE)),
        (True, "auto", True, (EVERY, OWN)),
        (True, "off", True, (OWN,)),
        ("auto", "off", True, (OWN, NONE)),
        ("auto", "every_step", True, (EVERY,)),  # else the run is refused
        ("auto", 8, True, (SOME,)),
        ("auto", 8, False, (OWN, NONE)),
        (False, "off", True, (NONE,)),
    ],
)
def test_what_is_asked_for_and_what_is_done_without_room(
    memory: bool | str, replicate: int | str, several: bool, found: tuple[Keeps, ...]
) -> None:
    assert keeps_of(memory, replicate, several, replays=True) == found


def test_the_bytes_of_each_by_hand() -> None:
    # Of a state of 12 bytes and a gradient of 4: docs/recovery.md.
    assert [each.bytes(12, 4) for each in (NONE, OWN, EVERY, SOME)] == [0, 24, 24 + 24 + 8, 36 + 24]
    assert Keeps(2, 2).bytes(12, 4) == 48
    assert (EVERY.own_bytes(12, 4), EVERY.replica_bytes(12, 4)) == (28, 28)


@pytest.mark.parametrize(("free", "found"), [(1000, EVERY), (84, EVERY), (83, OWN), (48, OWN), (47, NONE)])
def test_auto_leaves_half_of_what_is_free(free: float, found: Keeps) -> None:
    assert in_room((EVERY, OWN, NONE), 12, 4, free) == found


def test_what_is_asked_for_is_counted_whatever_there_is() -> None:
    assert in_room((EVERY,), 12, 4, 1.0) == EVERY
    assert in_room((EVERY, OWN), 12, 4, 1.0) == OWN


def test_in_words() -> None:
    assert told(NONE, 12) == {}
    assert told(OWN, 12) == {"the two newest steps": 24}
    assert told(SOME, 12) == {
        "the two newest steps": 24,
        "a third, on several nodes": 12,
        "a replica, on several nodes": 24,
    }
