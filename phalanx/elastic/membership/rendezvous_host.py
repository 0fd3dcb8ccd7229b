"""Node 0 of a job on several nodes at their meeting, as its agent sees the others: who is there, who fits and is ready.

Nothing here waits: `tend` takes what has come and sends what there is to say. Nodes say hello once per connection, get
the configuration (`offer`), and say that they are ready. When all are, they enter the circle (`membership.py`), where
node
0 is one of them, and the meeting is over.
"""

import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import CollectiveError, ConfigError, PhalanxError, RunError, Unhealthy
from phalanx.core.events import Kind
from phalanx.core.placement import ExitCode
from phalanx.elastic.membership import channel as wire
from phalanx.elastic.membership import rendezvous, shared_secret
from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.handshake import crowd, objection, taken
from phalanx.elastic.membership.listener import Address, Door, bind
from phalanx.elastic.membership.member_list import Roster, member_of, roster_to_message
from phalanx.elastic.membership.messages import NONSENSE, problem

LOOK_S = 2.0  # between two looks whether the address file is still there
NOTE_S = 60.0  # after which it is said, and said again, who is not ready


@dataclass
class Seat:
    """What is known of a node that is there."""

    channel: Channel
    hello: Message
    answer: Message | None = None  # what it said with its being ready
    claimant: tuple[Channel, Message] | None = None  # who says that he is this node too
    asked: float = 0.0  # when this one was asked whether it is still there


class FirstNode:
    """`hello` is what this node would say of itself; `notice(kind, details)` is told who comes and goes. Of the `nodes`
    as many may turn out not to be fit as there are `spares` among them."""

    def __init__(
        self,
        nodes: int,
        listener: socket.socket,
        address: rendezvous.Address | str,
        folder: Path | None,
        hello: Message,
        timeout_s: float,
        notice: Callable[[str, dict[str, Any]], None],
        spares: int = 0,
    ) -> None:
        self.nodes, self.notice, self._timeout_s, self._spares = nodes, notice, timeout_s, spares
        self._folder, self._address = folder, address
        self.secret = address if isinstance(address, str) else address.secret
        self.door = Door(listener, self.secret, self._refused)
        self._hellos: dict[int, Message] = {0: hello}  # of all nodes that the job was resolved for
        self._seats: dict[int, Seat] = {}
        self._offer: Callable[[int], Message] | None = None
        self._over = False
        self._missing_since = self._looked = time.monotonic()
        self._note_at = math.inf
        self.refusal: PhalanxError | None = None  # why a node cannot take part as things are
        self.left_out: dict[int, str] = {}  # nodes that are not fit, which spares make up for, and why
        self.asked: str | None = None  # the first stop signal on another node

    # ------------------------------------------------------------------------------------------------------ gathering

    def descriptors(self) -> Mapping[int, int]:
        """What poll() has to look at, and for what."""
        channels = [seat.channel for seat in self._seats.values()]
        channels += [seat.claimant[0] for seat in self._seats.values() if seat.claimant]
        found = {channel.fileno(): channel.awaits for channel in channels if channel.lost is None}
        return found | self.door.descriptors()

    def due_s(self) -> float:
        """Seconds until the next turn is due, whatever poll() sees; infinite where it is not."""
        return self.door.due_s()

    def hellos(self) -> list[Message]:
        """What each node has said of itself, by node. All must be there."""
        return [self._hello_of(node) for node in range(self.nodes)]

    def missing(self) -> list[int]:
        """Nodes that are not there, and are waited for."""
        return [node for node in range(1, self.nodes) if node not in self._seats and node not in self.left_out]

    def arrived(self) -> bool:
        """Whether all nodes are there. Raises PhalanxError when a node does not come in time, or another job has this
        job's rendezvous."""
        now = time.monotonic()
        if self._folder is not None and now > self._looked + LOOK_S:
            self._keep_published(self._folder)
        missing = self.missing()
        if missing and now > self._missing_since + self._timeout_s:
            names = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self.nodes}"
            raise CollectiveError(
                f"{names} did not arrive within {self._timeout_s:g} s; start the same command there with its own "
                "--node-rank, or raise --rendezvous-timeout"
            )
        return not missing

    def stand_aside(self, why: str, alone: bool) -> str:
        """This node is not fit: once all have entered it leaves, and a spare takes its place. Returns `why`. Raises
        Unhealthy where none can: there is none left, or this node `alone` can write the run's records."""
        fit = self._seats.keys() - self.left_out.keys()
        if alone:
            raise Unhealthy(
                f"{why}; this is node 0, which alone writes to the run's URL, so no spare takes its place: start its "
                "command on another machine"
            )
        if len(self.left_out) >= self._spares or not fit:
            raise Unhealthy(
                f"{why}; this is node 0, for which all wait, and there is no spare to take its place: start its "
                "command on another machine, or all with --spares 1 and one node more (and replace in "
                "resilience.on_lost_node)"
            )
        self.left_out[0] = why
        self.notice(Kind.WARNING, {"message": f"{why}; node 0 brings all together, and a spare takes its place"})
        return why

    def offer(self, offer: Callable[[int], Message]) -> None:
        """Tell every node, now and when it comes back, what `offer(node)` says; from now on each has to come back as it
        is."""
        self._offer, self._note_at = offer, time.monotonic() + NOTE_S
        for node, seat in self._seats.items():
            self._hellos[node] = seat.hello
            seat.channel.say({"offer": offer(node)})

    def ready(self) -> bool:
        """Whether all nodes can start. Raises as `arrived`, and an error with the words of a node that cannot:
        Unhealthy where that is not fit, else ConfigError."""
        if self.refusal is not None:
            raise self.refusal
        awaited = [node for node, seat in sorted(self._seats.items()) if seat.answer is None]
        if awaited and time.monotonic() > self._note_at:
            self._note_at = time.monotonic() + NOTE_S
            names = f"node{'s' if len(awaited) > 1 else ''} {', '.join(map(str, awaited))}"
            self.notice(Kind.WARNING, {"message": f"waiting for {names} to get ready; their own output says with what"})
        return self.arrived() and not awaited

    def answers(self) -> list[Message]:
        """What the other nodes said with their being ready, in order of node."""
        return list(self.answered().values())

    def answered(self) -> dict[int, Message]:
        """The same, by node."""
        return {node: seat.answer for node, seat in sorted(self._seats.items()) if seat.answer is not None}

    def interface(self) -> str | None:
        """The interface of this machine through which the other nodes reach it."""
        found = (rendezvous.interface_of(seat.channel.socket) for seat in self._seats.values())
        return next((name for name in found if name is not None), None)

    def tend(self) -> None:
        """Do all that can be done without waiting."""
        for channel, hello in self.door.tend():
            self._greet(channel, hello)
        if self.door.crowd is not None:
            host, self.door.crowd = self.door.crowd, None
            self.notice(Kind.WARNING, {"message": crowd(host, 0)})
        for node, seat in list(self._seats.items()):
            for message in seat.channel.heard():
                if (wrong := problem(message)) is not None:
                    seat.channel.close(NONSENSE.format(wrong))
                    break
                self._hear(node, seat, message)
            seat.channel.check_alive()
            if seat.channel.lost is not None:
                self._lose(node, seat.channel.lost)
            elif seat.claimant is not None and time.monotonic() > seat.asked + wire.SILENT_S:
                self._lose(node, "it does not answer")

    def _refused(self, host: str, why: str) -> None:
        mend = (
            "it has read an old address file and looks again"
            if self._folder
            else f"set the same {shared_secret.VARIABLE} on all nodes"
        )
        self.notice(
            Kind.WARNING, {"message": f"a caller from {host} was refused: {why}; if it is a node of this job, {mend}"}
        )

    def _greet(self, channel: Channel, hello: Message) -> None:
        if hello.get("role") == "first":
            channel.farewell({"ok": True}, "it only asked whether there is a node 0")
        elif (wrong := self._objection(hello)) is not None:
            self.notice(Kind.WARNING, {"message": wrong})
            channel.farewell({"refused": wrong}, wrong)
        elif (seat := self._seats.get(hello["node"])) is None:
            self._seat(channel, hello)
        elif seat.claimant is not None:
            channel.farewell({"refused": _taken(seat.hello, hello)}, "its place is taken")
        else:  # it may be that node, started again, and the one that is known may be gone without a word
            seat.claimant, seat.asked = (channel, hello), time.monotonic()
            seat.channel.say({"ping": True})

    def _objection(self, hello: Message) -> str | None:
        """Why a node cannot take part, as a sentence for its user."""
        if (wrong := objection(hello, self._hellos[0], to_node_0=True)) is not None:
            return wrong
        try:
            if hello["devices"]:  # nodes that only look at each other have none, and do not become members
                member_of(hello | hello["at"])
        except (KeyError, TypeError, ValueError):
            return "a node sent a greeting that makes no sense; use the same version of Phalanx on all nodes"
        node, devices, before = hello["node"], hello["devices"], self._hellos.get(hello["node"])
        if self._offer is not None and before is not None and before["devices"] != devices:
            return (
                f"node {node} ({hello['host']}) has {_ranks(devices)} now, and the job was started with "
                f"{_ranks(before['devices'])} there; start it as before, or stop the job and start all nodes anew"
            )
        return None

    def _seat(self, channel: Channel, hello: Message) -> None:
        node = hello["node"]
        self.left_out.pop(node, None)  # it may have been mended
        self._seats[node] = Seat(channel, hello)
        self.notice(Kind.NODE_JOINED, {"node": node, "host": hello["host"], "ranks": len(hello["devices"])})
        if self._offer is not None:
            channel.say({"offer": self._offer(node)})

    def _lose(self, node: int, why: str) -> None:
        if not self.missing():
            self._missing_since = time.monotonic()
        seat = self._seats.pop(node)
        seat.channel.close(why)
        self.notice(Kind.NODE_LOST, {"node": node, "host": seat.hello["host"], "reason": why})
        if seat.claimant is not None:
            self._greet(*seat.claimant)

    def _hear(self, node: int, seat: Seat, message: Message) -> None:
        if "answer" in message and isinstance(message["answer"], dict):
            seat.answer = message["answer"]
        elif "unfit" in message:
            unhealthy = message.get("code") == ExitCode.UNHEALTHY
            others = self._seats.keys() - self.left_out.keys() - {node}
            if unhealthy and len(self.left_out) < self._spares and others:
                self.left_out[node] = str(message["unfit"])
            else:
                error = Unhealthy if unhealthy else ConfigError
                self.refusal = error(f"node {node} ({seat.hello['host']}): {message['unfit']}")
        elif "stop" in message:
            self.asked = self.asked or str(message["stop"])
        elif "ping" in message:
            seat.channel.say({"pong": True})
        elif "pong" in message and seat.claimant is not None:
            channel, hello = seat.claimant
            seat.claimant = None
            self.notice(Kind.WARNING, {"message": _taken(seat.hello, hello)})
            channel.farewell({"refused": _taken(seat.hello, hello)}, "its place is taken")

    def _hello_of(self, node: int) -> Message:
        return self._seats[node].hello if node in self._seats else self._hellos[node]

    def _keep_published(self, folder: Path) -> None:
        self._looked = time.monotonic()
        there = rendezvous.read_address(folder)
        assert isinstance(self._address, rendezvous.Address)
        if there is None:
            rendezvous.publish(folder, self._address)
        elif there != self._address:
            raise RunError(
                f"the rendezvous folder {folder} is used by another job now, whose node 0 is process {there.process}; "
                "give each job a folder of its own"
            )

    # ------------------------------------------------------------------------------------------------------- the end

    def bound(self) -> Address:
        """This machine's address as the other nodes know it, with the sockets for them; at others of its addresses
        nothing listens any more. Raises RunError."""
        found = [str(seat.channel.socket.getsockname()[0]).removeprefix("::ffff:") for seat in self._seats.values()]
        address = min(found, key=rendezvous.is_loopback)
        try:
            self.door.narrow(address)
            return bind(address, self.door.listener)
        except OSError as error:
            raise RunError(f"node 0 cannot listen at {address} ({error.strerror}); look at its network") from None

    def roster(self, epoch: int, at: Address) -> Roster:
        """All that are here as members of a first epoch. All must be there."""
        told = [
            self._hellos[0] | at.told(),
            *(seat.hello | seat.hello["at"] for _, seat in sorted(self._seats.items())),
        ]
        return Roster(epoch, 0, tuple(member_of(each) for each in told))

    def enter(self, roster: Roster) -> None:
        """Have all others enter the circle; the meeting is over, and this one's door is for others to tend."""
        self._say_last({"roster": roster_to_message(roster)}, "the meeting is over")
        self._over = True

    def finish(self, code: int, text: str) -> None:
        """Tell all nodes how the job ended, and leave nothing behind. Nothing to do once the meeting is over."""
        self._say_last({"finish": code, "text": text}, "the job is over")
        if not self._over:
            self.door.close("the job is over")

    def _say_last(self, message: Message, why: str) -> None:
        """Say it to all before one of them is waited for: there may be thousands."""
        for seat in self._seats.values():
            seat.channel.say(message)
        for seat in self._seats.values():
            seat.channel.linger(why)
        self._seats = {}


def _ranks(devices: list[Any]) -> str:
    models = ", ".join(sorted({str(device[1]) for device in devices}))
    return f"{len(devices)} rank{'s' if len(devices) > 1 else ''} on {models}"


def _taken(holder: Message, claimant: Message) -> str:
    return taken(int(holder["node"]), f"process {holder['pid']} on {holder['host']}", claimant)
