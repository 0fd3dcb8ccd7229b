"""The promise for a task of a user's own: the vision example on any ranks and shares, with dropout, killed and resumed,
walks one curve; and it really learns."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phalanx.comm.mesh import Mesh, join
from phalanx.config import load, resolve
from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.models.counter_rng import CounterRNG
from phalanx.parallel.init_weights import materialize
from phalanx.tasks.task import Batch, Task
from phalanx.trainer import run_folder, train_rank
from phalanx.trainer.export import export_run, load_trained_model
from phalanx.trainer.loop import TrainingLoop
from phalanx.trainer.resolve import resolve_with_files
from phalanx.trainer.setup import TrainingJob
from phalanx.workload.build import build_components
from phalanx.workload.step import evaluate, run_micro_batches
from tests.helpers import ROOT, run_ranks
from tests.numerics import runs
from tests.unit.test_custom_task import SOUND, idx

STEPS = 6
RECIPE: dict[str, dict[str, Any]] = {
    "task": {"code": str(ROOT / "examples" / "vision_task.py"), "options": {"width": 8, "depth": 2, "dropout": 0.2}},
    "train": {"steps": STEPS, "global_batch": 9, "micro_batch": 4, "dtype": "fp64", "eval_sequences": 25,
              "eval_every": 3},
    "optim": {"lr": 1e-2, "clip_norm": 0.9, "decay_steps": STEPS},
    "checkpoint": {"every": 3},
    "balance": {"batch": "even"},
    "comm": {"timeout_s": 30},
    "report": {"tensorboard": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """IDX files with something to learn in them: which half of the picture is bright."""
    root, generator = tmp_path_factory.mktemp("mnist"), np.random.default_rng(3)
    for part, count in (("train", 60), ("t10k", 31)):
        labels = generator.integers(0, 2, count).astype(np.uint8)
        pictures = generator.integers(0, 160, (count, 6, 6)).astype(np.uint8)
        for picture, label in zip(pictures, labels, strict=True):
            picture[label * 3 : label * 3 + 3] += 90
        (root / f"{part}-images-idx3-ubyte").write_bytes(idx(pictures))
        (root / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return root


def job(run: Path, images: str, changes: dict[str, Any], world: int) -> TrainingJob:
    tree = {section: dict(keys) for section, keys in RECIPE.items()}
    tree["task"]["options"] = {**tree["task"]["options"], "folder": images}
    for key, value in changes.items():
        section, _, leaf = key.partition(".")
        tree.setdefault(section, {})[leaf] = value
    config, _ = resolve.resolve_autos(load.build_config(tree, "the tests' recipe"), device="cpu", world=world)
    return TrainingJob(config, None, RunPaths(run), [], {})


def train(placement: Placement, run: str, images: str, changes: dict[str, Any], dies_in: int | None = None) -> int:
    """One rank of a run, from start or newest checkpoint; `dies_in` a step, at the first attempt, without a word."""
    described = job(Path(run), images, changes, placement.world)
    where = dataclasses.replace(placement, threads=1)
    if dies_in is not None and placement.attempt == 1:
        import os

        walk = TrainingLoop.train_step

        def train_one(loop: TrainingLoop, step: int) -> str | None:
            if step == dies_in and placement.rank == placement.world - 1:
                loop.setup.saver.wait()  # there is a checkpoint
                os._exit(9)
            return walk(loop, step)

        loop_class: Any = TrainingLoop
        loop_class.train_step = train_one  # of this forked process alone
    return int(train_rank.run_training(described, where))


def walk(
    ranks: int, run: Path, images: Path, dies_in: int | None = None, restarts: int = 0, **changes: Any
) -> runs.Outcome:
    run.mkdir()
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    codes = run_ranks(train, ranks, 240, restarts, run=str(run), images=str(images), changes=dotted, dies_in=dies_in)
    assert codes == [0] * ranks
    return runs.outcome(run)


def scores(run: Path) -> list[tuple[int, float]]:
    return [(event["step"], event["scores"]["accuracy"]) for event in runs.events(run, "evaluated")]


def test_any_ranks_and_shares_walk_one_curve(images: Path, tmp_path: Path) -> None:
    one = walk(1, tmp_path / "one", images)
    others = {
        "uneven": walk(3, tmp_path / "uneven", images, balance__batch=[5, 3, 1]),
        "empty": walk(3, tmp_path / "empty", images, balance__batch=[5, 4, 0], memory__activations="full"),
    }
    assert min(one.losses) < 0.7 * one.losses[0]
    for name, other in others.items():
        assert runs.farthest(other.losses, one.losses) < 1e-9, name
        assert runs.farthest(other.norms, one.norms) < 1e-9, name
        assert runs.distance(other.state, one.state, "param") < 1e-9, name
        assert other.evaluations == pytest.approx(one.evaluations, rel=1e-9)
        # Scores are quotients of sums of whole numbers: the same to the last bit.
        assert scores(tmp_path / name) == scores(tmp_path / "one")
    assert [step for step, _ in scores(tmp_path / "one")] == [3, STEPS]
    [first, _] = runs.events(tmp_path / "one", "evaluated")
    assert (first["tokens"], first["unit"]) == (25, "samples")


def test_killed_and_resumed_is_the_same_to_the_last_bit(images: Path, tmp_path: Path) -> None:
    whole = walk(2, tmp_path / "whole", images, balance__batch=[6, 3])
    killed = walk(2, tmp_path / "killed", images, dies_in=5, restarts=1, balance__batch=[6, 3])
    assert runs.events(tmp_path / "killed", "resumed")[0]["step"] == 3
    assert killed.losses == whole.losses
    assert runs.same_bits(killed.state, whole.state)


def gradients(placement: Placement, images: str, cases: list[tuple[str, list[int]]]) -> list[dict[str, list[float]]]:
    """`gradients_of` these types and shares."""
    torch.set_num_threads(1)
    with join(placement, 30) as mesh:
        return [gradients_of(mesh, images, dtype, work) for dtype, work in cases]


def gradients_of(mesh: Mesh, images: str, dtype: str, work: list[int]) -> dict[str, list[float]]:
    """One step's whole gradients, divided by nothing, of a batch cut into these shares."""
    changes = {"balance.batch": work, "train.dtype": dtype, "train.global_batch": sum(work)}
    if mesh.world > 1:  # the twin leaves gradients where autograd puts them
        changes["parallel.engine"] = "fsdp2"
    described = job(Path("nowhere"), images, changes, mesh.world)
    parts = build_components(described.config, None, mesh, [], {})
    materialize(parts.model, parts.engine, parts.starting_weights)
    batches = [parts.task.collate(samples) for samples in parts.train.batches(0, parts.work_split.division)]
    parts.engine.begin_step(1, sum(batch.weight for batch in batches), 1e-3, None)
    run_micro_batches(parts.engine, parts.model, parts.task, batches, seed=0, step=1, nominal_weight=1)
    found = {}
    for name, parameter in parts.model.named_parameters():
        grad: Any = parameter.grad
        found[name] = (grad.full_tensor() if mesh.world > 1 else grad).flatten().tolist()
    return found


class Kinds(Task):
    """Counts samples by kind; a batch names those kinds alone that it has."""

    def collate(self, samples: Sequence[float]) -> Batch:
        return Batch({"x": torch.tensor(samples)[:, None]}, len(samples))

    def nominal_weight(self, global_batch: int) -> int:
        return global_batch

    def loss_sum(self, model: nn.Module, batch: Batch, draws: CounterRNG | None) -> Tensor:
        return model(batch.inputs["x"]).sum() * 0.0

    def counts(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        kinds = batch.inputs["x"].flatten().int().tolist()
        return {f"kind {kind}": torch.tensor(kinds.count(kind)) for kind in kinds}

    def scores(self, counts: dict[str, float]) -> dict[str, float]:
        return counts


def scores_of_kinds(placement: Placement) -> dict[str, float]:
    mine = [[1.0, 2.0, 2.0], [3.0], [2.0, 4.0]][placement.rank]
    with join(placement, 30) as mesh:
        task = Kinds()
        _, weight, scores = evaluate(nn.Linear(1, 1), task, [[task.collate(mine)]], mesh)
        assert weight == 6
        return scores


def test_a_rank_may_have_nothing_to_count_under_a_name() -> None:
    for scores in run_ranks(scores_of_kinds, 3):
        assert scores == {"kind 1": 1, "kind 2": 3, "kind 3": 1, "kind 4": 1}


def test_gradients_of_shares_are_those_of_one_process(images: Path) -> None:
    types = {"fp32": 1e-6, "fp64": 1e-12}
    cases = list(itertools.product(types, ([7, 2], [0, 9])))
    [wholes] = run_ranks(gradients, 1, images=str(images), cases=[(dtype, [9]) for dtype, _ in cases[::2]])
    [cuts, _] = run_ranks(gradients, 2, images=str(images), cases=cases)
    for number, (dtype, work) in enumerate(cases):
        cut, whole = cuts[number], wholes[number // 2]
        assert cut.keys() == whole.keys()
        for name in whole:
            a, b = (torch.tensor(values[name], dtype=torch.float64) for values in (cut, whole))
            assert float((a - b).norm()) <= types[dtype] * float(b.norm()), (name, dtype, work)


def test_it_learns_the_digits_and_its_export_computes_the_same(tmp_path: Path) -> None:
    """Real pictures: scikit-learn's digits, held out ones told with more than 95 % right after 200 steps."""
    config = load.load_recipe(
        ROOT / "recipes" / "digits.yaml",
        ["train.steps=200", f"task.code={ROOT}/examples/vision_task.py", "task.options={width: 16, depth: 2}",
         "train.micro_batch=64", "train.eval_every=0", "report.tensorboard=false"],
    )  # fmt: skip
    [accuracy] = run_ranks(learn, 1, 120, run=str(tmp_path), text=load.to_yaml(config))
    assert accuracy > 0.95


def learn(placement: Placement, run: str, text: str) -> float:
    from safetensors.torch import load_file

    from phalanx.core.user_code import load_class
    from phalanx.tasks.task import CustomTask

    paths = RunPaths(Path(run) / "run")
    paths.root.mkdir()
    config, _ = resolve.resolve_autos(load.build_config(load.parse_yaml(text, "it"), "it"), device="cpu", world=1)
    answer = resolve_with_files(load.to_yaml(config), ["cpu"], 1, 1, None)
    config = load.build_config(load.parse_yaml(answer["config"], "answer"), "answer")
    run_folder.write_start(paths, config, answer["tokenizer"])
    where = dataclasses.replace(placement, threads=1)
    assert train_rank.run_training(TrainingJob(config, None, paths, [], {}), where) == 0
    export_run(paths, Path(run) / "exported", None)
    # A reader needs no more than the folder: the class of its task.py, the options, the tensors by their own names.
    task_class: Any = load_class("task.code", Path(run) / "exported" / "task.py", "Task", CustomTask)
    made = task_class(width=16, depth=2)
    model = made.model()
    model.load_state_dict(load_file(Path(run) / "exported" / "model.safetensors"))
    loaded = dict(load_trained_model(paths).named_parameters())
    assert all(torch.equal(loaded[name].to(each.dtype), each) for name, each in model.named_parameters())
    held_out = made.held_out()
    batch = made.collate([held_out[number] for number in range(len(held_out))])
    with torch.no_grad():
        counts: dict[str, Tensor] = made.counts(model, batch)
    [event] = runs.events(paths.root, "evaluated")
    mine = made.scores({name: float(count) for name, count in counts.items()})["accuracy"]
    assert event["tokens"] == 360
    assert abs(mine - event["scores"]["accuracy"]) < 1e-9
    return float(event["scores"]["accuracy"])


def test_a_sample_that_cannot_be_read_ends_the_run_with_its_number(tmp_path: Path) -> None:
    """Found by one of two ranks in the middle of the training: nobody hangs, and nothing is tried again."""
    torn = "    def __getitem__(self, i):\n        if i == 20: raise OSError('torn')\n        return torch.ones(3)\n"
    data = f"class Torn:\n    def __len__(self):\n        return 60\n{torn}class Net("
    (tmp_path / "task.py").write_text(
        SOUND.replace("class Net(", data).replace("[torch.full((3,), float(i)) for i in range(6)]", "Torn()")
    )
    [(code, attempts, log)] = run_ranks(launched, 1, 60, folder=str(tmp_path))
    assert (code, attempts) == (2, 1)
    assert "sample 20 of train() fails: OSError: torn in line" in log


def launched(placement: Placement, folder: str) -> tuple[int, int, str]:
    from phalanx.launch import run

    paths = RunPaths(Path(folder) / "run")
    train: dict[str, Any] = {"steps": 30, "global_batch": 4, "micro_batch": 2, "eval_sequences": 0}
    tree: dict[str, Any] = {"task": {"code": f"{folder}/task.py"}, "train": train, "report": {"tensorboard": False}}
    tree["balance"] = {"batch": "even"}
    code = run.train(load.build_config(tree, "the test's recipe"), paths, 2, {})
    logs = "".join(path.read_text() for path in sorted((paths.root / "logs").rglob("*.log")))
    return code, len(runs.events(paths.root, "attempt_started")), logs
