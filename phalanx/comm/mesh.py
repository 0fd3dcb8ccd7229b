"""Process groups and meshes: the only place that makes them."""

import contextlib
import datetime
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx import accelerator
from phalanx.comm.collectives import Traffic, all_reduce
from phalanx.errors import CollectiveError, RunError
from phalanx.records import Placement, StoreAddress

ROLL_CALL_S = 2.0  # how long the others get to say that the same collective failed for them


@dataclass
class Mesh:
    """The groups of one attempt. Independent streams of collectives have groups of their own, so that none can overtake
    or delay another's: `shard` carries gradients and parameters, `control` a few bytes a step, `checkpoint` saves."""

    rank: int
    world: int
    device: torch.device
    shard: DeviceMesh
    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup
    traffic: Traffic
    store: dist.Store
    timeout_s: float
    bookkeeping: Traffic = field(default_factory=Traffic)  # a few numbers a step, which are no part of its traffic

    def sum(self, values: list[float]) -> list[float]:
        """Sum numbers over all ranks, in float64, and wait for the result."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """The greatest of each number over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def min(self, values: list[float]) -> list[float]:
        """The least of each number over all ranks."""
        return self._reduce(values, dist.ReduceOp.MIN)

    def gather(self, value: float) -> list[float]:
        """A number of every rank, in order of rank."""
        table = [0.0] * self.world
        table[self.rank] = value
        return self.sum(table)

    def blame(self, error: RuntimeError) -> RuntimeError | CollectiveError:
        """What to raise for `error`: if a collective failed, an error that names the ranks that were not in it.

        Every rank in a failed collective gets an error of its own at about the same time and says so at the store;
        those that say nothing are the late ones. A dead store leaves the error as it is.
        """
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            return error
        names = [f"failed/{rank}" for rank in range(self.world)]
        try:
            self.store.set(names[self.rank], "1")
            time.sleep(ROLL_CALL_S)
            late = [str(rank) for rank, name in enumerate(names) if not self.store.check([name])]
        except RuntimeError:
            return error
        if not late:
            return error
        first_line = str(error).splitlines()[0]
        return CollectiveError(
            f"rank{'s' if len(late) > 1 else ''} {', '.join(late)} of {self.world} did not take part in a collective "
            f"within {self.timeout_s:g} s ({first_line}); look at the logs of the late, or raise comm.timeout_s"
        )

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        all_reduce(tensor, self.control, self.bookkeeping, op).wait()
        return tensor.tolist()


@contextlib.contextmanager
def join(placement: Placement, timeout_s: float, storage_s: float = 0.0) -> Iterator[Mesh]:
    """Meet the other ranks, make the groups, and leave them on exit. `storage_s`: how much longer the group for saves
    waits, for a rank whose remote store is still being tried.

    Raises CollectiveError naming the missing ranks when they do not arrive within `timeout_s`.
    """
    device = torch.device(placement.device)
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.PrefixStore(f"attempt-{placement.attempt}", _store(placement, timeout))
    _meet(store, placement, timeout_s)
    dist.init_process_group(
        accelerator.backend(device),
        store=dist.PrefixStore("group", store),
        rank=placement.rank,
        world_size=placement.world,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    try:
        yield Mesh(
            rank=placement.rank,
            world=placement.world,
            device=device,
            shard=DeviceMesh(device.type, torch.arange(placement.world), mesh_dim_names=("shard",)),
            control=dist.new_group(backend="gloo", timeout=timeout),
            checkpoint=dist.new_group(backend="gloo", timeout=timeout + datetime.timedelta(seconds=storage_s)),
            traffic=Traffic(),
            store=store,
            timeout_s=timeout_s,
        )
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def alone(mesh: Mesh) -> Iterator[Mesh]:
    """This rank as if there were no other, for what each rank tries for itself; there is nothing to shard over."""
    timeout = datetime.timedelta(seconds=mesh.timeout_s)
    group = dist.new_group([dist.get_rank()], backend="gloo", timeout=timeout, use_local_synchronization=True)
    try:
        yield replace(mesh, rank=0, world=1, control=group, checkpoint=group, traffic=Traffic())
    finally:
        dist.destroy_process_group(group)


def _store(placement: Placement, timeout: datetime.timedelta) -> dist.Store:
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


def _meet(store: dist.Store, placement: Placement, timeout_s: float) -> None:
    """Wait until every rank has announced itself, so that a missing one is named, not waited for in silence."""
    names = [f"arrived/{rank}" for rank in range(placement.world)]
    deadline = time.monotonic() + timeout_s
    try:
        store.set(names[placement.rank], "1")
        while not store.check(names):
            if time.monotonic() > deadline:
                missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
                raise CollectiveError(
                    f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {placement.world} did not arrive "
                    f"within {timeout_s:.0f} s; look at their logs, or raise comm.timeout_s"
                )
            time.sleep(0.002)
    except dist.DistError as error:
        first_line = str(error).splitlines()[0]
        raise CollectiveError(
            f"rank {placement.rank} lost the store while it waited for the others ({first_line}), so rank 0 has left; "
            "look at its log"
        ) from None
