"""The agent of a node: a warm parent that forks the ranks, watches them, kills them and forks again.

Starting Python and importing torch costs seconds, a fork of a process that has done so costs milliseconds; so the agent
imports what the workers need (`preload`) and starts nothing itself: it has one thread, never touches an accelerator and
never computes. Workers do not try to survive a broken process group: when one ends abnormally all are killed and the
next attempt starts at once, of processes that were forked before (`standby.py`). `run_local_job` runs a job on this
node alone, as a member of a cluster of one (`node_agent.py`). No torch here; the caller says what to preload and what a
worker runs.
"""

import dataclasses
import gc
import importlib
import math
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.elastic.membership import rendezvous
from phalanx.elastic.membership.channel import Message, poll_descriptors
from phalanx.elastic.membership.membership import Membership
from phalanx.elastic.node.attempt import IDLE_S, JobAttempt
from phalanx.elastic.node.node_agent import AttemptLink, NodeAgent
from phalanx.elastic.node.worker import NodeJob, NodeRanks, StopSignals
from phalanx.elastic.supervisor.assignment import NodeAssignment
from phalanx.elastic.supervisor.coordinator import Coordinator, Plan
from phalanx.elastic.supervisor.failover import describe_division
from phalanx.elastic.supervisor.state import RecoveryPolicy
from phalanx.elastic.supervisor.take_lead import become_coordinator


def preload(modules: Sequence[str]) -> None:
    """Import modules that the workers will need, with every numerical library held to one thread meanwhile.

    Workers raise their thread count themselves (`torch.set_num_threads`); while they wait, threads spin but briefly.
    Objects alive afterwards are taken out of the garbage collector's sight, so that collections in the workers do not
    copy the shared pages.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        # Read once, when torch is loaded. By default waiting OpenMP threads spin: on cores that others use too, a step
        # of 1.7 ms then takes 170 (medians, two threads on two busy cores); with so few turns 21, and with none 18, but
        # threads that sleep at once cost an idle machine more than twice as much (at best 4 ms, here 2).
        os.environ["GOMP_SPINCOUNT"] = "1000"
    limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before, collects = {name: os.environ.get(name) for name in limits}, gc.isenabled()
    os.environ.update(dict.fromkeys(limits, "1"))
    gc.disable()  # nearly all that imports make stays: to look for what does not takes a tenth of the time
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if collects:
            gc.enable()
    gc.collect()
    gc.freeze()


def run_local_job(
    job: NodeJob,
    max_restarts: int = 0,
    max_identical_failures: int = 3,
    first_attempt: int = 1,
    progress: Callable[[], int] = lambda: 0,
    read_notice: Callable[[], str] = str,
) -> int:
    """Run a job on this node alone to its end and return its exit code. `read_notice`: as of `StopSignals`.

    What follows a rank's death is decided as on several nodes (`supervisor/decide.py`), by a policy of `max_restarts`
    and `max_identical_failures`; `progress` says how far the job has come for good. DONE when all ranks are done;
    STOPPED when they stopped for a signal; otherwise the code of the first real cause (FAILED for a death by signal).
    SIGTERM and SIGUSR1 are passed on to the workers, a first SIGINT and a SIGHUP that is not ignored as SIGTERM; a
    second SIGINT, or `grace_s` gone by, kills them. Must be called from the main thread; signal handlers are as before
    when it returns. However it ends, by an exception of a callback too, no worker is left.

    Raises:
        RunError: logs cannot be written.
        PhalanxError: a killed worker does not die.
    """
    devices = [[name, name.partition(":")[0], False] for name in job.devices]
    policy = RecoveryPolicy(1, max_restarts, on_lost_node=(), same_crash=max_identical_failures)
    agent = NodeAgent("", _never_make, lambda agent: lead(agent))
    offer = describe_division(1, [(0, job.world)], [devices], policy)
    agent.adopt_job({**offer, "attempt": first_attempt}, job)
    agent.join_alone(devices)

    def lead(agent: NodeAgent) -> Coordinator:
        return become_coordinator(
            agent, {}, first_attempt, progress(), _never_prepare, job.on_event, lambda: [progress()]
        )

    with StopSignals(read_notice) as signals:
        try:
            return run_agent(agent, job.grace_s, signals)
        finally:
            agent.close()


def _never_make(offer: Message, poll_once: Callable[[], None]) -> NodeJob:
    raise AssertionError("a job on one node is never redistributed")


def _never_prepare(division: int, plan: Plan, devices: list[list[Any]]) -> Message:
    raise AssertionError("a job on one node is never redistributed")


# ----------------------------------------------------------------------------------------------------------- the loop

LEAVE_S = 5.0  # time limit for the leader, after a second SIGINT on another node, to report how the job ended


class OfferChanged(Exception):
    """The preparation of a node was cancelled."""


def run_agent(agent: NodeAgent, grace_s: float, signals: StopSignals) -> int:
    """Run this node's part to the job's end and return its exit code; the message is in `agent.over`, or in
    `agent.membership.fenced` where this node had to leave.

    Ends workers and passes signals on as `run_local_job` says, and raises as that does where this node is to blame.
    """
    deadline = math.inf

    def enough() -> bool:
        nonlocal deadline
        for asked in signals.take():
            agent.membership.send_reliably(signals.describe(asked))
        if signals.all_signals:
            patience_s = LEAVE_S if signals.all_signals.count(signal.SIGINT) >= 2 else grace_s
            deadline = min(deadline, time.monotonic() + patience_s)
        return time.monotonic() > deadline

    agent.poll_once()
    while True:
        _wait(agent, signals)
        late = enough()
        if agent.over is not None:
            return agent.over[0]
        if agent.membership.fenced is not None or late:  # the others continue without this node
            return int(ExitCode.STOPPED if agent.membership.fenced is None else ExitCode.FAILED)
        prepare_offer(agent, enough)
        if (order := agent.take_start_order()) is not None:
            _attempt(agent, *order, signals)


def _attempt(agent: NodeAgent, number: int, assignment: NodeAssignment, signals: StopSignals) -> None:
    attempt = make_attempt(agent, number, assignment, signals)
    code, lowered = int(ExitCode.FAILED), False
    try:
        attempt.start()
        code = attempt.watch()
        lowered = code == ExitCode.OUT_OF_MEMORY and attempt.job.after_out_of_memory()
    finally:
        attempt.kill()
        agent.end_attempt()
        agent.report_end(number, code, attempt.exits, lowered, attempt.interrupted)
    agent.poll_once()  # first, since the others may wait for the result
    if code not in (ExitCode.DONE, ExitCode.STOPPED) and not agent.must_leave:
        agent.memory.open(agent.job)  # for the next attempt, while the others end theirs


def _wait(agent: NodeAgent, signals: StopSignals) -> None:
    ready = agent.over is not None or agent.has_start_order or agent.membership.has_messages
    descriptors = {signals.fileno(): select.POLLIN, **agent.descriptors()}
    poll_descriptors(descriptors, 0 if ready else min(IDLE_S, agent.membership.due_s()))
    agent.poll_once()


def prepare_offer(agent: NodeAgent, must_leave: Callable[[], bool]) -> None:
    """Prepare the job of a new offer, if there is one, and report that this node is ready. `must_leave` forwards
    stop signals, and returns whether this node leaves now, whatever becomes of the job."""
    while agent.offer is not None and int(agent.offer["division"]) != agent.division:
        offer = agent.offer

        def poll_once(offer: Message = offer) -> None:
            agent.poll_once()
            if must_leave() or agent.must_leave or agent.offer is not offer:
                raise OfferChanged

        try:
            job = agent.make_job(offer, poll_once)
        except OfferChanged:
            if must_leave() or agent.must_leave:
                return
            continue
        except PhalanxError as error:
            leader = agent.membership.member_list.leader
            agent.membership.send(leader, {"unfit": str(error), "code": int(error.exit_code)})
            agent.offer = None
            return
        agent.job, agent.division = job, int(offer["division"])
        agent.report_ready()


def make_attempt(agent: NodeAgent, number: int, assignment: NodeAssignment, signals: StopSignals) -> JobAttempt:
    """This node's part of an attempt."""
    job, start, members = agent.job, agent.start, agent.membership.member_list
    assert job is not None and start is not None
    seats = start["seats"]
    next_one = members.member(int(seats[(assignment.slot + 1) % len(seats)]))
    partner = None if next_one is None or len(seats) == 1 else (next_one.address, next_one.port)
    world, epoch = sum(start["ranks"]), None if agent.membership.is_solo else start["epoch"]
    interface = _find_interface(agent.membership)
    part = NodeRanks(assignment.slot, assignment.first_rank, world, interface, len(seats), partner, epoch)
    link, tell = AttemptLink(agent, number), job.on_event

    def note(kind: str, details: dict[str, Any]) -> None:
        """Forward an event of this node's ranks; the leader reports what concerns all nodes."""
        if not agent.is_leader or kind not in (EventKind.WORKER_DIED, EventKind.STOP_REQUESTED):
            tell(kind, details)

    mine = dataclasses.replace(
        job,
        world=assignment.ranks,
        devices=list(job.devices)[: assignment.ranks],
        find_in_memory_state=job.find_in_memory_state if job.shared is None else lambda: link.in_memory_state,
        on_event=note,
    )
    return JobAttempt(mine, part, number, link, signals, agent.standby)


def _find_interface(membership: Membership) -> str | None:
    """The network interface that leads to the other nodes."""
    if rendezvous.is_loopback(membership.me.address):
        return "lo"
    return next((name for name, address in rendezvous.interfaces() if address == membership.me.address), None)
