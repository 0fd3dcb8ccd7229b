"""All checks of `phalanx doctor` in their order, each carried out in a process of its own, and told of as it ends.

The process of the command never imports torch, which may crash as it is loaded: a child does, the examiner, and forks a
process for each check that needs it. It tells what it does in a file of lines, which the command follows.
"""

import functools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phalanx.core.errors import PhalanxError
from phalanx.core.json_lines import read_lines
from phalanx.core.run_paths import RunPaths
from phalanx.doctor import machine_checks
from phalanx.doctor.results import LIBRARY, PROOFS, CheckResult, CheckState, DoctorCheck, result_from_json
from phalanx.elastic.node import agent
from phalanx.health.findings import DEVICES_TIMEOUT_S, PRELOAD, DeviceInfo, preload_and_find_devices
from phalanx.recovery import shared_memory
from phalanx.system.fork import fork_call

RUNS = "runs"
IMPORT_S = 180.0
CPU_RANKS = 2
ARITHMETIC_S, ARITHMETIC_ON_HOST_S = 3.0, 0.5
PROOF_S, PROOF_ON_HOST_S = 150.0, 90.0
BESIDE_S = 30.0  # beyond a check's own limit, after which the examiner itself must hang
DRIVER = "look at the driver's log (dmesg, nvidia-smi), reboot the machine if that does not help"


class DoctorListener(Protocol):
    """Who is told of the examination as it goes on."""

    def begin(self, name: str) -> None:
        """A check begins."""

    def line(self, line: CheckResult) -> None:
        """A check has said something."""


@dataclass(frozen=True)
class DoctorScope:
    """What is examined. `require_accelerators`: it is about accelerators, and wrong where there is none; `only`: these
    checks, all if there is none."""

    require_accelerators: bool
    run_dir: Path
    cache: Path
    only: tuple[str, ...] = ()

    def includes(self, name: str) -> bool:
        return not self.only or name in self.only


def run_doctor(scope: DoctorScope, folder: Path, listener: DoctorListener) -> list[CheckResult]:
    """Carry all checks of a scope out, with files in `folder`; tells of each line, and returns all."""
    lines: list[CheckResult] = []
    for check in _of_machine(scope):
        if scope.includes(check.name):
            listener.begin(check.name)
            for line in machine_checks.run_isolated(check, folder):
                listener.line(line)
                lines.append(line)
    if scope.require_accelerators or any(scope.includes(name) for name in (*LIBRARY, *PROOFS)):
        gpus = [line.value for line in lines if line.check == "gpus" and isinstance(line.value, int | float)]
        try:
            lines += _run_examiner(scope, folder, listener, int(gpus[0]) if gpus else None)
        finally:
            for run in folder.glob(f"{RUNS}/*"):  # one that was ended has not taken away what it kept there
                if (kept := shared_memory.find_folder(RunPaths(run))) is not None:
                    shutil.rmtree(kept, ignore_errors=True)
    return lines


def _of_machine(scope: DoctorScope) -> list[DoctorCheck]:
    waits = "look for what it waits on (ps shows state D)"
    return [
        DoctorCheck("python", machine_checks.check_python, 10.0, waits),
        DoctorCheck("health", functools.partial(machine_checks.check_node, scope.run_dir, scope.cache), 200.0, waits),
        DoctorCheck(
            "network", machine_checks.check_network, 30.0, "look at the interface lo, and at what filters its packets"
        ),
        DoctorCheck("slurm", machine_checks.check_slurm, 45.0, "look at Slurm's controller (`scontrol ping`)"),
    ]


# ----------------------------------------------------------------------------------------------------- with the library


@dataclass
class _ResultFollower:
    """What the examiner has written, read on by the command."""

    file: Path
    listener: DoctorListener
    results: list[CheckResult]
    lines_read: int = 0
    name: str = "torch"
    until: float = 0.0

    def poll(self) -> None:
        """Raises PhalanxError where the examiner itself says nothing for too long."""
        told = list(read_lines(self.file))[self.lines_read :] if self.file.exists() else []
        self.lines_read += len(told)
        for each in told:
            if "begin" in each:
                self.name, self.until = each["begin"], time.monotonic() + each["limit_s"] + BESIDE_S
                self.listener.begin(self.name)
            else:
                self.emit(result_from_json(each))
        if self.until and time.monotonic() > self.until:
            raise PhalanxError(f"{self.name} has hung")

    def emit(self, result: CheckResult) -> None:
        self.results.append(result)
        self.listener.line(result)


def _run_examiner(
    scope: DoctorScope, folder: Path, listener: DoctorListener, gpus_of_driver: int | None
) -> list[CheckResult]:
    follower = _ResultFollower(folder / "lines.jsonl", listener, [])
    try:
        fork_call(_examiner, scope, folder, gpus_of_driver, timeout_s=None, meanwhile=follower.poll)
        follower.poll()
    except (PhalanxError, RuntimeError, OSError) as error:
        how = (
            "no answer in time, so it was ended"
            if isinstance(error, PhalanxError)
            else machine_checks.describe_exit(error)
        )
        check = DoctorCheck(follower.name, list, 0.0, f"install PyTorch anew, or {DRIVER}; nothing more was tried")
        follower.emit(
            *machine_checks.add_time_and_log([machine_checks.make_failure(check, how)], 0.0, folder / "examiner.log")
        )
    return follower.results


def _examiner(scope: DoctorScope, folder: Path, gpus_of_driver: int | None) -> None:
    """In a child: import torch, find the devices, and have a process for each proof."""
    machine_checks.redirect_output(str(folder / "examiner.log"))
    with open(folder / "lines.jsonl", "a", encoding="utf-8") as file:

        def tell(tree: dict[str, Any]) -> None:
            file.write(json.dumps(tree) + "\n")
            file.flush()

        def directly(check: DoctorCheck) -> bool:
            """By this process itself, for what it leaves behind; returns whether to go on."""
            tell({"begin": check.name, "limit_s": check.limit_s})
            begun = time.monotonic()
            try:
                lines = check.run()
            except Exception as error:
                lines = [machine_checks.make_failure(check, machine_checks.error_reason(error))]
            lines = machine_checks.add_time_and_log(lines, time.monotonic() - begun, folder / "examiner.log")
            for line in lines:
                tell(line.to_json())
            return all(line.state != CheckState.WRONG for line in lines)

        found: dict[str, Any] = {}
        again = "install PyTorch anew, of the version that Phalanx asks for (pip install --force-reinstall torch)"
        if not directly(DoctorCheck("torch", _library, IMPORT_S, again)):
            return
        look = functools.partial(_devices, scope, gpus_of_driver, found)
        if not directly(DoctorCheck("devices", look, DEVICES_TIMEOUT_S, DRIVER)):
            return
        for check in _proofs(found["devices"], folder):
            if scope.includes(check.name):
                tell({"begin": check.name, "limit_s": check.limit_s})
                for line in machine_checks.run_isolated(check, folder):
                    tell(line.to_json())


def _library() -> list[CheckResult]:
    agent.preload(PRELOAD)
    return machine_checks.check_torch()


def _devices(scope: DoctorScope, gpus_of_driver: int | None, found: dict[str, Any]) -> list[CheckResult]:
    devices, accelerators = preload_and_find_devices(on_cpu=False)
    names = accelerators or ["cpu"] * CPU_RANKS
    found["devices"] = [devices[name] for name in names]
    return machine_checks.check_devices(devices, accelerators, scope.require_accelerators, gpus_of_driver)


def _proofs(devices: Sequence[DeviceInfo], folder: Path) -> list[DoctorCheck]:
    """The proofs for ranks on devices, one for each."""
    from phalanx.doctor import collective_checks, device_checks, training_checks

    names = [device.name for device in devices]
    own, on_cpu = list(dict.fromkeys(names)), names[0] == "cpu"
    limit_s, seconds = (PROOF_ON_HOST_S, ARITHMETIC_ON_HOST_S) if on_cpu else (PROOF_S, ARITHMETIC_S)
    first, place = names[0], training_checks.TrainingTestbed(folder / RUNS, tuple(names))
    place.folder.mkdir()

    def check(
        name: str, function: Callable[..., list[CheckResult]], *arguments: Any, remedy: str = DRIVER
    ) -> DoctorCheck:
        return DoctorCheck(name, functools.partial(function, *arguments), limit_s, remedy)

    train = functools.partial(check, remedy="the report has what it said; do not train here before this is found")
    no_copies = [CheckResult("copies", CheckState.SKIPPED, "ranks on the CPU copy nothing to a device")]
    return [
        check("arithmetic", device_checks.check_arithmetic, seconds, len(names), devices),
        check("copies", (lambda: no_copies) if on_cpu else functools.partial(device_checks.check_copies, own)),
        check("attention", device_checks.check_attention, first, remedy="use another version of PyTorch"),
        check("compile", device_checks.check_compile, first, remedy="train with train.compile=false"),
        check("memory-limit", device_checks.check_memory_limit, own),
        check(
            "collectives",
            collective_checks.check_collectives,
            folder / "exchange",
            names,
            remedy=collective_checks.REMEDIES[collective_checks.OWN],
        ),
        train("one-rank", training_checks.check_one_rank, place),
        *(train(f"zero-{zero}", training_checks.check_zero, place, zero) for zero in (1, 2, 3)),
        train("resume", training_checks.check_resume, place),
        train("time-limit", training_checks.check_hang, place),
    ]
