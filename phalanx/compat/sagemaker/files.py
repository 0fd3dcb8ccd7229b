"""Checkpoint folders, local or at S3: PyTorch's reader and writer, with hooks around the writing."""

import contextlib
import functools
import io
import logging
import os
import random
import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from phalanx.compat.pickles import load_metadata
from phalanx.core.errors import CheckpointError, ConfigError
from phalanx.storage import files as storage

ATTEMPTS, FIRST_PAUSE_S = 3, 0.2
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
                found = load_metadata(cast("IO[bytes]", file))
            found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
            found.storage_meta.load_id = self.load_id
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist, so no checkpoint was completed there; name another folder, or load on as many "
                "tensor and expert parallel ranks as it was saved on, which have one each, a local one on as many "
                "shards, too"
            ) from None
        except Exception as error:  # whatever a file that is none makes of the unpickler
            raise unreadable_error(path, error) from None
        return found

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """One tensor or value, a separate archive, whose checksums PyTorch writes and does not check."""
        part = super()._slice_file(file, sinfo)
        if getattr(sinfo, "transform_descriptors", None) or not torch.serialization.get_crc32_options():
            return part
        held = io.BytesIO(part.read())  # PyTorch's view of a file does not find its own end, as zipfile has to
        if held.getbuffer()[:2] == b"PK" and (bad := zipfile.ZipFile(held).testzip()) is not None:
            path = os.path.join(self.path, str(sinfo.relative_path))
            raise CheckpointError(
                f"{path} is damaged: {bad} does not match its checksum; download the checkpoint again, or load "
                "another one"
            )
        held.seek(0)
        return held


def unreadable_error(path: str | os.PathLike[str], error: BaseException) -> CheckpointError:
    """The error for a checkpoint, or a file of one, that cannot be read."""
    reason = " ".join(str(error).split()).partition(". ")[0][:300] or type(error).__name__
    return CheckpointError(f"{path} cannot be read ({reason}); download the checkpoint again, or load another one")


def check_path_exists(path: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """A path as it is. Raises ConfigError where there is none."""
    if path is None or path == "":
        raise ConfigError("no checkpoint location was given; pass checkpoint_id=")
    return path


def path_to_file_system(
    path: str | os.PathLike[str], s3_region: str | None = None, s3client_config: Any = None
) -> FileSystem:
    """What reads and writes files at a path. Raises ConfigError for settings of S3 where the path is none of it."""
    if is_s3_uri(path):
        return S3FileSystem(s3_region, s3client_config=s3client_config)
    if s3_region is not None or s3client_config is not None:
        raise ConfigError(f"s3_region and s3client_config are for s3:// URLs, not for {path}; remove them")
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
                "s3client_config configures a client that is not used here; remove it, and configure S3 with "
                "environment variables (AWS_ENDPOINT_URL, AWS_PROFILE and the like)"
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
