"""What the simulated accelerator is for: a synchronisation that is missing is a wrong number, and no matter of luck."""

from typing import Any

import pytest

from phalanx.core.placement import Placement
from tests.accelerator.device import needs_device, run_on_device

pytestmark = needs_device
SIZE = 1000


def streams(placement: Placement, waits: bool) -> float:
    """A copy on a second stream of what the first one computes."""
    import torch

    side = torch.Stream(placement.device)
    source, target = (torch.zeros(SIZE, device=placement.device) for _ in range(2))
    torch.accelerator.synchronize()
    source.fill_(7.0)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        target.copy_(source)
        return target.mean().item()


def lent(placement: Placement, waits: bool) -> float:
    """A second stream's work on memory that the first one lets go of and uses again."""
    import torch

    side = torch.Stream(placement.device)
    source = torch.ones(SIZE, device=placement.device)
    torch.accelerator.synchronize()
    with side:
        doubled = source * 2
        if waits:
            source.record_stream(torch.accelerator.current_stream())
    del source
    torch.full((SIZE,), 5.0, device=placement.device)
    torch.accelerator.current_stream().synchronize()
    with side:
        return doubled.mean().item()


def borrowed(placement: Placement) -> float:
    """What FSDP2 does with its gradients: memory of a second stream, which the first one uses and lets go of, and which
    the second one uses again only after it has waited for the first."""
    import torch

    main, side = torch.accelerator.current_stream(), torch.Stream(placement.device)
    with side:
        source = torch.ones(SIZE, device=placement.device)
    main.wait_stream(side)
    doubled = source * 2
    del source
    side.wait_stream(main)
    with side:
        torch.full((SIZE,), 5.0, device=placement.device)
        torch.accelerator.current_stream().synchronize()
    return doubled.mean().item()


@pytest.mark.parametrize("order", ["lazy", "main_last", "random", "threads"])
def test_memory_stays_as_it_is_until_its_owner_uses_it_again(order: str) -> None:
    assert run_on_device(borrowed, order=order, delay_ms=5) == [2.0]


def to_host(placement: Placement, waits: bool) -> float:
    """A read of pinned memory into which a copy has been queued."""
    import torch

    source = torch.full((SIZE,), 3.0, device=placement.device)
    target = torch.empty(SIZE, pin_memory=True)
    target.copy_(source, non_blocking=True)
    event = torch.Event(placement.device)
    event.record()
    if waits:
        event.synchronize()
    return target.mean().item()


def to_device(placement: Placement, waits: bool) -> float:
    """A write to pinned memory from which a copy has been queued."""
    import torch

    source = torch.full((SIZE,), 3.0).pin_memory()
    target = torch.empty(SIZE, device=placement.device)
    target.copy_(source, non_blocking=True)
    if waits:
        torch.accelerator.synchronize()
    source.fill_(9.0)
    return target.mean().item()


SEEN = [
    (streams, "lazy", 7.0), (streams, "main_last", 7.0),
    (lent, "lazy", 2.0), (lent, "side_last", 2.0),
    (to_host, "lazy", 3.0), (to_host, "main_last", 3.0),
    (to_device, "lazy", 3.0), (to_device, "main_last", 3.0),
]  # fmt: skip


@pytest.mark.parametrize(("program", "order", "right"), SEEN)
def test_a_missing_synchronisation_is_a_wrong_number(program: Any, order: str, right: float) -> None:
    wrong = run_on_device(program, order=order, waits=False)
    assert wrong != [right]
    assert run_on_device(program, order=order, waits=True) == [right]


@pytest.mark.parametrize("program", [streams, lent, to_host, to_device])
@pytest.mark.parametrize("order", ["random", "threads"])
def test_what_is_synchronised_is_right_by_chance_too(program: Any, order: str) -> None:
    right = {each: number for each, _, number in SEEN}[program]
    assert run_on_device(program, order=order, delay_ms=5, waits=True) == [right]


def late(placement: Placement) -> list[float]:
    return [streams(placement, waits=False) for _ in range(30)]


def test_delays_show_what_threads_alone_may_hide() -> None:
    assert set(run_on_device(late, order="threads", delay_ms=20)[0]) != {7.0}
