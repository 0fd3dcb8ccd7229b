"""`phalanx health` and `phalanx nodes` as commands, and what a run does with a node that is not fit."""

import json
import os
import resource
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor import node_requests
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.health.findings import Severity
from phalanx.launch.schedulers import slurm
from phalanx.storage import mirror
from tests.dist.command import phalanx, refused, sentence, write_place
from tests.helpers import run_ranks

FEW_FILES = 200  # less than any training could do with


# ------------------------------------------------------------------------------------------------------- phalanx health


def test_what_the_command_says_and_writes(tmp_path: Path) -> None:
    files = ("--out", "new/result.json", "--save-baseline", "baseline.json", "--run-dir", ".")
    commands = [
        ["health", *files],
        ["health", "--json", "--expect", "baseline.json"],
        ["health", "--as-slurm", "prolog"],
    ]
    table, as_json, prolog = run_ranks("tests.dist.command:call", 1, folder=str(tmp_path), commands=commands)[0]
    assert [table[0], as_json[0], prolog[0]] == [0, 0, 0], table + as_json + prolog
    for word in ("limits", "memory", "processors", "disk", "clock"):
        assert word in table[1]
    assert "kernel log" in table[1] or "out of memory" in table[1]  # other tests have processes killed for memory
    result = json.loads((tmp_path / "new" / "result.json").read_text())
    assert result.keys() == {"version", "host", "time", "verdict", "findings"}
    assert result["version"] == 1
    assert {key for finding in result["findings"] for key in finding} == {
        "check", "severity", "sentence", "value", "limit", "where",
    }  # fmt: skip
    assert {finding["severity"] for finding in result["findings"]} <= {str(each) for each in Severity}
    assert json.loads(as_json[1])["verdict"] == result["verdict"]
    assert prolog[1:] == ["", ""]
    baseline = json.loads((tmp_path / "baseline.json").read_text())
    assert baseline["cpus"] == len(os.sched_getaffinity(0))


def test_a_node_that_is_not_fit(tmp_path: Path) -> None:
    expected = {"version": 1, "host": "n", "cpus": 1}
    gpu = {"uuid": "GPU-gone", "name": "H100", "bus": "0000:3b:00", "memory_bytes": 1, "pcie_width": 16, "links": None}
    (tmp_path / "expected.json").write_text(json.dumps(expected | {"gpus": [gpu]}))
    code, out, _ = phalanx(tmp_path, "health", "--json", "--expect", "expected.json")
    result = json.loads(out)
    assert (code, result["verdict"]) == (3, "reboot")
    assert [each["check"] for each in result["findings"] if each["severity"] == "reboot"] in (
        ["gpu count"], ["gpu driver"],
    )  # fmt: skip


def test_bad_command_lines(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert "--save-baseline" in refused(tmp_path, "health", "--expect", "other.json")
    assert "cannot be read" in refused(tmp_path, "health", "--expect", "none.json")
    assert "cannot be written" in refused(tmp_path, "health", "--out", "other.json/result.json")
    assert "--deep" in refused(tmp_path, "health", "--as-slurm", "epilog", "--deep")
    assert "--run-dir" in refused(tmp_path, "health", "--as-slurm", "epilog", "--run-dir", ".")
    assert refused(tmp_path, "health", "--seconds", "60") == (
        "--seconds has no effect without --deep; add it, or remove --seconds"
    )


@pytest.mark.parametrize(("role", "expected"), [("healthcheck", 0), ("prolog", 3), ("epilog", 3)])
def test_as_one_of_slurms_programs(tmp_path: Path, role: str, expected: int) -> None:
    code, err, calls = run_ranks(_as_slurm, 1, folder=str(tmp_path), role=role)[0]
    assert code == expected
    assert err.startswith("phalanx reset: this process may open 200 files")
    if role != "healthcheck":  # what these exit with is all: they must not call Slurm
        assert calls == []
        return
    name = os.uname().nodename.partition(".")[0]
    assert len(calls) == 1
    assert calls[0].startswith(f"update nodename={name} state=drain reason=phalanx reset: this process may open 200")
    assert "\n" not in calls[0].strip()


def _as_slurm(placement: Placement, folder: str, role: str) -> list[Any]:
    """With no environment but a PATH, as a daemon starts it, on a node with too few files to open."""
    from tests.dist.command import call

    _slurm(Path(folder))
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, 4096))
    path = f"{folder}:{os.environ['PATH']}"
    os.environ.clear()
    os.environ["PATH"] = path
    code, _, err = call(placement, folder, [["health", "--as-slurm", role]])[0]
    log = Path(folder) / "calls"
    return [code, err, log.read_text().splitlines() if log.exists() else []]


def _slurm(folder: Path, answer: str = "exit 0") -> None:
    """Programs in the stead of Slurm's, which note how they were called."""
    for name in ("scontrol", "sinfo"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {folder}/calls\n{answer}\n')
        program.chmod(0o755)


def test_a_fault_of_the_check_itself_costs_no_node(tmp_path: Path) -> None:
    code, _, err = phalanx(tmp_path, "health", "--as-slurm", "prolog", "--expect", "none.json")
    assert code == 0
    assert "phalanx health: the baseline none.json cannot be read" in err


# -------------------------------------------------------------------------------------------------------- phalanx nodes


def test_what_is_asked_of_nodes_is_written_and_listed(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    write_event(paths.events, EventKind.RUN_STARTED, 1, hosts=["n1", "n2"])
    write_event(paths.events, EventKind.NODE_LOST, 1, node=1, host="n2")
    write_event(paths.events, EventKind.HEALTH, 1, host="n1", verdict="watch", findings=[])
    commands = [
        ["nodes", "drain", "n1", "--run", "run", "--reason", "hot"],
        ["nodes", "replace", "1", "--run", "run"],
        ["nodes", "return", "n9", "--run", "run"],
        ["nodes", "--run", "run", "--json"],
        ["nodes", "--run", "run"],
    ]
    done = run_ranks("tests.dist.command:call", 1, folder=str(tmp_path), commands=commands)[0]
    assert [code for code, _, _ in done] == [0] * 5, done
    rows = json.loads(done[3][1])
    assert [(row["node"], row["state"], row["health"]) for row in rows] == [
        ("0 n1", "in the run", "watch"), ("1 n2", "lost", ""), ("n9", "not in the run", ""),
    ]  # fmt: skip
    assert "drain asked for by" in rows[0]["why"]
    assert rows[0]["why"].endswith(": hot")
    assert "replace" in rows[1]["why"]
    assert "n9" in done[4][1]
    assert "has this name now" in done[2][1] and "is called so" not in done[0][1] + done[1][1]
    (paths.nodes / "odd.json").write_text("[" * 100_000)
    (paths.nodes / "odd.health").write_text("[" * 100_000)
    assert "odd" not in node_requests.read_health_reports(paths)
    asked = node_requests.read_requests(paths)
    assert [(each.node, each.wanted) for each in asked] == [
        ("n1", NodeRequestKind.DRAIN), ("n2", NodeRequestKind.REPLACE), ("n9", NodeRequestKind.RETURN),
    ]  # fmt: skip
    # In another start, as of a job that Slurm has queued again, a machine that is well may be node 1.
    assert node_requests.find_newest_request(asked, 1, "n5") is None
    assert stat.S_IMODE(paths.nodes.stat().st_mode) == 0o700
    write_event(paths.events, EventKind.RUN_STARTED, 2, hosts=["n1"])
    code, out, _ = run_ranks("tests.dist.command:call", 1, folder=str(tmp_path), commands=commands[:1])[0][0]
    assert code == 0 and "no effect" in out
    # The last word holds, and what is no request asks for nothing.
    node_requests.write_request(paths, "n1", NodeRequestKind.RETURN, "cool")
    (paths.nodes / "n7.json").write_text("{")
    (paths.nodes / "n8.json").write_text(paths.node_request("n1").read_text())
    assert {each.node: each.wanted for each in node_requests.read_requests(paths)}["n1"] == NodeRequestKind.RETURN
    assert {each.node for each in node_requests.read_requests(paths)} == {"n1", "n2", "n9"}
    # Also where it calls the node by its other name.
    node_requests.write_request(paths, "0", NodeRequestKind.DRAIN, "hot again")
    (row,) = [row for row in node_requests.list_nodes(paths) if row["state"] != node_requests.ELSEWHERE]
    assert row["node"] == "0 n1" and row["why"].endswith(": hot again")
    newest = node_requests.find_newest_request(node_requests.read_requests(paths), 0, "n1")
    assert newest is not None and newest.wanted == NodeRequestKind.DRAIN
    assert node_requests.find_newest_request(node_requests.read_requests(paths), 3, "n3") is None


def test_names_that_are_no_nodes_and_folders_that_are_no_runs(tmp_path: Path) -> None:
    for name in ("../n1", "", "n1/n2", ".hidden", "a" * 300):
        with pytest.raises(ConfigError, match="is not a node name"):
            node_requests.check_name(name)
    assert "is not a run folder" in refused(tmp_path, "nodes", "drain", "n1", "--run", ".")
    assert "is not a run folder" in refused(tmp_path, "nodes", "--run", ".")


def test_a_run_at_a_url_is_asked_where_it_works(tmp_path: Path) -> None:
    at, url = tmp_path / "bucket" / "run", (tmp_path / "bucket" / "run").as_uri()
    (at / "nodes").mkdir(parents=True)
    write_event(at / "events.jsonl", EventKind.RUN_STARTED, 1, hosts=["n1", "n2"])
    (at / "config.yaml").write_text("{}")
    node_requests.write_request(RunPaths(at), "n2", NodeRequestKind.DRAIN, "hot")
    commands = [["nodes", "--run", url, "--json"], ["nodes", "drain", "n1", "--run", url]]
    listed, asked = run_ranks("tests.dist.command:call", 1, folder=str(tmp_path), commands=commands)[0]
    assert [(row["node"], row["why"][-5:]) for row in json.loads(listed[1])] == [("0 n1", ""), ("1 n2", ": hot")]
    said = sentence(asked[0], asked[2], ExitCode.CONFIG)
    working = mirror.make_working_paths(url, "~/.cache/phalanx", 1.0).root
    assert said.endswith(
        f"{url} is a URL, where no run reads requests; on the machine of node 0 give its working folder, --run "
        f"{working} (below its own data.cache, where the recipe sets one)"
    )


def test_nodes_without_slurm(tmp_path: Path) -> None:
    done = run_ranks(
        _nodes, 1, folder=str(tmp_path), path=str(tmp_path), commands=[["nodes"], ["nodes", "drain", "n1"]]
    )[0]
    for code, _, err in done:
        assert "--run RUN" in sentence(code, err)


def test_nodes_by_slurm(tmp_path: Path) -> None:
    _slurm(tmp_path, 'case "$*" in *Node*) echo "n1|idle|none"; echo "n2|drained|hot \\| noisy";; esac')
    commands = [
        ["nodes", "--json"],
        ["nodes", "drain", "n2", "--reason", "hot\nand  noisy"],
        ["nodes", "replace", "n2"],
        ["nodes", "return", "n2"],
    ]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_ranks(_nodes, 1, folder=str(tmp_path), path=path, commands=commands)[0]
    assert [code for code, _, _ in done] == [0] * 4, done
    assert [(row["node"], row["state"]) for row in json.loads(done[0][1])] == [("n1", "idle"), ("n2", "drained")]
    assert (tmp_path / "calls").read_text().splitlines()[1:] == [
        "update nodename=n2 state=drain reason=hot and noisy",
        "update nodename=n2 state=fail reason=Action:Replace",
        "update nodename=n2 state=resume",
    ]


def test_slurm_that_refuses(tmp_path: Path) -> None:
    _slurm(tmp_path, 'echo "slurm_update error: Invalid user id" >&2; exit 1')
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_ranks(_nodes, 1, folder=str(tmp_path), path=path, commands=[["nodes", "drain", "n2"]])[0]
    said = sentence(done[0][0], done[0][2])
    assert "Invalid user id" in said
    assert "operator rights" in said


def _nodes(placement: Placement, folder: str, path: str, commands: list[list[str]]) -> list[Any]:
    from tests.dist.command import call

    os.environ["PATH"] = path
    return call(placement, folder, commands)


def test_a_reason_fits_on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[str]] = []

    def run(command: Any) -> str:
        said.append(list(command))
        return ""

    monkeypatch.setattr(slurm, "run_slurm", run)
    slurm.set_node_state("n1", NodeRequestKind.DRAIN, "a\n\tb\0" + "c" * 500)
    assert said[0][-1] == "reason=a b" + "c" * 197


# ------------------------------------------------------------------------------------------------------ what a run does


def test_a_run_does_not_start_on_a_node_that_is_not_fit(tmp_path: Path) -> None:
    write_place(tmp_path)
    quick, off = run_ranks(_train_with_few_files, 1, folder=str(tmp_path))[0]
    said = sentence(quick[0], quick[2], ExitCode.UNHEALTHY)
    assert "is not fit for training: this process may open 200 files" in said
    assert "resilience.health=off" in said
    assert not (tmp_path / "first").exists()  # the folder was made for this start alone
    assert off[0] == 0, off


def _train_with_few_files(placement: Placement, folder: str) -> list[Any]:
    from tests.dist.command import call

    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, 4096))
    train = ["train", "recipe.yaml", "--ranks", "1"]
    commands = [[*train, "--run-dir", "first"], [*train, "--run-dir", "second", "resilience.health=off"]]
    return call(placement, folder, commands)


def test_what_deserves_a_look_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    write_place(tmp_path)
    code, out, err = run_ranks(_train_with_rather_few_files, 1, folder=str(tmp_path))[0]
    assert code == 0, err
    events = [each for each in read_lines(RunPaths(tmp_path / "run").events) if each["kind"] == EventKind.HEALTH]
    assert [(each["verdict"], each["after"]) for each in events] == [("watch", None)]
    # Other tests have processes killed for memory, which the kernel's log tells of.
    assert [each["check"] for each in events[0]["findings"] if each["check"] != "out of memory"] == ["open files"]
    assert out.count("this process may open 700 files") == 1


def _train_with_rather_few_files(placement: Placement, folder: str) -> Any:
    from tests.dist.command import call

    resource.setrlimit(resource.RLIMIT_NOFILE, (700, 4096))
    return call(placement, folder, [["train", "recipe.yaml", "--ranks", "1", "--run-dir", "run"]])[0]


def test_after_a_death_the_node_is_looked_at_and_nobody_waits(tmp_path: Path) -> None:
    found = run_ranks(_watched, 1, folder=str(tmp_path))[0]
    assert not found["begun"]  # nothing happens yet
    events = list(read_lines(RunPaths(tmp_path).events))
    assert [(each["kind"], each["after"], each["attempt"]) for each in events] == [
        (EventKind.HEALTH, "the death of rank 1", 3)
    ]
    assert events[0]["host"] == os.uname().nodename
    assert found["reports"][os.uname().nodename]["verdict"] == events[0]["verdict"]
    assert found["children"] == []


def _watched(placement: Placement, folder: str) -> dict[str, Any]:
    from phalanx.launch import health_check

    paths = RunPaths(Path(folder))

    def write(attempt: int, seen: dict[str, Any]) -> None:
        write_event(paths.events, EventKind.HEALTH, attempt, **seen)

    watch = health_check.HealthWatch(paths, [], write)
    watch.request_check(3, "the death of rank 1")
    begun = paths.events.exists()
    watch.poll_once()
    assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == ""  # what starts again comes first
    until = time.monotonic() + 50
    while not paths.events.exists() and time.monotonic() < until:
        watch.poll_once()
        time.sleep(0.01)
    watch.close()  # nothing was asked for since
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"begun": begun, "reports": node_requests.read_health_reports(paths), "children": children}


def test_a_request_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_event(paths.events, EventKind.RUN_STARTED, 1)
    paths.nodes.write_text("in the way")
    with pytest.raises(RunError, match="cannot be written"):
        node_requests.write_request(paths, "n1", NodeRequestKind.DRAIN, "why")
