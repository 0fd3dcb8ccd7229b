"""The backend "phalanx" where its ranks' tensors are an accelerator's and travel through the host."""

from typing import Any

import torch
import torch.distributed as dist

from phalanx.core.placement import Placement
from tests.accelerator.device import needs_device, run_on_device
from tests.helpers import process_group

pytestmark = needs_device


def chained(placement: Placement) -> list[Any]:
    """Sums that callbacks of a future have halved, as the hook of a model's gradients does, read in a stream of one's
    own; and the device that was current in the callbacks."""
    device = torch.device(placement.device)
    torch.accelerator.set_device_index(device.index)
    current: list[int] = []

    def halve(done: torch.futures.Future[Any]) -> torch.Tensor:
        current.append(torch.accelerator.current_device_index())
        (value,) = done.value() if isinstance(done.value(), list) else (done.value(),)
        for _ in range(20):
            value = value / 2 * 2
        return value / 2

    with process_group(placement, backend="phalanx"), torch.Stream(device) as stream:
        tensor = torch.full((100,), 3.0 + placement.rank, device=device)
        future = dist.all_reduce(tensor, async_op=True).get_future().then(halve)  # type: ignore[union-attr]
        halved = future.wait() + 0  # in this stream
        stream.synchronize()
        return [halved.cpu().unique().tolist(), current]


def test_what_hangs_on_a_future_runs_on_its_device_and_before_what_waits_for_it() -> None:
    for order in ("lazy", "side_last", "main_last"):
        found = run_on_device(chained, 2, order=order, devices=3, on=["sim:1", "sim:1"])
        assert found == [[[3.5], [1]]] * 2, order


def strided(placement: Placement) -> list[float]:
    """What another stream reads of a sum whose elements are not one behind the other, once it has been waited for."""
    device = torch.device(placement.device)
    with process_group(placement, backend="phalanx"), torch.Stream(device) as stream:
        tensor = torch.full((60, 40), 3.0 + placement.rank, device=device).t()
        stream.synchronize()
        dist.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
        read = tensor + 0
        stream.synchronize()
        return read.cpu().unique().tolist()


def test_a_sum_in_memory_with_gaps_is_there_for_all_streams() -> None:
    for order in ("lazy", "side_last", "main_last"):
        assert run_on_device(strided, 2, order=order) == [[7.0]] * 2, order
