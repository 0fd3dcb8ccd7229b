"""The health monitor of a cluster's node: samples GPUs, network links and the kernel's log every few seconds, and the
host every minute, while jobs run.

Findings drain the node in Slurm, with the severity in the reason. It uses the checks of `phalanx health`, imports only
the standard library, and keeps the GPU driver open in a child process, which is killed if the driver hangs. `main` runs
it, as root.
"""

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.json_lines import write_atomic
from phalanx.health import checks, kernel_log, network, nvml
from phalanx.health import gpu as gpu_health
from phalanx.health.findings import Finding, Severity, at_least, unique_sentences, verdict
from phalanx.health.gpu import Gpu, GpuMemoryErrors, GpuReading
from phalanx.health.kernel_log import KernelLogLine
from phalanx.system.fork import fork, kill_group

PERIOD_S, HOST_S, HANG_S = 4.0, 60.0, 30.0
REASON = "phalanx"  # a drain's reason begins with it and the severity, which the healer reads
STATUS_FILE = Path("/run/phalanx/health.json")
BASELINE_FILE = Path("/var/lib/phalanx/baseline.json")
SIMULATED_FILE = Path("/run/phalanx/simulated.json")  # of a node that pretends: its GPUs and lines of its kernel log
LOG_LINES = 1000  # of the kernel that are kept


def read_simulated(file: Path) -> tuple[GpuReading, list[str]]:
    """Read simulated GPUs and kernel lines of a node of provider `local`, which has no real ones. Raises OSError,
    ValueError."""
    tree = json.loads(file.read_text(encoding="utf-8"))
    gpus = [Gpu(**{**each, "errors": GpuMemoryErrors(**each.get("errors", {}))}) for each in tree["gpus"]]
    return GpuReading(tuple(gpus)), [str(line) for line in tree.get("kernel", [])]


class DriverReader:
    """Asks the GPU driver in a child process that keeps it open: opening it again costs more than a sample may."""

    def __init__(self, read_gpus: Callable[[], GpuReading] = nvml.read_gpus) -> None:
        self._read_gpus = read_gpus
        self._pid = self._pidfd = -1
        self._ask = self._answer = -1
        self._absent: GpuReading | None = None  # this node has no driver, so no child is kept

    def read(self, timeout_s: float = HANG_S) -> GpuReading:
        """Read the driver's report, or report a hang if there is no answer in time."""
        if self._absent is not None:
            return self._absent
        first = self._pid < 0
        if first:
            self._start()
        try:
            os.write(self._ask, b"?")
            line = self._read_line(time.monotonic() + timeout_s)
        except OSError:
            line = b""
        if not line:
            self.close()
            text = f"the GPU driver did not answer within {timeout_s:g} s, or its reader died; reboot the node"
            return GpuReading(problem=text, severity=Severity.REBOOT)
        reading = _reading_from_json(json.loads(line))
        if first and reading.problem is not None and reading.severity == Severity.UNKNOWN:
            self._absent = reading
            self.close()
        return reading

    def _start(self) -> None:
        ask_out, self._ask = os.pipe()
        self._answer, answer_in = os.pipe()
        self._pid, self._pidfd = fork(lambda: self._serve(ask_out, answer_in), keep=[ask_out, answer_in])
        os.close(ask_out)
        os.close(answer_in)

    def _serve(self, ask: int, answer: int) -> int:
        with nvml.keep_open():
            while os.read(ask, 1):
                reading = self._read_gpus()
                tree = dataclasses.asdict(reading) | {"severity": str(reading.severity)}
                os.write(answer, json.dumps(tree).encode() + b"\n")
        return 0

    def _read_line(self, until: float) -> bytes:
        heard = b""
        while not heard.endswith(b"\n"):
            ready, _, _ = select.select([self._answer], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._answer, 1 << 16) if ready else b""
            if not part:
                return b""
            heard += part
        return heard

    def close(self) -> None:
        """End the child. One that the driver holds in the kernel ends when the driver lets it."""
        if self._pid >= 0:
            kill_group(self._pid)
            for descriptor in (self._ask, self._answer):
                os.close(descriptor)
            select.select([self._pidfd], [], [], 1.0)
            os.waitpid(self._pid, os.WNOHANG)
            os.close(self._pidfd)
            self._pid = -1


def _reading_from_json(tree: dict[str, Any]) -> GpuReading:
    gpus = [Gpu(**{**each, "errors": GpuMemoryErrors(**each["errors"]), "processes": ()}) for each in tree["gpus"]]
    return GpuReading(tuple(gpus), tree["problem"], Severity(tree["severity"]), tree["driver"])


@dataclass
class NodeSample:
    """What one look gave: GPUs, new lines of the kernel's log (None: it cannot be read), links of network cards."""

    gpus: GpuReading
    lines: list[KernelLogLine] | None
    links: Mapping[str, bool]


@dataclass
class HealthJudge:
    """Findings of consecutive samples. Pure. `baseline`: GPUs and links of the node when it was healthy; None:
    taken from the first sample with a driver that answers, or none."""

    baseline: dict[str, Any] | None = None
    _lines: list[KernelLogLine] = field(default_factory=list)

    def judge(self, sample: NodeSample, now_s: float) -> list[Finding]:
        """Findings of a sample, with those of the kernel lines that came earlier; `now_s` by the clock of the lines."""
        silent = sample.gpus.problem is not None and sample.gpus.severity != Severity.UNKNOWN
        if self.baseline is None and not silent:
            gpus = [gpu_health.gpu_identity(gpu) for gpu in sample.gpus.gpus if gpu.lost is None]
            self.baseline = {"gpus": gpus, "links": dict(sample.links)}
        self._lines = [*self._lines, *(sample.lines or ())][-LOG_LINES:]
        lines = None if sample.lines is None else self._lines
        jobs_use_gpus = ("gpu memory", "persistence")  # which is no finding while jobs run
        baseline = self.baseline or {"gpus": [], "links": sample.links}
        found = gpu_health.judge_gpus(sample.gpus, baseline["gpus"])
        found = [finding for finding in found if finding.check not in jobs_use_gpus]
        recovery = gpu_health.recovery_by_bus(sample.gpus)
        found += kernel_log.judge_kernel_log(lines, "not readable", recovery, now_s, checks.RECENT_S)
        return found + network.judge_links(sample.links, baseline["links"])


class NodeMonitor:
    """Samples this node, judges, writes the status file, and drains the node in Slurm where it must not be used."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._driver = DriverReader()
        self._judge = HealthJudge(_read_baseline())
        self._log = kernel_log.KernelLogFollower()
        self._host: list[Finding] = []
        self._host_at = -HOST_S
        self._told: set[tuple[str, str | None]] = set()
        self._seen_simulated = 0
        self._written = ""

    def look(self) -> list[Finding]:
        """One sample, from reading to draining."""
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        found = self._judge.judge(self._sample(now), now)
        if self._judge.baseline is not None and not BASELINE_FILE.exists():
            _write_file(BASELINE_FILE, json.dumps(self._judge.baseline))
        if now - self._host_at >= HOST_S:
            self._host_at = now
            self._host = checks.run_checks(checks.host_checks(checks.HealthScope(network=False)))
        found = found + self._host
        self._write(found)
        self._drain(found)
        return found

    def _sample(self, now_s: float) -> NodeSample:
        links = network.read_links()
        if SIMULATED_FILE.exists():
            reading, texts = read_simulated(SIMULATED_FILE)
            new, self._seen_simulated = texts[self._seen_simulated :], len(texts)
            return NodeSample(reading, [KernelLogLine(now_s, text) for text in new], links)
        lines, _ = self._log.read_new()
        return NodeSample(self._driver.read(), lines, links)

    def _write(self, found: list[Finding]) -> None:
        tree = checks.build_node_report(found)
        if (text := json.dumps(tree["findings"])) != self._written:
            self._written = text if _write_file(STATUS_FILE, json.dumps(tree) + "\n") else ""

    def _drain(self, found: list[Finding]) -> None:
        """Drain the node once for each finding, so that a person may resume it."""
        bad = at_least(found, Severity.RESET)
        new = {(finding.check, finding.where) for finding in bad} - self._told
        if not new:
            return
        reason = f"{REASON} {verdict(bad)}: {'; '.join(unique_sentences(bad))}"[:200]
        sys.stderr.write(f"{time.strftime('%F %T')} {reason}\n")
        command = ["scontrol", "update", f"nodename={self._node}", "state=drain", f"reason={reason}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(f"scontrol: {error}\n")
            return
        if done.returncode == 0:
            self._told |= new
        else:
            sys.stderr.write(f"scontrol: {done.stderr.strip()}\n")

    def close(self) -> None:
        """End the child process."""
        self._driver.close()


def _write_file(file: Path, text: str) -> bool:
    """Write a file; whether it could be. A full disk must not end the monitor, which finds it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    except OSError as error:
        sys.stderr.write(f"{file}: {error}\n")
        return False
    return True


def _read_baseline() -> dict[str, Any] | None:
    try:
        tree = json.loads(BASELINE_FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) and {"gpus", "links"} <= tree.keys() else None


def main() -> None:
    """Monitor this node until a signal ends it."""
    monitor = NodeMonitor(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while True:
            begun = time.monotonic()
            monitor.look()
            time.sleep(max(0.1, PERIOD_S - (time.monotonic() - begun)))
    finally:
        monitor.close()
