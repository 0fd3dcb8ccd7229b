"""Machines simulated by Linux namespaces, with a control group for the processes of each.

A machine has a separate network, host name, processes and mounts; /etc, /opt, /usr and /var are overlays whose changes
are its disk; /run and /dev/shm are its memory. All else is shared with this machine, as by a network file system.
Machines are connected by a bridge in a separate namespace, so that this machine gets no interface, address or route,
and no machine can reach outside.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import RunError

TOOLS = ("ip", "nsenter", "unshare", "mount", "setpriv")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OVERLAYS = ("etc", "opt", "usr", "var")
SWITCH = "switch"
BOOT_S, END_S = 30.0, 20.0
UPTIME_S = 2  # of a machine at its start: Slurm detects restarts by it, rounded to whole seconds
_IDLE = "trap : TERM INT HUP\nwhile :; do sleep 1000000 & wait $!; done"


def find_obstacle(folder: Path) -> str | None:
    """Why this machine cannot have such machines, whose disks would be in a folder; None where it can."""
    if os.geteuid() != 0:
        return "nodes on this machine are made of namespaces, which needs root: run the command with sudo"
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]:
        return f"{missing[0]} is not installed; Debian has it in iproute2, util-linux or mount"
    if _group_root() is None:
        return "no control groups of version 2 are mounted (/sys/fs/cgroup or /sys/fs/cgroup/unified)"
    place = folder
    while not place.exists():
        place = place.parent
    probe = place / f".phalanx-overlay-{os.getpid()}"
    script = (
        f"mkdir -p {shlex.quote(str(probe))}/u {shlex.quote(str(probe))}/w && cd {shlex.quote(str(probe))} && "
        "mount -t overlay overlay -o lowerdir=/etc,upperdir=u,workdir=w /etc"
    )
    try:
        done = subprocess.run(
            ["unshare", "--net", "--pid", "--mount", "--fork", "sh", "-c", script], capture_output=True, text=True
        )
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return (
        f"this machine makes no namespaces with overlays on {place} ({said[-1] if said else 'no reason given'}); use a "
        "machine (not a container) where root may mount, and --folder on a local disk"
    )


def _group_root() -> Path | None:
    """Where control groups of version 2 are mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        fields = line.split()
        if len(fields) > 2 and fields[2] == "cgroup2":
            return Path(fields[1])
    return None


@dataclass(frozen=True)
class Namespaces:
    """The machines of one cluster. `folder` has their disks, `label` names their control group."""

    folder: Path
    label: str

    # -------------------------------------------------------------------------------------------------- control groups

    def _group(self, name: str = "") -> Path:
        root = _group_root()
        assert root is not None
        return root / f"phalanx-{self.label}" / name

    def processes(self, name: str) -> list[int]:
        """All processes of a machine, by their numbers on this one."""
        with contextlib.suppress(OSError):
            return [int(pid) for pid in (self._group(name) / "cgroup.procs").read_text().split() if pid != "0"]
        return []

    def first_process(self, name: str) -> int | None:
        """Process 1 of a machine, by its number on this one; None where it does not run."""
        for pid in self.processes(name):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                spaces = next(line for line in lines if line.startswith("NSpid:")).split()
                dead = any(line.startswith("State:") and line.split()[1] in "ZX" for line in lines)
                if len(spaces) > 2 and spaces[-1] == "1" and not dead:
                    return pid
        return None

    def kill(self, name: str) -> None:
        """Kill all processes of a machine at once, as a power loss does; its disk stays."""
        (self._group(name) / "cgroup.kill").write_text("1")

    def _end(self, group: Path) -> None:
        """Kill all processes of a control group and those below it, and remove it."""
        if not group.exists():
            return
        until = time.monotonic() + END_S
        folders = sorted((path for path in group.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts))
        for folder in [*folders, group]:
            while folder.exists():
                with contextlib.suppress(OSError):
                    (folder / "cgroup.kill").write_text("1")
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                if time.monotonic() > until:
                    raise RunError(f"processes in {folder} do not end ({folder / 'cgroup.procs'}); reboot this machine")
                time.sleep(0.01)

    # -------------------------------------------------------------------------------------------------------- machines

    def start_switch(self) -> None:
        """Make the bridge that joins the machines."""
        if self.first_process(SWITCH) is None:
            self._end(self._group(SWITCH))
            self._hold(SWITCH, ["--net"], "ip link set lo up; ip link add br0 type bridge; ip link set br0 up")

    def start(self, name: str, address: str) -> None:
        """Start a machine, with the disk that it has or an empty one."""
        disk = self.folder / name
        for part in OVERLAYS:
            (disk / part / "upper").mkdir(parents=True, exist_ok=True)
            (disk / part / "upper").chmod(0o755)  # what users see of the folder itself, whatever the umask
            shutil.rmtree(disk / part / "work", ignore_errors=True)
            (disk / part / "work").mkdir()
        mounts = "\n".join(
            f"mount -t overlay overlay -o lowerdir=/{part},upperdir={shlex.quote(str(disk / part / 'upper'))},workdir="
            f"{shlex.quote(str(disk / part / 'work'))} /{part}"
            for part in OVERLAYS
        )
        script = (
            f"mount --make-rprivate /\n{mounts}\nmount -t tmpfs -o mode=755 tmpfs /run\n"
            "mkdir -p /run/lock /run/phalanx\n"
            f"mount -t tmpfs -o mode=1777 tmpfs /dev/shm\nmount -t proc proc /proc\nhostname {name}\n"
            "ip link set lo up"
        )
        self._hold(name, ["--net", "--uts", "--ipc", "--mount", *self._uptime()], script)
        self.plug(name, address)

    def _uptime(self) -> list[str]:
        if not os.path.exists("/proc/self/ns/time"):
            return []
        now = int(float(Path("/proc/uptime").read_text().split()[0]))
        return ["--time", f"--boottime={UPTIME_S - now}"]

    def _hold(self, name: str, flags: list[str], script: str) -> None:
        """Start process 1 of a machine in new namespaces, which keeps them."""
        group = self._group(name)
        group.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        ready, log = self.folder / f"{name}.ready", self.folder / f"{name}.boot"
        ready.unlink(missing_ok=True)
        words = [
            "unshare",
            *flags,
            "--pid",
            "--fork",
            "bash",
            "-ec",
            f"{script}\n: > {shlex.quote(str(ready))}\n{_IDLE}",
        ]
        # In the background of a shell that exits, so that this process does not have to wait for it.
        begin = ["sh", "-c", 'echo 0 > "$0"/cgroup.procs && { "$@" & }', str(group)]
        with open(log, "wb") as out:
            subprocess.run(
                [*begin, *words],
                env={"PATH": PATH},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        until = time.monotonic() + BOOT_S
        while not ready.exists():
            if not self.processes(name) or time.monotonic() > until:
                self._end(group)
                said = log.read_text(errors="replace").strip().splitlines()
                raise RunError(f"{name} did not start: {said[-1] if said else 'no reason given'}")
            time.sleep(0.01)
        ready.unlink()

    def _joining(self, name: str) -> list[str]:
        """What makes a command a member of a machine's control group."""
        return ["sh", "-c", 'echo 0 > "$0"/cgroup.procs && exec "$@"', str(self._group(name))]

    def command(self, name: str, command: list[str]) -> list[str]:
        """The command line that runs a command in a machine. Raises RunError where it does not run."""
        first = self.first_process(name)
        if first is None:
            raise RunError(f"{name} does not run")
        spaces = ["-n"] if name == SWITCH else ["-n", "-m", "-u", "-i", "-p"]
        spaces += ["-T"] if name != SWITCH and self._uptime() else []
        clean = ["env", "-i", f"PATH={PATH}", "HOME=/root", "LANG=C.UTF-8"]
        return [*self._joining(name), "nsenter", "-t", str(first), *spaces, "--", *clean, *command]

    def run(self, name: str, script: str, check: bool = True) -> None:
        """Run a shell script in a machine. Raises RunError where it fails and `check` is set."""
        done = subprocess.run(
            self.command(name, ["sh", "-c", script]), capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            raise RunError(f"{name}: {done.stderr.strip() or done.stdout.strip()}")

    def plug(self, name: str, address: str) -> None:
        """Connect a machine to the switch."""
        first, port = self.first_process(name), _port(address)
        self.run(SWITCH, f"ip link del {port}", check=False)
        self.run(
            SWITCH,
            f"ip link add {port} type veth peer name eth0 netns {first} && ip link set {port} master br0 up",
        )
        # All of 10.0.0.0/8 is at the switch: scripts tell their own address by a route there.
        self.run(name, f"ip addr add {address}/8 dev eth0 && ip link set eth0 up")

    def cut(self, address: str, up: bool = False) -> None:
        """Pull a machine's cable out, or put it in again."""
        self.run(SWITCH, f"ip link set {_port(address)} {'up' if up else 'down'}")

    def stop(self, name: str, address: str, keep_disk: bool = False) -> None:
        """End a machine, cable first; its disk goes too, unless it is kept."""
        if address and self.first_process(SWITCH) is not None:
            self.run(SWITCH, f"ip link del {_port(address)}", check=False)
        self._end(self._group(name))
        if not keep_disk:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def close(self) -> None:
        """End all machines and the switch, and remove their disks."""
        self._end(self._group())
        shutil.rmtree(self.folder, ignore_errors=True)


def _port(address: str) -> str:
    """The name of a machine's port at the switch: interfaces have at most 15 characters."""
    return "p-" + "-".join(address.split(".")[-2:])
