"""Alerts: found once, sent once with a command, never with the webhook's URL in any record; and metrics of runs."""

import contextlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from phalanx.cli.dashboard import _list_clusters
from phalanx.config.operations import ReportSection
from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import RunPaths
from phalanx.health.checks import build_node_report
from phalanx.health.findings import Finding, Severity
from phalanx.launch.observer import Observer, check_report
from phalanx.provision import cluster_view
from phalanx.provision.slurm_control import SlurmNodeView
from phalanx.report import prometheus_cluster
from phalanx.report.alerts import STALL_S, find_alerts
from phalanx.report.gpu_samples import gpu_samples_path
from phalanx.report.history import read_run_history
from phalanx.report.prometheus import RunCollector
from phalanx.report.run_index import RunIndex
from tests.helpers import ROOT, free_port, wait_until
from tests.unit.test_run_index import BEGAN, append, write_life

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")


def step(number: int, attempt: int = 1) -> dict[str, Any]:
    return {"step": number, "attempt": attempt, "loss": 1.0, "step_s": 1.0, "time": BEGAN + number}


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "a run")
    paths.root.mkdir()
    event(paths, "run_started", 0.0, hosts=["n0", "n1"], spares=["n2"], steps=100)
    return paths


def event(paths: RunPaths, kind: str, after: float, attempt: int = 1, **details: Any) -> None:
    append(paths.events, {"kind": kind, "time": BEGAN + after, "attempt": attempt, **details})


def texts(paths: RunPaths, after: float = 20.0) -> list[str]:
    return [alert.text for alert in find_alerts(read_run_history(paths), "runs/a run", BEGAN + after)]


def test_a_healthy_run_has_no_alert(paths: RunPaths) -> None:
    for number in range(1, 11):
        append(paths.metrics, step(number))
    event(paths, "checkpoint_saved", 5, step=5)
    event(paths, "worker_died", 6, rank=1, signal="SIGKILL")  # it restarts: no one has to do anything
    assert texts(paths) == []


@pytest.mark.parametrize(
    ("kind", "details", "said"),
    [
        ("stopped", {"step": 9}, "stopped after step 9"),
        ("finished", {"step": 100}, "finished after step 100"),
        ("gave_up", {"reason": "3 restarts"}, "the run ended: no further restart: 3 restarts"),
        ("rolled_back", {"step": 5, "from_step": 9, "reason": "a spike"}, "training diverged: "),
        ("worker_died", {"rank": 0, "exit_code": 2, "reason": "the loss is not finite"}, "training diverged: "),
        ("checkpoint_failed", {"step": 9, "reason": "no space"}, "checkpoint of step 9 could not be saved: no space"),
    ],
)
def test_what_a_user_has_to_know_is_an_alert(paths: RunPaths, kind: str, details: dict[str, Any], said: str) -> None:
    append(paths.metrics, step(1))
    event(paths, kind, 9, **details)
    (found,) = find_alerts(read_run_history(paths), "runs/a run", BEGAN + 10)
    assert found.text.startswith(said) and "'runs/a run'" in found.command
    event(paths, "warning", 60, attempt=0, message="a clock of another node, by which the others are shifted")
    run = read_run_history(paths)
    assert run.clock_moves and find_alerts(run, "runs/a run", BEGAN + 11)[0].key == found.key


USED_UP = "no spare node is left: a further loss shrinks the run or ends it"


def test_a_lost_node_and_the_last_spare(paths: RunPaths) -> None:
    append(paths.metrics, step(1))
    event(paths, "node_lost", 9, node=1, host="n1", reason="silent")
    assert texts(paths) == ["node 1 (n1) was lost: silent", USED_UP]
    event(paths, "node_lost", 10, node=2, host="n2", reason="silent")
    assert len(texts(paths)) == 3
    event(paths, "run_started", 11, hosts=["n0"], steps=100)  # another start: what was before is over
    assert texts(paths) == []


def test_a_node_that_leaves_is_told_of_once_and_uses_a_spare_up(paths: RunPaths) -> None:
    """At its notice, not when it has gone; a node that comes instead is a spare again, which may leave as well."""
    append(paths.metrics, step(1))
    event(paths, "node_leaving", 9, node=1, host="n1", reason="a spot notice")
    told = ["node 1 (n1) will soon be gone: a spot notice", USED_UP]
    assert texts(paths) == told
    event(paths, "node_lost", 12, node=1, host="n1", reason="it left")
    assert texts(paths) == told
    event(paths, "node_joined", 13, node=1, host="n3", ranks=1)
    assert texts(paths) == told
    event(paths, "node_lost", 14, node=1, host="n3", reason="silent")
    assert texts(paths) == [*told, "node 1 (n3) was lost: silent", USED_UP]
    assert len({alert.key for alert in find_alerts(read_run_history(paths), "runs/a run", BEGAN + 20)}) == 4


def test_silence_is_told_of_after_the_first_step(paths: RunPaths) -> None:
    assert texts(paths, 9_999) == []  # it may still compile
    append(paths.metrics, step(1))
    assert texts(paths, STALL_S) == []
    assert texts(paths, STALL_S + 2)[0].startswith("no record for 2 min 01 s, after step 1")
    event(paths, "attempt_started", 5, attempt=2)
    assert texts(paths, 9_999) == []


def test_an_old_checkpoint_is_told_of(paths: RunPaths) -> None:
    paths.config.write_text("checkpoint:\n  every: 100\n")
    for number in (1, 500, 601):
        append(paths.metrics, step(number))
    assert texts(paths, 600) == []
    assert texts(paths, 602) == ["the newest checkpoint is missing: none was saved for 10 min 02 s"]
    event(paths, "checkpoint_saved", 400, step=400)
    assert texts(paths, 602) == []


# ------------------------------------------------------------------------------------------------------------- sending


@pytest.fixture
def hook() -> Iterator[tuple[str, list[tuple[float, dict[str, Any]]], list[int]]]:
    """A server of a webhook: its URL, what it received and when, and the statuses of its next answers."""
    received: list[tuple[float, dict[str, Any]]] = []
    answers: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((time.time(), json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(answers.pop(0) if answers else 200)
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/services/S3CRET", received, answers
    server.shutdown()


OBSERVE = """
import json, sys
from pathlib import Path
from phalanx.cli.dashboard import _list_clusters
from phalanx.config.operations import ReportSection
from phalanx.core.run_paths import RunPaths
from phalanx.launch.observer import Observer
observer = Observer.start(ReportSection(**json.loads(sys.argv[2])), RunPaths(Path(sys.argv[1])))
print("on", flush=True)
sys.stdin.read()
observer.close()
"""


def observe(paths: RunPaths, **report: Any) -> subprocess.Popen[str]:
    """An agent's process with an observer; closing its input is the end of the run."""
    command = [os.sys.executable, "-c", OBSERVE, str(paths.root), json.dumps(report)]  # type: ignore[attr-defined]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    return process


def test_an_alert_is_sent_once_and_its_url_stands_nowhere(paths: RunPaths, tmp_path: Path, hook: Any) -> None:
    url, received, answers = hook
    file = tmp_path / "hook"
    file.write_text(url + "\n")
    append(paths.metrics, {**step(1), "time": time.time()})
    event(paths, "node_lost", 1, node=1, host="<n1>", reason="silent")
    process = observe(paths, webhook=str(file))
    answers += [500]  # the first answer; it is tried again
    until = time.monotonic() + 60
    while len(received) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    append(paths.events, {"kind": "finished", "time": (written := time.time()), "attempt": 1, "step": 100})
    output, _ = process.communicate(timeout=60)  # the end of the run: what is left is sent
    said = [told["text"] for _, told in received]
    assert (
        said[0]
        == said[1]
        == "*a run*: node 1 (&lt;n1&gt;) was lost: silent\n`phalanx nodes --run '" + str(paths.root) + "'`"
    )
    assert [text.split("\n")[0] for text in said[2:]] == [
        "*a run*: no spare node is left: a further loss shrinks the run or ends it",
        "*a run*: finished after step 100",
    ]
    assert received[-1][0] - written < 20  # 3 s on a machine that is not busy
    # another leader: nothing is sent again; and a redirection is not followed
    answers += [302]
    append(paths.events, {"kind": "gave_up", "time": time.time(), "attempt": 1, "reason": "no node"})
    again, _ = observe(paths, webhook=str(file)).communicate(timeout=60)
    assert len(received) == 5 and "no node" in received[4][1]["text"]
    assert "HTTP status 302" in paths.events.read_text()
    for text in (output, again, *(path.read_text() for path in paths.root.iterdir() if path.is_file())):
        assert "S3CRET" not in text


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "cannot be read"), ("ftp://x/y", "has no http"), ("http://", "has no http"), ("", "has no")],
)
def test_a_webhook_without_a_url_is_refused(tmp_path: Path, content: str | None, why: str) -> None:
    if content is not None:
        (tmp_path / "hook").write_text(content)
    with pytest.raises(ConfigError, match=why) as caught:
        check_report(ReportSection(webhook=str(tmp_path / "hook")))
    assert "://" not in str(caught.value).replace("http:// or https://", "")
    with pytest.raises(ConfigError, match="a secret") as caught:
        check_report(ReportSection(webhook="https://hooks.example/S3CRET"))
    assert "S3CRET" not in str(caught.value)


def test_without_metrics_and_alerts_there_is_no_process(paths: RunPaths) -> None:
    assert Observer.start(ReportSection(), paths) is None


# ------------------------------------------------------------------------------------------------------------- metrics


def scrape(*paths: RunPaths) -> str:
    nodes = [{"node": "0 n0", "state": "in the run", "health": "watch", "why": ""}]
    job = {"by": "process", "id": "7", "state": "RUNNING", "nodes": "n0"}
    indexes, registry = [RunIndex(each) for each in paths], CollectorRegistry()
    registry.register(
        RunCollector(lambda: indexes, lambda: BEGAN + 600, lambda _: nodes, lambda _: job, threading.Lock())
    )
    return generate_latest(registry).decode()


def test_metrics_are_those_of_the_records(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / 'r"\n')
    paths.root.mkdir()
    for line in write_life(paths, 3, steps=200):
        append(*line)
    found = scrape(paths)
    if PROMTOOL:
        subprocess.run([PROMTOOL, "check", "metrics"], input=found, text=True, check=True, timeout=60)
    run = read_run_history(paths)
    run_label = 'run="r\\"\\n"'
    assert f"phalanx_step{{{run_label}}} 200.0" in found
    assert f"phalanx_replayed_steps_total{{{run_label}}} {float(run.totals.lost_steps)}" in found
    assert f'phalanx_rank_share_ratio{{rank="1",{run_label}}} 0.625' in found
    assert f'phalanx_node_health{{node="0 n0",{run_label}}} 2.0' in found
    assert f'phalanx_recoveries_total{{cause="worker_died",{run_label}}}' in found


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    found = []
    for place, steps in (("a/run", 20), ("b/run", 30), ("b/other", 40)):
        found.append(RunPaths(tmp_path / place))
        found[-1].root.mkdir(parents=True)
        for line in write_life(found[-1], 1, steps):
            append(*line)
    told = [line for line in scrape(*found).splitlines() if line.startswith("phalanx_step{")]
    labels = (found[0].root, found[1].root, "other")
    assert told == [f'phalanx_step{{run="{label}"}} {step}.0' for label, step in zip(labels, (20, 30, 40), strict=True)]


def scrape_clusters(file: Path, **clusters: Any) -> str:
    """Metrics of clusters, each read by a function, and of the host whose monitor has written `file`."""
    registry = CollectorRegistry()
    sources = [prometheus_cluster.ClusterSource(name, read) for name, read in clusters.items()]
    registry.register(prometheus_cluster.ClusterCollector(sources, file))
    found = generate_latest(registry).decode()
    if PROMTOOL:
        subprocess.run([PROMTOOL, "check", "metrics"], input=found, text=True, check=True, timeout=60)
    return found


def unhealthy_host(folder: Path) -> Path:
    file = folder / "health.json"
    finding = Finding("clock", Severity.REBOOT, "the clock is wrong", where="eth0")
    file.write_text(json.dumps(build_node_report([finding]) | {"host": "n0"}))
    return file


def test_a_cluster_is_served_while_its_scheduler_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, lines in (("squeue", "main|RUNNING\nmain|PENDING\nmain|PENDING"), ("sinfo", "n0|idle|none\nn1|down*|x")):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{lines}\\n'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(prometheus_cluster, "CACHE_S", 0.0)
    found = scrape_clusters(unhealthy_host(tmp_path), lab=cluster_view.sample_queue)
    for line in (
        'phalanx_queue_jobs{cluster="lab",partition="main",state="pending"} 2.0',
        'phalanx_cluster_node_usable{cluster="lab",node="n0"} 1.0',
        'phalanx_cluster_node_usable{cluster="lab",node="n1"} 0.0',
        'phalanx_cluster_node_state{cluster="lab",node="n1",state="down"} 1.0',
        'phalanx_scheduler_up{cluster="lab"} 1.0',
        'phalanx_host_health{cluster="",node="n0"} 4.0',
        'phalanx_host_finding{check="clock",node="n0",where="eth0"} 4.0',
    ):
        assert line in found, found
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    found = scrape_clusters(tmp_path / "none", lab=cluster_view.sample_queue)
    assert 'phalanx_scheduler_up{cluster="lab"} 0.0' in found and "node" not in found


def test_what_a_clusters_monitors_found_is_served(tmp_path: Path) -> None:
    class Lab:
        def nodes(self) -> list[dict[str, str]]:
            new = {"node": "n2", "slurm": "", "health": ""}
            silent = {"node": "n3", "slurm": "DOWN*", "health": "no answer"}
            return [{"node": "n1", "slurm": "IDLE", "health": "watch"}, new, silent]

        def command(self, words: list[str]) -> list[str]:
            return ["printf", "main|RUNNING\n"]

    sample = cluster_view.sample_cluster(Lab())  # type: ignore[arg-type]
    found = scrape_clusters(unhealthy_host(tmp_path), lab=lambda: sample, other=lambda: sample)
    assert 'phalanx_host_health{cluster="lab",node="n1"} 2.0' in found and "n2" not in found
    assert 'phalanx_host_health{cluster="lab",node="n3"} 0.0' in found
    assert 'phalanx_host_health{cluster="",node="n0"} 4.0' in found and found.count("HELP phalanx_host_health") == 1
    assert 'phalanx_cluster_node_usable{cluster="lab",node="n1"} 1.0' in found


@pytest.mark.parametrize(("name", "controller", "served"), [("lab", "head-1", {"lab"}), ("lab", "other", {"lab", ""})])
def test_the_slurm_of_this_machine_is_served_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, controller: str, served: set[str]
) -> None:
    said = {"squeue": "main|RUNNING", "sinfo": "n1|idle|none"}
    said["scontrol"] = f"Configuration data as of now\nClusterName  = {name}\nSlurmctldHost[0] = {controller}(10.0.0.1)"
    for program, text in said.items():
        (tmp_path / program).write_text(f"#!/bin/sh\ncat <<'.'\n{text}\n.\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    class Lab:
        name = "lab"

        def describe(self) -> dict[str, Any]:
            return {}

        def nodes(self) -> list[dict[str, str]]:
            return [{"node": "head-1", "slurm": ""}, {"node": "n1", "slurm": "IDLE"}]

        def command(self, words: list[str]) -> list[str]:
            return words

    registry = CollectorRegistry()
    sources = _list_clusters(True, Lab())  # type: ignore[arg-type]
    registry.register(prometheus_cluster.ClusterCollector(sources, tmp_path / "none"))
    found = generate_latest(registry).decode()
    assert set(re.findall(r'node_usable{cluster="(\w*)",node="n1"} 1', found)) == served


def test_a_cluster_that_is_slow_to_read_holds_up_no_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_cluster, "CACHE_S", 0.0)
    monkeypatch.setattr(prometheus_cluster, "WAIT_S", 0.0)
    goes_on, readings = threading.Event(), []

    def read() -> cluster_view.ClusterSample:
        readings.append(cluster_view.ClusterSample({("main", "running"): len(readings)}, []))
        assert len(readings) == 1 or goes_on.wait(60)
        return readings[-1]

    source = prometheus_cluster.ClusterSource("lab", read)
    assert source.sample() is readings[0]
    assert [source.sample() for _ in range(3)] == [readings[0]] * 3
    wait_until(lambda: len(readings) == 2)
    assert source.sample() is readings[0] and len(readings) == 2  # one reads at a time
    monkeypatch.setattr(prometheus_cluster, "STALE_S", 0.0)
    assert source.sample() is None
    monkeypatch.setattr(prometheus_cluster, "STALE_S", 60.0)
    goes_on.set()
    wait_until(lambda: source.sample() is not readings[0])


def test_the_port_is_checked_before_a_run_starts() -> None:
    check_report(ReportSection(prometheus=free_port()))
    with pytest.raises(ConfigError, match="cannot be used"):
        check_report(ReportSection(prometheus="203.0.113.1:80"))
    for wrong in (0, 70_000, "x", "9420", "host:", True):
        with pytest.raises(ValueError, match="must be a port"):
            ReportSection(prometheus=wrong)


def test_a_run_serves_its_metrics(paths: RunPaths) -> None:
    import httpx

    append(paths.metrics, step(7))
    port = free_port()
    process = observe(paths, prometheus=port)
    until = time.monotonic() + 60
    while True:
        try:
            found = httpx.get(f"http://127.0.0.1:{port}/metrics").text
            break
        except httpx.TransportError:
            assert time.monotonic() < until
            time.sleep(0.05)
    assert 'phalanx_step{run="a run"} 7.0' in found
    process.communicate(timeout=60)


@pytest.mark.skipif(not PROMTOOL, reason="there is no promtool")
def test_alert_rules_fire_on_a_recorded_incident() -> None:
    folder = ROOT / "contrib" / "grafana"
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([str(PROMTOOL), *command], cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not PROMETHEUS, reason="there is no prometheus")
def test_a_prometheus_scrapes_a_run_and_its_rules_fire(tmp_path: Path) -> None:
    """A run with two deaths, that gave up in the end; a GPU of it has errors."""
    import httpx

    paths = RunPaths(tmp_path / "runs" / "one")
    paths.root.mkdir(parents=True)
    for line in write_life(paths, 3, steps=60)[:-1]:
        append(*line)
    event(paths, "gave_up", 1e5, attempt=9, reason="3 attempts in a row made no progress")
    gpus = [{"index": 0, "temperature_c": 60, "power_w": 300.0, "corrected": 0, "uncorrected": 1}]
    append(gpu_samples_path(paths, 0), {"time": time.time(), "host": "n0", "gpus": gpus})
    metrics, port = free_port(), free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "contrib" / "grafana" / "alerts.yml")],
        "scrape_configs": [{"job_name": "phalanx", "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    commands = (
        [sys.executable, "-m", "phalanx", "metrics", str(tmp_path / "runs"), "--port", str(metrics)],
        [str(PROMETHEUS), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{port}"],
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "output", "wb") as out, contextlib.ExitStack() as held:
        for command in commands:
            process = held.enter_context(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
            held.callback(process.terminate)

        def ask(what: str, **query: str) -> Any:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/{what}", params=query, timeout=10)
                return answer.json()["data"]
            except (httpx.TransportError, ValueError, KeyError):
                return {}

        def firing() -> set[str]:
            return {
                each["labels"]["alertname"] for each in ask("alerts").get("alerts", []) if each["state"] == "firing"
            }

        wait_until(lambda: firing() >= {"PhalanxRunDied", "PhalanxGpuMemoryErrors"}, timeout_s=120)
        (recoveries,) = ask("query", query="sum by (run) (phalanx_recoveries_total)")["result"]
        (step,) = ask("query", query="phalanx_step")["result"]
    assert recoveries["metric"] == {"run": "one"} and float(recoveries["value"][1]) >= 1
    assert float(step["value"][1]) == 60


def test_the_grafana_dashboard_and_the_rules_name_metrics_that_exist(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    for line in write_life(paths, 3, steps=60):
        append(*line)
    records = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    full = {"grad_norm": 1.0, "lr": 1e-3, "wait_s": 0.1, "mfu": 0.4, "total_tokens": 1000}
    paths.metrics.write_text("".join(json.dumps({**record, **full}) + "\n" for record in records))
    evaluated = {"kind": "evaluated", "time": BEGAN, "attempt": 1, "step": 60, "set": "held_out", "loss": 1.0}
    append(paths.events, evaluated | {"fp8": {"largest": [40.0, 6.5], "zero": [0.0, 0.00125]}})
    gpus = [{"index": 0, "temperature_c": 60, "power_w": 300.0, "corrected": 0, "uncorrected": 1}]
    append(gpu_samples_path(paths, 0), {"time": time.time(), "host": "n0", "gpus": gpus})
    sample = cluster_view.ClusterSample({("main", "running"): 1}, [SlurmNodeView("n0", "idle")])
    found = scrape(paths) + scrape_clusters(unhealthy_host(tmp_path), lab=lambda: sample)
    assert re.search(r"^phalanx_fp8_largest_input\{.*} 40\.0$", found, re.MULTILINE)
    assert re.search(r"^phalanx_fp8_zero_ratio\{.*} 0\.00125$", found, re.MULTILINE)
    served = {line.split("{")[0] for line in found.splitlines() if not line.startswith("#")}
    folder = ROOT / "contrib" / "grafana"
    board = json.loads((folder / "phalanx.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    rules = yaml.safe_load((folder / "alerts.yml").read_text())["groups"][0]["rules"]
    for expression in [*shown, *(rule["expr"] for rule in rules)]:
        named = set(re.findall(r"phalanx_\w+", expression))
        assert named and named <= served, expression
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) and len(board["panels"]) >= 10
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and panel["title"]
