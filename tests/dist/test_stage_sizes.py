"""A slow device gets fewer blocks, the same ones at the next start, and the curve stays."""

from pathlib import Path

from phalanx.autotune.probe_model import ProbeModel
from phalanx.core.placement import Placement
from tests.helpers import run_ranks
from tests.numerics import runs

CHANGES = {"model.layers": 6, "train.micro_batch": 1, "train.steps": 2, "parallel.pipeline": 2, "model.vocab_size": 61}


def on_unlike(placement: Placement, run: str, data: str, changes: dict[str, object], slow: list[float]) -> int:
    """A run in which a pass takes this rank so long."""
    ProbeModel.measure_seconds = lambda self, samples, passes=1: slow[placement.rank]  # type: ignore[method-assign]
    return runs.train(placement, run, data, changes)


def stages_of(run: Path) -> list[object]:
    return [
        event["value"] for event in runs.events(run, "auto_resolved") if event["key"] == "parallel.layers_per_stage"
    ]


def test_the_slower_half_gets_fewer_blocks_and_keeps_them(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    runs.write_tokens(data)
    where = {"run": str(tmp_path / "run"), "data": str(data)}
    assert run_ranks(on_unlike, 2, timeout_s=180, **where, changes=CHANGES, slow=[1.0, 3.0]) == [0, 0]
    assert stages_of(tmp_path / "run") == [[5, 1]]
    # What a neighbour does to the second measurement is of no account.
    longer = CHANGES | {"train.steps": 4}
    assert run_ranks(on_unlike, 2, timeout_s=180, **where, changes=longer, slow=[3.0, 1.0]) == [0, 0]
    assert stages_of(tmp_path / "run") == [[5, 1]]


def test_devices_that_are_nearly_alike_are_taken_for_alike(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    runs.write_tokens(data)
    where = {"run": str(tmp_path / "run"), "data": str(data)}
    assert run_ranks(on_unlike, 2, timeout_s=180, **where, changes=CHANGES, slow=[1.0, 1.2]) == [0, 0]
    assert stages_of(tmp_path / "run") == [[3, 3]]
    # They stay so, whatever a neighbour does to the next measurement: another cut adds up in another order.
    longer = CHANGES | {"train.steps": 4}
    assert run_ranks(on_unlike, 2, timeout_s=180, **where, changes=longer, slow=[1.0, 3.0]) == [0, 0]
    assert stages_of(tmp_path / "run") == [[3, 3]]


def test_a_longer_pipeline_of_the_same_ranks_is_measured_anew(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    runs.write_tokens(data)
    where = {"run": str(tmp_path / "run"), "data": str(data)}
    slow = [1.0, 1.0, 3.0, 3.0]
    assert run_ranks(on_unlike, 4, timeout_s=180, **where, changes=CHANGES, slow=slow) == [0] * 4
    longer = CHANGES | {"train.steps": 4, "parallel.pipeline": 4}
    assert run_ranks(on_unlike, 4, timeout_s=180, **where, changes=longer, slow=slow) == [0] * 4
    assert [len(stages) for stages in stages_of(tmp_path / "run")] == [2, 4]
