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
from phalanx.core.events import Kind
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.node import agent
from phalanx.elastic.node.job import Job
from phalanx.elastic.node.node_agent import Peer, run
from phalanx.elastic.node.signals import Signals, StopAsked, stoppable
from phalanx.elastic.supervisor.coordinator import Leader, Plan, take_lead
from phalanx.elastic.supervisor.failover import division_of
from phalanx.elastic.supervisor.state import Policy
from phalanx.health.devices import Device, devices_of_ranks, warmed
from phalanx.launch import local, multinode, node_session, offer_checks
from phalanx.launch.local import Prepared
from phalanx.launch.rendezvous_options import Meeting
from phalanx.layout import balance, hardware
from phalanx.layout.hardware import Hardware
from phalanx.report import event_text, hardware_table
from phalanx.report.terminal import open_terminal

COMMAND = "phalanx hardware"  # by which its nodes know each other
HEARTBEAT_S = 5.0  # of silence; measuring takes all of a machine
GRACE_S = 1.0  # what ranks get to end; they have nothing to save


def survey(
    wanted: Config, ranks: int | None, file: Path, as_json: bool, on_cpu: bool = False, meeting: Meeting | None = None
) -> int:
    """Measure the devices that `phalanx train` would use with as many ranks, show them and write `file`: on node 0,
    where this is one of several nodes.

    Returns the exit code; raises PhalanxError for what a user can mend. Prepares the data, as the model's vocabulary
    may come from it, and writes no run folder.
    """
    if wanted.parallel.tensor * wanted.parallel.pipeline > 1:
        raise ConfigError(
            "what is measured is the whole model on each device, but parallel.tensor and parallel.pipeline cut it; set "
            "both to 1 to measure"
        )
    try:
        with tempfile.TemporaryDirectory(prefix="phalanx-hardware-") as folder:
            paths = RunPaths(Path(folder))
            if meeting is None or meeting.node == 0:
                _writable(file)
            with stoppable():
                found, accelerators = warmed(on_cpu)
            devices = devices_of_ranks(found, accelerators, ranks)
            # A file that is missing or old is why one measures.
            wanted = load.update(wanted, {"balance.hardware": None, "parallel.layout": "given"})
            if meeting is not None:
                meeting = replace(meeting, quiet=as_json)
                if meeting.node > 0:
                    return _take_part(wanted, devices, paths, meeting)
            return _survey(wanted, devices, file, as_json, paths, meeting)
    except StopAsked as asked:
        open_terminal().print(f"stopped by {asked}; nothing was written")
        return ExitCode.STOPPED


def _survey(
    wanted: Config, devices: Sequence[Device], file: Path, as_json: bool, paths: RunPaths, meeting: Meeting | None
) -> int:
    with contextlib.ExitStack() as held:
        with stoppable():
            prepared, peer = _prepared(wanted, devices, paths, meeting, held)
        code = _measured(prepared, devices, peer, as_json, paths)
        if code == ExitCode.DONE:
            known = hardware.read(paths.hardware)
            try:
                hardware.write(file, known)
            except OSError as error:
                raise _unwritten(file, error) from None
            _show(known, wanted, prepared, file, as_json)
        return code


@dataclass
class _Said:
    """What is said of events while ranks measure."""

    quiet: bool
    died: list[str] = field(default_factory=list)

    def note(self, kind: str, details: dict[str, Any]) -> None:
        if kind in (Kind.WORKER_DIED, Kind.NODE_LOST):
            self.died.append(event_text.sentence({"kind": kind, **details}))
        elif kind == Kind.WARNING and not self.quiet:
            open_terminal().print(event_text.sentence({"kind": kind, **details}))


def _prepared(
    wanted: Config, devices: Sequence[Device], paths: RunPaths, meeting: Meeting | None, held: contextlib.ExitStack
) -> tuple[Prepared, Peer | None]:
    """Resolve the recipe; on node 0 of several with all others there and ready."""
    here = len(devices)
    if meeting is None:
        return local.prepare(wanted, paths, devices, here, here, writes=False), None
    said = multinode.hello(wanted, devices, meeting, COMMAND)
    first = held.enter_context(multinode.hosted(meeting, said))
    tend = multinode.hearing(first)
    multinode.gather(first, meeting, tend)
    rows = [each["devices"] for each in first.hellos()]
    elsewhere = [Device(*row) for each in rows[1:] for row in each]
    world = here + len(elsewhere)
    prepared = local.prepare(wanted, paths, devices, world, here, writes=False, elsewhere=elsewhere, meanwhile=tend)
    plan = [(node, len(each)) for node, each in enumerate(rows)]
    told = {"config": node_session.config_for_all(wanted, prepared), "world": world}
    told |= division_of(1, plan, rows, Policy(len(rows), max_restarts=0, on_lost_node=()))
    multinode.offer(first, lambda node: told, tend)
    works = _works(wanted, said, devices, paths, as_json=meeting.quiet)
    peer = Peer(first.secret, works.make, works.lead)
    peer.prepared(told, _job(prepared.job, devices, paths))
    multinode.enter_first(first, peer, None, HEARTBEAT_S, epoch=1)
    return prepared, peer


def _works(wanted: Config, said: Message, devices: Sequence[Device], paths: RunPaths, as_json: bool) -> multinode.Works:
    """What a node does that measures with others. A node that is lost ends it."""
    from phalanx.trainer.loop import Run
    from phalanx.trainer.resolve import token_folders
    from phalanx.workload import local_copies
    from phalanx.workload.workload import spec_if_any

    def make(offer: Message, tend: Callable[[], None]) -> Job:
        config = load.check(load.parse_yaml(offer["config"], "node 0's configuration"), "node 0's configuration")
        offer_checks.check(wanted, config)
        answer = local.resolved(config, devices, int(offer["world"]), tend)
        what = "the resolved configuration"
        here = local_copies.here(load.check(load.parse_yaml(answer["config"], what), what))
        return _job(Run(here, spec_if_any(here, paths), paths, *token_folders(answer)), devices, paths)

    def prepare(division: int, plan: Plan, devices: list[list[Any]]) -> Message:
        raise ConfigError("devices are measured together, or not at all")

    def lead(peer: Peer) -> Leader:
        return take_lead(peer, said, 1, 0, prepare, _Said(as_json).note)

    return multinode.Works(make, lead, None, HEARTBEAT_S)


def _job(training: Any, devices: Sequence[Device], paths: RunPaths) -> Job:
    return Job(
        world=len(devices),
        worker=functools.partial(_worker, training, paths.hardware),
        paths=paths,
        devices=[device.name for device in devices],
        grace_s=GRACE_S,
    )


def _measured(prepared: Prepared, devices: Sequence[Device], peer: Peer | None, as_json: bool, paths: RunPaths) -> int:
    """Have all ranks measure; returns the exit code."""
    terminal, said = open_terminal(), _Said(as_json)
    world = len(devices) if peer is None or peer.offer is None else int(peer.offer["world"])
    if not as_json:
        terminal.print(f"measuring {world} device{'s' if world > 1 else ''}: passes of this model, copies, the link")
    if peer is None:
        code = agent.run(replace(_job(prepared.job, devices, paths), on_event=said.note))
        why = "; ".join(said.died)
    else:
        code = _run(peer)
        why = peer.circle.fenced or (peer.over[1] if peer.over is not None else "")
    if code != ExitCode.DONE:
        terminal.print(why or f"not measured (exit code {code})", style="red")
    return code


def _run(peer: Peer) -> int:
    """This node's part of measuring."""
    with Signals() as signals:
        try:
            code = run(peer, GRACE_S, signals)
            if peer.leads and peer.over is not None and code == ExitCode.DONE:
                peer.over = code, "the devices are measured, and node 0 has the file"
                if peer.circle.me.node > 0:
                    code = int(ExitCode.FAILED)
                    peer.over = code, "node 0, which alone has what was measured, was lost; measure again"
        finally:
            peer.close()
    return code


def _show(known: Hardware, wanted: Config, prepared: Prepared, file: Path, as_json: bool) -> None:
    terminal, train, speeds = open_terminal(), prepared.config.train, hardware.speeds(known)
    assert train.micro_batch != "auto"
    # As a run would with this file: no rank gets larger micro-batches than the recipe allows. What `auto` came to is
    # known for the devices of this node alone.
    if wanted.train.micro_batch != "auto" or len({device.node for device in known.devices}) == 1:
        speeds = [replace(speed, most=min(speed.most, train.micro_batch)) for speed in speeds]
    lockstep = balance.in_lockstep(*prepared.config.parallel.settled)
    division = balance.divide(train.global_batch, speeds, lockstep=lockstep)
    if as_json:
        terminal.out(json.dumps(hardware.to_json(known) | division.tree(), indent=1), highlight=False)
    else:
        terminal.print(hardware_table.table(known, division))
        terminal.print(f"written to {file}; balance.hardware={file} uses it")


def _take_part(wanted: Config, devices: Sequence[Device], paths: RunPaths, meeting: Meeting) -> int:
    """Measure this node's devices as node 0 says; it has the result."""
    said = multinode.hello(wanted, devices, meeting, COMMAND)
    peer = multinode.take_part(said, meeting, _works(wanted, said, devices, paths, as_json=meeting.quiet))
    if isinstance(peer, int):
        return peer
    code = _run(peer)
    if not meeting.quiet:
        open_terminal().print(peer.circle.fenced or (peer.over[1] if peer.over is not None else ""))
    return code


def _writable(file: Path) -> None:
    """Raises RunError where `file` cannot be written, before anybody has waited for what would be in it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise _unwritten(file, error) from None


def _unwritten(file: Path, error: OSError) -> RunError:
    return RunError(f"{file} cannot be written ({error.strerror or error}); choose another with --out")


def _worker(job: Any, file: Path, placement: Placement) -> int:
    from phalanx.autotune import measure

    return int(measure.run(job.config, job.spec, placement, file))
