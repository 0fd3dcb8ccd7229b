"""A rank that hangs is named by those that waited for it."""

import time

import pytest

from phalanx.comm.mesh import join
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import CollectiveError
from phalanx.core.placement import Placement
from tests.helpers import run_ranks

PATIENCE_S = 3.0


def hang(placement: Placement, sleeper: int) -> str:
    """The error that this rank would raise; the sleeper never comes to the second collective."""
    with join(placement, PATIENCE_S) as mesh:
        mesh.sum([1.0])
        if placement.rank == sleeper:
            time.sleep(PATIENCE_S + 4)
            return "slept"
        try:
            mesh.sum([1.0])
        except RuntimeError as error:
            blamed = mesh.roll_call.name_missing_ranks(error)
            return f"{type(blamed).__name__}: {blamed}"
    return "no error"


def slow_store(placement: Placement) -> list[int] | None:
    with join(placement, PATIENCE_S, 30) as mesh:
        if placement.rank == 1:
            time.sleep(PATIENCE_S + 1)
        return JsonGroup(mesh.checkpoint).gather_objects(placement.rank)


def other_error(placement: Placement) -> bool:
    with join(placement, PATIENCE_S) as mesh:
        mistake = RuntimeError("shapes differ")
        return mesh.roll_call.name_missing_ranks(mistake) is mistake


@pytest.mark.parametrize("sleeper", [0, 1])
def test_the_late_rank_is_named(sleeper: int) -> None:
    answers = run_ranks(hang, 2, sleeper=sleeper)
    assert answers[sleeper] == "slept"
    named = answers[1 - sleeper]
    assert named.startswith(f"{CollectiveError.__name__}: rank {sleeper} of 2 did not respond after a collective")
    assert "comm.timeout_s" in named


def noticing(placement: Placement, lost: int | None) -> str:
    """What a rank says that notices a failure later than the one before it; `lost` does not."""
    with join(placement, 20) as mesh:
        mesh.sum([1.0])
        if placement.rank == lost:
            time.sleep(8)
            return "nothing"
        time.sleep(0.6 * placement.rank)
        return str(mesh.roll_call.name_missing_ranks(RuntimeError("gloo: the pair was closed")))


def test_who_is_slow_to_notice_is_not_named() -> None:
    *said, nothing = run_ranks(noticing, 4, lost=3)
    assert nothing == "nothing"
    assert all(each.startswith("rank 3 of 4 did not respond") for each in said), said
    assert all(each.startswith("a collective failed on all 3 ranks") for each in run_ranks(noticing, 3, lost=None))


def test_a_rank_whose_store_is_still_tried_is_waited_for() -> None:
    assert run_ranks(slow_store, 2) == [[0, 1], None]


def test_an_error_that_is_no_collective_s_blames_nobody() -> None:
    assert run_ranks(other_error, 2) == [True, True]
