"""What NVIDIA's management library (NVML, by nvidia-ml-py) says of a node's GPUs.

It needs no rights and takes no GPU memory, but may hang on a sick device: callers ask in a process of their own.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.health.findings import Severity
from phalanx.health.gpu import Gpu, GpuProcess, GpuReading
from phalanx.health.xid import normalize_bus_id


class _DeviceLost(Exception):
    """The driver has no hold of the device any more."""


def read_gpus() -> GpuReading:
    """All GPUs that this node's NVIDIA driver shows to this user."""
    import pynvml  # only here: it loads the driver's library

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _unreachable(nvml, error)
    try:
        count = nvml.nvmlDeviceGetCount()
        gpus = tuple(_gpu(nvml, index) for index in range(count))
        return GpuReading(gpus, driver=_driver(nvml))
    except nvml.NVMLError as error:
        return _unreachable(nvml, error)
    finally:
        nvml.nvmlShutdown()


def _driver(nvml: Any) -> str:
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:  # it speaks of its GPUs, which is what matters
        return ""


def _unreachable(nvml: Any, error: Any) -> GpuReading:
    if error.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        text = "the NVIDIA driver was updated, but an older one still runs in the kernel; reboot the node"
        return GpuReading(problem=text, severity=Severity.REBOOT)
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return GpuReading(problem="there is no NVIDIA driver here, so nothing is known of GPUs")
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED and os.path.exists("/dev/nvidiactl"):
        return GpuReading(
            problem="the NVIDIA driver is installed but not loaded; reboot the node", severity=Severity.REBOOT
        )
    return GpuReading(problem=f"the NVIDIA driver does not speak of its GPUs ({error})")


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return Gpu(index, lost=str(error))

    def ask(name: str, *arguments: Any) -> Any:
        """What a function of the library says; None where this driver, GPU or user has no answer."""
        function = getattr(nvml, name, None)
        if function is None:
            return None
        try:
            return function(handle, *arguments)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise _DeviceLost(str(error)) from None
            return None

    known: dict[str, Any] = {}
    try:
        pci = ask("nvmlDeviceGetPciInfo")
        if pci is not None:
            known["bus"] = normalize_bus_id(_text(pci.busId))
        known["uuid"], known["name"] = _text(ask("nvmlDeviceGetUUID")), _text(ask("nvmlDeviceGetName"))
        known |= _state(nvml, ask)
    except _DeviceLost as lost:
        return Gpu(index, lost=str(lost), **{key: known[key] for key in ("bus", "uuid", "name") if key in known})
    return Gpu(index, **known)


def _state(nvml: Any, ask: Callable[..., Any]) -> dict[str, Any]:
    memory = ask("nvmlDeviceGetMemoryInfo")
    rows = ask("nvmlDeviceGetRemappedRows")  # corrected, not corrected, pending, failed
    throttles = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if throttles is None:
        throttles = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    causes = (
        nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    pages = [ask("nvmlDeviceGetRetiredPages", cause) for cause in causes]
    links = [ask("nvmlDeviceGetNvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    present = [state for state in links if state is not None]
    persistence, pending = ask("nvmlDeviceGetPersistenceMode"), ask("nvmlDeviceGetRetiredPagesPendingStatus")
    return {
        "memory_bytes": None if memory is None else int(memory.total),
        "memory_used_bytes": None if memory is None else int(memory.used),
        "temperature_c": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "slowdown_c": ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        "throttles": throttles,
        "uncorrected": ask("nvmlDeviceGetTotalEccErrors", uncorrected, nvml.NVML_VOLATILE_ECC),
        "remap_failed": None if rows is None else bool(rows[3]),
        "remap_pending": None if rows is None else bool(rows[2]),
        "retired_pages": None if None in pages else sum(len(each) for each in pages),
        "retire_pending": None if pending is None else bool(pending),
        "recovery": _field(nvml, ask, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_width_most": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "links": len(present) if present else None,
        "links_up": sum(bool(state) for state in present) if present else None,
        "persistence": None if persistence is None else bool(persistence),
        "processes": tuple(_process(each) for each in ask("nvmlDeviceGetComputeRunningProcesses") or ()),
    }


def _field(nvml: Any, ask: Callable[..., Any], name: str) -> int | None:
    """One of the numbered fields, where library and driver know it."""
    number = getattr(nvml, name, None)
    values = None if number is None else ask("nvmlDeviceGetFieldValues", [number])
    if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def _process(known: Any) -> GpuProcess:
    try:
        name = Path(f"/proc/{known.pid}/comm").read_text().strip()
    except OSError:  # it has ended, or belongs to another container
        name = ""
    return GpuProcess(int(known.pid), name, known.usedGpuMemory)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
