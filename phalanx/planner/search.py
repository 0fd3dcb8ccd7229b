"""Search for the fastest parallel layout on a cluster: enumerate, skip what cannot fit, rank by seconds per step.

Every layout that is returned fits, by `memory`. Devices are taken in the cluster's order, from the first on; where some
are better left idle, a smaller cluster or `LayoutChoice.devices` says so, with the reason. Heterogeneous devices get
shares by their speed (balance.py), stages of a pipeline layers by theirs (layout/pipeline_stages.py).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from phalanx.layout import balance
from phalanx.planner import compute_cost, memory
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.cost import CostModel
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS, CostConstants, DeviceKind
from phalanx.planner.failures import FailureModel
from phalanx.planner.heterogeneous import HeterogeneousDevices
from phalanx.planner.layout_choice import LayoutChoice, Recompute
from phalanx.planner.memory import DeviceMemory
from phalanx.planner.plan import WORTH, BestPlans, Plan, SearchResult, layout_family
from phalanx.planner.search_space import SearchSpace, only_degrees
from phalanx.planner.work import StepWork

RECOMPUTE: tuple[tuple[Recompute, bool], ...] = (("none", False), ("selective", False), ("full", False), ("full", True))
MOST_GROUPS = 4  # groups of which all subsets are tried; of more, those of the fastest kinds
FEW = 16  # copies of the model up to which every number is tried; sequences of one, too
MOST_SHARES = 4  # even shares that a copy on faster devices may have
NEARLY = 0.9  # slices of a block may take less than their part of it
PACE_IS_NEAR = 0.8  # what large micro-batches may be faster by than a line through small ones
Reduce = Literal["per_step", "per_micro_batch"]


def search_layouts(
    work: StepWork, cluster: ClusterSpec, space: SearchSpace, constants: CostConstants = DEFAULT_CONSTANTS,
    keep: int = 6, failures: FailureModel | None = None,
) -> SearchResult:  # fmt: skip
    """The best layouts, `keep` families of them at most; `failures` None: as if nothing ever failed. Deterministic; of
    equals the first of the enumeration wins."""
    found = BestPlans(failures)
    for part, turned in [(cluster, False)] if space.use_all_devices else _parts(cluster):
        _Search(work, part, space, constants, found, turned).search_cluster()
    if not space.use_all_devices:
        _with_fewer(work, space, constants, found, found.ranking()[: 2 * keep])
    for plan in found.ranking()[: 2 * keep]:
        refining = _Search(work, plan.cluster, space, constants, found, False)
        for choice in found.promising_choices(plan):
            refining.refine(choice)
    plans = found.ranking()[:keep]
    return SearchResult(tuple(plans), None if plans else found.shortfall, found.tried)


def _parts(cluster: ClusterSpec) -> Iterator[tuple[ClusterSpec, bool]]:
    """The cluster, and its subsets without some groups, since a slow group may cost more than it adds; each also
    in reverse order."""
    groups, numbers = cluster.groups, range(len(cluster.groups))
    if len(groups) <= MOST_GROUPS:
        subsets: list[tuple[int, ...]] = [
            subset for size in range(len(groups), 0, -1) for subset in itertools.combinations(numbers, size)
        ]
    else:
        by_speed = sorted(numbers, key=lambda number: -max(groups[number].kind.flop_per_s.values()))
        subsets = [tuple(by_speed[:size]) for size in range(len(groups), 0, -1)]
    seen = set()
    for subset in subsets:
        # The order of stages matters: the kind with the head, or with the most micro-batches in flight, may be first or
        # last.
        for turned in (False, True):
            part = cluster.select_groups(subset[::-1] if turned else subset)
            if part.names not in seen:
                seen.add(part.names)
                yield part, turned


def _with_fewer(
    work: StepWork, space: SearchSpace, constants: CostConstants, found: BestPlans, plans: list[Plan]
) -> None:
    """Plans for some nodes of a small heterogeneous cluster, in the degrees of those for all: without its slow nodes a
    cluster may be faster. Removes one more as long as that helps."""
    seen = set()
    for plan in plans:  # which grows
        groups, choice = plan.cluster.groups, plan.choice
        degrees = (choice.tensor, choice.pipeline)
        if len(groups) == 1 or plan.cluster.nodes > FEW:
            continue
        for number, group in enumerate(groups):
            part = plan.cluster.resize_groups([each.nodes - (place == number) for place, each in enumerate(groups)])
            key = part.names, degrees, choice.context, choice.expert
            if group.nodes > 1 and key not in seen:
                seen.add(key)
                _Search(work, part, only_degrees(space, choice), constants, found, False).search_cluster()
                made = [other for other in found.ranking() if other.cluster.names == part.names]
                plans += [other for other in made[:1] if other.effective_step_s < plan.effective_step_s]


class _Search:
    """One cluster, all of whose groups are used."""

    def __init__(
        self,
        work: StepWork,
        cluster: ClusterSpec,
        space: SearchSpace,
        constants: CostConstants,
        found: BestPlans,
        turned: bool,
    ) -> None:
        self.turned = turned
        self.work, self.cluster, self.space, self.constants, self.found = work, cluster, space, constants, found
        self.model = CostModel(work, cluster, constants)
        self.unlike = HeterogeneousDevices(work, cluster, constants)
        self.rows_fit = True  # of the degrees that are tried, whether one row at a time always fits
        self._blocks: dict[tuple[object, ...], float] = {}

    def search_cluster(self) -> None:
        pins = self.space.pins
        for tensor, pipeline in self.space.degrees:
            if (pins.get("tensor", tensor), pins.get("pipeline", pipeline)) != (tensor, pipeline):
                continue
            if not any(group.per_node % tensor for group in self.cluster.groups):
                if pipeline == 1 and self.turned:
                    continue  # the same in another order
                engine = pins.get("engine", "sharded")
                self.search_degrees(LayoutChoice(tensor=tensor, pipeline=pipeline, engine=engine))

    def search_degrees(self, degrees: LayoutChoice) -> None:
        """Try all degrees of context and expert parallelism beside those of a layout. Rows are shared where one is too
        much for a copy of the model, or where there are more devices than rows: else two ranks with two rows each do
        as much without an exchange."""
        for context in self.space.contexts:
            self.rows_fit = True
            for expert in self.space.experts:
                tried = replace(degrees, context=context, expert=expert)
                cuts = any(group.nodes * group.per_node % tried.row_devices for group in self.cluster.groups)
                if (context > 1 and cuts and not self.unlike.uniform) or tried.expert_ranks > self.work.experts > 0:
                    continue  # heterogeneous devices would take rows together, or some have no expert
                for devices in self.device_counts(tried):
                    self.layouts(tried, devices)
            more_rows = self.work.global_batch * degrees.tensor * degrees.pipeline * context
            if self.rows_fit and more_rows >= self.cluster.devices:
                return

    def candidate_values(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        return (self.space.pins[name],) if name in self.space.pins else values

    def device_counts(self, degrees: LayoutChoice) -> Iterator[int]:
        """Numbers of devices to try: all that make whole copies; fewer if the largest share of a step stays the
        same, since sequences are whole; and few, if communication takes longer than computing."""
        batch, wanted, shares = self.work.global_batch, self.space.pins.get("devices"), self.space.pins.get("shares")
        together, step = degrees.group_devices, degrees.expert  # row groups come in so many (layout/mesh_axes.py)
        if isinstance(shares, tuple):
            wanted = len(shares) * together
        if wanted is not None:
            if wanted % (together * step) == 0 and self.cluster.spans[-1][0] < wanted <= self.cluster.devices:
                yield wanted
            return
        most = min(self.cluster.devices // together, batch) // step * step
        if most < 1:
            return
        if self.space.use_all_devices:
            if most * together == self.cluster.devices:
                yield self.cluster.devices
            return
        counts = {most}
        if self.unlike.uniform:
            counts |= {*range(1, min(most, FEW) + 1), *(1 << power for power in range(most.bit_length()))}
        counts |= {fewer for share in range(-(-batch // most), FEW + 1) if (fewer := -(-batch // share)) <= most}
        for copies in sorted(counts, reverse=True):
            # What uses nothing of the last group is another part's to try.
            if (
                copies % step == 0
                and copies * together > self.cluster.spans[-1][0]
                and (copies == most or self.may_win(copies, together))
            ):
                yield copies * together

    def may_win(self, copies: int, together: int) -> bool:
        """Whether so few devices could be the best, if nothing but blocks took any time."""
        share = -(-self.work.global_batch // copies)
        whole = LayoutChoice()
        block_s = min(self.block_s(kind, whole, share) for kind in self.cluster.kinds)
        return self.work.layers * block_s / together * NEARLY < self.found.best_s

    def layouts(self, degrees: LayoutChoice, devices: int) -> None:
        """Try all other choices, for so many devices."""
        tensor, pipeline = degrees.tensor, degrees.pipeline
        copies, pins = devices // degrees.group_devices, self.space.pins
        divided = degrees.context * degrees.expert > 1 or (tensor > 1 and self.work.experts > 0)
        # Stages of heterogeneous devices have different numbers of layers, which interleaved ones cannot have.
        twice = pipeline > 1 and 2 * pipeline <= self.work.layers and self.unlike.uniform and "stages" not in pins
        for virtual in self.candidate_values("virtual", (1, 2) if twice else (1,)):
            if "stages" in pins and len(pins["stages"]) != pipeline * virtual:
                continue
            for recompute, offload in RECOMPUTE:
                if pins.get("recompute", recompute) != recompute or pins.get("offload", offload) != offload:
                    continue
                if offload and pipeline > 1:
                    continue  # which has several micro-batches under way, and offload knows of one
                if offload and "offload" not in pins and any(kind.on_host for kind in self.cluster.kinds):
                    continue  # the host's memory is the device's
                if offload and self.work.layers <= self.work.horizon:
                    continue  # nothing would leave
                if divided and recompute == "selective" and "recompute" not in pins:
                    continue  # blocks that are compiled in parts cannot have it
                base = replace(
                    degrees, virtual=virtual, recompute=recompute, offload=offload, devices=devices,
                    sequence=tensor > 1 and pins.get("sequence", self.work.seq_len % tensor == 0),
                )  # fmt: skip
                if self.is_slow(base, copies):
                    continue
                if "stages" in pins:
                    base = replace(base, stages=pins["stages"])
                else:
                    base = replace(base, stages=self.unlike.stage_layers(base, copies))
                missed = self.found.missed
                # Of shared rows one at a time: two are as much as one on half as many ranks.
                sizes = (1,) if base.context > 1 and "micro_batch" not in pins else self.sizes(copies)
                for size in sizes:
                    if not self.sizes_fit(replace(base, micro_batch=size), copies):
                        self.rows_fit &= size > 1
                        break
                if missed == self.found.missed:
                    break  # where everything fits, computing again only takes time

    def is_slow(self, choice: LayoutChoice, copies: int) -> bool:
        """Whether heterogeneous devices are too slow even if all of them were always busy."""
        if self.unlike.uniform or self.found.best_s == math.inf:
            return False
        width = copies * choice.group_devices
        per_s = sum(
            (min(behind, width) - begin) / choice.row_devices / self.unlike.fit_kind_speed(group.kind, choice)[1]
            for begin, behind, group in self.cluster.spans
            if begin < width
        )
        return PACE_IS_NEAR * self.work.global_batch / per_s > WORTH * self.found.best_s

    def sizes(self, copies: int) -> Iterator[int]:
        """Of micro-batches: powers of two up to the share of a copy, and that; more where fast copies get more."""
        share, size = -(-self.work.global_batch // copies), 1
        if not self.unlike.uniform:
            share = min(self.work.global_batch, MOST_SHARES * share)
        if "micro_batch" in self.space.pins:
            yield min(self.space.pins["micro_batch"], share)
            return
        while size < share:
            yield size
            size *= 2
        yield share

    def sizes_fit(self, choice: LayoutChoice, copies: int) -> bool:
        """Try all ways of sharding; whether any of them fits, or might where it was passed over as too slow."""
        pins = self.space.pins
        if "shares" in pins:
            even = tuple(balance.split_evenly(self.work.global_batch, copies))
            choice = replace(choice, shares=even if pins["shares"] == "even" else pins["shares"])
            if len(choice.shares) != copies:
                return False
        elif not self.unlike.uniform:
            choice = replace(choice, shares=self.unlike.divide_batch(choice, copies))
        if choice.shares and choice.micro_batch >= 2 * max(choice.shares) and "micro_batch" not in pins:
            return False  # half of it was as much as any copy has
        bound_s = self.least_s(choice, copies)
        if bound_s > WORTH * self.found.best_s:
            return True
        fitted = False
        for zero, degree, reduce, slots in self.shardings(copies * choice.context, choice):
            if self.found.is_hopeless(layout_family(choice, zero, self.cluster), bound_s):
                fitted = True
                continue
            each = replace(choice, zero=zero, shard_degree=degree, reduce=reduce, slots=slots)
            # The shares were for copies with other layouts.
            if each.lockstep and not self.unlike.uniform and "shares" not in pins:
                each = replace(each, shares=self.unlike.divide_batch(each, copies))
            holders = self.holders(each, copies)
            worst = min(holders, key=lambda held: held.free_bytes)
            state = self.state_of(each, copies * choice.context, holders)
            if worst.free_bytes < 0 and state == ():
                self.found.note_misfit(each, self.cluster, worst)
            elif state is not None:
                fitted |= self.see(replace(each, state=state) if state else each)
        return fitted

    def state_of(self, choice: LayoutChoice, copies: int, holders: Sequence[DeviceMemory]) -> tuple[float, ...] | None:
        """State shares: the fixed ones (None: for another number of ranks), by the room of heterogeneous devices where
        even ones do not fit, or () for even ones."""
        wanted, degree = self.space.pins.get("state"), choice.shard_degree
        if choice.engine != "sharded":
            return ()  # the others know of even parts alone
        if wanted is None:
            short = any(held.free_bytes < 0 for held in holders)
            if (
                short
                and not self.unlike.uniform
                and choice.pipeline == choice.expert == 1
                and not degree
                and copies > 1
            ):
                return self.unlike.state_weights(holders, copies, choice.tensor)
            return ()
        if wanted == "even":
            return ()
        if choice.pipeline > 1 or len(wanted) != (degree or copies):
            return None
        return tuple(part / sum(wanted) for part in wanted)

    def see(self, choice: LayoutChoice) -> bool:
        """Predict a layout; whether it fits."""
        return self.found.see(choice, self.model.estimate(choice), self.cluster)

    def shardings(self, copies: int, degrees: LayoutChoice) -> Iterator[tuple[int, int, Reduce, int]]:
        """(zero, shard degree, reduce, slots) that the sharded engine can do and that may be worth it. Zero 2 that
        reduces once a step holds more than zero 1 and sends as much, and a pipeline can do no other."""
        pins, degree, pipeline = self.space.pins, self.space.pins.get("shard_degree", 0), degrees.pipeline
        if copies == 1 and (degree < 2 or (self.space.use_all_devices and self.cluster.devices == 1)):
            yield 1, 0, "per_step", 1  # nothing to shard
            return
        if degree and copies % degree:
            return
        for zero in self.candidate_values("zero", (1, 2, 3) if pipeline == 1 else (1,)):
            reduces: Sequence[Reduce] = ("per_step",)
            if pipeline == 1 and zero > 1:
                reduces = ("per_micro_batch", "per_step") if zero == 3 else ("per_micro_batch",)
            for reduce in self.candidate_values("reduce", reduces):
                if zero == 3 and pins.get("slots", 1) > 1:
                    continue  # its parameters are gathered again for each pass
                if pipeline == 1 or (zero < 3 and reduce == "per_step"):
                    yield zero, degree, reduce, pins.get("slots", 1)

    def refine(self, choice: LayoutChoice) -> None:
        """What makes little difference and multiplies what there is to try: only for the best of each family."""
        pins, copies = self.space.pins, (choice.devices or self.cluster.devices) // (choice.tensor * choice.pipeline)
        alone = "shard_degree" in pins or "state" in pins or choice.expert > 1
        per_node = max(1, self.cluster.groups[0].per_node // choice.tensor)
        degrees = [each for each in (per_node, 2 * per_node) if 1 < each < copies and copies % each == 0]
        degrees = [choice.shard_degree] if alone else [0, *degrees]
        slots = self.candidate_values("slots", (1, 2) if choice.zero < 3 and copies > 1 else (1,))
        cuts = [choice.stages]
        if choice.stages and self.unlike.uniform and "stages" not in pins and not self.space.use_all_devices:
            # By products the head counts as this many layers; small layers are slower than that.
            cuts.append(tuple(balance.split_evenly(self.work.layers, choice.pipeline)))
        for degree, count, stages in itertools.product(degrees, slots, cuts):
            state = choice.state if degree in (0, choice.shard_degree) else ()
            other = replace(choice, shard_degree=degree, slots=count, state=state, stages=stages)
            if other != choice:
                self.see(other)

    # ---------------------------------------------------------------------------------------------------------- bounds

    def least_s(self, choice: LayoutChoice, copies: int) -> float:
        """A bound that no sharding is below: blocks and the bubble, without any communication, on the fastest kind or,
        with shares of all copies, on all of them together."""
        total, work = self.work.global_batch, self.work
        largest = max(choice.shares) if choice.shares else -(-total // copies)
        micro_batches = -(-largest // choice.micro_batch)
        if choice.shares:
            per_s = sum(count / each for count, _, each in self.unlike.classes(choice, copies))
            fill = (choice.pipeline - 1) / choice.virtual * (1.0 / micro_batches)
            return PACE_IS_NEAR * total / per_s * (1.0 + fill)
        block_s = min(self.block_s(kind, choice, largest / micro_batches) for kind in self.cluster.kinds)
        longest = work.layers / choice.pipeline * block_s
        return micro_batches * longest + (choice.pipeline - 1) * longest / choice.virtual

    def block_s(self, kind: DeviceKind, choice: LayoutChoice, sequences: float) -> float:
        sequences /= choice.context
        key = (kind.name, choice.tensor, choice.context, choice.sequence, choice.recompute, sequences)
        if key not in self._blocks:
            found = compute_cost.block_pass(self.work, kind, choice, sequences, self.constants)
            self._blocks[key] = found.forward_s + found.backward_s
        return self._blocks[key]

    def holders(self, choice: LayoutChoice, copies: int) -> list[DeviceMemory]:
        """Memory of the fullest devices, with even parts of the state, which is cheaper than the full cost of a
        layout. With one stage, one of each group; with several, those of the first and the last stage with the
        most memory."""
        largest = max(choice.shares) if choice.shares else -(-self.work.global_batch // copies)
        copies *= choice.context
        replicated = self.model.needs_replicas(choice, copies)
        layers = choice.layers_of(self.work.layers)
        own, width, found = 1.0 / (choice.shard_degree or copies), copies * choice.tensor, []
        if choice.pipeline == 1:
            ends = [
                (0, group.kind, begin // choice.row_devices) for begin, _, group in self.cluster.spans if begin < width
            ]
        else:
            ends = []
            for stage in (0, choice.pipeline - 1):
                here = self.unlike.kinds_of(stage * width, (stage + 1) * width)
                ends.append((stage, max(here, key=lambda kind: kind.memory_bytes), -1))
        for stage, kind, first in ends:
            share = largest if not choice.shares else min(choice.shares) if first < 0 else choice.shares[first]
            for parts in dict.fromkeys(choice.micro_batches(share, largest, fits) for fits in (True, False)):
                sequences = max(1.0, share / parts)
                at = (self.work, kind, choice, copies, stage, layers[stage], sequences, parts, own, self.constants)
                held = memory.estimate_device_memory(*at, replicated=replicated)
                if held.free_bytes >= 0:
                    break
            found.append(held)
        return found
