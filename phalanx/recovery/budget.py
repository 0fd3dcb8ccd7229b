"""What it takes to keep steps in memory that outlives the ranks: one rule for a run's shares, a dry run and a plan.

It is memory of the host. Where ranks compute on CPUs it is that which they compute in, and their state lives there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.recovery.shared_memory import HOST_MEMORY_SHARE

SLOTS = 2  # steps of a rank, and of a replica
NEWEST, PINNED = "the two newest steps", "a third, on several nodes"
REPLICA = "a replica, on several nodes"


@dataclass(frozen=True)
class StateCopies:
    """How often the state of a rank lies in such memory: `own` times as its own, and `replicas` times that of a rank of
    another node, taken to be as large; `replays`: a gradient of either beside it, by which updates are made again."""

    own: int = 0
    replicas: int = 0
    replays: bool = False

    def own_bytes(self, state: float, gradient: float) -> float:
        """Bytes of a rank's own, of whose state and gradient these are."""
        return self.own * state + self.replays * gradient

    def replica_bytes(self, state: float, gradient: float) -> float:
        """Bytes of the replica that is kept for another rank."""
        return self.replicas * state + self.replays * gradient

    def total_bytes(self, state: float, gradient: float) -> float:
        """Both."""
        return self.own_bytes(state, gradient) + self.replica_bytes(state, gradient)


NO_COPIES = StateCopies()


def list_copy_options(
    memory: bool | str, replicate: int | str, several: bool, replays: bool
) -> tuple[StateCopies, ...]:
    """What `resilience.in_memory_checkpoints` and `resilience.replicate_every` ask for, and what is done in turn where
    there is no room for that. `several`: other nodes are to get what this one has; `replays`: they can make its updates
    again."""
    if memory is False:
        return (NO_COPIES,)
    if not several or replicate == "off":
        found = [StateCopies(SLOTS)]
    elif isinstance(replicate, int):
        return (StateCopies(SLOTS + 1, SLOTS),)
    else:
        found = [StateCopies(SLOTS, SLOTS, replays)]
        if replicate == "every_step":
            return tuple(found)
        found.append(StateCopies(SLOTS))
    return tuple(found) if memory is True else (*found, NO_COPIES)


def choose_copies(options: Sequence[StateCopies], state: float, gradient: float, free: float) -> StateCopies:
    """Which of them a run does that finds so many bytes free; the last one, where none of the others leaves enough."""
    for each in options[:-1]:
        own = each.own_bytes(state, gradient)
        if own <= HOST_MEMORY_SHARE * free and each.replica_bytes(state, gradient) <= HOST_MEMORY_SHARE * (free - own):
            return each
    return options[-1]


def describe_budget(keeps: StateCopies, state: int) -> dict[str, int]:
    """What is counted, in words, for a dry run."""
    found = {NEWEST: SLOTS * state} if keeps.own else {}
    if keeps.replicas:
        found |= {PINNED: state} if keeps.own > SLOTS else {}
        found[REPLICA] = keeps.replicas * state
    return found
