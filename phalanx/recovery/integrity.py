"""What tells memory that was damaged from memory that was written: checks of words, of short records, and of slots.

They are against accidents (a flipped bit, a page that was not written), not against somebody who means it. No torch.
"""

import zlib

WORD_BITS = 40  # of a value in a checked word; the other 24 are its check
VOID_WORD = (1 << 64) - 1
PAGE_BYTES = 4096  # of which each has a sum of its own
_FRAME_BYTES = 8


def encode_word(value: int, place: int) -> int:
    """A value that is not negative as an unsigned word of eight bytes that carries its own check; the same value at
    another `place` has another one."""
    assert 0 <= value < 1 << WORD_BITS, value
    return value | _check_bits(value, place) << WORD_BITS


def decode_word(word: int, place: int) -> int | None:
    """The value of a word; None where it has been damaged."""
    value = word & ((1 << WORD_BITS) - 1)
    return value if word >> WORD_BITS == _check_bits(value, place) else None


def _check_bits(value: int, place: int) -> int:
    return zlib.crc32(value.to_bytes(8, "little") + place.to_bytes(8, "little")) & 0xFFFFFF


def frame_record(record: bytes) -> bytes:
    """A record behind its length and its CRC-32."""
    return len(record).to_bytes(4, "little") + zlib.crc32(record).to_bytes(4, "little") + record


def unframe_record(memory: bytes | memoryview) -> bytes | None:
    """The record that memory begins with; None where it has been damaged."""
    length = int.from_bytes(memory[:4], "little")
    record = bytes(memory[_FRAME_BYTES : _FRAME_BYTES + length])
    whole = len(record) == length and zlib.crc32(record) == int.from_bytes(memory[4:_FRAME_BYTES], "little")
    return record if whole else None


def frame_bytes(record: bytes) -> int:
    """What `frame_record` takes."""
    return _FRAME_BYTES + len(record)


def checksum(memory: memoryview) -> int:
    """The CRC-32 of the sums of memory's pages, of which it must be whole ones; a sum is that of the page's words of
    eight bytes, modulo 2^64. As fast as memory can be read, which a CRC of all of it is not."""
    import numpy as np  # not at the top: agents import this module, and need no numbers

    if not len(memory):
        return 0
    words = np.frombuffer(memory, dtype=np.int64).reshape(-1, PAGE_BYTES // 8)
    return zlib.crc32(words.sum(axis=1).tobytes())
