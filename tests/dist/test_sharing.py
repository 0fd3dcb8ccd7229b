"""What an attempt begins with: what is recorded, else what the checkpoint says, else what the devices are known for."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from phalanx.comm.mesh import join
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.json_lines import append_line
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.engine.interface import DeviceStepOutcome
from phalanx.layout.balance import Division, Speed, parse_division
from phalanx.trainer.metrics import MfuCalculator as Flops
from phalanx.trainer.metrics import StepRecorder
from phalanx.workload.work_split import RecordedDivisions, WorkSplit, read_divisions
from tests.helpers import run_ranks

FIRST = {"kind": EventKind.WORK_SPLIT, "step": 1, "shares": [3, 1], "parts": 1}
LATER = {"kind": EventKind.WORK_REBALANCED, "step": 6, "shares": [2, 2], "parts": 2}
OF_THREE = {"kind": EventKind.WORK_SPLIT, "step": 4, "shares": [2, 1, 1], "parts": 1}
MOVED = {"kind": EventKind.DEVICES_CHANGED, "reason": "rank 1 was on another"}
OF_OTHERS = [FIRST | {"shares": [1, 3]}, LATER, MOVED]
SINCE = [{"kind": EventKind.WORK_SPLIT, "step": 4, "shares": [3, 1], "parts": 1}, LATER]
SAVED = {"shares": [0, 4], "parts": 1}

# name: (balance.batch, events, last recorded step, step of the checkpoint, its division, limits)
CASES: dict[str, tuple[Any, list[dict[str, Any]], int, int, dict[str, Any] | None, list[int]]] = {
    "fresh": ("auto", [], 0, 0, None, [4, 4]),
    "recorded": ("auto", [FIRST, LATER], 7, 3, SAVED, [4, 4]),
    "no checkpoint yet": ("auto", [FIRST, LATER], 7, 0, None, [4, 4]),
    "of another number of ranks": ("auto", [FIRST, OF_THREE], 7, 3, SAVED, [4, 4]),
    "taken back": ("auto", [FIRST, LATER, OF_THREE, FIRST | {"step": 4}], 7, 3, SAVED, [4, 4]),
    "no memory for what was": ("auto", [FIRST, LATER], 7, 3, SAVED, [2, 4]),
    "no memory for that either": ("auto", [FIRST, LATER], 7, 3, SAVED, [2, 2]),
    "damaged": ("auto", [FIRST | {"shares": "3+1"}, LATER | {"parts": None}], 7, 3, {"shares": 3}, [4, 4]),
    "other devices": ("auto", OF_OTHERS, 7, 3, SAVED, [4, 4]),
    "other devices, once more": ("auto", [*OF_OTHERS, *SINCE], 7, 3, SAVED, [4, 4]),
    "other devices, and no memory": ("auto", [*OF_OTHERS, *SINCE], 7, 3, SAVED, [2, 4]),
    "other devices, no memory later": ("auto", [*OF_OTHERS, *SINCE], 7, 4, SAVED, [2, 4]),
    "asked for otherwise": ("even", [FIRST, LATER], 7, 3, SAVED, [4, 4]),
    "as it was": ("even", [FIRST | {"shares": [2, 2]}], 7, 3, SAVED, [4, 4]),
    "measured once": ("measured-once", [LATER], 7, 3, SAVED, [4, 4]),
}


def begun(placement: Placement, folder: str) -> dict[str, Any]:
    """Shares of the next six steps, and what was said, in each case; ranks seem alike in all of these steps."""
    found: dict[str, Any] = {}
    with join(placement, 30) as mesh:
        for name, (work, events, last, step, header, most) in CASES.items():
            paths = RunPaths(Path(folder) / name)
            if mesh.rank == 0:
                paths.root.mkdir()
                for event in events:
                    append_line(paths.events, event)
                append_line(paths.metrics, {"step": last})
            said: list[Any] = []
            speeds = [Speed(1.0, most=most[0]), Speed(3.0, most=most[1])]
            sharing = WorkSplit(work, 4, speeds, mesh)
            say = lambda kind, details, said=said: said.append([kind, details["step"], details["shares"]])  # noqa: E731
            sharing.begin(step, header, paths, JsonGroup(mesh.checkpoint), say)
            walked = []
            for number in range(step + 1, step + 7):
                walked.append([*sharing.division.shares, sharing.division.parts])
                sharing.exchange(number, 0, float(speeds[mesh.rank].seconds(sharing.division.shares[mesh.rank], 1)))
                sharing.settle()
            found[name] = [walked, said]
    return found


def test_what_an_attempt_begins_with() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(begun, 2, folder=folder)
        paths = RunPaths(Path(folder) / "other devices, once more")
        assert read_divisions(paths).last_step == 7
        append_line(paths.metrics, {"step": 30, "attempt": 1})
        append_line(paths.events, MOVED | {"attempt": 2})
        assert read_divisions(paths) == RecordedDivisions([], 0, True)  # step 30 was not walked with these
        assert read_divisions(RunPaths(Path(folder) / "taken back")).divisions[-1][0] == 4
    assert {name: walked for name, (walked, _) in first.items()} == {
        name: walked for name, (walked, _) in second.items()
    }
    known, saved, two, even = [3, 1, 1], [0, 4, 1], [2, 2, 2], [2, 2, 1]
    # Where nothing is repeated the ranks are found to be as they are known to be: 3, 1.
    assert first["fresh"] == [[known] * 6, [["work_split", 1, [3, 1]]]]
    walked, said = first["recorded"]
    assert walked[:4] == [known, known, two, two]  # steps 4 to 7: as recorded
    assert said[:1] != [["work_split", 4, [3, 1]]]
    assert first["no checkpoint yet"][0] == [known] * 5 + [two]
    assert first["no checkpoint yet"][1] == []
    for name in ("of another number of ranks", "no memory for what was"):
        walked, said = first[name]
        assert walked[0] == saved
        assert said[0] == ["work_split", 4, [0, 4]]
    assert first["taken back"] == [[known] * 6, []]
    assert first["no memory for that either"][0][0] == even  # in two micro-batches it would be as slow
    assert first["damaged"] == [[known] * 6, [["work_split", 4, [3, 1]]]]
    # What was recorded of other devices is not repeated, nor what they saved; but what was decided since is.
    assert first["other devices"] == [[known] * 6, [["work_split", 4, [3, 1]]]]
    walked, said = first["other devices, once more"]
    assert walked[:4] == [known, known, two, two]
    assert said[:1] != [["work_split", 4, [3, 1]]]
    assert first["other devices, and no memory"][0][0] == even
    assert first["other devices, no memory later"][0][0] == saved
    assert first["asked for otherwise"] == [[even] * 6, [["work_split", 4, [2, 2]]]]
    assert first["as it was"] == [[even] * 6, []]
    assert first["measured once"] == [[known] * 6, [["work_split", 4, [3, 1]]]]


# name: (whether all run as many, what the run folder says of steps 1 and 3)
OWN: dict[str, tuple[bool, list[dict[str, Any]]]] = {
    "fresh": (False, []),
    "recorded": (False, [{"step": 1, "shares": [4, 0], "parts": [4, 1]}, {"step": 3, "shares": [2, 2], "parts": 2}]),
    "recorded of lockstep": (False, [{"step": 1, "shares": [3, 1], "parts": 3}]),
    "in lockstep": (True, [{"step": 1, "shares": [3, 1], "parts": [3, 1]}]),
}


def own_numbers(placement: Placement, folder: str) -> dict[str, Any]:
    """Shares and micro-batches of each rank in steps 2 to 6, where only one sequence fits at a time."""
    found: dict[str, Any] = {}
    with join(placement, 30) as mesh:
        for name, (lockstep, events) in OWN.items():
            paths = RunPaths(Path(folder) / name)
            if mesh.rank == 0:
                paths.root.mkdir()
                for event in events:
                    append_line(paths.events, {"kind": EventKind.WORK_SPLIT} | event)
                append_line(paths.metrics, {"step": 4 if events else 1})
            speeds = [Speed(1.0, most=1), Speed(3.0, most=1)]
            sharing = WorkSplit("auto", 4, speeds, mesh, lockstep=lockstep)
            sharing.begin(1, None, paths, JsonGroup(mesh.checkpoint), lambda kind, details: None)
            walked = []
            for step in range(2, 7):
                now = sharing.division
                walked.append([now.shares, [now.micro_batches_of(rank) for rank in range(2)]])
                assert parse_division(sharing.to_header()) == now
                busy = speeds[mesh.rank].seconds(now.shares[mesh.rank], now.micro_batches_of(mesh.rank))
                sharing.exchange(step, 0, busy)
                sharing.settle()
            found[name] = [walked, sharing.compute_copy_seconds()]
    return found


def test_ranks_run_numbers_of_their_own_and_walk_them_again() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(own_numbers, 2, folder=folder)
    assert {name: walked for name, (walked, _) in first.items()} == {
        name: walked for name, (walked, _) in second.items()
    }
    known = [[3, 1], [3, 1]]
    assert first["fresh"][0] == [known] * 5
    assert first["fresh"][1] == [2.0, 6.0]  # of two sequences, one at a time
    assert first["recorded"][0][:3] == [[[4, 0], [4, 1]], [[2, 2], [2, 2]], [[2, 2], [2, 2]]]
    # What was walked in lockstep is walked again so, and then left: a rank without a sequence need not run any.
    walked = first["recorded of lockstep"][0]
    assert walked[:3] == [[[3, 1], [3, 3]]] * 3
    assert walked[-1] == known
    # Numbers of their own are nothing for ranks in lockstep.
    assert first["in lockstep"][0] == [[[2, 2], [2, 2]]] * 5


def unlike_clocks(placement: Placement) -> dict[str, Any]:
    """Rank 0's clock tells of the step before, as an accelerator's does, and rank 1's of this one. Their speeds are as
    they are known, and the division changes at step 6."""
    late = 1 - placement.rank
    with join(placement, 30) as mesh:
        sharing = WorkSplit("auto", 40, [Speed(1.0), Speed(3.0)], mesh)
        known, told = sharing.division, []
        walked: dict[int, Division] = {}
        for step in range(1, 13):
            if step == 6:
                sharing.division = Division((20, 20), 1)
            walked[step] = sharing.division
            of = walked.get(step - late)
            share = of.shares[mesh.rank] if of is not None else 0
            busy = share * (1.0, 3.0)[mesh.rank] * step if of is not None else float("nan")
            sharing.exchange(step, late, busy / step)
            told.append(sharing.describe_step(step - 1)[1])
            sharing.settle()
        return {"known": list(known.shares), "last": list(sharing.division.shares), "busy": told}


def test_a_clock_that_is_late_and_one_that_is_not_speak_of_the_same_step() -> None:
    first, _ = run_ranks(unlike_clocks, 2)
    assert first["known"] == [30, 10]
    assert first["busy"][:4] == [None, [30.0, 30.0], [30.0, 30.0], [30.0, 30.0]]
    assert first["busy"][6] == [20.0, 60.0]  # of step 6, as told in step 7
    assert first["last"] == [30, 10]


def counted(placement: Placement) -> list[int]:
    """Collectives of each of three steps on the group for a few bytes, without the engine's."""
    calls = []
    with join(placement, 30) as mesh:
        sharing = WorkSplit("auto", 4, [Speed(1.0)] * 2, mesh)
        recorder = StepRecorder(mesh, Flops(1, 1, None), 1, 0, 8, sharing)
        for step in range(1, 4):
            before = mesh.bookkeeping.take().calls
            assert before == 0
            sharing.exchange(step, 0, 1.0, recorder.rank_values())
            record = recorder.flush(sharing.gather_rows())
            assert (record is None) == (step == 1)
            if record is not None:
                assert record.loss == 1.5  # (10 + 20) / 20
                assert record.busy_s == ([1.0, 1.0] if mesh.rank == 0 else None)
            sharing.announce(asked=False)
            sharing.settle()
            calls.append(mesh.bookkeeping.calls)
            outcome = DeviceStepOutcome(torch.tensor(1.0), torch.tensor(0.0), 20)
            recorder.add_step(step, torch.tensor(10.0 * (1 + mesh.rank)), outcome, 1e-3, 0.0)
    return calls


def test_a_step_takes_two_small_collectives() -> None:
    """What each has worked and what its record says travel together; the answer and a request to stop do, too."""
    assert run_ranks(counted, 2) == [[2, 2, 2]] * 2
