"""What ranks resolve together: a slow device gets fewer blocks, the same ones at the next start, and the curve stays;
and all shard alike, whatever each found of its own memory."""

import dataclasses
from pathlib import Path

from phalanx.autotune.probe_model import ProbeModel
from phalanx.comm.mesh import join
from phalanx.config.load import update_config
from phalanx.core.placement import Placement
from phalanx.parallel import model_part
from phalanx.workload.engines import agree_on_sharding, make_sharding_spec
from tests.helpers import run_ranks
from tests.numerics import runs

CHANGES = {"model.layers": 6, "train.micro_batch": 1, "train.steps": 1, "parallel.pipeline": 2, "model.vocab_size": 61}


def on_unlike(placement: Placement, run: str, data: str, changes: dict[str, object], slow: list[float]) -> list[int]:
    """A run in which a pass takes this rank so long; the blocks of the stages that its model was cut into."""
    cuts: list[list[int]] = []
    cut = model_part.plan_stages

    def note(*args: object, **kwargs: object) -> object:
        plan = cut(*args, **kwargs)  # type: ignore[arg-type]
        cuts.append([len(layers) for layers in plan.layers])
        return plan

    model_part.plan_stages = note  # type: ignore[assignment]
    ProbeModel.measure_seconds = lambda self, samples, passes=1: slow[placement.rank]  # type: ignore[method-assign]
    assert runs.train(placement, run, data, changes) == 0
    return cuts[-1]


def agreed(placement: Placement, data: str, found: list[dict[str, object]]) -> list[object]:
    """What the ranks shard, where each has resolved what is `found`."""
    config = runs.job(Path(data) / "run", data, {}, placement.world).config
    mine = update_config(config, found[placement.rank])
    with join(placement, 60.0) as mesh:
        return list(dataclasses.astuple(make_sharding_spec(agree_on_sharding(mine, mesh)))[:4])


def stages_of(run: Path) -> list[object]:
    return [
        event["value"] for event in runs.events(run, "auto_resolved") if event["key"] == "parallel.layers_per_stage"
    ]


def test_the_slower_half_gets_fewer_blocks_and_keeps_them(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    runs.write_tokens(data)
    where = {"run": str(tmp_path / "run"), "data": str(data)}
    assert run_ranks(on_unlike, 2, timeout_s=180, **where, changes=CHANGES, slow=[1.0, 3.0]) == [[5, 1]] * 2
    assert stages_of(tmp_path / "run") == [[5, 1]]
    # What a neighbour does to the second measurement is of no account.
    longer = CHANGES | {"train.steps": 2}
    assert run_ranks(on_unlike, 2, timeout_s=180, **where, changes=longer, slow=[3.0, 1.0]) == [[5, 1]] * 2
    assert stages_of(tmp_path / "run") == [[5, 1]]


def test_devices_that_are_nearly_alike_are_taken_for_alike(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    runs.write_tokens(data)
    where = {"run": str(tmp_path / "run"), "data": str(data)}
    assert run_ranks(on_unlike, 2, timeout_s=180, **where, changes=CHANGES, slow=[1.0, 1.2]) == [[3, 3]] * 2
    assert stages_of(tmp_path / "run") == [[3, 3]]
    # They stay so, whatever a neighbour does to the next measurement: another cut adds up in another order.
    longer = CHANGES | {"train.steps": 2}
    assert run_ranks(on_unlike, 2, timeout_s=180, **where, changes=longer, slow=[1.0, 3.0]) == [[3, 3]] * 2
    assert stages_of(tmp_path / "run") == [[3, 3]]


def test_a_longer_pipeline_of_the_same_ranks_is_measured_anew(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    runs.write_tokens(data)
    where = {"run": str(tmp_path / "run"), "data": str(data)}
    slow = [1.0, 1.0, 3.0, 3.0]
    assert len({tuple(cut) for cut in run_ranks(on_unlike, 4, timeout_s=180, **where, changes=CHANGES, slow=slow)}) == 1
    longer = CHANGES | {"train.steps": 2, "parallel.pipeline": 4}
    assert [len(cut) for cut in run_ranks(on_unlike, 4, timeout_s=180, **where, changes=longer, slow=slow)] == [4] * 4
    assert [len(stages) for stages in stages_of(tmp_path / "run")] == [2, 4]


def test_all_shard_as_much_as_the_one_with_the_least_memory(tmp_path: Path) -> None:
    runs.write_tokens(tmp_path)
    found = [
        {"parallel.zero": 1, "parallel.grad_reduce": "per_step", "optim.double_buffer": True},
        {"parallel.zero": 2, "parallel.grad_reduce": "per_micro_batch", "optim.double_buffer": True},
    ]
    assert run_ranks(agreed, 2, timeout_s=60, data=str(tmp_path), found=found) == [[2, "per_micro_batch", None, 2]] * 2
    found[1] |= {"parallel.zero": 3, "optim.double_buffer": False}
    assert run_ranks(agreed, 2, timeout_s=60, data=str(tmp_path), found=found) == [[3, "per_micro_batch", None, 1]] * 2
