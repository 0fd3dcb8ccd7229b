"""Shell scripts whose `phalanx` is forked from a process that has imported everything: no command starts Python anew.

`run_script` is for one rank of the harness. It puts a small client named `phalanx` before all else on the script's
path; the client hands its words, folder, environment and descriptors over, and leaves with the exit code that it gets.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from phalanx.core.placement import Placement
from phalanx.system.fork import fork

CLIENT = """#!{python} -SE
import json, os, socket, sys
told = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as there:
    there.connect({address!r})
    socket.send_fds(there, [len(told).to_bytes(8, "little")], [0, 1, 2])
    there.sendall(told)
    code = there.recv(8)
sys.exit(int(code) if code else "whoever runs phalanx here has gone")
"""


def run_script(placement: Placement, script: str, folder: str, settings: dict[str, str]) -> list[Any]:
    """Exit code of bash with the script in a folder, which ends at the first command that fails, and all it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}/socket")
        listener.listen()
        client = Path(place, "phalanx")
        client.write_text(CLIENT.format(python=sys.executable, address=f"{place}/socket"))
        client.chmod(0o755)
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
            _serve(listener, shell)
            printed.seek(0)
            return [shell.returncode, printed.read().decode(errors="replace")]


def _serve(listener: socket.socket, shell: "subprocess.Popen[bytes]") -> None:
    """Run what clients ask for, until the shell has ended."""
    over = os.pidfd_open(shell.pid)
    running: dict[int, tuple[int, socket.socket]] = {}  # by descriptor: the process, and who waits for its end
    while True:
        ready, _, _ = select.select([listener, over, *running], [], [])
        for descriptor in set(ready) & set(running):
            pid, client = running.pop(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(descriptor)
            with contextlib.suppress(OSError), client:  # it may have been killed
                client.sendall(b"%d" % (code if code >= 0 else 128 - code))
        if listener in ready:
            client, _ = listener.accept()
            pid, descriptor = _start(client)
            running[descriptor] = pid, client
        if over in ready and not running:
            break
    os.close(over)
    shell.wait()


def _start(client: socket.socket) -> tuple[int, int]:
    """The process of one command, and a descriptor that tells of its end."""
    size, streams, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as told:
        words, folder, environment = json.loads(told.read(int.from_bytes(size, "little")))

    def command() -> int:
        from phalanx.cli import root

        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["phalanx", *words]
        try:
            root.main()
        except SystemExit as leaving:
            return int(leaving.code or 0)
        return 0

    try:
        return fork(command, keep=streams)
    finally:
        for stream in streams:
            os.close(stream)
