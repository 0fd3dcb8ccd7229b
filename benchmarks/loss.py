"""The chunked loss against the full logits: time and memory of forward and backward, interleaved in one call.

`cross_entropy_sum` never holds all logits and makes its gradients in the forward pass, and must not pay for it in time.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Row, at_least, at_most, machine, options, report, result, spread
from phalanx.models.layers import cross_entropy_sum
from phalanx.system import accelerator

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
SHAPES = ((4096, 256, 4096), (32768, 512, 2048))  # vocabulary, width, tokens
THREADS = 2


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What one would write: all logits at once."""
    return F.cross_entropy(hidden @ weight.T, labels, reduction="sum")


def step(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, int]:
    """Seconds of a forward and backward pass, and the bytes it added to the process at its height."""
    hidden.grad = weight.grad = None
    device = hidden.device
    accelerator.reset_peak_memory(device)
    before = accelerator.peak_memory(device)
    begun = time.perf_counter()
    loss(hidden, weight, labels).backward()
    return time.perf_counter() - begun, accelerator.peak_memory(device) - before


def compare(shape: tuple[int, int, int], turns: int) -> list[Row]:
    """A row a way of computing; the speed is over the full logits, turn by turn."""
    vocabulary, width, tokens = shape
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width).mul_(width**-0.5).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,))
    ways: dict[str, Loss] = {"full logits": full_logits, "chunked": cross_entropy_sum}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks = dict.fromkeys(ways, 0)
    for turn in range(turns + 1):
        for name in sorted(ways, reverse=turn % 2 == 1):
            taken, added = step(ways[name], hidden, weight, labels)
            if turn:  # the first is to warm up
                seconds[name].append(taken)
                peaks[name] = max(peaks[name], added)
    rows: list[Row] = []
    for name, times in seconds.items():
        ratios = [full / own for full, own in zip(seconds["full logits"], times, strict=True)]
        low, middle, high = spread(ratios)
        rows.append(
            {
                "way": name,
                "vocabulary": vocabulary,
                "width": width,
                "tokens": tokens,
                "seconds": spread(times)[1],
                "speed over full logits": middle,
                "quartiles": f"{low:.3f} .. {high:.3f}",
                "added, MiB": peaks[name] / 2**20,
            }
        )
    return rows


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    torch.set_num_threads(THREADS)
    rows = [row for shape in SHAPES for row in compare(shape, turns=10 if arguments.quick else 40)]
    checks = []
    for full, chunked in zip(rows[::2], rows[1::2], strict=True):
        name = f"vocabulary {full['vocabulary']}"
        checks.append(at_least(f"{name}: speed over full logits", chunked["speed over full logits"], 1.0))
        memory = chunked["added, MiB"] / full["added, MiB"]
        checks.append(at_most(f"{name}: memory over full logits", memory, 0.6))
    report(result("loss", machine(None, THREADS), rows, checks), arguments.json)


if __name__ == "__main__":
    main()
