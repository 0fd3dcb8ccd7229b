"""`phalanx doctor`: what this machine can do, and the proof that training on it gives the right numbers."""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from phalanx.config.model import DataSection
from phalanx.core.placement import ExitCode
from phalanx.doctor.results import NAMES, CheckResult, CheckState, parse_check_names
from phalanx.elastic.node.signals import StopRequested, raise_on_stop_signal
from phalanx.report.doctor import DoctorConsole
from phalanx.report.terminal import open_terminal
from phalanx.storage.files import local_cache


class _ConsoleListener:
    """Who watches the examination, or with --json nobody."""

    def __init__(self, lines: DoctorConsole | None) -> None:
        self._lines = lines

    def begin(self, name: str) -> None:
        if self._lines is not None:
            self._lines.begin(name)

    def line(self, line: CheckResult) -> None:
        if self._lines is not None:
            self._lines.line(str(line.state), line.check, line.sentence)


def doctor_command(
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Insist on accelerators: without one that is wrong, and nothing is tried.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help=f"Only this check; may be repeated. One of {', '.join(NAMES)}."),
    ] = None,
    run_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder that runs are to go to, whose disk is looked at.")
    ] = Path("runs"),
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The report to write: JSON, without names, addresses and secrets.")
    ] = Path("phalanx-doctor.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report, and nothing while checks go on.")] = False,
) -> None:
    """Prove that training works on this machine: in a minute on CPUs, in about five on accelerators.

    Looks at versions, devices, memory, limits, disks, network and Slurm, and at arithmetic, copies and kernels.

    Trains a tiny model on one device and on all: sharded, killed, resumed, with a hang. The losses must agree.

    Each line is ok, slow (it works, at a cost), wrong, missing or skipped, and says what to do.

    Exit code 0 where nothing is wrong, else 3. A check that crashes or hangs is one line, too.
    """
    from phalanx.doctor import run_checks, shareable_report

    cache = local_cache(DataSection().cache)
    scope = run_checks.DoctorScope(gpus, run_dir, cache, parse_check_names(only or []))
    begun, lines = time.monotonic(), None if as_json else DoctorConsole(open_terminal())
    shareable_report.check_report_writable(out)
    try:
        with (
            raise_on_stop_signal(),
            tempfile.TemporaryDirectory(prefix="phalanx-doctor-", ignore_cleanup_errors=True) as folder,
        ):
            found = run_checks.run_doctor(scope, Path(folder), _ConsoleListener(lines))
    except StopRequested as asked:
        open_terminal().print(f"stopped by {asked}; no report was written")
        raise typer.Exit(int(ExitCode.STOPPED)) from None
    report = shareable_report.build_report(found, time.monotonic() - begun, os.environ)
    shareable_report.write_report(out, report)
    if lines is not None:
        lines.end(report, str(out))
    else:
        open_terminal().out(json.dumps(report, indent=1), highlight=False)
    raise typer.Exit(int(ExitCode.UNHEALTHY if report["verdict"] == CheckState.WRONG else ExitCode.DONE))
