"""The cluster of a plan: devices and links as plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.core.errors import ConfigError
from phalanx.planner.device_catalog import DeviceKind


@dataclass(frozen=True)
class NodeGroup:
    """A group of `nodes` equal nodes with `per_node` devices of one kind each; `shares_node`: its first node is the
    last node of the previous group, with devices of both kinds."""

    nodes: int
    per_node: int
    kind: DeviceKind
    shares_node: bool = False

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class ClusterSpec:
    """Groups of nodes on one network. A node sends at most `between_bits_per_s`, for any number of devices, and
    receives as much at the same time. Devices are numbered by group, node and place on the node, as ranks are.
    `busy_hop_s`: the added latency of a message to a rank that computes; CPUs only. Raises ConfigError for a cluster
    without a device, or with a network without bandwidth.
    """

    groups: tuple[NodeGroup, ...]
    between_bits_per_s: float = 100e9
    between_latency_s: float = 5e-6
    busy_hop_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.groups or any(group.nodes < 1 or group.per_node < 1 for group in self.groups):
            raise ConfigError("a cluster needs one device at least in every group; give each group nodes and devices")
        if not self.between_bits_per_s > 0 or self.between_latency_s < 0:
            raise ConfigError(
                f"a network of {self.between_bits_per_s} bits per second and a latency of {self.between_latency_s} "
                "seconds carries nothing; give it a positive speed and a latency of zero or more"
            )

    @cached_property
    def devices(self) -> int:
        return sum(group.devices for group in self.groups)

    @cached_property
    def nodes(self) -> int:
        return sum(group.nodes - group.shares_node for group in self.groups)

    @cached_property
    def spans(self) -> tuple[tuple[int, int, NodeGroup], ...]:
        """(first device, one after the last, group) in order."""
        spans, first = [], 0
        for group in self.groups:
            spans.append((first, first + group.devices, group))
            first += group.devices
        return tuple(spans)

    @cached_property
    def node_sizes(self) -> tuple[int, ...]:
        """Of each group the devices of the fullest node that it is on, with those beside its own."""
        found, node = [group.per_node for group in self.groups], list[int]()
        for number, group in enumerate(self.groups):
            node = [*node, number] if group.shares_node else [number]
            together = sum(self.groups[each].per_node for each in node)
            for each in node:
                found[each] = max(found[each], together)
            if group.nodes > 1:
                node = [number]  # only its last node can have devices of other groups
        return tuple(found)

    def node_size_of(self, device: int) -> int:
        """The same of a device's group."""
        return next(crowd for (_, behind, _), crowd in zip(self.spans, self.node_sizes, strict=True) if device < behind)

    @cached_property
    def names(self) -> tuple[tuple[int, int, str, bool], ...]:
        """The identity of a cluster, without its network."""
        return tuple((group.nodes, group.per_node, group.kind.name, group.shares_node) for group in self.groups)

    @cached_property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """Each kind once, in order of appearance."""
        found: list[DeviceKind] = []
        for group in self.groups:
            if group.kind not in found:
                found.append(group.kind)
        return tuple(found)

    def node_of(self, device: int) -> int:
        """The number of a device's node."""
        before = 0
        for first, behind, group in self.spans:
            before -= group.shares_node
            if device < behind:
                return before + (device - first) // group.per_node
            before += group.nodes
        raise IndexError(f"there is no device {device} among {self.devices}")

    def select_groups(self, numbers: Sequence[int]) -> "ClusterSpec":
        """Some of the groups, in that order: those that have a node in common are beside one another still."""
        found: list[NodeGroup] = []
        ends = [(self.node_of(first), self.node_of(behind - 1)) for first, behind, _ in self.spans]
        for place, number in enumerate(numbers):
            first, last = ends[number]
            before = ends[numbers[place - 1]] if place else None
            common = before is not None and (before[0] in (first, last) or before[1] in (first, last))
            found.append(replace(self.groups[number], shares_node=common))
        return replace(self, groups=tuple(found))

    def merge_alike_groups(self) -> "ClusterSpec":
        """Merge groups of equal nodes at the place of the first; nodes with heterogeneous devices stay."""
        if any(group.shares_node for group in self.groups):
            return self
        alike: dict[tuple[str, int], NodeGroup] = {}
        for group in self.groups:
            key = (group.kind.name, group.per_node)
            before = alike.get(key)
            alike[key] = group if before is None else replace(before, nodes=before.nodes + group.nodes)
        return replace(self, groups=tuple(alike.values()))

    def resize_groups(self, nodes: Sequence[int]) -> "ClusterSpec":
        """Select this number of nodes of each group; groups without nodes are removed."""
        part = self.select_groups([number for number, count in enumerate(nodes) if count > 0])
        counts = [count for count in nodes if count > 0]
        groups = (replace(group, nodes=count) for group, count in zip(part.groups, counts, strict=True))
        return replace(part, groups=tuple(groups))

    def group_of(self, device: int) -> NodeGroup:
        for first, behind, group in self.spans:
            if first <= device < behind:
                return group
        raise IndexError(f"there is no device {device} among {self.devices}")

    def kind_of(self, device: int) -> DeviceKind:
        return self.group_of(device).kind
