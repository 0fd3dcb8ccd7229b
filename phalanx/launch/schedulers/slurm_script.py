"""The batch script of a Slurm job, rendered by a pure function from the options.

One `srun` starts one `phalanx keep` on each node. Neither job nor step is killed by the loss of a node (`--no-kill` on
both, `--kill-on-bad-exit=0`), that of the batch host included: then this script is gone, and the last of the nodes ends
the job. So srun's exit code is only believed where the nodes have said nothing of how the run ended.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.operations import SlurmSection
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import RunPaths
from phalanx.launch.schedulers.scheduler import LaunchOptions

LEAD_S, LEAD_SHARE = 300, 5  # the signal's lead before a job's end; of a short limit this part
MOST_LEAD_S = 65535  # Slurm's maximum
SETTLE_S = 30  # what srun gets to end once the run is over; a lost node keeps it waiting for minutes


@dataclass(frozen=True)
class SlurmScriptOptions:
    """Options of a Slurm batch script. `parts` are partitions (None: Slurm's own choice) with numbers of nodes;
    `python` is what runs on the nodes, `folder` where."""

    name: str
    run: RunPaths
    folder: Path
    parts: Sequence[tuple[str | None, int]]
    slurm: SlurmSection
    python: str
    until_done: bool = False


def make_job_spec(config: Config, paths: RunPaths, options: LaunchOptions) -> SlurmScriptOptions:
    """Resolve the options of a job. Raises ConfigError for what could not run, before anything is submitted."""
    parts = parse_partition_counts(config.slurm.partition, options.nodes + options.spares)
    for option in config.slurm.extra:
        if not option.startswith("-"):
            raise ConfigError(
                f"{option} is not an option of sbatch; write an option and its value as one word, such as "
                "--constraint=a100"
            )
    for key in ("mounts", "container_by"):
        section = config.slurm
        if section.container is None and getattr(section, key) != type(section).model_fields[key].get_default():
            raise ConfigError(
                f"slurm.{key} needs a container, but slurm.container is not set; set it, or remove slurm.{key}"
            )
    python = config.slurm.python
    if python == "auto":
        python = sys.executable if config.slurm.container is None else "python3"
    return SlurmScriptOptions(
        paths.name, RunPaths(paths.root.resolve()), Path.cwd(), parts, config.slurm, python, options.until_done
    )


def render_script(options: SlurmScriptOptions) -> str:
    """The script. Raises ConfigError for values that a script cannot express."""
    check_path(options.run.root, "the run folder")
    check_path(options.folder, "the working folder")
    return "\n".join(
        [
            "#!/bin/bash",
            *_headers(options),
            "# Written by `phalanx launch`; `sbatch` with this file resumes the run unless it was cancelled.",
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
            raise ConfigError(f"{what} {str(path)!r} has {name} in its name, which Slurm does not accept; rename it")


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
                f"the partition {text} has no number of nodes; with several partitions write each as NAME:NODES, "
                f"such as {text.partition(':')[0]}:2"
            )
        parts.append((match[1], int(match[2])))
    if (total := sum(count for _, count in parts)) != nodes:
        raise ConfigError(f"the partitions have {total} nodes in all, but the job has {nodes}; make the numbers equal")
    return parts


def resolve_save_lead(section: SlurmSection) -> int:
    """Seconds before a job's end when its run is signalled to save. Raises ConfigError."""
    limit_s = None if section.time is None else parse_time_limit(section.time)
    if section.time is not None and not limit_s:
        raise ConfigError(
            f"the time limit {section.time} is not a Slurm time; write minutes, H:MM:SS or D-HH:MM:SS, such as 2:00:00"
        )
    if section.lead_s == "auto":
        return LEAD_S if limit_s is None else max(1, min(LEAD_S, limit_s // LEAD_SHARE))
    if limit_s is not None and section.lead_s >= limit_s:
        raise ConfigError(
            f"slurm.lead_s {section.lead_s} is as long as the whole job ({limit_s} s), so the job would be stopped "
            "as it starts; raise the time limit or lower the lead"
        )
    if section.lead_s > MOST_LEAD_S:
        raise ConfigError(f"slurm.lead_s {section.lead_s} is above Slurm's limit; use at most {MOST_LEAD_S}")
    return section.lead_s


def parse_time_limit(text: str) -> int | None:
    """Parse a time limit in any of Slurm's formats into seconds; None for no limit (`infinite`), or an invalid text.

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


# --------------------------------------------------------------------------------------------------------------- header


def option(text: str) -> str:
    """Quote a word for an #SBATCH line, where nothing is expanded but quotes and backslashes count."""
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./\[\]-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _headers(options: SlurmScriptOptions) -> list[str]:
    slurm = options.slurm
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", options.name)[:60]
    pattern = options.run.job_log("slurm", "%j")  # the one place where a % is not itself
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
    remedy = "use a file system that all nodes share"
    lines = [
        "on_node() {",
        f'  cd -- {folder} || {{ echo "error: node $HOSTNAME has no folder "{folder}"; {remedy}" >&2; {fails}; }}',
        *(f"  module load {shlex.quote(module)}" for module in options.slurm.modules),
        *(f"  {line}" for line in options.slurm.setup),
    ]
    if _contained(options) == "apptainer":
        assert options.slurm.container is not None
        words = ["apptainer", "exec", *(["--nv"] if options.slurm.gpus_per_node is not None else [])]
        words += [word for mount in _mounts(options) for word in ("--bind", mount)]
        words += ["--pwd", str(options.folder), options.slurm.container]
        return [*lines, f"  exec {shlex.join(words)} {keep}", "}"]
    missing = f'"error: node $HOSTNAME cannot run Phalanx by "{python}"; {remedy} for the environment, or slurm.python"'
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
