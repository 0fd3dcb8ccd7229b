"""Kinds of devices as plain numbers from their data-sheets: what a plan knows of a device that nobody has measured yet.

Speeds are what a maker promises, without sparsity; how much of them a training step reaches is said by `constants`,
the same for all kinds. Only `sustained` is not on a data-sheet: the share of the promised matrix products per second
that the best of several shapes holds within the device's power, as measured by others: the maximum achievable matmul
flop/s of Bekman's tables (bf16: A100 271.2, H100 794.5, B200 1,745 Tflop/s), and for kinds that are not there the best
of torch's products of 1,024 to 10,240 rows in a public collection of such runs, which for an A100 is a tenth lower. A
T4 is capped by its 70 W within seconds: products of 4,096 rows then go on at 24 Tflop/s.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.device_peaks import find_peaks
from phalanx.core.errors import ConfigError

GB = 10**9
GIB = 2**30
UNMEASURED = 0.85  # `sustained` of a kind for which nobody has published it: the middle of those that are known


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device. Bytes and flop per second are of one device; links count one direction."""

    name: str
    flop_per_s: Mapping[str, float]  # of dense matrix products, by type: fp64, fp32, bf16, fp16, fp8
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to the other devices of its node
    link_latency_s: float
    cores: int  # streaming multiprocessors, over which tiles of a matrix product are spread
    source: str
    sustained: float = UNMEASURED
    attention: float = 1.0  # of matrix products that attention's kernels reach, if written for the generation before
    host_bytes_per_s: float = 12e9  # between device and host
    reserved_bytes: int = 3 * GIB // 4  # that the driver's context and the collectives' buffers take of its memory
    update: float = 1.0  # of its memory's bandwidth that updates reach, where a run has shown it
    speed: float = 1.0  # times as fast as its data-sheet says; of a CPU, which has none to speak of, always 1
    on_host: bool = False  # a CPU: nothing is queued, its memory is the host's, and it carries all that is sent itself
    call_s: float = 0.0  # of a CPU for an operation, beside what it computes
    carries_s_per_byte: float | None = None  # of a CPU's computing, for what it sends and gets; None: not measured

    def peak_flop_per_s(self, dtype: str) -> float:
        """Matrix products per second in a type, flop/s. Raises ConfigError for one that the device has no unit for, or
        of which nothing is known here."""
        if dtype not in self.flop_per_s:
            raise ConfigError(
                f"a {self.name} computes no {dtype}, or a plan does not know how fast; it knows "
                f"{', '.join(sorted(self.flop_per_s))}: choose one of these"
            )
        return self.flop_per_s[dtype]

    def scale_speed(self, speed: float) -> "DeviceKind":
        """The same device as it was measured: `speed` times as fast as was thought, in memory and arithmetic alike."""
        faster = {dtype: flops * speed for dtype, flops in self.flop_per_s.items()}
        found = replace(self, flop_per_s=faster, memory_bytes_per_s=self.memory_bytes_per_s * speed)
        # What processes of one host exchange is copied by themselves.
        if self.on_host:
            return replace(found, link_bytes_per_s=self.link_bytes_per_s * speed)
        return replace(found, speed=self.speed * speed)


_MAMF = "sustained: S. Bekman, Machine Learning Engineering, table of maximum achievable matmul flop/s"
_COLLECTED = "sustained: zzc0721, torch-performance-test-data, 2025-2026"


def _kind(
    name: str, memory: int, bandwidth: float, link: float, cores: int, source: str, chip: str = "", **more: Any
) -> DeviceKind:
    """GiB, GB/s of memory and of links in one direction; `chip` as its maker calls it, where that is another name."""
    latency = more.pop("link_latency_s", 3e-6)
    peaks = find_peaks(chip or name)
    return DeviceKind(name, peaks, memory * GIB, bandwidth * GB, link * GB, latency, cores, source, **more)


# Warp-level matrix instructions, which FlashAttention 2 and Triton of 2023 use: Luo et al., Benchmarking and Dissecting
# the Nvidia Hopper GPU Architecture, 2024. Of Blackwell nobody has published it.
_HOPPER = 0.63
_PCIE3, _PCIE4 = 16.0, 32.0  # GB/s of 16 lanes, in one direction

# Memory is what the devices report, in GiB.
DEVICE_KINDS: dict[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        _kind(
            "V100-16GB", 16, 900, 150, 80,
            f"NVIDIA V100 SXM2 data-sheet, 2020; {_COLLECTED}, 97.4 Tflop/s",
            sustained=0.779,
        ),
        _kind(
            "V100-32GB", 32, 900, 150, 80,
            f"NVIDIA V100 SXM2 data-sheet, 2020; {_COLLECTED}, 97.4 Tflop/s",
            sustained=0.779,
        ),
        _kind(
            "T4", 15, 300, _PCIE3, 40,
            "NVIDIA T4 data-sheet, 2019; sustained: NVIDIA developer forum, About GPU peak performance, 2023",
            link_latency_s=8e-6, sustained=0.37,
        ),
        _kind(
            "A10G", 22, 600, _PCIE4, 80,
            f"NVIDIA A10G data-sheet, 2021 (80 multiprocessors, an A10 has 72); {_COLLECTED}, 69.5 Tflop/s",
            link_latency_s=8e-6, host_bytes_per_s=24e9, sustained=0.99,
        ),
        _kind(
            "A40", 44, 696, _PCIE4, 84,
            f"NVIDIA A40 data-sheet, 2021; {_COLLECTED}, 122 Tflop/s",
            link_latency_s=8e-6, host_bytes_per_s=24e9, sustained=0.817,
        ),
        _kind(
            "L40S", 44, 864, _PCIE4, 142,
            f"NVIDIA L40S data-sheet, 2023; {_COLLECTED}, 269 Tflop/s",
            link_latency_s=8e-6, host_bytes_per_s=24e9, sustained=0.743,
        ),
        _kind(
            "A100-40GB", 40, 1555, 300, 108, f"NVIDIA A100 SXM data-sheet, 2021; {_MAMF}",
            sustained=0.869, host_bytes_per_s=24e9,
        ),
        _kind(
            "A100-80GB", 79, 2039, 300, 108, f"NVIDIA A100 SXM data-sheet, 2021; {_MAMF}",
            sustained=0.869, host_bytes_per_s=24e9,
        ),
        _kind(
            "H100-80GB", 79, 3350, 450, 132, f"NVIDIA H100 SXM data-sheet, 2023; {_MAMF}",
            sustained=0.803, attention=_HOPPER, host_bytes_per_s=50e9,
        ),
        _kind(
            "H200", 139, 4800, 450, 132, f"NVIDIA H200 SXM data-sheet, 2024; {_MAMF}, of the H100",
            sustained=0.803, attention=_HOPPER, host_bytes_per_s=50e9,
        ),
        _kind(
            "B200", 178, 7700, 900, 148, f"NVIDIA HGX B200 data-sheet, 2025; {_MAMF}",
            sustained=0.776, attention=_HOPPER, host_bytes_per_s=50e9,
        ),
        _kind(
            "RTX-3090", 24, 936, _PCIE4 / 2, 82,
            f"NVIDIA GA102 whitepaper, 2020; {_COLLECTED}: 75.6 Tflop/s, beyond the promised clock",
            link_latency_s=8e-6, sustained=1.0, chip="RTX 3090",
        ),
        _kind(
            "RTX-4090", 24, 1008, _PCIE4 / 2, 128,
            f"NVIDIA Ada whitepaper, 2022; {_COLLECTED}, 165 Tflop/s", link_latency_s=8e-6, sustained=1.0,
            chip="RTX 4090",
        ),
        DeviceKind(
            "CPU", {"fp64": 0.25e12, "fp32": 0.5e12, "bf16": 0.25e12, "fp16": 0.25e12}, 64 * GIB, 50e9, 10e9, 2e-5, 1,
            "16 cores of 32 flop a cycle at 1 GHz, DDR4-3200 in two channels: an order of magnitude, so measure it",
            host_bytes_per_s=50e9, reserved_bytes=GIB // 2, on_host=True,
        ),
    )
}  # fmt: skip

ALIASES = {"A100": "A100-40GB", "V100": "V100-16GB", "H100": "H100-80GB", "RTX3090": "RTX-3090", "RTX4090": "RTX-4090"}


def find_kind(name: str) -> DeviceKind | None:
    """The kind of that name, whatever its case; spaces and underscores count as hyphens; None of an unknown one."""
    wanted = name.strip().replace("_", "-").replace(" ", "-").lower()
    names = {key.lower(): kind for key, kind in DEVICE_KINDS.items()}
    names |= {alias.lower(): DEVICE_KINDS[key] for alias, key in ALIASES.items()}
    names |= {key.removesuffix("gb"): kind for key, kind in names.items() if key.endswith("gb")}
    return names.get(wanted)


def unknown_kind_message(name: str) -> str:
    """What is said of a kind that nobody knows: which numbers are needed of it, and what finds them."""
    near = difflib.get_close_matches(name.upper().replace(" ", "-"), [*DEVICE_KINDS, *ALIASES], n=1)
    meant = f"; did you mean {near[0]}?" if near else "."
    return (
        f"no kind of device is called {name!r}; known are {', '.join(DEVICE_KINDS)}{meant} Of another one numbers are "
        "needed: seconds of passes of a model, bytes of memory, and bytes per second of its links to other devices and "
        "to its host. `phalanx hardware` on a node of them measures all; give its file as --hardware"
    )
