"""Where a rank runs, what it begins with, and how a process ends."""

import enum
from dataclasses import dataclass

HostPort = tuple[str, int]


@dataclass(frozen=True)
class StateFileLocation:
    """The state file of a rank of an attempt before: `path` on this node; or, at the `address` of another one, the
    `name` that it is asked for there. `layout`: what its slots look like, as hexadecimal digits of a digest."""

    rank: int
    path: str
    layout: str = ""
    address: HostPort | None = None


@dataclass(frozen=True)
class InMemoryCheckpoint:
    """A step that all ranks of an attempt before have committed to shared memory, and their files in order of rank:
    all of them, or as many as hold every part."""

    step: int
    files: tuple[StateFileLocation, ...]


class ExitCode(enum.IntEnum):
    """Exit codes of `phalanx` and of its workers."""

    DONE = 0
    FAILED = 1  # an unexpected error; worth another attempt
    CONFIG = 2  # a mistake in the recipe, the data or the run folder; never retried
    UNHEALTHY = 3  # a node is not fit to be trained on: found before the start; another node may be
    STOPPED = 10  # asked to stop by a signal: finished the step, saved, left
    OUT_OF_MEMORY = 11  # never retried unchanged


@dataclass(frozen=True)
class StoreAddress:
    """Where the ranks of one attempt meet: the TCP store's host and port. The rank that keeps the store has either its
    socket, bound and listening, or is told to `serve`."""

    host: str
    port: int
    listen_fd: int | None = None
    serve: bool = False


@dataclass(frozen=True)
class Placement:
    """Where one worker runs. `device` is "cpu" or an accelerator with its index; `attempt` counts from 1; `threads` of
    the host are the user's choice, 0: this rank's part of the cores; `shared` is the folder in this node's shared
    memory where things outlive the rank, `keeps` whether state does, `kept` what the attempt begins with (None: with
    what is on the disk); of several `nodes` the agent of the next one is at `partner`, the order came in `epoch`."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    device: str
    store: StoreAddress | None  # None: one rank alone
    attempt: int = 1
    threads: int = 0
    shared: str | None = None
    kept: InMemoryCheckpoint | None = None
    keeps: bool = True
    nodes: int = 1
    partner: HostPort | None = None
    epoch: int | None = None


# --------------------------------------------------------------------------------------------------------- round robin
# Who meets whom, so that each pair meets once and nobody is with two at a time: a round-robin tournament.


def round_robin_partners(rank: int, world: int) -> list[int | None]:
    """Whom a rank meets, round by round, so that all pairs meet once and nobody two at a time; None: it waits.

    A round-robin tournament by the circle method: the last seat stays, the others move on by one.
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
