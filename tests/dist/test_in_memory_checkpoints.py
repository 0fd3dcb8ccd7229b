"""A committed step outlives the ranks: whoever is killed whenever, the run goes on from it, and no bit differs."""

import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint.memory.previous_state import InMemoryCheckpointReader
from phalanx.checkpoint.memory.store import SharedMemoryStore
from phalanx.cli import root
from phalanx.comm.mesh import Mesh, join
from phalanx.config import load, resolve
from phalanx.core.errors import CheckpointError
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import InMemoryCheckpoint, Placement, StateFileLocation
from phalanx.core.records import EventKind, read_steps, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.engine.interface import Precision
from phalanx.engine.sharded import ShardedEngine
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.engine.single import SingleEngine
from phalanx.recovery import inventory, shared_memory, state_file
from phalanx.recovery.shared_memory import describe_shortage
from phalanx.recovery.state_file import StateFile
from phalanx.system.fork import die_with
from phalanx.trainer import train_rank
from tests.dist.command import write_place
from tests.dist.engine_cases import ADAMW, FLOAT64, NOMINAL, WIDTH, Mix, Net, batches, fill_from, rate
from tests.helpers import ALL, find_committed_step, find_newest_checkpoint, run_ranks, some, wait_until
from tests.numerics import runs
from tests.numerics.runs import Outcome, distance, farthest, on_one_thread, same_bits, walk

SHORT = {"train.steps": 6, "optim.decay_steps": 6, "train.eval_sequences": 4}
UNEVEN = {"balance.optimizer_state": [3, 1], "train.eval_every": 2}


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory, as an agent makes it."""
    folder = shared_memory.SHM_ROOT / f"phalanx-test-{os.getpid()}-{random.randrange(1 << 30)}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


# ------------------------------------------------------------------------------------------------ killed, by the minute


def die(placement: Placement, at: str, step: int, rank: int) -> None:
    """Have this rank SIGKILL itself at an instruction of the commit of a step."""
    if placement.rank != rank:
        return
    void, commit = StateFile.invalidate, StateFile.commit

    def voided(file: StateFile, slot: int) -> None:
        now = file.slot_step(1 - slot) + 1
        if at == "before the slot is void" and now == step:
            os.kill(os.getpid(), signal.SIGKILL)
        void(file, slot)
        if at == "when the slot is void" and now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def committed(file: StateFile, slot: int, now: int, header: bytes) -> None:
        if at == "before the commit" and now == step:
            file.map[file.slot_offset(slot) : file.slot_offset(slot) + 64] = (
                b"\xff" * 64
            )  # whatever lies there does not count
            os.kill(os.getpid(), signal.SIGKILL)
        commit(file, slot, now, header)
        if at == "behind the commit" and now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    StateFile.invalidate, StateFile.commit = voided, committed  # type: ignore[method-assign]


def train_and_die(
    placement: Placement, run: str, data: str, changes: dict[str, Any], deaths: Sequence[Any], first_attempt: int = 1
) -> int:
    """A rank whose attempts end at `deaths`: (at, step, rank), or (seconds, rank) behind the attempt's beginning."""
    described = runs.job(run, data, changes, placement.world)
    number = placement.attempt - first_attempt
    if number < len(deaths):
        death = deaths[number]
        if isinstance(death[0], str):
            die(placement, *death)
        elif placement.rank == death[1]:
            threading.Timer(death[0], os.kill, (os.getpid(), signal.SIGKILL)).start()
    return int(train_rank.run_training(described, on_one_thread(placement)))


def begin(run: Path) -> None:
    """A run folder as a launcher leaves it to the ranks: its records have begun."""
    run.mkdir(exist_ok=True)
    write_event(RunPaths(run).events, EventKind.RUN_STARTED, 1)


def killed(ranks: int, run: Path, data: Path, shared: Path, deaths: Sequence[Any], **changes: Any) -> Outcome:
    """A run whose ranks die as `deaths` say, and are started again each time."""
    begin(run)
    arguments = {"run": str(run), "data": str(data), "changes": SHORT | changes, "deaths": list(deaths)}
    codes = run_ranks(train_and_die, ranks, timeout_s=240, restarts=len(deaths), shared=shared, **arguments)
    assert codes == [0] * ranks
    return runs.outcome(run)


def assert_same(found: Outcome, quiet: Outcome) -> None:
    assert found.losses == quiet.losses  # with the record of a step that nobody lived to write
    assert found.norms == quiet.norms
    assert found.evaluations == quiet.evaluations
    assert same_bits(found.state, quiet.state)


def resumed(run: Path) -> list[tuple[int, bool]]:
    return [(event["step"], event.get("memory", False)) for event in runs.events(run, EventKind.RESUMED)]


MOMENTS = ["before the slot is void", "when the slot is void", "before the commit", "behind the commit"]


@pytest.fixture(scope="module")
def quiet(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two ranks of uneven shards, undisturbed and without anything in shared memory."""
    changes = {key.replace(".", "__"): value for key, value in (SHORT | UNEVEN).items()}
    return walk(2, tmp_path_factory.mktemp("quiet"), tokens, **changes)


def test_killed_at_every_instruction_of_a_commit(quiet: Outcome, tokens: Path, tmp_path: Path, shared: Path) -> None:
    """One rank at a time; the other is killed by the agent wherever it has come to, and may be a step ahead."""
    deaths = [(at, step, step % 2) for step, at in enumerate(MOMENTS, 2)]
    found = killed(2, tmp_path / "run", tokens, shared, deaths, **UNEVEN)
    assert_same(found, quiet)
    steps = resumed(tmp_path / "run")
    print("resumed after", steps)
    assert [memory for _, memory in steps] == [True] * len(MOMENTS)
    # The last committed step of all: the one before that which a rank was committing, or that one.
    for (step, _), (at, dying, _) in zip(steps, deaths, strict=True):
        assert step == dying if at == "behind the commit" else step == dying - 1
    assert sorted({line["attempt"] for line in read_lines(RunPaths(tmp_path / "run").metrics)})[-1] == 5


@pytest.mark.parametrize("seed", [1, 2] if ALL else [1])
def test_killed_at_random_moments(seed: int, quiet: Outcome, tokens: Path, tmp_path: Path, shared: Path) -> None:
    draw = random.Random(seed)
    deaths = [(draw.uniform(0.0, 0.8), draw.randrange(2)) for _ in range(4 if ALL else 2)]
    found = killed(2, tmp_path / "run", tokens, shared, deaths, **UNEVEN)
    print("resumed after", resumed(tmp_path / "run"))
    assert_same(found, quiet)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {"train.dtype": "fp32"}),
        (2, {"parallel.zero": 2, "train.dtype": "bf16", "train.micro_batch": 2, "optim.double_buffer": True}),
        (2, {"parallel.shard_degree": 1, "train.dtype": "fp16"}),
        (2, {"parallel.pipeline": 2, "train.micro_batch": 2}),
        (2, {"parallel.engine": "fsdp2"}),
        (2, {"optim.name": "adamw8bit", "model.hidden": 64, "model.intermediate": 80, "parallel.zero": 3}),
        (2, {"parallel.tensor": 2}),
        (2, {"parallel.zero": 2, "train.dtype": "bf16", "train.micro_batch": 2}),
        (2, {"optim.double_buffer": True, "train.micro_batch": 2}),
        (3, {"optim.name": "adamw8bit", "model.hidden": 64, "model.intermediate": 80, "parallel.zero": 3}),
        (1, {"train.dtype": "bf16", "optim.name": "adamw8bit", "model.hidden": 64, "model.intermediate": 80}),
        (2, {"parallel.zero": 3, "train.dtype": "fp32"}),
        (4, {"parallel.tensor": 2, "model.tie_embeddings": True}),
    ][: None if ALL else 7],
)
def test_every_engine_and_layout(
    ranks: int, changes: dict[str, Any], tokens: Path, tmp_path: Path, shared: Path
) -> None:
    changes |= {} if ALL else {"train.steps": 4}
    dotted = {key.replace(".", "__"): value for key, value in (SHORT | changes).items()}
    undisturbed = walk(ranks, tmp_path / "quiet", tokens, **dotted)
    deaths = [("when the slot is void", 3, ranks - 1), ("behind the commit", 5, 0)][: None if ALL else 1]
    found = killed(ranks, tmp_path / "run", tokens, shared, deaths, **changes)
    assert_same(found, undisturbed)
    # Of ranks that commit at the end of a step none is ahead of who dies; of others one may be.
    assert resumed(tmp_path / "run")[0] == (2, True)
    assert all(memory for _, memory in resumed(tmp_path / "run"))


def test_killed_before_an_evaluation_and_a_checkpoint_that_were_due(
    quiet: Outcome, tokens: Path, tmp_path: Path, shared: Path
) -> None:
    deaths = [("behind the commit", 4, 0)]
    found = killed(2, tmp_path / "run", tokens, shared, deaths, **UNEVEN, **{"checkpoint.every": 2})
    assert sorted(step for step, _ in found.evaluations) == [2, 4, 6]
    assert_same(found, quiet)
    saved = {event["step"] for event in runs.events(tmp_path / "run", EventKind.CHECKPOINT_SAVED)}
    assert saved | {2} == {2, 4, 6}  # that of step 2 may still have been on its way


# --------------------------------------------------------------------------------------------- other ranks, other rooms


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    some([(2, 3, {"parallel.zero": 3}), (2, 2, {"parallel.tensor": 2}), (2, 3, {}), (3, 1, {}), (1, 2, {})], 0, 1),
)
def test_other_ranks_go_on_from_what_was_left_in_memory(
    before: int, after: int, changes: dict[str, Any], quiet: Outcome, tokens: Path, tmp_path: Path, shared: Path
) -> None:
    """The files are read by coordinates, and removed when the new ones hold the step."""
    run = tmp_path / "run"
    begin(run)
    arguments: dict[str, Any] = {"run": str(run), "data": str(tokens)}
    with pytest.raises(AssertionError, match="killed by SIGKILL"):
        run_ranks(
            train_and_die, before, shared=shared, changes=SHORT, deaths=[("before the commit", 5, 0)], **arguments
        )
    assert [path.name for path in inventory.list_state_files(shared)] == [
        state_file.state_file_name(1, rank) for rank in range(before)
    ]
    codes = run_ranks(
        train_and_die, after, shared=shared, changes=SHORT | changes, deaths=[], first_attempt=2, **arguments
    )
    assert codes == [0] * after
    assert resumed(run) == [(4, True)]
    assert [path.name for path in inventory.list_state_files(shared)] == [
        state_file.state_file_name(2, rank) for rank in range(after)
    ]
    found = runs.outcome(run)
    assert farthest(found.losses, quiet.losses) < 1e-9
    assert distance(found.state, quiet.state, "param") < 1e-9


def train_in_little_room(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> int:
    described = runs.job(run, data, changes, placement.world)
    if placement.rank == 1:  # on one rank alone: all of them do without
        resource.setrlimit(resource.RLIMIT_FSIZE, (160_000, resource.RLIM_INFINITY))
    return int(train_rank.run_training(described, on_one_thread(placement)))


def test_where_there_is_no_room_the_run_does_without(tokens: Path, tmp_path: Path, shared: Path) -> None:
    changes = SHORT | {"train.steps": 2, "checkpoint.every": 0, "train.dtype": "bf16"}
    changes |= {"model.hidden": 16, "model.intermediate": 16, "model.layers": 1}  # of which a checkpoint still fits
    arguments: dict[str, Any] = {"run": str(tmp_path), "data": str(tokens), "changes": changes}
    assert run_ranks(train_in_little_room, 2, shared=shared, **arguments) == [0, 0]
    [decided] = [
        event
        for event in runs.events(tmp_path, EventKind.AUTO_RESOLVED)
        if event["key"] == "resilience.in_memory_checkpoints"
    ]
    assert decided["value"] is False
    assert "has no room for it" in decided["reason"]
    assert inventory.list_state_files(shared) == []
    assert len(read_steps(RunPaths(tmp_path).metrics)) == 2


def test_asked_for_and_no_room_is_refused_with_numbers(tokens: Path, tmp_path: Path, shared: Path) -> None:
    arguments: dict[str, Any] = {"run": str(tmp_path), "data": str(tokens)}
    changes = SHORT | {"resilience.in_memory_checkpoints": True}
    with pytest.raises(AssertionError) as caught:
        run_ranks(train_in_little_room, 2, shared=shared, changes=changes, **arguments)
    assert (
        "resilience.in_memory_checkpoints is true, but the state of the ranks does not fit into shared memory"
        in str(caught.value)
    )
    for key, value in (("in_memory_checkpoints", True), ("replicate_every", 4)):
        changes = SHORT | {f"resilience.{key}": value}
        said = f"resilience.{key} is {value}, but another launcher started"
        with pytest.raises(AssertionError, match=f"(?i){said}"):
            run_ranks(train_in_little_room, 2, changes=changes, **arguments)


@pytest.mark.parametrize(
    ("need", "shared_free", "host_free", "asked", "says"),
    [
        (10, 100, 100, False, None),
        (95, 100, 1000, False, "shared memory has"),
        (95, 100, 1000, True, None),
        (101, 100, 1000, True, "shared memory has"),
        (60, 100, 100, False, "of memory free"),
        (60, 100, 100, True, None),
        (90, 100, 80, True, "of memory free"),
    ],
)
def test_what_fits(need: int, shared_free: int, host_free: int, asked: bool, says: str | None) -> None:
    gib = 2**30
    found = describe_shortage("the state", need * gib, shared_free * gib, host_free * gib, asked)
    assert found is None if says is None else says in (found or "") and f"{need}.00 GiB" in (found or "")


# --------------------------------------------------------------------------------- copied beside the computation, apart


def in_the_background(placement: Placement, folder: str, kind: str) -> list[Any]:
    """Steps of an engine whose state is copied by a thread of its own, as from an accelerator, which is slow here;
    what is read from the files afterwards, by coordinates and as they are."""
    with join(placement, 30) as mesh:
        memory = slow_memory(mesh, Path(folder), 1)
        engine = made(mesh, kind, memory)
        for number in range(1, 6):
            step(engine, number, mesh)
        engine.keeper_settles()
        mesh.sum([0.0])
        kept = find_newest_checkpoint(inventory.read_state_files(Path(folder), b"r" * 32))
        assert kept is not None
        same = True
        source = InMemoryCheckpointReader(
            kept, {name: tuple(p.shape) for name, p in engine.inner.model.named_parameters()}
        )
        for piece in engine.inner.pieces():
            out = torch.empty_like(piece.tensor)
            source.read_into(piece.name, piece.kind, piece.start, piece.stop, out)
            same &= torch.equal(out, piece.tensor)
        mesh.sum([0.0])
        again = made(mesh, kind, slow_memory(mesh, Path(folder), 2, kept))
        mine = {(p.name, p.kind, p.start): p.tensor.clone() for p in engine.inner.pieces()}
        found = {(p.name, p.kind, p.start): p.tensor.clone() for p in again.inner.pieces()}
        same &= mine.keys() == found.keys() and all(torch.equal(mine[key], found[key]) for key in mine)
        engine.inner.close()
        again.inner.close()
        return [kept.step, bool(same), again.memory.has_state, source.header["tokens"]]


class Made:
    """An engine and its memory."""

    def __init__(self, inner: Any, memory: SharedMemoryStore) -> None:
        self.inner, self.memory = inner, memory

    def keeper_settles(self) -> None:
        list(self.inner.pieces())
        self.memory.wait_for_commit()


def slow_memory(mesh: Mesh, folder: Path, generation: int, kept: InMemoryCheckpoint | None = None) -> SharedMemoryStore:
    memory = SharedMemoryStore(
        folder, mesh, generation=generation, run=b"r" * 32, on_event=lambda kind, details: None, previous=kept,
        in_place=False, background=True,
    )  # fmt: skip
    keep = memory._keep

    def slowly(*arguments: Any) -> None:
        time.sleep(0.02)  # longer than a step takes here
        keep(*arguments)

    memory._keep = slowly  # type: ignore[method-assign]
    return memory


def made(mesh: Mesh, kind: str, memory: SharedMemoryStore) -> Made:
    torch.manual_seed(3)
    model = Net([Mix([(WIDTH, WIDTH), (7,)]), Mix([(3, WIDTH)])])
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    common: dict[str, Any] = {"mesh": mesh, "rule": ADAMW, "nominal_weight": NOMINAL, "keeper": memory}
    engine: Any
    if kind == "single":
        engine = SingleEngine(
            model.to("meta"), model.units(), precision=Precision(torch.float64, torch.float64), **common
        )
    else:
        sharding = ShardingSpec(zero=3 if kind == "zero 3" else 1, weights=(0.75, 0.25) if kind == "uneven" else None)
        engine = ShardedEngine(model, model.units(), precision=FLOAT64, sharding=sharding, **common)
    with torch.no_grad():
        engine.initialise(fill_from(values))
    return Made(engine, memory)


def step(made: Made, number: int, mesh: Mesh) -> None:
    from phalanx.optim import gradients

    engine, mine = made.inner, batches(number, mesh.rank)
    engine.begin_step(number, sum(batch.weight for batch in mine), rate(number), None)
    for index, batch in enumerate(mine):
        with engine.micro_batch(last=index == len(mine) - 1):
            gradients.backward(batch.loss_sum(engine.model), NOMINAL, None)
    engine.finish_step()
    engine.commit(number)


@pytest.mark.parametrize(("ranks", "kind"), [(1, "single"), (2, "zero 1"), (2, "zero 3")])
def test_copied_in_the_background(ranks: int, kind: str, shared: Path) -> None:
    found = run_ranks(in_the_background, ranks, folder=str(shared), kind=kind)
    weight = sum(batch.weight for number in range(1, 6) for rank in range(ranks) for batch in batches(number, rank))
    assert found == [[5, True, True, weight]] * ranks


def test_what_is_not_there_any_more_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state file .* cannot be opened .*; remove it"):
        _ = InMemoryCheckpointReader(InMemoryCheckpoint(3, (StateFileLocation(0, str(tmp_path / "gone")),)), {}).header


# ------------------------------------------------------------------------------------------------- the agent is killed


def kill_the_agent(placement: Placement, folder: str, step: int, arguments: list[str]) -> list[Any]:
    """Start the command line, SIGKILL the agent when so many steps are committed, and start it again."""
    os.chdir(folder)
    paths = RunPaths(Path("runs/killed"))
    place = Path(folder) / "none"

    def committed() -> int:
        nonlocal place
        place = shared_memory.find_folder(paths) or place
        return find_committed_step(place, state_file.compute_run_id(paths.events))

    def command() -> int:
        import sys

        pid = os.fork()
        if pid == 0:
            die_with(os.getppid())
            with open("said.txt", "a") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            sys.argv = ["phalanx", "train", "recipe.yaml", "--run-dir", str(paths.root), *arguments]
            code = 1
            try:
                root.main()
            except SystemExit as leaving:
                code = int(leaving.code or 0)
            finally:
                os._exit(code)
        return pid

    pid = command()
    wait_until(lambda: committed() >= step, 60)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    Path("killed").touch()
    left = len(inventory.list_state_files(place))
    code = os.waitstatus_to_exitcode(os.waitpid(command(), 0)[1])
    return [left, code, place.is_dir()]


WAITS = """
import pathlib, time, phalanx
class Callback(phalanx.Callback):
    def on_step_end(self, run, metrics):
        while run.step == 6 and not pathlib.Path("killed").exists():
            time.sleep(0.02)
"""


def test_the_agent_is_killed_and_the_same_command_goes_on_from_memory(tmp_path: Path) -> None:
    write_place(tmp_path)
    (tmp_path / "waits.py").write_text(WAITS)
    arguments = ["--ranks", "2", "train.steps=8", "checkpoint.every=0", "callback.code=waits.py"]
    [[left, code, still_there]] = run_ranks(
        kill_the_agent, 1, timeout_s=120, folder=str(tmp_path), step=5, arguments=arguments
    )
    assert (left, code, still_there) == (2, 0, False), (tmp_path / "said.txt").read_text()
    [(step, memory)] = resumed(tmp_path / "runs/killed")
    assert step >= 5
    assert memory
    steps = [record["step"] for record in read_steps(RunPaths(tmp_path / "runs/killed").metrics)]
    assert steps == list(range(1, 9))


def test_the_key_may_change_in_a_run() -> None:
    saved = load.build_config({"model": {"hidden": 16, "layers": 1, "heads": 2}}, "here")
    wanted = load.update_config(saved, {"resilience.in_memory_checkpoints": False})
    assert resolve.continue_config(wanted, saved, Path("x")).resilience.in_memory_checkpoints is False
