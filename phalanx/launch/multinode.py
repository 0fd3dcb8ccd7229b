"""Starting a run on several nodes that no scheduler ties together: one command on each, which meet by themselves.

Node 0 resolves the recipe, prepares its data and tells the others what came of it; each of them checks that it sees the
same run folder and the same data before the first step. The rules of meeting are in `elastic/`.
"""

import contextlib
import functools
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import phalanx
from phalanx.config.schema import Config
from phalanx.core import faults
from phalanx.core.errors import ConfigError, PhalanxError, RunError, Unhealthy
from phalanx.core.faults import Fault
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import epoch_files, rendezvous, rendezvous_client, shared_secret
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.handshake import flat, make_hello
from phalanx.elastic.membership.listener import ConnectionListener
from phalanx.elastic.membership.membership import Claim
from phalanx.elastic.membership.rendezvous_client import RendezvousClient
from phalanx.elastic.membership.rendezvous_host import RendezvousHost
from phalanx.elastic.node.job import NodeJob
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.node.signals import StopRequested, raise_on_stop_signal
from phalanx.elastic.supervisor.coordinator import Coordinator
from phalanx.health.devices import DeviceInfo, assign_devices, preload_and_find_devices
from phalanx.launch import health_gate, local, node_session, outcome
from phalanx.launch.node_participant import NodeContext
from phalanx.launch.remote_run_dir import mirror_while_running
from phalanx.launch.rendezvous_options import RendezvousOptions
from phalanx.recovery import shared_memory
from phalanx.recovery.catalog import inventory_from_message
from phalanx.report import event_text
from phalanx.report.terminal import open_terminal

TAKEOVER_S = 10.0  # what the nodes that are left get to agree on another leader
IDLE_S = 0.1  # after which others are heard, whatever comes
LOOK_S = 1.0  # between two looks whether they have


def train_on_nodes(
    wanted: Config,
    paths: RunPaths,
    ranks: int | None,
    options: RendezvousOptions,
    on_cpu: bool = False,
    planned: Sequence[Fault] = (),
) -> int:
    """Train as one of several nodes. Returns the exit code, as `launch.train` does; raises PhalanxError for what a user
    can mend, on whichever node it was found."""
    try:
        with raise_on_stop_signal():
            found, accelerators = preload_and_find_devices(on_cpu)
        devices = assign_devices(found, accelerators, ranks)
        for folder in shared_memory.remove_stale_folders(but=paths):
            options.notify_user(f"removed {folder}, which a run had left behind more than a day ago")
        lead = functools.partial(_lead, wanted, paths, devices, options, planned)
        return lead_or_follow(paths, options, lead, lambda: _follow(wanted, paths, devices, options, planned))
    except StopRequested as asked:
        open_terminal().print(outcome.describe_early_stop(paths, str(asked)))
        return ExitCode.STOPPED


def lead_or_follow(
    paths: RunPaths, options: RendezvousOptions, lead: Callable[[int], int], follow: Callable[[], int]
) -> int:
    """Be node 0 of a job, which is to `lead`, or `follow` who leads already. Returns the exit code.

    `lead` is given the run's epoch, and raises RunError where others go on with the run."""
    for file in shared_secret.remove_unused_secrets(options.point.secret_file):
        options.notify_user(f"removed {file}, the secret of a rendezvous that nobody has used for a long time")
    # Others may begin another epoch while this node checks whether the run continues.
    before = epoch_files.read_epoch_number(paths) if options.node == 0 else 0
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
    """What this node says of itself; nodes that were started by unlike commands do not fit, nor by unlike recipes."""
    asked = {"the command": command, "--spares": options.spares, **dict(flat(wanted.model_dump(mode="json")))}
    asked["--inject"] = "; ".join(fault.text for fault in planned)
    return make_command_hello(asked, devices, options)


def make_command_hello(
    settings: dict[str, Any], devices: Sequence[DeviceInfo], options: RendezvousOptions
) -> dict[str, Any]:
    """The same of the `settings` of this node's command."""
    rows = [[device.name, device.model, device.bf16, "", device.memory_bytes, device.cores] for device in devices]
    versions = {"phalanx": phalanx.__version__, "torch": version("torch")}
    return make_hello(options.node, options.total, rows, versions, settings)


def _show(options: RendezvousOptions, kind: str, details: dict[str, Any]) -> None:
    options.notify_user(event_text.describe_event({"kind": kind, **details}))


def poll_until(others: RendezvousHost | RendezvousClient, until: Callable[[], bool]) -> None:
    """Let others be heard until something holds."""
    others.poll_once()
    while not until():
        poll = select.poll()
        for descriptor, events in others.descriptors().items():
            poll.register(descriptor, events)
        poll.poll(1000 * min(IDLE_S, others.due_s()))
        others.poll_once()


# -------------------------------------------------------------------------------------------------------------- node 0


def is_run_active(paths: RunPaths, options: RendezvousOptions) -> bool:
    """Whether the run goes on already, led by another node, which this one then comes back to."""
    if options.point.folder is None:
        leader = epoch_files.read_leader_address(paths)
        return leader is not None and rendezvous_client.is_run_active((leader[0],), leader[1], options.point.secret)
    there = rendezvous.read_address(options.point.folder)
    return there is not None and rendezvous_client.is_run_active(there.hosts, there.port, there.secret)


def has_new_leader(paths: RunPaths, options: RendezvousOptions) -> bool:
    """Whether others go on with a run that node 0 was about to begin: started again at once, it may be there before
    they have agreed on who leads now."""
    until = time.monotonic() + TAKEOVER_S
    while epoch_files.read_newest_epoch(paths) is not None and time.monotonic() < until:
        if is_run_active(paths, options):
            return True
        time.sleep(rendezvous_client.PAUSE_S)
    return False


def watch_for_takeover(paths: RunPaths, poll_once: Callable[[], None], before: int) -> Callable[[], None]:
    """A function that does as `poll_once`, and raises RunError once others have begun another epoch than `before`."""
    look_at = time.monotonic() + LOOK_S

    def look() -> None:
        nonlocal look_at
        poll_once()
        if time.monotonic() > look_at:
            look_at = time.monotonic() + LOOK_S
            if epoch_files.read_epoch_number(paths) != before:
                raise RunError(
                    f"another node leads the run in {paths.display_name} now; start this one again, and it comes back"
                )

    return look


def _lead(
    wanted: Config,
    paths: RunPaths,
    devices: Sequence[DeviceInfo],
    options: RendezvousOptions,
    planned: Sequence[Fault],
    before: int,
) -> int:
    """Be node 0: bring all together, prepare the run, and then be one of the members. `before`: the run's epoch."""
    from phalanx.trainer import run_folder

    said = make_training_hello(wanted, devices, options, planned=planned)
    with contextlib.ExitStack() as held:
        with raise_on_stop_signal():
            held.enter_context(run_folder.hold_run_folder(paths))
            held.enter_context(mirror_while_running(paths))
            # Before all have met: what nobody holds then belongs to no node.
            shared = held.enter_context(
                shared_memory.hold_folder(
                    paths, options.node, wanted=wanted.resilience.in_memory_checkpoints is not False
                )
            )
            where = NodeContext(options.node, options.nodes, options.point.folder)
            run = node_session.NodeSession(paths, devices, where, said, options.notify_user, wanted, shared, planned)
            held.callback(run.settle_memory)
            replaces = "replace" in wanted.resilience.on_lost_node
            first = held.enter_context(host_rendezvous(options, said, spares=options.spares if replaces else 0))
            poll_once = raise_on_remote_stop(first)
            gather(first, options, watch_for_takeover(paths, poll_once, before))
            if (done := local.exit_code_if_complete(wanted, paths)) is not None:
                first.finish(done, "the run is complete already")
                run.code = done
                return done
            try:
                noticed = health_gate.check_node_if_enabled(wanted, paths, devices)
            except Unhealthy as error:
                noticed, run.unfit_reason = None, first.yield_to_spare(str(error), alone=paths.url is not None)
            hellos = first.hellos()
            rows_of = [each["devices"] for each in hellos[: options.nodes]]  # spares have no part yet
            by_node = [[DeviceInfo(*row) for row in rows] for rows in rows_of]
            everywhere = [device for devices_there in by_node for device in devices_there]
            elsewhere, world = everywhere[len(devices) :], len(everywhere)
            faults.check_faults(planned, world, wanted.train.steps, local=paths.url is None, nodes=options.total)
            prepared = local.prepare_run(
                wanted,
                paths,
                devices,
                world,
                len(devices),
                writes=True,
                elsewhere=elsewhere,
                meanwhile=poll_once,
                nodes=by_node,
            )
            prepared = local.add_faults(prepared, planned)
            plan = [(node, len(rows)) for node, rows in enumerate(rows_of)]
            told = node_session.make_offer(wanted, prepared, paths, 1, plan, rows_of, options.nodes)
            until_all_meet = held.enter_context(contextlib.ExitStack())
            until_all_meet.callback(paths.node0_marker.unlink, missing_ok=True)
            offer_to_all(first, lambda node: told, poll_once)
            run.clean_memory(paths, poll_once)
            peer = NodeAgent(first.secret, run.make_job, run.make_coordinator, _replay_of)
            peer.adopt_job(told, run.job_for(prepared.job, len(devices), world))
            run.inventories = {0: inventory_from_message(peer.list_inventory())}
            run.inventories |= {
                node: inventory_from_message(each.get("held", [])) for node, each in first.answers_by_node().items()
            }
            hosts = [each["host"] for each in hellos]
            there = {"hosts": hosts[: options.nodes], "spares": hosts[options.nodes :]}
            left_out = [(node, why) for node, why in first.replaced_by_spares.items() if node]  # this one leaves later
            lost = [{"node": node, "host": hosts[node], "reason": why} for node, why in left_out]
            run.begin(local.describe_start(prepared, everywhere, world) | there, prepared, noticed, lost)
            epoch = (
                1 if run.claim is None else epoch_files.claim_next(paths, {"attempt": prepared.attempt, "leader": 0})
            )

        enter = functools.partial(
            start_membership, first, peer, run.claim, wanted.resilience.heartbeat_timeout_s, epoch, until_all_meet
        )
        return run.run_to_end(peer, enter)


def _replay_of(form: Mapping[str, Any]) -> Any:
    """What makes updates of other nodes' ranks again; in the process that keeps their replicas, which was forked with
    all that this imports."""
    from phalanx.checkpoint.memory.replica_update import make_replayer

    return make_replayer(form)


def start_membership(
    first: RendezvousHost,
    agent: NodeAgent,
    claim: Claim | None,
    heartbeat_s: float,
    epoch: int,
    until_all_meet: contextlib.ExitStack | None = None,
) -> None:
    """Have all who have met enter the circle, node 0 with them; by what holds `until_all_meet` they go on, and come
    back, without this node too, so it stays. Raises RunError, and StopAsked once one of them was asked to stop."""
    raise_on_remote_stop(first)()  # a node that was asked to stop has left by now, and all shall stop
    at = first.bind_address()
    member_list = first.make_member_list(epoch, at)
    me = member_list.member(0)
    assert me is not None
    first.enter(member_list)
    agent.join_membership(me, member_list, first.listener, at, heartbeat_s, claim)
    if until_all_meet is not None:
        until_all_meet.pop_all()


def raise_on_remote_stop(first: RendezvousHost) -> Callable[[], None]:
    """A function that hears the other nodes; it raises StopAsked once one of them was asked to stop."""

    def poll_once() -> None:
        first.poll_once()
        if first.stop_signal is not None:
            raise StopRequested(first.stop_signal)

    return poll_once


def offer_to_all(first: RendezvousHost, what: Callable[[int], dict[str, Any]], poll_once: Callable[[], None]) -> None:
    """Tell each node `what(node)` says, and wait until all are ready. Raises as `RendezvousHost.are_all_ready`."""
    first.offer(what)
    while not first.are_all_ready():
        _look(first, poll_once)


def gather(first: RendezvousHost, options: RendezvousOptions, poll_once: Callable[[], None]) -> None:
    """Wait until all nodes are there; `poll_once` hears them. Raises as `RendezvousHost.have_all_nodes`."""
    said: list[int] = []
    while not first.have_all_nodes():
        if first.missing() != said:
            said = first.missing()
            names = f"node{'s' if len(said) > 1 else ''} {', '.join(map(str, said))}"
            options.notify_user(f"waiting for {names} at {options.point.text}, for {options.timeout_s:g} s at most")
        _look(first, poll_once)


def _look(first: RendezvousHost, poll_once: Callable[[], None]) -> None:
    poll = select.poll()
    for descriptor, events in first.descriptors().items():
        poll.register(descriptor, events)
    poll.poll(1000 * min(IDLE_S, first.due_s()))
    poll_once()


@contextlib.contextmanager
def host_rendezvous(options: RendezvousOptions, hello: dict[str, Any], spares: int = 0) -> Iterator[RendezvousHost]:
    """Node 0, to be found by the others, of which `spares` make up for such as are not fit. However it ends, they are
    told, and nothing stays behind."""
    place = options.point
    if place.folder is not None:
        there = rendezvous.read_address(place.folder)
        if there is not None and rendezvous_client.is_there(there):
            raise RunError(
                f"the rendezvous folder {place.folder} is used by another job, whose node 0 is process "
                f"{there.process}; give each job a folder of its own, or stop that one"
            )
    with contextlib.ExitStack() as held:
        listener = rendezvous.listen(place)
        held.callback(listener.close)
        address: rendezvous.HostAddress | str = place.secret
        if place.folder is not None:
            address = rendezvous.make_host_address(listener)
            made = rendezvous.publish(place.folder, address)
            held.callback(rendezvous.withdraw, place.folder, address, made)
        show = functools.partial(_show, options)
        first = RendezvousHost(options.total, listener, address, place.folder, hello, options.timeout_s, show, spares)
        try:
            yield first
        except StopRequested as asked:
            first.finish(ExitCode.STOPPED, f"node 0 was stopped by {asked} before the ranks were started")
            raise
        except PhalanxError as error:
            first.finish(error.exit_code, str(error))
            raise
        except BaseException as error:
            first.finish(ExitCode.FAILED, f"node 0 failed: {type(error).__name__}: {error}")
            raise


# --------------------------------------------------------------------------------------------------------- other nodes


class _Changed(Exception):
    """Node 0 has gone, or has ended the job, while this node was preparing its part."""


def _follow(
    wanted: Config, paths: RunPaths, devices: Sequence[DeviceInfo], options: RendezvousOptions, planned: Sequence[Fault]
) -> int:
    said = make_training_hello(wanted, devices, options, planned=planned)
    with shared_memory.hold_folder(
        paths, options.node, wanted=wanted.resilience.in_memory_checkpoints is not False
    ) as shared:
        where = NodeContext(options.node, options.nodes, options.point.folder)
        run = node_session.NodeSession(paths, devices, where, said, options.notify_user, wanted, shared, planned)
        works = AgentHooks(run.make_job, run.make_coordinator, run.claim, wanted.resilience.heartbeat_timeout_s)
        try:
            peer = join_job(said, options, works, functools.partial(epoch_files.read_leader_address, paths))
            return peer if isinstance(peer, int) else run.run_to_end(peer)
        finally:
            run.settle_memory()


@dataclass(frozen=True)
class AgentHooks:
    """What a node does as a member of a job, as `NodeAgent` and its circle want it."""

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
    """Come to a job, whose leader hears `hello` of this node, and be a member; or the exit code where the job is over.

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
        options.notify_user(
            f"node 0 was lost ({node.lost}); waiting for it to come back, for {options.timeout_s:g} s at most"
        )
        time.sleep(rendezvous_client.PAUSE_S)


def _take_part(node: RendezvousClient, options: RendezvousOptions, hooks: AgentHooks) -> NodeAgent | int | None:
    """The way into the job: a member, the exit code of one that is over, or None when node 0 is lost."""

    def settled() -> bool:
        return node.over is not None or node.refusal is not None or node.lost is not None

    def poll_once() -> None:
        node.poll_once()
        if settled():
            raise _Changed

    peer = NodeAgent(node.secret, hooks.make_job, hooks.make_coordinator, _replay_of)
    try:
        with raise_on_stop_signal(), contextlib.suppress(_Changed):
            options.notify_user("reached node 0, which prepares the run when all are there")
            poll_until(node, lambda: settled() or node.offer is not None or node.member_list is not None)
            if node.offer is not None and not settled():
                peer.adopt_job(node.offer, hooks.make_job(node.offer, poll_once))
                node.send({"answer": {"held": peer.list_inventory()}})
                poll_until(node, lambda: settled() or node.member_list is not None)
    except StopRequested as asked:
        node.report_stop_signal(str(asked))
        raise
    except PhalanxError as error:
        node.send({"unfit": str(error), "code": int(error.exit_code)})
        raise
    if node.member_list is not None:
        door = ConnectionListener(node.at.listener, node.secret, functools.partial(_refused, options))
        peer.join_membership(node.member, node.member_list, door, node.at, hooks.heartbeat_s, hooks.claim)
        return peer
    if node.refusal is not None:
        raise ConfigError(node.refusal)
    if node.over is not None:
        options.notify_user(node.over[1])
        return node.over[0]
    return None


def _refused(options: RendezvousOptions, host: str, why: str) -> None:
    options.notify_user(f"a caller from {host} was refused: {why}")
