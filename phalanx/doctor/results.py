"""What a check of `phalanx doctor` says, and what a check is. Plain data; no torch."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.health.findings import Finding, Severity

# The names of checks, in their order: what needs no torch, torch itself, and what is tried with it.
MACHINE = ("python", "health", "network", "slurm")
LIBRARY = ("torch", "devices")
PROOFS = (
    "arithmetic", "copies", "attention", "compile", "memory-limit", "collectives",
    "one-rank", "zero-1", "zero-2", "zero-3", "resume", "time-limit",
)  # fmt: skip
NAMES = (*MACHINE, *LIBRARY, *PROOFS)


class CheckState(enum.StrEnum):
    """How a check came out."""

    OK = "ok"
    SLOW = "slow"  # it works, at a cost: less speed or room than there could be, or something to look after
    WRONG = "wrong"  # training here would fail, or give other numbers
    MISSING = "missing"  # not on this machine, which only matters to those who want to use it
    SKIPPED = "skipped"  # not tried, or not to be seen from here


@dataclass(frozen=True)
class CheckResult:
    """One line of the output. `sentence` has the remedy where one is needed; `log` is the end of what the check printed
    where it is not `ok`."""

    check: str
    state: CheckState
    sentence: str
    value: float | str | None = None
    seconds: float = 0.0
    log: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"state": str(self.state)}


def result_from_json(tree: Mapping[str, Any]) -> CheckResult:
    """The opposite of `CheckResult.to_json`."""
    return CheckResult(**{**tree, "state": CheckState(tree["state"])})


@dataclass(frozen=True)
class DoctorCheck:
    """A part of the examination. `run` runs in a process of its own for `limit_s` at most; `remedy` is said where that
    process crashes, or is not done in time."""

    name: str
    run: Callable[[], list[CheckResult]]
    limit_s: float
    remedy: str


_OF_FINDING = {Severity.OK: CheckState.OK, Severity.UNKNOWN: CheckState.SKIPPED, Severity.WATCH: CheckState.SLOW}


def result_of_finding(finding: Finding) -> CheckResult:
    """A finding of `phalanx health` as a line: a node that is not to be used is `wrong`."""
    return CheckResult(
        finding.check, _OF_FINDING.get(finding.severity, CheckState.WRONG), finding.sentence, finding.value
    )


def parse_check_names(only: Sequence[str]) -> tuple[str, ...]:
    """The names of checks that are asked for. Raises ConfigError for one that there is not."""
    for name in only:
        if name not in NAMES:
            raise ConfigError(f"there is no check {name!r}; choose from {', '.join(NAMES)}")
    return tuple(only)


def verdict(lines: Iterable[CheckResult]) -> CheckState:
    """`wrong` if anything is, else `slow` if anything is, else `ok`."""
    states = {line.state for line in lines}
    return next((state for state in (CheckState.WRONG, CheckState.SLOW) if state in states), CheckState.OK)
