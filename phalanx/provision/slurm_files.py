"""Configuration files of Slurm and munge for each node of a cluster, from the measured resources of its nodes. Pure.

Other settings keep Slurm's defaults. Processes are tracked without control groups, and tasks are not bound: HyperPod's
auto-resume needs `TaskPlugin=task/none`, and Phalanx's agents divide the cores themselves.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from phalanx.provision import lifecycle
from phalanx.provision.config import GroupConfig, NodeRole
from phalanx.provision.links import group_by_links, list_measured
from phalanx.provision.machines import NodeFile
from phalanx.provision.state import ClusterState, NodeRecord, Stage

CONF = "/etc/slurm/slurm.conf"
SITE_CONF = "/etc/slurm/site.conf"  # included at the end: the administrator's, which is never written
DAEMONS = "/opt/phalanx/daemons.sh"
HOSTS = "/opt/phalanx/hosts"  # a block of /etc/hosts, between these lines
HOSTS_BEGIN, HOSTS_END = "# phalanx cluster: begin", "# phalanx cluster: end"
DEFAULT_PARTITION = "dev"
GPU_FOLDER = "/run/phalanx/gpus"  # of pretended GPUs, which provider `local` makes
MONITOR_PID = "/run/phalanx/monitor.pid"
STOP_MONITOR = f"""
if pid=$(cat {MONITOR_PID} 2>/dev/null) && kill $pid 2>/dev/null; then
  for i in $(seq 100); do [ -d /proc/$pid ] || break; sleep 0.1; done
fi
"""
_CONF = """# written by `phalanx cluster`, which replaces it
ClusterName={name}
SlurmctldHost={controller}({address})
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=cred_expire=10
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=permit_job_expansion,sched_min_interval=200000,batch_sched_delay=0,bf_interval=2
SlurmdTimeout={timeout}
MessageTimeout=10
KillWait=10
ReturnToService=1
JobRequeue=1
"""
# Starts the daemons of a node, unless they run already; systemd does so if it is in charge. `daemons.sh restart
# slurmd`.
_DAEMONS = """#!/bin/sh
# usage: daemons.sh start|restart|stop munged|slurmctld|slurmd; written by `phalanx cluster`
verb=$1 daemon=$2 options="@OPTIONS@"
unit=$daemon; [ "$daemon" = munged ] && unit=munge
pidfile=/run/$daemon.pid; [ "$daemon" = munged ] && pidfile=/run/munge/munged.pid
running() {
  pid=$(cat $pidfile 2>/dev/null) && [ -n "$pid" ] && [ "$(cat /proc/$pid/comm 2>/dev/null)" = $daemon ]
}
if [ -d /run/systemd/system ]; then
  [ "$daemon" = slurmd ] && echo "SLURMD_OPTIONS=$options" >/etc/default/slurmd
  if [ "$verb" = start ]; then exec systemctl enable --now $unit; fi
  exec systemctl "$verb" $unit
fi
if [ "$verb" != start ] && running; then
  kill "$pid"
  for i in $(seq 100); do running || break; sleep 0.05; done
  running && kill -9 "$pid" && sleep 0.2
fi
[ "$verb" = stop ] && exit 0
running && exit 0
case $daemon in
  munged)
    mkdir -p /run/munge /var/lib/munge /var/log/munge
    chown munge: /run/munge /var/lib/munge /var/log/munge
    chmod 755 /run/munge
    exec setpriv --reuid=munge --regid=munge --clear-groups munged --force ;;
  slurmctld)
    mkdir -p /var/lib/slurm/slurmctld /var/log/slurm
    chown slurm: /var/lib/slurm /var/lib/slurm/slurmctld /var/log/slurm
    exec slurmctld ;;
  slurmd)
    mkdir -p /var/lib/slurm/slurmd /var/log/slurm
    exec slurmd $options ;;
esac
"""


def node_names(group: str, count: int) -> list[str]:
    """The names of the nodes of a group."""
    return [f"{group}-{number + 1}" for number in range(count)]


def make_slurm_conf(state: ClusterState, slurmd_timeout_s: int) -> str:
    """slurm.conf: each worker with its processors, memory and GPUs, and a partition for each group or name."""
    head = state.controller
    text = _CONF.format(
        name=state.config.name, controller=head.hostname or head.name, address=head.address, timeout=slurmd_timeout_s
    )
    partitions: dict[str, list[str]] = {}
    if any(_gpus(state, node) for node in state.nodes):
        text += "GresTypes=gpu\n"
    for node in _workers(state):
        group = state.config.group(node.group)
        cpus, memory = group.cpus or node.facts.get("cpus", 1), node.facts.get("memory_mib", 1000)
        gpus = _gpus(state, node)
        gres = f" Gres=gpu:{gpus}" if gpus else ""
        host = f" NodeHostname={node.hostname}" if node.hostname not in ("", node.name) else ""
        text += (
            f"NodeName={node.name}{host} NodeAddr={node.address} CPUs={cpus} RealMemory={memory}{gres} State=UNKNOWN\n"
        )
        partitions.setdefault(group.partition or DEFAULT_PARTITION, []).append(node.name)
    for number, (name, nodes) in enumerate(partitions.items()):
        default = "YES" if number == 0 else "NO"
        text += f"PartitionName={name} Nodes={','.join(nodes)} Default={default} MaxTime=INFINITE State=UP\n"
    return text


def _workers(state: ClusterState) -> list[NodeRecord]:
    """Nodes that run jobs and have an address."""
    return [
        node
        for node in state.nodes
        if state.config.group(node.group).role == NodeRole.WORKER and node.stage != Stage.ABSENT
    ]


def _gpus(state: ClusterState, node: NodeRecord) -> int:
    group: GroupConfig = state.config.group(node.group)
    return node.facts.get("gpus", 0) if group.gpus is None else group.gpus


def make_gres_conf(state: ClusterState) -> str:
    """gres.conf: the device files of GPUs, where nodes have any."""
    text = ""
    for node in _workers(state):
        if gpus := _gpus(state, node):
            at = "/dev/nvidia" if node.facts.get("gpus", 0) else f"{GPU_FOLDER}/gpu"
            text += f"NodeName={node.name} Name=gpu File={at}{f'[0-{gpus - 1}]' if gpus > 1 else '0'}\n"
    return text


def make_topology_conf(state: ClusterState) -> str:
    """topology.conf: nodes whose measured links are fast hang on one switch, else those of a group; all switches on
    another."""
    known = list_measured(state.links)
    measured = [node.name for node in _workers(state) if node.name in known]
    groups = {node.group for node in state.nodes}
    together = group_by_links(measured, state.links)
    switches = {_free_name(f"switch{number + 1}", groups): names for number, names in enumerate(together)}
    for node in _workers(state):
        if node.name not in known:
            switches.setdefault(node.group, []).append(node.name)
    lines = [f"SwitchName={switch} Nodes={','.join(nodes)}" for switch, nodes in switches.items()]
    if len(switches) < 2:
        return ""
    return "\n".join([*lines, f"SwitchName={_free_name('all', groups)} Switches={','.join(switches)}"]) + "\n"


def _free_name(name: str, taken: Collection[str]) -> str:
    """A name of ours that is not one of a user's."""
    while name in taken:
        name += "-"
    return name


def _make_hosts(state: ClusterState) -> str:
    """The block of /etc/hosts: jobs find each other by the names of nodes."""
    there = [node for node in state.nodes if node.stage != Stage.ABSENT]
    lines = [" ".join(dict.fromkeys([node.address, node.name, node.hostname])).strip() for node in there]
    return "\n".join([HOSTS_BEGIN, *lines, HOSTS_END]) + "\n"


def make_node_files(
    state: ClusterState, node: NodeRecord, key: bytes, scripts: Mapping[str, bytes], slurmd_timeout_s: int
) -> dict[str, NodeFile]:
    """All files of a node, by path."""
    topology = make_topology_conf(state)
    conf = make_slurm_conf(state, slurmd_timeout_s) + ("TopologyPlugin=topology/tree\n" if topology else "")
    conf += f"include {SITE_CONF}\n"
    files = {
        CONF: conf,
        "/etc/slurm/gres.conf": make_gres_conf(state),
        "/etc/slurm/topology.conf": topology,
        "/etc/slurm/cgroup.conf": "CgroupAutomount=no\n",
        HOSTS: _make_hosts(state),
        DAEMONS: _DAEMONS.replace("@OPTIONS@", f"-N {node.name}"),
        lifecycle.RESOURCES: json.dumps(lifecycle.make_resources(state.config, state.nodes), indent=1),
        f"{lifecycle.FOLDER}/{lifecycle.PARAMETERS}": json.dumps(lifecycle.make_parameters(state.config), indent=1),
    }
    made = {path: NodeFile(text.encode()) for path, text in files.items()}
    made |= {
        f"{lifecycle.FOLDER}/{name}": NodeFile(data, 0o755)
        for name, data in scripts.items()
        if name != lifecycle.PARAMETERS
    }
    if scripts:
        made |= {path: NodeFile(text.encode(), 0o755) for path, text in lifecycle.TOOL_FILES.items()}
    return made | {"/etc/munge/munge.key": NodeFile(key, 0o400, "munge")}


def digest_files(files: Mapping[str, NodeFile]) -> str:
    """A digest of the files that Slurm's daemons read: with another one they are restarted."""
    seen = hashlib.sha256()
    for path, file in sorted(files.items()):
        if not path.startswith((lifecycle.FOLDER, lifecycle.RESOURCES)):
            seen.update(path.encode() + b"\0" + file.data + b"\0")
    return seen.hexdigest()[:16]


def digest_scripts(scripts: Mapping[str, bytes], software: str) -> str:
    """A digest of the lifecycle scripts and of the update that they belong to."""
    seen = hashlib.sha256(software.encode())
    for name, data in sorted(scripts.items()):
        seen.update(name.encode() + b"\0" + data + b"\0")
    return seen.hexdigest()[:16]


def describe_facts(output: str) -> dict[str, Any]:
    """Parse the output of the measuring script: `cpus N`, `memory_mib N`, `gpus N`, and last the host name."""
    pairs = [line.split() for line in output.splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


MEASURE = (
    "echo cpus $(nproc)\n"
    "echo memory_mib $(($(sed -n 's/^MemTotal: *\\([0-9]*\\).*/\\1/p' /proc/meminfo) * 9 / 10240))\n"
    "echo gpus $(ls /dev/nvidia[0-9]* 2>/dev/null | wc -l)\n"
    "hostname -s"
)
