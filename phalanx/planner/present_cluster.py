"""The cluster of a job, from its nodes' descriptions of their devices before any measurement."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.layout.hardware import MOST, Hardware
from phalanx.planner import measured_cluster, parse_cluster
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS, CostConstants

SHEET_CORES = 16  # of the CPU whose figures are in `kinds`


@dataclass(frozen=True)
class NodeDevice:
    """A rank's device: what its maker calls it, and bytes of memory that this rank could have. `cores` are a CPU
    rank's part of its machine's; 0 of an accelerator."""

    model: str
    memory_bytes: int
    cores: float = 0.0


def parse_node_devices(tree: Any) -> tuple[tuple[NodeDevice, ...], ...]:
    """The devices of each node, as JSON has them. Raises ValueError for anything else."""
    try:
        nodes = tuple(tuple(NodeDevice(**device) for device in node) for node in tree)
    except TypeError as error:
        raise ValueError(f"no devices of nodes: {error}") from None
    if not nodes or not all(node and all(map(_is_one, node)) for node in nodes):
        raise ValueError("a node without devices, or a device that is none")
    return nodes


def _is_one(device: NodeDevice) -> bool:
    if not isinstance(device.model, str) or type(device.memory_bytes) is not int:
        return False
    return 0 <= device.memory_bytes <= MOST and type(device.cores) in (int, float) and 0 <= device.cores <= MOST


def cluster_from_nodes(nodes: Sequence[Sequence[NodeDevice]]) -> ClusterSpec:
    """The devices of all nodes in order of rank, as their data-sheets have them and with their own memory; the network
    between nodes is taken to be as fast as where a cluster's text names no speed."""
    kinds, numbers = [], []
    for number, devices in enumerate(nodes):
        for device in devices:
            kind = measured_cluster.match_device_name(device.model, device.cores > 0, device.memory_bytes)
            kind = replace(kind, memory_bytes=device.memory_bytes)
            if device.cores > 0:
                kind = replace(
                    kind.scale_speed(device.cores / SHEET_CORES), name=f"{kind.name} of {device.cores:.3g} cores"
                )
            kinds.append(kind)
            numbers.append(number)
    return ClusterSpec(
        measured_cluster.group_devices(numbers, kinds), parse_cluster.DEFAULT_SPEED, parse_cluster.DEFAULT_LATENCY
    )


def resolve_cluster(
    nodes: Sequence[Sequence[NodeDevice]], known: Hardware | None
) -> tuple[ClusterSpec, CostConstants, bool]:
    """The cluster of these devices, its constants, and whether both rest on measurements of these devices
    (`known`), or on data sheets, for example if the measurements were of other devices."""
    there = [(number, device.model) for number, devices in enumerate(nodes) for device in devices]
    if known is not None:
        order = {node: number for number, node in enumerate(dict.fromkeys(device.node for device in known.devices))}
        if there == [(order[device.node], device.model) for device in known.devices]:
            constants = measured_cluster.constants_from_hardware(known)
            return measured_cluster.cluster_from_hardware(known, constants), constants, True
    return cluster_from_nodes(nodes), DEFAULT_CONSTANTS, False
