"""The simulated accelerator by itself: what it computes, what it shows, and what it refuses."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from phalanx.core.errors import is_out_of_memory
from phalanx.core.placement import Placement
from tests.accelerator.device import ORDERS, needs_device, run_on_device, sim_environment
from tests.helpers import ROOT, run_ranks

pytestmark = needs_device
SIZE = 1000


def losses(device: str) -> Any:
    """Of five steps with a dropout-free network, its parameters at the end in the last place."""
    import torch

    torch.manual_seed(0)
    inputs, labels = torch.randn(8, 64), torch.arange(8) % 10
    layers = [torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 10)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    found = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*torch.stack(found).tolist(), [each.tolist() for each in model.parameters()]]


def same_as_on_cpu(placement: Placement) -> list[Any]:
    import torch

    from tests.accelerator import torch_sim

    same = losses("cpu") == losses(placement.device)
    torch.accelerator.synchronize()
    return [same, sorted(torch_sim.counts()), sum(torch_sim.pending().values())]


@pytest.mark.parametrize("order", ORDERS)
def test_training_is_bitwise_that_of_the_cpu(order: str) -> None:
    """And no operation of a step makes the host wait."""
    assert run_on_device(same_as_on_cpu, order=order, delay_ms=1) == [[True, ["queued"], 0]]


def left_waiting(placement: Placement) -> list[int]:
    """Kernels of the main stream and of another one that have not run when 40 were queued in each, and nobody has
    waited; in the order `threads`, once they have had time."""
    import torch

    from tests.accelerator import torch_sim

    side = torch.Stream(placement.device)
    ours, theirs = torch.zeros(SIZE, device=placement.device), torch.zeros(SIZE, device=placement.device)
    torch.accelerator.synchronize()
    for _ in range(40):
        ours.add_(1)
        with side:
            theirs.add_(1)
    until = time.monotonic() + (20 if os.environ["SIM_ORDER"] == "threads" else 0)
    while sum(torch_sim.pending().values()) and time.monotonic() < until:
        time.sleep(0.01)
    left = torch_sim.pending()
    return [left.pop("0/0"), sum(left.values())]


def test_each_order_runs_what_it_says() -> None:
    found = {order: run_on_device(left_waiting, order=order)[0] for order in ORDERS}
    main, side = found.pop("random")
    assert 0 < main + side < 80
    none, all_of_them = 0, 40
    assert found == {
        "eager": [none, none], "lazy": [all_of_them, all_of_them], "threads": [none, none],
        "side_last": [none, all_of_them], "main_last": [all_of_them, none],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- memory


def poisoned(placement: Placement) -> list[Any]:
    """Of fresh memory, memory that was let go of, and pinned memory."""
    import torch

    fresh = torch.empty(SIZE, device=placement.device).isnan().all().item()
    used = torch.ones(SIZE, device=placement.device)
    address = used.data_ptr()
    del used
    again = torch.empty(SIZE, device=placement.device)
    pinned = torch.empty(SIZE, pin_memory=True)
    return [fresh, again.data_ptr() == address, again.isnan().all().item(), pinned.isnan().all().item()]


def test_memory_that_nobody_has_written_is_no_number() -> None:
    assert run_on_device(poisoned, order="lazy") == [[True, True, True, True]]


def by_stream(placement: Placement) -> list[bool]:
    """Whether memory that a second stream has let go of is used again by the first one, and by itself."""
    import torch

    side = torch.Stream(placement.device)
    with side:
        address = torch.ones(SIZE, device=placement.device).data_ptr()
    other = torch.empty(SIZE, device=placement.device)
    with side:
        own = torch.empty(SIZE, device=placement.device)
    return [other.data_ptr() == address, own.data_ptr() == address]


def test_memory_is_cached_by_stream() -> None:
    assert run_on_device(by_stream, order="lazy") == [[False, True]]


def pinned_again(placement: Placement) -> list[Any]:
    """Pinned memory is let go of while a copy from it is queued, and after that copy is done."""
    import torch

    target = torch.empty(SIZE, device=placement.device)
    source = torch.ones(SIZE).pin_memory()
    address = source.data_ptr()
    target.copy_(source, non_blocking=True)
    del source
    other = torch.full((SIZE,), 9.0).pin_memory()
    early = other.data_ptr() == address
    mean = target.mean().item()
    return [early, mean, torch.empty(SIZE, pin_memory=True).data_ptr() == address]


def test_pinned_memory_is_given_out_again_only_after_its_copies() -> None:
    assert run_on_device(pinned_again, order="lazy") == [[False, 1.0, True]]


def full(placement: Placement) -> list[Any]:
    import torch

    free, total = torch.accelerator.get_memory_info()
    small = [torch.empty(1 << 20, dtype=torch.uint8, device=placement.device) for _ in range(6)]
    peak = torch.accelerator.max_memory_allocated()
    try:
        torch.empty(3 << 20, dtype=torch.uint8, device=placement.device)
        said = ""
    except torch.OutOfMemoryError as error:
        said = str(error)
    small.clear()  # kept by the allocator, until there is no other way
    torch.empty(7 << 20, dtype=torch.uint8, device=placement.device)
    retries = torch.accelerator.memory_stats()["num_alloc_retries"]
    return [free, total, peak, said, retries]


def test_a_full_device_says_what_a_real_one_says() -> None:
    free, total, peak, said, retries = run_on_device(full, memory_mb=8)[0]
    assert (free, total, peak, retries) == (8 << 20, 8 << 20, 6 << 20, 2)
    assert said.startswith(
        "CUDA out of memory. Tried to allocate 3.00 MiB. GPU 0 has a total capacity of 8.00 MiB of which 2.00 MiB is "
        "free."
    )


# ----------------------------------------------------------------------------------------------------------- failures


def failing(placement: Placement, call: str) -> list[str]:
    """The class and the text of what two calls, of which the second is to fail, raise."""
    import torch
    import torch.distributed as dist

    from tests.accelerator import torch_sim

    one = torch.ones(4, 4, device=placement.device)
    calls = {
        "cublas": lambda: one @ one,
        "pinned": lambda: torch.empty(4, pin_memory=True),
        "allocator": lambda: torch.empty(1 << 19, dtype=torch.uint8, device=placement.device),
        "nccl": lambda: dist.all_reduce(one),
    }
    if call == "nccl":
        dist.init_process_group("simccl", store=dist.HashStore(), rank=0, world_size=1)
    torch_sim.fail_at(call, 2)
    said = []
    for _ in range(2):
        try:
            calls[call]()
            said.append("")
        except Exception as error:
            recognised = "" if is_out_of_memory(error) else "not recognised: "
            said.append(f"{recognised}{type(error).__module__}.{type(error).__name__}: {error}")
    return said


FAILURES = {
    "nccl": "torch.distributed.DistBackendError: NCCL error in: ",
    "allocator": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 KiB. GPU 0 has a total",
    "cublas": "builtins.RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "pinned": "torch.AcceleratorError: CUDA error: out of memory\n",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_by_request_has_the_words_of_its_library(kind: str) -> None:
    first, second = run_on_device(failing, call=kind)[0]
    assert first == ""
    assert second.startswith(FAILURES[kind]), second


def test_a_failure_can_be_asked_for_by_the_environment() -> None:
    queued, *later = run_on_device(broken, fail="cublas:9,kernel:3")[0]
    assert queued == ""
    for said in later:
        assert said.startswith("CUDA error: device-side assert triggered (simulated: aten::index_select: asked to fail")


def broken(placement: Placement) -> list[str]:
    """What is said when a kernel is queued that fails, when it is waited for, and from then on."""
    import torch

    table = torch.ones(4, 4, device=placement.device)
    place = torch.full((2,), 9, device=placement.device)
    calls: list[Callable[[], Any]] = [
        lambda: torch.nn.functional.embedding(place, table),
        torch.accelerator.synchronize,
        torch.accelerator.synchronize,
        lambda: table + 1,
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("")
        except torch.AcceleratorError as error:
            said.append(str(error))
    return said


def test_a_failed_kernel_is_noticed_late_and_never_forgotten() -> None:
    queued, *later = run_on_device(broken, order="lazy")[0]
    assert queued == ""
    for said in later:
        assert said.startswith(
            "CUDA error: device-side assert triggered (simulated: aten::index_select: index out of range"
        )


# --------------------------------------------------------------------------------------------------------- strictness


def mixed(placement: Placement) -> list[str]:
    """What is said of tensors of the host and of another device, and of what is allowed of the host."""
    import torch

    one = torch.ones(4, 4, device=placement.device)
    calls = [
        lambda: torch.mm(one, torch.ones(4, 4)),
        lambda: one + torch.ones(4, 4, device="sim:1"),
        lambda: torch.nn.functional.embedding(torch.tensor([1]), one),
        lambda: torch.accelerator.set_device_index(2),
        lambda: one + torch.tensor(1.0),
        lambda: one[torch.tensor([1])],
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("")
        except RuntimeError as error:
            said.append(str(error).splitlines()[0])
    return said


def test_tensors_of_several_devices_are_refused() -> None:
    *refused, ordinal, scalar, indices = run_on_device(mixed, devices=2)[0]
    for said in refused:
        assert said.startswith("Expected all tensors to be on the same device"), said
    assert ordinal == "CUDA error: invalid device ordinal"
    assert scalar == indices == ""


def forked(placement: Placement) -> list[Any]:
    """What a process says that was forked before the device was opened, and one that was forked after."""
    import torch

    said = []
    for touch in (False, True):
        if touch:
            torch.ones(1, device=placement.device)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                text = str(torch.ones(1, device=placement.device).item())
            except RuntimeError as error:
                text = str(error)
            os.write(writer, text.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        said.append(os.read(reader, 1000).decode())
    return said


def test_a_fork_after_the_device_was_opened_is_refused() -> None:
    for order in ("lazy", "threads"):
        before, after = run_on_device(forked, order=order)[0]
        assert before == "1.0"
        assert after.startswith("Cannot re-initialize SIM in forked subprocess. To use SIM with multiprocessing,")


# ---------------------------------------------------------------------------------------------------- clock and chance


def clock(placement: Placement) -> list[Any]:
    """Milliseconds between events around a product, and what is said of events that are not timed or not yet there."""
    import torch

    one = torch.ones(500, 500, device=placement.device)
    begin, end, plain = (torch.Event(placement.device, enable_timing=timed) for timed in (True, True, False))
    begin.record()
    one @ one
    end.record()
    plain.record()
    said = []
    for other in (end, plain):
        try:
            begin.elapsed_time(other)
        except (RuntimeError, ValueError) as error:
            said.append(str(error).splitlines()[0])
    asked = time.perf_counter()
    polls = 0
    while not end.query():
        polls += 1
    return [said, begin.elapsed_time(end), 1e3 * (time.perf_counter() - asked), polls]


def test_events_keep_the_time_of_the_device() -> None:
    said, milliseconds, host, polls = run_on_device(clock, order="lazy")[0]
    assert said[0] == "Both events must be completed before calculating elapsed time."
    assert "enable_timing=True" in said[1]
    assert 0 < milliseconds < host
    assert polls > 0


def draws(placement: Placement) -> list[Any]:
    """Random numbers: a dropout, a draw, that draw again from the same state and one after it; and one of the CPU's
    generator, which the device leaves alone."""
    import torch

    torch.manual_seed(3)
    dropped = torch.nn.functional.dropout(torch.ones(100, device=placement.device), 0.5)
    module = torch.get_device_module(placement.device)
    state = module.get_rng_state(placement.device)
    again = [torch.randn(3, device=placement.device)]
    module.set_rng_state(state, placement.device)
    again += [torch.randn(3, device=placement.device) for _ in range(2)]
    numbers = [each.tolist() for each in again]
    return [dropped.tolist(), *numbers, torch.rand(1).item(), torch.manual_seed(3) and torch.rand(1).item()]


def test_random_numbers_do_not_depend_on_when_kernels_run() -> None:
    found = [run_on_device(draws, order=order)[0] for order in ("eager", "lazy", "threads")]
    assert found[0] == found[1] == found[2]
    dropped, first, again, other, after, fresh = found[0]
    assert first == again != other
    assert after == fresh
    assert set(dropped) == {0.0, 2.0}


# -------------------------------------------------------------------------------------------------------- the harness


def place(placement: Placement) -> list[Any]:
    import torch

    kind = torch.accelerator.current_accelerator()
    return [placement.device, kind and kind.type, torch.accelerator.is_available(), os.environ.get("SIM_ORDER")]


def test_ranks_get_the_places_that_are_asked_for() -> None:
    places = ["sim:1", "cpu", "sim:1"]
    found = run_on_device(place, world=3, order="threads", devices=2, on=places)
    assert found == [[each, "sim", True, "threads"] for each in places]
    assert run_ranks(place, 1) == [["cpu", None, False, None]]  # the next request finds no trace of it


def test_a_started_process_has_the_device() -> None:
    code = "import torch; print(torch.accelerator.current_accelerator(), torch.accelerator.device_count())"
    environment = os.environ | sim_environment(order="lazy", devices=3)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.stdout == "sim 3\n", ran.stderr
