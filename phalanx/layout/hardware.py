"""The hardware file (hardware.json): measurements of each device of a job.

Speeds depend on the work, so a file says for which it was measured (`work`); check `explain_mismatch` before use. No
torch here: `autotune/measure.py` measures.
"""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.core import format_versions
from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import write_atomic
from phalanx.core.run_paths import RunPaths
from phalanx.layout.balance import UNBOUND, Speed

VERSION = 1
ALIKE = 1.15  # ratio of the times of two devices of one model
UNLIKE = 1.25  # one that is worth measuring again
REMEASURE_HINT = "measure again with `phalanx hardware`, or delete the file"
# Of seconds, bytes and bytes a second in a file: nothing beyond was measured, and squares of these are still floats.
LEAST, MOST = 1e-18, 1e18
SHOWN = 40  # characters of what a file holds instead


@dataclass(frozen=True)
class MeasuredDevice:
    """One rank's device, as it was measured while all others were measured too."""

    rank: int
    node: int
    local_rank: int
    host: str
    name: str  # "cpu", or an accelerator with its index
    model: str  # what its maker calls it
    memory_bytes: int  # that this rank could have
    most: int  # sequences that fit into one forward and backward pass
    # (sequences, seconds) of a forward and backward pass of the whole model, by size; empty: could not be measured
    times: tuple[tuple[int, float], ...]
    host_to_device_bytes_per_s: float | None  # None for a CPU, which copies nothing
    # Of its computing that each byte costs a CPU which it sends and gets in an all-reduce; None for an accelerator, and
    # of one rank
    carries_s_per_byte: float | None = None


@dataclass(frozen=True)
class MeasuredLink:
    """An all-reduce over all ranks: bytes of the tensor per second for a large one, seconds for one number.

    `busy_latency_s`: for one number while all ranks compute, as they do when gradients travel; a CPU that has a part of
    a core answers later then. None where it was not measured, and for accelerators only.
    """

    bytes_per_s: float
    latency_s: float
    busy_latency_s: float | None = None


@dataclass(frozen=True)
class Calibration:
    """Calibration from the steps of a run (`phalanx plan --calibrate`); None for unknown values. `run` is its name and
    `steps` the number used; `host_s`: further seconds of the host per step, `update`: the measured speed of updates
    over that by the memory bandwidth of the device's kind.
    """

    run: str
    steps: int
    host_s: float | None = None
    update: float | None = None


@dataclass(frozen=True)
class Hardware:
    """`work`: what was done to measure, such as the model's shapes; `devices` in order of rank; `link` None for one;
    `learnt`: what a run has shown."""

    work: dict[str, Any]
    devices: tuple[MeasuredDevice, ...]
    link: MeasuredLink | None
    learnt: Calibration | None = None


class UnsupportedHardwareVersion(ValueError):
    """A file is of a format version that this release does not read; the text is the end of a sentence."""


def read_hardware(path: Path) -> Hardware:
    """Read what `write_hardware` wrote. Raises ConfigError, naming the file and what to do, for one that is none or
    damaged."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the hardware file {path} cannot be read ({error.strerror}); name one that `phalanx hardware` wrote"
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"the hardware file {path} is not JSON, so it is damaged; {REMEASURE_HINT}") from None
    try:
        return from_json(tree)
    except UnsupportedHardwareVersion as error:
        raise ConfigError(f"the hardware file {path} {error}") from None
    except ValueError as error:
        raise ConfigError(f"the hardware file {path} cannot be used: {error}; {REMEASURE_HINT}") from None


def read_hardware_if_valid(path: Path) -> Hardware | None:
    """The same; None where there is no file, or none that can be used."""
    try:
        return read_hardware(path) if path.exists() else None
    except ConfigError:
        return None


def write_hardware(path: Path, hardware: Hardware) -> None:
    """Write the file in one go. Raises OSError where that cannot be done."""
    write_atomic(path, json.dumps(to_json(hardware), indent=1, allow_nan=False) + "\n")


def to_json(hardware: Hardware) -> dict[str, Any]:
    return {"version": VERSION, **asdict(hardware)}


def from_json(tree: Any) -> Hardware:
    """The other way round; raises ValueError with half a sentence for anything else than what `to_json` gives."""
    if not isinstance(tree, dict):
        raise ValueError("it holds no table")
    if (wrong := format_versions.describe_version_problem(tree.get("version"), (VERSION,), REMEASURE_HINT)) is not None:
        raise UnsupportedHardwareVersion(wrong)
    work, devices, link = (_item(tree, key, "it") for key in ("work", "devices", "link"))
    if not isinstance(work, dict):
        raise ValueError(f"its work is {_shorten(work)}, not a table")
    if not isinstance(devices, list) or not devices:
        raise ValueError("it lists no devices")
    found = tuple(_device(each, number) for number, each in enumerate(devices))
    learnt = _calibration(tree.get("learnt"))
    if link is None:
        return Hardware(work, found, None, learnt)
    if not isinstance(link, dict):
        raise ValueError(f"its link is {_shorten(link)}, not a table")
    rate, latency = _positive(link, "bytes_per_s", "link"), _positive(link, "latency_s", "link")
    busy = None if link.get("busy_latency_s") is None else _positive(link, "busy_latency_s", "link")
    return Hardware(work, found, MeasuredLink(rate, latency, busy), learnt)


def explain_mismatch(hardware: Hardware, models: Sequence[str | None], work: Mapping[str, Any]) -> str | None:
    """Why it was measured for another job than that of devices of these models (None: not known yet), in order of rank,
    doing `work`; None when it fits."""
    there = [device.model for device in hardware.devices]
    if len(there) != len(models):
        return f"it was measured with {len(there)} ranks, and this job has {len(models)}"
    other = _describe_changed_device(there, models)
    if other is not None:
        return other
    for key in [*work, *(key for key in hardware.work if key not in work)]:
        measured, wanted = hardware.work.get(key), work.get(key)
        if measured != wanted:
            return f"it was measured for another piece of work: {key} was {measured!r} and is {wanted!r} now"
    return None


def find_changed_device(paths: RunPaths, models: Sequence[str]) -> str | None:
    """The rank of a run that is on a device of another model than when its devices were last measured; None where there
    is none, or models are unknown."""
    if not paths.hardware.exists():
        return None
    try:
        there = [device.model for device in read_hardware(paths.hardware).devices]
    except ConfigError:
        return None
    return _describe_changed_device(there, models) if len(there) == len(models) else None


def _describe_changed_device(there: Sequence[str], models: Sequence[str | None]) -> str | None:
    for rank, (before, now) in enumerate(zip(there, models, strict=True)):
        if now is not None and before != now:
            return f"rank {rank} was on a device called {before!r} when it was measured, and is on {now!r} now"
    return None


def fit_speeds(hardware: Hardware) -> list[Speed]:
    """The speed of each rank, in order of rank: the line through the times of its device with the least relative error.

    Devices of one model that differ by no more than ALIKE count as equal, since short measurements are noisy. Where one
    device could not be measured, all count as equal.
    """
    lines = [fit_line(device.times) for device in hardware.devices]
    known = [found for found in lines if found is not None]
    if len(known) < len(lines):
        return [Speed(1.0, 0.0, device.most) for device in hardware.devices]
    for took in _by_model(hardware, known).values():
        if max(took.values()) <= ALIKE * min(took.values()):
            mean = (
                sum(known[rank][0] for rank in took) / len(took),
                sum(known[rank][1] for rank in took) / len(took),
            )
            for rank in took:
                known[rank] = mean
    return [
        Speed(sequence_s, fixed_s, device.most, device.model)
        for (fixed_s, sequence_s), device in zip(known, hardware.devices, strict=True)
    ]


def _by_model(hardware: Hardware, lines: Sequence[tuple[float, float]]) -> dict[str, dict[int, float]]:
    """Seconds of each rank, by the model of its device, at the size at which all of that model were measured: so fixed
    costs count, too."""
    found: dict[str, dict[int, float]] = {}
    for model in sorted({device.model for device in hardware.devices}):
        ranks = [device.rank for device in hardware.devices if device.model == model]
        size = min(hardware.devices[rank].times[-1][0] for rank in ranks)
        found[model] = {rank: lines[rank][0] + size * lines[rank][1] for rank in ranks}
    return found


def describe_uneven_devices(hardware: Hardware) -> str | None:
    """Devices of one model that differ so much that other users of the machine may be the cause, as a sentence; None
    where none do, or where one could not be measured."""
    lines = [fit_line(device.times) for device in hardware.devices]
    known = [found for found in lines if found is not None]
    for model, took in _by_model(hardware, known).items() if len(known) == len(lines) else ():
        fast, slow = min(took, key=lambda rank: took[rank]), max(took, key=lambda rank: took[rank])
        if took[slow] > UNLIKE * took[fast]:
            return (
                f"once more, since rank {slow} takes {took[slow] / took[fast]:.1f} times as long as rank {fast}, both "
                f"of {model}: other work on a machine may be the cause"
            )
    return None


def merge_fastest(one: Hardware, other: Hardware) -> Hardware:
    """Of two measurements of the same devices the better of each figure: what disturbs only slows."""
    devices = []
    for first, second in zip(one.devices, other.devices, strict=True):
        times = dict(first.times)
        for size, seconds in second.times:
            times[size] = min(seconds, times.get(size, seconds))
        copies = [each.host_to_device_bytes_per_s or 0.0 for each in (first, second)]
        carries = [each.carries_s_per_byte or 0.0 for each in (first, second)]
        devices.append(
            replace(
                second,
                most=max(first.most, second.most),
                times=tuple(sorted(times.items())),
                host_to_device_bytes_per_s=max(copies) or None,
                carries_s_per_byte=min(carries) or None,
            )
        )
    links = [link for link in (one.link, other.link) if link is not None]
    return replace(other, devices=tuple(devices), link=max(links, key=lambda link: link.bytes_per_s, default=None))


def fit_line(times: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """(fixed seconds, seconds of a sequence) of the line through `times` with the least sum of squared relative errors
    that neither begins below zero nor falls; None of no times.

    >>> fixed_s, sequence_s = fit_line([(1, 3.0), (2, 5.0), (4, 9.0)])
    >>> round(fixed_s, 6), round(sequence_s, 6)
    (1.0, 2.0)
    """
    if not times:
        return None
    # Of the squares of (fixed + size * each - seconds) / seconds, by the normal equations.
    weights = [1 / seconds**2 for _, seconds in times]
    total = sum(weights)
    mean_size = sum(weight * size for weight, (size, _) in zip(weights, times, strict=True)) / total
    mean_s = sum(weight * seconds for weight, (_, seconds) in zip(weights, times, strict=True)) / total
    spread = sum(weight * (size - mean_size) ** 2 for weight, (size, _) in zip(weights, times, strict=True))
    together = sum(
        weight * (size - mean_size) * (seconds - mean_s) for weight, (size, seconds) in zip(weights, times, strict=True)
    )
    slope = together / spread if spread > 0 else 0.0
    fixed = mean_s - slope * mean_size
    if slope > 0 and fixed >= 0:
        return fixed, slope
    # The best line through the origin: more sequences always take longer, whatever noise says.
    squares = sum(weight * size**2 for weight, (size, _) in zip(weights, times, strict=True))
    return 0.0, sum(weight * size * seconds for weight, (size, seconds) in zip(weights, times, strict=True)) / squares


# ------------------------------------------------------------------------------------------------------- reading a file


def _device(tree: Any, rank: int) -> MeasuredDevice:
    where = f"device {rank}"
    if not isinstance(tree, dict):
        raise ValueError(f"its {where} is {_shorten(tree)}, not a table")
    if _whole(tree, "rank", where) != rank:
        raise ValueError(f"its devices are not in order of rank: number {rank} has rank {tree['rank']}")
    bandwidth = _item(tree, "host_to_device_bytes_per_s", where)
    carries = tree.get("carries_s_per_byte")  # files of before have none
    return MeasuredDevice(
        rank=rank,
        node=_whole(tree, "node", where),
        local_rank=_whole(tree, "local_rank", where),
        host=_text(tree, "host", where),
        name=_text(tree, "name", where),
        model=_text(tree, "model", where),
        memory_bytes=_whole(tree, "memory_bytes", where),
        most=_whole(tree, "most", where, least=1),
        times=_times(_item(tree, "times", where), where),
        host_to_device_bytes_per_s=None if bandwidth is None else _positive(tree, "host_to_device_bytes_per_s", where),
        carries_s_per_byte=None if carries is None else _positive(tree, "carries_s_per_byte", where),
    )


def _calibration(tree: Any) -> Calibration | None:
    if tree is None:
        return None
    where = "what it has learnt"
    if not isinstance(tree, dict):
        raise ValueError(f"{where} is {_shorten(tree)}, not a table")
    told = {name: _positive(tree, name, where) for name in ("host_s", "update") if tree.get(name) is not None}
    return Calibration(_text(tree, "run", where), _whole(tree, "steps", where, least=1), **told)


def _times(value: Any, where: str) -> tuple[tuple[int, float], ...]:
    wrong = ValueError(f"the times of {where} are not pairs of rising sizes and seconds above zero")
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise wrong
    pairs = [
        (size, seconds)
        for size, seconds in value
        if type(size) is int and 1 <= size <= UNBOUND and _is_positive(seconds)
    ]
    sizes = [size for size, _ in pairs]
    if len(pairs) < len(value) or sizes != sorted(set(sizes)):
        raise wrong
    return tuple((size, float(seconds)) for size, seconds in pairs)


def _item(tree: dict[str, Any], key: str, where: str) -> Any:
    if key not in tree:
        raise ValueError(f"{where} has no {key}")
    return tree[key]


def _whole(tree: dict[str, Any], key: str, where: str, least: int = 0) -> int:
    value = _item(tree, key, where)
    if type(value) is not int or value < least:
        raise ValueError(f"{key} of {where} is {_shorten(value)}, not a whole number from {least}")
    if value > MOST:
        raise ValueError(f"{key} of {where} is {_shorten(value)}, more than any device has")
    return value


def _text(tree: dict[str, Any], key: str, where: str) -> str:
    value = _item(tree, key, where)
    if not isinstance(value, str):
        raise ValueError(f"{key} of {where} is {_shorten(value)}, not a text")
    return value


def _positive(tree: dict[str, Any], key: str, where: str) -> float:
    value = _item(tree, key, where)
    if not _is_number(value) or not value > 0:
        raise ValueError(f"{key} of {where} is {_shorten(value)}, not a number above zero")
    if not _is_positive(value):
        raise ValueError(f"{key} of {where} is {_shorten(value)}, which nothing that is measured can be")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    """Whether it is a number that could have been measured; NaN is none."""
    return _is_number(value) and LEAST <= value <= MOST


def _shorten(value: Any) -> str:
    """What a file holds, no longer than a sentence can be."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = SHOWN
    return brief.repr(value)
