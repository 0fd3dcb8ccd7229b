"""Steps that bring a cluster to its description: pure, from the description, the nodes and the running machines.

After an interruption the same function gives the remaining steps; for a finished cluster, none.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from phalanx.core.errors import RunError
from phalanx.provision.config import ClusterConfig
from phalanx.provision.slurm_files import node_names
from phalanx.provision.state import NodeRecord, Stage


class NodesFailed(RunError):
    """What was done left `nodes` unfit for service, or none by name where the whole cluster failed."""

    def __init__(self, message: str, nodes: Collection[str]) -> None:
        super().__init__(message)
        self.nodes = frozenset(nodes)


class StepKind(StrEnum):
    """Kind of step; all nodes of one step are handled at the same time."""

    TERMINATE = "terminate"
    LAUNCH = "launch"
    CONFIGURE = "configure"
    PROVISION = "provision"
    JOIN = "join"


# A node needs a step until it has reached a stage.
_REACHES = {
    StepKind.LAUNCH: Stage.LAUNCHED,
    StepKind.CONFIGURE: Stage.CONFIGURED,
    StepKind.PROVISION: Stage.PROVISIONED,
    StepKind.JOIN: Stage.JOINED,
}
_ORDER = list(Stage)


@dataclass(frozen=True)
class Step:
    """One kind of work on some nodes, by name."""

    kind: StepKind
    nodes: tuple[str, ...]


def plan_nodes(config: ClusterConfig, nodes: Collection[NodeRecord]) -> list[NodeRecord]:
    """The nodes that a description wants: those that there are, and new records for the others."""
    known = {node.name: node for node in nodes}
    return [
        known.get(name) or NodeRecord(name, group.name)
        for group in config.groups
        for name in node_names(group.name, group.count)
    ]


def mark_lost(nodes: Collection[NodeRecord], alive: Collection[str]) -> list[NodeRecord]:
    """Take nodes that do not live back to the beginning; returns them."""
    lost = [node for node in nodes if node.stage != Stage.ABSENT and node.name not in alive]
    for node in lost:
        node.stage, node.config_digest = Stage.ABSENT, ""
    return lost


def plan_steps(
    wanted: Collection[NodeRecord], present: Collection[NodeRecord], digests: Mapping[str, str] | None = None
) -> list[Step]:
    """The steps to the wanted nodes, in order; `digests`: of the files that each should have, once that is known."""
    names = {node.name for node in wanted}
    steps = [Step(StepKind.TERMINATE, tuple(node.name for node in present if node.name not in names))]
    for kind, stage in _REACHES.items():
        due = [node.name for node in wanted if _ORDER.index(node.stage) < _ORDER.index(stage)]
        if kind == StepKind.CONFIGURE and digests is not None:
            changed = [node.name for node in wanted if node.config_digest != digests[node.name]]
            due = list(dict.fromkeys([*due, *changed]))
        steps.append(Step(kind, tuple(due)))
    return [step for step in steps if step.nodes]
