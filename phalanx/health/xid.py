"""What the NVIDIA driver's numbered errors (Xid) in the kernel's log mean, and what has to be done about each.

The table follows the column "Immediate Action" of NVIDIA's Xid Catalog (docs.nvidia.com/deploy/xid-errors, "Analyzing
Xid Errors with the Xid Catalog", for Ampere and newer GPUs): RESET_GPU is a reset, RESTART_BM a reboot, and
CHECK_MECHANICALS an isolation; RESTART_APP and IGNORE are worth a look at most. An Xid 154 says itself what has to be
done, and overrides the others of its GPU. Errors that are missing there are told, and judged no worse than that.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.health.findings import Severity

RECOVERY_ACTION_CHANGED = 154


@dataclass(frozen=True)
class Meaning:
    """`blames`: whether it speaks of the device, not of the program that ran on it."""

    severity: Severity
    words: str
    blames: bool = True


_RESET, _REBOOT, _ISOLATE, _WATCH = Severity.RESET, Severity.REBOOT, Severity.ISOLATE, Severity.WATCH

XIDS: Mapping[int, Meaning] = {
    8: Meaning(_WATCH, "the GPU stopped processing", blames=False),
    11: Meaning(_WATCH, "an invalid command stream", blames=False),
    13: Meaning(_WATCH, "a fault of the program in a kernel, such as an index out of bounds", blames=False),
    25: Meaning(_WATCH, "an illegal command stream", blames=False),
    31: Meaning(_WATCH, "a program accessed memory that is not its own", blames=False),
    32: Meaning(_WATCH, "a corrupted command stream, often by the PCI link"),
    38: Meaning(_WATCH, "a driver firmware error"),
    43: Meaning(_WATCH, "a program was ended for a fault of its own", blames=False),
    44: Meaning(_WATCH, "a fault while contexts were switched"),
    45: Meaning(_WATCH, "a program's work was removed, which follows another error or a kill", blames=False),
    46: Meaning(_RESET, "the GPU stopped processing"),
    48: Meaning(_RESET, "a memory error that could not be corrected (double bit ECC)"),
    54: Meaning(_ISOLATE, "the board's auxiliary power is not connected"),
    62: Meaning(_RESET, "an internal micro-controller has halted"),
    63: Meaning(_WATCH, "a row of memory was remapped, or a page retired"),
    64: Meaning(_RESET, "a row of memory could not be remapped, or a page not be retired"),
    69: Meaning(_WATCH, "a graphics engine class error", blames=False),
    74: Meaning(_RESET, "an NVLink error"),
    79: Meaning(_REBOOT, "the GPU has fallen off the bus"),
    80: Meaning(_WATCH, "data was corrupted on the way to the GPU"),
    92: Meaning(_WATCH, "many memory errors that were corrected"),
    93: Meaning(_WATCH, "the board's InfoROM could not be written"),
    94: Meaning(_WATCH, "a memory error that was contained to one program; reset the GPU when convenient"),
    95: Meaning(_RESET, "a memory error that was not contained"),
    109: Meaning(_RESET, "a context switch took too long"),
    110: Meaning(_RESET, "a security fault"),
    119: Meaning(_RESET, "the GPU's system processor did not answer"),
    120: Meaning(_RESET, "an error of the GPU's system processor"),
    121: Meaning(_WATCH, "corrected errors on the link to the host's processor"),
    136: Meaning(_RESET, "a link could not be trained"),
    137: Meaning(_WATCH, "an illegal access to another GPU's memory", blames=False),
    140: Meaning(_RESET, "memory errors that could neither be corrected nor remapped"),
    143: Meaning(_RESET, "the GPU could not be initialised"),
    144: Meaning(_WATCH, "an NVLink error (SAW)"),
    145: Meaning(_WATCH, "an NVLink error (RLW)"),
    146: Meaning(_WATCH, "an NVLink error (TLW)"),
    147: Meaning(_WATCH, "an NVLink error (TREX)"),
    148: Meaning(_WATCH, "an NVLink error (NVLPW_CTRL)"),
    149: Meaning(_WATCH, "an NVLink error (NETIR)"),
    150: Meaning(_WATCH, "an NVLink error (MSE)"),
    151: Meaning(_REBOOT, "keys could not be exchanged anew"),
    155: Meaning(_RESET, "an NVLink has gone down"),
    156: Meaning(_RESET, "a part of the GPU was retired"),
    157: Meaning(_WATCH, "a part of the GPU could not be retired"),
    158: Meaning(_RESET, "a fatal timeout of the GPU"),
    163: Meaning(_WATCH, "power smoothing is off"),
    164: Meaning(_WATCH, "power smoothing is near the end of its life"),
    165: Meaning(_WATCH, "power smoothing is at the end of its life"),
    167: Meaning(_RESET, "a fatal timeout on PCI Express"),
    168: Meaning(_REBOOT, "errors in the protected part of the memory"),
    171: Meaning(_RESET, "a memory error that could not be corrected (DRAM)"),
    172: Meaning(_RESET, "a memory error that could not be corrected (SRAM)"),
}

# What an Xid 154 says that is to be done: "changed from 0x0 (None) to 0x2 (Node Reboot Required)".
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
    """One line of the kernel's log: the GPU's place on the bus, the number, the driver's own words."""

    bus: str
    number: int
    text: str

    @property
    def meaning(self) -> Meaning:
        if self.number == RECOVERY_ACTION_CHANGED:
            found = _CHANGED.search(self.text)
            action = found[1].lower() if found else ""
            words = f"the driver asks for: {found[1]}" if found else "the driver's advice has changed"
            return Meaning(_ACTIONS.get(action, Severity.WATCH), words)
        return XIDS.get(self.number, Meaning(Severity.WATCH, "an error that this version has no words for"))


def parse(line: str) -> Xid | None:
    """The Xid that a line of the kernel's log tells of, if it does."""
    found = _LINE.search(line)
    return None if found is None else Xid(bus_of(found[1]), int(found[2]), (found[3] or "").strip())


def bus_of(text: str) -> str:
    """A place on the PCI bus in one spelling, such as 0000:3b:00: domain, bus and device."""
    parts = text.lower().partition(".")[0].split(":")
    if len(parts) == 2:
        parts = ["0", *parts]
    try:
        domain, bus, device = (int(part, 16) for part in parts)
    except ValueError:
        return text.lower()
    return f"{domain:04x}:{bus:02x}:{device:02x}"
