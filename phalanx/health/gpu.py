"""GPU state as reported by the driver, and findings in it. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.health.findings import Finding, Severity

BUSY_SHARE = 0.05  # share of a GPU's memory in use that is reported
RETIRED_PAGES = 60  # NVIDIA's limit for a replacement, of GPUs that retire pages (before Ampere)
CORRECTED_ERRORS = 1000  # since the driver was loaded; a few are normal
NEAR_C = 3  # degrees below the throttling temperature

# Bits of "clocks event reasons" (older drivers: throttle reasons) for which a GPU is slower than it should be; these do
# not include a power cap and an idle GPU.
THROTTLES: Mapping[int, str] = {
    0x08: "hardware slowdown (heat, power or a brake signal)",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "external power brake",
}
# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, by the values of nvmlDeviceGpuRecoveryAction_t.
RECOVERY = {
    0: Severity.OK,
    1: Severity.RESET,
    2: Severity.REBOOT,
    3: Severity.RESET,
    4: Severity.RESET,
}


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses memory of a GPU; `name` is empty if it is not visible from here."""

    pid: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class GpuMemoryErrors:
    """Memory errors of a GPU since the driver was loaded, and repairs of the faulty parts."""

    uncorrected: int | None = None
    corrected: int | None = None
    remap_failed: bool | None = None
    remap_pending: bool | None = None
    retired_pages: int | None = None
    retire_pending: bool | None = None


@dataclass(frozen=True)
class Gpu:
    """The driver's report of one GPU; None for values that it does not report."""

    index: int
    uuid: str = ""
    name: str = ""
    bus: str = ""
    lost: str | None = None  # why the driver cannot access it any more
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    power_w: float | None = None
    throttles: int | None = None  # bits of THROTTLES
    errors: GpuMemoryErrors = GpuMemoryErrors()
    recovery: int | None = None  # a key of RECOVERY
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    links: int | None = None  # number of NVLinks
    links_up: int | None = None
    persistence: bool | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class GpuReading:
    """All GPUs of a node; `problem`: why the driver could not be queried, with its `severity`."""

    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None
    severity: Severity = Severity.UNKNOWN
    driver: str = ""  # driver version


def judge_gpus(
    reading: GpuReading, expected: Sequence[Mapping[str, Any]] | None = None, only: Sequence[str] | None = None
) -> list[Finding]:
    """Findings in the GPUs' state. `expected`: the GPUs of a baseline (`gpu_identity`); `only`: UUIDs of the GPUs
    to check."""
    if reading.problem is not None:
        missing = bool(expected)
        severity = Severity.REBOOT if missing and reading.severity == Severity.UNKNOWN else reading.severity
        return [Finding("gpu driver", severity, reading.problem)]
    gpus = [gpu for gpu in reading.gpus if only is None or gpu.uuid in only or gpu.lost is not None]
    found = [finding for gpu in gpus for check in _CHECKS for finding in check(gpu)]
    if expected is not None:
        found += _compare_with_baseline(gpus, expected)
    if not found:
        count = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"
        driver = f" (driver {reading.driver})" if reading.driver else ""
        sentence = f"{count}{driver}: ok" if gpus else "the driver reports no GPU"
        found.append(Finding("gpus", Severity.OK, sentence, len(gpus), len(gpus)))
    return found


def gpu_identity(gpu: Gpu) -> dict[str, Any]:
    """The baseline record of a GPU."""
    return {
        "uuid": gpu.uuid,
        "name": gpu.name,
        "bus": gpu.bus,
        "memory_bytes": gpu.memory_bytes,
        "pcie_width": gpu.pcie_width_most,
        "links": gpu.links_up,
    }


def recovery_by_bus(reading: GpuReading) -> dict[str, Severity]:
    """The driver's recovery action by bus id, if it reports one."""
    known = {gpu.bus: RECOVERY.get(gpu.recovery) for gpu in reading.gpus if gpu.recovery is not None and not gpu.lost}
    return {bus: severity for bus, severity in known.items() if severity is not None}


def _label(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name or 'of unknown model'}{f' at {gpu.bus}' if gpu.bus else ''})"


def _check_present(gpu: Gpu) -> list[Finding]:
    if gpu.lost is None:
        return []
    sentence = f"the driver has lost {_label(gpu)}: {gpu.lost}; reboot the node, and have the GPU inspected"
    return [Finding("gpu lost", Severity.REBOOT, sentence, where=_where(gpu))]


def _check_recovery_action(gpu: Gpu) -> list[Finding]:
    severity = RECOVERY.get(gpu.recovery, Severity.WATCH) if gpu.recovery is not None else Severity.OK
    if severity == Severity.OK:
        return []
    todo = {
        Severity.RESET: "end its programs and reset it (nvidia-smi --gpu-reset)",
        Severity.REBOOT: "reboot the node",
        Severity.WATCH: "see `nvidia-smi -q` for the action",
    }[severity]
    return [_make_finding(gpu, "recovery action", severity, f"the driver requests a recovery of {_label(gpu)}; {todo}")]


def _check_memory_errors(gpu: Gpu) -> list[Finding]:
    found, errors = [], gpu.errors
    if errors.remap_failed:
        text = f"{_label(gpu)} has no spare rows left to remap faulty memory; drain the node and replace the GPU"
        found.append(_make_finding(gpu, "remapped rows", Severity.ISOLATE, text))
    if errors.uncorrected:
        count = f"{errors.uncorrected} memory error{'' if errors.uncorrected == 1 else 's'}"
        text = f"{_label(gpu)} had {count} that could not be corrected since the driver was loaded"
        # A reset clears the counters, so the errors are recent; but the driver knows better whether a reset is due.
        calm = gpu.recovery == 0
        severity = Severity.WATCH if calm else Severity.RESET
        todo = (
            ("the driver requests no action; reset it when convenient") if calm else "reset it (nvidia-smi --gpu-reset)"
        )
        found.append(_make_finding(gpu, "ecc", severity, f"{text}; {todo}", errors.uncorrected, 0))
    if errors.corrected is not None and errors.corrected >= CORRECTED_ERRORS:
        text = (
            f"{_label(gpu)} had {errors.corrected} corrected memory errors since the driver was loaded; watch whether "
        )
        text += "they increase"
        found.append(_make_finding(gpu, "ecc corrected", Severity.WATCH, text, errors.corrected, CORRECTED_ERRORS))
    if errors.remap_pending or errors.retire_pending:
        text = f"{_label(gpu)} will remap faulty memory at its next reset; reset it when convenient"
        found.append(_make_finding(gpu, "remapped rows", Severity.WATCH, text))
    if errors.retired_pages is not None and errors.retired_pages >= RETIRED_PAGES:
        text = f"{_label(gpu)} has retired {errors.retired_pages} pages of its memory; replace it"
        found.append(_make_finding(gpu, "retired pages", Severity.ISOLATE, text, errors.retired_pages, RETIRED_PAGES))
    return found


def _check_throttling(gpu: Gpu) -> list[Finding]:
    found = []
    for bit, words in THROTTLES.items():
        if gpu.throttles is not None and gpu.throttles & bit:
            text = f"{_label(gpu)} is throttled: {words}; check cooling and power"
            found.append(_make_finding(gpu, "clocks", Severity.WATCH, text, f"0x{gpu.throttles:x}", "0x0"))
            break
    if gpu.temperature_c is not None and gpu.slowdown_c is not None and gpu.temperature_c > gpu.slowdown_c - NEAR_C:
        text = f"{_label(gpu)} has {gpu.temperature_c} degrees and throttles at {gpu.slowdown_c}; check its cooling"
        found.append(
            _make_finding(gpu, "temperature", Severity.WATCH, text, gpu.temperature_c, gpu.slowdown_c - NEAR_C)
        )
    return found


def _check_links(gpu: Gpu) -> list[Finding]:
    found = []
    if gpu.pcie_width is not None and gpu.pcie_width_most is not None and gpu.pcie_width < gpu.pcie_width_most:
        text = (
            f"{_label(gpu)} uses {gpu.pcie_width} of {gpu.pcie_width_most} PCI Express lanes, so copies to it are "
            "slower; if its slot has all of them, reseat it"
        )
        found.append(_make_finding(gpu, "pcie width", Severity.WATCH, text, gpu.pcie_width, gpu.pcie_width_most))
    if gpu.links_up and gpu.links is not None and gpu.links_up < gpu.links:
        text = (
            f"{_label(gpu)} has {gpu.links_up} of {gpu.links} NVLinks up, so collectives are slower; reset it, and "
            "have it inspected if that does not help"
        )
        found.append(_make_finding(gpu, "nvlink", Severity.WATCH, text, gpu.links_up, gpu.links))
    return found


def _check_free(gpu: Gpu) -> list[Finding]:
    used, whole = gpu.memory_used_bytes, gpu.memory_bytes
    if used is None or not whole or used <= BUSY_SHARE * whole:
        return []
    seen = [f"{process.name or 'process'} ({process.pid})" for process in gpu.processes]
    who = f"by {', '.join(seen)}; end leftover processes" if seen else "by no process visible from here"
    free = f"{(whole - used) / 2**30:.1f} of {whole / 2**30:.1f} GiB of its memory are free"
    text = f"{_label(gpu)} is already in use {who}: only {free}"
    return [_make_finding(gpu, "gpu memory", Severity.WATCH, text, used, int(BUSY_SHARE * whole))]


def _check_persistence(gpu: Gpu) -> list[Finding]:
    if gpu.persistence is not False:
        return []
    text = (
        f"the driver unloads {_label(gpu)} whenever no program uses it, which slows each start; enable persistence "
        "mode (nvidia-smi -pm 1)"
    )
    return [_make_finding(gpu, "persistence", Severity.WATCH, text)]


_CHECKS: Sequence[Callable[[Gpu], list[Finding]]] = (
    _check_present,
    _check_recovery_action,
    _check_memory_errors,
    _check_throttling,
    _check_links,
    _check_free,
    _check_persistence,
)


def _compare_with_baseline(gpus: Sequence[Gpu], expected: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Compare GPUs with a baseline: missing or replaced GPUs, fewer lanes or links."""
    there = {gpu.uuid: gpu for gpu in gpus if gpu.lost is None}
    missing = [known for known in expected if known["uuid"] not in there]
    new = [gpu for uuid, gpu in there.items() if uuid not in {known["uuid"] for known in expected}]
    found = []
    if len(missing) > len(new):
        names = ", ".join(f"{known['name']} at {known['bus']} ({known['uuid']})" for known in missing)
        text = f"{len(there)} GPUs are there and {len(expected)} are expected; missing: {names}; reboot the node"
        found.append(Finding("gpu count", Severity.REBOOT, text, len(there), len(expected)))
    elif missing or new:
        text = (
            f"{len(new)} GPU{'' if len(new) == 1 else 's'} of this node are not in the baseline; if that is "
            "intended, write a new one with --save-baseline"
        )
        found.append(Finding("gpu identity", Severity.WATCH, text, len(there), len(expected)))
    for known in expected:
        gpu = there.get(known["uuid"])
        if gpu is not None:
            found += _fewer(gpu, "pcie width", gpu.pcie_width_most, known.get("pcie_width"), "PCI Express lanes")
            found += _fewer(gpu, "nvlink", gpu.links_up, known.get("links"), "NVLinks")
    return found


def _fewer(gpu: Gpu, check: str, now: int | None, before: int | None, what: str) -> list[Finding]:
    if now is None or before is None or now >= before:
        return []
    text = f"{_label(gpu)} has {now} {what} and had {before}; reset it, and reseat it if that does not help"
    return [_make_finding(gpu, check, Severity.RESET, text, now, before)]


def _make_finding(
    gpu: Gpu, check: str, severity: Severity, text: str, value: float | str | None = None, limit: Any = None
) -> Finding:
    return Finding(check, severity, text, value, limit, _where(gpu))


def _where(gpu: Gpu) -> str:
    return gpu.uuid or gpu.bus or f"GPU {gpu.index}"
