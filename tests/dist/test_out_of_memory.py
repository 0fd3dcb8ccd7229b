"""A device that runs out of memory: the run goes on with smaller micro-batches there and nowhere else, or says why not.

The memory really runs out: a model of one's own asks for more than there can be when it gets too many sequences.
"""

from pathlib import Path

import pytest

from phalanx.core import progress_page
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.layout import hardware, memory_limits
from phalanx.layout.mesh_axes import MeshAxes
from tests.dist.command import phalanx, write_place
from tests.helpers import ALL, run_ranks

MODEL = """
import torch
import torch.distributed as dist
from phalanx.models import llama

RANK, MOST = {rank}, {most}

class Block(llama.Block):
    def forward(self, x, *args, **kwargs):
        if x.device.type != "meta" and dist.get_rank() == RANK and x.shape[0] > MOST:
            torch.empty(2**50, dtype=torch.uint8)
        return super().forward(x, *args, **kwargs)

class Model(llama.Llama):
    block = Block
"""
LONG = ("train.steps=4", "train.global_batch=8", "train.micro_batch=4", "train.dtype=fp64", "checkpoint.every=2")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("memory"))


def train(here: Path, name: str, most: int, *changes: str, rank: int = 1) -> tuple[int, RunPaths]:
    (here / f"{name}.py").write_text(MODEL.format(rank=rank, most=most))
    code = f"model.code={name}.py"
    run = phalanx(here, "train", "recipe.yaml", "--ranks", "2", "--run-dir", name, code, *LONG, *changes)
    return run[0], RunPaths(here / name)


def events(paths: RunPaths, kind: str) -> list[dict[str, object]]:
    return [event for event in read_lines(paths.events) if event["kind"] == kind]


def test_the_next_attempt_gives_that_rank_smaller_micro_batches(here: Path) -> None:
    once = ("resilience.max_restarts=0",)  # it is no failure that counts
    code, quiet = train(here, "quiet", 99, *once)
    assert code == ExitCode.DONE
    assert not quiet.memory_limit(1).exists()
    code, paths = train(here, "tight", 1, *once)
    assert code == ExitCode.DONE
    assert [event["reason"] for event in events(paths, EventKind.WORKER_DIED)] == [
        f"rank 1 ran out of memory with micro-batches of {tried} sequences; from the next start on it gets "
        f"{tried // 2} at most"
        for tried in (4, 2)
    ]
    assert {event["exit_code"] for event in events(paths, EventKind.WORKER_DIED)} == {ExitCode.OUT_OF_MEMORY}
    assert [event["most"] for event in events(paths, EventKind.MEMORY_LIMITED)] == [{"1": 2}, {"1": 1}]
    assert memory_limits.read_micro_batch_limits(paths) == {1: 1}
    ours, theirs = ([step["loss"] for step in read_steps(each.metrics)] for each in (paths, quiet))
    assert len(ours) == 4
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_a_model_that_never_fits_ends_with_a_sentence(here: Path) -> None:
    code, paths = train(here, "never", 0, rank=0)
    assert code == ExitCode.OUT_OF_MEMORY
    reasons = [str(event["reason"]) for event in events(paths, EventKind.WORKER_DIED)]
    assert len(reasons) == 3  # with 4, 2 and 1
    assert reasons[-1] == (
        "rank 0 ran out of memory with micro-batches of one sequence, and there are none smaller; shard the model over "
        "more ranks, set memory.activations=full, or lower data.seq_len"
    )


def test_what_does_not_fit_when_it_is_measured_is_never_tried(here: Path) -> None:
    code, paths = train(here, "measured", 3, "balance.batch=auto")
    assert code == ExitCode.DONE
    assert events(paths, EventKind.WORKER_DIED) == []
    assert [device.most for device in hardware.read_hardware(paths.hardware).devices] == [8, 3]
    assert len(events(paths, EventKind.MEASURED)) == 1
    steps = read_steps(paths.metrics)
    assert len(steps) == 4
    # What was measured is kept: nothing is measured when the run goes on.
    code, paths = train(here, "measured", 3, "balance.batch=auto", "train.steps=6")
    assert code == ExitCode.DONE
    assert len(events(paths, EventKind.MEASURED)) == 1


@pytest.mark.skipif(not ALL, reason="make test-all")
def test_what_fits_is_measured_though_less_is_asked_for(here: Path) -> None:
    code, paths = train(here, "little", 2, "train.micro_batch=1", "balance.batch=auto")
    assert code == ExitCode.DONE
    assert [device.most for device in hardware.read_hardware(paths.hardware).devices] == [8, 1]


def known(placement: Placement, run: str, data: str) -> list[int]:
    """Sequences of a micro-batch that each of two copies of a model on two ranks each may have."""
    from phalanx.autotune.rank_speeds import find_rank_speeds
    from phalanx.comm.mesh import join
    from phalanx.workload.sinks import RecordWriter
    from phalanx.workload.workload import make_workload
    from tests.numerics.runs import job

    described = job(run, data, {"parallel.tensor": 2, "train.micro_batch": 4}, placement.world)
    with join(placement, 30, axes=MeshAxes(2)) as mesh:
        records = RecordWriter(described.paths, 1, [], active=mesh.rank == 0)
        workload = make_workload(described.config, described.spec)
        speeds, _ = find_rank_speeds(described.config, workload, placement, mesh, described.paths, records)
        records.close()
    return [speed.most for speed in speeds]


def test_what_one_rank_ran_out_of_memory_with_limits_its_copy_of_the_model(tokens: Path, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    memory_limits.record_out_of_memory(paths, 3, 4)
    memory_limits.record_out_of_memory(paths, 9, 4)  # there is no such rank any more
    assert run_ranks(known, 4, run=str(tmp_path), data=str(tokens)) == [[4, 2]] * 4
    assert [event["most"] for event in events(paths, EventKind.MEMORY_LIMITED)] == [{"3": 2}]
    assert memory_limits.read_micro_batch_limits(paths) == {3: 2}


def tries(placement: Placement, run: str, data: str) -> list[list[int]]:
    """What is tried on this rank when it is measured, each time with what its pulse says of that; and what that says in
    the end."""
    from phalanx.autotune.probe_model import ProbeModel
    from phalanx.autotune.rank_speeds import find_rank_speeds
    from phalanx.comm.mesh import join
    from phalanx.workload.sinks import RecordWriter
    from phalanx.workload.workload import make_workload
    from tests.numerics.runs import job, on_one_thread

    found: list[list[int]] = []
    inner = ProbeModel.measure_peak_bytes

    def said() -> int:
        beat = progress_page.read_progress(
            progress_page.progress_page_path(run, placement.rank).read_bytes(), placement.rank, placement.attempt, 0
        )
        assert beat is not None
        return beat.largest

    def noted(self: ProbeModel, samples: int) -> int:
        peak = inner(self, samples)
        found.append([samples, said()])
        return peak

    ProbeModel.measure_peak_bytes = noted  # type: ignore[method-assign]
    hardware.describe_uneven_devices = lambda known: None  # or all might be tried again, on a busy machine
    described = job(run, data, {"balance.batch": "auto", "train.micro_batch": 3}, placement.world)
    with join(on_one_thread(placement), 30) as mesh:
        mesh.traffic.progress_page = progress_page.open_progress_page(run, placement.rank, placement.attempt)
        records = RecordWriter(described.paths, 1, [], active=mesh.rank == 0)
        workload = make_workload(described.config, described.spec)
        find_rank_speeds(described.config, workload, placement, mesh, described.paths, records)
        records.close()
    return [*found, [said()]]


def test_what_memory_ran_out_with_is_not_measured_again(tokens: Path, tmp_path: Path) -> None:
    memory_limits.record_out_of_memory(RunPaths(tmp_path), 1, 2)
    free, limited = run_ranks(tries, 2, run=str(tmp_path), data=str(tokens))
    assert free == [[1, 1], [3, 3]] * 2 + [[0]]
    assert limited == [[1, 1]] * 2 + [[0]]
    known = hardware.read_hardware(RunPaths(tmp_path).hardware).devices
    assert known[0].most > 1 == known[1].most  # what is written down is no more than was left to try


OWN = """
import torch
from torch import nn
from phalanx.models.model import Model
from phalanx.tasks.task import CustomTask
from phalanx.tasks.task import Batch

class Net(Model):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        return self.head(x)

class Task(CustomTask):
    def model(self):
        return Net()

    def train(self):
        return [torch.ones(2)] * 8

    def collate(self, samples):
        return Batch({"x": torch.stack(samples)}, len(samples))

    def loss_sum(self, model, batch, draws):
        if torch.distributed.is_initialized():  # not where the task is looked at beforehand
            torch.empty(2**50, dtype=torch.uint8)
        return model(batch.inputs["x"]).sum()
"""


def test_a_task_of_a_users_own_has_no_sequences_to_shorten(here: Path) -> None:
    (here / "own.py").write_text(OWN)
    (here / "own.yaml").write_text("task: {code: own.py}\ntrain: {steps: 2, global_batch: 2, eval_sequences: 0}\n")
    even = ("train.micro_batch=1", "balance.batch=even", "report.tensorboard=false")
    assert phalanx(here, "train", "own.yaml", "--ranks", "2", *even)[0] == ExitCode.OUT_OF_MEMORY
    (died,) = events(RunPaths(here / "runs" / "own"), EventKind.WORKER_DIED)
    assert str(died["reason"]).endswith(
        "shard the model over more ranks, set memory.activations=full, or make the model or its samples smaller"
    )
