"""`phalanx doctor --gpus` on the simulated accelerator: what works is ok, and a broken device is a line."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.placement import ExitCode, Placement
from phalanx.doctor import collective_checks, device_checks
from phalanx.system import accelerator
from tests.accelerator.device import needs_device, phalanx, run_on_device

pytestmark = needs_device


def doctor(folder: Path, *names: str, **how: Any) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit code, lines by check, and all that was printed."""
    only = [word for name in names for word in ("--only", name)]
    code, out, err = phalanx(folder, "doctor", "--gpus", *only, **how)
    assert "Traceback" not in out + err, out + err
    report = json.loads((folder / "phalanx-doctor.json").read_text())
    lines = {line["check"]: line for line in report["checks"]}
    for line in lines.values():
        assert f"{line['state']:7} {line['check']:27} " in out
    return code, lines, out + err


def test_two_devices_do_all_that_is_asked(tmp_path: Path) -> None:
    names = ("copies", "memory-limit", "collectives", "resume", "time-limit")
    code, lines, said = doctor(tmp_path, *names, order="threads", devices=2)
    assert code == ExitCode.DONE, said
    assert {name: lines[name]["state"] for name in names} == dict.fromkeys(names, "ok"), said
    assert "2 devices" in lines["copies"]["sentence"]
    assert lines[collective_checks.NAMES[collective_checks.THROUGH_HOST]]["state"] == "ok"
    assert "simccl" in lines["collectives"]["sentence"]
    assert lines["resume"]["value"] < 1e-5
    assert "from the checkpoint at step 4, then from memory" in lines["resume"]["sentence"]
    assert "identified and stopped" in lines["time-limit"]["sentence"]


def test_the_device_alone(tmp_path: Path) -> None:
    code, lines, said = doctor(tmp_path, "copies", "attention", "compile", "collectives", order="main_last")
    assert code == ExitCode.DONE, said
    assert [lines[name]["state"] for name in ("copies", "attention", "compile", "collectives")] == [
        "ok", "ok", "slow", "skipped",
    ]  # fmt: skip
    assert "does not work for sim:0" in lines["compile"]["sentence"]


@pytest.mark.parametrize(
    ("fail", "names"),
    [
        ("kernel:1", ["attention"]),
        ("pinned:2", ["copies"]),
        ("allocator:1", ["attention", "copies"]),
        ("nccl:2", ["collectives"]),
        ("cublas:1", ["compile", "one-rank"]),
    ],
)
def test_a_broken_device_is_a_line(tmp_path: Path, fail: str, names: list[str]) -> None:
    code, lines, said = doctor(tmp_path, *names, order="eager", devices=2, fail=fail)
    assert code == ExitCode.UNHEALTHY, said
    for name in names:
        assert lines[name]["state"] == "wrong", said
        assert "; " in lines[name]["sentence"]  # with a remedy
        assert lines[name]["log"]


def wrong_copies(placement: Placement) -> list[Any]:
    """What is said of copies that come late: an event behind them says nothing."""
    mark = accelerator.record_event

    class Early:
        def __init__(self, event: Any) -> None:
            self.event = event

        def synchronize(self) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return getattr(self.event, name)

    accelerator.record_event = lambda device: (
        Early(mark(device)) if calls.append(1) or len(calls) % 2 == 0 else mark(device)
    )
    calls: list[int] = []
    return [line.to_json() for line in device_checks.check_copies([placement.device])]


def test_copies_that_come_late_are_found() -> None:
    ((line,),) = run_on_device(wrong_copies, order="lazy")
    assert line["state"] == "wrong"
    assert "pinned memory and back" in line["sentence"]
