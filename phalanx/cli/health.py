"""`phalanx health`: health checks of one node or several, for a user or for Slurm."""

import dataclasses
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from phalanx.config.model import DataSection
from phalanx.core.errors import ConfigError, PhalanxError, RunError
from phalanx.core.placement import ExitCode
from phalanx.doctor.results import NAMES, CheckResult, CheckState, parse_check_names
from phalanx.elastic.node.worker import StopRequested, raise_on_stop_signal
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.health import checks, dcgm
from phalanx.health.findings import Severity, at_least, is_usable, unique_sentences, verdict
from phalanx.launch.schedulers import slurm
from phalanx.report import tables as shown
from phalanx.report.doctor import DoctorConsole
from phalanx.report.logs import open_terminal
from phalanx.storage.files import local_cache

AsSlurm = Literal["healthcheck", "prolog", "epilog"]


def health_command(
    context: typer.Context,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also test compute, copies and collectives on every device; needs an idle node."),
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="With --deep: seconds of compute on each device. Default: 10.")
    ] = None,
    diag_level: Annotated[
        int | None,
        typer.Option(min=1, max=4, help="With --deep: level of `dcgmi diag`, if installed. Default: 2."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results as JSON.")] = None,
    expect: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Expected hardware of this node, a file of --save-baseline.")
    ] = None,
    save_baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the hardware of this node as a baseline.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder for runs: also check its disk and clock.")
    ] = None,
    since: Annotated[
        float | None,
        typer.Option(min=0.0, help="Kernel messages of the last N seconds only. Default: since boot."),
    ] = None,
    node_count: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="Number of nodes, which also check each other; run this command on each."),
    ] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="Rank of this node, from 0.")] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Rendezvous: tcp://HOST:PORT of node 0, or file:///FOLDER on a shared file system."
        ),
    ] = None,
    rendezvous_timeout: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds that nodes wait for a missing one. Default: 600.")
    ] = None,
    as_slurm: Annotated[
        AsSlurm | None,
        typer.Option(help="Run as Slurm's HealthCheckProgram, Prolog or Epilog: short output, drain the node."),
    ] = None,
) -> None:
    """Check this node: devices, driver, kernel log, disks, memory, limits, clock.

    Exit code 0 if it is fit for training, else 3.
    """
    from phalanx.health import burn_in_report
    from phalanx.launch import health_check, rendezvous_options

    meeting = rendezvous_options.parse_rendezvous_options(
        node_count, node_rank, rendezvous, rendezvous_timeout, context.obj
    )
    if not deep and (seconds is not None or diag_level is not None):
        named = "--seconds" if seconds is not None else "--diag-level"
        raise ConfigError(f"{named} has no effect without --deep; add it, or remove {named}")
    if as_slurm is not None:
        if deep or as_json or save_baseline is not None or run_dir is not None or meeting is not None:
            raise ConfigError(
                "--as-slurm cannot be combined with --deep, --json, --save-baseline, --run-dir or --nodes; remove them"
            )
        raise typer.Exit(_for_slurm(as_slurm, expect, out, since))
    expected = None if expect is None else checks.read_baseline(expect)
    findings = checks.run_health_checks(checks.HealthScope(run_dir, None, expected, since))
    rows: burn_in_report.BurnInRows = []
    if save_baseline is not None:
        _write_json(save_baseline, checks.collect_baseline())
    if deep:
        found, rows = burn_in_report.run_burn_in(10.0 if seconds is None else seconds)
        check = dcgm.make_dcgm_check(2 if diag_level is None else diag_level)
        findings += found if check is None else found + checks.run_checks([check])
    result = checks.build_node_report(findings)
    code = int(ExitCode.DONE if is_usable(verdict(findings)) else ExitCode.UNHEALTHY)
    if meeting is not None:
        meeting = dataclasses.replace(meeting, quiet=as_json)
        code, result = health_check.check_nodes(meeting, result | {"rows": rows}, as_json)
    elif not as_json:
        open_terminal().print(shown.render_findings_table(result))
    if out is not None:
        _write_json(out, result)
    if as_json:
        open_terminal().out(json.dumps(result, indent=1), highlight=False)
    raise typer.Exit(code)


def _write_json(file: Path, tree: Mapping[str, Any]) -> None:
    try:
        checks.write_json(file, tree)
    except OSError as error:
        raise RunError(f"{file} cannot be written ({error.strerror or error}); give another file") from None


# ------------------------------------------------------------------------------------------------------------ for Slurm


def _for_slurm(role: AsSlurm, expect: Path | None, out: Path | None, since: float | None) -> int:
    """Health check for Slurm's daemon, run as root with almost no environment.

    A HealthCheckProgram drains the node itself, and its exit code has no meaning; for a Prolog or an Epilog slurmd
    drains the node by the exit code, and they must not call Slurm. An error of the check itself never drains a node: it
    is printed, and the exit code is 0.
    """
    try:
        expected = None if expect is None else checks.read_baseline(expect)
        findings = checks.run_health_checks(checks.HealthScope(None, None, expected, since, network=False))
        if out is not None:
            _write_json(out, checks.build_node_report(findings))
        unfit = at_least(findings, Severity.RESET)
        if not unfit:
            return ExitCode.DONE
        reason = f"phalanx {verdict(findings)}: {'; '.join(unique_sentences(unfit))}"
        sys.stderr.write(f"{reason}\n")
        if role != "healthcheck":
            return ExitCode.UNHEALTHY
        slurm.set_node_state(_slurm_node_name(), NodeRequestKind.DRAIN, reason)
    except PhalanxError as error:
        sys.stderr.write(f"phalanx health: {error}\n")
    except Exception as error:
        sys.stderr.write(f"phalanx health: {type(error).__name__}: {error}\n")
    return ExitCode.DONE


def _slurm_node_name() -> str:
    """Slurm's name of this node: the host name without a domain."""
    return socket.gethostname().partition(".")[0]


# -------------------------------------------------------------------------------------------------------------- doctor
# `phalanx doctor`: tests of this machine, and a proof that training on it is correct.


class _ConsoleListener:
    """Progress output of the checks; none with --json."""

    def __init__(self, lines: DoctorConsole | None) -> None:
        self._lines = lines

    def begin(self, name: str) -> None:
        if self._lines is not None:
            self._lines.begin(name)

    def line(self, line: CheckResult) -> None:
        if self._lines is not None:
            self._lines.line(str(line.state), line.check, line.sentence)


def doctor_command(
    gpus: Annotated[bool, typer.Option("--gpus", help="Require accelerators: fail at once without one.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help=f"Only this check; may be repeated. One of {', '.join(NAMES)}."),
    ] = None,
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="The folder for runs, whose disk is checked.")] = Path(
        "runs"
    ),
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The report to write: JSON, without names, addresses and secrets.")
    ] = Path("phalanx-doctor.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, without progress.")] = False,
) -> None:
    """Test that training works on this machine: a minute on CPUs, about five on accelerators.

    Checks versions, devices, memory, limits, disks, network and Slurm, and arithmetic, copies and kernels.

    Trains a tiny model on one device and on all: sharded, killed, resumed, with a hang. The losses must agree.

    Each line is ok, slow (it works, at a cost), wrong, missing or skipped, and says what to do.

    Exit code 0 if nothing is wrong, else 3. A check that crashes or hangs is one line, too.
    """
    from phalanx.doctor import results, run_checks

    cache = local_cache(DataSection().cache)
    scope = run_checks.DoctorScope(gpus, run_dir, cache, parse_check_names(only or []))
    begun, lines = time.monotonic(), None if as_json else DoctorConsole(open_terminal())
    results.check_report_writable(out)
    try:
        with (
            raise_on_stop_signal(),
            tempfile.TemporaryDirectory(prefix="phalanx-doctor-", ignore_cleanup_errors=True) as folder,
        ):
            found = run_checks.run_doctor(scope, Path(folder), _ConsoleListener(lines))
    except StopRequested as asked:
        open_terminal().print(f"stopped by {asked}; no report was written")
        raise typer.Exit(int(ExitCode.STOPPED)) from None
    report = results.build_report(found, time.monotonic() - begun, os.environ)
    results.write_report(out, report)
    if lines is not None:
        lines.end(report, str(out))
    else:
        open_terminal().out(json.dumps(report, indent=1), highlight=False)
    raise typer.Exit(int(ExitCode.UNHEALTHY if report["verdict"] == CheckState.WRONG else ExitCode.DONE))
