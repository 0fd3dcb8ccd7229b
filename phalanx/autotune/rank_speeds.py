"""The speeds of ranks at the start of a run, from its folder, from a file, or measured now; and memory limits for the
next start after running out of memory."""

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.autotune.measure import describe_work, measure_devices
from phalanx.autotune.micro_batch import suggest_remedy
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import ConfigError, OutOfMemory, is_out_of_memory
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.layout import hardware, memory_limits
from phalanx.layout.balance import UNBOUND, Speed
from phalanx.layout.hardware import Hardware, MeasuredLink
from phalanx.system import accelerator
from phalanx.workload.engines import StateWeights
from phalanx.workload.sinks import RecordWriter
from phalanx.workload.work_split import WorkSplit
from phalanx.workload.workload import Workload

if TYPE_CHECKING:
    from phalanx.config.schema import Config


def find_rank_speeds(
    config: "Config",
    workload: Workload,
    placement: Placement,
    mesh: Mesh,
    paths: RunPaths,
    records: RecordWriter,
    weights: StateWeights = None,
) -> tuple[list[Speed], MeasuredLink | None]:
    """Find the speeds of the ranks and the largest micro-batch of each, in order of rank: from the run folder or the
    recipe's file, else measured; equal where speeds are not needed. Also the link between them, where speeds are in
    seconds.

    Collective; the same on all ranks. Raises ConfigError where the file that the recipe names does not fit the job.
    """
    assert config.train.micro_batch != "auto"
    group = JsonGroup(mesh.checkpoint)
    models = _gather_all(group, accelerator.get_device_name(mesh.device))
    if mesh.rank == 0:
        memory_limits.drop_stale_limits(paths, models)
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
        limit = memory_limits.read_micro_batch_limits(paths).get(mesh.rank, UNBOUND)
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
    """Speeds of copies of the model on several ranks, which no rank can measure: copies count as equal, with the
    smallest micro-batch of their ranks."""
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
    limits = [int(most) for most in mesh.gather(memory_limits.read_micro_batch_limits(paths).get(mesh.rank, UNBOUND))]
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
        f"balance.hardware {path} does not fit this job: {why}; measure again with `phalanx hardware`, or remove "
        "balance.hardware"
    )


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


@contextlib.contextmanager
def limit_after_out_of_memory(paths: RunPaths, mesh: Mesh, work_split: WorkSplit, workload: Workload) -> Iterator[None]:
    """Where memory runs out while it lasts, note in the run folder that this rank gets smaller micro-batches from the
    next start on. Raises OutOfMemory that says so, or that there are none smaller."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        tried = work_split.largest_micro_batch(mesh.row_group)
        said = f"rank {mesh.rank} ran out of memory with micro-batches of"
        if tried <= 1:
            raise OutOfMemory(
                f"{said} one sequence, and there are none smaller; shard the model over more ranks, set "
                f"memory.activations=full, or {suggest_remedy(workload)}"
            ) from error
        if workload.takes_whole_share:
            raise OutOfMemory(
                f"{said} {tried} samples, its share of a step, which batch norm takes at once; use more ranks or a "
                f"smaller train.global_batch, set memory.activations=full, or {suggest_remedy(workload)}"
            ) from error
        most = memory_limits.record_out_of_memory(paths, mesh.rank, tried, accelerator.get_device_name(mesh.device))
        raise OutOfMemory(f"{said} {tried} sequences; from the next start on it gets {most} at most") from error
