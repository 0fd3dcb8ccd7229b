"""The cost model of a layout: seconds of a step by term, and bytes of each device. Pure floats, no search.

A step of the slowest copy of the model: every stage computes its micro-batches in turn after the first has reached it,
the engine transfers gradients and parameters, and the state is updated.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from phalanx.core.errors import ConfigError
from phalanx.layout import balance
from phalanx.planner import compute_cost, link_cost
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.compute_cost import LayerCost, RowGroups, StageCost, filling_s, peak_dtype
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS, CostConstants, DeviceKind
from phalanx.planner.layer_exchanges import LayerRings, find_layer_cost
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.link_cost import CommTime, ReplicationCost, RingPlacement
from phalanx.planner.memory import DeviceMemory, estimate_device_memory, needs_replicas, parameters_of
from phalanx.planner.work import StepWork

RecoverySource = Literal["checkpoints", "memory", "copies"]  # steps in memory outlive processes, copies nodes
RING_BYTES = 1e9  # of a tensor by which rings are compared
TERMS = ("compute", "communication", "bubble", "imbalance", "optimizer", "commit", "offload", "other")


@dataclass(frozen=True)
class StepEstimate:
    """The estimate of a step: seconds by term (`terms` sum to `step_s`), and memory by device, the fullest first."""

    step_s: float
    terms: dict[str, float]
    memory: tuple[DeviceMemory, ...]
    tokens_per_s: float
    mfu: float  # of the data-sheets' peak of all devices that are used
    replicas: ReplicationCost | None = None  # None: no node gets what another one has
    recovers_from: RecoverySource = "checkpoints"

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return all(each.free_bytes >= 0 for each in self.memory)


class CostModel:
    """The cost model of a step's work on a cluster, with parts that many layouts share computed once."""

    def __init__(self, work: StepWork, cluster: ClusterSpec, constants: CostConstants = DEFAULT_CONSTANTS) -> None:
        self.work, self.cluster, self.constants = work, cluster, constants
        self._layers: dict[tuple[object, ...], LayerCost] = {}
        self._rings: dict[tuple[int, int, int], RingPlacement] = {}
        self._need_replicas: dict[tuple[int, ...], bool] = {}

    def estimate(self, choice: LayoutChoice) -> StepEstimate:
        """Estimate seconds and bytes of a layout. Raises ConfigError for one whose degrees do not divide, and where
        heterogeneous devices would take rows together."""
        work, constants = self.work, self.constants
        devices, copies, layers, shares = self._numbers(choice)
        groups = copies // choice.context
        runs = [
            self._fit_micro_batch(choice, run, max(shares), layers, copies)
            for run in self._runs(choice, copies, shares)
        ]
        last, last_s, mean_s = None, -1.0, 0.0
        for run in runs:
            sequences = max(1.0, run.share / run.parts)  # a pass without any computes one for nothing
            stages = [self._stage(choice, run, number, layers, copies, sequences) for number in range(choice.pipeline)]
            longest = max(stage.total_s for stage in stages)
            fill = filling_s(choice, stages, run.parts)
            mean_s += run.parts * sum(stage.total_s for stage in stages) / choice.pipeline * run.groups / groups
            # Not always the copy with the longest passes: communication overlaps less with shorter ones.
            travel, shown_s = self._parameter_comm(choice, run, stages, layers, copies)
            if run.parts * longest + fill + shown_s > last_s:
                last, last_s = (run, stages, longest, fill, travel, shown_s), run.parts * longest + fill + shown_s
        assert last is not None
        run, stages, longest, fill, travel, shown_s = last
        average = min(mean_s, run.parts * longest)  # the passes' time if all were equally busy
        part = average / max(longest, 1e-30)
        critical = max(stages, key=lambda stage: stage.total_s)
        update_s = max(self._update_s(choice, each, layers) for each in runs)
        found = self._memory(choice, runs, layers, copies)
        terms = {
            "compute": part * (longest - critical.waits_s - critical.offload_s),
            "communication": part * critical.waits_s + shown_s,
            "bubble": fill,
            "imbalance": run.parts * longest - average,
            "optimizer": update_s,
            "commit": 0.0,
            "offload": part * critical.offload_s,
        }
        # Copies and transfers of a step may take until the update of the next one, beside that step's transfers.
        window_s = sum(terms.values()) - update_s
        keeps = all(each.keeps.own for each in found)  # else none of them has room
        if keeps:
            terms["commit"] = max(
                link_cost.commit_s(each.kind, each.state_bytes, window_s, constants) for each in found
            )
        replicas = self._replicas(found, window_s - travel.exposed_s - travel.hidden_s)
        if replicas is not None:
            terms["communication"] += replicas.waits_s
        busy = sum(terms.values())
        waits = constants.jitter * link_cost.doublings(copies) * busy
        terms["other"] = constants.step_s + waits
        step_s = busy + terms["other"]
        peak = sum(
            max(0, min(behind, devices) - begin)
            * group.kind.peak_flop_per_s(peak_dtype(work, group.kind))
            / group.kind.speed
            for begin, behind, group in self.cluster.spans
        )
        tokens_per_s = work.tokens / step_s
        mfu = tokens_per_s * work.flops_per_token() / peak
        # Or other nodes have the same state anyway.
        copied = replicas is not None or (self._nodes(devices) > 1 and not self.needs_replicas(choice, copies))
        kept: RecoverySource = (
            "checkpoints" if not keeps else "copies" if copied and work.replicate != "off" else "memory"
        )
        return StepEstimate(step_s, terms, found, tokens_per_s, mfu, replicas, kept)

    def needs_replicas(self, choice: LayoutChoice, copies: int) -> bool:
        """`memory.needs_replicas` on this cluster."""
        key = (choice.tensor, choice.pipeline, choice.shard_degree, choice.devices, copies)
        if key not in self._need_replicas:
            self._need_replicas[key] = needs_replicas(choice, copies, self.cluster)
        return self._need_replicas[key]

    # ------------------------------------------------------------------------------------------------- ranks and copies

    def _numbers(self, choice: LayoutChoice) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        work, cluster = self.work, self.cluster
        devices = choice.devices or cluster.devices
        copies, rest = divmod(devices, choice.tensor * choice.pipeline)
        if rest or not copies or devices > cluster.devices:
            raise ConfigError(
                f"{devices} of {cluster.devices} devices cannot hold copies of a model on {choice.tensor} x "
                f"{choice.pipeline} each; choose degrees whose product divides their number"
            )
        together = choice.context * choice.expert
        if copies % together:
            raise ConfigError(
                f"{copies} copies of a model do not form groups of {together} that share rows or experts; choose "
                "degrees that divide their number"
            )
        edges = (begin for begin, _, _ in cluster.spans[1:] if begin < devices and len(cluster.kinds) > 1)
        if choice.context > 1 and any(begin % choice.row_devices for begin in edges):
            raise ConfigError(
                "a plan does not know how heterogeneous devices share rows, which a run measures; set "
                "parallel.context=1, or `phalanx train --dry-run` for its memory"
            )
        if choice.shard_degree and copies % choice.shard_degree:
            raise ConfigError(
                f"a copy of the state cannot be sharded over {choice.shard_degree} of {copies} copies of the model; "
                "choose a shard_degree that divides their number"
            )
        layers = choice.layers_of(work.layers)
        stages = choice.stages or layers
        groups = copies // choice.context
        shares = choice.shares or tuple(balance.split_evenly(work.global_batch, groups))
        chunks = choice.pipeline * choice.virtual if choice.stages else choice.pipeline
        if len(stages) != chunks or sum(stages) != work.layers or min(stages) < 1:
            raise ConfigError(
                f"stages of {list(stages)} layers are not for {work.layers} layers on {chunks} stages; give "
                "each stage one layer at least, and all of them together"
            )
        if len(shares) != groups or sum(shares) != work.global_batch:
            raise ConfigError(
                f"shares of {len(shares)} copies and {sum(shares)} sequences are not for {work.global_batch} sequences "
                f"on {groups} copies; give each copy its sequences"
            )
        return devices, copies, layers, shares

    def _runs(self, choice: LayoutChoice, copies: int, shares: tuple[int, ...]) -> Iterator[RowGroups]:
        """All row groups, those alike once; of even shares only the largest, since nothing waits for a smaller one."""
        together, width = choice.row_devices, copies * choice.tensor
        cuts = {0, len(shares)}
        for begin, _, _ in self.cluster.spans[1:]:
            for stage in range(choice.pipeline):
                inside = begin - stage * width
                if 0 < inside < width:
                    cuts |= {inside // together, -(-inside // together)}
        degree = choice.shard_degree or copies
        weights, total = choice.state, sum(choice.state)
        ordered, most = sorted(cuts), max(shares)
        for begin, behind in pairwise(ordered):
            kinds = tuple(self._slowest(stage * width + begin * together, together) for stage in range(choice.pipeline))
            if not choice.shares and not weights:
                share = max(shares[begin:behind])
                yield RowGroups(begin, behind - begin, kinds, share, choice.micro_batches(share, most), 1.0 / degree)
                continue
            if not weights:
                for share, count in Counter(shares[begin:behind]).items():
                    first = shares.index(share, begin)
                    yield RowGroups(first, count, kinds, share, choice.micro_batches(share, most), 1.0 / degree)
                continue
            seen: dict[tuple[int, float], list[int]] = {}
            for group in range(begin, behind):
                mine = range(group * choice.context, (group + 1) * choice.context)
                most_owned = max(weights[copy_ % degree] for copy_ in mine) / total
                seen.setdefault((shares[group], most_owned), []).append(group)
            for (share, owns), alike in seen.items():
                yield RowGroups(alike[0], len(alike), kinds, share, choice.micro_batches(share, most), owns)

    def _fit_micro_batch(
        self, choice: LayoutChoice, run: RowGroups, most: int, layers: tuple[int, ...], copies: int
    ) -> RowGroups:
        """Try smaller micro-batches, if the whole ones do not fit."""
        parts = choice.micro_batches(run.share, most, fits=False)
        if parts == run.parts or self._memory(choice, [run], layers, copies)[0].free_bytes >= 0:
            return run
        return replace(run, parts=parts)

    def _slowest(self, first: int, tensor: int) -> DeviceKind:
        kinds = [group.kind for begin, behind, group in self.cluster.spans if begin < first + tensor and first < behind]
        if len(kinds) == 1:
            return kinds[0]
        return min(kinds, key=lambda kind: kind.peak_flop_per_s(peak_dtype(self.work, kind)) * kind.sustained)

    def _nodes(self, devices: int) -> int:
        return self.cluster.node_of(devices - 1) + 1

    def _ring(self, first: int, ranks: int, stride: int) -> RingPlacement:
        key = (first, ranks, stride)
        if key not in self._rings:
            self._rings[key] = link_cost.ring_of(first, ranks, stride, self.cluster)
        return self._rings[key]

    # ---------------------------------------------------------------------------------------------------------- seconds

    def _layer(self, choice: LayoutChoice, kind: DeviceKind, first: int, rows: float) -> LayerCost:
        """Of a device in the groups that begin with device `first`."""
        tensor, together = choice.tensor, choice.expert_ranks
        rings = LayerRings(
            self._ring(first, tensor, 1) if tensor > 1 else None,
            self._ring(first, choice.context, tensor) if choice.context > 1 else None,
            # Rows are divided over parts of such a group, too.
            self._ring(first // together * together, together, 1) if self.work.experts and together > 1 else None,
        )
        key = (
            kind.name, tensor, choice.context, choice.expert, choice.sequence, choice.recompute, choice.attention,
            choice.engine, rows, rings.key,
        )  # fmt: skip
        if key not in self._layers:
            at = (self.work, kind, choice, rings, rows, self.cluster, self.constants)
            self._layers[key] = find_layer_cost(*at)
        return self._layers[key]

    def _stage(
        self, choice: LayoutChoice, run: RowGroups, number: int, layers: tuple[int, ...], copies: int, sequences: float
    ) -> StageCost:
        work, cluster, constants, kind = self.work, self.cluster, self.constants, run.kinds[number]
        first, rows = number * copies * choice.tensor + run.first * choice.row_devices, sequences / choice.context
        layer = self._layer(choice, kind, first, rows)
        moved = rows * work.seq_len * work.hidden * work.width
        forward = backward = offload = 0.0
        waits = layers[number] * layer.waits_s
        if choice.offload:
            # Blocks whose inputs are offloaded one after the other, from the beginning of the first to the end of the
            # last, which waits for the offload; and the same backwards.
            copy_s = moved / (choice.tensor if choice.sequence else 1) / kind.host_bytes_per_s
            copies_s = (layers[number] - work.horizon) * copy_s
            forward = max(0.0, copies_s - (layers[number] - 1) * layer.forward_s)
            backward = max(0.0, copies_s - (layers[number] - 1) * layer.backward_s)
            offload = forward + backward
        forward_only = layers[number] * layer.forward_s
        backward += layers[number] * layer.backward_s
        for wanted, edge in zip(choice.ends(number), (layer.embedding, layer.head), strict=True):
            if wanted:
                device_s, host_s = edge.forward_s + 0.5 * layer.exchange_s, edge.host_forward_s + 0.5 * layer.calls_s
                passed = compute_cost.overlap_host_s(device_s, host_s, constants)
                forward_only += passed
                backward += compute_cost.overlap_host_s(edge.backward_s, edge.host_backward_s, constants)
                waits += passed - compute_cost.overlap_host_s(edge.forward_s, edge.host_forward_s, constants)
        forward += forward_only * (2 if work.counts_ahead else 1)
        if choice.pipeline > 1:
            moved, gathered_s = self._handed(choice, first, moved)
            beside = min(copies * choice.tensor, cluster.node_size_of(first))
            width = copies * choice.tensor
            for other in (number - 1, number + 1):
                if 0 <= other < choice.pipeline:
                    near = cluster.node_of(first) == cluster.node_of(first + (other - number) * width)
                    sent = (
                        link_cost.send_s(moved, near, kind, cluster, beside, constants) + gathered_s + constants.skew_s
                    )
                    waits += choice.virtual * sent
                    if other < number:
                        forward += choice.virtual * sent
                    else:
                        backward += choice.virtual * sent
        return StageCost(forward, backward, waits, offload)

    def _handed(self, choice: LayoutChoice, first: int, moved: float) -> tuple[float, float]:
        """(bytes that a rank hands to the next stage, seconds until the tensor ranks there have them all) of what is
        `moved` for a micro-batch.

        With sequence parallelism each has no more than its part. Megatron's ranks, which all have the same, send a part
        each and gather the parts behind (Narayanan et al. 2021, 4.1); this project's own send all they have.
        """
        if choice.tensor == 1 or not (choice.sequence or choice.engine == "megatron"):
            return moved, 0.0
        if choice.sequence:
            return moved / choice.tensor, 0.0
        ring = self._ring(first, choice.tensor, 1)
        gathered_s = link_cost.reduce_scatter_s(moved, ring, self.cluster, self.constants) + link_cost.skew_s(
            ring, self.constants
        )
        return moved / choice.tensor, gathered_s

    def _parameter_comm(
        self, choice: LayoutChoice, run: RowGroups, stages: list[StageCost], layers: tuple[int, ...], copies: int
    ) -> tuple[CommTime, float]:
        """Of the stage whose parameters make a step longest on their way, and by how much they do."""
        work, worst, most_s = self.work, CommTime(0.0, 0.0), 0.0
        width = copies * choice.tensor
        for number, stage in enumerate(stages):
            parameters, *_ = parameters_of(work, choice.tensor, layers[number], *choice.ends(number))
            first = number * width
            degree = choice.shard_degree or copies
            shard = self._shard_ring(first, degree, choice.tensor, copies // degree)
            spread = self._ring(first, copies // degree, choice.tensor * degree)
            least = min(choice.state) / sum(choice.state) if choice.state else 1.0 / degree
            found = link_cost.estimate_comm_time(
                work, choice, parameters, layers[number], (shard, spread, least), run.owns,
                (stage.forward_s, stage.backward_s), run.parts, self.cluster, self.constants,
            )  # fmt: skip
            crosses = max(shard.nodes, spread.nodes) > 1
            taken = link_cost.compute_slowdown(run.kinds[number], crosses, self.cluster, self.constants)
            longer_s = found.exposed_s + taken * found.hidden_s
            if longer_s > most_s:
                worst, most_s = found, longer_s
        return worst, most_s

    def _shard_ring(self, first: int, degree: int, tensor: int, count: int) -> RingPlacement:
        """The slowest of `count` rings from `first` on, each with a copy of the state; they may be on heterogeneous
        devices or cross nodes."""
        width, numbers = degree * tensor, {0}
        for begin, _, group in self.cluster.spans if count > 1 else ():
            # The first ring of each group and the one after it; more if rings and nodes are not aligned.
            unlike = group.per_node if width % group.per_node and group.per_node % width else 1
            number = max(0, begin - first) // width
            numbers |= {each for each in range(number, number + unlike + 1) if each < count}
        rings = [self._ring(first + number * width, degree, tensor) for number in sorted(numbers)]
        return max(rings, key=lambda ring: link_cost.reduce_scatter_s(RING_BYTES, ring, self.cluster, self.constants))

    def _update_s(self, choice: LayoutChoice, run: RowGroups, layers: tuple[int, ...]) -> float:
        """Of the stage that takes longest. All wait for what any copy updates, also one that computes longest and owns
        nothing."""
        longest = 0.0
        for number, kind in enumerate(run.kinds):
            parameters, *_ = parameters_of(self.work, choice.tensor, layers[number], *choice.ends(number))
            own = parameters * run.owns if choice.zero else parameters
            longest = max(longest, link_cost.update_s(self.work, kind, own, self.constants))
        return longest

    def _replicas(self, found: tuple[DeviceMemory, ...], idle_s: float) -> ReplicationCost | None:
        """What sending replicas costs where the network has nothing else to do for `idle_s` of a step. A CPU copies
        what it sends and gets itself, as it does in collectives."""
        work, constants, node_bytes, copying_s = self.work, self.constants, 0.0, 0.0
        if not all(each.keeps.replicas for each in found):
            return None
        for each in found:
            kind, sent = each.kind, each.state_bytes
            if each.keeps.replays:  # gradients, by which the update is made again
                sent *= work.master_bytes / (work.master_bytes + work.state_bytes)
            crowds = zip(self.cluster.groups, self.cluster.node_sizes, strict=True)
            beside = max(crowd for group, crowd in crowds if group.kind == kind)
            node_bytes = max(node_bytes, beside * sent)
            if kind.on_host:
                copying_s = max(copying_s, link_cost.cpu_transfer_s(sent, kind, constants))
        every = work.replicate if isinstance(work.replicate, int) else 1
        sent_s = 8.0 * node_bytes / (self.cluster.between_bits_per_s * constants.far_share)
        return ReplicationCost(every, node_bytes, (max(0.0, sent_s - max(0.0, idle_s)) + copying_s) / every)

    # ----------------------------------------------------------------------------------------------------------- memory

    def _memory(
        self, choice: LayoutChoice, runs: list[RowGroups], layers: tuple[int, ...], copies: int
    ) -> tuple[DeviceMemory, ...]:
        replicated = self.needs_replicas(choice, copies)
        found = [
            estimate_device_memory(
                self.work, kind, choice, copies, number, layers[number], max(1.0, run.share / run.parts),
                run.parts, run.owns, self.constants, run.groups * choice.row_devices, replicated,
            )
            for run in runs
            for number, kind in enumerate(run.kinds)
        ]  # fmt: skip
        return tuple(sorted(found, key=lambda each: each.free_bytes))


def estimate_step(
    work: StepWork, cluster: ClusterSpec, choice: LayoutChoice, constants: CostConstants = DEFAULT_CONSTANTS
) -> StepEstimate:
    """Estimate a step of `work` on `cluster` in the layout `choice`; for many layouts use a `CostModel`. Raises
    ConfigError for degrees that do not divide."""
    return CostModel(work, cluster, constants).estimate(choice)
