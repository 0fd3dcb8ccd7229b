"""The rendezvous of a job's nodes: a TCP address, or a file in a shared folder with node 0's address.

A file is put into place by rename, so that it is never read half-written; nothing is locked. Network file systems cache
a folder's content for a while: `refresh_listing` makes them ask the server. The file of a dead job has an address where
nothing answers, or nothing that knows its secret, and is ignored.
"""

import contextlib
import errno
import fcntl
import ipaddress
import json
import os
import platform
import secrets
import socket
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from phalanx.core.errors import ConfigError, RunError
from phalanx.elastic.membership import shared_secret
from phalanx.elastic.membership.listener import open_listener

ADDRESS_FILE = "phalanx-node-0.json"
PASSING = ".phalanx-passing-"  # how the names of files begin that are gone again at once
STALE_S = 3600.0  # a passing file of that age was left by a process that was killed
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class RendezvousPoint:
    """Where nodes meet: `folder`, or `host` and `port` with a `secret` that all nodes know already, kept
    in `secret_file` if the user has set none."""

    text: str  # as the user wrote it
    folder: Path | None = None
    host: str = ""
    port: int = 0
    secret: str = field(default="", repr=False)
    secret_file: Path | None = None


@dataclass(frozen=True)
class HostAddress:
    """The content of node 0's address file."""

    hosts: tuple[str, ...]  # addresses of its interfaces
    port: int
    secret: str = field(repr=False)
    process: str  # for people: pid and host


def parse_rendezvous(text: str, environment: Mapping[str, str]) -> RendezvousPoint:
    """Read a rendezvous from the command line, with its secret: that of the environment, else that of a file of the
    user's own, which is made where it is missing. Raises ConfigError."""
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ConfigError(
            f"--rendezvous {text} is not a URL ({error}); give tcp://host:port or file:///folder"
        ) from None
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise ConfigError(
                f"--rendezvous {text} names no folder; write file:// and an absolute path, such as file:///shared/meet"
            )
        return RendezvousPoint(text, folder=Path(unquote(parts.path)))
    if parts.scheme != "tcp":
        raise ConfigError(
            f"--rendezvous {text} is neither tcp://host:port nor file:///shared/folder; give one of these"
        )
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.path not in ("", "/") or parts.username or parts.query or parts.fragment:
        raise ConfigError(f"--rendezvous {text} is not of the form tcp://host:port with a port between 1 and 65535")
    # One address: at another address of the name an attacker could listen.
    host = "127.0.0.1" if host == "localhost" else host
    if (own := shared_secret.read_user_secret(environment)) is not None:
        return RendezvousPoint(text, host=host, port=port, secret=own)
    file = shared_secret.file_of(None if is_loopback(host) else host, port, environment)
    return RendezvousPoint(
        text, host=host, port=port, secret=shared_secret.load_or_create_secret(file), secret_file=file
    )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine as it is written; a name that happens to lead here is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ------------------------------------------------------------------------------------------------------------- sockets


def listen(place: RendezvousPoint) -> socket.socket:
    """Open node 0's listening socket. Raises RunError."""
    if place.folder is not None:
        only_ipv6 = not any("." in host for host in own_addresses() if not is_loopback(host))
        ipv6 = only_ipv6 and any(":" in host for host in own_addresses() if not is_loopback(host))
        host, port = "::" if ipv6 else "0.0.0.0", 0
    else:
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise RunError(
                f"the host of --rendezvous {place.text} cannot be resolved ({error.strerror}); give node 0's address"
            ) from None
        host, port = str(found[0][4][0]), place.port
        if is_loopback(host) and not is_loopback(place.host):
            host = "::" if ":" in host else "0.0.0.0"  # many systems lead their own name to 127.0.1.1
    try:
        listener = open_listener(host, port)
    except OSError as error:
        raise RunError(
            f"node 0 cannot listen at {place.text} ({error.strerror}); give an address of node 0 itself and a port "
            "that no other program or job uses"
        ) from None
    listener.setblocking(False)
    return listener


def interfaces() -> list[tuple[str, str]]:
    """Name and address of each of this machine's interfaces that has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no IPv4 address
                found.append((name, socket.inet_ntoa(fcntl.ioctl(asking, _GET_ADDRESS, request)[20:24])))
    ipv6 = Path("/proc/net/if_inet6")
    for line in ipv6.read_text().splitlines() if ipv6.exists() else ():
        digits, _, _, scope, _, name = line.split()
        if scope != "20":  # an address that means something else on each link
            found.append((name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found


def own_addresses() -> list[str]:
    """This machine's addresses, those that lead to itself alone last."""
    return sorted({host for _, host in interfaces()}, key=lambda host: (is_loopback(host), ":" in host, host))


def interface_of(connection: socket.socket) -> str | None:
    """The name of the interface that a connection uses; None if unknown."""
    try:
        mine = str(connection.getsockname()[0]).removeprefix("::ffff:")
    except OSError:
        return None
    if is_loopback(mine):
        return "lo"
    return next((name for name, address in interfaces() if address == mine), None)


# ------------------------------------------------------------------------------------------------------- address file


def refresh_listing(folder: Path) -> None:
    """Refresh a folder listing that a network file system has cached, by changing the folder. If it seems not to
    exist, its parent is changed."""
    if not folder.is_dir():
        folder = folder.parent
    name = _passing(folder)
    with contextlib.suppress(OSError):  # missing or not writable: the cached listing has to do
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        name.unlink()
        os.listdir(folder)


def read_address(folder: Path) -> HostAddress | None:
    """Parse the address file; None where it is missing or invalid."""
    refresh_listing(folder)
    try:
        tree = _written(folder)
        hosts, port, secret, process = (tree[name] for name in ("hosts", "port", "secret", "process"))
    except (KeyError, TypeError):
        return None
    texts = [secret, process, *hosts] if isinstance(hosts, list) else [None]
    if not all(isinstance(text, str) for text in texts) or type(port) is not int or not 0 < port < 65536:
        return None
    return HostAddress(tuple(hosts), port, secret, process)


def _written(folder: Path) -> Any:
    """Read the address file; None where it is missing or unreadable.

    Raises RunError where it belongs to another user, or others can read it, since node 0 decides what the nodes run.
    """
    path = folder / ADDRESS_FILE
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags), "rb") as file:
            seen = os.fstat(file.fileno())
            if seen.st_uid != os.geteuid() and seen.st_uid != _given_uid(folder):
                raise PermissionError
            if not stat.S_ISREG(seen.st_mode) or seen.st_mode & 0o077:
                raise RunError(
                    f"{path} can be read by other users (mode {stat.S_IMODE(seen.st_mode):o}), but holds the secret "
                    "of a rendezvous; remove it, and give each job its own folder on a file system that keeps file "
                    "permissions"
                )
            return json.loads(file.read())
    except PermissionError:
        raise RunError(
            f"{path} belongs to another user's job; start all nodes as one user, and give each job its own folder"
        ) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RunError(f"{path} is a link that no node made; remove it") from None
        return None
    except (ValueError, RecursionError):
        return None


def _given_uid(folder: Path) -> int | None:
    """The owner of a file that this process creates in a folder: file servers may map all users, or root, to another
    one."""
    passing = _passing(folder)
    try:
        descriptor = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            passing.unlink()


def _passing(folder: Path) -> Path:
    return folder / f"{PASSING}{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"


def make_host_address(listener: socket.socket) -> HostAddress:
    """The address of a listening node 0, with a new secret."""
    process = f"{os.getpid()} on {platform.node()}"
    return HostAddress(tuple(own_addresses()), listener.getsockname()[1], secrets.token_hex(32), process)


def publish(folder: Path, address: HostAddress) -> bool:
    """Put the address file into place, replacing any other. Returns whether the folder was created for it, or for the
    replaced one, whose node 0 was killed and could not remove the folder.

    Raises RunError when the folder cannot be written.
    """
    passing = _passing(folder)
    try:
        before = _written(folder)
        made = not folder.is_dir() or (isinstance(before, dict) and before.get("made") is True)
        text = json.dumps({**asdict(address), "made": made})
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with open(os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(passing, folder / ADDRESS_FILE)
    except OSError as error:
        with contextlib.suppress(OSError):
            passing.unlink()
        raise RunError(
            f"the rendezvous folder {folder} cannot be written ({error.strerror}); choose a folder that all nodes "
            "share and can write to"
        ) from None
    return made


def keep_published(folder: Path, address: HostAddress) -> None:
    """Restore the address file if it is gone. Raises RunError where it now belongs to another job."""
    there = read_address(folder)
    if there is None:
        publish(folder, address)
    elif there != address:
        raise RunError(
            f"the rendezvous folder {folder} is now in use by another job (node 0 is process {there.process}); give "
            "each job its own folder"
        )


def withdraw(folder: Path, address: HostAddress, made: bool) -> None:
    """Remove the address file, unless it now belongs to another job, and the folder if it was `made` for this."""
    with contextlib.suppress(OSError, RunError):  # it is gone, or the folder is, or it is another's by now
        if read_address(folder) == address:
            (folder / ADDRESS_FILE).unlink()
        if made:
            folder.rmdir()


def _sweep(folder: Path) -> None:
    """Remove files of killed processes."""
    for path in folder.glob(f"{PASSING}*"):
        with contextlib.suppress(OSError):  # somebody else was faster
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()
