"""`phalanx health` on several nodes: each node checks itself and its connections to the others; node 0 shows the
results."""

import contextlib
import itertools
import os
import secrets
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.config.schema import Config
from phalanx.core import placement
from phalanx.core.errors import CollectiveError, ConfigError, PhalanxError, Unhealthy
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import rendezvous_client
from phalanx.elastic.membership.connectivity import ConnectionProbe, EchoServer, probe
from phalanx.elastic.membership.rendezvous import interfaces
from phalanx.elastic.membership.rendezvous_client import RendezvousClient
from phalanx.elastic.node.worker import StopRequested, raise_on_stop_signal
from phalanx.elastic.supervisor import node_requests
from phalanx.elastic.supervisor.meeting import name_nodes
from phalanx.elastic.supervisor.meeting_host import MeetingHost
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.health import burn_in_report, checks
from phalanx.health import host as host_health
from phalanx.health.findings import (
    VERSION,
    DeviceInfo,
    Finding,
    Severity,
    at_least,
    is_usable,
    unique_sentences,
    verdict,
)
from phalanx.launch import multinode
from phalanx.launch.rendezvous_options import RendezvousOptions
from phalanx.report import tables as shown
from phalanx.report.logs import open_terminal
from phalanx.system.fork import fork, kill_group

COMMAND = "phalanx health"  # by which its nodes know each other
SLOW = 0.5  # of the median way: worth a look
PROBE_TIMEOUT_S = 600.0  # what nodes get to reach each other


def check_nodes(meeting: RendezvousOptions, own: dict[str, Any], as_json: bool) -> tuple[int, dict[str, Any]]:
    """Exchange health results with the other nodes (`rows` of a deep check as well), and check the connections between
    them. Returns the exit code, the same everywhere, and on node 0 the results of all nodes; elsewhere this node's.
    Raises PhalanxError if nodes do not arrive, or do not match.
    """
    try:
        with raise_on_stop_signal():
            if meeting.node == 0:
                return _lead(meeting, own, as_json)
            return _follow(meeting, own), _shareable_report(own)
    except StopRequested as asked:
        open_terminal().print(f"stopped by {asked}")
        return ExitCode.STOPPED, _shareable_report(own)


def _shareable_report(result: Mapping[str, Any]) -> dict[str, Any]:
    """A node's results without the fields that only nodes exchange."""
    return {key: result[key] for key in result if key not in ("ways", "rows")}


def _lead(meeting: RendezvousOptions, own: dict[str, Any], as_json: bool) -> tuple[int, dict[str, Any]]:
    with contextlib.ExitStack() as held:
        said = multinode.make_training_hello(Config(), [], meeting, COMMAND)
        first = held.enter_context(multinode.meet_nodes(meeting, said))
        secret = secrets.token_hex(32)
        echo = EchoServer(dict(interfaces()).get(first.interface() or "lo", "127.0.0.1"), secret)
        held.callback(echo.close)
        multinode.offer_to_all(first, {"secret": secret})
        peers = [list(echo.address), *(first.answers[node]["echo"] for node in sorted(first.answers))]
        first.offer({"secret": secret, "peers": peers})
        ways = {0: _probe_peers(0, peers, secret, first.poll_once)}
        _wait_for_all(first)
        answers = [own, *(first.answers[node]["result"] for node in sorted(first.answers))]
        ways |= {
            node: {int(to): ConnectionProbe(**way) for to, way in answers[node]["ways"].items()}
            for node in range(1, len(peers))
        }
        together = _combine_reports(answers, ways)
        usable = is_usable(Severity(together["verdict"]))
        code = ExitCode.DONE if usable else ExitCode.UNHEALTHY
        if not as_json:
            for result in [*together["nodes"], {"host": "between nodes", **together["between"]}]:
                open_terminal().print(shown.render_findings_table(result, show_ok=False))
        first.finish(code, f"all nodes checked: {together['verdict']}; see the output of node 0")
        return code, together


def _wait_for_all(first: MeetingHost) -> None:
    """Wait for the results of all nodes. Raises CollectiveError for nodes that do not answer, or that leave."""
    until = time.monotonic() + PROBE_TIMEOUT_S
    while first.state.missing or first.state.unready:
        first.poll_once()
        if first.state.missing or time.monotonic() > until:
            late = name_nodes(first.state.missing or first.state.unready)
            raise CollectiveError(f"{late} left or did not finish within {PROBE_TIMEOUT_S:g} s; see its output")
        time.sleep(0.05)


def _follow(meeting: RendezvousOptions, own: dict[str, Any]) -> int:
    said = multinode.make_training_hello(Config(), [], meeting, COMMAND)
    node = rendezvous_client.connect_to_leader(meeting.point, said, meeting.timeout_s, lambda text: None)
    with contextlib.ExitStack() as held:
        held.enter_context(contextlib.closing(node))

        def poll_once() -> None:
            node.poll_once()
            if node.lost is not None and node.over is None and node.refusal is None:
                raise CollectiveError(f"node 0 was lost ({node.lost}); restart all nodes")

        offer = _wait_for_offer(node, poll_once, "secret")
        if offer is not None:
            secret = str(offer["secret"])
            echo = EchoServer(str(node.channel.socket.getsockname()[0]).removeprefix("::ffff:"), secret)
            held.callback(echo.close)
            node.send({"answer": {"echo": list(echo.address)}})
            offer = _wait_for_offer(node, poll_once, "peers")
        if offer is not None:
            ways = _probe_peers(meeting.node, offer["peers"], secret, poll_once)
            told = {str(to): way.to_json() for to, way in ways.items()}
            node.send({"answer": {"result": own | {"ways": told}}})
            multinode.poll_until(node, lambda: _is_settled(node), poll_once)
        if node.refusal is not None:
            raise ConfigError(node.refusal)
        assert node.over is not None
        return node.over[0]


def _is_settled(node: RendezvousClient) -> bool:
    return node.over is not None or node.refusal is not None


def _wait_for_offer(node: RendezvousClient, poll_once: Callable[[], None], key: str) -> dict[str, Any] | None:
    """Wait for node 0's offer with `key`; None where the rendezvous ends before."""
    multinode.poll_until(node, lambda: _is_settled(node) or (node.offer is not None and key in node.offer), poll_once)
    return None if _is_settled(node) else node.offer


def _probe_peers(
    own: int, peers: Sequence[Sequence[Any]], secret: str, poll_once: Callable[[], None]
) -> dict[int, ConnectionProbe]:
    """Probe this node's connections to all others, in an order in which nodes pair off."""
    found = {}
    for other in placement.round_robin_partners(own, len(peers)):
        if other is not None:
            host, port = peers[other]
            found[other] = probe((str(host), int(port)), secret)
            poll_once()
    return found


# -------------------------------------------------------------------------------------------------------------- judging


def _combine_reports(
    answers: Sequence[Mapping[str, Any]], connections: Mapping[int, Mapping[int, ConnectionProbe]]
) -> dict[str, Any]:
    hosts = [str(answer["host"]) for answer in answers]
    between = judge_connections(hosts, connections)
    rows = [
        row | {"rank": at} for at, row in enumerate(itertools.chain(*(answer.get("rows", []) for answer in answers)))
    ]
    between += burn_in_report.compare_devices(rows)
    told = [
        {"from": one, "to": other} | way.to_json()
        for one, of_one in sorted(connections.items())
        for other, way in sorted(of_one.items())
    ]
    worst = verdict(
        [Finding("", Severity(answer["verdict"]), "") for answer in answers] + between,
    )
    return {
        "version": VERSION,
        "time": time.time(),
        "verdict": str(worst),
        "nodes": [_shareable_report(answer) for answer in answers],
        "between": {"verdict": str(verdict(between)), "findings": [finding.to_json() for finding in between]},
        "ways": told,
    }


def judge_connections(hosts: Sequence[str], connections: Mapping[int, Mapping[int, ConnectionProbe]]) -> list[Finding]:
    """Judge the connections between nodes; `ways[one][other]` is what `one` found."""
    every = [(one, other, way) for one, of_one in sorted(connections.items()) for other, way in sorted(of_one.items())]
    found = []
    for one, other, way in every:
        if way.error is not None:
            text = (
                f"node {one} ({hosts[one]}) cannot reach node {other} ({hosts[other]}): {way.error}; check "
                "firewalls, routes and the network of both"
            )
            found.append(Finding("connection", Severity.RESET, text, where=f"{one}-{other}"))
    rates = {(one, other): way.bytes_per_s for one, other, way in every if way.bytes_per_s is not None}
    if len(rates) >= burn_in_report.LEAST:
        median = statistics.median(rates.values())
        for (one, other), rate in rates.items():
            if rate < SLOW * median:
                text = (
                    f"node {one} ({hosts[one]}) and node {other} ({hosts[other]}) exchange {rate / median:.0%} of "
                    "the median pair's rate; check their network cards and cables"
                )
                found.append(Finding("network speed", Severity.WATCH, text, rate, SLOW * median, f"{one}-{other}"))
    for one, other, way in every:
        if one == 0 and way.skew_s is not None:  # to the nearest half round trip of a byte
            ahead = 0.0 if abs(way.skew_s) <= (way.latency_s or 0.0) else way.skew_s
            finding = host_health.judge_clock_skew(ahead, f"node {other} ({hosts[other]})")
            if finding.severity != Severity.OK:
                found.append(finding)
    if not found:
        fastest = f", the slowest at {min(rates.values()) / 2**20:.0f} MiB/s" if rates else ""
        found.append(Finding("connection", Severity.OK, f"all nodes reach each other{fastest}"))
    return found


# --------------------------------------------------------------------------------------------------------- health gate
# Health gate: whether this node is fit for training, before a start and after a death.


LATER_S = 1.0  # after a death, until the node is checked: restarting ranks need the cores first
INCIDENT_S = 60.0  # time limit of a check after a death; no process waits for it
LAST_S = 3.0  # limit at the end of a run
OF_DEVICES = ("gpu", "xid", "nvswitch", "ecc", "remapped", "recovery")  # how the names of checks of accelerators begin
OF_HOST = ("host", "shared memory")  # cut off only by a node that is busy, as it is when its ranks start again
SUSPICIOUS = 2  # corruptions of a device from which on each start reports it


def check_node_if_enabled(config: Config, paths: RunPaths, devices: Sequence[DeviceInfo]) -> dict[str, Any] | None:
    """The same as `check_node`, unless `resilience.health` is off."""
    return None if config.resilience.health == "off" else check_node(paths, devices, "resilience.health=off")


def check_node(paths: RunPaths, devices: Sequence[DeviceInfo], otherwise: str) -> dict[str, Any] | None:
    """Check this node's health before training. Returns the details of an event if there are findings, else None;
    raises Unhealthy where the node is not fit, with what to write to start `otherwise`."""
    findings = [
        *checks.run_quick_checks(paths.root, list_accelerator_uuids(devices)),
        *find_suspected_devices(paths, devices),
    ]
    unfit = at_least(findings, Severity.RESET)
    if unfit:
        raise Unhealthy(
            f"{socket.gethostname()} is not fit for training: {'; '.join(unique_sentences(unfit))} ({otherwise} "
            "starts anyway)"
        )
    seen = at_least(findings, Severity.WATCH)
    return make_health_details(seen, findings) if seen else None


def find_suspected_devices(paths: RunPaths, devices: Sequence[DeviceInfo]) -> list[Finding]:
    """Devices of this node that held wrong parameters in this run more than once, beyond doubt."""
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
            f"{model}{f' ({identity})' if identity else ''} held wrong parameters {times} times in this run "
            f"({paths.suspects.name}); exclude this node until `phalanx health --deep` passes",
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
    """Details of a `health` event: all findings that make the verdict."""
    return {
        "host": socket.gethostname(),
        "after": after,
        "verdict": str(verdict(findings)),
        "findings": [finding.to_json() for finding in seen],
    }


def list_accelerator_uuids(devices: Sequence[DeviceInfo]) -> list[str] | None:
    """UUIDs of the accelerators that are used, as their driver's library names them; None where not all are known."""
    accelerators = [device for device in devices if device.name != "cpu"]
    known = all(device.identity.startswith("GPU-") for device in accelerators)  # a part of a GPU has another name
    return sorted({device.identity for device in accelerators}) if known else None


def request_replacement(paths: RunPaths, findings: Sequence[Finding]) -> None:
    """Request a spare in place of this node where its hardware is unfit; other causes, such as a full disk, may affect
    all nodes."""
    broken = [
        finding
        for finding in at_least(findings, Severity.RESET)
        if (finding.severity != Severity.RESET or finding.check.startswith(OF_DEVICES)) and finding.check not in OF_HOST
    ]
    host = socket.gethostname()
    before = node_requests.find_newest_request(node_requests.read_requests(paths), host, host)
    if broken and (before is None or before.wanted == NodeRequestKind.RETURN):  # a user's own is not taken back
        reason = "; ".join(unique_sentences(broken))
        with contextlib.suppress(PhalanxError):  # it cannot be written; the event has the same contents
            node_requests.write_request(paths, host, NodeRequestKind.REPLACE, reason, node_requests.BY_HEALTH)


class HealthWatch:
    """Checks this node's health after a death, in a child process that writes its findings to the run folder and passes
    the details of an event to `write_details`.

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
        """Schedule a health check LATER_S from now, by `poll_once`: restarting ranks come first."""
        self._asked = self._asked or (attempt, after)
        self._not_before = time.monotonic() + LATER_S

    def poll_once(self) -> None:
        """Start a scheduled check, reap a finished one, and stop one that takes too long."""
        if self._child is not None:
            self._reap(*self._child)
        if self._child is None and self._asked is not None and time.monotonic() >= self._not_before:
            (attempt, after), self._asked = self._asked, None
            since_s = time.monotonic() - self._begun  # only kernel messages since the run began
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
        """Give a running or scheduled check a moment, then stop it."""
        until = time.monotonic() + LAST_S
        self._not_before = 0.0
        self.poll_once()
        while self._child is not None and time.monotonic() < until:
            time.sleep(0.02)
            self._reap(*self._child)
        if self._child is not None:  # a check that a device blocks in the kernel ends when the device releases it
            kill_group(self._child[0])

    def _write(self, attempt: int, after: str, since_s: float) -> int:
        findings = checks.run_quick_checks(self._paths.root, self._only, since_s)
        seen = at_least(findings, Severity.WATCH)
        self._write_details(attempt, make_health_details(seen, findings, after))
        checks.write_node_report(self._paths, findings)
        request_replacement(self._paths, findings)
        return ExitCode.DONE
