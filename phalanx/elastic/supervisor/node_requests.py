"""Requests to drain, replace or return a node of a run: files in the run folder, one per node; and the nodes of a run
from its records: state, health and requests.

The leader of the run reads the requests. A file has the current request; the last one written counts.
"""

import enum
import getpass
import json
import os
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.json_lines import write_atomic
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import RunPaths
from phalanx.system import locks

VERSION = 1
BY_HEALTH = "its health check"  # the requester without a user: effective only where a spare takes the node's place
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class NodeRequestKind(enum.StrEnum):
    """The kinds of requests for a node."""

    DRAIN = "drain"  # to be left at the next occasion
    REPLACE = "replace"  # the same, and another one taken instead
    RETURN = "return"  # to be used again


@dataclass(frozen=True)
class NodeRequest:
    """`node` is a host name, or a number of the run's nodes; `time` in seconds since the epoch; `by` for people."""

    node: str
    wanted: NodeRequestKind
    reason: str
    time: float
    by: str


def check_name(node: str) -> None:
    """Raises ConfigError for an invalid node name, which must not become a file name."""
    if _NAME.fullmatch(node) is None:
        raise ConfigError(f"{node!r} is not a node name; give a host name, or a node's number in the run")


def write_request(
    paths: RunPaths, node: str, wanted: NodeRequestKind, reason: str, by: str | None = None
) -> NodeRequest:
    """Write a request into a run folder, in the name of this user unless `by` says whose it is. Raises ConfigError for
    a bad name, RunError where it cannot be written."""
    check_name(node)
    if not paths.events.exists():
        raise RunError(f"{paths.display_name} is not a run folder; name a run folder with --run")
    locks.check_symlinks(paths)
    by = by or f"{_user()} on {socket.gethostname()}"
    request = NodeRequest(node, wanted, reason, time.time(), by)
    tree = {"version": VERSION, **vars(request)}
    try:
        paths.nodes.mkdir(mode=0o700, exist_ok=True)
        write_atomic(paths.node_request(node), json.dumps(tree) + "\n")
    except OSError as error:
        raise RunError(
            f"the request cannot be written to {paths.nodes} ({error.strerror}); fix its permissions"
        ) from None
    return request


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container that knows no name for it
        return f"user {os.getuid()}"


def read_requests(paths: RunPaths) -> list[NodeRequest]:
    """All requests in a run folder, in order of time; a file that cannot be read asks for nothing."""
    found = []
    for path in sorted(paths.nodes.glob("*.json")):
        try:
            tree: Any = json.loads(path.read_text(encoding="utf-8"))
            names = ("node", "wanted", "reason", "time", "by")
            node, wanted, reason, when, by = (tree[name] for name in names)
            request = NodeRequest(str(node), NodeRequestKind(wanted), str(reason), float(when), str(by))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if path.name == f"{request.node}.json":
            found.append(request)
    return sorted(found, key=lambda request: request.time)


def find_newest_request(candidates: Iterable[NodeRequest], number: int | str, host: str) -> NodeRequest | None:
    """The last of these requests that names a node, by its number or its host; None where none does."""
    named = [request for request in candidates if request.node in (str(number), host)]
    return max(named, key=lambda request: request.time, default=None)


def read_health_reports(paths: RunPaths) -> dict[str, dict[str, Any]]:
    """The newest results of each host's checks in a run folder, by host."""
    found = {}
    for path in sorted(paths.nodes.glob("*.health")):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            found[str(tree["host"])] = tree
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


HERE, LOST, ELSEWHERE, OVER = "in the run", "lost", "not in the run", "the run is over"


def list_nodes(paths: RunPaths) -> list[dict[str, str]]:
    """List the nodes of the last start, and others with a request: `node` (number and host), `state`, `health`
    (the verdict of the last check, if any) and `why` (the request and its user). Raises RunError if there is no
    run.
    """
    if not paths.events.exists():
        raise RunError(f"{paths.display_name} is not a run folder; name a run folder")
    hosts: dict[str, str] = {}  # by number
    state: dict[str, str] = {}
    seen: dict[str, str] = {}
    for event in read_events(paths.events):
        kind, number = event.get("kind"), str(event.get("node"))
        if kind == EventKind.RUN_STARTED and (event.get("hosts") or not hosts):  # without: the work was redistributed
            here = [*(_names(event.get("hosts")) or [socket.gethostname()]), *_names(event.get("spares"))]
            hosts = {str(at): host for at, host in enumerate(here)}
            state = dict.fromkeys(hosts, HERE)
        elif kind == EventKind.NODE_JOINED and event.get("host"):
            hosts[number], state[number] = str(event["host"]), HERE
        elif kind == EventKind.NODE_LOST:
            state[number] = LOST
        elif kind in (EventKind.FINISHED, EventKind.STOPPED, EventKind.GAVE_UP):
            state = {each: LOST if was == LOST else OVER for each, was in state.items()}
        elif kind == EventKind.RESTARTED:  # stopped to redistribute the work
            state = {each: HERE if was == OVER else was for each, was in state.items()}
        elif kind == EventKind.HEALTH:
            seen[str(event.get("host"))] = str(event.get("verdict"))
    for host, report in read_health_reports(paths).items():
        seen[host] = str(report.get("verdict"))
    asked = {request.node: request for request in read_requests(paths)}
    found, named = [], set[str]()
    for number, host in hosts.items():
        request = find_newest_request(asked.values(), number, host)
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
