"""Stores that tests write to: a real S3 server on loopback, and a file system that fails, stalls and tears on cue."""

import errno
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from tests.helpers import free_port, wait_until

BUCKET = "phalanx"


class S3Server:
    """moto's server in a process of its own, with an empty bucket. `environment` leads a process's S3 driver to it."""

    def __init__(self, log: Path) -> None:
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        with open(log, "wb") as output:
            command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        wait_until(self._answers, 60)
        urllib.request.urlopen(urllib.request.Request(f"{self.address}/{BUCKET}", method="PUT"))

    def _answers(self) -> bool:
        assert self._process.poll() is None, "moto_server has ended"
        try:
            urllib.request.urlopen(f"{self.address}/moto-api/")
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Faults:
    """What goes wrong in `faulty://`, and what was asked of it so far."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rate = 0.0  # how often a call fails
        self.fails_at = 0  # the call of this number fails
        self.dies_at = 0  # the call of this number and all after it fail
        self.dead = False  # all calls fail
        self.error: Callable[[], BaseException] = lambda: OSError(errno.EIO, "the store is out of order")
        self.tear: list[int] = []  # writes that break after so many bytes, in order
        self.swallow: list[int] = []  # writes of which all after so many bytes is lost in silence, in order
        self.slow_s = 0.0  # what each write takes
        self.dice = random.Random(7)
        self.stalled: set[str] = set()  # operations that do not return until `release`
        self.release = threading.Event()

    def step(self, operation: str) -> None:
        self.calls.append(operation)
        if operation in self.stalled:
            self.release.wait(60)
        if operation == "write":
            time.sleep(self.slow_s)
        self.dead = self.dead or len(self.calls) == self.dies_at
        if self.dead or len(self.calls) == self.fails_at or self.dice.random() < self.rate:
            raise self.error()


class FaultyFile:
    """A file being written."""

    def __init__(self, file: LocalFileOpener, faults: Faults) -> None:
        self._file, self._faults = file, faults
        self._breaks = faults.tear.pop(0) if faults.tear else None
        self._loses = faults.swallow.pop(0) if faults.swallow else None
        self._done = 0

    def write(self, data: Any) -> int:
        self._faults.step("write")
        part = bytes(data)
        if self._loses is not None:
            part = part[: max(0, self._loses - self._done)]
        if self._breaks is not None:
            part = part[: max(0, self._breaks - self._done)]
        self._file.write(part)
        self._done += len(part)
        if self._breaks is not None and self._done >= self._breaks:
            self._file.flush()
            raise self._faults.error()
        return len(data)

    def close(self) -> None:
        self._faults.step("close")
        self._file.close()


class FaultyFileSystem(LocalFileSystem):
    """`faulty:///path` is the local path, behind `faults`."""

    protocol = "faulty"
    faults = Faults()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("faulty://") or "/")

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self.faults.step("open")
        file = LocalFileOpener(path, mode, fs=self)
        return FaultyFile(file, self.faults) if mode == "wb" else file

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        self.faults.step("ls")
        return super().ls(path, detail=detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self.faults.step("info")
        return super().info(path, **kwargs)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> Any:
        self.faults.step("mv")
        os.replace(self._strip_protocol(path1), self._strip_protocol(path2))

    def rm_file(self, path: str) -> None:
        self.faults.step("rm")
        super().rm_file(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self.faults.step("cat")
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))


def register() -> Faults:
    """Make `faulty://` known to this process and those it forks, with no fault yet."""
    FaultyFileSystem.faults = Faults()
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    return FaultyFileSystem.faults
