"""Callbacks: what they are told, what they can request, and that neither failures nor they change the curve."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.disk.load import list_steps
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.trainer.callback import Callback, RunState
from tests.dist.command import call, write_place
from tests.dist.test_in_memory_checkpoints import SHORT, killed, resumed, shared  # noqa: F401
from tests.helpers import run_ranks
from tests.numerics import runs
from tests.numerics.runs import same_bits, walk

CODE = '''
"""Remembers all that it is told, and requests things after the steps that its options name."""
import json
import phalanx

class Callback(phalanx.Callback):
    def __init__(self, **after):
        self.after, self.told = after, []

    def note(self, run, *said):
        with open(run.folder / "heard.jsonl", "a") as file:
            file.write(json.dumps([run.replayed, run.attempt, *said]) + "\\n")

    def on_train_begin(self, run):
        self.note(run, "begin", run.step, run.steps, run.world)

    def on_step_end(self, run, metrics):
        assert metrics["step"] == run.step
        self.told.append(["step", run.step, metrics["loss"]])
        self.note(run, "step", run.step)
        for what in ("save", "evaluate", "gather_weights", "stop"):
            if self.after.get(what) == run.step:
                getattr(run, what)()
        if self.after.get("fail") == run.step:
            raise KeyError("no such thing")

    def on_evaluate(self, run, results):
        self.told.append(["evaluated", run.step, {name: found["loss"] for name, found in results.items()}])

    def on_weights(self, run, weights):
        self.note(run, "weights", run.step, float(weights["head.weight"].sum()), len(weights))
        for weight in weights.values():
            weight.zero_()

    def on_save(self, run, step):
        self.note(run, "saved", step)

    def on_train_end(self, run, reason):
        (run.folder / "ended.json").write_text(json.dumps([run.step, reason, self.told]))

    def state_dict(self):
        return {"told": self.told}

    def load_state_dict(self, state):
        self.told = state["told"]
'''
EIGHT = SHORT | {"train.steps": 8}
KEEP = {"checkpoint__keep": 9}
AFTER = {"save": 2, "evaluate": 3, "gather_weights": 4, "stop": 5}


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "callback.py").write_text(CODE)
    return str(tmp_path / "callback.py")


def ended(run: Path) -> Any:
    return json.loads((run / "ended.json").read_text())


def heard(run: Path) -> list[Any]:
    return list(map(json.loads, (run / "heard.jsonl").read_text().splitlines()))


def test_what_is_told_and_requested_on_any_ranks(code: str, tokens: Path, tmp_path: Path) -> None:
    """A request of step k is met at the end of step k + 1, and nothing of it changes the curve."""
    changes = {key.replace(".", "__"): value for key, value in EIGHT.items()} | KEEP
    plain = walk(1, tmp_path / "plain", tokens, **changes)
    ends = []
    for ranks, zero in ((1, "auto"), (3, 3)):
        run = tmp_path / f"on {ranks}"
        found = walk(
            ranks, run, tokens, callback__code=code, callback__options=AFTER, parallel__zero=zero,
            train__eval_every=5, **changes,
        )  # fmt: skip
        assert found.losses == pytest.approx(plain.losses[:6], rel=1e-12)
        step, reason, told = ended(run)
        assert (step, reason) == (6, "requested by a callback")
        assert [(kind, of) for kind, of, *_ in told] == [
            ("step", 1), ("step", 2), ("step", 3), ("step", 4), ("evaluated", 4), ("step", 5), ("evaluated", 5),
            ("step", 6), ("evaluated", 6),
        ]  # fmt: skip
        assert list_steps(RunPaths(run).checkpoints) == [6, 3]
        calls = heard(run)
        assert calls[0] == [False, 1, "begin", 0, 8, ranks]
        assert [call[3] for call in calls if call[2] == "saved"] == [3, 6]
        assert {call[0] for call in calls} == {False}
        assert [event["step"] for event in runs.events(run, EventKind.FINISHED)] == [6]
        weights = [call[3:] for call in calls if call[2] == "weights"]
        assert [[of, count] for of, _, count in weights] == [[5, 21]]
        ends.append([*told, ["weights", 5, weights[0][1]]])
    for one, three in zip(*ends, strict=True):
        assert one[:2] == three[:2]
        assert one[2] == pytest.approx(three[2], rel=1e-12)


def test_a_killed_run_tells_and_stops_as_one_that_was_not(
    code: str,
    tokens: Path,
    tmp_path: Path,
    shared: Path,  # noqa: F811
) -> None:
    """Between the commit of a step and the next, before a commit, and when a stop is agreed on and nothing saved."""
    changes = {"callback.code": code, "callback.options": AFTER, "checkpoint.keep": 9} | EIGHT
    dotted = {key.replace(".", "__"): value for key, value in changes.items()}
    quiet = walk(2, tmp_path / "quiet", tokens, **dotted)
    deaths = [("behind the commit", 4, 0), ("before the commit", 6, 1), ("behind the commit", 6, 0)]
    found = killed(2, tmp_path / "run", tokens, shared, deaths, **changes)
    assert found.losses == quiet.losses
    assert len(found.losses) == 6
    assert same_bits(found.state, quiet.state)
    assert ended(tmp_path / "run") == ended(tmp_path / "quiet")
    assert [step for step, _ in resumed(tmp_path / "run")] == [4, 5, 6]
    again = {call[3] for call in heard(tmp_path / "run") if call[2] == "step" and call[0]}
    assert again
    # Started again, it is complete, until the callback is another.
    assert run_ranks(runs.train, 2, run=str(tmp_path / "run"), data=str(tokens), changes=changes) == [0, 0]
    assert ended(tmp_path / "run")[0] == 6
    on = changes | {"callback.options": {}}
    assert run_ranks(runs.train, 2, run=str(tmp_path / "run"), data=str(tokens), changes=on) == [0, 0]
    step, reason, told = ended(tmp_path / "run")
    assert (step, reason) == (8, None)
    assert [of for kind, of, *_ in told if kind == "step"] == list(range(1, 9))


def test_a_rollback_takes_the_callback_back_as_well(code: str, tokens: Path, tmp_path: Path) -> None:
    from tests.dist.test_training_health import CALM
    from tests.dist.test_training_health import walk as spoiled

    changes = {key.replace(".", "__"): value for key, value in CALM.items()}
    changes |= {"callback__code": code, "resilience__on_nan": "rollback", "train__steps": 14}
    spoiled(tmp_path / "run", tokens, "nan:step=9", **changes)
    back = runs.events(tmp_path / "run", EventKind.ROLLED_BACK)[0]["step"]
    step, _, told = ended(tmp_path / "run")
    assert [of for kind, of, *_ in told if kind == "step"] == list(range(1, step + 1))
    again = [call[3] for call in heard(tmp_path / "run") if call[2] == "step" and call[0]]
    assert again == list(range(back + 1, 9 + 1))


class Ours(Callback):
    def on_step_end(self, run: RunState, metrics: Any) -> None:
        if run.step == 1:
            run.stop("it is enough")


def from_python(placement: Placement, folder: str) -> list[Any]:
    """A run that a program starts, with callbacks of its own, and runs of the command line whose callbacks fail."""
    import os

    from phalanx.config import load
    from phalanx.launch import run

    os.chdir(folder)
    config = load.load_recipe(Path("recipe.yaml"), ["train.steps=4"])
    code = run.train(config, RunPaths(Path("ours")), 2, {}, on_cpu=True, callbacks=[Ours()])
    fail = ["callback.code=callback.py", "callback.options={fail: 1}"]
    train = ["train", "recipe.yaml"]
    commands = [
        [*train, "--run-dir", "failed", "--ranks", "2", *fail],
        [*train, "--run-dir", "none", "callback.code=recipe.yaml"],
        [*train, "--run-dir", "odd", "callback.options={a: 2}"],
        [*train, "--run-dir", "state", "callback.code=state.py"],
    ]
    return [code, *call(placement, folder, commands)]


def test_from_a_program_and_callbacks_that_fail(code: str, tmp_path: Path) -> None:
    write_place(tmp_path)
    (tmp_path / "state.py").write_text(
        "import phalanx\nclass Callback(phalanx.Callback):\n    def state_dict(self): return {'a': {1, 2}}\n"
    )
    code_of_ours, failed, none, odd, state = run_ranks(from_python, 1, timeout_s=240, folder=str(tmp_path))[0]
    assert code_of_ours == ExitCode.DONE
    last = list(read_lines(tmp_path / "ours" / "events.jsonl"))
    finished = [event for event in last if event["kind"] == EventKind.FINISHED]
    assert [(event["step"], event["reason"]) for event in finished] == [(2, "it is enough")]
    assert failed[0] == ExitCode.CONFIG
    said = "callback.code callback.py: on_step_end after step 1 fails: KeyError: 'no such thing' in line 25; correct it"
    assert said in " ".join((failed[1] + failed[2]).split())
    log = RunPaths(tmp_path / "failed").log(1, 0).read_text()
    assert "Traceback" in log
    assert 'raise KeyError("no such thing")' in log
    assert none[0] == odd[0] == state[0] == ExitCode.CONFIG
    assert "recipe.yaml is not a Python file" in " ".join((none[1] + none[2]).split())
    assert "callback.options has no effect without callback.code" in odd[2]
    assert "returns no dictionary of JSON values" in " ".join((state[1] + state[2]).split())
