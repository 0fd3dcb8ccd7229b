"""Which ranks share a node: by the names of their hosts, never by their numbers."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Topology:
    """Which ranks share a node."""

    nodes: tuple[tuple[int, ...], ...]  # ranks of each node, ascending
    node_of: tuple[int, ...]  # by rank
    index_of: tuple[int, ...]  # by rank: its index among the ranks of its node

    @staticmethod
    def from_hosts(hosts: Sequence[str]) -> "Topology":
        """The topology of ranks whose hosts have these names, in order of rank."""
        nodes: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            nodes.setdefault(host, []).append(rank)
        numbers = {host: number for number, host in enumerate(nodes)}
        return Topology(
            tuple(tuple(ranks) for ranks in nodes.values()),
            tuple(numbers[host] for host in hosts),
            tuple(nodes[host].index(rank) for rank, host in enumerate(hosts)),
        )

    def subset(self, ranks: Sequence[int]) -> "Topology":
        """That of a group of these ranks, in this order."""
        return Topology.from_hosts([str(self.node_of[rank]) for rank in ranks])

    @property
    def form(self) -> str:
        """What its collectives come to: "alone", "direct" (one node), "ring" (one rank per node) or "two-level"."""
        if len(self.node_of) == 1:
            return "alone"
        if len(self.nodes) == 1:
            return "direct"
        return "ring" if len(self.nodes) == len(self.node_of) else "two-level"

    def relay(self, node: int, owner: int) -> int:
        """The rank that handles the range of `owner` on a node (modulo their number); the owner itself on its own."""
        ranks = self.nodes[node % len(self.nodes)]
        return ranks[self.index_of[owner] % len(ranks)]


def this_host() -> str:
    """A name of this machine that no other has. Network namespaces, such as containers, count as machines."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        boot, network = "", ""
    return f"{socket.gethostname()} {boot} {network}"
