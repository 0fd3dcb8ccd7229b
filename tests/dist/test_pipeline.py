"""A pipeline walks the trajectory of one process: any schedule, any division into stages, with copies of the model
beside it, with a tied head, and from checkpoint to checkpoint."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from phalanx.checkpoint.disk.load import agree_on_newest
from phalanx.checkpoint.disk.save import CheckpointSaver
from phalanx.comm.mesh import Mesh, join
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.placement import Placement
from phalanx.engine.interface import Engine, Precision
from phalanx.engine.sharded import ShardedEngine
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.engine.single import SingleEngine
from phalanx.layout import tensor_shards
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.layout.model_shape import ModelSpec
from phalanx.layout.tensor_shards import TensorShard
from phalanx.models.llama import Llama
from phalanx.optim.update import AdamW
from phalanx.parallel import activations
from phalanx.parallel.init_weights import make_random_fill, materialize
from phalanx.parallel.model_part import count_tied_copies, fill_by_rows, find_tied_elsewhere, make_pipeline, plan_stages
from phalanx.parallel.parallelize import sharding_units
from phalanx.parallel.tensor import apply_tensor_parallel, make_tensor_context
from phalanx.tasks.language import CausalLMTask
from phalanx.tasks.task import Batch
from phalanx.workload.step import evaluate, evaluate_pipeline, run_micro_batches, run_pipeline
from tests.helpers import run_ranks, some

SEED, LENGTH, SEQUENCES, BETA = 3, 12, 8, 0.9
# Each way to divide a step; twenty steps are walked by tests/numerics/test_auto_layout.py.
STEPS = 4
SPEC = ModelSpec(
    vocab_size=37, hidden=16, layers=4, heads=4, kv_heads=2, head_dim=4, intermediate=20, max_seq_len=32, dropout=0.1
)
NOMINAL = SEQUENCES * LENGTH


@dataclass(frozen=True)
class Sample:
    """A sequence; some of its labels do not count."""

    position: int
    lengths: NDArray[np.int64] | None = None

    @property
    def _draws(self) -> np.random.Generator:
        return np.random.default_rng(self.position)

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._draws.integers(0, SPEC.vocab_size, LENGTH + 1)

    @property
    def learnt(self) -> NDArray[np.bool_]:
        return self._draws.random(LENGTH) < 0.9


def sequences(step: int, packed: bool) -> list[Sample]:
    lengths = np.array([5, LENGTH - 5], np.int64) if packed else None
    return [Sample(step * SEQUENCES + number, lengths) for number in range(SEQUENCES)]


def cut(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Micro-batches of unlike sizes, of which the last may be empty."""
    size = -(-len(samples) // (parts - 1)) if parts > 1 else len(samples)
    return [list(samples[part * size : (part + 1) * size]) for part in range(parts)]


def micro_batches(step: int, copy: int, copies: int, packed: bool) -> list[Batch]:
    """What copy number `copy` of the model has in a step: uneven shares, and another number of micro-batches than in
    the step before, one of them in some steps of nothing."""
    samples = sequences(step, packed)
    share = [SEQUENCES] if copies == 1 else [5, 3]
    first = sum(share[:copy])
    parts = (4, 5, 1, 3)[step % 4]
    task = CausalLMTask(LENGTH, isolated=packed)
    return [task.collate(some) for some in cut(samples[first : first + share[copy]], parts)]


@dataclass
class Walker:
    """A model under its engine on one rank, alone or in a pipeline."""

    mesh: Mesh
    spec: ModelSpec
    dtype: str = "float64"
    schedule: str = ""  # "": no pipeline
    numbers: list[int] | None = None
    zero: int = 1
    slots: int = 1
    packed: bool = False
    recompute: bool = False
    compiled: bool = False
    sequence: bool = False

    def __post_init__(self) -> None:
        kind = getattr(torch, self.dtype)
        self.precision = Precision(kind, kind)
        self.task = CausalLMTask(LENGTH, isolated=self.packed)
        with torch.device("meta"):
            self.model = Llama(self.spec)
        self.shapes = {name: tuple(each.shape) for name, each in self.model.named_parameters()}
        held = (
            apply_tensor_parallel(self.model, make_tensor_context(self.mesh, self.spec.kv_heads, self.sequence))
            if self.mesh.tensor
            else {}
        )
        self.pipeline = None
        if self.schedule:
            assert self.mesh.pipe is not None
            plan = plan_stages(self.spec, self.mesh.pipe.size, self.schedule, self.numbers)
            self.pipeline = make_pipeline(self.model, plan, self.schedule, self.mesh, self.precision, self.sequence)
        if self.recompute:
            activations.recompute(self.model.blocks(), selective=False)
        if self.compiled:
            for block in self.model.blocks():  # what a compiler does to autograd, without the minute of its C++
                block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        rule = AdamW(BETA, 0.95, 1e-6, 0.1)
        same: dict[str, Any] = {"rule": rule, "nominal_weight": NOMINAL, "precision": self.precision}
        self.engine: Engine = (
            SingleEngine(self.model, sharding_units(self.model), mesh=self.mesh, **same)
            if self.pipeline is None
            else ShardedEngine(
                self.model, sharding_units(self.model), mesh=self.mesh.data, **same,
                sharding=ShardingSpec(zero=self.zero, slots=self.slots), copies=self.copies(held),
            )
        )  # fmt: skip
        materialize(self.model, self.engine, fill_by_rows(make_random_fill(self.model, SEED), held))

    def step(self, number: int) -> list[float]:
        """One step; returns this rank's loss sum, the norm, and whether the update was skipped."""
        data = self.mesh.data
        batches = micro_batches(number, data.rank, data.world, self.packed)
        if self.compiled:  # each size for itself
            batches = [batch for batch in batches if batch.weight]
        self.engine.begin_step(number, sum(batch.weight for batch in batches), 3e-3 / number**0.5, 0.5)
        how: dict[str, Any] = {"seed": SEED, "step": number, "nominal_weight": NOMINAL}
        if self.pipeline is None:
            loss = run_micro_batches(self.engine, self.model, self.task, batches, **how)
        else:
            assert isinstance(self.engine, ShardedEngine)
            loss = run_pipeline(self.engine, self.model, self.task, batches, **how, pipeline=self.pipeline)
        outcome = self.engine.finish_step()
        self.engine.commit(number)
        return [float(loss), *outcome.get()]

    def evaluate(self) -> tuple[float, int, dict[str, float]]:
        batches = [
            micro_batches(1000 + each, self.mesh.data.rank, self.mesh.data.world, self.packed) for each in (0, 1)
        ]
        if self.pipeline is None:
            return evaluate(self.model, self.task, batches, self.mesh)
        speaks = self.pipeline.has_loss and (self.mesh.tensor is None or self.mesh.tensor.rank == 0)
        with torch.compiler.set_stance("force_eager"):  # or all would be compiled once more, for other sizes
            return evaluate_pipeline(self.model, self.task, batches, self.mesh, speaks, self.pipeline)

    def copies(self, held: dict[str, TensorShard]) -> dict[str, int]:
        """How many ranks of one model hold each parameter alike."""
        assert self.pipeline is not None
        names, tensor = dict(self.model.named_parameters()), self.mesh.axes.tensor
        slices_alike = tensor_shards.count_copies(names, held, tensor) if tensor > 1 else {}
        ends_alike = count_tied_copies(self.model, self.pipeline)
        return {name: slices_alike.get(name, 1) * ends_alike.get(name, 1) for name in names}

    def saved_elsewhere(self) -> frozenset[str]:
        return frozenset() if self.pipeline is None else find_tied_elsewhere(self.model, self.pipeline)

    def close(self) -> None:
        self.engine.close()
        if self.pipeline is not None:
            self.pipeline.close()

    def outcome(self, steps: int, first: int = 1) -> dict[str, Any]:
        """Losses and norms of some steps, an evaluation, and the state."""
        walked = [self.step(number) for number in range(first, first + steps)]
        found: dict[str, Any] = {
            "losses": [each[0] for each in walked],
            "norms": [each[1] for each in walked],
            "skipped": sum(each[2] for each in walked),
            "evaluated": self.evaluate(),
            "pieces": [[p.name, p.kind, p.start, p.tensor.tolist()] for p in self.engine.pieces()],
            "copied": sorted(self.saved_elsewhere()),
        }
        self.close()
        return found


def walk(
    placement: Placement, steps: int, spec: dict[str, Any], pipeline: int = 1, tensor: int = 1, **how: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    with join(placement, 30, axes=MeshAxes(tensor, pipeline)) as mesh:
        return Walker(mesh, replace(SPEC, **spec), **how).outcome(steps)


@dataclass
class Found:
    """What all ranks of a run have found."""

    ranks: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [sum(each) for each in zip(*(rank["losses"] for rank in self.ranks), strict=True)]

    def state(self, kind: str, copies: bool = False) -> dict[str, torch.Tensor]:
        """Parameters' whole states by name; `copies`: those of tied heads instead of what they are copies of."""
        parts: dict[str, dict[int, list[float]]] = {}
        for rank in self.ranks:
            for name, of, start, values in rank["pieces"]:
                if of == kind and (name in rank["copied"]) == copies:
                    parts.setdefault(name, {})[start] = values
        return {
            name: torch.tensor([value for start in sorted(some) for value in some[start]], dtype=torch.float64)
            for name, some in parts.items()
        }


def run(world: int, steps: int, spec: dict[str, Any] | None = None, **how: Any) -> Found:
    return Found(run_ranks(walk, world, timeout_s=180, steps=steps, spec=spec or {}, **how))


@cache
def alone(steps: int, spec: str = "{}", **how: Any) -> Found:
    """One process."""
    return run(1, steps, json.loads(spec), **how)


def check(found: Found, wanted: Found, near: float = 1e-8) -> None:
    for one, other in zip(found.losses, wanted.losses, strict=True):
        assert one == pytest.approx(other, rel=near)
    for rank in found.ranks:
        assert rank["norms"] == pytest.approx(wanted.ranks[0]["norms"], rel=near)
        assert rank["skipped"] == 0
        assert rank["evaluated"][:2] == pytest.approx(wanted.ranks[0]["evaluated"][:2], rel=near)
    for kind in ("param", "exp_avg"):
        mine, theirs = found.state(kind), wanted.state(kind)
        assert sorted(mine) == sorted(theirs)
        assert max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) < near


# --------------------------------------------------------------------------------------------------------- trajectories

TIED: dict[str, Any] = {"tie_embeddings": True}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # ranks, how it is run, the model
    "two stages": (2, {"pipeline": 2, "schedule": "1f1b"}, {}),
    "all forward, then all back": (2, {"pipeline": 2, "schedule": "gpipe", "zero": 2}, {}),
    "four ranks, two stages each": (4, {"pipeline": 4, "schedule": "interleaved"}, {"layers": 8}),
    "half backward passes": (2, {"pipeline": 2, "schedule": "zero_bubble"}, {}),
    "copies that shard their state": (4, {"pipeline": 2, "schedule": "1f1b", "zero": 2, "slots": 2}, {}),
    "half backward passes, copies": (4, {"pipeline": 2, "schedule": "zero_bubble", "zero": 2}, {}),
    "tied head": (4, {"pipeline": 2, "schedule": "1f1b"}, TIED),
    "tied head, four stages": (4, {"pipeline": 4, "schedule": "1f1b", "zero": 2}, TIED),
    "tied head on the rank of the embedding": (2, {"pipeline": 2, "schedule": "zero_bubble"}, TIED),
    "tied head, two stages each, documents in rows": (
        2, {"pipeline": 2, "schedule": "interleaved", "packed": True}, TIED,
    ),
    "unequal stages, activations computed again": (
        2, {"pipeline": 2, "schedule": "1f1b", "numbers": [3, 1], "recompute": True}, {},
    ),
}  # fmt: skip


# Two stages and half backward passes alone, and other tied heads: in others and below, too.
@pytest.mark.parametrize("case", some(CASES, 1, 2, 4, 5, 9, 10))
def test_walks_as_one_process_does(case: str) -> None:
    ranks, how, spec = CASES[case]
    found = run(ranks, STEPS, spec, **how)
    wanted = alone(STEPS, json.dumps(spec), packed=how.get("packed", False))
    check(found, wanted)
    for name, values in found.state("param", copies=True).items():
        assert torch.equal(values, found.state("param")[name])  # to the last bit, or they would drift apart


LEARNT: dict[str, Any] = TIED | {"architecture": "opt", "kv_heads": 4}  # positions, which the last stage has none of


@pytest.mark.parametrize(
    ("schedule", "sequence", "spec"), some([("1f1b", True, LEARNT), ("zero_bubble", False, TIED)], 0)
)
def test_stages_of_slices_walk_as_one_process_does(schedule: str, sequence: bool, spec: dict[str, Any]) -> None:
    found = run(4, 2, spec, tensor=2, pipeline=2, schedule=schedule, sequence=sequence)
    wanted = alone(2, json.dumps(spec), packed=False)
    assert [loss / 2 for loss in found.losses] == pytest.approx(wanted.losses, rel=1e-8)  # two have the last stage
    for rank in found.ranks:
        assert rank["norms"] == pytest.approx(wanted.ranks[0]["norms"], rel=1e-8)
        assert rank["evaluated"][:2] == pytest.approx(wanted.ranks[0]["evaluated"][:2], rel=1e-8)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_first_gradients_are_those_of_one_process(schedule: str) -> None:
    found = run(2, 1, TIED, pipeline=2, schedule=schedule, dtype="float32").state("exp_avg")
    wanted = alone(1, json.dumps(TIED), dtype="float32").state("exp_avg")
    norm = sum(float(each.square().sum()) for each in wanted.values()) ** 0.5
    apart = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted) ** 0.5
    assert sorted(found) == sorted(wanted)
    assert apart < 1e-6 * norm


def test_compiled_blocks_walk_alike() -> None:
    how = {"pipeline": 2, "schedule": "1f1b"}
    check(run(2, 1, {"layers": 2}, compiled=True, **how), run(2, 1, {"layers": 2}, **how))


# ---------------------------------------------------------------------------------------------------------- checkpoints


def saved(placement: Placement, folder: str, steps: int, **how: Any) -> dict[str, Any]:
    """Some steps from the newest checkpoint, or from the start, and a checkpoint of the last."""
    with join(placement, 30, axes=MeshAxes(pipeline=how.pop("pipeline", 1))) as mesh:
        walker, group = Walker(mesh, replace(SPEC, **TIED), **how), JsonGroup(mesh.checkpoint)
        known = agree_on_newest(Path(folder), mesh.rank, group, None, lambda kind, details: None)
        first = 1
        if known is not None:
            first = int(known.header["step"]) + 1
            with torch.no_grad():
                walker.engine.load(known.read_into)
            walker.engine.commit(first - 1)
            known.close()
        for number in range(first, first + steps - 1):
            walker.step(number)
        last = [walker.step(first + steps - 1)]
        leave_out = walker.saved_elsewhere()
        saver = CheckpointSaver(Path(folder), mesh.rank, group, 3, lambda kind, details: None)
        parameters = {name: (shape, "float64") for name, shape in walker.shapes.items()}
        mine = [piece for piece in walker.engine.pieces() if piece.name not in leave_out]
        saver.save({"step": first + steps - 1}, parameters, mine, 1)
        saver.wait()
        outcome = saver.outcome
        saver.close()
        walker.close()
        return {"loss": last[0][0], "norm": last[0][1], "saved": outcome is not None and outcome.saved}


def test_what_a_pipeline_saves_one_process_takes_on_and_back(tmp_path: Path) -> None:
    wanted = alone(STEPS, json.dumps(TIED), packed=False)
    folder = str(tmp_path)
    run_ranks(saved, 4, folder=folder, steps=2, pipeline=2, schedule="1f1b")
    (single,) = run_ranks(saved, 1, folder=folder, steps=1)
    assert [single["loss"], single["norm"]] == pytest.approx([wanted.losses[2], wanted.ranks[0]["norms"][2]], rel=1e-8)
    back = run_ranks(saved, 4, folder=folder, steps=1, pipeline=4, schedule="1f1b", zero=2)
    assert all(rank["saved"] for rank in (single, *back))
    assert sum(rank["loss"] for rank in back) == pytest.approx(wanted.losses[3], rel=1e-8)


# --------------------------------------------------------------------------------------------------------------- timing


def early(placement: Placement) -> list[list[str]]:
    """Which units have gone to the lane, at each backward pass of the first stage."""
    with join(placement, 30, axes=MeshAxes(pipeline=2)) as mesh:
        walker = Walker(mesh, SPEC, schedule="1f1b")
        assert isinstance(walker.engine, ShardedEngine) and walker.pipeline is not None
        engine, seen = walker.engine, []
        passed: Callable[..., Any] = walker.pipeline.messages.send

        def note(tensor: torch.Tensor, to: int) -> None:
            seen.append(
                [unit.name for unit in engine._units if all(held.gradient.submitted for held in unit.trained_buckets)]
            )
            passed(tensor, to)

        walker.pipeline.messages.send = note  # type: ignore[method-assign]
        walker.step(1)
        walker.close()
        return seen


def test_a_unit_is_sent_after_its_last_backward_pass_and_not_before() -> None:
    seen = run_ranks(early, 2)[1]  # the last stage sends a gradient after each of its backward passes
    assert seen[:-1] == [[]] * (len(seen) - 1)
    assert seen[-1] == ["layers.2", "layers.3", "head"]
