"""`phalanx.train`: a run from a Python program."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.config import load
from phalanx.core.run_paths import RunPaths
from phalanx.launch import local

if TYPE_CHECKING:
    from phalanx.trainer.callback import Callback


def train(
    recipe: Path | str,
    *overrides: str,
    run_dir: Path | str,
    ranks: int | None = None,
    callbacks: Sequence["Callback"] = (),
) -> int:
    """Train a recipe on this machine, as `phalanx train` does, and return its exit code: 0 when it is finished.

    `recipe` is a YAML file; `overrides` are texts such as "train.steps=100". A `run_dir` that holds a run of this
    recipe is resumed. `ranks`: how many processes, by default one for each device; where torchrun or Slurm has started
    this process as one rank of several, it is that rank. `callbacks` are called beside the recipe's, in the process of
    rank 0: what they change is not seen here.

    A program that calls this must guard it by `if __name__ == "__main__":`, and must have started no thread. Raises
    PhalanxError for what a user can correct.
    """
    config = load.load_recipe(Path(recipe), overrides)
    return local.train(config, RunPaths(Path(run_dir)), ranks, os.environ, callbacks=callbacks)
