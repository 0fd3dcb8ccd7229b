"""The table of what was measured on the devices of a job."""

from rich.table import Table

from phalanx.layout.balance import Division
from phalanx.layout.hardware import Hardware, MeasuredDevice
from phalanx.report import event_text


def render_hardware_table(known: Hardware, division: Division) -> Table:
    """A row for each rank: its device, its speed by size of micro-batch, and its share of a step under `division`."""
    positions = known.work.get("positions")
    positions = positions if type(positions) is int and positions > 1 else 1
    unit = "tokens/s" if positions > 1 else "samples/s"
    each = "sequence" if positions > 1 else "sample"
    several = len({device.host for device in known.devices}) > 1
    copies = any(device.host_to_device_bytes_per_s for device in known.devices)
    # Fits a terminal of 80 columns: the names and the speeds of a device take as many lines as they need.
    shown = Table(caption=_caption(known, division, each), caption_justify="left", box=None, padding=(0, 2, 0, 0))
    shown.add_column("rank", justify="right", no_wrap=True)
    shown.add_column("device", min_width=8, overflow="fold")
    shown.add_column("memory", justify="right", no_wrap=True)
    shown.add_column("largest\nmicro-\nbatch", justify="right", no_wrap=True)
    shown.add_column(f"{unit} by\nmicro-batch", min_width=12)
    if positions > 1:
        shown.add_column("sequences\na second\nat best", justify="right", no_wrap=True)
    if copies:
        shown.add_column("host to\ndevice", justify="right", no_wrap=True)
    shown.add_column(f"share\nof {sum(division.shares)}", justify="right", no_wrap=True)
    for device, share in zip(known.devices, division.shares, strict=True):
        speeds = [f"{size}:{event_text.format_count(positions * size / seconds)}" for size, seconds in device.times]
        best = max((size / seconds for size, seconds in device.times), default=None)
        bandwidth = device.host_to_device_bytes_per_s
        shown.add_row(
            str(device.rank),
            _called(device, several),
            event_text.format_bytes(device.memory_bytes),
            str(device.most),
            "  ".join(speeds) or "-",
            *(["-" if best is None else event_text.format_count(best)] if positions > 1 else []),
            *(["-" if bandwidth is None else f"{event_text.format_bytes(bandwidth)}/s"] if copies else []),
            str(share),
        )
    return shown


def _called(device: MeasuredDevice, several: bool) -> str:
    name = device.name if device.name == device.model else f"{device.name} {device.model}"
    return f"{name} on {device.host}" if several else name


def _caption(known: Hardware, division: Division, each: str) -> str:
    parts = [f"speeds by {each}s of a micro-batch, of forward and backward passes alone, not compiled"]
    if known.link is not None:
        rate, latency = event_text.format_bytes(known.link.bytes_per_s), event_text.format_seconds(known.link.latency_s)
        parts.append(f"an all-reduce over all ranks: {rate}/s, and {latency} for one number")
    plural = "es" if division.parts > 1 else ""
    few = f"{min(division.own)} to {division.parts}" if division.own else str(division.parts)
    parts.append(f"each rank would take its share of a step in {few} micro-batch{plural}")
    return "; ".join(parts)
