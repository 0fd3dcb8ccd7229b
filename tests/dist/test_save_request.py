"""A checkpoint on request: a file in the run folder, which all ranks heed at the end of the same step."""

from pathlib import Path

from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.trainer.stop_request import SaveRequestFile
from tests.numerics import runs
from tests.numerics.runs import walk


def test_a_run_saves_when_it_is_asked_to(tokens: Path, tmp_path: Path) -> None:
    RunPaths(tmp_path).save_request.touch()
    walk(2, tmp_path, tokens, train__steps=5, checkpoint__every=0)
    assert [event["step"] for event in runs.events(tmp_path, EventKind.CHECKPOINT_SAVED)] == [1, 5]
    assert not RunPaths(tmp_path).save_request.exists()


def test_rank_0_alone_takes_a_request_and_looks_once_a_second(tmp_path: Path) -> None:
    path = RunPaths(tmp_path).save_request
    path.touch()
    assert not SaveRequestFile(path, rank=1).take() and path.exists()
    request = SaveRequestFile(path, rank=0)
    assert request.take() and not path.exists()
    path.touch()
    assert not request.take()  # not yet
