"""Small models cut over ranks, with an engine and without, beside the same model whole in the same process."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.disk.load import Checkpoint, Parameters, step_folder
from phalanx.checkpoint.disk.save import CheckpointSaver
from phalanx.comm.mesh import Mesh, join, single_rank_mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.placement import Placement
from phalanx.engine.interface import Engine
from phalanx.engine.sharded import ShardedEngine
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.engine.single import SingleEngine
from phalanx.layout.balance import split_evenly
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.layout.model_shape import ModelSpec
from phalanx.layout.tensor_shards import TensorShard, count_copies, whole_shapes
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.layers import IGNORE_INDEX
from phalanx.models.llama import Llama
from phalanx.models.user_model import load_family_class
from phalanx.optim import gradients
from phalanx.optim.update import Shard
from phalanx.parallel import activations
from phalanx.parallel.experts import ExpertParallel, apply_expert_parallel
from phalanx.parallel.init_weights import make_random_fill, materialize
from phalanx.parallel.model_part import fill_by_rows, make_shard_reader, to_whole_pieces
from phalanx.parallel.offload import offload
from phalanx.parallel.parallelize import sharding_units
from phalanx.parallel.tensor import apply_tensor_parallel, make_tensor_context
from tests.dist.engine_cases import ADAMW, FLOAT64

SPEC = ModelSpec(
    vocab_size=61, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=44, max_seq_len=64, dropout=0.1,
)  # fmt: skip
SEQ_LEN, GLOBAL_BATCH, NOMINAL, SEED, CLIP = 16, 4, 40, 3, 0.5


@contextmanager
def among(placement: Placement, tensor: int) -> Iterator[Mesh]:
    with join(placement, 60, axes=MeshAxes(tensor=tensor)) as mesh:
        yield mesh


def spec_of(changes: dict[str, Any]) -> ModelSpec:
    """SPEC with some numbers changed, as they travel in JSON."""
    return replace(SPEC, **{key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()})


def data(step: int, spec: ModelSpec, packed: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """The global batch of a step, of which many labels are ignored: inputs, and which sample each row is."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, spec.vocab_size, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(GLOBAL_BATCH):
        labels[row, : (step + 5 * row) % SEQ_LEN] = IGNORE_INDEX
    inputs = {"tokens": tokens[:, :-1].contiguous(), "labels": labels}
    if packed:
        cuts = [0, 5, SEQ_LEN - 1, SEQ_LEN]
        inputs["positions"] = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cuts)]).repeat(
            GLOBAL_BATCH, 1
        )
    return inputs, torch.arange(GLOBAL_BATCH) + step * GLOBAL_BATCH


def loss_of(model: Llama, step: int, rows: slice, packed: bool = False) -> Tensor:
    """The sum of losses of some rows of a step's batch, with dropout."""
    found, samples = data(step, model.spec, packed)
    mine = {name: tensor[rows] for name, tensor in found.items()}
    if packed:
        count = len(mine["tokens"])
        ends = torch.tensor([5, SEQ_LEN - 1, SEQ_LEN])
        offsets = (torch.arange(count)[:, None] * SEQ_LEN + ends).flatten()
        mine["segments"] = torch.cat([torch.zeros(1, dtype=torch.int64), offsets]).int()
    loss: Tensor = model(draws=CounterRNG(SEED, step, samples[rows]), **mine)
    return loss


@dataclass
class Driven:
    """A model under an engine: one of several ranks, or alone."""

    mesh: Mesh
    model: Llama
    engine: Engine
    held: dict[str, TensorShard]
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def walk(self, steps: int) -> None:
        """Some steps with two micro-batches, or one where a rank has one row; three ranks have unlike shares."""
        ranks = self.mesh.data
        first, end = (GLOBAL_BATCH * rank // ranks.world for rank in (ranks.rank, ranks.rank + 1))
        rows = [slice(first, (first + end) // 2), slice((first + end) // 2, end)]
        rows = [part for part in rows if part.start < part.stop]
        for step in range(self.engine.step + 1, self.engine.step + 1 + steps):
            labels = data(step, self.model.spec)[0]["labels"]
            weight = sum(int((labels[part] != IGNORE_INDEX).sum()) for part in rows)
            self.engine.begin_step(step, weight, 1e-2 / (1 + step % 4), CLIP)
            total = 0.0
            for part in rows:
                with self.engine.micro_batch(last=part is rows[-1]):
                    loss = loss_of(self.model, step, part)
                    gradients.backward(loss, NOMINAL)
                total += loss.item()
            self.norms.append(self.engine.finish_step().get()[0])
            self.engine.commit(step)
            (everyone,) = ranks.sum([total])
            self.losses.append(everyone)

    def apart(self, other: "Driven") -> float:
        """The greatest difference from the whole model: of norms, losses, parameters, and this rank's state."""
        found = [abs(a - b) for a, b in zip(self.norms, other.norms, strict=True)]
        found += [abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True)]
        with self.engine.full_parameters() as mine, other.engine.full_parameters() as whole:
            assert mine.keys() == whole.keys()
            found += [greatest(mine[name] - taken(whole[name], self.held.get(name))) for name in mine]
        state = {(piece.kind, piece.name): piece.tensor for piece in other.engine.pieces()}
        for piece in self.engine.pieces():
            part, shape = self.held.get(piece.name), other.engine.trainable[piece.name]
            flat = taken(state[piece.kind, piece.name].view(shape), part).flatten()
            found.append(greatest(piece.tensor - flat[piece.start : piece.stop]))
        return max(found)

    def save(self, folder: Path, step: int = 1) -> None:
        """A checkpoint by all ranks."""
        saver = CheckpointSaver(folder, self.mesh.rank, JsonGroup(self.mesh.checkpoint), 3, lambda kind, details: None)
        axis = self.mesh.tensor
        pieces = to_whole_pieces(self.engine.pieces(), self.held, first=axis is None or axis.rank == 0)
        shapes = whole_shapes(self.engine.trainable, self.held)
        parameters: Parameters = {name: (shape, "float64") for name, shape in shapes.items()}
        saver.save({"step": step}, parameters, pieces, 1)
        saver.wait()
        assert saver.outcome is not None
        assert saver.outcome.saved, saver.outcome

    def load(self, folder: Path, step: int = 1) -> None:
        checkpoint = Checkpoint(step_folder(folder, step))
        checkpoint.verify()
        self.engine.load(make_shard_reader(checkpoint.read_into, self.held))


def taken(whole: Tensor, part: TensorShard | None) -> Tensor:
    if part is None:
        return whole
    return torch.cat([whole.narrow(part.dim, start, stop - start) for start, stop in part.ranges], part.dim)


def greatest(difference: Tensor) -> float:
    return float(difference.detach().abs().max()) if difference.numel() else 0.0


def driven(
    mesh: Mesh, spec: ModelSpec, zero: int, sequence: bool, memory: str = "none", seed: int = SEED, slots: int = 1
) -> Driven:
    """A drawn model under the sharded engine, or that of one rank where `zero` is 0."""
    with torch.device("meta"):
        model = load_family_class(spec.architecture)(spec)
    assert isinstance(model, Llama)
    held: dict[str, TensorShard] = {}
    if mesh.tensor is not None and spec.moe is not None:
        counts = split_evenly(spec.moe.experts, mesh.tensor.size)
        held = apply_expert_parallel(model, ExpertParallel(mesh.tensor, mesh.traffic, counts))
    if mesh.tensor is not None:
        held |= apply_tensor_parallel(model, make_tensor_context(mesh, spec.kv_heads, sequence))
    if memory != "none":
        activations.recompute(model.blocks(), selective=memory == "selective")
    if memory == "offload":
        offload(model.blocks(), 1)
    size = 1 if mesh.tensor is None else mesh.tensor.size
    names = dict(model.named_parameters())
    copies = count_copies(names, held, size) if size > 1 else {}
    common: dict[str, Any] = {
        "mesh": mesh.data, "rule": ADAMW, "nominal_weight": NOMINAL, "precision": FLOAT64, "copies": copies,
    }  # fmt: skip
    engine: Engine
    if zero == 0:
        engine = SingleEngine(model, sharding_units(model), **common)
    else:
        reduce = "per_step" if zero == 1 else "per_micro_batch"
        engine = ShardedEngine(model, sharding_units(model), **common, sharding=ShardingSpec(zero, reduce, slots=slots))
    materialize(model, engine, fill_by_rows(make_random_fill(model, seed), held))
    return Driven(mesh, model, engine, held)


@contextmanager
def whole(mesh: Mesh, spec: ModelSpec) -> Iterator[Driven]:
    """The same on one rank."""
    with single_rank_mesh(mesh) as single:
        yield driven(single, spec, zero=0, sequence=False)


def values(spec: ModelSpec, dtype: torch.dtype) -> Llama:
    """A whole model with drawn values, without an engine."""
    with torch.device("meta"):
        model = Llama(spec)
    model.to(dtype).to_empty(device="cpu")
    draw = make_random_fill(model, SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            draw(Shard(name, 0, math.prod(shape), shape, parameter.data.view(-1)))
            if parameter.dim() == 1:  # nothing is told of a norm's gradient by ones, nor of a bias's by zeros
                parameter += torch.linspace(-0.3, 0.4, parameter.numel(), dtype=dtype)
    return model


def gradients_apart(mine: Llama, other: Llama, held: dict[str, TensorShard]) -> float:
    """The norm of the difference of two models' gradients, relative to the norm of all; of unlike local shares the
    greatest of any rank."""
    theirs = dict(other.named_parameters())
    total = math.sqrt(sum(float(p.grad.double().square().sum()) for p in theirs.values() if p.grad is not None))
    apart = 0.0
    for name, parameter in mine.named_parameters():
        assert parameter.grad is not None, name
        whole_grad = theirs[name].grad
        assert whole_grad is not None, name
        apart += float((parameter.grad.double() - taken(whole_grad.double(), held.get(name))).square().sum())
    return math.sqrt(apart) / total
