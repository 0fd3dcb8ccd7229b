"""The schedulers by name: a new one is a module and a row here."""

from phalanx.core.errors import ConfigError
from phalanx.launch.schedulers import slurm
from phalanx.launch.schedulers.kubernetes import Kubernetes
from phalanx.launch.schedulers.scheduler import Background, Scheduler

SCHEDULERS: dict[str, Scheduler] = {"slurm": slurm, "k8s": Kubernetes(), "background": Background()}
DEFAULT, LOCAL = next(iter(SCHEDULERS)), "background"


def find_scheduler(name: str) -> Scheduler:
    """Raises ConfigError for an unknown name."""
    if name not in SCHEDULERS:
        raise ConfigError(f"unknown scheduler {name}; choose one of {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name]
