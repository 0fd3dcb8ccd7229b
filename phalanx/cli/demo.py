"""`phalanx demo`: a run on two CPU cores from start to end: train, kill a rank, resume, evaluate, export, generate."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from phalanx.cli import help
from phalanx.cli.data import Overrides
from phalanx.config import load
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.records import EventKind, read_events, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.report.logs import open_terminal

PROMPT = "def read("
KILLED_RANK = 1


def demo_command(
    overrides: Overrides = None,
    run_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="The run folder, which must not exist; the export goes beside it.")
    ] = Path("runs/demo"),
    verbose: help.Verbose = False,
) -> None:
    """Run a demo in three minutes on two CPU cores: train, kill a rank, resume, export, generate.

    It runs the commands that it prints, kills a rank with SIGKILL, and downloads nothing.
    """
    export = run_dir.with_name(f"{run_dir.name}-export")
    for folder in (run_dir, export):
        if folder.exists():
            raise ConfigError(
                f"{folder} exists, and the demo deletes nothing; remove it (rm -r {shlex.quote(str(folder))})"
                " or give another folder with --run-dir"
            )
    began = time.monotonic()
    say("the demo takes about three minutes on two idle CPU cores; it does not use GPUs")
    say("1. copy a recipe and train it on two ranks; kill one of them half-way with SIGKILL")
    run_phalanx("recipes", "copy", "demo")
    # The demo's small products run on two ranks of one thread each: the two cores that the demo asks for.
    options = ["--ranks", "2", "--run-dir", str(run_dir), *(["--verbose"] if verbose else [])]
    train_and_kill_rank(["train", "recipes/demo.yaml", *options, *(overrides or [])], run_dir)
    say("2. export to a Hugging Face folder")
    run_phalanx("export", str(run_dir), str(export))
    say("3. load that folder with transformers and generate text")
    generate_with_transformers(export)
    say(f"done in {time.monotonic() - began:.0f} s; results:")
    paths = RunPaths(run_dir)
    newest = max((run_dir / "checkpoints").glob("step-*"))
    for name, path in (("run", run_dir), ("checkpoint", newest), ("export", export), ("report", paths.report)):
        typer.echo(f"  {name:11}{path.resolve()}")


def train_and_kill_rank(command: list[str], run_dir: Path) -> None:
    """Run a training command, and kill a rank half-way."""
    from phalanx.system.accelerator import NO_DEVICES_ENV  # imports torch

    typer.echo(f"$ phalanx {shlex.join(command)}")
    run = subprocess.Popen([sys.executable, "-m", "phalanx", *command], env=os.environ | NO_DEVICES_ENV)
    killed = False
    while run.poll() is None:
        time.sleep(0.02)  # some steps of a small model
        if not killed and (pid := find_victim(RunPaths(run_dir))) is not None:
            os.kill(pid, signal.SIGKILL)
            killed = True
    if run.returncode != 0 or not killed:
        before = "" if killed else ", before the kill"
        raise RunError(f"the demo's training ended with exit code {run.returncode}{before}; see its output")
    if not any(event["kind"] == EventKind.RESUMED for event in read_events(RunPaths(run_dir).events)):
        raise RunError("the demo's training ended before the kill took effect; train more steps (train.steps=180)")


def find_victim(paths: RunPaths) -> int | None:
    """The process to kill, once half of the steps are done; None before."""
    started = [event for event in read_events(paths.events) if event["kind"] == EventKind.RUN_STARTED]
    attempts = [event for event in read_events(paths.events) if event["kind"] == EventKind.ATTEMPT_STARTED]
    steps = read_steps(paths.metrics)
    if not started or not attempts or not steps or steps[-1]["step"] < started[0]["steps"] // 2:
        return None
    return int(attempts[-1]["pids"][str(KILLED_RANK)])


def generate_with_transformers(export: Path) -> None:
    """Generate text from a Hugging Face folder with transformers, without Phalanx."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    model: Any = AutoModelForCausalLM.from_pretrained(export)
    typer.echo(f"loaded {type(model).__name__} with {model.num_parameters():,} parameters, {type(tokenizer).__name__}")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(0)
    written = model.generate(
        **inputs, max_new_tokens=80, do_sample=True, temperature=0.7, pad_token_id=tokenizer.eos_token_id
    )
    text = tokenizer.decode(written[0], skip_special_tokens=True)
    typer.echo("\n".join(f"  | {line}" for line in text.splitlines()))


def run_phalanx(*arguments: str) -> None:
    """Run a command as a user would, and show it. Raises RunError where it fails."""
    typer.echo(f"$ phalanx {shlex.join(arguments)}")
    code = subprocess.run([sys.executable, "-m", "phalanx", *arguments]).returncode
    if code != 0:
        raise RunError(f"`phalanx {arguments[0]}` ended with exit code {code}; see its output")


def say(text: str) -> None:
    typer.echo(f"\n== {text}")


# ------------------------------- `phalanx recipes`: list and copy bundled recipes and examples


recipes_app = typer.Typer(help="List or copy bundled recipes and examples.", no_args_is_help=True)


@recipes_app.command("list")
def recipes_list() -> None:
    """List bundled recipes and examples with a description of each."""
    grid = Table(box=None, pad_edge=False)
    grid.add_column(
        "recipes and examples",
        no_wrap=True,
        min_width=max(map(len, map(load.short_name, load.list_bundled_files()))),
    )
    grid.add_column("description")
    for name in load.list_bundled_files():
        grid.add_row(Text(load.short_name(name)), Text(load.describe_bundled_file(name)))
    open_terminal().print(grid)


@recipes_app.command("copy")
def recipes_copy(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Such as demo, or its path: recipes/demo.yaml.")
    ],
    to: Annotated[Path, typer.Option(metavar="DIR", help="Parent folder of recipes/ and examples/.")] = Path(),
) -> None:
    """Copy recipes and examples to recipes/ and examples/, where the documentation's commands expect them.

    A recipe also copies the example that it names as its code. Existing files are not overwritten.
    """
    for name in names:
        for path in load.copy_bundled_files(name, to):
            typer.echo(path)
