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
from typing import Any

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import election, rendezvous
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.election import Claim
from phalanx.elastic.membership.rendezvous import refresh_listing
from phalanx.elastic.membership.rendezvous_host import RendezvousHost
from phalanx.elastic.node.agent import run_agent
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.node.worker import NodeJob, StopSignals
from phalanx.elastic.supervisor.coordinator import Coordinator, Plan, become_coordinator
from phalanx.elastic.supervisor.node_requests import NodeRequest
from phalanx.health.findings import DeviceInfo
from phalanx.launch import health_check, multinode
from phalanx.launch.recorder import EventRecorder, HoldLeaderFiles, LocalRecorder, TryAgain
from phalanx.launch.rendezvous_options import RendezvousOptions
from phalanx.recovery.catalog import StateFileInfo
from phalanx.report import event_text

CHECK_S = 120.0  # what a look at this node may take, before it is trained on
SEEN_S = 3.0  # what a network file system gets to show what another node has just written
Tend = Callable[[], None]


@dataclass
class NodeParticipant(abc.ABC):
    """`hello`: what this node says of itself."""

    paths: RunPaths
    devices: Sequence[DeviceInfo]
    options: RendezvousOptions
    hello: Message
    recorder: EventRecorder | LocalRecorder | None = field(default=None, init=False)
    first_attempt: int = field(default=0, init=False)
    committed: int = field(default=0, init=False)
    inventories: Mapping[int, tuple[StateFileInfo, ...]] = field(
        default_factory=dict, init=False
    )  # in nodes' memories, of a job before
    code: int = field(default=int(ExitCode.FAILED), init=False)
    cut_off: bool = field(default=False, init=False)
    unfit_reason: str | None = field(
        default=None, init=False
    )  # why the first node does no more than bring all together
    health_watch: health_check.HealthWatch = field(init=False)

    def __post_init__(self) -> None:
        self.health_watch = health_check.HealthWatch(
            self.paths, health_check.list_accelerator_uuids(self.devices), self._seen
        )

    def notify_user(self, text: str) -> None:
        """Tell the user who sits here, while another node leads."""
        self.options.notify_user(text)

    @property
    @abc.abstractmethod
    def checks_health(self) -> bool:
        """Whether this node is looked at after a death."""

    @property
    @abc.abstractmethod
    def heartbeat_s(self) -> float:
        """Seconds of silence after which a node is lost."""

    @property
    @abc.abstractmethod
    def grace_s(self) -> float:
        """What ranks get to end, in seconds, after a stop signal."""

    @abc.abstractmethod
    def make_job(self, offer: Message, poll_once: Tend) -> NodeJob:
        """What this node's agent runs in a division. Raises PhalanxError where this node does not fit it."""

    @abc.abstractmethod
    def prepare_offer(self, division: int, plan: Plan, devices: list[list[Any]]) -> Message:
        """What is offered for other ranks; runs in a child."""

    @abc.abstractmethod
    def take_over_recording(self, offer: Message, hold: HoldLeaderFiles) -> EventRecorder:
        """Take the lead over from another node: take what the offer says, and record from now on."""

    @abc.abstractmethod
    def finish(self, agent: NodeAgent, code: int) -> int:
        """The job is over, and this node led it to its end: say so. Returns the exit code."""

    def take_committed_steps(self) -> list[int]:
        """How far the job has come for good, since the last call: so far restarts are not counted again."""
        assert self.recorder is not None
        return self.recorder.take_committed_steps()

    @property
    def claim(self) -> Claim | None:
        """Creates the files of epochs; a URL has none."""
        return None if self.paths.url is not None else functools.partial(election.claim, self.paths)

    def count_ranks(self, offer: Message) -> int:
        """How many ranks this node has in a division, or would have in the place of another one."""
        ranks = dict(zip(offer["seats"], (ranks for ranks, _ in offer["slots"]), strict=True))
        # Of one that has come back with fewer devices than its ranks had, as many as it has: it cannot take them again.
        return min(len(self.devices), ranks.get(self.options.node, max(ranks.values())))

    # ---------------------------------------------------------------------------------------------------- what happens

    def _seen(self, attempt: int, seen: dict[str, Any]) -> None:
        """What was found on this node after a death; in a child."""
        if self.recorder is not None:
            write_event(self.paths.events, EventKind.HEALTH, attempt, **seen)
        else:
            self.notify_user(event_text.describe_event({"kind": EventKind.HEALTH, **seen}))

    def _note(self, world: int, kind: str, details: dict[str, Any]) -> None:
        """Take what this node's own agent says of its ranks, of `world`."""
        if kind == EventKind.WORKER_DIED:
            self._look_after(details)
        if self.recorder is not None:
            self.recorder.record(kind, details)
        elif kind == EventKind.ATTEMPT_STARTED:
            ranks = sorted(details["pids"])
            which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            self.notify_user(f"attempt {details['attempt']} started: {which} of {world} here")
        else:
            self.notify_user(event_text.describe_event({"kind": kind, **details}))

    def _tell(self, kind: str, details: dict[str, Any]) -> None:
        """Record what the leader says; a death on this node is looked into."""
        assert self.recorder is not None
        if kind == EventKind.WORKER_DIED and "host" not in details:
            self._look_after(details)
        self.recorder.record(kind, details)

    def _look_after(self, death: dict[str, Any]) -> None:
        if self.checks_health:
            self.health_watch.request_check(death["attempt"], f"the death of rank {death['rank']}")

    # --------------------------------------------------------------------------------------------------------- leading

    def start_recording(
        self,
        recorder: EventRecorder | LocalRecorder,
        event: dict[str, Any],
        later: Sequence[tuple[str, dict[str, Any]]],
    ) -> None:
        """Be the first to lead, whose `event` of the start is written already, and note what was found `later`."""
        self.recorder = recorder
        recorder.show(EventKind.RUN_STARTED, event)
        for kind, details in later:
            recorder.record(kind, {"attempt": self.first_attempt, **details})

    def make_coordinator(self, agent: NodeAgent) -> Coordinator:
        """Lead from now on."""
        offer = agent.offer
        assert offer is not None
        if self.recorder is None:
            hold = functools.partial(self._found, agent.secret, agent.membership.me.address, agent.membership.me.port)
            self.recorder = self.take_over_recording(offer, hold)
        return become_coordinator(
            agent, self.hello, self.first_attempt, self.committed, self.prepare_offer, self._tell,
            self.take_committed_steps, self._asked,
            held=self.inventories, unfit_reason=self.unfit_reason,
        )  # fmt: skip

    def _asked(self) -> list[NodeRequest]:
        assert self.recorder is not None
        return self.recorder.take_node_requests()

    @contextlib.contextmanager
    def _found(self, secret: str, address: str, port: int) -> Iterator[TryAgain]:
        """Hold what a leader holds that was not the first one: the rendezvous, and the run folder's lock, as soon as it
        is free: what is yielded tries that. Both name this agent, whose child holds them."""
        from phalanx.trainer import run_folder

        agent, locks = os.getppid(), list[int]()
        with contextlib.ExitStack() as held:

            def again() -> None:
                with contextlib.suppress(RunError):  # a leader that was frozen may hold it; the epoch keeps it out
                    if not locks:
                        locks.append(run_folder.lock_run_folder(self.paths, agent)[0])
                        held.callback(os.close, locks[0])

            again()
            place = self.options.point.folder
            if place is not None:
                there = rendezvous.HostAddress((address,), port, secret, f"{agent} on {self.hello['host']}")
                with contextlib.suppress(RunError):  # then no node comes back, and the others go on
                    made = rendezvous.publish(place, there)
                    held.callback(rendezvous.withdraw, place, there, made)
            yield again

    # ----------------------------------------------------------------------------------------- the meeting and the end

    def begin_epoch(
        self, first: RendezvousHost, agent: NodeAgent, until_all_meet: contextlib.ExitStack
    ) -> Callable[[], None]:
        """Begin an epoch, as node 0 when all are ready. Returns what makes all who have met members of it."""
        epoch = 1
        if self.claim is not None and self.options.total > 1:
            epoch = election.claim_next(self.paths, {"attempt": self.first_attempt, "leader": 0})
        return functools.partial(
            multinode.start_membership, first, agent, self.claim, self.heartbeat_s, epoch, until_all_meet
        )

    def follow(self) -> int:
        """Take part in a run that node 0, or whoever leads by now, has. Returns the exit code."""
        hooks = multinode.AgentHooks(self.make_job, self.make_coordinator, self.claim, self.heartbeat_s)
        where = functools.partial(election.read_leader_address, self.paths)
        agent = multinode.join_job(self.hello, self.options, hooks, where)
        return agent if isinstance(agent, int) else self.run_to_end(agent)

    def run_to_end(self, agent: NodeAgent, start_membership: Callable[[], None] = lambda: None) -> int:
        """Run this node's part and say how the run ended. Returns the exit code. `start_membership` makes all who have
        met members first: of a stop signal that comes meanwhile they hear, and do not go on without this node."""
        with StopSignals() as signals:
            start_membership()
            try:
                code = run_agent(agent, self.grace_s, signals)
                if agent.over is not None and agent.is_leader:
                    agent.over = code, _ending(code, self.paths, self.options.node)
            finally:
                agent.close()
                self.health_watch.close()
        recorder, self.recorder = self.recorder, None
        self.code, self.cut_off = code, agent.membership.fenced is not None
        if agent.membership.fenced is not None:
            if recorder is not None:
                # One that has given the lead away still says so; one that was given up may not write any more.
                end = recorder.close if agent.over is not None else recorder.abandon
                end()
            self.notify_user(f"this node has ended its ranks and leaves: {agent.membership.fenced}")
            return code
        if recorder is None:
            self.notify_user(agent.over[1] if agent.over is not None else "this node was asked to stop, and leaves")
            return code
        recorder.close()
        self.paths.node0_marker.unlink(missing_ok=True)
        self.code = self.finish(agent, code)
        return self.code


def _ending(code: int, paths: RunPaths, leader: int) -> str:
    if code == ExitCode.DONE:
        return "the run is done"
    if code == ExitCode.STOPPED:
        return "the run was stopped; the same commands go on with it"
    return f"the run failed (exit code {code}); node {leader} and {paths.display_name} say why"


# -------------------------------------------------------------------------------------------------- a folder for all


def ensure_run_sign(paths: RunPaths, first: bool = True) -> str:
    """The sign by which all nodes know the run folder from now on. It stays, where it is not the `first` one: what was
    offered before may yet be gone on with."""
    if not first:
        with contextlib.suppress(OSError):
            if sign := paths.node0_marker.read_text(encoding="utf-8"):
                return sign
    sign = secrets.token_hex(8)
    write_atomic(paths.node0_marker, sign)
    return sign


def check_shared_folder(paths: RunPaths, sign: str, poll_once: Tend) -> None:
    """Raises ConfigError when this node does not see node 0's run folder, or cannot write to it."""
    until = time.monotonic() + SEEN_S
    while True:
        refresh_listing(paths.root)
        with contextlib.suppress(OSError):
            if paths.node0_marker.read_text(encoding="utf-8") == sign:
                break
        if time.monotonic() > until:
            raise ConfigError(
                f"the run folder {paths.root.absolute()} of this node is not the one of node 0; give --run-dir a "
                "folder on a file system that all nodes share, or a URL"
            )
        poll_once()
        time.sleep(0.05)
    # By doing so: what the rights say is not what a server does, which may take this node's root for nobody.
    probe = paths.root / f"{paths.node0_marker.name}-{secrets.token_hex(4)}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"this node cannot write to the run folder {paths.root.absolute()} ({error.strerror}); change its rights"
        ) from None
