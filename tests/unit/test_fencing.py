"""Whether a rank may still write, as the newest file of epochs says; and that it is not to blame for that."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import CutOff, RunError
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import epoch_files
from phalanx.recovery import fencing
from phalanx.system.exit_causes import WorkerExit, describe_exception, is_secondary_failure

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
    fencing.check_before_commit(paths, attempt, epoch)  # there are no files
    for number in (1, 2):
        assert epoch_files.claim(paths, number, {"since": number, "attempt": 2 * number}) is None
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
    assert [epoch_files.claim_next(paths, told) for _ in range(2)] == [1, 2]
    assert fencing.read_newest_epoch(paths) == {"epoch": 2, "since": 2, **told}
    with pytest.raises(CutOff, match=TELLS):
        fencing.check_before_commit(paths, 1, 1)
    fencing.check_before_commit(paths, 1, 2)


@pytest.mark.parametrize("begun", ["", "{", '{"epoch": 3}', "[]", '{"attempt": "4"}'])
def test_while_a_file_is_being_written_the_one_before_counts(begun: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for epoch, attempt in ((1, 1), (9, 2)):  # numbers, not names
        epoch_files.claim(paths, epoch, {"attempt": attempt})
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
