"""Network cards of a node: which have a link, and differences from a baseline.

RDMA ports count as cards. Virtual interfaces (loopback, bridges, tunnels) are skipped, unless a node has no others.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from phalanx.health.findings import Finding, Severity

INTERFACES, RDMA = Path("/sys/class/net"), Path("/sys/class/infiniband")


def read_links(interfaces: Path = INTERFACES, rdma: Path = RDMA) -> dict[str, bool]:
    """Whether each card, and each port of an RDMA card, has a link; by name, such as eth0 or mlx5_0 port 1."""
    names = [path.name for path in sorted(interfaces.glob("*")) if path.name != "lo" and path.is_dir()]
    real = [name for name in names if (interfaces / name / "device").exists()] or names
    found = {}
    for name in real:
        with contextlib.suppress(OSError):  # the carrier of a disabled card cannot be read
            found[name] = False
            found[name] = (interfaces / name / "carrier").read_text().strip() == "1"
    for state in sorted(rdma.glob("*/ports/*/state")):
        with contextlib.suppress(OSError):
            found[f"{state.parts[-4]} port {state.parts[-2]}"] = "ACTIVE" in state.read_text()
    return found


def judge_links(links: Mapping[str, bool], expected: Mapping[str, bool]) -> list[Finding]:
    """Cards that had a link in the baseline and have lost it, or are missing."""
    found = []
    for name in (name for name, up in expected.items() if up):
        if name not in links:
            text = f"the network card {name} is not there any more; reboot the node, and have the card inspected"
            found.append(Finding("network card", Severity.REBOOT, text, where=name))
        elif not links[name]:
            text = f"the network card {name} has lost its link; check its cable and the switch"
            found.append(Finding("network link", Severity.RESET, text, 0, 1, name))
    return found or [Finding("network", Severity.OK, f"{sum(links.values())} network links up")]
