"""What travels beside the computation does not hold the host: after it the device still has all its work to do."""

from collections.abc import Callable
from typing import Any

import torch

from phalanx.checkpoint.disk.snapshot import HostBuffer
from phalanx.checkpoint.memory.store import SharedMemoryStore
from phalanx.core.placement import Placement
from phalanx.optim.update import StatePiece
from phalanx.parallel.offload import MIN_BYTES, ActivationOffloader
from phalanx.system import accelerator
from phalanx.tasks.task import Batch
from tests.accelerator.device import needs_device, run_on_device

pytestmark = needs_device
ELEMENTS = 1000


def waiting() -> int:
    """Tasks that the device has been given and has not done."""
    from tests.accelerator import torch_sim

    return sum(torch_sim.pending().values())


def left(device: torch.device, work: Callable[[torch.Tensor], object]) -> int:
    """How many of three tasks before, and of those of `work`, are still to be done behind it."""
    given = torch.zeros(ELEMENTS, device=device)
    accelerator.synchronize(device)
    for number in range(3):
        given.fill_(number)
    work(given)
    return waiting()


def number_asked_for(placement: Placement) -> int:
    kept: list[Any] = []
    return left(torch.device(placement.device), lambda given: kept.append(accelerator.HostCopy([given[0]])))


def batch(placement: Placement) -> int:
    device = torch.device(placement.device)
    return left(device, lambda given: Batch({"tokens": torch.arange(5)}, 5, torch.arange(5)).to(device))


def input_that_leaves(placement: Placement) -> int:
    """The input of the first of four units, which is copied to the host."""
    device, mover = torch.device(placement.device), ActivationOffloader(4, 1)
    weight = torch.ones((), device=device, requires_grad=True)
    rows = torch.ones(MIN_BYTES // 4, device=device) * weight
    return left(device, lambda given: mover.forward(0, lambda each: each * each, rows))


def saved(placement: Placement) -> list[int]:
    """What waits when a save of five pieces comes to where it waits, and behind that."""
    device, found = torch.device(placement.device), []
    pieces = [StatePiece(f"p{number}", "param", 0, 10, torch.full((10,), 1.0, device=device)) for number in range(5)]
    inner = accelerator.synchronize

    def noted(device: torch.device) -> None:
        found.append(waiting())
        inner(device)
        found.append(waiting())

    accelerator.synchronize(device)
    accelerator.synchronize = noted
    HostBuffer().store(pieces)
    return found


class Slots:
    """A file of state that notes what a slot holds, and what the device has left to do, when it is committed."""

    def __init__(self, slot: dict[str, dict[str, torch.Tensor]]) -> None:
        self.slot, self.found = slot, list[Any]()

    def invalidate(self, slot: int) -> None:
        assert slot == 0

    def make_header(self, slot: int, header: dict[str, Any]) -> bytes:
        return b""

    def commit(self, slot: int, step: int, header: bytes) -> None:
        self.found += [waiting(), sorted(each["param"].sum().item() for each in self.slot.values())]


def kept(placement: Placement) -> list[Any]:
    """The same of a step's state that is copied into page-locked memory, and what is committed then."""
    device, memory = torch.device(placement.device), object.__new__(SharedMemoryStore)
    slot = {f"p{number}": {"param": torch.empty(10, pin_memory=True)} for number in range(5)}
    state = {f"p{number}": {"param": torch.full((10,), float(number), device=device)} for number in range(5)}
    memory._mesh, memory.slots, memory.in_place = type("Mesh", (), {"device": device}), [slot], False  # type: ignore[assignment]
    memory._file = file = Slots(slot)  # type: ignore[assignment]
    memory._replication = None
    inner, found = accelerator.synchronize_stream, []

    def noted(device: torch.device) -> None:
        found.append(waiting())
        inner(device)

    accelerator.synchronize(device)
    accelerator.synchronize_stream = noted
    memory._keep(0, {"step": 1}, state)
    return [*found, *file.found]


def test_a_step_is_committed_when_all_of_it_is_there_and_waited_for_once() -> None:
    assert run_on_device(kept) == [[5, 0, [0.0, 10.0, 20.0, 30.0, 40.0]]]


def test_a_number_is_asked_for_without_waiting_for_it() -> None:
    assert run_on_device(number_asked_for)[0] >= 3 + 1


def test_a_batch_is_sent_without_waiting_for_the_one_before() -> None:
    assert run_on_device(batch)[0] >= 3 + 1


def test_an_input_leaves_beside_the_computation() -> None:
    assert run_on_device(input_that_leaves)[0] >= 3 + 1


def test_a_save_waits_once_for_all_that_it_copies() -> None:
    assert run_on_device(saved) == [[5, 0]]
