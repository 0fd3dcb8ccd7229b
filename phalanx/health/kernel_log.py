"""The kernel log since boot: reading it, as far as permissions allow, and the hardware errors in it.

Newer systems show the log only to root (`kernel.dmesg_restrict`); then the journal is tried, which members of some
groups may read. An unreadable log is reported, never treated as free of errors.
"""

import functools
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.health import xid
from phalanx.health.findings import Finding, Severity
from phalanx.health.xid import RECOVERY_ACTION_CHANGED, Xid, XidMeaning

JOURNAL_S = 10.0
JOURNAL = ("journalctl", "--dmesg", "--boot", "--output=short-monotonic", "--no-pager", "--quiet")
OF_GPUS = ("nvswitch", "driver")  # checks that are irrelevant to a run without GPUs
SHOWN = 160  # length to which a line is shortened


@dataclass(frozen=True)
class KernelLogLine:
    """A line of the kernel log; `at_s`: seconds since boot."""

    at_s: float
    text: str


# Other hardware messages of the kernel, the worst first; the first match counts. SXid are the errors of NVIDIA's
# switches, which report whether they are fatal.
_KERNEL_MESSAGES: Sequence[tuple[re.Pattern[str], Severity, str, str]] = (
    (
        re.compile(r"SXid \(.*?\): \d+, Fatal\b", re.IGNORECASE),
        Severity.RESET,
        "nvswitch",
        "an NVSwitch reports a fatal error; reset all GPUs and switches of the node, or reboot it",
    ),
    (re.compile(r"SXid \("), Severity.WATCH, "nvswitch", "an NVSwitch reports an error; watch whether it recurs"),
    (
        re.compile(r"RmInitAdapter failed|NVRM: .*API mismatch"),
        Severity.REBOOT,
        "driver",
        "the NVIDIA driver could not initialize a GPU; reboot the node",
    ),
    (
        re.compile(r"\[Hardware Error\].*(Uncorrect|Fatal)|mce: .*(Uncorrect|Fatal)", re.IGNORECASE),
        Severity.REBOOT,
        "machine check",
        "the processor or its memory reports an error that could not be corrected; reboot, and have the node "
        "inspected if it recurs",
    ),
    (
        re.compile(r"\[Hardware Error\]|mce: .*event"),
        Severity.WATCH,
        "machine check",
        "the processor or its memory reports errors that were corrected; watch whether they increase",
    ),
    (
        re.compile(r"Remounting filesystem read-only|EXT4-fs error|XFS .*[Cc]orruption|I/O error, dev (?!fd|sr|loop)"),
        Severity.WATCH,
        "disk errors",
        "the kernel reports disk or file system errors; see `dmesg`, and check that disk",
    ),
    (
        re.compile(r"blocked for more than \d+ seconds"),
        Severity.WATCH,
        "stuck process",
        "a process was stuck in the kernel for minutes, mostly on a disk, a network file system or a device",
    ),
    (
        re.compile(r"[Oo]ut of memory: Kill"),
        Severity.WATCH,
        "out of memory",
        "the kernel killed a process because host memory ran out; check whether it was part of a run",
    ),
)


def read_kernel_log(
    device: Path = Path("/dev/kmsg"), journal: Sequence[str] = JOURNAL
) -> tuple[list[KernelLogLine] | None, str]:
    """The lines since boot, or None and why they cannot be read."""
    try:
        return _ring(device), ""
    except OSError as error:
        refused = f"{device}: {error.strerror}"
    try:
        said = subprocess.run(journal, capture_output=True, text=True, timeout=JOURNAL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{refused}; {journal[0]}: {error}"
    if said.returncode != 0 or not said.stdout.strip():
        return None, f"{refused}; {journal[0]}: {said.stderr.strip().partition(chr(10))[0] or 'no lines'}"
    return [line for text in said.stdout.splitlines() if (line := _journal_line(text)) is not None], ""


class KernelLogFollower:
    """Follows the kernel log: reads lines written from now on."""

    def __init__(self, device: Path = Path("/dev/kmsg")) -> None:
        self._descriptor = -1
        self._why_not = ""
        try:
            self._descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            self._why_not = f"{device}: {error.strerror}"

    def read_new(self) -> tuple[list[KernelLogLine] | None, str]:
        """Lines since the last call, or None and why they cannot be read."""
        if self._why_not:
            return None, self._why_not
        try:
            return _read_records(self._descriptor), ""
        except OSError as error:
            return None, str(error.strerror)


def _ring(device: Path) -> list[KernelLogLine]:
    """All records of the kernel's ring buffer."""
    descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _read_records(descriptor)
    finally:
        os.close(descriptor)


def _read_records(descriptor: int) -> list[KernelLogLine]:
    """The remaining records: each read() returns one, `priority,number,microseconds,flags;text`."""
    found: list[KernelLogLine] = []
    while True:
        try:
            record = os.read(descriptor, 8192)
        except BlockingIOError:
            return found
        except BrokenPipeError:  # overwritten before it was read; the next read continues after it
            continue
        if not record:
            return found
        head, _, text = record.decode(errors="replace").partition(";")
        fields = head.split(",")
        if len(fields) >= 3 and fields[2].isdigit():
            found.append(KernelLogLine(int(fields[2]) / 1e6, text.partition("\n")[0]))


def _journal_line(text: str) -> KernelLogLine | None:
    """`[    5.123456] host kernel: words`."""
    found = re.match(r"\[\s*(\d+\.\d+)\] \S+ \S+: (.*)", text)
    return None if found is None else KernelLogLine(float(found[1]), found[2])


def judge_kernel_log(
    lines: Sequence[KernelLogLine] | None,
    why_not: str,
    recovery: Mapping[str, Severity],
    now_s: float | None = None,
    watched_s: float | None = None,
    since_s: float | None = None,
) -> list[Finding]:
    """Findings in the lines. `recovery`: the driver's current recovery action of each GPU, by bus id.

    Lines of the last `since_s` seconds count, all if None; those of severity `watch`, of the last `watched_s`. An older
    error that a reset fixes has at most severity `watch`, unless the driver still requests a reset.
    """
    if lines is None:
        sentence = (
            f"the kernel's log cannot be read ({why_not}), so the errors it reports are unknown; ask an administrator"
        )
        return [Finding("kernel log", Severity.UNKNOWN, sentence)]
    now_s = time.clock_gettime(time.CLOCK_MONOTONIC) if now_s is None else now_s
    lines = [line for line in lines if since_s is None or now_s - line.at_s <= since_s]

    def recent(line: KernelLogLine) -> bool:
        return watched_s is None or now_s - line.at_s <= watched_s

    found = _gpu_findings(lines, recovery, now_s, recent) + _other_findings(lines, now_s, recent)
    return found or [Finding("kernel log", Severity.OK, "the kernel's log reports no hardware errors")]


def _gpu_findings(
    lines: Sequence[KernelLogLine],
    recovery: Mapping[str, Severity],
    now_s: float,
    recent: Callable[[KernelLogLine], bool],
) -> list[Finding]:
    by_kind: dict[tuple[str, int], list[tuple[KernelLogLine, Xid]]] = {}
    for line in lines:
        seen = xid.parse_xid(line.text)
        if seen is not None and (seen.meaning.severity != Severity.WATCH or recent(line)):
            by_kind.setdefault((seen.bus, seen.number), []).append((line, seen))
    findings = []
    for (bus, number), all_of_it in by_kind.items():
        line, seen = all_of_it[-1]
        meaning = _apply_driver_advice(seen.meaning, recovery.get(bus), superseded=_advice_after(by_kind, bus, line))
        if meaning.severity == Severity.RESET and bus not in recovery and not recent(line):
            meaning = XidMeaning(
                Severity.WATCH, f"{meaning.description} (reset it, unless that was done since)", meaning.blames_device
            )
        if meaning.severity == Severity.OK:
            continue
        times = f"{len(all_of_it)} times, last " if len(all_of_it) > 1 else ""
        sentence = (
            f"the driver reported Xid {number} for the GPU at {bus} {times}{_ago(now_s - line.at_s)}: "
            f"{meaning.description}; {_remedy(meaning)}"
        )
        findings.append(Finding(f"xid {number}", meaning.severity, sentence, len(all_of_it), 0, bus))
    return findings


def _advice_after(
    seen: Mapping[tuple[str, int], list[tuple[KernelLogLine, Xid]]], bus: str, line: KernelLogLine
) -> Severity | None:
    """The advice of an Xid 154 of the same GPU, written at the time of a line or later: it overrides that line's
    own meaning."""
    said = [x.meaning.severity for at, x in seen.get((bus, RECOVERY_ACTION_CHANGED), []) if at.at_s >= line.at_s]
    return said[-1] if said else None


def _apply_driver_advice(meaning: XidMeaning, recovery: Severity | None, superseded: Severity | None) -> XidMeaning:
    """Adjust a meaning to the driver's recovery action: a GPU without one was reset meanwhile."""
    advice = recovery if recovery is not None else superseded
    if advice != Severity.OK or meaning.severity in (Severity.OK, Severity.WATCH, Severity.ISOLATE):
        return meaning
    return XidMeaning(
        Severity.WATCH, f"{meaning.description} (the driver requests no further action)", meaning.blames_device
    )


def _remedy(meaning: XidMeaning) -> str:
    if not meaning.blames_device:
        return "check the program that ran there first"
    return {
        Severity.WATCH: "watch whether it recurs",
        Severity.RESET: "end its programs and reset it (nvidia-smi --gpu-reset), or reboot the node",
        Severity.REBOOT: "reboot the node, and have the GPU inspected if it recurs",
        Severity.ISOLATE: "drain the node and have it inspected",
    }[meaning.severity]


@functools.lru_cache(maxsize=4096)  # a monitor judges the lines that it keeps every second
def _find_message(text: str) -> int | None:
    """The place in `_KERNEL_MESSAGES` of the first pattern that a line matches."""
    return next((number for number, (pattern, *_) in enumerate(_KERNEL_MESSAGES) if pattern.search(text)), None)


def _other_findings(
    lines: Sequence[KernelLogLine], now_s: float, recent: Callable[[KernelLogLine], bool]
) -> list[Finding]:
    counted: dict[int, list[KernelLogLine]] = {}
    for line in lines:
        number = _find_message(line.text)
        if number is not None and (_KERNEL_MESSAGES[number][1] != Severity.WATCH or recent(line)):
            counted.setdefault(number, []).append(line)
    findings = []
    for number, those in sorted(counted.items()):
        _, severity, check, words = _KERNEL_MESSAGES[number]
        last = those[-1]
        if severity == Severity.RESET and not recent(last):
            severity = Severity.WATCH  # it may have been reset since, which the log does not record
        sentence = f"{words} ({_ago(now_s - last.at_s)}: {last.text[:SHOWN]})"
        where = "NVIDIA" if check in OF_GPUS else None
        findings.append(Finding(check, severity, sentence, len(those), 0, where))
    return findings


def _ago(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s ago"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.0f} h ago" if seconds < 172800 else f"{seconds / 86400:.0f} d ago"
