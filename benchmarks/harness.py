"""What every benchmark shares: its options, the machine, statistics, the table and the JSON file."""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

QUIET = 0.02  # of the wanted processor time: with more of it stolen, or a load before, timings are longer by that
PACKAGES = ("phalanx", "torch", "transformers", "accelerate", "torchft", "numpy")
Row = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """A claim with its figure; `value` is None where it could not be measured, and then it does not hold."""

    name: str
    value: float | None
    target: float
    holds: bool


def at_least(name: str, value: float | None, target: float) -> Check:
    """A check that `value` reaches `target`."""
    return Check(name, value, target, value is not None and value >= target)


def at_most(name: str, value: float | None, target: float) -> Check:
    """A check that `value` stays below or at `target`."""
    return Check(name, value, target, value is not None and value <= target)


def options(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--quick", action="store_true", help="a short form of about a minute")
    return parser


def machine(accelerator: str | None, threads: int) -> dict[str, Any]:
    """What the figures were measured on; to be asked when they are, since it says how much time others had."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "accelerator": accelerator,
        "platform": platform.platform(),
        "load_before": _LOAD_BEFORE,
        "stolen": stolen(_TIMES_BEFORE, _processor_times()),
    }


def _processor_times() -> list[int]:
    """The kernel's clocks of all processors, in ticks: user, nice, system, idle, iowait, irq, softirq, steal."""
    try:
        return [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:  # not Linux
        return []


def stolen(before: Sequence[int], after: Sequence[int]) -> float | None:
    """Which part of the processor time that was wanted a hypervisor gave to other machines; None if nobody knows."""
    user, nice, system, _, _, irq, softirq, steal = [b - a for a, b in zip(before, after, strict=True)] or [0] * 8
    wanted = user + nice + system + irq + softirq + steal
    return round(steal / wanted, 3) if wanted else None


_TIMES_BEFORE, _LOAD_BEFORE = _processor_times(), round(os.getloadavg()[0], 2)  # when the program began


def _cpu() -> str:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Versions of what takes part; "not installed" where a package is missing."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile)."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def result(name: str, machine_facts: Mapping[str, Any], rows: Sequence[Row], checks: Sequence[Check]) -> dict[str, Any]:
    """The content of the JSON file."""
    return {
        "name": name,
        "machine": dict(machine_facts),
        "versions": versions(),
        "rows": list(rows),
        "checks": [asdict(check) for check in checks],
    }


def report(outcome: dict[str, Any], file: Path | None) -> None:
    """Print the tables and the checks, and write the JSON file if one was asked for.

    Rows with the same columns make one table, in the order in which they come.
    """
    facts = [f"{key} {value}" for key, value in outcome["machine"].items() if value is not None]
    print(f"{outcome['name']}: " + ", ".join(facts))
    print(", ".join(f"{key} {value}" for key, value in outcome["versions"].items()))
    if (part := outcome["machine"].get("stolen") or 0) > QUIET:
        print(f"Other virtual machines took {part:.0%} of the processor time meanwhile: timings say less than usual.")
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in outcome["rows"]:
        tables.setdefault(tuple(row), []).append(row)
    for columns, rows in tables.items():
        print_table(columns, [[_shown(row[column]) for column in columns] for row in rows])
    for check in outcome["checks"]:
        verdict = "holds" if check["holds"] else "DOES NOT HOLD"
        print(f"{verdict:>13}  {check['name']}: {_shown(check['value'])} (target {_shown(check['target'])})")
    if file is not None:
        file.write_text(json.dumps(outcome, indent=1) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table by rich, or plain columns where rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
        for line in [columns, *rows]:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console = Console()
    # Piped into a file there is no terminal to fit: a table cut at 80 columns would lose figures.
    (console if console.is_terminal else Console(width=200)).print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and 0.99 < value < 1.01 and value != 1:
        return f"{value:.4f}"  # of a ratio near one its difference is the news
    return f"{value:.4g}" if isinstance(value, float) else str(value)
