"""Running the checks of `phalanx doctor` in order, each in its own process, reported as it ends.

The process of the command never imports torch, which may crash on import: a child process, the examiner, imports it and
forks a process for each check that needs it. It writes results to a file of lines, which the command follows.
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
DRIVER = "check the driver's log (dmesg, nvidia-smi), and reboot the machine if that does not help"


class DoctorListener(Protocol):
    """Observer of the running checks."""

    def begin(self, name: str) -> None:
        """A check begins."""

    def line(self, line: CheckResult) -> None:
        """A check has a result."""


@dataclass(frozen=True)
class DoctorScope:
    """The scope of the checks. `require_accelerators`: missing accelerators are an error; `only`: these checks,
    all if empty."""

    require_accelerators: bool
    run_dir: Path
    cache: Path
    only: tuple[str, ...] = ()

    def includes(self, name: str) -> bool:
        return not self.only or name in self.only


def run_doctor(scope: DoctorScope, folder: Path, listener: DoctorListener) -> list[CheckResult]:
    """Run all checks of a scope, with files in `folder`; passes each line to the listener, and returns all."""
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
            for run in folder.glob(f"{RUNS}/*"):  # a run that was stopped has not removed its files there
                if (kept := shared_memory.find_folder(RunPaths(run))) is not None:
                    shutil.rmtree(kept, ignore_errors=True)
    return lines


def _of_machine(scope: DoctorScope) -> list[DoctorCheck]:
    waits = "check what it is blocked on (ps shows state D)"
    return [
        DoctorCheck("python", machine_checks.check_python, 10.0, waits),
        DoctorCheck("health", functools.partial(machine_checks.check_node, scope.run_dir, scope.cache), 200.0, waits),
        DoctorCheck("network", machine_checks.check_network, 30.0, "check the interface lo and its packet filters"),
        DoctorCheck("slurm", machine_checks.check_slurm, 45.0, "check Slurm's controller (`scontrol ping`)"),
    ]


# ----------------------------------------------------------------------------------------------------- with the library


@dataclass
class _ResultFollower:
    """Follows the results that the examiner writes."""

    file: Path
    listener: DoctorListener
    results: list[CheckResult]
    lines_read: int = 0
    name: str = "torch"
    until: float = 0.0

    def poll(self) -> None:
        """Read new results. Raises PhalanxError if the examiner itself does not respond for too long."""
        told = list(read_lines(self.file))[self.lines_read :] if self.file.exists() else []
        self.lines_read += len(told)
        for each in told:
            if "begin" in each:
                self.name, self.until = each["begin"], time.monotonic() + each["limit_s"] + BESIDE_S
                self.listener.begin(self.name)
            else:
                self.emit(result_from_json(each))
        if self.until and time.monotonic() > self.until:
            raise PhalanxError(f"{self.name} hung")

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
            "no answer in time, so it was stopped"
            if isinstance(error, PhalanxError)
            else machine_checks.describe_exit(error)
        )
        check = DoctorCheck(follower.name, list, 0.0, f"reinstall PyTorch, or {DRIVER}; remaining checks were skipped")
        follower.emit(
            *machine_checks.add_time_and_log([machine_checks.make_failure(check, how)], 0.0, folder / "examiner.log")
        )
    return follower.results


def _examiner(scope: DoctorScope, folder: Path, gpus_of_driver: int | None) -> None:
    """Main function of the examiner, in a child: import torch, find the devices, and fork a process for each check."""
    machine_checks.redirect_output(str(folder / "examiner.log"))
    with open(folder / "lines.jsonl", "a", encoding="utf-8") as file:

        def tell(tree: dict[str, Any]) -> None:
            file.write(json.dumps(tree) + "\n")
            file.flush()

        def directly(check: DoctorCheck) -> bool:
            """Run a check in this process, for its side effects; returns whether to continue."""
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
        again = "reinstall PyTorch in the version that Phalanx requires (pip install --force-reinstall torch)"
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
    """The checks for ranks on devices, one for each device."""
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

    train = functools.partial(check, remedy="see the report for its output; do not train here until the cause is found")
    no_copies = [CheckResult("copies", CheckState.SKIPPED, "ranks on the CPU do not copy to devices")]
    return [
        check("arithmetic", device_checks.check_arithmetic, seconds, len(names), devices),
        check("copies", (lambda: no_copies) if on_cpu else functools.partial(device_checks.check_copies, own)),
        check("attention", device_checks.check_attention, first, remedy="use another version of PyTorch"),
        check("compile", device_checks.check_compile, first, remedy="train with train.compile=false"),
        check("fp8", device_checks.check_fp8, first, remedy="train with train.fp8=none"),
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
