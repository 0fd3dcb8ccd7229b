"""The agent of one node: a warm parent that forks the ranks, watches them, kills them and forks again.

Starting Python and importing torch costs seconds, a fork of a process that has done so costs milliseconds; so the agent
imports what the workers need (`preload`) and starts nothing itself: it has one thread, never touches an accelerator and
never computes. Workers do not try to survive a broken process group: when one ends abnormally all are killed and the
next attempt starts at once, of processes that were forked before (`standby.py`). `run_local_job` is the agent of a job
on one node; of several each runs its part (`node_agent.py`). No torch here; the caller says what to preload and what a
worker runs.
"""

import contextlib
import gc
import importlib
import itertools
import os
import select
import time
from collections.abc import Sequence

from phalanx.core.events import EventKind
from phalanx.core.placement import ExitCode
from phalanx.elastic.node.attempt import IDLE_S, JobAttempt
from phalanx.elastic.node.job import NodeJob
from phalanx.elastic.node.signals import StopSignals
from phalanx.elastic.node.standby import StandbyPool
from phalanx.elastic.supervisor.decide import PAUSE_S
from phalanx.system.exit_causes import FROM_ELSE, is_deterministic, is_state_damage, locate_failure

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


def run_local_job(job: NodeJob) -> int:
    """Run a job to its end and return its exit code.

    DONE when all ranks are done; STOPPED when they stopped for a signal; otherwise the code of the first real cause
    (FAILED for a death by signal). A configuration error is never retried, nor an exhausted memory unless
    `after_out_of_memory` says that it is worth it, nor is anything once a stop was asked for; kept state that was
    damaged is passed over by another attempt, which is not counted. SIGTERM and SIGUSR1 are
    passed on to the workers, a first SIGINT and a SIGHUP that is not ignored as SIGTERM; a second SIGINT, or `grace_s`
    gone by, kills them. Must be called from the main thread; signal handlers are as before when it returns. However it
    ends, by an exception of a callback too, no worker is left.

    Raises:
        RunError: logs cannot be written.
        PhalanxError: a killed worker does not die.
    """
    failures, reached = 0, job.progress()
    places: list[tuple[int | None, str, str] | None] = []  # where attempts failed
    with StopSignals() as signals, contextlib.closing(StandbyPool()) as early:
        for number in itertools.count(job.first_attempt):
            attempt = JobAttempt(job, number, signals, early)
            try:
                attempt.start()
                code = attempt.watch()
            finally:
                attempt.kill()
            for late in signals.take():
                job.on_event(EventKind.STOP_REQUESTED, {"attempt": number, "signal": late.name})
            asked = signals.all_signals
            if code == ExitCode.OUT_OF_MEMORY and not asked and job.after_out_of_memory():
                job.on_event(EventKind.RESTARTED, {"attempt": number + 1, "reason": "with smaller micro-batches"})
                continue
            if is_state_damage(attempt.cause) and not asked:
                job.on_event(EventKind.RESTARTED, {"attempt": number + 1, "reason": FROM_ELSE})
                continue
            if code == ExitCode.DONE or code in NEVER_RETRIED or asked:
                return code
            places.append(locate_failure(attempt.cause))
            if is_deterministic(places, job.max_identical_failures):
                job.on_event(
                    EventKind.GAVE_UP, {"attempt": number, "reason": _same(places[-1], job.max_identical_failures)}
                )
                return code
            before, reached = reached, max(reached, job.progress())
            failures = 1 if reached > before else failures + 1
            if failures > job.max_restarts:
                if job.max_restarts:  # else nobody expects another one
                    job.on_event(EventKind.GAVE_UP, {"attempt": number, "reason": _no_further(failures, reached)})
                return code
            _pause(job, signals, PAUSE_S[min(failures, len(PAUSE_S)) - 1])
            for late in signals.take():
                job.on_event(EventKind.STOP_REQUESTED, {"attempt": number, "signal": late.name})
            if signals.all_signals:
                return code
            job.on_event(EventKind.RESTARTED, {"attempt": number + 1})
    raise AssertionError("unreachable")


def _pause(job: NodeJob, signals: StopSignals, seconds: float) -> None:
    """Wait before another attempt, but for no signal."""
    poll, until = select.poll(), time.monotonic() + seconds
    poll.register(signals, select.POLLIN)
    while (left := until - time.monotonic()) > 0 and not poll.poll(min(left, IDLE_S) * 1000):
        job.on_idle()


def _no_further(failures: int, reached: int) -> str:
    """Why there is no other attempt after so many in a row that were in vain."""
    return (
        f"{failures} attempts in a row have not come beyond step {reached}; their logs say why, and "
        "resilience.max_restarts allows more"
    )


def _same(place: tuple[int | None, str, str] | None, times: int) -> str:
    """Why there is no other attempt after so many failures at one place."""
    assert place is not None
    step, kind, line = place
    where = f"in step {step}" if step is not None else "before the first step"
    return (
        f"{times} attempts have failed in a row with {kind} {where} ({line}), so it would come again; mend that first"
    )
