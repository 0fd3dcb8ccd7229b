"""HDF5 shards of masked sequences as NVIDIA's BERT writes them, to be converted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

Arrays = dict[str, Any]


def write_shard(
    path: Path,
    rows: int,
    *,
    width: int = 32,
    predictions: int = 5,
    vocab: int = 70,
    seed: int = 0,
    change: Callable[[Arrays], Any] | None = None,
) -> Arrays:
    """Write a shard of `rows` sequences whose masked tokens follow from their neighbours; returns what is in it.

    Token 4 stands where one is masked, and what stood there is one more than the token before it. `change` may spoil
    the arrays first.
    """
    generator = np.random.default_rng(seed)
    arrays: Arrays = {
        "input_ids": np.zeros((rows, width), np.int32),
        "input_mask": np.zeros((rows, width), np.int8),
        "segment_ids": np.zeros((rows, width), np.int8),
        "masked_lm_positions": np.zeros((rows, predictions), np.int32),
        "masked_lm_ids": np.zeros((rows, predictions), np.int32),
        "next_sentence_labels": generator.integers(0, 2, rows).astype(np.int8),
    }
    for row in range(rows):
        length = int(generator.integers(12, width + 1))
        middle = int(generator.integers(4, length - 3))
        tokens = generator.integers(5, vocab - 1, length)
        asked = int(generator.integers(1, predictions + 1))
        places = np.sort(generator.choice(np.setdiff1d(np.arange(2, length - 1, 2), [middle, middle + 1]), asked))
        places = np.unique(places)
        arrays["masked_lm_ids"][row, : len(places)] = tokens[places - 1] + 1
        tokens[places] = 4
        tokens[0], tokens[middle], tokens[-1] = 2, 3, 3
        arrays["input_ids"][row, :length] = tokens
        arrays["input_mask"][row, :length] = 1
        arrays["segment_ids"][row, middle + 1 : length] = 1
        arrays["masked_lm_positions"][row, : len(places)] = places
    if change is not None:
        change(arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for key, values in arrays.items():
            file.create_dataset(key, data=values)
    return arrays
