"""The rendezvous client: a joining node connects to node 0 or the current leader, until it is a member.

`connect_to_leader` blocks, before the agent has signal handlers; nothing in the client class blocks.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from phalanx.core.errors import CollectiveError, ConfigError
from phalanx.elastic.membership import messages, rendezvous, shared_secret
from phalanx.elastic.membership.admission import receive_messages
from phalanx.elastic.membership.channel import HANDSHAKE_TIMEOUT_S, Channel, Message, open_channel
from phalanx.elastic.membership.listener import bind
from phalanx.elastic.membership.member_list import AgentMember, MemberList, parse_member, parse_member_list
from phalanx.elastic.membership.rendezvous import RendezvousPoint

CONNECT_S = 3.0  # what an address gets before another one of node 0's is tried
PAUSE_S = 0.3  # between two rounds of looking
NOTE_S = 60.0  # after which the wait is reported again


class RendezvousClient:
    """This node's connection to node 0, or to whichever leads now, whose secret is known to both. Says `hello` at once,
    with the address where this node listens for the others."""

    def __init__(self, channel: Channel, secret: str, hello: Message) -> None:
        self.channel, self.secret = channel, secret
        self.at = bind(str(channel.socket.getsockname()[0]))
        self.hello = hello | {"at": self.at.to_message()}
        self.offer: Message | None = None  # what node 0 has resolved for the job
        self.member_list: MemberList | None = None  # once this node is a member
        self.refusal: str | None = None  # why it does not let this node take part
        self.over: tuple[int, str] | None = None  # how the job ended: exit code and words
        channel.send(self.hello)

    @property
    def lost(self) -> str | None:
        """Why node 0 is out of reach; None while it is not."""
        return self.channel.lost

    @property
    def member(self) -> AgentMember:
        """This node as a member."""
        return parse_member(self.hello | self.hello["at"])

    def descriptors(self) -> Mapping[int, int]:
        """Descriptors for poll(), with their event masks."""
        return {} if self.channel.lost is not None else {self.channel.fileno(): self.channel.awaits}

    def due_s(self) -> float:
        """Seconds until the next turn is due, whatever poll() sees."""
        return math.inf

    def poll_once(self) -> None:
        """Run one turn without blocking."""
        for message in receive_messages(self.channel):
            match message:
                case messages.RefusedMessage():
                    self.refusal = message.refused
                case messages.OfferMessage():
                    self.offer = message.offer
                case messages.MemberListMessage():
                    self.member_list = parse_member_list(message.roster)
                case messages.FinishMessage():
                    self.over = message.finish, message.text

    def send(self, message: Message) -> None:
        """Send a message to node 0; dropped if it is gone."""
        if self.channel.lost is None:
            self.channel.send(message)

    def close(self) -> None:
        """Leave; pending messages are still sent. A member's address stays open: it belongs to the membership."""
        if self.channel.lost is None:
            self.channel.linger("this node has left")
        if self.member_list is None:
            self.at.close()


def connect_to_leader(
    place: RendezvousPoint,
    hello: Message,
    timeout_s: float,
    notice: Callable[[str], None],
    leader: Callable[[], tuple[str, int] | None] = lambda: None,
) -> RendezvousClient:
    """Wait for node 0 at the rendezvous, or for the one that leads in its stead, and say hello. `leader` looks where
    that is, as the newest epoch's file says.

    Raises CollectiveError when it is not there in time, ConfigError when it does not take this node's secret.
    """
    until = time.monotonic() + timeout_s
    note_at, problem = time.monotonic() + 1.0, "no address file yet"
    while True:
        for address, secret in _addresses(place, leader()):
            patience_s = max(1.0, until - time.monotonic())
            try:
                channel = open_channel(
                    address, secret, min(CONNECT_S, patience_s), min(HANDSHAKE_TIMEOUT_S, patience_s)
                )
            except OSError as error:
                problem = f"{address[0]}:{address[1]}: {error.strerror or error}"
                unproved = isinstance(error, ConnectionRefusedError) and error.errno is None
                # Another process may listen at a former leader's address, and in a folder the next file may be right.
                if unproved and address == (place.host, place.port):
                    where = "" if place.secret_file is None else (
                        f"it is kept in {place.secret_file} here, which all nodes must share; otherwise use a shared "
                        "folder (--rendezvous file:///FOLDER), or "
                    )  # fmt: skip
                    raise ConfigError(
                        f"node 0 at {place.text} refused this node: {error}; {where}set the same "
                        f"{shared_secret.VARIABLE} on all nodes, and give each job its own port"
                    ) from None
                continue
            return RendezvousClient(channel, secret, hello)
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


def is_there(address: rendezvous.HostAddress) -> bool:
    """Whether a job answers at an address; for a node 0 that finds one in its folder."""
    return any(_asked(host, address.port, address.secret) is not None for host in address.hosts)


def is_run_active(hosts: Sequence[str], port: int, secret: str) -> bool:
    """Whether a job answers there whose nodes have met already."""
    return any((_asked(host, port, secret) or {}).get("goes_on") is True for host in hosts)


def _asked(host: str, port: int, secret: str) -> Message | None:
    """The answer of the job that listens at an address to a node 0; None without an answer."""
    try:
        channel = open_channel((host, port), secret, CONNECT_S, HANDSHAKE_TIMEOUT_S)
    except OSError:
        return None
    channel.send({"role": "first"})
    until = time.monotonic() + HANDSHAKE_TIMEOUT_S
    heard: list[Message] = []
    while not heard and channel.lost is None and time.monotonic() < until:
        channel.wait(0.1)
        heard = channel.receive()
    channel.close("finished")
    return heard[0] if heard else {}


def _addresses(place: RendezvousPoint, leader: tuple[str, int] | None) -> Iterator[tuple[tuple[str, int], str]]:
    if place.folder is None:
        if leader is not None:
            yield leader, place.secret
        yield (place.host, place.port), place.secret
        return
    found = rendezvous.read_address(place.folder)
    for host in found.hosts if found is not None else ():
        assert found is not None
        yield (host, found.port), found.secret
