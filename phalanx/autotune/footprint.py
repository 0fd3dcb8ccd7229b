"""What the ranks of a layout hold, each its stages and slices: counted on meta, without ranks and without memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.config.schema import Config
from phalanx.layout.mesh_axes import Place
from phalanx.layout.pipeline_stages import Action, Stages
from phalanx.models.model import Model
from phalanx.parallel.model_part import cut_down
from phalanx.parallel.pipeline_schedules import orders
from phalanx.workload.workload import Subject


@dataclass(frozen=True)
class Held:
    """What one rank of a pipeline holds of the model, in the largest of the slices into which tensor ranks cut it."""

    model: Model
    pipe: int
    plan: Stages | None = None  # None: there is no pipeline

    @property
    def layers(self) -> dict[int, range]:
        """The layers of its stages, by stage; {} without a pipeline."""
        return {} if self.plan is None else {stage: self.plan.layers[stage] for stage in self.plan.of(self.pipe)}

    @property
    def parameters(self) -> int:
        """Elements of all that it holds."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def held_by(subject: Subject, config: Config, pipe: int) -> Held:
    """What the rank number `pipe` of a pipeline holds."""
    model = subject.model()
    if config.parallel.axes.model == 1:
        return Held(model, pipe)
    # Where the vocabulary does not divide, the last slice of it is one of the longest.
    return Held(model, pipe, cut_down(model, config, Place(pipe, 0, config.parallel.tensor - 1)))


def all_held(subject: Subject, config: Config) -> list[Held]:
    """What each rank of a pipeline holds, in order; one of them without."""
    return [held_by(subject, config, pipe) for pipe in range(config.parallel.pipeline)]


def at_height(order: Sequence[Action], sizes: Mapping[int, int]) -> int:
    """The most that a rank's passes keep at a time, where a pass through a stage keeps `sizes` of it until its
    gradients are made."""
    now = most = 0
    for action in order:
        if action.kind == "F":
            now += sizes[action.stage]
        elif action.kind in ("B", "W"):
            now -= sizes[action.stage]
        most = max(most, now)
    return most


def activations(config: Config, held: Held, micro_batches: int, layers: int, ends: int, block: int) -> tuple[int, int]:
    """Bytes of activations that a rank keeps: of one micro-batch, and of all that are under way at a time.

    A micro-batch keeps `block` bytes of each of the model's `layers`, and `ends` of what lies behind them.
    """
    if held.plan is None:
        return (ends + layers * block,) * 2
    sizes = {
        stage: len(layers_of) * block + ends * (stage == held.plan.last) for stage, layers_of in held.layers.items()
    }
    order = orders(config.parallel.schedule, held.plan, micro_batches)[held.pipe]
    return sum(sizes.values()), at_height(order, sizes)


def of_slice(config: Config, block: int, stream: int, mode: str) -> int:
    """What a tensor-parallel rank keeps of the `block` bytes of a layer, of whose residual stream are `stream`.

    With parallel.sequence an N-th, and of what is gathered before either pair of matrices all where it is not computed
    again. Without, norms and residuals are whole, and so this is too much.
    """
    parts = config.parallel.tensor
    if parts == 1 or config.parallel.sequence is not True:
        return block
    gathered = 2 * stream if mode == "none" else 0
    return min(block, block // parts + gathered * (parts - 1) // parts)
