"""torchft in the benchmark of recovery: what is read of a run of it, and what is asked; all of it where it is there."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recovery, torchft_peer
from benchmarks.torchft_peer import TorchFt, lines_of
from phalanx.core.run_paths import RunPaths
from tests.helpers import ROOT


def line(step: int, participants: int, time: float, step_s: float | None = 0.5, loss: float = 8.0) -> str:
    told = {"step": step, "participants": participants, "loss": loss, "time": time, "step_s": step_s}
    return json.dumps(told) + "\n"


def test_replicas_that_are_lost_and_come_back_are_read_from_their_lines(tmp_path: Path) -> None:
    run = TorchFt(RunPaths(tmp_path), replicas=2)
    assert (run.recorded(), run.committed(), run.whole(), run.losses()) == ((0, 0), 0, False, {})
    with open(lines_of(tmp_path, 0), "w") as first, open(lines_of(tmp_path, 1), "w") as second:

        def write(which: Any, *texts: str) -> None:
            which.write("".join(texts))
            which.flush()

        write(first, line(1, 2, 10.0, None, 9.0), line(2, 2, 10.5, 0.5, 7.0))
        write(second, line(1, 2, 10.0, None, 8.0), line(2, 2, 10.5, 0.7, 6.5))
        assert (run.recorded(), run.whole(), run.step_s()) == ((0, 2), True, pytest.approx(0.6))
        assert run.losses() == {1: 8.5, 2: 6.75}

        write(first, line(3, 1, 11.5, 1.0), line(4, 1, 11.8, 0.3))
        assert (run.committed(), run.whole()) == (4, False)
        assert run.step_s() == pytest.approx(0.6), "steps of a part of the replicas are no measure of a step"

        write(first, line(5, 1, 12.1, 0.3), line(6, 2, 12.7, 0.6))
        write(second, line(5, 1, 12.1, None), line(6, 2, 12.7, 0.6))  # what it took part in first was not its own
        assert (run.committed(), run.whole()) == (6, True)
    assert run.losses() == {1: 8.5, 2: 6.75, 6: 8.0}
    assert run.partial() == {3, 4, 5}
    assert run.filled(0.0, 20.0) == pytest.approx((3 * 1.0 + 3 * 0.5) / 6)
    assert run.filled(11.0, 12.5) == 0.5
    assert run.filled(20.0, 30.0) == 0.0


def test_a_step_that_is_walked_again_counts_as_it_was_walked_last(tmp_path: Path) -> None:
    run = TorchFt(RunPaths(tmp_path), replicas=2)
    lines_of(tmp_path, 0).write_text(line(7, 2, 10.0))
    lines_of(tmp_path, 1).write_text(line(7, 1, 15.0))  # all were lost, and this one was back first
    assert run.filled(0.0, 20.0) == 0.5


def local(system: str, dead: float, whole: float, differ: float | None = None) -> dict[str, Any]:
    return {
        "after kill -9 of one rank": system, "parameters": "10M", "dead, s": dead, "until whole, s": whole,
        "losses differ by": differ,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("torchft", "failing"),
    [
        (local("torchft", 0.3, 6.0, 1e-6), []),  # the others go on sooner, with a part of the batch
        (local("torchft", 0.3, 1.5, 1e-6), ["of torchft's, until a step has all of its batch"]),
        (local("torchft", 0.3, 6.0, 1e-2), ["relative difference of torchft's first losses"]),
    ],
)
def test_what_is_asked_beside_torchft(torchft: dict[str, Any], failing: list[str]) -> None:
    rows = [local("Phalanx", 0.4, 0.4), local("torchrun", 8.0, 8.0), torchft]
    assert [check.name for check in recovery.checks_of(rows, 1.0) if not check.holds] == failing


def test_faults_by_chance_are_compared_by_sequences_with_the_same_trace() -> None:
    def chance(system: str, part: float, every: float) -> dict[str, Any]:
        return {"steps committed by": system, "on": "local", "fault": "kill", "every, s": every,
                "of its sequences": part}  # fmt: skip

    rows = [chance("Phalanx", 0.9, 15.0), chance("torchft", 0.7, 15.0), chance("torchrun", 0.95, 15.0)]
    rows += [
        chance("Phalanx", 0.98, 60.0),
        chance("torchft", 0.97, 60.0),
        {"after": "crash", "on": "nodes", "steps lost": 0},
    ]
    found = {check.name: check.holds for check in recovery.checks_of(rows, 1.0)}
    assert found == {
        "of the sequences at a kill every 15 s on local, beside torchft": True,
        "of the sequences at a kill every 15 s on local, beside torchrun": False,
        "of the sequences at a kill every 60 s on local, beside torchft": True,
        "steps lost by crash on nodes": True,
    }


def test_where_it_is_missing_or_broken_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft_peer, "find_spec", lambda name: None)
    assert torchft_peer.why_not() == "torchft is not installed (pip install torchft==0.2.0)"
    monkeypatch.undo()
    (tmp_path / "torchft.py").write_text("raise ModuleNotFoundError(\"No module named 'opentelemetry'\")")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    missing = torchft_peer.why_not()
    assert missing == "torchft cannot be imported (ModuleNotFoundError: No module named 'opentelemetry')"


@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")
def test_a_replica_is_killed_and_comes_back(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/recovery.py", "--quick", "--on", "local", "--kinds", "kill", "--times", "1"]
    command += ["--loaded", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert (tmp_path / "found.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    [found] = [row for row in rows if row["after kill -9 of one rank"] == "torchft"]
    assert found["losses differ by"] < recovery.SAME_LOSSES
    assert found["until whole, s"] > found["dead, s"] > 0
