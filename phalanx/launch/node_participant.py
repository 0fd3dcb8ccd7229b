"""What one of several nodes does beside its ranks, whatever these run: it looks at itself after a death, says how the
job goes and, while it leads, records that, shows it, and can be found by nodes that come back.

Any node may come to lead.
"""

import abc
import contextlib
import functools
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.events import Kind, write_event
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import epoch_files, rendezvous
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.membership import Claim
from phalanx.elastic.membership.rendezvous import look_again
from phalanx.elastic.node.job import Job
from phalanx.elastic.node.node_agent import Peer, run
from phalanx.elastic.node.signals import Signals
from phalanx.elastic.supervisor.coordinator import Leader, Plan, take_lead
from phalanx.elastic.supervisor.node_requests import Request
from phalanx.health.devices import Device
from phalanx.launch import health_gate
from phalanx.launch.recorder import Again, Hold, Recorder
from phalanx.recovery.catalog import Held
from phalanx.report import event_text

CHECK_S = 120.0  # what a look at this node may take, before it is trained on
SEEN_S = 3.0  # what a network file system gets to show what another node has just written
Tend = Callable[[], None]


@dataclass(frozen=True)
class Where:
    """This node's number, how many train, and the folder where they meet, if it is one."""

    node: int
    nodes: int
    meeting: Path | None


@dataclass
class Participant(abc.ABC):
    """`said`: what this node says of itself; `say` is for the user who sits here, while another node leads."""

    paths: RunPaths
    devices: Sequence[Device]
    where: Where
    said: Message
    say: Callable[[str], None]
    recorder: Recorder | None = field(default=None, init=False)
    first_attempt: int = field(default=0, init=False)
    committed: int = field(default=0, init=False)
    held: Mapping[int, tuple[Held, ...]] = field(
        default_factory=dict, init=False
    )  # in nodes' memories, of a job before
    code: int = field(default=int(ExitCode.FAILED), init=False)
    cut_off: bool = field(default=False, init=False)
    unfit: str | None = field(default=None, init=False)  # why the first node does no more than bring all together
    watch: health_gate.Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = health_gate.Watch(self.paths, health_gate.used(self.devices), self._seen)

    @property
    @abc.abstractmethod
    def looks(self) -> bool:
        """Whether this node is looked at after a death."""

    @property
    @abc.abstractmethod
    def grace_s(self) -> float:
        """What ranks get to end, in seconds, after a stop signal."""

    @abc.abstractmethod
    def make(self, offer: Message, tend: Tend) -> Job:
        """What this node's agent runs in a division. Raises PhalanxError where this node does not fit it."""

    @abc.abstractmethod
    def prepare(self, division: int, plan: Plan, devices: list[list[Any]]) -> Message:
        """What is offered for other ranks; runs in a child."""

    @abc.abstractmethod
    def succeed(self, offer: Message, hold: Hold) -> Recorder:
        """Take the lead over from another node: take what the offer says, and record from now on."""

    @abc.abstractmethod
    def finish(self, peer: Peer, code: int) -> int:
        """The job is over, and this node led it to its end: say so. Returns the exit code."""

    def safe(self) -> list[int]:
        """How far the job has come for good, since the last call: so far restarts are not counted again."""
        assert self.recorder is not None
        return self.recorder.safe()

    @property
    def claim(self) -> Claim | None:
        """Creates the files of epochs; a URL has none."""
        return None if self.paths.url is not None else functools.partial(epoch_files.claim, self.paths)

    def ranks_of(self, offer: Message) -> int:
        """How many ranks this node has in a division, or would have in the place of another one."""
        ranks = dict(zip(offer["seats"], (ranks for ranks, _ in offer["slots"]), strict=True))
        # Of one that has come back with fewer devices than its ranks had, as many as it has: it cannot take them again.
        return min(len(self.devices), ranks.get(self.where.node, max(ranks.values())))

    # ---------------------------------------------------------------------------------------------------- what happens

    def _seen(self, attempt: int, seen: dict[str, Any]) -> None:
        """What was found on this node after a death; in a child."""
        if self.recorder is not None:
            write_event(self.paths.events, Kind.HEALTH, attempt, **seen)
        else:
            self.say(event_text.sentence({"kind": Kind.HEALTH, **seen}))

    def _note(self, world: int, kind: str, details: dict[str, Any]) -> None:
        """Take what this node's own agent says of its ranks, of `world`."""
        if kind == Kind.WORKER_DIED:
            self._look_after(details)
        if self.recorder is not None:
            self.recorder.note(kind, details)
        elif kind == Kind.ATTEMPT_STARTED:
            ranks = sorted(details["pids"])
            which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            self.say(f"attempt {details['attempt']} started: {which} of {world} here")
        else:
            self.say(event_text.sentence({"kind": kind, **details}))

    def _tell(self, kind: str, details: dict[str, Any]) -> None:
        """Record what the leader says; a death on this node is looked into."""
        assert self.recorder is not None
        if kind == Kind.WORKER_DIED and "host" not in details:
            self._look_after(details)
        self.recorder.note(kind, details)

    def _look_after(self, death: dict[str, Any]) -> None:
        if self.looks:
            self.watch.look(death["attempt"], f"the death of rank {death['rank']}")

    # --------------------------------------------------------------------------------------------------------- leading

    def record(self, recorder: Recorder, event: dict[str, Any], later: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Be the first to lead, whose `event` of the start is written already, and note what was found `later`."""
        self.recorder = recorder
        recorder.show(Kind.RUN_STARTED, event)
        for kind, details in later:
            recorder.note(kind, {"attempt": self.first_attempt, **details})

    def lead(self, peer: Peer) -> Leader:
        """Lead from now on."""
        offer = peer.offer
        assert offer is not None
        if self.recorder is None:
            hold = functools.partial(self._found, peer.secret, peer.circle.me.address, peer.circle.me.port)
            self.recorder = self.succeed(offer, hold)
        return take_lead(
            peer, self.said, self.first_attempt, self.committed, self.prepare, self._tell, self.safe, self._asked,
            held=self.held, unfit=self.unfit,
        )  # fmt: skip

    def _asked(self) -> list[Request]:
        assert self.recorder is not None
        return self.recorder.asked()

    @contextlib.contextmanager
    def _found(self, secret: str, address: str, port: int) -> Iterator[Again]:
        """Hold what a leader holds that was not the first one: the rendezvous, and the run folder's lock, as soon as it
        is free: what is yielded tries that. Both name this agent, whose child holds them."""
        from phalanx.trainer import run_folder

        agent, locks = os.getppid(), list[int]()
        with contextlib.ExitStack() as held:

            def again() -> None:
                with contextlib.suppress(RunError):  # a leader that was frozen may hold it; the epoch keeps it out
                    if not locks:
                        locks.append(run_folder.open_folder(self.paths, agent)[0])
                        held.callback(os.close, locks[0])

            again()
            place = self.where.meeting
            if place is not None:
                there = rendezvous.Address((address,), port, secret, f"{agent} on {self.said['host']}")
                with contextlib.suppress(RunError):  # then no node comes back, and the others go on
                    made = rendezvous.publish(place, there)
                    held.callback(rendezvous.withdraw, place, there, made)
            yield again

    # --------------------------------------------------------------------------------------------------------- the end

    def to_the_end(self, peer: Peer, enter: Callable[[], None] = lambda: None) -> int:
        """Run this node's part and say how the run ended. Returns the exit code. `enter` makes all who have met members
        first: of a stop signal that comes meanwhile they hear, and do not go on without this node."""
        with Signals() as signals:
            enter()
            try:
                code = run(peer, self.grace_s, signals)
                if peer.over is not None and peer.leads:
                    peer.over = code, _ending(code, self.paths, self.where.node)
            finally:
                peer.close()
                self.watch.close()
        recorder, self.recorder = self.recorder, None
        self.code, self.cut_off = code, peer.circle.fenced is not None
        if peer.circle.fenced is not None:
            if recorder is not None:
                # One that has given the lead away still says so; one that was given up may not write any more.
                end = recorder.close if peer.over is not None else recorder.abandon
                end()
            self.say(f"this node has ended its ranks and leaves: {peer.circle.fenced}")
            return code
        if recorder is None:
            self.say(peer.over[1] if peer.over is not None else "this node was asked to stop, and leaves")
            return code
        recorder.close()
        self.paths.sign.unlink(missing_ok=True)
        self.code = self.finish(peer, code)
        return self.code


def _ending(code: int, paths: RunPaths, leader: int) -> str:
    if code == ExitCode.DONE:
        return "the run is done"
    if code == ExitCode.STOPPED:
        return "the run was stopped; the same commands go on with it"
    return f"the run failed (exit code {code}); node {leader} and {paths.shown} say why"


# -------------------------------------------------------------------------------------------------- a folder for all


def signed(paths: RunPaths, first: bool = True) -> str:
    """The sign by which all nodes know the run folder from now on. It stays, where it is not the `first` one: what was
    offered before may yet be gone on with."""
    if not first:
        with contextlib.suppress(OSError):
            if sign := paths.sign.read_text(encoding="utf-8"):
                return sign
    sign = secrets.token_hex(8)
    write_atomic(paths.sign, sign)
    return sign


def check_folder(paths: RunPaths, sign: str, tend: Tend) -> None:
    """Raises ConfigError when this node does not see node 0's run folder, or cannot write to it."""
    until = time.monotonic() + SEEN_S
    while True:
        look_again(paths.root)
        with contextlib.suppress(OSError):
            if paths.sign.read_text(encoding="utf-8") == sign:
                break
        if time.monotonic() > until:
            raise ConfigError(
                f"the run folder {paths.root.absolute()} of this node is not the one of node 0; give --run-dir a "
                "folder on a file system that all nodes share, or a URL"
            )
        tend()
        time.sleep(0.05)
    # By doing so: what the rights say is not what a server does, which may take this node's root for nobody.
    probe = paths.root / f"{paths.sign.name}-{secrets.token_hex(4)}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"this node cannot write to the run folder {paths.root.absolute()} ({error.strerror}); change its rights"
        ) from None
