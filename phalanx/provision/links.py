"""The links between the nodes of a cluster: measured pair by pair, and the groups of nodes that they show, as behind
one switch, for Slurm's topology.conf."""

import contextlib
import json
import secrets
import statistics
import subprocess
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phalanx.elastic.membership.connectivity import ConnectionProbe
from phalanx.provision.machines import Machines
from phalanx.provision.state import NodeRecord

FAR = 0.5  # of a usual near link's rate: a slower link leads to another switch
MOST_MEASURED = 64  # nodes: each probes all others
MEASURE_S = 300.0
_PROBE = "from phalanx.provision.link_probe import main; main()"
Probes = Mapping[int, Mapping[int, ConnectionProbe]]  # [from][to], by place in the list of nodes


def measure_links(machines: Machines, nodes: Sequence[NodeRecord]) -> Probes:
    """Probe the links between all nodes, at the same time. A node whose part fails counts as unreachable."""
    secret = secrets.token_hex(32)
    script = f"exec {machines.python()} -c '{_PROBE}'"
    processes = [
        subprocess.Popen(
            machines.command(node, ["sh", "-c", script]), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node in nodes
    ]  # fmt: skip
    timer = threading.Timer(MEASURE_S, _kill_all, [processes])
    timer.start()
    try:
        with ThreadPoolExecutor(len(nodes)) as pool:

            def ask(number: int, question: Mapping[str, Any]) -> Any:
                process = processes[number]
                assert process.stdin is not None and process.stdout is not None
                try:
                    process.stdin.write(json.dumps(question) + "\n")
                    process.stdin.flush()
                    return json.loads(process.stdout.readline())
                except (OSError, ValueError):  # it has ended
                    return None

            every = range(len(nodes))
            peers = list(pool.map(lambda i: ask(i, {"secret": secret, "host": nodes[i].address}), every))
            found = list(pool.map(lambda i: peers[i] and ask(i, {"own": i, "peers": peers}), every))
    finally:
        timer.cancel()
        for process in processes:
            with contextlib.suppress(OSError):  # it has ended
                assert process.stdin is not None
                process.stdin.close()
        said = [_end(process) for process in processes]
    probes: dict[int, dict[int, ConnectionProbe]] = {}
    for one in every:
        probes[one] = {int(other): ConnectionProbe(**probe) for other, probe in (found[one] or {}).items()}
        for other in every:
            if other != one and other not in probes[one]:
                at = one if found[one] is None else other
                why = f"the probe of {nodes[at].name} did not run ({said[at] or 'no reason given'})"
                probes[one][other] = ConnectionProbe(error=why)
    return probes


def _kill_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()


def _end(process: subprocess.Popen[str]) -> str:
    """End a node's part; the last line of its errors."""
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        lines = process.stderr.read().strip().splitlines()
    process.wait()
    return lines[-1] if lines else ""


def record_rates(nodes: Sequence[NodeRecord], probes: Probes) -> dict[str, int]:
    """Bytes per second of each pair of nodes, by their names with a blank between: the better of both ways, for what
    else runs only makes a link look slower."""
    rates: dict[str, int] = {}
    for one, of_one in probes.items():
        for other, probe in of_one.items():
            if probe.bytes_per_s is not None:
                pair = link_key(nodes[one].name, nodes[other].name)
                rates[pair] = max(rates.get(pair, 0), int(probe.bytes_per_s))
    return rates


def link_key(one: str, other: str) -> str:
    """The key of a pair of nodes."""
    return " ".join(sorted((one, other)))


def group_by_links(names: Sequence[str], rates: Mapping[str, float]) -> list[list[str]]:
    """Groups of nodes that reach each other at nearly the best rate, as those behind one switch do; one group where no
    link is much slower. A node whose links are all slow forms a group alone.

    Nodes belong together where a chain of near links joins them (single linkage); a link is near at FAR of the rate
    that is usual for the best link of a node.
    """

    def rate(one: str, other: str) -> float:
        return rates.get(link_key(one, other), 0.0)

    best = [max((rate(one, other) for other in names if other != one), default=0.0) for one in names]
    near = FAR * statistics.median(best) if best else 0.0
    groups: list[list[str]] = []
    for name in names:
        joined = [group for group in groups if any(rate(name, other) >= near for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append([*(each for group in joined for each in group), name])
    order = {name: number for number, name in enumerate(names)}
    return sorted((sorted(group, key=order.__getitem__) for group in groups), key=lambda group: order[group[0]])


def forget_node(rates: Mapping[str, int], name: str) -> dict[str, int]:
    """The rates without those of a node that is another machine now."""
    return {pair: rate for pair, rate in rates.items() if name not in pair.split()}


def list_measured(rates: Mapping[str, int]) -> Collection[str]:
    """The nodes that have been measured."""
    return {name for pair in rates for name in pair.split()}
