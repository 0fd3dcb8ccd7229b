"""The Slurm step of this process, read from Slurm's variables; pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.core.errors import ConfigError

AUTO_RESUME = "PHALANX_AUTO_RESUME"  # what the option --auto-resume of srun and sbatch sets, by contrib/spank


@dataclass(frozen=True)
class SlurmStep:
    """One task of a step that has one task on each node. `start_count` counts from 1 how often the job was started.

    `caller` is where the step's `srun` listens, by which it can be told whether that still lives; None: not known.
    """

    job: str
    step: str
    node: int
    nodes: int
    start_count: int
    caller: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        """By which one start of a job is told from another, in names of files."""
        return f"{self.job}-{self.start_count}"


def read_slurm_step(environment: Mapping[str, str]) -> SlurmStep | None:
    """The step that `srun` describes, or None where no step did start this process.

    Raises ConfigError when there are several tasks on a node: each node has one agent, which starts the ranks itself.
    """
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    tasks, nodes = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_STEP_NUM_NODES")
    if tasks != nodes:
        raise ConfigError(
            f"the Slurm step has {tasks} tasks on {nodes} nodes, but each node needs one task, which starts the "
            "ranks there; give srun --ntasks-per-node=1"
        )
    host = environment.get("SLURM_LAUNCH_NODE_IPADDR") or environment.get("SLURM_SRUN_COMM_HOST")
    port = environment.get("SLURM_SRUN_COMM_PORT", "")
    return SlurmStep(
        # Of a mixed job the first part's, by which all of it is known.
        job=environment.get("SLURM_JOB_ID_HET_GROUP_0") or environment.get("SLURM_JOB_ID", "0"),
        step=environment.get("SLURM_STEP_ID", "0"),
        node=_number(environment, "SLURM_PROCID"),
        nodes=nodes,
        start_count=_number(environment, "SLURM_RESTART_COUNT", 0) + 1,
        caller=(host, int(port)) if host and re.fullmatch(r"[0-9]{1,5}", port) else None,
    )


def read_auto_resume_step(environment: Mapping[str, str]) -> SlurmStep | None:
    """The step on several nodes that was started with --auto-resume=1, else None. Raises as `read_slurm_step`."""
    if environment.get(AUTO_RESUME) != "1":
        return None
    step = read_slurm_step(environment)
    return None if step is None or step.nodes == 1 else step


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise ConfigError(f"the environment variable {name} is {value!r}, not a number; let srun set it")
    return int(value)
