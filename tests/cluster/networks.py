"""Network namespaces that stand for machines: each has interfaces and addresses of its own, and no others."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Networks:
    """Two namespaces, joined by one cable."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def cut(self, up: bool = False) -> None:
        """Pull the cable out, without a word to either side; or put it in again."""
        state = "up" if up else "down"
        ip("-n", self.names[1], "link", "set", "wire1", state)


def why_not() -> str | None:
    """Why this machine cannot have such namespaces; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip command (iproute2)"
    name = f"phx{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"this machine makes no network namespaces: {error.stderr.strip()}"
    return None


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two() -> Iterator[Networks]:
    """Two namespaces that reach each other and nothing else."""
    names = (f"phx{os.getpid()}a", f"phx{os.getpid()}b")
    addresses = ("10.99.0.1", "10.99.0.2")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire1", "netns", names[1])
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"wire{number}")
            ip("-n", name, "link", "set", f"wire{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Networks(names, addresses)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
