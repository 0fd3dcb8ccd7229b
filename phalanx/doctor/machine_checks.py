"""Checks of this machine that need no training: versions, node health, network, Slurm, PyTorch, devices."""

import contextlib
import dataclasses
import os
import platform
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, PhalanxError, RunError
from phalanx.core.version import __version__
from phalanx.doctor.results import CheckResult, CheckState, DoctorCheck, result_from_json, result_of_finding
from phalanx.health import checks
from phalanx.health import host as host_health
from phalanx.health.findings import DeviceInfo, Severity
from phalanx.launch.schedulers import slurm
from phalanx.system.exit_causes import describe_exception
from phalanx.system.fork import fork_call

SENT_BYTES = 2**20  # sent over loopback in each direction
LOOPBACK_S = 5.0


def check_python() -> list[CheckResult]:
    """Check versions, and whether this system can run Phalanx."""
    libc = " ".join(platform.libc_ver()).strip() or "an unknown C library"
    text = (
        f"Phalanx {__version__} on Python {platform.python_version()}, {platform.system()} {platform.release()} "
        f"({platform.machine()}), {libc}"
    )
    if sys.platform != "linux":
        return [CheckResult("python", CheckState.WRONG, f"{text}; Phalanx runs on Linux only")]
    return [CheckResult("python", CheckState.OK, text)]


def check_node(run_dir: Path, cache: Path) -> list[CheckResult]:
    """Run the checks of `phalanx health`, and check the disk of the data cache."""
    findings = checks.run_health_checks(checks.HealthScope(folder=run_dir))
    room = checks.HealthCheck(
        "cache folder", lambda: host_health.check_disk(cache, what="cache folder"), checks.DISK_S, Severity.RESET
    )
    return [result_of_finding(finding) for finding in [*findings, *checks.run_checks([room])]]


def check_network(
    interfaces: Path = Path("/sys/class/net"), cards: Path = Path("/sys/class/infiniband")
) -> list[CheckResult]:
    """Check whether processes of this machine reach each other, and list the networks to other machines."""
    try:
        lines = [_loopback()]
    except OSError as error:
        text = (
            f"processes cannot reach each other over 127.0.0.1 ({error.strerror or error}); bring the interface lo up"
        )
        lines = [CheckResult("loopback", CheckState.WRONG, f"{text}, and allow it in the firewall")]
    found = [_interface(place) for place in sorted(interfaces.glob("*")) if place.name != "lo"]
    shown = [name for name in found if name]
    rdma = sorted(card.name for card in cards.glob("*"))
    if not shown and not rdma:
        return [
            *lines,
            CheckResult("network", CheckState.MISSING, "no network interface is up except lo: single machine only"),
        ]
    with_rdma = f"; RDMA: {', '.join(rdma)}" if rdma else "; no RDMA"
    return [*lines, CheckResult("network", CheckState.OK, f"{', '.join(shown) or 'no Ethernet'}{with_rdma}")]


def _interface(place: Path) -> str:
    """An interface with its speed; empty if it is down."""
    try:
        if (place / "operstate").read_text().strip() == "down":
            return ""
        speed = int((place / "speed").read_text())
    except (OSError, ValueError):  # a virtual interface has no speed
        speed = -1
    return f"{place.name} ({speed / 1000:g} Gbit/s)" if speed > 0 else place.name


def _loopback() -> CheckResult:
    data = os.urandom(SENT_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LOOPBACK_S)
        with socket.create_connection(listener.getsockname(), LOOPBACK_S) as client:
            server, _ = listener.accept()
            server.settimeout(LOOPBACK_S)
            with server:
                sending = threading.Thread(target=client.sendall, args=(data,), daemon=True)
                sending.start()
                received = bytearray()
                while len(received) < len(data) and (part := server.recv(1 << 16)):
                    received += part
                sending.join(LOOPBACK_S)
    if received != data:
        raise OSError(5, "the received bytes differ from the sent bytes")
    return CheckResult("loopback", CheckState.OK, "processes reach each other over 127.0.0.1")


def check_slurm() -> list[CheckResult]:
    """Check whether Slurm is installed and answers."""
    try:
        partitions = slurm.partitions()
    except ConfigError:
        return [CheckResult("slurm", CheckState.MISSING, "Slurm is not installed; `phalanx train` does not need it")]
    except RunError as error:
        text = f"Slurm's commands are installed but do not answer ({error}); `phalanx launch` cannot use it"
        return [CheckResult("slurm", CheckState.MISSING, text)]
    names = ", ".join(f"{each.name} ({each.nodes} nodes)" for each in partitions) or "none"
    return [CheckResult("slurm", CheckState.OK, f"Slurm answers; its partitions: {names}")]


def check_torch() -> list[CheckResult]:
    """Check PyTorch, which must be imported already."""
    import torch

    from phalanx.system import accelerator

    return [
        CheckResult("torch", CheckState.OK, f"PyTorch {torch.__version__}, built for {accelerator.describe_build()}")
    ]


def check_devices(
    found: Mapping[str, DeviceInfo], accelerators: Sequence[str], require_accelerators: bool, gpus_of_driver: int | None
) -> list[CheckResult]:
    """Check the devices for ranks. `require_accelerators`: accelerators are required; `gpus_of_driver`: number
    that NVIDIA's driver reports."""
    if not accelerators:
        return [_no_accelerator(found["cpu"], require_accelerators, gpus_of_driver or 0)]
    lines = []
    for model in sorted({found[name].model for name in accelerators}):
        names = [name for name in accelerators if found[name].model == model]
        first = found[names[0]]
        shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        text = f"{len(names)} x {model} ({shown}), {first.memory_bytes / 2**30:.1f} GiB of memory each"
        bf16 = "computes in bf16" if first.bf16 else "does not compute in bf16, so runs take fp16"
        lines.append(CheckResult("devices", CheckState.OK, f"{text}; {bf16}", len(names)))
    if gpus_of_driver is not None and gpus_of_driver > len(accelerators):
        text = (
            f"NVIDIA's driver finds {gpus_of_driver} GPUs but PyTorch only {len(accelerators)}: the job, the "
            "container or an environment variable hides the others; unhide them if you need them"
        )
        lines.append(CheckResult("devices", CheckState.SLOW, text, len(accelerators)))
    return lines


def _no_accelerator(cpu: DeviceInfo, require_accelerators: bool, gpus_of_driver: int) -> CheckResult:
    from phalanx.system import accelerator

    built = accelerator.describe_build()
    here = f"the CPU: {cpu.cores} cores, {cpu.memory_bytes / 2**30:.1f} GiB"
    if not require_accelerators and not gpus_of_driver:
        return CheckResult("devices", CheckState.OK, f"there is no accelerator; ranks run on {here}", 0)
    if built == accelerator.CPUS:
        why = "is a CPU-only build; install a PyTorch build for this machine's accelerators"
    else:
        why = (
            f"is built for {built}; check the driver, the devices of the container or job, and environment variables "
            "that hide devices"
        )
    known = f", although NVIDIA's driver finds {gpus_of_driver}" if gpus_of_driver else ""
    text = f"PyTorch finds no accelerator{known}, so ranks run on {here}; this PyTorch {why}"
    return CheckResult("devices", CheckState.WRONG if require_accelerators else CheckState.SLOW, text, 0)


# ----------------------------------------------------------------------------------------------------------- isolation
# Running a check in a separate process: its result is a line in any case, even after a crash or a hang.


LOG_BYTES, RANK_LOG_BYTES = 8000, 1500  # bytes at the end of a check's output that go into the report
_END = re.compile(r"was killed by \S+|ended with exit code \d+")


def run_isolated(check: DoctorCheck, folder: Path) -> list[CheckResult]:
    """Run a check and return its lines; its output goes into a file in `folder`. This process must have a single
    thread."""
    log, begun = folder / f"{check.name}.log", time.monotonic()
    try:
        answer = fork_call(_answer, check, str(log), timeout_s=check.limit_s)
        lines = [result_from_json(tree) for tree in answer["lines"]]
        if answer["failed"] is not None:
            lines = [make_failure(check, answer["failed"])]
    except PhalanxError as error:  # raised by `fork_call` itself: a timeout, or the kernel had no memory
        late = f"no answer within {check.limit_s:g} s, so it was stopped"
        lines = [
            make_failure(check, late if type(error) is PhalanxError else "it was killed: the machine ran out of memory")
        ]
    except (RuntimeError, OSError) as error:
        lines = [make_failure(check, describe_exit(error))]
    return add_time_and_log(lines, time.monotonic() - begun, log)


def make_failure(check: DoctorCheck, how: str) -> CheckResult:
    """The line of a check that did not finish."""
    return CheckResult(check.name, CheckState.WRONG, f"{how}; {check.remedy}")


def error_reason(error: Exception) -> str:
    """An exception in one line; if `fork_call` passes it on with its traceback, the line below that."""
    below = str(error).rpartition("\n  File ")[2] if isinstance(error, RuntimeError) else ""
    handed_on = re.findall(r"^\w[\w.]*: .*$", below, re.M)
    return handed_on[0] if handed_on else str(describe_exception(error)["reason"])


def describe_exit(error: Exception) -> str:
    """How a process ended, in the words of `fork_call`."""
    found = _END.search(str(error))
    return f"its process {found[0]}" if found else f"it could not be started ({error})"


def add_time_and_log(lines: Sequence[CheckResult], seconds: float, log: Path) -> list[CheckResult]:
    """Add the time to the lines, and the output to those that are not `ok`."""
    said = _tail(log)
    return [
        dataclasses.replace(line, seconds=round(seconds, 2), log=said if line.state == CheckState.WRONG else line.log)
        for line in lines
    ]


def redirect_output(log: str) -> None:
    """Redirect all output of this process and its libraries into a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115


def append_log_tail(log: Path) -> None:
    """Append the end of a rank's log to this check's log."""
    with open(1, "ab", closefd=False) as out:
        out.write(f"--- {log.name}\n".encode() + log.read_bytes()[-RANK_LOG_BYTES:])


def _answer(check: DoctorCheck, log: str) -> dict[str, Any]:
    """Run a check in the child. An exception is part of the result; its traceback is in the log."""
    redirect_output(log)
    try:
        return {"lines": [line.to_json() for line in check.run()], "failed": None}
    except Exception as error:
        traceback.print_exc()
        return {"lines": [], "failed": error_reason(error)}


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace")
    return ""
