"""Frozen parameters: computed with in the compute type, filled from the starting weights, and part of nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.mesh import Mesh, join
from phalanx.config import load, resolve
from phalanx.core.placement import Placement
from phalanx.engine.fsdp2 import Fsdp2Engine
from phalanx.engine.interface import Engine
from phalanx.engine.single import SingleEngine
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.user_model import build_on_meta
from phalanx.optim.update import Shard
from phalanx.parallel.init_weights import make_frozen_fill, make_random_fill, materialize
from phalanx.parallel.parallelize import parallelize
from phalanx.system import accelerator
from phalanx.tasks.task import Batch
from phalanx.workload.step import run_micro_batches
from phalanx.workload.workload import read_model_shape
from tests.helpers import run_ranks
from tests.numerics import runs

STEPS = 4
TOLERANCES = {"fp64": 1e-9, "bf16": 3e-2, "mixed": 3e-2}


def is_frozen(name: str) -> bool:
    """Some of every unit, and all of the first and the last: units hold both kinds, or one alone."""
    return name.startswith(("embed", "head")) or name.endswith((".q.weight", ".mlp_norm.weight", ".down.weight"))


class Trained:
    """A small model with frozen parameters under an engine, and what was filled."""

    def __init__(self, mesh: Mesh, engine: str, dtype: str, saved: dict[str, torch.Tensor] | None = None) -> None:
        tree = load.apply_overrides(runs.RECIPE, [f"train.dtype={dtype}", f"parallel.engine={engine}"])
        config, _ = resolve.resolve_autos(load.build_config(tree, "the test's recipe"), device="cpu", world=mesh.world)
        spec = read_model_shape(config)
        self.mesh, self.model = mesh, build_on_meta(spec)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not is_frozen(name))
        make: Any = {"single": SingleEngine, "fsdp2": Fsdp2Engine}[engine]
        self.engine: Engine
        self.engine, _ = parallelize(self.model, config, mesh, make, nominal_weight=128)
        self.filled: dict[str, Shard] = {}
        fill = make_random_fill(self.model, seed=0)

        def note(shard: Shard) -> None:
            (fill if saved is None else make_frozen_fill(fill))(shard)
            self.filled[shard.name] = shard

        materialize(self.model, self.engine, note)
        if saved is not None:

            def read(name: str, kind: str, start: int, stop: int, out: torch.Tensor) -> None:
                out.copy_(saved[f"{kind}/{name}"][start:stop])

            with torch.no_grad():
                self.engine.load(read)

    def step(self, number: int) -> float:
        tokens = torch.randint(0, runs.VOCAB, (4, 17), generator=torch.Generator().manual_seed(number))
        mine = slice(*(4 * (self.mesh.rank + i) // self.mesh.world for i in (0, 1)))
        rows, samples = tokens[mine], torch.arange(4)[mine]
        batch = Batch({"tokens": rows[:, :-1], "labels": rows[:, 1:]}, rows[:, 1:].numel(), samples)
        self.engine.begin_step(number, batch.weight, 1e-2, 0.5)
        run_micro_batches(self.engine, self.model, _Task(), [batch], seed=0, step=number, nominal_weight=128)
        norm, _ = self.engine.finish_step().get()
        self.engine.commit(number)
        return norm

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's pieces by "kind/name", in a tensor of the whole with zeros elsewhere."""
        found = {}
        for piece in self.engine.pieces():
            whole = torch.zeros(torch.Size(self.engine.trainable[piece.name]).numel(), dtype=torch.float64)
            whole[piece.start : piece.stop] = piece.tensor
            found[f"{piece.kind}/{piece.name}"] = whole
        return found


class _Task:
    def loss_sum(self, model: torch.nn.Module, batch: Batch, draws: CounterRNG | None) -> torch.Tensor:
        return model(batch.inputs["tokens"], batch.inputs["labels"], draws=draws)


def walk(placement: Placement, folder: str) -> None:
    accelerator.best_dtype = lambda device: torch.bfloat16
    with join(placement, 30) as mesh:
        for engine in ("fsdp2", "single") if mesh.world == 1 else ("fsdp2",):
            for dtype in TOLERANCES:
                walk_by(mesh, engine, dtype, Path(folder) / f"{engine}-{dtype}")


def walk_by(mesh: Mesh, engine: str, dtype: str, folder: Path) -> None:
    trained = Trained(mesh, engine, dtype)
    compute = torch.float64 if dtype == "fp64" else torch.bfloat16
    wide = dtype == "mixed" and mesh.world > 1  # other ranks may compute in another type
    begun = {name: shard.tensor.clone() for name, shard in trained.filled.items()}
    for name, shard in trained.filled.items():
        assert shard.trainable is not is_frozen(name)
        narrow = dtype == "fp64" or (is_frozen(name) and not wide)
        assert shard.tensor.dtype == (compute if narrow else torch.float32)
    norms = [trained.step(number) for number in range(1, STEPS + 1)]
    for parameter in trained.model.parameters():
        assert parameter.requires_grad or parameter.grad is None
    with trained.engine.full_parameters() as whole:
        for name, tensor in whole.items():
            assert tensor.dtype == compute
            shard = trained.filled[name]
            same = torch.equal(tensor.flatten()[shard.start : shard.stop], begun[name].to(compute))
            assert same is (is_frozen(name) or shard.start == shard.stop), name
    folder.mkdir(exist_ok=True)
    torch.save([norms, trained.state()], folder / f"{mesh.rank}.pt")


def outcome(folder: Path, ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    norms, state = [], {}
    for rank in range(ranks):
        norms, mine = torch.load(folder / f"{rank}.pt")
        state = {name: state.get(name, 0) + tensor for name, tensor in mine.items()}
    return norms, state


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with what came of each engine and type, by the number of ranks."""
    folders = {ranks: tmp_path_factory.mktemp(f"on-{ranks}") for ranks in (1, 3)}
    for ranks, folder in folders.items():
        run_ranks(walk, ranks, folder=str(folder))
    return folders


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items())
def test_engines_and_ranks_agree(dtype: str, tolerance: float, walked: dict[int, Path]) -> None:
    found = {}
    for engine, ranks in (("single", 1), ("fsdp2", 1), ("fsdp2", 3)):
        found[engine, ranks] = outcome(walked[ranks] / f"{engine}-{dtype}", ranks)
    norms, state = found["single", 1]
    assert {name.rpartition("/")[2] for name in state if is_frozen(name.partition("/")[2])} == set()
    assert len(state) == 3 * 12, "param and two moments of q's neighbours k, v, o, gate, up and a norm in two blocks"
    for other_norms, other in found.values():
        assert runs.farthest(other_norms, norms) < tolerance
        assert runs.distance(other, state, "param") < tolerance


def resume(placement: Placement, engine: str, folder: str) -> bool:
    """Two steps, then the next two by an engine that was given the saved state; True where nothing differs."""
    with join(placement, 30) as mesh:
        whole = Trained(mesh, engine, "bf16")
        for number in (1, 2):
            whole.step(number)
        saved = whole.state()
        again = Trained(mesh, engine, "bf16", saved)
        again.engine.commit(2)
        norms = [[trained.step(number) for number in (3, 4)] for trained in (whole, again)]
        one, other = whole.state(), again.state()
        assert norms[0] == norms[1]
        return runs.same_bits(one, other) and not runs.same_bits(one, saved)


@pytest.mark.parametrize(("engine", "ranks"), [("single", 1), ("fsdp2", 2)])
def test_a_checkpoint_needs_the_starting_weights_beside_it(engine: str, ranks: int, tmp_path: Path) -> None:
    assert run_ranks(resume, ranks, engine=engine, folder=str(tmp_path)) == [True] * ranks
