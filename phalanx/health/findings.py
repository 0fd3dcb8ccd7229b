"""Findings of a health check: severity, observation, remedy. Plain data."""

import enum
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.system.fork import DEVICES_TIMEOUT_S, fork_call
from phalanx.system.torchrun_env import device_of

VERSION = 1  # of the files that hold results and baselines


class Severity(enum.StrEnum):
    """The severity of a finding, which determines what must be done before the node is used again."""

    UNKNOWN = "unknown"  # could not be read, with these permissions or on this machine
    OK = "ok"
    WATCH = "watch"  # the node may be used, but should be watched
    RESET = "reset"  # not to be used until fixed: a GPU reset, disk space freed, a limit raised
    REBOOT = "reboot"  # not to be used before a reboot
    ISOLATE = "isolate"  # drain: hardware must be inspected or replaced


_ORDER = list(Severity)


@dataclass(frozen=True)
class Finding:
    """One finding of a check. `where` is the device, folder or node concerned, if there are several."""

    check: str
    severity: Severity
    sentence: str  # for the user, with the remedy
    value: float | str | None = None
    limit: float | str | None = None
    where: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"severity": str(self.severity)}


def finding_from_json(tree: dict[str, Any]) -> Finding:
    """Parse the output of `Finding.to_json`."""
    return Finding(**{**tree, "severity": Severity(tree["severity"])})


def verdict(findings: Iterable[Finding]) -> Severity:
    """The worst severity; `unknown` only if there is nothing else."""
    return max((finding.severity for finding in findings), key=_ORDER.index, default=Severity.UNKNOWN)


def is_usable(severity: Severity) -> bool:
    """Whether a node with this verdict may be used for training."""
    return severity in (Severity.OK, Severity.UNKNOWN, Severity.WATCH)


def at_least(findings: Iterable[Finding], severity: Severity) -> list[Finding]:
    """The findings of at least a severity, the worst first."""
    wanted = [finding for finding in findings if _ORDER.index(finding.severity) >= _ORDER.index(severity)]
    return sorted(wanted, key=lambda finding: -_ORDER.index(finding.severity))


def unique_sentences(findings: Sequence[Finding]) -> list[str]:
    """Sentences of findings for a user, each once."""
    return list(dict.fromkeys(finding.sentence for finding in findings))


# ------------------------------------------------------------------------------------------------------------- devices
# This machine's devices as a launcher sees them, found by a child process, which may initialize them, on behalf of the
# ranks.


# Modules that workers need, imported once in the parent that forks the workers. Importing torch alone is not enough:
# the first optimizer step would import torch._dynamo in each worker.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "phalanx.trainer.train_rank",
    "phalanx.trainer.resolve",
    "numpy.ma",  # imported lazily by numpy
)


@dataclass(frozen=True)
class DeviceInfo:
    """A device of this machine, as found by a child process."""

    name: str  # "cpu", or an accelerator with its index
    model: str  # the maker's name
    bf16: bool  # whether it supports bf16
    identity: str = ""  # the driver's identifier; empty for a CPU, and for devices of other nodes
    memory_bytes: int = 0  # total memory; for a CPU the limit of this machine or control group
    cores: int = 0  # cores of a CPU that this process may use


def preload_and_find_devices(on_cpu: bool, preload: Sequence[str] = PRELOAD) -> tuple[dict[str, DeviceInfo], list[str]]:
    """Import what workers need. Returns this machine's devices by name, and the names of usable accelerators."""
    # Imported here, since the monitor of a node (phalanx/provision/monitor.py) imports this module and has to stay
    # small.
    from phalanx.elastic.node import agent
    from phalanx.report.logs import open_terminal

    terminal = open_terminal()
    if terminal.is_terminal:
        terminal.print("[dim]importing torch[/dim]", end="\r")
    agent.preload(preload)
    found = {row[0]: DeviceInfo(*row) for row in fork_call(_probe_devices, timeout_s=DEVICES_TIMEOUT_S)}
    return found, [name for name in found if name != "cpu" and not on_cpu]


def assign_devices(found: Mapping[str, DeviceInfo], accelerators: Sequence[str], ranks: int | None) -> list[DeviceInfo]:
    """The device of each local rank. Raises ConfigError if there are more ranks than accelerators."""
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
    """The makers' names, each once."""
    return sorted({device.model for device in devices})
