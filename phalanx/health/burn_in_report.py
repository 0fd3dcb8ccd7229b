"""`phalanx health --deep`: burn-in of every device of this node, compared with the others of its model."""

import functools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.node import agent
from phalanx.elastic.node.worker import NodeJob
from phalanx.health.findings import Finding, Severity, assign_devices, preload_and_find_devices
from phalanx.report import event_text, formats
from phalanx.system.fork import fork_call

EXTRA_TIMEOUT_S = 300.0  # beyond the requested time: connections, memory, compilers
SLOW = 0.85  # share of the median of its model, below which a device is reported as slow
SLOW_PAIR = 0.5  # the same for an exchange of two ranks, which varies more
LEAST = 3  # number of values for a meaningful median
BurnInRows = Sequence[dict[str, Any]]


def run_burn_in(seconds: float, ranks: int | None = None) -> tuple[list[Finding], BurnInRows]:
    """Test all accelerators of this node at the same time, or its CPU if it has none. Returns the findings and
    each rank's results."""
    found, accelerators = preload_and_find_devices(on_cpu=False)
    devices = [device.name for device in assign_devices(found, accelerators, ranks)]
    with tempfile.TemporaryDirectory(prefix="phalanx-health-") as place:
        folder = Path(place)
        wrong = ""
        try:
            wrong = fork_call(_run_ranks, seconds, str(folder), devices, timeout_s=seconds + EXTRA_TIMEOUT_S)
        except PhalanxError as error:
            late = f"no answer within {seconds + EXTRA_TIMEOUT_S:g} s"
            wrong = late if type(error) is PhalanxError else str(error)  # such as too little memory
        rows = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
        rows.sort(key=lambda row: row["rank"])
        return judge_burn_in(rows, devices, wrong), rows


def _run_ranks(seconds: float, folder: str, devices: list[str]) -> str:
    """Run the test on all ranks; returns the error, if any."""
    died: list[str] = []

    def note(kind: str, details: dict[str, Any]) -> None:
        if kind == EventKind.WORKER_DIED:
            died.append(event_text.describe_event({"kind": kind, **details}))

    job = NodeJob(
        world=len(devices),
        worker=functools.partial(_worker, seconds, Path(folder)),
        paths=RunPaths(Path(folder)),
        devices=devices,
        on_event=note,
        grace_s=1.0,
    )
    code = agent.run_local_job(job)
    return "; ".join(died) or ("" if code == 0 else f"exit code {code}")


def _worker(seconds: float, folder: Path, placement: Placement) -> int:
    from phalanx.health import burn_in

    return int(burn_in.run_burn_in(seconds, folder, placement))


# ------------------------------------------------------------------------------------------------------------- findings


def judge_burn_in(rows: BurnInRows, devices: Sequence[str], failure: str = "") -> list[Finding]:
    """Findings from the ranks' files. `devices` by rank; `failure`: why some have not finished."""
    found: list[Finding] = []
    for rank, device in enumerate(devices):
        row = next((row for row in rows if row["rank"] == rank), None)
        # Compute and memory tests involve one device only; if they are complete, a failure was not caused by this
        # device alone.
        if failure and (row is None or row["memory_wrong"] is None):
            text = f"the test of {device} did not finish ({failure}); reset the device, and test it alone"
            found.append(Finding("burn-in", Severity.RESET, text, where=device))
    if failure and not found:
        text = f"the devices could not communicate ({failure}); check their links and the network"
        found.append(Finding("exchange", Severity.RESET, text))
    tested = [row for row in rows if row["memory_wrong"] is not None]
    for row in tested:
        found += _check_results(row)
    found += compare_devices(tested) + _pairs(tested)
    return found + [_summarize(row) for row in tested]


def compare_devices(rows: BurnInRows) -> list[Finding]:
    """Compare devices with the others of their model, over all nodes."""
    tested = [row for row in rows if row["memory_wrong"] is not None]
    found = _checksums(tested)
    for key, check, what in (
        ("flops_per_s", "compute speed", "computes"),
        ("copied_bytes_per_s", "memory speed", "device-to-device copies"),
        ("host_bytes_per_s", "copy speed", "host-to-device copies"),
    ):
        found += _find_slow_devices(tested, key, check, what)
    return found


def _check_results(row: dict[str, Any]) -> list[Finding]:
    device, found = row["device"], []
    if row["wrong"]:
        text = (
            f"{device} ({row['model']}) gave different results in {row['wrong']} of {row['products']} repeats of the "
            "same product; replace it"
        )
        found.append(Finding("burn-in", Severity.ISOLATE, text, row["wrong"], 0, device))
    if row["off"] > row["tolerance"]:
        text = (
            f"{device} ({row['model']}) computes {row['off']:.2g} off the exact result, more than rounding explains; "
            "replace it"
        )
        found.append(Finding("burn-in", Severity.ISOLATE, text, row["off"], row["tolerance"], device))
    if row["memory_wrong"]:
        text = f"{device} ({row['model']}) lost {row['memory_wrong']} values in its memory; replace it"
        found.append(Finding("device memory", Severity.ISOLATE, text, row["memory_wrong"], 0, device))
    return found


def _group_by_model(rows: BurnInRows) -> list[list[dict[str, Any]]]:
    models = sorted({row["model"] for row in rows})
    return [[row for row in rows if row["model"] == model] for model in models]


def _find_slow_devices(rows: BurnInRows, key: str, check: str, what: str) -> list[Finding]:
    found = []
    for alike in _group_by_model([row for row in rows if row[key] is not None]):
        median = statistics.median(row[key] for row in alike)
        for row in alike if len(alike) >= LEAST else []:
            if row[key] < SLOW * median:
                text = (
                    f"{row['device']} ({row['model']}) on {row['host']} {what} at {row[key] / median:.0%} of the "
                    "median of its model; check its clocks, cooling and slot"
                )
                found.append(Finding(check, Severity.WATCH, text, row[key], SLOW * median, row["device"]))
    return found


def _checksums(rows: BurnInRows) -> list[Finding]:
    """Compare checksums: devices of one model must compute identical bits."""
    found = []
    for alike in _group_by_model(rows):
        sums = [row["checksum"] for row in alike]
        usual = statistics.mode(sums)
        if len(alike) >= LEAST and sums.count(usual) > len(sums) / 2:
            for row in alike:
                if row["checksum"] != usual:
                    text = (
                        f"{row['device']} ({row['model']}) on {row['host']} computes different bits than the others "
                        "of its model; test it again, and replace it if the result is the same"
                    )
                    found.append(Finding("checksum", Severity.RESET, text, where=row["device"]))
    return found


def _pairs(rows: BurnInRows) -> list[Finding]:
    """Report pairs of ranks that exchange less than the median of their kind of pair: on one host, or between two."""
    by_rank = {row["rank"]: row for row in rows}
    rates = {
        (row["rank"], other): rate
        for row in rows
        for other, rate in row["pairs"]
        if row["rank"] < other and other in by_rank
    }
    found = []
    for together in (True, False):
        some = {pair: rate for pair, rate in rates.items() if _on_one_host(by_rank, *pair) == together}
        if len(some) < LEAST:
            continue
        median = statistics.median(some.values())
        for (one, other), rate in some.items():
            if rate < SLOW_PAIR * median:
                names = " and ".join(f"{by_rank[rank]['device']} on {by_rank[rank]['host']}" for rank in (one, other))
                text = f"{names} exchange {rate / median:.0%} of the median pair's rate; check the link between them"
                found.append(Finding("link speed", Severity.WATCH, text, rate, SLOW_PAIR * median, names))
    return found


def _on_one_host(rows: dict[int, dict[str, Any]], one: int, other: int) -> bool:
    return bool(rows[one]["host"] == rows[other]["host"])


def _summarize(row: dict[str, Any]) -> Finding:
    """The measurements, for display; no judgement."""
    parts = [
        f"{row['products']} products at {row['flops_per_s'] / 1e12:.3g} TFLOP/s",
        f"{formats.format_bytes(row['memory_bytes'])} of memory verified",
        f"device copies at {formats.format_bytes(row['copied_bytes_per_s'])}/s",
    ]
    if row["host_bytes_per_s"]:
        parts.append(f"host-to-device copies at {formats.format_bytes(row['host_bytes_per_s'])}/s")
    if row["all_reduce_bytes_per_s"]:
        parts.append(f"all-reduce at {formats.format_bytes(row['all_reduce_bytes_per_s'])}/s")
    sound = not _check_results(row)
    text = f"{row['device']} ({row['model']}): {', '.join(parts)}"
    return Finding(
        "measured", Severity.OK if sound else Severity.UNKNOWN, text, row["flops_per_s"], None, row["device"]
    )
