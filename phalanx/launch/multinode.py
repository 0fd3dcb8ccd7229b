"""Rendezvous of the nodes of a job without a scheduler: one command on each node, for every kind of job.

The protocol is in `elastic/membership/`. A job on one node needs no rendezvous.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, PhalanxError, RunError
from phalanx.core.faults import Fault
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.core.version import __version__
from phalanx.elastic.membership import election, rendezvous, rendezvous_client, shared_secret
from phalanx.elastic.membership.admission import flat, make_hello
from phalanx.elastic.membership.channel import Message, poll_descriptors
from phalanx.elastic.membership.election import Claim
from phalanx.elastic.membership.listener import ConnectionListener
from phalanx.elastic.membership.rendezvous_client import RendezvousClient
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.node.worker import NodeJob, StopRequested, raise_on_stop_signal
from phalanx.elastic.supervisor.coordinator import Coordinator
from phalanx.elastic.supervisor.meeting_host import MeetingHost
from phalanx.health.findings import DeviceInfo
from phalanx.launch.rendezvous_options import RendezvousOptions
from phalanx.report import event_text

TAKEOVER_S = 10.0  # time for the remaining nodes to agree on another leader
IDLE_S = 0.1  # longest time between two turns
LOOK_S = 1.0  # between two looks whether they have


def lead_or_follow(
    paths: RunPaths, options: RendezvousOptions, lead: Callable[[int], int], follow: Callable[[], int]
) -> int:
    """Lead a job as node 0 (`lead`), or `follow` the current leader. Returns the exit code.

    `lead` receives the run's epoch, and raises RunError where other nodes continue the run."""
    for file in shared_secret.remove_unused_secrets(options.point.secret_file):
        options.notify_user(f"removed {file}, the unused secret of an old rendezvous")
    # Others may begin another epoch while this node checks whether the run continues.
    before = election.read_epoch_number(paths) if options.node == 0 else 0
    if options.node == 0 and not is_run_active(paths, options):
        try:
            return lead(before)
        except RunError:
            if not has_new_leader(paths, options):
                raise
    return follow()


def make_training_hello(
    wanted: Config,
    devices: Sequence[DeviceInfo],
    options: RendezvousOptions,
    command: str = "phalanx train",
    planned: Sequence[Fault] = (),
) -> dict[str, Any]:
    """The greeting of a training node; nodes started with different commands or recipes are refused."""
    asked = {"the command": command, "--spares": options.spares, **dict(flat(wanted.model_dump(mode="json")))}
    asked["--inject"] = "; ".join(fault.text for fault in planned)
    return make_command_hello(asked, devices, options)


def make_command_hello(
    settings: dict[str, Any], devices: Sequence[DeviceInfo], options: RendezvousOptions
) -> dict[str, Any]:
    """The greeting of a node with the `settings` of its command."""
    rows = [[device.name, device.model, device.bf16, "", device.memory_bytes, device.cores] for device in devices]
    versions = {"phalanx": __version__, "torch": version("torch")}
    return make_hello(options.node, options.total, rows, versions, settings)


def _show(options: RendezvousOptions, kind: str, details: dict[str, Any]) -> None:
    options.notify_user(event_text.describe_event({"kind": kind, **details}))


def poll_until(
    others: MeetingHost | RendezvousClient, until: Callable[[], bool], poll_once: Callable[[], None]
) -> None:
    """Call `poll_once` until a condition holds."""
    poll_once()
    while not until():
        poll_descriptors(others.descriptors(), min(IDLE_S, others.due_s()))
        poll_once()


def early_stop_code(asked: StopRequested, options: RendezvousOptions | None) -> ExitCode:
    """The exit code of a node that a signal stopped before the ranks were started: one that only leaves is unfit, and
    the others wait for it or another one in its place."""
    return ExitCode.UNHEALTHY if asked.leaves and options is not None and options.total > 1 else ExitCode.STOPPED


# -------------------------------------------------------------------------------------------------------------- node 0


def is_run_active(paths: RunPaths, options: RendezvousOptions) -> bool:
    """Whether the run is already active under another leader, which this node then rejoins."""
    if options.point.folder is None:
        leader = election.read_leader_address(paths)
        return leader is not None and rendezvous_client.is_run_active((leader[0],), leader[1], options.point.secret)
    there = rendezvous.read_address(options.point.folder)
    return there is not None and rendezvous_client.is_run_active(there.hosts, there.port, there.secret)


def has_new_leader(paths: RunPaths, options: RendezvousOptions) -> bool:
    """Whether other nodes continue a run that node 0 was about to begin: a restarted node 0 may arrive before they have
    elected a new leader."""
    until = time.monotonic() + TAKEOVER_S
    while election.read_newest_epoch(paths) is not None and time.monotonic() < until:
        if is_run_active(paths, options):
            return True
        time.sleep(rendezvous_client.PAUSE_S)
    return False


def watch_for_takeover(paths: RunPaths, poll_once: Callable[[], None], before: int) -> Callable[[], None]:
    """A `poll_once` that raises RunError once other nodes have begun an epoch other than `before`."""
    look_at = time.monotonic() + LOOK_S

    def look() -> None:
        nonlocal look_at
        poll_once()
        if time.monotonic() > look_at:
            look_at = time.monotonic() + LOOK_S
            if election.read_epoch_number(paths) != before:
                raise RunError(f"another node now leads the run in {paths.display_name}; restart this node to rejoin")

    return look


def make_replica_updater(form: Mapping[str, Any]) -> Any:
    """Recomputes updates of other nodes' ranks, in the replica process, which was forked with all that this imports."""
    from phalanx.checkpoint.memory.replication import make_replayer

    return make_replayer(form)


def start_membership(
    first: MeetingHost,
    agent: NodeAgent,
    claim: Claim | None,
    heartbeat_s: float,
    epoch: int,
    until_all_meet: contextlib.ExitStack | None = None,
) -> None:
    """Make all arrived nodes members, node 0 included. The files that `until_all_meet` holds stay, since the others may
    continue or return without this node. Raises RunError, and StopAsked once one of them was asked to stop."""
    first.poll_once()  # a node that was asked to stop has left by now, and all must stop
    agent.met = first.state
    if first.state.total == 1:
        agent.join_alone(first.devices(1)[0])
        return
    at = first.bind_address()
    member_list = first.enter(epoch, at)
    me = member_list.member(0)
    assert me is not None
    agent.join_membership(me, member_list, first.listener, at, heartbeat_s, claim)
    if until_all_meet is not None:
        until_all_meet.pop_all()


def offer_to_all(first: MeetingHost, offer: Message) -> None:
    """Send an offer to all nodes and wait until they are ready. Raises as `MeetingHost.are_all_ready`."""
    first.offer(offer)
    poll_until(first, first.are_all_ready, first.poll_once)


@contextlib.contextmanager
def host_rendezvous(options: RendezvousOptions, hello: dict[str, Any], spares: int = 0) -> Iterator[MeetingHost]:
    """Host the rendezvous as node 0; `spares` replace unfit nodes. All nodes receive the outcome, and all files
    are removed. A job on one node skips it."""
    place, show = options.point, functools.partial(_show, options)
    if options.total == 1:
        yield MeetingHost(1, None, "", None, hello, options.timeout_s, show)
        return
    if place.folder is not None:
        there = rendezvous.read_address(place.folder)
        if there is not None and rendezvous_client.is_there(there):
            raise RunError(
                f"the rendezvous folder {place.folder} is in use by another job (node 0 is process {there.process}); "
                "give each job its own folder, or stop that job"
            )
    with contextlib.ExitStack() as held:
        listener = rendezvous.listen(place)
        held.callback(listener.close)
        address: rendezvous.HostAddress | str = place.secret
        if place.folder is not None:
            address = rendezvous.make_host_address(listener)
            made = rendezvous.publish(place.folder, address)
            held.callback(rendezvous.withdraw, place.folder, address, made)
        first = MeetingHost(options.total, listener, address, place.folder, hello, options.timeout_s, show, spares)
        try:
            yield first
        except StopRequested as asked:
            if not asked.leaves:  # else the others wait for the node 0 that comes instead
                first.finish(ExitCode.STOPPED, f"node 0 was stopped by {asked} before the ranks were started")
            raise
        except PhalanxError as error:
            first.finish(error.exit_code, str(error))
            raise
        except BaseException as error:
            first.finish(ExitCode.FAILED, f"node 0 failed: {type(error).__name__}: {error}")
            raise


@contextlib.contextmanager
def meet_nodes(
    options: RendezvousOptions, hello: Message, spares: int = 0, paths: RunPaths | None = None, before: int = 0
) -> Iterator[MeetingHost]:
    """Node 0 with all others there. Where it leads the run at `paths`, no other node may have begun another epoch than
    `before` meanwhile."""
    with host_rendezvous(options, hello, spares) as first:
        poll_once = first.poll_once if paths is None else watch_for_takeover(paths, first.poll_once, before)
        poll_until(first, first.have_all_nodes, poll_once)
        yield first


# --------------------------------------------------------------------------------------------------------- other nodes


class _Changed(Exception):
    """Node 0 has gone, or has ended the job, while this node was preparing its part."""


@dataclass(frozen=True)
class AgentHooks:
    """Hooks of a job for its `NodeAgent` and membership."""

    make_job: Callable[[Message, Callable[[], None]], NodeJob]
    make_coordinator: Callable[[NodeAgent], Coordinator]
    claim: Claim | None
    heartbeat_s: float


def join_job(
    hello: Message,
    options: RendezvousOptions,
    hooks: AgentHooks,
    leader: Callable[[], tuple[str, int] | None] = lambda: None,
) -> NodeAgent | int:
    """Join a job by sending `hello` to its leader and become a member; or return the exit code where the job is over.

    Raises StopAsked, and PhalanxError where node 0 does not come or this node cannot take part.
    """
    while True:
        with raise_on_stop_signal():
            node = rendezvous_client.connect_to_leader(
                options.point, hello, options.timeout_s, options.notify_user, leader
            )
        with contextlib.closing(node):
            found = _take_part(node, options, hooks)
        if found is not None:
            return found
        options.notify_user(f"node 0 was lost ({node.lost}); waiting up to {options.timeout_s:g} s for it to return")
        time.sleep(rendezvous_client.PAUSE_S)


def _take_part(node: RendezvousClient, options: RendezvousOptions, hooks: AgentHooks) -> NodeAgent | int | None:
    """Join the job: a member, the exit code of a finished job, or None when node 0 is lost."""

    def settled() -> bool:
        return node.over is not None or node.refusal is not None or node.lost is not None

    def poll_once() -> None:
        node.poll_once()
        if settled():
            raise _Changed

    peer = NodeAgent(node.secret, hooks.make_job, hooks.make_coordinator, make_replica_updater)
    try:
        with raise_on_stop_signal(), contextlib.suppress(_Changed):
            options.notify_user("connected to node 0, which prepares the run once all nodes have joined")
            poll_until(
                node, lambda: settled() or node.offer is not None or node.member_list is not None, node.poll_once
            )
            if node.offer is not None and not settled():
                peer.adopt_job(node.offer, hooks.make_job(node.offer, poll_once))
                node.send(peer.describe_ready())
                poll_until(node, lambda: settled() or node.member_list is not None, node.poll_once)
    except StopRequested as asked:
        if not asked.leaves:  # else node 0 waits for the one that comes instead
            node.send({"stop": str(asked)})
        raise
    except PhalanxError as error:
        node.send({"unfit": str(error), "code": int(error.exit_code)})
        raise
    if node.member_list is not None:
        door = ConnectionListener(
            node.at.listener,
            node.secret,
            lambda host, why: options.notify_user(f"refused a connection from {host}: {why}"),
        )
        peer.join_membership(node.member, node.member_list, door, node.at, hooks.heartbeat_s, hooks.claim)
        return peer
    if node.refusal is not None:
        raise ConfigError(node.refusal)
    if node.over is not None:
        options.notify_user(node.over[1])
        return node.over[0]
    return None
