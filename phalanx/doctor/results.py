"""Checks of `phalanx doctor` and their results. Plain data; no torch."""

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

# The names of checks in order: those without torch, torch itself, and those that need it.
MACHINE = ("python", "health", "network", "slurm")
LIBRARY = ("torch", "devices")
PROOFS = (
    "arithmetic", "copies", "attention", "compile", "fp8", "memory-limit", "collectives",
    "one-rank", "zero-1", "zero-2", "zero-3", "resume", "time-limit",
)  # fmt: skip
NAMES = (*MACHINE, *LIBRARY, *PROOFS)


class CheckState(enum.StrEnum):
    """State of a check."""

    OK = "ok"
    SLOW = "slow"  # it works, but with less speed or room than possible, or needs attention
    WRONG = "wrong"  # training here would fail, or give different results
    MISSING = "missing"  # not on this machine; only relevant to users who need it
    SKIPPED = "skipped"  # not tried, or not visible from here


@dataclass(frozen=True)
class CheckResult:
    """One line of the output. `sentence` has the remedy if one is needed; `log` is the end of the check's output
    if it is not `ok`."""

    check: str
    state: CheckState
    sentence: str
    value: float | str | None = None
    seconds: float = 0.0
    log: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"state": str(self.state)}


def result_from_json(tree: Mapping[str, Any]) -> CheckResult:
    """Parse the output of `CheckResult.to_json`."""
    return CheckResult(**{**tree, "state": CheckState(tree["state"])})


@dataclass(frozen=True)
class DoctorCheck:
    """A group of checks. `run` is called in a separate process, for at most `limit_s`; `remedy` is shown if that
    process crashes or is too slow."""

    name: str
    run: Callable[[], list[CheckResult]]
    limit_s: float
    remedy: str


_OF_FINDING = {Severity.OK: CheckState.OK, Severity.UNKNOWN: CheckState.SKIPPED, Severity.WATCH: CheckState.SLOW}


def result_of_finding(finding: Finding) -> CheckResult:
    """Convert a finding of `phalanx health` to a line; an unusable node is `wrong`."""
    return CheckResult(
        finding.check, _OF_FINDING.get(finding.severity, CheckState.WRONG), finding.sentence, finding.value
    )


def parse_check_names(only: Sequence[str]) -> tuple[str, ...]:
    """Validate names of checks. Raises ConfigError for an unknown one."""
    for name in only:
        if name not in NAMES:
            raise ConfigError(f"unknown check {name!r}; choose from {', '.join(NAMES)}")
    return tuple(only)


def verdict(lines: Iterable[CheckResult]) -> CheckState:
    """`wrong` if any line is, else `slow` if any is, else `ok`."""
    states = {line.state for line in lines}
    return next((state for state in (CheckState.WRONG, CheckState.SLOW) if state in states), CheckState.OK)


# ---------------------------------------------------------------------------------------------------- shareable report
# The report of a run of the checks that can be shared: without names of machines and users, addresses or secrets.


VERSION = 1  # version of this format
# Minimum lengths of values to redact: a short value of the environment is part of many words, a short secret is
# unlikely
LONG, SHORT = 8, 4
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH", re.I)
_ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}\b|\b(?:[0-9a-f]{1,4}:){3,7}[0-9a-f:]+", re.I)


def build_report(lines: Sequence[CheckResult], seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Build the report as it is written and shared."""
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
    """Write a report. Raises RunError if the file cannot be written."""
    try:
        write_atomic(file, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise _not_written(file, error) from None


def check_report_writable(file: Path) -> None:
    """Raises RunError if the report could not be written later."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "it is not a file")
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise _not_written(file, error) from None


def _not_written(file: Path, error: OSError) -> RunError:
    return RunError(f"{file} cannot be written ({error.strerror or error}); choose another with --out")


class _Redactor:
    """Replaces private details by the names of their kinds."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        hidden = {platform.node(): "HOST", platform.node().partition(".")[0]: "HOST", str(Path.home()): "HOME"}
        for name, value in environment.items():
            if len(value) >= LONG or (_SECRET.search(name) and len(value) >= SHORT):
                hidden.setdefault(value, f"${name}")
        self._hidden = {text: name for text, name in hidden.items() if len(text) > 1}
        # The longest first, as one may be a part of another. Not inside of words.
        texts = sorted(map(re.escape, self._hidden), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(texts)})(?!\w)") if texts else re.compile(r"(?!)")

    def __call__(self, text: str) -> str:
        covered = self._pattern.sub(lambda match: f"<{self._hidden[match[0]]}>", text)
        return _ADDRESS.sub("<ADDRESS>", covered)
