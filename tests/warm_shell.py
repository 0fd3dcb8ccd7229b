"""Commands that are forked from a process that has imported everything: none starts Python anew.

A small client hands its words, folder, environment and descriptors over, passes signals on, and leaves with the exit
code that it gets. `run_script` is for one rank of the harness: it puts a client named `phalanx` before all else on the
path of a shell script. `serve` is for clients in namespaces of their own, in which their commands then run.
`serve_workers` is for the workers of pytest-xdist, and for their zygotes.
"""

import contextlib
import ctypes
import json
import os
import platform
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.core.placement import Placement
from phalanx.provision.namespaces import _group_root
from phalanx.system.fork import die_with, fork
from tests import helpers, zygote
from tests.helpers import ROOT, START_S, wait_until

# That clients pass on; the last is what Slurm sends before a time limit.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGPWR, signal.SIGUSR1)
SPACES = ("net", "ipc", "uts", "time", "pid", "mnt")
CALL = """
import json, os, signal, socket, sys
def call(words):
    told = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX) as there:
        there.connect({address!r})
        socket.send_fds(there, [len(told).to_bytes(8, "little")], [0, 1, 2])
        there.sendall(told)
        for number in {signals!r}:
            signal.signal(number, lambda number, frame: there.send(bytes([number])))
        code = there.recv(8)
    sys.exit(int(code) if code else "whoever runs phalanx here has gone")
"""
CLIENT = "#!{python} -SE" + CALL + "call(sys.argv[1:])\n"
# A Python whose `-m phalanx train` is forked; any other command begins as usual, and knows this as its Python.
PYTHON = (
    "#!{python}"
    + CALL
    + """
if sys.argv[3] == "train":
    call(sys.argv[3:])
import runpy
sys.executable, sys.argv = __file__, ["phalanx", *sys.argv[3:]]
runpy.run_module("phalanx", run_name="__main__", alter_sys=True)
"""
)
# A Python for pytest's workers and their zygotes, which end with whoever has started them.
WORKER = "#!{python} -SE\nimport ctypes\nctypes.CDLL(None).prctl(1, 9, 0, 0, 0)" + CALL + "call(sys.argv[1:])\n"


def write_client(path: Path, text: str, address: str) -> None:
    """Write a program that calls whoever listens at an address."""
    path.write_text(text.format(python=sys.executable, address=address, signals=[int(number) for number in SIGNALS]))
    path.chmod(0o755)


def run_script(placement: Placement, script: str, folder: str, settings: dict[str, str]) -> list[Any]:
    """Exit code of bash with the script in a folder, which ends at the first command that fails, and all it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}/socket")
        listener.listen()
        write_client(Path(place, "phalanx"), CLIENT, f"{place}/socket")
        path = os.pathsep.join([place, str(Path(sys.executable).parent), environment["PATH"]])
        with open(f"{place}/printed", "w+b") as printed:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=folder,
                env=environment | {"PATH": path} | settings,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
            )
            over = os.pidfd_open(shell.pid)
            _serve(listener, over, inside=False)
            os.close(over)
            shell.wait()
            printed.seek(0)
            return [shell.returncode, printed.read().decode(errors="replace")]


def serve(placement: Placement, address: str) -> None:
    """Run what clients ask for, each in the namespaces and the control group of its client, until somebody connects to
    the address with `.end`."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as ending:
        for one, name in ((ending, f"{address}.end"), (listener, address)):  # who sees the latter sees both
            one.bind(name)
            one.listen()
        _serve(listener, ending.fileno(), inside=True)


@contextlib.contextmanager
def python_of_workers() -> Iterator[Path]:
    """A Python whose processes are forked from one that has imported what ranks and most tests need."""
    with tempfile.TemporaryDirectory(prefix="phalanx-workers-") as place:
        python = Path(place, "python")
        words = [sys.executable, "-m", "tests.warm_shell", str(os.getpid()), str(python)]
        with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE) as parent:
            wait_until(lambda: python.exists() or parent.poll() is not None, START_S)
            assert parent.poll() is None, f"the parent of the workers ended with exit code {parent.returncode}"
            yield python


def serve_workers(python: str) -> None:
    """Run what the Python of workers is asked for, until standard input ends and nothing runs any more."""
    zygote.warm_up()
    zygote.use_huge_pages()
    helpers.zygote_python.append(python)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{python}.socket")
        listener.listen()
        write_client(Path(f"{python}.new"), WORKER, f"{python}.socket")
        os.rename(f"{python}.new", python)  # who sees it can call
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers, whose clients pass it on
        _serve(listener, sys.stdin.fileno(), inside=False, run=_run_python)


def _run_python(words: list[str]) -> None:
    """What `python -m module` and `python -u -c code` do, of which pytest needs no more."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    option, code, *rest = words[words[0] == "-u" :]
    sys.argv = [option, *rest]
    if option == "-m":
        runpy.run_module(code, run_name="__main__")
    else:
        exec(code, {"__name__": "__main__"})  # noqa: S102


def _run_phalanx(words: list[str]) -> None:
    from phalanx.cli import root

    sys.argv = ["phalanx", *words]
    root.main()


def _serve(listener: socket.socket, over: int, inside: bool, run: Callable[[list[str]], None] = _run_phalanx) -> None:
    """Run what clients ask for, until the descriptor `over` can be read and nothing runs any more."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by descriptor: the process, and who waits for its end
    awaited: list[Any] = [listener, over]
    while over in awaited or running:
        clients = {client: descriptor for descriptor, (_, client) in running.items() if client.fileno() >= 0}
        ready, _, _ = select.select([*awaited, *running, *clients], [], [])
        for client in set(ready) & set(clients):
            told = client.recv(64)
            for number in told or [signal.SIGKILL]:  # it may have been killed: its command goes with it
                signal.pidfd_send_signal(clients[client], number)
            if not told:
                client.close()
        for descriptor in set(ready) & set(running):
            pid, client = running.pop(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(descriptor)
            with contextlib.suppress(OSError), client:
                client.sendall(b"%d" % (code if code >= 0 else 128 - code))
        if listener in ready:
            client, _ = listener.accept()
            if (started := _start(client, inside, run)) is None:
                client.close()
            else:
                pid, descriptor = started
                running[descriptor] = pid, client
        if over in ready:
            awaited.remove(over)  # it can be read from here on


def _start(client: socket.socket, inside: bool, run: Callable[[list[str]], None]) -> tuple[int, int] | None:
    """The process of one command, and a descriptor that tells of its end; None for a client that was killed before it
    had said what to run."""
    size, streams, _, _ = socket.recv_fds(client, 8, 3)
    told = client.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    if not told or len(told) < int.from_bytes(size, "little"):
        for stream in streams:
            os.close(stream)
        return None
    words, folder, environment = json.loads(told)
    peer = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]

    def command() -> int:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        try:
            run(words)
        except SystemExit as leaving:
            return int(leaving.code or 0)
        return 0

    try:
        return fork((lambda: _run_beside(peer, command)) if inside else command, keep=streams)
    finally:
        for stream in streams:
            os.close(stream)


def _run_beside(peer: int, command: Callable[[], int]) -> int:
    """Call a function in a child within the namespaces and the control group of another process; returns its exit
    code."""
    libc = ctypes.CDLL(None, use_errno=True)
    group = Path(f"/proc/{peer}/cgroup").read_text().rpartition("0::/")[2].split("\n")[0]
    root = _group_root()
    assert root is not None
    (root / group / "cgroup.procs").write_text("0")
    for descriptor in [os.open(f"/proc/{peer}/ns/{space}", os.O_RDONLY) for space in SPACES]:
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns failed")
        os.close(descriptor)
    platform._uname_cache = None  # type: ignore[attr-defined]  # of another host
    pid = os.fork()  # only children are in the other namespace of processes
    if pid == 0:
        code = 1
        try:
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG; its parent has no number there
            os.setpgid(0, 0)
            code = command()
        finally:
            os._exit(code)
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    serve_workers(sys.argv[2])
