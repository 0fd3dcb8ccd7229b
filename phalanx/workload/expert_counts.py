"""How many experts each rank of an expert-parallel group holds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.layout.balance import Speed
from phalanx.layout.context_slices import split_in_proportion
from phalanx.layout.model_shape import ModelSpec

if TYPE_CHECKING:
    from phalanx.config.schema import Config


def find_expert_counts(config: "Config", spec: ModelSpec | None, speeds: Sequence[Speed] = ()) -> tuple[int, ...]:
    """The experts of each layer that each rank of a group holds, in order: as `balance.experts` says, or in proportion
    to the `speeds` of all copies of the model, of those that hold the same experts the slowest; without speeds equal
    numbers. Tensor-parallel ranks of a copy are as fast as one another. () where each rank holds all.

    Whatever takes part in the choice of an expert is balanced by training, so the work of a rank follows its number.
    """
    axes, wanted = config.parallel.axes, config.balance.experts
    size = axes.expert_ranks
    if size == 1 or spec is None or spec.moe is None:
        return ()
    shares = [1.0] * size
    if isinstance(wanted, list):
        shares = [float(each) for each in wanted]
    elif wanted == "auto" and speeds:
        copies = [max(each.sequence_s for each in speeds[place :: axes.expert]) for place in range(axes.expert)]
        shares = [1.0 / slowest for slowest in copies for _ in range(axes.tensor)]
    return tuple(split_in_proportion(spec.moe.experts, shares))
