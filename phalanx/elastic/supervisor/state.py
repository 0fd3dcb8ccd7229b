"""State, events and actions of the supervisor of a job on several nodes: plain data.

A job is divided over *slots* of ranks, each with devices of a kind; a *seat* says which node has a slot now.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.recovery.catalog import RestorePoint, StateFileInfo


class JobPhase(enum.StrEnum):
    IDLE = "idle"  # nodes are missing, and the run waits for them
    PREPARING = "preparing"  # a new division is being resolved
    READYING = "readying"  # nodes with a seat are not all ready, or it is not time yet
    RUNNING = "running"
    ENDING = "ending"  # some ranks of the attempt may still run
    OVER = "over"


@dataclass(frozen=True)
class RecoveryPolicy:
    """Policy of recovery. `on_lost_node`: of "replace", "shrink" and "wait", in the order in which they are tried,
    before the run stops. `group`: number of ranks that belong together, as those of one copy of the model do. `nodes`:
    as many as the run was started for, without spares; with fewer than `least` it does not continue.
    `replicate_every`: steps between replicas on a second node."""

    nodes: int
    max_restarts: int = 3
    on_lost_node: tuple[str, ...] = ("replace", "shrink", "wait")
    wait_s: float = 600.0
    grow: bool = True
    same_crash: int = 3
    group: int = 1
    replicate_every: int = 1
    least: int = 1


@dataclass(frozen=True)
class NodeSlot:
    ranks: int
    model: str  # of the devices that it was divided for


@dataclass(frozen=True)
class Node:
    """A living member: `ready` is the division that it is ready for; `held`: state in its memory."""

    node: int
    host: str
    ranks: int
    model: str
    ready: int = 0
    drained: bool = False
    held: tuple[StateFileInfo, ...] = ()
    leaving: bool = False  # its machine will soon be gone


@dataclass(frozen=True)
class FailureCause:
    """Why the ranks of a node ended: `fingerprint` is the same for the same mistake, whichever rank makes it."""

    priority: int
    code: int
    fingerprint: str
    memory_reduced: bool = False  # after want of memory: whether the next attempt asks for less
    state_damaged: bool = False  # in-memory state was damaged and voided: the next attempt begins from other state


@dataclass(frozen=True)
class RestartBudget:
    """The restarts used of those that a policy allows."""

    failures: int = 0  # since `reached`
    reached: int = 0  # the step that was safe at the last failure
    crash: tuple[str, int] = ("", 0)  # the last one and how often it came in a row
    first: int = 1  # the first attempt of this start


@dataclass(frozen=True)
class StopState:
    """`signal`: the first stop signal. `interrupted`: ranks of this attempt were ended before they could save.
    `saving`: the last attempt after a stop signal, which restores the step in memory, saves and ends."""

    signal: str | None = None
    interrupted: bool = False
    saving: bool = False


@dataclass(frozen=True)
class JobState:
    policy: RecoveryPolicy
    phase: JobPhase = JobPhase.READYING
    nodes: tuple[Node, ...] = ()
    division: int = 1
    slots: tuple[NodeSlot, ...] = ()
    seats: tuple[int, ...] = ()  # the node of each slot
    attempt: int = 0  # the last that was started
    codes: Mapping[int, int] = field(default_factory=dict)  # of this attempt, by node
    causes: tuple[FailureCause, ...] = ()
    lost_with_ranks: tuple[int, ...] = ()  # nodes that were lost with ranks of this attempt
    since: float = 0.0  # when the phase began, of ENDING and READYING
    pause_reason: str | None = None  # why an attempt is ended that has not failed
    plan: tuple[tuple[int, int], ...] = ()  # node and ranks of a division that is prepared
    refused: frozenset[tuple[tuple[int, int], ...]] = frozenset()  # plans that came to nothing
    committed: int = 0  # the newest step that is safe
    budget: RestartBudget = RestartBudget()
    retry_reason: str | None = None  # why another attempt is made, where it has not failed
    stop: StopState = StopState()
    wait_until: float | None = None  # for lost nodes
    start_at: float = 0.0

    def node(self, number: int) -> Node | None:
        return next((node for node in self.nodes if node.node == number), None)


# ----------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class RanksEnded:
    """Ranks of an attempt are over on a node."""

    now: float
    node: int
    attempt: int
    code: int
    cause: FailureCause | None = None
    interrupted: bool = False  # they were ended after a stop signal, before they could save


@dataclass(frozen=True)
class NodeLost:
    now: float
    node: int
    why: str


@dataclass(frozen=True)
class NodeLeaving:
    """A node's machine will soon be gone, and others can continue without it."""

    now: float
    node: int
    why: str


@dataclass(frozen=True)
class NodeJoined:
    now: float
    node: Node


@dataclass(frozen=True)
class NodeReady:
    """A node is ready for a division."""

    now: float
    node: int
    division: int


@dataclass(frozen=True)
class NodeInventoryReported:
    """The state of the run in a node's memory, once no rank runs there."""

    now: float
    node: int
    held: tuple[StateFileInfo, ...]


@dataclass(frozen=True)
class NodeUnfit:
    """A node cannot take part; `code` is the exit code that says of what kind the reason is."""

    now: float
    node: int
    why: str
    code: int


@dataclass(frozen=True)
class DivisionPrepared:
    now: float
    division: int


@dataclass(frozen=True)
class DivisionRejected:
    """A division cannot be: too little memory, or shares that the recipe gives rank by rank."""

    now: float
    division: int
    why: str


@dataclass(frozen=True)
class StepsCommitted:
    now: float
    step: int


@dataclass(frozen=True)
class StopSignalReceived:
    """A stop signal, on any node."""

    now: float
    signal: str


@dataclass(frozen=True)
class NodeDrainChanged:
    """A node is not to be used any more, or (`drained` false) is to be used again. `only_if_spare`: only where a spare
    takes its seat."""

    now: float
    node: int
    drained: bool
    why: str
    only_if_spare: bool = False


@dataclass(frozen=True)
class Tick:
    now: float


SupervisorEvent = (
    RanksEnded
    | NodeLost
    | NodeLeaving
    | NodeJoined
    | NodeReady
    | NodeInventoryReported
    | NodeUnfit
    | DivisionPrepared
    | DivisionRejected
    | StepsCommitted
    | StopSignalReceived
    | NodeDrainChanged
    | Tick
)


# ---------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class EndAttempt:
    """Have an attempt end everywhere; `save_first`: by asking its ranks to finish their step and save."""

    attempt: int
    save_first: bool = False


@dataclass(frozen=True)
class PrepareDivision:
    """Resolve the recipe for another division: `plan` has node and ranks of each slot."""

    division: int
    plan: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SendOffer:
    """Send the offer of a division to all members, or to a new one."""

    division: int
    node: int | None = None


@dataclass(frozen=True)
class StartAttempt:
    """Start an attempt with these seats from a step: on the disk, or in memory, where `kept` says. `replayed_steps`:
    how many later steps, committed by all living ranks, are replayed. `reason`: why another attempt is made, where the
    one before has not failed."""

    attempt: int
    division: int
    seats: tuple[int, ...]
    step: int
    kept: RestorePoint | None = None
    replayed_steps: int = 0
    reason: str | None = None


@dataclass(frozen=True)
class DropNode:
    """A member is to leave, with an exit code."""

    node: int
    why: str
    code: int


@dataclass(frozen=True)
class WriteEvent:
    """Something for the records and the console."""

    kind: str
    details: Mapping[str, object]


@dataclass(frozen=True)
class FinishJob:
    code: int
    why: str = ""


SupervisorAction = EndAttempt | PrepareDivision | SendOffer | StartAttempt | DropNode | WriteEvent | FinishJob
Decision = tuple[JobState, list[SupervisorAction]]
