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
    to the `speeds` of all ranks, of those that hold the same experts the slowest; without speeds equal numbers. () with
    parallel.expert 1.

    Whatever takes part in the choice of an expert is balanced by training, so the work of a rank follows its number.
    """
    size, wanted = config.parallel.expert, config.balance.experts
    if size == 1:
        return ()
    assert spec is not None and spec.moe is not None, "as the configuration sees to"
    shares = [1.0] * size
    if isinstance(wanted, list):
        shares = [float(each) for each in wanted]
    elif wanted == "auto" and speeds:
        shares = [1.0 / max(each.sequence_s for each in speeds[place::size]) for place in range(size)]
    return tuple(split_in_proportion(spec.moe.experts, shares))
