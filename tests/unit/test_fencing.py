"""Whether a rank may still write, as the newest file of epochs says."""

from pathlib import Path
from typing import Any

import pytest

from phalanx import fencing
from phalanx.cluster import epochs
from phalanx.errors import RunError
from phalanx.records import RunPaths

TELLS = "since epoch 2 the run goes on with another one on other nodes; this node was cut off from them and ends"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


@pytest.mark.parametrize(
    ("attempt", "epoch", "over"),
    [
        (4, 1, True),  # of the same number, and of the leader before
        (9, 1, True),
        (3, 2, True),
        (4, 2, False),
        (1, 3, False),
        (3, None, True),  # of one node alone, before there were several
        (4, None, False),
    ],
)
def test_a_rank_may_write_that_was_started_in_the_newest_epoch(
    attempt: int, epoch: int | None, over: bool, paths: RunPaths
) -> None:
    fencing.before_commit(paths, attempt, epoch)  # there are no files
    for number in (1, 2):
        assert epochs.claim(paths, number, {"since": number, "attempt": 2 * number}) is None
    if over:
        with pytest.raises(RunError, match=TELLS):
            fencing.before_commit(paths, attempt, epoch)
    else:
        fencing.before_commit(paths, attempt, epoch)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"attempt": "9"}'])
def test_a_file_that_is_being_written_says_nothing(text: str, paths: RunPaths) -> None:
    paths.epoch(1).parent.mkdir()
    paths.epoch(1).write_text(text)
    fencing.before_commit(paths, 1, 1)


def test_a_job_that_begins_leaves_nobody_of_an_earlier_one_writing(paths: RunPaths) -> None:
    told: dict[str, Any] = {"attempt": 1, "leader": 0}
    assert [epochs.claim_next(paths, told) for _ in range(2)] == [1, 2]
    assert fencing.newest(paths) == {"epoch": 2, "since": 2, **told}
    with pytest.raises(RunError, match=TELLS):
        fencing.before_commit(paths, 1, 1)
    fencing.before_commit(paths, 1, 2)
