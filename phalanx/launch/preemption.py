"""Notices of preemption: a process that asks a cloud's metadata service whether this machine will be taken away.

AWS, Google Cloud and Azure announce the end of a spot machine 30 s to 2 min ahead, at an address that only the machine
itself can reach. The watcher tells its parent: an agent by LEAVE_SIGNAL, which administrators may send as well, a rank
that another launcher started by SIGTERM.
"""

import contextlib
import http.client
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.config.operations import ResilienceSection
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.launch.observer import NoRedirect
from phalanx.system.fork import LEAVE_SIGNAL, STOP_SIGNALS, end_child, fork

POLL_S, ANSWER_S = 2.0, 2.0  # between two requests; for an answer
CAUGHT_S = 0.1  # between two looks whether the agent would notice a signal
MAX_BYTES = 1 << 20  # of an answer
TOKEN_S = 21600  # of an AWS token
LINK_LOCAL = "http://169.254.169.254"
URLS = {"aws": LINK_LOCAL, "gcp": "http://metadata.google.internal", "azure": LINK_LOCAL}
VENDORS = {"Amazon EC2": "aws", "Google": "gcp"}  # in the firmware
AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"  # Microsoft's other virtual machines have another one
DMI = Path("/sys/class/dmi/id")


_open = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect).open


def detect_cloud(firmware: Path = DMI) -> str | None:
    """The cloud whose machine this is, as the firmware names it; None for others."""
    found = {}
    for name in ("sys_vendor", "chassis_asset_tag", "bios_version"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found[name] = (firmware / name).read_text(encoding="utf-8").strip()
    if found.get("chassis_asset_tag") == AZURE_ASSET_TAG:
        return "azure"
    if found.get("bios_version", "").endswith(".amazon"):  # older types, such as p3, whose vendor is Xen
        return "aws"
    return VENDORS.get(found.get("sys_vendor", ""))


def _request(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """The answer; None for an address without a document. Raises OSError, and ValueError for what is no text."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with _open(request, timeout=ANSWER_S) as answer:
            return str(answer.read(MAX_BYTES).decode())
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
        raise


class MetadataService:
    """The metadata service of a `cloud`, asked for notices."""

    def __init__(self, cloud: str, url: str | None = None) -> None:
        self._ask = {"aws": self._ask_aws, "gcp": self._ask_gcp, "azure": self._ask_azure}[cloud]
        self._url = (url or URLS[cloud]).rstrip("/")
        self._token: str | None = None
        self._token_until = 0.0
        self._name: str | None = None  # of this machine, in Azure

    def ask(self) -> tuple[str | None, str | None]:
        """A sentence that this machine will be taken away, and one that it may be; None each without a notice. A
        service that does not answer, or answers nonsense, has none."""
        try:
            return self._ask()
        except (OSError, http.client.HTTPException, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            self._token = None  # it may have expired
            return None, None

    def _ask_aws(self) -> tuple[str | None, str | None]:
        """Instance metadata service, version 2."""
        if self._token is None or time.monotonic() > self._token_until:
            header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            self._token = _request(f"{self._url}/latest/api/token", header, "PUT")
            self._token_until = time.monotonic() + TOKEN_S / 2
        header = {"X-aws-ec2-metadata-token": self._token or ""}
        action = _request(f"{self._url}/latest/meta-data/spot/instance-action", header)
        if action is not None:
            told = json.loads(action)
            return f"AWS will {told['action']} this spot instance at {told['time']}", None
        rebalance = _request(f"{self._url}/latest/meta-data/events/recommendations/rebalance", header)
        return None, None if rebalance is None else "AWS recommends to rebalance: this spot instance may be interrupted"

    def _ask_gcp(self) -> tuple[str | None, str | None]:
        header, instance = {"Metadata-Flavor": "Google"}, f"{self._url}/computeMetadata/v1/instance"
        if (_request(f"{instance}/preempted", header) or "").strip() == "TRUE":
            return "Google Cloud preempts this machine", None
        if (_request(f"{instance}/maintenance-event", header) or "").strip() == "TERMINATE_ON_HOST_MAINTENANCE":
            return "Google Cloud will end this machine for maintenance of its host", None
        return None, None

    def _ask_azure(self) -> tuple[str | None, str | None]:
        """Scheduled events, which may be those of other machines of a scale set."""
        header = {"Metadata": "true"}
        if not self._name:
            where = f"{self._url}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (_request(where, header) or "").strip()
        answer = _request(f"{self._url}/metadata/scheduledevents?api-version=2020-07-01", header)
        for event in json.loads(answer or "{}").get("Events", []):
            if event["EventType"] in ("Preempt", "Terminate") and self._name in event["Resources"]:
                return f"Azure event {event['EventType']} for this machine, not before {event['NotBefore']}", None
        return None, None


# ------------------------------------------------------------------------------------------------------- the process


@contextlib.contextmanager
def watch_for_preemption(
    wanted: ResilienceSection, paths: RunPaths | None, number: signal.Signals = LEAVE_SIGNAL
) -> Iterator[Callable[[], str]]:
    """Watch in a child, as long as this lasts, and send `number` to this process after a notice. Gives a function that
    returns the notice, once; empty without one. Without `paths` no checkpoint can be requested on mere advice."""
    cloud = detect_cloud() if wanted.preemption_notice == "auto" else wanted.preemption_notice
    if cloud is None or cloud == "off":
        yield str
        return
    service = MetadataService(cloud, wanted.metadata_url)
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    pid, pidfd = fork(lambda: _watch(service, paths, number, writer), keep=[writer])
    os.close(writer)

    def read_notice() -> str:
        with contextlib.suppress(OSError):
            return os.read(reader, 4096).decode(errors="replace")
        return ""

    try:
        yield read_notice
    finally:
        end_child(pid, pidfd)
        os.close(reader)


def _watch(service: MetadataService, paths: RunPaths | None, sent: signal.Signals, notices: int) -> int:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the run ends first
    parent, advised = os.getppid(), False
    while True:
        notice, advice = service.ask()
        if notice is not None:
            os.write(notices, notice.encode()[:4096])
            if (
                sent != LEAVE_SIGNAL and paths is not None and paths.events.exists()
            ):  # an agent says itself why it leaves
                _note(paths, f"{notice}; the run saves and stops")
            while not _is_caught(parent, sent):  # between two phases of the parent it would be killed
                time.sleep(CAUGHT_S)
            os.kill(parent, sent)
            return 0
        if paths is not None and advice is not None and not advised and paths.events.exists():
            advised = True
            _save_now(paths, advice)
        time.sleep(POLL_S)


def _is_caught(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _save_now(paths: RunPaths, advice: str) -> None:
    with contextlib.suppress(OSError):
        paths.save_request.touch()
    _note(paths, f"{advice}; a checkpoint is saved now")


def _note(paths: RunPaths, message: str) -> None:
    with contextlib.suppress(OSError):
        write_event(paths.events, EventKind.WARNING, 1, message=message)
