"""A rank's part of a model under pipeline and tensor parallelism: its stages, and its slices of their layers.

Engines see this rank's parameters; initial values, Hugging Face folders and checkpoints use coordinates of the whole
model. Only this file converts between the two.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.comm.mesh import Mesh
from phalanx.comm.p2p import connect
from phalanx.core.errors import ConfigError
from phalanx.engine.interface import Engine, Precision
from phalanx.layout.mesh_axes import MeshCoordinates
from phalanx.layout.model_shape import ModelSpec
from phalanx.layout.pipeline_stages import PipelineStages, divide_layers, stages_from_counts
from phalanx.layout.tensor_shards import TensorShard, count_copies, plan_tensor_shards
from phalanx.models.families.catalog import family_of, parameter_shapes
from phalanx.models.families.family import active_shapes
from phalanx.models.model import Model, StagedArchitecture
from phalanx.optim.update import ROW_KIND, Shard, StatePiece
from phalanx.parallel.experts import ExpertParallel, apply_expert_parallel
from phalanx.parallel.init_weights import Fill
from phalanx.parallel.pipeline import Pipeline
from phalanx.parallel.tensor import apply_tensor_parallel, make_tensor_context
from phalanx.parallel.tensor_layers import copy_shard

# -------------------------------------------------------------------------------------------------------- tensor state
# Initializing, saving and loading the state of tensor-parallel ranks in coordinates of whole parameters. An engine does
# not know of slices: its shards and pieces are elements of this rank's parameters. Here they become elements of whole
# parameters, so that initial values and checkpoints are the same on any number of ranks.


Read = Callable[[str, str, int, int, Tensor], None]  # name, kind, start, stop, out
# The read function of a checkpoint: (name, kind, start, stop, out, window); [start, stop) are elements of the window of
# columns, or of the whole parameter with None.
WindowRead = Callable[[str, str, int, int, Tensor, tuple[int, int] | None], None]

_ELEMENTS = 1 << 22  # of whole rows that are filled at a time to select columns


def fill_by_runs(fill: Fill, shards: Mapping[str, TensorShard]) -> Fill:
    """Fill slices by a `fill` of whole parameters that is fast for short runs, too, as files are."""

    def fill_part(shard: Shard) -> None:
        part = shards.get(shard.name)
        if part is None:
            fill(shard)
            return
        at = 0
        for start, stop in part.runs(shard.start, shard.stop):
            fill(_of_whole(shard, part, start, stop, shard.tensor[at : at + stop - start]))
            at += stop - start

    return fill_part


def fill_by_rows(fill: Fill, shards: Mapping[str, TensorShard]) -> Fill:
    """Fill slices by a `fill` of whole parameters that is fast for long runs only, as random draws are: for columns,
    whole rows are filled a few at a time, and the other columns dropped."""

    def fill_part(shard: Shard) -> None:
        part = shards.get(shard.name)
        if part is None:
            fill(shard)
        elif part.window is None:
            start = part.offset + shard.start
            fill(_of_whole(shard, part, start, start + shard.stop - shard.start, shard.tensor))
        else:
            _fill_columns(fill, shard, part)

    return fill_part


def _fill_columns(fill: Fill, shard: Shard, part: TensorShard) -> None:
    width, columns = part.shape[-1], part.stop - part.start
    rows = max(1, _ELEMENTS // width)
    first, last = shard.start // columns, -(-shard.stop // columns)
    for row in range(first, last, rows):
        end = min(row + rows, last)
        whole = torch.empty((end - row) * width, dtype=shard.tensor.dtype, device=shard.tensor.device)
        fill(_of_whole(shard, part, row * width, end * width, whole))
        found = whole.view(-1, width)[:, part.start : part.stop].reshape(-1)
        low, high = max(shard.start, row * columns), min(shard.stop, end * columns)
        shard.tensor[low - shard.start : high - shard.start].copy_(found[low - row * columns : high - row * columns])


def _of_whole(shard: Shard, part: TensorShard, start: int, stop: int, into: Tensor) -> Shard:
    return replace(shard, start=start, stop=stop, shape=part.shape, tensor=into)


def _offset(part: TensorShard, kind: str) -> int:
    """Where a slice's state of a kind begins in that of the whole, or in its window."""
    if part.window is not None:
        return 0
    return part.offset // part.shape[-1] if kind.startswith(ROW_KIND) else part.offset


def to_whole_pieces(
    pieces: Iterable[StatePiece], shards: Mapping[str, TensorShard], first: bool
) -> Iterator[StatePiece]:
    """Convert an engine's pieces to coordinates of whole parameters, for a checkpoint; one rank yields each.

    `first`: this is the first rank of the tensor axis, which yields replicated parameters.
    """
    for piece in pieces:
        part = shards.get(piece.name)
        if part is None:
            if first:
                yield piece
        elif part.first:
            window, moved = part.window, _offset(part, piece.kind)
            yield replace(piece, start=piece.start + moved, stop=piece.stop + moved, window=window)


def make_shard_reader(read: WindowRead, shards: Mapping[str, TensorShard]) -> Read:
    """Make an engine's read function of its slices from a checkpoint's `read`."""

    def read_part(name: str, kind: str, start: int, stop: int, out: Tensor) -> None:
        part = shards.get(name)
        if part is None:
            read(name, kind, start, stop, out, None)
        else:
            moved = _offset(part, kind)
            read(name, kind, start + moved, stop + moved, out, part.window)

    return read_part


# ------------------------------------------------------------------------------------------ a rank's part of the model


if TYPE_CHECKING:  # avoids the import of pydantic
    from phalanx.config.schema import Config

TIED_WEIGHT = "embed.weight"  # with a tied head the last stage holds this one, too


@dataclass(frozen=True)
class ModelPart:
    """This rank's part of a model. `shapes`: of all trained parameters of the whole model; `copies`: the number of
    ranks that replicate a parameter within one model, by name."""

    shapes: Mapping[str, tuple[int, ...]]
    pipeline: Pipeline | None = None
    shards: Mapping[str, TensorShard] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    first: bool = True  # the first rank of the tensor axis
    tied_elsewhere: frozenset[str] = frozenset()  # tied parameters that another stage saves

    @property
    def reports_loss(self) -> bool:
        """Whether this rank reports the loss; others with the same losses do not."""
        return self.first and (self.pipeline is None or self.pipeline.has_loss)

    def make_fill(self, fill: Fill, by_rows: bool) -> Fill:
        """Make a `fill` of this part from one of whole parameters; `by_rows`: that is fast for long runs only."""
        if not self.shards:
            return fill
        return fill_by_rows(fill, self.shards) if by_rows else fill_by_runs(fill, self.shards)

    def checkpoint_pieces(self, engine: Engine) -> Iterator[StatePiece]:
        """The pieces that this rank writes to a checkpoint."""
        return self.to_whole_pieces(engine.pieces())

    def to_whole_pieces(self, pieces: Iterable[StatePiece]) -> Iterator[StatePiece]:
        """Convert an engine's pieces to coordinates of whole parameters, those that this rank yields."""
        own = (piece for piece in pieces if piece.name not in self.tied_elsewhere)
        return to_whole_pieces(own, self.shards, self.first)

    def make_reader(self, read: WindowRead) -> Read:
        """Make the read function by which this rank's engine loads."""
        return make_shard_reader(read, self.shards)


def partition_model(
    model: Model, config: "Config", mesh: Mesh, precision: Precision, expert_counts: Sequence[int] = ()
) -> ModelPart:
    """Partition `model`, on meta: keep this rank's part of it; `expert_counts`: experts of each rank that divides them
    with this one. Collective.

    Raises ConfigError for a model that cannot be cut.
    """
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
    held: dict[str, TensorShard] = {}
    if (axis := mesh.expert or mesh.tensor) is not None and expert_counts:
        connect(axis.group, mesh.device)
        held = apply_expert_parallel(model, ExpertParallel(axis, mesh.traffic, expert_counts, precision.transport))
    if mesh.axes.model_parallel_size == 1:
        return ModelPart(shapes, shards=held)
    if not isinstance(model, StagedArchitecture):
        raise ConfigError(
            f"parallel.tensor and parallel.pipeline cut models of the Llama family only, not a {type(model).__name__}; "
            "remove them"
        )
    parallel = config.parallel
    pipeline = None
    # Stages first, so that only layers which stay are sliced.
    if mesh.pipe is not None:
        numbers = None if parallel.layers_per_stage == "auto" else parallel.layers_per_stage
        plan = plan_stages(model.spec, mesh.pipe.size, parallel.schedule, numbers)
        pipeline = make_pipeline(model, plan, parallel.schedule, mesh, precision, parallel.sequence_parallel is True)
    if mesh.tensor is not None:
        cut = make_tensor_context(mesh, model.spec.kv_heads, parallel.sequence_parallel is True)
        held |= apply_tensor_parallel(model, cut)
    names = [name for name, _ in model.named_parameters()]
    size = 1 if mesh.tensor is None else mesh.tensor.size
    copies = count_copies(dict.fromkeys(names), held, size)
    lent: frozenset[str] = frozenset()
    if pipeline is not None:
        copies |= {name: count * copies[name] for name, count in count_tied_copies(model, pipeline).items()}
        lent = find_tied_elsewhere(model, pipeline)
    first = mesh.tensor is None or mesh.tensor.rank == 0
    return ModelPart(shapes, pipeline, held, {n: count for n, count in copies.items() if count > 1}, first, lent)


def partition_model_at(model: Model, config: "Config", place: MeshCoordinates) -> PipelineStages | None:
    """Partition `model`, on meta, as `partition_model` does for the rank at `place`, without the other ranks: for
    counting bytes, not for running. Returns the stages of its pipeline."""
    plan, parallel = None, config.parallel
    if not isinstance(model, StagedArchitecture):
        return plan  # `partition_model` refuses it
    if parallel.pipeline > 1:
        numbers = None if parallel.layers_per_stage == "auto" else parallel.layers_per_stage
        plan = plan_stages(model.spec, parallel.pipeline, parallel.schedule, numbers)
        model.keep_stages([plan.layers[stage] for stage in plan.stages_of(place.pipe)])
    if parallel.tensor > 1:
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        for name, mine in plan_tensor_shards(
            shapes, family_of(model.spec).tensor_plan, model.spec.kv_heads, parallel.tensor, place.tensor
        ).items():
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module).register_parameter(leaf, copy_shard(model.get_parameter(name), mine))
    return plan


def plan_stages(
    spec: ModelSpec, ranks: int, schedule: str, numbers: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
) -> PipelineStages:  # fmt: skip
    """The pipeline stages of a model: with these `numbers` of layers, or balanced in proportion to `speeds`, with the
    head's cost counted."""
    if numbers is not None:
        return stages_from_counts(spec.layers, ranks, schedule, numbers)
    return divide_layers(spec.layers, ranks, schedule, speeds=speeds, head=head_worth(spec))


def head_worth(spec: ModelSpec) -> float:
    """The cost of the head in layers, by matrix products. An embedding is a lookup and costs nothing."""
    shapes, last = active_shapes(spec, parameter_shapes(spec)), f"layers.{spec.layers - 1}."
    block = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(last) and len(shape) > 1)
    return spec.vocab_size * spec.embedding_width / block


def make_pipeline(
    model: StagedArchitecture,
    plan: PipelineStages,
    schedule: str,
    mesh: Mesh,
    precision: Precision,
    sequence: bool = False,
) -> Pipeline:
    """Partition `model`, on meta, into this rank's pipeline stages, and return the pipeline; `sequence`: the number of
    ranks that hidden states are cut over along the sequence."""
    assert mesh.pipe is not None, "a mesh without stages"
    model.keep_stages([plan.layers[stage] for stage in plan.stages_of(mesh.pipe.rank)])
    over = mesh.axes.tensor if sequence else 1
    return Pipeline(plan, schedule, mesh.pipe, mesh.device, precision, mesh.traffic, over)


def count_tied_copies(model: StagedArchitecture, pipeline: Pipeline) -> dict[str, int]:
    """The number of pipeline ranks that replicate a parameter: the embedding's weight with a tied head. All copies are
    bitwise equal, and count once in the norm."""
    return {TIED_WEIGHT: 2} if holds_one_tied_end(model, pipeline) else {}


def find_tied_elsewhere(model: StagedArchitecture, pipeline: Pipeline) -> frozenset[str]:
    """Names of tied parameters whose state another rank of the pipeline saves."""
    return frozenset({TIED_WEIGHT} if holds_one_tied_end(model, pipeline) and 0 not in pipeline.stages else ())


def holds_one_tied_end(model: StagedArchitecture, pipeline: Pipeline) -> bool:
    """Whether this rank has the embedding or the head of a model that ties them, but not both."""
    ends = {pipeline.plan.owner(0), pipeline.plan.owner(pipeline.plan.last)}
    return model.spec.tie_embeddings and len(ends) > 1 and pipeline.rank in ends
