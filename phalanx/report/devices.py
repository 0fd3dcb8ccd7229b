"""Utilization of each device from the step records: its share of the batch, its busy time and its waiting time.

Of the ranks that the last step had, over the newest steps in a row with as many of them (the progress line: over a
few, the closing table and the report: over all but the first), a device's **share** is how many of a step's sequences
it does, and its part of the work that of all sequences of these steps. **Busy** is the part of their time in which it
worked, and waiting is the rest. Ranks that left have no row.

The cost of an even split is estimated from the same records: with equal shares, the slowest device delays all. Part of
its time does not grow with its share; measurements of the devices tell which. There is no estimate if a device had no
share and was not measured.
"""

import html
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from phalanx.core.errors import ConfigError
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import RunPaths
from phalanx.layout import hardware
from phalanx.layout.balance import Division, parse_division
from phalanx.report import formats

Record = Mapping[str, Any]
Line = tuple[float, float]  # seconds of a micro-batch, and of each of its sequences
COLORS = ("blue", "teal", "violet", "orange", "green", "red", "amber", "grey")
DRAWN = len(COLORS)  # with more ranks, only the extremes are drawn


@dataclass(frozen=True)
class DeviceStep:
    """One step: sequences and busy seconds of each rank, seconds of the whole, and micro-batches of each rank."""

    shares: tuple[int, ...]
    busy_s: tuple[float, ...]
    step_s: float
    parts: int = 1
    parts_by_rank: tuple[int, ...] = ()  # where they differ, each rank's

    def even_s(self, lines: Mapping[int, Line]) -> float | None:
        """Estimated step time with equal shares, in as many micro-batches (or in micro-batches of the same size if each
        rank has its own number). Time in which no device was busy (the link) stays the same. None if a rank had no
        share and its device was not measured."""
        if any(not own and rank not in lines for rank, own in enumerate(self.shares)):
            return None
        share = sum(self.shares) / len(self.shares)
        busy_s = max(
            busy * _grows(lines.get(rank, (0.0, 1.0)), (parts, own), (self._parts_for(share, rank), share))
            for rank, (parts, own, busy) in enumerate(zip(self._parts(), self.shares, self.busy_s, strict=True))
        )
        return self.step_s - max(self.busy_s) + busy_s

    def _parts(self) -> tuple[int, ...]:
        return self.parts_by_rank or (self.parts,) * len(self.shares)

    def _parts_for(self, share: float, rank: int) -> int:
        """Micro-batches of a rank with another share."""
        if not self.parts_by_rank:
            return self.parts
        # The memory limit is unknown: take the largest micro-batch used, by other ranks if this one had none.
        sizes = [max(1, -(-had // parts)) for had, parts in zip(self.shares, self.parts_by_rank, strict=True)]
        size = sizes[rank] if self.shares[rank] else max(sizes)
        return max(1, math.ceil(share / size))

    def busy_share(self, rank: int) -> float:
        """Busy fraction of the step for a rank, at most 1: some of its work may lie just outside the step."""
        return mean_busy_share([self], rank)


def mean_busy_share(steps: Sequence[DeviceStep], rank: int) -> float:
    """Busy fraction of some steps for a rank."""
    return min(1.0, sum(step.busy_s[rank] for step in steps) / sum(step.step_s for step in steps))


def steps_of_current_ranks(steps: Sequence[DeviceStep]) -> list[DeviceStep]:
    """The newest consecutive steps with as many ranks as the last one."""
    world = len(steps[-1].shares) if steps else 0
    newest = itertools.takewhile(lambda step: len(step.shares) == world, reversed(steps))
    return list(newest)[::-1]


def _grows(line: Line, was: tuple[int, float], other: tuple[int, float]) -> float:
    """Ratio of a device's times for another and for its own share, each as (micro-batches, sequences); an empty
    micro-batch costs as much as one sequence."""
    (fixed_s, sequence_s), (parts, share), (other_parts, other_share) = line, was, other
    other_s = other_parts * fixed_s + max(other_share, other_parts) * sequence_s
    return other_s / (parts * fixed_s + max(share, parts) * sequence_s)


@dataclass(frozen=True)
class DeviceUsage:
    """A device over some steps: its share of all sequences and of the last step's, and its busy fraction."""

    rank: int
    name: str
    share: float
    last_share: int
    busy: float
    sequences_per_s: float | None  # while it was busy


@dataclass(frozen=True)
class DeviceSummary:
    """All devices over some steps. `step_s` and `even_s` are mean step times, measured and with equal shares (None if
    unknown). With model parallelism, `devices` are copies of the model."""

    devices: tuple[DeviceUsage, ...]
    step_s: float
    even_s: float | None
    of_copies: bool = False
    steps: int = 0

    @property
    def about(self) -> str:
        """The number of steps behind the figures."""
        return (
            f"of {self.steps} step{'' if self.steps == 1 else 's'} on these {'copies' if self.of_copies else 'ranks'}"
        )

    @property
    def titles(self) -> tuple[str, ...]:
        """Of a table's columns."""
        return ("copy" if self.of_copies else "rank", *TITLES)

    @property
    def verdict(self) -> str:
        """The estimated cost of an even split, as a sentence; empty if unknown."""
        if self.even_s is None:
            return ""
        ours, even = formats.format_seconds(self.step_s), formats.format_seconds(self.even_s)
        if abs(self.even_s - self.step_s) <= 0.005 * self.step_s:
            return f"an even split would have been as fast: {ours} a step"
        if self.even_s < self.step_s:
            return f"an even split would have been faster: {even} a step instead of {ours}"
        times = f"{self.even_s / self.step_s:.2f} times as long"
        instead = f": {even} a step instead of {ours}" if even != ours else f" as the {ours} of a step"
        return f"an even split would have taken {times}{instead}"


def parse_device_step(record: Record) -> DeviceStep | None:
    """Device figures of a step record; None if they are missing or invalid."""
    shares, busy_s, step_s = (
        record.get("shares"),
        record.get("busy_s"),
        formats.finite_number(dict(record), "step_s"),
    )
    if not isinstance(shares, list) or not isinstance(busy_s, list) or step_s is None or step_s <= 0:
        return None
    if not shares or len(shares) != len(busy_s) or any(type(share) is not int or share < 0 for share in shares):
        return None
    times = [formats.finite_number({"s": value}, "s") for value in busy_s]
    if sum(shares) == 0 or any(value is None or value < 0 for value in times):
        return None
    division = parse_division(record) or Division(tuple(shares), 1)  # older records do not name micro-batches
    known_s = tuple(value for value in times if value is not None)
    return DeviceStep(division.shares, known_s, step_s, division.parts, division.own)


def summarize_devices(
    records: Iterable[Record], names: Mapping[int, str], lines: Mapping[int, Line] | None = None
) -> DeviceSummary | None:
    """Device utilization over the steps with as many ranks as the last; None without records of several ranks. `names`
    of the devices and `lines` of the measured ones, by rank. More names than shares: shares belong to copies of the
    model. The first step is excluded if there are others, since it includes compilation and set-up.
    """
    steps = steps_of_current_ranks([step for record in records if (step := parse_device_step(record)) is not None])
    if not steps or len(steps[-1].shares) < 2:
        return None
    steps = steps[1:] or steps
    whole_s, sequences = sum(step.step_s for step in steps), sum(sum(step.shares) for step in steps)
    count = len(steps[-1].shares)
    together = len(names) > count
    if together:  # what was measured was of ranks
        names, lines = dict.fromkeys(range(count), ", ".join(sorted(set(names.values())))), {}
    evens = [step.even_s(lines or {}) for step in steps]
    devices = []
    for rank in range(count):
        done, busy_s = sum(step.shares[rank] for step in steps), sum(step.busy_s[rank] for step in steps)
        rate = done / busy_s if busy_s > 0 and done else None
        last = steps[-1].shares[rank]
        devices.append(
            DeviceUsage(rank, names.get(rank, ""), done / sequences, last, mean_busy_share(steps, rank), rate)
        )
    mean_s = _mean([step.step_s for step in steps], evens)
    return DeviceSummary(tuple(devices), whole_s / len(steps), mean_s, together, len(steps))


def _mean(steps_s: Sequence[float], evens: Sequence[float | None]) -> float | None:
    """Mean step time with equal shares: the mean of all steps, scaled by the steps for which it is known."""
    told = [(step_s, even_s) for step_s, even_s in zip(steps_s, evens, strict=True) if even_s is not None]
    if not told:
        return None
    times = max(0.0, sum(even_s for _, even_s in told)) / sum(step_s for step_s, _ in told)
    return times * sum(steps_s) / len(steps_s)


def read_device_names(paths: RunPaths) -> dict[int, str]:
    """Device names by rank, with the host if there are several: as measured, else as the last start found them; empty
    if unknown."""
    known = _known(paths)
    several = len({device.host for device in known}) > 1
    measured = {device.rank: f"{device.model} on {device.host}" if several else device.model for device in known}
    return measured or dict(enumerate(_models(paths) or ()))


def read_device_lines(paths: RunPaths) -> dict[int, Line]:
    """Measured times of each rank's device."""
    found = {device.rank: hardware.fit_line(device.times) for device in _known(paths)}
    return {rank: line for rank, line in found.items() if line is not None}


def _known(paths: RunPaths) -> tuple[hardware.MeasuredDevice, ...]:
    """Measurements of the devices of the last start; none if others were measured, or none."""
    if not paths.hardware.exists():
        return ()
    try:
        devices = hardware.read_hardware(paths.hardware).devices
    except ConfigError:  # the report is of the steps
        return ()
    return devices if _models(paths) in (None, [device.model for device in devices]) else ()


def _models(paths: RunPaths) -> list[str] | None:
    """Device names of the last start on several devices, in order of rank, if recorded."""
    starts = [event for event in read_events(paths.events) if event.get("kind") == EventKind.RUN_STARTED]
    several = [event for event in starts if event.get("world") != 1]
    models = (several or starts)[-1].get("models") if starts else None
    return [str(model) for model in models] if isinstance(models, list) else None


def format_shares(steps: Sequence[DeviceStep]) -> str:
    """Shares of the last step and busy fractions over all steps, for the progress line."""
    steps = steps_of_current_ranks(steps)
    step, worked = steps[-1], [100 * mean_busy_share(steps, rank) for rank in range(len(steps[-1].busy_s))]
    if len(worked) > DRAWN:
        shares = f"{min(step.shares)} to {max(step.shares)}"
        return f"shares {shares}, busy {min(worked):.0f} to {max(worked):.0f} %"
    return f"shares {'+'.join(map(str, step.shares))}, busy {'/'.join(f'{part:.0f}' for part in worked)} %"


def render_device_table(found: DeviceSummary) -> Table:
    """Device table for a terminal; of many ranks, those that waited least and most."""
    shown = Table(
        caption="\n".join(filter(None, (found.about, found.verdict))),
        caption_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for title in found.titles:
        shown.add_column(title, justify="left" if title == "device" else "right", no_wrap=title != "device")
    for device in _few(found.devices):
        shown.add_row(*(Text(cell) for cell in _cells(device)))
    return shown


TITLES = ("device", "share now", "of the work", "busy", "waiting", "sequences/s")


def _cells(device: DeviceUsage) -> tuple[str, ...]:
    return (
        str(device.rank),
        device.name or "-",
        str(device.last_share),
        f"{100 * device.share:.1f} %",
        f"{100 * device.busy:.0f} %",
        f"{100 * max(0.0, 1 - device.busy):.0f} %",
        "-" if device.sequences_per_s is None else formats.format_count(device.sequences_per_s),
    )


def _few(devices: Sequence[DeviceUsage]) -> list[DeviceUsage]:
    if len(devices) <= 2 * DRAWN:
        return list(devices)
    by_busy = sorted(devices, key=lambda device: (device.busy, device.rank))
    return sorted([*by_busy[:DRAWN], *by_busy[-DRAWN:]], key=lambda device: device.rank)


def render_device_card(found: DeviceSummary | None) -> list[str]:
    """Device table of the report."""
    if found is None:
        return []
    head = "".join(f"<th>{title}</th>" for title in found.titles)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _cells(device))}</tr>"
        for device in _few(found.devices)
    )
    what = "copies" if found.of_copies else "ranks"
    few = f"{2 * DRAWN} of {len(found.devices)} {what}" if len(found.devices) > 2 * DRAWN else ""
    said = "; ".join(part for part in (found.about, found.verdict, few) if part)
    body = f'<table class="inside"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    title = f"<h3>Devices<span>{html.escape(said)}</span></h3>"
    return [f'<section class="card">{title}<div class="scroll">{body}</div></section>']


# -------------------------------------------------------------------------------------------------------------- charts


def world_size_of(records: Iterable[Record]) -> int:
    """The largest number of ranks in any record; 1 without records."""
    return max((len(step.shares) for record in records if (step := parse_device_step(record)) is not None), default=1)


def device_columns(records: Sequence[Record], world: int) -> dict[str, list[float | None]]:
    """Chart columns: batch share and busy fraction of each of `world` ranks; of many ranks the minimum, median and
    maximum; none for one rank."""
    found: dict[str, list[float | None]] = {name: [] for name in _names(world)}
    for step in map(parse_device_step, records):
        values = dict.fromkeys(found) if step is None else _values(step, world)
        for name, column in found.items():
            value = values.get(name)
            column.append(None if value is None else float(f"{value:.6g}"))
    return found


def device_traces(world: int, of_copies: bool = False) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """(name, column, colour) of the curves of shares and of those of busy times; `of_copies`: `world` copies of a model
    that several ranks hold."""
    names = _names(world)
    what = "copy" if of_copies else "rank"
    labels = [f"{what} {rank}" for rank in range(world)] if world <= DRAWN else ["least", "median", "greatest"]
    colors = COLORS if world <= DRAWN else ("teal", "blue", "orange")
    half = len(names) // 2
    shares = list(zip(labels, names[:half], colors, strict=False))
    return shares, list(zip(labels, names[half:], colors, strict=False))


def _names(world: int) -> list[str]:
    if world < 2:
        return []
    keys = [str(rank) for rank in range(world)] if world <= DRAWN else ["least", "median", "greatest"]
    return [f"share_{key}" for key in keys] + [f"busy_{key}" for key in keys]


def _values(step: DeviceStep, world: int) -> dict[str, float]:
    shares = [share / sum(step.shares) for share in step.shares]
    worked = [step.busy_share(rank) for rank in range(len(step.busy_s))]
    if world <= DRAWN:
        return {f"share_{rank}": share for rank, share in enumerate(shares)} | {
            f"busy_{rank}": part for rank, part in enumerate(worked)
        }
    return {
        f"{name}_{key}": function(values)
        for name, values in (("share", shares), ("busy", worked))
        for key, function in (("least", min), ("median", statistics.median), ("greatest", max))
    }
