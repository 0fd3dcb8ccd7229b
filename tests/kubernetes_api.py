"""The part of a Kubernetes API server that kubectl needs for objects that nothing acts on: discovery, and objects that
are created, listed, patched and deleted. For tests of commands with the real kubectl."""

import contextlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate

VERSION = "1.29"
KINDS = {"nodes": "Node", "pods": "Pod", "services": "Service", "secrets": "Secret", "jobs": "Job", "jobsets": "JobSet"}
GROUPS = {
    "/api/v1": ["nodes", "pods", "services", "secrets"],
    "/apis/batch/v1": ["jobs"],
    "/apis/jobset.x-k8s.io/v1alpha2": ["jobsets"],
}


class Api(http.server.ThreadingHTTPServer):
    """`objects` by their path; `log` is what each pod has written; `groups` are those that the cluster has."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.groups = dict(GROUPS)
        self.log = "step 7\n"

    def add(self, kind: str, name: str, **fields: Any) -> None:
        """Add an object of the core group, as a controller does."""
        place = "/api/v1/nodes" if kind == "nodes" else f"/api/v1/namespaces/default/{kind}"
        version = {"apiVersion": "v1", "kind": KINDS[kind], "metadata": {"name": name, **fields.pop("metadata", {})}}
        self.objects[f"{place}/{name}"] = version | fields


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Api

    def answer(self, tree: dict[str, Any] | str, code: int = 200) -> None:
        body = (tree if isinstance(tree, str) else json.dumps(tree)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(tree, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fail(self, code: int, reason: str) -> None:
        self.answer({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": f"{reason}: {self.path}",
                     "reason": reason, "code": code}, code)  # fmt: skip

    def body(self) -> dict[str, Any]:
        tree: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        return tree

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        groups = self.server.groups
        if path == "/api":
            return self.answer({"kind": "APIVersions", "versions": ["v1"]})
        if path == "/apis":
            versions = [each.removeprefix("/apis/") for each in groups if each.startswith("/apis/")]
            listed = [{"groupVersion": each, "version": each.partition("/")[2]} for each in versions]
            found = [{"name": each["groupVersion"].partition("/")[0], "versions": [each], "preferredVersion": each}
                     for each in listed]  # fmt: skip
            return self.answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": found})
        if path in groups:
            resources = [{"name": name, "singularName": "", "kind": KINDS[name], "namespaced": name != "nodes",
                          "verbs": ["create", "delete", "get", "list", "patch"]} for name in groups[path]]  # fmt: skip
            version = path.removeprefix("/apis/").removeprefix("/api/")
            return self.answer({"kind": "APIResourceList", "groupVersion": version, "resources": resources})
        if path == "/openapi/v3":
            where = {each.strip("/"): {"serverRelativeURL": f"/openapi/v3{each}"} for each in groups}
            return self.answer({"paths": where})
        if path.startswith("/openapi/v3/"):
            return self.answer(_describe(path.removeprefix("/openapi/v3"), groups))
        if path.endswith("/log"):
            return self.answer(self.server.log)
        if path in self.server.objects:
            return self.answer(self.server.objects[path])
        if path.rpartition("/")[2] not in KINDS:
            return self.fail(404, "NotFound")
        wanted = dict(urllib.parse.parse_qsl(query)).get("labelSelector", "")
        return self.answer({"kind": "List", "apiVersion": "v1", "items": list(self.select(path, wanted).values())})

    def select(self, place: str, selector: str) -> dict[str, dict[str, Any]]:
        found = {path: each for path, each in self.server.objects.items() if path.rpartition("/")[0] == place}
        for term in filter(None, selector.split(",")):
            name, _, value = term.partition("=")
            found = {
                path: each for path, each in found.items() if each["metadata"].get("labels", {}).get(name) == value
            }
        return found

    def do_POST(self) -> None:
        tree, place = self.body(), self.path.partition("?")[0]
        path = f"{place}/{tree['metadata']['name']}"
        if path in self.server.objects:
            return self.fail(409, "AlreadyExists")
        if tree["kind"] != "JobSet":
            kubernetes_validate.validate(tree, VERSION, strict=True)
        self.server.objects[path] = tree
        return self.answer(tree, 201)

    def do_PATCH(self) -> None:
        path, change = self.path.partition("?")[0], self.body()
        found = self.server.objects[path]
        for part in ("metadata", "spec"):
            found[part] = _merge(found.get(part, {}), change.get(part, {}))
        self.answer(found)

    def do_DELETE(self) -> None:
        self.body()
        found = self.server.objects.pop(self.path.partition("?")[0], None)
        if found is None:
            return self.fail(404, "NotFound")
        return self.answer(found)

    def log_message(self, form: str, *arguments: Any) -> None:
        pass


def _describe(group: str, groups: dict[str, list[str]]) -> dict[str, Any]:
    """What says that this server checks the fields of objects, so that kubectl leaves it to it."""
    name, _, version = group.removeprefix("/apis/").removeprefix("/api/").rpartition("/")
    checks = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    paths = {
        f"{group}/{each}/{{name}}": {
            "patch": {
                "parameters": [checks], "responses": {},
                "x-kubernetes-group-version-kind": {"group": name, "version": version, "kind": KINDS[each]},
            }
        }
        for each in groups[group]
    }  # fmt: skip
    return {"openapi": "3.0.0", "info": {"title": group, "version": "1"}, "paths": paths}


def _merge(tree: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = {**tree, **change}
    for name in change:
        if isinstance(change[name], dict):
            merged[name] = _merge(tree.get(name) or {}, change[name])
    return {name: value for name, value in merged.items() if value is not None}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[Api, Path]]:
    """A server on loopback, and the configuration by which kubectl reaches it."""
    api = Api()
    thread = threading.Thread(target=api.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{api.server_port}"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "users": [{"name": "test", "user": {}}],
    }  # fmt: skip
    (folder / "kubeconfig").write_text(json.dumps(config))
    try:
        yield api, folder / "kubeconfig"
    finally:
        api.shutdown()
        api.server_close()
        thread.join()
