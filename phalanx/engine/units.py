"""A model's units as an engine sees them: which parameters each uses, and the buckets that it has on this rank."""

from collections.abc import Sequence

from torch import nn

from phalanx.engine.bucket import RankBucket
from phalanx.layout.buckets import ParameterSpec
from phalanx.optim.update import UpdateRule


class Unit:
    """A unit with its buckets on this rank."""

    def __init__(self, number: int, name: str, module: nn.Module, buckets: Sequence[RankBucket]) -> None:
        """`name` is "" for the model itself, which holds what no unit has for itself."""
        self.number, self.name, self.module, self.buckets = number, name, module, list(buckets)
        self.trained_buckets = [held for held in self.buckets if held.bucket.trained]
        self.parts = len(self.buckets[0].bucket.parts) if self.buckets else 1
        self.elements = sum(held.bucket.elements for held in self.buckets)
        self.bytes = sum(held.values.untyped_storage().nbytes() for held in self.buckets)


def describe_parameters(
    model: nn.Module, units: Sequence[tuple[str, nn.Module]], rule: UpdateRule
) -> list[ParameterSpec]:
    """The parameters of a model in order of use, each with the unit that uses it; what several units use, or none, is
    the model's own, and comes first."""
    users: dict[int, set[str]] = {}
    for unit, module in units:
        for parameter in module.parameters():
            users.setdefault(id(parameter), set()).add(unit)
    order = {unit: number for number, (unit, _) in enumerate(units, 1)}
    found = []
    for name, parameter in model.named_parameters():
        used_by = users.get(id(parameter), set())
        shape, trained = tuple(parameter.shape), parameter.requires_grad
        unit = next(iter(used_by)) if len(used_by) == 1 else ""
        rows = trained and rule.needs_whole_rows(shape)
        found.append(ParameterSpec(name, shape, unit, str(parameter.dtype), trained, rows))
    return sorted(found, key=lambda parameter: order.get(parameter.unit, 0))
