"""An abortable gloo group: a failure on one rank ends it on all ranks promptly.

gloo itself notices a lost peer only where it waits for that peer: the others wait until their timeout. Here the ranks
form a ring, and each watches the next one by a receive that is answered only when that rank leaves in order. If its
process dies, the connection closes without an answer. Then the failure is passed backwards around the ring, and each
rank closes its connections, which raises in all waits on them.

gloo has no call to abort a group; but a wait that times out closes all its connections, so that is used.
"""

import datetime
import threading
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist

from phalanx.comm.chunk_link import P2PGroup

WATCH_TAG = 2**30  # of the watch; the tags below are of collectives, those above of the user's own messages
FIRST_USER_TAG = WATCH_TAG + 1
USER_TAGS = 2**31 - 1 - FIRST_USER_TAG
GRACE_S = 0.5  # for what a lost rank sent before it was lost to arrive: the last collective of a program may still end
REASON_WAIT_S = 0.5  # how long a rank whose transfer has failed waits to hear who was lost
_FOREVER = datetime.timedelta(days=3650)
_AT_ONCE = datetime.timedelta(milliseconds=1)
_LEAVES, _LOST = 1, 2


class AbortableGloo:
    """`group` is the gloo backend; use it for sends and receives alone, and hand what it raises to `fail`. `on_abort`
    is called once, when the group has ended by a failure, from whatever thread has noticed.

    Raises a RuntimeError when the others do not arrive within the timeout.
    """

    def __init__(
        self, store: dist.Store, rank: int, world: int, timeout: datetime.timedelta, on_abort: Callable[[], None]
    ) -> None:
        self.rank, self.world = rank, world
        self.group = cast(P2PGroup, dist.ProcessGroupGloo(dist.PrefixStore("guarded", store), rank, world, timeout))
        self.failure: RuntimeError | None = None
        self._store = dist.PrefixStore("circle", store)
        self._on_abort, self._closing = on_abort, False
        self._final_send: dist.Work | None = None
        self._reason_known = threading.Event()  # it is known why the group ends
        self._skip_grace = threading.Event()  # nothing more is expected to arrive
        self._reason = ""
        self._lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="phalanx-watch", daemon=True)
        if world > 1:
            self._watcher.start()

    def fail(self, error: BaseException, peer: int | None = None) -> RuntimeError:
        """End the group on all ranks because a transfer, with `peer`, has failed on this one; returns what to raise."""
        if self.failure is None and not self._closing:
            if peer is not None and self._has_left(peer):
                self._reason = f"rank {peer} of {self.world} has left this group;"
                self._notify(_LOST, peer)  # to ranks that do not wait for it themselves
            elif peer is not None and "Timed out" not in str(error):
                self._reason_known.wait(REASON_WAIT_S)
            self._abort(str(error).splitlines()[0])
        return self.failure or RuntimeError(f"this process group was destroyed; {str(error).splitlines()[0]}")

    def close(self) -> None:
        """Leave the group, and let the others know that this is no failure."""
        if self._closing:
            return
        self._closing = True
        self._skip_grace.set()
        if self.failure is None and self.world > 1:
            try:
                self._store.set(f"left/{self.rank}", "1")
            except RuntimeError:
                self._reason = "the store is gone"  # with its rank
            self._notify(_LEAVES, self.rank)
        self._close_connections()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join(1.0)

    # ---------------------------------------------------------------------------------------------------------- circle

    def _watch(self) -> None:
        watched = self.rank
        while (watched := (watched + 1) % self.world) != self.rank:
            news = torch.zeros(2, dtype=torch.int64)
            try:
                self.group.recv([news], watched, WATCH_TAG).wait(_FOREVER)
                what, who = news.tolist()
            except RuntimeError:
                if self._closing or self.failure is not None:
                    return
                what, who = (_LEAVES if self._has_left(watched) else _LOST), watched
            if what == _LOST:
                self._handle_lost_rank(who)
                return

    def _handle_lost_rank(self, rank: int) -> None:
        self._reason = f"rank {rank} of {self.world} was lost or failed, see its log;"
        self._reason_known.set()
        if (self.rank - 1) % self.world != rank:
            self._notify(_LOST, rank)
        self._skip_grace.wait(GRACE_S)
        self._abort("the connection to it has closed")

    def _notify(self, what: int, rank: int) -> None:
        """Notify the rank that watches this one; it may be gone itself."""
        try:
            work = self.group.send([torch.tensor([what, rank])], (self.rank - 1) % self.world, WATCH_TAG)
            if what == _LEAVES:
                work.wait(datetime.timedelta(seconds=GRACE_S))
            else:
                self._final_send = work  # what is not kept is not sent
        except RuntimeError as error:
            self._reason = self._reason or str(error)

    def _has_left(self, rank: int) -> bool:
        try:
            return self._store.check([f"left/{rank}"])
        except RuntimeError:  # the store is gone, with the rank that keeps it
            return False

    def _abort(self, detail: str) -> None:
        with self._lock:
            first = self.failure is None
            if first:
                self.failure = dist.DistBackendError(
                    f"rank {self.rank}: {self._reason + ' ' if self._reason else ''}({detail})"
                )
        self._reason_known.set()
        self._close_connections()
        if first:
            self._on_abort()

    def _close_connections(self) -> None:
        """Close all connections: what waits on them raises, here and on the other side."""
        for peer in range(self.world):
            if peer != self.rank:
                try:
                    self.group.recv([torch.zeros(1)], peer, WATCH_TAG - 1).wait(_AT_ONCE)
                except RuntimeError as error:
                    if "Timed out" in str(error):
                        return
