"""Node 0 of a job on several nodes, as its agent sees the others: who is there, who fits, what each attempt came to.

Nothing here waits: `tend` takes what has come and sends what there is to say. Nodes say hello once per connection, get
the configuration (`offer`), say that they are ready, and start and end attempts as they are told. A connection lasts as
long as its node; when it ends, the node is lost, and the attempt with it.
"""

import os
import platform
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.cluster import rendezvous, wire
from phalanx.cluster.causes import End
from phalanx.cluster.relay import Relay, beside_the_store, hand_over
from phalanx.cluster.wire import Channel, Message, Proof
from phalanx.errors import CollectiveError, ConfigError, RunError
from phalanx.records import ExitCode, Kind, StoreAddress, shown

MOST_STRANGERS = 64  # connections that have not proved themselves; others wait before they are taken
PRESSED_S = 1.0  # what the oldest of them gets to prove itself while others wait
MOST_TOLD = 20  # hosts whose calls were refused, each of which is said once
COLLECT_S = 15.0  # what another node gets to end its ranks; its agent kills them in less
LOOK_S = 2.0  # between two looks whether the address file is still there


@dataclass(frozen=True)
class Stranger:
    """Who has called and has not said who it is."""

    channel: Channel
    proof: Proof
    host: str  # the address it calls from


@dataclass
class Seat:
    """What is known of a node that is there."""

    channel: Channel
    hello: Message
    answer: Message | None = None  # what it said with its being ready
    attempt: int = 0  # the attempt that it was told to start
    code: int | None = None  # how that ended there; None: not yet
    ends: list[End] = field(default_factory=list)
    claimant: tuple[Channel, Message] | None = None  # who says that he is this node too
    asked: float = 0.0  # when this one was asked whether it is still there


class FirstNode:
    """`hello` is what this node would say of itself; `notice(kind, details)` is told who comes and goes."""

    def __init__(
        self,
        nodes: int,
        listener: socket.socket,
        address: rendezvous.Address | str,
        folder: Path | None,
        hello: Message,
        timeout_s: float,
        notice: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.nodes, self.notice, self._timeout_s = nodes, notice, timeout_s
        self._listener, self._folder, self._address = listener, folder, address
        self._secret = address if isinstance(address, str) else address.secret
        self._hellos: dict[int, Message] = {0: hello}  # of all nodes that the job was resolved for
        self._strangers: list[Stranger] = []
        self._told: set[str] = set()  # hosts of strangers that were refused, which was said
        self._seats: dict[int, Seat] = {}
        self._offer: Callable[[int], Message] | None = None
        self._attempt = 0
        self._lost = False  # some node, within this attempt
        self._missing_since = self._looked = time.monotonic()
        self._relay: tuple[Relay, socket.socket] | None = None
        self._end_by: float | None = None
        self._stops: list[str] = []
        self.refusal: str | None = None  # why a node cannot take part as things are
        self.asked: str | None = None  # the first stop signal on another node

    # ------------------------------------------------------------------------------------------------------ gathering

    def descriptors(self) -> Mapping[int, int]:
        """What poll() has to look at, and for what."""
        channels = [stranger.channel for stranger in self._strangers]
        channels += [seat.channel for seat in self._seats.values()]
        channels += [seat.claimant[0] for seat in self._seats.values() if seat.claimant]
        found = {channel.fileno(): channel.awaits for channel in channels if channel.lost is None}
        return found if self._is_full() else found | {self._listener.fileno(): select.POLLIN}

    def hellos(self) -> list[Message]:
        """What each node has said of itself, by node. All must be there."""
        return [self._hello_of(node) for node in range(self.nodes)]

    def missing(self) -> list[int]:
        """Nodes that are not there."""
        return [node for node in range(1, self.nodes) if node not in self._seats]

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

    def offer(self, offer: Callable[[int], Message]) -> None:
        """Tell every node, now and when it comes back, what `offer(node)` says; from now on each has to come back as it
        is."""
        self._offer = offer
        for node, seat in self._seats.items():
            self._hellos[node] = seat.hello
            seat.channel.say({"offer": offer(node)})

    def ready(self) -> bool:
        """Whether all nodes can start. Raises as `arrived`, and ConfigError with the words of a node that cannot."""
        if self.refusal is not None:
            raise ConfigError(self.refusal)
        return self.arrived() and all(seat.answer is not None for seat in self._seats.values())

    def answers(self) -> list[Message]:
        """What the other nodes said with their being ready."""
        return [seat.answer for _, seat in sorted(self._seats.items()) if seat.answer is not None]

    def interface(self) -> str | None:
        """The interface of this machine through which the other nodes reach it."""
        found = (rendezvous.interface_of(seat.channel.socket) for seat in self._seats.values())
        return next((name for name in found if name is not None), None)

    def tend(self) -> None:
        """Do all that can be done without waiting."""
        for stranger in list(self._strangers):
            self._hear_stranger(stranger)
        self._let_in()
        for node, seat in list(self._seats.items()):
            for message in seat.channel.heard():
                self._hear(node, seat, message)
            seat.channel.check_alive()
            if seat.channel.lost is not None:
                self._lose(node, seat.channel.lost)
            elif seat.claimant is not None and time.monotonic() > seat.asked + wire.SILENT_S:
                self._lose(node, "it does not answer")

    def _is_full(self) -> bool:
        """Whether who calls now has to wait: many ranks may call at once, and none may push another out."""
        if len(self._strangers) < MOST_STRANGERS:
            return False
        return time.monotonic() < self._strangers[0].proof.until - wire.PROOF_S + PRESSED_S

    def _let_in(self) -> None:
        while not self._is_full():
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it has gone again, or there is no descriptor left: the next may do better
                return
            if len(self._strangers) >= MOST_STRANGERS:
                self._strangers.pop(0).channel.close("it kept others waiting")
            channel = Channel(connection)
            host = str(peer[0]).removeprefix("::ffff:")
            self._strangers.append(Stranger(channel, Proof(channel, self._secret, calling=False), host))

    def _hear_stranger(self, stranger: Stranger) -> None:
        channel, proof = stranger.channel, stranger.proof
        messages = channel.heard()
        hello = None
        for message in messages:
            if not proof.done and proof.failed is None:
                proof.hear(message)
            elif proof.done:
                hello = message
        if hello is not None:
            self._strangers.remove(stranger)
            self._greet(channel, hello)
        elif channel.lost or proof.failed or time.monotonic() > proof.until:
            self._strangers.remove(stranger)
            channel.close(proof.failed or "it did not say who it is in time")
            if proof.failed:
                self._say_refused(stranger.host, proof.failed)

    def _say_refused(self, host: str, why: str) -> None:
        """Say once for each host, and for no more hosts than fit on a page, that its call was refused."""
        if host in self._told or len(self._told) >= MOST_TOLD:
            return
        self._told.add(host)
        mend = (
            "it has read an old address file and looks again"
            if self._folder
            else f"set the same {rendezvous.SECRET} there"
        )
        self.notice(
            Kind.WARNING, {"message": f"a caller from {host} was refused: {why}; if it is a node of this job, {mend}"}
        )

    def _greet(self, channel: Channel, hello: Message) -> None:
        if hello.get("role") == "store":
            self._join_to_store(channel, hello)
        elif hello.get("role") == "first":
            channel.farewell({"ok": True}, "it only asked whether there is a node 0")
        elif (objection := self._objection(hello)) is not None:
            self.notice(Kind.WARNING, {"message": objection})
            channel.farewell({"refused": objection}, objection)
        elif (seat := self._seats.get(hello["node"])) is None:
            self._seat(channel, hello)
        elif seat.claimant is not None:
            channel.farewell({"refused": _taken(seat.hello, hello)}, "its place is taken")
        else:  # it may be that node, started again, and the one that is known may be gone without a word
            seat.claimant, seat.asked = (channel, hello), time.monotonic()
            seat.channel.say({"ping": True})

    def _objection(self, hello: Message) -> str | None:
        """Why a node cannot take part, as a sentence for its user."""
        first = self._hellos[0]
        try:
            node, host, nodes = int(hello["node"]), str(hello["host"]), int(hello["nodes"])
            versions, recipe, devices = dict(hello["versions"]), dict(hello["recipe"]), list(hello["devices"])
            kinds = {kind_of(device) for device in [*devices, *first["devices"]]}
        except (KeyError, TypeError, ValueError, IndexError):
            return "a node sent a greeting that makes no sense; use the same version of Phalanx on all nodes"
        who = f"node {node} ({host})"
        if nodes != self.nodes:
            return f"--nodes is {nodes} on {who} and {self.nodes} on node 0; give all nodes the same number"
        if not 0 < node < self.nodes:
            return f"{host} wants to be node {node} of {self.nodes}; give it a --node-rank that is not taken"
        for name, version in first["versions"].items():
            if versions.get(name) != version:
                theirs = versions.get(name, "missing")
                return f"{name} is {theirs} on {who} and {version} on node 0; install the same version on all nodes"
        different = [key for key in sorted({*recipe, *first["recipe"]}) if recipe.get(key) != first["recipe"].get(key)]
        if different:
            both = [(key, _told(recipe.get(key)), _told(first["recipe"].get(key))) for key in different[:3]]
            said = "; ".join(f"{key} is {theirs!r} on {who} and {here!r} on node 0" for key, theirs, here in both)
            return f"{said}; start all nodes with the same recipe and the same keys"
        if len(kinds) > 1:
            return (
                f"{who} trains on {kind_of(devices[0])} and node 0 on {kind_of(first['devices'][0])}, between which "
                "nothing can be exchanged; hide the accelerators of all nodes, or of none"
            )
        before = self._hellos.get(node)
        if self._offer is not None and before is not None and before["devices"] != devices:
            return (
                f"{who} has {_ranks(devices)} now, and the job was started with {_ranks(before['devices'])} there; "
                "start it as before, or stop the job and start all nodes anew"
            )
        return None

    def _seat(self, channel: Channel, hello: Message) -> None:
        node = hello["node"]
        self._seats[node] = Seat(channel, hello)
        self.notice(Kind.NODE_JOINED, {"node": node, "host": hello["host"], "ranks": len(hello["devices"])})
        if self._offer is not None:
            channel.say({"offer": self._offer(node)})

    def _lose(self, node: int, why: str) -> None:
        if not self.missing():
            self._missing_since = time.monotonic()
        seat = self._seats.pop(node)
        seat.channel.close(why)
        if seat.attempt == self._attempt and seat.code is None:
            self._lost = True
        self.notice(Kind.NODE_LOST, {"node": node, "host": seat.hello["host"], "reason": why})
        if seat.claimant is not None:
            self._greet(*seat.claimant)

    def _hear(self, node: int, seat: Seat, message: Message) -> None:
        if "answer" in message and isinstance(message["answer"], dict):
            seat.answer = message["answer"]
        elif "unfit" in message:
            self.refusal = f"node {node} ({seat.hello['host']}): {message['unfit']}"
        elif message.get("ended") == self._attempt == seat.attempt:
            seat.ends = [_end(end, seat.hello["host"]) for end in message["ends"]]
            seat.code = int(message["code"])
        elif "stop" in message:
            self.asked = self.asked or str(message["stop"])
            self._stops.append(str(message["stop"]))
            self.tell_stop(str(message["stop"]), known=node)
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

    # ------------------------------------------------------------------------------------------------------- attempts

    def begin(self, number: int, port: int | None) -> StoreAddress | None:
        """Start an attempt on the other nodes, whose ranks find the store that listens at a loopback port here."""
        assert port is not None
        self._attempt, self._lost, self._end_by = number, False, None
        self._relay = beside_the_store(port)
        for seat in self._seats.values():
            seat.attempt, seat.code, seat.ends = number, None, []
            seat.channel.say({"start": number})
        return None

    def busy(self) -> bool:
        """Whether ranks of this attempt still run on other nodes."""
        return any(seat.attempt == self._attempt and seat.code is None for seat in self._seats.values())

    def broken(self) -> bool:
        """Whether the attempt has to end here because of what happened elsewhere."""
        codes = [seat.code for seat in self._seats.values() if seat.attempt == self._attempt]
        return self._lost or any(code not in (None, ExitCode.DONE, ExitCode.STOPPED) for code in codes)

    def explained(self) -> bool:
        """Whether what happened elsewhere explains why ranks here lost a peer: a lost node does."""
        return self._lost

    def ends(self) -> list[End]:
        """How ranks on other nodes ended, as far as known."""
        return [end for seat in self._seats.values() if seat.attempt == self._attempt for end in seat.ends]

    def stopped(self) -> bool:
        """Whether ranks of another node ended because they were asked to stop."""
        return any(seat.code == ExitCode.STOPPED for seat in self._seats.values())

    def end(self) -> None:
        """Tell the other nodes that this attempt is over."""
        self._end_by = time.monotonic() + COLLECT_S
        for seat in self._seats.values():
            if seat.attempt == self._attempt and seat.code is None:
                seat.channel.say({"end": self._attempt})
        self.stop_relay()

    def ended(self) -> bool:
        """Whether it is over everywhere; a node that does not say so in time is given up."""
        late = self._end_by is not None and time.monotonic() > self._end_by
        for node, seat in list(self._seats.items()):
            if late and seat.attempt == self._attempt and seat.code is None:
                self._lose(node, f"it did not end its ranks within {COLLECT_S:g} s")
        return not self.busy()

    def stops(self) -> list[str]:
        """Names of stop signals that other nodes got since the last call."""
        new, self._stops = self._stops, []
        return new

    def tell_stop(self, name: str, known: int | None = None) -> None:
        """Pass a stop signal on to all nodes, but for one that knows it."""
        for node, seat in self._seats.items():
            if node != known:
                seat.channel.say({"stop": name})

    def stop_relay(self) -> None:
        if self._relay is not None:
            relay, ours = self._relay
            self._relay = None
            ours.close()
            relay.stop()

    def finish(self, code: int, text: str) -> None:
        """Tell all nodes how the job ended, and leave nothing behind."""
        self.stop_relay()
        for seat in self._seats.values():
            seat.channel.farewell({"finish": code, "text": text}, "the job is over")
        for stranger in self._strangers:
            stranger.channel.close("the job is over")
        self._seats, self._strangers = {}, []
        self._listener.close()

    def _join_to_store(self, channel: Channel, hello: Message) -> None:
        if self._relay is None or hello.get("attempt") != self._attempt:
            channel.close("it belongs to another attempt")
            return
        channel.say({"ok": True})
        try:
            hand_over(self._relay[1], channel.socket)
        except OSError as error:  # the relay has died: the rank that waits for it fails, and with it the attempt
            self.notice(Kind.WARNING, {"message": f"the store could not be reached from another node ({error})"})
        channel.close("the relay has it")


def own_hello(node: int, nodes: int, devices: list[Any], versions: Message, recipe: Message) -> Message:
    """What a node says of itself: `devices` has name, model and bf16 of each of its ranks."""
    return {
        "role": "node", "node": node, "nodes": nodes, "host": platform.node(), "pid": os.getpid(), "devices": devices,
        "versions": versions, "recipe": recipe,
    }  # fmt: skip


def kind_of(device: list[Any]) -> str:
    """The kind of a device of a hello: "cpu", or an accelerator's."""
    return str(device[0]).partition(":")[0]


def _ranks(devices: list[Any]) -> str:
    models = ", ".join(sorted({str(device[1]) for device in devices}))
    return f"{len(devices)} rank{'s' if len(devices) > 1 else ''} on {models}"


def _taken(holder: Message, claimant: Message) -> str:
    return (
        f"process {claimant['pid']} on {claimant['host']} says it is node {holder['node']}, which process "
        f"{holder['pid']} on {holder['host']} is already; give each node a --node-rank of its own"
    )


def _told(value: Any) -> Any:
    """A value of a recipe as others may read it: without what is secret in a URL."""
    if isinstance(value, dict):
        return {key: _told(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_told(each) for each in value]
    return shown(value) if isinstance(value, str) else value


def _end(tree: Message, host: str) -> End:
    return End(tree["rank"], tree["pid"], tree["signal"], tree["exit_code"], tree["cause"], host)
