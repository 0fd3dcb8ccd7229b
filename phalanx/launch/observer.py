"""The observer process of a leading agent, or of rank 0: serves metrics for Prometheus and sends alerts.

It reads only the run's records: it outlives ranks, and a server that does not answer delays no step. A new leader
starts its own; sent alerts are recorded in `alerts.jsonl`, so each is sent once.
"""

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

from phalanx.config.fields import parse_address
from phalanx.config.operations import ReportSection
from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import append_line, read_lines
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor import node_requests
from phalanx.report.alerts import Alert, find_alerts
from phalanx.report.run_index import RunIndex
from phalanx.system.fork import STOP_SIGNALS, end_child, fork

LOOK_S = 0.5
SEND_S, AGAIN_S, TRIES = 5.0, 1.0, 4  # for an answer; between two tries, doubled each time; of one alert
CLOSE_S = 10.0  # time at the end to send the last alerts


class Observer:
    """A running observer; `close` waits until the last alerts are sent."""

    def __init__(self, pid: int, pidfd: int, control: int) -> None:
        self._pid, self._pidfd, self._control = pid, pidfd, control

    @classmethod
    def start(cls, report: ReportSection, paths: RunPaths) -> Self | None:
        """Start one where the recipe asks for metrics or alerts; else None."""
        if report.prometheus is None and report.webhook is None:
            return None
        reader, writer = os.pipe()
        address = None if report.prometheus is None else parse_address(report.prometheus)
        pid, pidfd = fork(lambda: _observe(reader, paths, address, report.webhook), keep=[reader])
        os.close(reader)
        return cls(pid, pidfd, writer)

    def close(self) -> None:
        """Wait a while for the last alerts, and end it."""
        os.close(self._control)
        select.select([self._pidfd], [], [], CLOSE_S)
        end_child(self._pid, self._pidfd)


def check_report(report: ReportSection) -> None:
    """Check before a run starts that metrics can be served and that the webhook's file has a URL. Raises
    ConfigError."""
    if report.webhook is not None:
        read_webhook(report.webhook)
    if report.prometheus is None:
        return
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise ConfigError(
            "report.prometheus needs the package prometheus_client; install it with pip install 'phalanx[metrics]', or "
            "set report.prometheus=null"
        ) from None
    host, port = parse_address(report.prometheus)
    try:
        with contextlib.closing(_listen(host, port)):
            return
    except OSError as error:
        raise ConfigError(
            f"report.prometheus {report.prometheus} cannot be used ({error.strerror or error}); choose another port"
        ) from None


def _listen(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def read_webhook(file: str) -> str:
    """Read the URL in the file of `report.webhook`. Raises ConfigError, whose message does not contain the URL."""
    if "://" in file:
        raise ConfigError(
            "report.webhook is a URL, a secret that config.yaml would show; write it into a file that only you can "
            "read, and give the name of that file"
        )
    try:
        url = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the file {file} of report.webhook cannot be read ({why}); write the URL into it") from None
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or any(character.isspace() for character in url):
        raise ConfigError(f"the file {file} of report.webhook has no http:// or https:// URL; write one into it")
    return url


def _observe(control: int, paths: RunPaths, address: tuple[str, int] | None, webhook: str | None) -> int:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the run ends first: it has something to say still
    index, lock = RunIndex(paths), threading.Lock()
    if address is not None:
        _serve_metrics(index, lock, paths, address)
    sender = None if webhook is None else _AlertSender(paths, webhook)
    while True:
        ended = bool(select.select([control], [], [], LOOK_S)[0])
        if sender is not None:
            with lock:
                while index.poll():
                    continue
                alerts = find_alerts(index.history(), paths.display_name, time.time())
            for alert in alerts:
                sender.send(alert)
        if ended:
            return 0


def _serve_metrics(index: RunIndex, lock: threading.Lock, paths: RunPaths, address: tuple[str, int]) -> None:
    from prometheus_client import CollectorRegistry, start_http_server

    from phalanx.report.prometheus import RunCollector

    registry = CollectorRegistry()
    collector = RunCollector(lambda: [index], time.time, lambda one: list_nodes(one.paths), lambda one: None, lock)
    registry.register(collector)
    try:
        start_http_server(address[1], address[0], registry)
    except OSError as error:  # another node leads now, where the port is taken
        why = f"metrics for Prometheus are not served ({error.strerror or error}): report.prometheus"
        write_event(paths.events, EventKind.WARNING, _attempt(index), message=why)


def list_nodes(paths: RunPaths) -> list[dict[str, str]]:
    """Nodes of a run; none before its first event."""
    return node_requests.list_nodes(paths) if paths.events.exists() else []


def _attempt(index: RunIndex) -> int:
    index.poll()
    return max((event["attempt"] for event in index.events if type(event.get("attempt")) is int), default=1)


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would pass the URL's secrets on to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class _AlertSender:
    """Posts alerts to a webhook, each once, and notes in the run folder that it did."""

    def __init__(self, paths: RunPaths, file: str) -> None:
        self._paths, self._file = paths, file
        self._sent = {str(line.get("key")) for line in read_lines(paths.alerts)}
        self._open = urllib.request.build_opener(NoRedirect).open

    def send(self, alert: Alert) -> None:
        """Send an alert that was not sent yet; of failures an event tells."""
        if alert.key in self._sent:
            return
        self._sent.add(alert.key)
        failure = self._post(alert)
        line = {"key": alert.key, "time": time.time(), "text": alert.text, "delivered": failure is None}
        with contextlib.suppress(OSError):  # a full disk
            append_line(self._paths.alerts, line)
            if failure is not None:
                message = f"an alert was not delivered to report.webhook ({failure}): {alert.text}"
                write_event(self._paths.events, EventKind.WARNING, 1, message=message)

    def _post(self, alert: Alert) -> str | None:
        """Why the alert could not be delivered, in words without the URL; None where it was."""
        text = f"*{_escape(self._paths.name)}*: {_escape(alert.text)}\n`{_escape(alert.command)}`"
        data, failure = json.dumps({"text": text}).encode(), None
        for attempt in range(TRIES):
            if attempt:
                time.sleep(AGAIN_S * 2 ** (attempt - 1))
            try:
                request = urllib.request.Request(
                    read_webhook(self._file), data, {"Content-Type": "application/json", "User-Agent": "phalanx"}
                )
                with self._open(request, timeout=SEND_S):
                    return None
            except urllib.error.HTTPError as error:
                failure = f"HTTP status {error.code}"
                if error.code < 500 and error.code != 429:
                    return failure
            except ConfigError as error:
                return str(error)
            except OSError as error:
                reason = getattr(error, "reason", error)
                failure = getattr(reason, "strerror", None) or type(reason).__name__
        return failure


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("`", "'")
