"""What is compiled for a device's tensors serves any division of a step, as the same on the host's does.

There attention asks whether the device has a kernel, and other paths are taken where it has none.
"""

import functools
from typing import Any

import pytest

from phalanx.core.placement import Placement
from tests.accelerator.curves import EVERYTHING
from tests.accelerator.device import needs_device, run_on_device
from tests.helpers import some

pytestmark = needs_device


def recompiled(placement: Placement, family: str, packed: bool) -> list[Any]:
    """Frames compiled for the first two sizes of micro-batches, and for all of three other divisions; whether the
    losses are those of what is not compiled."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    from phalanx.parallel.parallelize import compile_units
    from tests.unit import test_compile as host

    counter = CompileCounterWithBackend("eager")  # the simulated device has no compiler, and the guards are the same
    torch.compile = functools.partial(torch.compile, backend=counter)  # type: ignore[assignment]
    compiled, plain = (host.model(family).to(placement.device, torch.float32) for _ in range(2))
    compile_units(compiled, compiled.blocks(), sizes_change=True)
    for sequences in (4, 1):
        host.loss(compiled, sequences, packed=packed)
    first, alike = counter.frame_count, []
    for sequences in (5, 1, 3, 2, 7):
        found, wanted = (host.loss(each, sequences, packed=packed).item() for each in (compiled, plain))
        alike.append(abs(found - wanted) < 1e-4 * abs(wanted))
    return [first, counter.frame_count, all(alike)]


CASES = [("llama", True), ("bert", False)]
MORE = [("llama", False), ("qwen2", False), ("qwen2", True), ("lora", False), ("lora", True)]


@pytest.mark.parametrize(("family", "packed"), CASES + MORE if EVERYTHING else some(CASES, 0))
def test_other_divisions_compile_nothing_anew_for_a_device(family: str, packed: bool) -> None:
    """Whole blocks: a break in one is an error, as where it is compiled for good."""
    ((first, last, alike),) = run_on_device(recompiled, family=family, packed=packed)
    assert 0 < first <= 8
    assert last == first
    assert alike
