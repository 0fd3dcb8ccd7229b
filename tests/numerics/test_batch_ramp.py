"""A global batch that grows at the start: Megatron's rule, and one curve on any division, stopped and resumed."""

from pathlib import Path

import pytest

from phalanx.comm.mesh import join
from phalanx.config.load import build_config
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.layout.batch_ramp import make_batch_schedule
from phalanx.trainer import train_rank
from tests.helpers import ALL, run_ranks
from tests.numerics import runs
from tests.numerics.runs import distance, farthest

RAMP, STEPS = [2, 2, 20], 9
SIZES = [2, 2, 2, 2, 4, 4, 6, 8, 8]


@pytest.mark.parametrize(
    ("full", "ramp"), [(8, RAMP), (256, [16, 16, 5000]), (100, [1, 33, 7]), (9, [8, 1, 1]), (64, [1, 1, 1000])]
)
def test_sizes_follow_the_sequences_so_far(full: int, ramp: list[int]) -> None:
    start, increment, samples = ramp
    schedule, done = make_batch_schedule(full, ramp), 0
    for step in range(1, 400):
        grown = done * ((full - start) // increment) // samples
        size = min(full, start + grown * increment)
        assert (schedule.batch_size(step), schedule.first_sequence(step)) == (size, done), step
        done += size
        assert schedule.count_steps(done) == step
        assert schedule.count_steps(done + 1) == step + 1
    assert make_batch_schedule(full).first_sequence(400) == 399 * full


def train(placement: Placement, folder: str, data: str) -> list[int]:
    """The run, on several ranks in uneven shares, stopped within the ramp and resumed."""
    found, world = [], placement.world
    changes = {"train.rampup_batch": RAMP, "optim.decay_steps": STEPS, "train.eval_sequences": 0}
    changes["balance.batch"] = {1: "even", 2: [5, 3], 3: [4, 1, 3]}[world]
    with join(placement, 60) as mesh:
        for steps in (STEPS,) if world == 1 else (3, STEPS):
            described = runs.job(f"{folder}/{world}", data, changes | {"train.steps": steps}, world)
            loop = runs.loop_among(mesh, runs.on_one_thread(placement), described)
            found.append(int(train_rank.run_steps(loop, loop.restore())))
            loop.setup.close()
    return found


def test_any_ranks_walk_the_curve_of_one(tokens: Path, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "data": str(tokens)}
    many = (2, 3) if ALL else (3,)
    for ranks in (1, *many):
        run_ranks(train, ranks, **arguments)
    alone = runs.outcome(tmp_path / "1")
    for ranks in many:
        found = runs.outcome(tmp_path / f"{ranks}")
        apart = max(farthest(found.losses, alone.losses), distance(found.state, alone.state, "param"))
        print(ranks, apart)
        assert apart < 1e-9
    steps = [record["tokens"] for record in runs.read_steps(runs.RunPaths(tmp_path / "3").metrics)]
    assert steps == [16 * size for size in SIZES]


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ([32, 1, 9], "does not lead to train.global_batch 32 in whole increments"),
        ([8, 7, 9], "does not lead to train.global_batch 32 in whole increments"),
        ([8, 8], "must be the first batch, the increment and the sequences of the ramp"),
        ([8, 0, 9], "must be the first batch, the increment and the sequences of the ramp"),
        (8, "must be the first batch, the increment and the sequences of the ramp"),
    ],
)
def test_nonsense_is_refused(ramp: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config({"model": {"preset": "llama-3.2-1b"}, "train": {"rampup_batch": ramp}}, "here")
