"""Runs in the pods of an Indexed Job, acted by namespaces; skipped, with the reason, where there are no rights."""

import os
import signal
from pathlib import Path

import pytest

from phalanx.core.json_lines import read_last_line
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.launch.start_outcomes import read_start_outcomes
from phalanx.provision.namespaces import find_obstacle
from tests.cluster import pods
from tests.cluster.lives import SLOW, SLOW_MODEL, events
from tests.cluster.warm_python import WarmPython
from tests.dist import command
from tests.helpers import ALL

STEPS = ("train.steps=400", "checkpoint.every=300", SLOW, "k8s.shared_memory_gib=1", "train.eval_every=1000")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    if (reason := find_obstacle(tmp_path)) is not None:
        pytest.skip(reason)
    (tmp_path / "slow.py").write_text(SLOW_MODEL)
    return command.write_place(tmp_path)


def step(place: Path) -> int:
    return int((read_last_line(RunPaths(place / "run").metrics) or {"step": 0})["step"])


@pytest.mark.skipif(not ALL, reason="a life in a pod more: make test-all")
def test_a_container_keeps_its_memory_through_a_crash(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training command is killed; the container's first process starts it again, which goes on from memory."""
    with pods.launched(place, monkeypatch, 1, *STEPS) as cluster:
        pod = cluster.create(0)
        pods.until(cluster, lambda: step(place) >= 20)
        kept = pod.shared()
        (trains,) = [pid for pid in pod.processes() if parent(pid) == pod.first()]
        os.kill(trains, signal.SIGKILL)
        pods.until(cluster, lambda: events(place / "run", EventKind.RESUMED))
        assert [name for name in pod.shared() if name in kept] == kept != []
        assert pod.wait() == ExitCode.DONE, pod.said()
    (resumed,) = events(place / "run", EventKind.RESUMED)
    assert resumed["memory"] and resumed["step"] >= 19  # of step 300 was the first checkpoint


def parent(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))


def test_a_deleted_pod_is_replaced_and_the_run_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, warm: WarmPython
) -> None:
    """First while nodes meet, then in training: each time the Job's controller makes another pod, which joins."""
    run, steps = place / "run", (f"k8s.python={warm.python}", "train.steps=1000000", *STEPS[1:])
    with pods.launched(place, monkeypatch, 2, *steps) as cluster:
        late = cluster.create(1)
        pods.until(cluster, lambda: "waiting" in late.said())
        assert cluster.follows(late.delete()) == "Count"
        pair = [cluster.create(0), cluster.create(1)]
        pods.until(cluster, lambda: step(place) >= 6)
        assert pair[1].shared()
        code = pair[1].delete()
        assert (code, cluster.follows(code)) == (ExitCode.UNHEALTHY, "Count")
        assert cluster.machines.first_process(pair[1].name) is None
        pair[1] = cluster.create(1)
        assert not pair[1].shared()
        pods.until(cluster, lambda: events(run, EventKind.NODE_JOINED))
        joined = step(place)
        pods.until(cluster, lambda: step(place) > joined + 2)
        os.kill(pair[0].first(), signal.SIGTERM)
        assert [pod.wait() for pod in pair] == [ExitCode.STOPPED] * 2, pair[0].said()
        over = read_start_outcomes(RunPaths(run))
        assert [each.code for each in over] == [ExitCode.STOPPED]
        # The run is done before a pod comes that replaces another one.
        (RunPaths(run).launch / "over-x").write_text(f"{int(ExitCode.DONE)} end 5 0\n")
        assert cluster.create(1).wait() == ExitCode.DONE
    assert [event["node"] for event in events(run, EventKind.NODE_LEAVING)] == [1]
    assert not events(run, EventKind.WORKER_DIED)
    assert all(event.get("memory") for event in events(run, EventKind.RESUMED))
