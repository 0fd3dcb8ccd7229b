"""GPU state from NVIDIA's management library (NVML, by nvidia-ml-py).

It needs no permissions and takes no GPU memory, but may hang on a faulty device: callers use a separate process.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.health.findings import Severity
from phalanx.health.gpu import Gpu, GpuMemoryErrors, GpuProcess, GpuReading
from phalanx.health.xid import normalize_bus_id


class _DeviceLost(Exception):
    """The driver has lost the device."""


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


@contextlib.contextmanager
def keep_open() -> Iterator[None]:
    """Keep the driver's library open, so that not every reading opens it; no effect without the library."""
    import pynvml

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield
        return
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _driver(nvml: Any) -> str:
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:  # the version is not essential
        return ""


def _unreachable(nvml: Any, error: Any) -> GpuReading:
    if error.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        text = "the NVIDIA driver was updated, but the kernel still runs an older one; reboot the node"
        return GpuReading(problem=text, severity=Severity.REBOOT)
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return GpuReading(problem="no NVIDIA driver is installed, so GPUs are not checked")
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED and os.path.exists("/dev/nvidiactl"):
        return GpuReading(
            problem="the NVIDIA driver is installed but not loaded; reboot the node", severity=Severity.REBOOT
        )
    return GpuReading(problem=f"the NVIDIA driver cannot list its GPUs ({error})")


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return Gpu(index, lost=str(error))

    def ask(name: str, *arguments: Any) -> Any:
        """Call a function of the library; None if this driver, GPU or user gets no answer."""
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
    rows = ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
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
    power = ask("nvmlDeviceGetPowerUsage")  # in mW
    persistence, pending = ask("nvmlDeviceGetPersistenceMode"), ask("nvmlDeviceGetRetiredPagesPendingStatus")
    return {
        "memory_bytes": None if memory is None else int(memory.total),
        "memory_used_bytes": None if memory is None else int(memory.used),
        "temperature_c": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "slowdown_c": ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        "power_w": None if power is None else power / 1000,
        "throttles": throttles,
        "errors": GpuMemoryErrors(
            ask("nvmlDeviceGetTotalEccErrors", uncorrected, nvml.NVML_VOLATILE_ECC),
            ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC),
            None if rows is None else bool(rows[3]),
            None if rows is None else bool(rows[2]),
            None if None in pages else sum(len(each) for each in pages),
            None if pending is None else bool(pending),
        ),
        "recovery": _field(nvml, ask, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_width_most": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "links": len(present) if present else None,
        "links_up": sum(bool(state) for state in present) if present else None,
        "persistence": None if persistence is None else bool(persistence),
        "processes": tuple(_process(each) for each in ask("nvmlDeviceGetComputeRunningProcesses") or ()),
    }


def _field(nvml: Any, ask: Callable[..., Any], name: str) -> int | None:
    """Read a numbered field, if library and driver support it."""
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
