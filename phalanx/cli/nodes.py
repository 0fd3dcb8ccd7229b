"""`phalanx nodes`: list, drain, replace and uncordon nodes of a run or of Slurm."""

import json
from pathlib import Path
from typing import Annotated

import typer

from phalanx.config.model import DataSection
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.renamed import warn_of
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor import node_requests
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.launch.schedulers.registry import DEFAULT, SCHEDULERS, find_scheduler
from phalanx.report import tables as shown
from phalanx.report.logs import open_terminal
from phalanx.storage import files as storage
from phalanx.storage import mirror

nodes_app = typer.Typer(help="List, drain, replace or uncordon nodes.", invoke_without_command=True)

RunOption = Annotated[str | None, typer.Option("--run", metavar="RUN", help="A run folder. Default: Slurm's nodes.")]
Node = Annotated[str, typer.Argument(metavar="NODE", help="A host name; with --run also a node's number in the run.")]
SchedulerOption = Annotated[
    str, typer.Option("--scheduler", metavar="NAME", help=f"Scheduler, without --run: {', '.join(SCHEDULERS)}.")
]
Reason = Annotated[str | None, typer.Option(help="Reason, shown to others.")]


@nodes_app.callback()
def nodes_command(
    context: typer.Context,
    run: RunOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    scheduler: SchedulerOption = DEFAULT,
) -> None:
    """List the nodes of a run, or of Slurm: state, health and requests."""
    if context.invoked_subcommand is not None:
        if run is not None or as_json:
            raise ConfigError(f"write the options after the command: phalanx nodes {context.invoked_subcommand} NODE")
        return
    rows = _scheduler_node_rows(scheduler) if run is None else _run_node_rows(run)
    if as_json:
        open_terminal().out(json.dumps(rows, indent=1), highlight=False)
    else:
        open_terminal().print(shown.render_node_table(rows))


def _scheduler_node_rows(scheduler: str) -> list[dict[str, str]]:
    try:
        found = find_scheduler(scheduler).list_nodes()
    except ConfigError as error:
        raise ConfigError(f"{error}; without Slurm, give a run: phalanx nodes --run RUN") from None
    return [{"node": node.name, "state": node.state, "health": "", "why": node.reason} for node in found]


def _run_node_rows(run: str) -> list[dict[str, str]]:
    with mirror.open_records(run) as paths:
        return node_requests.list_nodes(paths)


def _request_paths(run: str) -> RunPaths:
    """Folder where a run reads requests. Raises ConfigError for a URL, which no run reads."""
    if not storage.is_url(run):
        return RunPaths(Path(run))
    working = mirror.make_working_paths(run, DataSection.model_fields["cache"].default, storage.TIMEOUT_S)
    raise ConfigError(
        f"{working.display_name} is a URL, where no run reads requests; on the machine of node 0 give its working "
        f"folder, --run {working.root} (below its own data.cache, where the recipe sets one)"
    )


@nodes_app.command("drain")
def drain(node: Node, run: RunOption = None, reason: Reason = None, scheduler: SchedulerOption = DEFAULT) -> None:
    """Drain a node: a run leaves it at its next restart, Slurm gives it no new jobs."""
    _request(node, NodeRequestKind.DRAIN, run, reason, scheduler)


@nodes_app.command("replace")
def replace(node: Node, run: RunOption = None, reason: Reason = None, scheduler: SchedulerOption = DEFAULT) -> None:
    """Replace a node: by a spare of the run, or by the operators of Slurm's nodes."""
    _request(node, NodeRequestKind.REPLACE, run, reason, scheduler)


@nodes_app.command("uncordon")
def uncordon(node: Node, run: RunOption = None, reason: Reason = None, scheduler: SchedulerOption = DEFAULT) -> None:
    """Uncordon a node: it may be used again."""
    _request(node, NodeRequestKind.RETURN, run, reason, scheduler)


@nodes_app.command("return", hidden=True)
def uncordon_by_its_old_name(
    node: Node, run: RunOption = None, reason: Reason = None, scheduler: SchedulerOption = DEFAULT
) -> None:
    """Old name of `phalanx nodes uncordon`."""
    warn_of([("nodes return", "nodes uncordon")], "the command line")
    uncordon(node, run, reason, scheduler)


def _resolve_host(paths: RunPaths, node: str) -> str:
    """Host of a node number, which another start may give to another host. The number itself if nodes share a host."""
    rows = [row["node"].split() for row in node_requests.list_nodes(paths) if row["state"] != node_requests.ELSEWHERE]
    named = [host for number, host in rows if number == node]
    return named[0] if named and sum(host == named[0] for _, host in rows) == 1 else node


def _request(node: str, wanted: NodeRequestKind, run: str | None, reason: str | None, scheduler: str) -> None:
    node_requests.check_name(node)
    if run is not None:
        paths = _request_paths(run)
        node = _resolve_host(paths, node)
        node_requests.write_request(paths, node, wanted, reason or "no reason given")
        there = [row for row in node_requests.list_nodes(paths) if row["state"] != node_requests.ELSEWHERE]
        said = ""
        if len(there) == 1:
            said = "; no effect: the run has one node"
        elif not any(node in row["node"].split() for row in there):
            said = "; no node of the run has this name now (see phalanx nodes --run), so the request waits for one"
        open_terminal().print(f"{wanted} of node {node} requested in {paths.nodes}{said}", soft_wrap=True)
        return
    try:
        found = find_scheduler(scheduler)
        word = found.set_node_state(node, wanted, reason)
    except ConfigError as error:
        raise ConfigError(f"{error}; without Slurm, give the run: --run RUN") from None
    except RunError as error:
        raise RunError(
            f"{error}; this needs operator rights: ask an admin, exclude the node from your jobs (--exclude), or "
            "give a run (--run RUN)"
        ) from None
    open_terminal().print(f"{found.TITLE} has node {node} as: {word}")
