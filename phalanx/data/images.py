"""Image data sets with labels: from IDX files, the format of MNIST, from tensors as torchvision once stored them, or
from arrays."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from phalanx.core import renamed
from phalanx.core.errors import DataError

MOST_DIMS = 4
PROCESSED = {"train": "training.pt", "t10k": "test.pt"}  # of torchvision before 0.9


class Images:
    """A map-style data set of grayscale images and their labels, from arrays.

    Args:
        images: Images as uint8, of shape (number, height, width).
        labels: Class of each image as an integer from 0, of shape (number,).
        what: Name of the data in error messages.
        classes: Number of classes.

    Raises:
        errors.DataError: shapes do not match, or a label is not below `classes`.

    Examples:
        >>> images = phalanx.Images(np.zeros((5, 8, 8), np.uint8), np.arange(5), "blank images", classes=10)
        >>> image, label = images[3]
        >>> len(images), image.shape, label
        (5, (8, 8), 3)
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, what: str, classes: int) -> None:
        self.images, self.labels = images, labels
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise DataError(f"{what}: images of shape {images.shape} and labels of {labels.shape}; fix the files")
        if labels.max(initial=0) >= classes:
            raise DataError(f"{what}: labels up to {labels.max()}, but only {classes} classes; raise that option")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return self.images[number], int(self.labels[number])


def load_mnist(folder: str | Path, part: str, classes: int = 10) -> Images:
    """Load one part of MNIST, or of any data set in its format.

    Args:
        folder: Folder with the four IDX files, compressed by gzip or not; or with training.pt and test.pt of
            torchvision before 0.9, also in `processed` or `MNIST/processed`.
        part: "train" or "t10k".
        classes: Number of classes.

    Returns:
        Images: the data set of this part.

    Raises:
        errors.DataError: a file is missing or damaged.

    Examples:
        >>> train = phalanx.load_mnist("mnist", "train")
        >>> image, label = train[0]
    """
    folder = Path(folder).expanduser()
    places = (folder / under / PROCESSED[part] for under in ("", "processed", "MNIST/processed"))
    if (tensors := next((path for path in places if path.is_file()), None)) is not None:
        return Images(*_read_tensors(tensors), str(tensors), classes)
    images, labels = (read_idx(folder, f"{part}-{what}-ubyte") for what in ("images-idx3", "labels-idx1"))
    return Images(images, labels, f"{folder}, {part}", classes)


def _read_tensors(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a file of torch.save. Raises DataError for another file; nothing in it is run."""
    import torch  # of the modules for data this one alone needs it

    try:
        images, labels = torch.load(path, map_location="cpu", weights_only=True)
        found = images.numpy(), labels.numpy()
    except Exception as error:  # whatever a file that is none makes of the unpickler
        reason = " ".join(str(error).split()).partition(". ")[0][:200]
        raise DataError(
            f"{path} holds no pair of image and label tensors ({type(error).__name__}: {reason}); download MNIST again"
        ) from error
    if found[0].dtype != np.uint8 or found[1].dtype.kind != "i":
        raise DataError(f"{path} holds {found[0].dtype} images and {found[1].dtype} labels; give uint8 and integers")
    return found


def read_idx(folder: Path, name: str) -> np.ndarray:
    """The array (uint8, any dims) of the IDX file `name` (or `name`.gz) in `folder`. Raises DataError where it is
    missing or damaged. Source of the format: yann.lecun.com/exdb/mnist."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise DataError(f"{folder} has neither {name} nor {name}.gz; give the folder with the four MNIST files")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, dims = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{dims}I", raw, 4) if dims <= MOST_DIMS else ()
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{path} is damaged ({error}); download the file again") from error
    if (zeros, kind) != (0, 8) or not 0 < dims <= MOST_DIMS or not all(shape):
        raise DataError(f"{path} is not an IDX file of bytes (it begins with {raw[:4].hex()}); download the file again")
    if len(raw) != 4 + 4 * dims + np.prod(shape, dtype=object):
        raise DataError(f"{path} has {len(raw)} bytes, but its header says {shape}; download the file again")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)


__getattr__ = renamed.old_names(__name__)
