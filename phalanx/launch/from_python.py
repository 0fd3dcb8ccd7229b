"""Runs from a Python program or a notebook: `phalanx.train`, `load_recipe`, `plan`, `export` and `Run`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, OutOfMemory, PhalanxError, Unhealthy
from phalanx.core.json_lines import read_last_line
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, read_events, read_steps
from phalanx.core.renamed import rename_keys, rename_words
from phalanx.core.run_paths import Url, redact_url
from phalanx.launch import child_run, run
from phalanx.launch.auto_layout import read_folder_spec
from phalanx.planner import advice, parse_cluster
from phalanx.planner.advice import PlanQuery
from phalanx.planner.plan import Plan
from phalanx.planner.recipe_keys import free_layout
from phalanx.report import event_text
from phalanx.storage import files as storage
from phalanx.storage import hub, mirror
from phalanx.system.fork import thread_names
from phalanx.system.torchrun_env import from_environment

if TYPE_CHECKING:
    from phalanx.models.model import Model
    from phalanx.trainer.callback import Callback

Recipe = Path | str | Mapping[str, Any] | Config
FAILURES: dict[int, type[PhalanxError]] = {
    ExitCode.CONFIG: ConfigError,
    ExitCode.UNHEALTHY: Unhealthy,
    ExitCode.OUT_OF_MEMORY: OutOfMemory,
}


def train(
    recipe: Recipe,
    *overrides: str,
    run_dir: Path | str,
    ranks: int | None = None,
    callbacks: Sequence["Callback"] = (),
    **sections: Any,
) -> "Run":
    """Train a model on this machine, or resume the run that `run_dir` holds.

    The ranks are separate processes, so a notebook, or a program that has used torch, can call this any number of
    times. In a notebook a progress bar and the loss curve are shown below the cell. An interrupt (the stop button,
    Ctrl-C) ends the run after the current step with its state saved, and the same call resumes it; a second one ends it
    at once. In a process that torchrun, mpirun or Slurm started as one rank of several, this is that rank.

    Args:
        recipe: A YAML file, a mapping of its sections, or what `load_recipe` returned.
        overrides: Texts such as `"train.steps=100"`.
        run_dir: The folder, or the URL, for everything of this run.
        ranks: Number of processes. Default: one for each accelerator; one on a machine without.
        callbacks: Objects that are called beside the recipe's `callback.code`, in the process of rank 0: what they
            change there is not seen here. They need a process without other threads, so no notebook.
        sections: Overrides by section, such as `train={"steps": 100}`, or by key, `**{"train.steps": 100}`.

    Returns:
        Run: the run, finished or interrupted (see `Run.finished`).

    Raises:
        errors.ConfigError: the recipe, the data or the run folder cannot be used, or a rank found so.
        errors.PhalanxError: the run failed; the subclass says how, the message where the logs are.

    Examples:
        >>> run = phalanx.train("recipe.yaml", run_dir="runs/first", ranks=2, train={"steps": 4})
        >>> run.finished, run.step
        (True, 4)
        >>> run = phalanx.train("recipe.yaml", run_dir="runs/first", ranks=1, train={"steps": 6})  # continues
        >>> run.step
        6
    """
    config = load_recipe(recipe, *overrides, **sections)
    is_rank = ranks is None and from_environment(os.environ, ()) is not None
    if not callbacks and not is_rank:
        code = child_run.train_in_child(config, str(run_dir), ranks)
    elif callbacks and not is_rank and len(thread_names()) > 1:
        raise ConfigError(
            f"callbacks= needs a process without other threads, but this one has {len(thread_names())} (a notebook, "
            "or earlier torch computation); put the class in a file and pass callback={'code': 'callback.py'}"
        )
    else:
        paths = child_run.prepare_run_folder(config, str(run_dir))
        code = run.train(config, paths, ranks, os.environ, callbacks=callbacks)
    found = Run(run_dir)
    if code not in (ExitCode.DONE, ExitCode.STOPPED):
        raise FAILURES.get(code, PhalanxError)(found._describe_failure(code))
    return found


class Run:
    """A training run: how far it is, its metrics and its trained model.

    `train` returns one; `phalanx.Run(run_dir)` opens that of an earlier program or command. A run that trains
    elsewhere meanwhile can be read, too.

    Args:
        run_dir: The run's folder or URL.

    Examples:
        >>> run = phalanx.Run("runs/trained")
        >>> run.step, [round(record["loss"]) for record in run.metrics()]
        (2, [6, 6])
        >>> model = run.load_model()
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 280])
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = str(run_dir)

    def __repr__(self) -> str:
        state = "finished" if self.finished else "not finished"
        return f"Run({redact_url(self.run_dir)!r}): step {self.step}, {state}"

    @property
    def finished(self) -> bool:
        """Whether the newest start has trained to its end; False after an interrupt."""
        finished = False
        with mirror.open_records(self.run_dir) as paths:
            for event in read_events(paths.events):
                if event.get("kind") in (EventKind.RUN_STARTED, EventKind.FINISHED):
                    finished = event["kind"] == EventKind.FINISHED
        return finished

    @property
    def step(self) -> int:
        """The newest completed step; 0 before the first."""
        with mirror.open_records(self.run_dir) as paths:
            return int((read_last_line(paths.metrics) or {}).get("step", 0))

    def metrics(self) -> list[dict[str, Any]]:
        """Read the records of all steps, in order.

        Returns:
            One dictionary a step with the keys of metrics.jsonl, such as `step`, `loss`, `lr`, `tokens_per_s`
            and `step_s` (seconds). Of a step that was replayed after a failure it is the one that counts.
        """
        with mirror.open_records(self.run_dir) as paths:
            return read_steps(paths.metrics)

    def evaluations(self) -> list[dict[str, Any]]:
        """Read the results of all evaluations, in order.

        Returns:
            One dictionary for each evaluation and data set: `step`, `set`, `loss` and the scores of the task.
        """
        with mirror.open_records(self.run_dir) as paths:
            return [event for event in read_events(paths.events) if event.get("kind") == EventKind.EVALUATED]

    def load_model(self, step: int | None = None) -> "Model":
        """Load the trained model from a checkpoint.

        Args:
            step: The step of the checkpoint. Default: the newest checkpoint.

        Returns:
            The `nn.Module` that was trained, on the CPU, in float32 (float64 of an fp64 run) and in evaluation mode;
            LoRA adapters are merged into it. A language model maps token ids (B, S) to logits (B, S, V).

        Raises:
            errors.RunError: the folder holds no run.
            errors.CheckpointError: there is no valid checkpoint, or none of this step.
        """
        from phalanx.trainer.export import load_trained_model

        with mirror.open_records(self.run_dir) as paths:
            return load_trained_model(paths, step)

    def export(
        self, folder: Path | str, *, dtype: str | None = None, merge: bool = False, step: int | None = None
    ) -> int:
        """Write a checkpoint as a Hugging Face folder; see `phalanx.export`."""
        return export(self.run_dir, folder, dtype=dtype, merge=merge, step=step)

    def _describe_failure(self, code: int) -> str:
        with mirror.open_records(self.run_dir) as paths:
            died = [event for event in read_events(paths.events) if event.get("kind") == EventKind.WORKER_DIED]
            why = f": {event_text.describe_event(died[-1])}" if died else ""
            return (
                f"the run {paths.display_name} failed (exit code {code}){why}; the ranks' logs are in {paths.root}/logs"
            )


def load_recipe(recipe: Recipe, *overrides: str, **sections: Any) -> Config:
    """Read a recipe, apply overrides and check it. Nothing is started, and no torch is imported.

    Args:
        recipe: A YAML file, a mapping of its sections, or a recipe that was loaded before.
        overrides: Texts such as `"optim.lr=3e-4"`.
        sections: Overrides by section, such as `optim={"lr": 3e-4}`, or by key, `**{"optim.lr": 3e-4}`.

    Returns:
        Config: the recipe with the defaults of all keys, by section: `config.train.steps`.

    Raises:
        errors.ConfigError: the file cannot be read, or keys or values are wrong; the message lists all problems.

    Examples:
        >>> config = phalanx.load_recipe("recipe.yaml", train={"steps": 100}, optim={"lr": 1e-3})
        >>> config.train.steps, config.optim.lr
        (100, 0.001)
    """
    words = [*overrides, *_to_words(sections)]
    if isinstance(recipe, str | Path):
        return load.load_recipe(Path(recipe), words)
    given = recipe.model_dump(mode="json", exclude_unset=True) if isinstance(recipe, Config) else recipe
    plain = json.loads(json.dumps(given, default=str))
    tree = load.apply_overrides(rename_keys(plain)[0], words)
    return load.check_recipe(load.build_config(tree, "the recipe"), "the recipe")


def _to_words(sections: Mapping[str, Any]) -> Iterator[str]:
    """Overrides of keyword arguments as those of a command line: JSON is YAML."""
    for key, value in sections.items():
        if "." not in key and isinstance(value, Mapping):
            yield from (f"{key}.{name}={json.dumps(each, default=str)}" for name, each in value.items())
        else:
            yield f"{key}={json.dumps(value, default=str)}"


def plan(recipe: Recipe, cluster: str, *overrides: str, **sections: Any) -> Plan:
    """Find the fastest parallel layout of a recipe on a cluster. Nothing is started, and no torch is imported.

    Args:
        recipe: A YAML file, a mapping of its sections, or what `load_recipe` returned.
        cluster: Nodes, devices and network, as for `phalanx plan --cluster`: `"4x(8xA100-80GB), 200Gb/s"`.
        overrides: Texts such as `"train.global_batch=512"`. Keys of the layout are held fixed.
        sections: Overrides by section, such as `train={"global_batch": 512}`.

    Returns:
        Plan: `choice` is the layout, `estimate.step_s` the time of a step in seconds, `estimate.tokens_per_s` the
        throughput, `devices` the number of devices used.

    Raises:
        errors.ConfigError: a mistake in the recipe or the cluster, or no layout fits the devices.

    Examples:
        >>> plan = phalanx.plan("recipe.yaml", "2x(4xA100-80GB), 100Gb/s", train={"global_batch": 64})
        >>> plan.estimate.step_s > 0
        True
    """
    words = rename_words([*overrides, *_to_words(sections)])
    config = free_layout(load_recipe(recipe, *words), words)
    there = parse_cluster.parse_cluster(cluster).merge_alike_groups()
    query = PlanQuery(config, read_folder_spec(config), tuple(words))
    found = query.search(there)
    if not found.plans and found.shortfall is None:
        raise ConfigError(advice.explain_no_layout(query, there))
    if not found.plans:
        there_text = parse_cluster.format_cluster(there)
        raise ConfigError(
            f"no layout of this recipe fits into the memory of {there_text}; `phalanx plan` suggests changes that "
            "make it fit"
        )
    return found.best


def export(
    run_dir: Path | str,
    folder: Path | str,
    *,
    dtype: str | None = None,
    merge: bool = False,
    step: int | None = None,
    push: str | None = None,
) -> int:
    """Write a checkpoint of a run as a Hugging Face folder, which transformers and `model.from_hf` load.

    A run that trains LoRA adapters is written as a folder that PEFT loads; that of a custom task as safetensors with
    its code.

    Args:
        run_dir: The run's folder or URL.
        folder: The folder or URL to write; nothing may be there yet.
        dtype: Type of the weights: "bf16", "fp16", "fp32" or "fp64". Default: as imported, else the compute type.
        merge: Whether adapters are merged into the whole model.
        step: The step of the checkpoint. Default: the newest.
        push: A name on the Hugging Face hub, such as "organization/name" or "organization/name@branch", that the folder
            is pushed to, too; a repository that does not exist is made, private.

    Returns:
        The step of the checkpoint.

    Raises:
        errors.RunError: `run_dir` holds no run.
        errors.CheckpointError: there is no valid checkpoint, or none of this step.
        errors.ConfigError: `folder` is not empty, or an argument does not fit the run, or the hub refuses.
        errors.StorageError: the hub breaks off.

    Examples:
        >>> phalanx.export("runs/trained", "out/model", dtype="fp32")
        2
    """
    from phalanx.trainer.export import EXPORT_DTYPES, export_run

    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(EXPORT_DTYPES)}")
    target = Url(str(folder).rstrip("/"), storage.TIMEOUT_S) if storage.is_url(str(folder)) else Path(folder)
    if push is not None:
        hub.prepare_push(push, target)
    with mirror.open_records(str(run_dir)) as paths:
        written = export_run(paths, target, dtype, note=paths.url is None, merge=merge, step=step)
        if paths.url is not None:
            mirror.append_event(paths, EventKind.EXPORTED, folder=str(target), step=written)
    if push is not None:
        hub.push_folder(Path(folder), push, f"Step {written}")
    return written
