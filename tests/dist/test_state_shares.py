"""What ranks hold of the state, and when: less where there is little memory, never more than is said, alike on all."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.autotune.state_shares import (
    STATE_SHARE,
    compute_state_weights,
    find_in_memory_options,
    resolve_state_weights,
)
from phalanx.comm.mesh import join
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.engine.bucket import RankBucket
from phalanx.engine.sharded import ShardedEngine
from phalanx.system import accelerator
from phalanx.trainer import train_rank
from phalanx.workload.sinks import RecordWriter
from phalanx.workload.workload import make_workload
from tests.helpers import run_ranks
from tests.numerics import runs
from tests.numerics.runs import farthest, outcome, walk

ROOMY = 2**40


def asked(placement: Placement, data: str, free: list[int], changes: dict[str, Any]) -> list[float] | str | None:
    """What the ranks agree on if each has so many bytes free."""
    accelerator.memory_free = lambda device, local_world: free[placement.rank]
    described = runs.job(Path(data).parent / "nowhere", data, changes, placement.world)
    with join(placement, 30) as mesh:
        try:
            found = compute_state_weights(described.config, make_workload(described.config, described.spec), mesh, 1)
        except ConfigError as error:
            return str(error)
    return None if found is None else list(found)


def train(placement: Placement, run: str, data: str, free: list[int]) -> list[int]:
    """A run with so little free; the elements of the state that this rank holds."""
    accelerator.memory_free = lambda device, local_world: free[placement.rank]
    held = []
    make = ShardedEngine.initialise

    def noting(engine: ShardedEngine, fill: Any) -> None:
        make(engine, fill)
        held.append(sum(bucket.count_elements(placement.rank) for bucket in engine.buckets))

    ShardedEngine.initialise = noting  # type: ignore[method-assign]
    described = runs.job(run, data, {}, placement.world)
    assert train_rank.run_training(described, runs.on_one_thread(placement)) == 0
    return held


def bytes_of(tokens: Path, ranks: int) -> tuple[int, int]:
    """Of the tests' model in float64: bytes of parameters and gradients on each rank, and of the state of all."""
    elements = 0
    for shape in run_ranks(shapes, 1, data=str(tokens))[0]:
        count = 1
        for size in shape:
            count *= size
        elements += count
    return 16 * elements, 16 * elements  # parameters, which are the masters, and sums; two moments


def shapes(placement: Placement, data: str) -> list[list[int]]:
    described = runs.job(Path(data).parent / "nowhere", data, {}, 1)
    model = make_workload(described.config, described.spec).model()
    return [list(parameter.shape) for parameter in model.parameters()]


def test_ranks_with_little_memory_hold_less_of_the_state(tokens: Path) -> None:
    whole, state = bytes_of(tokens, 3)
    tight = int((whole + state / 10) / STATE_SHARE) + 20_000  # room for a tenth, and the padding
    found = run_ranks(asked, 3, data=str(tokens), free=[ROOMY, tight, ROOMY], changes={})
    assert found[0] == found[1] == found[2]
    assert sum(found[0]) == pytest.approx(1.0)
    assert 0.05 < found[0][1] < 0.2
    assert found[0][0] == pytest.approx(found[0][2])
    none = run_ranks(asked, 3, data=str(tokens), free=[ROOMY, whole // 2, ROOMY], changes={})
    assert none[0] == pytest.approx([0.5, 0.0, 0.5])
    assert run_ranks(asked, 2, data=str(tokens), free=[ROOMY] * 2, changes={}) == [None] * 2
    even = {"balance.optimizer_state": "even"}
    assert run_ranks(asked, 2, data=str(tokens), free=[ROOMY, tight], changes=even) == [None] * 2
    (said, *_) = run_ranks(asked, 2, data=str(tokens), free=[whole] * 2, changes={})
    assert "the optimizer state needs" in said


def kept(placement: Placement, data: str, free: list[int], place: str, nodes: int) -> list[Any]:
    """What ranks agree on that keep steps in the memory that they compute in, as wanted and with less of that in turn;
    and what they find of before."""
    accelerator.memory_free = lambda device, local_world: free[placement.rank]
    described = runs.job(Path(data).parent / "nowhere", data, {}, placement.world)
    placement = dataclasses.replace(placement, shared=place, node=placement.rank % nodes, nodes=nodes)
    workload, found = make_workload(described.config, described.spec), list[Any]()
    with join(placement, 30) as mesh:
        keeping = find_in_memory_options(described.config, placement, mesh)
        for keeps in keeping.options:
            try:
                weights = compute_state_weights(described.config, workload, mesh, 1, keeps)
                found.append(None if weights is None else list(weights))
            except ConfigError:
                found.append("no room")
    return [*found, keeping.reusable_bytes]


def test_ranks_on_cpus_have_room_for_the_steps_that_they_keep_and_for_replicas(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "state-000001-00000").write_bytes(bytes(1000))
    whole, state = bytes_of(tokens, 2)
    # A tenth of two steps of masters and moments; without them the masters are the parameters: three tenths.
    tight = int((whole + 3 * state / 10) / STATE_SHARE) + 20_000
    arguments: dict[str, Any] = {"data": str(tokens), "place": str(tmp_path)}
    found = run_ranks(kept, 2, free=[ROOMY, tight], nodes=1, **arguments)
    assert found[0] == found[1]
    assert found[0][:2] == [pytest.approx([0.9, 0.1], abs=0.1), pytest.approx([0.7, 0.3], abs=0.1)]
    assert found[0][1][1] > 2 * found[0][0][1] and found[0][2] == 500.0
    found = run_ranks(kept, 2, free=[ROOMY, tight], nodes=2, **arguments)
    assert found[0] == ["no room", *found[1][1:]]  # the other node would have to hold as much
    assert found[0][1][1] < 0.2 < found[0][2][1]
    assert run_ranks(kept, 2, free=[ROOMY, ROOMY], nodes=2, **arguments)[0] == [None, None, None, 500.0]


def test_a_run_cuts_its_state_so_and_walks_the_same_curve(tokens: Path, tmp_path: Path) -> None:
    whole, state = bytes_of(tokens, 2)
    tight = int((whole + state / 10) / STATE_SHARE) + 20_000
    held = run_ranks(train, 2, run=str(tmp_path / "tight"), data=str(tokens), free=[ROOMY, tight], timeout_s=240)
    assert 4 * held[1][0] < held[0][0]
    (said,) = [
        each
        for each in runs.events(tmp_path / "tight", EventKind.AUTO_RESOLVED)
        if each["key"] == "balance.optimizer_state"
    ]
    assert said["value"][1] < 0.2
    assert farthest(outcome(tmp_path / "tight").losses, walk(1, tmp_path / "one", tokens).losses) < 1e-9


def settling(
    placement: Placement, run: str, data: str, starts: list[tuple[list[int], dict[str, Any]]]
) -> list[list[float] | None]:
    """What the ranks hold from one start to the next, with so many bytes free on each of them."""
    paths, found = RunPaths(Path(run)), []
    with join(placement, 30) as mesh:
        for attempt, (free, changes) in enumerate(starts, start=1):
            accelerator.memory_free = lambda device, local_world, free=free: free[placement.rank]  # type: ignore[misc]
            described = runs.job(run, data, changes, placement.world)
            records = RecordWriter(paths, attempt, [], active=mesh.rank == 0)
            workload = make_workload(described.config, described.spec)
            weights = resolve_state_weights(described.config, workload, mesh, 1, paths, records)
            found.append(None if weights is None else list(weights))
    return found


def test_what_was_found_is_taken_again_as_long_as_it_fits(tokens: Path, tmp_path: Path) -> None:
    whole, state = bytes_of(tokens, 2)
    tight = int((whole + state / 10) / STATE_SHARE) + 20_000
    starts = [
        ([ROOMY, tight], {}),
        ([ROOMY, ROOMY], {}),  # as before
        ([ROOMY, whole // 2], {}),  # where nothing fits any more
        ([ROOMY, ROOMY], {"parallel.zero": 2}),  # another layout
        ([ROOMY, 2 * tight], {"parallel.zero": 2}),
        ([ROOMY, ROOMY], {}),
    ]
    (tmp_path / "run").mkdir()
    first, other = run_ranks(settling, 2, run=str(tmp_path / "run"), data=str(tokens), starts=starts)
    assert first == other
    cut, again, none, even, still, last = first
    assert cut is not None
    assert cut[1] < 0.2
    assert (again, none, even, still, last) == (cut, [1.0, 0.0], None, None, [1.0, 0.0])
    said = [each["value"] for each in runs.events(tmp_path / "run", EventKind.AUTO_RESOLVED)]
    assert said == [cut, [1.0, 0.0], "even"]


def unlike(placement: Placement, run: str, data: str, zeros: list[int]) -> int:
    """A run of ranks that have each resolved parallel.zero for their own memory."""
    described = runs.job(run, data, {"parallel.zero": zeros[placement.rank], "train.steps": 3}, placement.world)
    return int(train_rank.run_training(described, runs.on_one_thread(placement)))


def test_ranks_that_were_resolved_apart_do_what_shards_most(tokens: Path, tmp_path: Path) -> None:
    arguments = {"run": str(tmp_path / "unlike"), "data": str(tokens), "zeros": [1, 3]}
    assert run_ranks(unlike, 2, timeout_s=240, **arguments) == [0, 0]
    three = walk(2, tmp_path / "three", tokens, parallel__zero=3, train__steps=3)
    assert outcome(tmp_path / "unlike").losses == three.losses


def starting(placement: Placement, run: str, data: str) -> list[int]:
    """The most elements of whole parameters that are there at a time while a zero 3 engine takes memory, the elements
    of the largest bucket, and those of all."""
    helds: list[RankBucket] = []
    most, make, take = [0], RankBucket.__init__, RankBucket.adopt_parameters

    def noting(held: RankBucket, *arguments: Any) -> None:
        make(held, *arguments)
        helds.append(held)

    def counting(held: RankBucket, *arguments: Any) -> None:
        take(held, *arguments)
        most[0] = max(most[0], sum(each.values.untyped_storage().nbytes() for each in helds) // 8)

    RankBucket.__init__, RankBucket.adopt_parameters = noting, counting  # type: ignore[method-assign]
    described = runs.job(run, data, {"parallel.zero": 3}, placement.world)
    with runs.loop_of(placement, described) as loop:
        loop.restore()
    sizes = [held.bucket.elements for held in helds]
    return [most[0], max(sizes), sum(sizes)]


def test_what_is_released_is_never_there_all_at_once(tokens: Path, tmp_path: Path) -> None:
    for most, largest, everything in run_ranks(starting, 2, run=str(tmp_path), data=str(tokens)):
        assert most == largest < everything


def copies(placement: Placement, run: str, data: str) -> bool:
    """Whether a rank of the second copy, too, is through with its last gathers when it has given its pieces."""
    changes = {"parallel.shard_degree": 1, "train.steps": 2, "train.eval_sequences": 0}
    described = runs.job(run, data, changes, placement.world)
    with runs.loop_of(placement, described) as loop:
        loop.restore()
        engine: Any = loop.setup.components.engine
        gather = engine._update.queue.gather

        def slowly(*arguments: Any) -> None:
            time.sleep(0.05)
            gather(*arguments)

        engine._update.queue.gather = slowly
        loop.train_step(1)
        assert list(engine.pieces()) == [] or placement.rank == 0
        return all(mark.is_recorded for mark in engine._parameters.gathered)


def test_every_copy_is_complete_when_its_pieces_are_asked_for(tokens: Path, tmp_path: Path) -> None:
    assert run_ranks(copies, 2, run=str(tmp_path), data=str(tokens)) == [True, True]
