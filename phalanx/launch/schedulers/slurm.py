"""Slurm as a scheduler, and its commands: the only module that runs sbatch, scontrol, sinfo and scancel, each with a
time limit.

Their output is parsed by functions that need no Slurm. A job's details come from `scontrol show job`, which needs no
accounting database; long after its end Slurm forgets a job.
"""

import contextlib
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, PhalanxError, RunError
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.launch.schedulers.scheduler import Job, JobTask, LaunchOptions, QueuePhase, SchedulerNode
from phalanx.launch.schedulers.slurm_script import (
    make_job_spec,
    parse_partition_counts,
    parse_time_limit,
    render_script,
)
from phalanx.system import torchrun_env
from phalanx.system.commands import run_program
from phalanx.system.slurm_env import SlurmStep, read_slurm_step

TITLE = "Slurm"
SECTION: str | None = "slurm"
QUEUES = True
TIMEOUT_S = 30.0
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_FED")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")
SRUN_FLUSH_S = 1.0  # time for srun to pass on a node's output before its step is ended
STATES = {NodeRequestKind.DRAIN: "drain", NodeRequestKind.REPLACE: "fail", NodeRequestKind.RETURN: "resume"}
# SageMaker HyperPod replaces a node whose state is `fail` with exactly this reason; elsewhere it is for the admin.
REPLACE_REASON = "Action:Replace"
REASON_MOST = 200  # characters


@dataclass(frozen=True)
class SlurmPartition:
    """`limit` as Slurm writes it, such as 1-00:00:00 or infinite; `nodes` counts all that belong to it."""

    name: str
    default: bool
    up: bool
    nodes: int
    limit: str


def run_slurm(
    command: Sequence[str], timeout_s: float = TIMEOUT_S, environment: Mapping[str, str] | None = None
) -> str:
    """Run one of Slurm's commands, in an `environment` (None: this process's), and return its output. Raises
    ConfigError without Slurm, and RunError with Slurm's message if it fails or does not answer in time.
    """
    name = command[0]
    missing = (
        f"{name} was not found, so Slurm cannot be used; log in to a node of the cluster, or run without Slurm "
        "(`phalanx launch --local` or `phalanx train`)"
    )
    again = "try again when its controller is up (`scontrol ping`)"
    return run_program(command, f"Slurm's {name}", timeout_s, missing, again, environment=environment)


# ------------------------------------------------------------------------------------------------------------ questions


def partitions() -> list[SlurmPartition]:
    """All partitions, including hidden ones. Raises as `run_slurm`."""
    return read_partitions(run_slurm(["sinfo", "--all", "--noheader", "--format=%P|%a|%D|%l"]))


def read_partitions(text: str) -> list[SlurmPartition]:
    """What `sinfo --format=%P|%a|%D|%l` has printed: a line for each kind of state that a partition's nodes are in."""
    found: dict[str, SlurmPartition] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 4 or not fields[2].isdecimal():
            continue
        name = fields[0].removesuffix("*")
        before = found[name].nodes if name in found else 0
        found[name] = SlurmPartition(
            name, fields[0].endswith("*"), fields[1] == "up", before + int(fields[2]), fields[3]
        )
    return list(found.values())


def query_job(number: str) -> Job | None:
    """A job, or None where Slurm no longer knows it. Raises as `run_slurm`."""
    try:
        return read_job(run_slurm(["scontrol", "show", "job", "--oneliner", number]))
    except RunError as error:
        if "invalid job id" in str(error).lower():
            return None
        raise


def read_job(text: str) -> Job | None:
    """What `scontrol show job --oneliner` has printed; of a job in several parts the first one, with all nodes."""
    lines = [_fields(line) for line in text.splitlines() if "JobState=" in line]
    if not lines:
        return None
    first = lines[0]
    nodes = ",".join(part["NodeList"] for part in lines if part.get("NodeList", "(null)") not in ("(null)", ""))
    restarts, code = first.get("Restarts", "0"), first.get("ExitCode", "").partition(":")[0]
    return Job(
        id=first.get("JobId", ""),
        state=first["JobState"],
        phase=find_phase(first["JobState"]),
        reason="" if first.get("Reason") in (None, "None") else first["Reason"],
        nodes=nodes,
        restarts=int(restarts) if restarts.isdecimal() else 0,
        time_limit=first.get("TimeLimit", ""),
        end_time="" if first.get("EndTime") in (None, "Unknown") else first["EndTime"],
        code=int(code) if code.isdecimal() else None,
    )


def find_phase(state: str) -> QueuePhase:
    if state in WAITING:
        return QueuePhase.WAITS
    if state == "COMPLETING":
        return QueuePhase.ENDS
    return QueuePhase.RUNS if state in RUNNING else QueuePhase.OVER


def _fields(line: str) -> dict[str, str]:
    """Words of the form key=value; what follows a value's first space belongs to no key that is read here."""
    found: dict[str, str] = {}
    for word in line.split():
        key, equals, value = word.partition("=")
        if equals and key not in found:
            found[key] = value
    return found


def check_cluster(config: Config, options: LaunchOptions) -> None:
    """Raises ConfigError if the cluster does not have these partitions, or not enough nodes."""
    check_partitions(
        parse_partition_counts(config.slurm.partition, options.nodes + options.spares), config.slurm.time, partitions()
    )


def check_partitions(parts: Sequence[tuple[str | None, int]], limit: str | None, found: list[SlurmPartition]) -> None:
    """Raises ConfigError if the cluster does not have these partitions, or not enough nodes."""
    names = ", ".join(partition.name for partition in found) or "none"
    for name, nodes in parts:
        fits = [each for each in found if each.name == name or (name is None and each.default)]
        if not fits and name is None:
            raise ConfigError(f"Slurm has no default partition; choose one with --partition: {names}")
        for each in fits or _largest_of_list(name, found, names):
            if not each.up:
                raise ConfigError(
                    f"the partition {each.name} does not accept jobs now; wait, or choose another: {names}"
                )
            if each.nodes < nodes:
                raise ConfigError(
                    f"the partition {each.name} has {each.nodes} node{'s' if each.nodes != 1 else ''}, but {nodes} "
                    "are requested (--nodes and --spares); request fewer, or choose another partition"
                )
            limit_s, asked_s = parse_time_limit(each.limit), parse_time_limit(limit or "0")
            if limit_s is not None and asked_s is not None and asked_s > limit_s:
                raise ConfigError(
                    f"the partition {each.name} limits a job to {each.limit}, but --time requests {limit}; request "
                    "less, and add --until-done to continue in further jobs"
                )


def _largest_of_list(name: str | None, found: list[SlurmPartition], names: str) -> list[SlurmPartition]:
    """The largest of the partitions of a list such as `a,b`, any of which Slurm may choose."""
    several = [each for each in found if each.name in (name or "").split(",")]
    if not several or len(several) < len((name or "").split(",")):
        raise ConfigError(f"partition {name} does not exist; this cluster has: {names}")
    return [max((each for each in several if each.up), key=lambda each: each.nodes, default=several[0])]


# -------------------------------------------------------------------------------------------------------------- actions


def make_script(config: Config, paths: RunPaths, options: LaunchOptions) -> str | None:
    """The script of a job. Raises ConfigError for what could not run."""
    return render_script(make_job_spec(config, paths, options))


def submit(paths: RunPaths, environment: Mapping[str, str]) -> str:
    """Submit the script of a run to Slurm, without the environment's job variables; returns the job's number. Raises as
    `run_slurm`."""
    command = ["sbatch", "--parsable", str(paths.launch_script.resolve())]
    answer = run_slurm(command, 60.0, torchrun_env.strip_job_variables(environment)).strip().partition(";")[0]
    if not re.fullmatch(r"\d+(\+\d+)?", answer):
        raise RunError(f"sbatch answered {answer[:100]!r} instead of a job number; check with `squeue --me`")
    return answer


def stop(number: str) -> None:
    """Send SIGTERM to a job's steps: its ranks save and exit. Raises as `run_slurm`."""
    run_slurm(["scancel", "--signal=TERM", number])


def cancel(number: str) -> None:
    """End a job, or a step of one (`12.0`), now. Raises as `run_slurm`."""
    run_slurm(["scancel", number])


def requeue(number: str) -> None:
    """Put a job into the queue again, under its number. Raises as `run_slurm`."""
    run_slurm(["scontrol", "requeue", number])


# -------------------------------------------------------------------------------------------------------------- nodes


def set_node_state(node: str, wanted: NodeRequestKind, reason: str | None) -> str:
    """Drain a node (its running jobs continue), request its replacement, or return it to Slurm.

    Takes an operator's rights. Raises ConfigError without Slurm, RunError with its words where it refuses.
    """
    command = ["scontrol", "update", f"nodename={node}", f"state={STATES[wanted]}"]
    default = {NodeRequestKind.DRAIN: "drained by phalanx", NodeRequestKind.REPLACE: REPLACE_REASON}.get(wanted)
    if (why := reason or default) is not None and wanted != NodeRequestKind.RETURN:
        command.append(f"reason={one_line(why)}")
    run_slurm(command)
    return STATES[wanted]


def one_line(text: str) -> str:
    """A reason as Slurm can keep it."""
    return re.sub(r"\s+", " ", "".join(letter for letter in text if letter.isprintable() or letter.isspace()))[
        :REASON_MOST
    ].strip()


def list_nodes() -> list[SchedulerNode]:
    """All nodes that Slurm has, each once. Raises as `run_slurm`."""
    found = {}
    for line in run_slurm(["sinfo", "--noheader", "--Node", "--format=%N|%T|%E"]).splitlines():
        name, state, reason = (line.split("|", 2) + ["", ""])[:3]
        if name.strip():
            found[name.strip()] = SchedulerNode(
                name.strip(), state.strip(), "" if reason.strip() == "none" else reason.strip()
            )
    return list(found.values())


# ------------------------------------------------------------------------------------------------ on a node of a job


def read_task(environment: Mapping[str, str], paths: RunPaths) -> JobTask | None:
    return read_slurm_step(environment)


def exit_code(code: int, leaves: bool, ends: bool) -> int:
    return code


def find_rendezvous(paths: RunPaths, task: JobTask | None) -> str:
    return paths.rendezvous.resolve().as_uri()


def is_script_alive(task: JobTask) -> bool:
    """Whether the `srun` of this step still listens; where that is not known it is taken to."""
    if not isinstance(task, SlurmStep) or task.caller is None:
        return True
    try:
        socket.create_connection(task.caller, timeout=3).close()
    except OSError:
        return False
    return True


def cancel_task(environment: Mapping[str, str]) -> None:
    """Cancel the step that this node cannot take part in: the other nodes would wait for it."""
    time.sleep(SRUN_FLUSH_S)
    step = read_slurm_step(environment)
    if step is not None:
        with contextlib.suppress(PhalanxError):
            cancel(f"{step.job}.{step.step}")


def find_log(paths: RunPaths, number: str) -> Path:
    return paths.job_log("slurm", number)
