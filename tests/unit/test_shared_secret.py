"""The secret of a rendezvous in a file of the user's own: who makes it, who finds it, and whose is not believed."""

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.core.errors import ConfigError
from phalanx.elastic.membership import shared_secret
from phalanx.elastic.membership.rendezvous import parse_rendezvous
from phalanx.elastic.membership.shared_secret import VARIABLE, file_of, load_or_create_secret
from tests.another_user import NOBODY, as_root, begin, open_path
from tests.dist.command import call
from tests.helpers import ALL, ROOT, run_ranks

SECRET = "sixteen or more characters"
__all__ = ["open_path"]


def test_each_rendezvous_has_a_secret_that_its_user_alone_can_read(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    first = parse_rendezvous("tcp://127.0.0.1:29500", home)
    assert first.secret_file is not None and first.secret_file.is_relative_to(tmp_path)
    assert len(first.secret) == 64 and first.secret not in repr(first)
    assert stat.S_IMODE(first.secret_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.secret_file.parent.stat().st_mode) == 0o700
    assert os.listdir(first.secret_file.parent) == [first.secret_file.name]
    for same in ("tcp://127.0.0.1:29500", "tcp://localhost:29500", "tcp://[::1]:29500/"):
        assert parse_rendezvous(same, home).secret == first.secret
    others = [
        parse_rendezvous(f"tcp://{there}", home)
        for there in ("127.0.0.1:29501", "n1:29500", "127.0.0.1.evil.org:29500")
    ]
    assert len({place.secret for place in [first, *others]}) == 4
    assert parse_rendezvous("tcp://N1:29500", home).secret == others[1].secret  # a name is the same in capitals
    assert parse_rendezvous("tcp://127.0.0.1:29500", {"HOME": str(tmp_path / "of another")}).secret != first.secret


def test_a_secret_that_is_set_is_taken_and_no_file_made(tmp_path: Path) -> None:
    place = parse_rendezvous("tcp://127.0.0.1:29500", {"HOME": str(tmp_path), VARIABLE: SECRET})
    assert (place.secret, place.secret_file, os.listdir(tmp_path)) == (SECRET, None, [])
    with pytest.raises(ConfigError, match="has 5 characters and could be guessed"):
        parse_rendezvous("tcp://127.0.0.1:29500", {"HOME": str(tmp_path), VARIABLE: "short"})


@pytest.mark.parametrize("ahead_s", [0.0, 2 * shared_secret.PASSED_S])
def test_nodes_that_come_at_the_same_moment_find_the_same_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Eight processes wait for one byte, and then look for twenty secrets in turn; also where their clocks are ahead of
    the file system's, so that they take for old what another one is writing."""
    monkeypatch.setattr(shared_secret, "PASSED_S", shared_secret.PASSED_S - ahead_s)
    ours, theirs = socket.socketpair()
    answers, writer = os.pipe()
    pids = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                theirs.recv(1, socket.MSG_PEEK)
                os.write(
                    writer,
                    " ".join(load_or_create_secret(tmp_path / "of" / f"n-{turn}") for turn in range(20)).encode()
                    + b"\n",
                )
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(writer)
    ours.send(b"!")
    with open(answers) as pipe:
        told = pipe.read().splitlines()
    for pid in pids:
        os.waitpid(pid, 0)
    assert len(told) == 8 and len(set(told)) == 1
    assert len(set(told[0].split())) == 20
    assert len(os.listdir(tmp_path / "of")) == 20


def test_a_file_is_complete_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is killed while it writes leaves nothing that another node would take for a secret."""

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        load_or_create_secret(tmp_path / "of" / "n-1")
    assert os.listdir(tmp_path / "of") == []


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda file: os.chmod(file, 0o640), r"n-1 may be read by others \(mode 640\)"),
        (lambda file: os.chmod(file.parent, 0o770), r"of may be written by others \(mode 770\)"),
        (lambda file: file.write_text("a" * 63 + "\n"), "is not a rendezvous secret"),
        (lambda file: file.write_text("a" * 65 + "\n"), "is not a rendezvous secret"),
        (lambda file: (file.rename(file.with_name("n-2")), file.symlink_to("n-2")), "n-1 is not a regular file"),
        (lambda file: (file.unlink(), os.mkfifo(file, 0o600)), "n-1 is not a regular file"),
        (lambda file: (file.unlink(), file.mkdir(0o700)), "n-1 is not a regular file"),
        (lambda file: file.parent.symlink_to(file.parent.rename(file.parent.with_name("it"))), "cannot be stored"),
    ],
)  # fmt: skip
def test_what_others_may_have_written_or_read_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], expected: str
) -> None:
    file = tmp_path / "of" / "n-1"
    held = load_or_create_secret(file)
    spoil(file)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_or_create_secret(file)
    assert "or set the same PHALANX_SECRET on all nodes" in str(caught.value)
    assert held not in str(caught.value)


@as_root
@pytest.mark.parametrize("what", ["the file", "the folder"])
def test_what_another_user_has_planted_is_refused_and_the_variable_still_helps(tmp_path: Path, what: str) -> None:
    home = {"HOME": str(tmp_path)}
    file = file_of(None, 29500, home)
    planted = load_or_create_secret(file)
    os.chown(file if what == "the file" else file.parent, NOBODY, NOBODY)
    with pytest.raises(
        ConfigError, match=r"belongs to another user \(uid 65534\).*; remove it, or set the same PHALANX"
    ):
        parse_rendezvous("tcp://127.0.0.1:29500", home)
    assert parse_rendezvous("tcp://127.0.0.1:29500", home | {VARIABLE: SECRET}).secret == SECRET != planted


@as_root
def test_another_user_does_not_read_it(open_path: Path) -> None:
    """Nor where the folders above are open to all."""
    file = open_path / "of" / "n-1"
    held = load_or_create_secret(file)
    os.chmod(file.parent, 0o755)
    assert begin(os.listdir, file.parent)() == ["n-1"]
    assert begin(file.read_text)().startswith("PermissionError")
    assert begin(load_or_create_secret, file)().startswith("ConfigError")
    assert load_or_create_secret(file) == held


def test_a_user_without_a_home_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (str(tmp_path / "file"), "nowhere"):
        with pytest.raises(ConfigError, match="or set the same PHALANX_SECRET on all nodes") as caught:
            parse_rendezvous("tcp://127.0.0.1:29500", {"HOME": home})
    assert "has no home folder" in str(caught.value)


def test_what_nobody_has_used_for_long_is_removed(tmp_path: Path) -> None:
    """And only that: a file is used whenever a node looks for it."""
    old, mine, other, passing = (tmp_path / name for name in ("old-1", "mine-1", "other-1", ".passing-1"))
    for file in (old, mine, other):
        load_or_create_secret(file)
    passing.touch()
    long_ago = time.time() - (shared_secret.UNUSED_DAYS + 1) * 86400
    for file in (old, mine, other, passing):
        os.utime(file, (long_ago, long_ago))
    load_or_create_secret(other)
    assert shared_secret.remove_unused_secrets(mine) == [old]
    assert shared_secret.remove_unused_secrets(None) == []
    assert sorted(os.listdir(tmp_path)) == [".passing-1", "mine-1", "other-1"]
    load_or_create_secret(tmp_path / "new-1")
    assert not passing.exists()


def test_nothing_is_removed_where_another_user_has_led_the_folder_elsewhere(tmp_path: Path) -> None:
    """As who can write further up may, once the secret was read."""
    file, papers = tmp_path / "of" / "n-1", tmp_path / "papers"
    load_or_create_secret(file)
    papers.mkdir()
    (papers / "of-old-times").touch()
    os.utime(papers / "of-old-times", (0, 0))
    file.parent.rename(tmp_path / "moved")
    file.parent.symlink_to(papers)
    assert shared_secret.remove_unused_secrets(file) == []
    assert os.listdir(papers) == ["of-old-times"]


def test_the_secret_leaves_the_environment_of_a_process_and_of_its_children() -> None:
    """Of those that it forks, and that never execute anything else, too; other variables stay."""
    script = f"""
import os, subprocess, sys
from phalanx.elastic.membership.shared_secret import take_from_environment
before = take_from_environment()
assert before["{VARIABLE}"] == {SECRET!r}
whole = dict(before)
del whole["{VARIABLE}"]
assert whole == dict(os.environ)
seen = [open("/proc/self/environ").read(), subprocess.run(["env"], capture_output=True, text=True).stdout]
pid = os.fork()
assert pid or not os._exit("characters" in open("/proc/self/environ").read() or "{VARIABLE}" in os.environ)
assert os.waitpid(pid, 0)[1] == 0
assert {SECRET!r} not in str(seen), seen
assert all("ANOTHER=one of sixteen" in text for text in seen), seen
assert take_from_environment() == whole
"""
    environment = {**os.environ, "ANOTHER": "one of sixteen", VARIABLE: SECRET, "LAST": "x"}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=60, env=environment)


def test_a_script_and_what_it_starts_do_not_have_the_secret(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, subprocess\n"
        "told = subprocess.run(['cat', '/proc/self/environ'], capture_output=True).stdout\n"
        "open('told', 'w').write(f\"{b'HOME' in told} {b'characters' in told} {'PHALANX_SECRET' in os.environ}\")\n"
    )
    words = [["run", "--nproc", "1", "script.py"]]
    [done] = run_ranks(call, 1, folder=str(tmp_path), commands=words, environment={VARIABLE: SECRET})[0]
    assert done[0] == 0, done
    assert (tmp_path / "told").read_text() == "True False False"


@pytest.mark.skipif(not ALL, reason="it starts Python and imports torch: make test-all")
@pytest.mark.parametrize("command", [["phalanx", "run"], ["phalanx.compat.sagemaker"]])
def test_a_command_takes_the_secret_out_of_its_environment(tmp_path: Path, command: list[str]) -> None:
    """A script, and what it starts, have it no more."""
    (tmp_path / "script.py").write_text(
        "import os, subprocess\n"
        "told = subprocess.run(['cat', '/proc/self/environ'], capture_output=True).stdout\n"
        "own = open('/proc/self/environ', 'rb').read()\n"
        "print('seen', 'HOME' in os.environ, b'characters' in told + own, 'PHALANX_SECRET' in os.environ)\n"
    )
    words = [sys.executable, "-m", *command, "--nproc", "1", str(tmp_path / "script.py")]
    environment = {**os.environ, VARIABLE: SECRET}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
    assert "seen True False False" in done.stdout, done.stderr
