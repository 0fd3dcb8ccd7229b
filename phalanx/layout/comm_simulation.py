"""Simulation of a training step's communication and computation: what is ready when, and what waits for what.

Three lanes do one thing at a time each: computation, the link, and updates. What there is to do, and what needs what,
is a `StepProgram`; the order on the link is given by whoever walks through it, operation by operation, or found on the
way by `schedule_transfers`. Pure.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TransferKind = Literal["reduce", "gather", "regather"]
# What happens: (what, bucket, micro-batch); an agreement is of no bucket.
ProgramNode = tuple[str, int, int]


@dataclass(frozen=True)
class TransferOp:
    """Part `part` of `parts` of a bucket's reduce-scatter or all-gather.

    A reduce is behind the backward pass of `micro_batch` (reduced once per step: the last one). A gather is for the
    next step's first forward pass; in an order of `plan_zero3`, for the forward pass of `micro_batch` of the same
    step, and a regather for its backward pass.
    """

    kind: TransferKind
    bucket: int
    part: int
    micro_batch: int = 0

    @property
    def node(self) -> ProgramNode:
        """What it is a part of."""
        return self.kind, self.bucket, self.micro_batch


@dataclass(frozen=True)
class TimelineSpan:
    """Something that took place, in seconds since the beginning of the step as it is simulated."""

    lane: Literal["compute", "link", "update"]
    kind: str  # forward, backward, update or an operation's
    bucket: int
    part: int
    micro_batch: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class ComputeWait:
    """Seconds that computation stood still before a pass through `bucket`, and what it waited for: its gather, the
    agreement of all ranks, or room for its gradients."""

    why: Literal["gather", "agree", "room"]
    bucket: int
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """A step in the steady state; `step_s` is what it computes and all it waits."""

    step_s: float
    waits: tuple[ComputeWait, ...]
    spans: tuple[TimelineSpan, ...]

    @property
    def exposed_s(self) -> float:
        """Seconds for which communication was not hidden."""
        return sum(wait.seconds for wait in self.waits)


@dataclass(frozen=True)
class StepProgram:
    """What there is to do: seconds and needs of each node; `computed` in this order, the others as they are ready."""

    seconds: dict[ProgramNode, float]
    needs: dict[ProgramNode, list[ProgramNode]]
    computed: list[ProgramNode]


class ScheduleSimulation:
    """A program as it is carried out: three lanes, each doing one thing at a time, and what is ready since when."""

    def __init__(self, program: StepProgram, parts: int) -> None:
        self._program, self.parts = program, parts
        self.number = {node: number for number, node in enumerate(program.seconds)}
        self._unmet = {node: len(needs) for node, needs in program.needs.items()}
        self._wanted_by: dict[ProgramNode, list[ProgramNode]] = {}
        for node, needs in program.needs.items():
            for need in needs:
                self._wanted_by.setdefault(need, []).append(node)
        self._since = dict.fromkeys(program.needs, 0.0)
        self._due: dict[ProgramNode, ProgramNode] = {}  # which of its needs a node waited for longest
        self._next = 0
        self._update_at = 0.0
        self.link_at = self.compute_at = 0.0
        self.ready: dict[ProgramNode, float] = {}  # of the link's nodes: since when
        self.newly_ready: list[ProgramNode] = []  # which became so since somebody looked
        self._left = {node: set(range(parts)) for node in program.needs if node[0] in ("reduce", "gather", "regather")}
        self.transfers: list[tuple[TransferOp, float, float]] = []
        self.waits: list[ComputeWait] = []
        self.delayed_nodes: list[ProgramNode] = []
        self.last_wait: ProgramNode | None = None  # the link's node that ended the last wait
        self._last_reduced: ProgramNode | None = None
        self.spans: list[TimelineSpan] = []
        for node in [node for node, unmet in self._unmet.items() if not unmet]:
            self._begin(node)
        self._compute()

    def run_transfer(self, op: TransferOp) -> None:
        """The link does `op` next; ValueError where it never could."""
        node = op.node
        if node not in self.ready or op.part not in self._left[node]:
            raise ValueError(f"{op} can not be carried out here: what it needs comes later, or it was done before")
        begin = max(self.link_at, self.ready[node])
        self.link_at = begin + self._program.seconds[node] / self.parts
        self.transfers.append((op, begin, self.link_at))
        self.spans.append(TimelineSpan("link", op.kind, op.bucket, op.part, op.micro_batch, begin, self.link_at))
        self._left[node].remove(op.part)
        if not self._left[node]:
            self._finish(node, self.link_at)
            self._compute()

    def check_done(self) -> None:
        """ValueError if an operation is missing."""
        missing = [node for node, parts in self._left.items() if parts]
        if missing:
            raise ValueError(f"{len(missing)} operations are missing, {missing[0]} among them")

    def _finish(self, node: ProgramNode, end: float) -> None:
        if node[0] == "reduce":
            self._last_reduced = node
        for other in self._wanted_by.get(node, ()):
            self._unmet[other] -= 1
            if end >= self._since[other]:
                self._since[other], self._due[other] = end, node
            if not self._unmet[other]:
                self._begin(other)

    def _begin(self, node: ProgramNode) -> None:
        """Its needs are met; what is computed waits for its turn, and what the link does for its place in the order."""
        kind, since = node[0], self._since[node]
        if kind in ("reduce", "gather", "regather"):
            self.ready[node] = since
            self.newly_ready.append(node)
        elif kind == "update":
            begin = max(self._update_at, since)
            self._update_at = begin + self._program.seconds[node]
            self.spans.append(TimelineSpan("update", kind, node[1], 0, node[2], begin, self._update_at))
            self._finish(node, self._update_at)
        elif kind in ("agree", "reduced"):
            self._finish(node, since + self._program.seconds[node])

    def _compute(self) -> None:
        """Forward and backward passes, as far as what they need is known."""
        computed = self._program.computed
        while self._next < len(computed) and not self._unmet[node := computed[self._next]]:
            self._next += 1
            begin = max(self.compute_at, self._since[node])
            if begin > self.compute_at:
                due = self._due[node]
                why = {"agree": "agree", "reduce": "room"}.get(due[0], "gather")
                self.waits.append(ComputeWait(why, node[1], begin - self.compute_at))  # type: ignore[arg-type]
                self.delayed_nodes.append(node)
                self.last_wait = self._last_reduced if due[0] == "agree" else due
            self.compute_at = begin + self._program.seconds[node]
            self.spans.append(TimelineSpan("compute", node[0], node[1], 0, node[2], begin, self.compute_at))
            self._finish(node, self.compute_at)


def schedule_transfers(
    simulation: ScheduleSimulation, rank: Mapping[ProgramNode, float], blocked_by: Mapping[TransferOp, TransferOp]
) -> None:
    """Carry out everything: at any time the ready operation of the least rank, and no pause while one is ready.

    One that is held (`blocked_by`) counts as ready only when the other is done.
    """
    coming: list[tuple[float, int, int, TransferOp]] = []
    ready: list[tuple[float, float, int, int, TransferOp]] = []
    behind: dict[TransferOp, list[TransferOp]] = {}
    for op, other in blocked_by.items():
        behind.setdefault(other, []).append(op)
    done: set[TransferOp] = set()

    def offer(op: TransferOp) -> None:
        since = simulation.ready[op.node]
        heapq.heappush(coming, (since, simulation.number[op.node], op.part, op))

    while True:
        for node in simulation.newly_ready:
            for part in range(simulation.parts):
                op = TransferOp(node[0], node[1], part, node[2])  # type: ignore[arg-type]
                if op not in blocked_by or blocked_by[op] in done:
                    offer(op)
        simulation.newly_ready.clear()
        if not coming and not ready:
            return
        now = simulation.link_at if ready else max(simulation.link_at, coming[0][0])
        while coming and coming[0][0] <= now:
            since, number, part, op = heapq.heappop(coming)
            heapq.heappush(ready, (rank[op.node], since, number, part, op))
        op = heapq.heappop(ready)[-1]
        simulation.run_transfer(op)
        done.add(op)
        for other in behind.get(op, ()):
            if other.node in simulation.ready and other.node not in simulation.newly_ready:
                offer(other)
