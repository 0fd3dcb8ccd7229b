"""One bucket on one rank during training: whole parameters, gradients to be reduced, and this rank's shard."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from phalanx.comm.comm_thread import POLL_S, CommThread, StreamEvent
from phalanx.engine.interface import Precision
from phalanx.layout.buckets import Bucket, BucketMember, Fragment
from phalanx.layout.memory_model import IN_FLIGHT
from phalanx.optim.update import Shard, Slot
from phalanx.system import accelerator

AllocateWorkingMemory = Callable[
    [int, torch.dtype], torch.Tensor | None
]  # elements and type -> memory with any content


def no_working_memory(elements: int, dtype: torch.dtype) -> None:
    """The allocator of working memory of a run without any: returns None, so that the caller allocates."""
    return None


class GradientBufferPool:
    """A pool of gradient buffers, each returned once its gradient is reduced. A rank that computes faster than the
    communication thread sends waits here, but never while that thread waits for the main thread."""

    def __init__(self, max_buffers: int = IN_FLIGHT, keeps: bool = True) -> None:
        """`max_buffers` limits the buffers of one size; `keeps`: returned buffers are reused, else their memory goes
        back to the allocator."""
        self._max_buffers, self._keeps = max_buffers, keeps
        self._free: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, StreamEvent]]] = {}
        self._taken: dict[tuple[int, torch.dtype], int] = {}
        self._changed = threading.Condition()
        self._awaited: list[StreamEvent] = []  # by the communication thread

    def acquire(self, like: torch.Tensor, elements: int, comm_thread: CommThread, limited: bool) -> torch.Tensor:
        """Take an uninitialized buffer of `elements`; `limited`: wait while `max_buffers` of that size are in use."""
        size = (elements, like.dtype)
        with comm_thread.report_wait(), self._changed:
            while (
                limited
                and self._taken.get(size, 0) >= self._max_buffers
                and all(mark.is_recorded for mark in self._awaited)
            ):
                self._changed.wait(POLL_S)
                comm_thread.raise_error()
            self._taken[size] = self._taken.get(size, 0) + 1
            free = self._free.setdefault(size, [])
            if not free:
                return like.new_empty(elements)
            buffer, given_back = free.pop()
        given_back.wait()  # the device, not the host: it was set before
        return buffer

    def release(self, buffer: torch.Tensor, comm_thread: CommThread) -> None:
        """Return a buffer to the pool. Runs on the communication thread."""
        size = (buffer.numel(), buffer.dtype)
        if not self._keeps:
            accelerator.record_stream(buffer)
        here = StreamEvent(comm_thread)
        here.record()
        with self._changed:
            self._taken[size] -= 1
            if self._keeps:
                self._free[size].append((buffer, here))
            self._changed.notify_all()

    @contextlib.contextmanager
    def report_blocked_thread(self, mark: StreamEvent) -> Iterator[None]:
        """The communication thread waits for the main thread to reach `mark`."""
        with self._changed:
            self._awaited.append(mark)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._awaited.remove(mark)


@dataclass
class BucketGradient:
    """A bucket's gradient from its first micro-batch until it is summed over the ranks."""

    first_of_step: bool  # of the step
    buffer: torch.Tensor | None
    ready: StreamEvent
    members_with_grad: set[int] = field(default_factory=set)  # members that have one, from any micro-batch
    pending_members: set[int] = field(default_factory=set)  # members that this micro-batch has none for yet
    submitted: bool = False  # now owned by the communication thread


class RankBucket:
    """A bucket on this rank: views of its parameters, its gradient, and this rank's range of it."""

    def __init__(
        self,
        bucket: Bucket,
        rank: int,
        device: torch.device,
        precision: Precision,
        comm_thread: CommThread,
        pool: GradientBufferPool | None,
        working_memory: AllocateWorkingMemory = no_working_memory,
    ) -> None:
        """`rank` is the rank within the group that one copy of the state is sharded over. Without a `pool` the bucket
        keeps one gradient buffer. `working_memory` allocates persistent buffers."""
        self.bucket, self.fragments = bucket, tuple(bucket.fragments(rank))
        self.names = [member.parameter.name for member in bucket.members]
        self._own = [part.range(rank) for part in bucket.parts]  # elements of the bucket
        self._precision, self._comm_thread, self._pool = precision, comm_thread, pool
        self.gathered_dtype = precision.transport  # in which elements are sent to be gathered
        own = working_memory(bucket.elements, precision.compute)
        self.values = torch.empty(bucket.elements, dtype=precision.compute, device=device) if own is None else own
        self._transport_buffer: torch.Tensor | None = None
        self._parameters: list[nn.Parameter] = []
        self._views: list[torch.Tensor] = []  # of the bucket, by parameter
        self.names_with_grad: set[str] = set()  # in this step, on this rank
        if not bucket.trained:
            return
        # Uninitialized: parameters without a gradient are zeroed on submission.
        self._sums = None if pool is not None else working_memory(bucket.elements, precision.master)
        if pool is None and self._sums is None:
            self._sums = self.values.new_empty(bucket.elements, dtype=precision.master)
        # Reduced gradient of this rank's range of each part.
        self.reduced_gradient = (
            self._by_part(self.values.new_zeros(bucket.count_elements(rank), dtype=precision.master))
            if self._sums is None
            else [self._sums[start:stop] for start, stop in self._own]
        )
        self.gradient = BucketGradient(True, self._sums, StreamEvent(comm_thread), submitted=True)

    def _by_part(self, own: torch.Tensor) -> list[torch.Tensor]:
        return list(own.split([stop - start for start, stop in self._own]))

    # ------------------------------------------------------------------------------------------------------- parameters

    def adopt_parameters(self, parameters: Sequence[nn.Parameter], replaced: dict[int, nn.Parameter]) -> None:
        """Make whole parameters views of the bucket. A parameter on meta is replaced; `replaced` maps the id of the old
        parameter to the new one."""
        with torch.no_grad():
            for gap in self.bucket.gaps:  # all else is filled or gathered before anything reads it
                self.values[gap].zero_()
            for member, parameter in zip(self.bucket.members, parameters, strict=True):
                # Through `data`, so that autograd does not see a later all-gather as an in-place change.
                view = self.values[member.offset : member.end].view(member.parameter.shape).data
                self._views.append(view)
                if parameter.is_meta:
                    replaced[id(parameter)] = nn.Parameter(view, requires_grad=parameter.requires_grad)
                else:
                    view.copy_(parameter)
                    parameter.data = view
        self._parameters = [replaced.get(id(parameter), parameter) for parameter in parameters]

    def register_grad_hooks(
        self, accumulate_gradient: Callable[["RankBucket", int, torch.Tensor], None]
    ) -> list[RemovableHandle]:
        """Call the method `accumulate_gradient` with the number of each member whose gradient a backward pass has
        completed."""
        # The garbage collector does not see what a tensor's hooks reference: only weak references let the model be
        # freed.
        here, method = weakref.ref(self), weakref.WeakMethod(accumulate_gradient)

        def completed(index: int, parameter: torch.Tensor) -> None:
            held, call = here(), method()
            if held is not None and call is not None:
                call(held, index, parameter)

        return [
            parameter.register_post_accumulate_grad_hook(functools.partial(completed, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def members(self) -> Iterator[tuple[BucketMember, torch.Tensor]]:
        """Yield each member parameter with its whole values, flat."""
        for member in self.bucket.members:
            yield member, self.values[member.offset : member.end]

    def fragment_values(self, fragment: Fragment) -> torch.Tensor:
        """The elements of a whole parameter that `fragment` covers, in the compute type."""
        return _at(self.values, fragment)

    def frozen_shards(self) -> Iterator[Shard]:
        """The shards of a frozen bucket that this rank fills."""
        for member, values in self.members():
            yield Shard(member.parameter.name, 0, values.numel(), member.parameter.shape, values, trainable=False)

    def reshard(self) -> None:
        """Free the memory of the whole parameters (ZeRO 3; does nothing here)."""

    def unshard(self) -> None:
        """Allocate the memory of the whole parameters again (ZeRO 3; does nothing here)."""

    def stage_masters(self, slot: Slot) -> None:
        """Copy this rank's master parameters to the input of the all-gather."""
        self._stage((each, slot[each.key]["param"]) for each in self.fragments)

    def _stage(self, shards: Iterable[tuple[Fragment, torch.Tensor]]) -> None:
        # The input of the all-gather: the parameters themselves, unless they are sent in another type.
        departing = self.values
        if self._precision.transport != self._precision.compute:
            departing = self.values.new_empty(self.bucket.elements, dtype=self._precision.transport)
            self._transport_buffer = departing
        for gap in self.bucket.gaps:  # quantized in one block with others, so it must be defined
            departing[gap].zero_()
        pairs = [(_at(departing, each), values) for each, values in shards]
        pairs = [(target, master) for target, master in pairs if target.data_ptr() != master.data_ptr()]
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [master for _, master in pairs])

    def prepare_gather(self, number: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """The all-gather of part `number`: its input, and a callback for when it has arrived."""
        part, travelling = self.bucket.parts[number], self._transport_buffer
        if travelling is None:
            return self.values[part.start : part.stop], lambda: None
        arriving = travelling[part.start : part.stop]

        def arrived() -> None:
            self.values[part.start : part.stop].copy_(arriving)
            if part is self.bucket.parts[-1]:
                self._transport_buffer = None

        return arriving, arrived

    @property
    def memory_ids(self) -> tuple[int, ...]:
        """Identify the parameters' memory; unchanged while that memory is freed and allocated again."""
        return (int(self.values.untyped_storage()._cdata),)

    # -------------------------------------------------------------------------------------------------------- gradients

    def begin_step(self) -> None:
        self.names_with_grad = set()
        self.gradient = BucketGradient(True, self._sums, StreamEvent(self._comm_thread))

    def begin_micro_batch(self, reduces: bool) -> None:
        """Start a micro-batch; `reduces`: its gradients, added to those accumulated so far, are reduced once
        complete."""
        if self.gradient.submitted:
            self.gradient = BucketGradient(False, self._sums, StreamEvent(self._comm_thread))
        self._reduces = reduces
        self.gradient.pending_members = set(range(len(self.names)))

    def expect_last_backward(self) -> None:
        """The next backward pass is this bucket's last in the micro-batch: reduce its gradients as they complete."""
        self._reduces = True
        self.gradient.pending_members = set(range(len(self.names)))

    def gradient_sum(self, index: int) -> torch.Tensor:
        """The locally accumulated gradient of a parameter, flat; additions to it in place are reduced with it."""
        gradient, member = self.gradient, self.bucket.members[index]
        assert not gradient.submitted, self.names[index]
        sums = self._buffer()[member.offset : member.end]
        if index not in gradient.members_with_grad:
            gradient.members_with_grad.add(index)
            self.names_with_grad.add(self.names[index])
            sums.zero_()
        return sums

    def accumulate_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Accumulate a parameter's gradient into the bucket, if it has one."""
        if (grad := parameter.grad) is None:
            return
        parameter.grad = None
        gradient = self.gradient
        if gradient.submitted:
            raise RuntimeError(
                f"parameter {self.names[index]} got a second gradient after its first was sent; call backward() once "
                "within engine.micro_batch(), of the sum of the losses"
            )
        member = self.bucket.members[index]
        sums = self._buffer()[member.offset : member.end].view(member.parameter.shape)
        if index in gradient.members_with_grad:
            sums.add_(grad)
        else:
            sums.copy_(grad)
            gradient.members_with_grad.add(index)
            self.names_with_grad.add(self.names[index])
        gradient.pending_members.discard(index)
        if self._reduces and not gradient.pending_members:
            self.submit_gradient()

    def accumulate_all(self) -> None:
        for index, parameter in enumerate(self._parameters):
            self.accumulate_gradient(index, parameter)

    def finish_backward(self) -> None:
        """Finish the bucket's backward pass: no more gradients come in this micro-batch."""
        if self._reduces:
            self.submit_gradient()

    def submit_gradient(self) -> None:
        """Submit the gradient to the communication thread; parameters without one count as zero."""
        gradient = self.gradient
        if gradient.submitted:
            return
        buffer = self._buffer()
        for index in set(range(len(self.names))) - gradient.members_with_grad:
            member = self.bucket.members[index]
            buffer[member.offset : member.end].zero_()
        for gap in self.bucket.gaps:
            buffer[gap].zero_()
        gradient.submitted = True
        gradient.ready.record()

    def _buffer(self) -> torch.Tensor:
        if self.gradient.buffer is None:
            assert self._pool is not None
            self.gradient.buffer = self._pool.acquire(
                self.reduced_gradient[0], self.bucket.elements, self._comm_thread, self._reduces
            )
        return self.gradient.buffer

    def prepare_reduce(
        self, gradient: BucketGradient, number: int
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
        """The reduce-scatter of part `number`: its input, its output, and a callback. Runs on the communication
        thread."""
        buffer, part, sum_so_far = gradient.buffer, self.bucket.parts[number], self.reduced_gradient[number]
        assert buffer is not None
        into = sum_so_far if gradient.first_of_step else torch.empty_like(sum_so_far)

        def summed() -> None:
            if not gradient.first_of_step:
                sum_so_far.add_(into)
            if self._pool is not None and part is self.bucket.parts[-1]:
                gradient.buffer = None
                self._pool.release(buffer, self._comm_thread)

        return buffer[part.start : part.stop], into, summed

    def gradient_of(self, fragment: Fragment) -> torch.Tensor:
        """The reduced gradient of a fragment."""
        return self._of(self.reduced_gradient, fragment)

    def _of(self, parts: Sequence[torch.Tensor], fragment: Fragment) -> torch.Tensor:
        """A fragment's elements of tensors that hold this rank's range, part by part."""
        first = fragment.offset - self._own[fragment.part][0]
        return parts[fragment.part][first : first + fragment.stop - fragment.start]


def _at(bucket: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    return bucket[fragment.offset : fragment.offset + fragment.stop - fragment.start]


def iterate_gradients(
    buckets: Sequence[RankBucket], replica_counts: Mapping[str, int]
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the reduced gradients of this rank's ranges, each with the number of ranks that replicate it within one
    model (`replica_counts`, by parameter; 1 if not named)."""
    for held in buckets:
        if not replica_counts:
            yield from ((part, 1) for part in held.reduced_gradient)
        else:
            names = ((fragment, fragment.parameter.name) for fragment in held.fragments)
            yield from ((held.gradient_of(fragment), replica_counts.get(name, 1)) for fragment, name in names)


def replace_meta_tensors(model: nn.Module, replaced: dict[int, nn.Parameter], device: torch.device) -> None:
    """Replace parameters on meta, and allocate buffers and parameters without elements on `device`."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter.is_meta and id(parameter) not in replaced:
                assert not parameter.numel(), key
                empty = torch.empty_like(parameter, device=device)
                replaced[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[key] = replaced.get(id(parameter), parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                on_meta = buffer.is_meta
                module._buffers[key] = torch.empty_like(buffer, device=device) if on_meta else buffer.to(device)
