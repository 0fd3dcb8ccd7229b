"""The run folder: who holds it, what a refused start leaves, and what a damaged note of the data says."""

import fcntl
import os
import platform
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.core.errors import RunError
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.data.record_files import TokenFile
from phalanx.elastic.supervisor import node_requests
from phalanx.launch.schedulers import scheduler
from phalanx.trainer import run_folder
from tests.another_user import as_root, begin, open_path
from tests.helpers import wait_until
from tests.token_sets import TokenWriter

__all__ = ["open_path"]


def refuse(paths: RunPaths) -> None:
    """A start that finds something wrong after it has taken the folder."""
    with pytest.raises(RunError, match="the real reason"), run_folder.hold_run_folder(paths):
        raise RunError("the real reason")


def test_a_refused_start_takes_its_folder_away(tmp_path: Path) -> None:
    refuse(RunPaths(tmp_path / "runs" / "new"))
    assert not (tmp_path / "runs" / "new").exists()


def test_a_refused_start_takes_its_folder_away_though_another_node_looks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "run")
    passing, listdir = paths.root / ".passing", os.listdir

    def looked_at(place: Path) -> list[str]:
        names = listdir(place)
        passing.touch()
        threading.Timer(0.03, passing.unlink).start()
        return names

    monkeypatch.setattr(os, "listdir", looked_at)
    refuse(paths)
    assert not paths.root.exists()


@pytest.mark.parametrize("name", ["empty", "link", "."])
def test_a_refused_start_leaves_a_folder_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "link").symlink_to(empty)
    monkeypatch.chdir(empty if name == "." else tmp_path)
    refuse(RunPaths(Path(name)))
    assert (tmp_path / "link").is_symlink()
    assert list(empty.iterdir()) == []


def test_a_lock_names_whoever_it_is_held_for(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    lock, _ = run_folder.lock_run_folder(paths, 4711)
    assert scheduler.find_lock_holder(paths.lock) == (4711, platform.node())
    os.close(lock)


def test_what_a_start_has_written_stays(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    with run_folder.hold_run_folder(paths):
        paths.config.write_text("x")
    assert sorted(os.listdir(paths.root)) == [".lock", "config.yaml"]


def test_a_folder_that_vanished_meanwhile_is_no_error(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    with run_folder.hold_run_folder(paths):
        paths.lock.unlink()
        paths.root.rmdir()
    assert not paths.root.exists()


@pytest.mark.parametrize("whole", [False, True])
def test_a_lock_that_was_taken_away_while_waiting_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Between opening and locking, its holder before removes the file, or all of the folder."""
    paths, take, tries = RunPaths(tmp_path / "run"), run_folder._try_lock, []

    def late(lock: int, of: RunPaths) -> None:
        if not tries:
            paths.lock.unlink()
            if whole:
                paths.root.rmdir()
        tries.append(lock)
        take(lock, of)

    monkeypatch.setattr(run_folder, "_try_lock", late)
    lock, created = run_folder.lock_run_folder(paths)
    assert created
    assert len(tries) == 2
    assert os.path.samestat(os.fstat(lock), os.stat(paths.lock))
    with pytest.raises(RunError, match=f"in use by process {os.getpid()} on"):
        run_folder.lock_run_folder(paths)
    os.close(lock)


@pytest.mark.parametrize("place", ["file", "dangling", "file/inside"])
def test_a_place_that_can_be_no_folder_is_a_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"cannot be written .* choose another with --run-dir"):
        run_folder.lock_run_folder(RunPaths(tmp_path / place))


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "checkpoints", "logs/attempt-001", "logs/attempt-001/rank-00000.log"]
)
def test_links_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run / name).parent.mkdir(parents=True)
    elsewhere.mkdir()
    (run / "latest").symlink_to("versions.json")  # what stays within is fine
    (tmp_path / "link").symlink_to(run)  # and so is a folder that is behind a link
    for place in (run, tmp_path / "link"):
        os.close(run_folder.lock_run_folder(RunPaths(place))[0])
    (run / name).symlink_to(elsewhere)
    for place in (run, tmp_path / "link"):
        with pytest.raises(RunError, match=rf"has a link, {name}, that points outside to .*/elsewhere, but a run"):
            run_folder.lock_run_folder(RunPaths(place))
    (run / "events.jsonl").touch()
    with pytest.raises(RunError, match="points outside"):
        node_requests.write_request(RunPaths(run), "n1", node_requests.NodeRequestKind.DRAIN, "hot")
    assert list(elsewhere.iterdir()) == []


def test_a_lock_that_leads_nowhere_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "no" / "such")
    with pytest.raises(RunError, match="cannot be written"):
        run_folder.lock_run_folder(RunPaths(tmp_path))


Known = dict[str, dict[str, Any]]


@pytest.fixture
def tokens(tmp_path: Path) -> Known:
    writer = TokenWriter(tmp_path / "tokens", vocab_size=10, eos_id=0, key="k")
    writer.append(np.array([1, 2, 3]))
    writer.finish()
    return {"train": run_folder.fingerprint_tokens(TokenFile(tmp_path / "tokens"))}


@pytest.mark.parametrize(
    "text", ["[]", "null", "7", '"train"', '{"train": 3}', '{"train": []}', "{}", pytest.param("[" * 99999, id="deep")]
)
def test_a_note_of_the_data_that_is_none_is_a_sentence(tmp_path: Path, tokens: Known, text: str) -> None:
    paths = RunPaths(tmp_path)
    paths.data.write_text(text)
    with pytest.raises(RunError, match="restore it or choose another --run-dir"):
        run_folder.check_run_data(paths, tokens, resuming=True)


def test_other_tokens_are_named(tmp_path: Path, tokens: Known) -> None:
    paths = RunPaths(tmp_path)
    run_folder.check_run_data(paths, tokens, resuming=False)
    run_folder.check_run_data(paths, tokens, resuming=True)
    paths.data.write_text('{"train": {"tokens": 5, "crc32": null}}')
    with pytest.raises(RunError, match="train tokens differ"):
        run_folder.check_run_data(paths, tokens, resuming=True)


def test_every_file_of_a_tokenizer_goes_with_the_run(tmp_path: Path) -> None:
    """A run and its export must not lose added tokens, a chat template or another kind of vocabulary."""
    from phalanx.config import load
    from phalanx.core.run_paths import TOKENIZER_FILES

    tokenizer, paths = tmp_path / "tokenizer", RunPaths(tmp_path / "run")
    tokenizer.mkdir()
    paths.root.mkdir()
    for name in TOKENIZER_FILES:
        (tokenizer / name).write_text(name)
    run_folder.write_start(paths, load.build_config({"model": {"preset": "llama-3.2-1b"}}, "here"), tokenizer)
    assert sorted(file.name for file in paths.tokenizer.iterdir()) == sorted(TOKENIZER_FILES)
    assert {"added_tokens.json", "chat_template.json", "spiece.model", "vocab.txt"} <= set(TOKENIZER_FILES)


def test_an_attempt_that_left_only_logs_counts(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert run_folder.next_attempt(paths) == 1
    write_event(paths.events, EventKind.RUN_STARTED, 3)
    assert run_folder.next_attempt(paths) == 4
    paths.log(5, 0).parent.mkdir(parents=True)
    (paths.log(5, 0).parent.parent / "attempt-of-mine").mkdir()
    assert run_folder.next_attempt(paths) == 6


def hold(lock: str, until: str, exclusive: bool) -> bool:
    """Hold a lock as somebody who may only read it, until a file is there."""
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        Path(until).with_name("held").touch()
        wait_until(Path(until).exists)
    return True


@as_root
@pytest.mark.parametrize("exclusive", [True, False])
def test_another_user_who_holds_the_lock_does_not_keep_the_run(open_path: Path, exclusive: bool) -> None:
    paths = RunPaths(open_path / "run")
    (open_path / "signs").mkdir()
    (open_path / "signs").chmod(0o777)
    paths.root.mkdir()
    paths.lock.write_text("1 on somewhere")
    paths.lock.chmod(0o644)  # as earlier versions have left it
    held = begin(hold, str(paths.lock), str(open_path / "signs/until"), exclusive)
    wait_until((open_path / "signs/held").exists)
    with run_folder.hold_run_folder(paths):
        assert paths.lock.stat().st_mode & 0o777 == 0o600
        assert paths.lock.read_text().startswith(f"{os.getpid()} on ")
        with pytest.raises(RunError, match=f"in use by process {os.getpid()} on"):
            run_folder.lock_run_folder(paths)
        assert "Permission" in begin(hold, str(paths.lock), str(open_path / "signs/until"), exclusive)()
        (open_path / "signs/until").touch()
        assert held() is True


def test_a_lock_whose_owner_has_ended_is_said_to_be_held_by_another_process(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    with run_folder.hold_run_folder(paths):
        paths.lock.write_text(f"{gone} on {platform.node()}\n")
        with pytest.raises(RunError, match=rf"a process other than .*{gone} on .*which has ended.*fuser -v"):
            run_folder.lock_run_folder(paths)
