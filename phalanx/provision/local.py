"""Provider `local`: nodes on this machine, of namespaces and control groups, for trying out, teaching and tests."""

import hashlib
import json
import shlex
import shutil
import sys
from pathlib import Path

from phalanx.provision.config import ClusterConfig
from phalanx.provision.machines import NodeFile
from phalanx.provision.monitor import SIMULATED_FILE
from phalanx.provision.namespaces import PATH, Namespaces, find_obstacle
from phalanx.provision.slurm_files import GPU_FOLDER
from phalanx.provision.state import ClusterState, NodeRecord

NETWORK = "10.77"
DAEMONS = ("munged", "slurmctld", "slurmd")
MOST_NODES = 200


class LocalMachines:
    """Nodes on this machine. `folder`: of the cluster, with the nodes' disks."""

    SLURMD_TIMEOUT_S = 10
    LIVENESS_IS_CHEAP = True
    OWN_HARDWARE = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        label = f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        self.namespaces = Namespaces(folder / "nodes", label)

    def find_problems(self, config: ClusterConfig) -> list[str]:
        """What this machine lacks."""
        found = find_obstacle(self._folder)
        problems = [] if found is None else [found]
        if missing := [tool for tool in DAEMONS if shutil.which(tool, path=PATH) is None]:
            problems.append(f"{', '.join(missing)} not installed; on Debian: apt-get install slurm-wlm munge")
        if (total := sum(group.count for group in config.groups)) > MOST_NODES:
            problems.append(f"{total} nodes are too many for one machine (at most {MOST_NODES}); lower the counts")
        return problems

    def prepare(self, state: ClusterState) -> None:
        """Make the switch, and give each node an address."""
        taken = {node.address for node in state.nodes}
        free = (address for number in range(1, 255) if (address := f"{NETWORK}.0.{number}") not in taken)
        for node in state.nodes:
            node.address = node.address or next(free)
        self.namespaces.start_switch()

    def count_spares(self, state: ClusterState) -> int | None:
        """Unlimited: a new node can always be created."""
        return None

    def python(self) -> str:
        """That of this command: nodes see this machine's files."""
        root = Path(__file__).parents[2]
        return f"env PYTHONPATH={shlex.quote(str(root))} {shlex.quote(sys.executable)}"

    def extra_files(self) -> dict[str, NodeFile]:
        """None: nodes see this machine's files."""
        return {}

    def launch(self, state: ClusterState, node: NodeRecord) -> None:
        """Start a node with an empty disk."""
        self.namespaces.stop(node.name, node.address)
        self.namespaces.start(node.name, node.address)
        self._pretend_gpus(state, node)

    def _pretend_gpus(self, state: ClusterState, node: NodeRecord) -> None:
        """Device files for Slurm's GRES, which wants character devices: they are /dev/null. The node's monitor reads
        healthy GPUs from a file, where faults can be written."""
        gpus = state.config.group(node.group).gpus or 0
        if not gpus:
            return
        simulated = [
            {"index": number, "uuid": f"{node.instance}-{number}", "name": "simulated", "bus": f"0000:{number:02x}:00"}
            for number in range(gpus)
        ]
        made = [f"mkdir -p {GPU_FOLDER}", *(f"mknod -m 666 {GPU_FOLDER}/gpu{number} c 1 3" for number in range(gpus))]
        text = json.dumps({"gpus": simulated, "kernel": []})
        self.namespaces.run(node.name, f"{'; '.join(made)}; echo {shlex.quote(text)} >{SIMULATED_FILE}")

    def is_alive(self, node: NodeRecord) -> bool:
        """Whether its process 1 runs."""
        return self.namespaces.first_process(node.name) is not None

    def command(self, node: NodeRecord, command: list[str]) -> list[str]:
        """Enters the node's namespaces."""
        return self.namespaces.command(node.name, command)

    def reboot(self, state: ClusterState, node: NodeRecord) -> None:
        """End all processes and start again, with the disk as it is."""
        self.namespaces.stop(node.name, node.address, keep_disk=True)
        self.namespaces.start(node.name, node.address)
        self._pretend_gpus(state, node)

    def terminate(self, state: ClusterState, node: NodeRecord) -> None:
        """End all processes and remove the disk."""
        self.namespaces.stop(node.name, node.address)

    def close(self, state: ClusterState) -> None:
        """End everything."""
        self.namespaces.close()
