"""The server of the live page: Starlette routes behind a token, server-sent events, and no external resources.

The token is the first part of the path; without it all paths have the same answer. Runs are named by identifiers that
the server assigned and logs by the names that it listed, so no path of a request is the path of a file.
"""

import asyncio
import importlib.resources
import json
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.core.errors import PhalanxError, RunError
from phalanx.core.run_paths import RunPaths
from phalanx.dashboard import log_files
from phalanx.dashboard.poller import RUNS, Poller
from phalanx.dashboard.run_view import encode
from phalanx.elastic.supervisor import node_requests
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.launch import jobs
from phalanx.report.chart_script import CURVES_SCRIPT
from phalanx.report.tables import PALETTE

SCRIPTS = ("plot.js", "pages.js", "logs.js", "app.js")  # after the curves that the report draws, too
RANGE_POINTS = 2000  # points of a stretch of steps that a page zooms into
QUIET_S = 15.0  # interval between keep-alive messages of a stream
SWITCH_S = 0.001  # after which the thread that reads records lets this one answer
STREAMS = 64  # open at once
MOST_RUNS = 12  # runs of one stream
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class TokenGate:
    """Lets requests pass whose path begins with the token, compared in constant time, and whose `Host` is allowed;
    adds the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str] | None) -> None:
        self._app, self._token, self._hosts = app, token.encode(), hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        first, slash, rest = str(scope["path"]).lstrip("/").partition("/")
        known = secrets.compare_digest(first.encode("utf-8", "surrogatepass"), self._token)
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").rpartition(":")[0]
        if not (known and slash) or (self._hosts is not None and host.strip("[]") not in self._hosts):
            await Response("not found\n", 404, HEADERS)(scope, receive, send)
            return
        await self._app({**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, receive, send)


class DashboardServer:
    """Routes of the page. `notify` wakes open streams, from any thread."""

    def __init__(self, poller_of: Callable[[Callable[[], None]], Poller], allow_actions: bool) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._streams = 0
        self._allow_actions = allow_actions
        self.poller = poller_of(self.notify)

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page),
            Route("/app.css", self.style),
            Route("/app.js", self.script),
            Route("/stream", self.stream),
            Route("/rows", self.rows),
            Route("/logs", self.logs),
            Route("/log", self.log),
            Route("/actions/{action}", self.act, methods=["POST"]),
        ]

    def notify(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def page(self, request: Request) -> Response:
        text = _asset("page.html").replace("ACTIONS", "yes" if self._allow_actions else "no")
        return _answer(text.encode(), "text/html; charset=utf-8")

    async def style(self, request: Request) -> Response:
        return _answer((PALETTE + _asset("style.css")).encode(), "text/css; charset=utf-8")

    async def script(self, request: Request) -> Response:
        return _answer(make_script().encode(), "text/javascript; charset=utf-8")

    async def stream(self, request: Request) -> Response:
        """Server-sent events: the list of runs, and the sections of the requested runs."""
        wanted = [RUNS, *[run for run in request.query_params.get("runs", "").split(",") if run][:MOST_RUNS]]
        if self._streams >= STREAMS:
            return Response("too many open pages\n", 503, HEADERS)
        self._loop = asyncio.get_running_loop()
        headers = {**HEADERS, "X-Accel-Buffering": "no"}
        return StreamingResponse(self._send_events(wanted), headers=headers, media_type="text/event-stream")

    async def _send_events(self, wanted: list[str]) -> AsyncIterator[bytes]:
        sent: dict[tuple[str, str], tuple[int, int]] = {}
        self._streams += 1
        self.poller.subscribe(wanted)
        try:
            yield b"retry: 1000\n\n"
            while True:
                changed = self._changed
                told = self.poller.messages(wanted, sent)
                if told:
                    yield b"".join(b"event: %s\ndata: %s\n\n" % (name.encode(), data) for name, data in told)
                try:
                    await asyncio.wait_for(changed.wait(), QUIET_S)
                except TimeoutError:
                    yield b": quiet\n\n"
        finally:
            self._streams -= 1
            self.poller.unsubscribe(wanted)

    async def rows(self, request: Request) -> Response:
        """Columns of a stretch of steps, with more points than in the whole curve."""
        subject = self.poller.subjects.get(request.query_params.get("run", ""))
        view = None if subject is None else subject.view
        first, last = _number(request, "first"), _number(request, "last")
        if view is None or first is None or last is None:
            return Response("not found\n", 404, HEADERS)
        found = await run_in_threadpool(view.range, first, last, RANGE_POINTS)
        return _answer(encode(found), "application/json")

    async def logs(self, request: Request) -> Response:
        subject = self.poller.subjects.get(request.query_params.get("run", ""))
        if subject is None:
            return Response("not found\n", 404, HEADERS)
        return _answer(encode(await run_in_threadpool(log_files.list_logs, subject.index.paths)), "application/json")

    async def log(self, request: Request) -> Response:
        """A part of a log, or with `text` the lines that contain it."""
        query = request.query_params
        subject = self.poller.subjects.get(query.get("run", ""))
        path = None
        if subject is not None:
            path = await run_in_threadpool(log_files.find_log, subject.index.paths, query.get("name", ""))
        if path is None:
            return Response("not found\n", 404, HEADERS)
        before, after, text = _number(request, "before"), _number(request, "after"), query.get("text", "")
        try:
            if text:
                found = await run_in_threadpool(log_files.search, path, text[:200], before)
            else:
                found = await run_in_threadpool(log_files.read_part, path, before, after)
        except OSError:
            return Response("not found\n", 404, HEADERS)
        return _answer(encode(found), "application/json")

    async def act(self, request: Request) -> Response:
        """Stop a run after its step, have it save now, or drain a node; only if the command line allows it."""
        if not self._allow_actions:
            return _answer(encode({"error": "start phalanx dashboard with --allow-actions"}), "application/json", 403)
        origin, host = request.headers.get("origin"), request.headers.get("host")
        if request.headers.get("content-type") != "application/json" or (origin and origin.partition("//")[2] != host):
            return _answer(encode({"error": "the request did not come from this page"}), "application/json", 403)
        try:
            asked = json.loads(await request.body())
            subject = self.poller.subjects.get(str(asked["run"]))
        except (ValueError, KeyError, TypeError):
            subject = None
        action = ACTIONS.get(request.path_params["action"])
        if subject is None or action is None:
            return _answer(encode({"error": "no such run or action"}), "application/json", 404)
        try:
            told = await run_in_threadpool(action, subject.index.paths, asked)
        except (PhalanxError, OSError) as error:
            return _answer(encode({"error": str(error)}), "application/json", 409)
        return _answer(encode({"done": told}), "application/json")


ACTIONS: Mapping[str, Callable[..., str]] = {
    "stop": lambda paths, asked: jobs.cancel_run(paths, now=False),
    "save": lambda paths, asked: jobs.request_save(paths),
    "drain": lambda paths, asked: drain_node(paths, str(asked.get("node", ""))),
}


def drain_node(paths: RunPaths, node: str) -> str:
    """Have a run leave one of its nodes, given by number; returns what was done. Raises PhalanxError."""
    there = [row["node"].split()[0] for row in node_requests.list_nodes(paths) if row["state"] == node_requests.HERE]
    if node not in there:
        raise RunError(f"the run {paths.display_name} has no node {node} now")
    if len(there) == 1:
        raise RunError(f"the run {paths.display_name} has one node, which it cannot leave; stop the run instead")
    node_requests.write_request(paths, node, NodeRequestKind.DRAIN, "asked for on the page")
    return f"node {node} is drained: ranks save, then the run continues without it"


def make_script() -> str:
    """The page's script: the curves of the report's script, and the page's own parts."""
    return "\n".join([CURVES_SCRIPT, *(_asset(name) for name in SCRIPTS)])


def make_app(server: DashboardServer, token: str, hosts: frozenset[str] | None) -> ASGIApp:
    """The application. `hosts`: names by which a browser may call it; None: any."""
    return TokenGate(Starlette(routes=server.routes()), token, hosts)


def _asset(name: str) -> str:
    return (importlib.resources.files("phalanx.dashboard") / "static" / name).read_text(encoding="utf-8")


def _answer(content: bytes, media_type: str, status: int = 200) -> Response:
    return Response(content, status, HEADERS, media_type)


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 16 else None


def serve(app: ASGIApp, sockets: list[Any], ready: threading.Event | None = None) -> None:
    """Serve until Ctrl-C. Requests are not logged: their paths hold the token."""
    import uvicorn

    sys.setswitchinterval(SWITCH_S)
    config = uvicorn.Config(app, access_log=False, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=sockets)
