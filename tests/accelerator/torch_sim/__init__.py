"""A simulated accelerator, device type "sim": its streams really defer, so that a missing wait is a wrong number.

A kernel is queued on the current stream and runs later, on the CPU, on aliases of the device's memory. Memory is
poisoned when it is given out. `register` (or torch itself, where the library's folder is on Python's path) makes the
device known; the environment is read when a process first touches it:

| variable | |
|---|---|
| SIM_ORDER | when tasks of streams run, below; lazy |
| SIM_DELAY_US | in the order `threads`: one task in eight comes up to so many microseconds late; 0 |
| SIM_SEED | of the delays, and of the order `random`; 0 |
| SIM_DEVICES | number of devices; 1 |
| SIM_MEMORY_MB | memory of each device, for each process; 4096 |
| SIM_LINK_MB_S | megabytes a second that go between host and device in each stream; 0: as fast as memory |
| SIM_POISON | 1: memory that is given out, pinned memory too, holds NaN (integers: -1); 1 |
| SIM_FAIL | "cublas:3,nccl:1": the third matrix product fails for want of memory, and the first collective; likewise \
pinned (host memory), allocator (of the device's memory, which fails also where that is full) and kernel (which fails \
when it runs); "hang/1:7": the seventh kernel of device 1 never ends |
| SIM_COLLECTIVES | 0: the device has none of its own, as kinds that PyTorch knows no backend for; 1 |
| SIM_SLICES | so many neighbouring devices are slices (MIG) of one; 1 |
| SIM_CONNECTIONS | 1: the device runs collectives in the order in which they were queued, whatever their groups and \
streams, as with CUDA_DEVICE_MAX_CONNECTIONS=1; 8 |
| SIM_WATCHDOG | 1: a collective that passes its group's timeout ends the process by SIGABRT, as NCCL's does; 1 |
| SIM_MACHINE | machines of unlike names have devices of their own; 0 |
| SIM_WATCHDOG_GRACE_MS | how long after that; 500 |

Orders: `eager` runs each task at once, which hides what is missing; `lazy` runs nothing before the host waits for it;
`side_last` and `main_last` run one kind of stream at once and the other like `lazy`; `random` lets a stream run some of
its tasks now and then; `threads` has a thread for each stream. Several ranks with collectives of their own need
`threads` (or `eager`): in the others nothing runs while a rank waits for another.

The backend of its process groups is `simccl` (over gloo), which behaves as NCCL: collectives run on a stream of the
group, and `wait` holds the current stream and not the host.
"""

import contextlib
import datetime
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

import torch

from tests.accelerator import build

NAME = "sim"
_module: Any = None  # the library


def register() -> None:
    """Make the device and its backend known to torch in this process, without touching the device."""
    global _module  # noqa: PLW0603
    if _module is not None:
        return
    path = str(build.library())
    loader = importlib.machinery.ExtensionFileLoader("torch_sim_C", path)
    spec = importlib.util.spec_from_file_location("torch_sim_C", path, loader=loader)
    assert spec is not None
    _module = importlib.util.module_from_spec(spec)
    loader.exec_module(_module)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _module.set_host_groups(_host_group)
    if os.environ.get("SIM_COLLECTIVES", "1") == "1":
        torch.distributed.Backend.register_backend("simccl", _group, devices=[NAME])
    _tell_phalanx()


def counts() -> dict[str, int]:
    """How many kernels were "queued", and "sync NAME": how many of which the host had to wait for."""
    found: dict[str, int] = _module.counts()
    return found


def pending() -> dict[str, int]:
    """Tasks that have not run yet, by "DEVICE/STREAM"."""
    found: dict[str, int] = _module.pending()
    return found


def fail_at(kind: str, number: int = 1) -> None:
    """Have the `number`th call from now fail; kinds are those of SIM_FAIL."""
    _module.fail_at(kind, number)


def _index(device: Any) -> int:
    """The index of a device that is given in any of torch's ways; None is the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _module.current_device() if index is None else index


def _device_module() -> types.ModuleType:
    """What torch and its users look for in `torch.sim`, as in `torch.cuda`."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator
    module.device_count = _module.device_count
    module.is_available = lambda: _module.device_count() > 0
    module.is_initialized = _module.opened
    module._is_in_bad_fork = _module.forked_after_opening
    module._lazy_init = lambda: None
    module.current_device = _module.current_device
    module.set_device = lambda device: _module.set_device(_index(device))
    module.device = lambda device: accelerator.device_index(_index(device))
    module.synchronize = accelerator.synchronize
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = accelerator.current_stream
    module.set_stream = accelerator.set_stream
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.get_device_name = lambda device=None: _properties(device).name
    module.get_device_properties = _properties
    module.is_bf16_supported = lambda including_emulation=True: True
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    for name in (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
        "empty_cache", "reset_peak_memory_stats",
    ):  # fmt: skip
        setattr(module, name, getattr(accelerator, name))
    module.cudart = lambda: types.SimpleNamespace(cudaHostRegister=_register)
    module.mem_get_info = accelerator.get_memory_info
    module.manual_seed = lambda seed: _module.default_generator(_index(None)).manual_seed(seed)
    module.manual_seed_all = _module.seed_all
    module.get_rng_state = lambda device=None: _module.default_generator(_index(device)).get_state()
    module.set_rng_state = lambda state, device=None: _module.default_generator(_index(device)).set_state(state)
    made: types.ModuleType = module
    return made


def _register(address: int, size: int, flags: int) -> int:
    """As CUDA's runtime: 0, or the number of an error."""
    return 0 if _module.register_host(address, size) else 712


def _properties(device: Any = None) -> types.SimpleNamespace:
    index, slices = _index(device), int(os.environ.get("SIM_SLICES", "1"))
    name = "Simulated accelerator" + (" MIG 1g.5gb" if slices > 1 else "")
    # Of this machine's device, whatever process asks.
    uuid = f"SIM-{os.environ.get('SIM_MACHINE', '0')}-{index}"
    found = types.SimpleNamespace(name=name, total_memory=_module.memory_bytes(), multi_processor_count=1, uuid=uuid)
    found.pci_domain_id, found.pci_bus_id, found.pci_device_id = 0, index // slices, 0
    return found


def _group(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """A group of `simccl`. Below a default group that is bound to its device it is a split of that one, as with NCCL:
    all ranks take part, those outside by `perform_nocolor_split`, which torch calls."""
    dist = torch.distributed
    default: Any = dist.group.WORLD if dist.is_initialized() else None
    bound = None if default is None else default.bound_device_id
    if bound is not None and bound.type == NAME:
        parent = default._get_backend(bound)
        if isinstance(parent, _module.Group):
            parent.meet_for_split()
    return _module.Group(store, _host_group(store, rank, size, timeout), timeout)


def _host_group(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """The gloo group below a group of `simccl`. The store is that of the gloo group beside it, too, in a split."""
    dist = torch.distributed
    return dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, timeout)


def _tell_phalanx() -> None:
    """Where the package was imported first, as in the tests' warm parents, its backend is registered again, for it asks
    what kind of accelerator there is; on a real machine the answer is there before."""
    if "phalanx.comm.backend" in sys.modules:
        sys.modules["phalanx.comm.backend"].register()
