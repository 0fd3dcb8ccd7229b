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
from phalanx.elastic.membership.handshake import flat, own_hello
from phalanx.elastic.membership.listener import Door
from phalanx.elastic.membership.membership import Claim
from phalanx.elastic.membership.rendezvous_client import OtherNode
from phalanx.elastic.membership.rendezvous_host import FirstNode
from phalanx.elastic.node.job import Job
from phalanx.elastic.node.node_agent import Peer
from phalanx.elastic.node.signals import StopAsked, stoppable
from phalanx.elastic.supervisor.coordinator import Leader
from phalanx.health.devices import Device, devices_of_ranks, warmed
from phalanx.launch import health_gate, local, node_session, outcome
from phalanx.launch.node_participant import Where
from phalanx.launch.remote_run_dir import mirrored
from phalanx.launch.rendezvous_options import Meeting
from phalanx.recovery import shared_memory
from phalanx.recovery.catalog import held_of
from phalanx.report import event_text
from phalanx.report.terminal import open_terminal

TAKEOVER_S = 10.0  # what the nodes that are left get to agree on another leader
IDLE_S = 0.1  # after which others are heard, whatever comes
LOOK_S = 1.0  # between two looks whether they have


def train(
    wanted: Config,
    paths: RunPaths,
    ranks: int | None,
    meeting: Meeting,
    on_cpu: bool = False,
    planned: Sequence[Fault] = (),
) -> int:
    """Train as one of several nodes. Returns the exit code, as `launch.train` does; raises PhalanxError for what a user
    can mend, on whichever node it was found."""
    try:
        with stoppable():
            found, accelerators = warmed(on_cpu)
        devices = devices_of_ranks(found, accelerators, ranks)
        for folder in shared_memory.sweep(but=paths):
            meeting.say(f"removed {folder}, which a run had left behind more than a day ago")
        lead = functools.partial(_lead, wanted, paths, devices, meeting, planned)
        return meet(paths, meeting, lead, lambda: _follow(wanted, paths, devices, meeting, planned))
    except StopAsked as asked:
        open_terminal().print(outcome.stopped_early(paths, str(asked)))
        return ExitCode.STOPPED


def meet(paths: RunPaths, meeting: Meeting, lead: Callable[[int], int], follow: Callable[[], int]) -> int:
    """Be node 0 of a job, which is to `lead`, or `follow` who leads already. Returns the exit code.

    `lead` is given the run's epoch, and raises RunError where others go on with the run."""
    for file in shared_secret.removed(meeting.place.kept):
        meeting.say(f"removed {file}, the secret of a rendezvous that nobody has used for a long time")
    # Others may begin another epoch while this node checks whether the run continues.
    before = epoch_files.number(paths) if meeting.node == 0 else 0
    if meeting.node == 0 and not goes_on(paths, meeting):
        try:
            return lead(before)
        except RunError:
            if not is_taken_over(paths, meeting):
                raise
    return follow()


def hello(
    wanted: Config,
    devices: Sequence[Device],
    meeting: Meeting,
    command: str = "phalanx train",
    planned: Sequence[Fault] = (),
) -> dict[str, Any]:
    """What this node says of itself; nodes that were started by unlike commands do not fit, nor by unlike recipes."""
    asked = {"the command": command, "--spares": meeting.spares, **dict(flat(wanted.model_dump(mode="json")))}
    asked["--inject"] = "; ".join(fault.text for fault in planned)
    return hello_of(asked, devices, meeting)


def hello_of(asked: dict[str, Any], devices: Sequence[Device], meeting: Meeting) -> dict[str, Any]:
    """The same of what is `asked` by this node's command."""
    rows = [[device.name, device.model, device.bf16, "", device.memory_bytes, device.cores] for device in devices]
    versions = {"phalanx": phalanx.__version__, "torch": version("torch")}
    return own_hello(meeting.node, meeting.total, rows, versions, asked)


def _show(meeting: Meeting, kind: str, details: dict[str, Any]) -> None:
    meeting.say(event_text.sentence({"kind": kind, **details}))


def wait(others: FirstNode | OtherNode, until: Callable[[], bool]) -> None:
    """Let others be heard until something holds."""
    others.tend()
    while not until():
        poll = select.poll()
        for descriptor, events in others.descriptors().items():
            poll.register(descriptor, events)
        poll.poll(1000 * min(IDLE_S, others.due_s()))
        others.tend()


# -------------------------------------------------------------------------------------------------------------- node 0


def goes_on(paths: RunPaths, meeting: Meeting) -> bool:
    """Whether the run goes on already, led by another node, which this one then comes back to."""
    if meeting.place.folder is None:
        leader = epoch_files.leader(paths)
        return leader is not None and rendezvous_client.goes_on((leader[0],), leader[1], meeting.place.secret)
    there = rendezvous.read_address(meeting.place.folder)
    return there is not None and rendezvous_client.goes_on(there.hosts, there.port, there.secret)


def is_taken_over(paths: RunPaths, meeting: Meeting) -> bool:
    """Whether others go on with a run that node 0 was about to begin: started again at once, it may be there before
    they have agreed on who leads now."""
    until = time.monotonic() + TAKEOVER_S
    while epoch_files.newest(paths) is not None and time.monotonic() < until:
        if goes_on(paths, meeting):
            return True
        time.sleep(rendezvous_client.PAUSE_S)
    return False


def watching(paths: RunPaths, tend: Callable[[], None], before: int) -> Callable[[], None]:
    """A function that does as `tend`, and raises RunError once others have begun another epoch than `before`."""
    look_at = time.monotonic() + LOOK_S

    def look() -> None:
        nonlocal look_at
        tend()
        if time.monotonic() > look_at:
            look_at = time.monotonic() + LOOK_S
            if epoch_files.number(paths) != before:
                raise RunError(
                    f"another node leads the run in {paths.shown} now; start this one again, and it comes back"
                )

    return look


def _lead(
    wanted: Config, paths: RunPaths, devices: Sequence[Device], meeting: Meeting, planned: Sequence[Fault], before: int
) -> int:
    """Be node 0: bring all together, prepare the run, and then be one of the members. `before`: the run's epoch."""
    from phalanx.trainer import run_folder

    said = hello(wanted, devices, meeting, planned=planned)
    with contextlib.ExitStack() as held:
        with stoppable():
            held.enter_context(run_folder.opened(paths))
            held.enter_context(mirrored(paths))
            # Before all have met: what nobody holds then belongs to no node.
            shared = held.enter_context(
                shared_memory.held(paths, meeting.node, wanted=wanted.resilience.memory is not False)
            )
            where = Where(meeting.node, meeting.nodes, meeting.place.folder)
            run = node_session.Member(paths, devices, where, said, meeting.say, wanted, shared, planned)
            held.callback(run.leave)
            replaces = "replace" in wanted.resilience.on_lost_node
            first = held.enter_context(hosted(meeting, said, spares=meeting.spares if replaces else 0))
            tend = hearing(first)
            gather(first, meeting, watching(paths, tend, before))
            if (done := local.finished(wanted, paths)) is not None:
                first.finish(done, "the run is complete already")
                run.code = done
                return done
            try:
                noticed = health_gate.checked(wanted, paths, devices)
            except Unhealthy as error:
                noticed, run.unfit = None, first.stand_aside(str(error), alone=paths.url is not None)
            hellos = first.hellos()
            rows_of = [each["devices"] for each in hellos[: meeting.nodes]]  # spares have no part yet
            by_node = [[Device(*row) for row in rows] for rows in rows_of]
            everywhere = [device for devices_there in by_node for device in devices_there]
            elsewhere, world = everywhere[len(devices) :], len(everywhere)
            faults.check(planned, world, wanted.train.steps, local=paths.url is None, nodes=meeting.total)
            prepared = local.prepare(
                wanted,
                paths,
                devices,
                world,
                len(devices),
                writes=True,
                elsewhere=elsewhere,
                meanwhile=tend,
                nodes=by_node,
            )
            prepared = local.armed(prepared, planned)
            plan = [(node, len(rows)) for node, rows in enumerate(rows_of)]
            told = node_session.offer_of(wanted, prepared, paths, 1, plan, rows_of, meeting.nodes)
            until_all_meet = held.enter_context(contextlib.ExitStack())
            until_all_meet.callback(paths.sign.unlink, missing_ok=True)
            offer(first, lambda node: told, tend)
            run.tidy(paths, tend)
            peer = Peer(first.secret, run.make, run.lead, _replay_of)
            peer.prepared(told, run.job(prepared.job, len(devices), world))
            run.held = {0: held_of(peer.held())}
            run.held |= {node: held_of(each.get("held", [])) for node, each in first.answered().items()}
            hosts = [each["host"] for each in hellos]
            there = {"hosts": hosts[: meeting.nodes], "spares": hosts[meeting.nodes :]}
            left_out = [(node, why) for node, why in first.left_out.items() if node]  # this one leaves later
            lost = [{"node": node, "host": hosts[node], "reason": why} for node, why in left_out]
            run.begin(local.facts(prepared, everywhere, world) | there, prepared, noticed, lost)
            epoch = (
                1 if run.claim is None else epoch_files.claim_next(paths, {"attempt": prepared.attempt, "leader": 0})
            )

        enter = functools.partial(
            enter_first, first, peer, run.claim, wanted.resilience.heartbeat_s, epoch, until_all_meet
        )
        return run.to_the_end(peer, enter)


def _replay_of(form: Mapping[str, Any]) -> Any:
    """What makes updates of other nodes' ranks again; in the process that keeps their replicas, which was forked with
    all that this imports."""
    from phalanx.checkpoint.memory.replica_update import replay_of

    return replay_of(form)


def enter_first(
    first: FirstNode,
    peer: Peer,
    claim: Claim | None,
    heartbeat_s: float,
    epoch: int,
    until_all_meet: contextlib.ExitStack | None = None,
) -> None:
    """Have all who have met enter the circle, node 0 with them; by what holds `until_all_meet` they go on, and come
    back, without this node too, so it stays. Raises RunError, and StopAsked once one of them was asked to stop."""
    hearing(first)()  # a node that was asked to stop has left by now, and all shall stop
    at = first.bound()
    roster = first.roster(epoch, at)
    me = roster.member(0)
    assert me is not None
    first.enter(roster)
    peer.enter(me, roster, first.door, at, heartbeat_s, claim)
    if until_all_meet is not None:
        until_all_meet.pop_all()


def hearing(first: FirstNode) -> Callable[[], None]:
    """A function that hears the other nodes; it raises StopAsked once one of them was asked to stop."""

    def tend() -> None:
        first.tend()
        if first.asked is not None:
            raise StopAsked(first.asked)

    return tend


def offer(first: FirstNode, what: Callable[[int], dict[str, Any]], tend: Callable[[], None]) -> None:
    """Tell each node `what(node)` says, and wait until all are ready. Raises as `FirstNode.ready`."""
    first.offer(what)
    while not first.ready():
        _look(first, tend)


def gather(first: FirstNode, meeting: Meeting, tend: Callable[[], None]) -> None:
    """Wait until all nodes are there; `tend` hears them. Raises as `FirstNode.arrived`."""
    said: list[int] = []
    while not first.arrived():
        if first.missing() != said:
            said = first.missing()
            names = f"node{'s' if len(said) > 1 else ''} {', '.join(map(str, said))}"
            meeting.say(f"waiting for {names} at {meeting.place.text}, for {meeting.timeout_s:g} s at most")
        _look(first, tend)


def _look(first: FirstNode, tend: Callable[[], None]) -> None:
    poll = select.poll()
    for descriptor, events in first.descriptors().items():
        poll.register(descriptor, events)
    poll.poll(1000 * min(IDLE_S, first.due_s()))
    tend()


@contextlib.contextmanager
def hosted(meeting: Meeting, hello: dict[str, Any], spares: int = 0) -> Iterator[FirstNode]:
    """Node 0, to be found by the others, of which `spares` make up for such as are not fit. However it ends, they are
    told, and nothing stays behind."""
    place = meeting.place
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
        address: rendezvous.Address | str = place.secret
        if place.folder is not None:
            address = rendezvous.new_address(listener)
            made = rendezvous.publish(place.folder, address)
            held.callback(rendezvous.withdraw, place.folder, address, made)
        show = functools.partial(_show, meeting)
        first = FirstNode(meeting.total, listener, address, place.folder, hello, meeting.timeout_s, show, spares)
        try:
            yield first
        except StopAsked as asked:
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
    wanted: Config, paths: RunPaths, devices: Sequence[Device], meeting: Meeting, planned: Sequence[Fault]
) -> int:
    said = hello(wanted, devices, meeting, planned=planned)
    with shared_memory.held(paths, meeting.node, wanted=wanted.resilience.memory is not False) as shared:
        where = Where(meeting.node, meeting.nodes, meeting.place.folder)
        run = node_session.Member(paths, devices, where, said, meeting.say, wanted, shared, planned)
        works = Works(run.make, run.lead, run.claim, wanted.resilience.heartbeat_s)
        try:
            peer = take_part(said, meeting, works, functools.partial(epoch_files.leader, paths))
            return peer if isinstance(peer, int) else run.to_the_end(peer)
        finally:
            run.leave()


@dataclass(frozen=True)
class Works:
    """What a node does as a member of a job, as `Peer` and its circle want it."""

    make: Callable[[Message, Callable[[], None]], Job]
    lead: Callable[[Peer], Leader]
    claim: Claim | None
    heartbeat_s: float


def take_part(
    said: Message,
    meeting: Meeting,
    works: Works,
    leader: Callable[[], tuple[str, int] | None] = lambda: None,
) -> Peer | int:
    """Come to a job, whose leader hears `said` of this node, and be a member; or the exit code where the job is over.

    Raises StopAsked, and PhalanxError where node 0 does not come or this node cannot take part.
    """
    while True:
        with stoppable():
            node = rendezvous_client.seek(meeting.place, said, meeting.timeout_s, meeting.say, leader)
        with contextlib.closing(node):
            found = _take_part(node, meeting, works)
        if found is not None:
            return found
        meeting.say(f"node 0 was lost ({node.lost}); waiting for it to come back, for {meeting.timeout_s:g} s at most")
        time.sleep(rendezvous_client.PAUSE_S)


def _take_part(node: OtherNode, meeting: Meeting, works: Works) -> Peer | int | None:
    """The way into the job: a member, the exit code of one that is over, or None when node 0 is lost."""

    def settled() -> bool:
        return node.over is not None or node.refused is not None or node.lost is not None

    def tend() -> None:
        node.tend()
        if settled():
            raise _Changed

    peer = Peer(node.secret, works.make, works.lead, _replay_of)
    try:
        with stoppable(), contextlib.suppress(_Changed):
            meeting.say("reached node 0, which prepares the run when all are there")
            wait(node, lambda: settled() or node.offer is not None or node.roster is not None)
            if node.offer is not None and not settled():
                peer.prepared(node.offer, works.make(node.offer, tend))
                node.say({"answer": {"held": peer.held()}})
                wait(node, lambda: settled() or node.roster is not None)
    except StopAsked as asked:
        node.tell_stop(str(asked))
        raise
    except PhalanxError as error:
        node.say({"unfit": str(error), "code": int(error.exit_code)})
        raise
    if node.roster is not None:
        door = Door(node.at.listener, node.secret, functools.partial(_refused, meeting))
        peer.enter(node.member, node.roster, door, node.at, works.heartbeat_s, works.claim)
        return peer
    if node.refused is not None:
        raise ConfigError(node.refused)
    if node.over is not None:
        meeting.say(node.over[1])
        return node.over[0]
    return None


def _refused(meeting: Meeting, host: str, why: str) -> None:
    meeting.say(f"a caller from {host} was refused: {why}")
