"""Looking into steps of real runs: every rank leaves a trace, and the curve does not notice."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.report import html
from phalanx.system.trace import PHASES
from phalanx.trainer import train_rank
from phalanx.trainer.profile import OUTSIDE
from tests.helpers import run_ranks
from tests.numerics import runs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    runs.write_tokens(folder)
    return folder


def phases_of(trace: Path) -> set[str]:
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def test_two_ranks_are_looked_into_and_walk_the_same_curve(tmp_path: Path, data: Path) -> None:
    every: dict[str, Any] = {"train__steps": 4, "train__eval_every": 2, "checkpoint__every": 2}
    plain = runs.walk(2, tmp_path / "plain", data, **every)
    looked = runs.walk(
        2, tmp_path / "looked", data, **every, train__profile="2-3", train__memory_snapshot=4
    )  # fmt: skip
    assert looked.losses == plain.losses
    assert runs.same_bits(looked.state, plain.state)

    paths = RunPaths(tmp_path / "looked")
    traces = [paths.trace(rank, 2, 3) for rank in (0, 1)]
    memories = [paths.memory(rank, 4, "json") for rank in (0, 1)]
    assert sorted(paths.profile.iterdir()) == sorted([*traces, *memories])
    assert not RunPaths(tmp_path / "plain").profile.exists()
    for trace in traces:
        assert {f"phalanx.{name}" for name in PHASES} <= phases_of(trace)
    (event,) = runs.events(paths.root, "profiled")
    assert (event["first"], event["last"]) == (2, 3)
    assert set(event["phases"]) == set(PHASES)
    assert all(0 < mine <= slowest for mine, slowest in event["phases"].values())
    assert event["operators"]

    (event,) = runs.events(paths.root, "memory_recorded")
    assert event["file"] == str(memories[0])
    for memory in memories:
        found = json.loads(memory.read_text())
        assert found["step"] == 4
        # Updates are made beside the passes, and take nothing that stays.
        assert {"forward", "backward"} <= set(found["phases"]) <= {*PHASES, OUTSIDE}
        assert 0 < found["phases"]["forward"]["kept_bytes"] <= found["peak_bytes"]
    page = html.write_report(paths).read_text()
    assert "steps 2 to 3, time of a step" in page
    assert "step 4, rank 0, bytes above" in page


def test_a_run_that_goes_on_within_the_window_sees_the_rest_of_it(tmp_path: Path, data: Path) -> None:
    runs.walk(1, tmp_path / "run", data, train__steps=3)
    runs.walk(1, tmp_path / "run", data, train__steps=6, train__profile="2-5", train__memory_snapshot=1)
    paths = RunPaths(tmp_path / "run")
    assert list(paths.profile.iterdir()) == [paths.trace(0, 4, 5)]
    (message,) = [event["message"] for event in runs.events(paths.root, "warning")]
    assert message == "steps 1 to 1 are not profiled: they were done before this start"


def fail_in_step_three(placement: Placement, run: str, data: str) -> list[str]:
    """A run whose third step fails, within the steps that are traced; what is found in its folder then."""
    described = runs.job(run, data, {"train.steps": 5, "train.profile": "2-4"}, placement.world)
    with runs.loop_of(placement, described) as loop:
        finish = loop.setup.components.engine.finish_step

        def failing(*arguments: object) -> object:
            if loop.setup.components.engine.step == 2:
                raise RuntimeError("the device is gone")
            return finish(*arguments)  # type: ignore[arg-type]

        loop.setup.components.engine.finish_step = failing  # type: ignore[method-assign,assignment]
        with pytest.raises(RuntimeError, match="the device is gone"), loop.profiler:
            train_rank.run_steps(loop, loop.restore())
    return sorted(path.name for path in RunPaths(Path(run)).profile.iterdir())


def test_a_failing_run_leaves_what_was_seen_until_then(tmp_path: Path, data: Path) -> None:
    (names,) = run_ranks(fail_in_step_three, 1, run=str(tmp_path / "run"), data=str(data))
    assert names == ["rank-00000-steps-2-3.json.gz"]
