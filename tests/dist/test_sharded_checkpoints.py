"""Checkpoints of the sharded engine: saved by uneven ranks, they go on with any others, and come back."""

import shutil
from pathlib import Path
from typing import Any

from tests.helpers import some
from tests.numerics import runs
from tests.numerics.runs import Outcome, distance, farthest, walk

QUIET: dict[str, Any] = {"train__eval_sequences": 0}
UNEVEN: dict[str, Any] = {"balance__optimizer_state": [3, 0, 1, 2], "parallel__zero": 2}
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "released": (3, {"balance__optimizer_state": [1, 2, 0], "parallel__zero": 3}),
    "more": (5, {"parallel__zero": 1, "optim__double_buffer": True}),
    "fsdp2": (2, {"parallel__engine": "fsdp2"}),
}


def apart(found: Outcome, wanted: Outcome) -> float:
    kinds = ("param", "exp_avg", "exp_avg_sq")
    return max(
        farthest(found.losses, wanted.losses),
        farthest(found.norms, wanted.norms),
        *(distance(found.state, wanted.state, kind) for kind in kinds),
    )


def test_saved_by_uneven_ranks_and_taken_on_by_any(tokens: Path, tmp_path: Path) -> None:
    wanted = {steps: walk(1, tmp_path / f"alone-{steps}", tokens, train__steps=steps, **QUIET) for steps in (4, 6)}
    first = walk(4, tmp_path / "first", tokens, train__steps=2, **QUIET, **UNEVEN)
    assert len(first.losses) == 2
    for name in some(OTHERS, 1, 3):
        ranks, changes = OTHERS[name]
        shutil.copytree(tmp_path / "first", tmp_path / name)
        found = walk(ranks, tmp_path / name, tokens, train__steps=4, **QUIET, **changes)
        assert [event["step"] for event in runs.events(tmp_path / name, "resumed")] == [2]
        assert apart(found, wanted[4]) < 1e-9, name
    for name in some(("released", "fsdp2"), 0):
        back = walk(4, tmp_path / name, tokens, train__steps=6, **QUIET, **UNEVEN)
        assert [event["step"] for event in runs.events(tmp_path / name, "resumed")] == [2, 4]
        assert apart(back, wanted[6]) < 1e-9, name
