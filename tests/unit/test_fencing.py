"""Whether a rank may still write, as the newest file of epochs says; and that it is not to blame for that."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import CutOff, RunError
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import election
from phalanx.recovery import fencing
from phalanx.system.exit_causes import WorkerExit, describe_exception, is_secondary_failure

TELLS = "since epoch 2 the run continues on other nodes; this node was cut off from them and exits"


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
    fencing.check_before_commit(paths, attempt, epoch)  # there are no files
    for number in (1, 2):
        assert election.claim(paths, number, {"since": number, "attempt": 2 * number}) is None
    if over:
        with pytest.raises(RunError if epoch is None else CutOff, match=TELLS):
            fencing.check_before_commit(paths, attempt, epoch)
    else:
        fencing.check_before_commit(paths, attempt, epoch)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"attempt": "9"}'])
def test_a_lone_file_that_is_being_written_says_nothing(text: str, paths: RunPaths) -> None:
    paths.epoch(1).parent.mkdir()
    paths.epoch(1).write_text(text)
    fencing.check_before_commit(paths, 1, 1)


def test_a_job_that_begins_leaves_nobody_of_an_earlier_one_writing(paths: RunPaths) -> None:
    told: dict[str, Any] = {"attempt": 1, "leader": 0}
    assert [election.claim_next(paths, told) for _ in range(2)] == [1, 2]
    assert fencing.read_newest_epoch(paths) == {"epoch": 2, "since": 2, **told}
    with pytest.raises(CutOff, match=TELLS):
        fencing.check_before_commit(paths, 1, 1)
    fencing.check_before_commit(paths, 1, 2)


@pytest.mark.parametrize("begun", ["", "{", '{"epoch": 3}', "[]", '{"attempt": "4"}'])
def test_while_a_file_is_being_written_the_one_before_counts(begun: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for epoch, attempt in ((1, 1), (9, 2)):  # numbers, not names
        election.claim(paths, epoch, {"attempt": attempt})
    paths.epoch(10).write_text(begun)
    fencing.check_before_commit(paths, 2, 9)
    with pytest.raises(CutOff):
        fencing.check_before_commit(paths, 1, 1)


def test_it_is_no_mistake_of_the_recipe_and_no_first_cause() -> None:
    """Else a save that ends with its attempt would end the run, and be what it is said to have died of."""
    found = describe_exception(CutOff("the run goes on elsewhere"))
    end = WorkerExit(0, 1, None, found["exit_code"], found)
    assert found["exit_code"] == ExitCode.FAILED
    assert is_secondary_failure(end)
    assert not is_secondary_failure(replace(end, cause=describe_exception(ValueError("the run goes on elsewhere"))))


def test_an_epoch_is_written_before_others_find_it(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(election.os, "fsync", lambda descriptor: found.append(paths.epoch(1).exists()))
    assert election.claim(paths, 1, {"leader": 3}) is None
    assert found == [False]
    assert fencing.read_epoch(paths, 1) == {"epoch": 1, "leader": 3}
    assert [path.name for path in paths.epoch(1).parent.iterdir()] == [paths.epoch(1).name]


def test_an_epoch_is_claimed_once_where_there_are_no_hard_links_or_their_answer_is_lost(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    def make_twice(passing: Path, path: Path) -> None:
        link(passing, path)
        link(passing, path)

    for epoch, how in ((1, refuse), (2, make_twice)):
        monkeypatch.setattr(election.os, "link", how)
        assert election.claim(paths, epoch, {"leader": 3}) is None
        assert election.claim(paths, epoch, {"leader": 4}) == {"epoch": epoch, "leader": 3}
    assert len(list(paths.epoch(1).parent.iterdir())) == 2
