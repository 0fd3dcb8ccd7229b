"""Checkpoint folders, local or at S3: PyTorch's reader and writer, with hooks around the writing."""

import contextlib
import functools
import io
import logging
import math
import os
import pickle
import random
import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from phalanx.core.errors import CheckpointError, ConfigError
from phalanx.storage import files as storage

ATTEMPTS, FIRST_PAUSE_S = 3, 0.2
MAX_COMPARED = 4096  # chunks of a tensor: two and two, in memory
_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}  # fmt: skip
Hook = Callable[["DistributedFileSystemWriter"], object]


class DistributedFileSystemWriter(FileSystemWriter):
    """PyTorch's writer of a folder, or of one at an `s3://` URL. Each rank calls `pre_write_hooks` before and
    `post_write_hooks` after its writing, with this writer, which knows whether it `is_coordinator`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        pre_write_hooks: Sequence[Hook] = (),
        post_write_hooks: Sequence[Hook] = (),
        s3_region: str | None = None,
        s3client_config: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(check_path_exists(path), *args, **options)
        self.fs = path_to_file_system(path, s3_region, s3client_config)
        self.path = self.fs.init_path(path)
        self.is_coordinator = False
        self._before, self._after = list(pre_write_hooks), list(post_write_hooks)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.fs = path_to_file_system(checkpoint_id)
        super().reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        for hook in self._before:
            hook(self)
        written: Future[list[Any]] = super().write_data(plan, planner)
        written.wait()
        for hook in self._after:
            hook(self)
        return written


class _Metadata(pickle.Unpickler):
    """Reads what a folder says of its checkpoint, and calls nothing but the classes that say it: PyTorch's own reader
    runs whatever the file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)


class DistributedFileSystemReader(FileSystemReader):
    """PyTorch's reader of a folder, or of one at an `s3://` URL, which runs no code of the files in it. Errors are
    CheckpointErrors."""

    def __init__(
        self, path: str | os.PathLike[str], *args: Any, s3_region: str | None = None, s3client_config: Any = None
    ) -> None:
        super().__init__(check_path_exists(path), *args)
        self.fs = path_to_file_system(path, s3_region, s3client_config)
        self.path = self.fs.init_path(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.fs = path_to_file_system(checkpoint_id)
        super().reset(checkpoint_id)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        path = self._get_metadata_path(options.get("rank"))
        try:
            with self.fs.create_stream(path, "rb") as file:
                found = _Metadata(file).load()
            assert isinstance(found, Metadata) and isinstance(found.storage_data, dict), "it is none of a checkpoint"
            names = [str(each.relative_path) for each in found.storage_data.values()]
            assert not any(os.path.basename(name) != name for name in names), "it names files of another folder"
            for name, each in found.state_dict_metadata.items():
                assert not isinstance(each, TensorStorageMetadata) or _is_covered(each), (
                    f"{name} has other parts than all"
                )
            found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
            found.storage_meta.load_id = self.load_id
        except Exception as error:  # whatever a file that is none makes of the unpickler
            raise unreadable_error(path, error) from None
        return found

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """One tensor or value, an archive of its own, whose checksums PyTorch writes and does not look at."""
        part = super()._slice_file(file, sinfo)
        if getattr(sinfo, "transform_descriptors", None) or not torch.serialization.get_crc32_options():
            return part
        held = io.BytesIO(part.read())  # PyTorch's view of a file does not find its own end, as zipfile has to
        if held.getbuffer()[:2] == b"PK" and (bad := zipfile.ZipFile(held).testzip()) is not None:
            path = os.path.join(self.path, str(sinfo.relative_path))
            raise CheckpointError(
                f"{path} is damaged: {bad} has another checksum than it was written with; fetch the checkpoint "
                "again, or load another one"
            )
        held.seek(0)
        return held


def _is_covered(tensor: TensorStorageMetadata) -> bool:
    """Whether its chunks cover a tensor and no element is in two: where there is none, PyTorch's reader leaves what was
    in memory before. (A chunk may be named twice, as copies of one tensor are.)"""
    chunks = {(tuple(each.offsets), tuple(each.sizes)) for each in tensor.chunks}
    if not chunks or sum(math.prod(sizes) for _, sizes in chunks) != math.prod(tensor.size):
        return not chunks and not math.prod(tensor.size)
    begins, sizes = np.array(list(chunks), np.int64).reshape(len(chunks), 2, len(tensor.size)).swapaxes(0, 1)
    if (begins < 0).any() or (sizes < 0).any() or (begins + sizes > np.array(tensor.size, np.int64)).any():
        return False
    if len(chunks) > MAX_COMPARED:
        return True
    before = (begins[:, None] + sizes[:, None] <= begins[None]).any(axis=-1)
    empty = (sizes == 0).any(axis=-1)
    return bool((before | before.T | np.eye(len(chunks), dtype=bool) | empty | empty[:, None]).all())


def unreadable_error(path: str | os.PathLike[str], error: BaseException) -> CheckpointError:
    """What to say of a checkpoint, or a file of one, that cannot be read."""
    reason = " ".join(str(error).split()).partition(". ")[0][:300] or type(error).__name__
    return CheckpointError(f"{path} cannot be read ({reason}); fetch the checkpoint again, or load another one")


def check_path_exists(path: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """A path as it is. Raises ConfigError where there is none."""
    if path is None or path == "":
        raise ConfigError("there is nothing to put a checkpoint into or take it from; pass checkpoint_id=")
    return path


def path_to_file_system(
    path: str | os.PathLike[str], s3_region: str | None = None, s3client_config: Any = None
) -> FileSystem:
    """What reads and writes files at a path. Raises ConfigError for settings of S3 where the path is none of it."""
    if is_s3_uri(path):
        return S3FileSystem(s3_region, s3client_config=s3client_config)
    if s3_region is not None or s3client_config is not None:
        raise ConfigError(f"s3_region and s3client_config are for s3:// URLs, not for {path}; leave them out")
    return FileSystem()


def retry_with_jitter(function: Any) -> Any:
    """A decorator that tries again, after a random pause, what failed with an OSError."""
    inner = function.__func__ if isinstance(function, staticmethod) else function

    @functools.wraps(inner)
    def call(*args: Any, **options: Any) -> Any:
        for attempt in range(ATTEMPTS):
            try:
                return inner(*args, **options)
            except OSError:
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(FIRST_PAUSE_S * 2**attempt * (0.5 + random.random()))
        raise AssertionError("unreachable")

    return staticmethod(call) if isinstance(function, staticmethod) else call


# ---------------------------------------------------------------------------------- checkpoints at `s3://` URLs
# Each operation is tried again until a deadline, and a file is seen when all of it has arrived.


Place = str | os.PathLike[str]


class S3FileSystem(FileSystem):
    """Objects of S3 as files. `region`: that of the bucket, by default what the environment says."""

    def __init__(self, region: str | None = None, s3_client: Any = None, s3client_config: Any = None) -> None:
        if s3_client is not None or s3client_config is not None:
            raise ConfigError(
                "s3client_config is for the client of another library, which is not used here; leave it out, and say "
                "where S3 is and who asks by the environment (AWS_ENDPOINT_URL, AWS_PROFILE and the like)"
            )
        if region is not None:
            storage.set_region(region)

    @contextlib.contextmanager
    def create_stream(self, path: Place, mode: str) -> Iterator[Any]:
        """A file to read, or one to write, which is sent when the block ends and never when it raises."""
        url = format_s3_path(path)
        if "w" not in mode:
            with storage.open_read(url) as stream:
                yield stream
            return
        with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
            local = Path(folder, "file")
            with open(local, "wb") as stream:
                yield stream
            storage.upload(local, url)

    def concat_path(self, path: Place, suffix: str) -> str:
        return storage.join_url(format_s3_path(path), suffix)

    def init_path(self, path: Place) -> str:
        return format_s3_path(path)

    def rename(self, path: Place, new_path: Place) -> None:
        storage.write_bytes(format_s3_path(new_path), storage.read_bytes(format_s3_path(path)))
        self.rm_file(path)

    def mkdir(self, path: Place) -> None:
        """Nothing: a folder is there when a file is in it."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        return is_s3_uri(checkpoint_id)

    def exists(self, path: Place) -> bool:
        return storage.exists(format_s3_path(path))

    def rm_file(self, path: Place) -> None:
        storage.remove([format_s3_path(path)])

    def ls(self, path: Place) -> list[str]:
        return [one.url for one in storage.list_folder(format_s3_path(path))]


def is_s3_uri(uri: Place) -> bool:
    return str(uri).startswith("s3:/")


def format_s3_path(path: Place) -> str:
    """An S3 URI that went through a Path, and lost a slash there, as it was."""
    return re.sub(r"^s3:/+", "s3://", str(path))


# ------------------------------------------------------------------- folders of checkpoints: how many of them are kept


logger = logging.getLogger("phalanx.sagemaker")

# Marks of that library in the checkpoints of its version 1.
SMP_IS_PARTIAL_KEY = "smp_is_partial"
SMP_IS_LOAD_INFO_KEY = "smp_is_load_info"


def last_number(name: str) -> int:
    """The last whole number in a folder's name, -1 where there is none: sorts by step."""
    found = re.findall(r"\d+", os.path.basename(name))
    return int(found[-1]) if found else -1


def limit_num_subdirs(
    root: str | os.PathLike[str],
    max_to_keep: int,
    sort_fn: Callable[[str], Any] = last_number,
    regex: str | None = None,
    log: bool = True,
) -> list[str]:
    """Remove the first of the folders below `root`, which may be an `s3://` URL, whose names match `regex`, in the
    order of `sort_fn`, so that `max_to_keep` are left; 0 or less keeps all. Only where `log`, which one rank should
    say. Gives those removed."""
    if not log or max_to_keep <= 0:
        return []
    root = format_s3_path(root)
    matching = sorted((name for name in _folders(root) if regex is None or re.match(regex, name)), key=sort_fn)
    removed = [os.path.join(root, name) for name in matching[: max(0, len(matching) - max_to_keep)]]
    for folder in removed:
        logger.info("removing %s", folder)
        if is_s3_uri(folder):
            storage.remove(one.url for one in storage.list_folder(folder, recursive=True))
        else:
            shutil.rmtree(folder)
    return removed


def _folders(root: str) -> list[str]:
    if is_s3_uri(root):
        return [one.name for one in storage.list_folder(root) if one.folder]
    return [name for name in os.listdir(root) if os.path.isdir(os.path.join(root, name))] if os.path.isdir(root) else []
