"""Outcome of a run as written by its launcher: the agent's events, how it ended, the report."""

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from phalanx.config import load
from phalanx.config import shrink as tiny
from phalanx.config.schema import Config
from phalanx.core import faults
from phalanx.core.errors import PhalanxError
from phalanx.core.faults import Fault
from phalanx.core.json_lines import read_last_line
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, read_events, write_event
from phalanx.core.run_paths import RunPaths, Url
from phalanx.elastic.node import agent
from phalanx.report.logs import open_terminal
from phalanx.system.fork import fork_call


def write_agent_event(paths: RunPaths, console: Any, kind: str, details: dict[str, Any]) -> None:
    """Write an event of the agent. A full disk must not end a run that can continue: then the event is only shown."""
    try:
        write_event(paths.events, kind, **details)
    except OSError as error:
        console.on_event({"kind": kind, **details})
        console.say(f"{paths.events} could not be written: {error.strerror}", kind=EventKind.WARNING)


def newest_checkpoint_step(paths: RunPaths) -> int:
    """The step of the newest checkpoint; 0 if there is none. A remote store is not queried: that would start
    threads."""
    from phalanx.checkpoint.disk.load import list_steps

    if isinstance(paths.checkpoints, Url):
        return checkpoint_step_in_events(paths)
    return max(list_steps(paths.checkpoints), default=0)


def checkpoint_step_in_events(paths: RunPaths) -> int:
    """The last step that the records say was saved; 0 where they say nothing."""
    saved = (event for event in read_events(paths.events) if event.get("kind") == EventKind.CHECKPOINT_SAVED)
    return max((event["step"] for event in saved if type(event.get("step")) is int), default=0)


def rollback_attempts(paths: RunPaths) -> list[int]:
    """The attempts of all rollbacks."""
    events = (event for event in read_events(paths.events) if event.get("kind") == EventKind.ROLLED_BACK)
    return [event["attempt"] for event in events if type(event.get("attempt")) is int]


def describe_early_stop(paths: RunPaths, signal_name: str) -> str:
    """Describe a start that the signal `signal_name` stopped before there were ranks."""
    step, done = checkpoint_step_in_events(paths), (read_last_line(paths.metrics) or {}).get("step")
    later = type(done) is int and done > step  # after a failure: whether that is kept is known when all nodes are there
    if not step and not later:
        return f"stopped by {signal_name} before the first step finished; the same command starts over"
    where = f"the checkpoint of step {step}" if step else "the beginning"
    where += ", or from a later step kept in memory" * later
    return f"stopped by {signal_name} before another step finished; the same command resumes from {where}"


def _read_events_since(paths: RunPaths, attempt: int) -> Iterator[dict[str, Any]]:
    events = read_events(paths.events)
    return (event for event in events if type(event.get("attempt")) is int and event["attempt"] >= attempt)


def resolve_exit_code(paths: RunPaths, code: int, first_attempt: int) -> tuple[int, bool]:
    """The exit code of a start whose agent ended with `code`, and whether it was requested to stop. A saved run
    has not failed: ranks that are killed (a second Ctrl-C) while they exit have done their work.
    """
    kinds = [event.get("kind") for event in _read_events_since(paths, first_attempt)]
    asked = EventKind.STOP_REQUESTED in kinds
    if code == ExitCode.FAILED and asked and EventKind.FINISHED in kinds:
        return ExitCode.DONE, asked
    if code == ExitCode.FAILED and asked and EventKind.STOPPED in kinds:
        return ExitCode.STOPPED, asked
    return code, asked


def write_finish_event(paths: RunPaths, step: int, attempt: int) -> None:
    """Write that a run of several nodes is done with `step`, where rank 0 was lost before it had written that."""
    said = [event for event in read_events(paths.events) if event.get("kind") == EventKind.FINISHED]
    if not any(event.get("attempt") == attempt or event.get("step") == step for event in said):
        with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
            write_event(paths.events, EventKind.FINISHED, attempt, step=step)


def warn_missing_faults(paths: RunPaths, planned: Sequence[Fault], first_attempt: int) -> None:
    """Warn about requested faults that did not happen in this start."""
    since = _read_events_since(paths, first_attempt)
    happened = {str(event.get("fault")) for event in since if event.get("kind") == EventKind.INJECTED}
    for fault in faults.find_missed_faults(planned, happened):
        message = f"--inject {fault.text} did not happen: the run did not reach that point in that attempt"
        open_terminal().print(message, style="yellow", soft_wrap=True)
        write_event(paths.events, EventKind.WARNING, first_attempt, message=message)


def finish_run(paths: RunPaths, code: int, stop_requested: bool = False, memory_folder: Path | None = None) -> None:
    """Write the report and say where everything is; a report that fails must not hide how the run ended.
    `memory_folder`: the folder in shared memory that holds a later step than the disk."""
    from phalanx.report import html
    from phalanx.report.console import render_run_summary

    terminal = open_terminal()
    try:
        html.write_report(paths)
    except (PhalanxError, OSError) as error:
        terminal.print(f"the report was not written: {error}", style="yellow")
    if code in (ExitCode.DONE, ExitCode.STOPPED):
        terminal.print(render_run_summary(paths))
    elif memory_folder is not None:
        terminal.print(
            f"the run failed (exit code {code}); the ranks' logs are in {paths.root / 'logs'}. Its last step is "
            f"newer than its checkpoints and is kept in {memory_folder}: the same command on this machine resumes "
            "from it",
            style="red",
        )
    elif stop_requested:
        step = newest_checkpoint_step(paths)
        on = f"resumes from the checkpoint of step {step}" if step else "starts over because there is no checkpoint"
        terminal.print(
            f"the run was asked to stop but ended before it saved (exit code {code}); the same command {on}",
            style="yellow",
        )
    else:
        terminal.print(f"the run failed (exit code {code}); the ranks' logs are in {paths.root / 'logs'}", style="red")


# ----------------------------------------------------------------------------------------------------------- preflight
# Preflight: checks of a recipe before torch is imported here, by shrinking it and inspecting its data.


def check_first_records(wanted: Config) -> None:
    """Raises ConfigError or DataError for mistakes that the first records of the data show."""
    fork_call(_check_first_records, load.to_yaml(wanted), timeout_s=None)


def _check_first_records(text: str) -> None:
    from phalanx.data import inspect

    inspect.check_first_records(load.from_yaml(text, "the recipe"))


def shrink_recipe(wanted: Config, show: bool = True) -> Config:
    """Shrink the recipe for a quick check; prints what it changed."""
    agent.preload(["phalanx.data.chat"])  # with numpy, whose threads would forbid to fork later
    tiny_hf = fork_call(_tiny_hf, load.to_yaml(wanted), timeout_s=None) if wanted.model.from_hf else None
    config = tiny.shrink_config(wanted, _is_source_available, tiny_hf)
    if show:
        terminal = open_terminal()
        terminal.print("settings reduced; differences from the recipe:")
        for line in tiny.list_changes(wanted, config):
            terminal.print(Text(f"  {line}", style="dim"))
    return config


def _is_source_available(source: str) -> bool:
    from phalanx.data.chat import TEMPLATES

    built_in = source in ("stdlib", "stdlib-chat") or source in TEMPLATES
    return built_in or bool(glob.glob(os.path.expanduser(source), recursive=True))


def _tiny_hf(text: str) -> tuple[str, bool]:
    from phalanx.storage.hub import is_hub_name
    from phalanx.workload import local_copies
    from phalanx.workload.tiny_model import write_tiny_model

    config = load.from_yaml(text, "the recipe")
    try:
        config = local_copies.fetch_local_copies(config, weights=False, keys=["model.from_hf"])
    except PhalanxError:
        if not is_hub_name(str(config.model.from_hf)):
            raise  # a model of the hub that cannot be fetched is replaced, as a missing folder is
    return write_tiny_model(config)
