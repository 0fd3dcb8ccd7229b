"""What lines of the kernel's log tell: the driver's numbered errors, other hardware, and what is history."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.health import xid
from phalanx.health.findings import Severity, verdict
from phalanx.health.kernel_log import KernelLogLine, judge_kernel_log, read_kernel_log

NOW = 10_000.0


def said(*texts: str, at: float = NOW - 60, recovery: dict[str, Severity] | None = None, **history: float) -> dict:
    lines = [KernelLogLine(at + second, text) for second, text in enumerate(texts)]
    return {each.check: each.severity for each in judge_kernel_log(lines, "", recovery or {}, NOW, **history)}


def line_of(number: int, rest: str = "pid=77, name=python, Ch 00000003") -> str:
    return f"NVRM: Xid (PCI:0000:3b:00): {number}, {rest}"


@pytest.mark.parametrize(
    ("number", "severity"),
    [
        (13, Severity.WATCH), (31, Severity.WATCH), (43, Severity.WATCH), (48, Severity.RESET), (54, Severity.ISOLATE),
        (62, Severity.RESET), (63, Severity.WATCH), (64, Severity.RESET), (74, Severity.RESET), (79, Severity.REBOOT),
        (92, Severity.WATCH), (94, Severity.WATCH), (95, Severity.RESET), (119, Severity.RESET), (120, Severity.RESET),
        (140, Severity.RESET), (145, Severity.WATCH), (156, Severity.RESET), (158, Severity.RESET),
        (168, Severity.REBOOT), (999, Severity.WATCH),
    ],
)  # fmt: skip
def test_each_xid_has_its_severity(number: int, severity: Severity) -> None:
    assert said(line_of(number)) == {f"xid {number}": severity}


def test_an_xid_154_says_itself_what_is_to_be_done() -> None:
    def to(text: str) -> str:
        return line_of(154, f"GPU recovery action changed from 0x0 (None) to {text}")

    assert said(to("0x1 (GPU Reset Required)")) == {"xid 154": Severity.RESET}
    assert said(to("0x2 (Node Reboot Required)")) == {"xid 154": Severity.REBOOT}
    assert said(to("0x9 (Something New)")) == {"xid 154": Severity.WATCH}
    # It overrides what came before it: here nothing is to be done any more.
    none = line_of(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    assert said(line_of(48), none) == {"xid 48": Severity.WATCH}
    assert said(none, line_of(48)) == {"xid 48": Severity.RESET}


def test_the_driver_knows_better_whether_a_gpu_was_reset_since() -> None:
    assert said(line_of(48), recovery={"0000:3b:00": Severity.OK}) == {"xid 48": Severity.WATCH}
    assert said(line_of(48), recovery={"0000:5e:00": Severity.OK}) == {"xid 48": Severity.RESET}
    assert said(line_of(54), recovery={"0000:3b:00": Severity.OK}) == {"xid 54": Severity.ISOLATE}


def test_a_place_on_the_bus_has_one_spelling() -> None:
    assert (
        xid.normalize_bus_id("00000000:3B:00.0")
        == xid.normalize_bus_id("0000:3b:00")
        == xid.normalize_bus_id("3b:00")
        == "0000:3b:00"
    )


def test_errors_of_one_kind_are_told_once() -> None:
    found = judge_kernel_log([KernelLogLine(NOW - each, line_of(48)) for each in (500, 400, 60)], "", {}, NOW)
    assert len(found) == 1
    assert found[0].value == 3
    assert "3 times, last 60 s ago" in found[0].sentence
    assert found[0].where == "0000:3b:00"


@pytest.mark.parametrize(
    ("text", "check", "severity"),
    [
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM", "nvswitch", Severity.RESET),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 30", "nvswitch", Severity.WATCH),
        ("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0xffff:2477)", "driver", Severity.REBOOT),
        ("mce: [Hardware Error]: Uncorrected error, action required", "machine check", Severity.REBOOT),
        ("mce: [Hardware Error]: Machine check events logged", "machine check", Severity.WATCH),
        ("EXT4-fs error (device sda1): ext4_find_entry:1463", "disk errors", Severity.WATCH),
        ("INFO: task python:4711 blocked for more than 120 seconds.", "stuck process", Severity.WATCH),
        ("Out of memory: Killed process 4711 (python) total-vm:1kB", "out of memory", Severity.WATCH),
        ("Memory cgroup out of memory: Killed process 4711 (python)", "out of memory", Severity.WATCH),
        ("usb 1-1: new high-speed USB device number 2", "kernel log", Severity.OK),
    ],
)
def test_other_lines(text: str, check: str, severity: Severity) -> None:
    assert said(text) == {check: severity}


def test_what_only_deserves_a_look_is_soon_history() -> None:
    assert said(line_of(13), "Out of memory: Killed process 1", watched_s=30) == {"kernel log": Severity.OK}
    assert said(line_of(13), watched_s=90) == {"xid 13": Severity.WATCH}
    assert said(line_of(79), watched_s=30) == {"xid 79": Severity.REBOOT}
    # What a reset cures may have been cured since; a driver that knows says whether it was.
    assert said(line_of(48), watched_s=30) == {"xid 48": Severity.WATCH}
    assert said(line_of(48), watched_s=90) == {"xid 48": Severity.RESET}
    assert said(line_of(48), watched_s=30, recovery={"0000:3b:00": Severity.RESET}) == {"xid 48": Severity.RESET}
    assert said("SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30", watched_s=30) == {"nvswitch": Severity.WATCH}
    assert said(line_of(79), since_s=30) == {"kernel log": Severity.OK}


def test_a_log_that_cannot_be_read_is_not_a_clean_one(tmp_path: Path) -> None:
    lines, why_not = read_kernel_log(tmp_path / "kmsg", ["false"])
    assert lines is None
    assert "No such file" in why_not
    assert verdict(judge_kernel_log(lines, why_not, {})) == Severity.UNKNOWN


def test_the_journal_is_read_where_the_ring_is_not_shown(tmp_path: Path) -> None:
    text = "[   12.500000] host kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    lines, _ = read_kernel_log(tmp_path / "kmsg", ["echo", text])
    assert lines == [KernelLogLine(12.5, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")]


@pytest.mark.skipif(os.getuid() != 0, reason="the kernel shows its log to root")
def test_the_ring_of_this_machine() -> None:
    if not Path("/dev/kmsg").exists():
        pytest.skip("there is no /dev/kmsg in this container")
    mark = f"phalanx test {os.getpid()}"
    try:
        Path("/dev/kmsg").write_text(f"<6>{mark}\n")
        lines, _ = read_kernel_log()
    except PermissionError:
        pytest.skip("this container may not use the kernel's log")
    assert lines is not None
    assert mark in [line.text for line in lines]
    assert judge_kernel_log(lines, "", {})  # real lines are judged without an error


@given(st.lists(st.tuples(st.floats(0, 1e6), st.text(max_size=80))))
def test_no_line_is_too_strange(lines: list[tuple[float, str]]) -> None:
    tales = [KernelLogLine(at, f"NVRM: Xid (PCI:{text}): 79, {text}") for at, text in lines]
    tales += [KernelLogLine(at, text) for at, text in lines]
    assert judge_kernel_log(tales, "", {}, NOW)
