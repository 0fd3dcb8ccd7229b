"""`phalanx health --deep`: every device of this node computes, remembers, copies and exchanges, and is compared with
the others of its kind."""

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
from phalanx.report import event_text
from phalanx.system.fork import fork_call

EXTRA_TIMEOUT_S = 300.0  # beside the time that is asked for: connections, memory, compilers
SLOW = 0.85  # of the median of its kind: a device that computes or copies slower is worth a look
SLOW_PAIR = 0.5  # the same of what two ranks exchange, which varies more
LEAST = 3  # so many make a median worth comparing with
BurnInRows = Sequence[dict[str, Any]]


def run_burn_in(seconds: float, ranks: int | None = None) -> tuple[list[Finding], BurnInRows]:
    """Test all accelerators of this node at the same time, or its CPU where it has none. Returns what follows, and what
    each has found."""
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
    """Run the test on all ranks; returns what went wrong."""
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


# -------------------------------------------------------------------------------------------------------------- judging


def judge_burn_in(rows: BurnInRows, devices: Sequence[str], failure: str = "") -> list[Finding]:
    """What the ranks' files tell. `devices` by rank; `failure`: why not all have come to their end."""
    found: list[Finding] = []
    for rank, device in enumerate(devices):
        row = next((row for row in rows if row["rank"] == rank), None)
        # Computing and memory are each device's own; where that is done, a failure was not this device's alone.
        if failure and (row is None or row["memory_wrong"] is None):
            text = f"the test of {device} did not come to its end ({failure}); reset the device, and test it alone"
            found.append(Finding("burn-in", Severity.RESET, text, where=device))
    if failure and not found:
        text = f"the devices could not exchange anything ({failure}); look at their links, and at the network"
        found.append(Finding("exchange", Severity.RESET, text))
    tested = [row for row in rows if row["memory_wrong"] is not None]
    for row in tested:
        found += _check_results(row)
    found += compare_devices(tested) + _pairs(tested)
    return found + [_summarize(row) for row in tested]


def compare_devices(rows: BurnInRows) -> list[Finding]:
    """Devices against the others of their kind, on as many nodes as there are."""
    tested = [row for row in rows if row["memory_wrong"] is not None]
    found = _checksums(tested)
    for key, check, what in (
        ("flops_per_s", "compute speed", "computes"),
        ("copied_bytes_per_s", "memory speed", "copies within its memory"),
        ("host_bytes_per_s", "copy speed", "copies from the host"),
    ):
        found += _find_slow_devices(tested, key, check, what)
    return found


def _check_results(row: dict[str, Any]) -> list[Finding]:
    device, found = row["device"], []
    if row["wrong"]:
        text = (
            f"{device} ({row['model']}) gave another result in {row['wrong']} of {row['products']} times that it "
            "computed the same; take it out and have it replaced"
        )
        found.append(Finding("burn-in", Severity.ISOLATE, text, row["wrong"], 0, device))
    if row["off"] > row["tolerance"]:
        text = (
            f"{device} ({row['model']}) computes {row['off']:.2g} beside the exact result, more than its type of "
            "number explains; take it out and have it replaced"
        )
        found.append(Finding("burn-in", Severity.ISOLATE, text, row["off"], row["tolerance"], device))
    if row["memory_wrong"]:
        text = f"{device} ({row['model']}) lost {row['memory_wrong']} numbers of its memory; have it replaced"
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
                    "median of its kind; look at its clocks, cooling and slot"
                )
                found.append(Finding(check, Severity.WATCH, text, row[key], SLOW * median, row["device"]))
    return found


def _checksums(rows: BurnInRows) -> list[Finding]:
    """Devices of one model that compute the same must come to the same bits."""
    found = []
    for alike in _group_by_model(rows):
        sums = [row["checksum"] for row in alike]
        usual = statistics.mode(sums)
        if len(alike) >= LEAST and sums.count(usual) > len(sums) / 2:
            for row in alike:
                if row["checksum"] != usual:
                    text = (
                        f"{row['device']} ({row['model']}) on {row['host']} computes other bits than the others of its "
                        "kind; test it again, and have it replaced if that stays"
                    )
                    found.append(Finding("checksum", Severity.RESET, text, where=row["device"]))
    return found


def _pairs(rows: BurnInRows) -> list[Finding]:
    """Pairs of ranks that exchange less than the median of pairs of their kind: on one host, or between two."""
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
                text = (
                    f"{names} exchange {rate / median:.0%} of what the median pair does; look at the link between them"
                )
                found.append(Finding("link speed", Severity.WATCH, text, rate, SLOW_PAIR * median, names))
    return found


def _on_one_host(rows: dict[int, dict[str, Any]], one: int, other: int) -> bool:
    return bool(rows[one]["host"] == rows[other]["host"])


def _summarize(row: dict[str, Any]) -> Finding:
    """What was measured, for people: not a judgement."""
    parts = [
        f"{row['products']} products at {row['flops_per_s'] / 1e12:.3g} TFLOP/s",
        f"{event_text.format_bytes(row['memory_bytes'])} of memory kept what they were given",
        f"copies at {event_text.format_bytes(row['copied_bytes_per_s'])}/s",
    ]
    if row["host_bytes_per_s"]:
        parts.append(f"from the host at {event_text.format_bytes(row['host_bytes_per_s'])}/s")
    if row["all_reduce_bytes_per_s"]:
        parts.append(f"an all-reduce at {event_text.format_bytes(row['all_reduce_bytes_per_s'])}/s")
    sound = not _check_results(row)
    text = f"{row['device']} ({row['model']}): {', '.join(parts)}"
    return Finding(
        "measured", Severity.OK if sound else Severity.UNKNOWN, text, row["flops_per_s"], None, row["device"]
    )
