"""Relay of the TCPStore between nodes: torch's TCPStore has no authentication, so it listens on loopback only.

On node 0 a forked process gets connections that have proved themselves from the agent and joins each to the store. On
every other node one listens on loopback for that node's ranks and joins each of theirs to a proved connection to node
0. Both die with their agent. Threads are fine here: such a process forks nothing.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from phalanx.core.placement import StoreAddress
from phalanx.elastic.membership.channel import Message, connect_and_greet, enable_keepalive
from phalanx.system.fork import fork, kill_group

PART_BYTES = 1 << 16
CALL_S = 20.0  # what node 0 gets to answer


class Relay:
    """A forked process that runs until it is stopped or its agent dies."""

    def __init__(self, run: Callable[[], int], keep: socket.socket) -> None:
        self.pid, self._pidfd = fork(run, keep=[keep.fileno()])

    def kill(self) -> None:
        """Have it end; `stop` waits until it has."""
        kill_group(self.pid)

    def stop(self) -> None:
        self.kill()
        os.waitpid(self.pid, 0)
        os.close(self._pidfd)


def start_host_relay(port: int) -> tuple[Relay, socket.socket]:
    """Start node 0's relay to the store at a loopback port; the socket takes connections, by `hand_over`."""
    ours, theirs = socket.socketpair()
    relay = Relay(lambda: _join_to_store(theirs, port), keep=theirs)
    theirs.close()
    ours.setblocking(False)
    return relay, ours


def hand_over(relay: socket.socket, connection: socket.socket) -> None:
    """Give a connection to node 0's relay. Raises OSError when that has died."""
    socket.send_fds(relay, [b"1"], [connection.fileno()])


def start_client_relay(address: tuple[str, int], secret: str, hello: Message) -> tuple[Relay, StoreAddress]:
    """Start another node's relay; ranks of that node find the store at the address that is returned."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(socket.SOMAXCONN)
        relay = Relay(lambda: _join_to_node_0(listener, address, secret, hello), keep=listener)
        return relay, StoreAddress(*listener.getsockname())


def _join_to_store(handed: socket.socket, port: int) -> int:
    while True:
        data, descriptors, _, _ = socket.recv_fds(handed, 1, 1)
        if not data:
            return 0
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(True)
        _in_thread(_join, connection, lambda: socket.create_connection(("127.0.0.1", port)))


def _join_to_node_0(listener: socket.socket, address: tuple[str, int], secret: str, hello: Message) -> int:
    while True:
        connection, _ = listener.accept()
        _in_thread(_join, connection, lambda: connect_and_greet(address, secret, hello, CALL_S))


def _join(one: socket.socket, find: Callable[[], socket.socket]) -> None:
    """Forward data both ways until both sides have ended; if the other side cannot be reached, the first is closed."""
    with one, contextlib.suppress(OSError), find() as other:
        for connection in (one, other):
            enable_keepalive(connection)
        back = _in_thread(_carry, other, one)
        _carry(one, other)
        back.join()


def _carry(source: socket.socket, target: socket.socket) -> None:
    try:
        while part := source.recv(PART_BYTES):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one of the two is gone
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _in_thread(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread
