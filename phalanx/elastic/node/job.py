"""What an agent runs on its node, and what it knows of the other nodes of the same job."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from phalanx.core.placement import HostPort, InMemoryCheckpoint, Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.node.watchdog import HangTimeouts, StepHistory


class LeaderRole(Protocol):
    """What the node that leads does beside its part."""

    def poll_once(self) -> None:
        """Do all that can be done without waiting."""

    def hear(self, node: int, message: Message) -> None:
        """Take what a member says."""

    def greet(self, channel: Channel, hello: Message) -> None:
        """Take a caller who is no member."""

    def descriptors(self) -> Mapping[int, int]:
        """What poll() has to look at, and for what."""

    def close(self, over: tuple[int, str] | None) -> None:
        """Leave nothing behind; who was about to come hears how the job ended, exit code and words, if it is `over`."""


@dataclass(frozen=True)
class NodeRanks:
    """The part of a job's ranks that one node has."""

    node: int
    first_rank: int
    world: int  # ranks of the whole job
    interface: str | None  # the network interface that leads to the other nodes, where it is known
    nodes: int = 1  # that have ranks
    partner: HostPort | None = None  # where the agent of the next one of them is
    epoch: int | None = None  # in which its attempt was ordered


def _nothing() -> None:
    return None


def _no() -> bool:
    return False


def _not_less(rank: int, tried: int, steps: int) -> None:
    return None


def _nothing_kept() -> None:
    return None


def _no_event(kind: str, details: dict[str, Any]) -> None:
    return None


@dataclass
class NodeJob:
    """What an agent runs: `world` ranks of `worker` on this node.

    `find_in_memory_state` says what an attempt goes on from that is in shared memory; it is asked when no rank lives.
    `after_out_of_memory` says whether, after a rank ran
    out of memory, another attempt asks for less than the one before: then it is made, whatever the count.
    `after_kernel_kill` is told of a rank that the kernel has killed for want of memory, of the sequences of its
    largest micro-batch and of the steps that it had done in its attempt; it returns what to say where that is why it
    ran out of memory, and has it ask for less if that can be. None: it is a death like any other.

    `devices` has one name per rank (none given: all on the CPU). `paths` says where logs and causes of death go (None:
    standard error, and no causes), `logs` whether ranks have logs or write to where their agent does.
    `blocked_signals`: signals that wait until a rank unblocks them, as one that trains does once it can heed them.
    `on_event(kind, details)` gets the events; details always hold `attempt`. `on_idle` is called about every 0.1 s.
    `grace_s`: seconds that workers get, after a stop signal, to finish their step and save, before they are killed.
    `shared`: a folder in this node's shared memory, which
    outlives the ranks, where they may keep their state if `keeps_state` says so; there their pulses are, by which ranks
    are ended for which nothing has changed for longer than `hang_timeouts` (None: for ever); `step_history` is what
    attempts of this job before have shown of their steps.
    """

    world: int
    worker: Callable[[Placement], int]
    paths: RunPaths | None = None
    devices: Sequence[str] = ()
    on_event: Callable[[str, dict[str, Any]], None] = _no_event
    on_idle: Callable[[], None] = _nothing
    grace_s: float = 60.0
    after_out_of_memory: Callable[[], bool] = _no
    after_kernel_kill: Callable[[int, int, int], str | None] = _not_less
    shared: Path | None = None
    keeps_state: bool = True
    hang_timeouts: HangTimeouts | None = None
    step_history: StepHistory = field(default_factory=StepHistory)
    find_in_memory_state: Callable[[], InMemoryCheckpoint | None] = _nothing_kept
    logs: bool = True
    blocked_signals: Collection[int] = ()

    def __post_init__(self) -> None:
        self.devices = list(self.devices) or ["cpu"] * self.world
        assert len(self.devices) == self.world >= 1, f"{self.world} ranks need as many devices, not {self.devices}"
