"""Losses that are no numbers or spikes, and parameters that change by themselves: what is done about them is exact."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.disk.save import CheckpointSaver
from phalanx.core import faults
from phalanx.core.errors import PhalanxError
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.trainer import train_rank
from phalanx.trainer.skipped_batches import SkippedBatches
from tests.helpers import ALL, run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import same_bits

# A loss that hardly changes, so that a spike is one.
CALM = {"checkpoint.every": 4, "checkpoint.keep": 20, "train.eval_sequences": 0, "model.layers": 1}
CALM |= {"optim.lr": 1e-4, "resilience.rollback_steps": 3}
BACK = {"train.steps": 8, "checkpoint.every": 2, "resilience.on_nan": "rollback"}


def train(placement: Placement, run: str, data: str, changes: dict[str, Any], planned: list[str]) -> str:
    """The exit code of a run in which something goes wrong, or what it raised."""
    described = runs.job(run, data, CALM | changes, placement.world)
    described = dataclasses.replace(described, faults=tuple(faults.parse_faults(planned)))
    try:
        return str(int(train_rank.run_training(described, runs.on_one_thread(placement))))
    except PhalanxError as error:
        return f"{type(error).__name__}: {error}"


def train_past(placement: Placement, run: str, data: str, changes: dict[str, Any], skips: list[list[int]]) -> int:
    """A run that has never seen some batches."""
    described = runs.job(run, data, CALM | changes, placement.world)
    with runs.loop_of(placement, described) as loop:
        start = loop.restore()
        loop.skipped_batches = SkippedBatches(tuple((first, stop) for first, stop in skips))
        return int(train_rank.run_steps(loop, start))


def walk(run: Path, tokens: Path, *planned: str, ranks: int = 2, **changes: Any) -> list[str]:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return run_ranks(train, ranks, timeout_s=90, run=str(run), data=str(tokens), changes=dotted, planned=list(planned))


@pytest.mark.parametrize(
    ("ranks", "changes"),
    some([(2, {"train.dtype": "bf16"}), (2, {"parallel.zero": 3}), (2, {"optim.double_buffer": True}),
          (1, {}), (2, {"parallel.engine": "fsdp2"}), (2, {"parallel.tensor": 2})], 1),
)  # fmt: skip
def test_a_run_that_goes_back_walks_as_one_that_never_saw_the_data(
    ranks: int, changes: dict[str, Any], tokens: Path, tmp_path: Path
) -> None:
    """Step 6 goes wrong: back to the checkpoint of step 2, step 3 as before, past the data of 4 to 6."""
    kwargs = {"data": str(tokens), "changes": BACK | changes}
    done = run_ranks(train, ranks, timeout_s=180, run=str(tmp_path / "back"), planned=["nan:step=6"], **kwargs)
    assert done == ["0"] * ranks
    [back] = runs.events(tmp_path / "back", EventKind.ROLLED_BACK)
    assert (back["step"], back["from_step"], back["first"], back["last"]) == (2, 6, 4, 6)
    walked = run_ranks(train_past, ranks, timeout_s=180, run=str(tmp_path / "past"), skips=[[3, 6]], **kwargs)
    assert walked == [0] * ranks
    expected, found = runs.outcome(tmp_path / "past"), runs.outcome(tmp_path / "back")
    assert found.losses == expected.losses
    assert same_bits(found.state, expected.state)
    plain = runs.job(tmp_path / "back", tokens, kwargs["changes"], ranks)
    assert len(read_steps(plain.paths.metrics)) == 8


def test_whoever_goes_on_with_a_run_that_went_back_goes_on_with_that(tokens: Path, tmp_path: Path) -> None:
    """Killed in the steps that are done again, before those whose data are passed over; and once more behind them."""
    once = {name.replace(".", "__"): value for name, value in BACK.items()}
    assert walk(tmp_path / "one", tokens, "nan:step=6", **once) == ["0", "0"]
    # The first attempt ends at step 4, when it has come there for the second time.
    stop = {"run": str(tmp_path / "two"), "data": str(tokens), "changes": BACK, "planned": ["nan:step=6"]}
    run_ranks(train_and_die, 2, timeout_s=180, restarts=1, **stop)
    assert [event["step"] for event in runs.events(tmp_path / "two", EventKind.RESUMED)] == [2]
    one, two = runs.outcome(tmp_path / "one"), runs.outcome(tmp_path / "two")
    assert one.losses == two.losses
    assert same_bits(one.state, two.state)


def train_and_die(placement: Placement, run: str, data: str, changes: dict[str, Any], planned: list[str]) -> str:
    """As `train`, but the first attempt fails in step 4 once it has gone back; the disk is slow."""
    save = CheckpointSaver._save

    def slowly(saver: CheckpointSaver, job: Any) -> None:
        time.sleep(0.5)
        save(saver, job)

    saver_class: Any = CheckpointSaver
    saver_class._save = slowly  # of this forked process alone

    class Failing:
        went_back = False

        def on_step(self, record: dict[str, Any]) -> None:
            if self.went_back and record["step"] == 3 and placement.attempt == 1:
                raise RuntimeError("as the test wants")

        def on_event(self, event: dict[str, Any]) -> None:
            self.went_back |= event["kind"] == EventKind.ROLLED_BACK

        def close(self) -> None: ...

    described = runs.job(run, data, CALM | changes, placement.world)
    described = dataclasses.replace(described, faults=tuple(faults.parse_faults(planned)))
    return str(int(train_rank.run_training(described, runs.on_one_thread(placement), [Failing()])))


def test_a_spike_is_skipped_by_all_ranks_without_a_trace(tokens: Path, tmp_path: Path) -> None:
    """As a step whose gradient is no number, which has no weight in anything."""
    keys = {"train__steps": 25, "resilience__on_spike": "skip"}
    assert walk(tmp_path / "spike", tokens, "spike:rank=1,step=24,factor=10", **keys) == ["0", "0"]
    assert walk(tmp_path / "nan", tokens, "nan:rank=1,step=24", **keys) == ["0", "0"]
    [skipped] = runs.events(tmp_path / "spike", EventKind.STEP_SKIPPED)
    assert skipped["step"] == 24 and "spike" in skipped["reason"]
    records = read_steps(RunPaths(tmp_path / "spike").metrics)
    assert [record["step"] for record in records if record["skipped"]] == [24]
    assert records[23]["loss"] > 3 * records[22]["loss"]
    assert same_bits(runs.state(tmp_path / "spike"), runs.state(tmp_path / "nan"))


def test_a_spike_is_gone_back_behind(tokens: Path, tmp_path: Path) -> None:
    keys = {"train__steps": 24, "resilience__on_spike": "rollback"}
    assert walk(tmp_path, tokens, "spike:step=24,factor=10", ranks=1, **keys) == ["0"]
    [back] = runs.events(tmp_path, EventKind.ROLLED_BACK)
    assert (back["step"], back["first"], back["last"]) == (20, 22, 24)
    assert "above" in back["reason"]


@pytest.mark.parametrize(
    ("ranks", "planned", "changes", "sentence"),
    [
        (2, "nan:step=5", {"resilience__on_nan": "stop"}, "in step 5 the gradient is not finite, so training stopped"),
        (1, "spike:step=24,factor=9", {"resilience__on_spike": "stop"}, "in step 24 the loss is"),
        (
            1,
            "nan:step=3",
            {"resilience__on_nan": "rollback"},
            "no checkpoint of step 0 or before is left to go back to",
        ),
        (
            1,
            "nan:step=7,every=true",
            {"resilience__on_nan": "rollback"},
            "was already rolled back 3 times within 1000 steps",
        ),
    ],
)
def test_training_stops_where_going_on_is_no_use(
    ranks: int, planned: str, changes: dict[str, Any], sentence: str, tokens: Path, tmp_path: Path
) -> None:
    said = walk(tmp_path, tokens, planned, ranks=ranks, **{"train__steps": 26} | changes)
    assert all(one.startswith("Diverged: ") and sentence in one for one in said), said


# ----------------------------------------------------------------------------------------------------------- corruption


@pytest.mark.parametrize(
    "changes", some([{"train.dtype": "bf16"}, {"parallel.zero": 2}, {}, {"parallel.tensor": 1}], 1)
)
def test_a_bit_that_flips_is_found_and_repaired(changes: dict[str, Any], tokens: Path, tmp_path: Path) -> None:
    keys = {"train.steps": 6, "resilience.checksum_every": 2} | changes
    kwargs = {"data": str(tokens), "changes": keys}
    planned = ["bit-flip:rank=2,step=4,parameter=embed.weight,element=5,bit=13"]
    assert run_ranks(train, 3, timeout_s=180, run=str(tmp_path / "flip"), planned=planned, **kwargs) == ["0"] * 3
    [found] = runs.events(tmp_path / "flip", EventKind.CORRUPTED)
    assert (found["step"], found["repaired"], found["parameters"]) == (4, True, "embed.weight")
    assert [(row["rank"], row["certain"], row["device"]) for row in found["devices"]] == [(2, True, "cpu")]
    [marked] = read_lines(RunPaths(tmp_path / "flip").suspects)
    assert (marked["rank"], marked["step"]) == (2, 4)
    assert run_ranks(train, 3, timeout_s=180, run=str(tmp_path / "well"), planned=[], **kwargs) == ["0"] * 3
    assert not runs.events(tmp_path / "well", EventKind.CORRUPTED)
    assert not RunPaths(tmp_path / "well").suspects.exists()
    assert runs.outcome(tmp_path / "flip").losses == runs.outcome(tmp_path / "well").losses
    assert same_bits(runs.state(tmp_path / "flip"), runs.state(tmp_path / "well"))


def test_of_two_ranks_that_differ_none_is_believed(tokens: Path, tmp_path: Path) -> None:
    """They go back to the checkpoint before the last comparison that was well, and do the same steps again."""
    keys = {"train__steps": 10, "resilience__checksum_every": 3}
    assert walk(tmp_path / "flip", tokens, "bit-flip:rank=1,step=9,parameter=embed.weight", **keys) == ["0", "0"]
    [found] = runs.events(tmp_path / "flip", EventKind.CORRUPTED)
    assert [(row["rank"], row["certain"]) for row in found["devices"]] == [(0, False), (1, False)]
    [back] = runs.events(tmp_path / "flip", EventKind.ROLLED_BACK)
    assert (back["step"], back["from_step"]) == (4, 9)
    assert "first" not in back
    assert walk(tmp_path / "well", tokens, **keys) == ["0", "0"]
    assert same_bits(runs.state(tmp_path / "flip"), runs.state(tmp_path / "well"))


def test_a_bit_that_flips_in_a_shard_is_found_where_another_rank_has_the_same(tokens: Path, tmp_path: Path) -> None:
    layout = {"parallel.zero": 3, "parallel.shard_degree": 2}
    changes = {"train.steps": 7, "resilience.checksum_every": 3, "checkpoint.every": 2} | layout
    kwargs: dict[str, Any] = {"data": str(tokens), "changes": changes}
    planned = ["bit-flip:rank=2,step=6,parameter=embed.weight"]
    assert run_ranks(train, 4, timeout_s=180, run=str(tmp_path / "flip"), planned=planned, **kwargs) == ["0"] * 4
    [found] = runs.events(tmp_path / "flip", EventKind.CORRUPTED)
    assert (found["step"], found["repaired"], found["parameters"]) == (6, False, "embed.weight")
    assert [(row["rank"], row["certain"]) for row in found["devices"]] == [(0, False), (2, False)]
    [back] = runs.events(tmp_path / "flip", EventKind.ROLLED_BACK)
    assert (back["step"], back["from_step"]) == (2, 6)
    if not ALL:  # the same steps again: as of two ranks above
        return
    assert run_ranks(train, 4, timeout_s=180, run=str(tmp_path / "well"), planned=[], **kwargs) == ["0"] * 4
    assert not runs.events(tmp_path / "well", EventKind.CORRUPTED)
    assert same_bits(runs.state(tmp_path / "flip"), runs.state(tmp_path / "well"))


def test_memory_that_is_bad_for_good_ends_the_attempt(tokens: Path, tmp_path: Path) -> None:
    keys = {"train__steps": 9, "resilience__checksum_every": 3, "checkpoint__every": 2}
    said = walk(tmp_path, tokens, "bit-flip:rank=1,step=6,parameter=embed.weight,every=true", **keys)
    assert all("Corrupted: after step 6 one of ranks 0, 1" in one for one in said), said
    assert [event["step"] for event in runs.events(tmp_path, EventKind.ROLLED_BACK)] == [2, 2, 2]


def test_a_checkpoint_that_may_be_wrong_is_better_than_none(tokens: Path, tmp_path: Path) -> None:
    keys = {"train__steps": 6, "resilience__checksum_every": 6, "checkpoint__every": 4}
    assert walk(tmp_path, tokens, "bit-flip:rank=1,step=6,parameter=embed.weight", **keys) == ["0", "0"]
    [back] = runs.events(tmp_path, EventKind.ROLLED_BACK)
    assert back["step"] == 4
    assert "no checkpoint of step 0 or before is left, so this one may contain the error" in back["reason"]


@pytest.mark.parametrize("state", [[1, 1], [3, 1, 0, 0]])
def test_where_nothing_is_held_twice_that_is_said(state: list[int], tokens: Path, tmp_path: Path) -> None:
    """Ranks that hold nothing at all are no two that hold the same."""
    keys = {"train__steps": 1, "resilience__checksum_every": 1, "parallel__zero": 3, "balance__optimizer_state": state}
    assert walk(tmp_path, tokens, ranks=len(state), **keys) == ["0"] * len(state)
    [warning] = [event for event in runs.events(tmp_path, EventKind.WARNING) if "checksum_every" in event["message"]]
    assert "its own shard" in warning["message"]
