"""`phalanx health` on several nodes: each looks at itself and at its ways to the others; node 0 shows what was seen."""

import contextlib
import itertools
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.config.schema import Config
from phalanx.core import round_robin
from phalanx.core.errors import CollectiveError, ConfigError
from phalanx.core.placement import ExitCode
from phalanx.elastic.membership import rendezvous_client
from phalanx.elastic.membership.connectivity import Echo, Way, probe
from phalanx.elastic.membership.rendezvous import interfaces
from phalanx.elastic.membership.rendezvous_client import OtherNode
from phalanx.elastic.membership.rendezvous_host import FirstNode
from phalanx.elastic.node.signals import StopAsked, stoppable
from phalanx.health import burn_in_report
from phalanx.health import host as host_health
from phalanx.health.findings import VERSION, Finding, Severity, is_usable, verdict
from phalanx.launch import multinode
from phalanx.launch.rendezvous_options import Meeting
from phalanx.report import health as shown
from phalanx.report.terminal import open_terminal

COMMAND = "phalanx health"  # by which its nodes know each other
SLOW = 0.5  # of the median way: worth a look
LEAST = 3  # so many ways make a median worth comparing with
LATE_S = 600.0  # what nodes get to reach each other


def looked_at(meeting: Meeting, own: dict[str, Any], as_json: bool) -> tuple[int, dict[str, Any]]:
    """Meet the other nodes with the results of this one (`rows` of a deep check beside them), and look at the ways
    between. Returns the exit code, the same everywhere, and on node 0 the results of all; its own elsewhere.

    Raises PhalanxError where nodes do not come, or do not fit.
    """
    try:
        with stoppable():
            if meeting.node == 0:
                return _lead(meeting, own, as_json)
            return _follow(meeting, own), _shown(own)
    except StopAsked as asked:
        open_terminal().print(f"stopped by {asked}")
        return ExitCode.STOPPED, _shown(own)


def _shown(result: Mapping[str, Any]) -> dict[str, Any]:
    """A node's results without what only nodes tell each other."""
    return {key: result[key] for key in result if key not in ("ways", "rows")}


def _lead(meeting: Meeting, own: dict[str, Any], as_json: bool) -> tuple[int, dict[str, Any]]:
    with contextlib.ExitStack() as held:
        first = held.enter_context(multinode.hosted(meeting, multinode.hello(Config(), [], meeting, COMMAND)))
        tend = multinode.hearing(first)
        multinode.gather(first, meeting, tend)
        secret = secrets.token_hex(32)
        echo = Echo(dict(interfaces()).get(first.interface() or "lo", "127.0.0.1"), secret)
        held.callback(echo.close)
        multinode.offer(first, lambda node: {"secret": secret}, tend)
        peers = [list(echo.address), *(answer["echo"] for answer in first.answers())]
        first.offer(lambda node: {"secret": secret, "peers": peers})
        ways = {0: _ways(0, peers, secret, tend)}
        _wait_for_all(first, tend)
        answers = [own, *(answer["result"] for answer in first.answers())]
        ways |= {
            node: {int(to): Way(**way) for to, way in answers[node]["ways"].items()} for node in range(1, len(peers))
        }
        together = _together(answers, ways)
        usable = is_usable(Severity(together["verdict"]))
        code = ExitCode.DONE if usable else ExitCode.UNHEALTHY
        if not as_json:
            for result in [*together["nodes"], {"host": "between nodes", **together["between"]}]:
                open_terminal().print(shown.table(result, well=False))
        first.finish(code, f"all nodes were looked at: {together['verdict']}; node 0 shows what was found")
        return code, together


def _wait_for_all(first: FirstNode, tend: Callable[[], None]) -> None:
    """Until all nodes have said what they found. Raises CollectiveError for nodes that do not, or that leave."""
    until = time.monotonic() + LATE_S
    while first.missing() or not all("result" in answer for answer in first.answers()):
        tend()
        late = ", ".join(map(str, first.missing()))
        if late or time.monotonic() > until:
            raise CollectiveError(
                f"node {late or '?'} left, or was not done within {LATE_S:g} s; its own output says why"
            )
        time.sleep(0.05)


def _follow(meeting: Meeting, own: dict[str, Any]) -> int:
    said = multinode.hello(Config(), [], meeting, COMMAND)
    node = rendezvous_client.seek(meeting.place, said, meeting.timeout_s, lambda text: None)
    with contextlib.ExitStack() as held:
        held.enter_context(contextlib.closing(node))

        def tend() -> None:
            node.tend()
            if node.lost is not None and node.over is None and node.refused is None:
                raise CollectiveError(f"node 0 was lost ({node.lost}); start all nodes again")

        offer = _offered(node, tend, "secret")
        if offer is not None:
            secret = str(offer["secret"])
            echo = Echo(str(node.channel.socket.getsockname()[0]).removeprefix("::ffff:"), secret)
            held.callback(echo.close)
            node.say({"answer": {"echo": list(echo.address)}})
            offer = _offered(node, tend, "peers")
        if offer is not None:
            ways = _ways(meeting.node, offer["peers"], secret, tend)
            told = {str(to): way.to_json() for to, way in ways.items()}
            node.say({"answer": {"result": own | {"ways": told}}})
            multinode.wait(node, lambda: _settled(node, tend))
        if node.refused is not None:
            raise ConfigError(node.refused)
        assert node.over is not None
        return node.over[0]


def _settled(node: OtherNode, tend: Callable[[], None]) -> bool:
    tend()
    return node.over is not None or node.refused is not None


def _offered(node: OtherNode, tend: Callable[[], None], key: str) -> dict[str, Any] | None:
    """What node 0 offers once it has `key`; None where the meeting ends before."""
    multinode.wait(node, lambda: _settled(node, tend) or (node.offer is not None and key in node.offer))
    return None if node.over is not None or node.refused is not None else node.offer


def _ways(own: int, peers: Sequence[Sequence[Any]], secret: str, tend: Callable[[], None]) -> dict[int, Way]:
    """This node's ways to all others, in an order in which nodes pair off."""
    found = {}
    for other in round_robin.meetings(own, len(peers)):
        if other is not None:
            host, port = peers[other]
            found[other] = probe((str(host), int(port)), secret)
            tend()
    return found


# -------------------------------------------------------------------------------------------------------------- judging


def _together(answers: Sequence[Mapping[str, Any]], ways: Mapping[int, Mapping[int, Way]]) -> dict[str, Any]:
    hosts = [str(answer["host"]) for answer in answers]
    between = judge(hosts, ways)
    rows = [
        row | {"rank": at} for at, row in enumerate(itertools.chain(*(answer.get("rows", []) for answer in answers)))
    ]
    between += burn_in_report.compared(rows)
    told = [
        {"from": one, "to": other} | way.to_json()
        for one, of_one in sorted(ways.items())
        for other, way in sorted(of_one.items())
    ]
    worst = verdict(
        [Finding("", Severity(answer["verdict"]), "") for answer in answers] + between,
    )
    return {
        "version": VERSION,
        "time": time.time(),
        "verdict": str(worst),
        "nodes": [_shown(answer) for answer in answers],
        "between": {"verdict": str(verdict(between)), "findings": [finding.to_json() for finding in between]},
        "ways": told,
    }


def judge(hosts: Sequence[str], ways: Mapping[int, Mapping[int, Way]]) -> list[Finding]:
    """What the ways between nodes tell; `ways[one][other]` is what `one` found."""
    every = [(one, other, way) for one, of_one in sorted(ways.items()) for other, way in sorted(of_one.items())]
    found = []
    for one, other, way in every:
        if way.error is not None:
            text = (
                f"node {one} ({hosts[one]}) does not reach node {other} ({hosts[other]}): {way.error}; look at "
                "firewalls, routes and the network of both"
            )
            found.append(Finding("connection", Severity.RESET, text, where=f"{one}-{other}"))
    rates = {(one, other): way.bytes_per_s for one, other, way in every if way.bytes_per_s is not None}
    if len(rates) >= LEAST:
        median = statistics.median(rates.values())
        for (one, other), rate in rates.items():
            if rate < SLOW * median:
                text = (
                    f"node {one} ({hosts[one]}) and node {other} ({hosts[other]}) exchange {rate / median:.0%} of what "
                    "the median pair does; look at their network cards and cables"
                )
                found.append(Finding("network speed", Severity.WATCH, text, rate, SLOW * median, f"{one}-{other}"))
    for one, other, way in every:
        if one == 0 and way.skew_s is not None:  # to the nearest half of what a byte takes there and back
            ahead = 0.0 if abs(way.skew_s) <= (way.latency_s or 0.0) else way.skew_s
            finding = host_health.skewed(ahead, f"node {other} ({hosts[other]})")
            if finding.severity != Severity.OK:
                found.append(finding)
    if not found:
        fastest = f", the slowest at {min(rates.values()) / 2**20:.0f} MiB/s" if rates else ""
        found.append(Finding("connection", Severity.OK, f"all nodes reach each other{fastest}"))
    return found
