"""Device abstraction: the only file that depends on the kind of accelerator; other code uses it or
torch.accelerator."""

import contextlib
import datetime
import os
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from phalanx.core.device_peaks import find_peaks
from phalanx.system import cpus
from phalanx.system import memory as host_memory

NO_DEVICES_ENV = dict.fromkeys(
    ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ""
)  # with this in its environment none is seen
CPUS = "CPUs"  # what a torch is built for that knows of no accelerator

# The kind of device, and its groups, that scripts of other libraries name outright.
SCRIPT_DEVICE_TYPE, SCRIPT_BACKEND = "cuda", "nccl"

_TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def list_devices() -> list[str]:
    """Names of this machine's accelerators, such as ["cuda:0", "cuda:1"]; empty when there are none.

    This may initialise the accelerator's driver: a process that forks workers must call it in a child.
    """
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]


def backend_string(device: torch.device) -> str:
    """The process group backend string: gloo for host tensors, the device's own collectives for its tensors; gloo alone
    where that kind of device has none, so that its tensors travel through host memory."""
    own = torch.distributed.Backend.default_device_backend_map.get(device.type, "gloo")
    there = own != "gloo" and torch.distributed.is_backend_available(own)  # torch may be built without it
    return f"cpu:gloo,{device.type}:{own}" if there else "gloo"


def accelerator_types() -> list[str]:
    """The kind of accelerator that torch was built for, if it was; asking touches no driver."""
    kind = torch.accelerator.current_accelerator()
    return [] if kind is None else [kind.type]


def describe_build() -> str:
    """What this build of torch computes on, with the version of its libraries; asking touches no driver."""
    for name in ("cuda", "hip", "xpu"):
        if version := getattr(torch.version, name, None):
            return f"{'ROCm' if name == 'hip' else name.upper()} {version}"
    return accelerator_types()[0] if accelerator_types() else CPUS


def record_event(device: torch.device) -> torch.Event:
    """An event after all work that this thread has queued on the device; its `synchronize` blocks the host until
    then."""
    with torch.accelerator.device_index(device.index or 0):
        event = torch.Event(device.type)
        event.record()
    return event


def make_native_group(
    device: torch.device, store: torch.distributed.Store, rank: int, world: int, timeout: datetime.timedelta
) -> torch.distributed.ProcessGroup | None:
    """A group of the device's own collectives for ranks that have each a device; None for a kind that has no NCCL."""
    dist: Any = torch.distributed
    if not backend_string(device).endswith(":nccl"):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    inner = dist.ProcessGroupNCCL(dist.PrefixStore("native", store), rank, world, options)
    group: torch.distributed.ProcessGroup = dist.ProcessGroup(store, rank, world)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device(device.type), dist.ProcessGroup.BackendType.NCCL, inner)
    inner._set_sequence_number_for_group()
    return group


def has_block_scaled_mm(device: torch.device) -> bool:
    """Whether `block_scaled_mm` may run there: on NVIDIA's Hopper, the only kind whose kernel takes such scales."""
    if device.type != SCRIPT_DEVICE_TYPE or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def block_scaled_mm(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """a @ b.T in bfloat16 of FP8 matrices with float32 scales of blocks.

    a (M, K) with a_scale (M, K / 128), b (N, K) with b_scale (N / 128, K / 128) -> (M, N). Layouts are cuBLAS's: scales
    of `a` column by column and M a multiple of 4, rows of tiles of `b` filled up to a multiple of 4.
    """
    functional: Any = torch.nn.functional
    rows, tiles = a.shape[0], b_scale.shape[1]
    a = torch.nn.functional.pad(a.view(torch.uint8), (0, 0, 0, -rows % 4)).view(a.dtype)
    a_scale = torch.nn.functional.pad(a_scale, (0, 0, 0, -rows % 4)).t().contiguous().t()
    b_scale = torch.nn.functional.pad(b_scale, (0, -tiles % 4)).t()
    kinds = functional.ScalingType
    product: torch.Tensor = functional.scaled_mm(
        a, b.t(), a_scale, kinds.BlockWise1x128, b_scale, kinds.BlockWise128x128, output_dtype=torch.bfloat16
    )
    return product[:rows]


def has_tensor_scaled_mm(device: torch.device) -> bool:
    """Whether `tensor_scaled_mm` may run there: on NVIDIA's GPUs from Ada and Hopper on."""
    if device.type != SCRIPT_DEVICE_TYPE or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def tensor_scaled_mm(a: torch.Tensor, a_scale: float, b: torch.Tensor, b_scale: float) -> torch.Tensor:
    """a @ b.T in bfloat16 of FP8 matrices a (M, K) and b (N, K), one of them E4M3, each times its scale; K and N
    multiples of 16."""
    functional: Any = torch.nn.functional
    by_tensor = functional.ScalingType.TensorWise
    scales = [torch.full((), each, device=a.device) for each in (a_scale, b_scale)]
    product: torch.Tensor = functional.scaled_mm(
        a.contiguous(), b.contiguous().t(), scales[0], by_tensor, scales[1], by_tensor, output_dtype=torch.bfloat16
    )
    return product


def device_uuid(device: torch.device) -> str:
    """The unique ID of this device; "" for a CPU, and for kinds of devices without one."""
    if device.type == "cpu":
        return ""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", ""))


def hardware_id(device: torch.device, host: str) -> str:
    """What two ranks cannot both have in collectives of the device's own; "" where nothing is known of it.

    That is the `device_uuid`, but for slices of a GPU (MIG): NCCL takes the GPU that they are of, which it finds by its
    place in the machine `host`. Where torch does not tell the place, all slices there count as of one GPU.
    """
    found = device_uuid(device)
    if not found or not _is_slice(get_device_name(device)):
        return found
    properties = torch.get_device_module(device).get_device_properties(device)
    place = [str(getattr(properties, f"pci_{part}_id", "?")) for part in ("domain", "bus", "device")]
    return f"{host} {':'.join(place)}"


def driver_uuid(device_name: str) -> str:
    """The `device_uuid` of a device given by its own name, in the spelling of NVIDIA's driver; "" for other kinds."""
    device = torch.device(device_name)
    return format_uuid(device_uuid(device), get_device_name(device)) if device.type == SCRIPT_DEVICE_TYPE else ""


def format_uuid(uuid: str, device_name: str) -> str:
    """A UUID as NVIDIA's driver writes it, for a GPU or a slice of one."""
    if not uuid or uuid.startswith(("GPU-", "MIG-")):
        return uuid
    return f"{'MIG' if _is_slice(device_name) else 'GPU'}-{uuid}"


def _is_slice(device_name: str) -> bool:
    return re.search(r"\bMIG\b", device_name) is not None


def host_cores() -> int:
    """CPU cores that this process may use, by affinity and by its control groups' quota."""
    return cpus.count_cpus()


def threads_per_rank(requested: int, local_world: int) -> int:
    """Host threads for each of a machine's ranks: as many as are `requested`, or with 0 its part of the cores."""
    return requested or max(1, host_cores() // local_world)


def set_device(device: torch.device, threads: int) -> None:
    """Make `device` this process's current one, with `threads` host threads for operations on the CPU."""
    torch.set_num_threads(max(1, threads))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def set_arithmetic(device: torch.device, *, tf32: bool, deterministic: bool) -> None:
    """Have this process multiply float32 in TF32 or as it is, and use only deterministic kernels if asked to.

    To be called before the device computes. An operation that has no deterministic kernel raises RuntimeError then.
    """
    if device.type != "cpu":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32  # torch's own default is to round in convolutions
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not, and torch raises
        torch.use_deterministic_algorithms(True)


def get_device_name(device: torch.device) -> str:
    """The vendor's name of the device; "cpu" for a CPU."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Dense peak in FLOP/s, or None where it is not known of such a device."""
    return find_peaks(device_name).get(_TYPES.get(dtype, ""))


def get_model_name(device_name: str) -> str:
    """`get_device_name` of a device given by its own name, such as "cuda:0"."""
    return get_device_name(torch.device(device_name))


def supports_bf16(device: str) -> bool:
    """Whether the device computes in bfloat16 itself; one that only emulates it is slower than in float32.

    True for a CPU and for a kind of device that cannot be asked. Asking an accelerator initialises its driver.
    """
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return True
    with torch.accelerator.device_index(chosen.index or 0):  # the answer is about the current device
        return _says_bf16(torch.get_device_module(chosen))


def compute_capability(device: torch.device) -> tuple[int, int]:
    """That of a GPU as CUDA counts it, (major, minor); (0, 0) of any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def best_dtype(device: torch.device) -> torch.dtype:
    """The fastest type that is good enough to train in: bfloat16, else float16, on a CPU float32."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if supports_bf16(str(device)) else torch.float16


def _says_bf16(module: Any) -> bool:
    try:
        return bool(module.is_bf16_supported(including_emulation=False))
    except AttributeError:  # a kind of device that knows no such question
        return True
    except TypeError:  # a kind of device that emulates nothing
        return bool(module.is_bf16_supported())


def page_lock(memory: torch.Tensor, device: torch.device) -> bool:
    """Lock the pages of host memory that this process has mapped itself, for the rest of its life, so that copies from
    and to the device need not be staged; False where the device's kind or the machine does not do that."""
    if device.type == "cpu":
        return False
    try:
        runtime = torch.get_device_module(device).cudart()
    except AttributeError:  # a kind of device without
        return False
    with torch.accelerator.device_index(device.index or 0):
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
            return True
        with contextlib.suppress(RuntimeError):  # which the next kernel's check would raise as if it were its own
            torch.zeros(1, device=device)
    return False


class HostCopy:
    """An asynchronous copy of small device tensors to the host, read later."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        stacked = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])
        self._event: torch.Event | None = None
        if stacked.device.type == "cpu":
            self._host = stacked
            return
        self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        self._host.copy_(stacked, non_blocking=True)
        self._event = torch.Event(stacked.device)
        self._event.record()

    def get(self) -> list[float]:
        """The values; waits for the copy only, not for work queued after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def record_stream(tensor: torch.Tensor) -> None:
    """Record this thread's stream for a tensor of another stream, so that its memory is not reused before the queued
    work."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def side_stream(device: torch.device) -> Any:
    """A stream of work beside the device's usual one, which can be entered as a context; None for a CPU."""
    return None if device.type == "cpu" else torch.Stream(device)


def synchronize_stream(device: torch.device) -> None:
    """Block until the device has finished all work that this thread has queued."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def synchronize(device: torch.device) -> None:
    """Block until the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of `peak_memory`."""
    if device.type == "cpu":
        # Linux: writing 5 resets the high-water mark of the resident set to its current size.
        Path("/proc/self/clear_refs").write_text("5") if os.access("/proc/self/clear_refs", os.W_OK) else None
    else:
        torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Most bytes held since `reset_peak_memory`: resident memory of the process on CPU, allocated memory elsewhere."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    for line in _lines(Path("/proc/self/status")):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_free(device: torch.device, local_world: int) -> int:
    """Bytes that one rank may still take: on CPU its part of what the machine and its control group leave."""
    if device.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free)
    return host_memory.free_bytes() // local_world


def empty_cache(device: torch.device) -> None:
    """Give blocks that the allocator keeps for later back to the device, so that `memory_free` counts them."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def memory_total(device: torch.device, local_world: int) -> int:
    """Bytes that one rank could ever have: the device's own, or its part of this machine's and its control group's."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[1])
    return host_memory.limit_bytes() // local_world


def memory_limit(device_name: str) -> int:
    """Bytes that a device has, by its own name: an accelerator's memory, or what Linux and the control group let the
    processes of this machine have together."""
    return memory_total(torch.device(device_name), 1)


def start_memory_history(device: torch.device) -> bool:
    """Have the device's allocator note all that it gives out and takes back, with stacks; False where it cannot."""
    try:
        torch.get_device_module(device).memory._record_memory_history(max_entries=1_000_000)
    except AttributeError:  # a kind of device without
        return False
    return True


def save_memory_history(device: torch.device, path: Path) -> bool:
    """Write what was noted as the file that PyTorch's memory_viz reads, and stop noting; False where there is none."""
    try:
        memory = torch.get_device_module(device).memory
        memory._dump_snapshot(str(path))
        memory._record_memory_history(enabled=None)
    except AttributeError:
        return False
    return True


def out_of_memory(message: str) -> Exception:
    """The exception of a device's allocator when memory runs out."""
    return torch.OutOfMemoryError(message)


def _lines(path: Path) -> Sequence[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def cache_flushes(device: torch.device) -> int:
    """How often the device's allocator has had to give all that it kept for later back, to find memory; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    return int(torch.accelerator.memory_stats(device).get("num_alloc_retries", 0))
