"""The benchmark of unlike devices in miniature: that it holds processes back, and what it prints and writes."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, mixed_devices
from benchmarks.mixed_devices import Size
from benchmarks.throttle import throttle
from phalanx.core.placement import Placement
from tests.helpers import ALL, run_ranks

TINY = Size(
    ratios=((2, 1),), turns=1, warm=1, steps=2, slow_steps=(2, 5, 5), global_batch=12, seq_len=16,
    model={"hidden": 16, "layers": 1, "heads": 2, "intermediate": 32, "vocab_size": 64},
    large={"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab_size": 64},
)  # fmt: skip


def miniature(placement: Placement) -> list[Any]:
    kind, rows, checks = mixed_devices.measure(TINY)
    return [kind, harness.result("mixed_devices", {}, rows, checks)]


@pytest.mark.skipif(not ALL, reason="half a minute of slowed-down cores: make test-all")
def test_compares_and_writes_the_agreed_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((kind, outcome),) = run_ranks(miniature, 1, timeout_s=240)
    assert kind in ("control groups v1", "control groups v2", "stop and go")
    harness.report(outcome, tmp_path / "result.json")
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["name"] == "mixed_devices"
    rows = written["rows"]
    assert [row["trained by"] for row in rows[:4]] == [
        "each alone, their sum", "each by itself, all at once", "an equal split", "Phalanx",
    ]  # fmt: skip
    assert [row["theory"] for row in rows[:4]] == [1.0, 1.0, pytest.approx(2 / 3), 1.0]
    assert all(row["tokens/s"] > 0 for row in rows[:7])
    assert [row["a device"] for row in rows[4:7]] == ["before", "slowed", "after"]
    assert rows[7]["devices"] == 2
    *speeds, same, share = written["checks"]
    assert [check["target"] for check in speeds] == [0.97, 0.985, 0.05, 0.95, 0.95]
    assert same["holds"], same  # whatever the shares: the same curve
    assert share["value"] > 0
    assert "DOES NOT HOLD" in capsys.readouterr().out or all(check["holds"] for check in written["checks"])


def spin(placement: Placement, by_groups: bool, cores: float) -> float:
    """Seconds of a core that a child under a limit uses in half a second."""
    with throttle(1, by_groups) as limits:
        limits.limit(0, cores)
        if (pid := os.fork()) == 0:
            limits.enter(0)
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                pass
            os._exit(0)
        usage = os.wait4(pid, 0)[2]
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("by_groups", [True, False])
def test_a_process_gets_no_more_than_its_part(by_groups: bool) -> None:
    if by_groups and os.geteuid() != 0:
        pytest.skip("control groups need root here")
    (used,) = run_ranks(spin, 1, by_groups=by_groups, cores=0.2)
    assert used < 0.2  # it is 0.1, and without a limit half a second; a busy machine gives it less


def test_quotas_are_in_proportion_and_leave_the_machine_some_room() -> None:
    for ratio in Size().ratios:
        parts = mixed_devices.quotas(ratio)
        assert sum(parts) <= 0.8 * len(os.sched_getaffinity(0)) + 1e-9
        assert max(parts) <= 0.9
        assert [part / parts[0] for part in parts] == pytest.approx([each / ratio[0] for each in ratio])
        assert 160 % sum(ratio) == 0
