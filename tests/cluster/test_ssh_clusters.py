"""Clusters of provider `ssh`: OpenSSH's sshd on machines that are namespaces, with keys and configuration of its own;
skipped, with the reason, where there are no rights or no programs."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.core.errors import ConfigError, RunError
from phalanx.provision.cluster import Cluster
from phalanx.provision.config import ClusterConfig
from phalanx.provision.local import DAEMONS
from phalanx.provision.namespaces import PATH, SWITCH, Namespaces, find_obstacle
from tests.helpers import ALL, wait_until

pytestmark = pytest.mark.skipif(not ALL, reason="a whole life of a cluster by ssh: make test-all")
HOSTS = ["alpha", "beta", "gamma", "delta"]
# Carries a connection into the machines' network, which this machine is no part of.
RELAY = """
import os, select, socket, sys
s = socket.create_connection((sys.argv[1], 22), timeout=5)
while True:
    for f in select.select([0, s], [], [])[0]:
        d = os.read(0, 65536) if f == 0 else s.recv(65536)
        if not d:
            sys.exit()
        s.sendall(d) if f == 0 else os.write(1, d)
"""


def address(host: str) -> str:
    return f"10.88.0.{HOSTS.index(host) + 1}"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Namespaces]:
    """Machines of HOSTS with an sshd each, and `ssh_config` in the folder."""
    programs = (*DAEMONS, "sshd", "ssh", "ssh-keygen")
    missing = [tool for tool in programs if shutil.which(tool, path=PATH) is None]
    if (reason := find_obstacle(tmp_path)) is not None or missing:
        pytest.skip(reason or f"{missing[0]} is not installed (slurm-wlm, munge, openssh-server)")
    made = Namespaces(tmp_path / "machines", f"ssh-{tmp_path.name}-{tmp_path.parent.name}")
    try:
        made.start_switch()
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
        made.run(SWITCH, "ip addr add 10.88.255.254/16 dev br0")
        relay = f"nsenter -t {made.first_process(SWITCH)} -n {sys.executable} {tmp_path}/relay.py %h"
        (tmp_path / "relay.py").write_text(RELAY)
        text = ""
        for host in HOSTS:
            begin_machine(made, tmp_path, host)
            text += f"Host {host}\n HostName {address(host)}\n"
        key = (tmp_path / "host.pub").read_text().strip()
        known = tmp_path / "known_hosts"
        known.write_text("".join(f"{address(host)} {key}\n" for host in HOSTS))
        text += (
            f"Host *\n User root\n IdentityFile {tmp_path}/user\n UserKnownHostsFile {known}\n ProxyCommand {relay}\n"
        )
        (tmp_path / "ssh_config").write_text(text)
        yield made
    finally:
        made.close()


def begin_machine(made: Namespaces, folder: Path, host: str) -> None:
    made.start(host, address(host))
    keys = f"-o AuthorizedKeysFile=/etc/ssh/test_keys -o StrictModes=no -o UsePAM=no -h {folder}/host"
    made.run(host, f"mkdir -p /run/sshd && cp {folder}/user.pub /etc/ssh/test_keys && /usr/sbin/sshd {keys}")


def describe(tmp_path: Path, workers: int, hosts: list[str]) -> ClusterConfig:
    tree = {
        "name": "rack",
        "provider": "ssh",
        "groups": [{"name": "head", "role": "controller"}, {"name": "workers", "count": workers, "cpus": 2}],
        "hosts": hosts,
        "ssh_config": str(tmp_path / "ssh_config"),
    }
    return ClusterConfig.model_validate(tree)


def run(cluster: Cluster, *words: str, node: str | None = None) -> str:
    done = subprocess.run(cluster.command(list(words), node), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


@pytest.mark.timeout(1800)
def test_a_life_of_machines_that_exist(tmp_path: Path, machines: Namespaces) -> None:
    """Create on three, job, death and replacement by the spare, its return, a deep check, scale down and up, update,
    delete."""
    told: list[str] = []
    cluster = Cluster("rack", tmp_path / "clusters", lambda node, text: told.append(f"{node}: {text}"))
    if cached := list(Path("/var/cache/apt/archives").glob("slurmd_*.deb")):  # machines without Slurm
        for host in HOSTS[:3]:
            machines.run(host, "DEBIAN_FRONTEND=noninteractive apt-get purge -q -y slurmd slurmctld slurm-client munge")
            machines.run(host, "! command -v slurmd")
    before = snapshot(machines)
    begun = time.monotonic()
    cluster.create(describe(tmp_path, 2, HOSTS), heal=False)
    print(f"three machines in service after {time.monotonic() - begun:.1f} s", file=sys.stderr)
    assert [(row["node"], row["host"], row["slurm"]) for row in cluster.nodes()] == [
        ("head-1", "alpha", ""), ("workers-1", "beta", "idle"), ("workers-2", "gamma", "idle"),
    ]  # fmt: skip
    assert sorted(run(cluster, "srun", "-N2", "hostname").split()) == ["beta", "gamma"]
    assert "workers-2" in run(cluster, "getent", "hosts", "workers-2", node="workers-1")
    wait_until(lambda: cluster.nodes()[1]["health"] not in ("", "unknown"), 60)  # by the package that was brought
    assert ": measuring the links of 2 nodes" in told
    told.clear()
    cluster.create(describe(tmp_path, 2, HOSTS), heal=False)
    assert told == []
    with pytest.raises(
        RunError, match=r"check of workers-1 failed: its python3 has no \w+; install Phalanx with torch"
    ):
        cluster.check(["workers-1"])
    assert [row["slurm"] for row in cluster.nodes()] == ["", "drained", "idle"]

    machines.cut(address("beta"))
    machines.kill("beta")
    run(cluster, "scontrol", "update", "nodename=workers-1", "state=fail", "reason=Action:Replace")
    cluster.heal(once=True)
    assert [(row["node"], row["host"], row["slurm"]) for row in cluster.nodes()][1] == ("workers-1", "delta", "idle")
    with pytest.raises(ConfigError, match="1 nodes cannot be replaced by 0 spare hosts; name more with --hosts"):
        cluster.replace(["workers-2"])
    with pytest.raises(ConfigError, match="host beta cannot be reached"):
        cluster.scale("workers", 3, ["beta"])
    machines.stop("beta", address("beta"))
    begin_machine(machines, tmp_path, "beta")
    cluster.scale("workers", 3, ["beta"])
    assert [row["slurm"] for row in cluster.nodes()[1:]] == ["idle"] * 3
    cluster.scale("workers", 1)
    assert run(cluster, "srun", "hostname") == "delta\n"
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "on_create.sh").write_text("set -e\ncp provisioning_parameters.json /opt/updated\n")
    cluster.update(str(scripts))
    assert "workers-1" not in run(cluster, "sinfo", "-h", "-R") and cluster.nodes()[1]["slurm"] == "idle"
    assert '"controller_group": "head"' in run(cluster, "cat", "/opt/updated", node="workers-1")
    cluster.delete()
    assert snapshot(machines) == before
    if cached:
        machines.run("gamma", "! command -v slurmd")


def snapshot(machines: Namespaces) -> dict[str, list[str]]:
    """Daemons of each machine, and files of the cluster."""
    found = {}
    script = "ps -eo comm= | grep -E 'slurm|munge|python' | sort; ls -d /opt/phalanx /etc/slurm/* /var/lib/phalanx"
    for host in HOSTS:
        done = subprocess.run(machines.command(host, ["sh", "-c", script]), capture_output=True, text=True)
        found[host] = done.stdout.split()
    return found


def test_hosts_that_cannot_be_used_are_named_with_what_to_do(tmp_path: Path, machines: Namespaces) -> None:
    cluster = Cluster("rack", tmp_path / "clusters")
    machines.cut(address("beta"))
    machines.run("gamma", "mount -t tmpfs -o size=64k tmpfs /var")
    machines.run("delta", "rm -f /usr/bin/python3 /usr/local/bin/python3")
    with pytest.raises(ConfigError) as caught:
        cluster.create(describe(tmp_path, 2, HOSTS), heal=False)
    said = str(caught.value)
    assert "host beta cannot be reached (" in said and "try `ssh beta`" in said
    assert "host gamma: its disk is full (64 KiB left in /var); free 1 GiB there" in said
    assert "host delta: no python3 of 3.11 or later" in said
    assert "alpha" not in said and not (tmp_path / "clusters" / "rack").exists()


def test_another_slurm_and_another_cluster_stay_as_they_are(tmp_path: Path, machines: Namespaces) -> None:
    """Such hosts, and one without rights, are refused at once, before any is touched."""
    cluster = Cluster("rack", tmp_path / "clusters")
    conf = "ClusterName=theirs\nSlurmctldHost=gamma\nNodeName=gamma CPUs=1\nPartitionName=p Nodes=gamma\n"
    fake = "cp /bin/sleep /run/slurmd; /run/slurmd 1000 </dev/null >/dev/null 2>&1 &"
    machines.run("gamma", f"printf '{conf}' >/etc/slurm/slurm.conf; {fake}")
    machines.run("beta", "printf '# written by `phalanx cluster`\nClusterName=old\n' >/etc/slurm/slurm.conf")
    machines.run("delta", "useradd -M -d /var/plain -p '*' -s /bin/sh plain")
    config = tmp_path / "ssh_config"
    config.write_text(config.read_text().replace("Host delta\n", "Host delta\n User plain\n"))
    before = snapshot(machines)
    with pytest.raises(ConfigError) as caught:
        cluster.create(describe(tmp_path, 3, HOSTS), heal=False)
    said = str(caught.value)
    assert "host gamma: another Slurm runs here (ClusterName=theirs); stop it, or name another machine" in said
    assert "host beta: this machine belongs to the cluster old; delete that one first, or name another" in said
    assert "host delta: neither root nor sudo without a password" in said and "allow sudo (NOPASSWD)" in said
    assert "alpha" not in said and not (tmp_path / "clusters" / "rack").exists()
    assert snapshot(machines) == before
    text = subprocess.run(machines.command("gamma", ["cat", "/etc/slurm/slurm.conf"]), capture_output=True, text=True)
    assert text.stdout == conf
