"""Rendezvous of ranks: the store, arrived ranks, missing ranks after a failed collective, the topology of nodes, and
exchange of small JSON objects."""

import datetime
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.collectives import Traffic, all_gather, all_reduce
from phalanx.core.errors import CollectiveError, RunError
from phalanx.core.placement import Placement, StoreAddress

LOST_PEER_WORDS = ("gloo", "pair closure")  # in what gloo says of a peer; a plain send or receive does not name itself
# How long no other rank reports that a collective has failed for it, too, before the roll call ends; the others notice
# it one after the other, when their neighbours leave.
ROLL_CALL_S, LONGEST_ROLL_CALL_S, ROLL_LOOK_S = 2.0, 10.0, 0.1


def open_store(placement: Placement, timeout: datetime.timedelta) -> dist.Store:
    """The store at which the ranks meet."""
    address = placement.store
    if address is None:
        assert placement.world == 1, "several ranks need a store to meet at"
        return dist.HashStore()
    listen_fd = _listen(address) if address.serve else address.listen_fd
    try:
        return dist.TCPStore(
            address.host,
            address.port,
            placement.world,
            is_master=listen_fd is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
    except dist.DistError as error:
        raise RunError(
            f"rank {placement.rank} found no store at {address.host}:{address.port} within "
            f"{timeout.total_seconds():.0f} s ({str(error).splitlines()[0]}); check that rank 0 is alive and that "
            "this node can reach that address"
        ) from None


def _listen(address: StoreAddress) -> int:
    """Bind only the store's address: TCPStore by itself would listen on every interface."""
    family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    try:
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(2048)
    except OSError as error:
        raise RunError(
            f"rank 0 cannot listen at {address.host}:{address.port} ({error.strerror}); "
            "choose an address of its node and a free port"
        ) from None
    return bound.detach()


def exchange_offers(store: dist.Store, placement: Placement, timeout_s: float, offer: str) -> list[str]:
    """Wait until every rank has announced itself, so that missing ones can be named.

    Returns what each rank offers, in order of rank.
    """
    names = [f"arrived/{rank}" for rank in range(placement.world)]
    try:
        store.set(names[placement.rank], offer)
        try:
            store.wait(names, datetime.timedelta(seconds=timeout_s))
        except dist.DistStoreError:  # the time is up, or the store is gone, as the next question shows
            missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
            if missing:
                raise CollectiveError(
                    f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {placement.world} did not arrive "
                    f"within {timeout_s:.0f} s; see their logs, or raise comm.timeout_s"
                ) from None
        return [value.decode() for value in store.multi_get(names)]
    except dist.DistError as error:
        first_line = str(error).splitlines()[0]
        raise CollectiveError(
            f"rank {placement.rank} lost the store while waiting for the others ({first_line}), so rank 0 has "
            "exited; see its log"
        ) from None


@dataclass(frozen=True)
class RollCall:
    """The roll call after a failed collective, through the store."""

    store: dist.Store
    rank: int
    world: int
    timeout_s: float  # of collectives

    def name_missing_ranks(self, error: RuntimeError) -> RuntimeError | CollectiveError:
        """The error to raise for `error`: if a collective failed, one that names the ranks that do not report it. Every
        rank in a failed collective gets an error sooner or later, and reports it at the store. Ranks that do not report
        while others still do are lost, or blocked. A dead store leaves the error unchanged.
        """
        if not isinstance(error, dist.DistError) and not any(words in str(error) for words in LOST_PEER_WORDS):
            return error
        try:
            late = self._find_silent_ranks()
        except RuntimeError:
            return error
        first_line = str(error).splitlines()[0]
        if not late:
            return CollectiveError(
                f"a collective failed on all {self.world} ranks ({first_line}): the network between them broke, or "
                "ranks were in different collectives; check that all ranks make the same calls the same number of "
                "times"
            )
        return CollectiveError(
            f"rank{'s' if len(late) > 1 else ''} {', '.join(late)} of {self.world} did not respond after a "
            f"collective failed on others ({first_line}): lost, or blocked for longer than {self.timeout_s:g} s; see "
            "their logs, or raise comm.timeout_s"
        )

    def _find_silent_ranks(self) -> list[str]:
        """The ranks that have not reported a failed collective, once no more reports arrive."""
        names = [f"failed/{rank}" for rank in range(self.world)]
        if not self.store.check([names[self.rank]]):
            self.store.set(names[self.rank], "1")
            self.store.add("failed", 1)
        begun = heard = time.monotonic()
        count = 0
        while count < self.world and time.monotonic() < min(heard + ROLL_CALL_S, begun + LONGEST_ROLL_CALL_S):
            now = self.store.add("failed", 0)
            if now > count:
                count, heard = now, time.monotonic()
            else:
                time.sleep(ROLL_LOOK_S)
        silent = [str(rank) for rank, name in enumerate(names) if not self.store.check([name])]
        if self.rank == 0:
            time.sleep(3 * ROLL_LOOK_S)  # with rank 0 the store goes, at which the others still look
        return silent


# --------------------------------------- which ranks share a node: by the names of their hosts, never by their numbers


@dataclass(frozen=True)
class Topology:
    """Which ranks share a node."""

    nodes: tuple[tuple[int, ...], ...]  # ranks of each node, ascending
    node_of: tuple[int, ...]  # by rank
    index_of: tuple[int, ...]  # by rank: its index among the ranks of its node

    @staticmethod
    def from_hosts(hosts: Sequence[str]) -> "Topology":
        """The topology of ranks whose hosts have these names, in order of rank."""
        nodes: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            nodes.setdefault(host, []).append(rank)
        numbers = {host: number for number, host in enumerate(nodes)}
        return Topology(
            tuple(tuple(ranks) for ranks in nodes.values()),
            tuple(numbers[host] for host in hosts),
            tuple(nodes[host].index(rank) for rank, host in enumerate(hosts)),
        )

    def subset(self, ranks: Sequence[int]) -> "Topology":
        """That of a group of these ranks, in this order."""
        return Topology.from_hosts([str(self.node_of[rank]) for rank in ranks])

    @property
    def form(self) -> str:
        """What its collectives come to: "alone", "direct" (one node), "ring" (one rank per node) or "two-level"."""
        if len(self.node_of) == 1:
            return "alone"
        if len(self.nodes) == 1:
            return "direct"
        return "ring" if len(self.nodes) == len(self.node_of) else "two-level"

    def relay(self, node: int, owner: int) -> int:
        """The rank that handles the range of `owner` on a node (modulo their number); the owner itself on its own."""
        ranks = self.nodes[node % len(self.nodes)]
        return ranks[self.index_of[owner] % len(ranks)]


def this_host() -> str:
    """A name of this machine that no other has. Network namespaces, such as containers, count as machines."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        boot, network = "", ""
    return f"{socket.gethostname()} {boot} {network}"


# ------------------------------------------------------------------------------------ small JSON objects between ranks
# JSON and not pickle, so that no data from the network can run code.


class JsonGroup:
    """Exchanges JSON-able objects over a process group for host tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)

    def gather_objects(self, obj: Any) -> list[Any] | None:
        """The objects of all ranks in order of rank on rank 0; None elsewhere."""
        everyones = self.all_gather_objects(obj)
        return everyones if self._rank == 0 else None

    def broadcast_object(self, obj: Any) -> Any:
        """Rank 0's object, on every rank."""
        return self.all_gather_objects(obj if self._rank == 0 else None)[0]

    def all_gather_objects(self, obj: Any) -> list[Any]:
        """The objects of all ranks in order of rank, on every rank."""
        mine = torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self._world, dtype=torch.int64)
        sizes[self._rank] = mine.numel()
        all_reduce(sizes, self._group, Traffic()).wait()
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        gathered = torch.empty(self._world * longest, dtype=torch.uint8)
        all_gather(gathered, padded, self._group, Traffic()).wait()
        rows = gathered.view(self._world, longest).numpy()
        return [json.loads(rows[rank, : int(sizes[rank])].tobytes()) for rank in range(self._world)]
