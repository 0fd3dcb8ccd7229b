"""One rank of a job started by torchrun, Slurm or mpirun: that launcher restarts it."""

import contextlib
import dataclasses
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.config.schema import Config
from phalanx.core import faults
from phalanx.core.errors import ConfigError
from phalanx.core.faults import Fault
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.node.worker import raise_on_stop_signal
from phalanx.health.findings import DeviceInfo
from phalanx.launch import health_check, observer, outcome, preemption, prepare
from phalanx.launch.launched_run import fetch_records, mirror_while_running
from phalanx.storage import mirror

if TYPE_CHECKING:
    from phalanx.trainer.callback import Callback


def run_started_rank(
    wanted: Config,
    paths: RunPaths,
    placement: Placement,
    device: DeviceInfo,
    planned: Sequence[Fault],
    callbacks: tuple["Callback", ...],
    verbose: bool = False,
) -> int:
    """Run as one rank of an externally started job; rank 0 keeps the run folder and shows the progress."""
    from phalanx.report.console import Console
    from phalanx.trainer import run_folder, train_rank
    from phalanx.workload.sinks import Sink

    first = placement.rank == 0
    if wanted.parallel.layout == "auto" and placement.world > 1:
        raise ConfigError(
            "parallel.layout auto needs the devices of all ranks, but an externally started rank knows only its "
            "own; start the ranks with `phalanx train` (--nodes, or srun --auto-resume=1), or put the keys from "
            "`phalanx plan` into the recipe"
        )
    faults.check_faults(planned, placement.world, wanted.train.most_steps, local=paths.url is None)
    if paths.url is not None:  # the ranks may be on one machine, or on many
        paths = mirror.make_working_paths(paths.url.text, wanted.data.cache, paths.url.timeout_s, placement.rank)
    with contextlib.ExitStack() as stack:
        if placement.local_rank == 0:  # no agent is there to let the others continue: all save and stop
            stack.enter_context(preemption.watch_for_preemption(wanted.resilience, paths, signal.SIGTERM))
        if first:
            stack.enter_context(run_folder.hold_run_folder(paths))
            stack.enter_context(mirror_while_running(paths))
        elif paths.url is not None:
            fetch_records(paths)
        if (done := prepare.exit_code_if_complete(wanted, paths, show=first)) is not None:
            return done
        with raise_on_stop_signal():
            noticed = health_check.check_node_if_enabled(wanted, paths, [device]) if placement.local_rank == 0 else None
            worlds = placement.world, placement.local_world
            prepared = prepare.prepare_run(wanted, paths, [device], *worlds, writes=first)
        # The launcher restarts this command: attempts are those of the run folder.
        job = dataclasses.replace(prepared.job, faults=tuple(planned), callbacks=callbacks)
        sinks: list[Sink] = []
        if first:
            started = write_event(
                paths.events,
                EventKind.RUN_STARTED,
                prepared.attempt,
                **prepare.describe_start(prepared, [device], placement.world),
            )
            console = Console(
                prepared.config.train.steps,
                paths.name,
                unit=prepared.unit,
                folder=paths.display_name,
                verbose=verbose,
            )
            console.on_event(started)
            if (watching := observer.Observer.start(prepared.config.report, paths)) is not None:
                stack.callback(watching.close)
            for message in prepared.warnings:
                console.on_event({"kind": EventKind.WARNING, "message": message})
            if prepared.layout_event is not None:
                console.on_event(
                    write_event(paths.events, EventKind.LAYOUT_CHOSEN, prepared.attempt, **prepared.layout_event)
                )
            if noticed is not None:
                console.on_event(write_event(paths.events, EventKind.HEALTH, prepared.attempt, **noticed))
            sinks = [console]
            sinks += prepare.make_sinks(prepared.job, prepared.attempt, console.on_event)
        code = int(train_rank.run_training(job, placement, sinks, attempt=prepared.attempt if first else 0))
        if first:
            outcome.warn_missing_faults(paths, planned, prepared.attempt)
            outcome.finish_run(paths, code)
        return code
