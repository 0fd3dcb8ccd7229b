"""`phalanx run` on several nodes: a script of one's own, started again from its own checkpoints when something dies, on
the same nodes, with spares in the place of lost ones, or on those that are left.

The nodes meet and agree as those of a training run do (`multinode.py`, `elastic/`). Each runs the script of its own
command line: no leader tells it which.
"""

import contextlib
import functools
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.compat import run as script_run
from phalanx.core import format_versions
from phalanx.core.errors import ConfigError, Unhealthy
from phalanx.core.events import Kind, write_event
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import epoch_files
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.rendezvous_host import FirstNode
from phalanx.elastic.node.job import Job
from phalanx.elastic.node.node_agent import Peer
from phalanx.elastic.node.signals import StopAsked, stoppable
from phalanx.elastic.supervisor import failover
from phalanx.elastic.supervisor.coordinator import Leader, Plan
from phalanx.elastic.supervisor.state import Phase, Policy
from phalanx.health.devices import Device, devices_of_ranks, models, warmed
from phalanx.launch import health_gate, multinode
from phalanx.launch.node_participant import CHECK_S, Participant, Tend, Where, check_folder, signed
from phalanx.launch.recorder import Hold, Recorder
from phalanx.launch.rendezvous_options import Meeting
from phalanx.report import event_text
from phalanx.system.fork import fork_call

COMMAND = "phalanx run"  # by which its nodes know each other
HEARTBEAT_S = 1.0  # of silence, after which a node is lost
LASTED_S = 600.0  # an attempt of that age has come further, as far as anybody knows who does not know the script
UNFIT = "--no-health"


@dataclass(frozen=True)
class Script:
    """What the command line asks for. `settings`: text of a file for SageMaker's library; `least_nodes`: with fewer the
    script does not go on, but waits for `wait_s` seconds; `looks`: whether nodes are looked at."""

    path: str
    arguments: tuple[str, ...]
    settings: str | None
    max_restarts: int
    least_nodes: int
    wait_s: float
    looks: bool = True

    def policy(self, nodes: int) -> Policy:
        """What is done about losses. A node that comes back is a spare: ranks of a script are not ended for it."""
        ways = ("replace", *(("shrink",) if self.least_nodes < nodes else ()), "wait")
        return Policy(
            nodes, self.max_restarts, on_lost_node=ways, wait_s=self.wait_s, grow=False, least=self.least_nodes
        )


def script_of(
    path: str,
    arguments: Sequence[str],
    smp_config: Path | None,
    meeting: Meeting,
    least_nodes: int | None = None,
    max_restarts: int | None = None,
    looks: bool = True,
) -> Script:
    """Check what belongs together. Raises ConfigError."""
    least = meeting.nodes if least_nodes is None else least_nodes
    if least > meeting.nodes:
        raise ConfigError(f"--min-nodes {least} is more than --nodes {meeting.nodes}; give a number up to that")
    restarts = script_run.RESTARTS if max_restarts is None else max_restarts
    settings = script_run.read(path, smp_config)
    return Script(path, tuple(arguments), settings, restarts, least, meeting.timeout_s, looks)


def run(script: Script, paths: RunPaths, ranks: int | None, meeting: Meeting) -> int:
    """Run a script as one of several nodes: `ranks` of it here, or one for each accelerator; `paths` is the folder that
    they share. Returns the exit code; raises PhalanxError for what a user can mend, on whichever node it was found."""
    if paths.config.exists():
        raise ConfigError(f"{paths.shown} holds a run of phalanx train; name another folder with --run-dir")
    try:
        with stoppable():
            found, accelerators = warmed(False, script_run.PRELOAD)
        devices = devices_of_ranks(found, accelerators, ranks)
        lead = functools.partial(_lead, script, paths, devices, meeting)
        return multinode.meet(paths, meeting, lead, lambda: _follow(script, paths, devices, meeting))
    except StopAsked as asked:
        meeting.say(f"stopped by {asked} before the script was started")
        return ExitCode.STOPPED


def _hello(script: Script, devices: Sequence[Device], meeting: Meeting) -> Message:
    asked = {
        "the command": COMMAND, "--spares": meeting.spares, "--min-nodes": script.least_nodes,
        "--max-restarts": script.max_restarts, "--smp-config": script.settings, UNFIT: not script.looks,
        "the digest of the script": _digest(Path(script.path).read_bytes()),
        "the digest of its arguments": _digest("\0".join(script.arguments).encode()),  # they may hold what is secret
    }  # fmt: skip
    return multinode.hello_of(asked, devices, meeting)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _member(script: Script, paths: RunPaths, devices: Sequence[Device], meeting: Meeting) -> "ScriptMember":
    where = Where(meeting.node, meeting.nodes, meeting.place.folder)
    said = _hello(script, devices, meeting)
    return ScriptMember(paths, devices, where, said, meeting.say, script)


def _lead(script: Script, paths: RunPaths, devices: Sequence[Device], meeting: Meeting, before: int) -> int:
    """Be node 0: bring all together, and then be one of the members. `before`: the run's epoch."""
    from phalanx.trainer import run_folder

    with contextlib.ExitStack() as held:
        with stoppable():
            held.enter_context(run_folder.opened(paths))
            run = _member(script, paths, devices, meeting)
            first = held.enter_context(multinode.hosted(meeting, run.said, spares=meeting.spares))
            tend = multinode.hearing(first)
            multinode.gather(first, meeting, multinode.watching(paths, tend, before))
            noticed = None
            try:
                noticed = run.looked_at(tend)
            except Unhealthy as error:
                run.unfit = first.stand_aside(str(error), alone=False)
            rows = [each["devices"] for each in first.hellos()[: meeting.nodes]]
            run.first_attempt = run_folder.next_attempt(paths)
            told = run.offered(1, [(node, len(each)) for node, each in enumerate(rows)], rows)
            until_all_meet = held.enter_context(contextlib.ExitStack())
            until_all_meet.callback(paths.sign.unlink, missing_ok=True)
            multinode.offer(first, lambda node: told, tend)
            peer = Peer(first.secret, run.make, run.lead)
            peer.prepared(told, run.job(told))
            run.begin(first, noticed)
            epoch = epoch_files.claim_next(paths, {"attempt": run.first_attempt, "leader": 0})
        enter = functools.partial(multinode.enter_first, first, peer, run.claim, HEARTBEAT_S, epoch, until_all_meet)
        return run.to_the_end(peer, enter)


def _follow(script: Script, paths: RunPaths, devices: Sequence[Device], meeting: Meeting) -> int:
    run = _member(script, paths, devices, meeting)
    works = multinode.Works(run.make, run.lead, run.claim, HEARTBEAT_S)
    peer = multinode.take_part(run.said, meeting, works, functools.partial(epoch_files.leader, paths))
    return peer if isinstance(peer, int) else run.to_the_end(peer)


@dataclass
class ScriptMember(Participant):
    """One of the nodes of a script."""

    script: Script
    leading: Leader | None = field(default=None, init=False)
    began: tuple[int, float] = field(default=(0, 0.0), init=False)  # the attempt that runs, and since when, as it seems

    @property
    def looks(self) -> bool:
        return self.script.looks

    @property
    def grace_s(self) -> float:
        return script_run.GRACE_S

    # ------------------------------------------------------------------------------------------------------ its ranks

    def make(self, offer: Message, tend: Tend) -> Job:
        if failover.policy_of(offer) != self.script.policy(self.where.nodes):
            raise ConfigError("the leader offers another policy than this command has; use one version of Phalanx")
        check_folder(self.paths, offer["sign"], tend)
        noticed = self.looked_at(tend)
        if noticed is not None:
            self.say(event_text.sentence({"kind": Kind.HEALTH, **noticed}))
        return self.job(offer)

    def _note(self, world: int, kind: str, details: dict[str, Any]) -> None:
        super()._note(world, kind, self._told(kind, details))

    def _tell(self, kind: str, details: dict[str, Any]) -> None:
        super()._tell(kind, self._told(kind, details))

    def _told(self, kind: str, details: dict[str, Any]) -> dict[str, Any]:
        """What ranks do about a signal is for their script to say."""
        return details | {"script": self.script.path} if kind == Kind.SIGNALLED else details

    def looked_at(self, tend: Tend) -> dict[str, Any] | None:
        """Look at this node, in a child: devices and disks may take their time. Raises Unhealthy."""
        if not self.script.looks:
            return None
        seen: dict[str, Any] | None = fork_call(
            health_gate.fit, self.paths, self.devices, UNFIT, timeout_s=CHECK_S, meanwhile=tend
        )
        return seen

    def job(self, offer: Message) -> Job:
        """This node's ranks in a division."""
        ranks = self.ranks_of(offer)
        launched = script_run.Launched(self.paths.name, int(offer["attempt"]), self.script.max_restarts)
        worker = functools.partial(
            script_run.become,
            script=self.script.path,
            arguments=list(self.script.arguments),
            settings=self.script.settings,
            launched=launched,
        )
        return Job(
            world=ranks,
            worker=worker,
            paths=self.paths,
            devices=[device.name for device in self.devices[:ranks]],
            on_event=functools.partial(self._note, int(offer["world"])),
            on_idle=self.watch.tend,
            grace_s=self.grace_s,
            logs=False,
        )

    # --------------------------------------------------------------------------------------------------------- leading

    def offered(self, division: int, plan: Plan, devices: Sequence[Any], first: bool = True) -> Message:
        """What all nodes are told of a division. Raises ConfigError where the settings forbid so many ranks."""
        world = sum(ranks for _, ranks in plan)
        script_run.check(self.script.settings, world)
        told = {"sign": signed(self.paths, first), "world": world, "attempt": self.first_attempt}
        return told | failover.division_of(division, plan, devices, self.script.policy(self.where.nodes))

    def prepare(self, division: int, plan: Plan, devices: list[list[Any]]) -> Message:
        rows = [Device(*row) for each in devices for row in each]
        write_event(self.paths.events, Kind.RUN_STARTED, self.first_attempt, **self._facts(rows))
        return self.offered(division, plan, devices, first=False)

    def begin(self, first: FirstNode, noticed: dict[str, Any] | None) -> None:
        """Be the first to lead: from now on the run is recorded and shown."""
        hellos = first.hellos()
        rows = [Device(*row) for each in hellos[: self.where.nodes] for row in each["devices"]]
        hosts = [each["host"] for each in hellos]
        there = {"hosts": hosts[: self.where.nodes], "spares": hosts[self.where.nodes :]}
        event = write_event(self.paths.events, Kind.RUN_STARTED, self.first_attempt, **self._facts(rows), **there)
        later = [] if noticed is None else [(str(Kind.HEALTH), noticed)]
        for node, why in first.left_out.items():
            if node:  # this one leaves later
                later.append((Kind.NODE_LOST, {"node": node, "host": hosts[node], "reason": why}))
        self.record(self._recorder(), event, later)

    def _facts(self, devices: Sequence[Device]) -> dict[str, Any]:
        return {
            format_versions.KEY: format_versions.RUN_FOLDER,
            "script": self.script.path,
            "world": len(devices),
            "device": devices[0].name.partition(":")[0],
            "device_names": models(devices),
        }

    def _recorder(self, hold: Hold = contextlib.nullcontext, later: bool = False) -> Recorder:
        return Recorder(self.paths, 0, "", hold, later, sys.stderr)

    def succeed(self, offer: Message, hold: Hold) -> Recorder:
        self.first_attempt = int(offer["attempt"])
        return self._recorder(hold, later=True)

    def lead(self, peer: Peer) -> Leader:
        """Lead from now on."""
        self.leading = super().lead(peer)
        return self.leading

    def safe(self) -> list[int]:
        """The attempt that runs, once it has lasted: what a script has saved it alone knows, and this much tells that
        it does not fail at its start."""
        super().safe()
        if self.leading is None or self.leading.state.phase != Phase.RUNNING:
            return []
        attempt, now = self.leading.state.attempt, time.monotonic()
        if self.began[0] != attempt:
            self.began = attempt, now
        return [attempt] if now > self.began[1] + LASTED_S else []

    def finish(self, peer: Peer, code: int) -> int:
        attempt = self.first_attempt if peer.start is None else int(peer.start["attempt"])
        kind = {int(ExitCode.DONE): Kind.FINISHED, int(ExitCode.STOPPED): Kind.STOPPED}.get(code)
        if kind is not None:
            with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
                write_event(self.paths.events, kind, attempt)
        self.say(peer.over[1] if peer.over is not None else "this node was asked to stop, and leaves")
        return code
