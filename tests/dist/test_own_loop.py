"""The example of a loop of one's own: the same curve on one rank and on several, also when one of them is slow."""

import time
from pathlib import Path

import pytest

from phalanx.core.placement import Placement
from tests.helpers import ROOT, run_ranks

EXAMPLE = ROOT / "examples" / "own_loop.py"


def curve(placement: Placement, slow: bool = False) -> list[float]:
    import importlib.util

    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    if slow and placement.rank == 1:
        quick = example.loss_sum

        def slowed(net: object, samples: list[object]) -> object:
            time.sleep(0.0005 * len(samples))
            return quick(net, samples)

        example.loss_sum = slowed
    shares: list[int] = []
    divide = example.Loader.batches

    def seen(self: object, step: int, division: object) -> object:
        shares.append(division.shares[-1])  # type: ignore[attr-defined]
        return divide(self, step, division)

    example.Loader.batches = seen
    losses: list[float] = example.train(placement)
    return [shares[-1], *losses]


def test_one_rank_and_several_walk_the_same_curve() -> None:
    ((_, *alone),) = run_ranks(curve, 1)
    assert alone[-1] < 0.5 * alone[0], "it does learn"
    for ranks, slow in ((2, False), (2, True), (3, False)):
        found = run_ranks(curve, ranks, slow=slow)
        for share, *losses in found:
            assert losses == pytest.approx(alone, rel=1e-9)
            if slow:
                assert share < 32, "the slow rank gets less than half"


def test_it_is_a_script(tmp_path: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss 0.")


def test_it_needs_about_eight_lines() -> None:
    marked = [line for line in EXAMPLE.read_text().splitlines() if "  # [" in line]
    assert [line.rpartition("# ")[2] for line in marked] == [f"[{number}]" for number in range(1, 9)]
