"""The nodes of a run as its records have them: whether they are there, what checks have found, what is asked of
them."""

import socket
from typing import Any

from phalanx.core.errors import RunError
from phalanx.core.events import EventKind, read_events
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor import node_requests

HERE, LOST, ELSEWHERE, OVER = "in the run", "lost", "not in the run", "the run is over"


def list_nodes(paths: RunPaths) -> list[dict[str, str]]:
    """For each node of the last start, and each other one that something is asked of: `node` (number and host),
    `state`, `health` (the verdict of its last check, if there was one) and `why` (what is asked, by whom).

    Raises RunError where there is no run.
    """
    if not paths.events.exists():
        raise RunError(f"{paths.display_name} holds no run; name a run folder")
    hosts: dict[str, str] = {}  # by number
    state: dict[str, str] = {}
    seen: dict[str, str] = {}
    for event in read_events(paths.events):
        kind, number = event.get("kind"), str(event.get("node"))
        if kind == EventKind.RUN_STARTED and (event.get("hosts") or not hosts):  # without, its ranks were divided anew
            here = [*(_names(event.get("hosts")) or [socket.gethostname()]), *_names(event.get("spares"))]
            hosts = {str(at): host for at, host in enumerate(here)}
            state = dict.fromkeys(hosts, HERE)
        elif kind == EventKind.NODE_JOINED and event.get("host"):
            hosts[number], state[number] = str(event["host"]), HERE
        elif kind == EventKind.NODE_LOST:
            state[number] = LOST
        elif kind in (EventKind.FINISHED, EventKind.STOPPED, EventKind.GAVE_UP):
            state = {each: LOST if was == LOST else OVER for each, was in state.items()}
        elif kind == EventKind.RESTARTED:  # it had stopped to be divided anew
            state = {each: HERE if was == OVER else was for each, was in state.items()}
        elif kind == EventKind.HEALTH:
            seen[str(event.get("host"))] = str(event.get("verdict"))
    for host, report in node_requests.read_health_reports(paths).items():
        seen[host] = str(report.get("verdict"))
    asked = {request.node: request for request in node_requests.read_requests(paths)}
    found, named = [], set[str]()
    for number, host in hosts.items():
        request = node_requests.find_newest_request(asked.values(), number, host)
        named |= {number, host}
        why = "" if request is None else f"{request.wanted} asked for by {request.by}: {request.reason}"
        found.append({"node": f"{number} {host}", "state": state[number], "health": seen.get(host, ""), "why": why})
    for request in [each for each in asked.values() if each.node not in named]:
        why = f"{request.wanted} asked for by {request.by}: {request.reason}"
        health = seen.get(request.node, "")
        found.append({"node": request.node, "state": ELSEWHERE, "health": health, "why": why})
    return found


def _names(value: Any) -> list[str]:
    """A list of names; none where a line, which may have come from anywhere, has something else."""
    return [str(each) for each in value] if isinstance(value, list) else []
