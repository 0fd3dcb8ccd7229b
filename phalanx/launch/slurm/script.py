"""The text of a Slurm job, made by one function from what was asked for; pure.

One `srun` starts one `phalanx keep` on each node. Neither job nor step is killed by the loss of a node (`--no-kill` on
both, `--kill-on-bad-exit=0`), that of the batch host included: then this script is gone, and the last of the nodes ends
the job. So srun's exit code is only believed where the nodes have said nothing of how the run ended.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.operations import SlurmSection
from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import RunPaths
from phalanx.launch.slurm.commands import parse_time_limit

LEAD_S, LEAD_SHARE = 300, 5  # how long before a job's end it is told; of a short limit one part of so many
MOST_LEAD_S = 65535  # Slurm takes no more
SETTLE_S = 30  # what srun gets to end once the run is over; a lost node keeps it waiting for minutes


@dataclass(frozen=True)
class SlurmScriptOptions:
    """What a job is made of. `parts` are partitions (None: Slurm's own choice) with numbers of nodes; `python` is what
    runs on the nodes, `folder` where."""

    name: str
    run: RunPaths
    folder: Path
    parts: Sequence[tuple[str | None, int]]
    slurm: SlurmSection
    python: str
    until_done: bool = False


def render_script(options: SlurmScriptOptions) -> str:
    """The script. Raises ConfigError for what no script can hold."""
    check_path(options.run.root, "the run folder")
    check_path(options.folder, "the working folder")
    return "\n".join(
        [
            "#!/bin/bash",
            *_headers(options),
            "# Written by `phalanx launch`; `sbatch` with this file goes on with the run, unless that was cancelled.",
            f"run={shlex.quote(str(options.run.root))}",
            "",
            *_on_node(options),
            "",
            *_step(options),
            "",
            *_ending(options),
            "",
        ]
    )


def check_path(path: Path, what: str) -> None:
    """Raises ConfigError for a path that Slurm cannot be given: no quoting helps there."""
    for character, name in (("\n", "a line break"), ("\r", "a line break"), ("\\", "a backslash")):
        if character in str(path):
            raise ConfigError(f"{what} {str(path)!r} has {name} in its name, which Slurm does not take; rename it")


def parse_partition_counts(partitions: Sequence[str], nodes: int) -> list[tuple[str | None, int]]:
    """Partitions with their numbers of nodes, from names such as `a100:2`. Raises ConfigError."""
    if not partitions:
        return [(None, nodes)]
    if len(partitions) == 1 and not re.search(r":\d+$", partitions[0]):
        return [(partitions[0], nodes)]
    parts: list[tuple[str | None, int]] = []
    for text in partitions:
        match = re.fullmatch(r"([^\s:]+):([1-9]\d{0,5})", text)
        if match is None:
            raise ConfigError(
                f"the partition {text} of several has no number of nodes; write each as NAME:NODES, such as "
                f"{text.partition(':')[0]}:2"
            )
        parts.append((match[1], int(match[2])))
    if (total := sum(count for _, count in parts)) != nodes:
        raise ConfigError(f"the partitions have {total} nodes in all, but the job has {nodes}; let the numbers agree")
    return parts


def resolve_save_lead(section: SlurmSection) -> int:
    """How long before a job's end its run is told to save, seconds. Raises ConfigError."""
    limit_s = None if section.time is None else parse_time_limit(section.time)
    if section.time is not None and not limit_s:
        raise ConfigError(
            f"the time limit {section.time} is none that Slurm knows; write minutes, H:MM:SS or D-HH:MM:SS, such as "
            "2:00:00"
        )
    if section.lead_s == "auto":
        return LEAD_S if limit_s is None else max(1, min(LEAD_S, limit_s // LEAD_SHARE))
    if limit_s is not None and section.lead_s >= limit_s:
        raise ConfigError(
            f"slurm.lead_s {section.lead_s} is as long as the whole job of {limit_s} s, which would be told to leave "
            "at its start; give it more time, or a smaller lead"
        )
    if section.lead_s > MOST_LEAD_S:
        raise ConfigError(f"slurm.lead_s {section.lead_s} is more than Slurm takes; give {MOST_LEAD_S} at most")
    return section.lead_s


# --------------------------------------------------------------------------------------------------------------- header


def option(text: str) -> str:
    """A word as Slurm reads it behind #SBATCH, where nothing is expanded but quotes and backslashes count."""
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./\[\]-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _headers(options: SlurmScriptOptions) -> list[str]:
    slurm = options.slurm
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", options.name)[:60]
    pattern = options.run.job_log("%j")  # the one place where a % is not itself
    log = str(pattern.parent).replace("%", "%%") + f"/{pattern.name}"
    whole = [f"--job-name=phalanx-{name}", f"--output={log}", "--open-mode=append", "--requeue"]
    each = [f"--{key}={value}" for key in ("account", "qos", "time") if (value := getattr(slurm, key)) is not None]
    each += ["--no-kill", "--ntasks-per-node=1", f"--signal=USR1@{resolve_save_lead(slurm)}"]
    each += ["--exclusive"] if slurm.exclusive else []
    for key, value in (("gpus-per-node", slurm.gpus_per_node), ("cpus-per-task", slurm.cpus_per_task)):
        each += [] if value is None else [f"--{key}={value}"]
    each += [] if slurm.exclude is None else [f"--exclude={slurm.exclude}"]
    each += slurm.extra
    lines = [f"#SBATCH {option(word)}" for word in whole]
    for number, (partition, nodes) in enumerate(options.parts):
        lines += ["#SBATCH hetjob"] if number else []
        own = [f"--nodes={nodes}", *([] if partition is None else [f"--partition={partition}"])]
        lines += [f"#SBATCH {option(word)}" for word in [*own, *each]]
    return lines


# ------------------------------------------------------------------------------------------------------ what nodes run


def _contained(options: SlurmScriptOptions) -> str:
    if options.slurm.container is None:
        return ""
    if options.slurm.container_by != "auto":
        return options.slurm.container_by
    return "apptainer" if options.slurm.container.endswith(".sif") else "pyxis"


def _mounts(options: SlurmScriptOptions) -> list[str]:
    own = dict.fromkeys([str(options.run.root), str(options.folder)])
    return [*own, *options.slurm.mounts]


def _on_node(options: SlurmScriptOptions) -> list[str]:
    folder, python = shlex.quote(str(options.folder)), shlex.quote(options.python)
    keep = f'{python} -m phalanx keep "$run"'
    fails = 'sleep 1; scancel "$SLURM_JOB_ID.$SLURM_STEP_ID" 2>/dev/null; exit 2'
    mend = "use a file system that all nodes share"
    lines = [
        "on_node() {",
        f'  cd -- {folder} || {{ echo "error: node $HOSTNAME has no folder "{folder}"; {mend}" >&2; {fails}; }}',
        *(f"  module load {shlex.quote(module)}" for module in options.slurm.modules),
        *(f"  {line}" for line in options.slurm.setup),
    ]
    if _contained(options) == "apptainer":
        assert options.slurm.container is not None
        words = ["apptainer", "exec", *(["--nv"] if options.slurm.gpus_per_node is not None else [])]
        words += [word for mount in _mounts(options) for word in ("--bind", mount)]
        words += ["--pwd", str(options.folder), options.slurm.container]
        return [*lines, f"  exec {shlex.join(words)} {keep}", "}"]
    missing = f'"error: node $HOSTNAME cannot run Phalanx by "{python}"; {mend} for the environment, or slurm.python"'
    return [
        *lines,
        f"  {python} -c 'import phalanx' || {{ echo {missing} >&2; {fails}; }}",
        f"  exec {keep}",
        "}",
    ]


# ---------------------------------------------------------------------------------------------------- step and ending


def _step(options: SlurmScriptOptions) -> list[str]:
    nodes = sum(count for _, count in options.parts)
    words = ["--no-kill", "--kill-on-bad-exit=0", "--ntasks-per-node=1", "--cpu-bind=none"]
    words += [f"--nodes={nodes}"] if len(options.parts) == 1 else [f"--het-group=0-{len(options.parts) - 1}"]
    words += [] if options.slurm.cpus_per_task is None else [f"--cpus-per-task={options.slurm.cpus_per_task}"]
    if _contained(options) == "pyxis":
        mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in _mounts(options))
        words += [f"--container-image={options.slurm.container}", f"--container-mounts={mounts}"]
        words += [f"--container-workdir={options.folder}"]
    over = f'"$run"/{RunPaths(Path()).start_outcome("NAME")}'.replace(
        "NAME", '"$SLURM_JOB_ID-$((${SLURM_RESTART_COUNT:-0} + 1))"'
    )
    return [
        f"over={over}",
        "trap : TERM USR1  # the nodes get these too; this shell has to outlive them",
        f'srun {shlex.join(words)} bash -c "$(declare -p run); $(declare -f on_node); on_node" &',
        "step=$!",
        "# A node that is lost keeps srun waiting until Slurm has noticed; a run that is over does not wait for it.",
        f"( until grep -qsE '^(0|10) ' \"$over\"; do sleep 2; done; sleep {SETTLE_S}; kill -KILL $step ) 2>/dev/null &",
        "watcher=$!",
        "while :; do wait $step; code=$?; kill -0 $step 2>/dev/null || break; done",
        "kill $watcher 2>/dev/null",
    ]


def _ending(options: SlurmScriptOptions) -> list[str]:
    lines = ['read -r code next rest 2>/dev/null < "$over"  # what the nodes say of the run is nearer to the truth']
    if options.until_done:
        script, jobs = RunPaths(Path()).launch_script, RunPaths(Path()).jobs
        lines += [
            'if [ "$next" = again ]; then',
            '  state=$(scontrol show job --oneliner "$SLURM_JOB_ID")',
            "  case $state in",
            "  *' JobState=RUNNING '* | '')",
            '    if scontrol requeue "$SLURM_JOB_ID"; then',
            "      sleep 300  # Slurm ends this script",
            "    else",
            f'      sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID" "$run"/{script} >> "$run"/{jobs}',
            "    fi ;;",
            '  *" PreemptTime="[0-9]*) scontrol requeue "$SLURM_JOB_ID" && sleep 300 ;;  # it may have done so itself',
            "  # else it was cancelled by scancel, or Slurm has put it back into the queue by itself",
            "  esac",
            "fi",
        ]
    return [*lines, 'exit "$code"']
