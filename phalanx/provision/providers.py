"""The providers of machines by name."""

from pathlib import Path

from phalanx.provision.config import ClusterConfig
from phalanx.provision.local import LocalMachines
from phalanx.provision.machines import Machines
from phalanx.provision.ssh import SshMachines


def make_machines(config: ClusterConfig, folder: Path) -> Machines:
    """The machines of a cluster whose state is in a folder."""
    return LocalMachines(folder) if config.provider == "local" else SshMachines(config, folder)
