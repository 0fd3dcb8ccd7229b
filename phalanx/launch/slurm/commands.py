"""Slurm's commands: the only place that runs sbatch, squeue, scontrol, sinfo and scancel, each with a time limit.

What they print is read by functions that need no Slurm. A job's details come from `scontrol show job`, which needs no
accounting database; long after its end Slurm forgets a job, and then there is no such job any more.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import ConfigError, RunError

TIMEOUT_S = 30.0
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_FED")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")


@dataclass(frozen=True)
class SlurmPartition:
    """`limit` as Slurm writes it, such as 1-00:00:00 or infinite; `nodes` counts all that belong to it."""

    name: str
    default: bool
    up: bool
    nodes: int
    limit: str


@dataclass(frozen=True)
class SlurmJob:
    """What Slurm says of a job. `restarts` counts how often it was requeued; `code` is what its script left with."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""  # a list such as n[1-2]
    batch_host: str = ""
    restarts: int = 0
    time_limit: str = ""
    end_time: str = ""
    code: int | None = None

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def ends(self) -> bool:
        """Whether Slurm ends what is left of it, or of what ran before it was put back into the queue."""
        return self.state == "COMPLETING"

    @property
    def over(self) -> bool:
        return self.state not in (*WAITING, *RUNNING)


def run_slurm(
    command: Sequence[str], timeout_s: float = TIMEOUT_S, environment: Mapping[str, str] | None = None
) -> str:
    """Run one of Slurm's commands, in an `environment` (None: this process's), and return what it prints.

    Raises ConfigError where there is no Slurm, and RunError with Slurm's own words where it refuses or says nothing in
    time.
    """
    name = command[0]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            errors="replace",
            env=environment,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {name} here, so Slurm cannot be asked; log in to a node of the cluster, or do without, by "
            "`phalanx launch --local` or `phalanx train`"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"Slurm has not answered `{name}` for {timeout_s:g} s; try again when its controller is there "
            "(`scontrol ping`)"
        ) from None
    except OSError as error:
        raise RunError(f"`{name}` cannot be run ({error.strerror}); mend the installation of Slurm") from None
    if done.returncode:
        raise RunError(f"Slurm's {name} has failed: {clean_output(done.stderr or done.stdout, done.returncode)}")
    return done.stdout


def clean_output(text: str, code: int) -> str:
    """The words of a Slurm command on one line, without what it says of itself in front of each."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line.strip()) for line in text.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines))[:300] or f"exit code {code} without a word"


# ------------------------------------------------------------------------------------------------------------ questions


def partitions() -> list[SlurmPartition]:
    """The partitions that there are, hidden ones too. Raises as `run_slurm`."""
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


def query_job(number: str) -> SlurmJob | None:
    """A job, or None where Slurm knows it no more. Raises as `run_slurm`."""
    try:
        return read_job(run_slurm(["scontrol", "show", "job", "--oneliner", number]))
    except RunError as error:
        if "invalid job id" in str(error).lower():
            return None
        raise


def read_job(text: str) -> SlurmJob | None:
    """What `scontrol show job --oneliner` has printed; of a job in several parts the first one, with all nodes."""
    lines = [_fields(line) for line in text.splitlines() if "JobState=" in line]
    if not lines:
        return None
    first = lines[0]
    nodes = ",".join(part["NodeList"] for part in lines if part.get("NodeList", "(null)") not in ("(null)", ""))
    restarts, code = first.get("Restarts", "0"), first.get("ExitCode", "").partition(":")[0]
    return SlurmJob(
        id=first.get("JobId", ""),
        state=first["JobState"],
        reason="" if first.get("Reason") in (None, "None") else first["Reason"],
        nodes=nodes,
        batch_host="" if first.get("BatchHost") in (None, "(null)") else first["BatchHost"],
        restarts=int(restarts) if restarts.isdecimal() else 0,
        time_limit=first.get("TimeLimit", ""),
        end_time="" if first.get("EndTime") in (None, "Unknown") else first["EndTime"],
        code=int(code) if code.isdecimal() else None,
    )


def _fields(line: str) -> dict[str, str]:
    """Words of the form key=value; what follows a value's first space belongs to no key that is read here."""
    found: dict[str, str] = {}
    for word in line.split():
        key, equals, value = word.partition("=")
        if equals and key not in found:
            found[key] = value
    return found


def parse_time_limit(text: str) -> int | None:
    """A time limit in seconds, in any form that Slurm takes; None for none (`infinite`), or what is no time.

    >>> [parse_time_limit(text) for text in ("90", "1:30", "2:00:00", "1-12", "1-12:30", "1-12:30:15", "soon")]
    [5400, 90, 7200, 129600, 131400, 131415, None]
    """
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,6}))?", text.strip())
    if match is None:
        return None
    days, parts = match[1], [int(part) for part in match.groups()[1:] if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    if len(parts) == 2:
        return parts[0] * 60 + parts[1]
    return (parts[0] * 60 + parts[1]) * 60 + parts[2]


# -------------------------------------------------------------------------------------------------------------- actions


def submit(script: Path, environment: Mapping[str, str]) -> str:
    """Give a script to Slurm, with the environment that it is to have; returns the job's number. Raises as
    `run_slurm`."""
    answer = run_slurm(["sbatch", "--parsable", str(script)], 60.0, environment).strip().partition(";")[0]
    if not re.fullmatch(r"\d+(\+\d+)?", answer):
        raise RunError(f"sbatch has answered {answer[:100]!r} instead of a job's number; look with `squeue --me`")
    return answer


def stop(number: str) -> None:
    """Send SIGTERM to a job's steps: what trains there saves and leaves. Raises as `run_slurm`."""
    run_slurm(["scancel", "--signal=TERM", number])


def cancel(number: str) -> None:
    """End a job, or a step of one (`12.0`), now. Raises as `run_slurm`."""
    run_slurm(["scancel", number])


def requeue(number: str) -> None:
    """Put a job into the queue again, under its number. Raises as `run_slurm`."""
    run_slurm(["scontrol", "requeue", number])
