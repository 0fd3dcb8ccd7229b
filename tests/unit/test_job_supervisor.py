"""Whether another start of a launched run follows: pure, and never for ever."""

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path, PosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import election
from phalanx.launch import job_supervisor, jobs, launched_run, start_outcomes
from phalanx.launch.launched_run import END, RESTART, STALLED, LaunchSpec, decide_restart
from phalanx.launch.schedulers import scheduler, slurm
from phalanx.launch.schedulers.registry import SCHEDULERS
from phalanx.launch.schedulers.scheduler import Job
from phalanx.launch.start_outcomes import StartOutcome
from phalanx.system.slurm_env import SlurmStep
from phalanx.trainer import run_folder
from tests.helpers import free_port, wait_until

LAUNCHED = LaunchSpec("slurm", 2, 0, None, True, 100, 0.0, "here")
TRIED = (ExitCode.FAILED, ExitCode.STOPPED)


def slurm_job(number: str, state: str) -> Job:
    return Job(number, state, slurm.find_phase(state))


def test_what_is_not_worth_another_start_ends() -> None:
    for code in (ExitCode.DONE, ExitCode.CONFIG, ExitCode.OUT_OF_MEMORY):
        assert decide_restart(LAUNCHED, code, False, 5, [])[0] == END
    for code in TRIED:
        assert decide_restart(LAUNCHED, code, False, 5, [])[0] == RESTART
        assert decide_restart(LAUNCHED, code, True, 5, []) == (END, "it was cancelled")


@given(st.lists(st.integers(0, 3), max_size=300), st.sampled_from(TRIED))
def test_starts_end_where_nothing_is_won(won: list[int], code: ExitCode) -> None:
    """Starts that each save so many steps more: they end after three that save none, or after a hundred."""
    before: list[StartOutcome] = []
    step, idle = 0, 0
    for more in won:
        step, idle = step + more, 0 if more else idle + 1
        follow, why = decide_restart(LAUNCHED, code, False, step, before)
        assert (follow == END) == (idle >= STALLED or len(before) + 1 == 100), (before, step)
        if follow == END:
            assert why
            break
        before.append(StartOutcome(int(code), RESTART, step))
    assert len(before) < 100


def test_what_was_launched_is_read_back(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.launch.mkdir()
    assert launched_run.read_launch_spec(paths) is None
    launched_run.write_launch_spec(paths, LAUNCHED)
    assert launched_run.read_launch_spec(paths) == LAUNCHED
    spec = {**asdict(LAUNCHED), "slurm": True}  # as 0.1 wrote it
    del spec["scheduler"]
    for slurm_too, name in ((True, "slurm"), (False, "background")):
        paths.launched.write_text(json.dumps({**spec, "slurm": slurm_too}))
        assert launched_run.scheduler_name_of(paths) == name
    paths.launched.write_text('{"nodes": 1}')
    assert launched_run.read_launch_spec(paths) is None


def test_what_another_version_has_launched_is_said_to_be_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_supervisor, "SEEN_S", 0.0)
    with pytest.raises(ConfigError, match="cannot see what `phalanx launch` wrote"):
        job_supervisor.supervise(tmp_path, {})
    paths = RunPaths(tmp_path)
    paths.launch.mkdir()
    paths.launched.write_text('{"nodes": 1}')
    with pytest.raises(ConfigError, match="cannot be read by this version of Phalanx"):
        job_supervisor.supervise(tmp_path, {})


def test_what_is_shown_is_the_log_of_the_node_that_leads(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.launch.mkdir()
    paths.node_log(0).parent.mkdir()
    election.claim(paths, 1, {"leader": 0})
    election.claim(paths, 2, {"leader": 1})
    assert launched_run.find_leading_node(paths) == 0  # of a run that was never launched there are no such logs
    launched_run.write_launch_spec(paths, LAUNCHED)
    assert launched_run.find_leading_node(paths) == 0
    paths.node_log(1).touch()
    assert launched_run.find_leading_node(paths) == 1
    launched_run.write_launch_spec(paths, replace(LAUNCHED, nodes=1))  # later, on one node
    assert launched_run.find_leading_node(paths) == 0


def test_a_start_after_a_cancellation_says_why_it_does_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.launch.mkdir()
    paths.cancelled.touch()
    assert job_supervisor._run_training(paths, LAUNCHED, 0, None, job_supervisor._StopHandler()) == ExitCode.STOPPED
    assert "--- not started because the run was cancelled" in paths.node_log(0).read_text()


def test_a_full_disk_does_not_keep_an_agent_that_was_killed_from_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, mark = RunPaths(tmp_path), tmp_path / "begun"
    paths.launch.mkdir()
    paths.node_log(0).parent.mkdir()
    paths.node_log(0).symlink_to("/dev/full")
    script = f"import os, pathlib; m = pathlib.Path({str(mark)!r}); m.exists() or m.touch() or os.kill(os.getpid(), 9)"
    monkeypatch.setattr(job_supervisor, "train_command", lambda *_: [sys.executable, "-c", script])
    assert job_supervisor._run_training(paths, LAUNCHED, 0, None, job_supervisor._StopHandler()) == 0


def test_a_signal_that_comes_just_before_the_child_is_passed_on(tmp_path: Path) -> None:
    class Cancelled(PosixPath):
        """Slurm's signal comes while it is looked whether the run was cancelled."""

        def exists(self) -> bool:
            if stop.asked is None:
                signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # another thread would take it at once
            return False

    stop = job_supervisor._StopHandler()
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        assert job_supervisor._run_child(["sleep", "20"], 2, stop, Cancelled(tmp_path / "cancelled")) == -signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, before)


LEADS = """
import fcntl, os, platform, signal, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
asked = []
signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
print(os.getpid(), "on", platform.node(), file=lock, flush=True)
while len(asked) < int(sys.argv[2]):
    time.sleep(0.02)
sys.exit(7)
"""


@pytest.mark.parametrize(("hosts", "heeds", "code"), [(1, 2, -signal.SIGKILL), (2, 2, 7), (2, 3, None)])
def test_a_run_on_several_nodes_is_not_ended_at_once_by_the_death_of_one(
    hosts: int, heeds: int, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would go on: so the agent that leads is told as by a second Ctrl-C."""
    monkeypatch.setattr(jobs, "ENDS_S", 60.0 if code else 2.0)
    paths = RunPaths(tmp_path)
    write_event(paths.events, EventKind.RUN_STARTED, 1, hosts=["n1", "n2"][:hosts])
    leads = subprocess.Popen([sys.executable, "-c", LEADS, str(paths.lock), str(heeds)])
    try:
        wait_until(lambda: scheduler.find_local_process(paths) is not None)
        if code is None:
            with pytest.raises(RunError, match="did not end it on all nodes within 2 s"):
                jobs.cancel_run(paths, now=True)
            return
        said = jobs.cancel_run(paths, now=True)
        assert ("ended the run on all nodes" if hosts > 1 else "was killed") in said
        assert leads.wait() == code
    finally:
        leads.kill()
        leads.wait()


def test_a_link_that_leads_out_of_a_run_is_not_written_to_by_who_cancels_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.launch.mkdir(parents=True)
    paths.cancelled.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="points outside"):
        jobs.cancel_run(paths, now=False)
    assert not (tmp_path / "elsewhere").exists()


def test_waiting_for_a_job_outlives_a_controller_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, silent = RunPaths(tmp_path), RunError("Slurm did not answer `scontrol` within 30 s")
    paths.launch.mkdir()
    paths.start_outcome("7-1").write_text("0 end 5 0\n")
    answers = [silent, slurm_job("7", "RUNNING"), silent, slurm_job("7", "COMPLETED")]

    def newest_job(of: RunPaths) -> Job:
        answer = answers.pop(0)
        if isinstance(answer, RunError):
            raise answer
        return answer

    monkeypatch.setattr(jobs, "newest_job", newest_job)
    monkeypatch.setattr(jobs, "ASK_S", 0.0)
    assert jobs.wait_for_end(paths, Config()) == 0
    assert answers == []


def test_slurm_is_not_asked_at_each_look_whether_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunPaths] = []
    monkeypatch.setattr(launched_run, "is_running", lambda paths: not asked.append(paths))
    goes_on = launched_run.RunningPoller(RunPaths(tmp_path))
    assert [goes_on() for _ in range(20)] == [True] * 20
    assert len(asked) == 1


def test_each_node_is_told_what_to_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "my run")
    words = job_supervisor.train_command(paths, LAUNCHED, 1, "file:///meet")
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--rendezvous") + 1] == "file:///meet"
    for one in SCHEDULERS.values():
        assert one.find_rendezvous(paths, None) == f"file://{tmp_path}/my%20run/launch/meet"
    assert "--spares" not in words and "--ranks" not in words
    alone = job_supervisor.train_command(paths, LaunchSpec("background", 1, 0, 3, False, 1, 0.0, "here"), 0, "")
    assert alone[-2:] == ["--ranks", "3"] and "--nodes" not in alone


def test_the_word_of_a_lower_node_and_of_success_stays(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.launch.mkdir()
    paths.node_log(0).parent.mkdir()
    for node, code, expected in (
        (1, ExitCode.FAILED, "1 again 0 1\n"),  # it may have failed alone
        (2, ExitCode.DONE, "0 end 0 2\n"),
        (1, ExitCode.FAILED, "0 end 0 2\n"),
        (0, ExitCode.DONE, "0 end 0 0\n"),
        (2, ExitCode.DONE, "0 end 0 0\n"),
    ):
        job_supervisor._record_outcome(paths, LAUNCHED, node, "7-1", int(code))
        assert paths.start_outcome("7-1").read_text() == expected


@pytest.mark.parametrize("links", [True, False])
def test_the_word_of_a_lower_node_stays_that_ends_in_the_same_moment(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 says how it ended while node 1 is about to."""
    paths = RunPaths(tmp_path)
    paths.launch.mkdir()
    recorded = job_supervisor.outcome.checkpoint_step_in_events

    def slowly(paths: RunPaths) -> int:
        monkeypatch.setattr(job_supervisor.outcome, "checkpoint_step_in_events", recorded)
        job_supervisor._record_outcome(paths, LAUNCHED, 0, "7-1", int(ExitCode.DONE))
        return recorded(paths)

    def none(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:  # nor is anything lost on a file system without them
        monkeypatch.setattr(job_supervisor.os, "link", none)
        job_supervisor._record_outcome(paths, LAUNCHED, 1, "7-1", int(ExitCode.DONE))
        assert paths.start_outcome("7-1").read_text() == "0 end 0 1\n"
    else:
        monkeypatch.setattr(job_supervisor.outcome, "checkpoint_step_in_events", slowly)
        job_supervisor._record_outcome(paths, LAUNCHED, 1, "7-1", int(ExitCode.DONE))
        assert paths.start_outcome("7-1").read_text() == "0 end 0 0\n"
    assert [path.name for path in paths.launch.iterdir()] == ["over-7-1"]


def test_slurm_is_asked_again_to_end_a_job_whose_script_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, step, asked = RunPaths(tmp_path), SlurmStep("7", "0", 1, 2, 1, ("127.0.0.1", free_port())), list[str]()
    paths.launch.mkdir()
    paths.node_log(1).parent.mkdir()

    def requeue(job: str) -> None:
        asked.append(job)
        if len(asked) == 1:
            raise RunError("Slurm's scontrol failed: Unable to contact slurm controller")

    for name, value in (("NODE0_OUTCOME_WAIT_S", 0.0), ("AGAIN_S", 0.0)):
        monkeypatch.setattr(job_supervisor, name, value)
    monkeypatch.setattr(slurm, "requeue", requeue)
    monkeypatch.setattr(slurm, "query_job", lambda job: slurm_job(job, "RUNNING"))
    stop = job_supervisor._StopHandler()
    stop.asked = signal.SIGTERM  # which has ended the training
    job_supervisor._end_orphaned_job(paths, slurm, step, int(ExitCode.STOPPED), RESTART, stop)
    assert asked == ["7", "7"]
    assert ("--- job 7 could not be ended: Slurm's scontrol failed: Unable to contact") in paths.node_log(1).read_text()


@pytest.mark.parametrize(
    ("asked", "grows", "ended"), [(True, False, True), (True, True, False), (False, True, False), (False, False, None)]
)
def test_who_has_failed_and_is_asked_to_stop_waits_no_longer_for_others_who_would_say_so(
    asked: bool, grows: bool, ended: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's script is gone, and one node has failed: the job is ended where nobody else trains. A signal that had
    come before it failed says nothing."""
    paths, step, calls = RunPaths(tmp_path), SlurmStep("7", "0", 1, 2, 1, ("127.0.0.1", free_port())), list[str]()
    for name, value in (
        ("NODE0_OUTCOME_WAIT_S", 0.0),
        ("ASKED_S", 0.5),
        ("GROWN_S", 0.05),
        ("QUIET_S", 60.0 if asked else 1.5),
    ):
        monkeypatch.setattr(job_supervisor, name, value)
    monkeypatch.setattr(slurm, "cancel", calls.append)
    monkeypatch.setattr(slurm, "query_job", lambda job: slurm_job(job, "RUNNING"))
    stop = job_supervisor._StopHandler()
    stop.asked = signal.SIGTERM
    if asked:
        threading.Timer(0.3, stop, (signal.SIGTERM, None)).start()
    if grows:
        threading.Timer(0.5, lambda: paths.events.write_text("{}\n")).start()
    began = time.monotonic()
    job_supervisor._end_orphaned_job(paths, slurm, step, int(ExitCode.FAILED), END, stop)
    assert calls == ([] if ended is False else ["7"])
    assert (time.monotonic() - began >= 1.5) is (ended is None)


@pytest.mark.parametrize(
    ("happens", "calls"),
    [
        ("PENDING", ["requeue 7"]),  # another node was first
        ("COMPLETING", ["requeue 7"]),
        ("CANCELLED", ["requeue 7"]),
        ("forgotten", ["requeue 7"]),
        ("at once PENDING", []),
        ("at once COMPLETING", []),  # as by `scancel`, after which `scontrol requeue` would have it come back
        ("at once CANCELLED", []),
        ("a signal", ["requeue 7"]),
        ("cancelled", ["requeue 7", "cancel 7"]),
        ("cancelled, a signal", ["requeue 7", "cancel 7"]),
    ],
)
def test_slurm_is_not_asked_on_and_on_for_what_it_does_already(
    happens: str, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, step, asked, stop = (
        RunPaths(tmp_path),
        SlurmStep("7", "0", 1, 2, 1),
        list[str](),
        job_supervisor._StopHandler(),
    )
    paths.launch.mkdir()
    paths.node_log(1).parent.mkdir()

    def requeue(job: str) -> None:
        assert not asked, "it is asked again"
        asked.append(f"requeue {job}")
        raise RunError("Slurm's scontrol failed: Job is pending execution")

    def job_of(job: str) -> Job | None:
        if "at once" in happens:
            return slurm_job(job, happens.split()[-1])
        if not asked:
            return slurm_job(job, "RUNNING")
        if "cancelled" in happens:
            paths.cancelled.touch()
        if "a signal" in happens:
            threading.Timer(0.2, stop, (signal.SIGTERM, None)).start()
        return None if happens == "forgotten" else slurm_job(job, happens if happens.isupper() else "RUNNING")

    monkeypatch.setattr(job_supervisor, "AGAIN_S", 60.0 if "a signal" in happens else 0.0)
    monkeypatch.setattr(slurm, "requeue", requeue)
    monkeypatch.setattr(slurm, "cancel", lambda job: asked.append(f"cancel {job}"))
    monkeypatch.setattr(slurm, "query_job", job_of)
    began = time.monotonic()
    job_supervisor._end_job(paths, slurm, step, RESTART, stop)
    assert asked == calls
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (["RUNNING", "COMPLETED"], "job 7 had already ended as COMPLETED"),
        (["RUNNING", "COMPLETING", "FAILED"], "job 7 had already ended as FAILED"),
        (["RUNNING"], "job 7 was asked to stop: it finishes the step, saves and exits"),
    ],
)
def test_of_a_job_that_was_over_before_it_could_be_cancelled_that_is_said(
    states: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(states)
    heard = len(states) == 1

    def refuse(job: str) -> None:
        if not heard:
            raise RunError("Slurm's scancel failed: Job/step already completing or completed")

    monkeypatch.setattr(jobs, "newest_job", lambda paths: slurm_job("7", left.pop(0) if len(left) > 1 else left[0]))
    monkeypatch.setattr(slurm, "stop", refuse)
    monkeypatch.setattr(slurm, "cancel", refuse)
    assert jobs.cancel_run(RunPaths(tmp_path), now=False) == said


def test_who_looks_whether_a_run_goes_on_is_in_nobodys_way(tmp_path: Path) -> None:
    """`phalanx launch --local` looks every 20 ms whether the process that it has started holds the run."""
    paths = RunPaths(tmp_path)
    paths.launch.mkdir()
    for lock, held in ((paths.job_supervisor, scheduler.hold_lock), (paths.lock, run_folder.hold_run_folder)):
        looks = os.open(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(looks, fcntl.LOCK_SH)
        threading.Timer(0.1, os.close, [looks]).start()
        with held(paths):
            assert scheduler.find_lock_holder(lock) == (os.getpid(), platform.node())
            with pytest.raises(RunError, match=f"process {os.getpid()}"), held(paths):
                pass


def test_a_lock_names_its_holder_while_it_is_held(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.launch.mkdir()
    assert scheduler.find_lock_holder(paths.job_supervisor) is None
    with scheduler.hold_lock(paths):
        assert scheduler.find_lock_holder(paths.job_supervisor) == (os.getpid(), platform.node())
    assert scheduler.find_lock_holder(paths.job_supervisor) is None


def test_the_end_of_a_start_that_another_launch_forgets_is_passed_over(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.launch.mkdir(parents=True)
    (paths.launch / "over-1.json").symlink_to(tmp_path / "gone")  # seen, and not there any more
    assert start_outcomes.read_start_outcomes(paths) == []
