"""The agent of one node: a warm parent that forks the ranks, watches them, kills them and forks again.

Starting Python and importing torch costs seconds, a fork of a process that has done so costs milliseconds; so the agent
imports what the workers need (`preload`) and starts nothing itself: it has one thread, never touches an accelerator and
never computes. Workers do not try to survive a broken process group: when one ends abnormally all are killed and the
next attempt starts at once. On several nodes the agent of node 0 decides (`run`) and the others do as they are told
(`follow`). No torch here; the caller says what to preload and what a worker runs.
"""

import gc
import importlib
import itertools
import math
import os
import select
import signal
import time
from collections.abc import Sequence

from phalanx.cluster.attempt import IDLE_S, Attempt
from phalanx.cluster.first_node import FirstNode
from phalanx.cluster.job import Job, Others
from phalanx.cluster.other_node import OtherNode
from phalanx.cluster.stopping import Signals
from phalanx.records import ExitCode, Kind

LEAVE_S = 5.0  # what node 0 gets, after a second SIGINT on another node, to say how the job ended
NEVER_RETRIED = (ExitCode.CONFIG, ExitCode.OUT_OF_MEMORY, ExitCode.STOPPED)


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
    before = {name: os.environ.get(name) for name in limits}
    os.environ.update(dict.fromkeys(limits, "1"))
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    gc.collect()
    gc.freeze()


def run(job: Job) -> int:
    """Run a job to its end and return its exit code.

    DONE when all ranks are done; STOPPED when they stopped for a signal; otherwise the code of the first real cause
    (FAILED for a death by signal). A configuration error is never retried, nor an exhausted memory unless
    `after_out_of_memory` says that it is worth it, nor is anything once a stop was asked for. SIGTERM and SIGUSR1 are
    passed on to the workers, a first SIGINT and a SIGHUP that is not ignored as SIGTERM; a second SIGINT, or `grace_s`
    gone by, kills them. Must be called from the main thread; signal handlers are as before when it returns. However it
    ends, by an exception of a callback too, no worker is left.

    On node 0 of several (its `others` are a FirstNode) each attempt begins when all nodes are there and ready.

    Raises:
        RunError: logs cannot be written.
        CollectiveError: a node did not come, or come back, in time.
        ConfigError: a node cannot take part.
        PhalanxError: a killed worker does not die.
    """
    failures, reached = 0, job.progress()
    with Signals() as signals:
        for number in itertools.count(job.first_attempt):
            if not _gathered(job, number, signals):
                return ExitCode.STOPPED
            attempt = Attempt(job, number, signals)
            try:
                attempt.start()
                code = attempt.watch()
            finally:
                attempt.kill()
                attempt.end_elsewhere()
            for late in signals.take():
                job.on_event(Kind.SIGNALLED, {"attempt": number, "signal": late.name})
            asked = signals.asked or (isinstance(job.others, FirstNode) and job.others.asked)
            if code == ExitCode.OUT_OF_MEMORY and not asked and job.after_out_of_memory():
                job.on_event(Kind.RESTARTED, {"attempt": number + 1, "reason": "with smaller micro-batches"})
                continue
            if code == ExitCode.DONE or code in NEVER_RETRIED or asked:
                return code
            before, reached = reached, max(reached, job.progress())
            failures = 1 if reached > before else failures + 1
            if failures > job.max_restarts:
                return code
            job.on_event(Kind.RESTARTED, {"attempt": number + 1})
    raise AssertionError("unreachable")


def _gathered(job: Job, number: int, signals: Signals) -> bool:
    """Wait until all nodes are ready; False when a stop was asked for first."""
    if not isinstance(job.others, FirstNode):
        return True
    while not job.others.ready():
        _wait(job.others, signals)
        for asked in signals.take():
            job.on_event(Kind.SIGNALLED, {"attempt": number, "signal": asked.name})
        for name in job.others.stops():
            job.on_event(Kind.SIGNALLED, {"attempt": number, "signal": name})
        if signals.asked or job.others.asked:
            return False
        job.on_idle()
    return True


def follow(job: Job, node: OtherNode) -> int | None:
    """Run this node's part of a job's attempts as node 0 says, until it says that the job is over.

    Returns the job's exit code, or None when node 0 is lost and this node was not asked to stop: then it may come back.
    Ends workers and passes signals on as `run` does. Raises as `run` does where this node is to blame.
    """
    assert job.others is node
    deadline = math.inf
    with Signals() as signals:
        while True:
            _wait(node, signals)
            for asked in signals.take():
                node.tell_stop(asked.name)
            if signals.asked:
                patience_s = LEAVE_S if signals.asked.count(signal.SIGINT) >= 2 else job.grace_s
                deadline = min(deadline, time.monotonic() + patience_s)
            if node.over is not None:
                return node.over[0]
            if node.lost is not None:
                return ExitCode.STOPPED if signals.asked else None
            if time.monotonic() > deadline:
                return ExitCode.STOPPED
            number = node.starting()
            if number is None:
                continue
            attempt = Attempt(job, number, signals)
            code, ends = int(ExitCode.FAILED), attempt.ends
            try:
                attempt.start()
                code = attempt.watch()
            finally:
                attempt.kill()
                attempt.end_elsewhere()
                node.report(number, code, ends)


def _wait(others: Others, signals: Signals) -> None:
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    for descriptor, events in others.descriptors().items():
        poll.register(descriptor, events)
    poll.poll(IDLE_S * 1000)
    others.tend()
