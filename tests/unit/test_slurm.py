"""What is asked of Slurm and what it answers, as text; no Slurm is needed."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from phalanx.cli import root
from phalanx.compat import run as script_run
from phalanx.config.operations import SlurmSection
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.run_paths import RunPaths
from phalanx.launch import rendezvous_options, script_nodes
from phalanx.launch.schedulers import slurm, slurm_script
from phalanx.launch.schedulers.slurm_script import SlurmScriptOptions
from phalanx.system.slurm_env import AUTO_RESUME, SlurmStep, read_slurm_step
from tests.dist import command

# As sinfo and scontrol of Slurm 22.05 print it, with details left out that nobody reads.
SINFO = "main*|up|2|1-00:00:00\nmain*|up|1|1-00:00:00\none|up|1|1:00:00\nshut|down|3|infinite\nnonsense\n"
JOB = (
    "JobId=7 JobName=phalanx-my-run UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 "
    "ExitCode=0:0 TimeLimit=00:10:00 EndTime=2026-11-22T06:12:05 NodeList=n[1-2] BatchHost=n1 "
    "Command=/a b/JobState=X NodeList=no\n"
)
MIXED = "JobId=7 JobState=RUNNING NodeList=a[1-2] Restarts=0\nJobId=8 JobState=RUNNING NodeList=b1 Restarts=0\n"


def script(parts: list[tuple[str | None, int]] | None = None, until_done: bool = False, **keys: Any) -> str:
    section = SlurmSection(**keys)
    return slurm_script.render_script(
        SlurmScriptOptions(
            "my run!", RunPaths(Path("/shared/my run")), Path("/work place"), parts or [(None, 2)], section,
            "/env/bin/python", until_done,
        )
    )  # fmt: skip


def headers(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


# ------------------------------------------------------------------------------------------------------------- answers


def test_partitions_are_read() -> None:
    found = {each.name: each for each in slurm.read_partitions(SINFO)}
    assert list(found) == ["main", "one", "shut"]
    assert (found["main"].default, found["main"].nodes, found["main"].up) == (True, 3, True)
    assert (found["shut"].default, found["shut"].up, slurm_script.parse_time_limit(found["shut"].limit)) == (
        False,
        False,
        None,
    )


def test_a_job_is_read() -> None:
    found = slurm.read_job(JOB)
    assert found is not None
    assert (found.id, found.state, found.nodes) == ("7", "RUNNING", "n[1-2]")
    assert (found.restarts, found.code, found.reason, found.over, found.waits) == (2, 0, "", False, False)
    mixed = slurm.read_job(MIXED)
    assert mixed is not None and mixed.nodes == "a[1-2],b1"
    assert slurm.read_job("slurm_load_jobs error: Invalid job id specified") is None
    pending = slurm.read_job(
        "JobId=9 JobState=PENDING Reason=Resources NodeList=(null) BatchHost=(null) EndTime=Unknown"
    )
    assert pending is not None and pending.waits
    assert (pending.nodes, pending.reason, pending.end_time) == ("", "Resources", "")


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_a_time_means_the_same_in_every_form(days: int, hours: int, minutes: int, seconds: int) -> None:
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert slurm_script.parse_time_limit(f"{days}-{hours}:{minutes:02d}:{seconds:02d}") == whole
    assert slurm_script.parse_time_limit(f"{days * 24 + hours}:{minutes:02d}:{seconds:02d}") == whole
    assert slurm_script.parse_time_limit(f"{whole // 60}:{seconds}") == whole
    assert slurm_script.parse_time_limit(f"{whole // 60}") == whole - seconds
    assert slurm_script.parse_time_limit(f"{days}-{hours}") == whole - minutes * 60 - seconds


def test_a_hidden_partition_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text('#!/bin/sh\necho "all*|up|4|infinite"\ncase "$*" in *--all*) echo "mine|up|2|infinite";; esac\n')
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [partition.name for partition in slurm.partitions()] == ["all", "mine"]


def test_without_slurm_there_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"no-such-command was not found, so Slurm cannot be used; log in"):
        slurm.run_slurm(["no-such-command"])


def test_a_command_that_fails_or_hangs_is_a_sentence() -> None:
    with pytest.raises(RunError, match=r"Slurm's sh failed: one; two$"):
        slurm.run_slurm(["sh", "-c", "echo 'sbatch: error: one' >&2; echo 'sbatch: error: two' >&2; exit 1"])
    with pytest.raises(RunError, match=r"Slurm's sleep did not answer within 0\.1 s"):
        slurm.run_slurm(["sleep", "5"], timeout_s=0.1)


# -------------------------------------------------------------------------------------------------------------- scripts


def test_the_script_is_one_step_that_no_node_takes_down() -> None:
    text = script()
    assert "--no-kill" in headers(text)
    step = next(shlex.split(line) for line in text.splitlines() if line.startswith("srun "))
    assert {"--no-kill", "--kill-on-bad-exit=0", "--ntasks-per-node=1", "--nodes=2"} <= set(step)
    assert "scontrol requeue" not in text
    assert "scontrol requeue" in script(until_done=True)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"modules": ["cuda/12.4", "it's"], "setup": ["export A='b c'", "ulimit -l unlimited"]},
        {"container": "/images/a b.sif", "gpus_per_node": 8, "mounts": ["/data"]},
        {"container": "nvcr.io#nvidia/pytorch:25.01-py3", "mounts": ["/data:/data:ro"]},
        {"partition": ["a:1", "b:1"], "time": "1-0", "exclude": "n[3-4]", "extra": ["--constraint=a100"]},
    ],
)
def test_every_script_is_valid_bash(keys: dict[str, Any]) -> None:
    text = script(**keys, until_done=True)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("state", "refuses", "asked"),
    [
        ("JobState=RUNNING PreemptTime=None", False, "requeue 7"),
        ("JobState=RUNNING PreemptTime=None", True, "submit"),
        (None, True, "submit"),  # its controller does not say
        ("JobState=COMPLETING PreemptTime=None", False, ""),  # by `scancel`: to requeue it would have it come back
        ("JobState=PENDING PreemptTime=None", True, ""),  # Slurm has put it back by itself
        ("JobState=COMPLETING PreemptTime=2026-01-01T00:00:00", False, "requeue 7"),
        ("JobState=COMPLETING PreemptTime=2026-01-01T00:00:00", True, ""),
    ],
)
def test_a_job_that_slurm_itself_ends_or_puts_back_is_left_alone(
    state: str | None, refuses: bool, asked: str, tmp_path: Path
) -> None:
    """The run was asked to stop, has saved, and wants another start."""
    paths, told = RunPaths(tmp_path / "run"), tmp_path / "told"
    paths.launch.mkdir(parents=True)
    shows = "exit 1" if state is None else f"echo 'JobId=7 JobName=it {state} Command=x'"
    commands = {
        "srun": f"echo 10 again 5 0 > '{paths.start_outcome('7-1')}'",
        "scontrol": f"test $1 = requeue || {{ {shows}; exit; }}\n{'exit 1' if refuses else f'echo $* > {told}'}",
        "sbatch": f"echo submit > {told}; echo 8",
        "sleep": "exec /bin/sleep 0.01",
    }
    for name, lines in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    job = SlurmScriptOptions("run", paths, tmp_path, [(None, 1)], SlurmSection(), "python", until_done=True)
    paths.launch_script.write_text(slurm_script.render_script(job))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(paths.launch_script)], env=environment, timeout=60)
    assert done.returncode == 10
    assert (told.read_text().strip() if told.exists() else "") == asked
    assert (paths.jobs.read_text() if paths.jobs.exists() else "") == ("8\n" if asked == "submit" else "")


def test_keys_become_options_of_the_job() -> None:
    keys: dict[str, Any] = {
        "account": "lab", "qos": "high", "time": "2:00:00", "gpus_per_node": "a100:4", "cpus_per_task": 12,
        "exclude": "n7", "extra": ["--constraint=a100", "--comment=two words"], "exclusive": False,
    }  # fmt: skip
    found = headers(script([("gpu", 4)], **keys))
    assert {"--account=lab", "--qos=high", "--time=2:00:00", "--gpus-per-node=a100:4", "--cpus-per-task=12"} <= set(
        found
    )
    assert {"--partition=gpu", "--nodes=4", "--exclude=n7", "--constraint=a100", '"--comment=two words"'} <= set(found)
    assert {"--job-name=phalanx-my-run-", "--signal=USR1@300", "--requeue", "--open-mode=append"} <= set(found)
    assert '"--output=/shared/my run/logs/slurm-%j.log"' in found
    assert "--exclusive" not in found and "--exclusive" in headers(script())


def test_what_nodes_run_comes_from_the_recipe() -> None:
    text = script(modules=["cuda/12.4"], setup=["source env.sh"])
    body = text[text.index("on_node() {") : text.index("\n}\n")]
    order = [body.index(part) for part in ("cd -- '/work place'", "module load cuda/12.4", "source env.sh", "exec ")]
    assert order == sorted(order)
    assert 'exec /env/bin/python -m phalanx keep "$run"' in body


def test_containers() -> None:
    inside = script(container="/images/a.sif", gpus_per_node=8, mounts=["/data"])
    expected = "exec apptainer exec --nv --bind '/shared/my run' --bind '/work place' --bind /data --pwd '/work place' "
    assert expected + "/images/a.sif /env/bin/python -m phalanx keep" in inside
    assert "--container-image" not in inside
    by_srun = script(container="pytorch:25", mounts=["/data:/d:ro"])
    step = next(shlex.split(line) for line in by_srun.splitlines() if line.startswith("srun "))
    assert "--container-image=pytorch:25" in step
    assert "--container-mounts=/shared/my run:/shared/my run,/work place:/work place,/data:/d:ro" in step
    assert "apptainer" not in by_srun
    assert "exec apptainer exec" in script(container="docker://pytorch", container_by="apptainer")


def test_partitions_of_a_mixed_job_are_its_parts() -> None:
    assert slurm_script.parse_partition_counts([], 3) == [(None, 3)]
    assert slurm_script.parse_partition_counts(["a,b"], 3) == [("a,b", 3)]
    assert slurm_script.parse_partition_counts(["a:1", "b:2"], 3) == [("a", 1), ("b", 2)]
    found = headers(script([("a", 1), ("b", 2)]))
    at = found.index("hetjob")
    assert "--partition=a" in found[:at] and "--partition=b" in found[at:]
    assert found.count("--no-kill") == found.count("--exclusive") == 2
    assert found.count("--requeue") == 1
    assert "--het-group=0-1" in script([("a", 1), ("b", 2)])


@pytest.mark.parametrize(
    ("limit", "lead", "expected"),
    [(None, "auto", 300), ("1:00:00", "auto", 300), ("10", "auto", 120), ("1", "auto", 12), ("1:00:00", 60, 60)],
)
def test_how_long_before_the_end_a_run_is_told(limit: str | None, lead: Any, expected: int) -> None:
    assert slurm_script.resolve_save_lead(SlurmSection(time=limit, lead_s=lead)) == expected


def test_names_that_no_script_can_hold_are_refused() -> None:
    for path in (Path("/a\nb"), Path("/a\\b"), Path("/a\rb")):
        with pytest.raises(ConfigError, match="which Slurm does not accept; rename it"):
            slurm_script.check_path(path, "the run folder")


@pytest.mark.parametrize("key", [name for name, field in SlurmSection.model_fields.items() if "str" in str(field)])
def test_no_key_brings_an_option_of_its_own_into_the_script(key: str) -> None:
    for text, problem in (("a\n#SBATCH --uid=0", "line break"), ("a\r", "line break"), ("a\x1bb", "control character")):
        with pytest.raises(ValueError, match=problem if key != "container_by" else "auto"):
            SlurmSection(**{key: [text] if key in ("partition", "modules", "setup", "mounts", "extra") else text})


# ---------------------------------------------------------------------------------------------------------------- steps

STEP = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "7"}


def test_a_step_is_read() -> None:
    caller = {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURM_SRUN_COMM_PORT": "5000", "SLURM_RESTART_COUNT": "2"}
    assert read_slurm_step(STEP | caller) == SlurmStep("7", "0", 1, 2, 3, ("10.0.0.1", 5000))
    mixed = read_slurm_step(STEP | {"SLURM_JOB_ID": "8", "SLURM_JOB_ID_HET_GROUP_0": "7"})
    assert mixed is not None and mixed.name == "7-1"
    assert read_slurm_step({"SLURM_JOB_ID": "7"}) is None
    with pytest.raises(ConfigError, match="the Slurm step has 8 tasks on 2 nodes, but each node needs one"):
        read_slurm_step(STEP | {"SLURM_STEP_NUM_TASKS": "8"})
    with pytest.raises(ConfigError, match="SLURM_PROCID is 'x', not a number"):
        read_slurm_step(STEP | {"SLURM_PROCID": "x"})


def test_with_auto_resume_the_nodes_of_a_step_meet_in_the_run_folder_and_some_may_wait(tmp_path: Path) -> None:
    paths, step = RunPaths(tmp_path), STEP | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "3"}
    resumed = step | {AUTO_RESUME: "1"}
    for environment in ({}, step, step | {AUTO_RESUME: "0"}, {AUTO_RESUME: "1"}):
        assert rendezvous_options.rendezvous_from_allocation(paths, environment) is None
    meeting = rendezvous_options.rendezvous_from_allocation(paths, resumed)
    assert meeting is not None
    assert (meeting.nodes, meeting.spares, meeting.node, meeting.total) == (3, 0, 1, 3)
    assert (
        rendezvous_options.parse_rendezvous_options(None, None, None, None, resumed, 1) is None
    )  # --spares needs no --nodes here
    meeting = rendezvous_options.rendezvous_from_allocation(paths, resumed, 1)
    assert meeting is not None
    assert (meeting.nodes, meeting.spares, meeting.node, meeting.total) == (2, 1, 1, 3)
    with pytest.raises(ConfigError, match="--spares 3 of the 3 nodes of this Slurm step leaves no node to train"):
        rendezvous_options.rendezvous_from_allocation(paths, resumed, 3)
    with pytest.raises(ConfigError, match="--spares is for a run on several nodes"):
        rendezvous_options.parse_rendezvous_options(None, None, None, None, step, 1)


FAILS_TWICE = """
import os, sys
name = sys.argv[1] + str(sum(os.path.exists(sys.argv[1] + str(i)) for i in range(9)))
open(name, "w").close()
raise SystemExit(name[-1] < "2")
"""


@pytest.mark.parametrize(("asked", "code", "times"), [("1", 0, 3), ("0", 1, 1)])
def test_a_script_on_one_node_is_started_again_where_that_was_asked_for(
    tmp_path: Path, asked: str, code: int, times: int
) -> None:
    (tmp_path / "script.py").write_text(FAILS_TWICE)
    words = ["run", "--nproc", "1", "script.py", "try"]
    found, _, said = command.phalanx(tmp_path, *words, environment={AUTO_RESUME: asked})
    assert found == code, said
    assert len(list(tmp_path.glob("try*"))) == times
    assert said.count("all ranks restart") == times - 1


def test_a_script_as_one_task_on_each_node_is_that_nodes_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").touch()
    met: list[Any] = []
    monkeypatch.setattr(
        script_nodes, "run_script_on_node", lambda script, paths, ranks, meeting: met.append((script, meeting)) or 0
    )
    step = STEP | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "3", "SLURM_PROCID": "2", AUTO_RESUME: "1"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    words = ["run", "--spares", "1", "--run-dir", str(tmp_path / "run"), str(tmp_path / "script.py"), "--spares"]
    done = CliRunner().invoke(root.app, words, obj=step)
    assert done.exit_code == 0, done.output
    ((script, meeting),) = met
    assert (meeting.nodes, meeting.spares, meeting.node, script.min_nodes) == (2, 1, 2, 2)
    assert meeting.point.folder == RunPaths(tmp_path / "run").rendezvous and script.arguments == ("--spares",)


def test_ranks_of_srun_on_several_nodes_are_not_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").touch()
    monkeypatch.setattr(script_run.agent, "preload", lambda modules: None)
    monkeypatch.setattr(script_run, "fork_call", lambda function, timeout_s: [])
    monkeypatch.setattr(script_run, "run_rank", lambda *given: 0)
    more = {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "a,b"}
    step = STEP | more | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", AUTO_RESUME: "1"}
    for rank in ("0", "1"):
        step |= {"SLURM_PROCID": rank, "SLURM_NODEID": rank}
        assert script_run.run_script(str(tmp_path / "script.py"), [], step) == 0
    assert capsys.readouterr().err.count("--auto-resume=1 has no effect") == 1
