"""Process groups and meshes, created only here."""

import contextlib
import datetime
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.comm.collectives import Traffic, all_reduce
from phalanx.comm.rendezvous import JsonGroup, RollCall, Topology, exchange_offers, open_store, this_host
from phalanx.core import renamed
from phalanx.core.placement import Placement
from phalanx.layout.mesh_axes import ALONE, MeshAxes
from phalanx.system import accelerator, cpus


@dataclass(frozen=True)
class Axis:
    """A group of ranks along an axis of model parallelism: their numbers among all ranks, and this one's place."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    rank: int
    cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # of its users, by name

    @property
    def size(self) -> int:
        return len(self.ranks)


@contextlib.contextmanager
def _default_group_unbound() -> Iterator[None]:
    """The default group without the device that a script has bound it to: torch looks that up in every group that is
    made meanwhile, which fails in those of gloo alone, and has ranks outside a new group take part in making it."""
    default = dist.group.WORLD
    assert default is not None
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def _new_group(ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
    with _default_group_unbound():
        return dist.new_group(ranks, **options)


def split_axis(axis: Axis, size: int, timeout_s: float) -> Axis:
    """The part of an axis that consists of this rank and those beside it, `size` of them, as long as the axis lives.
    To be called by all ranks of the part."""
    first = axis.rank // size * size
    ranks = axis.ranks[first : first + size]
    group = _new_group(
        list(ranks),
        backend=dist.get_backend(axis.group),
        timeout=datetime.timedelta(seconds=timeout_s),
        use_local_synchronization=True,
    )
    part = Axis(group, ranks, axis.rank - first)
    weakref.finalize(axis, tuple, (part,))  # holds it until then
    return part


@dataclass(frozen=True)
class RankDevices:
    """The device types of all ranks."""

    on_host: bool  # every rank's device is a CPU
    homogeneous: bool  # all devices are of one kind

    @staticmethod
    def from_offers(offers: Sequence[str]) -> "RankDevices":
        """Those of ranks that describe their devices so."""
        kinds = {offer.split("\t")[0] for offer in offers}
        return RankDevices(kinds == {"gloo"}, len(kinds) == 1)


@dataclass(frozen=True)
class ExtraGroups:
    """Groups that only some runs need; `members` of all meshes like this one, by number among all ranks ((): one mesh
    has all), and `axes`, this rank's parts of the data axis (`MeshAxes.parts_of_data`)."""

    members: tuple[tuple[int, ...], ...] = ()
    made: list[dist.ProcessGroup] = field(default_factory=list)
    named: dict[str, dist.ProcessGroup] = field(default_factory=dict)  # those of all ranks of this mesh
    axes: dict[str, Axis] = field(default_factory=dict)


@dataclass
class Mesh:
    """The process groups of one attempt. Independent streams of collectives have separate groups, so that none can
    overtake or delay another's: `shard` carries gradients and parameters, `transfers` those that the sharded engine
    sends itself and `agreement` the few bytes that go with them, `control` a few bytes a step, `checkpoint` saves.

    Where several ranks hold one copy of the model, `data` is the mesh of those that hold the same part of it as this
    rank, one in each copy: an engine shards over them, and knows nothing of the others but `model`.
    """

    rank: int
    world: int
    device: torch.device
    shard: DeviceMesh
    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup
    transfers: dist.ProcessGroup
    agreement: dist.ProcessGroup
    traffic: Traffic
    roll_call: RollCall
    topology: Topology  # which ranks share a node
    devices: RankDevices
    axes: MeshAxes = ALONE
    tensor: Axis | None = None  # ranks that hold slices of the same layers
    pipe: Axis | None = None  # ranks that hold the stages of one copy
    model: Axis | None = None  # ranks that hold one copy together
    all_ranks: dist.ProcessGroup | None = None  # of all ranks, for what engines of all of them agree on; None: alone
    inner: "Mesh | None" = None
    extra: ExtraGroups = field(default_factory=ExtraGroups)
    bookkeeping: Traffic = field(default_factory=Traffic)  # a few numbers a step, which are no part of its traffic

    @property
    def data(self) -> "Mesh":
        """This rank and those that hold the same part of other copies of the model; the mesh itself if that is all."""
        return self if self.inner is None else self.inner

    @property
    def context(self) -> Axis | None:
        """Ranks that take rows together, a part of `data`; None where each takes its own."""
        return self.extra.axes.get("context")

    @property
    def expert(self) -> Axis | None:
        """Ranks of several copies that divide the experts of each layer among them; None without parallel.expert, where
        those of `tensor` do."""
        return self.extra.axes.get("expert")

    @property
    def row_group(self) -> int:
        """Which of the groups that take different rows this rank belongs to."""
        return self.axes.row_group(self.rank, self.world)

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

    def drop_groups(self) -> None:
        """Drop references to the destroyed groups. The threads of a referenced group continue, and if the interpreter
        ends before them the process aborts."""
        if self.inner is not None:
            self.inner.drop_groups()
        self.extra.made.clear()
        self.extra.named.clear()
        self.extra.axes.clear()
        for name in ("shard", "control", "checkpoint", "transfers", "agreement", "roll_call"):
            self.__dict__.pop(name, None)
        self.tensor = self.pipe = self.model = self.all_ranks = self.inner = None

    def split(self, degree: int, through_host: bool) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
        """Groups for hybrid sharding: that of this rank and its neighbours, `degree` of them, over which a copy of the
        state is sharded, and that of the ranks which hold the same shard of another copy (None: there is one copy).

        Neighbours follow one another in order of rank, as the ranks of a node do. `through_host`: for tensors of the
        host alone, wherever ranks compute. Collective.
        """
        assert self.world % degree == 0, (self.world, degree)
        wait = datetime.timedelta(seconds=self.roll_call.timeout_s)
        backend: str = dist.get_backend(self.transfers)
        if through_host and not self.devices.on_host:
            backend = "gloo"
        elif degree == self.world:
            return self.transfers, None
        mine: dict[bool, dist.ProcessGroup] = {}
        me = dist.get_rank()
        for everyone in self.extra.members or (tuple(range(self.world)),):  # all make every group, in the same order
            neighbours = [everyone[first : first + degree] for first in range(0, self.world, degree)]
            copies = [everyone[place::degree] for place in range(degree)] if degree < self.world else []
            for ranks in (*neighbours, *copies):
                group = _new_group(list(ranks), backend=backend, timeout=wait)
                if me in ranks:
                    mine[ranks in copies] = group
                    self.extra.made.append(group)
        return mine[False], mine.get(True)

    def open_group(self, name: str) -> dist.ProcessGroup:
        """A group of all ranks of this mesh for another stream of collectives on the device. Collective on first
        use."""
        if name not in self.extra.named:
            wait, me = datetime.timedelta(seconds=self.roll_call.timeout_s), dist.get_rank()
            for ranks in self.extra.members or (tuple(range(self.world)),):
                group = _new_group(list(ranks), backend=dist.get_backend(self.transfers), timeout=wait)
                if me in ranks:
                    self.extra.named[name] = group
                    self.extra.made.append(group)
        return self.extra.named[name]

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        all_reduce(tensor, self.control, self.bookkeeping, op).wait()
        return tensor.tolist()


@contextlib.contextmanager
def join(placement: Placement, timeout_s: float, storage_s: float = 0.0, axes: MeshAxes = ALONE) -> Iterator[Mesh]:
    """Meet the other ranks, make the groups, and leave them on exit. `storage_s`: how much longer the group for saves
    waits, for a rank whose remote store is still being tried. `axes`: how many ranks hold one copy of the model.

    Raises CollectiveError naming the missing ranks when they do not arrive within `timeout_s`, and ConfigError where
    the ranks are no multiple of those that a copy needs.
    """
    axes.data_parallel_size(placement.world)
    timeout, device = datetime.timedelta(seconds=timeout_s), torch.device(placement.device)
    cpus.use_batch_scheduling(device.type)
    store = dist.PrefixStore(f"attempt-{placement.attempt}", open_store(placement, timeout))
    offers = exchange_offers(store, placement, timeout_s, _describe_device(device))
    dist.init_process_group(  # not bound to a device (`device_id`), for the reasons that `_default_group_unbound` has
        _choose_backend(offers),
        store=dist.PrefixStore("group", store),
        rank=placement.rank,
        world_size=placement.world,
        timeout=timeout,
    )
    mesh = None
    try:
        mesh = _mesh(device, offers, store, timeout_s, storage_s, axes)
        yield mesh
    finally:
        dist.destroy_process_group()
        if mesh is not None:
            mesh.drop_groups()


@contextlib.contextmanager
def attach_mesh(device: torch.device, timeout_s: float, axes: MeshAxes = ALONE) -> Iterator[Mesh]:
    """A mesh in a process whose ranks have already met: it has new groups, separate from all others, which are
    destroyed on exit. Every rank must make it, on its `device`."""
    axes.data_parallel_size(dist.get_world_size())
    cpus.use_batch_scheduling(device.type)
    # torch keeps this store to itself, but it is where every rank is known to look.
    store = dist.PrefixStore("beside", dist.distributed_c10d._get_default_store())
    meeting = _new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
    offers = JsonGroup(meeting).all_gather_objects(_describe_device(device))
    dist.destroy_process_group(meeting)
    with _default_group_unbound():
        mesh = _mesh(device, offers, store, timeout_s, 0.0, axes)
    try:
        yield mesh
    finally:
        for group in _groups(mesh):
            dist.destroy_process_group(group)
        mesh.drop_groups()


def _groups(mesh: Mesh) -> list[dist.ProcessGroup]:
    """All that were made for a mesh."""
    own = [*mesh.extra.made, mesh.control, mesh.checkpoint, mesh.transfers, mesh.agreement]
    if mesh.inner is None:
        return [*own, *(each.group for each in mesh.extra.axes.values())]
    axes = [axis.group for axis in (mesh.tensor, mesh.pipe, mesh.model) if axis is not None]
    return [*_groups(mesh.inner), mesh.inner.shard.get_group(), *axes, *own]


def _mesh(
    device: torch.device, offers: list[str], store: dist.Store, timeout_s: float, storage_s: float, axes: MeshAxes
) -> Mesh:
    """New groups of all ranks of the default group, and those along the axes of model parallelism."""
    timeout = datetime.timedelta(seconds=timeout_s)
    mesh = Mesh(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        device=device,
        shard=DeviceMesh(device.type, torch.arange(dist.get_world_size()), mesh_dim_names=("shard",)),
        control=_new_group(backend="gloo", timeout=timeout),
        checkpoint=_new_group(backend="gloo", timeout=timeout + datetime.timedelta(seconds=storage_s)),
        transfers=_new_group(backend=_choose_backend(offers), timeout=timeout),
        agreement=_new_group(backend="gloo", timeout=timeout),
        traffic=Traffic(),
        roll_call=RollCall(store, dist.get_rank(), dist.get_world_size(), timeout_s),
        topology=Topology.from_hosts([offer.split("\t")[2] for offer in offers]),
        devices=RankDevices.from_offers(offers),
        axes=axes,
    )
    mesh.all_ranks = mesh.agreement if mesh.world > 1 else None
    for name in axes.parts_of_data:
        mesh.extra.axes[name] = _make_axis(mesh, offers, timeout, name, None)
    if axes.model_parallel_size > 1:
        _add_axis_groups(mesh, offers, timeout, datetime.timedelta(seconds=timeout_s + storage_s))
    return mesh


def _make_axis(mesh: Mesh, offers: list[str], timeout: datetime.timedelta, axis: str, backend: str | None) -> Axis:
    """The group of this rank along an axis; every rank makes every group, in the same order."""
    mine = None
    for ranks in mesh.axes.groups(axis, mesh.world):
        group = _new_group(list(ranks), backend=backend or _choose_backend([offers[r] for r in ranks]), timeout=timeout)
        if mesh.rank in ranks:
            mine = Axis(group, ranks, ranks.index(mesh.rank))
    assert mine is not None
    return mine


def _add_axis_groups(mesh: Mesh, offers: list[str], wait: datetime.timedelta, wait_saved: datetime.timedelta) -> None:
    """Give `mesh` the groups of model parallelism."""
    axes, world = mesh.axes, mesh.world
    of = functools.partial(_make_axis, mesh, offers, wait)
    mesh.tensor = of("tensor", None) if axes.tensor > 1 else None
    mesh.pipe = of("pipe", None) if axes.pipeline > 1 else None
    mesh.model = of("model", "gloo")
    shard = of("data", None)
    inside = RankDevices.from_offers([offers[each] for each in shard.ranks])
    mesh.inner = replace(
        mesh,
        rank=shard.rank,
        world=shard.size,
        shard=DeviceMesh.from_group(shard.group, mesh.device.type, mesh=list(shard.ranks), mesh_dim_names=("shard",)),
        control=of("data", "gloo").group,
        checkpoint=_make_axis(mesh, offers, wait_saved, "data", "gloo").group,
        transfers=of("data", None).group,
        agreement=of("data", "gloo").group,
        topology=mesh.topology.subset(shard.ranks),
        devices=replace(mesh.devices, homogeneous=inside.homogeneous),
        extra=ExtraGroups(tuple(axes.groups("data", world)), axes=mesh.extra.axes),
        inner=None,
        bookkeeping=Traffic(),
    )


@contextlib.contextmanager
def single_rank_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """A mesh of this rank alone, for measurements of each rank by itself."""
    timeout = datetime.timedelta(seconds=mesh.roll_call.timeout_s)
    group = _new_group([dist.get_rank()], backend="gloo", timeout=timeout, use_local_synchronization=True)
    try:
        yield replace(
            mesh, rank=0, world=1, control=group, checkpoint=group, transfers=group, agreement=group, traffic=Traffic(),
            topology=Topology.from_hosts(["here"]), devices=RankDevices(mesh.device.type == "cpu", True), axes=ALONE,
            extra=ExtraGroups(((dist.get_rank(),),)), tensor=None, pipe=None, model=None, all_ranks=None, inner=None,
        )  # fmt: skip
    finally:
        dist.destroy_process_group(group)


def _describe_device(device: torch.device) -> str:
    """A rank's description for the others: the groups that its device supports, the device, and the machine."""
    return "\t".join([accelerator.backend_string(device), accelerator.hardware_id(device, this_host()), this_host()])


def _choose_backend(offers: list[str]) -> str:
    """The groups of an attempt: the device's own collectives where all have the same kind and each its own device; gloo
    for heterogeneous devices, and for ranks that share one, which an accelerator's collectives refuse."""
    backends = {offer.split("\t")[0] for offer in offers}
    devices = [device for offer in offers if (device := offer.split("\t")[1])]
    return backends.pop() if len(backends) == 1 and len(set(devices)) == len(devices) else "gloo"


# --------------------------------------------------------------------------------------------- groups of users' scripts


def init_default_group(placement: Placement, timeout_s: float) -> None:
    """Make the default process group of a script's process, which keeps it to its end."""
    timeout, device = datetime.timedelta(seconds=timeout_s), torch.device(placement.device)
    store = dist.PrefixStore("script", open_store(placement, timeout))
    dist.init_process_group(
        accelerator.backend_string(device), store=store, rank=placement.rank,
        world_size=placement.world, timeout=timeout,
    )  # fmt: skip


def make_subgroup(rank_lists: list[list[int]]) -> dist.ProcessGroup:
    """Make a group of each list of ranks, with the default group's backend; gives this rank's. Every rank is in one of
    them. Collective."""
    mine = None
    for ranks in rank_lists:  # every rank makes every group, in the same order
        group = _new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None, (dist.get_rank(), rank_lists)
    return mine


__getattr__ = renamed.old_names(__name__)
