"""A Hugging Face hub on loopback, with the few questions that a download and an upload ask."""

import base64
import hashlib
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_of_the_tests"
MANY = 1 << 20


class Hub:
    """Serves `models`: repository -> files of its only commit, on the branch main. `gated` and `closed` are names of
    those that nobody, or only TOKEN, may read; `breaks`: how often yet a large file breaks off, after MANY bytes.
    `asked` has (method, path, Range) of each request, `pushed` the files of each commit."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.closed: set[str] = set()
        self.breaks = 0
        self.down = False
        self.asked: list[tuple[str, str, str]] = []
        self.made: list[dict[str, Any]] = []
        self.pushed: dict[str, dict[str, bytes]] = {}
        hub = self

        class Handler(_Handler):
            served = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def add(self, name: str, folder: Path, **more: bytes) -> None:
        self.models[name] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} | more

    def commit(self, name: str) -> str:
        """What the newest commit is called."""
        files = self.models[name]
        return hashlib.sha1(repr([(each, len(files[each])) for each in sorted(files)]).encode()).hexdigest()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._read()

    def do_GET(self) -> None:
        self._read()

    def do_POST(self) -> None:
        hub, path = self.served, urllib.parse.unquote(self.path.partition("?")[0])
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.asked.append((self.command, path, ""))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, None)
        if path == "/api/repos/create":
            hub.made.append(json.loads(body))
            return self._json({"url": f"{hub.address}/org/new"})
        name, _, rest = path.removeprefix("/api/models/").partition(
            "/preupload/" if "preupload" in path else "/commit/"
        )
        if "preupload" in path:
            files = json.loads(body)["files"]
            return self._json({"files": [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in files]})
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.decode().splitlines()]
            held = {each["value"]["path"]: each["value"] for each in lines if each["key"] == "file"}
            hub.pushed[f"{name}@{rest}"] = {path: base64.b64decode(each["content"]) for path, each in held.items()}
            return self._json({"commitUrl": f"{hub.address}/{name}/commit/1", "commitOid": "1" * 40})
        return self._refuse(404, "EntryNotFound")

    def _read(self) -> None:
        hub, path = self.served, urllib.parse.unquote(self.path.partition("?")[0])
        hub.asked.append((self.command, path, self.headers.get("Range", "")))
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name = "/".join(parts[:2])
        if hub.down:
            return self._refuse(503, None)
        if name not in hub.models or (name in hub.closed and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            return self._refuse(401, "RepoNotFound")
        revision = parts[3] if len(parts) > 3 else "main"
        if revision not in ("main", hub.commit(name)):
            return self._refuse(404, "RevisionNotFound")
        files = hub.models[name]
        if not path.startswith("/api/"):
            return self._file(name, files.get("/".join(parts[4:])))
        if len(parts) > 2 and parts[2] == "tree":
            return self._json(
                [
                    {"type": "file", "path": each, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for each, data in files.items()
                ]
            )
        return self._json({"id": name, "sha": hub.commit(name), "siblings": [{"rfilename": each} for each in files]})

    def _file(self, name: str, data: bytes | None) -> None:
        hub = self.served
        if data is None:
            return self._refuse(404, "EntryNotFound")
        if name in hub.gated:
            return self._refuse(403, "GatedRepo")
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", hub.commit(name))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "HEAD":
            return None
        if hub.breaks and len(data) > MANY:
            hub.breaks -= 1
            self.wfile.write(data[start:MANY])
            self.close_connection = True
            return None
        self.wfile.write(data[start:])
        return None

    def _json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
