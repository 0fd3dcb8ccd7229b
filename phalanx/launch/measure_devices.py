"""`phalanx hardware`: ranks of one node or several measure their devices for a recipe's model; what follows from it."""

import contextlib
import errno
import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.node import agent
from phalanx.elastic.node.agent import run_agent
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.node.worker import NodeJob, StopRequested, StopSignals, raise_on_stop_signal
from phalanx.elastic.supervisor.coordinator import Coordinator, Plan
from phalanx.elastic.supervisor.failover import describe_division
from phalanx.elastic.supervisor.state import RecoveryPolicy
from phalanx.elastic.supervisor.take_lead import become_coordinator
from phalanx.health.findings import DeviceInfo, assign_devices, preload_and_find_devices
from phalanx.launch import multinode, node_session, prepare
from phalanx.launch.prepare import PreparedRun
from phalanx.launch.rendezvous_options import RendezvousOptions
from phalanx.layout import balance, hardware
from phalanx.layout.hardware import Hardware
from phalanx.report import event_text, tables
from phalanx.report.logs import open_terminal

COMMAND = "phalanx hardware"  # by which its nodes know each other
HEARTBEAT_S = 5.0  # of silence; measuring takes all of a machine
GRACE_S = 1.0  # what ranks get to end; they have nothing to save


def measure_hardware(
    wanted: Config,
    ranks: int | None,
    file: Path,
    as_json: bool,
    on_cpu: bool = False,
    meeting: RendezvousOptions | None = None,
) -> int:
    """Measure the devices that `phalanx train` would use with as many ranks, show them and write `file`, on node 0 if
    there are several nodes. Returns the exit code; raises PhalanxError for problems that a user can fix.

    Prepares the data, as the model's vocabulary may come from it, and writes no run folder.
    """
    if wanted.parallel.tensor * wanted.parallel.pipeline > 1:
        raise ConfigError(
            "measurement needs the whole model on each device, but parallel.tensor or parallel.pipeline splits it; "
            "set both to 1"
        )
    try:
        with tempfile.TemporaryDirectory(prefix="phalanx-hardware-") as folder:
            paths = RunPaths(Path(folder))
            if meeting is None or meeting.node == 0:
                _check_writable(file)
            with raise_on_stop_signal():
                found, accelerators = preload_and_find_devices(on_cpu)
            devices = assign_devices(found, accelerators, ranks)
            # A file that is missing or old is why one measures.
            wanted = load.update_config(wanted, {"balance.hardware": None, "parallel.layout": "given"})
            if meeting is not None:
                meeting = replace(meeting, quiet=as_json)
                if meeting.node > 0:
                    return _take_part(wanted, devices, paths, meeting)
            return _measure_and_write(wanted, devices, file, as_json, paths, meeting)
    except StopRequested as asked:
        open_terminal().print(f"stopped by {asked}; nothing was written")
        return ExitCode.STOPPED


def _measure_and_write(
    wanted: Config,
    devices: Sequence[DeviceInfo],
    file: Path,
    as_json: bool,
    paths: RunPaths,
    meeting: RendezvousOptions | None,
) -> int:
    with contextlib.ExitStack() as held:
        with raise_on_stop_signal():
            prepared, peer = _prepare(wanted, devices, paths, meeting, held)
        code = _measure(prepared, devices, peer, as_json, paths)
        if code == ExitCode.DONE:
            known = hardware.read_hardware(paths.hardware)
            try:
                hardware.write_hardware(file, known)
            except OSError as error:
                raise _not_writable(file, error) from None
            _show(known, wanted, prepared, file, as_json)
        return code


@dataclass
class _EventPrinter:
    """Messages on events while ranks measure."""

    quiet: bool
    deaths: list[str] = field(default_factory=list)

    def note(self, kind: str, details: dict[str, Any]) -> None:
        if kind in (EventKind.WORKER_DIED, EventKind.NODE_LOST):
            self.deaths.append(event_text.describe_event({"kind": kind, **details}))
        elif kind == EventKind.WARNING and not self.quiet:
            open_terminal().print(event_text.describe_event({"kind": kind, **details}))


def _prepare(
    wanted: Config,
    devices: Sequence[DeviceInfo],
    paths: RunPaths,
    meeting: RendezvousOptions | None,
    held: contextlib.ExitStack,
) -> tuple[PreparedRun, NodeAgent | None]:
    """Resolve the recipe; on node 0 of several with all others there and ready."""
    here = len(devices)
    if meeting is None:
        return prepare.prepare_run(wanted, paths, devices, here, here, writes=False), None
    said = multinode.make_training_hello(wanted, devices, meeting, COMMAND)
    first = held.enter_context(multinode.meet_nodes(meeting, said))
    rows = first.devices(meeting.total)
    elsewhere = [DeviceInfo(*row) for each in rows[1:] for row in each]
    world = here + len(elsewhere)
    prepared = prepare.prepare_run(
        wanted, paths, devices, world, here, writes=False, elsewhere=elsewhere, meanwhile=first.poll_once
    )
    plan = [(node, len(each)) for node, each in enumerate(rows)]
    told = {"config": node_session.render_shared_config(wanted, prepared), "world": world}
    told |= describe_division(1, plan, rows, RecoveryPolicy(len(rows), max_restarts=0, on_lost_node=()))
    multinode.offer_to_all(first, told)
    works = _measuring_callbacks(wanted, said, devices, paths, as_json=meeting.quiet)
    peer = NodeAgent(first.secret, works.make_job, works.make_coordinator)
    peer.adopt_job(told, _job(prepared.job, devices, paths))
    multinode.start_membership(first, peer, None, HEARTBEAT_S, epoch=1)
    return prepared, peer


def _measuring_callbacks(
    wanted: Config, hello: Message, devices: Sequence[DeviceInfo], paths: RunPaths, as_json: bool
) -> multinode.AgentHooks:
    """Callbacks of a node that measures with others. Losing a node ends it."""
    from phalanx.trainer.resolve import make_training_job

    def make(offer: Message, poll_once: Callable[[], None]) -> NodeJob:
        config = load.build_config(load.parse_yaml(offer["config"], "node 0's configuration"), "node 0's configuration")
        prepare.check_offer(wanted, config)
        answer = prepare.resolve_on_node(config, devices, int(offer["world"]), poll_once)
        return _job(make_training_job(answer, paths), devices, paths)

    def refuse_division(division: int, plan: Plan, devices: list[list[Any]]) -> Message:
        raise ConfigError("a device failed, so none is measured")

    def lead(peer: NodeAgent) -> Coordinator:
        return become_coordinator(peer, hello, 1, 0, refuse_division, _EventPrinter(as_json).note)

    return multinode.AgentHooks(make, lead, None, HEARTBEAT_S)


def _job(training: Any, devices: Sequence[DeviceInfo], paths: RunPaths) -> NodeJob:
    return NodeJob(
        world=len(devices),
        worker=functools.partial(_worker, training, paths.hardware),
        paths=paths,
        devices=[device.name for device in devices],
        grace_s=GRACE_S,
    )


def _measure(
    prepared: PreparedRun, devices: Sequence[DeviceInfo], peer: NodeAgent | None, as_json: bool, paths: RunPaths
) -> int:
    """Have all ranks measure; returns the exit code."""
    terminal, said = open_terminal(), _EventPrinter(as_json)
    world = len(devices) if peer is None or peer.offer is None else int(peer.offer["world"])
    if not as_json:
        terminal.print(f"measuring {world} device{'s' if world > 1 else ''}: passes of this model, copies, the link")
    if peer is None:
        code = agent.run_local_job(replace(_job(prepared.job, devices, paths), on_event=said.note))
        why = "; ".join(said.deaths)
    else:
        code = _run(peer)
        why = peer.membership.fenced or (peer.over[1] if peer.over is not None else "")
    if code != ExitCode.DONE:
        terminal.print(why or f"not measured (exit code {code})", style="red")
    return code


def _run(peer: NodeAgent) -> int:
    """This node's part of measuring."""
    with StopSignals() as signals:
        try:
            code = run_agent(peer, GRACE_S, signals)
            if peer.is_leader and peer.over is not None and code == ExitCode.DONE:
                peer.over = code, "measurement finished; node 0 wrote the file"
                if peer.membership.me.node > 0:
                    code = int(ExitCode.FAILED)
                    peer.over = code, "node 0, which collects the measurements, was lost; measure again"
        finally:
            peer.close()
    return code


def _show(known: Hardware, wanted: Config, prepared: PreparedRun, file: Path, as_json: bool) -> None:
    terminal, train, speeds = open_terminal(), prepared.config.train, hardware.fit_speeds(known)
    assert train.micro_batch != "auto"
    # As a run would with this file: no rank gets larger micro-batches than the recipe allows. What `auto` came to is
    # known for the devices of this node alone.
    if wanted.train.micro_batch != "auto" or len({device.node for device in known.devices}) == 1:
        speeds = [replace(speed, most=min(speed.most, train.micro_batch)) for speed in speeds]
    division = balance.divide(train.global_batch, speeds, lockstep=prepared.config.parallel.lockstep)
    if as_json:
        terminal.out(json.dumps(hardware.to_json(known) | division.to_json(), indent=1), highlight=False)
    else:
        terminal.print(tables.render_hardware_table(known, division))
        terminal.print(f"written to {file}; balance.hardware={file} uses it")


def _take_part(wanted: Config, devices: Sequence[DeviceInfo], paths: RunPaths, meeting: RendezvousOptions) -> int:
    """Measure this node's devices as node 0 says; it has the result."""
    said = multinode.make_training_hello(wanted, devices, meeting, COMMAND)
    peer = multinode.join_job(said, meeting, _measuring_callbacks(wanted, said, devices, paths, as_json=meeting.quiet))
    if isinstance(peer, int):
        return peer
    code = _run(peer)
    if not meeting.quiet:
        open_terminal().print(peer.membership.fenced or (peer.over[1] if peer.over is not None else ""))
    return code


def _check_writable(file: Path) -> None:
    """Raises RunError where `file` cannot be written, before the measurement."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise _not_writable(file, error) from None


def _not_writable(file: Path, error: OSError) -> RunError:
    return RunError(f"{file} cannot be written ({error.strerror or error}); choose another with --out")


def _worker(job: Any, file: Path, placement: Placement) -> int:
    from phalanx.autotune import measure

    return int(measure.run_measurement(job.config, job.spec, placement, file))
