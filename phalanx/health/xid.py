"""Meaning and remedy of the NVIDIA driver's Xid errors in the kernel log.

The table follows the column "Immediate Action" of NVIDIA's Xid Catalog (docs.nvidia.com/deploy/xid-errors, "Analyzing
Xid Errors with the Xid Catalog", for Ampere and newer GPUs): RESET_GPU is a reset, RESTART_BM a reboot, and
CHECK_MECHANICALS an isolation; RESTART_APP and IGNORE have at most severity `watch`. An Xid 154 names the recovery
action, and overrides the others of its GPU. Errors that are missing in the table are reported with severity `watch`.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.health.findings import Severity

RECOVERY_ACTION_CHANGED = 154


@dataclass(frozen=True)
class XidMeaning:
    """Meaning of an Xid. `blames_device`: whether the error concerns the device, not the program that ran on it."""

    severity: Severity
    description: str
    blames_device: bool = True


_RESET, _REBOOT, _ISOLATE, _WATCH = Severity.RESET, Severity.REBOOT, Severity.ISOLATE, Severity.WATCH

XIDS: Mapping[int, XidMeaning] = {
    8: XidMeaning(_WATCH, "the GPU stopped processing", blames_device=False),
    11: XidMeaning(_WATCH, "an invalid command stream", blames_device=False),
    13: XidMeaning(_WATCH, "a program error in a kernel, such as an index out of bounds", blames_device=False),
    25: XidMeaning(_WATCH, "an illegal command stream", blames_device=False),
    31: XidMeaning(_WATCH, "a program accessed invalid memory", blames_device=False),
    32: XidMeaning(_WATCH, "a corrupted command stream, often caused by the PCI link"),
    38: XidMeaning(_WATCH, "a driver firmware error"),
    43: XidMeaning(_WATCH, "a program was stopped because of an error in it", blames_device=False),
    44: XidMeaning(_WATCH, "an error during a context switch"),
    45: XidMeaning(_WATCH, "a program's work was removed (follows another error or a kill)", blames_device=False),
    46: XidMeaning(_RESET, "the GPU stopped processing"),
    48: XidMeaning(_RESET, "an uncorrectable memory error (double bit ECC)"),
    54: XidMeaning(_ISOLATE, "the board's auxiliary power is not connected"),
    62: XidMeaning(_RESET, "an internal micro-controller has halted"),
    63: XidMeaning(_WATCH, "a row of memory was remapped, or a page retired"),
    64: XidMeaning(_RESET, "a row of memory could not be remapped, or a page could not be retired"),
    69: XidMeaning(_WATCH, "a graphics engine class error", blames_device=False),
    74: XidMeaning(_RESET, "an NVLink error"),
    79: XidMeaning(_REBOOT, "the GPU has fallen off the bus"),
    80: XidMeaning(_WATCH, "data was corrupted in transfer to the GPU"),
    92: XidMeaning(_WATCH, "many corrected memory errors"),
    93: XidMeaning(_WATCH, "the board's InfoROM could not be written"),
    94: XidMeaning(_WATCH, "a memory error contained to one program; reset the GPU when convenient"),
    95: XidMeaning(_RESET, "an uncontained memory error"),
    109: XidMeaning(_RESET, "a context switch took too long"),
    110: XidMeaning(_RESET, "a security fault"),
    119: XidMeaning(_RESET, "the GPU's system processor did not answer"),
    120: XidMeaning(_RESET, "an error of the GPU's system processor"),
    121: XidMeaning(_WATCH, "corrected errors on the link to the host's processor"),
    136: XidMeaning(_RESET, "a link could not be trained"),
    137: XidMeaning(_WATCH, "an illegal access to another GPU's memory", blames_device=False),
    140: XidMeaning(_RESET, "memory errors that could be neither corrected nor remapped"),
    143: XidMeaning(_RESET, "the GPU could not be initialised"),
    144: XidMeaning(_WATCH, "an NVLink error (SAW)"),
    145: XidMeaning(_WATCH, "an NVLink error (RLW)"),
    146: XidMeaning(_WATCH, "an NVLink error (TLW)"),
    147: XidMeaning(_WATCH, "an NVLink error (TREX)"),
    148: XidMeaning(_WATCH, "an NVLink error (NVLPW_CTRL)"),
    149: XidMeaning(_WATCH, "an NVLink error (NETIR)"),
    150: XidMeaning(_WATCH, "an NVLink error (MSE)"),
    151: XidMeaning(_REBOOT, "keys could not be renewed"),
    155: XidMeaning(_RESET, "an NVLink is down"),
    156: XidMeaning(_RESET, "a part of the GPU was retired"),
    157: XidMeaning(_WATCH, "a part of the GPU could not be retired"),
    158: XidMeaning(_RESET, "a fatal timeout of the GPU"),
    163: XidMeaning(_WATCH, "power smoothing is off"),
    164: XidMeaning(_WATCH, "power smoothing is near the end of its life"),
    165: XidMeaning(_WATCH, "power smoothing is at the end of its life"),
    167: XidMeaning(_RESET, "a fatal timeout on PCI Express"),
    168: XidMeaning(_REBOOT, "errors in the protected part of the memory"),
    171: XidMeaning(_RESET, "an uncorrectable memory error (DRAM)"),
    172: XidMeaning(_RESET, "an uncorrectable memory error (SRAM)"),
}

# The recovery action of an Xid 154: "changed from 0x0 (None) to 0x2 (Node Reboot Required)".
_ACTIONS = {
    "none": Severity.OK,
    "gpu reset required": Severity.RESET,
    "drain and reset": Severity.RESET,
    "drain p2p": Severity.RESET,
    "node reboot required": Severity.REBOOT,
    "os reboot": Severity.REBOOT,
}

# NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")
_CHANGED = re.compile(r"recovery action changed .*\bto 0x[0-9a-fA-F]+ \(([^)]*)\)", re.IGNORECASE)


@dataclass(frozen=True)
class Xid:
    """An Xid line of the kernel's log: the GPU's bus id, the number, the driver's text."""

    bus: str
    number: int
    text: str

    @property
    def meaning(self) -> XidMeaning:
        if self.number == RECOVERY_ACTION_CHANGED:
            found = _CHANGED.search(self.text)
            action = found[1].lower() if found else ""
            words = f"the driver requests: {found[1]}" if found else "the driver's advice has changed"
            return XidMeaning(_ACTIONS.get(action, Severity.WATCH), words)
        return XIDS.get(self.number, XidMeaning(Severity.WATCH, "an error that this version does not describe"))


@functools.lru_cache(maxsize=4096)  # a monitor judges the lines that it keeps every second
def parse_xid(line: str) -> Xid | None:
    """Parse the Xid in a line of the kernel's log, or return None."""
    found = _LINE.search(line)
    return None if found is None else Xid(normalize_bus_id(found[1]), int(found[2]), (found[3] or "").strip())


def normalize_bus_id(text: str) -> str:
    """Normalize a PCI bus id to a form such as 0000:3b:00: domain, bus and device."""
    parts = text.lower().partition(".")[0].split(":")
    if len(parts) == 2:
        parts = ["0", *parts]
    try:
        domain, bus, device = (int(part, 16) for part in parts)
    except ValueError:
        return text.lower()
    return f"{domain:04x}:{bus:02x}:{device:02x}"
