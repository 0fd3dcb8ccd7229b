"""What a check of `phalanx doctor` says, and what a check is. Plain data; no torch."""

import enum
import errno
import json
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.json_lines import write_atomic
from phalanx.core.version import __version__
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


# ---------------------------------------------------------------------------------------------------- shareable report
# The report of an examination, to be sent to others: without names of machines and users, addresses or secrets.


VERSION = 1  # of this form
LONG, SHORT = 8, 4  # characters: a shorter value of the environment is part of many words, one of a secret is none
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH", re.I)
_ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}\b|\b(?:[0-9a-f]{1,4}:){3,7}[0-9a-f:]+", re.I)


def build_report(lines: Sequence[CheckResult], seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """All that was found, as it is written and sent."""
    cover = _Redactor(environment)
    return {
        "version": VERSION,
        "phalanx": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),
        "verdict": str(verdict(lines)),
        "count": {str(state): sum(line.state == state for line in lines) for state in CheckState},
        "checks": [
            {name: cover(value) if isinstance(value, str) else value for name, value in line.to_json().items()}
            for line in lines
        ],
    }


def write_report(file: Path, report: Mapping[str, Any]) -> None:
    """Raises RunError where the file cannot be written."""
    try:
        write_atomic(file, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise _not_written(file, error) from None


def check_report_writable(file: Path) -> None:
    """Raises RunError where the report could not be written later."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "it is no file")
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise _not_written(file, error) from None


def _not_written(file: Path, error: OSError) -> RunError:
    return RunError(f"{file} cannot be written ({error.strerror or error}); choose another with --out")


class _Redactor:
    """Puts names of kinds in the place of what nobody else has to know."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        hidden = {platform.node(): "HOST", platform.node().partition(".")[0]: "HOST", str(Path.home()): "HOME"}
        for name, value in environment.items():
            if len(value) >= LONG or (_SECRET.search(name) and len(value) >= SHORT):
                hidden.setdefault(value, f"${name}")
        self._hidden = {text: name for text, name in hidden.items() if len(text) > 1}
        # The longest first: one may be a part of another. Not inside of words.
        texts = sorted(map(re.escape, self._hidden), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(texts)})(?!\w)") if texts else re.compile(r"(?!)")

    def __call__(self, text: str) -> str:
        covered = self._pattern.sub(lambda match: f"<{self._hidden[match[0]]}>", text)
        return _ADDRESS.sub("<ADDRESS>", covered)
