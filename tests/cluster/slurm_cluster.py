"""A real Slurm on this one machine: slurmctld and a slurmd for each node, every node in namespaces of its own.

A node has its own hostname, address, processes, /dev/shm and a folder that is its disk; everything else on disk is
shared, as by a network file system. Nodes are joined by a bridge in a namespace of its own, so that this machine gets
no interface, address or route, and nothing within reaches out. All that is started dies with what has started it.
Commands of users run in the namespace of the controller (`ctl`).
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.provision.namespaces import _group_root
from phalanx.system.fork import die_with
from tests.helpers import ROOT, wait_until

TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "nsenter", "unshare")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin"
NET = "10.78.0"
CONF = """
ClusterName=phalanx
SlurmctldHost=ctl({net}.100)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket,cred_expire=5
StateSaveLocation={place}/state
SlurmctldPidFile={place}/slurmctld.pid
SlurmctldLogFile={place}/log/slurmctld.log
SlurmdPidFile={place}/nodes/%n/slurmd.pid
SlurmdSpoolDir={place}/nodes/%n/spool
SlurmdLogFile={place}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
SlurmctldTimeout=10
SlurmdTimeout=5
MessageTimeout=5
TCPTimeout=2
KillWait=3
UnkillableStepTimeout=10
InactiveLimit=0
MinJobAge=3600
ReturnToService=1
JobRequeue=1
PlugStackConfig={place}/etc/plugstack.conf
"""


def why_not() -> str | None:
    """Why there can be no such cluster here; None where there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster in namespaces needs root"
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]:
        return f"there is no {missing[0]}; Debian has it in slurm-wlm, munge, iproute2 or util-linux"
    if _group_root() is None:  # commands that are forked for a node (warm_python.py) are in its
        return "no control groups of version 2 are mounted"
    if not Path("/etc/slurm").is_dir():
        return "there is no folder /etc/slurm, over which each node has its own"
    done = subprocess.run(["unshare", "--net", "--pid", "--mount", "--fork", "true"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"this machine makes no namespaces: {done.stderr.strip()}"


@dataclass
class SlurmCluster:
    """A cluster that runs. `place` is its folder, `nodes` their names."""

    place: Path
    nodes: list[str]
    holders: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)  # of namespaces
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return own | ours | {"PATH": PATH, "SLURM_CONF": str(self.place / "etc" / "slurm.conf")}

    # ------------------------------------------------------------------------------------------------- running things

    def enter(self, name: str) -> list[str]:
        """What has to stand before a command for it to run in a node, in `ctl`, or in `sw`, the switch."""
        holder = self.holders[name].pid
        if name in ("ctl", "sw"):
            return ["nsenter", "-t", str(holder), "-n", *(["-m", "-u"] if name == "ctl" else []), "--"]
        return ["nsenter", "-t", str(self.first(name)), "-n", "-m", "-u", "-i", "-p", "--"]

    def first(self, node: str) -> int:
        """Process 1 of a node, as it is known outside."""
        holder = self.holders[node].pid
        children = Path(f"/proc/{holder}/task/{holder}/children")
        wait_until(lambda: bool(children.read_text().split()), timeout_s=180)
        return int(children.read_text().split()[0])

    def run(
        self, *command: str, name: str = "ctl", folder: Path | None = None, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        done = subprocess.run(
            self._words(command, name, folder),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0 or not check, f"{command} in {name}: {done.stderr or done.stdout}\n{self.words()}"
        return done

    def start(self, *command: str, name: str = "ctl", folder: Path | None = None) -> subprocess.Popen[str]:
        """Start a command whose output is read by whoever asked for it."""
        return subprocess.Popen(
            self._words(command, name, folder),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=functools.partial(die_with, os.getpid()),
        )

    def _words(self, command: Sequence[str], name: str, folder: Path | None) -> list[str]:
        # Entering a mount namespace leads to its root.
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder or "/")]
        return [*self.enter(name), *there, *command]

    def words(self) -> str:
        """The ends of the daemons' logs, for whoever wants to know why."""
        found = sorted((self.place / "log").glob("*"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-600:]}" for path in found)

    # -------------------------------------------------------------------------------------------------- what may happen

    def kill(self, node: str) -> None:
        """Power loss: the cable first, then every process, so that nobody hears of it."""
        self.cut(node)
        self.crash(node)

    def crash(self, node: str) -> None:
        """All processes end at once while the network is up."""
        self.holders[node].kill()
        self.holders.pop(node).wait()

    def cut(self, node: str, up: bool = False) -> None:
        """Pull a node's cable out, or put it in again."""
        self.run("ip", "link", "set", f"p-{node}", "up" if up else "down", name="sw")

    def limit(self, node: str, mbit: float) -> None:
        """Set what a node's cable carries, each way."""
        shape = ["root", "tbf", "rate", f"{round(mbit * 1000)}kbit", "burst", "64kb", "limit", str(2**20)]
        self.run("tc", "qdisc", "replace", "dev", "eth0", *shape, name=node)
        self.run("tc", "qdisc", "replace", "dev", f"p-{node}", *shape, name="sw")

    def processes(self, node: str) -> list[int]:
        """All that live on a node, as they are known outside."""
        space, found = os.readlink(f"/proc/{self.first(node)}/ns/pid"), []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and os.readlink(entry / "ns" / "pid") == space:
                    found.append(int(entry.name))
        return found

    def signal_all(self, node: str, number: signal.Signals) -> None:
        """Send a signal to every process of a node: SIGSTOP freezes it, SIGCONT thaws it."""
        for pid in self.processes(node):
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    # ------------------------------------------------------------------------------------------------------- beginning

    def hold(self, name: str, *flags: str, prepare: str = "", wait: bool = True) -> None:
        """Make the namespaces of a node, of the controller or of the switch."""
        ready = self.place / f"{name}.ready"
        script = f"{prepare}\necho > {ready}\ntrap : TERM INT HUP\nwhile :; do sleep 100000 & wait $!; done"
        with open(self.place / "log" / f"{name}.boot", "wb") as log:
            self.holders[name] = subprocess.Popen(
                ["unshare", *flags, "bash", "-ec", script],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=functools.partial(die_with, os.getpid()),
            )
        wait_until(ready.exists, timeout_s=180)

    def daemon(self, name: str | None, *command: str) -> None:
        with open(self.place / "log" / f"{command[0]}-{name}.out", "wb") as log:
            process = subprocess.Popen(
                [*(self.enter(name) if name is not None else []), *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=functools.partial(die_with, os.getpid()),
            )
        self.daemons.append(process)

    def plug(self, name: str, address: str) -> None:
        inside = str(self.holders[name].pid if name == "ctl" else self.first(name))
        self.run("ip", "link", "add", f"p-{name}", "type", "veth", "peer", "name", "eth0", "netns", inside, name="sw")
        self.run("ip", "link", "set", f"p-{name}", "master", "br0", "up", name="sw")
        script = f"ip link set lo up; ip addr add {address}/24 dev eth0; ip link set eth0 up"
        self.run("sh", "-c", script, name=name)

    def idle(self) -> int:
        """How many nodes are free."""
        done = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T", check=False)
        return sum(line.split()[-1] == "idle" for line in done.stdout.splitlines())

    def end(self) -> None:
        for process in [*self.daemons, *self.holders.values()]:
            process.kill()
        for process in [*self.daemons, *self.holders.values()]:
            process.wait()


@contextlib.contextmanager
def running(nodes: int, plugstack: str = "") -> Iterator[SlurmCluster]:
    """A cluster of idle nodes n1, n2, ... in the partitions `main` (all; the default), `one` (n1) and `rest`."""
    place = Path(tempfile.mkdtemp(prefix="phalanx-slurm-", dir="/run"))
    place.chmod(0o755)
    cluster = SlurmCluster(place, [f"n{number + 1}" for number in range(nodes)])
    try:
        _write(cluster, plugstack)
        _begin(cluster)
        wait_until(lambda: cluster.idle() == nodes, timeout_s=180)
        yield cluster
    except AssertionError as error:
        raise AssertionError(f"{error}\n{cluster.words()}") from error
    finally:
        cluster.end()
        shutil.rmtree(place, ignore_errors=True)


def _write(cluster: SlurmCluster, plugstack: str) -> None:
    place, nodes = cluster.place, cluster.nodes
    for name in (
        "etc",
        "log",
        "state",
        "munge",
        "local",
        *(f"nodes/{node}/{sub}" for node in nodes for sub in ("spool", "local")),
    ):
        (place / name).mkdir(parents=True)
    hosts = [
        "127.0.0.1 localhost",
        f"{NET}.100 ctl",
        *(f"{NET}.{number + 1} {node}" for number, node in enumerate(nodes)),
    ]
    (place / "hosts").write_text("\n".join(hosts) + "\n")
    (place / "nsswitch.conf").write_text("".join(f"{kind}: files\n" for kind in ("passwd", "group", "shadow", "hosts")))
    conf = CONF.format(net=NET, place=place)
    for number, node in enumerate(nodes):
        conf += f"NodeName={node} NodeAddr={NET}.{number + 1} CPUs=4 RealMemory=4000 State=UNKNOWN\n"
    conf += f"PartitionName=main Nodes={','.join(nodes)} Default=YES MaxTime=1-00:00:00 State=UP\n"
    conf += "PartitionName=one Nodes=n1 MaxTime=1:00:00 State=UP\n"
    conf += f"PartitionName=rest Nodes={','.join(nodes[1:]) or nodes[0]} MaxTime=1:00:00 State=UP\n"
    conf += f"PartitionName=shut Nodes={','.join(nodes)} MaxTime=1:00:00 State=DOWN\n"
    (place / "etc" / "slurm.conf").write_text(conf)
    (place / "etc" / "plugstack.conf").write_text(plugstack)
    key = place / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))


def _begin(cluster: SlurmCluster) -> None:
    place = cluster.place
    mounts = f"""
mount --make-rprivate /
mount --bind {place}/hosts /etc/hosts
mount --bind {place}/nsswitch.conf /etc/nsswitch.conf
mount --bind {place}/etc /etc/slurm
"""
    cluster.daemon(
        None, "munged", "--foreground", f"--key-file={place}/munge/key", f"--socket={place}/munge/socket",
        f"--pid-file={place}/munge/pid", f"--log-file={place}/munge/log", f"--seed-file={place}/munge/seed",
    )  # fmt: skip
    cluster.hold("sw", "--net", prepare="ip link set lo up; ip link add br0 type bridge; ip link set br0 up")
    cluster.hold("ctl", "--net", "--uts", "--mount", prepare=f"{mounts}\nhostname ctl")
    cluster.plug("ctl", f"{NET}.100")
    wait_until((place / "munge" / "socket").exists, timeout_s=180)
    cluster.daemon("ctl", "slurmctld", "-D", "-f", f"{place}/etc/slurm.conf")
    for number, node in enumerate(cluster.nodes):
        own = f"{mounts}\nhostname {node}\nmount -t proc proc /proc\nmount -t tmpfs tmpfs /dev/shm\n"
        own += f"mount --bind {place}/nodes/{node}/local {place}/local"
        cluster.hold(node, "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", prepare=own)
        cluster.plug(node, f"{NET}.{number + 1}")
        cluster.daemon(node, "slurmd", "-D", "-f", f"{place}/etc/slurm.conf")
