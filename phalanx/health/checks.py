"""Health checks of a node, before training and after an incident: the list of checks, and running them with time
limits.

A faulty device or file system does not answer, so checks run in a forked child, each with a time limit. A timeout is a
finding itself, and the remaining checks continue in another child. The caller must therefore have a single thread
(`system/fork.py`).
"""

import functools
import json
import os
import select
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.health import gpu as gpu_health
from phalanx.health import host as host_health
from phalanx.health import kernel_log, nvml
from phalanx.health.findings import VERSION, Finding, Severity, finding_from_json, verdict
from phalanx.health.gpu import GpuReading
from phalanx.system.fork import fork, fork_call, kill_group

RECENT_S = 3600.0  # age of kernel messages of severity `watch` that a quick check repeats
GPUS_S, DISK_S, HOST_S, LOG_S, NAME_S = 30.0, 20.0, 5.0, 15.0, 10.0


@dataclass(frozen=True)
class HealthCheck:
    """Checks that run together in one child: `hang_severity` is the severity if there is no answer within `limit_s`."""

    name: str
    run: Callable[[], list[Finding]]
    limit_s: float
    hang_severity: Severity
    remedy: str = "check what it is blocked on (ps shows state D)"


@dataclass(frozen=True)
class HealthScope:
    """The scope of a health check. `folder`: the run's; `only`: UUIDs of the GPUs to check, all if None."""

    folder: Path | None = None
    only: Sequence[str] | None = None
    expected: Mapping[str, Any] | None = None  # a baseline
    since_s: float | None = None  # kernel messages that are older are ignored
    watched_s: float | None = None  # the same for messages of severity `watch`
    network: bool = True  # whether to check what matters only to other nodes


def run_quick_checks(folder: Path, only: Sequence[str] | None, since_s: float | None = None) -> list[Finding]:
    """Health check of an agent before a start and after an incident; no GPU is checked if `only` is empty."""
    return run_health_checks(HealthScope(folder, only, None, since_s, RECENT_S, network=False))


def run_health_checks(scope: HealthScope, read_gpus: Callable[[], GpuReading] = nvml.read_gpus) -> list[Finding]:
    """Run all checks of a scope. `read_gpus` reads the driver's report of the GPUs."""
    told = _DriverReport()
    wanted = host_checks(scope)
    if scope.only is None or scope.only:
        look = functools.partial(_check_gpus, scope, read_gpus, told)
        wanted.append(HealthCheck("gpus", look, GPUS_S, Severity.REBOOT, "the driver hangs; reboot the node"))
    wanted.append(HealthCheck("kernel log", functools.partial(_check_kernel_log, scope, told), LOG_S, Severity.UNKNOWN))
    return run_checks(wanted)


@dataclass
class _DriverReport:
    """The GPU driver's report, for the check of the kernel's log in the same child; empty if the driver hangs."""

    recovery: Mapping[str, Severity] = field(default_factory=dict)
    foreign_buses: Sequence[str] = ()  # bus ids of GPUs outside the scope


def host_checks(scope: HealthScope) -> list[HealthCheck]:
    """The checks of a node except its GPUs."""
    cpus = None if scope.expected is None else scope.expected["cpus"]
    temporary = _temporary()
    wanted = [
        HealthCheck("host", functools.partial(_check_host, cpus), HOST_S, Severity.REBOOT),
        HealthCheck("shared memory", host_health.check_shared_memory, HOST_S, Severity.REBOOT),
        _disk_check(temporary, host_health.ROOM_TEMPORARY_BYTES, "temporary folder", Severity.WATCH),
    ]
    if scope.folder is not None:
        wanted.append(_disk_check(scope.folder, host_health.ROOM_BYTES, "run folder", Severity.RESET))
    clock = functools.partial(host_health.check_clock, scope.folder or temporary)
    wanted.append(HealthCheck("clock", clock, DISK_S, Severity.RESET))
    if scope.network:
        remedy = "check name resolution (/etc/resolv.conf)"
        wanted.append(HealthCheck("name", host_health.check_hostname, NAME_S, Severity.WATCH, remedy))
    return wanted


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # none of the usual folders is writable, which that check reports
        return Path("/tmp")


def _disk_check(place: Path, room_bytes: int, what: str, failed: Severity) -> HealthCheck:
    look = functools.partial(host_health.check_disk, place, room_bytes, what, failed)
    return HealthCheck(f"{what} {place}", look, DISK_S, failed, "check its disk or file server")


def _check_host(expected_cpus: int | None) -> list[Finding]:
    return [*host_health.check_limits(), *host_health.check_memory(), *host_health.check_cpus(expected=expected_cpus)]


def _check_gpus(scope: HealthScope, read_gpus: Callable[[], GpuReading], driver_report: _DriverReport) -> list[Finding]:
    reading = read_gpus()
    expected = None if scope.expected is None else scope.expected["gpus"]
    driver_report.recovery = gpu_health.recovery_by_bus(reading)
    if scope.only is not None:
        driver_report.foreign_buses = [gpu.bus for gpu in reading.gpus if gpu.uuid and gpu.uuid not in scope.only]
    return gpu_health.judge_gpus(reading, expected, scope.only)


def _check_kernel_log(scope: HealthScope, driver_report: _DriverReport) -> list[Finding]:
    """Findings in the kernel's log, except errors of GPUs outside the scope, which concern other runs."""
    lines, why_not = kernel_log.read_kernel_log()
    found = kernel_log.judge_kernel_log(lines, why_not, driver_report.recovery, None, scope.watched_s, scope.since_s)
    unused = scope.only is not None and not scope.only
    return [
        finding
        for finding in found
        if not (finding.where in driver_report.foreign_buses or (unused and finding.where is not None))
    ]


def run_checks(wanted: Sequence[HealthCheck]) -> list[Finding]:
    """Run checks one after another in a child; if one is stopped, the remaining ones in another child."""
    findings: list[Finding] = []
    at = 0
    while at < len(wanted):
        done, why_not = _run_in_child(wanted[at:])
        findings += [finding for each in done for finding in each]
        at += len(done)
        if at < len(wanted):
            findings.append(_unanswered_finding(wanted[at], why_not))
            at += 1
    return findings


def _unanswered_finding(check: HealthCheck, why_not: str | None) -> Finding:
    if why_not is not None:
        return Finding(check.name, Severity.UNKNOWN, f"{check.name}: not checked ({why_not})")
    text = f"{check.name}: no answer within {check.limit_s:g} s, so this check was stopped; {check.remedy}"
    return Finding(check.name, check.hang_severity, text, check.limit_s, check.limit_s)


def _run_in_child(wanted: Sequence[HealthCheck]) -> tuple[list[list[Finding]], str | None]:
    """Findings of the checks that answered, and why the next one did not: None for a timeout."""
    reader, writer = os.pipe()
    try:
        pid, pidfd = fork(lambda: _run_all(wanted, writer), keep=[writer])
    except OSError as error:
        os.close(reader)
        return [], f"no process could be started: {error.strerror}"
    finally:
        os.close(writer)
    try:
        with open(reader, "rb", buffering=0) as pipe:
            return _read_answers(pipe, wanted)
    finally:
        kill_group(pid)
        # A process that a device blocks in the kernel cannot be waited for; it ends when the device releases it.
        if _readable(pidfd, 1.0):
            os.waitpid(pid, 0)
        os.close(pidfd)


def _readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _run_all(wanted: Sequence[HealthCheck], writer: int) -> int:
    """Run checks in the child; writes a line for each."""
    with open(writer, "wb", buffering=0) as pipe:
        for check in wanted:
            try:
                answer: Any = [finding.to_json() for finding in check.run()]
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            pipe.write(json.dumps(answer).encode() + b"\n")
    return ExitCode.DONE


def _read_answers(pipe: Any, wanted: Sequence[HealthCheck]) -> tuple[list[list[Finding]], str | None]:
    done: list[list[Finding]] = []
    heard = bytearray()
    for check in wanted:
        until = time.monotonic() + check.limit_s
        while b"\n" not in heard:
            left = until - time.monotonic()
            if left <= 0 or not _readable(pipe.fileno(), left):
                return done, None
            part = pipe.read(1 << 16)
            if not part:
                return done, "its process died"
            heard += part
        line, _, rest = bytes(heard).partition(b"\n")
        heard = bytearray(rest)
        answer = json.loads(line)
        if isinstance(answer, dict):
            return done, str(answer["error"])
        done.append([finding_from_json(tree) for tree in answer])
    return done, None


# ------------------------------------------------------------------------------------------------------------- files


def build_node_report(findings: Sequence[Finding]) -> dict[str, Any]:
    """The report of this node: schema version, host, time, verdict, findings."""
    return {
        "version": VERSION,
        "host": socket.gethostname(),
        "time": time.time(),
        "verdict": str(verdict(findings)),
        "findings": [finding.to_json() for finding in findings],
    }


def write_node_report(paths: RunPaths, findings: Sequence[Finding]) -> None:
    """Write a report where `phalanx nodes` reads it. Raises OSError."""
    tree = build_node_report(findings)
    paths.nodes.mkdir(mode=0o700, exist_ok=True)
    write_atomic(paths.node_health(tree["host"]), json.dumps(tree) + "\n")


def collect_baseline(read_gpus: Callable[[], GpuReading] = nvml.read_gpus) -> dict[str, Any]:
    """Collect the baseline of a healthy node, for later comparison. Raises PhalanxError if the GPUs' driver does
    not answer."""

    def identities() -> list[dict[str, Any]]:
        return [gpu_health.gpu_identity(gpu) for gpu in read_gpus().gpus if gpu.lost is None]

    return {
        "version": VERSION,
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": fork_call(identities, timeout_s=GPUS_S),
    }


def read_baseline(file: Path) -> dict[str, Any]:
    """Read a baseline written by `--save-baseline`. Raises ConfigError."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the baseline {file} cannot be read ({error}); write one with --save-baseline") from None
    gpus = tree.get("gpus") if isinstance(tree, dict) else None
    whole = isinstance(gpus, list) and all(isinstance(gpu, dict) and isinstance(gpu.get("uuid"), str) for gpu in gpus)
    if not whole or tree.get("version") != VERSION or type(tree.get("cpus")) is not int:
        raise ConfigError(f"{file} is not a baseline of version {VERSION}; write one with --save-baseline")
    return tree


def write_json(file: Path, tree: Mapping[str, Any]) -> None:
    """Write a report or a baseline as JSON, atomically. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(tree, indent=1) + "\n")
