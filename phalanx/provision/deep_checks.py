"""Deep health checks of nodes, at creation and on request: all devices of a node under load, and the connections
between nodes."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from phalanx.core.errors import RunError
from phalanx.provision.links import Probes
from phalanx.provision.machines import Machines, run_on
from phalanx.provision.state import NodeRecord

DEEP_S = 10  # of load on each device
CHECK_S = 3600.0


def check_devices(machines: Machines, node: NodeRecord, log: Path) -> None:
    """Put all devices of a node under load (`phalanx health --deep`). Raises RunError with what is unhealthy, or what
    the node lacks for the check."""
    command = f"{machines.python()} -m phalanx health --deep --seconds {DEEP_S} --json"
    output = run_on(machines, node, f"{command}; echo code $?", log, CHECK_S)
    if not output.strip().endswith("code 0"):
        raise RunError(f"the deep health check of {node.name} failed: {explain_unhealthy(output)}")


def explain_unhealthy(output: str) -> str:
    """What `phalanx health --json` found to be unhealthy; else the package that it lacks, or the end of its output."""
    if missing := re.search(r"^ModuleNotFoundError: No module named '([\w.]+)'", output, re.MULTILINE):
        return (
            f"its python3 has no {missing[1]}; install Phalanx with torch there, such as by the lifecycle script, and "
            "repeat the command"
        )
    try:
        tree = json.loads(output[output.index("{") : output.rindex("}") + 1])
        said = [each["sentence"] for each in tree["findings"] if each["severity"] in ("reset", "reboot", "isolate")]
        return "; ".join(dict.fromkeys(said))
    except (ValueError, KeyError, TypeError):
        return " ".join(output.strip().splitlines()[-3:-1])


def find_broken_links(nodes: Sequence[NodeRecord], probes: Probes) -> dict[str, str]:
    """A sentence for each node that does not reach another one, or is not reached by it. Where a node has more broken
    links than those at their other ends, it alone is blamed for them."""
    broken: dict[frozenset[int], str] = {}
    for one, of_one in probes.items():
        for other, probe in of_one.items():
            if probe.error is not None:
                sentence = (
                    f"{nodes[one].name} cannot exchange data with {nodes[other].name}: {probe.error}; check firewalls, "
                    "routes and the network cards of both"
                )
                broken.setdefault(frozenset((one, other)), sentence)
    found: dict[str, str] = {}
    while broken:
        count = Counter(node for pair in broken for node in pair)
        most = max(count.values())
        for node in [node for node in count if count[node] == most]:
            found[nodes[node].name] = next(sentence for pair, sentence in broken.items() if node in pair)
        broken = {pair: sentence for pair, sentence in broken.items() if all(count[node] < most for node in pair)}
    return found
