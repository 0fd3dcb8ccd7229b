"""Node 0 of a job on several nodes at their meeting, as its agent sees the others: who is there, who fits and is ready.

Nothing here waits: `poll_once` takes what has come and sends what there is to say. Nodes say hello once per connection,
get the configuration (`offer`), and say that they are ready. When all are, they enter the membership (`membership.py`),
where node 0 is one of them, and the meeting is over.
"""

import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import CollectiveError, ConfigError, PhalanxError, RunError, Unhealthy
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.elastic.membership import channel as wire
from phalanx.elastic.membership import messages, rendezvous, shared_secret
from phalanx.elastic.membership.admission import (
    Admission,
    can_start_without,
    explain_flood,
    find_changed_devices,
    find_mismatch,
    receive_messages,
)
from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.heartbeat import NoNetwork
from phalanx.elastic.membership.listener import BoundAddress, ConnectionListener, bind
from phalanx.elastic.membership.member_list import MemberList, member_list_to_message, parse_member

LOOK_S = 2.0  # between two looks whether the address file is still there
NOTE_S = 60.0  # after which it is said, and said again, who is not ready


@dataclass
class ConnectedNode:
    """What is known of a node that is there."""

    channel: Channel
    hello: Message
    answer: Message | None = None  # what it said with its being ready
    pinged_at: float = math.inf  # when this one was asked whether it is still there, as another claims its number


class RendezvousHost:
    """`hello` is what this node would say of itself; `notice(kind, details)` is told who comes and goes. Of the `nodes`
    as many may turn out not to be fit as there are `spares` among them. Without a `listener` this is the only node."""

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
        self.nodes, self.notice, self._timeout_s, self._spares = nodes, notice, timeout_s, spares
        self._folder, self._address = folder, address
        self.secret = address if isinstance(address, str) else address.secret
        self.listener = ConnectionListener(listener, self.secret, self._refused) if listener else NoNetwork()
        self._admission = Admission(
            lambda theirs: find_mismatch(theirs, hello, to_node_0=True) or find_changed_devices(theirs, self._offered),
            self._find_holder,
            self._challenge,
            self._add_node,
            notice,
            wire.LINGER_S,
        )
        self._hello = hello
        self._offered: dict[int, Message] = {}  # hellos of all nodes that the job was resolved for
        self._connected: dict[int, ConnectedNode] = {}
        self._offer: Message | None = None
        self._over = False
        self._missing_since = self._looked = time.monotonic()
        self._note_at = math.inf
        self.refusal: PhalanxError | None = None  # why a node cannot take part as things are
        self.replaced_by_spares: dict[int, str] = {}  # nodes that are not fit, which spares make up for, and why
        self.stop_signal: str | None = None  # the first stop signal on another node

    # ------------------------------------------------------------------------------------------------------ gathering

    def descriptors(self) -> Mapping[int, int]:
        """What poll() has to look at, and for what."""
        channels = [seat.channel for seat in self._connected.values()]
        found = {channel.fileno(): channel.awaits for channel in channels if channel.lost is None}
        return found | self.listener.descriptors() | self._admission.descriptors()

    def due_s(self) -> float:
        """Seconds until the next turn is due, whatever poll() sees; infinite where it is not."""
        return self.listener.due_s()

    def hellos(self) -> list[Message]:
        """What each node has said of itself, by node. All must be there."""
        told = {0: self._hello, **self._offered, **{node: seat.hello for node, seat in self._connected.items()}}
        return [told[node] for node in range(self.nodes)]

    def devices(self, nodes: int) -> list[list[Any]]:
        """Those of the first `nodes`, which get ranks; spares have no part yet."""
        return [hello["devices"] for hello in self.hellos()[:nodes]]

    def describe_nodes(self, nodes: int) -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
        """What the event of the start says of the nodes, of which the others than the first `nodes` are spares; and the
        nodes that are lost before the first attempt, as they are not fit. Node 0 leaves later."""
        hosts = [hello["host"] for hello in self.hellos()]
        unfit = [(node, why) for node, why in self.replaced_by_spares.items() if node]
        lost = [{"node": node, "host": hosts[node], "reason": why} for node, why in unfit]
        return {"hosts": hosts[:nodes], "spares": hosts[nodes:]}, lost

    def missing(self) -> list[int]:
        """Nodes that are not there, and are waited for."""
        return [
            node for node in range(1, self.nodes) if node not in self._connected and node not in self.replaced_by_spares
        ]

    def have_all_nodes(self) -> bool:
        """Whether all nodes are there. Raises PhalanxError when a node does not come in time, or another job has this
        job's rendezvous."""
        now = time.monotonic()
        if self._folder is not None and now > self._looked + LOOK_S:
            self._looked = now
            assert isinstance(self._address, rendezvous.HostAddress)
            rendezvous.keep_published(self._folder, self._address)
        missing = self.missing()
        if missing and now > self._missing_since + self._timeout_s:
            names = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self.nodes}"
            raise CollectiveError(
                f"{names} did not arrive within {self._timeout_s:g} s; start the same command there with its own "
                "--node-rank, or raise --rendezvous-timeout"
            )
        return not missing

    def yield_to_spare(self, why: str, alone: bool) -> str:
        """This node is not fit: once all have entered it leaves, and a spare takes its place. Returns `why`. Raises
        Unhealthy where none can: there is none left, or this node `alone` can write the run's records."""
        if self.nodes == 1:
            raise Unhealthy(why)
        if alone:
            raise Unhealthy(
                f"{why}; this is node 0, which alone writes to the run's URL, so no spare takes its place: start its "
                "command on another machine"
            )
        if not can_start_without(0, self.replaced_by_spares, self._connected, self._spares):
            raise Unhealthy(
                f"{why}; this is node 0, for which all wait, and there is no spare to take its place: start its "
                "command on another machine, or all with --spares 1 and one node more (and replace in "
                "resilience.on_lost_node)"
            )
        self.replaced_by_spares[0] = why
        self.notice(EventKind.WARNING, {"message": f"{why}; node 0 brings all together, and a spare takes its place"})
        return why

    def offer(self, offer: Message) -> None:
        """Tell every node of an offer, now and when it comes back; from now on each has to come back as it is."""
        self._offer, self._note_at = offer, time.monotonic() + NOTE_S
        for node, seat in self._connected.items():
            self._offered[node] = seat.hello
            seat.channel.send({"offer": offer})

    def are_all_ready(self) -> bool:
        """Whether all nodes can start. Raises as `have_all_nodes`, and an error with the words of a node that cannot:
        Unhealthy where that is not fit, else ConfigError."""
        if self.refusal is not None:
            raise self.refusal
        awaited = [node for node, seat in sorted(self._connected.items()) if seat.answer is None]
        if awaited and time.monotonic() > self._note_at:
            self._note_at = time.monotonic() + NOTE_S
            names = f"node{'s' if len(awaited) > 1 else ''} {', '.join(map(str, awaited))}"
            self.notice(
                EventKind.WARNING, {"message": f"waiting for {names} to get ready; their own output says with what"}
            )
        return self.have_all_nodes() and not awaited

    def answers(self) -> dict[int, Message]:
        """What the other nodes said with their being ready, by node, in order."""
        return {node: seat.answer for node, seat in sorted(self._connected.items()) if seat.answer is not None}

    def interface(self) -> str | None:
        """The interface of this machine through which the other nodes reach it."""
        found = (rendezvous.interface_of(seat.channel.socket) for seat in self._connected.values())
        return next((name for name in found if name is not None), None)

    def poll_once(self) -> None:
        """Do all that can be done without waiting."""
        for channel, hello in self.listener.accept():
            if hello.get("role") == "first":
                channel.send_and_close({"ok": True}, "it only asked whether there is a node 0")
            else:
                self._admission.greet(channel, hello)
        if (host := self.listener.take_flooding_host()) is not None:
            self.notice(EventKind.WARNING, {"message": explain_flood(host, 0)})
        for node, seat in list(self._connected.items()):
            for message in receive_messages(seat.channel):
                self._hear(node, seat, message)
            if seat.channel.lost is not None:
                self._lose(node, seat.channel.lost)
            elif time.monotonic() > seat.pinged_at + wire.SILENT_S:
                self._lose(node, "it does not answer")
        self._admission.poll_once()

    def _refused(self, host: str, why: str) -> None:
        mend = (
            "it has read an old address file and looks again"
            if self._folder
            else f"set the same {shared_secret.VARIABLE} on all nodes"
        )
        self.notice(
            EventKind.WARNING,
            {"message": f"a caller from {host} was refused: {why}; if it is a node of this job, {mend}"},
        )

    def _find_holder(self, node: int) -> str | None:
        hello = self._connected[node].hello if node in self._connected else None
        return None if hello is None else f"process {hello['pid']} on {hello['host']}"

    def _challenge(self, node: int) -> float:
        """Ask the node that has a number whether it is there; it is lost if it does not answer."""
        seat = self._connected[node]
        if seat.pinged_at == math.inf:
            seat.pinged_at = time.monotonic()
            seat.channel.send({"ping": True})
        return math.inf

    def _add_node(self, channel: Channel, hello: Message) -> None:
        node = hello["node"]
        self.replaced_by_spares.pop(node, None)  # it may have been mended
        self._connected[node] = ConnectedNode(channel, hello)
        self.notice(EventKind.NODE_JOINED, {"node": node, "host": hello["host"], "ranks": len(hello["devices"])})
        if self._offer is not None:
            channel.send({"offer": self._offer})

    def _lose(self, node: int, why: str) -> None:
        if not self.missing():
            self._missing_since = time.monotonic()
        seat = self._connected.pop(node)
        seat.channel.close(why)
        self.notice(EventKind.NODE_LOST, {"node": node, "host": seat.hello["host"], "reason": why})

    def _hear(self, node: int, seat: ConnectedNode, message: messages.MessageRecord) -> None:
        match message:
            case messages.ReadyMessage():
                seat.answer = {"held": message.held or []}
            case messages.AnswerMessage():
                seat.answer = message.answer
            case messages.UnfitMessage():
                unhealthy = message.code == ExitCode.UNHEALTHY
                if unhealthy and can_start_without(node, self.replaced_by_spares, self._connected, self._spares):
                    self.replaced_by_spares[node] = message.unfit
                else:
                    error = Unhealthy if unhealthy else ConfigError
                    self.refusal = error(f"node {node} ({seat.hello['host']}): {message.unfit}")
            case messages.StopMessage():
                self.stop_signal = self.stop_signal or message.stop
            case messages.PongMessage():
                seat.pinged_at = math.inf
                self._admission.confirm(node)

    # ------------------------------------------------------------------------------------------------------- the end

    def bind_address(self) -> BoundAddress:
        """This machine's address as the other nodes know it, with the sockets for them; at others of its addresses
        nothing listens any more. Raises RunError."""
        found = [str(seat.channel.socket.getsockname()[0]).removeprefix("::ffff:") for seat in self._connected.values()]
        assert isinstance(self.listener, ConnectionListener)
        address = min(found, key=rendezvous.is_loopback)
        try:
            self.listener.restrict_to(address)
            return bind(address, self.listener.socket)
        except OSError as error:
            raise RunError(f"node 0 cannot listen at {address} ({error.strerror}); look at its network") from None

    def make_member_list(self, epoch: int, at: BoundAddress) -> MemberList:
        """All that are here as members of a first epoch. All must be there."""
        told = [
            self._hello | at.to_message(),
            *(seat.hello | seat.hello["at"] for _, seat in sorted(self._connected.items())),
        ]
        return MemberList(epoch, 0, tuple(parse_member(each) for each in told))

    def enter(self, member_list: MemberList) -> None:
        """Have all others enter the circle; the meeting is over, and this one's door is for others to tend."""
        self._say_last({"roster": member_list_to_message(member_list)}, "the meeting is over")
        self._admission.close()
        self._over = True

    def finish(self, code: int, text: str) -> None:
        """Tell all nodes how the job ended, and leave nothing behind. Nothing to do once the meeting is over."""
        self._say_last({"finish": code, "text": text}, "the job is over")
        if not self._over:
            self.listener.close("the job is over")

    def _say_last(self, message: Message, why: str) -> None:
        """Say it to all before one of them is waited for: there may be thousands."""
        for seat in self._connected.values():
            seat.channel.send(message)
        for seat in self._connected.values():
            seat.channel.linger(why)
        self._connected = {}
