"""The connections of a group of the backend, and the thread that runs its collectives in order."""

import contextlib
import datetime
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.abortable_gloo import FIRST_USER_TAG, USER_TAGS, AbortableGloo
from phalanx.comm.chunk_link import CollectiveSteps, PeerError
from phalanx.comm.host_tensors import copy_from_host, to_flat_host
from phalanx.comm.rendezvous import Topology, this_host
from phalanx.comm.two_level import TwoLevelCollectives, TwoLevelTransfer
from phalanx.system import accelerator

MAX_IN_FLIGHT = 4  # collectives of a group under way: the next begins while the end of the last is awaited


class CollectiveWork(dist.Work):
    """A collective that is queued, running or done."""

    def __init__(
        self,
        make_steps: Callable[[], CollectiveSteps],
        result: Any,
        group: AbortableGloo,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """`devices`: those other than the host that have a part in `result`."""
        super().__init__()
        self.make_steps, self._result, self._group = make_steps, result, group
        self._devices: list[Any] = list(devices)
        self.transfer: TwoLevelTransfer | None = None
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._future_lock = threading.Lock()

    def finish(self, error: BaseException | None) -> None:
        """Release the waiting threads."""
        self._error = error
        self._over.set()

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Return when the result is there. After `timeout`, where it is not zero, the group ends, as gloo's does."""
        if not self._over.wait(timeout.total_seconds() or None):
            raise self._group.fail(RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s for a collective"))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> "torch.futures.Future[Any]":
        with self._future_lock:
            if self._future is None:
                # With its devices: callbacks run there, in separate streams that later waits follow.
                self._future = torch.futures.Future(devices=self._devices)
                # What hangs on a future runs where that is set, and may wait for another collective of the group.
                threading.Thread(target=self._resolve, args=(self._future,), name="phalanx-future", daemon=True).start()
            return self._future

    def _resolve(self, future: "torch.futures.Future[Any]") -> None:
        self._over.wait()
        with torch.accelerator.device_index(self._devices[0].index) if self._devices else contextlib.nullcontext():
            if self._error is None:
                future.set_result(self._result)
            else:
                future.set_exception(self._error)


class P2PWork(dist.Work):
    """A point-to-point message of the user, to a rank or from one."""

    def __init__(self, work: dist.Work, peer: int | None, group: AbortableGloo, on_done: Callable[[], object]) -> None:
        super().__init__()
        self._work, self._peer, self._group, self._on_done = work, peer, group, on_done
        self._done = False

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        if not self._done:
            try:
                self._work.wait(timeout) if timeout else self._work.wait()
            except RuntimeError as error:
                raise self._group.fail(error, self._peer) from None
            self._on_done()
            self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done

    def _source_rank(self) -> int:
        return self._work._source_rank()

    source_rank = _source_rank


class CollectiveThread:
    """The connections of a group, and the thread that runs its collectives in order."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: datetime.timedelta, host: str) -> None:
        self.host, self.rank, self.world, self.timeout = host, rank, world, timeout
        self.native_calls = 0
        self._store = dist.PrefixStore("devices", store)
        hosts = dist.PrefixStore("hosts", store)
        hosts.set(str(rank), host)
        self.topology = Topology.from_hosts([hosts.get(str(other)).decode() for other in range(world)])
        self._device_group: dist.ProcessGroup | None = None
        self.gloo = AbortableGloo(store, rank, world, timeout, self._abort_device_group)
        self.two_level = TwoLevelCollectives(self.gloo.group, self.topology)
        self._own: dict[frozenset[int], bool] = {}  # whether each of these ranks has its own device
        self._calls: queue.SimpleQueue[CollectiveWork | None] = queue.SimpleQueue()
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="phalanx-collectives", daemon=True)
        self._worker.start()

    def submit(
        self, make_steps: Callable[[], CollectiveSteps], result: Any, devices: Sequence[torch.device] = ()
    ) -> CollectiveWork:
        """Queue a collective; `devices` as `CollectiveWork` has them."""
        if self.gloo.failure is not None:
            raise self.gloo.failure
        if self._closed:
            raise RuntimeError("this process group was destroyed; make another one")
        call = CollectiveWork(make_steps, result, self.gloo, devices)
        self._calls.put(call)
        return call

    def device_group(self, device: torch.device, peers: Iterable[int]) -> dist.ProcessGroup | None:
        """The group of the accelerator's own collectives; None where these ranks share a device, and where their kind
        of device has no such group.

        The first call waits for that of the others: they tell each other which devices they have.
        """
        if device.type == "cpu":
            return None
        if self.gloo.failure is not None:
            raise self.gloo.failure
        ranks = frozenset(peers) | {self.rank}
        if ranks not in self._own:
            self._store.set(str(self.rank), f"{device.type} {accelerator.hardware_id(device, this_host())}")
            found = [self._store.get(str(rank)).decode() for rank in sorted(ranks)]
            self._own[ranks] = len({each.split()[0] for each in found}) == 1 and len(set(found)) == len(found)
            if self._own[ranks] and self._device_group is None:
                self._device_group = accelerator.make_native_group(
                    device, self._store, self.rank, self.world, self.timeout
                )
                if self.gloo.failure is not None:  # meanwhile
                    self._abort_device_group()
                    raise self.gloo.failed
        return self._device_group if self._own[ranks] else None

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> dist.Work:
        """Send a tensor to a rank. Messages are not queued behind collectives."""
        if (native := self._native_for_message(tensor, to)) is not None:
            return native.send([tensor], to, tag)
        host = to_flat_host(tensor)
        self.two_level.link.count_bytes(to, host.numel() * host.element_size())
        # What is sent is kept until it has been.
        return self._post_p2p(lambda: self.gloo.group.send([host], to, _user_tag(tag)), to, host.numel)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> dist.Work:
        """Receive a tensor from a rank; None: from the first sender, through the host, without noticing that another
        rank is lost."""
        if source is not None and (native := self._native_for_message(tensor, source)) is not None:
            return native.recv([tensor], source, tag)
        host, group = to_flat_host(tensor, fill=False), self.gloo.group

        def start() -> dist.Work:
            if source is None:
                return group.recv_anysource([host], _user_tag(tag))
            return group.recv([host], source, _user_tag(tag))

        return self._post_p2p(start, source, lambda: copy_from_host(tensor, host))

    def _native_for_message(self, tensor: torch.Tensor, peer: int) -> dist.ProcessGroup | None:
        native = self.device_group(tensor.device, [peer])
        self.native_calls += native is not None
        return native

    def _post_p2p(self, start: Callable[[], dist.Work], peer: int | None, on_done: Callable[[], object]) -> dist.Work:
        if self.gloo.failure is not None:
            raise self.gloo.failure
        try:
            return P2PWork(start(), peer, self.gloo, on_done)
        except RuntimeError as error:
            raise self.gloo.fail(error, peer) from None

    def close(self) -> None:
        """Leave the group, after a collective in progress if that ends soon."""
        self._closed = True
        self._calls.put(None)
        self._worker.join(1.0 if self.gloo.failure is None else 0.0)
        self.gloo.close()
        if self.gloo.failure is not None:
            self._abort_device_group()
        elif self._device_group is not None:
            self._device_group.shutdown()

    def _abort_device_group(self) -> None:
        """Abort an accelerator's own collectives, which do not notice a lost rank."""
        native, self._device_group = self._device_group, None
        if native is not None:
            native.abort()

    def _work(self) -> None:
        begun: deque[CollectiveWork] = deque()
        leaving = False
        # In inference mode, so that tensors of users who are in it can be written.
        with torch.inference_mode():
            while begun or not leaving:
                if not leaving and len(begun) < MAX_IN_FLIGHT and (not begun or not self._calls.empty()):
                    call = self._calls.get()
                    leaving = call is None
                    if call is not None:
                        begun.append(call)
                        self._try(begun, self._begin)
                elif begun:
                    self._try(begun, self._step)
                while begun and begun[0].transfer is not None and begun[0].transfer.done:
                    begun.popleft().finish(None)

    def _begin(self, begun: deque[CollectiveWork]) -> None:
        begun[-1].transfer = self.two_level.begin(begun[-1].make_steps())

    def _step(self, _: deque[CollectiveWork]) -> None:
        self.two_level.step()

    def _try(self, begun: deque[CollectiveWork], act: Callable[[deque[CollectiveWork]], None]) -> None:
        try:
            act(begun)
        except Exception as error:
            raised = self.gloo.fail(error, error.peer if isinstance(error, PeerError) else None)
            while begun:
                begun.popleft().finish(raised)


def _user_tag(tag: int) -> int:
    if not 0 <= tag < USER_TAGS:
        raise ValueError(f"a message's tag is {tag}; the backend phalanx supports tags from 0 to {USER_TAGS - 1}")
    return FIRST_USER_TAG + tag
