"""Measure the devices of a job for this model: seconds by size of micro-batch, memory, copies, the link.

Every rank measures its own device, all at the same time, since neighbours share a machine; the results are gathered, so
that all ranks know the same. Times are of forward and backward passes, uncompiled; those of a deep model follow from
models of one and two blocks, as its memory does (`micro_batch.py`). A run starts with these figures and continues to
measure in training.
"""

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx.autotune.link_speed import measure_host_to_device, measure_link
from phalanx.autotune.micro_batch import (
    SIZES,
    USABLE,
    bytes_of_more_rows,
    choose_probe_depths,
    fit_micro_batch,
)
from phalanx.autotune.probe_model import ProbeModel, open_probe_model, shorten_rows
from phalanx.autotune.rank_bytes import state_bytes
from phalanx.autotune.state_shares import compute_state_weights
from phalanx.comm.mesh import Mesh, join, single_rank_mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import is_out_of_memory
from phalanx.core.placement import ExitCode, Placement
from phalanx.layout import hardware
from phalanx.layout.balance import UNBOUND
from phalanx.layout.hardware import Hardware, MeasuredDevice
from phalanx.layout.model_shape import ModelSpec, list_timing_shapes
from phalanx.system import accelerator
from phalanx.workload.engines import StateWeights, agree_on_sharding
from phalanx.workload.expert_counts import find_expert_counts
from phalanx.workload.workload import Workload, make_workload

if TYPE_CHECKING:
    from phalanx.config.schema import Config

BLOCK_S = 0.04  # passes are timed together for so long: some periods of a CPU quota, which runs a process in bursts
BLOCKS = 5  # of each size; the second fastest counts, which a neighbour that comes and goes disturbs least
# For all sizes of all depths, first passes included, when a run begins and when a user asks for nothing else; on a slow
# device no size is begun of which a pass would take a quarter of it.
BUDGET_S, LONG_BUDGET_S = 0.8, 4.0
GROWTH = 3  # from one size to the next
MEASURED = ("auto", "measured-once")  # of balance.batch: speeds count
STORE_KEY = "measured"  # in the store: how many ranks are


def run_measurement(config: "Config", spec: ModelSpec | None, placement: Placement, file: Path) -> ExitCode:
    """Run one rank of a job that only measures; rank 0 writes `file`. Raises as training does."""
    threads = accelerator.threads_per_rank(placement.threads, placement.local_world)
    accelerator.set_device(torch.device(placement.device), threads)
    with join(placement, config.comm.timeout_s) as mesh:
        config = agree_on_sharding(config, mesh)
        subject = make_workload(config, spec)
        weights = compute_state_weights(config, subject, mesh, placement.local_world)
        known = measure_devices(config, subject, placement, mesh, lambda why: None, LONG_BUDGET_S, weights)
        if mesh.rank == 0:
            hardware.write_hardware(file, known)
        mesh.min([1.0])  # the file is written: a node that is lost from now on does not matter
    return ExitCode.DONE


def measure_devices(
    config: "Config",
    workload: Workload,
    placement: Placement,
    mesh: Mesh,
    report: Callable[[str], None],
    budget_s: float = BUDGET_S,
    weights: StateWeights = None,
    limit: int = UNBOUND,
) -> Hardware:
    """Measure the devices of all ranks, and the link between them. Collective; the same on all ranks. `weights`: how
    much of the state each rank holds, if not all the same; no more than `limit` sequences are tried on this one.

    A device on which not even two blocks and one sequence fit has no times. Where devices of one model differ, all are
    measured once more, and rank 0 calls `report` with the reason: other users of the machine can only make a device
    slower.
    """
    config, workload = shorten_rows(config, workload)
    known, fit = _measure_once(config, workload, placement, mesh, budget_s, weights, limit, turn=0)
    if (why := hardware.describe_uneven_devices(known)) is not None:
        if mesh.rank == 0:
            report(why)
        again, fit = _measure_once(config, workload, placement, mesh, budget_s, weights, limit, turn=1)
        known = hardware.merge_fastest(known, again)
    if config.parallel.expert == 1 or config.balance.experts != "auto" or config.balance.batch not in MEASURED:
        return known
    # Experts follow the speeds, and a rank's state and rows follow its experts.
    fits = mesh.gather(fit(find_expert_counts(config, workload.spec, hardware.fit_speeds(known))))
    devices = (replace(device, most=int(most)) for device, most in zip(known.devices, fits, strict=True))
    return replace(known, devices=tuple(devices))


def _measure_once(
    config: "Config", workload: Workload, placement: Placement, mesh: Mesh, budget_s: float, weights: StateWeights,
    limit: int, turn: int,
) -> tuple[Hardware, Callable[[Sequence[int]], int]]:  # fmt: skip
    """The measurement, and what gives the most samples that fit on this rank where ranks that divide experts have so
    many each (none: as the recipe says)."""
    mesh.sum([0.0])  # all begin together
    with single_rank_mesh(mesh) as single:
        single.traffic.progress_page = pulse = (
            mesh.traffic.progress_page
        )  # what is tried may be too much, and is not tried again then
        others = _make_others_measure(mesh, turn)
        processor, begun = time.process_time(), time.perf_counter()
        times, fit = _measure_own_device(config, workload, single, placement.local_world, budget_s, others, limit)
        processor_s, wall_s = time.process_time() - processor, time.perf_counter() - begun
        if pulse is not None:
            pulse.set_largest_micro_batch(0)

    def fit_beside(experts: Sequence[int]) -> int:
        state = state_bytes(config, workload, mesh.device, mesh.world, weights, mesh.rank, experts)
        place = mesh.rank % config.parallel.expert
        return fit(state, bytes_of_more_rows(config, workload, experts, place) if experts else 0)

    link, carried_s = measure_link(mesh)
    # What a byte takes of the processor, over what this rank has of it: a part of a core, or several.
    carries = None if carried_s is None or mesh.device.type != "cpu" else carried_s * wall_s / max(processor_s, 1e-9)
    mine = MeasuredDevice(
        rank=mesh.rank,
        node=placement.node,
        local_rank=placement.local_rank,
        host=socket.gethostname(),
        name=placement.device,
        model=accelerator.get_device_name(mesh.device),
        memory_bytes=accelerator.memory_total(mesh.device, placement.local_world),
        most=fit_beside(()),
        times=times,
        host_to_device_bytes_per_s=measure_host_to_device(mesh.device),
        carries_s_per_byte=carries,
    )
    group = JsonGroup(mesh.checkpoint)
    rows = group.gather_objects(asdict(mine))
    whole = None
    if rows is not None:
        whole = {"version": hardware.VERSION, "work": describe_work(config, workload), "devices": rows}
        whole["link"] = None if link is None else asdict(link)
    return hardware.from_json(group.broadcast_object(whole)), fit_beside


def describe_work(config: "Config", workload: Workload) -> dict[str, Any]:
    """What decides how long a pass takes and how much it holds, as JSON has it."""
    shapes = {} if workload.spec is None else list_timing_shapes(workload.spec)
    parameters = sum(parameter.numel() for parameter in workload.model().parameters())
    how = {
        "task": config.task.kind,
        "parameters": parameters,
        "positions": -(-workload.positions // config.parallel.context),
        "dtype": config.train.dtype,
        "activations": config.memory.activations,
    }
    if config.memory.activations == "offload":
        how["horizon"] = config.memory.offload_prefetch_blocks
    work: dict[str, Any] = json.loads(json.dumps(how | shapes))
    return work


def _make_others_measure(mesh: Mesh, turn: int) -> Callable[[], bool]:
    """A function that says, when it is first called, that this rank has measured, and whether others still have not,
    for as long as one may be late."""
    begun: list[float] = []
    done = f"{STORE_KEY}/{turn}"

    def still() -> bool:
        if not begun:
            begun.append(time.monotonic())
            mesh.roll_call.store.add(done, 1)
        return mesh.roll_call.store.add(done, 0) < mesh.world and time.monotonic() < begun[0] + mesh.roll_call.timeout_s

    return still


@dataclass
class _SizeTimings:
    """What a trial took, by size of micro-batch; `full`: a larger one did not fit."""

    peaks: dict[int, int]
    seconds: dict[int, float]
    full: bool = False


def _measure_own_device(
    config: "Config",
    workload: Workload,
    mesh: Mesh,
    local_world: int,
    budget_s: float,
    others_measure: Callable[[], bool],
    limit: int = UNBOUND,
) -> tuple[tuple[tuple[int, float], ...], Callable[[int, int], int]]:
    """(samples, seconds of the whole model), and what gives the most samples that fit beside so many bytes of state,
    where each takes so many more than was measured. `mesh` is of this rank alone. When it is done, its device is kept
    as busy as in training for as long as `others_measure`. `limit`: samples that are tried at most."""
    assert config.train.micro_batch != "auto"
    # Of memory, not of what is asked for today: train.micro_batch may be another at the next start.
    all_samples = config.train.global_batch
    free = accelerator.memory_free(mesh.device, local_world)
    # One size alone would not tell what a sample more takes.
    sizes, walks = (
        _sizes(min(max(config.train.micro_batch, *SIZES), all_samples, limit)),
        dict[int | None, _SizeTimings](),
    )
    depths, begun = choose_probe_depths(workload, config), time.perf_counter()
    try:
        for number, layers in enumerate(depths, 1):
            with open_probe_model(config, workload, mesh, layers) as small:
                until = begun + budget_s * number / len(depths)
                walks[layers] = _time_sizes(small, sizes, free * USABLE, budget_s, until)
                sizes = list(walks[layers].seconds)
                while len(walks) == len(depths) and others_measure():
                    small.measure_seconds(1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        others_measure()  # or they would wait for this rank
        return (), lambda state, more: 1
    peaks, device = {layers: walk.peaks for layers, walk in walks.items()}, mesh.device
    tried = min(limit, sizes[-1]) if any(walk.full for walk in walks.values()) else limit

    def fit(state: int, more: int) -> int:
        if len(sizes) == 1:
            return min(all_samples, tried)
        finding = fit_micro_batch(
            config, workload, device, peaks, free, state=state, most=all_samples, more_sample_bytes=more
        )
        # One that seems to have no room for a single sample is tried all the same: this is an estimate.
        return min(max(1, finding.micro_batch), tried)

    blocks = 0 if workload.spec is None else workload.spec.layers - (depths[0] or 0)  # beyond those of the first model
    (few, *_), (*_, many) = walks.values(), walks.values()
    each = {size: max(0.0, many.seconds[size] - few.seconds[size]) for size in sizes}
    return tuple((size, few.seconds[size] + blocks * each[size]) for size in sizes), fit


def _sizes(most: int) -> list[int]:
    """Sizes of micro-batches to try: 1, 3, 9 and so on, and the largest."""
    sizes = [1]
    while sizes[-1] * GROWTH < most:
        sizes.append(sizes[-1] * GROWTH)
    return [*sizes, most] if most > 1 else sizes


def _time_sizes(
    probe_model: ProbeModel, sizes: list[int], room_bytes: float, budget_s: float, until: float = 0.0
) -> _SizeTimings:
    """Try these sizes as far as memory and patience reach, and begin no round after `until`."""
    peaks: dict[int, int] = {}
    first: dict[int, float] = {}
    full = False
    for size in sizes:
        if first:
            before = max(first)
            # More for the second size: of the first alone all would count as a sample's own, though much may be what
            # any micro-batch takes.
            enough_s = budget_s / 4 if len(first) > 1 else budget_s
            if first[before] * size / before > enough_s:  # a neighbour may just have had the cores
                first[before] = min(first[before], probe_model.measure_seconds(before))
            # Twice, since the deeper model that follows holds nearly as much again.
            if 2 * peaks[before] * size / before > room_bytes or first[before] * size / before > enough_s:
                break
        try:
            peaks[size] = probe_model.measure_peak_bytes(size)  # and so it is warm
            first[size] = probe_model.measure_seconds(size)
        except (RuntimeError, MemoryError) as error:
            if not first or not is_out_of_memory(error):
                raise
            peaks.pop(size, None)
            probe_model.discard_step()
            full = True
            break
    blocks: dict[int, list[float]] = {size: [] for size in first}  # seconds of a pass, each a mean over BLOCK_S
    # Round about, so that what disturbs for a while disturbs all sizes.
    for number in range(BLOCKS):
        if number and time.perf_counter() >= until:
            break
        for size, done in blocks.items():
            done.append(probe_model.measure_seconds(size, max(1, int(BLOCK_S / first[size]))))
    second = int(len(next(iter(blocks.values()))) > 1)  # of two the fastest
    return _SizeTimings(peaks, {size: sorted([first[size], *done])[second] for size, done in blocks.items()}, full)
