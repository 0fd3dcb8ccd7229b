"""What a supervisor knows of a job on several nodes, what it hears of it, and what it can have done: plain data.

A job is divided over *slots* of ranks, each with devices of a kind; a *seat* says which node has a slot now.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.recovery.catalog import Choice, Held


class Phase(enum.StrEnum):
    IDLE = "idle"  # nodes are missing, and it is waited for them
    PREPARING = "preparing"  # a new division is being resolved
    READYING = "readying"  # nodes with a seat are not all ready, or it is not time yet
    RUNNING = "running"
    ENDING = "ending"  # some ranks of the attempt may still run
    OVER = "over"


@dataclass(frozen=True)
class Policy:
    """`on_lost_node`: of "replace", "shrink" and "wait", what is tried, in that order, before the run stops. `group`:
    ranks that hold one copy of the model together. `nodes`: as many as the run was started for, without spares; with
    fewer than `least` it does not go on. `replicate_every`: of so many steps a second node has one."""

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
class Slot:
    ranks: int
    model: str  # of the devices that it was divided for


@dataclass(frozen=True)
class Node:
    """A living member: `ready` is the division that it has what it needs for; `held`: state in its memory."""

    node: int
    host: str
    ranks: int
    model: str
    ready: int = 0
    drained: bool = False
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class Cause:
    """Why the ranks of a node ended: `what` is the same for the same mistake, whichever rank makes it."""

    suspicion: int
    code: int
    what: str
    lowered: bool = False  # after want of memory: whether the next attempt asks for less
    damaged: bool = False  # what was kept in memory, and is void now: the next attempt begins with something else


@dataclass(frozen=True)
class State:
    policy: Policy
    phase: Phase = Phase.READYING
    nodes: tuple[Node, ...] = ()
    division: int = 1
    slots: tuple[Slot, ...] = ()
    seats: tuple[int, ...] = ()  # the node of each slot
    attempt: int = 0  # the last that was started
    codes: Mapping[int, int] = field(default_factory=dict)  # of this attempt, by node
    causes: tuple[Cause, ...] = ()
    gone: tuple[int, ...] = ()  # nodes that were lost with ranks of this attempt
    since: float = 0.0  # when the phase began, of ENDING and READYING
    planned: str | None = None  # why an attempt is ended that has not failed
    plan: tuple[tuple[int, int], ...] = ()  # node and ranks of a division that is prepared
    refused: frozenset[tuple[tuple[int, int], ...]] = frozenset()  # plans that came to nothing
    committed: int = 0  # the newest step that is safe
    reached: int = 0  # that of the last failure
    failures: int = 0  # since then
    crash: tuple[str, int] = ("", 0)  # the last one and how often it came in a row
    again: str | None = None  # why another attempt is made, where it has not failed
    first: int = 1  # the first attempt of this start
    asked: str | None = None  # the first stop signal
    wait_until: float | None = None  # for lost nodes
    start_at: float = 0.0

    def node(self, number: int) -> Node | None:
        return next((node for node in self.nodes if node.node == number), None)


# ----------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Ended:
    """Ranks of an attempt are over on a node."""

    now: float
    node: int
    attempt: int
    code: int
    cause: Cause | None = None


@dataclass(frozen=True)
class Lost:
    now: float
    node: int
    why: str


@dataclass(frozen=True)
class Joined:
    now: float
    node: Node


@dataclass(frozen=True)
class Ready:
    """A node has what a division needs."""

    now: float
    node: int
    division: int


@dataclass(frozen=True)
class Holds:
    """What a node has of the run's state in its memory, now that no rank runs there."""

    now: float
    node: int
    held: tuple[Held, ...]


@dataclass(frozen=True)
class Unfit:
    """A node cannot take part; `code` is the exit code that says of what kind the reason is."""

    now: float
    node: int
    why: str
    code: int


@dataclass(frozen=True)
class Prepared:
    now: float
    division: int


@dataclass(frozen=True)
class Refused:
    """A division cannot be: too little memory, or shares that the recipe gives rank by rank."""

    now: float
    division: int
    why: str


@dataclass(frozen=True)
class Progress:
    now: float
    step: int


@dataclass(frozen=True)
class Asked:
    """A stop signal, on any node."""

    now: float
    signal: str


@dataclass(frozen=True)
class Drained:
    """A node is not to be used any more, or (`drained` false) is to be used again. `gently`: only where a spare takes
    its seat."""

    now: float
    node: int
    drained: bool
    why: str
    gently: bool = False


@dataclass(frozen=True)
class Time:
    now: float


Event = Ended | Lost | Joined | Ready | Holds | Unfit | Prepared | Refused | Progress | Asked | Drained | Time


# ---------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class End:
    """Have an attempt end everywhere; `saving`: by asking its ranks to finish their step and save."""

    attempt: int
    saving: bool = False


@dataclass(frozen=True)
class Prepare:
    """Resolve the recipe for another division: `plan` has node and ranks of each slot."""

    division: int
    plan: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Offer:
    """Tell all members what a division needs, or the one member that has come."""

    division: int
    node: int | None = None


@dataclass(frozen=True)
class Start:
    """Start an attempt with these seats from a step: on the disk, or in memory, where `kept` says. `again`: so many
    steps behind that, which all ranks that live had committed, are walked again."""

    attempt: int
    division: int
    seats: tuple[int, ...]
    step: int
    kept: Choice | None = None
    again: int = 0


@dataclass(frozen=True)
class Drop:
    """A member is to leave, with an exit code."""

    node: int
    why: str
    code: int


@dataclass(frozen=True)
class Note:
    """Something for the records and the console."""

    kind: str
    details: Mapping[str, object]


@dataclass(frozen=True)
class Finish:
    code: int
    why: str = ""


Action = End | Prepare | Offer | Start | Drop | Note | Finish
Decision = tuple[State, list[Action]]
