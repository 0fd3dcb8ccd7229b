"""Node 0 at the rendezvous, until the nodes of its job are members: passes events to `decide_meeting` and performs its
actions.

Nothing here waits: `poll_once` reads and sends messages. Nodes say hello once per connection, get the configuration
(`offer`), and report that they are ready. When all are, they enter the membership (`membership.py`), where node 0 is
one of them; from then on the leader admits nodes by the same connections (`coordinator.py`).
"""

import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.core.errors import CollectiveError, ConfigError, PhalanxError, RunError, Unhealthy
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.elastic.membership import messages, rendezvous, shared_secret
from phalanx.elastic.membership.admission import explain_flood, find_changed_devices, find_mismatch
from phalanx.elastic.membership.channel import LINGER_S, Message
from phalanx.elastic.membership.heartbeat import NoNetwork
from phalanx.elastic.membership.listener import BoundAddress, ConnectionListener, bind
from phalanx.elastic.membership.member_list import MemberList, member_list_to_message, parse_member
from phalanx.elastic.membership.rendezvous_host import RendezvousHost
from phalanx.elastic.node.worker import StopRequested
from phalanx.elastic.supervisor.leader_tasks import list_events
from phalanx.elastic.supervisor.meeting import Meeting, decide_meeting
from phalanx.elastic.supervisor.state import (
    DivisionPrepared,
    FinishJob,
    Node,
    NodeJoined,
    NodeLost,
    NodeReady,
    NodeUnfit,
    SendOffer,
    StopSignalReceived,
    SupervisorEvent,
    Tick,
    WriteEvent,
)

LOOK_S = 2.0  # between two looks whether the address file is still there
ERRORS: Mapping[int, type[PhalanxError]] = {ExitCode.UNHEALTHY: Unhealthy, ExitCode.CONFIG: ConfigError}


class MeetingHost:
    """Host of a rendezvous. `hello` is this node's hello message; `notice(kind, details)` reports nodes that join or
    leave. Up to `spares` of the `nodes` may be unfit. Without a `listener` this is the only node. Methods that handle
    an event raise StopRequested once another node received a stop signal, and PhalanxError if the job cannot begin."""

    def __init__(
        self,
        nodes: int,
        listener: socket.socket | None,
        address: rendezvous.HostAddress | str,
        folder: Path | None,
        hello: Message,
        timeout_s: float,
        notice: Callable[[str, dict[str, Any]], None],
        spares: int = 0,
    ) -> None:
        self.notice, self._folder, self._address = notice, folder, address
        self.secret = address if isinstance(address, str) else address.secret
        self.listener = ConnectionListener(listener, self.secret, self._refused) if listener else NoNetwork()
        self._looked = now = time.monotonic()
        self.state = Meeting(nodes, timeout_s, (_node_of(hello),), spares, since=now)
        self.hellos: dict[int, Message] = {0: hello}  # of all that have been here
        self.answers: dict[int, Message] = {}  # to the last offer, by node
        self._offer: Message = {}
        self._over = False
        self.host = RendezvousHost(
            lambda theirs: (
                find_mismatch(theirs, hello, to_node_0=True)
                or find_changed_devices(theirs, self.hellos if self.state.division else {})
            ),
            notice,
            LINGER_S,
        )

    def descriptors(self) -> Mapping[int, int]:
        """Descriptors for poll(), with their event masks."""
        return {**self.host.descriptors(), **self.listener.descriptors()}

    def due_s(self) -> float:
        """Seconds until the next turn is due, whatever poll() sees; infinite where it is not."""
        return self.listener.due_s()

    def poll_once(self) -> None:
        """Run one turn without blocking."""
        for channel, hello in self.listener.accept():
            if hello.get("role") == "first":
                channel.send_and_close({"ok": True}, "it was only a check for node 0")
            else:
                self.host.greet(channel, hello)
        if (caller := self.listener.take_flooding_host()) is not None:
            self.notice(EventKind.WARNING, {"message": explain_flood(caller, 0)})
        for node, heard in self.host.poll_once():
            now = time.monotonic()
            if isinstance(heard, dict):
                self.hellos[node] = heard
                self.handle_event(NodeJoined(now, _node_of(heard)))
            elif isinstance(heard, str):
                self.answers.pop(node, None)
                self.handle_event(NodeLost(now, node, heard))
            elif isinstance(heard, messages.AnswerMessage):
                self.answers[node] = heard.answer
                self.handle_event(NodeReady(now, node, self.state.division))
            elif isinstance(heard, messages.StopMessage):
                self.handle_event(StopSignalReceived(now, heard.stop))
            else:
                for event in list_events(node, heard, now):
                    self.handle_event(event)

    def handle_event(self, event: SupervisorEvent) -> None:
        """Decide, and carry out the actions."""
        self.state, actions = decide_meeting(self.state, event)
        for action in actions:
            match action:
                case SendOffer():
                    self.host.send({"offer": self._offer}, action.node)
                case WriteEvent():
                    self.notice(action.kind, dict(action.details))
                case FinishJob(code=ExitCode.STOPPED):
                    raise StopRequested(action.why)
                case FinishJob():
                    raise ERRORS.get(action.code, CollectiveError)(action.why)

    def have_all_nodes(self) -> bool:
        """Whether all nodes are there. Raises RunError when another job has this job's rendezvous."""
        now = time.monotonic()
        if self._folder is not None and now > self._looked + LOOK_S:
            self._looked = now
            assert isinstance(self._address, rendezvous.HostAddress)
            rendezvous.keep_published(self._folder, self._address)
        self.handle_event(Tick(now))
        return not self.state.missing

    def are_all_ready(self) -> bool:
        """Whether all nodes can start. Raises as `have_all_nodes`."""
        return self.have_all_nodes() and not self.state.unready

    def offer(self, offer: Message) -> None:
        """Tell every node of an offer, now and when it comes back; from now on each has to come back as it is."""
        self._offer, self.answers = offer, {}
        self.handle_event(DivisionPrepared(time.monotonic(), self.state.division + 1))

    def report_unfit(self, why: str) -> None:
        """This node is not fit: once all have entered it leaves, and a spare takes its place. Raises Unhealthy where
        none can."""
        self.handle_event(NodeUnfit(time.monotonic(), 0, why, int(ExitCode.UNHEALTHY)))

    def devices(self, nodes: int) -> list[list[Any]]:
        """Those of the first `nodes`, which get ranks; spares have no part yet."""
        return [self.hellos[node]["devices"] for node in range(nodes)]

    def describe_nodes(self, nodes: int) -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
        """The fields of the start event about nodes, those after the first `nodes` being spares; and the nodes
        that are lost before the first attempt because they are unfit. Node 0 leaves later."""
        hosts = [self.hellos[node]["host"] for node in range(self.state.total)]
        unfit = [(node, why) for node, why in self.state.unfit.items() if node]
        lost = [{"node": node, "host": hosts[node], "reason": why} for node, why in unfit]
        return {"hosts": hosts[:nodes], "spares": hosts[nodes:]}, lost

    def interface(self) -> str | None:
        """The interface of this machine through which the other nodes reach it."""
        found = (rendezvous.interface_of(seat.channel.socket) for seat in self.host.connected.values())
        return next((name for name in found if name is not None), None)

    def _refused(self, host: str, why: str) -> None:
        remedy = (
            "it read an old address file and retries"
            if self._folder
            else f"set the same {shared_secret.VARIABLE} on all nodes"
        )
        text = f"refused a connection from {host}: {why}; if it is a node of this job, {remedy}"
        self.notice(EventKind.WARNING, {"message": text})

    # ------------------------------------------------------------------------------------------------------- the end

    def bind_address(self) -> BoundAddress:
        """This machine's address as the other nodes know it, with the sockets for them; at others of its addresses
        nothing listens any more. Raises RunError."""
        connected = self.host.connected.values()
        found = [str(seat.channel.socket.getsockname()[0]).removeprefix("::ffff:") for seat in connected]
        assert isinstance(self.listener, ConnectionListener)
        address = min(found, key=rendezvous.is_loopback)
        try:
            self.listener.restrict_to(address)
            return bind(address, self.listener.socket)
        except OSError as error:
            raise RunError(f"node 0 cannot listen at {address} ({error.strerror}); check its network") from None

    def enter(self, epoch: int, at: BoundAddress) -> MemberList:
        """Make all nodes that are here the members of a first epoch, and end the rendezvous; the listener stays open
        for others to serve."""
        told = [self.hellos[0] | at.to_message()]
        told += [seat.hello | seat.hello["at"] for _, seat in sorted(self.host.connected.items())]
        member_list = MemberList(epoch, 0, tuple(parse_member(each) for each in told))
        self.host.dismiss({"roster": member_list_to_message(member_list)}, "the rendezvous is over")
        self.host.close()
        self._over = True
        return member_list

    def finish(self, code: int, text: str) -> None:
        """Tell all nodes how the job ended, and stop listening. No effect once the rendezvous is over."""
        if not self._over:
            self.host.close({"finish": code, "text": text})
            self.listener.close("the job is over")


def _node_of(hello: Message) -> Node:
    devices = hello["devices"]
    return Node(hello["node"], hello["host"], len(devices), devices[0][1] if devices else "")
