"""What only an accelerator can show; skipped where there is none. The same recipes as the proofs on CPU."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.placement import Placement
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.models import layers
from phalanx.models.attention import attention, has_kernel
from phalanx.parallel import fp8, fp8_delayed
from phalanx.system import accelerator
from phalanx.system.accelerator import HostCopy
from phalanx.system.event_times import EventTimes
from phalanx.trainer import train_rank
from phalanx.workload.clock import UnitClock
from tests.gpu.device import SIMULATED, needs_accelerator, needs_compiler, needs_kernels
from tests.helpers import run_ranks
from tests.numerics import runs

pytestmark = needs_accelerator
STEPS = 6 if SIMULATED else 10


def train_on_device(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> int:
    placed = dataclasses.replace(placement, device=accelerator.list_devices()[0])
    return int(train_rank.run_training(runs.job(run, data, changes, placement.world), placed))


def host_copy(placement: Placement) -> list[float]:
    device = torch.device(accelerator.list_devices()[0])
    values = [torch.full((), float(i), device=device) for i in range(3)]
    copy = HostCopy(values)
    for value in values:
        value.fill_(99.0)  # queued after the copy: must not be seen
    return copy.get()


def memory(placement: Placement) -> list[int]:
    device = torch.device(accelerator.list_devices()[0])
    accelerator.set_device(device, 1)
    free = accelerator.memory_free(device, 1)
    block = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    peak = accelerator.peak_memory(device)
    del block
    accelerator.reset_peak_memory(device)
    return [free, peak, accelerator.peak_memory(device)]


def laps(placement: Placement) -> list[float | None]:
    """What the clock of a unit says in four steps, each of the step before, of which the third is the longest."""
    device = torch.device(accelerator.list_devices()[0])
    accelerator.set_device(device, 1)
    width = 128 if SIMULATED else 2048
    unit = torch.nn.Linear(width, width, device=device)
    clock = UnitClock([unit], EventTimes(device))
    found: list[float | None] = []
    for passes in (1, 3, 60, 1):
        clock.start()
        for _ in range(passes):
            unit(torch.ones(512, width, device=device, requires_grad=True)).sum().backward()
        seconds = clock.lap()
        found.append(None if math.isnan(seconds) else seconds)
        clock.stop()
    return found


def narrow_head(placement: Placement) -> list[float]:
    """Relative errors of the head's bfloat16 gradient in one chunk and in 64."""
    device = torch.device(accelerator.list_devices()[0])
    accelerator.set_device(device, 1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1024, 32, generator=generator).bfloat16()
    weight = torch.randn(64, 32, generator=generator).bfloat16()
    labels = torch.randint(0, 64, (1024,), generator=generator)
    exact_weight = weight.double().requires_grad_()
    layers.reference_cross_entropy_sum(hidden.double(), exact_weight, labels).backward()
    exact, errors = exact_weight.grad, []
    assert exact is not None
    for chunk in (1024, 16):
        moved = weight.to(device, copy=True).requires_grad_()
        layers.cross_entropy_sum(hidden.to(device), moved, labels.to(device), chunk=chunk).backward()
        assert moved.grad is not None
        errors.append(float((moved.grad.cpu().double() - exact).norm() / exact.norm()))
    return errors


def attention_in_float32(placement: Placement) -> list[float]:
    """Bytes that grouped attention over 8,192 positions takes, and its relative error against the CPU over 64."""
    device = torch.device(accelerator.list_devices()[0])
    accelerator.set_device(device, 1)
    q, kv = torch.randn(1, 4, 64, 16), torch.randn(1, 2, 64, 16)
    expected = attention(q, kv, kv)
    found = attention(q.to(device), kv.to(device), kv.to(device)).cpu()
    q, kv = (torch.randn(1, heads, 8192, 16, device=device) for heads in (4, 2))
    accelerator.reset_peak_memory(device)
    before = accelerator.peak_memory(device)
    attention(q, kv, kv)
    return [accelerator.peak_memory(device) - before, float((found - expected).norm() / expected.norm())]


def attention_with_documents(placement: Placement) -> list[float]:
    """Whether the variable-length kernel is used, and relative errors in bfloat16 against float32 on a CPU: of output
    and gradients, with a window, documents, and both, as it is and compiled."""
    device = torch.device(accelerator.list_devices()[0])
    accelerator.set_device(device, 1)
    offsets = torch.tensor([0, 40, 128, 128, 200, 256, 256], dtype=torch.int32)
    found = [float(has_kernel(device, torch.bfloat16, 64))]
    for window, segments in ((16, None), (None, offsets), (16, offsets)):
        parts = [torch.randn(2, heads, 128, 64).bfloat16() for heads in (4, 2, 2)]
        exact = [part.float().requires_grad_() for part in parts]
        out = attention(*exact, window=window, segments=segments)
        expected = [out, *torch.autograd.grad(out.sin().sum(), exact)]
        moved = [part.to(device).requires_grad_() for part in parts]
        there = None if segments is None else segments.to(device)
        for function in (attention, torch.compile(attention, fullgraph=True)):
            out = function(*moved, window=window, segments=there)
            results = [out, *torch.autograd.grad(out.float().sin().sum(), moved)]
            found += [float((a.cpu().float() - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True)]
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    runs.write_tokens(folder)
    return folder


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_steps(RunPaths(run).metrics)]


def walk(run: Path, data: Path, **changes: Any) -> list[float]:
    dotted = {key.replace("__", "."): value for key, value in changes.items()} | {"optim.decay_steps": runs.STEPS}
    arguments = {"run": str(run), "data": str(data), "changes": dotted}
    assert run_ranks(train_on_device, 1, timeout_s=280, **arguments) == [0]
    return losses(run)


def test_the_device_walks_the_curve_of_the_cpu(tmp_path: Path, data: Path) -> None:
    on_cpu = runs.walk(1, tmp_path / "cpu", data, train__steps=STEPS).losses
    on_device = walk(tmp_path / "device", data, train__steps=STEPS)
    assert on_device == pytest.approx(on_cpu, rel=1e-9)


@needs_compiler
@pytest.mark.parametrize("engine", ["single", "fsdp2"])
def test_bf16_and_compilation_stay_near_the_exact_curve(tmp_path: Path, data: Path, engine: str) -> None:
    exact = walk(tmp_path / "exact", data, train__steps=STEPS)
    near = walk(
        tmp_path / "near", data, train__steps=STEPS, train__dtype="bf16", train__compile=True, parallel__engine=engine
    )
    assert near == pytest.approx(exact, rel=2e-2)


def test_a_resumed_run_is_bitwise_the_undisturbed_one(tmp_path: Path, data: Path) -> None:
    whole = walk(tmp_path / "whole", data, train__steps=STEPS, train__dtype="bf16")
    walk(tmp_path / "cut", data, train__steps=STEPS // 2, train__dtype="bf16")
    assert walk(tmp_path / "cut", data, train__steps=STEPS, train__dtype="bf16") == whole


@pytest.mark.parametrize("activations", ["selective", "full"])
def test_recomputed_activations_change_nothing(activations: str, tmp_path: Path, data: Path) -> None:
    kept = walk(tmp_path / "kept", data, train__steps=STEPS)
    assert walk(tmp_path / "recomputed", data, train__steps=STEPS, memory__activations=activations) == pytest.approx(
        kept, rel=1e-12
    )


@pytest.mark.parametrize("rule", ["adamw8bit", "adadelta", "nadam"])
def test_other_rules_walk_the_curve_of_the_cpu(rule: str, tmp_path: Path, data: Path) -> None:
    changes = {"train__steps": STEPS, "optim__name": rule, "model__hidden": 64, "model__intermediate": 131}
    on_cpu = runs.walk(1, tmp_path / "cpu", data, **changes).losses
    assert walk(tmp_path / "device", data, **changes) == pytest.approx(on_cpu, rel=1e-9)


def test_float16_with_a_scaled_loss_stays_near_and_is_resumed_bitwise(tmp_path: Path, data: Path) -> None:
    half = {"train__dtype": "fp16", "train__loss_scale_growth_interval": 4}
    exact = walk(tmp_path / "exact", data, train__steps=STEPS)
    whole = walk(tmp_path / "whole", data, **half, train__steps=STEPS)
    assert whole == pytest.approx(exact, rel=5e-3)
    walk(tmp_path / "cut", data, **half, train__steps=STEPS // 2)
    assert walk(tmp_path / "cut", data, **half, train__steps=STEPS) == whole


def test_a_host_copy_holds_the_values_of_its_moment() -> None:
    assert run_ranks(host_copy, 1) == [[0.0, 1.0, 2.0]]


def test_bfloat16_chunks_of_the_head_are_summed_wide() -> None:
    ((one, many),) = run_ranks(narrow_head, 1)
    assert one < 1e-2
    assert many < 1.1 * one


@needs_kernels
def test_grouped_attention_in_float32_never_holds_all_scores() -> None:
    ((taken, error),) = run_ranks(attention_in_float32, 1)
    assert taken < 4 * 8192 * 8192 * 4 / 4, "the scores of all heads would take 1 GiB"
    assert error < 1e-5


@needs_kernels
def test_documents_and_windows_go_through_the_kernel_that_skips() -> None:
    ((used, *errors),) = run_ranks(attention_with_documents, 1)
    assert used, "this device has no variable-length kernel: attention walks through the documents"
    assert len(errors) == 3 * 2 * 4
    assert max(errors) < 2e-2


def test_memory_is_counted_in_bytes() -> None:
    (free, peak, after), *_ = run_ranks(memory, 1)
    assert free > 2**30
    assert peak >= 64 << 20 > after


def test_the_time_of_units_is_read_a_step_late() -> None:
    first, *others = run_ranks(laps, 1)[0]
    assert first is None
    assert min(others) > 0
    assert others[2] > 3 * others[1]


def fp8_kernel(placement: Placement, scaling: str) -> tuple[str, list[float]]:
    device = torch.device(accelerator.list_devices()[0])
    accelerator.set_device(device, 1)
    ways: tuple[Any, ...] = (fp8.linear_by_kernel, fp8.linear_by_emulation)
    problem = fp8.find_kernel_problem(device)
    if scaling == "delayed":
        scales = fp8_delayed.DelayedScaling()
        (scales.scales,) = fp8_delayed.find_scales(torch.full((1, 3), 5.0), 0)
        problem = fp8_delayed.find_kernel_problem(device)
        ways = tuple(functools.partial(fp8_delayed.linear, scales, kernel) for kernel in (True, False))
    apart = []
    for rows, into, out in ((256, 256, 256), (1000, 4096, 1024), (37, 128, 384)):
        x, weight = (torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True)
                     for shape in ((rows, into), (out, into)))  # fmt: skip
        grad = torch.randn(rows, out, device=device, dtype=torch.bfloat16)
        results = [(y, *torch.autograd.grad(y, (x, weight), grad)) for y in (linear(x, weight) for linear in ways)]
        apart += [float((a - b).float().norm() / b.float().norm()) for a, b in zip(*results, strict=True)]
    return problem, apart


@needs_kernels
@pytest.mark.parametrize("scaling", ["block", "delayed"])
def test_the_fp8_kernel_computes_what_the_emulation_does(scaling: str) -> None:
    problem, apart = run_ranks(fp8_kernel, 1, scaling=scaling)[0]
    if problem.startswith("no kernel"):
        pytest.skip(problem)
    assert problem == "" and max(apart) < 0.01
