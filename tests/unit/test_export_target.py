"""Exports to a URL: file by file, what makes it a model last, and no half of one."""

import errno
import os
import signal
from pathlib import Path

import pytest

from phalanx.config import load
from phalanx.core.errors import ConfigError, StorageError
from phalanx.core.placement import Placement
from phalanx.core.run_paths import Url
from phalanx.data.cache import prune
from phalanx.storage import local_copies, retry
from phalanx.trainer import export
from tests.helpers import run_ranks
from tests.stores import Faults

FILES = ("model-1.safetensors", "model-2.safetensors")


def write(url: Url, cache: Path, seen: list[list[str]]) -> None:
    config = load.build_config({"model": {"preset": "llama-3.2-1b"}, "data": {"cache": str(cache)}}, "here")
    with export.open_export_target(url, config) as (local, take):
        assert isinstance(local, Path)
        assert take is not None
        local.mkdir()
        for name in FILES:
            (local / name).write_text(name)
            take(local / name)
            seen.append([path.name for path in local.iterdir()])  # at most one shard is on the disk
        for name in ("config.json", "tokenizer.json"):
            (local / name).write_text(name)


def test_what_makes_it_a_model_comes_last(faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    there, seen = tmp_path / "there", []
    faults.rate = 0.1
    write(Url(f"faulty://{there}", 20), tmp_path / "cache", seen)
    faults.rate = 0
    assert seen == [[], []]
    assert {path.name: path.read_text() for path in there.iterdir()} == {
        name: name for name in (*FILES, "config.json", "tokenizer.json")
    }
    order = sorted(there.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert order[-1].name == "config.json"
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(ConfigError, match="is not empty"):
        write(Url(f"faulty://{there}", 20), tmp_path / "cache", seen)
    assert export.WRITE_LAST[0] == "config.json"


def killed_within_an_export(placement: Placement, url: str, cache: str) -> None:
    config = load.build_config({"model": {"preset": "llama-3.2-1b"}, "data": {"cache": cache}}, "here")
    with export.open_export_target(Url(url, 20), config) as (local, _):
        assert isinstance(local, Path)
        local.mkdir()
        (local / "model.safetensors").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_export_left_is_swept_by_the_next_command(tmp_path: Path) -> None:
    cache, url = tmp_path / "cache", Url(f"file://{tmp_path}/there", 20)
    with pytest.raises(AssertionError, match="killed by SIGKILL"):
        run_ranks(killed_within_an_export, 1, url=url.text, cache=str(cache))
    assert [path.suffix for path in sorted(cache.iterdir())] == [".lock", ".partial"]
    with local_copies.lock_file(next(cache.glob("*.lock")), 1):  # as if it were still going on
        prune(cache)
        assert len(list(cache.iterdir())) == 2
    prune(cache)  # as every preparation of data does, and every export
    assert list(cache.iterdir()) == []


def test_one_that_fails_is_taken_away(faults: Faults, tmp_path: Path) -> None:
    there = tmp_path / "there"
    faults.error = lambda: OSError(errno.ENOSPC, "No space left on device")
    faults.fails_at = 12  # within the second shard
    with pytest.raises(StorageError, match="free space there"):
        write(Url(f"faulty://{there}", 20), tmp_path / "cache", [])
    assert len(faults.calls) > 12
    assert list(there.iterdir()) == []
    assert list((tmp_path / "cache").iterdir()) == []
