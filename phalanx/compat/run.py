"""`phalanx run`: a custom script on the ranks of this machine, or as one externally started rank.

Scripts written for SageMaker's library find `torch.sagemaker` here. Where there is no accelerator, what they say to one
goes to the CPU.
"""

import contextlib
import datetime
import functools
import os
import runpy
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind
from phalanx.elastic.node import agent
from phalanx.system.fork import DEVICES_TIMEOUT_S, fork_call
from phalanx.system.slurm_env import AUTO_RESUME
from phalanx.system.torchrun_env import device_of, from_environment

# What most scripts import, once in the parent of the ranks.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "phalanx.api.fsdp.patches",
)
GRACE_S = 30.0
RESTARTS = 3  # on several nodes, and with --auto-resume=1: what a script has come to is for it to know
# Exit codes that mean something else to an agent when a rank ends with them.
RESERVED_EXIT_CODES = (ExitCode.STOPPED, ExitCode.OUT_OF_MEMORY)
MAX_LINGER = datetime.timedelta(days=365)  # how long ranks may continue after rank 0 has ended
PARAMETERS = "SM_HP_MP_PARAMETERS"  # where the launcher of SageMaker's library leaves its parameters, as JSON


@dataclass(frozen=True)
class LaunchInfo:
    """What a script learns of the job whose ranks this package has started, as torchrun tells it."""

    name: str = "none"
    first_attempt: int = 1
    max_restarts: int = 0


def run_script(
    script: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    nproc: int | None = None,
    smp_config: Path | None = None,
    max_restarts: int | None = None,
    watch: Callable[[], contextlib.AbstractContextManager[Callable[[], str]]] = lambda: contextlib.nullcontext(str),
) -> int:
    """Run a script to its end; gives the exit code, of the first rank that failed. Other ranks are ended with it.

    `nproc` ranks of this machine; None: one for each accelerator, else one; where torchrun, Slurm or mpirun has started
    this process, it is one of their ranks. `smp_config`: a JSON file of that library's settings, which take the place
    of those in the script. `max_restarts`: how often all ranks are restarted; None: never, or RESTARTS times with
    --auto-resume=1. `watch` is entered by who starts the ranks, and gives what says why this machine will be gone, for
    which it sends LEAVE_SIGNAL. Raises ConfigError for a missing file or invalid settings.
    """
    settings = read_settings(script, smp_config)
    agent.preload(PRELOAD)
    devices: list[str] = fork_call(_found, timeout_s=DEVICES_TIMEOUT_S)
    given = from_environment(environment, devices)
    if given is not None:
        if nproc is not None:
            raise ConfigError(
                f"--nproc {nproc} is for ranks that this command starts, but torchrun, Slurm or mpirun started it as "
                f"rank {given.rank} of {given.world}; remove it"
            )
        if max_restarts:
            raise ConfigError(
                f"--max-restarts {max_restarts} is for ranks that this command starts, but another launcher started "
                f"rank {given.rank} of {given.world}; restart them with that launcher, or start one process on each "
                "node with --nodes"
            )
        check_settings(settings, given.world)
        if environment.get(AUTO_RESUME) == "1" and given.rank == 0:
            sys.stderr.write(
                "--auto-resume=1 has no effect: srun started these ranks; `phalanx run` as one task on each node "
                "restarts its own ranks\n"
            )
        try:
            return run_rank(given, script, arguments, settings)
        except PhalanxError:
            raise
        except Exception:  # of the script, for its author
            traceback.print_exc()
            return int(ExitCode.FAILED)
    world = nproc or len(devices) or 1
    check_settings(settings, world)
    if max_restarts is None:
        max_restarts = RESTARTS if environment.get(AUTO_RESUME) == "1" else 0
    launched = LaunchInfo(max_restarts=max_restarts)
    worker = functools.partial(run_rank, script=script, arguments=list(arguments), settings=settings, launched=launched)
    job = agent.NodeJob(
        world=world,
        worker=worker,
        devices=[device_of(devices, rank, world) for rank in range(world)],
        on_event=_report_event,
        grace_s=GRACE_S,
    )
    with watch() as read_notice:
        return agent.run_local_job(job, max_restarts, read_notice=read_notice)


def _found() -> list[str]:
    from phalanx.system import accelerator

    return accelerator.list_devices()


def _report_event(kind: str, details: dict[str, Any]) -> None:
    if kind == EventKind.WORKER_DIED and details.get("world", 2) > 1:
        how = f"exit code {details['exit_code']}" if "type" not in details and "exit_code" in details else None
        sys.stderr.write(f"rank {details['rank']} ended first: {how or details.get('reason')}\n")
    if kind == EventKind.RESTARTED:
        sys.stderr.write("all ranks restart\n")
    if kind == EventKind.NODE_LEAVING:
        sys.stderr.write(f"this machine will soon be gone ({details['reason']}): the script's ranks get SIGTERM\n")


def read_settings(script: str, path: Path | None) -> str | None:
    """The text of a configuration, where there is one. Raises ConfigError where it cannot be read, or no script is
    there."""
    if not Path(script).is_file():
        raise ConfigError(f"script {script} does not exist; name a Python file")
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--smp-config {path} cannot be read ({error}); name a JSON file") from None


def check_settings(settings: str | None, world: int) -> None:
    """Raise ConfigError where a configuration's settings are invalid, or do not fit the number of ranks."""
    if settings is not None:
        from phalanx.compat.sagemaker import config

        config.check_settings(config.parse(settings, "--smp-config"), world, "--smp-config")


# ------------------------------------------------------------------------------------------------------------ one rank


def run_rank(
    placement: Placement,
    script: str,
    arguments: Sequence[str],
    settings: str | None = None,
    launched: LaunchInfo | None = None,
) -> int:
    """Be one rank of a script, in this process; `launched`: one that this package has started, and nothing else."""
    import torch

    from phalanx.compat.host_fallback import host_fallback
    from phalanx.compat.sagemaker.install import WITHOUT, install
    from phalanx.system import accelerator

    accelerator.set_device(
        torch.device(placement.device), accelerator.threads_per_rank(placement.threads, placement.local_world)
    )
    store = _announce(placement, launched)
    if settings is not None:
        os.environ[PARAMETERS] = settings
    install()
    _quieten()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    with host_fallback(placement.rank, placement.local_world):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as leaving:
            if launched is not None and leaving.code in RESERVED_EXIT_CODES:
                sys.stderr.write(f"{script} ended with exit code {leaving.code}\n")
                return int(ExitCode.FAILED)
            if leaving.code not in (None, 0):
                raise
        except ImportError as error:
            missing = str(error.name).partition(".")[0]
            if missing not in WITHOUT:
                raise
            raise ConfigError(f"{script} imports {missing}, which is not installed here; {WITHOUT[missing]}") from error
    if store is not None:
        _leave_store(store, placement)
    return 0


def _quieten() -> None:
    """Suppress torch's warnings about calls by torch's own functions, several for each checkpoint and rank. Those about
    the script's calls are shown."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|phalanx)\.")
    for of_groups in ("`_get_pg_default_device` will be deprecated", "Multiple backends are registered with this"):
        warnings.filterwarnings("ignore", message=of_groups, category=UserWarning, module=r"torch\.")


def _announce(placement: Placement, launched: LaunchInfo | None) -> Any:
    """Set the variables by which scripts, and torch itself, know where they are. Gives the ranks' store, where
    this package has made it."""
    address = placement.store
    known = {
        "RANK": placement.rank,
        "WORLD_SIZE": placement.world,
        "LOCAL_RANK": placement.local_rank,
        "LOCAL_WORLD_SIZE": placement.local_world,
        "GROUP_RANK": placement.node,
        "MASTER_ADDR": "127.0.0.1" if address is None else address.host,
        "MASTER_PORT": _free_port() if address is None else address.port,
    }
    if launched is not None:
        known |= {
            "ROLE_RANK": placement.rank,
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": placement.world,
            "GROUP_WORLD_SIZE": placement.nodes,
            "TORCHELASTIC_RESTART_COUNT": placement.attempt - launched.first_attempt,
            "TORCHELASTIC_MAX_RESTARTS": launched.max_restarts,
            "TORCHELASTIC_RUN_ID": launched.name,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
    os.environ.update({name: str(value) for name, value in known.items()})
    if launched is None or address is None:
        return None
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # there is one already: no other process may open it
    import torch.distributed as dist

    return dist.TCPStore(
        address.host,
        address.port,
        placement.world,
        is_master=address.listen_fd is not None,
        wait_for_workers=True,  # a script may end at once, and rank 0 takes the store with it
        master_listen_fd=address.listen_fd,
    )


def _leave_store(store: Any, placement: Placement) -> None:
    """Rank 0, which keeps the store, leaves last: the others may still ask it. One that fails ends them all.

    On several nodes none leaves before the script is over on all, since a node may be lost until then."""
    if placement.rank and placement.nodes > 1:
        store.set(f"over/{placement.rank}", "")
        store.wait(["over/0"], MAX_LINGER)
    if placement.rank:
        store.set(f"left/{placement.rank}", "")
        return
    others = range(1, placement.world)
    if placement.nodes > 1:
        store.wait([f"over/{rank}" for rank in others], MAX_LINGER)
        store.set("over/0", "")
    store.wait([f"left/{rank}" for rank in others], MAX_LINGER)


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])
