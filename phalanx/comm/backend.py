"""The backend "phalanx" of torch.distributed: topology-aware collectives; groups that fail on all ranks at once.

`import phalanx.comm` registers it; then any script may say `dist.init_process_group(backend="phalanx")`, make groups
and meshes of it, and use DDP, FSDP2 and any other user of process groups. Host tensors use `TwoLevelCollectives`: one
thread per group runs its collectives in call order. Those of an accelerator use its own collectives where each rank has
its own device, else the host. Point-to-point messages are not queued.
"""

import datetime
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.chunk_link import CollectiveSteps, even_cuts
from phalanx.comm.collective_thread import CollectiveThread
from phalanx.comm.host_tensors import (
    Tensors,
    consecutive_cuts,
    copy_from_host,
    fill_tensors,
    find_reduction,
    iterate_tensors,
    single_owner_cuts,
    split_rows,
    to_flat_host,
    to_list,
)  # fmt: skip
from phalanx.comm.rendezvous import this_host
from phalanx.comm.two_level import TwoLevelCollectives
from phalanx.core import renamed
from phalanx.system import accelerator

NAME = "phalanx"
# Host tensors in and out, all flat -> what moves them.
MakeSteps = Callable[[TwoLevelCollectives, list[torch.Tensor], list[torch.Tensor]], CollectiveSteps]


@dataclass(frozen=True)
class Options:
    """`pg_options` of a group. `host`: the name of this rank's node, where it is not to be found out; ranks with the
    same name share one. Groups without options take that of the default group."""

    host: str | None = None


@dataclass(frozen=True)
class Counters:
    """Exact counters of what this rank has sent in a group; what an accelerator's own collectives send is not known."""

    within_bytes: int  # to ranks of its node
    between_bytes: int  # to ranks of other nodes
    form: str  # of its collectives: alone, direct (one node), ring (one rank per node) or two-level
    native_calls: int  # collectives and messages that the accelerator's own group has done


def register(name: str = NAME) -> None:
    """Make the backend known to torch.distributed, for the host and the accelerator that torch was built for; it may
    have another name for scripts that say so. It becomes no device's default, which torch makes of the first backend
    that is registered for a kind of device without one."""
    defaults = dist.Backend.default_device_backend_map
    before = dict(defaults)
    dist.Backend.register_backend(name, _create, extended_api=True, devices=["cpu", *accelerator.accelerator_types()])
    for kind in set(defaults) - set(before):
        del defaults[kind]


def read_counters(group: dist.ProcessGroup | None = None) -> Counters:
    """The counts of a group of this backend; by default of the default group.

    Raises TypeError for a group of another backend.
    """
    group = group or dist.group.WORLD
    if not isinstance(group, ProcessGroupPhalanx):
        raise TypeError(f"only groups of the backend {NAME} have counters, not {type(group).__name__}")
    sent, topology = group._thread.two_level.link.sent, group._thread.topology
    return Counters(sent.within_bytes, sent.between_bytes, topology.form, group._thread.native_calls)


def _create(where: Any, options: Options | None) -> "ProcessGroupPhalanx":
    default = dist.group.WORLD
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options of the backend {NAME} are phalanx.comm.backend.Options, not {options!r}")
    host = options.host if options is not None else None
    if host is None and isinstance(default, ProcessGroupPhalanx):
        host = default._thread.host
    return ProcessGroupPhalanx(where.store, where.group_rank, where.group_size, where.timeout, host or this_host())


OLDER = {  # what torch called them before 2.13
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def _prefer_device_group(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """A collective of tensors on an accelerator goes to its own group, where there is one."""

    @functools.wraps(method)
    def call(group: "ProcessGroupPhalanx", *args: Any, **options: Any) -> dist.Work:
        device = next(iterate_tensors(args)).device
        native = group._thread.device_group(device, range(group._thread.world))
        if native is None:
            return method(group, *args, **options)
        group._thread.native_calls += 1
        name = method.__name__
        begin = getattr(native, name, None) or getattr(native, OLDER[name])
        work: dist.Work = begin(*args, **options)
        return work

    return call


class ProcessGroupPhalanx(dist.ProcessGroup):
    """A process group of the backend. Its methods have the names and arguments by which torch.distributed calls them;
    every collective returns at once, and its work's `wait` when the result is there."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: datetime.timedelta, host: str) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]  # the only form for a subclass
        self._group_store, self._names = store, {"name": "", "desc": "undefined"}
        self._thread = CollectiveThread(store, rank, world, timeout, host)
        self._close = weakref.finalize(self, self._thread.close)  # also at exit, or when collected

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the backend accepts; FSDP uses them to place tensors."""
        return [torch.device(kind) for kind in ("cpu", *accelerator.accelerator_types())]

    # ------------------------------------------------------------------------------------------------ one result on all

    @_prefer_device_group
    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self._reduce_all(to_list(tensors), opts)

    @_prefer_device_group
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self._reduce_all(tensors, opts)

    def _reduce_all(self, tensors: Tensors, opts: Any) -> dist.Work:
        combine, finish, factor = find_reduction(opts, tensors, self._thread.world)

        def make(line: TwoLevelCollectives, _: list[torch.Tensor], both: list[torch.Tensor]) -> CollectiveSteps:
            one = both[0] if len(both) == 1 else torch.cat(both)
            if factor is not None:
                one.mul_(factor)
            yield from line.all_reduce_steps(one, combine, finish)
            if len(both) > 1:
                fill_tensors(both, one)

        if len({tensor.dtype for tensor in tensors}) != 1:
            raise ValueError("the tensors of a coalesced all-reduce must have one dtype; reduce each dtype separately")
        return self._submit([], tensors, make, list(tensors), fill=True)

    @_prefer_device_group
    def broadcast(self, tensors: Tensors, opts: Any = None, root: int = 0) -> dist.Work:
        owner = opts if isinstance(opts, int) else root if opts is None else opts.rootRank

        def make(line: TwoLevelCollectives, _: list[torch.Tensor], both: list[torch.Tensor]) -> CollectiveSteps:
            yield from line.gather_steps(both[0], single_owner_cuts(owner, both[0].numel(), line.world))

        return self._submit([], to_list(tensors), make, to_list(tensors), fill=True)

    @_prefer_device_group
    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        combine, finish, factor = find_reduction(opts, tensors, self._thread.world)
        root = opts.rootRank

        def make(line: TwoLevelCollectives, _: list[torch.Tensor], both: list[torch.Tensor]) -> CollectiveSteps:
            one = both[0].clone()
            if factor is not None:
                one.mul_(factor)
            into = both[0] if line.rank == root else one[:0]
            yield from line.reduce_steps(one, single_owner_cuts(root, one.numel(), line.world), into, combine, finish)

        return self._submit([], tensors, make, list(tensors), fill=True)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._reduce_all([torch.zeros(1)], None)

    # ------------------------------------------------------------------------------------------------------- all-gather

    @_prefer_device_group
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        if isinstance(inputs, torch.Tensor):  # the short form: one list, one tensor
            outputs, inputs = [outputs], [inputs]
        return self._gather_all(outputs[0], inputs[0], [list(outputs[0])])

    @_prefer_device_group
    def all_gather_single(self, output: torch.Tensor, shard: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._gather_all([output], shard, output)

    def _gather_all(self, outputs: Tensors, shard: torch.Tensor, result: Any) -> dist.Work:
        """Gather into one tensor of equal parts, or into one for each rank, of any sizes."""
        world = self._thread.world
        if len(outputs) not in (1, world) or (len(outputs) == 1 and outputs[0].numel() != shard.numel() * world):
            raise ValueError(
                f"an all-gather of {shard.numel()} elements from each of {world} ranks needs room for them, not "
                f"{[tensor.numel() for tensor in outputs]}"
            )

        def make(line: TwoLevelCollectives, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> CollectiveSteps:
            cuts = even_cuts(writes[0].numel(), world) if len(writes) == 1 else consecutive_cuts(writes)
            everything = writes[0] if len(writes) == 1 else reads[0].new_empty(cuts[-1])
            own = everything[cuts[line.rank] : cuts[line.rank + 1]]
            if own.data_ptr() != reads[0].data_ptr():
                own.copy_(reads[0])
            yield from line.gather_steps(everything, cuts)
            if len(writes) > 1:
                fill_tensors(writes, everything)

        return self._submit([shard], outputs, make, result)

    @_prefer_device_group
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        # One list of outputs per rank, each with one tensor per input.
        return _CombinedWork(
            [self._gather_all([each[i] for each in outputs], own, None) for i, own in enumerate(inputs)]
        )

    @_prefer_device_group
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _CombinedWork([self._gather_all([output], shard, output) for output, shard in pairs])

    # --------------------------------------------------------------------------------------------------- reduce-scatter

    @_prefer_device_group
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        return self._scatter_sum(outputs[0], inputs[0], opts)

    @_prefer_device_group
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._scatter_sum(output, [tensor], opts)

    def _scatter_sum(self, output: torch.Tensor, inputs: Tensors, opts: Any) -> dist.Work:
        """Reduce one tensor of equal parts, or one for each rank, of any sizes; each rank gets its own."""
        world, combine, finish, factor = self._thread.world, *find_reduction(opts, inputs, self._thread.world)
        own = inputs[self._thread.rank].numel() if len(inputs) > 1 else inputs[0].numel() // world
        if output.numel() != own or (len(inputs) == 1 and inputs[0].numel() != own * world):
            raise ValueError(
                f"a reduce-scatter of {[tensor.numel() for tensor in inputs]} elements over {world} ranks leaves {own} "
                f"on this one, not {output.numel()}"
            )

        def make(line: TwoLevelCollectives, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> CollectiveSteps:
            cuts = even_cuts(reads[0].numel(), world) if len(reads) == 1 else consecutive_cuts(reads)
            one = reads[0] if len(reads) == 1 and factor is None else torch.cat(reads)
            if factor is not None:
                one.mul_(factor)
            yield from line.reduce_steps(one, cuts, writes[0], combine, finish, keep=one is reads[0])

        return self._submit(inputs, [output], make, [output])

    @_prefer_device_group
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _CombinedWork([self._scatter_sum(output, [tensor], opts) for output, tensor in pairs])

    # ------------------------------------------------------------------------------------------ from each to each other

    @_prefer_device_group
    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:  # fmt: skip
        """Splits are rows of the first dimension; none: equal parts."""
        world = self._thread.world

        def make(line: TwoLevelCollectives, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> CollectiveSteps:
            outgoing = split_rows(reads[0], tensor, input_splits, world)
            yield from line.exchange_steps(outgoing, split_rows(writes[0], output, output_splits, world))

        return self._submit([tensor], [output], make, output)

    @_prefer_device_group
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._submit(inputs, outputs, TwoLevelCollectives.exchange_steps, list(outputs))

    @_prefer_device_group
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        root = opts.rootRank

        def make(line: TwoLevelCollectives, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> CollectiveSteps:
            outgoing = [reads[0] if rank == root else None for rank in range(line.world)]
            yield from line.exchange_steps(outgoing, writes or [None] * line.world)

        return self._submit(inputs, outputs[0] if outputs else [], make, [list(each) for each in outputs])

    @_prefer_device_group
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        root = opts.rootRank

        def make(line: TwoLevelCollectives, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> CollectiveSteps:
            arriving = [writes[0] if rank == root else None for rank in range(line.world)]
            yield from line.exchange_steps(reads or [None] * line.world, arriving)

        return self._submit(inputs[0] if inputs else [], outputs, make, list(outputs))

    # --------------------------------------------------------------------------------------------------------- messages

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        return self._thread.send(tensor, to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        return self._thread.receive(tensor, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        return self._thread.receive(tensor, None, tag)

    # ------------------------------------------------------------------------------------------------------------ calls

    def _submit(self, reads: Tensors, writes: Tensors, make: MakeSteps, result: Any, fill: bool = False) -> dist.Work:
        """Queue what `make` makes of the flat host forms of these tensors; `fill`: what is written is read before."""
        devices = {tensor.device for tensor in (*reads, *writes) if tensor.device.type != "cpu"}
        marks = [accelerator.record_event(device) for device in devices]

        def program() -> CollectiveSteps:
            for mark in marks:
                mark.synchronize()  # holds this thread until the device has made what is to be sent
            sources = [to_flat_host(tensor) for tensor in reads]
            targets = [to_flat_host(tensor, fill) for tensor in writes]
            yield from make(self._thread.two_level, sources, targets)
            for tensor, host in zip(writes, targets, strict=True):
                copy_from_host(tensor, host)
            for device in devices:
                accelerator.record_event(device).synchronize()  # and until it has the result

        return self._thread.submit(program, result, sorted(devices, key=str))

    # ------------------------------------------------------------------------------------------ what torch asks a group

    def shutdown(self) -> None:
        self._close()

    def abort(self) -> None:
        """End the group on all ranks, as a failure."""
        self._thread.gloo.fail(RuntimeError("aborted by the program"))
        self._close()

    def get_group_store(self) -> dist.Store:
        return self._group_store

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name

    def _set_group_desc(self, desc: str) -> None:
        self._names["desc"] = desc

    def getGroupName(self) -> str:
        return self._names["name"]

    def getGroupDesc(self) -> str:
        return self._names["desc"]

    name = getBackendName
    setGroupName, setGroupDesc = _set_group_name, _set_group_desc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    # Names of older versions of torch, and of its functional collectives.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _CombinedWork(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> "torch.futures.Future[Any]":
        return torch.futures.collect_all([work.get_future() for work in self._works])


__getattr__ = renamed.old_names(__name__)
