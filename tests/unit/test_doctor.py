"""What `phalanx doctor` says of a machine, also of one where a check finds something wrong, crashes or hangs."""

import errno
import functools
import io
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from phalanx.core.errors import ConfigError, OutOfMemory
from phalanx.core.faults import Fault
from phalanx.core.placement import ExitCode, Placement
from phalanx.doctor import machine_checks, results
from phalanx.doctor.results import (
    NAMES,
    CheckResult,
    CheckState,
    DoctorCheck,
    parse_check_names,
    result_from_json,
    result_of_finding,
    verdict,
)
from phalanx.health.findings import DeviceInfo, Finding, Severity
from phalanx.launch import run
from phalanx.recovery import shared_memory
from phalanx.report.doctor import DoctorConsole
from phalanx.system.fork import fork_call
from tests.dist.command import call, phalanx, refused
from tests.helpers import run_ranks, some

CPU = DeviceInfo("cpu", "cpu", True, memory_bytes=2**34, cores=8)
GPU = DeviceInfo("dev:0", "Model 9", True, "GPU-1", 80 * 2**30)


def test_lines_at_a_terminal_and_in_a_file() -> None:
    for width, narrow in ((60, True), (120, False)):
        out = io.StringIO()
        shown = DoctorConsole(Console(file=out, force_terminal=True, width=width, color_system=None))
        shown.begin("compile")
        shown.line("wrong", "compile", "blocks are off; " + 20 * "mend it " + "now")
        waiting, *rest = out.getvalue().split("\r")[1:]
        assert waiting.startswith("\x1b[2K... compile")
        lines = [line.rstrip() for line in rest[-1].removeprefix("\x1b[2K").splitlines()]
        assert lines[0].startswith("wrong   compile") and (lines[0] == "wrong   compile") == narrow
        assert max(map(len, lines)) <= width and " ".join(lines).count("mend") == 20
    out = io.StringIO()
    DoctorConsole(Console(file=out, width=40)).line("ok", "compile", 30 * "long ")
    assert out.getvalue().count("\n") == 1
    assert "\x1b" not in out.getvalue()


# ------------------------------------------------------------------------------------------------------ carrying it out


def _raise() -> list[CheckResult]:
    raise ValueError("first\nsecond")


def _nested() -> list[CheckResult]:
    fork_call(_raise, timeout_s=60)
    return []


def _out_of_memory() -> list[CheckResult]:
    raise OutOfMemory("too little memory")


def _die(number: int) -> list[CheckResult]:
    os.write(2, b"last words\n")
    os.kill(os.getpid(), number)
    return []


def _leave() -> list[CheckResult]:
    os._exit(7)


def _sleep() -> list[CheckResult]:
    time.sleep(600)
    return []


def _well() -> list[CheckResult]:
    os.write(1, b"nobody has to read this\n")
    return [CheckResult("one", CheckState.OK, "all is well"), CheckResult("two", CheckState.SLOW, "slower; mend it")]


def carry(placement: Placement, folder: str) -> list[Any]:
    looks = [
        _raise,
        _nested,
        _out_of_memory,
        functools.partial(_die, signal.SIGSEGV),
        functools.partial(_die, signal.SIGABRT),
    ]
    checks = [DoctorCheck(f"c{number}", look, 60.0, "mend it") for number, look in enumerate([*looks, _leave, _well])]
    checks.append(DoctorCheck("slow", _sleep, 0.3, "mend it"))
    return [[line.to_json() for line in machine_checks.run_isolated(check, Path(folder))] for check in checks]


def test_whatever_happens_to_a_check_becomes_a_line(tmp_path: Path) -> None:
    *bad, well, hung = run_ranks(carry, 1, folder=str(tmp_path))[0]
    assert [line["sentence"] for (line,) in [*bad, hung]] == [
        "ValueError: first; mend it",
        "ValueError: first; mend it",
        "too little memory; mend it",
        "its process was killed by SIGSEGV; mend it",
        "its process was killed by SIGABRT; mend it",
        "its process ended with exit code 7; mend it",
        "no answer within 0.3 s, so it was stopped; mend it",
    ]
    assert {line["state"] for (line,) in [*bad, hung]} == {"wrong"}
    assert "Traceback" in bad[0][0]["log"] and bad[3][0]["log"].startswith("last words\n")
    assert [(line["check"], line["state"], line["log"]) for line in well] == [("one", "ok", ""), ("two", "slow", "")]
    assert result_from_json(well[1]).sentence == "slower; mend it"


def test_the_verdict_is_that_of_the_worst() -> None:
    lines = [result_of_finding(Finding("c", severity, "s")) for severity in Severity]
    assert [str(line.state) for line in lines] == ["skipped", "ok", "slow", "wrong", "wrong", "wrong"]
    assert [verdict(lines[:count]) for count in (1, 2, 3, 4)] == ["ok", "ok", "slow", "wrong"]
    assert verdict([CheckResult("c", CheckState.MISSING, "s")]) == "ok"


# ---------------------------------------------------------------------------------------------------------- the machine


def test_devices_in_words() -> None:
    (none,) = machine_checks.check_devices({"cpu": CPU}, [], False, None)
    assert (none.state, none.sentence) == ("ok", "there is no accelerator; ranks run on the CPU: 8 cores, 16.0 GiB")
    (asked,) = machine_checks.check_devices({"cpu": CPU}, [], True, None)
    assert asked.state == "wrong" and "a CPU-only build; install" in asked.sentence
    (known,) = machine_checks.check_devices({"cpu": CPU}, [], False, 8)
    assert known.state == "slow" and "although NVIDIA's driver finds 8" in known.sentence
    there, hidden = machine_checks.check_devices({"cpu": CPU, "dev:0": GPU}, ["dev:0"], True, 2)
    assert (there.state, hidden.state) == ("ok", "slow")
    assert there.sentence == "1 x Model 9 (dev:0), 80.0 GiB of memory each; computes in bf16"
    assert "2 GPUs but PyTorch only 1" in hidden.sentence


def test_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, state, speed in (("eth0", "up", "100000"), ("ib1", "down", "1"), ("lo", "unknown", ""), ("v0", "up", "")):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "operstate").write_text(state)
        (tmp_path / "net" / name / "speed").write_text(speed)
    (tmp_path / "cards" / "mlx5_0").mkdir(parents=True)
    loopback, found = machine_checks.check_network(tmp_path / "net", tmp_path / "cards")
    assert (loopback.state, found.state, found.sentence) == ("ok", "ok", "eth0 (100 Gbit/s), v0; RDMA: mlx5_0")
    assert (
        machine_checks.check_network(tmp_path, tmp_path / "none")[1].state == "ok"
    )  # a folder that is no interface has no state
    (tmp_path / "empty").mkdir()
    assert machine_checks.check_network(tmp_path / "empty", tmp_path / "none")[1].state == "missing"

    def filtered(*arguments: Any) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", filtered)
    assert "bring the interface lo up" in machine_checks.check_network()[0].sentence
    assert machine_checks.check_network()[0].state == "wrong"


def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [line.state for line in machine_checks.check_slurm()] == ["missing"]
    for answer, state in (("echo 'gpu*|up|4|infinite'", "ok"), ("echo away >&2; exit 1", "missing")):
        (tmp_path / "sinfo").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "sinfo").chmod(0o755)
        (line,) = machine_checks.check_slurm()
        assert line.state == state
        assert "gpu (4 nodes)" in line.sentence or "do not answer (Slurm's sinfo failed: away)" in line.sentence


# ----------------------------------------------------------------------------------------------------------- the report


def test_the_report_tells_no_names_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "gpu7.lab.example")
    monkeypatch.setenv("HOME", "/home/somebody")
    environment = {"HF_TOKEN": "hf_1", "DATA": "/mnt/private", "SHORT": "wrong", "HOME": "/home/somebody"}
    said = "gpu7 and gpu7.lab.example at 10.1.2.3, fe80:0:0:1::7, /home/somebody/x, hf_1, /mnt/private/a, wrong, gpu71"
    line = CheckResult("health", CheckState.WRONG, said, log=f"{said}; 127.0.0.1; 12:30:15")
    (check,) = results.build_report([line], 1.0, environment)["checks"]
    covered = "<HOST> and <HOST> at <ADDRESS>, <ADDRESS>, <HOME>/x, <$HF_TOKEN>, <$DATA>/a, wrong, gpu71"
    assert (check["sentence"], check["log"]) == (covered, f"{covered}; 127.0.0.1; 12:30:15")


# ---------------------------------------------------------------------------------------------------------- the command


def lines_of(folder: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((folder / "phalanx-doctor.json").read_text())
    return {line["check"]: line for line in report["checks"]}


def test_the_command(tmp_path: Path) -> None:
    quick = ["doctor", "--only", "python", "--only", "network"]
    shown, as_json = run_ranks(call, 1, folder=str(tmp_path), commands=[quick, [*quick, "--json", "--out", "new/r"]])[0]
    assert (shown[0], as_json[0]) == (0, 0), shown + as_json
    assert shown[1].startswith("ok      python ")
    assert "in 0 s" in shown[1] or "in 1 s" in shown[1] or " s. To be sent" in shown[1]
    report = json.loads(as_json[1])
    assert report == json.loads((tmp_path / "new" / "r").read_text())
    assert report["verdict"] == "ok" and report["count"]["ok"] >= 2
    assert [line["check"] for line in report["checks"]][:2] == ["python", "loopback"]
    assert "unknown check 'gpu'; choose from python, health" in refused(tmp_path, "doctor", "--only", "gpu")
    assert "another with --out" in refused(tmp_path, "doctor", "--out", ".")
    assert parse_check_names([*NAMES]) == NAMES
    with pytest.raises(ConfigError):
        parse_check_names([""])


def test_accelerators_that_are_insisted_on(tmp_path: Path) -> None:
    code, out, err = phalanx(tmp_path, "doctor", "--gpus", "--only", "zero-1")
    assert (code, err) == (ExitCode.UNHEALTHY, "")
    assert "PyTorch finds no accelerator, so ranks run on the CPU" in out
    assert list(lines_of(tmp_path)) == ["torch", "devices"]  # and nothing is tried


def broken(placement: Placement, folder: str, kind: str, names: list[str]) -> Any:
    """The command where something of the machine, or of Phalanx, is broken."""
    from phalanx.comm import collectives
    from phalanx.doctor import collective_checks, device_checks, run_checks
    from phalanx.system import accelerator

    train = run.train

    def flipped(*arguments: Any, planned: Any, **options: Any) -> int:
        bit = Fault("bit-flip", step=2, rank=1, bit=25)
        return train(*arguments, planned=[*planned, bit] if arguments[2] > 1 else planned, **options)

    def untouched(*arguments: Any, planned: Any, **options: Any) -> int:
        return train(*arguments, planned=[], **options)

    def one_more(*arguments: Any) -> Any:
        arguments[0].add_(1)
        return collectives.all_reduce(*arguments)

    def lost() -> list[str]:
        raise OSError("the driver has gone")

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if kind == "driver":
        accelerator.list_devices = lost
    elif kind == "shared memory":
        shared_memory._take_folder = full
    elif kind == "torch":
        run_checks._library = os.abort  # type: ignore[assignment]
    elif kind == "numbers":
        run.train = flipped  # type: ignore[assignment]
    elif kind == "faults":
        run.train = untouched  # type: ignore[assignment]
    elif kind == "run":
        run.train = lambda *arguments, **options: 1  # type: ignore[assignment]
    elif kind == "devices":
        collective_checks.all_reduce = one_more
        kernel = device_checks.attention
        device_checks.attention = lambda *parts, **options: 1.1 * kernel(*parts, **options)  # type: ignore[assignment]
        device_checks.is_out_of_memory = lambda error: False
        device_checks.compile_units = lambda model, blocks: next(model.parameters()).data.mul_(2)  # type: ignore
    only = [word for name in names for word in ("--only", name)]
    return call(placement, folder, [["doctor", *only]])[0]


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        ("torch", ["torch", "zero-1"], {"torch": "its process was killed by SIGABRT; reinstall PyTorch"}),
        ("driver", ["zero-1"], {"devices": "OSError: the driver has gone; check the driver's log"}),
        ("run", ["one-rank"], {"one-rank": "the run of 1 rank ended with exit code 1"}),
        ("numbers", ["zero-1"], {"zero-1": "the loss differs from one rank on the CPU"}),
        (
            "faults",
            some(["time-limit", "resume"], 0),
            some(
                [
                    ("time-limit", "but the run did not detect it (no rank was stopped)"),
                    ("resume", "the run recorded 0 deaths"),
                ],
                0,
            ),
        ),
        (
            "devices",
            ["attention", "compile", "memory-limit", "collectives"],
            {
                "attention": "differs from the reference formula",
                "compile": "differ from eager ones",
                "memory-limit": "which is not recognized",
                "collectives-host": "received wrong values over gloo, in all-reduce of",
            },
        ),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, kind: str, names: list[str], said: Any) -> None:
    said = dict(said)
    code, out, err = run_ranks(broken, 1, folder=str(tmp_path), kind=kind, names=names)[0]
    assert "Traceback" not in out + err
    assert (code, err) == (ExitCode.UNHEALTHY, ""), out + err
    found = lines_of(tmp_path)
    assert {name for name, line in found.items() if line["state"] == "wrong"} == set(said), out
    for name, words in said.items():
        assert words in found[name]["sentence"], out
        assert "; " in found[name]["sentence"]


def test_without_shared_memory_a_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    code, out, err = run_ranks(broken, 1, folder=str(tmp_path), kind="shared memory", names=["resume"])[0]
    assert (code, err) == (ExitCode.DONE, ""), out
    assert "then from the checkpoint at step 4" in lines_of(tmp_path)["resume"]["sentence"]
