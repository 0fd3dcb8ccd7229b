"""Parse the text of a cluster, such as `4x(8xA100-80GB), 2x(8xV100-32GB), 200Gb/s`, times, token counts and prices.

    cluster = part {"," part}
    part    = [nodes "x"] "(" [devices "x"] kind ")"  |  [devices "x"] kind  |  speed  |  latency

Devices without brackets are of one node. The speed is that of the network between nodes, of each node and in one
direction; the latency that of a message. Without them it is as DEFAULT_SPEED and DEFAULT_LATENCY say.
"""

import math
import re

from rich.cells import cell_len

from phalanx.core.errors import ConfigError
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.device_catalog import DEVICE_KINDS, DeviceKind, find_kind, unknown_kind_message

DEFAULT_SPEED = 100e9  # bits/s: one link of 100 Gb/s a node
DEFAULT_LATENCY = 5e-6
MOST_DEVICES = 1_000_000
MOST_DIGITS = 9  # of a number of devices
# Bits/s and seconds, beyond which a network is a slip of the pen.
LEAST_SPEED, MOST_SPEED, MOST_LATENCY = 1e3, 1e15, 10.0
MOST_AMOUNT = 1e30
PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SPACE = re.compile(r"\s*")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
TIMES = re.compile(r"(\d+)\s*[x*\N{MULTIPLICATION SIGN}]\s*", re.I)
SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(bit|bits|b|B|byte|bytes)\s*(?:/s|ps)(?![\w-])", re.I)
LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|ns)(?![\w-])", re.I)
LATENCIES = {
    "n": 1e-9,
    "u": 1e-6,
    "\N{GREEK SMALL LETTER MU}": 1e-6,
    "m": 1e-3,
}  # by folded letter: of mu there are two
NAME = re.compile(r"[A-Za-z][\w.+-]*(?:[ ][A-Za-z0-9][\w.+-]*)*")
AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmbt]?)\s*", re.I)
AMOUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def parse_cluster(text: str) -> ClusterSpec:
    """Parse a cluster. Raises ConfigError whose second line points at the wrong character."""
    groups: list[NodeGroup] = []
    speed: float | None = None
    latency: float | None = None
    at = _skip(text, 0)
    if at == len(text):
        raise _wrong(text, at, "the text is empty; write, for instance, 4x(8xA100-80GB), 200Gb/s")
    while True:
        if match := SPEED.match(text, at):
            if speed is not None:
                raise _wrong(text, at, "the speed of the network was given before; give it once")
            speed = _bits(text, at, match)
        elif match := LATENCY.match(text, at):
            if latency is not None:
                raise _wrong(text, at, "the latency of the network was given before; give it once")
            latency = float(match[1]) * LATENCIES[match[2][0].casefold()]
            if latency > MOST_LATENCY:
                raise _wrong(text, at, f"a latency above {MOST_LATENCY:g} s; there must be a digit too many")
        else:
            group, end = _group(text, at)
            groups.append(group)
            after = _next(text, end)
            if after is None:
                break
            at = after
            continue
        after = _next(text, match.end())
        if after is None:
            break
        at = after
    if not groups:
        raise _wrong(text, 0, "it names a network and no devices; put them before it, such as 4x(8xA100-80GB)")
    if sum(group.devices for group in groups) > MOST_DEVICES:
        raise _wrong(text, 0, f"it has more than {MOST_DEVICES:,} devices; there must be a digit too many")
    return ClusterSpec(tuple(groups), speed or DEFAULT_SPEED, DEFAULT_LATENCY if latency is None else latency)


def _group(text: str, at: int) -> tuple[NodeGroup, int]:
    """One part, and where it ends."""
    match = TIMES.match(text, at)
    bracket = match is not None and text[_skip(text, match.end()) :].startswith("(")
    nodes, start = _times(text, at, "nodes" if bracket else "devices")
    start = _skip(text, start)
    if text[start : start + 1] != "(":
        if nodes is not None and TIMES.match(text, start):
            raise _wrong(text, start, "devices of several nodes need brackets; write it as 4x(8xA100-80GB)")
        kind, end = _kind(text, start)
        return NodeGroup(1, nodes or 1, kind), end  # what stands before a kind are devices of one node
    inside = _skip(text, start + 1)
    devices, inside = _times(text, inside, "devices")
    kind, end = _kind(text, _skip(text, inside))
    end = _skip(text, end)
    if text[end : end + 1] != ")":
        raise _wrong(text, end, "the bracket that was opened is not closed here; write it as 4x(8xA100-80GB)")
    return NodeGroup(nodes or 1, devices or 1, kind), end + 1


def _times(text: str, at: int, what: str) -> tuple[int | None, int]:
    match = TIMES.match(text, at)
    if match is None:
        if number := NUMBER.match(text, at):
            raise _wrong(text, number.end(), f"after {number[0]} an x with a kind of device, or Gb/s, is expected")
        return None, at
    if len(match[1]) > MOST_DIGITS:
        raise _wrong(text, at, f"more than {MOST_DEVICES:,} devices; there must be a digit too many")
    if int(match[1]) < 1:
        raise _wrong(text, at, f"0 {what} are not possible; write their number, or remove the part")
    return int(match[1]), match.end()


def _kind(text: str, at: int) -> tuple[DeviceKind, int]:
    match = NAME.match(text, at)
    if match is None:
        raise _wrong(text, at, f"a kind of device is expected here, one of {', '.join(DEVICE_KINDS)}")
    found, end = find_kind(match[0]), match.end()
    for gap in re.finditer(" ", match[0]):
        # Text after a blank that begins another part means that a comma is missing.
        if found is None and any(form.match(text, at + gap.end()) for form in (TIMES, SPEED, LATENCY)):
            end = at + gap.start()
            found = find_kind(text[at:end])
    if found is None:
        raise _wrong(text, at, unknown_kind_message(match[0]))
    return found, end


def _next(text: str, at: int) -> int | None:
    """Where the next part begins; None at the end."""
    at = _skip(text, at)
    if at == len(text):
        return None
    if text[at] != ",":
        raise _wrong(text, at, "a comma or the end is expected here")
    at = _skip(text, at + 1)
    if at == len(text):
        raise _wrong(text, at, "nothing follows the comma; remove it")
    return at


def _bits(text: str, at: int, match: re.Match[str]) -> float:
    bits = float(match[1]) * PREFIX[match[2].casefold()] * (8 if match[3] == "B" or "byte" in match[3].lower() else 1)
    if bits <= 0:
        raise _wrong(text, at, "a network of speed 0 carries nothing; give its true speed, such as 100Gb/s")
    if bits < LEAST_SPEED:
        raise _wrong(
            text, at, f"a network below {LEAST_SPEED / 1e3:g} kb/s; its unit must be another one, such as Gb/s"
        )
    if bits > MOST_SPEED:
        raise _wrong(text, at, f"a network above {MOST_SPEED / 1e12:g} Tb/s; there must be a digit too many")
    return bits


def _skip(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return match.end() if match else at


def _wrong(text: str, at: int, why: str) -> ConfigError:
    line = "".join(character if character.isprintable() else " " for character in text)
    return ConfigError(
        f"the cluster cannot be read at character {at + 1}: {why}\n  {line}\n  {' ' * cell_len(line[:at])}^"
    )


# ------------------------------------------------------------------------------------------------------------- amounts


def parse_amount(text: str, what: str) -> float:
    """`300e9`, `300B`, `1.4T`: a number above 0. Raises ConfigError, which names `what` it is for."""
    match = AMOUNT.fullmatch(text)
    try:
        value = float(match[1]) * AMOUNTS[match[2].casefold()] if match else float(text)
    except ValueError:
        value = math.nan
    if not value > 0 or math.isinf(value):
        raise ConfigError(f"{what} {text!r} is no number above zero; write it as 300e9, 300B or 1.4T")
    if value > MOST_AMOUNT:
        raise ConfigError(
            f"{what} {text!r} is above {MOST_AMOUNT:g}, so there must be a digit too many; write it as 1.4T"
        )
    return value


# ------------------------------------------------------------------------------------------------------------- written


def format_cluster(there: ClusterSpec) -> str:
    """Format a cluster as `parse_cluster` reads it, except heterogeneous devices of one node, which a plus joins."""
    text = ""
    for group in there.groups:
        text += (" + " if group.shares_node else ", ") if text else ""
        devices = f"{group.per_node}x{group.kind.name}"
        text += devices if group.nodes == 1 else f"{group.nodes}x({devices})"
    return f"{text}, {there.between_bits_per_s / 1e9:g}Gb/s" if there.nodes > 1 else text


def add_nodes(there: ClusterSpec, group: int, more: int) -> ClusterSpec:
    """The same with `more` nodes (less, where negative) in one of its groups."""
    counts = [each.nodes + (more if number == group else 0) for number, each in enumerate(there.groups)]
    return there.resize_groups(counts)
