"""A run folder at a URL: its records here and there, and one writer at a time."""

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import RunError, StorageError
from phalanx.core.json_lines import append_line, read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths, Url
from phalanx.storage import lease, mirror, retry
from tests.helpers import run_ranks, wait_until
from tests.stores import Faults, register

ENDED = 2**22 + 1  # above what Linux gives out: no process has this number


@pytest.fixture
def url(faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(lease, "SETTLE_S", 0.0)
    return f"faulty://{tmp_path}/store/run"


def machine(tmp_path: Path, url: str, name: str, timeout_s: float = 20) -> RunPaths:
    """The run as a machine with its own cache sees it."""
    paths = mirror.make_working_paths(url, str(tmp_path / name), timeout_s)
    paths.root.mkdir(parents=True, exist_ok=True)
    return paths


def write_run(paths: RunPaths, steps: range) -> None:
    for step in steps:
        append_line(paths.metrics, {"step": step})
    paths.config.write_text("the configuration")
    paths.log(1, 0).parent.mkdir(parents=True, exist_ok=True)
    paths.log(1, 0).write_text("a log")
    paths.tokenizer.mkdir(exist_ok=True)
    (paths.tokenizer / "tokenizer.json").write_text("tokens")
    (paths.root / ".hidden").write_text("not a record")


def steps_of(paths: RunPaths) -> list[int]:
    return [record["step"] for record in read_lines(paths.metrics)]


def test_names(tmp_path: Path) -> None:
    paths = mirror.make_working_paths("s3://me:secret@bucket/runs/demo/", str(tmp_path), 5)
    assert (paths.name, paths.display_name) == ("demo", "s3://bucket/runs/demo")
    assert str(paths.checkpoints) == "s3://bucket/runs/demo/checkpoints"
    assert isinstance(paths.checkpoints, Url)
    assert paths.checkpoints.text.startswith("s3://me:secret@bucket/")
    assert paths.root.parent == tmp_path / "runs"
    others = [
        mirror.make_working_paths("s3://bucket/other/demo", str(tmp_path), 5),
        mirror.make_working_paths(paths.url.text, str(tmp_path), 5, 3),
    ]
    assert len({paths.root, *(other.root for other in others)}) == 3


def test_records_travel_from_one_machine_to_the_next(faults: Faults, tmp_path: Path, url: str) -> None:
    one, other, seen = machine(tmp_path, url, "one"), machine(tmp_path, url, "other"), {}
    write_run(one, range(1, 4))
    faults.rate = 0.1
    mirror.push_records(one, seen)
    faults.rate = 0
    before = len(faults.calls)
    mirror.push_records(one, seen)
    assert len(faults.calls) == before  # nothing has changed
    append_line(one.metrics, {"step": 4})
    mirror.push_records(one, seen)
    assert faults.calls[before:].count("mv") == 1
    mirror.fetch_records(other)
    assert steps_of(other) == [1, 2, 3, 4]
    assert (other.tokenizer / "tokenizer.json").read_text() == "tokens"
    assert not other.has_checkpoints.exists()
    assert not list(tmp_path.glob("store/run/.*"))
    with mirror.open_remote_records(url, 20) as looked:
        assert steps_of(looked) == [1, 2, 3, 4]


def test_what_a_killed_process_had_not_yet_copied_is_kept_and_what_another_wrote_wins(tmp_path: Path, url: str) -> None:
    one, other = machine(tmp_path, url, "one"), machine(tmp_path, url, "other")
    write_run(one, range(1, 4))
    mirror.push_records(one, {})
    append_line(one.metrics, {"step": 4})  # and here it is killed
    mirror.fetch_records(one)
    assert steps_of(one) == [1, 2, 3, 4]
    mirror.fetch_records(other)
    append_line(other.metrics, {"step": 4, "attempt": 2})
    append_line(other.metrics, {"step": 5, "attempt": 2})
    mirror.push_records(other, {})
    mirror.fetch_records(one)
    assert steps_of(one) == [1, 2, 3, 4, 5]
    assert one.metrics.read_bytes() == other.metrics.read_bytes()


def test_a_url_that_was_emptied_holds_no_run_any_more(tmp_path: Path, url: str) -> None:
    one = machine(tmp_path, url, "one")
    write_run(one, range(1, 4))
    mirror.fetch_records(one)
    assert [path.name for path in one.root.iterdir()] == [".hidden"]
    manifest = tmp_path / "store" / "run" / "checkpoints" / "step-00000003" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    mirror.fetch_records(one)
    assert one.has_checkpoints.is_dir()
    manifest.unlink()
    mirror.fetch_records(one)
    assert not one.has_checkpoints.exists()


def test_one_writer_at_a_time(tmp_path: Path, url: str) -> None:
    one, other = machine(tmp_path, url, "one"), machine(tmp_path, url, "other")
    lease.acquire_lease(one, os.getpid())
    lock = tmp_path / "store" / "run" / ".lock"
    beaten = {**json.loads(lock.read_text()), "beat": 1}

    def beating(pid: int, signal: int) -> None:
        lock.write_text(json.dumps(beaten))  # while the other looks whether the process still lives

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", beating)
        with pytest.raises(RunError, match=rf"in use by process {os.getpid()} on .*another --run-dir"):
            lease.acquire_lease(other, 7, stale_s=0.2)
    lease.renew_lease(one)
    lease.release_lease(one)
    assert not lock.exists()
    lease.acquire_lease(other, os.getpid(), stale_s=60)  # at once
    lease.release_lease(other)


def test_a_lease_that_nobody_renews_is_taken_over_and_its_holder_writes_no_more(tmp_path: Path, url: str) -> None:
    one, other = machine(tmp_path, url, "one"), machine(tmp_path, url, "other")
    lease.acquire_lease(one, ENDED)
    lease.acquire_lease(one, os.getpid(), stale_s=60)  # its process has ended on this machine: at once
    lease.acquire_lease(other, os.getpid(), stale_s=0.1)
    write_run(one, range(3))
    for late in (lambda: mirror.check_before_commit(one, {}), lambda: lease.renew_lease(one)):
        with pytest.raises(RunError, match="was taken over by process"):
            late()
    assert sorted(path.name for path in (tmp_path / "store" / "run").iterdir()) == [".lock"]
    lease.release_lease(one)  # not its own any more
    assert lease.is_in_use(one)
    write_run(other, range(3))
    mirror.check_before_commit(other, {})
    assert (tmp_path / "store" / "run" / "metrics.jsonl").exists()
    (tmp_path / "store" / "run" / ".lock").write_text("no JSON")
    lease.acquire_lease(one, os.getpid(), stale_s=0.1)
    lease.renew_lease(one)


def beside(placement: Placement, folder: str, dead: bool) -> list[Any]:
    """The life of the process beside a run that has come to its end; (exit code, what it said)."""
    faults = register()
    lease.SETTLE_S, mirror.PUSH_S, lease.RENEW_S = 0.0, 0.01, 0.01
    paths = machine(Path(folder), f"faulty://{folder}/store/run", "here", timeout_s=0.3)
    lease.acquire_lease(paths, os.getpid())
    write_run(paths, range(1, 4))
    write_event(paths.events, EventKind.RUN_STARTED, 3)
    faults.dead = dead
    reader, writer = os.pipe()
    os.close(writer)
    code = mirror.run_mirror(paths, reader)
    warned = [[event["attempt"], event["message"]] for event in read_lines(paths.events) if event["kind"] == "warning"]
    return [code, mirror.read_push_error(paths), warned, sorted(path.name for path in paths.root.iterdir())]


def test_the_process_beside_a_run(tmp_path: Path) -> None:
    """While the store is away it warns once; at the end everything is there, or it says what is missing."""
    for name in ("well", "dead"):
        (tmp_path / name).mkdir()
    code, said, warned, left = run_ranks(beside, 1, folder=str(tmp_path / "dead"), dead=True)[0]
    assert (code, [attempt for attempt, _ in warned]) == (1, [3])
    assert "could not be" in said
    assert "are kept locally" in warned[0][1]
    code, _, warned, left = run_ranks(beside, 1, folder=str(tmp_path / "well"), dead=False)[0]
    assert (code, warned) == (0, [])
    assert ".lease" not in left
    there = tmp_path / "well" / "store" / "run"
    assert sorted(path.name for path in there.iterdir()) == [
        "config.yaml", "events.jsonl", "logs", "metrics.jsonl", "tokenizer"
    ]  # fmt: skip
    assert (there / "logs" / "attempt-001" / "rank-00000.log").read_text() == "a log"


def test_a_run_that_was_lost_while_it_slept_writes_over_nothing(tmp_path: Path) -> None:
    code, said, kept = run_ranks(asleep, 1, folder=str(tmp_path))[0]
    assert code == ExitCode.CONFIG  # the same command would not copy these records
    assert "no longer has its lease" in said
    assert kept == list(range(1, 9))


def asleep(placement: Placement, folder: str) -> list[Any]:
    """The process beside a run wakes up when another one has taken the run to its end; (exit code, what it said, steps
    at the URL)."""
    register()
    lease.SETTLE_S, lease.RENEW_S = 0.0, 60.0
    one, other = (machine(Path(folder), f"faulty://{folder}/store/run", name) for name in ("one", "other"))
    lease.acquire_lease(one, ENDED)
    write_run(one, range(1, 4))
    lease.acquire_lease(other, os.getpid(), stale_s=0.1)
    write_run(other, range(1, 9))
    mirror.push_records(other, {})
    lease.release_lease(other)
    reader, writer = os.pipe()
    os.close(writer)
    return [
        mirror.run_mirror(one, reader),
        mirror.read_push_error(one),
        steps_of(RunPaths(Path(folder) / "store" / "run")),
    ]


def test_what_an_earlier_start_complained_of_is_forgotten(tmp_path: Path, url: str) -> None:
    one = machine(tmp_path, url, "one")
    (one.root / ".mirror").write_text("the store was away last week")
    lease.acquire_lease(one, os.getpid())
    assert mirror.read_push_error(one) == "the copying process died"


def test_an_event_of_an_export_is_added_unless_a_run_is_going_on(tmp_path: Path, url: str) -> None:
    one = machine(tmp_path, url, "one")
    write_run(one, range(1, 4))
    write_event(one.events, EventKind.FINISHED, 2)
    mirror.push_records(one, {})
    with mirror.open_remote_records(url, 20) as paths:
        mirror.append_event(paths, EventKind.EXPORTED, folder="x")
    lease.acquire_lease(one, os.getpid())
    with mirror.open_remote_records(url, 20) as paths:
        mirror.append_event(paths, EventKind.EXPORTED, folder="y")
        found = [(event["kind"], event["attempt"]) for event in read_lines(paths.events)]
    assert found == [(EventKind.FINISHED, 2), (EventKind.EXPORTED, 2)]


def test_a_store_that_is_away_at_the_start_is_a_sentence(faults: Faults, tmp_path: Path, url: str) -> None:
    faults.dead = True
    with pytest.raises(StorageError, match=r"could not be read for 0.2 s"):
        lease.acquire_lease(machine(tmp_path, url, "one", timeout_s=0.2), os.getpid())


def test_an_overtaken_copy_is_not_the_one_that_stays(faults: Faults, tmp_path: Path, url: str) -> None:
    """The process beside a run and the one that commits copy the same files: what is there last is what is newest."""
    one = machine(tmp_path, url, "one")
    lease.acquire_lease(one, os.getpid())
    append_line(one.metrics, {"step": 1})
    faults.stalled = {"mv"}
    beside = threading.Thread(target=mirror.push_records, args=(one, {}))
    beside.start()
    wait_until(lambda: faults.calls.count("mv") == 2)  # of the lease, and of the metrics with one step
    faults.stalled = set()
    append_line(one.metrics, {"step": 2})
    committing = threading.Thread(target=mirror.check_before_commit, args=(one, {}))
    committing.start()
    committing.join(0.3)
    faults.release.set()
    beside.join()
    committing.join()
    assert [record["step"] for record in read_lines(tmp_path / "store" / "run" / "metrics.jsonl")] == [1, 2]


def test_a_lease_that_is_gone_is_lost(tmp_path: Path, url: str) -> None:
    """Who took it over meanwhile may have come to its end already: its records must not be written over."""
    one, other = machine(tmp_path, url, "one"), machine(tmp_path, url, "other")
    lease.acquire_lease(one, ENDED)
    write_run(one, range(1, 4))
    lease.acquire_lease(other, os.getpid(), stale_s=0.1)
    write_run(other, range(1, 9))
    mirror.push_records(other, {})
    lease.release_lease(other)
    for late in (lambda: mirror.check_before_commit(one, {}), lambda: lease.renew_lease(one)):
        with pytest.raises(RunError, match="no longer has its lease"):
            late()
    assert not lease.is_in_use(one)
    assert steps_of(RunPaths(tmp_path / "store" / "run")) == list(range(1, 9))


def test_a_run_that_is_lost_while_its_records_are_copied_commits_nothing(
    faults: Faults, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machine(tmp_path, url, "one"), machine(tmp_path, url, "other")
    lease.acquire_lease(one, ENDED)
    write_run(one, range(1, 4))

    def slow(paths: RunPaths, seen: mirror.FileVersions) -> None:
        lease.acquire_lease(other, os.getpid(), stale_s=0.1)

    monkeypatch.setattr(mirror, "push_records", slow)
    with pytest.raises(RunError, match="was taken over"):
        mirror.check_before_commit(one, {})


def test_a_full_disk_here_does_not_lose_the_lease(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine(tmp_path, url, "one")
    lease.acquire_lease(one, os.getpid())
    lock = tmp_path / "store" / "run" / ".lock"
    before = lock.read_text()
    monkeypatch.setattr(lease, "write_atomic", no_room)
    lease.renew_lease(one)
    assert lock.read_text() != before


def no_room(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_working_folder_of_a_run_that_was_at_this_url_before(tmp_path: Path, url: str) -> None:
    """Emptied, then used by another machine for a new run: nothing of the old one comes back."""
    one, other = machine(tmp_path, url, "one"), machine(tmp_path, url, "other")
    write_run(one, range(1, 9))
    write_event(one.events, EventKind.RUN_STARTED, 1)
    mirror.push_records(one, {})
    shutil.rmtree(tmp_path / "store")
    other.config.write_text("another configuration")
    write_event(other.events, EventKind.RUN_STARTED, 1)  # and before its first step it is killed
    mirror.push_records(other, {})
    mirror.fetch_records(one)
    assert one.config.read_text() == "another configuration"
    assert one.events.read_bytes() == other.events.read_bytes()
    assert not one.metrics.exists()
    assert not (one.root / "logs").exists()


def test_an_event_of_an_export_is_added_to_what_was_written_meanwhile(tmp_path: Path, url: str) -> None:
    one = machine(tmp_path, url, "one")
    write_run(one, range(1, 4))
    write_event(one.events, EventKind.RUN_STARTED, 1)
    mirror.push_records(one, {})
    with mirror.open_remote_records(url, 20) as paths:
        write_event(one.events, EventKind.FINISHED, 2)  # a whole start, while the export was going on
        mirror.push_records(one, {})
        mirror.append_event(paths, EventKind.EXPORTED, folder="x")
    kinds = [event["kind"] for event in read_lines(tmp_path / "store" / "run" / "events.jsonl")]
    assert kinds == [EventKind.RUN_STARTED, EventKind.FINISHED, EventKind.EXPORTED]
