"""Notices of preemption, from metadata services on loopback."""

import http.server
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.started import start
from phalanx.config.operations import ResilienceSection
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import RunPaths
from phalanx.launch import preemption
from phalanx.launch.preemption import MetadataService, detect_cloud, watch_for_preemption
from tests.dist.command import write_place
from tests.helpers import free_port, run_ranks, wait_until

AWS_ACTION, AWS_REBALANCE = (
    "/latest/meta-data/spot/instance-action",
    "/latest/meta-data/events/recommendations/rebalance",
)
GCP = "/computeMetadata/v1/instance"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
TERMINATION = json.dumps({"action": "terminate", "time": "2026-01-01T00:02:00Z"})


class Metadata(http.server.ThreadingHTTPServer):
    """Answers as the services of all clouds do, who refuse requests without their header; `said` by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.said: dict[str, str] = {AZURE_NAME: "vm-7"}
        self.tokens = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Metadata

    def answer(self, code: int, text: str = "") -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self) -> None:
        self.server.tokens += 1
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200 if known else 400, f"token-{self.server.tokens}")

    def do_GET(self) -> None:
        headers = self.headers
        if self.path.startswith("/latest"):
            allowed = headers["X-aws-ec2-metadata-token"] == f"token-{self.server.tokens}"
        else:
            allowed = "Google" in (headers["Metadata-Flavor"] or "") or headers["Metadata"] == "true"
        said = self.server.said.get(self.path)
        self.answer(401 if not allowed else 404 if said is None else 200, said or "")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def azure(kind: str, name: str) -> str:
    return json.dumps(
        {"Events": [{"EventType": kind, "Resources": [name], "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}]}
    )


@pytest.mark.parametrize(
    ("cloud", "said", "notice", "advice"),
    [
        ("aws", {}, None, None),
        ("aws", {AWS_ACTION: TERMINATION}, "terminate this spot instance at 2026-01-01T00:02:00Z", None),
        ("aws", {AWS_REBALANCE: "{}"}, None, "may be interrupted"),
        ("aws", {AWS_ACTION: "not JSON"}, None, None),
        ("aws", {AWS_ACTION: "[]"}, None, None),
        ("gcp", {f"{GCP}/preempted": "FALSE", f"{GCP}/maintenance-event": "NONE"}, None, None),
        ("gcp", {f"{GCP}/preempted": "TRUE"}, "preempts this machine", None),
        ("gcp", {f"{GCP}/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, "maintenance of its host", None),
        ("gcp", {f"{GCP}/maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}, None, None),
        ("azure", {AZURE_EVENTS: json.dumps({"Events": []})}, None, None),
        ("azure", {AZURE_EVENTS: azure("Preempt", "vm-7")}, "Preempt for this machine", None),
        ("azure", {AZURE_EVENTS: azure("Preempt", "vm-8")}, None, None),
        ("azure", {AZURE_EVENTS: azure("Freeze", "vm-7")}, None, None),
        ("azure", {AZURE_EVENTS: json.dumps({"Events": [{}]})}, None, None),
    ],
)
def test_what_a_service_says(
    metadata: Metadata, cloud: str, said: dict[str, str], notice: str | None, advice: str | None
) -> None:
    metadata.said |= said
    found = MetadataService(cloud, metadata.url).ask()
    for expected, text in zip((notice, advice), found, strict=True):
        assert text is None if expected is None else expected in str(text)


def test_a_token_is_asked_for_once_and_again_after_a_refusal(metadata: Metadata) -> None:
    service = MetadataService("aws", metadata.url)
    assert [service.ask() for _ in range(3)] == [(None, None)] * 3
    assert metadata.tokens == 1
    metadata.tokens = 5  # another one is valid now, as after a restart of the service
    metadata.said[AWS_ACTION] = TERMINATION
    assert service.ask() == (None, None)
    assert "terminate" in str(service.ask()[0])


def test_a_service_that_is_not_there_says_nothing() -> None:
    assert MetadataService("gcp", "http://127.0.0.1:9").ask() == (None, None)


def test_a_service_that_speaks_no_http_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert MetadataService("gcp", f"http://127.0.0.1:{listener.getsockname()[1]}").ask() == (None, None)
        thread.join()


def test_a_name_that_was_not_known_at_first_is_asked_for_again(metadata: Metadata) -> None:
    metadata.said = {AZURE_EVENTS: azure("Preempt", "vm-7")}
    service = MetadataService("azure", metadata.url)
    assert service.ask() == (None, None)
    metadata.said[AZURE_NAME] = "vm-7"
    assert "Preempt for this machine" in str(service.ask()[0])


def test_an_address_that_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="must be an address such as"):
        ResilienceSection(metadata_url="127.0.0.1:1338")


@pytest.mark.parametrize(
    ("vendor", "tag", "cloud"),
    [
        ("Amazon EC2", "", "aws"), ("Google", "", "gcp"), ("QEMU", "", None),
        ("Microsoft Corporation", preemption.AZURE_ASSET_TAG, "azure"), ("Microsoft Corporation", "", None),
    ],
)  # fmt: skip
def test_a_cloud_is_known_by_its_firmware(tmp_path: Path, vendor: str, tag: str, cloud: str | None) -> None:
    (tmp_path / "sys_vendor").write_text(vendor + "\n")
    (tmp_path / "chassis_asset_tag").write_text(tag + "\n")
    assert detect_cloud(tmp_path) == cloud
    assert detect_cloud(tmp_path / "none") is None


def test_an_older_machine_of_aws_is_known_by_its_bios(tmp_path: Path) -> None:
    (tmp_path / "sys_vendor").write_text("Xen\n")
    (tmp_path / "bios_version").write_text("4.11.amazon\n")
    assert detect_cloud(tmp_path) == "aws"


def watched(placement: Placement, url: str, folder: str) -> list[Any]:
    """Wait for the notice; how many signals came, and what it says. At first the signal would end this process."""
    heard: list[float] = []
    signal.signal(signal.SIGPWR, signal.SIG_DFL)
    began = time.monotonic()
    wanted = ResilienceSection(preemption_notice="aws", metadata_url=url)
    with watch_for_preemption(wanted, RunPaths(Path(folder))) as read_notice:
        time.sleep(0.5)
        signal.signal(signal.SIGPWR, lambda *_: heard.append(time.monotonic()))
        while not heard and time.monotonic() < began + 30:
            time.sleep(0.02)
        text = read_notice()
        return [len(heard), text, read_notice()]


def test_a_notice_becomes_a_signal_to_the_agent(metadata: Metadata, tmp_path: Path) -> None:
    metadata.said[AWS_ACTION] = TERMINATION
    found = run_ranks(watched, 1, url=metadata.url, folder=str(tmp_path))[0]
    assert found[0] == 1 and "AWS will terminate" in found[1] and found[2] == ""


def test_advice_to_leave_has_a_checkpoint_saved(metadata: Metadata, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    preemption._save_now(paths, "it may be interrupted")
    assert paths.save_request.exists()
    (event,) = read_events(paths.events)
    assert event["kind"] == EventKind.WARNING and "saved now" in event["message"]


def as_script(placement: Placement, url: str, folder: str) -> list[Any]:
    """[exit code, output] of `phalanx run` on a machine of AWS."""
    preemption.detect_cloud = lambda *_: "aws"
    preemption.URLS["aws"] = url
    command = start(["run", "--nproc", "2", "script.py"], Path(folder), Path(folder) / "said.txt")
    try:
        wait_until(command.over, timeout_s=100)
    finally:
        command.end()
    return [command.code, command.said()]


def announce_when(metadata: Metadata, condition: Callable[[], bool]) -> None:
    def announce() -> None:
        wait_until(condition, timeout_s=100)
        metadata.said[AWS_ACTION] = TERMINATION

    threading.Thread(target=announce, daemon=True).start()


SCRIPT = """
import os, signal, sys, time
def leave(*_):
    print("saved by", os.environ["RANK"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open("ready-" + os.environ["RANK"], "w").close()
time.sleep(60)
sys.exit(5)
"""


def test_a_script_of_ours_gets_sigterm_after_a_notice(metadata: Metadata, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    announce_when(metadata, lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    code, said = run_ranks(as_script, 1, url=metadata.url, folder=str(tmp_path))[0]
    assert "AWS will terminate this spot instance" in said and "the script's ranks get SIGTERM" in said, said
    assert "saved by 0" in said and "saved by 1" in said and code in (0, ExitCode.STOPPED), (code, said)


def as_started_rank(placement: Placement, url: str, folder: str) -> list[Any]:
    """[exit code, output] of `phalanx train` as the one rank of torchrun on a machine of AWS."""
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
    os.environ.update(job)
    keys = ["train.steps=100000", "resilience.preemption_notice=aws", f"resilience.metadata_url={url}"]
    command = start(["train", "recipe.yaml", *keys, "--run-dir", "run"], Path(folder), Path(folder) / "said.txt")
    try:
        wait_until(command.over, timeout_s=100)
    finally:
        command.end()
    return [command.code, command.said()]


def test_ranks_that_another_launcher_started_save_and_stop_after_a_notice(metadata: Metadata, tmp_path: Path) -> None:
    place = write_place(tmp_path)
    paths = RunPaths(place / "run")
    announce_when(metadata, lambda: paths.metrics.exists() and paths.metrics.stat().st_size > 0)
    code, said = run_ranks(as_started_rank, 1, url=metadata.url, folder=str(place), timeout_s=150)[0]
    assert code == ExitCode.STOPPED, said
    told = list(read_events(paths.events))
    assert any("the run saves and stops" in str(event.get("message")) for event in told), told
    assert told[-1]["kind"] == EventKind.STOPPED


def test_nothing_watches_where_it_is_off(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/task")
    with watch_for_preemption(ResilienceSection(preemption_notice="off"), RunPaths(tmp_path)) as read_notice:
        assert read_notice() == "" and os.listdir("/proc/self/task") == before
