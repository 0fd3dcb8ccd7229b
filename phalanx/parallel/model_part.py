"""What a rank holds of a model that several ranks hold together: its stages of a pipeline, its slices of their layers.

Engines know parameters as they are here; a start is drawn, a folder read and a checkpoint written in coordinates of the
whole model. This is the only place that knows of both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.engine.interface import Engine, Precision
from phalanx.layout.mesh_axes import Place
from phalanx.layout.model_shape import ModelSpec
from phalanx.layout.pipeline_stages import Stages, divide, head_worth, listed
from phalanx.layout.tensor_shards import Slice, copies_of, slices
from phalanx.models.llama import TENSOR, Llama
from phalanx.models.model import Model
from phalanx.optim.state import Piece
from phalanx.parallel.materialize import Fill
from phalanx.parallel.pipeline import Pipeline
from phalanx.parallel.tensor import cut_among, part_of, split
from phalanx.parallel.tensor_state import Read, WindowRead, filled_by_rows, filled_by_runs, reading, saved

if TYPE_CHECKING:  # the loop runs where pydantic is not installed
    from phalanx.config.schema import Config

TIED = "embed.weight"  # where the head has no weight of its own, the last stage holds this one, too


@dataclass(frozen=True)
class Parted:
    """This rank's part of the model. `shapes` are those of all parameters of the whole model that are trained; `copies`
    says how many ranks of one model hold the same of a parameter."""

    shapes: Mapping[str, tuple[int, ...]]
    pipeline: Pipeline | None = None
    held: Mapping[str, Slice] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    first: bool = True  # of the ranks that hold slices of the same layers
    lent: frozenset[str] = frozenset()  # parameters that another stage saves

    @property
    def speaks(self) -> bool:
        """Whether this rank's losses are counted, of all that have the same."""
        return self.first and (self.pipeline is None or self.pipeline.has_loss)

    def filling(self, fill: Fill, drawn: bool) -> Fill:
        """A `fill` of whole parameters for this part; `drawn`: it is fast for long runs only."""
        if not self.held:
            return fill
        return filled_by_rows(fill, self.held) if drawn else filled_by_runs(fill, self.held)

    def pieces(self, engine: Engine) -> Iterator[Piece]:
        """What this rank gives to a checkpoint."""
        return self.whole(engine.pieces())

    def whole(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """An engine's pieces in coordinates of whole parameters, those that this rank gives."""
        own = (piece for piece in pieces if piece.name not in self.lent)
        return saved(own, self.held, self.first)

    def reading(self, read: WindowRead) -> Read:
        """What this rank's engine loads by."""
        return reading(read, self.held)


def part(model: Model, config: "Config", mesh: Mesh, precision: Precision) -> Parted:
    """Cut `model`, on meta, down to what this rank holds of it. Collective.

    Raises ConfigError for a model that cannot be cut.
    """
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
    if mesh.axes.model == 1:
        return Parted(shapes)
    if not isinstance(model, Llama):
        raise ConfigError(
            f"parallel.tensor and parallel.pipeline cut models of the Llama family only, not a {type(model).__name__}; "
            "remove them"
        )
    parallel = config.parallel
    pipeline = None
    # Stages first: there is no use in slices of what is let go of.
    if mesh.pipe is not None:
        numbers = None if parallel.stages == "auto" else parallel.stages
        plan = plan_of(model.spec, mesh.pipe.size, parallel.schedule, numbers)
        pipeline = make_pipeline(model, plan, parallel.schedule, mesh, precision, parallel.sequence is True)
    held: dict[str, Slice] = {}
    if mesh.tensor is not None:
        held = split(model, cut_among(mesh, model.spec.kv_heads, parallel.sequence is True))
    names = [name for name, _ in model.named_parameters()]
    size = 1 if mesh.tensor is None else mesh.tensor.size
    copies = copies_of(dict.fromkeys(names), held, size)
    lent: frozenset[str] = frozenset()
    if pipeline is not None:
        copies |= {name: count * copies[name] for name, count in copies_at_ends(model, pipeline).items()}
        lent = saved_elsewhere(model, pipeline)
    first = mesh.tensor is None or mesh.tensor.rank == 0
    return Parted(shapes, pipeline, held, {n: count for n, count in copies.items() if count > 1}, first, lent)


def cut_down(model: Model, config: "Config", place: Place) -> Stages | None:
    """Leave of `model`, on meta, what the rank at `place` holds, in the shapes that it has there: to be counted, not to
    be run. What `part` leaves, found without the other ranks; returns the stages of its pipeline."""
    plan, parallel = None, config.parallel
    if not isinstance(model, Llama):
        return plan  # which `part` refuses
    if parallel.pipeline > 1:
        numbers = None if parallel.stages == "auto" else parallel.stages
        plan = plan_of(model.spec, parallel.pipeline, parallel.schedule, numbers)
        model.keep([plan.layers[stage] for stage in plan.of(place.pipe)])
    if parallel.tensor > 1:
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        for name, mine in slices(shapes, TENSOR, model.spec.kv_heads, parallel.tensor, place.tensor).items():
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module).register_parameter(leaf, part_of(model.get_parameter(name), mine))
    return plan


def plan_of(
    spec: ModelSpec, ranks: int, schedule: str, numbers: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
) -> Stages:  # fmt: skip
    """The stages of a model: of `numbers` of layers, or as even as the head lets them be, in proportion to `speeds`."""
    if numbers is not None:
        return listed(spec.layers, ranks, schedule, numbers)
    return divide(spec.layers, ranks, schedule, speeds=speeds, head=head_worth(spec))


def make_pipeline(
    model: Llama, plan: Stages, schedule: str, mesh: Mesh, precision: Precision, sequence: bool = False
) -> Pipeline:
    """Cut `model`, on meta, down to the stages of this rank, and give what runs them; `sequence`: ranks that share its
    layers cut hidden states along the sequence."""
    assert mesh.pipe is not None, "a mesh without stages"
    model.keep([plan.layers[stage] for stage in plan.of(mesh.pipe.rank)])
    over = mesh.axes.tensor if sequence else 1
    return Pipeline(plan, schedule, mesh.pipe, mesh.device, precision, mesh.traffic, over)


def copies_at_ends(model: Llama, pipeline: Pipeline) -> dict[str, int]:
    """How many ranks of the pipeline hold a parameter alike, where more than one does: the weight of a tied head, which
    is the embedding's. All go the same way to the same bits, and are counted once in the norm."""
    return {TIED: 2} if shares_ends(model, pipeline) else {}


def saved_elsewhere(model: Llama, pipeline: Pipeline) -> frozenset[str]:
    """Names of parameters whose state another rank of the pipeline saves."""
    return frozenset({TIED} if shares_ends(model, pipeline) and 0 not in pipeline.held else ())


def shares_ends(model: Llama, pipeline: Pipeline) -> bool:
    """Whether this rank has one end of a model whose ends share a weight, and not the other."""
    ends = {pipeline.plan.owner(0), pipeline.plan.owner(pipeline.plan.last)}
    return model.spec.tie_embeddings and len(ends) > 1 and pipeline.rank in ends
