"""Faults on request, through the command line: each ends as the page on faults says, and where nothing is lost the run
ends as one that nothing has happened to, to the last bit."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from tests.dist.command import phalanx, refused, write_place
from tests.numerics import runs
from tests.numerics.runs import same_bits

SHORT = ["train.steps=10", "checkpoint.every=2", "checkpoint.keep=9"]
SHORT += ["comm.timeout_s=20", "resilience.max_restarts=9", "train.eval_sequences=0", "--ranks", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("injection"))


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> dict[str, Any]:
    code, _, err = phalanx(place, "train", "recipe.yaml", *SHORT, "--run-dir", "undisturbed")
    assert code == 0, err
    return runs.state(place / "undisturbed")


def train(place: Path, name: str, *arguments: str, code: int = 0) -> Path:
    found, out, err = phalanx(place, "train", "recipe.yaml", *SHORT, "--run-dir", name, *arguments)
    assert found == code, out + err
    return place / name


def died(run: Path) -> list[tuple[int, str]]:
    return [(event["rank"], event["reason"]) for event in runs.events(run, EventKind.WORKER_DIED)]


def test_deaths_and_hangs_of_one_attempt_after_the_other(place: Path, undisturbed: dict[str, Any]) -> None:
    planned = [
        "kill:rank=1,step=3",
        "crash:rank=0,step=4,attempt=2,phase=backward",
        "exception:rank=1,step=5,attempt=3,phase=update",
        "hang:rank=0,step=7,attempt=4",
        "freeze:rank=1,step=9,attempt=5,phase=data",
    ]
    run = train(place, "deaths", "--inject", "; ".join(planned), "resilience.hang_timeout_s=3")
    injected = runs.events(run, EventKind.INJECTED)
    assert [(event["attempt"], event["fault"]) for event in injected] == list(enumerate(planned, 1))
    killed, crashed, raised, hung, frozen = died(run)
    assert killed == (1, "killed by SIGKILL")
    assert crashed == (0, "killed by SIGSEGV")
    assert raised[0] == 1 and raised[1].startswith("RuntimeError: --inject exception:rank=1,step=5")
    assert hung[0] == 0 and "in forward of step 7" in hung[1] and "rank 1 waits in" in hung[1]
    assert frozen[0] == 1 and "in data of step 9, stopped by a signal" in frozen[1]
    assert same_bits(runs.state(run), undisturbed)
    log = RunPaths(run).log(4, 0).read_text()
    assert "in _execute_fault" in log, "the stack of the rank that hung is in its log"
    assert "hread 0x" in RunPaths(run).log(4, 1).read_text(), "and that of the one that waited"


def test_memory_that_runs_out_makes_micro_batches_smaller(place: Path) -> None:
    run = train(place, "oom", "--inject", "oom:rank=1,step=3", "train.steps=4")
    assert [reason for _, reason in died(run)] == [
        "rank 1 ran out of memory with micro-batches of 2 sequences; from the next start on it gets 1 at most"
    ]
    assert [event["most"] for event in runs.events(run, EventKind.MEMORY_LIMITED)] == [{"1": 1}]


def test_what_ends_no_attempt(place: Path, undisturbed: dict[str, Any]) -> None:
    """Then a death, after which the checkpoint that was damaged is passed over."""
    planned = "disk-full:rank=1,step=3; corrupt-checkpoint:rank=1,step=5; slow:rank=1,step=7,steps=1,factor=100"
    more = [
        "--inject",
        "kill:step=8,phase=update",
        "resilience.in_memory_checkpoints=false",
    ]  # or no checkpoint would be read
    run = train(place, "others", "--inject", planned, *more)
    assert [event["rank"] for event in runs.events(run, EventKind.INJECTED)] == [1, 1, 1, 0]
    [failed] = runs.events(run, EventKind.CHECKPOINT_FAILED)
    assert failed["step"] == 4 and "No space left" in failed["reason"]
    [refused] = runs.events(run, EventKind.CHECKPOINT_REFUSED)
    assert refused["step"] == 6 and "rank-00001.safetensors has CRC-32" in refused["reason"]
    took_s = {step["step"]: step["step_s"] for step in read_lines(RunPaths(run).metrics) if step["attempt"] == 1}
    assert took_s[7] > 3 * min(took_s.values())
    assert same_bits(runs.state(run), undisturbed)


def test_a_fault_that_does_not_happen_is_said(place: Path) -> None:
    alone = ("train.steps=3", "--ranks", "1", "--run-dir", "missed")
    found, out, _ = phalanx(place, "train", "recipe.yaml", *SHORT, *alone, "--inject", "kill:step=3,attempt=2")
    assert found == 0
    assert "--inject kill:rank=0,step=3,attempt=2 did not happen" in out
    [warning] = [event for event in runs.events(place / "missed", EventKind.WARNING) if "--inject" in event["message"]]
    assert "did not happen" in warning["message"]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("kill:rank=2,step=3", "no rank 2 in a run of ranks 0 to 1"),
        ("kill:step=11", "the run has 10 steps"),
        ("kil:step=3", "unknown fault 'kil'; did you mean kill?"),
    ],
)
def test_a_mistake_is_a_sentence_before_anything_starts(fault: str, sentence: str, place: Path) -> None:
    said = refused(place, "train", "recipe.yaml", *SHORT, "--run-dir", "mistake", "--inject", fault)
    assert sentence in said
    assert not (place / "mistake").exists()


def test_a_parameter_that_there_is_not_ends_the_run_before_its_first_step(place: Path) -> None:
    run = train(place, "unknown", "--inject", "bit-flip:step=3,parameter=nothing", code=ExitCode.CONFIG)
    assert "rank 0 has no part of a parameter nothing" in died(run)[0][1]
    assert not RunPaths(run).metrics.exists()
