"""Plans: the layouts that fit with their costs, the best of each family, and how far others are from fitting."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.cost import StepEstimate
from phalanx.planner.device_catalog import DeviceKind
from phalanx.planner.failures import FailureModel
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.memory import DeviceMemory

MOST_HOPES = 32  # layouts of a family that are tried with other degrees
BETTER = 1 - 1e-9
WORTH = 1.25  # slower layouts, relative to the best, are not shown


@dataclass(frozen=True)
class Plan:
    """A parallel layout that fits, with its predicted speed and the part of the cluster that it uses, by rank."""

    choice: LayoutChoice
    estimate: StepEstimate
    cluster: ClusterSpec
    goodput: float = 1.0  # share of the time that goes into steps that last; 1 without a failure model

    @property
    def effective_step_s(self) -> float:
        """Seconds for each step that lasts: what failures take is paid by the others."""
        return self.estimate.step_s / self.goodput

    @property
    def effective_tokens_per_s(self) -> float:
        """Tokens of lasting steps a second."""
        return self.estimate.tokens_per_s * self.goodput

    @property
    def devices(self) -> int:
        """How many devices it uses."""
        return self.choice.devices or self.cluster.devices

    @property
    def copies(self) -> int:
        """Of the whole model."""
        return self.devices // (self.choice.tensor * self.choice.pipeline)


def layout_family(choice: LayoutChoice, zero: int, cluster: ClusterSpec) -> tuple[object, ...]:
    """What tells layouts apart for a reader: of each family only the best is shown."""
    return (choice.tensor, choice.pipeline, choice.context, choice.expert, zero, cluster.names)


@dataclass(frozen=True)
class Shortfall:
    """How far a model is from fitting, in the layout that needs the least: bytes missing on the fullest device."""

    choice: LayoutChoice
    cluster: ClusterSpec
    kind: DeviceKind
    stage: int
    needed_bytes: float
    missing_bytes: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class SearchResult:
    """`plans`: the best of each family, fastest first; empty where nothing fits, which `shortfall` then explains."""

    plans: tuple[Plan, ...]
    shortfall: Shortfall | None
    tried: int

    @property
    def best(self) -> Plan:
        return self.plans[0]


class BestPlans:
    """The best plan of each family so far, and the nearest miss."""

    def __init__(self, failures: FailureModel | None) -> None:
        self.failures = failures
        self.plans: dict[tuple[object, ...], Plan] = {}
        self.hopes: dict[tuple[object, ...], list[tuple[float, LayoutChoice]]] = {}
        self.best_s = math.inf
        self.shortfall: Shortfall | None = None
        self.tried = self.missed = 0

    def ranking(self) -> list[Plan]:
        return sorted(self.plans.values(), key=lambda plan: plan.effective_step_s)

    def is_hopeless(self, key: tuple[object, ...], bound_s: float) -> bool:
        """Whether a layout of this family with this lower bound on its time can be skipped."""
        if bound_s > WORTH * self.best_s:
            return True
        before = self.plans.get(key)
        return before is not None and bound_s > before.effective_step_s

    def promising_choices(self, plan: Plan) -> Iterator[LayoutChoice]:
        """Layouts of a plan's family that would beat it if they exchanged nothing, as another degree may have it: of
        those with fewer devices or other micro-batches one that waits longer now may be the faster one then."""
        key = layout_family(plan.choice, plan.choice.zero, plan.cluster)
        yield plan.choice
        for hope_s, choice in sorted(self.hopes[key], key=lambda hope: hope[0])[:MOST_HOPES]:
            if hope_s >= self.plans[key].effective_step_s:
                return
            yield choice

    def note_misfit(self, choice: LayoutChoice, cluster: ClusterSpec, held: DeviceMemory) -> None:
        """Note a layout that does not fit, if it is nearer to it than all others."""
        self.tried += 1
        self.missed += 1
        if self.shortfall is None or -held.free_bytes < self.shortfall.missing_bytes:
            self.shortfall = Shortfall(
                choice, cluster, held.kind, held.stage, held.total_bytes, -held.free_bytes, held.parts
            )

    def see(self, choice: LayoutChoice, estimate: StepEstimate, cluster: ClusterSpec) -> bool:
        """Whether it fits; the best of its family is kept."""
        worst = estimate.memory[0]
        if worst.free_bytes < 0:
            self.note_misfit(choice, cluster, worst)
            return False
        self.tried += 1
        key = layout_family(choice, choice.zero, cluster)
        before = self.plans.get(key)
        self.hopes.setdefault(key, []).append((estimate.step_s - estimate.terms["communication"], choice))
        if before is not None and estimate.step_s >= before.effective_step_s:
            return True  # and no failure would make it faster
        plan = Plan(choice, estimate, cluster)
        if self.failures is not None:
            plan = replace(plan, goodput=self.failures.goodput(estimate, plan.devices))
        if before is None or plan.effective_step_s < before.effective_step_s * BETTER:
            self.plans[key] = plan
            self.best_s = min(self.best_s, plan.effective_step_s)
        return True
