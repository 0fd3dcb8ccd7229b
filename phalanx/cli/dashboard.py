"""`phalanx dashboard`, the live page of runs, and `phalanx metrics`, their metrics for Prometheus."""

import contextlib
import functools
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import RunPaths, redact_url
from phalanx.report.run_index import RunIndex, find_runs
from phalanx.storage import files as storage

if TYPE_CHECKING:
    from phalanx.provision.cluster import Cluster
    from phalanx.report.prometheus_cluster import ClusterSource

DEFAULT_PORT, METRICS_PORT = 8420, 9420
ClusterFolder = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Folder of clusters. Default: that of phalanx cluster.")
]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def dashboard_command(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders, or folders of runs. Default: runs/."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than this machine's own can reach it only if you say so.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help=f"Port; 0: any. Default: {DEFAULT_PORT}, or any if taken.")
    ] = None,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Let the page stop runs, have them save, and drain their nodes.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also show a cluster of phalanx cluster: nodes, Slurm's queue.")
    ] = None,
    cluster_folder: ClusterFolder = None,
) -> None:
    """Serve a live page of runs: curves, devices, incidents, logs, comparisons.

    The URL holds a secret token. Only this machine can open it, unless --host says otherwise.
    """
    places, known = _places(runs, cluster is not None), _find_cluster(cluster, cluster_folder)
    for place in map(str, places):
        if storage.is_url(place):
            raise ConfigError(f"{redact_url(place)} is a URL; the dashboard reads local folders, so copy the run first")
    try:
        from phalanx.dashboard.poller import Poller
        from phalanx.dashboard.server import DashboardServer, make_app, serve
    except ImportError as error:
        raise ConfigError(
            f"phalanx dashboard needs the package {error.name}; install it with pip install 'phalanx[dashboard]'"
        ) from None
    find_runs(places)  # says what is missing
    read_cluster = None
    if known is not None:
        from phalanx.provision.cluster_view import make_cluster_reader

        read_cluster = make_cluster_reader(known)
    listener = _listen(host, port)
    token = secrets.token_urlsafe(24)
    hosts = frozenset(LOOPBACK) if host in LOOPBACK else None
    server = DashboardServer(lambda notify: Poller(places, notify, read_cluster), allow_actions)
    bound = int(listener.getsockname()[1])
    shown = socket.getfqdn() if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    count = len(server.poller.subjects)
    typer.echo(f"{count} run{'' if count == 1 else 's'} at http://{shown}:{bound}/{token}/")
    if hosts is not None:
        typer.echo(f"from another machine: ssh -L {bound}:127.0.0.1:{bound} {socket.gethostname()}")
    server.poller.start()
    with contextlib.closing(server.poller), contextlib.suppress(KeyboardInterrupt):
        serve(make_app(server, token, hosts), [listener])


def metrics_command(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders, or folders of runs. Default: runs/."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port.")] = METRICS_PORT,
    queue: Annotated[bool, typer.Option("--queue", help="Also Slurm's queue and nodes, by squeue and sinfo.")] = False,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also those of a cluster of phalanx cluster, and its health.")
    ] = None,
    cluster_folder: ClusterFolder = None,
) -> None:
    """Serve metrics of runs for Prometheus, at /metrics.

    A run serves its own with the key report.prometheus. On a node with a health monitor, its findings are served, too.
    """
    from phalanx.launch.launched_run import describe_scheduler_state
    from phalanx.launch.observer import list_nodes
    from phalanx.provision.monitor import STATUS_FILE

    others = queue or cluster is not None or STATUS_FILE.exists()
    places, found = _places(runs, others), _find_cluster(cluster, cluster_folder)
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from phalanx.report.prometheus import RunCollector
        from phalanx.report.prometheus_cluster import ClusterCollector
    except ImportError as error:
        raise ConfigError(
            f"phalanx metrics needs the package {error.name}; install it with pip install 'phalanx[metrics]'"
        ) from None
    known: dict[Path, RunIndex] = {}

    def indexes() -> list[RunIndex]:
        folders = find_runs(places)
        return [known.setdefault(folder, RunIndex(RunPaths(folder))) for folder in folders]

    count, registry = len(indexes()), CollectorRegistry()
    nodes, jobs = (lambda one: list_nodes(one.paths)), (lambda one: describe_scheduler_state(one.paths))
    registry.register(RunCollector(indexes, time.time, nodes, jobs, threading.Lock()))
    registry.register(ClusterCollector(_list_clusters(queue, found), STATUS_FILE))
    try:
        _, server = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror or error}); choose another --port"
        ) from None
    typer.echo(f"metrics of {count} run{'' if count == 1 else 's'} at http://{host}:{port}/metrics")
    with contextlib.suppress(KeyboardInterrupt):
        server.join()


def _list_clusters(queue: bool, cluster: "Cluster | None") -> "list[ClusterSource]":
    """The clusters whose metrics are served: this machine's Slurm and a named one; if they are the same, the latter.
    Raises PhalanxError where one is missing."""
    from phalanx.provision.cluster_view import is_local, sample_cluster, sample_queue
    from phalanx.report.prometheus_cluster import ClusterSource

    sources = []
    if cluster is not None:
        cluster.describe()
        sources.append(ClusterSource(cluster.name, functools.partial(sample_cluster, cluster)))
    if queue:
        sample_queue()
        if cluster is not None and is_local(cluster):
            typer.echo(f"the Slurm of this machine is that of cluster {cluster.name}: its metrics are served once")
        else:
            sources.append(ClusterSource("", sample_queue))
    return sources


def _places(runs: list[Path] | None, optional: bool) -> list[Path]:
    """The folders to look into; the default one may be missing where runs are `optional`."""
    return runs or ([] if optional and not Path("runs").is_dir() else [Path("runs")])


def _find_cluster(name: str | None, folder: Path | None) -> "Cluster | None":
    if folder is not None and name is None:
        raise ConfigError("--cluster-folder has no effect without --cluster; add it, or remove --cluster-folder")
    from phalanx.provision.cluster import DEFAULT_FOLDER, Cluster

    return None if name is None else Cluster(name, folder or DEFAULT_FOLDER)


def _listen(host: str, port: int | None) -> socket.socket:
    """A listening socket. Raises ConfigError where the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port if port is not None else DEFAULT_PORT)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine ({error.strerror or error})") from None
    for attempt in (address, *([(address[0], 0, *address[2:])] if port is None else [])):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(attempt)
            listener.listen()  # who follows the address that is printed waits until the server is there
            return listener
        except OSError as error:
            listener.close()
            why = error.strerror
    raise ConfigError(f"cannot listen on {host} port {port} ({why}); choose another --port")
