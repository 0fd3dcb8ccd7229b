"""The report of an examination, to be sent to others: without names of machines and users, addresses or secrets."""

import errno
import json
import platform
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx import __version__
from phalanx.core.errors import RunError
from phalanx.core.json_lines import write_atomic
from phalanx.doctor.results import CheckResult, CheckState, verdict

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
