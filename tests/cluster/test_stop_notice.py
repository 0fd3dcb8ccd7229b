"""A machine that will soon be gone: the last step is on disk in time, the node leaves, and no bit differs."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.started import command_line
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.recovery import shared_memory
from phalanx.system.fork import fork
from tests.cluster.lives import RECIPE, STEPS, Life, curve, events, life, live, state, train
from tests.dist import command
from tests.helpers import ALL, run_ranks, wait_until

NOTICE_S = 30.0
QUICK = ("resilience.stop_notice_s=3",)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a recipe, and a run on one node that nothing happens to."""
    folder = command.write_place(tmp_path_factory.mktemp("notice"))
    (folder / "recipe.yaml").write_text(RECIPE.replace("eval_sequences: 4", "eval_sequences: 4, eval_every: 7"))
    assert alone(folder, "calm", life())[0] == 0
    return folder


def alone(folder: Path, run: str, what: Life, *overrides: str) -> list[Any]:
    """Exit code and output of a run on one node, whose memory is gone afterwards."""
    words = [["train", "recipe.yaml", *overrides, "--run-dir", run, "--ranks", "1"]]
    try:
        ((ended,),) = run_ranks(live, 1, folder=str(folder), run=run, commands=words, lives=[[what]], timeout_s=150)
        return list(ended)
    finally:
        forget_memory(RunPaths(folder / run))


def forget_memory(paths: RunPaths) -> None:
    """The machine is gone, and another one is started."""
    for node in range(3):
        if (folder := shared_memory.find_folder(paths, node)) is not None:
            shutil.rmtree(folder, ignore_errors=True)


def test_a_step_that_does_not_end_in_time_is_given_up_and_the_one_before_is_saved(place: Path) -> None:
    """The rank hangs in step 20, as in a long compilation; the newest checkpoint is that of step 18."""
    ended = alone(place, "late", life(end=18, number=signal.SIGTERM), *QUICK, "--inject", "hang:step=20")
    assert ended[0] == ExitCode.STOPPED, ended
    (stopped,) = events(place / "late", EventKind.STOPPED)
    assert stopped["step"] == 19
    assert not (place / "late" / "logs" / "attempt-003").exists()
    assert alone(place, "late", life())[0] == 0
    assert state(place / "late") == state(place / "calm")
    assert curve(place / "late") == curve(place / "calm")


def test_a_leader_whose_machine_will_be_gone_leaves_after_all_have_saved(place: Path) -> None:
    lives = [[life(end=10, number=signal.SIGPWR)], [life()], [life()]]
    ended = train(place, "leaves", lives, 2)
    assert [each[-1][0] for each in ended] == [ExitCode.UNHEALTHY, 0, 0], ended
    (leaving,) = events(place / "leaves", EventKind.NODE_LEAVING)
    assert leaving["node"] == 0
    assert events(place / "leaves", EventKind.CHECKPOINT_SAVED)
    assert not list(events(place / "leaves", EventKind.WORKER_DIED))
    assert [event["step"] for event in events(place / "leaves", EventKind.FINISHED)] == [STEPS]


def test_nodes_that_leave_while_nodes_meet_are_waited_for(place: Path) -> None:
    """First node 1, then node 0, with node 2 still to come: whoever stays waits for the one that comes instead."""
    lives = [
        [life(end="was lost.* joined", number=signal.SIGPWR), life()],
        [life(end="connected to node 0", number=signal.SIGPWR), life()],
        [life(begin="node-0")],
    ]
    ended = train(place, "meets", lives, 3, "train.steps=4")
    codes = [[each[0] for each in node] for node in ended]
    assert codes == [[ExitCode.UNHEALTHY, 0], [ExitCode.UNHEALTHY, 0], [0]], ended
    assert "node 0 was lost" in ended[1][1][1]


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def is_over(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def stop_at_random(placement: Placement, folder: str, run: str, seed: int, most_s: float) -> list[object]:
    """Start the run, ask it to stop at some moment of its life, and forget its memory; exit code, and seconds that it
    took to leave."""
    paths, moments = RunPaths(Path(folder) / run), random.Random(seed)

    def child() -> int:
        os.chdir(folder)
        arguments = ["train", "recipe.yaml", "--run-dir", run, "--ranks", "2"]
        return command_line(arguments, Path(folder) / f"{run}-{seed}.txt")

    pid, pidfd = fork(child)
    os.close(pidfd)
    if seed % 2:  # in steps, evaluations and saves; else from the start on
        before = size(paths.metrics)
        wait_until(lambda: size(paths.metrics) > before or is_over(pid), timeout_s=100)
        most_s = 1.0
    time.sleep(most_s * moments.random())
    asked = time.monotonic()
    try:
        os.kill(pid, moments.choice([signal.SIGTERM, signal.SIGPWR]))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return [code, time.monotonic() - asked]
    finally:
        forget_memory(paths)


@pytest.mark.skipif(not ALL, reason="it takes a minute: make test-all")
def test_runs_stopped_at_random_moments_save_and_resume_bitwise(place: Path) -> None:
    """60 moments, during start, evaluations and saves too; a run that is done is followed by another one."""
    arguments = ["train", "recipe.yaml", "--run-dir", "calm-2", "--ranks", "2"]
    assert command.phalanx(place, *arguments)[0] == 0
    wanted, stops, took, number = 60, 0, [0.0], 0
    done: list[str] = []
    for seed in range(10 * wanted):
        run = f"random-{number}"
        ((found),) = run_ranks(stop_at_random, 1, folder=str(place), run=run, seed=seed, most_s=6.0, timeout_s=120)
        code, seconds = found
        text = (place / f"{run}-{seed}.txt").read_text() if (place / f"{run}-{seed}.txt").exists() else ""
        if code == 0:
            done.append(run)
            number += 1
            continue
        stops += 1
        # Before the command has its handlers, the signal ends it, as any program; nothing of it has begun then.
        assert code == ExitCode.STOPPED or (code in (-signal.SIGTERM, -signal.SIGPWR) and not text), (code, text)
        took.append(float(seconds))
        if stops == wanted:
            break
    assert stops == wanted
    assert command.phalanx(place, "train", "recipe.yaml", "--run-dir", run, "--ranks", "2")[0] == 0
    for each in {*done, run}:
        assert state(place / each) == state(place / "calm-2"), each
        assert curve(place / each) == curve(place / "calm-2"), each
    assert max(took) < NOTICE_S
    median = sorted(took)[len(took) // 2]
    print(f"{stops} stops in {len(done) + 1} runs, left within {max(took):.1f} s (median {median:.1f})")
