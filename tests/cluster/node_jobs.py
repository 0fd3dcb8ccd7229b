"""The agents of a job's nodes with workers that are over at once, each in a process of its own; no torch is imported.

`python -m tests.cluster.node_jobs WORKER RANKS FOLDER '{"nodes": 2, "node": 1, "meet": "file:///...", ...}'` prints
each event, and what node 0 hears of others, as a JSON line, and how it ended last. Workers are those of agent_jobs and
those below; `attempt` is node 0's first.
"""

import contextlib
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.core import progress_page
from phalanx.core.errors import ConfigError, CutOff, PhalanxError, Unhealthy
from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import channel as channels
from phalanx.elastic.membership import election, rendezvous_client
from phalanx.elastic.membership.admission import make_hello
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.listener import ConnectionListener
from phalanx.elastic.membership.rendezvous_client import RendezvousClient
from phalanx.elastic.node.agent import run_agent
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.node.worker import NodeJob, StopSignals
from phalanx.elastic.supervisor.coordinator import Coordinator, Plan
from phalanx.elastic.supervisor.failover import describe_division
from phalanx.elastic.supervisor.state import RecoveryPolicy
from phalanx.elastic.supervisor.take_lead import become_coordinator
from phalanx.launch import multinode, rendezvous_options
from phalanx.recovery import fencing
from tests.unit import agent_jobs
from tests.unit.agent_jobs import note

FOLDER = Path(sys.argv[3]) if len(sys.argv) > 3 else Path()
PATIENT_S = 3.0  # heartbeats: the machines that run tests are busy


def tells(placement: Placement) -> int:
    """All ranks meet at the store's address through the relays, and each tells rank 0 who it is."""
    assert placement.store is not None
    if placement.store.listen_fd is None:
        with socket.create_connection((placement.store.host, placement.store.port), timeout=10) as connection:
            connection.sendall(bytes([placement.rank]) * 100_000)
            connection.shutdown(socket.SHUT_WR)
            assert connection.makefile("rb").read() == b"heard"
        note(placement, "heard", placement.rank)
    else:
        told = []
        with socket.socket(fileno=placement.store.listen_fd) as listener:
            for _ in range(placement.world - 1):
                with listener.accept()[0] as connection:
                    text = connection.makefile("rb").read()
                    assert text == text[:1] * 100_000
                    told.append(text[0])
                    connection.sendall(b"heard")
        note(placement, "told", sorted(told))
        until = time.monotonic() + 10  # the relay of a node ends with its last rank, whatever is still in it
        while len(list(agent_jobs.FOLDER.glob("heard-*"))) < placement.world - 1 and time.monotonic() < until:
            time.sleep(0.01)
    places = [placement.node, placement.local_rank, placement.local_world, os.environ.get("GLOO_SOCKET_IFNAME")]
    note(placement, "place", places)
    return 0


def second_time(placement: Placement) -> int:
    """The first attempt lasts until it is killed, the next is over at once."""
    note(placement, "ready", os.getpid())
    if placement.attempt == 1:
        time.sleep(60)
    note(placement, "place", [placement.node, placement.rank])
    return 0


def lingers(placement: Placement) -> int:
    """All is done and saved, but ranks take their time to leave."""
    progress_page.open_progress_page(placement.shared, placement.rank, placement.attempt).finish()
    note(placement, "ready", os.getpid())
    time.sleep(60)
    return 1


def until_fenced(placement: Placement) -> int:
    """The first attempt lasts until its ranks may not write any more, and is killed; those of the next one may."""
    note(placement, "ready", os.getpid())
    may_write = functools.partial(
        fencing.check_before_commit, RunPaths(FOLDER / "run"), placement.attempt, placement.epoch
    )
    try:
        may_write()
        while placement.attempt == 1:
            time.sleep(0.01)
            may_write()
    except CutOff as error:
        note(placement, "fenced", str(error))
        time.sleep(60)
    note(placement, "epoch", placement.epoch)
    return 0


def third_time(placement: Placement) -> int:
    """Attempts last until they are killed or asked to stop, but for one of two ranks after the first."""
    if placement.attempt > 1 and placement.world == 2:
        return second_time(placement)
    return agent_jobs.stops_when_asked(placement)


def is_leaving(placement: Placement) -> int:
    """Rank 1 is done; the others take their time to leave."""
    note(placement, "ready", os.getpid())
    time.sleep(0 if placement.rank == 1 else 60)
    return 0


def more_memory(placement: Placement) -> int:
    """Runs out of memory in attempts 1 and 2, on the last rank."""
    if placement.attempt < 3 and placement.rank == placement.world - 1:
        raise MemoryError("no more")
    time.sleep(60 if placement.attempt < 3 else 0)
    return 0


def goes_mad(peer: NodeAgent, frame: Any) -> None:
    """Have an agent send a frame to all others when its ranks have begun."""
    poll_once, waiting = peer.poll_once, [frame]

    def mad() -> None:
        poll_once()
        if waiting and list(FOLDER.glob(f"ready-1-{peer.membership.me.node}.json")):
            peer.membership.broadcast(waiting.pop(), but=peer.membership.me.node)

    peer.poll_once = mad  # type: ignore[method-assign]


def is_settled(other: RendezvousClient) -> bool:
    return any(found is not None for found in (other.refusal, other.over, other.lost, other.member_list))


def is_answered(other: RendezvousClient) -> bool:
    return is_settled(other) or other.offer is not None


class Node:
    """One node of a job, as the options say; `work` is what its ranks run."""

    def __init__(self, options: dict[str, Any], work: dict[str, Any], ranks: int) -> None:
        self.options, self.work, self.ranks = options, work, ranks
        self.node, self.total = options["node"], options["nodes"] + options.get("spares", 0)
        meeting = rendezvous_options.parse_rendezvous_options(
            options["nodes"], self.node, options["meet"], options.get("timeout_s", 20), os.environ,
            options.get("spares"),
        )  # fmt: skip
        assert meeting is not None
        self.meeting = meeting
        devices = [[options.get("device", "cpu"), "any", True]] * ranks
        versions, asked = {"torch": options.get("torch", "2")}, options.get("recipe", {"a": 1})
        self.hello = make_hello(self.node, self.total, devices, versions, asked)
        self.paths = RunPaths(FOLDER / "run")
        self.signals = StopSignals()
        self.policy = RecoveryPolicy(
            nodes=options["nodes"],
            max_restarts=options.get("max_restarts", 0),
            on_lost_node=tuple(options.get("on_lost_node", ("replace", "shrink", "wait"))),
            wait_s=options.get("wait_s", 20.0),
            grow=options.get("grow", True),
            group=options.get("group", 1),
        )
        self.claim = functools.partial(election.claim, self.paths) if options.get("files", True) else None
        self.leads: Coordinator | None = None

    def make(self, offer: Message, poll_once: Callable[[], None]) -> NodeJob:
        if int(offer["division"]) == self.options.get("unfit_for"):
            raise ConfigError("there is no room for that here")
        if int(offer["division"]) == self.options.get("slow_for"):
            (FOLDER / f"slow-{self.node}").touch()
            until = time.monotonic() + 120
            while time.monotonic() < until:
                poll_once()
                time.sleep(0.02)
        if self.options.get("unhealthy"):
            raise Unhealthy("this node is not fit for training: it smokes")
        allowed = iter([True] * self.options.get("lowered", 0))
        shared = FOLDER / f"shared-{self.node}" if self.options.get("shared") else None
        if shared is not None:
            shared.mkdir(exist_ok=True)
        return NodeJob(self.ranks, **self.work, shared=shared, after_out_of_memory=lambda: next(allowed, False))

    def prepare(self, division: int, plan: Plan, devices: list[list[Any]]) -> Message:
        assert sum(ranks for _, ranks in plan) >= self.options.get("least_ranks", 1), "too few ranks for the model"
        return describe_division(division, plan, devices, self.policy)

    def lead(self, peer: NodeAgent) -> Coordinator:
        note, attempt = self.work["on_event"], self.options.get("attempt", 1)
        self.leads = become_coordinator(peer, self.hello, attempt, 0, self.prepare, note)
        return self.leads

    def first(self, held: contextlib.ExitStack) -> NodeAgent:
        """Be node 0 until all have entered the circle."""
        first = held.enter_context(multinode.host_rendezvous(self.meeting, self.hello, self.meeting.spares))
        first.notice = self.work["on_event"]
        multinode.poll_until(first, first.have_all_nodes, first.poll_once)
        if self.options.pop("unhealthy", False):
            first.report_unfit("node 0 is not fit for training: it smokes")
        rows = first.devices(self.options["nodes"])
        offer = self.prepare(1, [(node, len(each)) for node, each in enumerate(rows)], rows)
        multinode.offer_to_all(first, offer)
        peer = NodeAgent(first.secret, self.make, self.lead)
        peer.adopt_job(offer, self.make(offer, first.poll_once))
        self.paths.root.mkdir(exist_ok=True)
        epoch = 1 if self.claim is None else election.claim_next(self.paths, {"attempt": 1})
        multinode.start_membership(first, peer, self.claim, self.options.get("heartbeat_s", PATIENT_S), epoch)
        return peer

    def other(self) -> NodeAgent | dict[str, Any]:
        """Be another node until it is a member; how it ended where it was not let in."""

        def tell(text: str) -> None:
            self.work["on_event"]("said", {"t": text})

        while True:
            other = rendezvous_client.connect_to_leader(self.meeting.point, self.hello, self.meeting.timeout_s, tell)
            multinode.poll_until(other, functools.partial(is_answered, other), other.poll_once)
            peer = NodeAgent(other.secret, self.make, self.lead)
            if other.offer is not None:
                try:
                    peer.adopt_job(other.offer, self.make(other.offer, other.poll_once))
                except Unhealthy as error:
                    other.send({"unfit": str(error), "code": int(error.exit_code)})
                    other.close()
                    raise
                other.send(peer.describe_ready())
                multinode.poll_until(other, functools.partial(is_settled, other), other.poll_once)
            if other.member_list is not None:
                door = ConnectionListener(other.at.listener, other.secret, lambda host, why: None)
                heartbeat_s = self.options.get("heartbeat_s", PATIENT_S)
                peer.join_membership(other.member, other.member_list, door, other.at, heartbeat_s, self.claim)
                other.close()
                return peer
            other.close()
            if other.refusal is not None:
                return {"code": 2, "words": other.refusal}
            if other.over is not None:
                return {"code": other.over[0], "words": other.over[1]}
            tell(f"lost: {other.lost}")

    def run(self) -> dict[str, Any]:
        """The whole life of the node: exit code and last words."""
        with contextlib.ExitStack() as held:
            member = self.first(held) if self.node == 0 and not self.options.get("again") else self.other()
            if isinstance(member, dict):
                return member
            if "mad" in self.options:
                goes_mad(member, self.options["mad"])
            with self.signals:
                try:
                    code = run_agent(member, 60.0, self.signals)
                finally:
                    member.close()
        words = member.membership.fenced if member.over is None else member.over[1]
        return {"code": code, "words": words, "epoch": member.membership.member_list.epoch}


def main() -> None:
    """Be the node that the arguments describe."""
    options = json.loads(sys.argv[4])
    worker = globals().get(sys.argv[1]) or getattr(agent_jobs, sys.argv[1])
    channels.IDLE_S, channels.BETWEEN_S, channels.COUNT, channels.SILENT_S = options.get("silence", (5, 3, 3, 14))
    channels.ASK_S, channels.DEAF_S = options.get("answer", (30.0, 300.0))

    def tell(kind: str, details: dict[str, Any]) -> None:
        print(json.dumps({"kind": kind, "time": time.monotonic(), **details}), flush=True)

    work = {"worker": worker, "paths": RunPaths(FOLDER / "run"), "on_event": tell}
    try:
        ended = Node(options, work, int(sys.argv[2])).run()
    except PhalanxError as error:
        ended = {"code": int(error.exit_code), "words": str(error)}
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
