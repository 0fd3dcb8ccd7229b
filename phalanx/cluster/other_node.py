"""A node but node 0 of a job on several nodes: finding node 0, and what the agent here has to know of it.

`seek` waits and belongs to the time before an agent has signal handlers; nothing in OtherNode waits.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from phalanx.cluster import rendezvous
from phalanx.cluster.causes import End
from phalanx.cluster.relay import Relay, to_node_0
from phalanx.cluster.rendezvous import Place
from phalanx.cluster.wire import PROOF_S, Channel, Message, proved
from phalanx.errors import CollectiveError, ConfigError
from phalanx.records import ExitCode, StoreAddress

CONNECT_S = 3.0  # what an address gets before another one of node 0's is tried
PAUSE_S = 0.3  # between two rounds of looking
NOTE_S = 60.0  # after which who is waited for is said once more


class OtherNode:
    """This node's connection to node 0, whose secret is known to both. Says `hello` at once."""

    def __init__(self, channel: Channel, address: tuple[str, int], secret: str, hello: Message) -> None:
        self.channel, self._address, self._secret, self._hello = channel, address, secret, hello
        self.offer: Message | None = None  # what node 0 has resolved for the job
        self.refused: str | None = None  # why it does not let this node take part
        self.over: tuple[int, str] | None = None  # how the job ended: exit code and words
        self._starting: int | None = None
        self._attempt = 0
        self._ordered_to_end = False
        self._stops: list[str] = []
        self._relay: Relay | None = None
        channel.say(hello)

    @property
    def lost(self) -> str | None:
        """Why node 0 is out of reach; None while it is not."""
        return self.channel.lost

    def descriptors(self) -> Mapping[int, int]:
        """What poll() has to look at, and for what."""
        return {} if self.channel.lost is not None else {self.channel.fileno(): self.channel.awaits}

    def tend(self) -> None:
        """Do all that can be done without waiting."""
        for message in self.channel.heard():
            if "refused" in message:
                self.refused = str(message["refused"])
            elif "offer" in message:
                self.offer = message["offer"]
            elif "start" in message:
                self._starting = int(message["start"])
            elif "end" in message and message["end"] == self._starting:
                self._starting = None
                self.report(int(message["end"]), ExitCode.FAILED, [])  # nothing of it has begun here
            elif "end" in message:
                self._ordered_to_end |= message["end"] == self._attempt
            elif "stop" in message:
                self._stops.append(str(message["stop"]))
            elif "finish" in message:
                self.over = int(message["finish"]), str(message["text"])
            elif "ping" in message:
                self.channel.say({"pong": True})
        self.channel.check_alive()

    def say(self, message: Message) -> None:
        """Tell node 0 something; lost where it is gone."""
        if self.channel.lost is None:
            self.channel.say(message)

    def starting(self) -> int | None:
        """The attempt that node 0 wants started, once."""
        number, self._starting = self._starting, None
        return number

    # ------------------------------------------------------------------------------------------------------- attempts

    def begin(self, number: int, port: int | None) -> StoreAddress | None:
        """Take part in an attempt; returns where its ranks on this node find the store."""
        assert port is None
        self._attempt, self._ordered_to_end = number, False
        role = {**self._hello, "role": "store", "attempt": number}
        self._relay, address = to_node_0(self._address, self._secret, role)
        return address

    def busy(self) -> bool:
        """Whether this node has to wait for others before its part is done: it has not."""
        return False

    def broken(self) -> bool:
        """Whether the attempt has to end here because of what happened elsewhere."""
        return self._ordered_to_end or self.channel.lost is not None or self.over is not None

    def explained(self) -> bool:
        """Whether what happened elsewhere explains why ranks here lost a peer: node 0 tells its user that."""
        return self.broken()

    def ends(self) -> list[End]:
        """How ranks elsewhere ended: that is node 0's to know."""
        return []

    def stopped(self) -> bool:
        """As for `ends`."""
        return False

    def end(self) -> None:
        """The attempt is over here."""
        if self._relay is not None:
            relay, self._relay = self._relay, None
            relay.stop()

    def ended(self) -> bool:
        """Whether it is over wherever this node has to wait for it."""
        return True

    def report(self, number: int, code: int, ends: list[End]) -> None:
        """Tell node 0 how an attempt ended here."""
        self.say({"ended": number, "code": code, "ends": [asdict(end) for end in ends]})

    def stops(self) -> list[str]:
        """Names of stop signals that other nodes got since the last call."""
        new, self._stops = self._stops, []
        return new

    def tell_stop(self, name: str) -> None:
        """Tell node 0 that this node was asked to stop."""
        self.say({"stop": name})

    def close(self) -> None:
        """Leave; what was said is still sent."""
        self.end()
        if self.channel.lost is None:
            self.channel.farewell({"bye": True}, "this node has left")


def seek(place: Place, hello: Message, timeout_s: float, notice: Callable[[str], None]) -> OtherNode:
    """Wait for node 0 at the rendezvous, and say hello.

    Raises CollectiveError when it is not there in time, ConfigError when it does not take this node's secret.
    """
    until = time.monotonic() + timeout_s
    note_at, problem = time.monotonic() + 1.0, "there was none yet"
    while True:
        for address, secret in _addresses(place):
            patience_s = max(1.0, until - time.monotonic())
            try:
                channel = proved(address, secret, min(CONNECT_S, patience_s), min(PROOF_S, patience_s))
            except OSError as error:
                problem = f"{address[0]}:{address[1]}: {error.strerror or error}"
                if isinstance(error, ConnectionRefusedError) and error.errno is None and place.folder is None:
                    raise ConfigError(
                        f"node 0 at {place.text} was not joined: {error}; set the same {rendezvous.SECRET} on all "
                        "nodes, and give each job a port of its own"
                    ) from None
                continue
            return OtherNode(channel, address, secret, hello)
        left = until - time.monotonic()
        if left <= 0:
            raise CollectiveError(
                f"node 0 did not arrive at {place.text} within {timeout_s:g} s (last try: {problem}); start the same "
                "command with --node-rank 0 on its node, or raise --rendezvous-timeout"
            )
        if time.monotonic() >= note_at:
            notice(f"waiting for node 0 at {place.text}")
            note_at = time.monotonic() + NOTE_S
        time.sleep(min(PAUSE_S, left))


def is_there(address: rendezvous.Address) -> bool:
    """Whether node 0 of some job answers at an address; for a node 0 that finds one in its folder."""
    for host in address.hosts:
        with contextlib.suppress(OSError):
            proved((host, address.port), address.secret, CONNECT_S, PROOF_S).farewell({"role": "first"}, "that was all")
            return True
    return False


def _addresses(place: Place) -> Iterator[tuple[tuple[str, int], str]]:
    if place.folder is None:
        yield (place.host, place.port), place.secret
        return
    found = rendezvous.read_address(place.folder)
    for host in found.hosts if found is not None else ():
        assert found is not None
        yield (host, found.port), found.secret
