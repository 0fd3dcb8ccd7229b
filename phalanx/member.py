"""What one of several nodes runs of a training run, from the moment when all have met: its ranks and, while it leads,
what all of them need.

Any node may come to lead. It then writes the records and shows the run, prepares other divisions of the ranks, and can
be found by nodes that come back.
"""

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from phalanx import (
    ending,
    faults,
    fitness,
    hardware,
    kept_files,
    launch,
    mirror,
    offers,
    recipe,
    shared_memory,
    state_file,
)
from phalanx.axes import axes_of
from phalanx.cluster import epochs, rendezvous, succession
from phalanx.cluster.affairs import Policy
from phalanx.cluster.circle import Claim
from phalanx.cluster.fork import fork_call
from phalanx.cluster.job import Job
from phalanx.cluster.leader import Leader, Plan, take_lead
from phalanx.cluster.peer import Peer, run
from phalanx.cluster.rendezvous import look_again
from phalanx.cluster.stopping import Signals
from phalanx.cluster.wire import Message
from phalanx.config import Config
from phalanx.devices import Device
from phalanx.errors import ConfigError, RunError
from phalanx.faults import Fault
from phalanx.kept import Held
from phalanx.launch import Prepared
from phalanx.recorder import Again, Recorder
from phalanx.records import BASE_WEIGHTS, ExitCode, Kind, RunPaths, write_atomic, write_event
from phalanx.remote_run import fetch_records
from phalanx.report import words
from phalanx.shared_memory import SharedMemory

WEIGHTS = "model.from_hf"  # what a new run begins with: each rank reads its own part of it
CHECK_S = 120.0  # what a look at this node may take, before it is trained on
SEEN_S = 3.0  # what a network file system gets to show what another node has just written
Tend = Callable[[], None]


def policy_of(config: Config, nodes: int) -> Policy:
    """What a recipe says of losses and restarts."""
    wanted, axes = config.resilience, axes_of(config)
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
    own = {key: "auto" for key in of_nodes if not planned and recipe.get(wanted, key) == "auto"}
    return recipe.to_yaml(recipe.update(prepared.config, own))


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
    """What all nodes are told of a division; the sign by which they know the run folder is there from now on. That
    stays, where it is not the `first` one: what was offered before may yet be gone on with."""
    sign = None
    if paths.url is None:
        with contextlib.suppress(OSError):
            sign = None if first else paths.sign.read_text(encoding="utf-8")
        if not sign:
            sign = secrets.token_hex(8)
            write_atomic(paths.sign, sign)
    return {
        "config": config_for_all(wanted, prepared),
        "sign": sign,
        "data": json.loads(paths.data.read_text(encoding="utf-8")),
        "weights": prepared.weights,
        "world": sum(ranks for _, ranks in plan),
        "faults": faults.plain(prepared.job.faults),
        "attempt": prepared.attempt,
        "unit": prepared.unit,
        "steps": prepared.config.train.steps,
        **succession.division_of(division, plan, devices, policy_of(prepared.config, nodes)),
    }


@dataclass(frozen=True)
class Where:
    """This node's number, how many train, and the folder where they meet, if it is one."""

    node: int
    nodes: int
    meeting: Path | None


@dataclass
class Member:
    """`said`: what this node says of itself; `memory`: its run's folder in shared memory, which it holds; `say` is for
    the user who sits here, while another node leads."""

    wanted: Config
    paths: RunPaths
    devices: Sequence[Device]
    where: Where
    said: Message
    memory: SharedMemory
    say: Callable[[str], None]
    asked: Sequence[Fault] = ()  # to go wrong, by the command of this node
    recorder: Recorder | None = None
    first_attempt: int = 0
    committed: int = 0
    planned: tuple[Fault, ...] = ()
    held: Mapping[int, tuple[Held, ...]] = field(default_factory=dict)  # in nodes' memories, since a job before
    code: int = int(ExitCode.FAILED)
    cut_off: bool = False
    records: RunPaths = field(init=False)  # of the run, as they are seen from here
    begun: bool = False  # whether what this machine had kept as another node was looked for
    unfit: str | None = None  # why this node, the first one, does no more than bring all together
    known: bytes = b""  # by which its state files are told from others; asked for early, as later its folder may hang
    limits: Callable[[], bool] = field(init=False)
    watch: fitness.Watch = field(init=False)

    def __post_init__(self) -> None:
        if self.memory.why is not None:
            self.say(f"{self.memory.why}, so no step is kept in memory on any node")
        self.records = self.paths
        self.limits = hardware.lowered(self.paths)
        self.watch = fitness.Watch(self.paths, fitness.used(self.devices), self._seen)

    def _seen(self, attempt: int, seen: dict[str, Any]) -> None:
        """What was found on this node after a death; in a child."""
        if self.recorder is not None:
            write_event(self.paths.events, Kind.HEALTH, attempt, **seen)
        else:
            self.say(words.sentence({"kind": Kind.HEALTH, **seen}))

    @property
    def shared(self) -> Path:
        """That folder."""
        return self.memory.folder

    def _idle(self) -> None:
        """What is done beside ranks, now and then."""
        self.watch.tend()
        self.memory.touch()  # or a run of days would be taken for one that was left behind, once it is killed

    @property
    def claim(self) -> Claim | None:
        """Creates the files of epochs; a URL has none."""
        return None if self.paths.url is not None else functools.partial(epochs.claim, self.paths)

    # ------------------------------------------------------------------------------------------------------ its ranks

    def make(self, offer: Message, tend: Tend) -> Job:
        """What this node's agent runs in a division. Raises PhalanxError where this node does not fit it."""
        from phalanx.train import copies
        from phalanx.train.resolve import token_folders
        from phalanx.train.subject import spec_if_any
        from phalanx.train.trainer import Run

        config = recipe.check(yaml.safe_load(offer["config"]), "node 0's configuration")
        offers.check(self.wanted, config)
        offers.check_faults(self.asked, faults.from_plain(offer["faults"]))
        if succession.policy_of(offer) != policy_of(config, self.where.nodes):
            raise ConfigError("the leader offers another resilience than its recipe has; use one version of Phalanx")
        paths = self.paths
        if paths.url is None:
            check_folder(paths, offer["sign"], tend)
        elif self.where.node > 0:
            paths = mirror.working(paths.url.text, config.data.cache, paths.url.timeout_s, self.where.node)
            fetch_records(paths, tend)
            self.limits = hardware.lowered(paths)  # where this node's ranks note theirs
        self.tidy(paths, tend)
        ranks = dict(zip(offer["seats"], (ranks for ranks, _ in offer["slots"]), strict=True))
        # Of one that has come back with fewer devices than its ranks had, as many as it has: it cannot take them again.
        mine = min(len(self.devices), ranks.get(self.where.node, max(ranks.values())))
        # In a child: devices and disks may take their time, and an agent may not.
        noticed = fork_call(fitness.checked, config, paths, self.devices, timeout_s=CHECK_S, meanwhile=tend)
        if noticed is not None:
            self.say(words.sentence({"kind": Kind.HEALTH, **noticed}))
        answer = launch.resolved(config, self.devices[:mine], int(offer["world"]), tend)
        check_data(answer, {**offer["data"], WEIGHTS: offer["weights"]})
        here = copies.here(recipe.check(yaml.safe_load(answer["config"]), "the resolved configuration"))
        planned = faults.from_plain(offer["faults"])
        training = Run(here, spec_if_any(here, paths), paths, *token_folders(answer), faults=planned)
        return self.job(training, mine, int(offer["world"]))

    def job(self, training: Any, ranks: int, world: int) -> Job:
        """`ranks` of a trainer's Run on this node."""
        return Job(
            world=ranks,
            worker=functools.partial(launch.worker, training),
            paths=training.paths,
            devices=[device.name for device in self.devices[:ranks]],
            on_event=functools.partial(self._note, world),
            on_idle=self._idle,
            grace_s=training.config.comm.timeout_s,
            patience=launch.patience(training.config),
            after_out_of_memory=self._limit_has_fallen,
            after_kernel_kill=launch.less_for(training),
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
            kept_files.remove_others(self.shared, ())
        else:
            kept_files.remove_passed(self.shared, self.known, ending.rolled_back(paths))

    def _take_over(self, tend: Tend) -> None:
        """Take what this machine has kept of the run when it had another number: Slurm may count nodes otherwise each
        time. All have met, so nodes that are this same machine hold their own."""
        if not self.memory.state:
            return
        with contextlib.closing(shared_memory.left_behind(self.paths, self.where.node, self.shared.parent)) as folders:
            for number, folder in folders:
                _await_the_dead(folder, tend)
                if kept_files.are_dead(folder) and kept_files.take_over(folder, self.shared):
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
        held = kept_files.held_in(self.shared, self.known or state_file.run_of(self.records.events))
        newest = max((step for each in held for step in each.steps), default=0)
        if self.cut_off:  # who has had to leave the others may not reach the disk either, and would hang
            return newest > 0
        look_again(self.records.has_checkpoints)
        return newest > ending.committed(self.records)

    def _limit_has_fallen(self) -> bool:
        look_again(self.paths.limit(0).parent)  # another node may have written it
        return self.limits()

    def _note(self, world: int, kind: str, details: dict[str, Any]) -> None:
        if kind == Kind.WORKER_DIED and self.wanted.resilience.health != "off":
            self.watch.look(details["attempt"], f"the death of rank {details['rank']}")
        if self.recorder is not None:
            self.recorder.note(kind, details)
        elif kind == Kind.ATTEMPT_STARTED:
            ranks = sorted(details["pids"])
            which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            self.say(f"attempt {details['attempt']} started: {which} of {world} here")
        else:
            self.say(words.sentence({"kind": kind, **details}))

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
            launch.preload_tensorboard()
        self.planned = prepared.job.faults
        self.first_attempt, self.committed = prepared.attempt, ending.committed(self.paths)
        # Here and not by the recorder, some time later: by the first event of all the run is known.
        event = write_event(self.paths.events, Kind.RUN_STARTED, prepared.attempt, **facts)
        self.recorder = Recorder(self.paths, prepared.config.train.steps, prepared.unit)
        self.recorder.show(Kind.RUN_STARTED, event)
        if prepared.planned is not None:
            self.recorder.note(Kind.PLANNED, {"attempt": prepared.attempt, **prepared.planned})
        if noticed is not None:
            self.recorder.note(Kind.HEALTH, {"attempt": prepared.attempt, **noticed})
        for each in lost:
            self.recorder.note(Kind.NODE_LOST, {"attempt": prepared.attempt, **each})
        for message in prepared.warnings:
            self.recorder.show(Kind.WARNING, {"message": message})

    def lead(self, peer: Peer) -> Leader:
        """Lead from now on."""
        offer = peer.offer
        assert offer is not None
        if self.recorder is None:
            self.first_attempt = int(offer["attempt"])
            self.planned = faults.from_plain(offer["faults"])
            hold = functools.partial(self._found, peer.secret, peer.circle.me.address, peer.circle.me.port)
            self.recorder = Recorder(self.paths, int(offer["steps"]), str(offer["unit"]), hold, later=True)
        if self.paths.url is not None and peer.circle.before is not None:
            peer.over = (
                int(ExitCode.FAILED),
                "node 0, which alone may write to the run's URL, was lost; start all again",
            )
        heard = (self.recorder.safe, self.recorder.asked)
        return take_lead(
            peer, self.said, self.first_attempt, self.committed, self.prepare, self._tell, *heard, held=self.held,
            unfit=self.unfit,
        )  # fmt: skip

    def _tell(self, kind: str, details: dict[str, Any]) -> None:
        """Record what the leader says; a death on this node is looked into."""
        assert self.recorder is not None
        if kind == Kind.WORKER_DIED and "host" not in details and self.wanted.resilience.health != "off":
            self.watch.look(details["attempt"], f"the death of rank {details['rank']}")
        self.recorder.note(kind, details)

    def prepare(self, division: int, plan: Plan, devices: list[list[Any]]) -> Message:
        """Resolve the recipe for other ranks; runs in a child."""
        rows = [(node, Device(*row)) for (node, _), each in zip(plan, devices, strict=True) for row in each]
        mine = [device for node, device in rows if node == self.where.node] or list(self.devices)
        elsewhere = [device for node, device in rows if node != self.where.node]
        by_node = [[Device(*row) for row in each] for each in devices]
        prepared = launch.prepare(
            self.wanted, self.paths, mine, len(rows), len(mine), writes=True, elsewhere=elsewhere, nodes=by_node
        )
        prepared = dataclasses.replace(prepared, job=dataclasses.replace(prepared.job, faults=self.planned))
        facts = launch.facts(prepared, [device for _, device in rows], len(rows))
        write_event(self.paths.events, Kind.RUN_STARTED, prepared.attempt, **facts)
        if prepared.planned is not None:
            write_event(self.paths.events, Kind.PLANNED, prepared.attempt, **prepared.planned)
        return offer_of(self.wanted, prepared, self.paths, division, plan, devices, self.where.nodes, first=False)

    @contextlib.contextmanager
    def _found(self, secret: str, address: str, port: int) -> Iterator[Again]:
        """Hold what a leader holds that was not the first one: the rendezvous, and the run folder's lock, as soon as it
        is free: what is yielded tries that. Both name this agent, whose child holds them."""
        from phalanx.train import folder

        agent, locks = os.getppid(), list[int]()
        with contextlib.ExitStack() as held:

            def again() -> None:
                with contextlib.suppress(RunError):  # a leader that was frozen may hold it; the epoch keeps it out
                    if not locks:
                        locks.append(folder.open_folder(self.paths, agent)[0])
                        held.callback(os.close, locks[0])

            again()
            place = self.where.meeting
            if place is not None:
                there = rendezvous.Address((address,), port, secret, f"{agent} on {self.said['host']}")
                with contextlib.suppress(RunError):  # then no node comes back, and the others go on
                    made = rendezvous.publish(place, there)
                    held.callback(rendezvous.withdraw, place, there, made)
            yield again

    # --------------------------------------------------------------------------------------------------------- the end

    def to_the_end(self, peer: Peer, enter: Callable[[], None] = lambda: None) -> int:
        """Run this node's part and say how the run ended. Returns the exit code. `enter` makes all who have met members
        first: of a stop signal that comes meanwhile they hear, and do not go on without this node."""
        with Signals() as signals:
            enter()
            try:
                code = run(peer, self.wanted.comm.timeout_s, signals)
                if peer.over is not None and peer.leads:
                    peer.over = code, _ending(code, self.paths, self.where.node)
            finally:
                peer.close()
                self.watch.close()
        recorder, self.recorder = self.recorder, None
        self.code, self.cut_off = code, peer.circle.fenced is not None
        if peer.circle.fenced is not None:
            if recorder is not None:
                # One that has given the lead away still says so; one that was given up may not write any more.
                end = recorder.close if peer.over is not None else recorder.abandon
                end()
            self.say(f"this node has ended its ranks and leaves: {peer.circle.fenced}")
            return code
        if recorder is None:
            self.say(peer.over[1] if peer.over is not None else "this node was asked to stop, and leaves")
            return code
        recorder.close()
        self.paths.sign.unlink(missing_ok=True)
        if code == ExitCode.DONE and peer.offer is not None and peer.start is not None:
            ending.tell_done(self.paths, int(peer.offer["steps"]), int(peer.start["attempt"]))
        code, asked = ending.outcome(self.paths, code, self.first_attempt)
        self.code = code
        ending.tell_missed(self.paths, self.planned, self.first_attempt)
        ending.close(self.paths, code, asked, self.shared if self._has_more() else None)
        return code


def _await_the_dead(shared: Path, tend: Tend) -> None:
    """Wait for ranks whose agent was killed, which outlive it by moments."""
    until = time.monotonic() + kept_files.DEATH_S
    while not kept_files.are_dead(shared) and time.monotonic() < until:
        tend()
        time.sleep(kept_files.LOOK_S)


def _ending(code: int, paths: RunPaths, leader: int) -> str:
    if code == ExitCode.DONE:
        return "the run is done"
    if code == ExitCode.STOPPED:
        return "the run was stopped; the same commands go on with it"
    return f"the run failed (exit code {code}); node {leader} and {paths.shown} say why"


def check_folder(paths: RunPaths, sign: str, tend: Tend) -> None:
    """Raises ConfigError when this node does not see node 0's run folder, or cannot write to it."""
    until = time.monotonic() + SEEN_S
    while True:
        look_again(paths.root)
        with contextlib.suppress(OSError):
            if paths.sign.read_text(encoding="utf-8") == sign:
                break
        if time.monotonic() > until:
            raise ConfigError(
                f"the run folder {paths.root.absolute()} of this node is not the one of node 0; give --run-dir a "
                "folder on a file system that all nodes share, or a URL"
            )
        tend()
        time.sleep(0.05)
    # By doing so: what the rights say is not what a server does, which may take this node's root for nobody.
    probe = paths.root / f"{paths.sign.name}-{secrets.token_hex(4)}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"this node cannot write to the run folder {paths.root.absolute()} ({error.strerror}); change its rights"
        ) from None


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
