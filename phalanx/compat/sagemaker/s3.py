"""Checkpoints at `s3://` URLs: a file system for PyTorch's reader and writer. Each operation is tried again until a
deadline, and a file is seen when all of it has arrived."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from phalanx.core.errors import ConfigError
from phalanx.storage import files as storage

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
