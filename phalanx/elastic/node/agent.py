"""The agent of a node: a warm parent that forks the ranks, watches them, kills them and forks again.

Starting Python and importing torch costs seconds, a fork of a process that has done so costs milliseconds; so the agent
imports what the workers need (`preload`) and starts nothing itself: it has one thread, never touches an accelerator and
never computes. Workers do not try to survive a broken process group: when one ends abnormally all are killed and the
next attempt starts at once, of processes that were forked before (`standby.py`). `run_local_job` runs a job on this
node alone, as a member of a cluster of one (`node_agent.py`). No torch here; the caller says what to preload and what a
worker runs.
"""

import gc
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.elastic.membership.channel import Message
from phalanx.elastic.node.job import NodeJob
from phalanx.elastic.node.node_agent import NodeAgent, run_agent
from phalanx.elastic.node.signals import StopSignals
from phalanx.elastic.supervisor.coordinator import Coordinator, Plan, become_coordinator
from phalanx.elastic.supervisor.failover import describe_division
from phalanx.elastic.supervisor.state import RecoveryPolicy
from phalanx.recovery.catalog import inventory_from_message


def preload(modules: Sequence[str]) -> None:
    """Import modules that the workers will need, with every numerical library held to one thread meanwhile.

    Workers raise their thread count themselves (`torch.set_num_threads`); while they wait, threads spin but briefly.
    Objects alive afterwards are taken out of the garbage collector's sight, so that collections in the workers do not
    copy the shared pages.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        # Read once, when torch is loaded. By default waiting OpenMP threads spin: on cores that others use too, a step
        # of 1.7 ms then takes 170 (medians, two threads on two busy cores); with so few turns 21, and with none 18, but
        # threads that sleep at once cost a machine of one's own more than twice as much (at best 4 ms, here 2).
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
) -> int:
    """Run a job on this node alone to its end and return its exit code.

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
    held = {0: inventory_from_message(agent.list_inventory())}

    def lead(agent: NodeAgent) -> Coordinator:
        return become_coordinator(
            agent, {}, first_attempt, progress(), _never_prepare, job.on_event, lambda: [progress()], held=held
        )

    with StopSignals() as signals:
        try:
            return run_agent(agent, job.grace_s, signals)
        finally:
            agent.close()


def _never_make(offer: Message, poll_once: Callable[[], None]) -> NodeJob:
    raise AssertionError("a job on one node is not divided again")


def _never_prepare(division: int, plan: Plan, devices: list[list[Any]]) -> Message:
    raise AssertionError("a job on one node is not divided again")
