"""What a network allows at best: the seconds that every benchmark of communication is set against."""

from collections.abc import Sequence

HEADERS = 1.045  # Ethernet, IP and TCP around the payload, at 1,500 bytes a packet: 1514 / 1448


def seconds(payload_bytes: float, mbit: float) -> float:
    """How long a link of so many Mbit/s takes for a payload."""
    return payload_bytes * HEADERS * 8 / (mbit * 1e6)


def of_shards(payload_bytes: float, mbit: float, shares: Sequence[float]) -> float:
    """The least seconds of a reduce-scatter, or of an all-gather, of a tensor divided in these shares, one rank a node.

    In a reduce-scatter a rank must send its contribution to all that it does not own, in an all-gather it must receive
    that; the rank with the least share is last.
    """
    total = sum(shares)
    return max(seconds((1 - share / total) * payload_bytes, mbit) for share in shares)
