"""Whether this node is fit to be trained on: what a launcher asks before a start, and finds out after a death."""

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.config.schema import Config
from phalanx.core.errors import PhalanxError, Unhealthy
from phalanx.core.events import EventKind, write_event
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor import node_requests
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.health import checks
from phalanx.health.devices import DeviceInfo
from phalanx.health.findings import Finding, Severity, at_least, unique_sentences, verdict
from phalanx.system.fork import fork, kill_group

LATER_S = 1.0  # after a death, until the node is looked at: the ranks that start again need the cores first
INCIDENT_S = 60.0  # what a look at the node after a death may take; nobody waits for it
LAST_S = 3.0  # but for so long, where the run has come to its end
OF_DEVICES = ("gpu", "xid", "nvswitch", "ecc", "remapped", "recovery")  # how the names of checks of accelerators begin
OF_HOST = ("host", "shared memory")  # cut off only by a node that is busy, as it is when its ranks start again
SUSPICIOUS = 2  # times that a device has held something wrong, from which on it is said at each start


def check_node_if_enabled(config: Config, paths: RunPaths, devices: Sequence[DeviceInfo]) -> dict[str, Any] | None:
    """The same as `check_node`, unless `resilience.health` is off."""
    return None if config.resilience.health == "off" else check_node(paths, devices, "resilience.health=off")


def check_node(paths: RunPaths, devices: Sequence[DeviceInfo], otherwise: str) -> dict[str, Any] | None:
    """Look at this node before it is trained on. Returns the details of an event where something is worth a look, else
    None; raises Unhealthy where the node is not fit, with what to write to start `otherwise`."""
    findings = [
        *checks.run_quick_checks(paths.root, list_accelerator_uuids(devices)),
        *find_suspected_devices(paths, devices),
    ]
    unfit = at_least(findings, Severity.RESET)
    if unfit:
        raise Unhealthy(
            f"{socket.gethostname()} is not fit to be trained on: {'; '.join(unique_sentences(unfit))} "
            f"({otherwise} starts all the same)"
        )
    seen = at_least(findings, Severity.WATCH)
    return make_health_details(seen, findings) if seen else None


def find_suspected_devices(paths: RunPaths, devices: Sequence[DeviceInfo]) -> list[Finding]:
    """Devices of this node that the run has found before, more than once and without a doubt, to hold other parameters
    than they must."""
    mine = {device.identity.removeprefix("GPU-") for device in devices}
    certain = Counter(
        (str(row.get("device")), str(row.get("identity") or "").removeprefix("GPU-"))
        for row in read_lines(paths.suspects)
        if row.get("certain") is True and row.get("host") == socket.gethostname()
    )
    return [
        Finding(
            "silent corruption",
            Severity.WATCH,
            f"{model}{f' ({identity})' if identity else ''} has held other parameters than it must {times} times in "
            f"this run ({paths.suspects.name}); test it by `phalanx health --deep`, and leave this node out until then",
            times,
            SUSPICIOUS,
            identity or model,
        )
        for (model, identity), times in certain.items()
        if times >= SUSPICIOUS and identity in mine
    ]


def make_health_details(
    seen: Sequence[Finding], findings: Sequence[Finding], after: str | None = None
) -> dict[str, Any]:
    """Of a `health` event: what was seen, of all findings that make the verdict."""
    return {
        "host": socket.gethostname(),
        "after": after,
        "verdict": str(verdict(findings)),
        "findings": [finding.to_json() for finding in seen],
    }


def list_accelerator_uuids(devices: Sequence[DeviceInfo]) -> list[str] | None:
    """UUIDs of the accelerators that are used, as their driver's library names them; None where not all are known."""
    accelerators = [device for device in devices if device.name != "cpu"]
    known = all(device.identity.startswith("GPU-") for device in accelerators)  # a part of a GPU has a name of its own
    return sorted({device.identity for device in accelerators}) if known else None


def request_replacement(paths: RunPaths, findings: Sequence[Finding]) -> None:
    """Ask a run on several nodes to take a spare instead of this one, where its hardware is not fit to be trained on;
    what else makes a node unfit, such as a full disk, may well be so on all of them."""
    broken = [
        finding
        for finding in at_least(findings, Severity.RESET)
        if (finding.severity != Severity.RESET or finding.check.startswith(OF_DEVICES)) and finding.check not in OF_HOST
    ]
    host = socket.gethostname()
    before = node_requests.find_newest_request(node_requests.read_requests(paths), host, host)
    if broken and (before is None or before.wanted == NodeRequestKind.RETURN):  # a user's own is not taken back
        reason = "; ".join(unique_sentences(broken))
        with contextlib.suppress(PhalanxError):  # it cannot be written; the event has said it
            node_requests.write_request(paths, host, NodeRequestKind.REPLACE, reason, node_requests.BY_HEALTH)


def make_event_writer(paths: RunPaths) -> Callable[[int, dict[str, Any]], None]:
    """What a Watch may `tell`: an event of the run."""

    def tell(attempt: int, seen: dict[str, Any]) -> None:
        write_event(paths.events, EventKind.HEALTH, attempt, **seen)

    return tell


class HealthWatch:
    """Looks at this node after a death, in a child of its own, which puts what it finds into the run folder and has
    `write_details` write or say the details of an event.

    Nothing here waits, but for `close`. The caller has one thread whenever it calls.
    """

    def __init__(
        self, paths: RunPaths, only: Sequence[str] | None, write_details: Callable[[int, dict[str, Any]], None]
    ) -> None:
        self._paths, self._only, self._write_details = paths, only, write_details
        self._begun = time.monotonic()
        self._asked: tuple[int, str] | None = None
        self._not_before = 0.0
        self._child: tuple[int, int] | None = None  # pid, pidfd
        self._until = 0.0

    def request_check(self, attempt: int, after: str) -> None:
        """Look at the node when `poll_once` is called, LATER_S from now: the ranks that start again come first."""
        self._asked = self._asked or (attempt, after)
        self._not_before = time.monotonic() + LATER_S

    def poll_once(self) -> None:
        """Begin a look that was asked for, take leave of one that has ended, and end one that takes too long."""
        if self._child is not None:
            self._reap(*self._child)
        if self._child is None and self._asked is not None and time.monotonic() >= self._not_before:
            (attempt, after), self._asked = self._asked, None
            since_s = time.monotonic() - self._begun  # what the kernel has said since the run began
            with contextlib.suppress(OSError):  # no room for another process: training is what matters
                self._child = fork(lambda: self._write(attempt, after, since_s))
                self._until = time.monotonic() + INCIDENT_S

    def _reap(self, pid: int, pidfd: int) -> None:
        if os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > self._until:
                kill_group(pid)
            return
        kill_group(pid)
        os.waitpid(pid, 0)
        os.close(pidfd)
        self._child = None

    def close(self) -> None:
        """The run is over: give a look that is going on, or was asked for, a moment; then end it."""
        until = time.monotonic() + LAST_S
        self._not_before = 0.0
        self.poll_once()
        while self._child is not None and time.monotonic() < until:
            time.sleep(0.02)
            self._reap(*self._child)
        if self._child is not None:  # what a device holds in the kernel ends when that lets it go
            kill_group(self._child[0])

    def _write(self, attempt: int, after: str, since_s: float) -> int:
        findings = checks.run_quick_checks(self._paths.root, self._only, since_s)
        seen = at_least(findings, Severity.WATCH)
        self._write_details(attempt, make_health_details(seen, findings, after))
        checks.write_node_report(self._paths, findings)
        request_replacement(self._paths, findings)
        return ExitCode.DONE
