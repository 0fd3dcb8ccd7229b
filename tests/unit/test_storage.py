"""Files at URLs: patience with stores that fail and stall, and nothing half-written."""

import errno
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.registry import known_implementations

from phalanx.core.errors import ConfigError, StorageError
from phalanx.storage import files as storage
from phalanx.storage import local_copies, retry
from tests.helpers import wait_until
from tests.stores import Faults, S3Server

DATA = bytes(range(256)) * 40


def parts() -> Iterator[bytes]:
    """DATA in three uneven parts."""
    yield DATA[:10]
    yield DATA[10:5000]
    yield DATA[5000:]


@pytest.fixture(params=["faulty", "s3", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder in each kind of store: with moving, with whole objects, and one of which storage knows nothing."""
    if request.param == "s3":
        return str(request.getfixturevalue("bucket"))
    request.getfixturevalue("faults")
    return f"{request.param}://{tmp_path}/root"


def test_what_is_written_is_read(root: str, tmp_path: Path) -> None:
    assert storage.list_folder(root) == []
    assert storage.get_entry(f"{root}/a/one.bin") is None
    storage.write_chunks(f"{root}/a/one.bin", parts)
    storage.write_bytes(f"{root}/a/b/two.txt", b"two")
    storage.write_bytes(f"{root}/a/empty", b"")
    assert [(one.name, one.size, one.folder) for one in storage.list_folder(f"{root}/a")] == [
        ("b", 0, True), ("empty", 0, False), ("one.bin", len(DATA), False)
    ]  # fmt: skip
    below = [f"{root}/a/b/two.txt", f"{root}/a/empty", f"{root}/a/one.bin"]
    assert [one.url for one in storage.list_folder(root, recursive=True)] == below
    assert [one.url for one in storage.glob(f"{root}/a/*.bin")] == [below[2]]
    assert [one.url for one in storage.glob(f"{root}/**/two.txt")] == [below[0]]
    assert [one.url for one in storage.glob(f"{root}/**")] == below
    assert [one.url for one in storage.glob(f"{root}/[ab]/?/t*")] == [below[0]]
    assert [one.url for one in storage.glob(f"{root}/a")] == below
    assert [one.url for one in storage.glob(below[1])] == [below[1]]
    assert storage.glob(f"{root}/b*/*") == []
    assert storage.read_bytes(below[2]) == DATA
    assert storage.read_bytes(below[2], 3, 3000) == DATA[3:3000]
    assert storage.read_bytes(below[2], 7) == DATA[7:]
    with storage.open_read(below[2], 5) as file:
        assert file.read(10) + file.read() == DATA[5:]
        file.seek(-4, 2)
        assert file.read() == DATA[-4:]
    storage.download(below[2], tmp_path / "local" / "copy")
    assert (tmp_path / "local" / "copy").read_bytes() == DATA
    storage.write_bytes(f"{root}/a/empty", b"no more")
    assert storage.upload(tmp_path / "local" / "copy", f"{root}/up") == len(DATA)
    assert storage.read_bytes(f"{root}/up") == DATA
    assert storage.read_bytes(f"{root}/a/empty") == b"no more"
    first = storage.get_entry(f"{root}/up")
    storage.remove([f"{root}/up", f"{root}/up"])
    assert first is not None
    assert not storage.exists(f"{root}/up")


def test_operations_that_fail_now_and_then_are_tried_again(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    url = f"faulty://{tmp_path}/there"
    faults.rate = 0.15
    for number in range(10):
        storage.write_bytes(f"{url}/{number}", DATA[number:])
        assert storage.read_bytes(f"{url}/{number}") == DATA[number:]
    assert [entry.size for entry in storage.glob(f"{url}/*")] == [len(DATA) - number for number in range(10)]
    storage.remove(f"{url}/{number}" for number in range(9))
    faults.rate = 0
    assert [entry.name for entry in storage.list_folder(url) if not entry.name.startswith(".")] == ["9"]


def test_a_torn_write_is_never_seen_under_the_file_s_name(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a write that breaks in the middle, nor one of which the store has lost the end."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    path = tmp_path / "file"
    path.write_bytes(b"old")
    seen: list[bytes] = []

    def watching() -> Iterator[bytes]:
        for part in parts():
            seen.append(path.read_bytes())
            yield part

    faults.tear, faults.swallow = [4, 5000], []
    storage.write_chunks(f"faulty://{path}", watching)
    faults.swallow = [4, 5000]
    storage.write_chunks(f"faulty://{path}", watching)
    assert set(seen) == {b"old", DATA}
    assert seen.count(b"old") == 1 + 2 + 3  # two torn tries and the good one
    assert seen.count(DATA) == 3 * 3
    assert path.read_bytes() == DATA
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_back_off_and_its_end(faults: Faults, tmp_path: Path) -> None:
    faults.dead = True
    with pytest.raises(
        StorageError, match=r"could not be read for 0.8 s in [2-4] tries \(OSError: .*out of order"
    ) as no:
        storage.read_bytes(f"faulty://me:secret@{tmp_path}/x?key=secret", timeout_s=0.8)
    assert 2 <= len(faults.calls) <= 4  # pauses of at most 0.25, 0.5, ... seconds, of at least half of that
    assert "secret" not in str(no.value)
    assert isinstance(no.value, OSError)


def test_a_stalled_operation_is_left_behind(faults: Faults, tmp_path: Path) -> None:
    """The second try succeeds, and the first, should it ever wake up, changes nothing any more."""
    url = f"faulty://{tmp_path}/file"
    faults.stalled = {"close"}
    before = threading.active_count()

    def once() -> Iterator[bytes]:
        yield from parts()
        if faults.calls.count("close") == 1:  # the try before is stuck in it
            faults.stalled = set()

    storage.write_chunks(url, once, timeout_s=0.9)
    assert (tmp_path / "file").read_bytes() == DATA
    storage.write_bytes(url, b"newer")
    faults.release.set()
    wait_until(lambda: threading.active_count() <= before)
    assert (tmp_path / "file").read_bytes() == b"newer"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    faults.stalled, faults.release = {"cat"}, threading.Event()
    with pytest.raises(StorageError, match=r"nothing moved for 0.1 s"):
        storage.read_bytes(url, timeout_s=0.3)
    faults.release.set()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(errno.EACCES, "no"), "access is denied"),
        (type("NoCredentialsError", (Exception,), {})("none"), "credentials are missing .* AWS_ACCESS_KEY_ID"),
        (OSError(errno.ENOSPC, "No space left on device"), "free space there"),
        (ValueError("bad name"), "correct the URL"),
        (type("ParamValidationError", (Exception,), {})("Invalid bucket name"), "correct the URL"),
        (FileNotFoundError(errno.ENOENT, "The specified bucket does not exist"), "its bucket does not exist"),
    ],
)
def test_what_no_retry_mends_ends_at_once(faults: Faults, tmp_path: Path, error: Exception, sentence: str) -> None:
    def fail() -> BaseException:
        return error

    faults.dead, faults.error = True, fail
    with pytest.raises((ConfigError, StorageError), match=sentence):
        storage.read_bytes(f"faulty://{tmp_path}/x")
    assert faults.calls == ["cat"]


def test_schemes_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"class": "no_such_package.Files", "err": "Please install no-such-package"}
    monkeypatch.setitem(known_implementations, "nodriver", known)
    with pytest.raises(ConfigError, match="Please install no-such-package"):
        storage.list_folder("nodriver://host/x")
    with pytest.raises(ConfigError, match="Protocol not known: nobody"):
        storage.write_bytes("nobody://host/x", b"")
    assert [storage.is_url(text) for text in ("s3://b/x", "/a/b", "a://", "hub:x/y", "C:/x")] == [
        True, False, True, False, False
    ]  # fmt: skip


def test_a_chain_of_drivers_is_no_local_path() -> None:
    """It would be one otherwise, and what was to be in a store would lie in a folder of a strange name."""
    assert not storage.is_url("a::b")
    with pytest.raises(ConfigError, match=r"simplecache::\.\.\. chains drivers") as no:
        storage.is_url("simplecache::s3://me:secret@bucket/x")
    assert "secret" not in str(no.value)


def test_a_driver_that_connects_when_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried as long as any other, and no URL of it is shown with its password."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    with pytest.raises(StorageError, match=r"ftp://127.0.0.1:1/x could not be read .*refused") as no:
        storage.read_bytes("ftp://me:secret@127.0.0.1:1/x", timeout_s=1)
    assert "secret" not in str(no.value)


def test_a_large_object_of_which_a_part_is_missing_is_none(
    bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large enough for an upload in parts; what breaks it makes no object and leaves no parts that cost money."""
    from s3fs import S3FileSystem

    monkeypatch.setattr(S3FileSystem, "default_block_size", 5 << 20)
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    found: list[storage.Entry | None] = []

    def chunks() -> Iterator[bytes]:
        for _ in range(6):
            yield bytes(1 << 20)
        found.append(storage.get_entry(f"{bucket}/large"))
        if len(found) == 1:
            raise OSError(errno.EIO, "the disk that it is read from")
        yield b"end"

    storage.write_chunks(f"{bucket}/large", chunks)
    assert found == [None, None]
    after = storage.get_entry(f"{bucket}/large")
    assert after is not None
    assert after.size == (6 << 20) + 3
    with urllib.request.urlopen(f"{s3_server.address}/{bucket.split('/')[2]}?uploads") as answer:
        assert b"<Upload>" not in answer.read()


def test_an_s3_that_refuses(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="the file does not exist"):
        storage.read_bytes(f"{bucket}/none")
    with pytest.raises(ConfigError, match="its bucket does not exist"):
        storage.write_bytes("s3://no-such-bucket/x", b"1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    storage._make_filesystem.cache_clear()
    with pytest.raises(ConfigError, match=r"credentials are missing or rejected \(NoCredentialsError\)"):
        storage.list_folder(bucket)


def test_the_local_copy_of_a_folder(faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched once, again when it has changed, and complete or not at all."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    there, cache = tmp_path / "there" / "model", str(tmp_path / "cache")
    there.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "README.md"):
        (there / name).write_text(name)
    url = f"faulty://{there}"
    faults.rate = 0.15
    copy = local_copies.fetch_folder(url, cache, weights=False)
    assert sorted(one.name for one in copy.iterdir()) == [".source.json", "config.json"]
    local_copies.fetch_folder(url, cache)
    faults.rate = 0
    assert copy == local_copies.local_copy_path(url + "/", cache)
    names = [".source.json", "config.json", "model.safetensors"]  # the same weights twice would be waste
    assert sorted(one.name for one in copy.iterdir()) == names
    (copy / "config.json").write_text("as it was")
    for weights in (True, False):
        local_copies.fetch_folder(url, cache, weights=weights)
    assert (copy / "config.json").read_text() == "as it was"
    assert (copy / "model.safetensors").exists()
    (there / "config.json").write_text("another")
    faults.tear, faults.dead = [], False
    local_copies.fetch_folder(url, cache)
    assert (copy / "config.json").read_text() == "another"
    (there / "config.json").write_text("a third one")
    faults.error = lambda: PermissionError(errno.EACCES, "no")
    faults.fails_at = len(faults.calls) + 5  # on the way
    with pytest.raises(ConfigError, match="denied"):
        local_copies.fetch_folder(url, cache)
    assert (copy / "config.json").read_text() == "another"
    assert json.loads((copy / ".source.json").read_text())["config.json"][0] == len("another")
    monkeypatch.setattr(local_copies, "LOCK_TIMEOUT_S", 0.05)
    with (
        local_copies.lock_file(copy.with_name(f".{copy.name}.lock"), 0),
        pytest.raises(ConfigError, match="another process has held"),
    ):
        local_copies.fetch_folder(url, cache)
    with pytest.raises(ConfigError, match="no model files"):
        local_copies.fetch_folder(f"faulty://{tmp_path}/nothing", cache)
    assert local_copies.fetch_folder("~/model", cache) == Path("~/model").expanduser()


def test_a_long_range_is_read_in_parts(faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one that takes long, but moves on, is not taken for a stall."""
    monkeypatch.setattr(storage, "CHUNK_BYTES", 1000)
    (tmp_path / "file").write_bytes(DATA)
    url, step = f"faulty://{tmp_path}/file", faults.step

    def slow(operation: str) -> None:
        step(operation)
        time.sleep(0.05 if operation == "cat" else 0)

    monkeypatch.setattr(faults, "step", slow)
    assert storage.read_bytes(url, 7, len(DATA), timeout_s=1) == DATA[7:]
    assert faults.calls.count("cat") == 11
    into = bytearray(len(DATA) - 20)
    with storage.open_read(url, 20, timeout_s=1) as file:
        assert file.readinto(into) == len(into)
    assert into == DATA[20:]
    assert faults.calls.count("cat") == 22
