"""`phalanx nodes`: listing the nodes of a run or of Slurm, taking one out of use and back."""

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

nodes_app = typer.Typer(help="List nodes, take one out of use, or take it back.", invoke_without_command=True)

RunOption = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="The run folder that is meant. Default: Slurm's nodes.")
]
Node = Annotated[str, typer.Argument(metavar="NODE", help="A host name; with --run also a node's number in the run.")]
SchedulerOption = Annotated[
    str, typer.Option("--scheduler", metavar="NAME", help=f"Whose nodes, without --run: {', '.join(SCHEDULERS)}.")
]
Reason = Annotated[str | None, typer.Option(help="Why, for the people who read it.")]


@nodes_app.callback()
def nodes_command(
    context: typer.Context,
    run: RunOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    scheduler: SchedulerOption = DEFAULT,
) -> None:
    """List the nodes of a run, or of Slurm: their state, health, and what is asked of them."""
    if context.invoked_subcommand is not None:
        if run is not None or as_json:
            raise ConfigError(f"write the options behind the command: phalanx nodes {context.invoked_subcommand} NODE")
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
        raise ConfigError(f"{error}; without Slurm, name a run: phalanx nodes --run RUN") from None
    return [{"node": node.name, "state": node.state, "health": "", "why": node.reason} for node in found]


def _run_node_rows(run: str) -> list[dict[str, str]]:
    with mirror.open_records(run) as paths:
        return node_requests.list_nodes(paths)


def _request_paths(run: str) -> RunPaths:
    """Where requests of a run are read. Raises ConfigError for a URL, where nobody looks."""
    if not storage.is_url(run):
        return RunPaths(Path(run))
    working = mirror.make_working_paths(run, DataSection.model_fields["cache"].default, storage.TIMEOUT_S)
    raise ConfigError(
        f"{working.display_name} is a URL, where no run looks for what is asked of its nodes; on the machine of node 0 "
        f"name the folder that it works in, --run {working.root} (below its own data.cache, where the recipe sets one)"
    )


@nodes_app.command("drain")
def drain(node: Node, run: RunOption = None, reason: Reason = None, scheduler: SchedulerOption = DEFAULT) -> None:
    """Have a node left out: by a run at its next occasion, or by Slurm for new jobs."""
    _request(node, NodeRequestKind.DRAIN, run, reason, scheduler)


@nodes_app.command("replace")
def replace(node: Node, run: RunOption = None, reason: Reason = None, scheduler: SchedulerOption = DEFAULT) -> None:
    """Have a node left out and another one taken: by a run that has a spare, or by whoever mends Slurm's nodes."""
    _request(node, NodeRequestKind.REPLACE, run, reason, scheduler)


@nodes_app.command("uncordon")
def uncordon(node: Node, run: RunOption = None, reason: Reason = None, scheduler: SchedulerOption = DEFAULT) -> None:
    """Have a node used again."""
    _request(node, NodeRequestKind.RETURN, run, reason, scheduler)


@nodes_app.command("return", hidden=True)
def uncordon_by_its_old_name(
    node: Node, run: RunOption = None, reason: Reason = None, scheduler: SchedulerOption = DEFAULT
) -> None:
    """Have a node used again: the name that `phalanx nodes uncordon` had."""
    warn_of([("nodes return", "nodes uncordon")], "the command line")
    uncordon(node, run, reason, scheduler)


def _resolve_host(paths: RunPaths, node: str) -> str:
    """The host that a number means now: in another start, on other machines, it is another one's. Where nodes have one
    host, the number itself."""
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
            said = "; the run is on one node, so it has nowhere else to go and takes no notice"
        elif not any(node in row["node"].split() for row in there):
            said = "; none of the run's nodes is called so now (phalanx nodes --run lists them), so this waits for one"
        open_terminal().print(f"{wanted} of node {node} is asked for in {paths.nodes}{said}", soft_wrap=True)
        return
    try:
        found = find_scheduler(scheduler)
        word = found.set_node_state(node, wanted, reason)
    except ConfigError as error:
        raise ConfigError(f"{error}; without Slurm, name the run that is to leave the node: --run RUN") from None
    except RunError as error:
        raise RunError(
            f"{error}; this takes an operator's rights: ask an admin, leave the node out of your own jobs (--exclude), "
            "or name a run (--run RUN)"
        ) from None
    open_terminal().print(f"{found.TITLE} has node {node} as: {word}")
