"""Killed or stopped and started again: the same curve, bitwise on the same layout."""

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.trainer import train_rank
from tests.dist.incidents import train_with_signal
from tests.helpers import ALL, run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import Outcome, distance, farthest, same_bits, walk

OFTEN = {"checkpoint.every": 1}


def assert_bitwise(found: Outcome, undisturbed: Outcome) -> None:
    assert found.losses == undisturbed.losses
    assert found.norms == undisturbed.norms
    assert same_bits(found.state, undisturbed.state)
    assert found.evaluations == undisturbed.evaluations


def random_step(seed: int) -> int:
    # The save of step 2 waits for that of step 1: from step 3 on there certainly is a checkpoint.
    return random.Random(seed).randrange(3, runs.STEPS - 1)


@pytest.mark.parametrize(("seed", "victims"), some([(2, [0]), (3, [0, 1]), (1, [1])], 0))
def test_killed_and_started_again_by_the_agent(
    seed: int, victims: list[int], undisturbed: Outcome, tokens: Path, tmp_path: Path
) -> None:
    step = random_step(seed)
    kwargs = {"step": step, "number": signal.SIGKILL, "ranks": victims}
    codes = run_ranks(train_with_signal, 2, restarts=1, run=str(tmp_path), data=str(tokens), changes=OFTEN, **kwargs)
    assert codes == [0, 0]
    resumed = runs.events(tmp_path, EventKind.RESUMED)
    print(f"killed {victims} in step {step + 1}, resumed from", [event["step"] for event in resumed])
    assert len(resumed) == 1
    assert 0 < resumed[0]["step"] <= step
    attempts = {record["attempt"] for record in read_lines(RunPaths(tmp_path).metrics)}
    assert attempts == {1, 2}
    assert_bitwise(runs.outcome(tmp_path), undisturbed)


@pytest.mark.parametrize(("ranks", "dtype"), some([(2, "bf16"), (1, "fp32"), (1, "bf16")], 0, 1))
def test_killed_with_other_engines_and_types(ranks: int, dtype: str, tokens: Path, tmp_path: Path) -> None:
    changes = {"train.dtype": dtype, "train.micro_batch": 3, "model.tie_embeddings": True, "train.steps": 6}
    quiet = walk(ranks, tmp_path / "quiet", tokens, **{key.replace(".", "__"): value for key, value in changes.items()})
    run, kwargs = tmp_path / "killed", {"step": 4, "number": signal.SIGKILL, "ranks": [ranks - 1]}
    run.mkdir()
    codes = run_ranks(
        train_with_signal, ranks, restarts=1, run=str(run), data=str(tokens), changes=changes | OFTEN, **kwargs
    )
    assert codes == [0] * ranks
    assert len(runs.events(run, EventKind.RESUMED)) == 1
    assert_bitwise(runs.outcome(run), quiet)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), *([(1, 2)] if ALL else [])])
def test_killed_and_resumed_on_another_number_of_ranks(
    before: int, after: int, undisturbed: Outcome, tokens: Path, tmp_path: Path
) -> None:
    step = random_step(10 * before + after)
    kwargs = {"step": step, "number": signal.SIGKILL, "ranks": [before - 1]}
    with pytest.raises(AssertionError, match="killed by SIGKILL"):
        run_ranks(train_with_signal, before, run=str(tmp_path), data=str(tokens), changes=OFTEN, **kwargs)
    found = walk(after, tmp_path, tokens, checkpoint__every=1)
    resumed = [event["step"] for event in runs.events(tmp_path, EventKind.RESUMED)]
    apart = farthest(found.losses, undisturbed.losses), distance(found.state, undisturbed.state, "param")
    print(f"killed in step {step + 1}, resumed from {resumed}: losses {apart[0]:.1e}, parameters {apart[1]:.1e} apart")
    assert len(resumed) == 1
    assert 0 < resumed[0] <= step
    assert max(apart) < 1e-9


@pytest.mark.parametrize(
    ("number", "ranks"), some([(signal.SIGTERM, [1]), (signal.SIGUSR1, [0]), (signal.SIGTERM, [0, 1])], 0, 1)
)
def test_asked_to_stop_the_ranks_finish_the_step_and_save(
    number: int, ranks: list[int], undisturbed: Outcome, tokens: Path, tmp_path: Path
) -> None:
    kwargs = {"step": 3, "number": number, "ranks": ranks}
    codes = run_ranks(train_with_signal, 2, run=str(tmp_path), data=str(tokens), changes={}, **kwargs)
    assert codes == [ExitCode.STOPPED] * 2
    kinds = [event["kind"] for event in runs.events(tmp_path)]
    assert kinds[-1] == EventKind.STOPPED
    stopped = runs.events(tmp_path, EventKind.STOPPED)[0]["step"]
    saved = [event["step"] for event in runs.events(tmp_path, EventKind.CHECKPOINT_SAVED)]
    # The record of step 3 is written within step 4; another rank may see the signal one step later.
    assert stopped in (4, 5)
    assert saved == [stopped]
    assert len(runs.outcome(tmp_path).losses) == stopped
    found = walk(2, tmp_path, tokens)
    assert [event["step"] for event in runs.events(tmp_path, EventKind.RESUMED)] == [stopped]
    assert_bitwise(found, undisturbed)


def test_a_signal_in_the_last_step_still_lets_the_run_end(tokens: Path, tmp_path: Path) -> None:
    short = {"train.steps": 6}
    kwargs = {"step": 5, "number": signal.SIGTERM, "ranks": [0]}
    codes = run_ranks(train_with_signal, 1, run=str(tmp_path), data=str(tokens), changes=short, **kwargs)
    assert codes == [ExitCode.STOPPED]
    assert not runs.events(tmp_path, EventKind.EVALUATED)
    walk(1, tmp_path, tokens, train__steps=6)
    assert [event["step"] for event in runs.events(tmp_path, EventKind.FINISHED)] == [6]
    assert len(runs.events(tmp_path, EventKind.EVALUATED)) == 1


def copy_through(placement: Placement, run: str, data: str, copy: str) -> int:
    """Load the newest checkpoint of `run`, save that very state into `copy`, and walk one step more."""
    described = runs.job(run, data, {"train.steps": 4, "train.eval_sequences": 0}, placement.world)
    with runs.loop_of(placement, described) as loop:
        step = loop.restore()
        loop.setup.saver.folder = RunPaths(Path(copy)).checkpoints
        loop.save(step)
        loop.setup.saver.wait()
        loop.setup.saver.folder = described.paths.checkpoints
        return int(train_rank.run_steps(loop, step))


@pytest.mark.parametrize("before", some([1, 2, 3, 5], 2))
def test_saved_on_any_number_of_ranks_loads_on_any(before: int, tokens: Path, tmp_path: Path) -> None:
    first: dict[str, Any] = {"train__steps": 3, "train__eval_sequences": 0}
    written = walk(before, tmp_path / "first", tokens, **first)
    losses = []
    another = {1: 3, 2: 5, 3: 1, 5: 2}[before]
    for after in (1, 2, 3, 5) if ALL else (before, another):
        run, copy = tmp_path / f"{before}-{after}", tmp_path / f"copy-{before}-{after}"
        shutil.copytree(tmp_path / "first", run)
        codes = run_ranks(copy_through, after, run=str(run), data=str(tokens), copy=str(copy))
        assert codes == [0] * after
        assert same_bits(runs.state(copy), written.state), f"saved on {before}, loaded on {after}"
        losses.append(runs.outcome(run).losses[3])
    print(f"saved on {before}: next losses differ by {farthest(losses, losses[:1] * len(losses)):.1e}")
    assert farthest(losses, losses[:1] * len(losses)) < 1e-9


def test_no_steps_write_a_checkpoint_of_the_starting_weights(tokens: Path, tmp_path: Path) -> None:
    found = walk(1, tmp_path, tokens, train__steps=0)
    assert found.losses == []
    assert found.evaluations == {}
    assert [event["step"] for event in runs.events(tmp_path, EventKind.CHECKPOINT_SAVED)] == [0]
    assert not any(tensor.any() for name, tensor in found.state.items() if name.startswith("exp_avg"))
    assert all(tensor.any() for name, tensor in found.state.items() if name.startswith("param"))
    more = walk(1, tmp_path, tokens, train__steps=3)  # and training goes on from it
    assert [event["step"] for event in runs.events(tmp_path, EventKind.RESUMED)] == [0]
    assert more.losses == walk(1, tmp_path / "fresh", tokens, train__steps=3).losses
