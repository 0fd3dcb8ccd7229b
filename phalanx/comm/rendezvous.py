"""How ranks meet: the store that they all reach, who has arrived, and who is missing once a collective has failed."""

import datetime
import socket
import time
from dataclasses import dataclass

import torch.distributed as dist

from phalanx.core.errors import CollectiveError, RunError
from phalanx.core.placement import Placement, StoreAddress

LOST_PEER_WORDS = ("gloo", "pair closure")  # in what gloo says of a peer; a plain send or receive does not name itself
# For how long nobody else says that a collective has failed for him, too, before the roll is closed; the others notice
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
            f"{timeout.total_seconds():.0f} s ({str(error).splitlines()[0]}); check that rank 0 is alive and that this "
            f"node reaches that address"
        ) from None


def _listen(address: StoreAddress) -> int:
    """Bind the store's own address and no other: TCPStore by itself would listen on every interface."""
    family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    try:
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(2048)
    except OSError as error:
        raise RunError(
            f"rank 0 cannot listen at {address.host}:{address.port} ({error.strerror}); "
            "choose an address of its own node and a free port"
        ) from None
    return bound.detach()


def exchange_offers(store: dist.Store, placement: Placement, timeout_s: float, offer: str) -> list[str]:
    """Wait until every rank has announced itself, so that a missing one is named, not waited for in silence.

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
                    f"within {timeout_s:.0f} s; look at their logs, or raise comm.timeout_s"
                ) from None
        return [value.decode() for value in store.multi_get(names)]
    except dist.DistError as error:
        first_line = str(error).splitlines()[0]
        raise CollectiveError(
            f"rank {placement.rank} lost the store while it waited for the others ({first_line}), so rank 0 has left; "
            "look at its log"
        ) from None


@dataclass(frozen=True)
class RollCall:
    """Who has failed in a collective, as all ranks say at the store."""

    store: dist.Store
    rank: int
    world: int
    timeout_s: float  # of collectives

    def name_missing_ranks(self, error: RuntimeError) -> RuntimeError | CollectiveError:
        """What to raise for `error`: if a collective failed, an error that names the ranks that say nothing of it.

        Every rank in a failed collective gets an error of its own, sooner or later, and says so at the store. Those
        that say nothing as long as others still do are lost, or held up. A dead store leaves the error as it is.
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
                "they waited for one another in different ones; see that all make the same calls, as many times"
            )
        return CollectiveError(
            f"rank{'s' if len(late) > 1 else ''} {', '.join(late)} of {self.world} did not answer when a collective "
            f"had failed on others ({first_line}): lost, or held up for longer than {self.timeout_s:g} s; look at the "
            "logs of those, or raise comm.timeout_s"
        )

    def _find_silent_ranks(self) -> list[str]:
        """The ranks that have not said that a collective failed for them, once nobody says so any more."""
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
