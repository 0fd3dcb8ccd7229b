"""`phalanx run` on several nodes: a script goes on without a node that is lost, and what ends it is named."""

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.links import enter
from benchmarks.started import start, strike
from phalanx.core.errors import ConfigError, Unhealthy
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.rendezvous import RendezvousPoint
from phalanx.elastic.supervisor.state import JobPhase
from phalanx.health.findings import DeviceInfo
from phalanx.launch import health_check, rendezvous_options, script_nodes
from phalanx.launch.rendezvous_options import RendezvousOptions
from phalanx.launch.script_nodes import ScriptJob, ScriptNodeSession
from tests.cluster import networks
from tests.helpers import ROOT, run_ranks, wait_until

PATIENCE_S = 200.0
TOLD = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
)  # fmt: skip
# A user's script behind one that notes what it is told.
SCRIPT = f"""
import json, os, runpy
told = {{name: os.environ[name] for name in {TOLD!r}}}
with open(f"told-{{told['TORCHELASTIC_RESTART_COUNT']}}-{{told['RANK']}}.json", "w") as file:
    json.dump(told, file)
runpy.run_path({str(ROOT / "examples" / "fsdp_loop.py")!r}, run_name="__main__")
"""
FAILS = """
import os, time
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("there is no such file: train.txt")
time.sleep(60)
"""

OPTIONS = RendezvousOptions(3, 1, RendezvousPoint("there"), 60.0, quiet=True)


@pytest.fixture
def wired() -> Iterator[networks.Networks]:
    if (reason := networks.why_not()) is not None:
        pytest.skip(reason)
    with networks.two() as made:
        yield made


def smokes(*_: Any) -> None:
    raise Unhealthy("this node smokes")


def node(
    placement: Placement,
    folder: str,
    words: list[str],
    within: Sequence[str] = (),
    dies: int | None = None,
    unfit: int | None = None,
) -> list[Any]:
    """[exit code, what it has said] of one node; all processes of the one that `dies` do so in the middle of it."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # this process is a rank of the harness
        os.environ.pop(name, None)
    if within:
        enter(within[placement.rank])
    script_nodes.HEARTBEAT_S = 3.0  # machines that run tests are busy
    if placement.rank == unfit:
        health_check.check_node = smokes
    output = Path(folder) / f"node-{placement.rank}.txt"
    own = ["run", "--nproc", "1", "--node-rank", str(placement.rank), "--rendezvous", f"file://{folder}/meet", *words]
    command = start(own, Path(folder), output)
    try:
        if placement.rank == dies:
            first = Path(folder) / "node-0.txt"
            wait_until(lambda: first.exists() and "step 5 " in first.read_text(), timeout_s=PATIENCE_S)
            strike(command.all(), signal.SIGKILL)
        wait_until(command.over, timeout_s=PATIENCE_S)
    finally:
        command.end()
    return [command.code, output.read_text()]


def losses(said: str) -> list[tuple[int, str]]:
    return [(int(step), loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", said, re.M)]


def test_a_spare_takes_the_place_of_a_lost_node_and_the_script_goes_on_from_its_checkpoint(
    wired: networks.Networks, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["--nodes", "2", "--spares", "1", "script.py", "kept", "--steps", "9", "--every", "4", "--pause", "0.2"]
    within = [wired.names[0], wired.names[1], wired.names[0]]  # the spare is beside node 0
    ended = run_ranks(node, 3, timeout_s=240, folder=str(tmp_path), words=words, within=within, dies=1)
    assert [code for code, _ in ended] == [0, -signal.SIGKILL, 0], ended
    walked = losses(ended[0][1])
    assert [step for step, _ in walked][-1] == 9
    assert len(set(walked)) == 9, "steps that are walked again are the same"
    assert re.search(r"resumed from step [48]$", ended[0][1], re.M)
    assert re.search(
        r"node 1 \(\S+\) was lost: .*; node 2 takes the ranks of node 1, [\d.]+ m?s after detection", ended[0][1]
    )
    told = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("told-*.json")}
    assert sorted(told) == ["told-0-0", "told-0-1", "told-1-0", "told-1-1"]
    assert told["told-1-1"] == {
        "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "script",
    }  # fmt: skip
    recorded = [event["kind"] for event in read_lines(RunPaths(tmp_path / "runs" / "script").events)]
    wanted = [EventKind.RUN_STARTED, EventKind.NODE_LOST, EventKind.RESTARTED, EventKind.INCIDENT, EventKind.FINISHED]
    assert [kind for kind in recorded if kind in wanted] == wanted
    assert not (tmp_path / "meet").exists()


def test_a_mistake_that_comes_again_ends_the_script_with_what_its_rank_said(tmp_path: Path) -> None:
    """On nodes of which the first is not fit, so that the second leads and the spare has rank 0."""
    (tmp_path / "script.py").write_text(FAILS)
    words = ["--nodes", "2", "--spares", "1", "--max-restarts", "5", "script.py"]
    ended = run_ranks(node, 3, timeout_s=240, folder=str(tmp_path), words=words, unfit=0)
    assert [code for code, _ in ended] == [ExitCode.UNHEALTHY, 1, 1], ended
    assert "this node smokes; this is node 0, which connects all nodes, so a spare replaces it" in ended[0][1]
    assert re.findall(r"^attempt (\d)$", ended[1][1], re.M) == ["0", "1", "2"]
    assert "3 attempts in a row failed with ValueError before the first step (File " in ended[1][1]
    assert ended[1][1].count("Traceback") == 3, "the script's own words are where its output is"


def member(folder: Path, script: ScriptJob) -> ScriptNodeSession:
    return ScriptNodeSession(
        RunPaths(folder),
        [DeviceInfo("cpu", "any", True)],
        OPTIONS,
        {},
        script,
    )


def test_fewer_nodes_are_taken_only_where_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("")
    meeting = rendezvous_options.RendezvousOptions(3, 1, RendezvousPoint("file:///meet"), 60.0)
    assert script_nodes.make_script_job(str(path), [], None, meeting).policy(3).on_lost_node == ("replace", "wait")
    fewer = script_nodes.make_script_job(str(path), [], None, meeting, min_nodes=2).policy(3)
    assert (fewer.on_lost_node, fewer.least, fewer.wait_s) == (("replace", "shrink", "wait"), 2, 60.0)
    with pytest.raises(ConfigError, match="--min-nodes 4 is more than --nodes 3"):
        script_nodes.make_script_job(str(path), [], None, meeting, min_nodes=4)
    offer = {"policy": asdict(replace(fewer, least=1)), "sign": "", "seats": [0, 1], "slots": [[1, "any"]] * 2}
    with pytest.raises(ConfigError, match="policy differs from this command's"):
        member(tmp_path, script_nodes.make_script_job(str(path), [], None, meeting, min_nodes=2)).make_job(
            offer, lambda: None
        )


def test_an_attempt_that_has_lasted_begins_the_count_of_failures_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one: Any = member(tmp_path, ScriptJob("script.py", (), None, 3, 2, 60.0))
    one.recorder = SimpleNamespace(take_committed_steps=list)
    one.is_leading = SimpleNamespace(state=SimpleNamespace(phase=JobPhase.RUNNING, attempt=7))
    assert one.take_committed_steps() == []
    monkeypatch.setattr(script_nodes, "LASTED_S", -1.0)  # ten minutes later
    assert one.take_committed_steps() == [7]
    one.is_leading.state.phase = JobPhase.IDLE
    assert one.take_committed_steps() == []


def test_what_ranks_do_about_a_signal_is_left_to_the_script(tmp_path: Path) -> None:
    said: list[str] = []
    one = member(tmp_path, ScriptJob("script.py", (), None, 3, 2, 60.0))
    one.notify_user = said.append
    one._note(2, EventKind.STOP_REQUESTED, {"attempt": 1, "signal": "SIGTERM"})
    assert said == ["got SIGTERM: passed to the script's ranks"]


def test_a_folder_of_a_training_run_is_left_alone(tmp_path: Path) -> None:
    paths, meeting = (
        RunPaths(tmp_path),
        rendezvous_options.RendezvousOptions(2, 0, RendezvousPoint("file:///meet"), 60.0),
    )
    paths.config.write_text("model: {}\n")
    script = ScriptJob("script.py", (), None, 3, 2, 60.0)
    with pytest.raises(ConfigError, match=r"holds a run of phalanx train; name another folder with --run-dir"):
        script_nodes.run_script_on_node(script, paths, 1, meeting)
