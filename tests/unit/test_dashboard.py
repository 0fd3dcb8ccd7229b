"""The live page's server: who may see what, what a request can reach, and what pages are sent."""

import asyncio
import json
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from phalanx.core.run_paths import RunPaths
from phalanx.dashboard import log_files
from phalanx.dashboard.poller import FIRST_BYTES, RUNS, Poller
from phalanx.dashboard.run_curves import POINTS, CurvePoints, RunCurves, choose_points
from phalanx.dashboard.server import DashboardServer, make_app
from phalanx.elastic.supervisor import node_requests
from phalanx.provision import cluster_view
from phalanx.report import history
from phalanx.report.gpu_samples import gpu_samples_path
from phalanx.report.run_index import RunIndex, find_runs
from tests.helpers import wait_until
from tests.unit.test_run_index import append, write_life

TOKEN = "t0k3n-of-a-test"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of two runs, one with a hostile name and hostile text in all of its records."""
    for name, seed in (("plain", 1), (HOSTILE, 2)):
        paths = RunPaths(tmp_path / "runs" / name)
        paths.log(1, 0).parent.mkdir(parents=True)
        for path, record in write_life(paths, seed, steps=40):
            append(path, record)
        append(paths.events, {"kind": "warning", "time": 1.0, "message": f"</script>{HOSTILE}"})
        gpu = {"index": 0, "name": HOSTILE, "temperature_c": 50}
        append(gpu_samples_path(paths, HOSTILE.replace("/", "")), {"time": 1.0, "host": HOSTILE, "gpus": [gpu]})
        paths.config.write_text(f"train:\n  steps: 40\nmodel:\n  preset: '{HOSTILE}'\n")
        paths.log(1, 0).write_text(f"begin\nline of {HOSTILE}\nError: it died\nend\n")
    (tmp_path / "secret.log").write_text("secret")
    return tmp_path / "runs"


@contextmanager
def serving(places: list[Path], actions: bool = False, hosts: frozenset[str] | None = None) -> Iterator[Any]:
    """Functions that call the application without a network: `get` and `post`, and the server itself."""
    server = DashboardServer(lambda notify: Poller(places, notify), actions)
    app = make_app(server, TOKEN, hosts)

    def call(method: str, path: str, **given: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
                return await client.request(method, path, **given)

        return asyncio.run(ask())

    yield server, lambda path, **given: call("GET", path, **given), lambda path, **given: call("POST", path, **given)


def ids(server: DashboardServer) -> dict[str, str]:
    return {subject.index.paths.name: run for run, subject in server.poller.subjects.items()}


def test_without_the_token_nothing_is_served(runs: Path) -> None:
    with serving([runs], hosts=frozenset({"127.0.0.1", "localhost"})) as (_, get, post):
        answers = {get(f"/{TOKEN}{path}").status_code for path in ("/", "/app.js", "/app.css")}
        assert answers == {200}
        wrong = [
            "/",
            f"/{TOKEN}",
            f"/{TOKEN}x/",
            f"/{TOKEN[:-1]}/",
            "/app.js",
            "/stream",
            f"//{TOKEN[:-2]}/",
            "/x/app.js",
        ]
        refused = [get(path) for path in wrong] + [post("/actions/stop")]
        assert {(answer.status_code, answer.text) for answer in refused} == {(404, "not found\n")}
        # a page of another site that resolves its name to this machine
        assert get(f"/{TOKEN}/", headers={"Host": "evil.example:1"}).status_code == 404
        assert get(f"/{TOKEN}/", headers={"Host": "localhost:1"}).status_code == 200


def test_every_answer_forbids_what_the_page_does_not_need(runs: Path) -> None:
    with serving([runs]) as (_, get, _post):
        for path in (f"/{TOKEN}/", f"/{TOKEN}/app.js", f"/{TOKEN}/none", "/"):
            headers = get(path).headers
            if path != f"/{TOKEN}/none":
                assert "default-src 'none'" in headers["content-security-policy"], path
                assert headers["referrer-policy"] == "no-referrer"
        page, script = get(f"/{TOKEN}/").text, get(f"/{TOKEN}/app.js").text
        assert "://" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing from elsewhere
        assert "innerHTML" not in script and "eval(" not in script and "://" not in script
        assert len(page) + len(script) + len(get(f"/{TOKEN}/app.css").text) < 200_000


@pytest.mark.parametrize(
    "name",
    ["../../secret.log", "..%2f..%2fsecret.log", "/etc/passwd", "attempt-001/../../config.yaml", "link.log", "",
     "x" * 5000, "attempt-001/rank-00000.log\0", "folder.log", "pipe.log"],
)  # fmt: skip
def test_a_log_is_one_of_those_that_are_listed(runs: Path, name: str) -> None:
    logs = runs / "plain" / "logs"
    (logs / "link.log").symlink_to(runs.parent / "secret.log")
    (logs / "attempt-002").symlink_to(runs.parent)  # which has secret.log
    (logs / "folder.log").mkdir()
    os.mkfifo(logs / "pipe.log")
    with serving([runs]) as (server, get, _post):
        run = ids(server)["plain"]
        listed = [log["name"] for log in get(f"/{TOKEN}/logs", params={"run": run}).json()]
        assert listed == ["attempt-001/rank-00000.log"]
        assert get(f"/{TOKEN}/log", params={"run": run, "name": name}).status_code == 404
        assert get(f"/{TOKEN}/log", params={"run": "../plain", "name": listed[0]}).status_code == 404
        found = get(f"/{TOKEN}/log", params={"run": run, "name": listed[0]}).json()
        assert [text for _, text in found["lines"]] == ["begin", f"line of {HOSTILE}", "Error: it died", "end"]


def test_a_log_is_searched_followed_and_read_backwards(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.log"
    path.write_bytes(b"".join(b"line %d of many\n" % number for number in range(20_000)) + b"last, not ended")
    part = log_files.read_part(path)
    assert part["lines"][-1][1] == "last, not ended" and part["end"] == path.stat().st_size
    texts = [text for _, text in part["lines"]]
    while part["start"]:
        part = log_files.read_part(path, before=part["start"])
        texts = [text for _, text in part["lines"]] + texts
    assert texts == [f"line {number} of many" for number in range(20_000)] + ["last, not ended"]
    found = log_files.search(path, "LINE 1999")
    assert [text for _, text in found["lines"]][-2:] == ["line 19998 of many", "line 19999 of many"]
    assert found["start"] == 0 and len(found["lines"]) == 11  # 1999, and 19990 to 19999
    many = log_files.search(path, "line")
    earlier = log_files.search(path, "line", before=many["start"])
    numbers = [int(text.split()[1]) for _, text in [*earlier["lines"], *many["lines"]]]
    assert numbers == list(range(19_000, 20_000))
    with open(path, "ab") as file:
        file.write(b" until now\nnew\n")
    after = log_files.read_part(path, after=log_files.read_part(path, after=0)["end"])
    assert after["start"] > 0
    assert [text for _, text in log_files.read_part(path, after=path.stat().st_size - 4)["lines"]] == ["new"]
    path.write_text("short\n")  # the file was written again
    assert log_files.read_part(path, after=9_999)["lines"] == [(0, "short")]


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"run": "x"}', b"\xff"])
def test_actions_need_the_option_and_a_request_of_the_page(runs: Path, body: bytes) -> None:
    json_type = {"Content-Type": "application/json"}
    with serving([runs]) as (server, _get, post):
        asked = json.dumps({"run": ids(server)["plain"]})
        assert post(f"/{TOKEN}/actions/stop", content=asked, headers=json_type).status_code == 403
    with serving([runs], actions=True) as (server, get, post):
        asked = json.dumps({"run": ids(server)["plain"]})
        assert get(f"/{TOKEN}/actions/stop").status_code == 405
        assert post(f"/{TOKEN}/actions/stop", content=asked).status_code == 403  # as a form of another site sends it
        foreign = json_type | {"Origin": "http://evil.example"}
        assert post(f"/{TOKEN}/actions/stop", content=asked, headers=foreign).status_code == 403
        assert post(f"/{TOKEN}/actions/stop", content=body, headers=json_type).status_code == 404
        assert post(f"/{TOKEN}/actions/drop", content=asked, headers=json_type).status_code == 404
        for action, why in (("stop", "is not running"), ("save", "nothing to save")):
            answer = post(f"/{TOKEN}/actions/{action}", content=asked, headers=json_type)
            assert answer.status_code == 409 and why in answer.json()["error"]


def test_a_node_is_drained_where_others_continue(tmp_path: Path) -> None:
    json_type = {"Content-Type": "application/json"}
    for name, hosts in (("one", ["n0"]), ("two", ["n0", "n1"])):
        paths = RunPaths(tmp_path / name)
        paths.root.mkdir()
        append(paths.events, {"kind": "run_started", "time": 1.0, "attempt": 1, "hosts": hosts})
    with serving([tmp_path], actions=True) as (server, _, post):

        def drain(run: str, node: Any) -> httpx.Response:
            asked = json.dumps({"run": ids(server)[run], "node": node})
            return post(f"/{TOKEN}/actions/drain", content=asked, headers=json_type)

        for run, node, why in (("one", "0", "one node"), ("two", "2", "no node 2"), ("two", "../x", "no node ../x")):
            answer = drain(run, node)
            assert answer.status_code == 409 and why in answer.json()["error"]
        assert "node 1 is drained" in drain("two", "1").json()["done"]
    (request,) = node_requests.read_requests(RunPaths(tmp_path / "two"))
    assert (request.node, request.wanted) == ("1", "drain")
    assert node_requests.read_requests(RunPaths(tmp_path / "one")) == []


class FakeCluster:
    """A cluster of one node whose controller answers with what `squeue` prints here."""

    name = "lab"

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def describe(self) -> dict[str, Any]:
        return {"ClusterStatus": "InService"}

    def nodes(self) -> list[dict[str, str]]:
        return [{"node": "n1", "slurm": "idle", "instance": "i-123", "why": HOSTILE}]

    def command(self, words: list[str]) -> list[str]:
        assert words[0] == "squeue"
        return self._command


def test_a_cluster_is_read_with_its_queue() -> None:
    line = f"12|train {HOSTILE}|me|RUNNING|1:02|2|n[1-2]"
    found = cluster_view.read_cluster(FakeCluster(["printf", "%s\\n", line, "torn"]))  # type: ignore[arg-type]
    assert found["status"] == "InService" and found["error"] == ""
    assert found["nodes"] == [{"node": "n1", "slurm": "idle", "why": HOSTILE}]
    (job,) = found["queue"]
    assert (job["job"], job["state"], job["where or why"]) == ("12", "RUNNING", "n[1-2]")
    broken = cluster_view.read_cluster(FakeCluster(["sh", "-c", "echo no >&2; exit 1"]))  # type: ignore[arg-type]
    assert broken["error"] == "Slurm's squeue failed: no" and broken["nodes"]
    assert cluster_view.read_cluster(FakeCluster(["/no/such"]))["error"]  # type: ignore[arg-type]


def test_pages_are_sent_the_cluster_with_the_list_of_runs(runs: Path) -> None:
    states = iter(["Creating", "InService", "InService"])
    seen = threading.Event()

    def read() -> dict[str, Any]:
        state = next(states, "InService")
        if state == "InService":
            seen.set()
        return {"name": "lab", "status": state, "nodes": [], "queue": [], "error": ""}

    poller = Poller([runs], lambda: None, read)
    poller.subscribe([RUNS])
    sent: dict[tuple[str, str], tuple[int, int]] = {}
    assert "cluster" not in dict(poller.messages([RUNS], sent))
    with mock.patch("phalanx.dashboard.poller.CLUSTER_S", 0.05):
        poller.start()
        try:
            wait_until(lambda: b"InService" in dict(poller.messages([RUNS], sent)).get("cluster", b""))
            assert "cluster" not in dict(poller.messages([RUNS], sent))  # once
        finally:
            poller.close()
    assert seen.is_set()


def test_curves_are_sent_in_parts_that_give_the_whole(tmp_path: Path) -> None:
    """A page that is told of updates has the rows of one that is told of all, through deaths and replayed steps."""
    paths, draw = RunPaths(tmp_path / "run"), random.Random(4)
    paths.root.mkdir()
    lines = write_life(paths, 5, steps=1300)
    append(*lines[0])
    poller = Poller([tmp_path], lambda: None)
    run = next(iter(poller.subjects))
    poller.subscribe([run])
    sent: dict[tuple[str, str], tuple[int, int]] = {}
    columns: dict[str, list[Any]] = {}
    base, parts = -1, 0
    for at, line in enumerate(lines[1:]):
        append(*line)
        if draw.random() < 0.04 or at == len(lines) - 2:
            poller._poll()
            for name, data in poller.messages([run], sent) if draw.random() < 0.7 or at == len(lines) - 2 else []:
                told = json.loads(data)
                if name == "curves":
                    goes_on = told["from"] > 0 and told["base"] == base
                    parts, base = parts + goes_on, told["base"]
                    columns = {
                        key: (columns[key][: told["from"]] if goes_on else []) + values
                        for key, values in told["columns"].items()
                    }
    fresh = json.loads(dict(poller.messages([run], {}))["curves"])
    assert parts > 10 and fresh["from"] == 0
    assert columns == fresh["columns"]
    steps = columns["step"]
    assert steps == sorted(set(steps)) and steps[0] == 1 and steps[-1] == 1300 and len(steps) <= POINTS
    poller.unsubscribe([run])


@pytest.mark.parametrize("seed", range(3))
def test_the_points_of_a_long_run_are_its_extremes(tmp_path: Path, seed: int) -> None:
    draw, paths = random.Random(seed), RunPaths(tmp_path)
    with open(paths.metrics, "w", encoding="utf-8") as file:
        for step in range(1, 6001):
            loss = None if draw.random() < 0.01 else draw.gauss(2, 0.1)
            file.write(
                json.dumps({"step": step, "attempt": 1, "loss": loss, "step_s": draw.random(), "time": step}) + "\n"
            )
    index = RunIndex(paths)
    curves = RunCurves(index, CurvePoints(index))
    while index.poll(200_000):
        curves.update()
    curves.update()
    drawn, stretch = set(curves.columns["step"]), 32
    for start in range(0, 6000, stretch):
        losses, times = (column[start : start + stretch] for column in (index.columns.loss, index.columns.step_s))
        assert {start + at + 1 for at in choose_points(losses, times)} <= drawn
        known = [None if value != value else value for value in losses]
        expected = history.thin([*known, *known], [*times, *times], points=8)  # the plain twin, on one stretch
        assert choose_points(losses, times) <= {at % len(losses) for at in expected} | {0, len(losses) - 1}
    assert {1, 6000} <= drawn and len(drawn) <= POINTS


def test_hostile_records_are_json_and_nothing_else(runs: Path) -> None:
    with serving([runs]) as (server, _get, _post):
        run = ids(server)[HOSTILE]
        server.poller.subscribe([RUNS, run])
        server.poller._poll()
        told = server.poller.messages([RUNS, run], {})
        assert {name for name, _ in told} == {
            RUNS,
            "facts",
            "charts",
            "story",
            "devices",
            "gpus",
            "experts",
            "config",
            "curves",
        }
        for _, data in told:
            assert b"\n" not in data  # a line break would begin another field of the stream
            json.loads(data)
        assert any(HOSTILE in json.dumps(json.loads(data)) for _, data in told)


def test_records_of_nonsense_hurt_no_other_run(runs: Path) -> None:
    broken = RunPaths(runs / "broken")
    broken.root.mkdir()
    broken.metrics.write_text('{"step": 1, "loss": [], "time": "x", "shares": {}}\n{"step": true}\nnull\n')
    broken.events.write_text('{"kind": "run_started", "time": {}, "attempt": "x", "hosts": 5}\n{"kind": 7}\n')
    broken.config.write_text("train: [1, 2\n")
    later = RunPaths(runs / "later")
    later.root.mkdir()
    later.events.write_text("{}\n")
    later.versions.write_text('{"format": 999}')
    with serving([runs]) as (server, _get, _post):
        known = ids(server)
        server.poller.subscribe([RUNS, *known.values()])
        server.poller._poll()
        listed = json.loads(dict(server.poller.messages([RUNS], {}))[RUNS])
        assert len(listed) == 4 and [run["step"] for run in listed if run["name"] == "plain"] == [40]
        told = [json.loads(data) for name, data in server.poller.messages(list(known.values()), {}) if name == "facts"]
        assert len(told) == 4


def test_new_runs_are_found_and_missing_folders_named(tmp_path: Path) -> None:
    from phalanx.core.errors import ConfigError

    with pytest.raises(ConfigError, match="no folder"):
        find_runs([tmp_path / "none"])
    poller = Poller([tmp_path], lambda: None)
    assert poller.subjects == {}
    append((tmp_path / "new").mkdir() or tmp_path / "new" / "events.jsonl", {"kind": "run_started", "time": 1.0})
    poller._find()
    poller._poll()
    assert [subject.index.paths.name for subject in poller.subjects.values()] == ["new"]


def test_a_page_is_told_of_changes_within_a_second(runs: Path) -> None:
    """The stream itself, with the thread that follows the files: a new step arrives."""
    server = DashboardServer(lambda notify: Poller([runs], notify), allow_actions=False)
    run, paths = ids(server)["plain"], RunPaths(runs / "plain")
    server.poller.start()

    async def watch() -> list[str]:
        import time

        server._loop = asyncio.get_running_loop()
        events, seen = server._send_events([RUNS, run]), []
        async for message in events:
            text = message.decode()
            if "event: curves" in text and not seen:
                append(paths.metrics, {"step": 41, "attempt": 99, "loss": 0.123456, "time": 2e9, "step_s": 0.1})
                seen.append(str(time.monotonic()))
            elif "0.123456" in text and seen:
                seen.append(str(time.monotonic()))
                break
        await events.aclose()
        return seen

    try:
        began, arrived = map(float, asyncio.run(asyncio.wait_for(watch(), 60)))
        assert arrived - began < 20  # a busy machine; the dashboard's page has the figure
        assert server.poller._wanted == {} and server._streams == 0
    finally:
        server.poller.close()


def test_short_runs_are_listed_while_a_long_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that a page shows is published first, and every other run before the long one is read to its end."""
    for name, steps in (("a long one", 3000), ("b", 5), ("c", 5)):
        paths = RunPaths(tmp_path / name)
        paths.root.mkdir()
        append(paths.events, {"kind": "run_started", "time": 1.0, "attempt": 1, "steps": steps})
        lines = [json.dumps({"step": step, "attempt": 1, "loss": 1.0, "step_s": 1.0, "time": 1.0 + step})
                 for step in range(1, steps + 1)]  # fmt: skip
        paths.metrics.write_text("\n".join(lines) + "\n")
    published: list[set[str]] = []
    made = Poller([tmp_path], lambda: published.append({each.id for each in made.subjects.values() if each.known}))
    long, *short = sorted(made.subjects.values(), key=lambda each: each.index.paths.name)
    made.subscribe([long.id, RUNS])
    polled = long.index.poll

    def poll(most_bytes: int = 1 << 12) -> bool:
        assert most_bytes == FIRST_BYTES or all(each.known for each in short), "the long run is read on before others"
        return polled(1 << 12)

    monkeypatch.setattr(long.index, "poll", poll)
    made._poll()
    assert published[0] == {long.id} and published[-1] == set(made.subjects)
