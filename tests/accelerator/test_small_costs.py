"""What would cost a little for each micro-batch or unit: memory pinned, events made."""

from typing import Any

from phalanx.core.placement import Placement
from tests.accelerator.device import needs_device, run_on_device

pytestmark = needs_device


def sent(placement: Placement) -> list[Any]:
    """A batch on the device, whose host tensors are gone and overwritten before it is computed; and how much was
    pinned for it."""
    import torch

    from phalanx.tasks.task import Batch

    inputs = {
        "tokens": torch.arange(15).view(3, 5),
        "mask": torch.tensor([[True], [False], [True]]),
        "one": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "rows": torch.arange(6, dtype=torch.float64).view(2, 3).T,
        "offsets": torch.tensor([0, 7], dtype=torch.int32).expand(3, 2),
    }
    pinned: list[int] = []
    inner = torch.empty

    def noted(*size: Any, **how: Any) -> torch.Tensor:
        made: torch.Tensor = inner(*size, **how)
        pinned.extend([made.nbytes] * bool(how.get("pin_memory")))
        return made

    torch.empty = noted  # type: ignore[assignment]
    kept = {name: tensor.clone() for name, tensor in inputs.items()}
    batch = Batch(inputs, 3, torch.tensor([4, 5, 6])).to(placement.device)
    torch.empty = inner
    for tensor in (inputs["tokens"], inputs["rows"]):
        tensor.zero_()
    batch.inputs["samples"], kept["samples"] = batch.samples, torch.tensor([4, 5, 6])
    alike = [
        tensor.device.type == "sim" and tensor.dtype == kept[name].dtype and torch.equal(tensor.cpu(), kept[name])
        for name, tensor in batch.inputs.items()
    ]
    return [alike, pinned]


def test_a_batch_travels_as_one() -> None:
    """7 tensors, each begun at a multiple of 64 bytes; one of them is empty."""
    assert run_on_device(sent, order="lazy") == [[[True] * 7, [128 + 5 * 64]]]


def events(placement: Placement) -> list[int]:
    """How many events there are after the first round of marks and after a tenth."""
    import torch

    from phalanx.comm.comm_thread import CommThread, StreamEvent
    from phalanx.system.event_times import EventTimes, seconds_between

    device, made = torch.device(placement.device), []
    inner = torch.Event

    def noted(*args: Any, **how: Any) -> torch.Event:
        made.append(inner(*args, **how))
        return made[-1]

    torch.Event = noted  # type: ignore[assignment, misc]
    clock, mark, counts = EventTimes(device), StreamEvent(CommThread(device)), []
    for _ in range(10):
        spans = [(clock.record(), clock.record()) for _ in range(3)]
        assert all(seconds_between(*span) >= 0 for span in spans)
        clock.recycle(*(each for span in spans for each in span))
        mark.record()
        mark.wait()
        counts.append(len(made))
    return [counts[0], counts[-1]]


def test_events_are_used_again() -> None:
    assert run_on_device(events) == [[7, 7]]
