"""A start that ends by `train.stop_after` or `train.stop_every`: saved, resumable, the same curve."""

import time
from pathlib import Path

import pytest

from phalanx.checkpoint.disk.load import list_steps
from phalanx.config.load import build_config
from phalanx.config.schema import TrainSection
from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import append_line
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.report.event_text import describe_event
from phalanx.trainer.stop_request import make_start_limit
from tests.helpers import run_ranks
from tests.numerics import runs

CHANGES = {"train.steps": 8, "optim.decay_steps": 8, "train.eval_sequences": 4}


def start(run: Path, data: Path, **changes: object) -> list[int]:
    given = CHANGES | {f"train.{key}": value for key, value in changes.items()}
    codes: list[int] = run_ranks(runs.train, 2, run=str(run), data=str(data), changes=given)
    return codes


def began(run: Path, ago_s: float, **more: object) -> None:
    run.mkdir(parents=True, exist_ok=True)
    line = {"kind": "run_started", "time": time.time() - ago_s, "attempt": 1, **more}
    append_line(RunPaths(run).events, line)


def test_starts_end_at_their_limits_and_walk_one_curve(tokens: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert start(whole, tokens) == [ExitCode.DONE] * 2
    codes, saved = [], []
    for given in ({"stop_every": 4}, {"stop_after": "30min"}, {"stop_every": 4, "stop_after": "3h"}):
        began(cut, 3600)
        codes.append(start(cut, tokens, **given))
        saved.append(list_steps(RunPaths(cut).checkpoints)[0])
    # The last step is a multiple, too, and ends the run as always.
    assert (codes, saved) == ([[ExitCode.STOPPED] * 2, [ExitCode.STOPPED] * 2, [ExitCode.DONE] * 2], [4, 5, 8])
    assert runs.same_bits(runs.state(cut), runs.state(whole))
    assert runs.outcome(cut).evaluations == runs.outcome(whole).evaluations
    stopped = runs.events(cut, EventKind.STOPPED)
    assert [event["reason"] for event in stopped] == ["train.stop_every 4", "train.stop_after 30min"]
    assert describe_event(stopped[0]).startswith("stopped by train.stop_every 4 after step 4; the same command")


def test_the_time_counts_from_the_start_of_the_command_on_the_clock_of_rank_0(tmp_path: Path) -> None:
    train = TrainSection(steps=9, stop_after="1h")
    assert make_start_limit(train, RunPaths(tmp_path), 0).find_reason(1) is None
    began(tmp_path, 7200)
    began(tmp_path, 10, again=True)  # the same start, divided anew
    assert make_start_limit(train, RunPaths(tmp_path), 0).find_reason(1) == "train.stop_after 1h"
    assert make_start_limit(train, RunPaths(tmp_path), 0).find_reason(9) is None
    assert make_start_limit(train, RunPaths(tmp_path), 1).find_reason(1) is None
    began(tmp_path, 10)
    assert make_start_limit(train, RunPaths(tmp_path), 0).find_reason(1) is None


@pytest.mark.parametrize("value", ["soon", "3", 3, "0h", "-1h", True, ["3h"]])
def test_nonsense_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="stop_after must be a time such as 90s, 45min or 3h, not"):
        build_config({"train": {"stop_after": value}}, "here")
