"""How a run stands, from records that are written here by hand."""

import fcntl
import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from phalanx.cli import jobs as cli_jobs
from phalanx.core.errors import RunError
from phalanx.core.json_lines import append_line
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor import node_requests
from phalanx.launch import jobs
from phalanx.report import html, logs
from phalanx.report import status as run_status

BEGAN = 1_000_000.0


def step(paths: RunPaths, number: int, at: float, attempt: int = 1, step_s: float = 2.0) -> None:
    record = {"step": number, "attempt": attempt, "loss": 5.0 - number / 10, "tokens_per_s": 100.0, "step_s": step_s}
    append_line(paths.metrics, record | {"time": BEGAN + at})


def event(paths: RunPaths, kind: str, at: float, attempt: int = 1, **details: Any) -> None:
    append_line(paths.events, {"kind": kind, "time": BEGAN + at, "attempt": attempt, **details})


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run that lost a rank and two steps, was stopped, and went on an hour later."""
    found = RunPaths(tmp_path / "demo")
    found.root.mkdir()
    found.config.write_text("train: {steps: 10}\n")
    event(found, EventKind.RUN_STARTED, 0, world=2, device="cpu", hosts=["n1", "n2"], unit="tokens")
    for number in (1, 2, 3, 4):
        step(found, number, 2 * number)
    event(found, EventKind.CHECKPOINT_SAVED, 4, step=2)
    event(found, EventKind.WORKER_DIED, 9, rank=1, signal="SIGKILL")
    event(found, EventKind.RESTARTED, 9.5, attempt=2)
    for number in (3, 4, 5):
        step(found, number, 6 + 2 * number, attempt=2)
    event(found, EventKind.CHECKPOINT_SAVED, 16.5, attempt=2, step=5)
    event(found, EventKind.STOPPED, 17, attempt=2, step=5)
    event(found, EventKind.RUN_STARTED, 3617, attempt=3, world=2, device="cpu", hosts=["n1", "n2"])
    step(found, 6, 3619, attempt=3)
    return found


def test_the_facts_of_a_run(paths: RunPaths) -> None:
    facts = run_status.read_status(paths, BEGAN + 3620)
    assert (facts["state"], facts["step"], facts["steps"], facts["loss"]) == ("running", 6, 10, 4.4)
    assert (facts["ranks"], facts["hosts"], facts["attempts"]) == (2, ["n1", "n2"], 3)
    assert facts["left_s"] == 8.0
    assert facts["checkpoint"] == {"step": 5, "time": BEGAN + 16.5}
    (incident,) = facts["incidents"]
    assert (incident["kind"], incident["step"], incident["recovery_s"]) == (EventKind.WORKER_DIED, 4, 3.0)
    assert incident["text"] == (
        "rank 1 was killed by SIGKILL after step 4; training resumed with step 3 after 3.0 s, 2 steps replayed"
    )
    json.dumps(facts)


def test_goodput_counts_steps_that_stayed_and_time_that_was_the_runs(paths: RunPaths) -> None:
    """Six steps of two seconds, in 17 seconds up to the stop and 3 since; the hour between is not the run's."""
    good = run_status.read_status(paths, BEGAN + 3620)["goodput"]
    assert good == {"share": 12 / 20, "counted_s": 12.0, "wall_s": 20.0, "lost_steps": 2}
    event(paths, EventKind.FINISHED, 3621, attempt=3, step=6)
    facts = run_status.read_status(paths, BEGAN + 99999)
    assert facts["goodput"]["wall_s"] == 21.0
    assert (facts["state"], facts["left_s"]) == ("finished", None)


def test_a_run_that_stops_to_be_divided_anew_is_not_over(paths: RunPaths) -> None:
    """For a node that comes or is to be left; a spare that takes its place begins no other start."""
    event(paths, EventKind.STOPPED, 3620, attempt=3, step=6, reason="SIGTERM")
    assert {row["state"] for row in node_requests.list_nodes(paths)} == {node_requests.OVER}
    event(paths, EventKind.RESTARTED, 3622, attempt=4, reason="node 1 will be drained")
    step(paths, 7, 3630, attempt=4)
    event(paths, EventKind.NODE_LOST, 3631, attempt=4, node=1, host="n2", reason="it left")
    assert [row["state"] for row in node_requests.list_nodes(paths)] == [node_requests.HERE, node_requests.LOST]
    facts = run_status.read_status(paths, BEGAN + 3632)
    assert (facts["state"], facts["goodput"]["wall_s"]) == ("running", 30.0)
    assert facts["goodput"]["counted_s"] == 14.0


def test_a_run_that_has_given_up_is_over(paths: RunPaths) -> None:
    event(paths, EventKind.NODE_LOST, 3620, attempt=3, node=1, host="n2", reason="it left")
    event(paths, EventKind.GAVE_UP, 3621, attempt=3, reason="those that are left cannot go on without it")
    assert run_status.read_status(paths, BEGAN + 3622)["state"] == "died"
    assert [row["state"] for row in node_requests.list_nodes(paths)] == [node_requests.OVER, node_requests.LOST]


def test_records_that_are_empty_yet_are_of_no_time(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.events.touch()
    facts = run_status.read_status(paths, BEGAN)
    assert (facts["state"], facts["last_line"]) == ("not finished", None)
    assert "last heard of" not in shown(run_status.render_status(facts, BEGAN))
    event(paths, EventKind.RUN_STARTED, 0, hosts=5, spares="two")  # nor is what makes no sense a reason to fail
    assert [row["state"] for row in node_requests.list_nodes(paths)] == [node_requests.HERE]


def test_a_run_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may read everything, so it is said here that it may not."""
    monkeypatch.chdir(tmp_path)
    exists = Path.exists

    def may_see(path: Path) -> bool:
        if "closed" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    def may_read(paths: RunPaths) -> list[Any]:
        if paths.name == "private":
            raise PermissionError(13, "Permission denied", str(paths.events))
        return []

    for name in ("closed", "one", "private", "two"):
        Path("runs", name).mkdir(parents=True)
        event(RunPaths(Path("runs", name)), EventKind.RUN_STARTED, 0, world=1)
    monkeypatch.setattr(Path, "exists", may_see)
    monkeypatch.setattr(node_requests, "list_nodes", may_read)
    assert [run["name"] for run in json.loads(cli_jobs._render_status(None, as_json=True))] == ["one", "two"]
    assert capsys.readouterr().err == (
        "skipped runs/private: runs/private/events.jsonl cannot be read (Permission denied)\n"
    )
    with pytest.raises(PermissionError):
        cli_jobs._render_status(Path("runs/private"), as_json=True)


def test_what_the_scheduler_knows_goes_before_what_the_records_say(paths: RunPaths) -> None:
    job = {"by": "slurm", "id": "7", "state": "PENDING", "reason": "Resources", "nodes": ""}
    facts = run_status.read_status(paths, BEGAN + 9999, job)
    assert facts["state"] == "waiting"
    assert run_status.read_status(paths, BEGAN + 9999)["state"] == "not finished"
    assert run_status.read_status(paths, BEGAN + 9999, job | {"state": "RUNNING"})["state"] == "running"
    empty = RunPaths(paths.root / "none")
    assert run_status.read_status(empty, BEGAN, job)["state"] == "waiting"
    with pytest.raises(RunError, match="no run in"):
        run_status.read_status(empty, BEGAN)


def shown(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_screen(paths: RunPaths) -> None:
    job = {"by": "slurm", "id": "7", "state": "RUNNING", "nodes": "n[1-2]", "restarts": 1, "end_time": "soon"}
    text = shown(run_status.render_status(run_status.read_status(paths, BEGAN + 3620, job), BEGAN + 3620))
    for part in (
        "step 6 of 10, 60%",
        "loss 4.4000   100 tokens/s   0:08 left",
        "goodput",
        "60.0%",
        "2 steps were replayed",
    ):
        assert part in text
    assert "7 of Slurm, RUNNING on n[1-2], until soon, restarted 1 time" in text
    assert "n1, n2" in text  # what is known where nothing else is said of nodes
    assert "rank 1 was killed by SIGKILL after step 4" in text
    facts = run_status.read_status(RunPaths(paths.root / "none"), BEGAN, job | {"state": "PENDING"})
    assert "waiting" in shown(run_status.render_status(facts, BEGAN))
    assert "6/10" in shown(run_status.render_runs_table([run_status.read_status(paths, BEGAN + 3620)]))


def test_nodes_and_their_health_are_on_the_screen(paths: RunPaths) -> None:
    node_requests.write_request(paths, "n1", node_requests.NodeRequestKind.DRAIN, "hot")
    event(paths, EventKind.NODE_LOST, 3620, attempt=3, node=1, host="n2")
    event(paths, EventKind.HEALTH, 3621, attempt=3, host="n2", verdict="watch", findings=[])
    event(paths, EventKind.RUN_STARTED, 3622, attempt=4, world=1)  # divided anew, by who leads
    rows = node_requests.list_nodes(paths)
    assert [(row["node"], row["state"], row["health"]) for row in rows] == [
        ("0 n1", "in the run", ""),
        ("1 n2", "lost", "watch"),
    ]
    text = shown(run_status.render_status(run_status.read_status(paths, BEGAN + 3623, None, rows), BEGAN + 3623))
    assert "0 n1, in the run, drain asked for by" in text and "hot" in text
    assert "1 n2, lost, health: watch" in text
    many = [{"node": f"{number} n", "state": "in the run", "health": "ok", "why": ""} for number in range(20)]
    text = shown(
        run_status.render_status(run_status.read_status(paths, BEGAN + 3623, None, [*many, rows[1]]), BEGAN + 3623)
    )
    assert "20 in the run" in text and "7 n" not in text
    assert "1 n2, lost" in text


def incidents_of(paths: RunPaths) -> list[str]:
    return [incident["text"] for incident in run_status.read_status(paths, BEGAN + 3620)["incidents"]]


def test_what_the_run_says_of_an_incident_is_what_all_say(paths: RunPaths) -> None:
    """The agent's own clock has measured it: screen, report and console have one number."""
    how = {"what": "rank 1 on n1: killed", "done": "all ranks restart", "step": 3, "seconds": 2.5}
    event(paths, EventKind.INCIDENT, 12, attempt=2, **how)
    went_on = "training resumed with step 3 after 2.5 s, 2 steps replayed"
    assert incidents_of(paths) == [f"rank 1 on n1: killed; all ranks restart; {went_on}"]
    page = html.write_report(paths).read_text()
    assert went_on in page and "<dt>incidents</dt><dd>1</dd>" in page


def test_what_is_no_incident(paths: RunPaths) -> None:
    """What was asked for, nodes that come and go without a start, and what only deserves a look."""
    event(paths, EventKind.INJECTED, 8, rank=1, step=5, fault="kill:rank=1,step=5")
    event(paths, EventKind.NODE_JOINED, 18, attempt=3, node=2, host="n3")
    event(paths, EventKind.NODE_LOST, 18, attempt=3, node=2, host="n3", reason="it was a spare")
    event(paths, EventKind.RESTARTED, 19, attempt=4, reason="node 2 has come back")
    event(paths, EventKind.CHECKPOINT_FAILED, 13, attempt=2, step=4, reason="full")
    assert len(incidents_of(paths)) == 1
    facts = run_status.read_status(paths, BEGAN + 3620)
    assert [warning["kind"] for warning in facts["warnings"]] == [EventKind.CHECKPOINT_FAILED]
    text = shown(run_status.render_status(facts, BEGAN + 3620))
    assert text.index("incidents") < text.index("warnings") < text.index("checkpoint of step 4")


def test_failures_without_a_step_between_are_one_incident_and_one_without_an_end_says_so(paths: RunPaths) -> None:
    event(paths, EventKind.WORKER_DIED, 3620, attempt=3, rank=0, signal="SIGKILL")
    event(paths, EventKind.RESTARTED, 3621, attempt=4)
    event(paths, EventKind.WORKER_DIED, 3622, attempt=4, rank=1, exit_code=1)
    event(paths, EventKind.GAVE_UP, 3623, attempt=4, reason="twice is enough")
    assert [text.split(";")[1] for text in incidents_of(paths)][1:] == [" no further restart: twice is enough"]
    step(paths, 6, 3630, attempt=5)
    assert incidents_of(paths)[1].endswith("training resumed with step 6 after 10.0 s, 1 step replayed")


# ----------------------------------------------------------------------------------------------------------------- logs


def test_the_first_error_is_the_cause_of_the_newest_incident(paths: RunPaths) -> None:
    fetched: list[Path] = []
    for attempt, rank, text in ((1, 0, "lost a peer"), (1, 1, "the real cause"), (2, 0, "fine")):
        paths.log(attempt, rank).parent.mkdir(parents=True, exist_ok=True)
        paths.log(attempt, rank).write_text(f"line\n{text}\n")
    paths.exit_cause(1, 1).write_text(json.dumps({"traceback": "Traceback: ValueError"}))
    lines = list(logs.explain_first_error(paths, fetched.append))
    assert fetched == [paths.exit_cause(1, 1), paths.log(1, 1)]  # no more than is read
    assert lines[0] == "attempt 1: rank 1 was killed by SIGKILL"
    assert "Traceback: ValueError" in lines and lines[-1] == "the real cause"
    with pytest.raises(RunError, match="has died; run `phalanx logs`"):
        list(logs.explain_first_error(RunPaths(paths.root / "none"), fetched.append))


def test_of_a_killed_rank_all_that_the_records_know_is_said(paths: RunPaths) -> None:
    event(paths, EventKind.INJECTED, 9, attempt=4, rank=1, fault="kill:rank=1,step=5")
    event(paths, EventKind.INJECTED, 9, attempt=4, rank=0, fault="kill:rank=0,step=6")
    event(paths, EventKind.WORKER_DIED, 10, attempt=4, rank=1, signal="SIGKILL", doing="backward of step 5")
    event(paths, EventKind.HEALTH, 11, attempt=4, host="n1", after="the death of rank 1", verdict="ok", findings=[])
    append_line(paths.metrics, {"step": 4, "attempt": 4})
    append_line(paths.metrics, {"step": 5, "attempt": 5})
    paths.log(4, 1).parent.mkdir(parents=True)
    paths.log(4, 1).touch()
    text = "\n".join(logs.explain_first_error(paths, lambda file: None))
    for known in (
        "operation: backward of step 5",
        "last step of the attempt: 4",
        "kill:rank=1,step=5",
        "health check of n1",
        "is empty",
    ):
        assert known in text
    assert "SIGKILL comes from outside" in text and "rank=0" not in text


def test_logs_are_found_or_what_there_is_is_said(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="has no log of rank 0; no logs yet"):
        logs.find_log(paths, None, None)
    for attempt in (1, 2):
        paths.log(attempt, 0).parent.mkdir(parents=True, exist_ok=True)
        paths.log(attempt, 0).write_text(f"attempt {attempt}\n")
    assert logs.find_log(paths, None, None) == logs.find_log(paths, 0, None) == paths.log(2, 0)
    paths.node_log(0).write_text("node 0\n")
    assert logs.find_log(paths, None, None) == paths.node_log(0)
    paths.node_log(0).write_text("")
    cli_jobs.logs(str(paths.root))
    assert "is empty; only `phalanx launch`" in capsys.readouterr().err
    with pytest.raises(RunError, match="has no log of node 3; it has logs of nodes 0 and ranks 0"):
        logs.find_log(paths, None, 3)


def test_a_log_is_followed_into_the_next_attempt(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("first\n")
    seen: list[str] = []
    files = iter([one, one, two, two, two])
    rounds = iter([False, False, True, True, True])

    def find() -> Path:
        path = next(files)
        if path == two and not two.exists():
            two.write_bytes("zwölf\n".encode())
        elif len(seen) == 1:
            with open(one, "a") as file:
                file.write("second\n")
        return path

    logs.follow_file(find, seen.append, lambda: next(rounds))
    assert "".join(seen) == f"first\nsecond\n\n==> {two} <==\nzwölf\n"


def test_who_follows_a_run_that_has_said_nothing_yet_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its job waits in the queue, or it is just being started."""
    monkeypatch.setattr(jobs, "ASK_S", 0.1)
    paths = RunPaths(tmp_path / "run")
    paths.launch.mkdir(parents=True)
    paths.job_supervisor.write_text(f"{os.getpid()} on here\n")
    held = os.open(paths.job_supervisor, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)

    def say() -> None:
        paths.node_log(0).parent.mkdir()
        paths.node_log(0).write_text("hello\n")
        os.close(held)

    threading.Timer(0.5, say).start()
    cli_jobs.logs(paths.root, follow=True)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("hello\n", f"{paths.root} has no output yet; waiting\n")
    with pytest.raises(RunError, match="has no log of rank 5; it has logs of nodes 0"):
        cli_jobs.logs(paths.root, follow=True, rank=5)


def test_only_the_end_of_a_long_log_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(20000)))
    text = logs.read_tail(path)
    assert text.startswith("line ") and text.endswith("line 19999\n") and len(text) <= logs.TAIL_BYTES
