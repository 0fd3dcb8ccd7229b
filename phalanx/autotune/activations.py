"""Choose `memory.activations: auto`: the cheapest mode with which a micro-batch fits, found by measuring.

Keeping everything costs no time, `selective` a little, and then there are two ways to keep only the blocks' inputs: on
the device (`full`), or on the host (`offload`), which holds more and costs no more time where the link between the two
carries a block's input while the block computes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from phalanx.autotune.link_speed import COPY_BYTES, measure_copy_rate
from phalanx.autotune.micro_batch import USABLE, MicroBatchFit, choose_probe_depths
from phalanx.autotune.probe_model import ProbeModel, open_probe_model
from phalanx.comm.mesh import join
from phalanx.config.load import update_config
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.models.counter_rng import CounterRNG
from phalanx.parallel.activations import check_horizon
from phalanx.system import accelerator
from phalanx.system import memory as host_memory
from phalanx.workload.workload import Workload

KEY = "memory.activations"
HIDDEN = 0.8  # of a block's forward pass, which its input's way to the host may take: links are not always idle
PASSES = 3  # of these the fastest counts

MicroBatchProbe = Callable[
    [Config], Sequence[MicroBatchFit]
]  # of each kind of device; raises ConfigError where no sample fits


@dataclass(frozen=True)
class OffloadTiming:
    """Offloading of one block's input for one sample: bytes, the link's rate, and the time to hide it in."""

    input_bytes: int
    bytes_per_s: float
    forward_s: float

    @property
    def is_hidden(self) -> bool:
        return self.input_bytes / self.bytes_per_s <= HIDDEN * self.forward_s

    def reason(self) -> str:
        return (
            f"a block's input of {self.input_bytes / 2**20:.1f} MiB takes "
            f"{1e3 * self.input_bytes / self.bytes_per_s:.2f} ms to the host and the block's forward pass "
            f"{1e3 * self.forward_s:.2f} ms"
        )


def choose_activation_mode(
    config: Config, workload: Workload, devices: Sequence[str], local_world: int, probe: MicroBatchProbe
) -> tuple[str, str, Sequence[MicroBatchFit]]:
    """Choose the mode for all `devices` (one of each model); returns it, the reason, and the result of `probe`.

    Raises ConfigError as `probe` does when nothing is enough.
    """
    blocks = len(workload.model().blocks())
    if not blocks:
        return "none", "the model has no blocks to compute again", probe(_with_mode(config, "none"))
    if config.parallel.pipeline > 1 and config.parallel.schedule == "zero_bubble":
        why = "each half of a backward pass of parallel.schedule zero_bubble would compute the activations again"
        return "none", why, probe(_with_mode(config, "none"))
    for mode, why in (
        ("none", "everything that a backward pass needs fits"),
        ("selective", "not everything that a backward pass needs fits"),
    ):
        try:
            return mode, why, probe(_with_mode(config, mode))
        except ConfigError:
            _forget(devices)
    less = "not even the results of products and attention fit"
    refused = _why_not_offload(config, workload, devices, local_world, blocks)
    if refused is None:
        links = [measure_offload_timing(config, workload, device) for device in devices]
        slow = next((link for link in links if not link.is_hidden), None)
        _forget(devices)
        if slow is None:
            return "offload", f"{less}; {links[0].reason()}", probe(_with_mode(config, "offload"))
        refused = slow.reason()
        try:
            return "full", f"{less}; {refused}, so the link would hold it up", probe(_with_mode(config, "full"))
        except ConfigError:
            _forget(devices)
            why = f"{less}, nor do the blocks' inputs, though the link holds training up: {refused}"
            return "offload", why, probe(_with_mode(config, "offload"))
    return "full", f"{less}; {refused}", probe(_with_mode(config, "full"))


def _with_mode(config: Config, mode: str) -> Config:
    return update_config(config, {KEY: mode})


def _forget(devices: Sequence[str]) -> None:
    for device in devices:
        accelerator.empty_cache(torch.device(device))


def _why_not_offload(
    config: Config, workload: Workload, devices: Sequence[str], local_world: int, blocks: int
) -> str | None:
    if any(torch.device(device).type == "cpu" for device in devices):
        return "on a CPU offload has nothing to gain: the host's memory is the device's"
    if config.parallel.pipeline > 1:
        return "offload knows of one micro-batch at a time, and a pipeline has several under way"
    try:
        check_horizon(blocks, config.memory.offload_prefetch_blocks)
    except ConfigError:
        ahead = config.memory.offload_prefetch_blocks
        return f"with memory.offload_prefetch_blocks {ahead} offload moves nothing of {blocks} blocks"
    if workload.spec is not None:
        dtype_bytes = 4 if config.train.dtype in ("fp32", "mixed") else 8 if config.train.dtype == "fp64" else 2
        input_bytes = config.data.seq_len * workload.spec.hidden * dtype_bytes
        needed = (blocks - config.memory.offload_prefetch_blocks) * host_memory.pinned_bytes(input_bytes) * local_world
        if needed > (free := USABLE * host_memory.free_bytes()):
            return (
                f"offload needs {needed / 2**30:.1f} GiB of this machine's memory for one sample of {local_world} "
                f"ranks, and has {free / 2**30:.1f}"
            )
    return None


def measure_offload_timing(config: Config, workload: Workload, device_name: str) -> OffloadTiming:
    """Measure the copy of a block's input to the host against the block's forward pass, for one sample."""
    device = torch.device(device_name)
    accelerator.set_device(device, 1)
    placement = Placement(rank=0, world=1, local_rank=0, local_world=1, node=0, device=str(device), store=None)
    seconds, input_bytes = [], 0
    depths = choose_probe_depths(workload, _with_mode(config, "full"))
    with join(placement, config.comm.timeout_s) as mesh:
        for layers in depths:
            with open_probe_model(_with_mode(config, "full"), workload, mesh, layers) as small:
                took, input_bytes, blocks = time_forward(small)
                seconds.append(took)
    each = seconds[0] / blocks if len(depths) == 1 else max(seconds[1] - seconds[0], 1e-9)
    return OffloadTiming(input_bytes, measure_device_to_host(device), each)


def time_forward(probe_model: ProbeModel) -> tuple[float, int, int]:
    """Seconds of a trial's forward pass of one sample, the bytes of the largest input of a block, and the blocks."""
    sizes = [0]

    def note(_: object, args: tuple[object, ...]) -> None:
        sizes.extend(each.nbytes for each in args if isinstance(each, torch.Tensor) and each.is_floating_point())

    batch, blocks, device = probe_model.make_batch(1), probe_model.model.blocks(), probe_model.mesh.device
    hooks = [block.register_forward_pre_hook(note) for block in blocks]
    fastest = float("inf")
    with torch.no_grad():
        for _ in range(PASSES + 1):  # the first of them may come behind what was queued before
            begun = time.perf_counter()
            probe_model.task.loss_sum(probe_model.model, batch, CounterRNG(0, 1, batch.samples))
            accelerator.synchronize(device)
            fastest = min(fastest, time.perf_counter() - begun)
    for hook in hooks:
        hook.remove()
    return fastest, max(sizes), len(blocks)


def measure_device_to_host(device: torch.device) -> float:
    """Bytes per second of copies from the device into pinned host memory (on a CPU, into other memory)."""
    there = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu")
    return measure_copy_rate(there, here, device)
