"""What a check of a node's health has found: how bad it is, what was seen, what to do. Plain data."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

VERSION = 1  # of the files that hold results and baselines


class Severity(enum.StrEnum):
    """How bad a finding is, which says what has to be done before the node is used again."""

    UNKNOWN = "unknown"  # could not be read, with these rights or on this machine
    OK = "ok"
    WATCH = "watch"  # the node may be used; look after it
    RESET = "reset"  # not to be used until something on it is put right: a GPU reset, a disk freed, a limit raised
    REBOOT = "reboot"  # not to be used before a reboot
    ISOLATE = "isolate"  # to be taken out: hardware has to be looked at or replaced


_ORDER = list(Severity)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `where` is a device, a folder or another node, where there are several."""

    check: str
    severity: Severity
    sentence: str  # for the user, with the remedy
    value: float | str | None = None
    limit: float | str | None = None
    where: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"severity": str(self.severity)}


def finding_from_json(tree: dict[str, Any]) -> Finding:
    """The opposite of `Finding.to_json`."""
    return Finding(**{**tree, "severity": Severity(tree["severity"])})


def verdict(findings: Iterable[Finding]) -> Severity:
    """The worst severity; what could not be read counts for nothing beside what could."""
    return max((finding.severity for finding in findings), key=_ORDER.index, default=Severity.UNKNOWN)


def is_usable(severity: Severity) -> bool:
    """Whether a node with this verdict may be trained on."""
    return severity in (Severity.OK, Severity.UNKNOWN, Severity.WATCH)


def at_least(findings: Iterable[Finding], severity: Severity) -> list[Finding]:
    """The findings that are as bad or worse, the worst first."""
    wanted = [finding for finding in findings if _ORDER.index(finding.severity) >= _ORDER.index(severity)]
    return sorted(wanted, key=lambda finding: -_ORDER.index(finding.severity))


def unique_sentences(findings: Sequence[Finding]) -> list[str]:
    """What to tell a user of them, each thing once."""
    return list(dict.fromkeys(finding.sentence for finding in findings))
