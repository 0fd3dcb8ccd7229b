"""The rank of an externally started process: the environment of torchrun, Open MPI's mpirun or Slurm, read into a
placement."""

import re
import zlib
from collections.abc import Mapping, Sequence

from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement, StoreAddress

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
OF_USERS = ("SLURM_CONF", "SLURM_CLUSTERS")  # of Slurm's variables, what says which cluster is meant


def strip_job_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for what is started here and is no part of the job whose shell this may be (`srun --pty bash`):
    it would take itself for one of its ranks, and a job that is submitted here would take its sizes and its count of
    restarts for its own."""
    inside = "SLURM_JOB_ID" in environment
    gone = {name for name in environment if inside and name.startswith("SLURM_") and name not in OF_USERS}
    return {name: value for name, value in environment.items() if name not in {*TORCHRUN, *MPIRUN, *gone}}


def from_environment(environment: Mapping[str, str], devices: Sequence[str]) -> Placement | None:
    """The placement that torchrun, mpirun or `srun` describes, or None when none of them started this process.

    `devices` are this node's accelerators ("cpu" is used when there are none). Raises ConfigError when the variables
    are there but make no sense, or when a node has more ranks than accelerators.
    """
    if all(name in environment for name in TORCHRUN):
        return _torchrun(environment, devices)
    if all(name in environment for name in MPIRUN):  # mpirun's own processes may be tasks of srun
        return _mpirun(environment, devices)
    # Inside an allocation but outside a step (an sbatch script, say) a process is alone.
    if all(name in environment for name in SLURM) and environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _slurm(environment, devices)
    return None


def _torchrun(environment: Mapping[str, str], devices: Sequence[str]) -> Placement:
    rank, world, local_rank = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_world = _number(environment, "LOCAL_WORLD_SIZE", world)
    _check_place(("RANK", rank), ("WORLD_SIZE", world), "torchrun")
    _check_place(("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_world), "torchrun")
    port = _master_port(environment)
    # torchrun's own agent usually keeps the store; otherwise rank 0 has to.
    kept_by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Placement(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        node=_number(environment, "GROUP_RANK", rank // local_world),
        device=_seen(devices, local_rank, local_world),
        store=StoreAddress(environment["MASTER_ADDR"], port, serve=rank == 0 and not kept_by_agent),
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0) + 1,
    )


def _mpirun(environment: Mapping[str, str], devices: Sequence[str]) -> Placement:
    rank, world, local_rank, local_world = (_number(environment, name) for name in MPIRUN)
    _check_place((MPIRUN[0], rank), (MPIRUN[1], world), "mpirun")
    _check_place((MPIRUN[2], local_rank), (MPIRUN[3], local_world), "mpirun")
    host = environment.get("MASTER_ADDR") or ("127.0.0.1" if local_world == world else None)
    if host is None:
        raise ConfigError(
            f"mpirun started {world} ranks, {local_world} of them here, but does not say where rank 0 is; give its "
            "host to all of them: mpirun -x MASTER_ADDR=HOST"
        )
    job = zlib.crc32(environment.get("PMIX_NAMESPACE", "").encode())
    return Placement(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        node=rank // local_world,
        device=_seen(devices, local_rank, local_world),
        store=StoreAddress(host, _master_port(environment, _port(job)), serve=rank == 0),
    )


def _master_port(environment: Mapping[str, str], default: int | None = None) -> int:
    port = _number(environment, "MASTER_PORT", default)
    if not 0 < port < 65536:
        raise ConfigError(
            f"the environment variable MASTER_PORT is {port}, which is not a port; give a free port between 1 and "
            "65535, or start torchrun with --standalone"
        )
    return port


def _port(job: int) -> int:
    """Where ranks of a job meet; ports below 10000 and above 60000 are left to others."""
    return 10000 + job % 50000


def _slurm(environment: Mapping[str, str], devices: Sequence[str]) -> Placement:
    rank, world = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_STEP_NUM_TASKS")
    local_rank = _number(environment, "SLURM_LOCALID")
    local_world = _tasks_here(environment, world)
    _check_place(("SLURM_PROCID", rank), ("SLURM_STEP_NUM_TASKS", world), "srun")
    _check_place(("SLURM_LOCALID", local_rank), ("SLURM_STEP_TASKS_PER_NODE", local_world), "srun")
    # Two steps of a job must not meet each other.
    port = _port(_number(environment, "SLURM_JOB_ID") * 64 + _number(environment, "SLURM_STEP_ID", 0))
    return Placement(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        node=_number(environment, "SLURM_NODEID"),
        device=_seen(devices, local_rank, local_world, environment.get("SLURM_GPUS_PER_TASK", "")),
        store=StoreAddress(first_host(environment["SLURM_STEP_NODELIST"]), port, serve=rank == 0),
        attempt=_number(environment, "SLURM_RESTART_COUNT", 0) + 1,
    )


def _seen(devices: Sequence[str], local_rank: int, local_world: int, per_task: str = "") -> str:
    """The device of an externally started rank, whose launcher may expose only that rank's accelerators.

    A variable of the driver set for each of torchrun's ranks, or `srun --gpu-bind`, shows one. --gpus-per-task shows
    as many as it says, such as 2 or "a100:2"; a step without binding in a job with that option sees all of the node.
    """
    count = re.fullmatch(r"(?:[^:]+:)?([0-9]{1,9})", per_task)
    own = max(1, int(count[1])) if count else 1
    return device_of(devices, 0 if len(devices) <= own else local_rank, local_world)


def device_of(devices: Sequence[str], local_rank: int, local_world: int) -> str:
    """The device of a rank of a node. Raises ConfigError when the node has more ranks than accelerators."""
    if not devices:
        return "cpu"
    if len(devices) == 1 and local_world > 1 and local_rank >= 1:
        raise ConfigError(
            f"this node has {local_world} ranks but sees one accelerator; start one rank per accelerator (--ranks 1)"
        )
    if local_rank >= len(devices):
        raise ConfigError(
            f"this node has {local_world} ranks but sees {len(devices)} accelerators; start one rank per accelerator "
            f"(--ranks {len(devices)})"
        )
    return devices[local_rank]


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list, which may count in several places.

    >>> first_host("gpu-[007-009,12],login")
    'gpu-007'
    >>> first_host("rack[2-3]n[01,04]")
    'rack2n01'
    """
    first = re.match(r"(?:[^,\[\]\s]|\[\w[\w,-]*\])+(?=,|$)", nodes)
    if first is None or first[0].startswith("["):
        raise ConfigError(f"SLURM_STEP_NODELIST is {nodes!r}, which is not a list of nodes; start the ranks with srun")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _tasks_here(environment: Mapping[str, str], world: int) -> int:
    """Ranks of this node, from a list such as "4(x2),3": four on each of two nodes, then three."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", str(world)).split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE has {part!r}, which is not a count; start the ranks with srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environment, "SLURM_NODEID")
    return counts[node] if node < len(counts) else world


def _check_place(place: tuple[str, int], total: tuple[str, int], starter: str) -> None:
    if place[1] >= total[1]:
        raise ConfigError(
            f"the environment has {place[0]} {place[1]} of {total[0]} {total[1]}, which is not possible; let "
            f"{starter} set them"
        )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable's value; without `default` it must be there."""
    if default is not None and name not in environment:
        return default
    value = environment[name]
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise ConfigError(
            f"the environment variable {name} is {value!r}, not a number; let torchrun, mpirun or srun set it"
        )
    return int(value)
