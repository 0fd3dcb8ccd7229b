"""A node of a multi-node job, apart from its ranks: health checks after a death, messages, and on the leader
records, console and the rendezvous for returning nodes. Any node may become the leader.
"""

import abc
import contextlib
import functools
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
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
from phalanx.elastic.node.agent import run_agent
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.node.worker import NodeJob, StopSignals
from phalanx.elastic.supervisor.coordinator import Coordinator, Plan
from phalanx.elastic.supervisor.meeting_host import MeetingHost
from phalanx.elastic.supervisor.node_requests import NodeRequest
from phalanx.elastic.supervisor.take_lead import become_coordinator
from phalanx.health.findings import DeviceInfo
from phalanx.launch import health_check, multinode
from phalanx.launch.gpu_recorder import GpuRecorder
from phalanx.launch.recorder import EventRecorder, HoldLeaderFiles, LocalRecorder, TryAgain
from phalanx.launch.rendezvous_options import RendezvousOptions
from phalanx.report import event_text

CHECK_S = 120.0  # time limit of this node's check before training
SEEN_S = 3.0  # time for a network file system to show a file that another node has just written
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
    code: int = field(default=int(ExitCode.FAILED), init=False)
    cut_off: bool = field(default=False, init=False)
    health_watch: health_check.HealthWatch = field(init=False)
    read_notice: Callable[[], str] = field(default=str, init=False)  # that this machine will be taken away

    def __post_init__(self) -> None:
        self.health_watch = health_check.HealthWatch(
            self.paths, health_check.list_accelerator_uuids(self.devices), self._seen
        )

    def notify_user(self, text: str) -> None:
        """Print a message on this node while another node leads."""
        self.options.notify_user(text)

    @property
    @abc.abstractmethod
    def checks_health(self) -> bool:
        """Whether this node's health is checked after a death."""

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
        """Prepare the offer for a different number of ranks; runs in a child."""

    @abc.abstractmethod
    def take_over_recording(self, offer: Message, hold: HoldLeaderFiles) -> EventRecorder:
        """Take over leadership from another node: adopt its offer, and record from now on."""

    @abc.abstractmethod
    def finish(self, agent: NodeAgent, code: int) -> int:
        """Report the end of a job on the node that led it. Returns the exit code."""

    def take_committed_steps(self) -> list[int]:
        """Newly committed steps since the last call, up to which restarts are not counted again."""
        assert self.recorder is not None
        return self.recorder.take_committed_steps()

    @property
    def claim(self) -> Claim | None:
        """Creates the files of epochs; a URL has none."""
        return None if self.paths.url is not None else functools.partial(election.claim, self.paths)

    def count_ranks(self, offer: Message) -> int:
        """How many ranks this node has in a division, or would have in the place of another one."""
        ranks = dict(zip(offer["seats"], (ranks for ranks, _ in offer["slots"]), strict=True))
        # A node that returned with fewer devices than its ranks had offers those that it has: it cannot take the same
        # ranks.
        return min(len(self.devices), ranks.get(self.options.node, max(ranks.values())))

    # ---------------------------------------------------------------------------------------------------- what happens

    def _seen(self, attempt: int, seen: dict[str, Any]) -> None:
        """Health findings of this node after a death; in a child."""
        if self.recorder is not None:
            write_event(self.paths.events, EventKind.HEALTH, attempt, **seen)
        else:
            self.notify_user(event_text.describe_event({"kind": EventKind.HEALTH, **seen}))

    def _note(self, world: int, kind: str, details: dict[str, Any]) -> None:
        """Receive the report of this node's agent on its ranks, of `world`."""
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
        """Record the leader's events; check this node after a death on it."""
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
        """Start recording on the first leader, whose start `event` is written already, and record the findings
        `later`."""
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
        )  # fmt: skip

    def _asked(self) -> list[NodeRequest]:
        assert self.recorder is not None
        return self.recorder.take_node_requests()

    @contextlib.contextmanager
    def _found(self, secret: str, address: str, port: int) -> Iterator[TryAgain]:
        """Hold the resources of a later leader: the rendezvous, and the run folder's lock as soon as it is free (the
        yielded function tries that). Both name this agent, whose child holds them."""
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
                with contextlib.suppress(RunError):  # then no node returns, and the others continue
                    made = rendezvous.publish(place, there)
                    held.callback(rendezvous.withdraw, place, there, made)
            yield again

    # ----------------------------------------------------------------------------------------- the meeting and the end

    def begin_epoch(
        self, first: MeetingHost, agent: NodeAgent, until_all_meet: contextlib.ExitStack
    ) -> Callable[[], None]:
        """Begin an epoch, as node 0 when all are ready. Returns what makes all who have met members of it."""
        epoch = 1
        if self.claim is not None and self.options.total > 1:
            epoch = election.claim_next(self.paths, {"attempt": self.first_attempt, "leader": 0})
        return functools.partial(
            multinode.start_membership, first, agent, self.claim, self.heartbeat_s, epoch, until_all_meet
        )

    def follow(self) -> int:
        """Take part in the run of node 0 or the current leader. Returns the exit code."""
        hooks = multinode.AgentHooks(self.make_job, self.make_coordinator, self.claim, self.heartbeat_s)
        where = functools.partial(election.read_leader_address, self.paths)
        agent = multinode.join_job(self.hello, self.options, hooks, where)
        return agent if isinstance(agent, int) else self.run_to_end(agent)

    def run_to_end(self, agent: NodeAgent, start_membership: Callable[[], None] = lambda: None) -> int:
        """Run this node's part and say how the run ended. Returns the exit code. `start_membership` makes all who have
        met members first: they receive a stop signal that comes meanwhile, and do not continue without this node."""
        gpus = GpuRecorder.start(self.paths, self.options.node, self.devices)
        with StopSignals(self.read_notice) as signals:
            start_membership()
            try:
                code = run_agent(agent, self.grace_s, signals)
                if agent.over is not None and agent.is_leader:
                    agent.over = code, _ending(code, self.paths, self.options.node)
            finally:
                agent.close()
                self.health_watch.close()
                if gpus is not None:
                    gpus.close()
        recorder, self.recorder = self.recorder, None
        self.code, self.cut_off = code, agent.membership.fenced is not None
        if agent.membership.fenced is not None:
            if recorder is not None:
                # A node that has handed over the lead still reports; one that was declared lost must not write.
                end = recorder.close if agent.over is not None else recorder.abandon
                end()
            self.notify_user(f"this node ended its ranks and exits: {agent.membership.fenced}")
            return code
        if recorder is None:
            self.notify_user(agent.over[1] if agent.over is not None else "this node was asked to stop and exits")
            return code
        recorder.close()
        self.paths.node0_marker.unlink(missing_ok=True)
        self.code = self.finish(agent, code)
        return self.code


def _ending(code: int, paths: RunPaths, leader: int) -> str:
    if code == ExitCode.DONE:
        return "the run is done"
    if code == ExitCode.STOPPED:
        return "the run was stopped; the same commands resume it"
    return f"the run failed (exit code {code}); node {leader} and {paths.display_name} say why"


# -------------------------------------------------------------------------------------------------- a folder for all


def ensure_run_sign(paths: RunPaths, first: bool = True) -> str:
    """The token file by which all nodes recognize the run folder. It stays unless it is the `first` one, because an
    earlier offer may still be continued."""
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
                f"the run folder {paths.root.absolute()} of this node differs from node 0's; set --run-dir to a "
                "folder on a file system that all nodes share, or to a URL"
            )
        poll_once()
        time.sleep(0.05)
    # By trying: a file server may map this node's root to another user, whatever the permissions say.
    probe = paths.root / f"{paths.node0_marker.name}-{secrets.token_hex(4)}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"this node cannot write to the run folder {paths.root.absolute()} ({error.strerror}); change its "
            "permissions"
        ) from None
