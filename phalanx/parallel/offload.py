"""Activation offloading: inputs of checkpointed units move to host memory and back while others compute.

A checkpointed unit saves only its inputs. With many units and long sequences these are most of what a device holds
between the two passes. Here an input stays on the device only while the pass is at most `horizon` units away from its
unit: the copy to the host starts when its unit begins, and the device's copy is freed `horizon` units later; it is
prefetched `horizon` units before its unit's backward pass. So a device holds at most `horizon` + 1 inputs at any depth,
and the inputs of the last `horizon` units, which the backward pass needs first, stay.

On an accelerator copies run in a separate stream, to and from pinned memory; no host thread waits. On a CPU the same
code copies synchronously into other buffers of the same memory, which saves nothing. Values are never rounded, so
gradients are bitwise the same. Source: Rhu et al., "vDNN", 2016.
"""

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from phalanx.system import accelerator
from phalanx.system import memory as host_memory

MIN_BYTES = 1024  # smaller tensors are not worth a copy

Key = tuple[Any, ...]  # identifies a live tensor


def offload(units: Sequence[nn.Module], horizon: int) -> "ActivationOffloader":
    """Offload the inputs that checkpointed `units`, in order of use, save for the backward pass to host memory.

    Tensor arguments of a unit (not within tuples) that need a gradient are moved. Masks, tables and position ids,
    parameters, tensors of less than MIN_BYTES, and overlapping views, whose strides a copy could not have, stay. The
    forward method is replaced in place: call it after units were checkpointed and compiled, since it is the outermost.
    """
    mover = ActivationOffloader(len(units), horizon)
    for number, unit in enumerate(units):
        unit.forward = functools.partial(mover.forward, number, unit.forward)
    return mover


class HostBufferPool:
    """A pool of reused host buffers, as many as were ever in use at one time."""

    def __init__(self) -> None:
        self.make: Callable[[int, bool], Tensor] = _host_buffer
        self.allocations = 0  # number of allocations so far
        self.bytes = 0  # in all buffers
        self._free: list[Tensor] = []
        self._lock = threading.RLock()  # a buffer may be returned by another thread, even while this one takes another

    def take(self, size: int, pinned: bool) -> Tensor:
        """Take a flat buffer, the smallest of at least `size` bytes. Raises MemoryError when host memory runs out."""
        with self._lock:
            fitting = [number for number, buffer in enumerate(self._free) if buffer.nbytes >= size]
            if fitting:
                return self._free.pop(min(fitting, key=lambda number: self._free[number].nbytes))
            if self._free:  # too small, since micro-batches have grown
                self.bytes -= self._free.pop().nbytes
            size = host_memory.pinned_bytes(size) if pinned else size
            if pinned and size > (free := host_memory.free_bytes()):
                raise MemoryError(
                    f"an input of {size / 2**20:,.0f} MiB was to wait in host memory, of which {free / 2**20:,.0f} MiB "
                    f"are left beside {self.bytes / 2**20:,.0f} MiB that wait already"
                )
            buffer = self.make(size, pinned)
            self.allocations += 1
            self.bytes += buffer.nbytes
            return buffer

    def give(self, buffer: Tensor) -> None:
        with self._lock:
            self._free.append(buffer)


def _host_buffer(size: int, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


class ActivationOffloader:
    """Offloads the inputs of units; `out_bytes` and `back_bytes` count the bytes moved so far."""

    def __init__(self, units: int, horizon: int) -> None:
        assert horizon >= 1
        self.horizon = horizon
        self.pool = HostBufferPool()
        self.out_bytes = self.back_bytes = 0
        self._units = units
        self._pass = _Pass(self)
        self._unit = -1  # the one that the forward pass has reached
        self._leaving: deque[_PendingCopy] = deque()
        self._streams: dict[torch.device, Any] = {}

    def forward(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run unit `number`'s forward pass. Raises RuntimeError where a unit has changed an earlier input in place."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if number <= self._unit:
            self._begin()
        self._unit = number
        # What a compiled unit saves besides its inputs, such as parameters, is not moved.
        inputs = {_key(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and _movable(each)}
        with saved_tensors_hooks(functools.partial(self._pack, self._pass, number, inputs), _unpack):
            output = forward(*args, **kwargs)
        while self._leaving and self._leaving[0].unit <= number - self.horizon:
            self._leaving.popleft().end(checked=True)
        return output

    def stream(self, device: torch.device) -> Any:
        """The stream of copies; None on a CPU. One for both directions, so that a buffer is read before it is
        reused."""
        if device not in self._streams:
            self._streams[device] = accelerator.side_stream(device)
        return self._streams[device]

    def _begin(self) -> None:
        """Start a forward pass; copies of one that an exception has ended may still be in flight."""
        while self._leaving:
            self._leaving.popleft().end(checked=False)
        self._pass = _Pass(self)

    def _pack(self, turn: "_Pass", unit: int, inputs: set[Key], tensor: Tensor) -> Any:
        """The object that autograd saves in place of a tensor."""
        if tensor.is_leaf:  # includes parameters, whose memory may have moved by the backward pass
            return tensor
        if not _movable(tensor) or (key := _key(tensor)) not in inputs:
            return _DeviceInput(turn, unit, tensor)
        if (moved := turn.find_offloaded(key, tensor)) is not None:
            moved.users += 1
            return moved
        if unit >= self._units - self.horizon:
            return _DeviceInput(turn, unit, tensor)
        moved = _OffloadedInput(turn, unit, tensor)
        self._leaving.append(_PendingCopy(unit, tensor, moved.copied_out))
        turn.add(key, tensor, moved)
        return moved


class _Pass:
    """A forward pass and its backward pass, with the offloaded inputs of their units."""

    def __init__(self, mover: ActivationOffloader) -> None:
        self.mover = mover
        # Weak references, so that what autograd has freed returns its buffer at once.
        self._of_unit: dict[int, list[weakref.ref[_OffloadedInput]]] = {}
        self._known: dict[Key, tuple[StorageWeakRef, int, weakref.ref[_OffloadedInput]]] = {}

    def add(self, key: Key, tensor: Tensor, moved: "_OffloadedInput") -> None:
        here = weakref.ref(moved)
        self._of_unit.setdefault(moved.unit, []).append(here)
        self._known[key] = StorageWeakRef(tensor.untyped_storage()), tensor._version, here

    def find_offloaded(self, key: Key, tensor: Tensor) -> "_OffloadedInput | None":
        """The offloaded copy of `tensor`, if it was the input of another unit."""
        storage, version, here = self._known.get(key, (None, 0, None))
        if storage is None or here is None or storage.expired() or version != tensor._version:
            return None  # or another tensor at the same address
        return here()

    def prefetch_before(self, unit: int) -> None:
        """Prefetch the inputs of the `horizon` units before `unit`."""
        for number in range(unit - 1, unit - 1 - self.mover.horizon, -1):
            for here in self._of_unit.get(number, ()):
                if (moved := here()) is not None:
                    moved.prefetch()


class _PendingCopy:
    """The device's copy of an input during its copy to the host; its memory must not be reused before it is read."""

    def __init__(self, unit: int, tensor: Tensor, left: torch.Event | None) -> None:
        self.unit, self._tensor, self._left = unit, tensor, left
        self._version = tensor._version

    def end(self, checked: bool) -> None:
        """Free the tensor. Device work queued from here on runs after the copy."""
        _come_after(self._tensor.device, self._left)
        if checked and self._tensor._version != self._version:
            raise RuntimeError(
                f"an input of block {self.unit} was changed in place while it was copied to the host for the backward "
                "pass, which needs it unchanged; change a copy of it"
            )


class _DeviceInput:
    """An input that stays on the device; detects in-place changes, as autograd does."""

    def __init__(self, turn: _Pass, unit: int, tensor: Tensor) -> None:
        self._turn, self._unit, self._version = turn, unit, tensor._version
        # Not the tensor itself: a unit's result that the unit also saves would keep itself alive.
        self._tensor = tensor.detach()

    def get(self) -> Tensor:
        self._turn.prefetch_before(self._unit)
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that the backward pass of block {self._unit} needs was "
                "changed in place after the block was called; change a copy of it"
            )
        return self._tensor


class _OffloadedInput:
    """An input on the host; also on the device from its prefetch until its last use."""

    _buffer: Tensor | None = None
    _back: Tensor | None = None
    _arrived: torch.Event | None = None

    def __init__(self, turn: _Pass, unit: int, tensor: Tensor) -> None:
        self.unit, self.users = unit, 1
        self._turn = turn
        self._size, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._bytes = tensor.numel() * tensor.itemsize
        self._buffer = turn.mover.pool.take(self._bytes, pinned=self._device.type != "cpu")
        self.copied_out = self._copy(_flat(tensor.detach()), self._host())
        turn.mover.out_bytes += self._bytes

    def prefetch(self) -> None:
        """Start the copy back to the device, unless it was started."""
        if self._back is not None or self.users < 1:
            return
        self._back = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
        # The copy must not begin before earlier work on this memory has finished: it runs after all that is queued.
        self._arrived = self._copy(self._host(), _flat(self._back))
        self._turn.mover.back_bytes += self._bytes

    def get(self) -> Tensor:
        """The input on the device; work queued next runs after its arrival."""
        self.users = max(self.users, 1)  # for a retained graph with several backward passes
        self.prefetch()
        self._turn.prefetch_before(self.unit)
        tensor = self._back
        assert tensor is not None
        _come_after(self._device, self._arrived)
        self._arrived = None
        self.users -= 1
        if not self.users:
            self._back = None
        return tensor

    def _host(self) -> Tensor:
        assert self._buffer is not None
        return self._buffer[: self._bytes].view(self._dtype)

    def _copy(self, source: Tensor, target: Tensor) -> torch.Event | None:
        """Copy after all queued work; returns an event recorded after the copy."""
        stream = self._turn.mover.stream(self._device)
        with torch.no_grad():
            if stream is None:
                target.copy_(source)
                return None
            stream.wait_event(accelerator.record_event(self._device))
            with stream:
                target.copy_(source, non_blocking=True)
                return accelerator.record_event(self._device)

    def __del__(self) -> None:
        if self._buffer is None or sys.is_finalizing():
            return
        if self._back is not None:  # prefetched but not used: its memory is not free before the copy has ended
            _come_after(self._device, self._arrived)
        self._turn.mover.pool.give(self._buffer)


def _unpack(saved: Any) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.get()


def _come_after(device: torch.device, event: torch.Event | None) -> None:
    """Work that this thread queues next on the device waits for the event."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)


def _key(tensor: Tensor) -> Key:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _movable(tensor: Tensor) -> bool:
    """Whether the tensor can be copied in memory order, and is large enough for that to pay."""
    if tensor.is_leaf or is_traceable_wrapper_subclass(tensor) or tensor.numel() * tensor.itemsize < MIN_BYTES:
        return False
    step = 1  # stride that the next dim must have
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's elements in memory order, 1-D."""
    return tensor.as_strided((tensor.numel(),), (1,))
