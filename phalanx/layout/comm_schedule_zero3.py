"""The order of communication if parameters are held only while they are used (zero 3): pure, like `comm_schedule`.

They are gathered for every forward pass, and for every backward pass again, a few units ahead of their use, and let go
behind it.
"""

from collections.abc import Sequence

from phalanx.layout.comm_schedule import StepTimings
from phalanx.layout.comm_simulation import (
    ProgramNode,
    ScheduleSimulation,
    StepProgram,
    Timeline,
    TimelineSpan,
    TransferOp,
    schedule_transfers,
)

FASTER = 0.02  # part of a step


def plan_zero3(timings: StepTimings, depth: int) -> tuple[TransferOp, ...]:
    """One step's operations if parameters are held only while they are used: gathered for every forward pass, and for
    every backward pass again.

    While a unit computes, up to `depth` units after it are gathered, so never more than depth + 1 are whole; so it is
    with whole gradients, unless they are kept for a reduction per step. A unit that is used twice in a row, where the
    forward pass turns into the backward pass or that into the next micro-batch's, is gathered once. A step's reduces
    all come before the next step's gathers. Of two rules one is taken: reduces first, since what was sent needs no
    memory any more, unless gathers first are faster by more than FASTER.
    """
    assert depth >= 0, depth
    orders = {}
    program = _make_zero3_program(timings, depth, steps=2)
    for first in ("gather", "reduce"):
        walk = ScheduleSimulation(program, timings.parts)
        # Gathers among themselves, and reduces too, in order of use: they become ready in no other.
        schedule_transfers(
            walk, {node: float((node[0] == "reduce") != (first == "reduce")) for node in program.needs}, {}
        )
        orders[first] = tuple(op for op, _, _ in walk.transfers if op.micro_batch < timings.micro_batches)
    gathers_s, reduces_s = (simulate_zero3(timings, orders[first], depth).step_s for first in ("gather", "reduce"))
    return orders["gather" if gathers_s * (1 + FASTER) < reduces_s else "reduce"]


def simulate_zero3(timings: StepTimings, order: Sequence[TransferOp], depth: int) -> Timeline:
    """What a step takes in the steady state with an order as `plan_zero3` makes them; errors as for
    `simulate_order`."""
    steps, per_step = 3, timings.micro_batches
    walk = ScheduleSimulation(_make_zero3_program(timings, depth, steps), timings.parts)
    for step in range(steps):
        for op in order:
            walk.run_transfer(TransferOp(op.kind, op.bucket, op.part, op.micro_batch + step * per_step))
    walk.check_done()
    ends = [max(span.end_s for span in walk.spans if span.lane == "compute" and span.micro_batch < step * per_step)
            for step in (steps - 1, steps)]  # fmt: skip
    last = (steps - 1) * per_step
    spans = (
        TimelineSpan(s.lane, s.kind, s.bucket, s.part, s.micro_batch - last, s.begin_s - ends[0], s.end_s - ends[0])
        for s in walk.spans
        if s.micro_batch >= last
    )
    waits = (wait for wait, node in zip(walk.waits, walk.delayed_nodes, strict=True) if node[2] >= last)
    return Timeline(ends[1] - ends[0], tuple(waits), tuple(spans))


def _make_zero3_program(timings: StepTimings, depth: int, steps: int) -> StepProgram:
    """`steps` steps with parameters that are held only while used; micro-batches are counted through all steps."""
    program = StepProgram({}, {}, [])
    units, per_step = range(timings.buckets), timings.micro_batches
    limited = timings.reduce == "per_micro_batch" or per_step == 1
    held: list[list[ProgramNode]] = []  # what is computed with one gathering of a unit, in order
    gathers: list[ProgramNode] = []
    left: list[ProgramNode] = []  # reduces, in the order of the backward passes
    previous: tuple[int, int] | None = None  # the step and the unit that was last used
    for batch in range(steps * per_step):
        step = batch // per_step
        for kind, unit in [*(("forward", unit) for unit in units), *(("backward", unit) for unit in reversed(units))]:
            node = (kind, unit, batch)
            program.computed.append(node)
            program.needs[node] = []
            program.seconds[node] = (timings.forward_s if kind == "forward" else timings.backward_s)[unit]
            if previous != (step, unit):
                gathers.append(("gather" if kind == "forward" else "regather", unit, batch))
                held.append([])
                program.needs[node].append(gathers[-1])
            held[-1].append(node)
            previous = (step, unit)
            if node[:2] == ("forward", 0) and batch and batch % per_step == 0:
                program.needs[node].append(("agree", 0, batch - 1))
            if kind == "backward" and batch % per_step in timings.reduced_micro_batches:
                if limited and len(left) > depth:
                    program.needs[node].append(left[-1 - depth])
                left.append(("reduce", unit, batch))
                program.seconds[left[-1]] = timings.reduce_s[unit]
                program.needs[left[-1]] = [node]
    for number, gather in enumerate(gathers):
        program.seconds[gather] = timings.gather_s[gather[1]]
        program.needs[gather] = [held[number - depth - 1][-1]] if number > depth else []
        if gather[0] == "gather" and gather[2] and gather[2] % per_step == 0:
            program.needs[gather] += [("update", gather[1], gather[2] - 1), ("reduced", 0, gather[2] - 1)]
    for step in range(steps):
        last = (step + 1) * per_step - 1
        mine = [node for node in left if node[2] // per_step == step]
        for name, seconds in (("reduced", 0.0), ("agree", timings.agreement_s)):
            program.seconds[name, 0, last] = seconds
            program.needs[name, 0, last] = mine
        for unit in units:
            own = [node for node in mine if node[1] == unit]
            program.seconds["update", unit, last] = timings.update_s[unit]
            program.needs["update", unit, last] = own if timings.early else [("agree", 0, last)]
    return program
