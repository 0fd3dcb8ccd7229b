"""`train.epochs`: one of two ways to say how long to train, and when a run of so many is complete."""

from pathlib import Path

import pytest

from phalanx.config.load import build_config, load_recipe, update_config
from phalanx.core.errors import ConfigError
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.launch.from_python import load_recipe as load_from_python
from phalanx.launch.prepare import exit_code_if_complete
from phalanx.trainer import run_folder

MODEL = {"model": {"preset": "llama-3.2-1b"}}


def test_steps_and_epochs_are_not_given_together(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {preset: llama-3.2-1b}\ntrain: {epochs: 2}\n")
    assert load_recipe(recipe).train.epochs == 2
    both = "train.steps and train.epochs both set the length of training; remove one of them"
    with pytest.raises(ConfigError, match=both):
        load_recipe(recipe, ["train.steps=9"])
    with pytest.raises(ConfigError, match=both):
        load_from_python(MODEL, train={"epochs": 2, "steps": 9})
    with pytest.raises(ConfigError, match=r"train.epochs must be above 0"):
        load_recipe(recipe, ["train.epochs=0"])
    assert load_recipe(recipe, ["train.profile=5000-5001"]).train.most_steps > 5001


def test_a_run_is_complete_with_its_epochs(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    saved = update_config(build_config(MODEL, "here"), {"train.epochs": 2, "train.steps": 5})
    run_folder.write_start(paths, saved, None)
    paths.metrics.touch()
    write_event(paths.events, EventKind.FINISHED, 1, step=5)

    def code(**train: float) -> int | None:
        return exit_code_if_complete(build_config(MODEL | {"train": train}, "here"), paths, show=False)

    assert [code(epochs=2), code(epochs=3), code(steps=5), code(steps=6)] == [ExitCode.DONE, None, ExitCode.DONE, None]
