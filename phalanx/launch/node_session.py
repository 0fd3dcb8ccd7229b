"""A node's part of a multi-node training run after the rendezvous: its ranks and, as the leader, the shared work."""

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config import load
from phalanx.config.schema import Config, get_knob
from phalanx.core import faults
from phalanx.core.errors import ConfigError
from phalanx.core.faults import Fault
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, write_event
from phalanx.core.renamed import rename_keys
from phalanx.core.run_paths import BASE_WEIGHTS, RunPaths
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.rendezvous import refresh_listing
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.node.worker import NodeJob
from phalanx.elastic.supervisor import failover
from phalanx.elastic.supervisor.coordinator import Coordinator, Plan
from phalanx.elastic.supervisor.state import RecoveryPolicy
from phalanx.health.findings import DeviceInfo
from phalanx.launch import health_check, outcome, prepare
from phalanx.launch.launched_run import fetch_records
from phalanx.launch.node_participant import CHECK_S, NodeParticipant, Tend, check_shared_folder, ensure_run_sign
from phalanx.launch.observer import Observer
from phalanx.launch.prepare import PreparedRun
from phalanx.launch.recorder import EventRecorder, HoldLeaderFiles, LocalRecorder
from phalanx.layout import memory_limits
from phalanx.recovery import inventory, shared_memory, state_file
from phalanx.recovery.shared_memory import SharedMemoryFolder
from phalanx.report import event_text
from phalanx.storage import mirror
from phalanx.system.fork import fork_call
from phalanx.trainer.stop_request import STOP_SIGNALS

WEIGHTS = "model.from_hf"  # initial weights of a new run: each rank reads its own part


def make_policy(config: Config, nodes: int) -> RecoveryPolicy:
    """The restart policy of a recipe."""
    wanted = config.resilience
    return RecoveryPolicy(
        nodes=nodes,
        max_restarts=wanted.max_restarts,
        on_lost_node=tuple(wanted.on_lost_node),
        wait_s=wanted.wait_for_node_s,
        grow=wanted.rejoin_nodes,
        same_crash=wanted.max_identical_failures,
        group=config.parallel.axes.group_size,
        replicate_every=wanted.replicate_every if isinstance(wanted.replicate_every, int) else 1,
    )


def render_shared_config(requested: Config, prepared: PreparedRun) -> str:
    """The resolved configuration as YAML, except `auto` values that depend on a node's memory or compilers, which each
    node resolves and ranks agree on."""
    of_nodes = ("train.micro_batch", "train.compile", "parallel.zero", "parallel.grad_reduce", "memory.activations")
    planned = requested.parallel.layout == "auto"  # by node 0, for all of them
    own = {key: "auto" for key in of_nodes if not planned and get_knob(requested, key) == "auto"}
    return load.to_yaml(load.update_config(prepared.config, own))


def read_offered_config(offer: Message) -> Config:
    """Parse a leader's configuration, which may come from the previous release. Raises ConfigError where it is not a
    recipe."""
    where = "node 0's configuration"
    return load.build_config(rename_keys(load.parse_yaml(offer["config"], where))[0], where)


def make_offer(
    requested: Config,
    prepared: PreparedRun,
    paths: RunPaths,
    division: int,
    plan: Plan,
    devices: Sequence[Any],
    nodes: int,
    first: bool = True,
) -> Message:
    """The offer to all nodes for a division of the work."""
    return {
        "config": render_shared_config(requested, prepared),
        "sign": ensure_run_sign(paths, first) if paths.url is None and nodes > 1 else None,
        "data": json.loads(paths.data.read_text(encoding="utf-8")),
        "weights": prepared.weights,
        "world": sum(ranks for _, ranks in plan),
        "faults": faults.faults_to_message(prepared.job.faults),
        "attempt": prepared.attempt,
        "unit": prepared.unit,
        "steps": prepared.config.train.steps,
        **failover.describe_division(division, plan, devices, make_policy(prepared.config, nodes)),
    }


@dataclass
class NodeSession(NodeParticipant):
    """`memory`: its run's folder in shared memory, which it holds."""

    requested_config: Config
    memory: SharedMemoryFolder
    requested_faults: Sequence[Fault] = ()  # to go wrong, by the command of this node
    planned_faults: tuple[Fault, ...] = ()
    records: RunPaths = field(init=False)  # of the run, as they are seen from here
    adopted_old_memory: bool = False  # whether what this machine had kept as another node was looked for
    run_id: bytes = b""  # identifies its state files; computed early, as later its folder may hang
    limits: Callable[[], bool] = field(init=False)
    led: NodeAgent | None = None  # this node's agent, once it leads
    observer: Observer | None = field(default=None, init=False)  # while this node leads, if the recipe sets one
    warnings: list[str] = field(default_factory=list)  # of this node, recorded by the leader
    verbose: bool = False  # whether the console shows how each setting was resolved

    def __post_init__(self) -> None:
        super().__post_init__()
        reason, wanted = self.memory.reason, self.requested_config.resilience.in_memory_checkpoints
        if reason is not None and wanted is True:
            raise ConfigError(
                f"resilience.in_memory_checkpoints is true, but {reason}; set it to auto or false, or fix the cause"
            )
        if reason is not None:
            self.warnings.append(
                f"{reason}, so steps are not kept in memory: a failure loses the steps since the newest checkpoint"
            )
        self.records = self.paths
        self.limits = memory_limits.watch_limits(self.paths)

    @property
    def checks_health(self) -> bool:
        return self.requested_config.resilience.health != "off"

    @property
    def heartbeat_s(self) -> float:
        return self.requested_config.resilience.heartbeat_timeout_s

    @property
    def grace_s(self) -> float:
        return self.requested_config.comm.timeout_s

    @property
    def shared(self) -> Path:
        """That folder."""
        return self.memory.folder

    def _idle(self) -> None:
        """Periodic work beside the ranks."""
        self.health_watch.poll_once()
        self.memory.touch()  # otherwise a run of days would count as abandoned after it is killed

    # ------------------------------------------------------------------------------------------------------ its ranks

    def make_job(self, offer: Message, poll_once: Tend) -> NodeJob:
        """What this node's agent runs in a division. Raises PhalanxError where this node does not fit it."""
        from phalanx.trainer.resolve import make_training_job

        config = read_offered_config(offer)
        prepare.check_offer(self.requested_config, config)
        prepare.check_faults(self.requested_faults, faults.faults_from_message(offer["faults"]))
        if failover.parse_policy(offer) != make_policy(config, self.options.nodes):
            raise ConfigError(
                "the leader's resilience section differs from its recipe; use the same version of Phalanx on all nodes"
            )
        paths = self.paths
        if paths.url is None:
            check_shared_folder(paths, offer["sign"], poll_once)
        elif self.options.node > 0:
            paths = mirror.make_working_paths(paths.url.text, config.data.cache, paths.url.timeout_s, self.options.node)
            fetch_records(paths, poll_once)
            self.limits = memory_limits.watch_limits(paths)  # where this node's ranks note theirs
        self.clean_memory(paths, poll_once)
        mine = self.count_ranks(offer)
        # In a child: devices and disks may take their time, and an agent may not.
        noticed = fork_call(
            health_check.check_node_if_enabled, config, paths, self.devices, timeout_s=CHECK_S, meanwhile=poll_once
        )
        if noticed is not None:
            self.notify_user(event_text.describe_event({"kind": EventKind.HEALTH, **noticed}))
        answer = prepare.resolve_on_node(config, self.devices[:mine], int(offer["world"]), poll_once)
        check_data(answer, {**offer["data"], WEIGHTS: offer["weights"]})
        planned = faults.faults_from_message(offer["faults"])
        return self.job_for(make_training_job(answer, paths, planned), mine, int(offer["world"]))

    def job_for(self, training: Any, ranks: int, world: int) -> NodeJob:
        """`ranks` of a TrainingJob on this node."""
        return NodeJob(
            world=ranks,
            worker=functools.partial(prepare.worker, training),
            paths=training.paths,
            devices=[device.name for device in self.devices[:ranks]],
            on_event=functools.partial(self._note, world),
            on_idle=self._idle,
            grace_s=training.config.comm.timeout_s,
            stop_notice_s=training.config.resilience.stop_notice_s,
            blocked_signals=STOP_SIGNALS,
            hang_timeouts=prepare.hang_limits(training.config),
            after_out_of_memory=self._limit_has_fallen,
            after_kernel_kill=prepare.reduce_memory_of(training),
            shared=self.shared,
            keeps_state=self.memory.state,
        )

    def clean_memory(self, paths: RunPaths, poll_once: Tend) -> None:
        """Remove state from this node's memory that a job must not resume from: that of an abandoned branch of the run
        at `paths`; or all, where the recipe keeps nothing there."""
        self.records, self.run_id = paths, state_file.compute_run_id(paths.events)
        _await_the_dead(self.shared, poll_once)
        if not self.adopted_old_memory:
            self.adopted_old_memory = True
            self._take_over(poll_once)
        if self.requested_config.resilience.in_memory_checkpoints is False:
            inventory.remove_unused_files(self.shared, ())
        else:
            inventory.remove_rolled_back(self.shared, self.run_id, outcome.rollback_attempts(paths))

    def _take_over(self, poll_once: Tend) -> None:
        """Take over state that this machine kept under another node number: Slurm may number nodes differently each
        time. All nodes have joined, so other nodes on this machine hold theirs."""
        if not self.memory.state:
            return
        with contextlib.closing(
            shared_memory.hold_orphaned_folders(self.paths, self.options.node, self.shared.parent)
        ) as folders:
            for number, folder in folders:
                _await_the_dead(folder, poll_once)
                if inventory.has_no_writers(folder) and inventory.move_state_files(folder, self.shared):
                    self.notify_user(
                        f"this machine was node {number} of the run before and still has that node's state"
                    )

    def settle_memory(self) -> None:
        """Remove this node's in-memory state of the run, unless a later job may have to resume from it."""
        self.memory.touch()
        self.memory.persists = self.memory.state and self._has_more()

    def _has_more(self) -> bool:
        """Whether this node's memory has a newer step than the disk."""
        at_url = self.paths.url is not None  # files saved there are not visible here at once
        if self.code == ExitCode.DONE or (self.code == ExitCode.STOPPED and at_url):
            return False
        held = inventory.read_inventory(self.shared, self.run_id or state_file.compute_run_id(self.records.events))
        newest = max((step for each in held for step in each.steps), default=0)
        if self.cut_off:  # a fenced node may not reach the disk either, and would hang
            return newest > 0
        refresh_listing(self.records.has_checkpoints)
        return newest > outcome.newest_checkpoint_step(self.records)

    def _limit_has_fallen(self) -> bool:
        refresh_listing(self.paths.memory_limit(0).parent)  # another node may have written it
        return self.limits()

    # --------------------------------------------------------------------------------------------------------- leading

    def begin(
        self,
        facts: dict[str, Any],
        prepared: PreparedRun,
        noticed: dict[str, Any] | None,
        lost: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Be the first to lead: from now on the run is recorded and shown. `lost`: nodes that are not fit."""
        if prepared.config.report.tensorboard:
            prepare.preload_tensorboard()
        self.planned_faults = prepared.job.faults
        self.first_attempt, self.committed = prepared.attempt, outcome.newest_checkpoint_step(self.paths)
        # Here and not by the recorder, some time later: by the first event of all the run is known.
        event = write_event(self.paths.events, EventKind.RUN_STARTED, prepared.attempt, **facts)
        later = [] if prepared.layout_event is None else [(EventKind.LAYOUT_CHOSEN, prepared.layout_event)]
        later += [] if noticed is None else [(EventKind.HEALTH, noticed)]
        later += [(EventKind.NODE_LOST, each) for each in lost]
        make = LocalRecorder if self.options.total == 1 else EventRecorder
        recorder = make(self.paths, prepared.config.train.steps, prepared.unit, verbose=self.verbose)
        self.start_recording(recorder, event, later)
        self.observer = Observer.start(prepared.config.report, self.paths)
        for message in prepared.warnings:
            recorder.show(EventKind.WARNING, {"message": message})
        for message in self.warnings:
            recorder.record(EventKind.WARNING, {"attempt": prepared.attempt, "message": message})

    def take_over_recording(self, offer: Message, hold: HoldLeaderFiles) -> EventRecorder:
        self.first_attempt = int(offer["attempt"])
        self.planned_faults = faults.faults_from_message(offer["faults"])
        self.observer = Observer.start(self.requested_config.report, self.paths)
        return EventRecorder(
            self.paths, int(offer["steps"]), str(offer["unit"]), hold, later=True, verbose=self.verbose
        )

    def make_coordinator(self, agent: NodeAgent) -> Coordinator:
        """Lead from now on."""
        self.led = agent
        if self.paths.url is not None and agent.membership.previous_member_list is not None:
            agent.over = (
                int(ExitCode.FAILED),
                "node 0, the only writer to the run's URL, was lost; restart all nodes",
            )
        return super().make_coordinator(agent)

    def prepare_offer(self, division: int, plan: Plan, devices: list[list[Any]]) -> Message:
        """Resolve the recipe for other ranks; runs in a child."""
        rows = [(node, DeviceInfo(*row)) for (node, _), each in zip(plan, devices, strict=True) for row in each]
        mine = [device for node, device in rows if node == self.options.node] or list(self.devices)
        elsewhere = [device for node, device in rows if node != self.options.node]
        by_node = [[DeviceInfo(*row) for row in each] for each in devices]
        prepared = prepare.prepare_run(
            self.requested_config,
            self.paths,
            mine,
            len(rows),
            len(mine),
            writes=True,
            elsewhere=elsewhere,
            nodes=by_node,
        )
        prepared = dataclasses.replace(prepared, job=dataclasses.replace(prepared.job, faults=self.planned_faults))
        facts = prepare.describe_start(prepared, [device for _, device in rows], len(rows))
        write_event(self.paths.events, EventKind.RUN_STARTED, prepared.attempt, **facts, again=True)
        if prepared.layout_event is not None:
            write_event(self.paths.events, EventKind.LAYOUT_CHOSEN, prepared.attempt, **prepared.layout_event)
        return make_offer(
            self.requested_config, prepared, self.paths, division, plan, devices, self.options.nodes, first=False
        )

    def take_committed_steps(self) -> list[int]:
        """The same; between attempts of a run on one node the disk itself is read, since no other node waits."""
        steps = super().take_committed_steps()
        if self.led is not None and self.led.membership.is_solo and self.led.running is None:
            steps.append(outcome.newest_checkpoint_step(self.paths))
        return steps

    def finish(self, agent: NodeAgent, code: int) -> int:
        if code == ExitCode.DONE and agent.offer is not None and agent.start is not None:
            outcome.write_finish_event(self.paths, int(agent.offer["steps"]), int(agent.start["attempt"]))
        code, asked = outcome.resolve_exit_code(self.paths, code, self.first_attempt)
        self.code = code
        outcome.warn_missing_faults(self.paths, self.planned_faults, self.first_attempt)
        outcome.finish_run(self.paths, code, asked, self.shared if self._has_more() else None)
        if self.observer is not None:
            self.observer.close()
        return code


def _await_the_dead(shared: Path, poll_once: Tend) -> None:
    """Wait for ranks whose agent was killed, which outlive it by moments."""
    until = time.monotonic() + inventory.WRITER_TIMEOUT_S
    while not inventory.has_no_writers(shared) and time.monotonic() < until:
        poll_once()
        time.sleep(inventory.POLL_S)


def check_data(answer: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raises ConfigError when this node's data differ from node 0's."""
    mine = {**answer["data"], WEIGHTS: answer["weights"]}
    if answer["base"] is not None:
        mine[BASE_WEIGHTS] = {"sha256": answer["base"]}
    different = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    if different:
        differ = "differs" if len(different) == 1 else "differ"
        raise ConfigError(
            f"{' and '.join(different)} {differ} between this node and node 0, so the nodes would train on different "
            "data; give all nodes the same files, or a shared data.cache"
        )
