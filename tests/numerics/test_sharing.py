"""Shares that follow the ranks' speeds: any division, changed at any step, walks the curve of one process; and what was
decided is walked again bit by bit when a run is started again.

Speeds are made up: the ranks' clocks tell what each sequence would take. What real clocks tell is the matter of
tests/dist/test_clock.py.
"""

import itertools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.disk.load import list_steps, step_folder
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.layout import balance
from phalanx.layout.balance import Division
from phalanx.models.counter_rng import CounterRNG
from phalanx.tasks.task import Batch, Task
from phalanx.trainer import train_rank
from tests.helpers import ALL, run_ranks, some
from tests.numerics.runs import STEPS, Outcome, events, job, loop_of, on_one_thread, outcome, same_bits, state, walk
from tests.numerics.test_rank_layout import assert_same

PAUSE_S = 0.01  # for a sequence, at speed 1
LENGTH = 30 if ALL else 2


@pytest.fixture(scope="module")
def few(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """`alone`, of so many steps."""
    return walk(1, tmp_path_factory.mktemp("few"), tokens, train__steps=LENGTH)


@pytest.mark.parametrize("proportions", some([[2, 1], [3, 1, 1], [5, 2, 0]], 0))
def test_given_shares(proportions: list[int], alone: Outcome, tokens: Path, tmp_path: Path) -> None:
    shares = balance.scale_division(8, Division(tuple(proportions), 1), [8] * len(proportions)).shares
    assert_same(walk(len(shares), tmp_path, tokens, shares=shares, train__micro_batch=5), alone)
    assert [event["shares"] for event in events(tmp_path, EventKind.WORK_SPLIT)] == [list(shares)]
    assert all(record["shares"] == list(shares) for record in read_steps(RunPaths(tmp_path).metrics))


@dataclass
class Counted(Task):
    """A task that counts the passes that are trained with."""

    task: Task
    passes: int = 0

    def collate(self, samples: Sequence[Any]) -> Batch:
        return self.task.collate(samples)

    def loss_sum(self, model: Any, batch: Batch, draws: CounterRNG | None) -> Any:
        self.passes += draws is not None
        return self.task.loss_sum(model, batch, draws)

    def nominal_weight(self, global_batch: int) -> int:
        return self.task.nominal_weight(global_batch)


def counting(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> int:
    """A run; returns how many forward passes this rank has trained with."""
    with loop_of(on_one_thread(placement), job(run, data, changes, placement.world)) as loop:
        loop.setup.components.task = task = Counted(loop.setup.components.task)
        assert train_rank.run_steps(loop, loop.restore()) == 0
        return task.passes


# What is changed in the recipe, and whether ranks run as many micro-batches.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "zero 1": ({"parallel.zero": 1}, False),
    "zero 1, updated early": ({"parallel.zero": 1, "optim.double_buffer": True}, False),
    "zero 1, reduced each time": ({"parallel.zero": 1, "parallel.grad_reduce": "per_micro_batch"}, True),
    "zero 2": ({"parallel.zero": 2}, True),
    "zero 2, reduced once": ({"parallel.zero": 2, "parallel.grad_reduce": "per_step"}, False),
    "zero 3": ({"parallel.zero": 3}, True),
    "zero 3, reduced once": ({"parallel.zero": 3, "parallel.grad_reduce": "per_step"}, True),
    "fsdp2": ({"parallel.engine": "fsdp2"}, True),
}


@pytest.mark.parametrize("way", some(WAYS, 0, 3, 4, 7))
def test_a_rank_runs_only_its_own_micro_batches_where_nothing_travels_in_one(
    way: str, few: Outcome, tokens: Path, tmp_path: Path
) -> None:
    """Of one sequence each: the slow rank has a third of those of the fast one, and the curve is that of one rank."""
    changes, lockstep = WAYS[way]
    changes = changes | {"balance.batch": [6, 2], "train.micro_batch": 1, "train.steps": LENGTH}
    found = run_ranks(counting, 2, timeout_s=240, run=str(tmp_path), data=str(tokens), changes=changes)
    assert found == [LENGTH * 6, LENGTH * (6 if lockstep else 2)]
    assert_same(outcome(tmp_path), few)
    told = 6 if lockstep else [6, 2]
    assert [event["parts"] for event in events(tmp_path, EventKind.WORK_SPLIT)] == [told]
    assert all(record["parts"] == told for record in read_steps(RunPaths(tmp_path).metrics))


@pytest.mark.parametrize(
    ("keys", "size", "shares", "by_rank"),
    some(
        [
            ({"tensor": 2}, 1, [5, 3], [5, 5, 3, 3]),
            # What fits is not measured there, so that a small share is not made a larger micro-batch than it would be.
            ({"tensor": 2}, 3, [5, 3], [2, 2, 2, 2]),
            ({"pipeline": 2}, 1, [7, 1], [7, 1, 7, 1]),
            ({"pipeline": 2, "schedule": "gpipe"}, 1, [8, 0], [8, 1, 8, 1]),
            ({"shard_degree": 2}, 1, [4, 3, 1, 0], [4, 3, 1, 1]),
            ({"shard_degree": 2}, 2, [4, 3, 1, 0], [2, 2, 1, 1]),
        ],
        0,
        1,
        3,
        5,
    ),
)
def test_copies_of_a_model_run_their_own_micro_batches(
    keys: dict[str, Any],
    size: int,
    shares: list[int],
    by_rank: list[int],
    few: Outcome,
    tokens: Path,
    tmp_path: Path,
) -> None:
    """All ranks that hold a copy together run those of the copy; one without a sequence runs one of weight 0."""
    changes = {f"parallel.{key}": value for key, value in keys.items()}
    changes |= {"train.micro_batch": size, "balance.batch": shares, "train.steps": LENGTH}
    found = run_ranks(counting, 4, timeout_s=240, run=str(tmp_path), data=str(tokens), changes=changes)
    assert found == [LENGTH * parts for parts in by_rank]
    assert_same(outcome(tmp_path), few)


def changing(placement: Placement, run: str, data: str, shares: list[list[int]]) -> int:
    """A run that is divided otherwise in each step."""
    with loop_of(on_one_thread(placement), job(run, data, {"train.micro_batch": 3}, placement.world)) as loop:
        sharing, turns = loop.setup.components.work_split, itertools.cycle(shares)
        settle = sharing.settle

        def settled() -> bool:
            asked = settle()
            sharing.division = balance.cut_into_micro_batches(next(turns), sharing.micro_batch_limits)
            return asked

        sharing.settle = settled  # type: ignore[method-assign]
        return int(train_rank.run_steps(loop, loop.restore()))


def test_shares_that_change_at_every_step(alone: Outcome, tokens: Path, tmp_path: Path) -> None:
    turns = [[8, 0, 0], [0, 7, 1], [3, 3, 2], [0, 0, 8], [1, 2, 5], [4, 4, 0], [0, 8, 0]]
    assert run_ranks(changing, 3, timeout_s=240, run=str(tmp_path), data=str(tokens), shares=turns) == [0] * 3
    assert_same(outcome(tmp_path), alone)
    walked = [record["shares"] for record in read_steps(RunPaths(tmp_path).metrics)]
    assert walked == [[3, 3, 2], *itertools.islice(itertools.cycle(turns), STEPS - 1)]


@dataclass
class Paced(Task):
    """A task and a clock that tells `pause_s` for every sequence of a step, and for a micro-batch without any as for
    one."""

    task: Task
    pause_s: list[float]  # by step, of one micro-batch each; the last for all that follow
    called: list[int] = field(default_factory=list)
    late: int = 0
    _told: int = 0

    def collate(self, samples: Sequence[Any]) -> Batch:
        self.called.append(len(samples))
        return self.task.collate(samples)

    def loss_sum(self, model: Any, batch: Batch, draws: CounterRNG | None) -> Any:
        return self.task.loss_sum(model, batch, draws)

    def nominal_weight(self, global_batch: int) -> int:
        return self.task.nominal_weight(global_batch)

    def start(self) -> None:
        self._told = len(self.called)

    def lap(self) -> float:
        return sum(
            self.pause_s[min(number, len(self.pause_s) - 1)] * max(1, self.called[number])
            for number in range(self._told, len(self.called))
        )

    def stop(self) -> None: ...


AUTO = {"balance.batch": "auto", "train.steps": 12, "checkpoint.every": 6}


def paced(placement: Placement, run: str, data: str, pauses: list[list[float]], changes: dict[str, Any]) -> list[Any]:
    """A run that measures; returns the exit code and the seconds that balancing took."""
    placement = on_one_thread(placement)
    with loop_of(placement, job(run, data, AUTO | changes, placement.world)) as loop:
        loop.setup.components.task = loop.clock = Paced(loop.setup.components.task, pauses[placement.rank])
        return [int(train_rank.run_steps(loop, loop.restore())), loop.setup.components.work_split.balance_s]


def walk_paced(ranks: int, run: Path, data: Path, pauses: list[list[float]], **changes: Any) -> Outcome:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    done = run_ranks(paced, ranks, timeout_s=240, run=str(run), data=str(data), pauses=pauses, changes=dotted)
    assert [code for code, _ in done] == [0] * ranks
    return outcome(run)


def forget_behind(run: Path, step: int) -> None:
    """Remove the checkpoints of later steps."""
    folder = run / "checkpoints"
    assert list_steps(folder)[-1] == step
    for later in list_steps(folder)[:-1]:
        shutil.rmtree(str(step_folder(folder, later)))


def test_shares_follow_the_speeds_and_are_walked_again_as_they_were(tokens: Path, tmp_path: Path) -> None:
    one = walk(1, tmp_path / "one", tokens, train__steps=12)
    # Rank 1 needs three times as long; from step 8 on it is rank 0, and rank 1 is as fast as it was.
    pauses = [[PAUSE_S] * 7 + [3 * PAUSE_S], [3 * PAUSE_S] * 7 + [PAUSE_S]]
    run = tmp_path / "two"
    first = walk_paced(2, run, tokens, pauses)
    assert_same(first, one)
    shares = [record["shares"] for record in read_steps(RunPaths(run).metrics)]
    assert shares[:3] == [[4, 4]] * 3  # one step to warm up, two to measure
    assert shares[6][0] > shares[6][1]
    assert shares[-1][0] < shares[-1][1]
    assert all(record["busy_s"][0] >= PAUSE_S for record in read_steps(RunPaths(run).metrics))
    told = events(run, EventKind.WORK_REBALANCED)
    assert {event["parts"] for event in told} == {1}
    assert all(event["before_s"] > event["after_s"] > 0 for event in told)
    changes = [(step + 1, now) for step, (before, now) in enumerate(itertools.pairwise(shares), 1) if now != before]
    decided = [(event["step"], event["shares"]) for event in told if event["step"] <= 12]
    assert decided == changes

    # Killed behind step 6 and started again, with speeds that would have called for other shares.
    again = tmp_path / "again"
    shutil.copytree(run, again)
    forget_behind(again, 6)
    second = walk_paced(2, again, tokens, [[4 * PAUSE_S], [PAUSE_S]])
    assert second.losses == first.losses
    assert second.norms == first.norms
    assert same_bits(state(again, 12), state(run, 12))
    repeated = [
        (event["step"], event["shares"]) for event in events(again, EventKind.WORK_REBALANCED) if event["step"] <= 12
    ]
    assert repeated == decided  # and none of it was written twice
    assert len(events(again, EventKind.WORK_SPLIT)) == 1

    # On three ranks nothing of it can be repeated: they begin anew, and what was decided for two is taken back.
    forget_behind(again, 6)
    assert_same(walk_paced(3, again, tokens, [[PAUSE_S]] * 3), one)
    assert [event["step"] for event in events(again, EventKind.WORK_SPLIT)] == [1, 7]


def test_measured_speeds_are_followed_where_only_one_sequence_fits(tokens: Path, tmp_path: Path) -> None:
    """Rank 1 needs three times as long for one: it gets a third, and is done at the same time. Started again behind
    step 6, in the midst of it, the run is walked again bit by bit, whatever the speeds are then."""
    one = walk(1, tmp_path / "one", tokens, train__steps=8)
    run, again = tmp_path / "two", tmp_path / "again"
    few = {"train__micro_batch": 1, "train__steps": 8}
    first = walk_paced(2, run, tokens, [[PAUSE_S], [3 * PAUSE_S]], **few)
    assert_same(first, one)
    records = read_steps(RunPaths(run).metrics)
    assert [records[0]["shares"], records[0]["parts"]] == [[4, 4], 4]
    assert [records[-1]["shares"], records[-1]["parts"]] == [[6, 2], [6, 2]]
    assert [(event["step"], event["parts"]) for event in events(run, EventKind.WORK_REBALANCED)] == [(4, [6, 2])]

    shutil.copytree(run, again)
    forget_behind(again, 6)
    second = walk_paced(2, again, tokens, [[PAUSE_S], [PAUSE_S]], **few)
    assert (second.losses, second.norms) == (first.losses, first.norms)
    assert same_bits(state(again, 8), state(run, 8))


def test_a_rank_that_got_nothing_can_come_back(tokens: Path, tmp_path: Path) -> None:
    pauses = [[PAUSE_S], [12 * PAUSE_S] * 6 + [PAUSE_S]]
    walk_paced(2, tmp_path, tokens, pauses, train__steps=12, checkpoint__every=0)
    shares = [record["shares"] for record in read_steps(RunPaths(tmp_path).metrics)]
    assert [8, 0] in shares
    assert shares[-1][1] > 1
