"""What one of several nodes runs of a training run, from the moment when all have met: its ranks and, while it leads,
what all of them need.
"""

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.core import faults
from phalanx.core.errors import ConfigError
from phalanx.core.events import Kind, write_event
from phalanx.core.faults import Fault
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import BASE_WEIGHTS, RunPaths
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.rendezvous import look_again
from phalanx.elastic.node.job import Job
from phalanx.elastic.node.node_agent import Peer
from phalanx.elastic.supervisor import failover
from phalanx.elastic.supervisor.coordinator import Leader, Plan
from phalanx.elastic.supervisor.state import Policy
from phalanx.health.devices import Device
from phalanx.launch import health_gate, local, offer_checks, outcome
from phalanx.launch.local import Prepared
from phalanx.launch.node_participant import CHECK_S, Participant, Tend, check_folder, signed
from phalanx.launch.recorder import Hold, Recorder
from phalanx.launch.remote_run_dir import fetch_records
from phalanx.layout import hardware
from phalanx.recovery import inventory, shared_memory, state_file
from phalanx.recovery.shared_memory import SharedMemory
from phalanx.report import event_text
from phalanx.storage import mirror
from phalanx.system.fork import fork_call
from phalanx.trainer.stop_request import HELD

WEIGHTS = "model.from_hf"  # what a new run begins with: each rank reads its own part of it


def policy_of(config: Config, nodes: int) -> Policy:
    """What a recipe says of losses and restarts."""
    wanted, axes = config.resilience, config.parallel.axes
    return Policy(
        nodes=nodes,
        max_restarts=wanted.max_restarts,
        on_lost_node=tuple(wanted.on_lost_node),
        wait_s=wanted.wait_for_node_s,
        grow=wanted.grow,
        same_crash=wanted.same_crash,
        group=axes.tensor * axes.pipeline,
        replicate_every=wanted.replicate if isinstance(wanted.replicate, int) else 1,
    )


def config_for_all(wanted: Config, prepared: Prepared) -> str:
    """The resolved configuration as YAML, but for what was `auto` and follows from memory, which each node looks at for
    itself and ranks agree on, or from the node's compilers."""
    of_nodes = ("train.micro_batch", "train.compile", "parallel.zero", "parallel.reduce", "memory.activations")
    planned = wanted.parallel.layout == "auto"  # by node 0, for all of them
    own = {key: "auto" for key in of_nodes if not planned and load.get(wanted, key) == "auto"}
    return load.to_yaml(load.update(prepared.config, own))


def offer_of(
    wanted: Config,
    prepared: Prepared,
    paths: RunPaths,
    division: int,
    plan: Plan,
    devices: Sequence[Any],
    nodes: int,
    first: bool = True,
) -> Message:
    """What all nodes are told of a division."""
    return {
        "config": config_for_all(wanted, prepared),
        "sign": signed(paths, first) if paths.url is None else None,
        "data": json.loads(paths.data.read_text(encoding="utf-8")),
        "weights": prepared.weights,
        "world": sum(ranks for _, ranks in plan),
        "faults": faults.plain(prepared.job.faults),
        "attempt": prepared.attempt,
        "unit": prepared.unit,
        "steps": prepared.config.train.steps,
        **failover.division_of(division, plan, devices, policy_of(prepared.config, nodes)),
    }


@dataclass
class Member(Participant):
    """`memory`: its run's folder in shared memory, which it holds."""

    wanted: Config
    memory: SharedMemory
    asked: Sequence[Fault] = ()  # to go wrong, by the command of this node
    planned: tuple[Fault, ...] = ()
    records: RunPaths = field(init=False)  # of the run, as they are seen from here
    begun: bool = False  # whether what this machine had kept as another node was looked for
    known: bytes = b""  # by which its state files are told from others; asked for early, as later its folder may hang
    limits: Callable[[], bool] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory.why is not None:
            self.say(f"{self.memory.why}, so no step is kept in memory on any node")
        self.records = self.paths
        self.limits = hardware.lowered(self.paths)

    @property
    def looks(self) -> bool:
        return self.wanted.resilience.health != "off"

    @property
    def grace_s(self) -> float:
        return self.wanted.comm.timeout_s

    @property
    def shared(self) -> Path:
        """That folder."""
        return self.memory.folder

    def _idle(self) -> None:
        """What is done beside ranks, now and then."""
        self.watch.tend()
        self.memory.touch()  # or a run of days would be taken for one that was left behind, once it is killed

    # ------------------------------------------------------------------------------------------------------ its ranks

    def make(self, offer: Message, tend: Tend) -> Job:
        """What this node's agent runs in a division. Raises PhalanxError where this node does not fit it."""
        from phalanx.trainer.loop import Run
        from phalanx.trainer.resolve import token_folders
        from phalanx.workload import local_copies
        from phalanx.workload.workload import spec_if_any

        config = load.check(yaml.safe_load(offer["config"]), "node 0's configuration")
        offer_checks.check(self.wanted, config)
        offer_checks.check_faults(self.asked, faults.from_plain(offer["faults"]))
        if failover.policy_of(offer) != policy_of(config, self.where.nodes):
            raise ConfigError("the leader offers another resilience than its recipe has; use one version of Phalanx")
        paths = self.paths
        if paths.url is None:
            check_folder(paths, offer["sign"], tend)
        elif self.where.node > 0:
            paths = mirror.working(paths.url.text, config.data.cache, paths.url.timeout_s, self.where.node)
            fetch_records(paths, tend)
            self.limits = hardware.lowered(paths)  # where this node's ranks note theirs
        self.tidy(paths, tend)
        mine = self.ranks_of(offer)
        # In a child: devices and disks may take their time, and an agent may not.
        noticed = fork_call(health_gate.checked, config, paths, self.devices, timeout_s=CHECK_S, meanwhile=tend)
        if noticed is not None:
            self.say(event_text.sentence({"kind": Kind.HEALTH, **noticed}))
        answer = local.resolved(config, self.devices[:mine], int(offer["world"]), tend)
        check_data(answer, {**offer["data"], WEIGHTS: offer["weights"]})
        here = local_copies.here(load.check(yaml.safe_load(answer["config"]), "the resolved configuration"))
        planned = faults.from_plain(offer["faults"])
        training = Run(here, spec_if_any(here, paths), paths, *token_folders(answer), faults=planned)
        return self.job(training, mine, int(offer["world"]))

    def job(self, training: Any, ranks: int, world: int) -> Job:
        """`ranks` of a trainer's Run on this node."""
        return Job(
            world=ranks,
            worker=functools.partial(local.worker, training),
            paths=training.paths,
            devices=[device.name for device in self.devices[:ranks]],
            on_event=functools.partial(self._note, world),
            on_idle=self._idle,
            grace_s=training.config.comm.timeout_s,
            held=HELD,
            patience=local.patience(training.config),
            after_out_of_memory=self._limit_has_fallen,
            after_kernel_kill=local.less_for(training),
            shared=self.shared,
            keeps=self.memory.state,
        )

    def tidy(self, paths: RunPaths, tend: Tend) -> None:
        """Have nothing in this node's memory that a job is not to go on from: what belongs to a way that the run, whose
        records are at `paths`, has given up since; or all, where the recipe keeps nothing there."""
        self.records, self.known = paths, state_file.run_of(paths.events)
        _await_the_dead(self.shared, tend)
        if not self.begun:
            self.begun = True
            self._take_over(tend)
        if self.wanted.resilience.memory is False:
            inventory.remove_others(self.shared, ())
        else:
            inventory.remove_passed(self.shared, self.known, outcome.rolled_back(paths))

    def _take_over(self, tend: Tend) -> None:
        """Take what this machine has kept of the run when it had another number: Slurm may count nodes otherwise each
        time. All have met, so nodes that are this same machine hold their own."""
        if not self.memory.state:
            return
        with contextlib.closing(shared_memory.left_behind(self.paths, self.where.node, self.shared.parent)) as folders:
            for number, folder in folders:
                _await_the_dead(folder, tend)
                if inventory.are_dead(folder) and inventory.take_over(folder, self.shared):
                    self.say(f"this machine was node {number} of the run before, and has what it had kept as that")

    def leave(self) -> None:
        """Take this node's memory of the run away, unless a later job may have to go on from there."""
        self.memory.touch()
        self.memory.keeps = self.memory.state and self._has_more()

    def _has_more(self) -> bool:
        """Whether this node's memory has a newer step than the disk."""
        at_url = self.paths.url is not None  # what is saved there is not known here at once
        if self.code == ExitCode.DONE or (self.code == ExitCode.STOPPED and at_url):
            return False
        held = inventory.held_in(self.shared, self.known or state_file.run_of(self.records.events))
        newest = max((step for each in held for step in each.steps), default=0)
        if self.cut_off:  # who has had to leave the others may not reach the disk either, and would hang
            return newest > 0
        look_again(self.records.has_checkpoints)
        return newest > outcome.committed(self.records)

    def _limit_has_fallen(self) -> bool:
        look_again(self.paths.limit(0).parent)  # another node may have written it
        return self.limits()

    # --------------------------------------------------------------------------------------------------------- leading

    def begin(
        self,
        facts: dict[str, Any],
        prepared: Prepared,
        noticed: dict[str, Any] | None,
        lost: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Be the first to lead: from now on the run is recorded and shown. `lost`: nodes that are not fit."""
        if prepared.config.report.tensorboard:
            local.preload_tensorboard()
        self.planned = prepared.job.faults
        self.first_attempt, self.committed = prepared.attempt, outcome.committed(self.paths)
        # Here and not by the recorder, some time later: by the first event of all the run is known.
        event = write_event(self.paths.events, Kind.RUN_STARTED, prepared.attempt, **facts)
        later = [] if prepared.planned is None else [(Kind.PLANNED, prepared.planned)]
        later += [] if noticed is None else [(Kind.HEALTH, noticed)]
        later += [(Kind.NODE_LOST, each) for each in lost]
        recorder = Recorder(self.paths, prepared.config.train.steps, prepared.unit)
        self.record(recorder, event, later)
        for message in prepared.warnings:
            recorder.show(Kind.WARNING, {"message": message})

    def succeed(self, offer: Message, hold: Hold) -> Recorder:
        self.first_attempt = int(offer["attempt"])
        self.planned = faults.from_plain(offer["faults"])
        return Recorder(self.paths, int(offer["steps"]), str(offer["unit"]), hold, later=True)

    def lead(self, peer: Peer) -> Leader:
        """Lead from now on."""
        if self.paths.url is not None and peer.circle.before is not None:
            peer.over = (
                int(ExitCode.FAILED),
                "node 0, which alone may write to the run's URL, was lost; start all again",
            )
        return super().lead(peer)

    def prepare(self, division: int, plan: Plan, devices: list[list[Any]]) -> Message:
        """Resolve the recipe for other ranks; runs in a child."""
        rows = [(node, Device(*row)) for (node, _), each in zip(plan, devices, strict=True) for row in each]
        mine = [device for node, device in rows if node == self.where.node] or list(self.devices)
        elsewhere = [device for node, device in rows if node != self.where.node]
        by_node = [[Device(*row) for row in each] for each in devices]
        prepared = local.prepare(
            self.wanted, self.paths, mine, len(rows), len(mine), writes=True, elsewhere=elsewhere, nodes=by_node
        )
        prepared = dataclasses.replace(prepared, job=dataclasses.replace(prepared.job, faults=self.planned))
        facts = local.facts(prepared, [device for _, device in rows], len(rows))
        write_event(self.paths.events, Kind.RUN_STARTED, prepared.attempt, **facts)
        if prepared.planned is not None:
            write_event(self.paths.events, Kind.PLANNED, prepared.attempt, **prepared.planned)
        return offer_of(self.wanted, prepared, self.paths, division, plan, devices, self.where.nodes, first=False)

    def finish(self, peer: Peer, code: int) -> int:
        if code == ExitCode.DONE and peer.offer is not None and peer.start is not None:
            outcome.tell_done(self.paths, int(peer.offer["steps"]), int(peer.start["attempt"]))
        code, asked = outcome.outcome(self.paths, code, self.first_attempt)
        self.code = code
        outcome.tell_missed(self.paths, self.planned, self.first_attempt)
        outcome.close(self.paths, code, asked, self.shared if self._has_more() else None)
        return code


def _await_the_dead(shared: Path, tend: Tend) -> None:
    """Wait for ranks whose agent was killed, which outlive it by moments."""
    until = time.monotonic() + inventory.DEATH_S
    while not inventory.are_dead(shared) and time.monotonic() < until:
        tend()
        time.sleep(inventory.LOOK_S)


def check_data(answer: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raises ConfigError when this node would train on something else than node 0."""
    mine = {**answer["data"], WEIGHTS: answer["weights"]}
    if answer["base"] is not None:
        mine[BASE_WEIGHTS] = {"sha256": answer["base"]}
    different = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    if different:
        differ = "differs" if len(different) == 1 else "differ"
        raise ConfigError(
            f"{' and '.join(different)} {differ} between this node and node 0, so the nodes would train on different "
            "things; give all nodes the same files, or a data.cache that they share"
        )
