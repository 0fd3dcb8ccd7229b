"""A start that is disturbed from outside: its output goes away, its terminal hangs up, it is stopped early or twice."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.json_lines import append_line, read_lines
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, read_steps, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.launch.outcome import describe_early_stop, resolve_exit_code
from tests.dist.command import refused, write_slow_callback
from tests.helpers import ALL, ROOT, run_ranks, some, wait_until
from tests.warm_shell import run_script

RECIPE = """
model: {hidden: 16, layers: 1, heads: 2, intermediate: 32}
data: {source: text.jsonl, tokenizer_vocab: 280, seq_len: 8, held_out: 0.3, cache: cache}
train: {steps: 3, global_batch: 3, micro_batch: 2, eval_sequences: 4}
report: {tensorboard: false}
"""
WORDS = ("train", "recipe.yaml", "--run-dir", "run", "--ranks", "1")
TRAIN = f"exec python -m phalanx {' '.join(WORDS)}"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    lines = [json.dumps({"text": f"document {i} says hello " * (i % 5 + 3)}) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def start(folder: Path, command: str, **options: Any) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"},
        text=True,
        **options,
    )


def kinds(paths: RunPaths) -> list[str]:
    return [event["kind"] for event in read_lines(paths.events)]


@pytest.mark.skipif(not ALL, reason="make test-all: below a run goes on without its terminal")
@pytest.mark.parametrize(
    "redirection",
    # A pipe whose reader has gone; all closed; a disk that is full.
    ["> >(exec sleep 0) 2>&1", ">&- 2>&- <&-", "> /dev/full"],
)
def test_a_run_goes_on_without_its_output(here: Path, redirection: str) -> None:
    with start(here, f"{TRAIN} {redirection}") as run:
        assert run.wait(timeout=200) == ExitCode.DONE
    paths = RunPaths(here / "run")
    assert [step["step"] for step in read_steps(paths.metrics)] == [1, 2, 3]
    assert EventKind.FINISHED in kinds(paths)
    assert paths.report.exists()


@pytest.mark.usefixtures("hang_ups_count")
def test_a_run_goes_on_without_its_terminal_and_beside_a_second_start_and_a_hang_up_stops_it(here: Path) -> None:
    paths = RunPaths(here / "run")
    with start(here, f"{TRAIN} train.steps=1000000 {write_slow_callback(here)}", stdout=subprocess.PIPE) as run:

        def wait_for_steps() -> None:
            before = len(read_steps(paths.metrics))
            wait_until(lambda: len(read_steps(paths.metrics)) > before + 2, timeout_s=180)

        wait_for_steps()
        said = refused(here, *WORDS)
        assert re.fullmatch(
            rf"the run folder run is in use by process {run.pid} on \S+; wait for it, stop it, "
            r"or choose another --run-dir",
            said,
        )
        assert run.stdout is not None
        run.stdout.close()  # the terminal takes nothing any more
        wait_for_steps()
        run.send_signal(signal.SIGHUP)
        assert run.wait(timeout=120) == ExitCode.STOPPED
    steps = [step["step"] for step in read_steps(paths.metrics)]
    assert steps == list(range(1, len(steps) + 1))
    assert [event["step"] for event in read_lines(paths.events) if event["kind"] == EventKind.STOPPED] == [steps[-1]]
    assert (paths.checkpoints / f"step-{steps[-1]:08d}").is_dir()


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], 0))
def test_a_stop_while_data_is_prepared_leaves_only_its_parts(here: Path, number: signal.Signals) -> None:
    line = json.dumps({"text": "some words that are told apart only by their number " * 200}) + "\n"
    with open(here / "text.jsonl", "w") as file:
        file.writelines(line.replace("number", str(i)) for i in range(8000))
    script = f"""phalanx {" ".join(WORDS)} &
until compgen -G 'cache/*.partial'; do sleep 0.05; done
test -d run
kill -{number.name} $!
wait $!"""
    ((code, out),) = run_ranks(run_script, 1, script=script, folder=str(here), settings={})
    assert code == ExitCode.STOPPED, out
    assert f"stopped by {number.name} before the first step finished" in out
    assert "Traceback" not in out
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("place", "expected"),
    [("", "--run-dir is empty"), ("memory://a/run?token=secret", "--run-dir memory://a/run has a")],
)
def test_a_run_dir_that_cannot_be_is_refused(here: Path, place: str, expected: str) -> None:
    said = refused(here, *WORDS, "--run-dir", place)
    assert said.startswith(expected)
    assert "secret" not in said


@pytest.mark.parametrize(
    ("written", "code", "expected"),
    [
        ([EventKind.STOP_REQUESTED, EventKind.STOPPED, EventKind.STOP_REQUESTED, EventKind.WORKER_DIED], 1, (10, True)),
        ([EventKind.STOP_REQUESTED, EventKind.FINISHED, EventKind.WORKER_DIED], 1, (0, True)),
        ([EventKind.STOP_REQUESTED, EventKind.STOP_REQUESTED, EventKind.WORKER_DIED], 1, (1, True)),
        ([EventKind.STOP_REQUESTED, EventKind.STOPPED, EventKind.WORKER_DIED], 2, (2, True)),
        ([EventKind.FINISHED, EventKind.WORKER_DIED], 1, (1, False)),
        ([EventKind.WORKER_DIED], 11, (11, False)),
        ([EventKind.FINISHED], 0, (0, False)),
    ],
)
def test_what_was_saved_has_not_failed(
    tmp_path: Path, written: list[EventKind], code: int, expected: tuple[int, bool]
) -> None:
    paths = RunPaths(tmp_path)
    for kind in (EventKind.STOP_REQUESTED, EventKind.STOPPED):  # of a start before
        write_event(paths.events, kind, 1)
    for kind in written:
        write_event(paths.events, kind, 2)
    assert resolve_exit_code(paths, code, 2) == expected


def test_a_start_that_is_stopped_early_says_what_the_next_one_goes_on_from(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert describe_early_stop(paths, "SIGINT").endswith("before the first step finished; the same command starts over")
    for step in (4, 8):
        write_event(paths.events, EventKind.CHECKPOINT_SAVED, 1, step=step)
    assert describe_early_stop(paths, "SIGINT") == (
        "stopped by SIGINT before another step finished; the same command resumes from the checkpoint of step 8"
    )
    append_line(paths.metrics, {"step": 9, "attempt": 1})
    assert describe_early_stop(paths, "SIGINT") == (
        "stopped by SIGINT before another step finished; the same command resumes from the checkpoint of step 8, or "
        "from a later step kept in memory"
    )
