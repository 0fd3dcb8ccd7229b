"""The device catalog: data-sheet figures of kinds of devices, used by plans before a device is measured.

Speeds are the maker's, without sparsity; `constants`, the same for all kinds, say how much of them a training step
reaches. Only `sustained` is not on a data sheet: the share of the peak matrix products per second that the best of
several shapes sustains within the device's power, as published: the maximum achievable matmul flop/s of Bekman's tables
(bf16: A100 271.2, H100 794.5, B200 1,745 Tflop/s), and for kinds that are not there the best of torch's products of
1,024 to 10,240 rows in a public collection of such runs, which for an A100 is a tenth lower. A T4 is capped by its 70 W
within seconds: products of 4,096 rows then run at 24 Tflop/s.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.device_peaks import find_peaks
from phalanx.core.errors import ConfigError

GB = 10**9
GIB = 2**30
UNMEASURED = 0.85  # `sustained` of kinds without a published figure: the middle of the known ones


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
    call_s: float = 0.0  # launch time of an operation on a CPU, beside its computation
    # Compute seconds that a CPU loses per byte sent and received; None: not measured
    carries_s_per_byte: float | None = None

    @property
    def multiplies_fp8_blocks(self) -> bool:
        """Whether `train.fp8: block` runs on its FP8 units: torch has a kernel with such scales for Hopper only."""
        return self.name.startswith(("H100", "H200"))

    def peak_flop_per_s(self, dtype: str) -> float:
        """Peak matrix products in a type, flop/s. Raises ConfigError for a type that the device does not support, or
        that has no figure here."""
        if dtype not in self.flop_per_s:
            raise ConfigError(
                f"a {self.name} computes no {dtype}, or a plan does not know how fast; it knows "
                f"{', '.join(sorted(self.flop_per_s))}: choose one of these"
            )
        return self.flop_per_s[dtype]

    def scale_speed(self, speed: float) -> "DeviceKind":
        """The device with measured speed: `speed` times the catalog's, in memory and arithmetic."""
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
# the Nvidia Hopper GPU Architecture, 2024. No figure is published for Blackwell.
_HOPPER = 0.63
_PCIE3, _PCIE4 = 16.0, 32.0  # GB/s of 16 lanes, in one direction

# Memory as reported by the devices, in GiB.
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
    """The error message for an unknown kind of device, with the figures that are needed and how to get them."""
    near = difflib.get_close_matches(name.upper().replace(" ", "-"), [*DEVICE_KINDS, *ALIASES], n=1)
    meant = f"; did you mean {near[0]}?" if near else "."
    return (
        f"no kind of device is called {name!r}; known are {', '.join(DEVICE_KINDS)}{meant} Of another one numbers are "
        "needed: seconds of passes of a model, bytes of memory, and bytes per second of its links to other devices and "
        "to its host. `phalanx hardware` on a node of them measures all; give its file as --hardware"
    )


# ----------------------------------------------------------------------------------------------------------- constants
# The few numbers that say how much of what is promised a training step reaches: one set for all devices and files. Each
# has a unit, a range within which it is physically plausible, and a default; `fit_constants` moves them within their
# ranges to what was measured. What differs between kinds of devices is on their data-sheets, not here.


@dataclass(frozen=True)
class CostConstants:
    """Shares are of a data-sheet's figure; seconds are of the host or a link; see RANGES for what is plausible."""

    matmul_share: float = 0.91  # of `sustained` that large products of a model's own shapes reach
    matmul_tail: float = 0.11  # waves of tiles that a product is longer by: the last one is half empty on average
    unaligned_share: float = 0.385  # of its speed that a product keeps whose rows do not begin at 16 bytes
    attention_share: float = 0.346  # of `sustained` that products inside attention reach
    memory_share: float = 0.9  # of the memory's bandwidth that a kernel reaches which only moves data
    traffic: float = 1.28  # times the counted passes over activations that element-wise kernels really make
    launch_s: float = 25e-6  # of the host for a kernel, forward or backward
    queueing: float = 1.64  # how sharply a pass takes the longer of the host's and the device's time, as a p-norm
    skew_s: float = 50e-6  # that a collective waits for the last of its ranks, for each doubling of them
    near_share: float = 0.95  # of the bandwidth between devices of a node that a large collective reaches
    far_share: float = 0.58  # of the bandwidth between nodes
    interference: float = 0.6  # of the time of a hidden collective, by which computation is longer
    step_s: float = 6.4e-3  # of the host, once a step
    jitter: float = 0.007  # of a step, for each doubling of the copies: the slowest of many is waited for
    slack: float = 0.025  # of a device's memory that fragmentation and workspaces take


# What a constant may be at all: (least, most). Beyond these it is no physics but a mistake elsewhere.
RANGES: dict[str, tuple[float, float]] = {
    "matmul_share": (0.7, 1.0),
    "matmul_tail": (0.0, 1.0),
    "unaligned_share": (0.2, 1.0),
    "attention_share": (0.2, 0.9),
    "memory_share": (0.5, 0.95),
    "traffic": (0.7, 2.0),
    "launch_s": (2e-6, 60e-6),
    "queueing": (1.5, 8.0),
    "skew_s": (0.0, 1e-3),
    "near_share": (0.3, 0.95),
    "far_share": (0.3, 0.95),
    "interference": (0.0, 0.6),
    "step_s": (1e-4, 5e-2),
    "jitter": (0.0, 0.05),
    "slack": (0.0, 0.15),
}
UNITS: dict[str, str] = {
    "matmul_tail": "waves of tiles",
    "launch_s": "seconds",
    "skew_s": "seconds",
    "step_s": "seconds",
}  # the others are ratios
DEFAULT_CONSTANTS = CostConstants()

# One measurement: seconds of its step, as a set of constants would have it, and as it was measured.
Row = tuple[Callable[[CostConstants], float], float]

SURE = 0.05  # what a good prediction is off by: the relative error that counts as much as ...
LIKELY = 0.05  # ... so much of a constant's range, away from where it was
ROUGH = 0.10  # relative error from which on a row counts by its size, not its square: one bad run must not rule
NUDGE = 1e-3  # of a range, to see which way is down
ROUNDS = 12
ENOUGH = 1e-4  # relative gain below which a round was the last


def fit_constants(rows: Sequence[Row], start: CostConstants = DEFAULT_CONSTANTS) -> CostConstants:
    """The constants within RANGES that explain `rows` best, near `start` where they say nothing. Deterministic.

    Bounded damped least squares (Levenberg 1944; Marquardt 1963) of the logarithms of predicted over measured, with
    errors above ROUGH counted by their size (Huber 1964), and a normal prior of LIKELY around `start`, so that few rows
    move only what they speak of. No row at all leaves `start` as it is.
    """
    names = [name for name in RANGES if name != "slack"]  # of memory, which no row here speaks of

    def at(point: Sequence[float]) -> CostConstants:
        values = {
            name: RANGES[name][0] + part * (RANGES[name][1] - RANGES[name][0])
            for name, part in zip(names, point, strict=True)
        }
        return replace(start, **values)

    def errors(point: Sequence[float]) -> list[float]:
        constants = at(point)
        return [math.log(predict(constants) / measured) for predict, measured in rows]

    origin = [(getattr(start, name) - RANGES[name][0]) / (RANGES[name][1] - RANGES[name][0]) for name in names]
    point, found = list(origin), errors(origin)
    stiff = (SURE / LIKELY) ** 2
    loss = _loss(found, point, origin, stiff)
    damping = 1e-3
    for _ in range(ROUNDS):
        slopes = []
        for index, part in enumerate(point):
            step = NUDGE if part + NUDGE <= 1.0 else -NUDGE
            beside = errors([*point[:index], part + step, *point[index + 1 :]])
            slopes.append([(after - before) / step for after, before in zip(beside, found, strict=True)])
        weights = [1.0 if abs(error) <= ROUGH else ROUGH / abs(error) for error in found]
        normal = [
            [sum(w * a * b for w, a, b in zip(weights, one, other, strict=True)) for other in slopes] for one in slopes
        ]
        downhill = [
            -sum(w * a * e for w, a, e in zip(weights, slope, found, strict=True)) - stiff * (part - begun)
            for slope, part, begun in zip(slopes, point, origin, strict=True)
        ]
        before = loss
        while damping < 1e6:
            tried = _bounded_step(normal, downhill, point, stiff, damping)
            there = errors(tried)
            if (less := _loss(there, tried, origin, stiff)) < loss:
                point, found, loss, damping = tried, there, less, damping / 5
                break
            damping *= 5
        if before - loss <= ENOUGH * before:
            break
    return at(point)


def _loss(errors: Sequence[float], point: Sequence[float], origin: Sequence[float], stiff: float) -> float:
    rough = sum(error**2 if abs(error) <= ROUGH else ROUGH * (2 * abs(error) - ROUGH) for error in errors)
    return rough + stiff * sum((part - begun) ** 2 for part, begun in zip(point, origin, strict=True))


def _bounded_step(
    normal: list[list[float]], downhill: list[float], point: list[float], stiff: float, damping: float
) -> list[float]:
    """One step from `point` within [0, 1]: a coordinate that would leave it stays at its bound, and the rest is solved
    again."""
    free = list(range(len(point)))
    tried = list(point)
    while free:
        matrix = [
            [normal[i][j] + (stiff + damping * (1.0 + normal[i][i]) if i == j else 0.0) for j in free] for i in free
        ]
        moves = _solve(matrix, [downhill[i] for i in free])
        beyond = [i for i, move in zip(free, moves, strict=True) if not 0.0 <= point[i] + move <= 1.0]
        for i, move in zip(free, moves, strict=True):
            tried[i] = min(1.0, max(0.0, point[i] + move))
        if not beyond:
            break
        free = [i for i in free if i not in beyond]
    return tried


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination of a positive definite system."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[below][column] -= factor * rows[pivot][column]
    solution = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][column] * solution[column] for column in range(index + 1, size))
        solution[index] = (rows[index][size] - known) / rows[index][index]
    return solution
