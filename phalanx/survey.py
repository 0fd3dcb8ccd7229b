"""`phalanx hardware`: local ranks that measure their devices for a recipe's model, and what follows from it."""

import errno
import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx import balance, hardware, launch, recipe
from phalanx.cluster import agent
from phalanx.cluster.stopping import StopAsked, stoppable
from phalanx.config import Config
from phalanx.errors import RunError
from phalanx.records import ExitCode, Kind, Placement, RunPaths
from phalanx.report import measured, words
from phalanx.report.terminal import open_terminal


def survey(
    wanted: Config, ranks: int | None, file: Path, environment: Mapping[str, str], as_json: bool, on_cpu: bool = False
) -> int:
    """Measure the devices that `phalanx train` would use with as many ranks, show them and write `file`.

    Returns the exit code; raises PhalanxError for what a user can mend. Prepares the data, as the model's vocabulary
    may come from it, and writes no run folder.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="phalanx-hardware-") as folder:
            return _survey(wanted, ranks, file, environment, as_json, on_cpu, RunPaths(Path(folder)))
    except StopAsked as asked:
        open_terminal().print(f"stopped by {asked}; nothing was written")
        return ExitCode.STOPPED


def _survey(
    wanted: Config,
    ranks: int | None,
    file: Path,
    environment: Mapping[str, str],
    as_json: bool,
    on_cpu: bool,
    paths: RunPaths,
) -> int:
    terminal = open_terminal()
    _writable(file)
    with stoppable():
        found, accelerators = launch.warmed(environment, on_cpu)
        devices = launch.devices_of_ranks(found, accelerators, ranks)
        world = len(devices)
        wanted = recipe.update(wanted, {"balance.hardware": None})  # a file that is missing or old is why one measures
        prepared = launch.prepare(wanted, paths, devices, world, world, writes=False)
    if not as_json:
        terminal.print(f"measuring {world} device{'s' if world > 1 else ''}: passes of this model, copies, the link")
    died: list[str] = []

    def note(kind: str, details: dict[str, Any]) -> None:
        if kind == Kind.WORKER_DIED:
            died.append(words.sentence({"kind": kind, **details}))

    job = agent.Job(
        world=world,
        worker=functools.partial(_worker, prepared.job, paths.hardware),
        paths=paths,
        devices=[device.name for device in devices],
        on_event=note,
        grace_s=1.0,
    )
    code = agent.run(job)
    if code != ExitCode.DONE:
        terminal.print("; ".join(died) or f"not measured (exit code {code})", style="red")
        return code
    known = hardware.read(paths.hardware)
    try:
        hardware.write(file, known)
    except OSError as error:
        raise _unwritten(file, error) from None
    train = prepared.config.train
    assert train.micro_batch != "auto"
    # As a run would with this file: no rank gets larger micro-batches than the recipe allows.
    speeds = [replace(speed, most=min(speed.most, train.micro_batch)) for speed in hardware.speeds(known)]
    division = balance.divide(train.global_batch, speeds)
    if as_json:
        shares = {"shares": list(division.shares), "parts": division.parts}
        terminal.out(json.dumps(hardware.to_json(known) | shares, indent=1), highlight=False)
    else:
        terminal.print(measured.table(known, division))
        terminal.print(f"written to {file}; balance.hardware={file} uses it")
    return ExitCode.DONE


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
