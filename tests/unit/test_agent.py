"""The agent with real processes, real signals and real files; the jobs are in agent_jobs.py."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.throttle import throttle
from phalanx.core.errors import CollectiveError, ConfigError, PhalanxError
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.node import attempt as attempts
from phalanx.elastic.node.agent import run_local_job
from phalanx.elastic.node.worker import NodeJob
from phalanx.system.exit_causes import (
    WorkerExit,
    describe_exception,
    find_root_cause,
    fingerprint_failure,
    is_secondary_failure,
)
from tests.helpers import ROOT, is_alive, wait_until, zygote_python
from tests.unit import agent_jobs


def start(
    worker: str,
    world: int,
    folder: Path,
    begin: Callable[[], None] | None = None,
    python: str = sys.executable,
    **options: Any,
) -> subprocess.Popen[str]:
    command = [python, "-m", "tests.unit.agent_jobs", worker, str(world), str(folder), json.dumps(options)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=begin
    )


def finish(agent: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]]]:
    out, err = agent.communicate(timeout=120)
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines, err
    assert "code" in lines[-1], err
    return lines[-1]["code"], lines[:-1]


def run_job(
    worker: str, world: int, folder: Path, begin: Callable[[], None] | None = None, **options: Any
) -> tuple[int, list[dict[str, Any]]]:
    """To its end. With `make test` forked from a warm Python, unless it is to `begin` in a process of its own."""
    python = zygote_python[-1] if begin is None else sys.executable
    return finish(start(worker, world, folder, begin, python, **options))


def noted(folder: Path, name: str, attempt: int, rank: int) -> Any:
    return json.loads((folder / f"{name}-{attempt}-{rank}.json").read_text())


def wait_for(folder: Path, name: str, world: int) -> list[int]:
    wait_until(lambda: len(list(folder.glob(f"{name}-1-*.json"))) == world)
    return [noted(folder, name, 1, rank) for rank in range(world)]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """What an agent has told, but for the sum of it (`incident`)."""
    return [event["kind"] for event in events if event["kind"] != "incident"]


def log(folder: Path, attempt: int, rank: int) -> str:
    return (folder / f"run/logs/attempt-{attempt:03d}/rank-{rank:05d}.log").read_text()


def test_all_ranks_done(tmp_path: Path) -> None:
    code, events = run_job("fine", 3, tmp_path)
    assert code == 0
    assert kinds(events) == ["attempt_started"]
    assert sorted(events[0]["pids"]) == ["0", "1", "2"]
    assert len({noted(tmp_path, "port", 1, rank) for rank in range(3)}) == 1


def test_a_rank_may_be_done_before_the_others(tmp_path: Path) -> None:
    assert run_job("early_and_late", 2, tmp_path)[0] == 0


@pytest.mark.parametrize(("worker", "world"), [("meet", 4), ("alone", 1)])
def test_ranks_find_each_other(tmp_path: Path, worker: str, world: int) -> None:
    assert run_job(worker, world, tmp_path)[0] == 0


def test_a_killed_rank_starts_the_next_attempt_on_another_port(tmp_path: Path) -> None:
    code, events = run_job("killed_once", 3, tmp_path, max_restarts=2)
    assert code == 0
    assert kinds(events) == ["attempt_started", "worker_died", "restarted", "attempt_started"]
    died = events[1]
    assert (died["attempt"], died["rank"], died["signal"]) == (1, 1, "SIGKILL")
    assert died["pid"] == events[0]["pids"]["1"]
    assert events[2]["attempt"] == events[3]["attempt"] == 2
    assert noted(tmp_path, "port", 1, 0) != noted(tmp_path, "port", 2, 0)
    assert not any(is_alive(pid) for pid in events[0]["pids"].values())
    killed = noted(tmp_path, "killed", 1, 1)
    running = max(noted(tmp_path, "running", 2, rank) for rank in range(3))
    print(f"from kill -9 to all 3 ranks running again: {(running - killed) * 1000:.1f} ms")
    assert running - killed < 1.0


def test_an_exception_leaves_its_cause_and_its_traceback(tmp_path: Path) -> None:
    code, events = run_job("raises", 2, tmp_path)
    assert code == 1
    died = events[-1]
    assert (died["kind"], died["rank"], died["exit_code"], died["step"]) == ("worker_died", 1, 1, 17)
    assert died["reason"] == "KeyError: 'layer 3'"
    cause = json.loads((tmp_path / "run/logs/attempt-001/rank-00001.cause.json").read_text())
    assert (cause["rank"], cause["attempt"], cause["type"], cause["step"]) == (1, 1, "KeyError", 17)
    assert cause["traceback"] in log(tmp_path, 1, 1)
    assert "in raises" in cause["traceback"]


@pytest.mark.parametrize(
    ("worker", "expected", "attempts"),
    [
        ("config_error", 2, 1),
        ("out_of_memory", 11, 1),
        ("checkpoint_error", 1, 2),
        ("exits_7", 7, 2),
        ("returns_3", 3, 2),
        ("asks_to_stop_and_fails", 3, 1),
    ],
)
def test_what_is_tried_again(tmp_path: Path, worker: str, expected: int, attempts: int) -> None:
    code, events = run_job(worker, 1, tmp_path, max_restarts=1)
    assert code == expected
    assert kinds(events).count("attempt_started") == attempts
    assert kinds(events).count("worker_died") == attempts
    assert all(event["exit_code"] == expected for event in events if event["kind"] == "worker_died")


@pytest.mark.parametrize("worker", ["starves", "starves_behind_a_step"])
def test_whom_the_kernel_kills_for_want_of_memory_asks_for_less(worker: str, tmp_path: Path) -> None:
    code, events = run_job(worker, 1, tmp_path, max_restarts=0)
    died = [event for event in events if event["kind"] == "worker_died"]
    at_once = worker == "starves"
    assert (code, [event.get("exit_code") for event in died]) == (
        11 if at_once else 1,
        [11, 11, 11 if at_once else None],
    )
    # Less than it ran, whatever it was asked for.
    assert died[0]["reason"] == (
        "killed by the kernel because memory ran out, with micro-batches of 4 sequences at most; from the next start "
        "on it gets 2 at most"
    )
    # There are none smaller. What has come through steps before has lost memory to others: a failure like any other.
    assert died[2]["reason"] == (
        "killed by the kernel because memory ran out, with micro-batches of one sequence, and there are none smaller; "
        "shard the model over more machines, run fewer ranks on this one, or set memory.activations=full"
        if at_once
        else "killed by SIGKILL; the kernel killed a process because memory ran out at that time"
    )
    again = [event["reason"] for event in events if event["kind"] == "restarted"]
    assert again == ["with smaller micro-batches"] * 2


def test_a_rank_that_a_control_group_kills_is_named_and_asks_for_less(tmp_path: Path) -> None:
    """By the kernel itself: the job is in a real group with a limit of memory, as schedulers and containers set it."""
    with throttle(1) as limits:
        if not limits.limits_memory:
            pytest.skip("this process may make no control group with a limit of memory")
        limits.limit_memory(0, 330 << 20)
        code, events = run_job("eats", 2, tmp_path, begin=lambda: limits.enter(0))
        kills = limits.memory_kills(0)
    died = [event for event in events if event["kind"] == "worker_died"]
    said = (
        "killed by the kernel because memory ran out, with micro-batches of 4 sequences at most; from the next start "
    )
    assert (kills, code) == (1, 0)
    assert [(event["rank"], event["reason"]) for event in died] == [(1, said + "on it gets 2 at most")]


def test_where_there_is_no_room_for_a_rank_it_is_said_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = [subprocess.Popen(["sleep", "60"], process_group=0)]

    def fork(child: Any, keep: Any, blocked_signals: Any) -> tuple[int, int]:
        if len(started) > 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(started[0])
        return started[0].pid, os.pidfd_open(started[0].pid)

    monkeypatch.setattr(attempts, "fork", fork)
    job = NodeJob(2, agent_jobs.fine, RunPaths(tmp_path))
    with pytest.raises(PhalanxError, match=r"rank 1 could not be started.*\(Resource temporarily unavailable\)"):
        run_local_job(job)
    started[0].wait()  # it was reaped already
    assert not is_alive(started[0].pid)


def test_attempts_are_numbered_from_the_first(tmp_path: Path) -> None:
    _, events = run_job("returns_3", 1, tmp_path, max_restarts=2, first_attempt=5)
    assert [event["attempt"] for event in events if event["kind"] == "attempt_started"] == [5, 6, 7]
    assert (events[-1]["kind"], events[-1]["attempt"]) == ("gave_up", 7)
    assert events[-1]["reason"].startswith("3 attempts in a row made no progress beyond step 0; see the ranks' logs")


@pytest.mark.parametrize(("restarts", "attempts"), [(0, 1), (1, 3), (2, 6)])
def test_a_new_checkpoint_begins_the_count_of_restarts_anew(tmp_path: Path, restarts: int, attempts: int) -> None:
    """The job comes further in attempts 1, 2 and 4, and never ends well."""
    _, events = run_job("fails_past_checkpoints", 1, tmp_path, max_restarts=restarts)
    assert kinds(events).count("attempt_started") == attempts
    ends, begins = (
        [each["time"] for each in events if each["kind"] == f"{kind}"] for kind in ("worker_died", "attempt_started")
    )
    paused = [begin - end for end, begin in zip(ends, begins[1:], strict=False)]
    assert all(paused[number - 1] >= 0.5 for number in (3, 5) if number < attempts)  # the second failure in a row


def test_a_cause_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    code, events = run_job("bad_cause", 3, tmp_path)
    assert code == 3
    assert events[-1]["reason"] == "ended with exit code 3 and no exception; its log may say why"


def test_a_hang_up_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does
    try:
        agent = start("stops_when_asked", 2, tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    pids = wait_for(tmp_path, "ready", 2)
    for pid in (agent.pid, *pids):
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.3)
    assert agent.poll() is None
    agent.terminate()
    code, events = finish(agent)
    assert (code, [event["signal"] for event in events if "signal" in event]) == (10, ["SIGTERM"])


def test_a_mistake_of_the_user_is_one_sentence_in_the_log(tmp_path: Path) -> None:
    _, events = run_job("config_error", 1, tmp_path)
    assert log(tmp_path, 1, 0) == events[-1]["reason"] + "\n"
    assert events[-1]["reason"] == "optim.lr is 0, so nothing would be learned; set it above 0"


def test_a_cause_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    code, _ = run_job("cause_cannot_be_written", 1, tmp_path)
    assert code == 1
    text = log(tmp_path, 1, 0)
    assert "could not be written" in text
    assert "ValueError: the real reason" in text


def test_peers_that_die_of_it_first_do_not_hide_the_cause(tmp_path: Path) -> None:
    code, events = run_job("peers_fail_first", 4, tmp_path)
    assert (code, events[-1]["rank"], events[-1]["reason"]) == (1, 1, "ValueError: the real reason")


@pytest.mark.usefixtures("hang_ups_count")
@pytest.mark.parametrize(
    ("sent", "received"),
    [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGUSR1"), ("SIGINT", "SIGTERM"), ("SIGHUP", "SIGTERM")],
)
def test_a_stop_signal_is_passed_on_and_workers_stop_in_peace(tmp_path: Path, sent: str, received: str) -> None:
    agent = start("stops_when_asked", 3, tmp_path, max_restarts=3)
    wait_for(tmp_path, "ready", 3)
    agent.send_signal(signal.Signals[sent])
    code, events = finish(agent)
    assert code == 10
    assert kinds(events) == ["attempt_started", "stop_requested"]
    assert events[1]["signal"] == sent
    assert [noted(tmp_path, "received", 1, rank) for rank in range(3)] == [received] * 3


def test_a_worker_that_ignores_the_signal_is_killed_after_the_grace(tmp_path: Path) -> None:
    agent = start("deaf", 2, tmp_path, grace_s=0.5, max_restarts=3)
    pids = wait_for(tmp_path, "ready", 2)
    begin = time.monotonic()
    agent.terminate()
    code, events = finish(agent)
    assert 0.5 < time.monotonic() - begin < 30
    assert code == 1
    assert kinds(events) == ["attempt_started", "stop_requested", "worker_died"]
    assert (events[-1]["rank"], events[-1]["pid"], events[-1]["signal"]) == (1, pids[1], "SIGKILL")
    assert "0.5 s after the stop signal" in events[-1]["reason"]
    assert "in deaf" in log(tmp_path, 1, 1), "the log does not say where the worker hung"
    assert not is_alive(pids[1])


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    agent = start("deaf", 2, tmp_path, grace_s=60)
    wait_for(tmp_path, "ready", 2)
    agent.send_signal(signal.SIGINT)
    wait_until(lambda: (tmp_path / "received-1-0.json").exists())
    begin = time.monotonic()
    agent.send_signal(signal.SIGINT)
    code, events = finish(agent)
    assert (code, events[-1]["reason"]) == (1, "killed by the agent: still running after a second SIGINT")
    assert time.monotonic() - begin < 30


def test_a_worker_stopped_before_it_could_listen_counts_as_stopped(tmp_path: Path) -> None:
    agent = start("unprepared", 2, tmp_path, max_restarts=3)
    wait_for(tmp_path, "ready", 2)
    agent.terminate()
    code, events = finish(agent)
    assert (code, kinds(events)) == (10, ["attempt_started", "stop_requested"])


def test_no_worker_outlives_a_killed_agent(tmp_path: Path) -> None:
    agent = start("deaf", 3, tmp_path)
    pids = wait_for(tmp_path, "ready", 3)
    agent.kill()
    agent.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_what_a_worker_started_dies_with_it(tmp_path: Path) -> None:
    assert run_job("starts_a_child", 2, tmp_path)[0] == 3
    children = [noted(tmp_path, "child", 1, rank) for rank in range(2)]
    wait_until(lambda: not any(is_alive(child) for child in children))


def test_a_worker_is_a_process_of_its_own(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()  # stands for a lock or a socket of the agent
    command = [sys.executable, "-m", "tests.unit.agent_jobs", "looks_around", "2", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, pass_fds=[read_end, write_end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdin is not None
        agent.stdin.write("not for workers")
        agent.stdin.flush()
        assert finish(agent)[0] == 0
    for rank in range(2):
        around = noted(tmp_path, "around", 1, rank)
        name = str(tmp_path / f"run/logs/attempt-001/rank-{rank:05d}.log")
        others = [file for file in around["files"] if file != name]
        assert len(others) == (1 if rank == 0 else 0), others
        assert all(file.startswith("socket:") for file in others)
        assert (around["stdin"], around["default"], around["blocked"], around["group"]) == ("", True, [], True)
        assert around["device"] == "cpu"
        assert log(tmp_path, 1, rank) == "printed\ncomplained\n"
    os.close(read_end)
    os.close(write_end)


def test_ranks_that_were_forked_early_are_as_those_forked_when_they_are_needed(tmp_path: Path) -> None:
    found = []
    for early in (True, False):
        folder = tmp_path / str(early)
        folder.mkdir()
        code, events = run_job("second_time", 3, folder, max_restarts=1, early=early)
        assert code == 0
        assert kinds(events) == ["attempt_started", "worker_died", "restarted", "attempt_started"]
        assert len({pid for event in events for pid in event.get("pids", {}).values()}) == 6
        for rank in range(3):
            told, around = noted(folder, "told", 2, rank), noted(folder, "around", 2, rank)
            assert told.pop("early") is early
            assert around["files"].pop(0) == str(folder / f"run/logs/attempt-002/rank-{rank:05d}.log")
            assert around["files"].pop(0) == str(folder / f"run/logs/attempt-002/rank-{rank:05d}.log")
            found.append([told, around | {"files": [name.partition("[")[0] for name in around["files"]]}])
            assert log(folder, 2, rank) == "printed\ncomplained\n"
    assert found[:3] == found[3:]
    assert [told["store"] for told, _ in found[:3]] == [["127.0.0.1", False]] * 3
    assert found[0][0]["kept"]["files"][1]["address"] == ["10.0.0.1", 5]


def test_who_was_forked_early_is_gone_where_no_other_attempt_follows(tmp_path: Path) -> None:
    assert run_job("second_time", 2, tmp_path, early=True)[0] == 1  # it looks for children itself


def in_own_process(text: str, python: str = zygote_python[-1], **options: Any) -> subprocess.CompletedProcess[str]:
    prelude = (
        "import os, pathlib, signal, subprocess, sys, threading, time\n"
        "from phalanx.elastic.node.agent import NodeJob, preload, run_local_job\n"
        "from phalanx.system.fork import fork, fork_call\n"
        "from phalanx.core.errors import *\n"
        "from phalanx.core.run_paths import RunPaths\n"
        "from phalanx.trainer.stop_request import STOP_SIGNALS, handle_stop_signals\n"
    )
    return subprocess.run(
        [python, "-c", prelude + text], cwd=ROOT, capture_output=True, text=True, timeout=120, **options
    )


def test_a_callback_that_raises_leaves_no_worker(tmp_path: Path) -> None:
    done = in_own_process("""
pids, calls, begin = [], [], time.monotonic()
def idle():
    calls.append(time.monotonic())
    if len(calls) == 5:
        raise KeyError("from on_idle")
try:
    note = lambda kind, details: pids.extend(details["pids"].values())
    run_local_job(NodeJob(2, lambda placement: time.sleep(60), on_event=note,
            on_idle=idle))
except KeyError as error:
    assert 0.35 < time.monotonic() - begin < 30, time.monotonic() - begin
    print(error, len(pids), [os.path.exists(f"/proc/{pid}") for pid in pids])
""")
    assert done.stdout == "'from on_idle' 2 [False, False]\n", done.stderr


def test_the_end_of_the_job_is_not_waited_for() -> None:
    done = in_own_process("""
from phalanx.elastic.node import agent
waits, real = [], agent.poll_descriptors
agent.poll_descriptors = lambda descriptors, timeout_s: waits.append(timeout_s) or real(descriptors, timeout_s)
print(run_local_job(NodeJob(1, lambda placement: 0)), waits[-1])
""")
    assert done.stdout == "0 0\n", done.stderr


EARLY = """
import dataclasses
from phalanx.elastic.node import standby
from phalanx.core.placement import Placement
standby.LATER_S = 0.0
waiting = standby.StandbyPool()
def fill(job):
    waiting.begin(job)
    for _ in range(job.world + 1):
        waiting.poll_once(job)
    return [each.pid for each in waiting._waiting]
def lives(pids):
    return [os.path.exists(f"/proc/{pid}") for pid in pids]
def code(job, place):
    return os.waitstatus_to_exitcode(os.waitpid(waiting.take(job, place, "lo")[0], 0)[1])
place = Placement(0, 1, 0, 1, 0, "cpu", store=None, epoch=3, partner=("10.0.0.1", 5))
def knows(placement):
    return 3 if dataclasses.replace(placement, threads=0) == place else 4  # the environment may say how many
first, other = NodeJob(2, knows), NodeJob(3, lambda placement: 0)
"""


def test_who_waits_to_be_a_rank_dies_with_the_agent() -> None:
    text = EARLY + "print(*fill(first), flush=True)\nos.kill(os.getpid(), 9)\n"
    done = in_own_process(text, python=sys.executable)
    assert done.returncode == -signal.SIGKILL
    both = [int(pid) for pid in done.stdout.split()]
    assert len(both) == 2, done.stderr
    wait_until(lambda: not any(is_alive(pid) for pid in both))


def test_who_waits_is_told_its_place() -> None:
    done = in_own_process(
        EARLY + "fill(first)\nprint([code(first, place) for _ in range(2)], waiting.take(first, place, 'lo'))"
    )
    assert done.stdout == "[3, 3] None\n", done.stderr


def test_who_waits_for_something_else_or_has_died_is_nobody() -> None:
    done = in_own_process(
        EARLY
        + """
before = fill(first)
print(waiting.take(other, place, "lo"), lives(before))
before = fill(first)
print(len(fill(other)), lives(before))
before = fill(first)
os.kill(before[0], 9)
os.waitid(os.P_PID, before[0], os.WEXITED | os.WNOWAIT)
print(code(first, place), lives(before), waiting.take(first, place, "lo"))
"""
    )
    assert done.stdout == "None [False, False]\n3 [False, False]\n3 [False, False] None\n", done.stderr


def test_without_room_for_another_process_fewer_wait_and_none_is_late() -> None:
    done = in_own_process(
        EARLY
        + """
forks = [standby.fork]
def full(*arguments, **others):
    if not forks:
        raise BlockingIOError("no room for another process")
    return forks.pop()(*arguments, **others)
standby.fork = full
print(len(fill(first)), code(first, place), waiting.take(first, place, "lo"))
standby.LATER_S = 60.0
print(len(fill(first)))
"""
    )
    assert done.stdout == "1 3 None\n0\n", done.stderr


def test_a_second_thread_is_refused_by_name() -> None:
    done = in_own_process("""
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
run_local_job(NodeJob(1, lambda placement: 0))
""")
    assert "has 2 threads (python" in done.stderr
    assert "fork_call" in done.stderr


def test_logs_that_cannot_be_written_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = in_own_process(f"""
try:
    run_local_job(NodeJob(1, lambda placement: 0, paths=RunPaths(pathlib.Path({str(tmp_path / "file")!r}))))
except RunError as error:
    print(error)
""")
    assert "cannot be written under" in done.stdout
    assert "choose another run folder" in done.stdout


def test_preload_imports_with_one_thread_and_restores_the_environment(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text("import os\nseen = os.environ['OMP_NUM_THREADS']\n")
    done = in_own_process(
        """
sys.path.insert(0, sys.argv[1] if len(sys.argv) > 1 else os.environ["FOLDER"])
preload(["greedy"])
print(sys.modules["greedy"].seen, os.environ["OMP_NUM_THREADS"], os.environ.get("MKL_NUM_THREADS"))
""",
        env=os.environ | {"FOLDER": str(tmp_path), "OMP_NUM_THREADS": "7"},
    )
    assert done.stdout.startswith("1 7 "), done.stderr


def test_a_stop_that_comes_while_a_rank_starts_is_heeded_once_it_can() -> None:
    done = in_own_process("""
def child():
    time.sleep(0.2)
    with handle_stop_signals() as request:
        return int(request.signal == "SIGTERM")
pid, pidfd = fork(child, blocked_signals=STOP_SIGNALS)
signal.pidfd_send_signal(pidfd, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""")
    assert done.stdout == "1\n", done.stderr


def test_fork_call_gives_results_and_errors_back() -> None:
    done = in_own_process(
        """
def fails(kind):
    if kind == "config": raise ConfigError("a sentence")
    if kind == "memory": raise MemoryError("no more")
    if kind == "other": raise LookupError("not here")
    if kind == "dies": os.kill(os.getpid(), 11)
    if kind == "exits": os._exit(0)
    if kind == "odd": return object()
parent, before = os.getpid(), len(os.listdir("/proc/self/fd"))
print(fork_call(lambda a, b: {"sum": a + b, "own": os.getpid() != parent == os.getppid()}, 1, 2, timeout_s=20))
print(len(fork_call(lambda: "x" * 5_000_000, timeout_s=None)))
for kind in ("config", "memory", "other", "dies", "exits", "odd"):
    try:
        fork_call(fails, kind, timeout_s=20)
    except Exception as error:
        first = str(error).replace("called in its own process, ", "").splitlines()[0]
        print(kind, type(error).__name__, first, "in fails" in str(error))
fork_call(lambda: print("seen by the user"), timeout_s=20)
print("descriptors left:", len(os.listdir("/proc/self/fd")) - before)
"""
    )
    assert done.stdout.splitlines() == [
        "{'sum': 3, 'own': True}",
        "5000000",
        "config ConfigError a sentence False",
        "memory OutOfMemory MemoryError: no more False",
        "other RuntimeError in its own process: True",
        "dies RuntimeError fails, was killed by SIGSEGV before it returned a result False",
        "exits RuntimeError fails, ended with exit code 0 before it returned a result False",
        "odd RuntimeError in its own process: False",
        "seen by the user",
        "descriptors left: 0",
    ], done.stderr


def test_fork_call_ends_a_call_that_takes_too_long_with_all_it_started() -> None:
    done = in_own_process("""
def slow():
    print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
    time.sleep(60)
begin = time.monotonic()
try:
    fork_call(slow, timeout_s=0.5)
except PhalanxError as error:
    print(error)
print(time.monotonic() - begin < 30)
""")
    child, sentence, quick = done.stdout.splitlines()
    assert sentence == "slow was stopped: it had not finished after 0.5 s in its own process"
    assert quick == "True"
    wait_until(lambda: not is_alive(int(child)))


def cause(error: BaseException) -> dict[str, Any]:
    return describe_exception(error)


def test_the_same_crash_is_not_tried_for_ever(tmp_path: Path) -> None:
    code, events = run_job("raises", 2, tmp_path, max_restarts=9, max_identical_failures=2)
    assert code == 1
    assert kinds(events) == [
        "attempt_started", "worker_died", "restarted", "attempt_started", "worker_died", "gave_up"
    ]  # fmt: skip
    assert re.fullmatch(
        r"2 attempts in a row failed with KeyError in step 17 \(File .*agent_jobs.py\", line \d+, in raises\), so "
        r"another would too; fix this first",
        events[-1]["reason"],
    )


LOST = WorkerExit(0, 1, None, 1, cause(RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer")))
ABORT = WorkerExit(1, 2, signal.SIGABRT, None)
COPY = (
    "state could not be replicated to another node (it closed the connection); that node or its replica process was "
    "lost"
)
UNKEPT = WorkerExit(1, 2, None, 1, cause(CollectiveError(COPY)))
OWN = WorkerExit(2, 3, None, 1, cause(ValueError("bad weights")))
KILLED = WorkerExit(3, 4, signal.SIGKILL, None)


@pytest.mark.parametrize("end", [LOST, KILLED, UNKEPT])
def test_who_did_not_fail_by_himself_has_no_fingerprint(end: WorkerExit) -> None:
    assert fingerprint_failure(end) == ""


def test_a_fingerprint_is_step_class_and_line_whichever_rank_it_was() -> None:
    error = cause(ValueError("one message"))
    error["traceback"] = 'Traceback:\n  File "a.py", line 3, in forward\nValueError: one message'
    known = fingerprint_failure(replace(OWN, cause=error | {"step": 4}))
    assert known == 'ValueError in step 4 (File "a.py", line 3, in forward)'
    assert fingerprint_failure(replace(OWN, rank=0, cause=error | {"step": 4, "message": "another"})) == known
    assert fingerprint_failure(replace(OWN, cause=error | {"step": 5})) != known
    assert fingerprint_failure(replace(OWN, cause=error | {"type": "CollectiveError"})) == ""  # the network may recover
    assert fingerprint_failure(replace(OWN, cause=None, exit_code=3)) == ""  # which mistake it was, nobody knows
    assert fingerprint_failure(ABORT) == "death by SIGABRT"


@pytest.mark.parametrize("aftermath", [ABORT, UNKEPT])
@given(st.permutations(range(4)), st.integers(1, 4))
def test_the_first_cause_is_the_least_explained_by_the_others(
    aftermath: WorkerExit, places: list[int], count: int
) -> None:
    order = [KILLED, OWN, aftermath, LOST]
    ends = [order[place] for place in places]
    assert find_root_cause(ends[:count]) == min(ends[:count], key=order.index)


@given(st.lists(st.sampled_from([OWN, LOST, KILLED, ABORT]), min_size=1, max_size=5))
def test_among_likes_the_first_seen_is_the_cause(ends: list[WorkerExit]) -> None:
    chosen = find_root_cause(ends)
    assert chosen is ends[ends.index(chosen)]
    assert is_secondary_failure(chosen) == all(is_secondary_failure(end) for end in ends)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (MemoryError(), 11),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"), 11),
        (RuntimeError("x"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_exit_codes_of_exceptions(error: BaseException, code: int) -> None:
    assert describe_exception(error)["exit_code"] == code
