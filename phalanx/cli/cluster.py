"""`phalanx cluster`: create, describe, scale, update, heal and delete clusters from one file."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.core.errors import ConfigError
from phalanx.provision.config import PROVIDERS, HealthPolicy
from phalanx.report.logs import open_terminal

cluster_app = typer.Typer(help="Create, heal, scale, update and delete clusters.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The cluster.")]
Nodes = Annotated[list[str], typer.Argument(metavar="NODE...", help="Nodes, by name or instance.")]
Folder = Annotated[
    Path, typer.Option("--folder", metavar="DIR", help="Where states of clusters are.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Hosts = Annotated[
    str | None, typer.Option("--hosts", metavar="A,B", help="Machines of provider ssh, as OpenSSH knows them.")
]
DrainTimeout = Annotated[float, typer.Option(min=0.0, help="Seconds that jobs may still run on drained nodes.")]
DEFAULT = Path("~/.local/state/phalanx/clusters")


def _report(node: str, sentence: str) -> None:
    terminal = open_terminal()
    terminal.print(f"{node}: {sentence}" if node else sentence, soft_wrap=True, markup=False, highlight=False)


def _cluster(name: str, folder: Path, **settings: Any) -> Any:
    from phalanx.provision.cluster import Cluster

    return Cluster(name, folder, _report, **settings)


def _split(hosts: str | None) -> list[str]:
    return [host.strip() for host in (hosts or "").split(",") if host.strip()]


@cluster_app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = Path("cluster.yaml"),
    name: Annotated[str | None, typer.Option(help="Name of the cluster.")] = None,
    provider: Annotated[str | None, typer.Option(help=f"Provider: {', '.join(PROVIDERS)}.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of nodes that run jobs.")] = None,
    hosts: Hosts = None,
) -> None:
    """Ask what the cluster should be, and write its file. What is given as an option is not asked."""
    from phalanx.provision.config import build_config
    from phalanx.provision.example_files import render_file

    if file.exists():
        raise ConfigError(f"{file} exists; name another file, or remove it")
    name = name or typer.prompt("Name of the cluster", default="my-cluster")
    provider = provider or typer.prompt(f"Provider ({', '.join(PROVIDERS)})", default="local")
    workers = workers or typer.prompt("Nodes that run jobs", default=2, type=int)
    listed = _split(hosts)
    if provider == "ssh" and not listed:
        listed = _split(typer.prompt(f"Hosts, by comma ({workers + 1} or more; the first is the controller)"))
    if provider == "sagemaker" and file.suffix != ".json":
        raise ConfigError(
            f"the provider sagemaker reads HyperPod's JSON; name a file such as {file.with_suffix('.json')}"
        )
    text, tree = render_file(name, provider, workers, listed)
    build_config(tree, [], str(file))
    file.write_text(text, encoding="utf-8")
    _report("", f"{file} written; `phalanx cluster create {file}` makes the cluster")


@cluster_app.command()
def create(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Our YAML, or HyperPod's create-cluster JSON.")],
    provider: Annotated[
        str | None, typer.Option(help=f"Provider: {', '.join(PROVIDERS)}. Default: the file's, or local.")
    ] = None,
    hosts: Hosts = None,
    scripts: Annotated[
        str | None, typer.Option(metavar="DIR", help="Lifecycle scripts, in place of those that the file names.")
    ] = None,
    remove_failed: Annotated[
        bool, typer.Option("--remove-failed", help="Remove nodes whose lifecycle script fails; else they stay.")
    ] = False,
    no_heal: Annotated[bool, typer.Option("--no-heal", help="Start no healer in the background.")] = False,
    region: Annotated[str | None, typer.Option(help="Region of AWS.")] = None,
    folder: Folder = DEFAULT,
) -> None:
    """Create a cluster, or continue where an interrupted `create` stopped.

    The file is our YAML, or the JSON of SageMaker HyperPod's create-cluster, unchanged.
    """
    from phalanx.provision.cluster_file import read_cluster_file

    config, passed = read_cluster_file(file, provider, _split(hosts), scripts)
    for sentence in passed:
        open_terminal().print(sentence, style="yellow", markup=False, soft_wrap=True)
    cluster = _cluster(config.name, folder, keep_failed=not remove_failed, region=region)
    cluster.create(config, heal=not no_heal)
    _report("", f"cluster {config.name} is in service; `phalanx cluster run {config.name} -- sinfo` shows its nodes")


@cluster_app.command()
def describe(name: Name, as_json: Json = False, folder: Folder = DEFAULT) -> None:
    """Show a cluster: status, groups, why it failed, and whether it is healed."""
    cluster = _cluster(name, folder)
    found = cluster.describe()
    if found["Provider"] != "sagemaker":
        found["HealerProcess"] = cluster.healer()
    if as_json:
        open_terminal().out(json.dumps(found, indent=1), highlight=False)
        return
    _report(
        "", f"{name}: {found['ClusterStatus']} (provider {found['Provider']}, node recovery {found['NodeRecovery']})"
    )
    for group in found["InstanceGroups"]:
        role = f" ({group['Role']})" if group["Role"] else ""
        _report("", f"  {group['InstanceGroupName']}{role}: {group['CurrentCount']} of {group['TargetCount']} nodes")
    if found["FailureMessage"]:
        _report("", f"  failed: {found['FailureMessage']}")
    if found.get("HealerProcess", 1) is None:
        _report("", f"  no healer runs; `phalanx cluster heal {name}` is one")


@cluster_app.command("list")
def list_command(as_json: Json = False, folder: Folder = DEFAULT) -> None:
    """List the clusters that were created from here."""
    from phalanx.provision.cluster import list_clusters

    _print_rows(list_clusters(folder), as_json, "no clusters")


@cluster_app.command()
def nodes(name: Name, as_json: Json = False, folder: Folder = DEFAULT) -> None:
    """List the nodes of a cluster: status, Slurm's state, health, and why."""
    rows = _cluster(name, folder).nodes()
    if not as_json:  # an instance is long, and known by its node
        rows = [{key: value for key, value in row.items() if key != "instance"} for row in rows]
    _print_rows(rows, as_json, "no nodes")


def _print_rows(rows: list[dict[str, str]], as_json: bool, nothing: str) -> None:
    from phalanx.report.tables import render_rows

    if as_json:
        open_terminal().out(json.dumps(rows, indent=1), highlight=False)
    elif rows:
        open_terminal().print(render_rows(rows))
    else:
        _report("", nothing)


@cluster_app.command()
def scale(
    name: Name,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="A group of the cluster.")],
    count: Annotated[int, typer.Argument(metavar="COUNT", min=1, help="Its number of nodes.")],
    hosts: Hosts = None,
    drain_timeout: DrainTimeout = 3600.0,
    folder: Folder = DEFAULT,
) -> None:
    """Change a group's number of nodes. The last ones are drained, then removed."""
    _cluster(name, folder, drain_timeout_s=drain_timeout).scale(group, count, _split(hosts))


@cluster_app.command()
def update(
    name: Name,
    scripts: Annotated[str | None, typer.Option(metavar="DIR", help="Other lifecycle scripts.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Replace each worker by a new one.")] = False,
    drain_timeout: DrainTimeout = 3600.0,
    folder: Folder = DEFAULT,
) -> None:
    """Run the lifecycle scripts again on each worker, one after another: drain, run, resume."""
    _cluster(name, folder, drain_timeout_s=drain_timeout).update(scripts, rebuild)


@cluster_app.command()
def reboot(name: Name, node: Nodes, folder: Folder = DEFAULT) -> None:
    """Reboot nodes now; Slurm requeues their jobs."""
    _cluster(name, folder).reboot(node)


@cluster_app.command()
def replace(name: Name, node: Nodes, hosts: Hosts = None, folder: Folder = DEFAULT) -> None:
    """Replace nodes by new ones now; Slurm requeues their jobs."""
    _cluster(name, folder).replace(node, _split(hosts))


@cluster_app.command()
def check(name: Name, node: Nodes, drain_timeout: DrainTimeout = 3600.0, folder: Folder = DEFAULT) -> None:
    """Drain nodes, put their devices under load and measure the links between them; those that pass are resumed."""
    _cluster(name, folder, drain_timeout_s=drain_timeout).check(node)


@cluster_app.command()
def heal(
    name: Name,
    policy: Annotated[HealthPolicy | None, typer.Option(help="automatic, ask or tell. Default: the cluster's.")] = None,
    once: Annotated[bool, typer.Option("--once", help="One look only.")] = False,
    folder: Folder = DEFAULT,
) -> None:
    """Watch a cluster, and reset, reboot or replace unhealthy nodes, until it is deleted."""

    def approve(found: Any) -> bool:
        return sys.stdin.isatty() and typer.confirm(f"{found.action} {found.node} ({found.reason})?")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _cluster(name, folder).heal(policy, approve, once)


@cluster_app.command("run", context_settings={"ignore_unknown_options": True})
def run_command(
    name: Name,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="A command, as root.")],
    node: Annotated[str | None, typer.Option("--node", metavar="NODE", help="A node. Default: the controller.")] = None,
    folder: Folder = DEFAULT,
) -> None:
    """Run a command on a node, such as `phalanx cluster run my -- sbatch job.sh`."""
    found = _cluster(name, folder).command(
        ["sh", "-c", 'cd "$0" 2>/dev/null; exec "$@"', str(Path.cwd()), *command], node
    )
    os.execvp(found[0], found)


@cluster_app.command()
def logs(name: Name, node: Annotated[str, typer.Argument(metavar="NODE")], folder: Folder = DEFAULT) -> None:
    """Print the log of all that was done on a node."""
    path = _cluster(name, folder).log(node)
    open_terminal().out(
        path.read_text(encoding="utf-8", errors="replace") if path.exists() else "no log yet", highlight=False
    )


@cluster_app.command()
def delete(name: Name, folder: Folder = DEFAULT) -> None:
    """Delete a cluster: its nodes, their daemons, and every file of them."""
    _cluster(name, folder).delete()
    _report("", f"cluster {name} is deleted")
