"""`phalanx run` on several nodes: a custom script that restarts from its own checkpoints after a failure, on the same
nodes, with spares in place of lost nodes, or on the remaining nodes.

The rendezvous is that of a training run (`multinode.py`, `elastic/`). Each node runs the script on its command line,
which the leader does not choose.
"""

import contextlib
import functools
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.compat import run as script_run
from phalanx.config.operations import ResilienceSection
from phalanx.core import format_versions
from phalanx.core.errors import ConfigError, Unhealthy
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.node.worker import NodeJob, StopRequested, raise_on_stop_signal
from phalanx.elastic.supervisor import failover
from phalanx.elastic.supervisor.coordinator import Coordinator, Plan
from phalanx.elastic.supervisor.meeting_host import MeetingHost
from phalanx.elastic.supervisor.state import JobPhase, RecoveryPolicy
from phalanx.health.findings import DeviceInfo, assign_devices, distinct_models, preload_and_find_devices
from phalanx.launch import health_check, multinode, preemption
from phalanx.launch.node_participant import (
    CHECK_S,
    NodeParticipant,
    Tend,
    check_shared_folder,
    ensure_run_sign,
)
from phalanx.launch.recorder import EventRecorder, HoldLeaderFiles
from phalanx.launch.rendezvous_options import RendezvousOptions
from phalanx.report import event_text
from phalanx.system.fork import fork_call

COMMAND = "phalanx run"  # by which its nodes know each other
HEARTBEAT_S = 1.0  # of silence, after which a node is lost
LASTED_S = 600.0  # an attempt of that age counts as progress, since the script's own progress is unknown
UNFIT = "--no-health"


@dataclass(frozen=True)
class ScriptJob:
    """Options of `phalanx run` on several nodes. `settings`: text of a file for SageMaker's library; `min_nodes`: with
    fewer the script waits up to `wait_s` seconds; `checks_health`: whether nodes are checked."""

    path: str
    arguments: tuple[str, ...]
    settings: str | None
    max_restarts: int
    min_nodes: int
    wait_s: float
    checks_health: bool = True

    def policy(self, nodes: int) -> RecoveryPolicy:
        """The restart policy. A node that returns becomes a spare: ranks of a script are not ended for it."""
        ways = ("replace", *(("shrink",) if self.min_nodes < nodes else ()), "wait")
        return RecoveryPolicy(
            nodes, self.max_restarts, on_lost_node=ways, wait_s=self.wait_s, grow=False, least=self.min_nodes
        )


def make_script_job(
    path: str,
    arguments: Sequence[str],
    smp_config: Path | None,
    options: RendezvousOptions,
    min_nodes: int | None = None,
    max_restarts: int | None = None,
    checks_health: bool = True,
) -> ScriptJob:
    """Check what belongs together. Raises ConfigError."""
    least = options.nodes if min_nodes is None else min_nodes
    if least > options.nodes:
        raise ConfigError(f"--min-nodes {least} is more than --nodes {options.nodes}; use at most --nodes")
    restarts = script_run.RESTARTS if max_restarts is None else max_restarts
    settings = script_run.read_settings(path, smp_config)
    return ScriptJob(path, tuple(arguments), settings, restarts, least, options.timeout_s, checks_health)


def _watch() -> contextlib.AbstractContextManager[Callable[[], str]]:
    """Watch for notices of the cloud whose machine this is: without a recipe, defaults count. No
    checkpoint of a script can be requested."""
    return preemption.watch_for_preemption(ResilienceSection(), None)


def run_script_alone(
    script: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    ranks: int | None,
    smp_config: Path | None,
    max_restarts: int | None,
) -> int:
    """Run a script on this machine, or as the rank that the environment describes; see `script_run.run_script`."""
    return script_run.run_script(script, arguments, environment, ranks, smp_config, max_restarts, _watch)


def run_script_on_node(script: ScriptJob, paths: RunPaths, ranks: int | None, options: RendezvousOptions) -> int:
    """Run a script as one of several nodes: `ranks` of it here, or one for each accelerator; `paths` is the shared
    folder. Returns the exit code; raises PhalanxError for problems that a user can fix, on any node."""
    if paths.config.exists():
        raise ConfigError(f"{paths.display_name} holds a run of phalanx train; name another folder with --run-dir")
    try:
        with raise_on_stop_signal():
            found, accelerators = preload_and_find_devices(False, script_run.PRELOAD)
        devices = assign_devices(found, accelerators, ranks)
        with _watch() as read_notice:
            make = functools.partial(_member, script, paths, devices, options, read_notice)
            return multinode.lead_or_follow(
                paths, options, lambda before: _lead(make(), before), lambda: make().follow()
            )
    except StopRequested as asked:
        options.notify_user(f"stopped by {asked} before the script was started")
        return multinode.early_stop_code(asked, options)


def _hello(script: ScriptJob, devices: Sequence[DeviceInfo], options: RendezvousOptions) -> Message:
    asked = {
        "the command": COMMAND, "--spares": options.spares, "--min-nodes": script.min_nodes,
        "--max-restarts": script.max_restarts, "--smp-config": script.settings, UNFIT: not script.checks_health,
        "the digest of the script": _digest(Path(script.path).read_bytes()),
        "the digest of its arguments": _digest("\0".join(script.arguments).encode()),  # arguments may contain secrets
    }  # fmt: skip
    return multinode.make_command_hello(asked, devices, options)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _member(
    script: ScriptJob,
    paths: RunPaths,
    devices: Sequence[DeviceInfo],
    options: RendezvousOptions,
    read_notice: Callable[[], str],
) -> "ScriptNodeSession":
    made = ScriptNodeSession(paths, devices, options, _hello(script, devices, options), script)
    made.read_notice = read_notice
    return made


def _lead(run: "ScriptNodeSession", before: int) -> int:
    """Lead as node 0: host the rendezvous, then become a member. `before`: the run's epoch."""
    from phalanx.trainer import run_folder

    paths, options = run.paths, run.options
    with contextlib.ExitStack() as held:
        with raise_on_stop_signal():
            held.enter_context(run_folder.hold_run_folder(paths))
            meeting = multinode.meet_nodes(options, run.hello, options.spares, paths, before)
            first = held.enter_context(meeting)
            noticed = None
            try:
                noticed = run.check_health(first.poll_once)
            except Unhealthy as error:
                first.report_unfit(str(error))
            rows = first.devices(options.nodes)
            run.first_attempt = run_folder.next_attempt(paths)
            told = run.make_offer(1, [(node, len(each)) for node, each in enumerate(rows)], rows)
            until_all_meet = held.enter_context(contextlib.ExitStack())
            until_all_meet.callback(paths.node0_marker.unlink, missing_ok=True)
            multinode.offer_to_all(first, told)
            peer = NodeAgent(first.secret, run.make_job, run.make_coordinator)
            peer.adopt_job(told, run.job_for(told))
            run.begin(first, noticed)
            enter = run.begin_epoch(first, peer, until_all_meet)
        return run.run_to_end(peer, enter)


@dataclass
class ScriptNodeSession(NodeParticipant):
    """One of the nodes of a script."""

    script: ScriptJob
    is_leading: Coordinator | None = field(default=None, init=False)
    began: tuple[int, float] = field(default=(0, 0.0), init=False)  # the attempt that runs, and since when, as it seems

    @property
    def checks_health(self) -> bool:
        return self.script.checks_health

    @property
    def heartbeat_s(self) -> float:
        return HEARTBEAT_S

    @property
    def grace_s(self) -> float:
        return script_run.GRACE_S

    # ------------------------------------------------------------------------------------------------------ its ranks

    def make_job(self, offer: Message, poll_once: Tend) -> NodeJob:
        if failover.parse_policy(offer) != self.script.policy(self.options.nodes):
            raise ConfigError(
                "the leader's policy differs from this command's; use the same version of Phalanx on all nodes"
            )
        check_shared_folder(self.paths, offer["sign"], poll_once)
        noticed = self.check_health(poll_once)
        if noticed is not None:
            self.notify_user(event_text.describe_event({"kind": EventKind.HEALTH, **noticed}))
        return self.job_for(offer)

    def _note(self, world: int, kind: str, details: dict[str, Any]) -> None:
        super()._note(world, kind, self._told(kind, details))

    def _tell(self, kind: str, details: dict[str, Any]) -> None:
        super()._tell(kind, self._told(kind, details))

    def _told(self, kind: str, details: dict[str, Any]) -> dict[str, Any]:
        """The script decides what its ranks do on a signal."""
        return details | {"script": self.script.path} if kind == EventKind.STOP_REQUESTED else details

    def check_health(self, poll_once: Tend) -> dict[str, Any] | None:
        """Check this node's health, in a child, since devices and disks may be slow. Raises Unhealthy."""
        if not self.script.checks_health:
            return None
        seen: dict[str, Any] | None = fork_call(
            health_check.check_node, self.paths, self.devices, UNFIT, timeout_s=CHECK_S, meanwhile=poll_once
        )
        return seen

    def job_for(self, offer: Message) -> NodeJob:
        """This node's ranks in a division."""
        ranks = self.count_ranks(offer)
        launched = script_run.LaunchInfo(self.paths.name, int(offer["attempt"]), self.script.max_restarts)
        worker = functools.partial(
            script_run.run_rank,
            script=self.script.path,
            arguments=list(self.script.arguments),
            settings=self.script.settings,
            launched=launched,
        )
        return NodeJob(
            world=ranks,
            worker=worker,
            paths=self.paths,
            devices=[device.name for device in self.devices[:ranks]],
            on_event=functools.partial(self._note, int(offer["world"])),
            on_idle=self.health_watch.poll_once,
            grace_s=self.grace_s,
            logs=False,
        )

    # --------------------------------------------------------------------------------------------------------- leading

    def make_offer(self, division: int, plan: Plan, devices: Sequence[Any], first: bool = True) -> Message:
        """The offer to all nodes for a division of the ranks. Raises ConfigError if the settings forbid that
        number of ranks."""
        world = sum(ranks for _, ranks in plan)
        script_run.check_settings(self.script.settings, world)
        told = {"sign": ensure_run_sign(self.paths, first), "world": world, "attempt": self.first_attempt}
        return told | failover.describe_division(division, plan, devices, self.script.policy(self.options.nodes))

    def prepare_offer(self, division: int, plan: Plan, devices: list[list[Any]]) -> Message:
        rows = [DeviceInfo(*row) for each in devices for row in each]
        write_event(self.paths.events, EventKind.RUN_STARTED, self.first_attempt, **self._facts(rows))
        return self.make_offer(division, plan, devices, first=False)

    def begin(self, first: MeetingHost, noticed: dict[str, Any] | None) -> None:
        """Be the first to lead: from now on the run is recorded and shown."""
        rows = [DeviceInfo(*row) for each in first.devices(self.options.nodes) for row in each]
        there, lost = first.describe_nodes(self.options.nodes)
        event = write_event(self.paths.events, EventKind.RUN_STARTED, self.first_attempt, **self._facts(rows), **there)
        later = [] if noticed is None else [(str(EventKind.HEALTH), noticed)]
        self.start_recording(self._recorder(), event, [*later, *((EventKind.NODE_LOST, each) for each in lost)])

    def _facts(self, devices: Sequence[DeviceInfo]) -> dict[str, Any]:
        return {
            format_versions.KEY: format_versions.RUN_FOLDER,
            "script": self.script.path,
            "world": len(devices),
            "device": devices[0].name.partition(":")[0],
            "device_names": distinct_models(devices),
        }

    def _recorder(self, hold: HoldLeaderFiles = contextlib.nullcontext, later: bool = False) -> EventRecorder:
        return EventRecorder(self.paths, 0, "", hold, later, sys.stderr)

    def take_over_recording(self, offer: Message, hold: HoldLeaderFiles) -> EventRecorder:
        self.first_attempt = int(offer["attempt"])
        return self._recorder(hold, later=True)

    def make_coordinator(self, agent: NodeAgent) -> Coordinator:
        """Lead from now on."""
        self.is_leading = super().make_coordinator(agent)
        return self.is_leading

    def take_committed_steps(self) -> list[int]:
        """The running attempt, once it has lasted: a script's checkpoints are unknown, but it has not failed at its
        start."""
        super().take_committed_steps()
        if self.is_leading is None or self.is_leading.state.phase != JobPhase.RUNNING:
            return []
        attempt, now = self.is_leading.state.attempt, time.monotonic()
        if self.began[0] != attempt:
            self.began = attempt, now
        return [attempt] if now > self.began[1] + LASTED_S else []

    def finish(self, agent: NodeAgent, code: int) -> int:
        attempt = self.first_attempt if agent.start is None else int(agent.start["attempt"])
        kind = {int(ExitCode.DONE): EventKind.FINISHED, int(ExitCode.STOPPED): EventKind.STOPPED}.get(code)
        if kind is not None:
            with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
                write_event(self.paths.events, kind, attempt)
        self.notify_user(agent.over[1] if agent.over is not None else "this node was asked to stop and exits")
        return code
