"""`phalanx.train` and `phalanx.plan`: a run, and the layout of a run, from a Python program."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.config import load
from phalanx.core.errors import ConfigError
from phalanx.core.renamed import rename_words
from phalanx.core.run_paths import RunPaths
from phalanx.launch import run
from phalanx.launch.auto_layout import read_folder_spec
from phalanx.planner import advice, parse_cluster
from phalanx.planner.advice import PlanQuery
from phalanx.planner.recipe_keys import free_layout
from phalanx.planner.search import Plan

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
    return run.train(config, RunPaths(Path(run_dir)), ranks, os.environ, callbacks=callbacks)


def plan(recipe: Path | str, cluster: str, *overrides: str) -> Plan:
    """Find the fastest layout of a recipe on a cluster. Nothing is started, and no torch is imported.

    `recipe` is a YAML file. `cluster` is written as for `phalanx plan --cluster`: "4x(8xA100-80GB), 200Gb/s".
    `overrides` are texts such as "train.global_batch=512"; those about the layout are held fixed. Of the result,
    `estimate.step_s` is the time of a step in seconds, `estimate.tokens_per_s` the throughput, and `choice` the layout.

    Raises ConfigError for a mistake in either, and where no layout fits the devices.
    """
    words = rename_words(overrides)
    config = free_layout(load.load_recipe(Path(recipe), words), words)
    there = parse_cluster.parse_cluster(cluster).merge_alike_groups()
    query = PlanQuery(config, read_folder_spec(config), tuple(words))
    found = query.search(there)
    if not found.plans and found.shortfall is None:
        raise ConfigError(advice.explain_no_layout(query, there))
    if not found.plans:
        there_text = parse_cluster.format_cluster(there)
        raise ConfigError(
            f"no layout of this recipe fits the memory of {there_text}; `phalanx plan` says what would help"
        )
    return found.best
