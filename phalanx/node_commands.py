"""`phalanx nodes`: listing the nodes of a run or of Slurm, taking one out of use and back."""

import json
import socket
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cluster import node_requests, slurm_nodes
from phalanx.cluster.node_requests import Wanted
from phalanx.errors import ConfigError, RunError
from phalanx.records import Kind, RunPaths, read_lines
from phalanx.report import health as shown
from phalanx.report.terminal import open_terminal

nodes_app = typer.Typer(help="List nodes, take one out of use, or take it back.", invoke_without_command=True)

RunOption = Annotated[
    Path | None, typer.Option("--run", metavar="RUN", help="The run folder that is meant. Default: Slurm's nodes.")
]
Node = Annotated[str, typer.Argument(metavar="NODE", help="A host name; with --run also a node's number in the run.")]
Reason = Annotated[str | None, typer.Option(help="Why, for the people who read it.")]


@nodes_app.callback()
def nodes_command(
    context: typer.Context,
    run: RunOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the nodes of a run, or of Slurm: their state, health, and what is asked of them."""
    if context.invoked_subcommand is not None:
        if run is not None or as_json:
            raise ConfigError(f"write the options behind the command: phalanx nodes {context.invoked_subcommand} NODE")
        return
    rows = _of_slurm() if run is None else _of_run(RunPaths(run))
    if as_json:
        open_terminal().out(json.dumps(rows, indent=1), highlight=False)
    else:
        open_terminal().print(shown.nodes(rows))


def _of_slurm() -> list[dict[str, str]]:
    try:
        found = slurm_nodes.nodes()
    except ConfigError as error:
        raise ConfigError(f"{error}; without Slurm, name a run: phalanx nodes --run RUN") from None
    return [{"node": node.name, "state": node.state, "health": "", "why": node.reason} for node in found]


def _of_run(paths: RunPaths) -> list[dict[str, str]]:
    """From the run's records: the nodes of its last start, whether they are there, their checks and requests."""
    if not paths.events.exists():
        raise RunError(f"{paths.shown} holds no run; name a run folder")
    hosts: dict[str, str] = {}  # by number
    state: dict[str, str] = {}
    seen: dict[str, str] = {}
    for event in read_lines(paths.events):
        kind, number = event.get("kind"), str(event.get("node"))
        if kind == Kind.RUN_STARTED:
            hosts = {str(at): str(host) for at, host in enumerate(event.get("hosts") or [socket.gethostname()])}
            state = dict.fromkeys(hosts, "in the run")
        elif kind == Kind.NODE_JOINED and event.get("host"):
            hosts[number], state[number] = str(event["host"]), "in the run"
        elif kind == Kind.NODE_LOST:
            state[number] = "lost"
        elif kind in (Kind.FINISHED, Kind.STOPPED):
            state = {each: "lost" if was == "lost" else "the run is over" for each, was in state.items()}
        elif kind == Kind.HEALTH:
            seen[str(event.get("host"))] = str(event.get("verdict"))
    for host, report in node_requests.health_reports(paths).items():
        seen[host] = str(report.get("verdict"))
    asked = {request.node: request for request in node_requests.requests(paths)}
    rows = []
    for number, host in hosts.items():
        request = asked.pop(number, None) or asked.pop(host, None)
        why = "" if request is None else f"{request.wanted} asked for by {request.by}: {request.reason}"
        rows.append({"node": f"{number} {host}", "state": state[number], "health": seen.get(host, ""), "why": why})
    for request in asked.values():
        why = f"{request.wanted} asked for by {request.by}: {request.reason}"
        rows.append({"node": request.node, "state": "not in the run", "health": seen.get(request.node, ""), "why": why})
    return rows


@nodes_app.command("drain")
def drain(node: Node, run: RunOption = None, reason: Reason = None) -> None:
    """Have a node left out: by a run at its next occasion, or by Slurm for new jobs."""
    _asked(node, Wanted.DRAIN, run, reason)


@nodes_app.command("replace")
def replace(node: Node, run: RunOption = None, reason: Reason = None) -> None:
    """Have a node left out and another one taken: by a run that has a spare, or by whoever mends Slurm's nodes."""
    _asked(node, Wanted.REPLACE, run, reason)


@nodes_app.command("return")
def give_back(node: Node, run: RunOption = None, reason: Reason = None) -> None:
    """Have a node used again."""
    _asked(node, Wanted.RETURN, run, reason)


def _asked(node: str, wanted: Wanted, run: Path | None, reason: str | None) -> None:
    node_requests.check_name(node)
    if run is not None:
        paths = RunPaths(run)
        node_requests.ask(paths, node, wanted, reason or "no reason given")
        open_terminal().print(f"{wanted} of node {node} is asked for in {paths.nodes}")
        return
    try:
        slurm_nodes.set_state(node, wanted, reason)
    except ConfigError as error:
        raise ConfigError(f"{error}; without Slurm, name the run that is to leave the node: --run RUN") from None
    except RunError as error:
        raise RunError(
            f"{error}; this takes an operator's rights: ask an admin, leave the node out of your own jobs (--exclude), "
            "or name a run (--run RUN)"
        ) from None
    open_terminal().print(f"Slurm has node {node} as: {slurm_nodes.STATES[wanted]}")
