"""The footprint of each rank of a layout, its stages and slices, counted on meta."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.config.schema import Config
from phalanx.layout.mesh_axes import MeshCoordinates
from phalanx.layout.pipeline_stages import Action, PipelineStages
from phalanx.layout.tensor_shards import plan_expert_shards
from phalanx.models.model import Model
from phalanx.parallel.experts import keep_experts
from phalanx.parallel.model_part import partition_model_at
from phalanx.parallel.pipeline import build_actions
from phalanx.workload.expert_counts import find_expert_counts
from phalanx.workload.workload import Workload


@dataclass(frozen=True)
class RankFootprint:
    """What one rank of a pipeline holds of the model, in the largest of the slices into which tensor ranks cut it, or
    with the experts of one of the ranks that divide them."""

    model: Model
    pipe: int
    stages: PipelineStages | None = None  # None: there is no pipeline

    @property
    def layers(self) -> dict[int, range]:
        """The layers of its stages, by stage; {} without a pipeline."""
        return (
            {}
            if self.stages is None
            else {stage: self.stages.layers[stage] for stage in self.stages.stages_of(self.pipe)}
        )

    @property
    def parameters(self) -> int:
        """Elements of all that it holds."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def make_rank_footprint(
    workload: Workload, config: Config, pipe: int, expert: int | None = None, counts: Sequence[int] = ()
) -> RankFootprint:
    """What the rank number `pipe` of a pipeline holds; of those that divide experts number `expert`
    (`MeshAxes.expert_place`), or the one that has most. `counts`: how many each of these has, where their speeds say
    so."""
    model = workload.model()
    if counts := counts or find_expert_counts(config, workload.spec):
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        place = counts.index(max(counts)) if expert is None else expert
        keep_experts(model, plan_expert_shards(shapes, counts, place))
    if config.parallel.axes.model_parallel_size == 1:
        return RankFootprint(model, pipe)
    # Where the vocabulary does not divide, the last slice of it is one of the longest.
    tensor = config.parallel.tensor
    at = MeshCoordinates(pipe, 0, tensor - 1 if expert is None else expert % tensor)
    return RankFootprint(model, pipe, partition_model_at(model, config, at))


def make_all_footprints(workload: Workload, config: Config) -> list[RankFootprint]:
    """What each rank of a pipeline holds, in order; one of them without."""
    return [make_rank_footprint(workload, config, pipe) for pipe in range(config.parallel.pipeline)]


def find_peak_bytes(order: Sequence[Action], sizes: Mapping[int, int]) -> int:
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


def compute_kept_activations(
    config: Config, footprint: RankFootprint, micro_batches: int, layers: int, ends: int, block: int
) -> tuple[int, int]:
    """Bytes of activations that a rank keeps: of one micro-batch, and of all that are under way at a time.

    A micro-batch keeps `block` bytes of each of the model's `layers`, and `ends` of what lies behind them.
    """
    if footprint.stages is None:
        return (ends + layers * block,) * 2
    sizes = {
        stage: len(layers_of) * block + ends * (stage == footprint.stages.last)
        for stage, layers_of in footprint.layers.items()
    }
    order = build_actions(config.parallel.schedule, footprint.stages, micro_batches)[footprint.pipe]
    return sum(sizes.values()), find_peak_bytes(order, sizes)


def compute_slice_bytes(config: Config, block: int, stream: int, mode: str) -> int:
    """What a tensor-parallel rank keeps of the `block` bytes of a layer, of whose residual stream are `stream`.

    With parallel.sequence_parallel an N-th, and of what is gathered before either pair of matrices all where it is not
    computed again. Without, norms and residuals are whole, and so this is too much.
    """
    parts = config.parallel.tensor
    if parts == 1 or config.parallel.sequence_parallel is not True:
        return block
    gathered = 2 * stream if mode == "none" else 0
    return min(block, block // parts + gathered * (parts - 1) // parts)
