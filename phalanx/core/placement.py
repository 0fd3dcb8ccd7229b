"""Placement of a rank, the state that it begins with, and exit codes of processes."""

import enum
from dataclasses import dataclass

HostPort = tuple[str, int]


@dataclass(frozen=True)
class StateFileLocation:
    """Location of the state file of a rank of an earlier attempt: `path` on this node; or `name` on the node at
    `address`. `layout`: digest of the layout of its slots, in hexadecimal digits."""

    rank: int
    path: str
    layout: str = ""
    address: HostPort | None = None


@dataclass(frozen=True)
class InMemoryCheckpoint:
    """A step that all ranks of an earlier attempt have committed to shared memory, and their files in order of rank:
    all of them, or enough that each part has one."""

    step: int
    files: tuple[StateFileLocation, ...]


class ExitCode(enum.IntEnum):
    """Exit codes of `phalanx` and of its workers."""

    DONE = 0
    FAILED = 1  # an unexpected error; retried
    CONFIG = 2  # an error in the recipe, the data or the run folder; never retried
    UNHEALTHY = 3  # a node is unfit for training: detected before the start; another node may be fit
    STOPPED = 10  # stopped by a signal: finished the step, saved, exited
    OUT_OF_MEMORY = 11  # never retried with the same settings


@dataclass(frozen=True)
class StoreAddress:
    """Address of the TCP store where the ranks of one attempt meet. The rank that hosts the store either inherits its
    listening socket, or is told to `serve`."""

    host: str
    port: int
    listen_fd: int | None = None
    serve: bool = False


@dataclass(frozen=True)
class Placement:
    """Placement of one rank. `device` is "cpu" or an accelerator with its index; `attempt` counts from 1; `threads` is
    the user's number of host threads, or 0 for this rank's share of the cores. `shared` is the folder in this node's
    shared memory for data that outlives the rank, `keeps` whether it holds training state, `kept` the in-memory
    checkpoint that the attempt begins with (None: from disk). With several `nodes`, the agent of the next one is at
    `partner`; `epoch` is that of the order to start."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    device: str
    store: StoreAddress | None  # None: a single rank
    attempt: int = 1
    threads: int = 0
    shared: str | None = None
    kept: InMemoryCheckpoint | None = None
    keeps: bool = True
    nodes: int = 1
    partner: HostPort | None = None
    epoch: int | None = None


# --------------------------------------------------------------------------------------------------------- round robin
# A round-robin tournament: each pair meets once, and no rank is in two pairs at a time.


def round_robin_partners(rank: int, world: int) -> list[int | None]:
    """Round-robin partners of a rank, round by round, so that each pair meets once and no rank is in two pairs at a
    time; None: the rank waits. By the circle method: the last seat stays, the others move on by one.
    """
    seats = world + world % 2
    met: list[int | None] = []
    for turn in range(seats - 1):
        if rank == seats - 1:
            other = turn * (seats // 2) % (seats - 1)
        else:
            other = (turn - rank) % (seats - 1)
            other = seats - 1 if other == rank else other
        met.append(other if other < world else None)
    return met
