"""What each device of a job takes for this model: seconds by size of micro-batch, memory, copies, the link.

Every rank measures its own device, all at the same time, since neighbours share a machine; the results are gathered, so
that all ranks know the same. Times are of forward and backward passes, uncompiled; those of a deep model follow from
models of one and two blocks, as its memory does (`micro_batch.py`). What is said here is where a run begins: it goes on
measuring while it trains.
"""

import contextlib
import functools
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx.autotune.link_speed import measure_link
from phalanx.autotune.micro_batch import (
    SIZES,
    USABLE,
    choose_probe_depths,
    fit_micro_batch,
    state_bytes,
    suggest_remedy,
)
from phalanx.autotune.probe_model import ProbeModel, open_probe_model
from phalanx.autotune.state_shares import compute_state_weights
from phalanx.comm.mesh import Mesh, join, single_rank_mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import ConfigError, OutOfMemory, is_out_of_memory
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.layout import hardware
from phalanx.layout.balance import UNBOUND, Speed
from phalanx.layout.hardware import Hardware, MeasuredDevice, MeasuredLink
from phalanx.layout.model_shape import ModelSpec, list_timing_shapes
from phalanx.system import accelerator
from phalanx.workload.engines import StateWeights, agree_on_sharding
from phalanx.workload.sinks import RecordWriter
from phalanx.workload.work_split import WorkSplit
from phalanx.workload.workload import Workload, make_workload

if TYPE_CHECKING:
    from phalanx.config.schema import Config

BLOCK_S = 0.04  # passes are timed together for so long: some periods of a CPU quota, which runs a process in bursts
BLOCKS = 5  # of each size; the second fastest counts, which a neighbour that comes and goes disturbs least
# For all sizes of all depths, first passes included, when a run begins and when a user asks for nothing else; on a slow
# device no size is begun of which a pass would take a quarter of it.
BUDGET_S, LONG_BUDGET_S = 0.8, 4.0
GROWTH = 3  # from one size to the next
COPY_BYTES = 64 * 2**20
STORE_KEY = "measured"  # in the store: how many ranks are


# ------------------------------------------------------------------------------------------------- at a run's beginning


def find_rank_speeds(
    config: "Config",
    workload: Workload,
    placement: Placement,
    mesh: Mesh,
    paths: RunPaths,
    records: RecordWriter,
    weights: StateWeights = None,
) -> tuple[list[Speed], MeasuredLink | None]:
    """How fast the ranks are and how many sequences of a micro-batch each may have, in order of rank: as the run folder
    says, or a file that the recipe names; measured where neither does. All alike where nobody asks for speeds. And the
    link between them, where speeds are in seconds as it is.

    Collective; the same on all ranks. Raises ConfigError where the file that the recipe names does not fit the job.
    """
    assert config.train.micro_batch != "auto"
    group = JsonGroup(mesh.checkpoint)
    models = _gather_all(group, accelerator.get_device_name(mesh.device))
    if mesh.rank == 0:
        hardware.drop_stale_limits(paths, models)
    if mesh.axes.model_parallel_size > 1:
        return _speeds_of_copies(config, mesh, paths, records), None
    divides = mesh.world > 1 and config.balance.batch in ("auto", "measured-once")
    wanted = divides or len(set(models)) > 1 or config.balance.hardware is not None
    answer: dict[str, Any] = {}
    if mesh.rank == 0:
        answer = _look_up_hardware(config, paths, models, describe_work(config, workload)) if wanted else {}
        changed = hardware.find_changed_device(paths, models) if wanted else None
        if changed is not None and "refused" not in answer:
            records.write_event(EventKind.DEVICES_CHANGED, {"reason": changed})  # before the file is of the new ones
    answer = group.broadcast_object(answer)
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    known = hardware.from_json(answer["hardware"]) if "hardware" in answer else None
    if known is not None and config.balance.hardware is not None and mesh.rank == 0:
        _write_hardware(paths, known, records)  # a run folder holds all that a run was made of
    if wanted and known is None:
        begun = time.perf_counter()
        records.write_event(EventKind.MEASURING, {"ranks": mesh.world, "reason": answer["why"]})
        limit = hardware.read_micro_batch_limits(paths).get(mesh.rank, UNBOUND)
        say = functools.partial(_report_remeasure, records, mesh)
        known = measure_devices(config, workload, placement, mesh, say, weights=weights, limit=limit)
        if mesh.rank == 0:
            _write_hardware(paths, known, records)
        records.write_event(EventKind.MEASURED, describe_measurement(known, time.perf_counter() - begun))
    fits = [device.most for device in known.devices] if known else [UNBOUND] * mesh.world
    most = _micro_batch_limits(config, mesh, paths, records, fits)
    used = known is not None and divides
    speeds = hardware.fit_speeds(known) if known is not None and used else [Speed(1.0)] * mesh.world
    link = known.link if known is not None and used and all(device.times for device in known.devices) else None
    return [replace(speed, most=few) for speed, few in zip(speeds, most, strict=True)], link


def _report_remeasure(records: RecordWriter, mesh: Mesh, why: str) -> None:
    records.write_event(EventKind.MEASURING, {"ranks": mesh.world, "reason": why})


def _speeds_of_copies(config: "Config", mesh: Mesh, paths: RunPaths, records: RecordWriter) -> list[Speed]:
    """The same where several ranks hold one copy of the model, so that none can measure it: the copies count as alike,
    and each takes what the least of its ranks may have."""
    most = [UNBOUND] * mesh.data.world
    for rank, few in enumerate(_micro_batch_limits(config, mesh, paths, records, [UNBOUND] * mesh.world)):
        copy = mesh.axes.coordinates(rank, mesh.world).data
        most[copy] = min(most[copy], few)
    return [Speed(1.0, most=few) for few in most]


def _micro_batch_limits(
    config: "Config", mesh: Mesh, paths: RunPaths, records: RecordWriter, fits: Sequence[int]
) -> list[int]:
    """Sequences of a micro-batch that each rank may have: as many as are asked for, as its device `fits`, and as it has
    not yet run out of memory with. Collective."""
    assert config.train.micro_batch != "auto"
    limits = [int(most) for most in mesh.gather(hardware.read_micro_batch_limits(paths).get(mesh.rank, UNBOUND))]
    # Ranks that one launcher did not start have each resolved train.micro_batch.
    asked = [int(most) for most in mesh.gather(config.train.micro_batch)]
    lowered = {rank: limit for rank, limit in enumerate(limits) if limit < min(asked[rank], fits[rank])}
    if lowered:
        records.write_event(EventKind.MEMORY_LIMITED, {"most": lowered})
    return [min(each) for each in zip(asked, fits, limits, strict=True)]


def _write_hardware(paths: RunPaths, known: Hardware, records: RecordWriter) -> None:
    try:
        hardware.write_hardware(paths.hardware, known)
    except OSError as error:  # a full disk: the next start measures again
        records.write_event(EventKind.WARNING, {"message": f"{paths.hardware} was not written: {error.strerror}"})


def _look_up_hardware(config: "Config", paths: RunPaths, models: list[str], work: dict[str, Any]) -> dict[str, Any]:
    """{"hardware": ...} from a file, or {"why": ...} nothing could be used, or {"refused": ...}. On rank 0."""
    if config.balance.hardware is not None:
        try:
            known = read_hardware_file(config.balance.hardware, models, work)
        except ConfigError as error:
            return {"refused": str(error)}
        return {"hardware": hardware.to_json(known)}
    if not paths.hardware.exists():
        return {"why": "nothing was known of these devices"}
    try:
        known = hardware.read_hardware(paths.hardware)
    except ConfigError as error:
        return {"why": str(error)}
    misfit = hardware.explain_mismatch(known, models, work)
    return {"why": misfit} if misfit is not None else {"hardware": hardware.to_json(known)}


def read_hardware_file(path: str, models: Sequence[str | None], work: dict[str, Any]) -> Hardware:
    """What the file that `balance.hardware` names says. Raises ConfigError where it cannot be read or was measured for
    another job than this, of devices of these models (None: not known yet) doing `work`."""
    known = hardware.read_hardware(Path(path).expanduser())
    why = hardware.explain_mismatch(known, models, work)
    if why is None:
        return known
    raise ConfigError(
        f"balance.hardware {path} does not fit this job: {why}; measure anew with `phalanx hardware`, or remove "
        "balance.hardware"
    )


def describe_work(config: "Config", workload: Workload) -> dict[str, Any]:
    """What decides how long a pass takes and how much it holds, as JSON has it."""
    shapes = {} if workload.spec is None else list_timing_shapes(workload.spec)
    parameters = sum(parameter.numel() for parameter in workload.model().parameters())
    how = {
        "task": config.task.kind,
        "parameters": parameters,
        "positions": workload.positions,
        "dtype": config.train.dtype,
        "activations": config.memory.activations,
    }
    if config.memory.activations == "offload":
        how["horizon"] = config.memory.offload_prefetch_blocks
    work: dict[str, Any] = json.loads(json.dumps(how | shapes))
    return work


def describe_measurement(known: Hardware, seconds: float) -> dict[str, Any]:
    """Details of the event: of each rank its device's model, largest micro-batch and sequences per second."""
    rows = [
        {
            "rank": device.rank,
            "model": device.model,
            "most": device.most,
            "sequences_per_s": max((size / took for size, took in device.times), default=None),
        }
        for device in known.devices
    ]
    return {"devices": rows, "seconds": seconds}


def _gather_all(group: JsonGroup, mine: Any) -> list[Any]:
    """What every rank says, in order of rank, on all of them."""
    everyones: list[Any] = group.broadcast_object(group.gather_objects(mine))
    return everyones


# -------------------------------------------------------------------------------------------------------- out of memory


@contextlib.contextmanager
def limit_after_out_of_memory(paths: RunPaths, mesh: Mesh, work_split: WorkSplit, workload: Workload) -> Iterator[None]:
    """Where memory runs out while it lasts, note in the run folder that this rank gets smaller micro-batches from the
    next start on. Raises OutOfMemory that says so, or that there are none smaller."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        tried = work_split.largest_micro_batch(mesh.data.rank)
        said = f"rank {mesh.rank} ran out of memory with micro-batches of"
        if tried <= 1:
            raise OutOfMemory(
                f"{said} one sequence, and there are none smaller; shard the model over more ranks, set "
                f"memory.activations=full, or {suggest_remedy(workload)}"
            ) from error
        most = hardware.record_out_of_memory(paths, mesh.rank, tried, accelerator.get_device_name(mesh.device))
        raise OutOfMemory(f"{said} {tried} sequences; from the next start on it gets {most} at most") from error


# ------------------------------------------------------------------------------------------------------------ measuring


def run_measurement(config: "Config", spec: ModelSpec | None, placement: Placement, file: Path) -> ExitCode:
    """One rank of a job that does nothing but measure; rank 0 writes `file`. Raises as training does."""
    threads = accelerator.threads_per_rank(placement.threads, placement.local_world)
    accelerator.set_device(torch.device(placement.device), threads)
    with join(placement, config.comm.timeout_s) as mesh:
        config = agree_on_sharding(config, mesh)
        subject = make_workload(config, spec)
        weights = compute_state_weights(config, subject, mesh, placement.local_world)
        known = measure_devices(config, subject, placement, mesh, lambda why: None, LONG_BUDGET_S, weights)
        if mesh.rank == 0:
            hardware.write_hardware(file, known)
        mesh.min([1.0])  # who is done knows that it is written: a node that is lost from now on is not missed
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
    measured once more, and rank 0 has `report` tell why: nothing makes a device faster than it is, but whoever else
    uses the machine makes it slower.
    """
    known = _measure_once(config, workload, placement, mesh, budget_s, weights, limit, turn=0)
    if (why := hardware.describe_uneven_devices(known)) is not None:
        if mesh.rank == 0:
            report(why)
        known = hardware.merge_fastest(
            known, _measure_once(config, workload, placement, mesh, budget_s, weights, limit, turn=1)
        )
    return known


def _measure_once(
    config: "Config", workload: Workload, placement: Placement, mesh: Mesh, budget_s: float, weights: StateWeights,
    limit: int, turn: int,
) -> Hardware:  # fmt: skip
    mesh.sum([0.0])  # all begin together
    with single_rank_mesh(mesh) as single:
        state = state_bytes(config, workload, mesh.device, mesh.world, weights, mesh.rank)
        single.traffic.progress_page = pulse = (
            mesh.traffic.progress_page
        )  # what is tried may be too much, and is not tried again then
        others = _make_others_measure(mesh, turn)
        processor, begun = time.process_time(), time.perf_counter()
        times, most = _measure_own_device(
            config, workload, single, state, placement.local_world, budget_s, others, limit
        )
        processor_s, wall_s = time.process_time() - processor, time.perf_counter() - begun
        if pulse is not None:
            pulse.set_largest_micro_batch(0)
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
        most=most,
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
    return hardware.from_json(group.broadcast_object(whole))


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
    state: int,
    local_world: int,
    budget_s: float,
    others_measure: Callable[[], bool],
    limit: int = UNBOUND,
) -> tuple[tuple[tuple[int, float], ...], int]:
    """(samples, seconds of the whole model), and the most samples that fit. `mesh` is of this rank alone. When it is
    done, its device is kept as busy as in training for as long as `others_measure`. `state`: bytes that it holds;
    `limit`: samples that are tried at most."""
    assert config.train.micro_batch != "auto"
    # Of memory, not of what is asked for today: train.micro_batch may be another at the next start.
    most = config.train.global_batch
    free = accelerator.memory_free(mesh.device, local_world)
    # One size alone would not tell what a sample more takes.
    sizes, walks = _sizes(min(max(config.train.micro_batch, *SIZES), most, limit)), dict[int | None, _SizeTimings]()
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
        return (), 1
    peaks = {layers: walk.peaks for layers, walk in walks.items()}
    if len(sizes) > 1:
        finding = fit_micro_batch(config, workload, mesh.device, peaks, free, state=state, most=most)
        # One that seems to have no room for a single sample is tried all the same: this is an estimate.
        most = max(1, finding.micro_batch)
    if any(walk.full for walk in walks.values()):
        most = min(most, sizes[-1])
    most = min(most, limit)
    blocks = 0 if workload.spec is None else workload.spec.layers - (depths[0] or 0)  # beyond those of the first model
    (few, *_), (*_, many) = walks.values(), walks.values()
    each = {size: max(0.0, many.seconds[size] - few.seconds[size]) for size in sizes}
    return tuple((size, few.seconds[size] + blocks * each[size]) for size in sizes), most


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


def measure_host_to_device(device: torch.device) -> float | None:
    """Bytes per second of copies from the host's pinned memory; None for a CPU."""
    if device.type == "cpu":
        return None
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8).pin_memory()
    return measure_copy_rate(here, there, device)


def measure_copy_rate(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    """Bytes per second at which the first is copied into the second, one of which is on `device`: the fastest of
    four."""
    best = float("inf")
    for _ in range(4):  # the first of them may come behind what was queued before
        begun = time.perf_counter()
        target.copy_(source)
        accelerator.synchronize(device)  # a copy within the device does not hold the host
        best = min(best, time.perf_counter() - begun)
    return source.nbytes / best
