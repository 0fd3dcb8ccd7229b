"""What follows from devices that differ: sequences of each copy of the model, layers of each stage, parts of the state.

By the functions that divide a run, or their closed forms where a search asks thousands of times.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from phalanx.core.errors import ConfigError
from phalanx.layout import balance
from phalanx.layout import pipeline_stages as pipelines
from phalanx.layout.balance import CostLine
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.cost import CostModel
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS, CostConstants, DeviceKind
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.memory import IN_SHARES, DeviceMemory
from phalanx.planner.work import StepWork


class HeterogeneousDevices:
    """The devices of one cluster, by how fast they are at one work; what many layouts have in common is kept."""

    def __init__(self, work: StepWork, cluster: ClusterSpec, constants: CostConstants = DEFAULT_CONSTANTS) -> None:
        self.work, self.cluster, self.constants = work, cluster, constants
        self.uniform = len(cluster.kinds) == 1
        self._paces: dict[tuple[object, ...], tuple[float, float]] = {}
        self._stages: dict[tuple[int, tuple[float, ...], bool], tuple[int, ...]] = {}
        self._classes: dict[tuple[object, ...], list[tuple[int, float, float]]] = {}
        self._shares: dict[tuple[object, ...], tuple[int, ...]] = {}

    def complete(self, choice: LayoutChoice) -> LayoutChoice:
        """Complete a layout: layers of its stages, and the copies' shares if devices differ."""
        devices = choice.devices or self.cluster.devices
        copies = devices // (choice.tensor * choice.pipeline)
        if not choice.stages:
            choice = replace(choice, stages=self.stage_layers(choice, copies))
        if not choice.shares and not self.uniform:
            choice = replace(choice, shares=self.divide_batch(choice, copies))
        return choice

    def stage_layers(self, choice: LayoutChoice, copies: int) -> tuple[int, ...]:
        """Layers of each stage, by its slowest device, and by the time of the head."""
        folded = choice.order == "zero_bubble"
        if choice.pipeline == 1 or (choice.virtual > 1 and not folded):
            return ()
        width = copies * choice.tensor
        paces = [
            max(self.fit_kind_speed(kind, choice)[1] for kind in self.kinds_of(stage * width, (stage + 1) * width))
            for stage in range(choice.pipeline)
        ]
        fastest = min(paces)
        ratios = {pace: float(f"{fastest / pace:.2g}") for pace in set(paces)}  # more digits would be noise
        speeds = tuple(ratios[pace] for pace in paces)
        key = (choice.pipeline, speeds, folded)
        if key not in self._stages:
            head = self.work.table_parameters / self.work.matrix_parameters
            found = pipelines.divide_layers(
                self.work.layers, choice.pipeline, "zero_bubble" if folded else "1f1b", speeds=speeds, head=head
            )
            self._stages[key] = tuple(len(each) for each in found.layers)
        return self._stages[key]

    def kinds_of(self, first: int, behind: int) -> list[DeviceKind]:
        """Kinds of devices [first, behind)."""
        return [group.kind for begin, end, group in self.cluster.spans if begin < behind and first < end]

    def divide_batch(self, choice: LayoutChoice, copies: int) -> tuple[int, ...]:
        """Sequences of each copy of the model, such that all end together; () where a copy would have none.

        With m micro-batches a copy of fixed seconds f and e for a sequence does (T - m f) / e of them in T seconds.
        Copies alike are one case, and what rounding leaves goes to those that then take least.
        """
        key = (copies, *self._key(choice), choice.micro_batch, choice.lockstep)
        if key not in self._shares:
            taken = self._in_lockstep(choice, copies)
            if not choice.lockstep and (
                choice.tensor * choice.pipeline == 1
                or min(map(min, taken)) * choice.micro_batch < max(map(max, taken))  # fewer than micro-batches
            ):
                taken = self._apart(choice, copies)
            shares = tuple(itertools.chain(*taken))
            self._shares[key] = shares if min(shares) > 0 and sum(shares) == self.work.global_batch else ()
        return self._shares[key]

    def _in_lockstep(self, choice: LayoutChoice, copies: int) -> list[list[int]]:
        """Sequences of each copy, by class: all run equally many micro-batches."""
        classes = self.classes(choice, copies)
        total = self.work.global_batch
        parts = 1
        for _ in range(3):  # more micro-batches cost the slow more, so the fast get more
            seconds = total + sum(count * parts * fixed / each for count, fixed, each in classes)
            seconds /= sum(count / each for count, _, each in classes)
            exact = [max(0.0, (seconds - parts * fixed) / each) for _, fixed, each in classes]
            before, parts = parts, max(1, math.ceil(max(exact) / choice.micro_batch - 1e-9))
            if parts == before:
                break
        taken = [[int(share)] * count for share, (count, _, _) in zip(exact, classes, strict=True)]
        left = total - sum(sum(each) for each in taken)
        order = sorted(range(len(classes)), key=lambda number: taken[number][0] + 1 - exact[number])
        for number in itertools.cycle(order):
            more = min(left, len(taken[number]))
            taken[number] = [share + (place < more) for place, share in enumerate(taken[number])]
            left -= more
            if left <= 0:
                break
        return taken

    def _apart(self, choice: LayoutChoice, copies: int) -> list[list[int]]:
        """Sequences of each copy, by class: each runs as many micro-batches as it needs. As in `balance.divide`."""
        classes, size = self.classes(choice, copies), choice.micro_batch
        left = total = self.work.global_batch
        lines = [CostLine(fixed, each, total, 1, size, fixed) for _, fixed, each in classes]
        turns = [size * each + fixed for _, fixed, each in classes]
        # So long it takes at least: all micro-batches would have to be full.
        seconds = total / sum(count * size / turn for (count, _, _), turn in zip(classes, turns, strict=True))
        taken = []
        for (count, fixed, each), turn in zip(classes, turns, strict=True):
            full = int(seconds / turn)
            more = min(size, int((seconds - full * turn - fixed) / each - 1e-9))
            taken.append([max(0, full * size + max(0, more) - 1)] * count)
            left -= count * taken[-1][0]
        while left > 0:
            number = min(range(len(lines)), key=lambda number: lines[number].cost(taken[number][0] + 1))
            more = min(left, len(taken[number]))
            taken[number] = [share + (place < more) for place, share in enumerate(taken[number])]
            left -= more
        return taken

    def _key(self, choice: LayoutChoice) -> tuple[object, ...]:
        """The properties that a copy's time depends on."""
        return (choice.tensor, choice.pipeline, choice.stages, choice.recompute, choice.offload)

    def classes(self, choice: LayoutChoice, copies: int) -> list[tuple[int, float, float]]:
        """(copies, fixed seconds, seconds of a sequence) of neighbouring copies that are alike, in order."""
        key = (copies, *self._key(choice))
        if key not in self._classes:
            self._classes[key] = self._found_classes(choice, copies)
        return self._classes[key]

    def _found_classes(self, choice: LayoutChoice, copies: int) -> list[tuple[int, float, float]]:
        width = copies * choice.tensor
        cuts = {0, copies}
        for begin, _, _ in self.cluster.spans[1:]:
            for stage in range(choice.pipeline):
                if 0 < begin - stage * width < width:
                    cuts |= {(begin - stage * width) // choice.tensor}
        found = []
        ordered, whole = sorted(cuts), self.work.layers
        layers = choice.layers_of(whole) if choice.stages else (whole / choice.pipeline,) * choice.pipeline
        for first, behind in itertools.pairwise(ordered):
            fixed = each = 0.0
            for stage in range(choice.pipeline):
                part = layers[stage] / whole
                at = stage * width + first * choice.tensor
                stage_fixed, stage_each = self.fit_kind_speed(self.kinds_of(at, at + 1)[0], choice)
                fixed, each = max(fixed, stage_fixed * part), max(each, stage_each * part)
            found.append((behind - first, fixed, each))
        return found

    def fit_kind_speed(self, kind: DeviceKind, choice: LayoutChoice) -> tuple[float, float]:
        """(fixed seconds, seconds of a sequence) of a micro-batch of the whole model on devices of a kind."""
        key = (kind.name, choice.tensor, choice.recompute, choice.offload)
        if key not in self._paces:
            alone = replace(self.cluster, groups=(NodeGroup(1, choice.tensor, kind),))
            times = []
            for sequences in (1, 4):
                work = replace(self.work, global_batch=sequences)
                plain = replace(
                    choice, pipeline=1, virtual=1, stages=(), shares=(), state=(), shard_degree=0,
                    micro_batch=sequences, devices=choice.tensor,
                )  # fmt: skip
                terms = CostModel(work, alone, self.constants).estimate(plain).terms
                times.append(terms["compute"] + terms["communication"] + terms["offload"])
            each = max((times[1] - times[0]) / 3, times[1] * 1e-6)
            self._paces[key] = (max(0.0, times[0] - each), each)
        return self._paces[key]

    def state_weights(self, holders: Sequence[DeviceMemory], copies: int, tensor: int) -> tuple[float, ...]:
        """Fraction of the state that each copy holds if equal parts do not fit: limited by its free memory; () if
        that is not enough in total."""
        rooms: list[float] = []
        needed = 0.0
        for held, (begin, behind, _) in zip(holders, self.cluster.spans, strict=False):
            own = sum(held.parts.get(name, 0.0) for name in IN_SHARES)
            room, count = max(0.0, held.free_bytes + own), (behind - begin) // tensor
            count = min(count, copies - len(rooms))
            rooms += [room] * count
            needed += own * count
        try:
            return balance.state_shares(rooms, needed)
        except ConfigError:
            return ()
