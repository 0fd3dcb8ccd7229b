"""Tiny real runs for the proofs: a job in a folder, a rank's part in it, and what it left behind.

`train` and the functions like it are run on ranks by `tests.helpers.run_ranks`; the others read the run folder.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.checkpoint.disk.load import Checkpoint, list_steps, step_folder
from phalanx.checkpoint.disk.save import CheckpointSaver
from phalanx.comm.mesh import Mesh, join
from phalanx.comm.rendezvous import JsonGroup
from phalanx.config import load, resolve
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import Placement
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.models.counter_rng import CounterRNG
from phalanx.optim.update import state_shape
from phalanx.tasks.language import IGNORE_INDEX
from phalanx.tasks.task import Batch, SampleLike, Task
from phalanx.trainer import train_rank
from phalanx.trainer.loop import TrainingLoop
from phalanx.trainer.setup import TrainingJob, TrainingSetup
from phalanx.trainer.stop_request import StopRequest
from phalanx.workload.build import build_components
from phalanx.workload.sinks import RecordWriter
from phalanx.workload.workload import read_model_shape
from tests.helpers import ALL, run_ranks
from tests.token_sets import TokenWriter

VOCAB = 61  # divides by none of 2, 3 and 5, so that every engine's cut of the embedding is uneven
STEPS = 30 if ALL else 6
RECIPE: dict[str, dict[str, Any]] = {
    "model": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 44, "vocab_size": VOCAB,
              "dropout": 0.1},
    "data": {"seq_len": 16},
    "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 8, "dtype": "fp64", "eval_sequences": 11},
    # A norm of about 1 at the start and less later: the clipping is active in some steps and not in others.
    "optim": {"lr": 1e-2, "warmup_steps": 3, "decay_steps": STEPS, "clip_norm": 0.9},
    "checkpoint": {"every": 0},
    "balance": {"batch": "even"},
    "comm": {"timeout_s": 30},
    "report": {"tensorboard": False},
}  # fmt: skip


def write_tokens(folder: Path) -> None:
    """Token files to train and to evaluate on, with something to learn in them: each token tends to follow another."""
    generator = np.random.default_rng(7)
    for name, documents in (("train", 60), ("held_out", 6)):
        writer = TokenWriter(folder / name, VOCAB, 0, "proofs")
        for _ in range(documents):
            tokens = generator.integers(1, VOCAB, 100)
            follow = generator.random(100) < 0.6
            for i in range(1, 100):
                if follow[i]:
                    tokens[i] = 1 + (tokens[i - 1] * 7) % (VOCAB - 1)
            writer.append(tokens)
        writer.finish()


def job(run: str | Path, data: str | Path, changes: dict[str, Any], world: int) -> TrainingJob:
    """The run of the recipe above with dotted keys, or whole sections, changed, in folder `run`, on tokens in `data`.

    What is called train... there is trained on, two sets as a mixture of weights 3 and 1; all others are evaluated on.
    """
    tree = copy.deepcopy(RECIPE)
    for key, value in changes.items():
        section, dot, leaf = key.partition(".")
        if dot:
            tree.setdefault(section, {})[leaf] = value
        else:
            tree[section] = value
    config, _ = resolve.resolve_autos(load.build_config(tree, "the tests' recipe"), device="cpu", world=world)
    Path(run).mkdir(parents=True, exist_ok=True)
    spec = read_model_shape(config)
    folders = sorted(path for path in Path(data).iterdir() if path.name.startswith("train"))
    weights = (3.0, 1.0) if len(folders) > 1 else (1.0,)
    held_out = {path.name: path for path in sorted(Path(data).iterdir()) if path not in folders}
    return TrainingJob(config, spec, RunPaths(Path(run)), list(zip(folders, weights, strict=True)), held_out)


def on_one_thread(placement: Placement) -> Placement:
    """The placement with one thread for each rank: threads that spin are slow on busy cores."""
    return dataclasses.replace(placement, threads=1)


@contextlib.contextmanager
def loop_of(placement: Placement, described: TrainingJob) -> Iterator[TrainingLoop]:
    """What `trainer.run` runs, for tests that change a part of it first."""
    parallel = described.config.parallel
    with join(placement, described.config.comm.timeout_s, axes=parallel.axes) as mesh:
        yield loop_among(mesh, placement, described)


def loop_among(
    mesh: Mesh, placement: Placement, described: TrainingJob, weights: tuple[float, ...] | None = None
) -> TrainingLoop:
    """The same among ranks that have met, with these `weights` of their shares of the state."""
    records = RecordWriter(described.paths, placement.attempt, [], active=mesh.rank == 0)
    saver = CheckpointSaver(described.paths.checkpoints, mesh.rank, JsonGroup(mesh.checkpoint), 3, records.write_event)
    sets = described.train_tokens, described.held_out_tokens
    parts = build_components(described.config, described.spec, mesh, *sets, weights=weights)
    return TrainingLoop(TrainingSetup(described, placement, mesh, parts, records, saver, StopRequest()))


def train(
    placement: Placement,
    run: str,
    data: str,
    changes: dict[str, Any] | None = None,
    shares: Sequence[int] | None = None,
    masked: bool = False,
) -> int:
    """One rank of a run, from start or newest checkpoint to its end; `shares` instead of even ones, labels `masked`."""
    given = {} if shares is None else {"balance.batch": list(shares)}
    described = job(run, data, (changes or {}) | given, placement.world)
    if not masked:
        return int(train_rank.run_training(described, on_one_thread(placement)))
    with loop_of(placement, described) as loop:
        loop.setup.components.task = Masked(loop.setup.components.task)
        return int(train_rank.run_steps(loop, loop.restore()))


@dataclass(frozen=True)
class Masked(Task):
    """A task that ignores many labels, of some samples all, by the sample's place: every step weighs something else."""

    task: Task

    def collate(self, samples: Sequence[SampleLike]) -> Batch:
        batch = self.task.collate(samples)
        labels = batch.inputs["labels"].clone()
        for row, sample in zip(labels, samples, strict=False):
            row[: sample.position * 5 % (2 * len(row))] = IGNORE_INDEX
        return Batch(batch.inputs | {"labels": labels}, int((labels != IGNORE_INDEX).sum()), batch.samples)

    def loss_sum(self, model: torch.nn.Module, batch: Batch, draws: CounterRNG | None) -> Tensor:
        return self.task.loss_sum(model, batch, draws)

    def nominal_weight(self, global_batch: int) -> int:
        return self.task.nominal_weight(global_batch)


def walk(
    ranks: int, run: Path, data: Path, shares: Sequence[int] | None = None, masked: bool = False, **changes: Any
) -> "Outcome":
    """Train on `ranks` ranks and return what came of it. Keys of `changes` are written with __ for the dot."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    codes = run_ranks(
        train, ranks, timeout_s=240, run=str(run), data=str(data), changes=dotted, shares=shares, masked=masked
    )
    assert codes == [0] * ranks
    return outcome(run)


@dataclass
class Outcome:
    """A run's curve and last state, as its folder tells them."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]  # "kind/name" -> the whole tensor, flat
    evaluations: dict[tuple[int, str], float] = field(default_factory=dict)  # by step and set


def outcome(run: Path) -> Outcome:
    """What a run folder holds: losses and norms by step, the newest checkpoint's tensors, evaluations."""
    steps = read_steps(RunPaths(run).metrics)
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    evaluations = {(event["step"], event["set"]): event["loss"] for event in events(run, "evaluated")}
    return Outcome(
        [record["loss"] for record in steps], [record["grad_norm"] for record in steps], state(run), evaluations
    )


def state(run: Path, step: int | None = None) -> dict[str, Tensor]:
    """All tensors of a checkpoint (the newest) by "kind/name", put together from their pieces."""
    folder = RunPaths(run).checkpoints
    checkpoint = Checkpoint(step_folder(folder, list_steps(folder)[0] if step is None else step))
    checkpoint.verify()
    tensors = {}
    for name, (shape, dtype) in checkpoint.parameters.items():
        for kind in checkpoint.kinds(name):
            tensors[f"{kind}/{name}"] = out = torch.empty(
                math.prod(state_shape(shape, kind)), dtype=getattr(torch, dtype)
            )
            checkpoint.read_into(name, kind, 0, out.numel(), out)
    checkpoint.close()
    return tensors


def read_header(run: Path) -> dict[str, Any]:
    """The header of the newest checkpoint."""
    folder = RunPaths(run).checkpoints
    checkpoint = Checkpoint(step_folder(folder, list_steps(folder)[0]))
    checkpoint.close()
    return checkpoint.header


def events(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The events of a run, of one kind if given."""
    return [event for event in read_lines(RunPaths(run).events) if kind is None or event["kind"] == kind]


def farthest(one: Sequence[float], other: Sequence[float]) -> float:
    """The greatest relative difference of two curves of equal length."""
    assert len(one) == len(other), (len(one), len(other))
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def distance(one: dict[str, Tensor], other: dict[str, Tensor], kind: str) -> float:
    """The norm of the difference of all tensors of a kind, relative to the norm of `other`'s."""
    assert one.keys() == other.keys()
    names = [name for name in other if name.startswith(f"{kind}/")]
    assert names
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in names)
    return math.sqrt(apart / sum(float(other[name].double().square().sum()) for name in names))


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states are equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)
