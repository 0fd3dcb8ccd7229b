"""Runs whose node has no shared memory for them, or that keep nothing there: they go on, and nothing is made there."""

import functools
import tempfile
from pathlib import Path
from typing import Any

from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.recovery import shared_memory
from tests.dist.command import call, write_place
from tests.helpers import run_ranks
from tests.numerics import runs


def without(placement: Placement, folder: str, arguments: list[str], place: str) -> list[Any]:
    """What a command line comes to where shared memory is at `place`, and where it makes folders for a while."""
    made: list[str] = []
    make = tempfile.mkdtemp

    def noted(suffix: Any = None, prefix: Any = None, dir: Any = None) -> str:
        made.append(str(dir))
        return make(suffix, prefix, dir)

    tempfile.mkdtemp = noted
    shared_memory.hold_folder = functools.partial(shared_memory.hold_folder, place=Path(place))
    return [*call(placement, folder, [arguments])[0], made]


def train(folder: Path, place: str, *overrides: str) -> list[Any]:
    write_place(folder)
    arguments = ["train", "recipe.yaml", "--run-dir", "run", "--ranks", "1", *overrides]
    found: list[Any] = run_ranks(without, 1, folder=str(folder), arguments=arguments, place=place)[0]
    return found


def test_a_run_goes_on_without_shared_memory(tmp_path: Path) -> None:
    code, _, err, made = train(tmp_path, "/proc")
    assert code == 0, err
    warnings = [event["message"] for event in runs.events(tmp_path / "run", EventKind.WARNING)]
    assert any(
        "shared memory cannot be used (/proc:" in each and "steps are not kept in memory" in each for each in warnings
    )
    decided = [
        event
        for event in runs.events(tmp_path / "run", EventKind.AUTO_RESOLVED)
        if event["key"] == "resilience.in_memory_checkpoints"
    ]
    assert [event["value"] for event in decided] == [False]
    assert made[-1] == tempfile.gettempdir()  # where the pulses of its ranks were


def test_what_was_asked_for_and_cannot_be_is_refused(tmp_path: Path) -> None:
    code, _, err, _ = train(tmp_path, "/proc", "resilience.in_memory_checkpoints=true")
    assert code == 2
    assert "resilience.in_memory_checkpoints is true, but shared memory cannot be used (/proc:" in err


def test_with_nothing_kept_nothing_is_made_there(tmp_path: Path) -> None:
    code, _, err, made = train(tmp_path, str(shared_memory.SHM_ROOT), "resilience.in_memory_checkpoints=false")
    assert code == 0, err
    assert str(shared_memory.SHM_ROOT) not in made
    assert shared_memory.find_folder(RunPaths(tmp_path / "run")) is None
    assert not runs.events(tmp_path / "run", EventKind.WARNING)


def test_a_run_that_keeps_steps_leaves_no_folder(tmp_path: Path) -> None:
    code, _, err, made = train(tmp_path, str(shared_memory.SHM_ROOT))
    assert code == 0, err
    assert str(shared_memory.SHM_ROOT) in made
    assert shared_memory.find_folder(RunPaths(tmp_path / "run")) is None
