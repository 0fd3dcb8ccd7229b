"""The backend "phalanx" of torch.distributed: collectives that know the nodes; groups that end on all ranks at once.

`import phalanx.comm` registers it; then any script may say `dist.init_process_group(backend="phalanx")`, make groups
and meshes of it, and use DDP, FSDP2 and whatever else speaks to a process group. Tensors of the host travel by
`TwoLevel`: one thread per group does its collectives in the order in which they were called. Those of an accelerator go
through its own collectives where each rank has a device of its own, else through the host. Messages between two ranks
are not queued.
"""

import datetime
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.abortable_gloo import FIRST_LETTER, MOST_LETTERS
from phalanx.comm.collective_thread import Letter, Line
from phalanx.comm.topology import this_host
from phalanx.comm.two_level import Combine, Finish, Program, TwoLevel, even
from phalanx.system import accelerator

NAME = "phalanx"
Tensors = Sequence[torch.Tensor]
# Host tensors in and out, all flat -> what moves them.
Make = Callable[[TwoLevel, list[torch.Tensor], list[torch.Tensor]], Program]

_COMBINE: dict[dist.ReduceOp.RedOpType, Combine] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_ORDER = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_BITS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


@dataclass(frozen=True)
class Options:
    """`pg_options` of a group. `host`: the name of this rank's node, where it is not to be found out; ranks with the
    same name share one. Groups without options take that of the default group."""

    host: str | None = None


@dataclass(frozen=True)
class Counters:
    """What this rank has sent in a group so far, exactly; what an accelerator's own collectives send is not known."""

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
    dist.Backend.register_backend(name, _create, extended_api=True, devices=["cpu", *accelerator.kinds()])
    for kind in set(defaults) - set(before):
        del defaults[kind]


def counters(group: dist.ProcessGroup | None = None) -> Counters:
    """The counts of a group of this backend; by default of the default group.

    Raises TypeError for a group of another backend.
    """
    group = group or dist.group.WORLD
    if not isinstance(group, Group):
        raise TypeError(f"counters are kept by groups of the backend {NAME}, not by {type(group).__name__}")
    sent, topology = group._line.two_level.sent, group._line.topology
    return Counters(sent.within_bytes, sent.between_bytes, topology.form, group._line.native_calls)


def _create(where: Any, options: Options | None) -> "Group":
    default = dist.group.WORLD
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options of the backend {NAME} are phalanx.comm.backend.Options, not {options!r}")
    host = options.host if options is not None else None
    if host is None and isinstance(default, Group):
        host = default._line.host
    return Group(where.store, where.group_rank, where.group_size, where.timeout, host or this_host())


OLDER = {  # what torch called them before 2.13
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def _or_native(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """A collective of tensors on an accelerator goes to its own group, where there is one."""

    @functools.wraps(method)
    def call(group: "Group", *args: Any, **options: Any) -> dist.Work:
        device = next(_tensors(args)).device
        native = group._line.native(device, range(group._line.world))
        if native is None:
            return method(group, *args, **options)
        group._line.native_calls += 1
        name = method.__name__
        begin = getattr(native, name, None) or getattr(native, OLDER[name])
        work: dist.Work = begin(*args, **options)
        return work

    return call


class Group(dist.ProcessGroup):
    """A process group of the backend. Its methods have the names and arguments by which torch.distributed calls them;
    every collective returns at once, and its work's `wait` when the result is there."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: datetime.timedelta, host: str) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]  # the only form of a class of one's own
        self._group_store, self._names = store, {"name": "", "desc": "undefined"}
        self._line = Line(store, rank, world, timeout, host)
        self._leave = weakref.finalize(self, self._line.close)  # also when the interpreter ends, or nobody holds it

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors it carries: where FSDP puts what it sends. Torch knows that of its own backends."""
        return [torch.device(kind) for kind in ("cpu", *accelerator.kinds())]

    # ------------------------------------------------------------------------------------------------ one result on all

    @_or_native
    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self._reduce_all(_listed(tensors), opts)

    @_or_native
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self._reduce_all(tensors, opts)

    def _reduce_all(self, tensors: Tensors, opts: Any) -> dist.Work:
        combine, finish, factor = self._operation(opts, tensors)

        def make(line: TwoLevel, _: list[torch.Tensor], both: list[torch.Tensor]) -> Program:
            one = both[0] if len(both) == 1 else torch.cat(both)
            if factor is not None:
                one.mul_(factor)
            yield from line.all_reducing(one, combine, finish)
            if len(both) > 1:
                _fill(both, one)

        if len({tensor.dtype for tensor in tensors}) != 1:
            raise ValueError("the tensors of a coalesced all-reduce must have one type; reduce those of each by itself")
        return self._call([], tensors, make, list(tensors), fill=True)

    @_or_native
    def broadcast(self, tensors: Tensors, opts: Any = None, root: int = 0) -> dist.Work:
        owner = root if opts is None or isinstance(opts, int) else opts.rootRank
        owner = opts if isinstance(opts, int) else owner

        def make(line: TwoLevel, _: list[torch.Tensor], both: list[torch.Tensor]) -> Program:
            yield from line.gathering(both[0], _owned_by(owner, both[0].numel(), line.world))

        return self._call([], _listed(tensors), make, _listed(tensors), fill=True)

    @_or_native
    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        combine, finish, factor = self._operation(opts, tensors)
        root = opts.rootRank

        def make(line: TwoLevel, _: list[torch.Tensor], both: list[torch.Tensor]) -> Program:
            one = both[0].clone()
            if factor is not None:
                one.mul_(factor)
            into = both[0] if line.rank == root else one[:0]
            yield from line.reducing(one, _owned_by(root, one.numel(), line.world), into, combine, finish)

        return self._call([], tensors, make, list(tensors), fill=True)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._reduce_all([torch.zeros(1)], None)

    # ------------------------------------------------------------------------------------------------------- all-gather

    @_or_native
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        if isinstance(inputs, torch.Tensor):  # the short form: one list, one tensor
            outputs, inputs = [outputs], [inputs]
        return self._gather_all(outputs[0], inputs[0], [list(outputs[0])])

    @_or_native
    def all_gather_single(self, output: torch.Tensor, shard: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._gather_all([output], shard, output)

    def _gather_all(self, outputs: Tensors, shard: torch.Tensor, result: Any) -> dist.Work:
        """Gather into one tensor of equal parts, or into one for each rank, of any sizes."""
        world = self._line.world
        if len(outputs) not in (1, world) or (len(outputs) == 1 and outputs[0].numel() != shard.numel() * world):
            raise ValueError(
                f"an all-gather of {shard.numel()} elements from each of {world} ranks needs room for them, not "
                f"{[tensor.numel() for tensor in outputs]}"
            )

        def make(line: TwoLevel, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Program:
            cuts = even(writes[0].numel(), world) if len(writes) == 1 else _one_after_another(writes)
            everything = writes[0] if len(writes) == 1 else reads[0].new_empty(cuts[-1])
            own = everything[cuts[line.rank] : cuts[line.rank + 1]]
            if own.data_ptr() != reads[0].data_ptr():
                own.copy_(reads[0])
            yield from line.gathering(everything, cuts)
            if len(writes) > 1:
                _fill(writes, everything)

        return self._call([shard], outputs, make, result)

    @_or_native
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        # One list of outputs per rank, each with one tensor per input.
        return _All([self._gather_all([each[i] for each in outputs], own, None) for i, own in enumerate(inputs)])

    @_or_native
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _All([self._gather_all([output], shard, output) for output, shard in pairs])

    # --------------------------------------------------------------------------------------------------- reduce-scatter

    @_or_native
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        return self._scatter_sum(outputs[0], inputs[0], opts)

    @_or_native
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._scatter_sum(output, [tensor], opts)

    def _scatter_sum(self, output: torch.Tensor, inputs: Tensors, opts: Any) -> dist.Work:
        """Reduce one tensor of equal parts, or one for each rank, of any sizes; each rank gets its own."""
        world, combine, finish, factor = self._line.world, *self._operation(opts, inputs)
        own = inputs[self._line.rank].numel() if len(inputs) > 1 else inputs[0].numel() // world
        if output.numel() != own or (len(inputs) == 1 and inputs[0].numel() != own * world):
            raise ValueError(
                f"a reduce-scatter of {[tensor.numel() for tensor in inputs]} elements over {world} ranks leaves {own} "
                f"on this one, not {output.numel()}"
            )

        def make(line: TwoLevel, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Program:
            cuts = even(reads[0].numel(), world) if len(reads) == 1 else _one_after_another(reads)
            one = reads[0] if len(reads) == 1 and factor is None else torch.cat(reads)
            if factor is not None:
                one.mul_(factor)
            yield from line.reducing(one, cuts, writes[0], combine, finish, keep=one is reads[0])

        return self._call(inputs, [output], make, [output])

    @_or_native
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _All([self._scatter_sum(output, [tensor], opts) for output, tensor in pairs])

    # ------------------------------------------------------------------------------------------ from each to each other

    @_or_native
    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:  # fmt: skip
        """Splits are rows of the first dimension; none: equal parts."""
        world = self._line.world

        def make(line: TwoLevel, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Program:
            outgoing = _rows(reads[0], tensor, input_splits, world)
            yield from line.exchanging(outgoing, _rows(writes[0], output, output_splits, world))

        return self._call([tensor], [output], make, output)

    @_or_native
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._call(inputs, outputs, lambda line, reads, writes: line.exchanging(reads, writes), list(outputs))

    @_or_native
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        root = opts.rootRank

        def make(line: TwoLevel, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Program:
            outgoing = [reads[0] if rank == root else None for rank in range(line.world)]
            yield from line.exchanging(outgoing, writes or [None] * line.world)

        return self._call(inputs, outputs[0] if outputs else [], make, [list(each) for each in outputs])

    @_or_native
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        root = opts.rootRank

        def make(line: TwoLevel, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Program:
            arriving = [writes[0] if rank == root else None for rank in range(line.world)]
            yield from line.exchanging(reads or [None] * line.world, arriving)

        return self._call(inputs[0] if inputs else [], outputs, make, list(outputs))

    # --------------------------------------------------------------------------------------------------------- messages

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        native = self._line.native(tensor.device, [to])
        if native is not None:
            self._line.native_calls += 1
            return native.send(list(tensors), to, tag)
        host = _flat(tensor)
        self._line.two_level.count(to, host.numel() * host.element_size())
        # What is sent is kept until it has been.
        return self._letter(lambda: self._line.guarded.group.send([host], to, _letter(tag)), to, host.numel)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        native = self._line.native(tensor.device, [source])
        if native is not None:
            self._line.native_calls += 1
            return native.recv(list(tensors), source, tag)
        host = _flat(tensor, fill=False)
        receive = self._line.guarded.group.recv
        return self._letter(lambda: receive([host], source, _letter(tag)), source, lambda: _put(tensor, host))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """From whoever sends first. It is through the host, and does not notice that another rank is lost."""
        (tensor,) = tensors
        host = _flat(tensor, fill=False)
        receive = self._line.guarded.group.recv_anysource
        return self._letter(lambda: receive([host], _letter(tag)), None, lambda: _put(tensor, host))

    def _letter(self, start: Callable[[], dist.Work], peer: int | None, then: Callable[[], object]) -> dist.Work:
        guarded = self._line.guarded
        if guarded.failed is not None:
            raise guarded.failed
        try:
            return Letter(start(), peer, guarded, then)
        except RuntimeError as error:
            raise guarded.fail(error, peer) from None

    # ------------------------------------------------------------------------------------------------------------ calls

    def _call(self, reads: Tensors, writes: Tensors, make: Make, result: Any, fill: bool = False) -> dist.Work:
        """Queue what `make` makes of the flat host forms of these tensors; `fill`: what is written is read before."""
        devices = {tensor.device for tensor in (*reads, *writes) if tensor.device.type != "cpu"}
        marks = [accelerator.mark(device) for device in devices]

        def program() -> Program:
            for mark in marks:
                mark.synchronize()  # holds this thread until the device has made what is to be sent
            sources = [_flat(tensor) for tensor in reads]
            targets = [_flat(tensor, fill) for tensor in writes]
            yield from make(self._line.two_level, sources, targets)
            for tensor, host in zip(writes, targets, strict=True):
                _put(tensor, host)
            for device in devices:
                accelerator.mark(device).synchronize()  # and until it has the result

        return self._line.call(program, result, sorted(devices, key=str))

    def _operation(self, opts: Any, tensors: Tensors) -> tuple[Combine, Finish, Any]:
        """How to combine two parts, what to do with the whole, and what each part is multiplied by first."""
        chosen: Any = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        kind = getattr(chosen, "op", chosen)
        dtype = tensors[0].dtype
        whole = not (dtype.is_floating_point or dtype.is_complex)
        if kind == dist.ReduceOp.PREMUL_SUM:
            return torch.add, None, chosen.factor
        if kind not in _COMBINE or any(tensor.is_sparse for tensor in tensors):
            raise ValueError(f"the backend {NAME} has no {kind} of {tensors[0].layout} tensors; use another operation")
        if (kind in _BITS and not whole) or (kind == dist.ReduceOp.AVG and whole):
            raise ValueError(f"{kind} is not defined for {dtype}; use another operation, or convert the tensor")
        if (kind in _ORDER and dtype.is_complex) or (dtype.itemsize == 1 and not whole):  # no sums of 8-bit floats
            raise ValueError(f"{kind} is not defined for {dtype}; convert the tensor")
        world = self._line.world
        return _COMBINE[kind], (lambda part: part.div_(world)) if kind == dist.ReduceOp.AVG else None, None

    # ------------------------------------------------------------------------------------------ what torch asks a group

    def shutdown(self) -> None:
        self._leave()

    def abort(self) -> None:
        """End the group on all ranks, as a failure."""
        self._line.guarded.fail(RuntimeError("aborted by the program"))
        self._leave()

    def get_group_store(self) -> dist.Store:
        return self._group_store

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name

    def _set_group_desc(self, desc: str) -> None:
        self._names["desc"] = desc

    def getGroupName(self) -> str:
        return self._names["name"]

    def getGroupDesc(self) -> str:
        return self._names["desc"]

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    # Names of older versions of torch, and of its functional collectives.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _All(dist.Work):
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


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for each in args:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _flat(tensor: torch.Tensor, fill: bool = True) -> torch.Tensor:
    """The tensor itself as a flat one of the host, where it is that already; else memory for it, or a copy of it.

    Of its data alone: what autograd keeps must not take a collective for a change that it was not told of.
    """
    data = tensor.data
    if data.device.type == "cpu" and data.is_contiguous():
        return data.view(-1)
    if not fill:
        return torch.empty(data.numel(), dtype=data.dtype)
    return data.to("cpu").contiguous().view(-1)


def _put(tensor: torch.Tensor, host: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.data_ptr() != host.data_ptr():
        tensor.data.copy_(host.view(tensor.shape))


def _fill(targets: Sequence[torch.Tensor], one: torch.Tensor) -> None:
    for target, part in zip(targets, one.split([target.numel() for target in targets]), strict=True):
        target.copy_(part)


def _owned_by(owner: int, count: int, world: int) -> list[int]:
    return [0] * (owner + 1) + [count] * (world - owner)


def _one_after_another(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0, *itertools.accumulate(tensor.numel() for tensor in tensors)]


def _rows(flat: torch.Tensor, shaped: torch.Tensor, splits: Sequence[int], world: int) -> list[torch.Tensor]:
    """The part of each rank, flat."""
    if not splits:
        if flat.numel() % world:
            raise ValueError(f"{tuple(shaped.shape)} does not divide into equal parts for {world} ranks; give splits")
        return list(flat.view(world, -1).unbind()) if flat.numel() else [flat] * world
    return list(flat.split([count * (flat.numel() // max(1, shaped.shape[0])) for count in splits]))


def _letter(tag: int) -> int:
    if not 0 <= tag < MOST_LETTERS:
        raise ValueError(f"a message's tag is {tag}; the backend {NAME} has those from 0 to {MOST_LETTERS - 1}")
    return FIRST_LETTER + tag
