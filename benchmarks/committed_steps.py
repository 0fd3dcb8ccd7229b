"""What it costs a run to have every step committed: two of them in the same ranks, which take turns, with and without.

A part of `recovery.py`. What of it is due to the update, which leaves the step before whole, is in `slot_to_slot.py`.
"""

import functools
import json
import os
import statistics
import time
from pathlib import Path

from benchmarks.harness import Row, spread
from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.node import agent
from phalanx.recovery import shared_memory

SAVES = 5
FOUND = "found.json"


def take_turns(placement: Placement, folder: str, tokens: str, config: str, pairs: int) -> int:
    """One rank: two loops in turns, with and without a keeper; rank 0 leaves the seconds of all steps, and how long
    checkpoints of the one with a keeper stall it."""
    import torch
    import yaml

    from phalanx.checkpoint.disk.save import CheckpointSaver
    from phalanx.comm.mesh import join
    from phalanx.comm.rendezvous import JsonGroup
    from phalanx.config import load
    from phalanx.system import accelerator
    from phalanx.trainer.loop import TrainingLoop
    from phalanx.trainer.restore import make_in_memory_store
    from phalanx.trainer.setup import TrainingJob, TrainingSetup
    from phalanx.trainer.stop_request import StopRequest
    from phalanx.workload.build import build_components
    from phalanx.workload.sinks import RecordWriter
    from phalanx.workload.workload import find_model_shape

    settings, spent = load.build_config(yaml.safe_load(config), "the benchmark's recipe"), []
    accelerator.set_device(torch.device("cpu"), 1)
    with join(placement, 60.0) as mesh:
        loops = []
        for name in ("kept", "plain"):
            paths = RunPaths(Path(folder) / name)
            paths.root.mkdir(exist_ok=True)
            records = RecordWriter(paths, 1, [], active=mesh.rank == 0)
            memory = make_in_memory_store(settings, placement, mesh, paths, records) if name == "kept" else None
            spec, rows = find_model_shape(settings, paths), [(Path(tokens), 1.0)]
            parts = build_components(settings, spec, mesh, rows, {}, keeper=memory)
            saver = CheckpointSaver(paths.checkpoints, mesh.rank, JsonGroup(mesh.checkpoint), 1, records.write_event)
            run = TrainingJob(settings, spec, paths, rows, {})
            loops.append(
                TrainingLoop(
                    TrainingSetup(run, placement, mesh, parts, records, saver, StopRequest(), in_memory_store=memory)
                )
            )
            loops[-1].restore()
        for step in range(1, pairs + 4):
            seconds = []
            for loop in loops if step % 2 else reversed(loops):
                mesh.sum([0.0])
                begun = time.perf_counter()
                loop.train_step(step)
                list(loop.setup.components.engine.pieces())  # waits until all of the step is done
                mesh.sum([0.0])
                seconds.append(time.perf_counter() - begun)
            if step > 3:
                spent.append(seconds if step % 2 else seconds[::-1])
        saves = []
        for _ in range(SAVES):
            mesh.sum([0.0])
            begun = time.perf_counter()
            loops[0].save(pairs + 3)
            saves.append(mesh.max([time.perf_counter() - begun])[0])
            loops[0].setup.saver.wait()
        for loop in loops:
            loop.setup.components.close()
    if placement.rank == 0:
        (Path(folder) / FOUND).write_text(json.dumps({"steps": spent, "saves": saves}))
    return 0


def cost(folder: Path, ranks: int, pairs: int, prepared: RunPaths) -> list[Row]:
    """What a step takes with every step committed, over what it takes without; of `pairs` of steps, with the recipe and
    the tokens of a run that has been."""
    tokens = next((folder / "cache").rglob("*.bin"), None)
    assert tokens is not None, "the run before has made its token files"
    shared = folder / "shared"
    shared.mkdir()
    place = shared_memory.SHM_ROOT / f"phalanx-benchmark-{os.getpid()}"
    worker = functools.partial(
        take_turns, folder=str(shared), tokens=str(tokens.parent), config=prepared.config.read_text(), pairs=pairs
    )
    place.mkdir(mode=0o700)
    try:
        job = agent.NodeJob(world=ranks, worker=worker, paths=RunPaths(shared / "logs"), shared=place)
        assert agent.run_local_job(job) == 0, f"see {shared / 'logs'}"
    finally:
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
    found = json.loads((shared / FOUND).read_text())
    spent, saves = found["steps"], found["saves"]
    kept, plain = (statistics.median(each[which] for each in spent) for which in (0, 1))
    low, middle, high = spread([with_it / without for with_it, without in spent])
    return [
        {"every step committed": "Phalanx", "ranks": ranks, "step, s": kept, "without, s": plain, "ratio": middle,
         "lower": low, "upper": high, "a save stalls, s": statistics.median(saves), "the first": saves[0]}
    ]  # fmt: skip
