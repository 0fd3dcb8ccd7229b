"""NVIDIA's DCGM diagnostics (`dcgmi diag`), where installed."""

import functools
import json
import shutil
import subprocess
from collections.abc import Sequence

from phalanx.health.checks import HealthCheck
from phalanx.health.findings import Finding, Severity

DCGMI_DIAG_TIMEOUT_S = 1800.0  # dcgmi diag -r 3 takes some ten minutes on eight GPUs


def make_dcgm_check(level: int = 2) -> HealthCheck | None:
    """The check that runs NVIDIA's DCGM diagnostics; None if DCGM is not installed."""
    program = shutil.which("dcgmi")
    if program is None:
        return None
    look = functools.partial(_run_dcgmi_diag, (program, "diag", "-r", str(level), "-j"), DCGMI_DIAG_TIMEOUT_S)
    return HealthCheck(
        "dcgmi diag", look, DCGMI_DIAG_TIMEOUT_S + 10, Severity.RESET, "end dcgmi, and check nv-hostengine"
    )


def _run_dcgmi_diag(command: Sequence[str], limit_s: float) -> list[Finding]:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"dcgmi diag gave no result ({error}); check that nv-hostengine runs"
        return [Finding("dcgmi diag", Severity.UNKNOWN, text)]
    return parse_dcgmi_diag(said.stdout, said.stderr)


def parse_dcgmi_diag(output: str, errors: str = "") -> list[Finding]:
    """Parse the JSON of `dcgmi diag -j`: a failed test has severity `reset`, a warning `watch`."""
    try:
        tree = json.loads(output[output.index("{") :])
        categories = next(iter(tree.values()))["test_categories"]
    except (ValueError, KeyError, StopIteration, TypeError):
        why = (errors or output).strip().partition("\n")[0] or "nothing"
        return [Finding("dcgmi diag", Severity.UNKNOWN, f"dcgmi diag gave an unreadable result: {why}")]
    found = []
    for category in categories:
        for test in category.get("tests", ()):
            for result in test.get("results", ()):
                status = str(result.get("status", "")).lower()
                severity = {"fail": Severity.RESET, "warn": Severity.WATCH}.get(status)
                if severity is None:
                    continue
                gpu = result.get("gpu_id", result.get("gpu_ids", "?"))
                said = result.get("warnings") or result.get("info") or "no reason given"
                why = said if isinstance(said, str) else "; ".join(str(each) for each in said)
                text = f"dcgmi diag: {test.get('name', '?')} ended with {status} on GPU {gpu}: {why}"
                found.append(Finding("dcgmi diag", severity, text, status, "pass", f"GPU {gpu}"))
    return found or [Finding("dcgmi diag", Severity.OK, "dcgmi diag passed")]
