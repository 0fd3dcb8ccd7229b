"""Labelled images as a data set: from IDX files, the format that MNIST and its kin are published in, or from arrays."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from phalanx.core.errors import DataError

MOST_DIMS = 4


class Images:
    """A map-style data set of (image uint8 (H, W), label); `what` names it in errors. Raises DataError."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, what: str, classes: int) -> None:
        self.images, self.labels = images, labels
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise DataError(f"{what}: images of shape {images.shape} and labels of {labels.shape}; mend the files")
        if labels.max(initial=0) >= classes:
            raise DataError(f"{what}: labels up to {labels.max()}, but only {classes} classes; raise that option")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return self.images[number], int(self.labels[number])


def mnist(folder: str | Path, part: str, classes: int = 10) -> Images:
    """One part ("train" or "t10k") of a folder with the four files of MNIST, zipped or not. Raises DataError."""
    folder = Path(folder).expanduser()
    images, labels = (read_idx(folder, f"{part}-{what}-ubyte") for what in ("images-idx3", "labels-idx1"))
    return Images(images, labels, f"{folder}, {part}", classes)


def read_idx(folder: Path, name: str) -> np.ndarray:
    """The array (uint8, any dims) of the IDX file `name` (or `name`.gz) in `folder`. Raises DataError where it is
    missing or damaged. Source of the format: yann.lecun.com/exdb/mnist."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise DataError(f"{folder} has neither {name} nor {name}.gz; name the folder with the four files of MNIST")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, dims = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{dims}I", raw, 4) if dims <= MOST_DIMS else ()
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{path} is damaged ({error}); fetch the file again") from error
    if (zeros, kind) != (0, 8) or not 0 < dims <= MOST_DIMS or not all(shape):
        raise DataError(f"{path} is no IDX file of bytes (it begins with {raw[:4].hex()}); fetch the file again")
    if len(raw) != 4 + 4 * dims + np.prod(shape, dtype=object):
        raise DataError(f"{path} has {len(raw)} bytes, but its header promises {shape}; fetch the file again")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)
