"""Whole runs at a URL of a real S3 server: the same curve, from any machine, whatever happens on the way."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import s3fs  # noqa: F401  # once, before processes are forked that need it

from phalanx.checkpoint.disk.load import list_steps
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths, Url
from phalanx.storage import files as storage
from phalanx.storage import mirror
from tests.dist.command import RECIPE, call, phalanx, write_place, write_slow_callback
from tests.helpers import free_port, run_ranks
from tests.stores import S3Server, register

OFTEN = ["train.steps=40", "checkpoint.every=8", "optim.decay_steps=40", "train.dtype=fp64"]
EIGHT = ["train.steps=8", "checkpoint.every=2"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a text and a recipe."""
    return write_place(tmp_path)


def remotely(
    placement: Placement, folder: str, arguments: list[str], environment: dict[str, str], kill_after: int | None = None
) -> list[Any]:
    """`call` with a command line, in a process that is killed when so many checkpoints have been saved."""
    os.environ.update(environment)
    register()
    if kill_after is not None and os.fork() == 0:
        while True:
            events = [
                event["kind"] for path in Path(folder).glob("*/runs/*/events.jsonl") for event in read_lines(path)
            ]
            if events.count(EventKind.CHECKPOINT_SAVED) >= kill_after:
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            time.sleep(0.005)
    return list(call(placement, folder, [arguments])[0])


def run_it(here: Path, server: S3Server, *arguments: str, **kwargs: Any) -> tuple[int, str, str]:
    code, out, err = run_ranks(
        remotely, 1, folder=str(here), arguments=list(arguments), environment=server.environment, **kwargs
    )[0]
    return code, out, err


def curve(paths: RunPaths) -> list[Any]:
    return [(record["step"], record["loss"], record["grad_norm"]) for record in read_steps(paths.metrics)]


def test_killed_and_resumed_on_another_machine(here: Path, bucket: str, s3_server: S3Server) -> None:
    """Data, run folder, export and the weights of a further run: all of it in the store, and no disk in common."""
    storage.upload(here / "text.jsonl", f"{bucket}/data/text.jsonl")
    train = ["train", "recipe.yaml", "--ranks", "2", *OFTEN, f"data.source={bucket}/data/*.jsonl"]
    with pytest.raises(AssertionError, match="killed by SIGKILL"):
        run_it(here, s3_server, *train, "--run-dir", f"{bucket}/run", kill_after=1)
    url = Url(f"{bucket}/run", 20)
    begun = list_steps(url / "checkpoints")
    assert begun
    assert begun[0] < 40
    assert storage.exists(f"{bucket}/run/.lock")
    other = ["data.cache=other", "resilience.in_memory_checkpoints=false"]  # another machine's memory holds nothing
    code, out, err = run_it(here, s3_server, *train, *other, "--run-dir", f"{bucket}/run/")
    assert code == ExitCode.DONE, err
    assert f"{bucket}/run/report.html" in out
    assert not storage.exists(f"{bucket}/run/.lock")
    code, _, err = phalanx(here, "train", "recipe.yaml", "--ranks", "2", *OFTEN, "--run-dir", "whole")
    assert code == ExitCode.DONE, err
    with mirror.open_remote_records(f"{bucket}/run") as paths:
        assert curve(paths) == curve(RunPaths(here / "whole"))
        resumed = [event["step"] for event in read_lines(paths.events) if event["kind"] == EventKind.RESUMED]
    assert resumed == begun[:1]
    names = {entry.url.removeprefix(f"{bucket}/run/") for entry in storage.list_folder(f"{bucket}/run", recursive=True)}
    assert {"config.yaml", "data.json", "versions.json", "report.html", "tokenizer/tokenizer.json",
            "logs/attempt-002/rank-00001.log"} <= names  # fmt: skip

    code, out, err = run_it(here, s3_server, "export", f"{bucket}/run", f"{bucket}/model", "--dtype", "fp64")
    assert code == 0, err
    assert out.endswith(f"step 40 of {bucket}/run is now the Hugging Face folder {bucket}/model\n")
    code, _, err = phalanx(here, "export", "whole", "model", "--dtype", "fp64")
    assert code == 0, err
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert storage.read_bytes(f"{bucket}/model/{name}") == (here / "model" / name).read_bytes()
    assert list((here / "other").glob("export-*")) == []

    (here / "next.yaml").write_text(
        RECIPE.replace("{hidden: 16, layers: 1, heads: 2, intermediate: 32}", f"{{from_hf: '{bucket}/model'}}")
    )
    code, _, err = run_it(here, s3_server, "train", "next.yaml", "--ranks", "1", "--run-dir", f"{bucket}/next")
    assert code == ExitCode.DONE, err
    with mirror.open_remote_records(f"{bucket}/next") as paths:
        config = paths.config.read_text()
    assert config.count(f"{bucket}/model") == 2  # the model's folder and the tokenizer's: as they are anywhere


def looked_after(placement: Placement, folder: str, url: str, environment: dict[str, str]) -> dict[str, Any]:
    """A run that would never end, and the commands that look after it, which know its URL alone."""
    os.environ.update(environment)
    register()
    slow = write_slow_callback(Path(folder))
    train = ["train", "recipe.yaml", "--ranks", "1", "train.steps=1000000", slow, "--run-dir", url]
    running = os.fork()
    if running == 0:
        os._exit(call(placement, folder, [train])[0][0])

    def ask(*arguments: str) -> list[Any]:
        return list(call(placement, folder, [list(arguments)])[0])

    while True:  # the test's own limit of time ends it
        code, out, _ = ask("status", url, "--json")
        if code == 0 and json.loads(out)["step"] > 0 and json.loads(out)["scheduler"]:
            break
        time.sleep(0.5)
    said = {"pid": running, "status": json.loads(out), "log": ask("logs", url), "now": ask("cancel", url, "--now")}
    said["cancel"] = ask("cancel", f"{url}/")
    said["code"] = os.waitstatus_to_exitcode(os.waitpid(running, 0)[1])
    said["follow"], said["again"] = ask("logs", "-f", url), ask("cancel", url)
    said["screen"], said["error"] = ask("status", url), ask("logs", "--first-error", url)
    return said


def test_a_run_at_a_url_is_looked_after_by_its_url(here: Path, bucket: str, s3_server: S3Server) -> None:
    said = run_ranks(looked_after, 1, folder=str(here), url=f"{bucket}/run", environment=s3_server.environment)[0]
    assert said["status"]["run"] == f"{bucket}/run" and said["status"]["state"] == "running"
    assert said["status"]["scheduler"]["id"] == str(said["pid"])
    assert said["log"][0] == said["follow"][0] == 0
    assert said["now"][0] == ExitCode.CONFIG and f"kill process {said['pid']}" in said["now"][2]
    assert said["cancel"][0] == 0 and "it finishes the step, saves and exits" in said["cancel"][1], said["cancel"]
    assert said["code"] == ExitCode.STOPPED
    assert f"the run {bucket}/run is not running" in said["again"][2]
    assert "stopped" in said["screen"][1]
    assert f"no rank of {bucket}/run has died" in said["error"][2]


def as_a_machine(placement: Placement, folder: str, arguments: list[str], environment: dict[str, str]) -> list[Any]:
    """One rank as torchrun starts it on a machine of its own, with a cache of its own."""
    ranks = {"RANK": placement.rank, "GROUP_RANK": placement.rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update(environment | {name: str(value) for name, value in ranks.items()})
    return list(call(placement, folder, [[*arguments, f"data.cache=cache-{placement.rank}"]])[0])


def test_ranks_that_share_no_disk(here: Path, bucket: str, s3_server: S3Server) -> None:
    torchrun = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    torchrun |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RESTART_COUNT": "0"}
    arguments = ["train", "recipe.yaml", "--run-dir", f"{bucket}/run"]
    for steps in (2, 4):
        results = run_ranks(
            as_a_machine, 2, folder=str(here), arguments=[*arguments, f"train.steps={steps}"],
            environment=s3_server.environment | torchrun,
        )  # fmt: skip
        assert [code for code, _, _ in results] == [ExitCode.DONE] * 2, results
    manifest = json.loads(storage.read_bytes(f"{bucket}/run/checkpoints/step-00000004/manifest.json"))
    assert sorted(name.rpartition("-")[0] for name in manifest["files"]) == [
        "rank-00000.attempt-2",
        "rank-00001.attempt-2",
    ]
    with mirror.open_remote_records(f"{bucket}/run") as paths:
        assert [(record["step"], record["attempt"]) for record in read_steps(paths.metrics)] == [
            (1, 1), (2, 1), (3, 2), (4, 2)
        ]  # fmt: skip
    assert [list((here / f"cache-{rank}").glob("runs/*/report.html")) != [] for rank in (0, 1)] == [True, False]


def test_a_store_that_fails_during_the_run(here: Path, tmp_path: Path) -> None:
    """Training waits for no save but the last; what is skipped is an event, and the curve is the same."""
    code, _, err = run_ranks(
        flaky, 1, folder=str(here), arguments=["train", "recipe.yaml", "--ranks", "1", *OFTEN, *EIGHT,
                                               "--run-dir", f"faulty://{tmp_path}/store/run"],
    )[0]  # fmt: skip
    assert code == ExitCode.DONE, err
    assert (
        phalanx(here, "train", "recipe.yaml", "--ranks", "1", *OFTEN, *EIGHT, "--run-dir", "whole")[0] == ExitCode.DONE
    )
    store = RunPaths(tmp_path / "store" / "run")
    assert curve(store) == curve(RunPaths(here / "whole"))
    assert max(list_steps(store.has_checkpoints)) == 8
    skipped = [event["reason"] for event in read_lines(store.events) if event["kind"] == EventKind.CHECKPOINT_SKIPPED]
    assert any("still running" in reason for reason in skipped)
    assert not [path for path in store.root.rglob("*") if path.name.endswith(".partial")]


def flaky(placement: Placement, folder: str, arguments: list[str]) -> list[Any]:
    """A command line with a slow store of which one operation in twenty fails."""
    from phalanx.storage import retry

    retry.FIRST_PAUSE_S = 0.001
    faults = register()
    faults.rate, faults.slow_s = 0.05, 0.1
    return list(call(placement, folder, [arguments])[0])


def test_credentials_that_are_missing_are_a_sentence(here: Path, bucket: str, s3_server: S3Server) -> None:
    without = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    server = type("Server", (), {"environment": s3_server.environment | without})()
    for arguments in (["train", "recipe.yaml", "--run-dir", f"{bucket}/run"], ["report", f"{bucket}/run"]):
        code, _, err = run_it(here, server, *arguments)
        assert code == ExitCode.CONFIG
        assert err.startswith("error: s3://")
        assert "credentials are missing" in err
        assert err.count("\n") == 1
    assert not list((here / "cache").glob("runs/*"))
