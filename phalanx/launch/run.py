"""Training from a command to its end, on any number of nodes: one node is a cluster of one.

Node 0 resolves the recipe, prepares its data and sends the result to the others; each of them checks that it sees the
same run folder and the same data before the first step. The rendezvous is in `multinode.py`, a node's part after it in
`node_session.py` and `elastic/`.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.config.schema import Config
from phalanx.core import faults
from phalanx.core.errors import Unhealthy
from phalanx.core.faults import Fault
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import election
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.node.worker import StopRequested, raise_on_stop_signal
from phalanx.health.findings import DeviceInfo, assign_devices, preload_and_find_devices
from phalanx.launch import health_check, multinode, node_session, outcome, prepare, started_rank
from phalanx.launch.launched_run import mirror_while_running
from phalanx.launch.preemption import watch_for_preemption
from phalanx.launch.rendezvous_options import ONE_NODE, RendezvousOptions
from phalanx.recovery import shared_memory
from phalanx.report.logs import open_terminal
from phalanx.system.torchrun_env import from_environment

if TYPE_CHECKING:
    from phalanx.trainer.callback import Callback


def train(
    wanted: Config,
    paths: RunPaths,
    ranks: int | None,
    environment: Mapping[str, str],
    options: RendezvousOptions | None = None,
    on_cpu: bool = False,
    planned: Sequence[Fault] = (),
    callbacks: Sequence["Callback"] = (),
    verbose: bool = False,
) -> int:
    """Train `wanted` in a run folder: with `ranks` local ranks (None: one for each device) on this node, or on the
    nodes that `options` names, of which this is one; or as the rank that torchrun's or Slurm's variables describe.
    `on_cpu` does not use accelerators; `planned` are injected faults. `callbacks` are called beside the recipe's, in
    the process of rank 0: changes that they make there are not visible here. `verbose` shows how each setting was
    resolved. Returns the exit code, also after a stop signal before ranks exist; raises PhalanxError for problems that
    a user can fix, on any node.
    """
    try:
        with raise_on_stop_signal():
            alone = options is None and from_environment(environment, ()) is None
            if alone and not paths.config.exists():  # of a larger job one rank looks
                outcome.check_first_records(wanted)
            found, accelerators = preload_and_find_devices(on_cpu)
        given = None if ranks is not None or options is not None else from_environment(environment, accelerators)
        if given is not None:
            return started_rank.run_started_rank(
                wanted, paths, given, found[given.device], planned, tuple(callbacks), verbose
            )
        there = options or ONE_NODE
        mine = assign_devices(found, accelerators, ranks)
        run = TrainingStart(wanted, paths, mine, there, planned, tuple(callbacks), verbose)
        if there.total == 1:
            return run.lead(election.read_epoch_number(paths))
        return multinode.lead_or_follow(paths, there, run.lead, run.follow)
    except StopRequested as asked:
        open_terminal().print(outcome.describe_early_stop(paths, str(asked)))
        return multinode.early_stop_code(asked, options)


@dataclasses.dataclass(frozen=True)
class TrainingStart:
    """The options of this node's command."""

    wanted: Config
    paths: RunPaths
    devices: Sequence[DeviceInfo]
    options: RendezvousOptions
    planned: Sequence[Fault]
    callbacks: tuple["Callback", ...]
    verbose: bool

    @property
    def hello(self) -> dict[str, Any]:
        return multinode.make_training_hello(self.wanted, self.devices, self.options, planned=self.planned)

    @contextlib.contextmanager
    def _session(self, hello: dict[str, Any]) -> Any:
        """This node's part, with its folder in shared memory, which it holds."""
        node = self.options
        swept = shared_memory.remove_stale_folders(but=self.paths)
        wanted = self.wanted.resilience.in_memory_checkpoints is not False
        with (
            shared_memory.hold_folder(self.paths, node.node, wanted=wanted) as shared,
            watch_for_preemption(self.wanted.resilience, self.paths) as read_notice,
        ):
            run = node_session.NodeSession(
                self.paths,
                self.devices,
                node,
                hello,
                self.wanted,
                shared,
                self.planned,
                verbose=self.verbose,
            )
            run.read_notice = read_notice
            run.warnings += [f"removed {each}, left behind by a run more than a day ago" for each in swept]
            try:
                yield run
            finally:
                run.settle_memory()

    def follow(self) -> int:
        """Take part in a run that node 0 or the current leader resolves."""
        with self._session(self.hello) as run:
            for message in run.warnings:
                self.options.notify_user(message)
            return int(run.follow())

    def lead(self, before: int) -> int:
        """Lead as node 0: host the rendezvous, prepare the run, then become a member. `before`: the run's epoch."""
        from phalanx.trainer import run_folder

        wanted, paths, options, said = self.wanted, self.paths, self.options, self.hello
        with contextlib.ExitStack() as held:
            with raise_on_stop_signal():
                held.enter_context(run_folder.hold_run_folder(paths))
                held.enter_context(mirror_while_running(paths))
                # Before the rendezvous ends: folders that are not held then belong to no node.
                run = held.enter_context(self._session(said))
                replaces = "replace" in wanted.resilience.on_lost_node
                spares = options.spares if replaces else 0
                meeting = multinode.meet_nodes(options, said, spares, paths, before)
                first = held.enter_context(meeting)
                if (done := prepare.exit_code_if_complete(wanted, paths)) is not None:
                    first.finish(done, "the run is complete already")
                    run.code = done
                    return done
                try:
                    noticed = health_check.check_node_if_enabled(wanted, paths, self.devices)
                except Unhealthy as error:
                    if paths.url is not None and options.total > 1:
                        raise Unhealthy(
                            f"{error}; this is node 0, the only writer to the run's URL, so no spare can replace "
                            "it: start its command on another machine"
                        ) from None
                    noticed = None
                    first.report_unfit(str(error))
                rows_of = first.devices(options.nodes)
                by_node = [[DeviceInfo(*row) for row in rows] for rows in rows_of]
                everywhere = [device for devices_there in by_node for device in devices_there]
                mine, world = len(self.devices), len(everywhere)
                faults.check_faults(self.planned, world, wanted.train.most_steps, paths.url is None, options.total)
                prepared = prepare.prepare_run(
                    wanted,
                    paths,
                    self.devices,
                    world,
                    mine,
                    writes=True,
                    elsewhere=everywhere[mine:],
                    meanwhile=first.poll_once,
                    nodes=by_node,
                )
                prepared = prepare.add_faults(prepared, self.planned)
                job = dataclasses.replace(prepared.job, callbacks=self.callbacks)
                plan = [(node, len(rows)) for node, rows in enumerate(rows_of)]
                told = node_session.make_offer(wanted, prepared, paths, 1, plan, rows_of, options.nodes)
                until_all_meet = held.enter_context(contextlib.ExitStack())
                until_all_meet.callback(paths.node0_marker.unlink, missing_ok=True)
                multinode.offer_to_all(first, told)
                run.clean_memory(paths, first.poll_once)
                agent = NodeAgent(first.secret, run.make_job, run.make_coordinator, multinode.make_replica_updater)
                agent.adopt_job(told, run.job_for(job, mine, world))
                there, lost = first.describe_nodes(options.nodes)
                run.begin(prepare.describe_start(prepared, everywhere, world) | there, prepared, noticed, lost)
                enter = run.begin_epoch(first, agent, until_all_meet)
            return int(run.run_to_end(agent, enter))
