"""`phalanx hardware`: ranks of one node or several measure their devices for a recipe's model; what follows from it."""

import contextlib
import errno
import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx import balance, hardware, launch, nodes, recipe
from phalanx.cluster import agent
from phalanx.cluster.job import Job, Part
from phalanx.cluster.other_node import OtherNode
from phalanx.cluster.rendezvous import interface_of
from phalanx.cluster.stopping import StopAsked, stoppable
from phalanx.config import Config
from phalanx.devices import Device, devices_of_ranks, warmed
from phalanx.errors import ConfigError, RunError
from phalanx.hardware import Hardware
from phalanx.launch import Nodes, Prepared
from phalanx.nodes import Meeting
from phalanx.records import ExitCode, Kind, Placement, RunPaths
from phalanx.report import measured, words
from phalanx.report.terminal import open_terminal

COMMAND = "phalanx hardware"  # by which its nodes know each other
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
            wanted = recipe.update(wanted, {"balance.hardware": None})
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
            prepared, everywhere = _prepared(wanted, devices, paths, meeting, held)
        code = _measured(prepared, devices, everywhere, as_json, paths)
        if code == ExitCode.DONE:
            known = hardware.read(paths.hardware)
            try:
                hardware.write(file, known)
            except OSError as error:
                raise _unwritten(file, error) from None
            _show(known, wanted, prepared, file, as_json)
        if everywhere is not None:
            done = "the devices are measured, and node 0 has the file"
            everywhere.first.finish(code, done if code == ExitCode.DONE else "not measured; node 0 says why")
        return code


def _prepared(
    wanted: Config, devices: Sequence[Device], paths: RunPaths, meeting: Meeting | None, held: contextlib.ExitStack
) -> tuple[Prepared, Nodes | None]:
    """Resolve the recipe; on node 0 of several with all others there and ready."""
    here = len(devices)
    if meeting is None:
        return launch.prepare(wanted, paths, devices, here, here, writes=False), None
    first = held.enter_context(nodes.hosted(meeting, nodes.hello(wanted, devices, meeting, COMMAND)))
    tend = nodes.hearing(first)
    nodes.gather(first, meeting, tend)
    everywhere = nodes.everywhere(first)
    world, elsewhere = len(everywhere.devices), everywhere.devices[here:]
    prepared = launch.prepare(wanted, paths, devices, world, here, writes=False, elsewhere=elsewhere, meanwhile=tend)
    counts = [len(said["devices"]) for said in first.hellos()]
    told = {"config": nodes.config_for_all(wanted, prepared), "world": world}
    nodes.offer(first, lambda node: told | {"first_rank": sum(counts[:node])}, tend)
    return prepared, everywhere


def _measured(
    prepared: Prepared, devices: Sequence[Device], everywhere: Nodes | None, as_json: bool, paths: RunPaths
) -> int:
    """Have all ranks measure; returns the exit code."""
    terminal = open_terminal()
    world = len(devices) if everywhere is None else len(everywhere.devices)
    if not as_json:
        terminal.print(f"measuring {world} device{'s' if world > 1 else ''}: passes of this model, copies, the link")
    died: list[str] = []

    def note(kind: str, details: dict[str, Any]) -> None:
        if kind in (Kind.WORKER_DIED, Kind.NODE_LOST):
            died.append(words.sentence({"kind": kind, **details}))
        elif kind == Kind.WARNING and not as_json:
            terminal.print(words.sentence({"kind": kind, **details}))

    if everywhere is not None:
        everywhere.first.notice = note
    job = Job(
        world=len(devices),
        worker=functools.partial(_worker, prepared.job, paths.hardware),
        paths=paths,
        devices=[device.name for device in devices],
        on_event=note,
        grace_s=GRACE_S,
        part=None if everywhere is None else everywhere.part,
        others=None if everywhere is None else everywhere.first,
    )
    code = agent.run(job)
    if code != ExitCode.DONE:
        terminal.print("; ".join(died) or f"not measured (exit code {code})", style="red")
    return code


def _show(known: Hardware, wanted: Config, prepared: Prepared, file: Path, as_json: bool) -> None:
    terminal, train, speeds = open_terminal(), prepared.config.train, hardware.speeds(known)
    assert train.micro_batch != "auto"
    # As a run would with this file: no rank gets larger micro-batches than the recipe allows. What `auto` came to is
    # known for the devices of this node alone.
    if wanted.train.micro_batch != "auto" or len({device.node for device in known.devices}) == 1:
        speeds = [replace(speed, most=min(speed.most, train.micro_batch)) for speed in speeds]
    division = balance.divide(train.global_batch, speeds)
    if as_json:
        shares = {"shares": list(division.shares), "parts": division.parts}
        terminal.out(json.dumps(hardware.to_json(known) | shares, indent=1), highlight=False)
    else:
        terminal.print(measured.table(known, division))
        terminal.print(f"written to {file}; balance.hardware={file} uses it")


def _take_part(wanted: Config, devices: Sequence[Device], paths: RunPaths, meeting: Meeting) -> int:
    """Measure this node's devices as node 0 says; it has the result."""
    from phalanx.train import copies
    from phalanx.train.resolve import token_folders
    from phalanx.train.subject import spec_if_any
    from phalanx.train.trainer import Run

    def make(node: OtherNode, tend: Callable[[], None]) -> Job:
        assert node.offer is not None
        first_rank, world = int(node.offer["first_rank"]), int(node.offer["world"])
        config = recipe.check(
            recipe.parse_yaml(node.offer["config"], "node 0's configuration"), "node 0's configuration"
        )
        answer = nodes.resolved(config, devices, world, tend)
        here = copies.here(
            recipe.check(
                recipe.parse_yaml(answer["config"], "the resolved configuration"), "the resolved configuration"
            )
        )
        run = Run(here, spec_if_any(here, paths), paths, *token_folders(answer))
        return Job(
            world=len(devices),
            worker=functools.partial(_worker, run, paths.hardware),
            paths=paths,
            devices=[device.name for device in devices],
            grace_s=GRACE_S,
            part=Part(meeting.node, first_rank, world, interface_of(node.channel.socket)),
            others=node,
        )

    return nodes.take_part(nodes.hello(wanted, devices, meeting, COMMAND), meeting, make)


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
    from phalanx.train import measure

    return int(measure.run(job.config, job.spec, placement, file))
