"""Interface of a provider of machines, for clusters that Phalanx itself configures: `local` and `ssh`.

`cluster.py` knows nodes by these functions only. Each may be repeated after an interruption.
"""

import io
import subprocess
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.core.errors import RunError
from phalanx.provision.config import ClusterConfig
from phalanx.provision.state import ClusterState, NodeRecord


@dataclass(frozen=True)
class NodeFile:
    """A file for a node; `mode` as of chmod, `owner` a user that the node has, else root."""

    data: bytes
    mode: int = 0o644
    owner: str = "root"


class Machines(Protocol):
    """Makes, reaches and removes nodes."""

    SLURMD_TIMEOUT_S: int  # after which Slurm takes a silent node for dead
    LIVENESS_IS_CHEAP: bool  # whether every node may be asked every few seconds
    OWN_HARDWARE: bool  # whether nodes share no devices and links

    def find_problems(self, config: ClusterConfig) -> list[str]:
        """Why these nodes cannot be had here, before anything is made; a sentence each."""

    def prepare(self, state: ClusterState) -> None:
        """Make what all nodes share, such as a network, and choose an address or a host for each new node. Raises
        RunError."""

    def count_spares(self, state: ClusterState) -> int | None:
        """How many nodes could be replaced now; None: any number."""

    def python(self) -> str:
        """Shell words that run a Python with Phalanx on a node."""

    def extra_files(self) -> dict[str, NodeFile]:
        """Files that each node gets beside those of Slurm, by path."""

    def launch(self, state: ClusterState, node: NodeRecord) -> None:
        """Create a node, and fill in its address and instance; remains of an earlier one are removed first. Raises
        RunError."""

    def is_alive(self, node: NodeRecord) -> bool:
        """Whether the machine of a node answers."""

    def command(self, node: NodeRecord, command: list[str]) -> list[str]:
        """The command line that runs a command as root on a node."""

    def reboot(self, state: ClusterState, node: NodeRecord) -> None:
        """Restart a node, whose disk stays. Raises RunError."""

    def terminate(self, state: ClusterState, node: NodeRecord) -> None:
        """Remove a node and its disk. Raises RunError where something of it remains that cannot be reached."""

    def close(self, state: ClusterState) -> None:
        """Remove what all nodes share, and every process."""


def run_on(
    machines: Machines, node: NodeRecord, script: str, log: Path, timeout_s: float = 60.0, data: bytes = b"",
    check: bool = True,
) -> str:  # fmt: skip
    """Run a shell script on a node, with `data` as its standard input; returns its output, both streams, which
    also goes to the log. Raises RunError if it fails and `check` is set, or takes longer than `timeout_s`."""
    command = machines.command(node, ["sh", "-c", script])
    try:
        done = subprocess.run(command, input=data, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        append_log(log, (error.stdout or b"").decode(errors="replace"))
        raise RunError(f"node {node.name}: no answer within {timeout_s:g} s; see {log}") from None
    output = done.stdout.decode(errors="replace")
    if check:
        append_log(log, output)
    if check and done.returncode != 0:
        words = output.strip().splitlines()
        raise RunError(f"node {node.name}: {words[-1] if words else f'exit code {done.returncode}'} (log: {log})")
    return output


def append_log(log: Path, text: str) -> None:
    """Append to the log of a node, with the time."""
    if text.strip():
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"-- {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text.rstrip()}\n")


def pack_files(files: Mapping[str, NodeFile]) -> bytes:
    """A tar archive of files by absolute path, for `tar -x` on a node: secrets pass by standard input, never by a
    command line."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, file in sorted(files.items()):
            info = tarfile.TarInfo(path.lstrip("/"))
            info.size, info.mode, info.uname, info.gname = len(file.data), file.mode, file.owner, file.owner
            archive.addfile(info, io.BytesIO(file.data))
    return packed.getvalue()
