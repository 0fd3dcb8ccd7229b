"""Nodes for benchmarks: network namespaces of this machine, joined by cables of a given rate, with ranks in them.

Each node has one interface, `wire`, on a cable to a switch (a bridge in a namespace of its own); tc limits what enters
the cable at either end. Ranks of one node reach each other unlimited. TCP's congestion control is reno in every node:
bbr, the default of some systems, loses a quarter of such a link at random. Needs root, iproute2, and nothing else: the
machine's own interfaces are not touched.
"""

import contextlib
import ctypes
import functools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tidy import heeding_signals, is_stale, undisturbed
from phalanx.core.placement import Placement, StoreAddress
from phalanx.system.fork import fork, kill_group

CLONE_NEWNET = 0x40000000
CONGESTION_CONTROL = "reno"
BURST_BYTES, QUEUE_BYTES = 64 * 1024, 2**20  # of each end of a cable
# What the system hands to an interface at once must fit into a burst: else each packet of it is handled by itself,
# which takes more processor time than the ranks have to spare.
SEGMENT_BYTES = 32 * 1024
INTERFACE = "wire"
PORT = 29400
_FOLDER = Path("/run/netns")
_PREFIX = "phxl"


@dataclass(frozen=True)
class Links:
    """Nodes that reach each other and nothing else."""

    names: tuple[str, ...]  # of the namespaces, in order of node
    addresses: tuple[str, ...]
    switch: str

    def limit(self, node: int, mbit: float) -> None:
        """Set what the node's cable carries from now on, in Mbit/s, each way."""
        shape = ["root", "tbf", "rate", f"{round(mbit * 1000)}kbit", "burst", str(BURST_BYTES),
                 "limit", str(QUEUE_BYTES)]  # fmt: skip
        _run("tc", "-n", self.names[node], "qdisc", "replace", "dev", INTERFACE, *shape)
        _run("tc", "-n", self.switch, "qdisc", "replace", "dev", f"port{node}", *shape)

    def plug(self, node: int, plugged: bool) -> None:
        """Pull the node's cable out, of which neither side is told, or put it in again."""
        _run("ip", "-n", self.switch, "link", "set", f"port{node}", "up" if plugged else "down")

    def sent_bytes(self) -> list[int]:
        """Bytes that have left each node since it was made, with headers as its interface counts them."""
        return [self._count(node, "tx") for node in range(len(self.names))]

    def received_bytes(self) -> list[int]:
        """Bytes that have arrived at each node."""
        return [self._count(node, "rx") for node in range(len(self.names))]

    def _count(self, node: int, way: str) -> int:
        text = _run("ip", "-n", self.names[node], "-json", "-statistics", "link", "show", INTERFACE)
        return int(json.loads(text)[0]["stats64"][way]["bytes"])

    def run(
        self, nodes: Sequence[int], function: Callable[..., Any], *args: Any, timeout_s: float = 300, **kwargs: Any
    ) -> list[Any]:
        """Call `function(placement, *args, **kwargs)` once for each rank, in the node that `nodes` says for it, and
        return the JSON-able results by rank.

        The ranks are forked from this process, which must have one thread. What they import should be imported before.

        Raises:
            RuntimeError: a rank failed, with its traceback, or the time was up; the others are ended.
        """
        with tempfile.TemporaryDirectory(prefix="phalanx-links-") as folder, _Children() as children:
            results = [Path(folder, str(rank)) for rank in range(len(nodes))]
            for rank, file in enumerate(results):
                place = self._placement(rank, nodes)
                children.start(functools.partial(self._call, place, file, function, args, kwargs))
            failed = children.wait(timeout_s)
            if failed is not None:
                rank, code = failed
                text = results[rank].read_text() if results[rank].exists() else f"it left no word, but the code {code}"
                raise RuntimeError(f"rank {rank} of {len(nodes)} failed:\n{text}")
            return [json.loads(file.read_text()) for file in results]

    def _placement(self, rank: int, nodes: Sequence[int]) -> Placement:
        here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        store = StoreAddress(self.addresses[nodes[0]], PORT, serve=rank == 0)
        return Placement(rank, len(nodes), here.index(rank), len(here), nodes[rank], "cpu", store, threads=1)

    def _call(
        self, place: Placement, file: Path, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int:
        try:
            enter(self.names[place.node])
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
            text = json.dumps(function(place, *args, **kwargs))
        except Exception:
            file.write_text(traceback.format_exc())
            return 1
        file.write_text(text)
        return 0


class _Children:
    """Forked ranks, none of which outlives this."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, int]] = {}  # pidfd -> (rank, pid)
        self._started = 0

    def __enter__(self) -> "_Children":
        return self

    def start(self, child: Callable[[], int]) -> None:
        pid, pidfd = fork(child)
        self._running[pidfd] = self._started, pid
        self._started += 1

    def wait(self, timeout_s: float) -> tuple[int, int] | None:
        """The first rank that failed, and its exit code, of a signal negative; None when all have ended well."""
        until = time.monotonic() + timeout_s
        poll = select.poll()
        for pidfd in self._running:
            poll.register(pidfd, select.POLLIN)
        while self._running:
            ready = poll.poll(max(0.0, until - time.monotonic()) * 1000)
            if not ready:
                late = ", ".join(str(rank) for rank, _ in self._running.values())
                raise RuntimeError(f"rank {late} had not ended after {timeout_s:g} s")
            for pidfd, _ in ready:
                poll.unregister(pidfd)
                rank, code = self._end(pidfd)
                if code != 0:
                    return rank, code
        return None

    def _end(self, pidfd: int) -> tuple[int, int]:
        rank, pid = self._running.pop(pidfd)
        os.close(pidfd)
        return rank, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def __exit__(self, *_: object) -> None:
        for rank_and_pid in self._running.values():
            kill_group(rank_and_pid[1])
        for pidfd in list(self._running):
            self._end(pidfd)


@contextlib.contextmanager
def links(mbit: Sequence[float]) -> Iterator[Links]:
    """As many nodes as rates in Mbit/s, each way. Nothing of them is left afterwards, also when the process is told to
    end meanwhile; nor of a benchmark that was killed before it could tidy up."""
    remove_stale()
    made = Links(
        tuple(f"{_PREFIX}{os.getpid()}-{node}" for node in range(len(mbit))),
        tuple(f"10.98.0.{1 + node}" for node in range(len(mbit))),
        f"{_PREFIX}{os.getpid()}-switch",
    )
    with heeding_signals():
        try:
            _run("ip", "netns", "add", made.switch)
            _run("ip", "-n", made.switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", made.switch, "link", "set", "bridge", "up")
            for node, rate in enumerate(mbit):
                _connect(made, node)
                made.limit(node, rate)
            yield made
        finally:
            _remove((*made.names, made.switch))


def _remove(names: Sequence[str]) -> None:
    with undisturbed():
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _connect(made: Links, node: int) -> None:
    name, port = made.names[node], f"port{node}"
    _run("ip", "netns", "add", name)
    _run("ip", "-n", made.switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _run("ip", "-n", made.switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", name, "addr", "add", f"{made.addresses[node]}/24", "dev", INTERFACE)
    _run("ip", "-n", name, "link", "set", INTERFACE, "gso_max_size", str(SEGMENT_BYTES))
    for interface in (INTERFACE, "lo"):
        _run("ip", "-n", name, "link", "set", interface, "up")
    _run("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}")


def why_not() -> str | None:
    """Why this machine cannot have such nodes, in a sentence; None where it can."""
    if os.geteuid() != 0:
        return "nodes with limited links are network namespaces, which need root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"nodes with limited links need the command {command}, of iproute2"
    try:
        with links([100]):
            return None
    except RuntimeError as error:
        return f"this machine gives no nodes with limited links: {error}"


def remove_stale() -> None:
    """Remove namespaces of processes that no longer live."""
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        if is_stale(path.name, rf"{_PREFIX}(\d+)-\w+"):
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True)


def enter(name: str) -> None:
    """Move this process, and what it starts, into a namespace; before it has threads."""
    with open(_FOLDER / name) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
