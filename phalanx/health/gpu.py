"""GPUs as their driver describes them, and what of it is worth a word. Pure: it takes what was read, however."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.health.findings import Finding, Severity

BUSY_SHARE = 0.05  # of a GPU's memory that may be in use before it is worth a word
RETIRED_PAGES = 60  # NVIDIA's bound for a replacement, of GPUs that retire pages (before Ampere)
NEAR_C = 3  # degrees below the point where a GPU slows itself down

# Bits of "clocks event reasons" (older drivers: throttle reasons) by which a GPU is slower than it should be; a power
# cap and an idle GPU are none of them.
THROTTLES: Mapping[int, str] = {
    0x08: "the hardware slows it down (heat, power or a brake signal)",
    0x20: "the driver slows it down for heat",
    0x40: "the hardware slows it down for heat",
    0x80: "an external power brake slows it down",
}
# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, in nvmlDeviceGpuRecoveryAction_t's numbers.
RECOVERY = {
    0: Severity.OK,
    1: Severity.RESET,
    2: Severity.REBOOT,
    3: Severity.RESET,
    4: Severity.RESET,
}


@dataclass(frozen=True)
class GpuProcess:
    """A program that holds memory of a GPU; `name` is empty where it cannot be seen from here."""

    pid: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """What one GPU's driver says; None where it says nothing."""

    index: int
    uuid: str = ""
    name: str = ""
    bus: str = ""
    lost: str | None = None  # why the driver cannot speak of it any more
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    throttles: int | None = None  # bits of THROTTLES
    uncorrected: int | None = None  # ECC errors since the driver was loaded
    remap_failed: bool | None = None
    remap_pending: bool | None = None
    retired_pages: int | None = None
    retire_pending: bool | None = None
    recovery: int | None = None  # a key of RECOVERY
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    links: int | None = None  # NVLinks that it has
    links_up: int | None = None
    persistence: bool | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class GpuReading:
    """All GPUs of a node; `problem` where the driver could not be asked, `severity` what follows from that."""

    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None
    severity: Severity = Severity.UNKNOWN
    driver: str = ""  # its version


def judge_gpus(
    reading: GpuReading, expected: Sequence[Mapping[str, Any]] | None = None, only: Sequence[str] | None = None
) -> list[Finding]:
    """What is worth a word. `expected`: the GPUs of a baseline (`gpu_identity`); `only`: UUIDs of those that are
    meant."""
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
        sentence = f"nothing is wrong with {count}{driver}" if gpus else "the driver knows of no GPU"
        found.append(Finding("gpus", Severity.OK, sentence, len(gpus), len(gpus)))
    return found


def gpu_identity(gpu: Gpu) -> dict[str, Any]:
    """What a baseline remembers of a GPU."""
    return {
        "uuid": gpu.uuid,
        "name": gpu.name,
        "bus": gpu.bus,
        "memory_bytes": gpu.memory_bytes,
        "pcie_width": gpu.pcie_width_most,
        "links": gpu.links_up,
    }


def recovery_by_bus(reading: GpuReading) -> dict[str, Severity]:
    """What the driver says is to be done, by place on the bus, as far as it says anything."""
    known = {gpu.bus: RECOVERY.get(gpu.recovery) for gpu in reading.gpus if gpu.recovery is not None and not gpu.lost}
    return {bus: severity for bus, severity in known.items() if severity is not None}


def _label(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name or 'of unknown model'}{f' at {gpu.bus}' if gpu.bus else ''})"


def _check_present(gpu: Gpu) -> list[Finding]:
    if gpu.lost is None:
        return []
    sentence = f"the driver has lost {_label(gpu)}: {gpu.lost}; reboot the node, and have the GPU looked at"
    return [Finding("gpu lost", Severity.REBOOT, sentence, where=_where(gpu))]


def _check_recovery_action(gpu: Gpu) -> list[Finding]:
    severity = RECOVERY.get(gpu.recovery, Severity.WATCH) if gpu.recovery is not None else Severity.OK
    if severity == Severity.OK:
        return []
    todo = {
        Severity.RESET: "end its programs and reset it (nvidia-smi --gpu-reset)",
        Severity.REBOOT: "reboot the node",
        Severity.WATCH: "see `nvidia-smi -q` for what it asks for",
    }[severity]
    return [_make_finding(gpu, "recovery action", severity, f"the driver asks for a recovery of {_label(gpu)}; {todo}")]


def _check_memory_errors(gpu: Gpu) -> list[Finding]:
    found = []
    if gpu.remap_failed:
        text = f"{_label(gpu)} has no spare rows left for broken memory; take the node out and have the GPU replaced"
        found.append(_make_finding(gpu, "remapped rows", Severity.ISOLATE, text))
    if gpu.uncorrected:
        errors = f"{gpu.uncorrected} memory error{'' if gpu.uncorrected == 1 else 's'}"
        text = f"{_label(gpu)} had {errors} that could not be corrected since the driver was loaded"
        # A reset takes the counters back, so they are of now; but the driver knows better whether one is due.
        calm = gpu.recovery == 0
        severity = Severity.WATCH if calm else Severity.RESET
        todo = "the driver asks for nothing; reset it when convenient" if calm else "reset it (nvidia-smi --gpu-reset)"
        found.append(_make_finding(gpu, "ecc", severity, f"{text}; {todo}", gpu.uncorrected, 0))
    if gpu.remap_pending or gpu.retire_pending:
        text = f"{_label(gpu)} is to put broken memory out of use at its next reset; reset it when convenient"
        found.append(_make_finding(gpu, "remapped rows", Severity.WATCH, text))
    if gpu.retired_pages is not None and gpu.retired_pages >= RETIRED_PAGES:
        text = f"{_label(gpu)} has put {gpu.retired_pages} pages of its memory out of use; have it replaced"
        found.append(_make_finding(gpu, "retired pages", Severity.ISOLATE, text, gpu.retired_pages, RETIRED_PAGES))
    return found


def _check_throttling(gpu: Gpu) -> list[Finding]:
    found = []
    for bit, words in THROTTLES.items():
        if gpu.throttles is not None and gpu.throttles & bit:
            text = f"{_label(gpu)} is slower than it could be: {words}; look at cooling and power"
            found.append(_make_finding(gpu, "clocks", Severity.WATCH, text, f"0x{gpu.throttles:x}", "0x0"))
            break
    if gpu.temperature_c is not None and gpu.slowdown_c is not None and gpu.temperature_c > gpu.slowdown_c - NEAR_C:
        text = (
            f"{_label(gpu)} has {gpu.temperature_c} degrees and slows itself down at {gpu.slowdown_c}; look at its "
            "cooling"
        )
        found.append(
            _make_finding(gpu, "temperature", Severity.WATCH, text, gpu.temperature_c, gpu.slowdown_c - NEAR_C)
        )
    return found


def _check_links(gpu: Gpu) -> list[Finding]:
    found = []
    if gpu.pcie_width is not None and gpu.pcie_width_most is not None and gpu.pcie_width < gpu.pcie_width_most:
        text = (
            f"{_label(gpu)} uses {gpu.pcie_width} of {gpu.pcie_width_most} PCI Express lanes, so copies to it are "
            "slower; if its slot has all of them, have it reseated"
        )
        found.append(_make_finding(gpu, "pcie width", Severity.WATCH, text, gpu.pcie_width, gpu.pcie_width_most))
    if gpu.links_up and gpu.links is not None and gpu.links_up < gpu.links:
        text = (
            f"{_label(gpu)} has {gpu.links_up} of {gpu.links} NVLinks up, so collectives are slower; reset it, and "
            "have it looked at if that does not help"
        )
        found.append(_make_finding(gpu, "nvlink", Severity.WATCH, text, gpu.links_up, gpu.links))
    return found


def _check_free(gpu: Gpu) -> list[Finding]:
    used, whole = gpu.memory_used_bytes, gpu.memory_bytes
    if used is None or not whole or used <= BUSY_SHARE * whole:
        return []
    seen = [f"{process.name or 'process'} ({process.pid})" for process in gpu.processes]
    who = f"by {', '.join(seen)}; end what is left over" if seen else "by no program that can be seen from here"
    free = f"{(whole - used) / 2**30:.1f} of {whole / 2**30:.1f} GiB of its memory are free"
    text = f"{_label(gpu)} is in use already, so only {free}: it is held {who}"
    return [_make_finding(gpu, "gpu memory", Severity.WATCH, text, used, int(BUSY_SHARE * whole))]


def _check_persistence(gpu: Gpu) -> list[Finding]:
    if gpu.persistence is not False:
        return []
    text = (
        f"the driver forgets {_label(gpu)} whenever no program uses it, which makes each start slower; switch "
        "persistence on (nvidia-smi -pm 1)"
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
    """GPUs against a baseline: one that is missing, another one, fewer lanes or links than there were."""
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
            f"{len(new)} GPU{'' if len(new) == 1 else 's'} of this node are not those of the baseline; if that was "
            "meant, write a new one with --save-baseline"
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
    text = f"{_label(gpu)} has {now} {what} and had {before}; reset it, and have it reseated if that does not help"
    return [_make_finding(gpu, check, Severity.RESET, text, now, before)]


def _make_finding(
    gpu: Gpu, check: str, severity: Severity, text: str, value: float | str | None = None, limit: Any = None
) -> Finding:
    return Finding(check, severity, text, value, limit, _where(gpu))


def _where(gpu: Gpu) -> str:
    return gpu.uuid or gpu.bus or f"GPU {gpu.index}"
