"""The benchmark of recovery: what is drawn, what is asked of figures, and what it can read of a run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recovery
from benchmarks.started import Run, Tail
from phalanx.core.run_paths import RunPaths
from phalanx.recovery import inventory, shared_memory, state_file
from phalanx.recovery.state_file import StateFileOwner


def test_faults_by_chance_are_the_same_for_all_and_come_as_often_as_they_should() -> None:
    trace = recovery.times_of(15.0, 60_000.0, seed=3)
    assert trace == recovery.times_of(15.0, 60_000.0, seed=3) != recovery.times_of(15.0, 60_000.0, seed=4)
    assert trace == sorted(trace) and trace[-1] < 60_000
    assert len(trace) == pytest.approx(4000, rel=0.1)
    assert recovery.times_of(15.0, 30.0, seed=3) == [each for each in trace if each < 30]


def test_the_part_of_the_steps_is_that_of_a_run_left_alone_whose_steps_last_as_long() -> None:
    steady = [(0.5 * number, 10 + number) for number in range(41)]
    assert recovery.part_of(steady, [], 20.0) == pytest.approx(1.0)
    # Two faults cost two seconds each: the one comes within a step, the other at once behind the first step after it.
    late = [(at + (2.0 if at > 5.2 else 0.0) + (2.0 if at > 5.6 else 0.0), step) for at, step in steady if at <= 16.0]
    assert recovery.part_of(late, [5.2, 7.6], 20.0) == pytest.approx(0.8)
    # Steps of one replica of two last half as long. They count; what a step takes is not theirs to say.
    ends = [*range(11), *(10.5 + 0.5 * number for number in range(10)), 18.0, *range(19, 22)]
    mixed = [(float(at), number) for number, at in enumerate(ends)]
    alone = set(range(11, 21))
    assert recovery.part_of(mixed, [], 21.0, alone) == pytest.approx(24 / 21)
    assert recovery.part_of(mixed, [], 21.0) != pytest.approx(24 / 21)
    with pytest.raises(AssertionError, match="left alone"):
        recovery.part_of(steady, [], 20.0, set(range(11, 51)))
    with pytest.raises(AssertionError, match="left alone"):
        recovery.part_of(steady, [moment + 0.1 for moment, _ in steady], 20.0)


def row(kind: str, **more: Any) -> dict[str, Any]:
    told = {"after": kind, "on": "nodes", "dead, s": 2.0, "asked, s": recovery.asked(kind, 0.5), "steps lost": 0}
    return told | {"fenced, s": 0.4 if kind == recovery.FREEZE else None} | more


@pytest.mark.parametrize(
    ("bad", "loaded", "which"),
    [
        (row("power-loss"), 1.0, None),
        (row("crash"), 1.0, "seconds dead after crash"),  # which is seen at once
        (row("crash"), 3.0, None),
        (row("freeze"), 1.0, None),
        (row("freeze", **{"fenced, s": 1.2}), 1.0, "thawed"),
        (row("leader", **{"steps lost": 1}), 1.0, "steps lost"),
        (row("kill", **{"dead, s": 9.0}), 1.0, None),
        ({"fault": "kill", "on": "local", "every, s": 60.0, "of an undisturbed run's": 0.97, "asked": 0.98}, 1.0, "60"),
    ],
)
def test_what_is_asked(bad: dict[str, Any], loaded: float, which: str | None) -> None:
    failed = [check.name for check in recovery.checks_of([bad], loaded) if not check.holds]
    assert len(failed) == (which is not None), failed
    assert which is None or which in failed[0]


def test_what_all_ranks_hold_is_read_from_the_memories_of_nodes(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.events.write_text('{"kind": "run_started"}\n')
    run = Run(paths, nodes=2, memory=lambda node: tmp_path / "shm")
    assert run.committed() == run.replicated() == 0
    (tmp_path / "shm").mkdir()
    known, index = state_file.compute_run_id(paths.events), {"tensors": [], "pieces": []}
    for node in range(2):
        with shared_memory.hold_folder(paths, node, tmp_path / "shm") as memory:
            folder = memory.folder
        own = state_file.create_state_file(folder, StateFileOwner(1, node, 2, known, node, 2), index, 16)
        other = state_file.create_state_file(
            folder / inventory.REPLICAS, StateFileOwner(1, 1 - node, 2, known, 1 - node, 2), index, 16
        )
        for slot, step in enumerate((7, 8 + node)):
            own.commit(slot, step, b"{}")
        other.commit(0, 7, b"{}")
        own.invalidate(1 - node)  # 8 is on no rank but one
    assert (run.committed(), run.replicated()) == (0, 7)
    own.commit(0, 7, b"{}")
    assert run.committed() == 7
    first = state_file.StateFile(inventory.list_state_files(run.folders()[0])[0], writable=True)
    first.commit(1, 9, b"{}")
    assert run.committed() == 9


def test_each_line_is_read_once_and_when_it_is_whole(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "events.jsonl")
    assert tail.read() == []
    with open(tail.path, "w") as file:
        file.write(json.dumps({"a": 1}) + '\n{"torn\n{"a": ')
        file.flush()
        assert tail.read() == [{"a": 1}]
        file.write("2}\n")
    assert tail.read() == [{"a": 1}, {"a": 2}]


def test_what_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["recovery.py", "--mtbf", "15", "--on", "slurm"])
    with pytest.raises(SystemExit, match="2"):
        recovery.main()
    assert "--mtbf is for --on local and --on nodes" in capsys.readouterr().err
