"""HDF5 shards of sequences that are masked already, as NVIDIA's BERT writes them and HetSeq reads them.

Keys: `input_ids`, `input_mask` and `segment_ids` (sequences, tokens); `masked_lm_positions` and `masked_lm_ids`
(sequences, predictions), where a position of 0 ends the list; `next_sentence_labels` (sequences,), 0 where the second
segment follows the first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError
from phalanx.core.run_paths import redact_url
from phalanx.storage import files as storage

KEYS = {
    "input_ids": 2,
    "input_mask": 2,
    "segment_ids": 2,
    "masked_lm_positions": 2,
    "masked_lm_ids": 2,
    "next_sentence_labels": 1,
}
BLOCK_SEQUENCES = 4096  # sequences read at a time

Array = NDArray[np.int64]


@dataclass(frozen=True)
class ShardBlock:
    """Some sequences of a shard, padded as there: `tokens`, `segments` (n, S); `places`, `labels` (n, P); `follows`
    (n,); `lengths` and `predicted` (n,), how much of a row is no padding."""

    tokens: Array
    segments: Array
    lengths: Array
    places: Array
    labels: Array
    predicted: Array
    follows: Array

    def columns(self, chosen: NDArray[np.bool_]) -> dict[str, tuple[Array, Array]]:
        """The values of the chosen sequences behind one another, and how many each has, by column."""
        inside = _before(self.lengths[chosen], self.tokens.shape[1])
        asked = _before(self.predicted[chosen], self.places.shape[1])
        lengths, predicted = self.lengths[chosen], self.predicted[chosen]
        return {
            "tokens": (self.tokens[chosen][inside], lengths),
            "segments": (self.segments[chosen][inside], lengths),
            "places": (self.places[chosen][asked], predicted),
            "labels": (self.labels[chosen][asked], predicted),
            "follows": (self.follows[chosen], np.ones(int(chosen.sum()), np.int64)),
        }


def read_blocks(path: str, vocab_size: int) -> Iterator[tuple[ShardBlock, float]]:
    """The sequences of a shard, and what part of it is read by then. Raises DataError naming file and key."""
    import h5py

    name = redact_url(path)
    if storage.is_url(path):
        raise DataError(f"{name} is at a URL, and HDF5 files are read in parts all over; copy it to a local disk")
    try:
        with h5py.File(path, "r") as file:
            found = {key: _dataset(file, key, dim, name) for key, dim in KEYS.items()}
            count = _check_shapes(found, name)
            for start in range(0, count, BLOCK_SEQUENCES):
                stop = min(start + BLOCK_SEQUENCES, count)
                parts = {key: _read(found[key], key, start, stop, name) for key in KEYS}
                yield _block(parts, start, vocab_size, name), stop / count
    except DataError:
        raise
    except Exception as error:  # whatever a file that is damaged makes of the library
        raise DataError(f"{name} is no whole HDF5 file ({_first_line(error)}); write or fetch it again") from None


def _dataset(file: Any, key: str, dim: int, name: str) -> Any:
    import h5py

    if key not in file:
        raise DataError(
            f"{name} has no key {key!r} (it has: {', '.join(list(file)[:8]) or 'none'}), so it is no shard of masked "
            "sequences; write it again"
        )
    dataset = file[key]
    if not isinstance(dataset, h5py.Dataset) or dataset.ndim != dim or dataset.dtype.kind not in "iu":
        raise DataError(f"{name} has no {dim}-dimensional whole numbers under {key!r}; write it again")
    return dataset


def _check_shapes(found: dict[str, Any], name: str) -> int:
    """The number of sequences. Raises DataError where keys disagree."""
    first, *others = found
    for key in others:
        if len(found[key]) != len(found[first]):
            raise DataError(
                f"{name} has {len(found[first])} sequences under {first!r} but {len(found[key])} under {key!r}; write "
                "it again"
            )
    for key, like in (
        ("input_mask", "input_ids"),
        ("segment_ids", "input_ids"),
        ("masked_lm_ids", "masked_lm_positions"),
    ):
        if found[key].shape != found[like].shape:
            raise DataError(
                f"{name} has rows of {found[key].shape[1]} under {key!r} but of {found[like].shape[1]} under {like!r}; "
                "write it again"
            )
    return len(found[first])


def _read(dataset: Any, key: str, start: int, stop: int, name: str) -> Array:
    try:
        return dataset[start:stop].astype(np.int64)
    except OSError as error:
        raise DataError(
            f"{name} is damaged under {key!r} near sequence {start} ({_first_line(error)}); write or fetch it again"
        ) from None


def _block(parts: dict[str, Array], start: int, vocab_size: int, name: str) -> ShardBlock:
    tokens, mask, places = parts["input_ids"], parts["input_mask"], parts["masked_lm_positions"]
    lengths = mask.sum(1)
    predicted = np.where((places == 0).any(1), (places == 0).argmax(1), places.shape[1])
    asked = _before(predicted, places.shape[1])
    follows = parts["next_sentence_labels"]

    def refuse(wrong: Any, key: str, what: str) -> None:
        if wrong.any():
            row = start + int(np.flatnonzero(wrong)[0])
            raise DataError(f"{name} holds {what} under {key!r} in sequence {row}; write it again")

    refuse((mask != _before(lengths, mask.shape[1])).any(1), "input_mask", "no ones followed by zeros")
    refuse(lengths == 0, "input_mask", "an empty sequence")
    for key in ("input_ids", "masked_lm_ids"):
        values = parts[key]
        refuse(((values < 0) | (values >= vocab_size)).any(1), key, f"a token beyond the tokenizer's {vocab_size}")
    refuse(((places < 0) | ((places >= lengths[:, None]) & asked)).any(1), "masked_lm_positions", "a place in no text")
    segments = parts["segment_ids"]
    refuse(((segments < 0) | (segments > 1)).any(1), "segment_ids", "something other than 0 and 1")
    refuse((follows < 0) | (follows > 1), "next_sentence_labels", "something other than 0 and 1")
    return ShardBlock(tokens, segments, lengths, places, parts["masked_lm_ids"], predicted, follows)


def _before(counts: Array, width: int) -> NDArray[np.bool_]:
    return np.arange(width) < counts[:, None]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
