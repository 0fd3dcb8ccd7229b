"""This machine's devices as a launcher sees them: a child process, which may touch them, finds them for the ranks."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.elastic.node import agent
from phalanx.report.logs import open_terminal
from phalanx.system.fork import fork_call
from phalanx.system.torchrun_env import device_of

# What a worker needs, imported once in the parent that forks the workers. Importing torch alone is not enough: the
# first optimizer step would import torch._dynamo in each worker.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "phalanx.trainer.train_rank",
    "phalanx.trainer.resolve",
    "numpy.ma",  # which numpy itself imports when it first looks something up
)
DEVICES_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class DeviceInfo:
    """A device of this machine, as a child process that may touch it found it."""

    name: str  # "cpu", or an accelerator with its index
    model: str  # what its maker calls it
    bf16: bool  # whether it computes in that type
    identity: str = ""  # what its driver knows it by; empty for a CPU, and for what is told by other nodes
    memory_bytes: int = 0  # all that it has; of a CPU all that this machine, or its control group, lets processes have
    cores: int = 0  # of a CPU, that this process may use


def preload_and_find_devices(on_cpu: bool, preload: Sequence[str] = PRELOAD) -> tuple[dict[str, DeviceInfo], list[str]]:
    """Import what workers need. Returns this machine's devices by name, and names of accelerators that may be used."""
    terminal = open_terminal()
    if terminal.is_terminal:
        terminal.print("[dim]importing torch[/dim]", end="\r")
    agent.preload(preload)
    found = {row[0]: DeviceInfo(*row) for row in fork_call(_probe_devices, timeout_s=DEVICES_TIMEOUT_S)}
    return found, [name for name in found if name != "cpu" and not on_cpu]


def assign_devices(found: Mapping[str, DeviceInfo], accelerators: Sequence[str], ranks: int | None) -> list[DeviceInfo]:
    """The device of each local rank. Raises ConfigError when there are more ranks than accelerators."""
    world = ranks or len(accelerators) or 1
    return [found[device_of(accelerators, rank, world)] for rank in range(world)]


def _probe_devices() -> list[tuple[str, str, bool, str, int, int]]:
    from phalanx.system import accelerator

    names = ["cpu", *accelerator.list_devices()]
    return [
        (
            name,
            accelerator.get_model_name(name),
            accelerator.supports_bf16(name),
            accelerator.driver_uuid(name),
            accelerator.memory_limit(name),
            len(os.sched_getaffinity(0)) if name == "cpu" else 0,
        )
        for name in names
    ]


def distinct_models(devices: Sequence[DeviceInfo]) -> list[str]:
    """What their makers call them, each once."""
    return sorted({device.model for device in devices})
