"""What an attempt begins with: what is recorded, else what the checkpoint says, else what the devices are known for."""

import tempfile
from pathlib import Path
from typing import Any

from phalanx.balance import Speed
from phalanx.comm.mesh import join
from phalanx.comm.objects import JsonGroup
from phalanx.records import Kind, Placement, RunPaths, append_line
from phalanx.train.sharing import Sharing, recorded
from tests.helpers import run_ranks

FIRST = {"kind": Kind.SHARED, "step": 1, "shares": [3, 1], "parts": 1}
LATER = {"kind": Kind.RESHARED, "step": 6, "shares": [2, 2], "parts": 2}
OF_THREE = {"kind": Kind.SHARED, "step": 4, "shares": [2, 1, 1], "parts": 1}
SAVED = {"shares": [0, 4], "parts": 1}

# name: (balance.work, events, last recorded step, step of the checkpoint, its division, limits)
CASES: dict[str, tuple[Any, list[dict[str, Any]], int, int, dict[str, Any] | None, list[int]]] = {
    "fresh": ("auto", [], 0, 0, None, [4, 4]),
    "recorded": ("auto", [FIRST, LATER], 7, 3, SAVED, [4, 4]),
    "no checkpoint yet": ("auto", [FIRST, LATER], 7, 0, None, [4, 4]),
    "of another number of ranks": ("auto", [FIRST, OF_THREE], 7, 3, SAVED, [4, 4]),
    "taken back": ("auto", [FIRST, LATER, OF_THREE, FIRST | {"step": 4}], 7, 3, SAVED, [4, 4]),
    "no memory for what was": ("auto", [FIRST, LATER], 7, 3, SAVED, [2, 4]),
    "no memory for that either": ("auto", [FIRST, LATER], 7, 3, SAVED, [2, 2]),
    "damaged": ("auto", [FIRST | {"shares": "3+1"}, LATER | {"parts": None}], 7, 3, {"shares": 3}, [4, 4]),
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
            sharing = Sharing(work, 4, speeds, mesh)
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
        assert recorded(RunPaths(Path(folder) / "taken back")).divisions[-1][0] == 4
    assert {name: walked for name, (walked, _) in first.items()} == {
        name: walked for name, (walked, _) in second.items()
    }
    known, saved, two, even = [3, 1, 1], [0, 4, 1], [2, 2, 2], [2, 2, 1]
    # Where nothing is repeated the ranks are found to be as they are known to be: 3, 1.
    assert first["fresh"] == [[known] * 6, [["shared", 1, [3, 1]]]]
    walked, said = first["recorded"]
    assert walked[:4] == [known, known, two, two]  # steps 4 to 7: as recorded
    assert said[:1] != [["shared", 4, [3, 1]]]
    assert first["no checkpoint yet"][0] == [known] * 5 + [two]
    assert first["no checkpoint yet"][1] == []
    for name in ("of another number of ranks", "no memory for what was"):
        walked, said = first[name]
        assert walked[0] == saved
        assert said[0] == ["shared", 4, [0, 4]]
    assert first["taken back"] == [[known] * 6, []]
    assert first["no memory for that either"][0][0] == even  # in two micro-batches it would be as slow
    assert first["damaged"] == [[known] * 6, [["shared", 4, [3, 1]]]]
    assert first["asked for otherwise"] == [[even] * 6, [["shared", 4, [2, 2]]]]
    assert first["as it was"] == [[even] * 6, []]
    assert first["measured once"] == [[known] * 6, [["shared", 4, [3, 1]]]]
