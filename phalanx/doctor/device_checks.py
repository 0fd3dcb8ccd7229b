"""Checks of single devices: compute, copies, attention, compilation, and out-of-memory errors."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.autotune.link_speed import measure_copy_rate
from phalanx.core.errors import is_out_of_memory
from phalanx.doctor.results import CheckResult, CheckState, result_of_finding
from phalanx.health import burn_in_report
from phalanx.health.findings import DeviceInfo, Severity
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.attention import attention, has_kernel, reference_attention
from phalanx.models.llama import Llama
from phalanx.parallel import fp8, fp8_delayed
from phalanx.parallel.parallelize import compile_units, find_compile_problem
from phalanx.system import accelerator

OF_PEAK = 0.25  # share of the peak in the data sheet below which a device is reported as slow
COPY_BYTES = (3, 2**20 + 1, 2**24)  # odd sizes reveal errors that full words hide
ROUNDS = 3
# Error bound relative to the exact result, in the norm: the rounding error of each dtype.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
COMPILED_TOLERANCE = 1e-4
HEADS, KV_HEADS, LENGTH, HEAD_DIM = 4, 2, 64, 64
OFFSETS = (0, 40, 64, 64, 100, 128)  # offsets of documents in two rows, one of them empty
SPEC = ModelSpec(
    vocab_size=128, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, max_seq_len=64
)
BEYOND_BYTES = 2**30  # more than the device has
NO_HOST_HAS_BYTES = 2**50


def check_arithmetic(seconds: float, ranks: int | None, devices: Sequence[DeviceInfo]) -> list[CheckResult]:
    """Check that products are reproducible and memory is intact, as `phalanx health --deep`."""
    findings, rows = burn_in_report.run_burn_in(seconds, ranks)
    lines = [result_of_finding(finding) for finding in findings if finding.severity != Severity.OK]
    lines = lines or [_summarize(rows)]
    bf16 = {device.name: device.bf16 for device in devices}
    for row in rows:
        dtype = torch.bfloat16 if bf16.get(row["device"], True) else torch.float16
        peak = accelerator.peak_flops(row["model"], dtype)
        if peak is not None and row["flops_per_s"] is not None and row["flops_per_s"] < OF_PEAK * peak:
            text = (
                f"{row['device']} multiplies at {row['flops_per_s'] / peak:.0%} of its peak rate; check its clocks, "
                "power limit and cooling (nvidia-smi -q), and other programs on it"
            )
            lines.append(CheckResult("compute speed", CheckState.SLOW, text, row["flops_per_s"]))
    return lines


def _summarize(rows: Sequence[Mapping[str, Any]]) -> CheckResult:
    speeds = [row["flops_per_s"] / 1e12 for row in rows]
    shown = f"{min(speeds):.3g}" if len(speeds) == 1 else f"{min(speeds):.3g} to {max(speeds):.3g}"
    text = (
        f"{len(rows)} device{'s' if len(rows) > 1 else ''} at once: products are reproducible and memory is intact "
        f"({shown} TFLOP/s)"
    )
    return CheckResult("arithmetic", CheckState.OK, text)


# --------------------------------------------------------------------------------------------------------------- copies


def check_copies(names: Sequence[str]) -> list[CheckResult]:
    """Check copies between host and devices, synchronous and asynchronous, and between devices, for wrong values."""
    wrong, rates = [], []
    source = torch.zeros(COPY_BYTES[-1], dtype=torch.uint8, pin_memory=True)
    for name in names:
        device = torch.device(name)
        accelerator.set_device(device, 1)
        wrong += [f"{name} {what}" for size in COPY_BYTES for what in _round_trips(device, size)]
        rates.append(
            f"{name} {measure_copy_rate(source, torch.empty_like(source, device=device), device) / 1e9:.3g} GB/s"
        )
    pairs = [(one, other) for one in names for other in names if one != other]
    wrong += [
        f"{one} to {other}" for one, other in pairs if not _is_exact_between(torch.device(one), torch.device(other))
    ]
    if wrong:
        text = (
            f"copies arrive with wrong values ({'; '.join(dict.fromkeys(wrong))}); for copies between devices "
            "disable the IOMMU and ACS in the firmware, for others have the slot, the cable and the device inspected"
        )
        return [CheckResult("copies", CheckState.WRONG, text, len(wrong))]
    between = f", and between {len(names)} devices" if pairs else ""
    text = (
        f"copies from pinned and pageable memory, asynchronous and synchronous{between}, are correct "
        f"({', '.join(rates)} to devices)"
    )
    return [CheckResult("copies", CheckState.OK, text)]


def _pattern(size: int, start: int) -> Tensor:
    # A prime period: no block of memory equals the previous one
    period = torch.arange(251, dtype=torch.uint8).roll(start)
    return period.repeat(size // 251 + 1)[:size].clone()


def _round_trips(device: torch.device, size: int) -> list[str]:
    """The kinds of copies that changed the values: to the device in its default stream, back in another one."""
    wrong = []
    side = accelerator.side_stream(device)
    for pinned in (True, False):
        for number in range(ROUNDS):
            given = _pattern(size, number)
            sent = given.pin_memory() if pinned else given.clone()
            there = sent.to(device, non_blocking=True)
            there += 1  # on the device, queued after the copy
            ready = accelerator.record_event(device)
            back = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            with side:
                side.wait_event(ready)
                back.copy_(there, non_blocking=True)
                done = accelerator.record_event(device)
            done.synchronize()
            if not torch.equal(back, given + 1):
                wrong.append(f"{'from pinned' if pinned else 'from pageable'} memory and back")
    return wrong


def _is_exact_between(one: torch.device, other: torch.device) -> bool:
    given = _pattern(COPY_BYTES[-1], 7)
    accelerator.set_device(one, 1)
    there = given.to(one).to(other)
    return torch.equal(there.cpu(), given)


# ------------------------------------------------------------------------------------------------------------ attention


def check_attention(name: str) -> list[CheckResult]:
    """Compare attention kernels with the reference formula in float64 on the CPU: rows, a window, documents, and
    gradients."""
    device = torch.device(name)
    accelerator.set_device(device, 1)
    told, wrong = [], []
    for dtype, most in TOLERANCES.items():
        error = max(
            _attention_error(device, dtype, window, segments)
            for window in (None, 7)
            for segments in (None, torch.tensor(OFFSETS, dtype=torch.int32))
        )
        told.append(f"{str(dtype).removeprefix('torch.')} within {error:.0e}")
        if not error <= most:  # true for NaN too
            wrong.append(f"{str(dtype).removeprefix('torch.')} {error:.1e}, above the rounding error {most:.0e}")
    if wrong:
        text = (
            f"attention on {name} differs from the reference formula ({'; '.join(wrong)}); use another version of "
            "PyTorch"
        )
        return [CheckResult("attention", CheckState.WRONG, f"{text}, which provides these kernels, or of the driver")]
    text = f"attention on {name} matches the reference formula: {', '.join(told)}"
    lines = [CheckResult("attention", CheckState.OK, text)]
    dtype = accelerator.best_dtype(device)
    if device.type != "cpu" and not has_kernel(device, dtype, HEAD_DIM):
        text = (
            f"{name} has no variable-length kernel in this PyTorch: packed documents and windows are computed one by "
            "one; a newer PyTorch may have one for this device"
        )
        lines.append(CheckResult("attention speed", CheckState.SLOW, text))
    return lines


def _attention_error(device: torch.device, dtype: torch.dtype, window: int | None, segments: Tensor | None) -> float:
    """The largest relative error of the output and of the gradients of q, k and v."""
    random = torch.Generator().manual_seed(3)
    shapes = [(2, heads, LENGTH, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    given = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    exact = [part.double().requires_grad_() for part in given]
    moved = [part.to(device).requires_grad_() for part in given]
    expected = reference_attention(exact[0], exact[1], exact[2], window, segments)
    there = None if segments is None else segments.to(device)
    found = attention(moved[0], moved[1], moved[2], window=window, segments=there)
    wanted = [expected, *torch.autograd.grad(expected.sin().sum(), exact)]
    results = [found, *torch.autograd.grad(found.float().sin().sum(), moved)]
    return max(_relative_error(result, right) for result, right in zip(results, wanted, strict=True))


def _relative_error(result: Tensor, right: Tensor) -> float:
    """Relative error in the norm; infinity if there is a NaN, which `max` would lose."""
    error = float((result.detach().cpu().double() - right.detach().double()).norm() / right.norm())
    return error if error == error else float("inf")


# -------------------------------------------------------------------------------------------------------------- compile


def check_compile(name: str) -> list[CheckResult]:
    """Compare a small model's loss and gradients in eager mode and compiled."""
    device = torch.device(name)
    accelerator.set_device(device, 1)
    begun = time.perf_counter()
    plain = _gradients(device, compiled=False)
    try:
        with torch._inductor.config.patch(compile_threads=1):  # worker processes would outlive this check
            found = _gradients(device, compiled=True)
    except Exception:  # of any compiler
        return [_cannot_compile(device)]
    error = max(_relative_error(one, other) for one, other in zip(found, plain, strict=True))
    if not error <= COMPILED_TOLERANCE:
        text = f"compiled blocks on {name} differ from eager ones by {error:.1e}; train with train.compile=false"
        return [CheckResult("compile", CheckState.WRONG, f"{text}, or use another version of PyTorch", error)]
    seconds = time.perf_counter() - begun
    text = f"torch.compile works on {name}; error at most {error:.0e} (compiled in {seconds:.0f} s)"
    return [CheckResult("compile", CheckState.OK, text, error)]


def _cannot_compile(device: torch.device) -> CheckResult:
    reason = find_compile_problem(device)
    if not reason:  # the quick test of a run passes, but its blocks fail
        text = f"torch.compile works for {device}, but not for a model's blocks; train with train.compile=false"
        return CheckResult("compile", CheckState.WRONG, text)
    text = f"torch.compile does not work for {device} ({reason}), so runs do not use it; install a C++ compiler"
    if device.type == "cpu":
        return CheckResult("compile", CheckState.MISSING, text)
    return CheckResult("compile", CheckState.SLOW, f"{text}, and Triton for this device")


def _gradients(device: torch.device, compiled: bool) -> list[Tensor]:
    random = torch.Generator().manual_seed(5)
    model = Llama(SPEC)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
    model = model.to(device)
    if compiled:
        compile_units(model, model.blocks())
    tokens = (torch.arange(2 * SPEC.max_seq_len, device=device) % 97).view(2, -1)
    loss = model(tokens, labels=tokens)
    parameters = list(model.parameters())
    return [loss, *torch.autograd.grad(loss, parameters)]


# ------------------------------------------------------------------------------------------------------------------ fp8


def check_fp8(name: str) -> list[CheckResult]:
    """Time a linear layer, forward and backward, with FP8 products (`train.fp8`) and without; the value is that of
    block scaling."""
    device = torch.device(name)
    accelerator.set_device(device, 1)
    size, dtype = (512, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    x = torch.randn(size, size, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(size, size, device=device, dtype=dtype, requires_grad=True)
    problems = {"block": fp8.find_kernel_problem(device), "delayed": fp8_delayed.find_kernel_problem(device)}
    ways = {"block": fp8.choose_linear(device), "delayed": fp8_delayed.make_measured_linear(device)}
    plain_s = min(_pass_s(torch.nn.functional.linear, x, weight) for _ in range(ROUNDS))
    ratios = {way: min(_pass_s(linear, x, weight) for _ in range(ROUNDS)) / plain_s for way, linear in ways.items()}
    emulated = {way: f" (emulated: {problem})" if problem else "" for way, problem in problems.items()}
    times = ", ".join(f"{ratio:.2f} with {way}{emulated[way]}" for way, ratio in ratios.items())
    text = f"train.fp8 on {name}: of its time without a linear layer takes {times}"
    return [CheckResult("fp8", CheckState.OK, text, ratios["block"])]


def _pass_s(linear: Callable[..., Tensor], x: Tensor, weight: Tensor) -> float:
    begun = time.perf_counter()
    found = torch.autograd.grad(linear(x, weight).float().square().sum(), (x, weight))
    found[0].sum().item()  # waits for the device
    return time.perf_counter() - begun


# --------------------------------------------------------------------------------------------------------------- memory


def check_memory_limit(names: Sequence[str]) -> list[CheckResult]:
    """Check that an allocation beyond the memory fails with a recognized error, and that the device still works."""
    for name in names:
        device = torch.device(name)
        accelerator.set_device(device, 1)
        size = NO_HOST_HAS_BYTES if name == "cpu" else accelerator.memory_total(device, 1) + BEYOND_BYTES
        try:
            torch.empty(size, dtype=torch.uint8, device=device)
        except Exception as error:
            if not is_out_of_memory(error):
                said = str(error).partition("\n")[0]
                text = f"{name} says {said!r} when memory runs out, which is not recognized; report it to Phalanx"
                return [CheckResult("memory-limit", CheckState.WRONG, f"{text}, and set train.micro_batch yourself")]
        else:
            text = (
                f"{name} allocates more memory than it has, so a run cannot find out what fits; set train.micro_batch"
            )
            return [CheckResult("memory-limit", CheckState.WRONG, f"{text}, and leave some memory free")]
        if float(torch.ones(1000, device=device).sum()) != 1000.0:
            text = (
                f"{name} computes wrong results after running out of memory; use another version of PyTorch or of "
                "the driver"
            )
            return [CheckResult("memory-limit", CheckState.WRONG, text)]
    shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return [
        CheckResult(
            "memory-limit",
            CheckState.OK,
            f"running out of memory is recognized on {shown}, which still computes correctly",
        )
    ]
