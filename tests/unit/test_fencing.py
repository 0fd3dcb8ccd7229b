"""Ranks whose attempt is over write no checkpoint any more, and are not to blame for that."""

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx import fencing
from phalanx.cluster import epochs
from phalanx.cluster.causes import End, describe, is_aftermath
from phalanx.errors import CutOff
from phalanx.records import ExitCode, RunPaths


def test_who_belongs_to_an_attempt_of_before_writes_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    fencing.before_commit(paths, 1)  # a run on one node has no epochs
    epochs.claim(paths, 1, {"attempt": 1, "leader": 0})
    fencing.before_commit(paths, 1)
    epochs.claim(paths, 2, {"attempt": 2, "leader": 1})
    fencing.before_commit(paths, 2)
    with pytest.raises(CutOff, match="attempt 1, and the run goes on with attempt 2"):
        fencing.before_commit(paths, 1)


@pytest.mark.parametrize("begun", ["", "{", '{"epoch": 3}', "[]", '{"attempt": "4"}'])
def test_while_a_file_is_being_written_the_one_before_counts(begun: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for epoch, attempt in ((1, 1), (9, 2)):  # numbers, not names
        epochs.claim(paths, epoch, {"attempt": attempt})
    paths.epoch(10).write_text(begun)
    fencing.before_commit(paths, 2)
    with pytest.raises(CutOff):
        fencing.before_commit(paths, 1)


def test_it_is_no_mistake_of_the_recipe_and_no_first_cause() -> None:
    """Else a save that ends with its attempt would end the run, and be what it is said to have died of."""
    found = describe(CutOff("the run goes on elsewhere"))
    end = End(0, 1, None, found["exit_code"], found)
    assert found["exit_code"] == ExitCode.FAILED
    assert is_aftermath(end)
    assert not is_aftermath(replace(end, cause=describe(ValueError("the run goes on elsewhere"))))
