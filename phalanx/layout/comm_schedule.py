"""The communication schedule of a training step (order of transfers), and the time of a step with it. Pure.

A step's gradients are reduce-scattered bucket by bucket while the backward pass runs, each rank updates its own range,
and the parameters are all-gathered until the next forward pass uses them. Both kinds need the same link in the same
direction, so one communication thread per rank runs one operation after the other, in an order that is computed
beforehand and is the same on all ranks: `plan_order`.

Every bucket's reduce-scatter and all-gather is cut into `parts`, so that a reduce-scatter whose gradients have just
come waits for a part at the most. What may begin when:

* a reduce: when the gradients of its bucket and micro-batch are there;
* an update: when its bucket is reduced whole (`early`), or when all are and the ranks have agreed (late);
* a gather: when its bucket is updated;
* the forward pass of a unit: when its bucket is gathered; of the first unit: when all buckets are reduced and the ranks
  have agreed, too, since until then a step may be refused;
* the backward pass of a unit: when there is room for its gradients, since those of its last micro-batch have left.

When a step's last unit begins its first forward pass, nothing of the step before is left to do. So a step is judged
alone: from there to the same point of the next.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.layout.comm_simulation import (
    ProgramNode,
    ScheduleSimulation,
    StepProgram,
    Timeline,
    TransferOp,
    schedule_transfers,
)

NEAR_ENOUGH = 1.001  # of the bound: the search stops within it
PARTS = 4  # operations that a bucket's transfer is cut into, so that an urgent one waits for a part at the most
PART_BYTES = 2**18  # a shorter part would be latency more than transfer
EFFORT = 40_000  # operations that a search may place; 512 buckets of 4 parts are 4,096


@dataclass(frozen=True)
class StepTimings:
    """A training step's work on the slowest rank, in seconds; tuples have a figure per bucket, in order of use.

    Updates are thought to run beside the link and the computation. Where they hold up the link, count them as part
    of `reduce_s` instead.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    reduce_s: tuple[float, ...]  # link time of the whole bucket's reduce-scatter
    gather_s: tuple[float, ...]  # link time of its all-gather
    update_s: tuple[float, ...]  # update of the own range, between the two
    micro_batches: int = 1
    reduce: Literal["per_step", "per_micro_batch"] = "per_step"
    early: bool = True  # may update and gather before the last reduce-scatter is done: needs no global norm
    parts: int = 4  # operations that a bucket's reduce-scatter, and its all-gather, is cut into
    agreement_s: float = 0.0  # what the agreement of all ranks takes, after the last reduce-scatter
    max_gradients: int | None = None  # for whole gradients of so many buckets; None: for all

    def __post_init__(self) -> None:
        counts = {len(self.forward_s), len(self.backward_s), len(self.reduce_s), len(self.gather_s), len(self.update_s)}
        assert len(counts) == 1 and counts != {0}, "a figure for every bucket"
        assert self.micro_batches > 0 and self.parts > 0, (self.micro_batches, self.parts)
        assert self.max_gradients is None or self.max_gradients > 0, self.max_gradients

    @property
    def buckets(self) -> int:
        return len(self.forward_s)

    @property
    def compute_s(self) -> float:
        """Forward and backward passes of all micro-batches."""
        return self.micro_batches * (sum(self.forward_s) + sum(self.backward_s))

    @property
    def reduced_micro_batches(self) -> range:
        """The micro-batches behind which gradients are reduced: all, or the last."""
        return range(0 if self.reduce == "per_micro_batch" else self.micro_batches - 1, self.micro_batches)


def plan_order(timings: StepTimings) -> tuple[TransferOp, ...]:
    """One step's operations in a good order; its gathers may run on into the next step's forward pass.

    List scheduling by the longest tail (Schrage 1971; here the tail is what is left of the forward pass behind an
    operation), which amounts to: reduces first, and in the gaps between them the lowest bucket that is updated. Then
    the operation that made the last wait by starting just before it is put behind what it held up, again and again
    (Potts 1980). What comes out is compared with gathering after the last reduce, and never worse.
    """
    after = _late_gather_order(timings)
    if not timings.early:
        return after
    urgency, enough = _urgency(timings), lower_bound_s(timings) * NEAR_ENOUGH
    best, best_s = after, simulate_order(timings, after).step_s
    held: dict[TransferOp, TransferOp] = {}  # an operation -> the one that it must let pass first
    for _ in range(max(2, EFFORT // len(after))):
        walk = ScheduleSimulation(_make_program(timings), timings.parts)
        schedule_transfers(walk, {node: -tail for node, tail in urgency.items()}, held)
        if walk.compute_at < best_s:
            best, best_s = tuple(op for op, _, _ in walk.transfers), walk.compute_at
        if best_s <= enough or (blamed := _find_blocking_op(walk, urgency)) is None or blamed[0] in held:
            break
        held[blamed[0]] = blamed[1]
    return best


def simulate_order(timings: StepTimings, order: Sequence[TransferOp]) -> Timeline:
    """What a step takes whose operations are carried out in `order`, one after the other.

    ValueError if that is not every operation once, or if it can never be carried out.
    """
    walk = ScheduleSimulation(_make_program(timings), timings.parts)
    for op in order:
        walk.run_transfer(op)
    walk.check_done()
    return Timeline(walk.compute_at, tuple(walk.waits), tuple(walk.spans))


def lower_bound_s(timings: StepTimings) -> float:
    """Seconds that a step takes at least, whatever the order and however finely it is cut.

    Leave away which operation needs which other, and keep for each only when it can begin at the earliest (its head),
    its link time, and how much of the step is left at least when it is done (its tail). A step then takes at least as
    long as the best order of these on one link that may interrupt an operation at any time, and that is known: always
    the one with the longest tail (Jackson 1955; Horn 1974). Heads: a reduce's is the end of its backward pass, if each
    operation that this waits for had the link for itself; a gather's is the end of its reduce, as if that had, plus
    the update. If there is no gather before the last reduce, it is the end of all reduces on a link that is never idle
    while there is one, plus agreement and update. Tails: a gather's is the forward pass from its unit on. A reduce's is
    update, gather and that, or the agreement and the whole forward pass, which is more; before the last micro-batch,
    all that is computed from the next backward pass through its unit on.
    """
    head, tail = _heads(timings), _urgency(timings)
    reduces = [(head[node], timings.reduce_s[node[1]], tail[node]) for node in head]
    gathers = []
    all_reduced = 0.0
    for begin, link_s, _ in sorted(reduces):
        all_reduced = max(all_reduced, begin) + link_s
    for bucket in range(timings.buckets):
        if timings.early:
            begin = head["reduce", bucket, timings.micro_batches - 1] + timings.reduce_s[bucket]
        else:
            begin = all_reduced + timings.agreement_s
        gathers.append((begin + timings.update_s[bucket], timings.gather_s[bucket], tail["gather", bucket, 0]))
    return max(timings.compute_s, _preemptive_s([*reduces, *gathers]))


def late_gather_s(timings: StepTimings) -> float:
    """Seconds of a step that gathers after the last reduce, bucket by bucket: what a global norm forces."""
    return simulate_order(timings, _late_gather_order(timings)).step_s


def ddp_step_s(timings: StepTimings) -> float:
    """Seconds of a step that all-reduces each bucket behind the backward pass, in as many bytes, then updates.

    That updates all of the parameters on each rank, for which `update_s` knows only the time of the own range.
    """
    computed = timings.compute_s - sum(timings.forward_s) - sum(timings.backward_s)
    moved = 0.0
    for bucket in reversed(range(timings.buckets)):
        computed += timings.backward_s[bucket]
        moved = max(moved, computed) + timings.reduce_s[bucket] + timings.gather_s[bucket]
    return moved + sum(timings.update_s) + sum(timings.forward_s)


def _late_gather_order(work: StepTimings) -> tuple[TransferOp, ...]:
    parts = range(work.parts)
    reduces = [
        TransferOp("reduce", bucket, part, batch)
        for batch in work.reduced_micro_batches
        for bucket in reversed(range(work.buckets))
        for part in parts
    ]
    return (*reduces, *(TransferOp("gather", bucket, part) for bucket in range(work.buckets) for part in parts))


def _heads(work: StepTimings) -> dict[ProgramNode, float]:
    """When each reduce can begin at the earliest: as if it had the link for itself."""
    heads: dict[ProgramNode, float] = {}
    now = 0.0
    for batch in range(work.micro_batches):
        now += sum(work.forward_s) if batch else 0.0
        for bucket in reversed(range(work.buckets)):
            before = ("reduce", bucket, batch - 1)
            room = heads[before] + work.reduce_s[bucket] if before in heads else 0.0
            now = max(now, room) + work.backward_s[bucket]
            if batch in work.reduced_micro_batches:
                heads["reduce", bucket, batch] = now
    return heads


def _urgency(work: StepTimings) -> dict[ProgramNode, float]:
    """How much of the step is left at least when an operation is done: its tail."""
    tails: dict[ProgramNode, float] = {}
    left = 0.0
    for bucket in reversed(range(work.buckets)):
        left += work.forward_s[bucket]
        tails["gather", bucket, 0] = left
    for batch in reversed(work.reduced_micro_batches):
        later = left + (work.micro_batches - 2 - batch) * (left + sum(work.backward_s))  # after the next micro-batch
        for bucket in range(work.buckets):
            if batch == work.micro_batches - 1:
                behind = work.update_s[bucket] + work.gather_s[bucket] + tails["gather", bucket, 0]
                tails["reduce", bucket, batch] = max(behind, work.agreement_s + left)
            else:
                later += work.backward_s[bucket]
                behind = work.reduce_s[bucket] + tails["reduce", bucket, batch + 1]
                tails["reduce", bucket, batch] = max(work.backward_s[bucket] + behind, later)
    return tails


def _preemptive_s(jobs: Sequence[tuple[float, float, float]]) -> float:
    """The least maximum of end and tail over jobs of (head, seconds, tail) on one machine with preemption."""
    coming = sorted(jobs)
    waiting: list[tuple[float, float]] = []
    now, most, taken = 0.0, 0.0, 0
    while waiting or taken < len(coming):
        if not waiting:
            now = max(now, coming[taken][0])
        while taken < len(coming) and coming[taken][0] <= now:
            heapq.heappush(waiting, (-coming[taken][2], coming[taken][1]))
            taken += 1
        minus_tail, seconds = heapq.heappop(waiting)
        until = coming[taken][0] if taken < len(coming) else float("inf")
        if now + seconds > until:
            heapq.heappush(waiting, (minus_tail, seconds - (until - now)))
            now = until
        else:
            now += seconds
            most = max(most, now - minus_tail)
    return most


def _find_blocking_op(
    walk: "ScheduleSimulation", urgency: Mapping[ProgramNode, float]
) -> tuple[TransferOp, TransferOp] | None:
    """(the less urgent operation that the last wait is due to, the last one of those that it held up), if any."""
    if walk.last_wait is None:
        return None
    at = next(at for at in reversed(range(len(walk.transfers))) if walk.transfers[at][0].node == walk.last_wait)
    critical = walk.transfers[at][0]
    tail = urgency[critical.node]
    while at > 0 and walk.transfers[at - 1][2] >= walk.transfers[at][1]:  # as long as the link had no pause
        at -= 1
        if urgency[walk.transfers[at][0].node] < tail:
            return walk.transfers[at][0], critical
    return None


def _make_program(work: StepTimings) -> StepProgram:
    """From the last unit's first forward pass to the same point of the next step."""
    program = StepProgram({}, {}, [])
    units, last = range(work.buckets), work.micro_batches - 1
    reduces: list[ProgramNode] = []  # in the order of the backward passes

    def add(node: ProgramNode, seconds: float, needs: Sequence[ProgramNode]) -> None:
        program.seconds[node] = seconds
        program.needs[node] = list(needs)

    room = work.buckets if work.max_gradients is None else min(work.max_gradients, work.buckets)
    for batch in range(work.micro_batches):
        for unit in units if batch else ():
            add(("forward", unit, batch), work.forward_s[unit], ())
        for unit in reversed(units):
            full = len(reduces) >= room and len(work.reduced_micro_batches) == work.micro_batches
            add(("backward", unit, batch), work.backward_s[unit], [reduces[-room]] if full else [])
            if batch in work.reduced_micro_batches:
                reduces.append(("reduce", unit, batch))
    agree: ProgramNode = ("agree", 0, last)
    for unit in units:
        gathered: list[ProgramNode] = [("gather", unit, 0)]
        add(("forward", unit, 0), work.forward_s[unit], gathered if unit else [*gathered, agree])
    program.computed.extend(program.seconds)
    for node in reduces:
        add(node, work.reduce_s[node[1]], [("backward", node[1], node[2])])
    add(agree, work.agreement_s, reduces)
    for unit in units:
        own: list[ProgramNode] = [("reduce", unit, batch) for batch in work.reduced_micro_batches]
        add(("update", unit, last), work.update_s[unit], own if work.early else [agree])
        add(("gather", unit, 0), work.gather_s[unit], [("update", unit, last)])
    return program
