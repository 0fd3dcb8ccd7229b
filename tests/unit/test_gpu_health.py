"""What is said of GPUs, by facts as NVIDIA's driver gives them; no GPU is needed."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx.health.findings import Severity, verdict
from phalanx.health.gpu import (
    CORRECTED_ERRORS,
    Gpu,
    GpuMemoryErrors,
    GpuProcess,
    GpuReading,
    gpu_identity,
    judge_gpus,
    recovery_by_bus,
)

# An H100 as it is when nothing is wrong, as nvidia-ml-py reports it.
WELL = Gpu(
    index=0,
    uuid="GPU-0",
    name="NVIDIA H100 80GB HBM3",
    bus="0000:3b:00",
    memory_bytes=85520809984,
    memory_used_bytes=650117120,
    temperature_c=34,
    slowdown_c=87,
    throttles=0x1,  # idle
    errors=GpuMemoryErrors(uncorrected=0, corrected=3, remap_failed=False, remap_pending=False),
    recovery=0,
    pcie_width=16,
    pcie_width_most=16,
    links=18,
    links_up=18,
    persistence=True,
)


def of(**changes: Any) -> list[tuple[str, Severity]]:
    found = judge_gpus(GpuReading((replace(WELL, **changes),)))
    assert all(each.sentence for each in found)
    return [(each.check, each.severity) for each in found]


def test_a_gpu_of_which_all_is_well() -> None:
    assert of() == [("gpus", Severity.OK)]
    assert of(throttles=0x1 | 0x4) == [("gpus", Severity.OK)]  # a power cap is no fault
    assert judge_gpus(GpuReading((Gpu(0, "GPU-0"),)))[0].severity == Severity.OK  # a driver that answers nothing else


@pytest.mark.parametrize(
    ("changes", "check", "severity"),
    [
        ({"lost": "GPU is lost"}, "gpu lost", Severity.REBOOT),
        ({"recovery": 1}, "recovery action", Severity.RESET),
        ({"recovery": 2}, "recovery action", Severity.REBOOT),
        ({"recovery": 4}, "recovery action", Severity.RESET),
        ({"recovery": 77}, "recovery action", Severity.WATCH),
        ({"errors": GpuMemoryErrors(uncorrected=2), "recovery": None}, "ecc", Severity.RESET),
        ({"errors": GpuMemoryErrors(corrected=CORRECTED_ERRORS)}, "ecc corrected", Severity.WATCH),
        ({"errors": GpuMemoryErrors(uncorrected=2)}, "ecc", Severity.WATCH),  # the driver asks for nothing
        ({"errors": GpuMemoryErrors(remap_failed=True)}, "remapped rows", Severity.ISOLATE),
        ({"errors": GpuMemoryErrors(remap_pending=True)}, "remapped rows", Severity.WATCH),
        ({"errors": GpuMemoryErrors(retire_pending=True)}, "remapped rows", Severity.WATCH),
        ({"errors": GpuMemoryErrors(retired_pages=60)}, "retired pages", Severity.ISOLATE),
        ({"throttles": 0x48}, "clocks", Severity.WATCH),
        ({"throttles": 0x80}, "clocks", Severity.WATCH),
        ({"temperature_c": 86}, "temperature", Severity.WATCH),
        ({"pcie_width": 8}, "pcie width", Severity.WATCH),
        ({"links_up": 17}, "nvlink", Severity.WATCH),
        ({"persistence": False}, "persistence", Severity.WATCH),
        ({"memory_used_bytes": 40 * 2**30}, "gpu memory", Severity.WATCH),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], check: str, severity: Severity) -> None:
    assert of(**changes) == [(check, severity)]


def test_just_below_a_limit_nothing_is_said() -> None:
    assert of(
        temperature_c=84, errors=GpuMemoryErrors(retired_pages=59), memory_used_bytes=int(0.05 * WELL.memory_bytes)
    ) == [("gpus", Severity.OK)]
    assert of(links_up=0) == [("gpus", Severity.OK)]  # a board whose links lead nowhere


def test_who_holds_memory_is_named() -> None:
    left = (GpuProcess(4711, "python", 2**34), GpuProcess(12, "", None))
    found = judge_gpus(GpuReading((replace(WELL, memory_used_bytes=2**34, processes=left),)))
    assert "python (4711), process (12)" in found[0].sentence
    assert (
        "no process visible from here" in judge_gpus(GpuReading((replace(WELL, memory_used_bytes=2**34),)))[0].sentence
    )


def test_a_driver_that_cannot_be_asked() -> None:
    broken = judge_gpus(GpuReading(problem="mismatch; reboot the node", severity=Severity.REBOOT))
    assert verdict(broken) == Severity.REBOOT
    assert verdict(judge_gpus(GpuReading(problem="no driver here"))) == Severity.UNKNOWN
    # Where GPUs are expected, no driver is no excuse.
    assert verdict(judge_gpus(GpuReading(problem="no driver here"), [gpu_identity(WELL)])) == Severity.REBOOT


def test_a_node_against_its_baseline() -> None:
    two = (WELL, replace(WELL, index=1, uuid="GPU-1", bus="0000:5e:00"))
    expected = [gpu_identity(gpu) for gpu in two]

    def against(*gpus: Gpu) -> list[tuple[str, Severity]]:
        return [(each.check, each.severity) for each in judge_gpus(GpuReading(gpus), expected)]

    assert against(*two) == [("gpus", Severity.OK)]
    assert against(two[0]) == [("gpu count", Severity.REBOOT)]
    assert against() == [("gpu count", Severity.REBOOT)]
    assert against(two[0], replace(two[1], uuid="GPU-9")) == [("gpu identity", Severity.WATCH)]
    assert against(*two, replace(WELL, index=2, uuid="GPU-2")) == [("gpu identity", Severity.WATCH)]
    slower = replace(two[1], pcie_width=8, pcie_width_most=8, links=12, links_up=12)
    assert against(two[0], slower) == [("pcie width", Severity.RESET), ("nvlink", Severity.RESET)]
    lost = judge_gpus(GpuReading((two[0], Gpu(1, lost="GPU is lost"))), expected)
    assert [each.check for each in lost] == ["gpu lost", "gpu count"]


def test_only_the_gpus_that_are_meant_count() -> None:
    two = (WELL, replace(WELL, index=1, uuid="GPU-1", bus="0000:5e:00", errors=GpuMemoryErrors(remap_failed=True)))
    assert verdict(judge_gpus(GpuReading(two), only=["GPU-0"])) == Severity.OK
    assert verdict(judge_gpus(GpuReading(two), only=["GPU-1"])) == Severity.ISOLATE


def test_the_drivers_own_advice_by_place_on_the_bus() -> None:
    other = replace(WELL, bus="0000:5e:00", recovery=2)
    silent = replace(WELL, bus="0000:86:00", recovery=None)
    reading = GpuReading((WELL, other, silent, Gpu(3, bus="0000:af:00", recovery=0, lost="GPU is lost")))
    assert recovery_by_bus(reading) == {"0000:3b:00": Severity.OK, "0000:5e:00": Severity.REBOOT}
