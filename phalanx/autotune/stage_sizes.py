"""Choose `parallel.layers_per_stage` on heterogeneous devices: slower devices get fewer blocks.

Every rank times one block before the model is partitioned. The result is kept in the run folder for the same ranks,
since another partition sums in another order.
"""

from phalanx.autotune.probe_model import open_probe_model
from phalanx.comm.mesh import Mesh, single_rank_mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.config.load import update_config
from phalanx.config.schema import Config
from phalanx.core.errors import is_out_of_memory
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.parallel.model_part import plan_stages
from phalanx.system import accelerator
from phalanx.workload.sinks import RecordWriter, find_resolved_value
from phalanx.workload.workload import Workload

KEY = "parallel.layers_per_stage"
# The ratio of the slowest to the fastest rank above which devices count as heterogeneous: of several kinds, and of one,
# where a neighbour on the same machine may be all there is to it.
MAX_RATIO, MAX_RATIO_SAME_MODEL = 1.15, 1.3
PASSES = 5  # of which the fastest counts


def resolve_stage_sizes(
    config: Config, workload: Workload, mesh: Mesh, paths: RunPaths, records: RecordWriter
) -> Config:
    """Resolve the configuration's numbers of blocks per stage, where the recipe has none and devices are heterogeneous.
    Collective, and the same on all ranks."""
    if mesh.pipe is None or config.parallel.layers_per_stage != "auto" or workload.spec is None:
        return config
    group = JsonGroup(mesh.checkpoint)
    models = group.all_gather_objects(accelerator.get_device_name(mesh.device))
    if len(set(models)) == 1 and mesh.device.type != "cpu":
        return config
    parallel = config.parallel
    of = {
        "devices": models,
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "schedule": parallel.schedule,
        "layers": workload.spec.layers,
    }
    numbers = group.broadcast_object(find_resolved_value(paths, KEY, of) if mesh.rank == 0 else None)
    if numbers is None:
        seconds = _by_stage(mesh, _block_s(config, workload, mesh))
        alike = max(seconds) <= (MAX_RATIO if len(set(models)) > 1 else MAX_RATIO_SAME_MODEL) * min(seconds)
        speeds = None if alike else [1.0 / taken for taken in seconds]
        plan = plan_stages(workload.spec, mesh.pipe.size, parallel.schedule, speeds=speeds)
        numbers = [len(layers) for layers in plan.layers]
        told = ", ".join(f"{1e3 * taken:.1f}" for taken in seconds)
        why = f"a pass through one block takes the ranks of the pipeline {told} ms"
        # Also where they are equal: the next start would measure again, and might find a difference.
        why += ", nearly alike" if alike else ""
        records.write_event(EventKind.AUTO_RESOLVED, {"key": KEY, "value": numbers, "reason": why, "of": of})
    return update_config(config, {KEY: numbers})


def _by_stage(mesh: Mesh, mine: float) -> list[float]:
    """The seconds of the slowest rank of each place in the pipeline."""
    found = [0.0] * mesh.axes.pipeline
    for rank, taken in enumerate(mesh.gather(mine)):
        place = mesh.axes.coordinates(rank, mesh.world).pipe
        found[place] = max(found[place], taken)
    return found


def _block_s(config: Config, workload: Workload, mesh: Mesh) -> float:
    """Seconds of one sample's passes through the model with one block, on this rank alone; 1 where that does not fit,
    so that such ranks count as equal."""
    with single_rank_mesh(mesh) as single:
        try:
            with open_probe_model(config, workload, single, 1) as one:
                one.measure_seconds(1)  # what happens only once
                return min(one.measure_seconds(1) for _ in range(PASSES))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return 1.0
