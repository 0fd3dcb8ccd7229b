"""Provider `ssh`: machines that exist, reached by OpenSSH with its own keys and configuration.

Root is needed for Slurm's packages, files and daemons; a user other than root must have sudo without a password. Hosts
that no node uses are spares.
"""

import contextlib
import functools
import importlib.util
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phalanx.core.errors import RunError
from phalanx.provision.config import ClusterConfig
from phalanx.provision.machines import NodeFile
from phalanx.provision.slurm_files import DAEMONS, HOSTS_BEGIN, HOSTS_END, SITE_CONF, STOP_MONITOR
from phalanx.provision.state import ClusterState, NodeRecord

CONNECT_S, REBOOT_S, COMMAND_S, CLEAN_S = 10, 900.0, 60.0, 600.0
PYTHON = "/opt/phalanx/python"  # where the package is on nodes
LEAST_PYTHON, LEAST_DISK_KIB = (3, 11), 1 << 20
AT_ONCE = 16
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # not that of the user's shell
_CHECK = f"""
export {PATH}
conf=/etc/slurm/slurm.conf
if grep -qs 'written by `phalanx cluster`' $conf; then
  other=$(sed -n 's/^ClusterName=//p' $conf)
  [ "$other" = "$cluster" ] || echo "problem: this machine belongs to the cluster $other; delete that one first, or \
name another machine"
elif grep -qxE 'slurmd|slurmctld' /proc/[0-9]*/comm 2>/dev/null; then
  echo "problem: another Slurm runs here ($(grep -is ^ClusterName $conf || echo its configuration is not in $conf)); \
stop it, or name another machine"
fi
[ $(id -u) = 0 ] || sudo -n true 2>/dev/null || echo 'problem: neither root nor sudo without a password, which the \
packages and daemons of Slurm need; log in as root, or allow sudo (NOPASSWD)'
free=$(df -Pk /var | tail -1 | awk '{{print $4}}')
[ "$free" -ge {LEAST_DISK_KIB} ] || echo "problem: its disk is full ($free KiB left in /var); free 1 GiB there"
python3 -c 'import sys; sys.exit(sys.version_info < {LEAST_PYTHON})' 2>/dev/null || \
echo 'problem: no python3 of 3.11 or later, which the health monitor needs; install it'
command -v apt-get >/dev/null || command -v slurmd >/dev/null || \
echo 'problem: neither Slurm nor apt-get to install it; install slurmd, slurmctld and munge'
"""
_FACTS = """
echo user $(id -u)
set -- $SSH_CONNECTION
case "$3" in *.*|*:*) echo address $3 ;; *) echo address $(hostname -I | cut -d' ' -f1) ;; esac
"""
# The cluster's files are removed, and earlier ones restored.
_CLEAN = f"""
conf=/etc/slurm/slurm.conf
if [ -f $conf ] && ! {{ grep -q 'written by `phalanx cluster`' $conf && grep -qx "ClusterName=$cluster" $conf; }}; then
  exit 0
fi
{STOP_MONITOR}
if [ -f {DAEMONS} ]; then for daemon in slurmd slurmctld munged; do sh {DAEMONS} stop $daemon; done; fi
if [ -f /var/lib/phalanx/installed ]; then
  DEBIAN_FRONTEND=noninteractive apt-get purge -q -y $(cat /var/lib/phalanx/installed) </dev/null >/dev/null 2>&1
fi
[ -f /etc/munge/munge.key.before ] && mv /etc/munge/munge.key.before /etc/munge/munge.key
[ -f $conf ] && rm -rf /var/lib/slurm/slurmctld /var/lib/slurm/slurmd
rm -f $conf {SITE_CONF} /etc/slurm/gres.conf /etc/slurm/topology.conf /etc/slurm/cgroup.conf
sed -i '/^{HOSTS_BEGIN}/,/^{HOSTS_END}/d' /etc/hosts
rm -rf /opt/phalanx /run/phalanx /var/lib/phalanx /var/log/phalanx /opt/ml/config/resource_config.json
exit 0
"""


class SshMachines:
    """Machines of a list of hosts."""

    SLURMD_TIMEOUT_S = 60
    LIVENESS_IS_CHEAP = False
    OWN_HARDWARE = True

    def __init__(self, config: ClusterConfig, folder: Path) -> None:
        self._config, self._folder = config, folder

    # ------------------------------------------------------------------------------------------------------- reaching

    def _ssh(self, host: str) -> list[str]:
        own = ["-F", self._config.ssh_config] if self._config.ssh_config else []
        options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=10", "ServerAliveCountMax=3"]
        return ["ssh", *own, *(word for option in options for word in ("-o", option)), "-T", host]

    def command(self, node: NodeRecord, command: list[str]) -> list[str]:
        """By ssh, and sudo for a user who is not root."""
        words = [*([] if node.facts.get("user") == 0 else ["sudo", "-n"]), "env", PATH, *command]
        return [*self._ssh(node.host), shlex.join(words)]

    def _ask(self, host: str, script: str, timeout_s: float = COMMAND_S) -> str:
        """Run a script as the user of the login. Raises RunError with ssh's words."""
        try:
            done = subprocess.run(
                [*self._ssh(host), shlex.join(["sh", "-c", script])],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RunError(f"host {host} did not answer within {timeout_s:g} s") from None
        if done.returncode == 255:
            words = done.stderr.strip().splitlines()
            raise RunError(
                f"host {host} cannot be reached ({words[-1] if words else 'ssh gave no reason'}); try `ssh {host}`, "
                "and accept its key or add yours"
            )
        return done.stdout

    def find_problems(self, config: ClusterConfig) -> list[str]:
        """What each host lacks; all hosts are asked at the same time, spares included."""

        def ask(host: str) -> list[str]:
            try:
                return self._find_problems(host)
            except RunError as error:
                return [str(error)]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [problem for found in pool.map(ask, config.hosts) for problem in found]

    def _find_problems(self, host: str) -> list[str]:
        said = self._ask(host, f"cluster={shlex.quote(self._config.name)}\n{_CHECK}")
        return [f"host {host}: {line.removeprefix('problem: ')}" for line in said.splitlines() if "problem: " in line]

    # --------------------------------------------------------------------------------------------------------- nodes

    def count_spares(self, state: ClusterState) -> int | None:
        """Hosts that no node uses."""
        return len(self._spares(state))

    def _spares(self, state: ClusterState) -> list[str]:
        used = {node.host for node in state.nodes} | set(state.bad_hosts)
        return [host for host in dict.fromkeys(self._config.hosts) if host not in used]

    def prepare(self, state: ClusterState) -> None:
        """Give each node without a host a spare one."""
        spares = self._spares(state)
        for node in state.nodes:
            if not node.host:
                if not spares:
                    raise RunError(f"no host is left for node {node.name}; list more under `hosts`")
                node.host = spares.pop(0)

    def python(self) -> str:
        """The node's own Python with the package that was brought."""
        return f"env PYTHONPATH={PYTHON} python3"

    def extra_files(self) -> dict[str, NodeFile]:
        """This package, for the health monitor."""
        return _package_files()

    def launch(self, state: ClusterState, node: NodeRecord) -> None:
        """Find a host's address and user. What it lacks is looked for again: it may have been a spare for long."""
        if problems := self._find_problems(node.host):
            raise RunError("; ".join(problems))
        facts = dict(line.split() for line in self._ask(node.host, _FACTS).splitlines() if len(line.split()) == 2)
        if "address" not in facts:
            raise RunError(f"host {node.host} does not say its address (hostname -I); give it one")
        node.address, node.facts["user"] = facts["address"], int(facts.get("user", "1"))

    def is_alive(self, node: NodeRecord) -> bool:
        """Whether it answers; it is asked again, as a busy machine may be slow to let ssh in."""
        for _ in range(2):
            with contextlib.suppress(RunError):
                return self._ask(node.host, "echo alive").strip() == "alive"
        return False

    def reboot(self, state: ClusterState, node: NodeRecord) -> None:
        """Reboot the host, and wait until another boot answers."""
        which = "cat /proc/sys/kernel/random/boot_id"
        before = self._ask(node.host, which).strip()
        command = [*([] if node.facts.get("user") == 0 else ["sudo", "-n"]), "reboot"]
        with contextlib.suppress(subprocess.TimeoutExpired):  # the connection may end with the machine
            subprocess.run(
                [*self._ssh(node.host), shlex.join(command)],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S,
            )  # fmt: skip
        until = time.monotonic() + REBOOT_S
        while time.monotonic() < until:
            try:
                if self._ask(node.host, which).strip() not in ("", before):
                    return
            except RunError:
                time.sleep(2.0)  # it is on its way
            time.sleep(1.0)
        raise RunError(f"host {node.host} was rebooted and does not answer after {REBOOT_S:g} s; inspect it")

    def terminate(self, state: ClusterState, node: NodeRecord) -> None:
        """Stop the daemons and remove the cluster's files. A host that does not answer has them still, and is none of
        the cluster's any more."""
        host, script = node.host, f"cluster={shlex.quote(self._config.name)}\n{_CLEAN}"
        cleaned = not host
        if host and self.is_alive(node):
            with contextlib.suppress(subprocess.TimeoutExpired):
                command = self.command(node, ["sh", "-c", script])
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CLEAN_S)
                cleaned = done.returncode == 0
        node.host = node.address = ""
        if not cleaned:
            raise RunError(f"host {host} does not answer, so it keeps the cluster's files and daemons; inspect it")

    def close(self, state: ClusterState) -> None:
        """Nothing is shared."""


@functools.cache
def _package_files() -> dict[str, NodeFile]:
    """The Python files of Phalanx, and of NVIDIA's bindings where they are installed, as a node gets them."""
    root = Path(__file__).parents[1]
    found = {f"{PYTHON}/{path.relative_to(root.parent)}": NodeFile(path.read_bytes()) for path in root.rglob("*.py")}
    bindings = importlib.util.find_spec("pynvml")
    if bindings is not None and bindings.origin is not None:
        found[f"{PYTHON}/pynvml.py"] = NodeFile(Path(bindings.origin).read_bytes())
    return found
