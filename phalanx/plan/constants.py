"""The few numbers that say how much of what is promised a training step reaches: one set for all devices and files.

Each has a unit, a range within which it is physically plausible, and a default; `fit` moves them within their ranges
to what was measured. What differs between kinds of devices is on their data-sheets, not here.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Shares are of a data-sheet's figure; seconds are of the host or a link; see RANGES for what is plausible."""

    matmul_share: float = 0.92  # of `sustained` that large products of a model's own shapes reach
    matmul_tail: float = 0.5  # waves of tiles that a product is longer by: the last one is half empty on average
    unaligned_share: float = 0.35  # of its speed that a product keeps whose rows do not begin at 16 bytes
    attention_share: float = 0.55  # of `sustained` that products inside attention reach
    memory_share: float = 0.80  # of the memory's bandwidth that a kernel reaches which only moves data
    traffic: float = 1.1  # times the counted passes over activations that element-wise kernels really make
    launch_s: float = 12e-6  # of the host for a kernel, forward or backward
    queueing: float = 2.5  # how sharply a pass takes the longer of the host's and the device's time, as a p-norm
    skew_s: float = 1e-4  # that a collective waits for the last of its ranks, for each doubling of them
    near_share: float = 0.75  # of the bandwidth between devices of a node that a large collective reaches
    far_share: float = 0.80  # of the bandwidth between nodes
    interference: float = 0.15  # of the time of a hidden collective, by which computation is longer
    step_s: float = 2e-3  # of the host, once a step
    jitter: float = 0.01  # of a step, for each doubling of the nodes: the slowest of many is waited for
    slack: float = 0.06  # of a device's memory that fragmentation and workspaces take


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
    "slack": (0.02, 0.15),
}
UNITS: dict[str, str] = {
    "matmul_tail": "waves of tiles",
    "launch_s": "seconds",
    "skew_s": "seconds",
    "step_s": "seconds",
}  # the others are ratios
DEFAULT = Constants()

Predict = Callable[[Constants], float]  # seconds of one measured step, as predicted
