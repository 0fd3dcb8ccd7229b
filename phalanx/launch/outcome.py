"""What a launcher says and writes of a run beside its ranks: its agent's events, how it ended, the report."""

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
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
    """Write an event of the agent's. A full disk must not end a run that can go on: then it is only shown."""
    try:
        write_event(paths.events, kind, **details)
    except OSError as error:
        console.on_event({"kind": kind, **details})
        console.say(f"{paths.events} could not take this: {error.strerror}", kind=EventKind.WARNING)


def newest_checkpoint_step(paths: RunPaths) -> int:
    """The step of the newest checkpoint; 0 where there is none. A store is not asked: that would start threads."""
    from phalanx.checkpoint.disk.load import list_steps

    if isinstance(paths.checkpoints, Url):
        return checkpoint_step_in_events(paths)
    return max(list_steps(paths.checkpoints), default=0)


def checkpoint_step_in_events(paths: RunPaths) -> int:
    """The last step that the records say was saved; 0 where they say nothing."""
    saved = (event for event in read_events(paths.events) if event.get("kind") == EventKind.CHECKPOINT_SAVED)
    return max((event["step"] for event in saved if type(event.get("step")) is int), default=0)


def rollback_attempts(paths: RunPaths) -> list[int]:
    """The attempt of each time that training went back behind what it had done."""
    events = (event for event in read_events(paths.events) if event.get("kind") == EventKind.ROLLED_BACK)
    return [event["attempt"] for event in events if type(event.get("attempt")) is int]


def describe_early_stop(paths: RunPaths, signal_name: str) -> str:
    """What to say of a start that the signal `signal_name` has stopped before there were ranks."""
    step, done = checkpoint_step_in_events(paths), (read_last_line(paths.metrics) or {}).get("step")
    later = type(done) is int and done > step  # after a failure: whether that is kept is known when all nodes are there
    if not step and not later:
        return f"stopped by {signal_name} before any step was done; the same command starts again"
    where = f"the checkpoint of step {step}" if step else "the beginning"
    where += ", or from a later step where memory has kept one" * later
    return f"stopped by {signal_name} before any further step; the same command goes on from {where}"


def _read_events_since(paths: RunPaths, attempt: int) -> Iterator[dict[str, Any]]:
    events = read_events(paths.events)
    return (event for event in events if type(event.get("attempt")) is int and event["attempt"] >= attempt)


def resolve_exit_code(paths: RunPaths, code: int, first_attempt: int) -> tuple[int, bool]:
    """The exit code of a start whose agent ended with `code`, and whether it had been asked to stop.

    What was saved has not failed: ranks that are killed (a second Ctrl-C) while they leave have done their work.
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
    """Say which faults were asked for and did not happen in this start, or they would be taken for tried."""
    since = _read_events_since(paths, first_attempt)
    happened = {str(event.get("fault")) for event in since if event.get("kind") == EventKind.INJECTED}
    for fault in faults.find_missed_faults(planned, happened):
        message = f"--inject {fault.text} did not happen: the run did not get there in that attempt"
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
        terminal.print(f"no report was written: {error}", style="yellow")
    if code in (ExitCode.DONE, ExitCode.STOPPED):
        terminal.print(render_run_summary(paths))
    elif memory_folder is not None:
        terminal.print(
            f"the run failed (exit code {code}); the ranks' own words are in {paths.root / 'logs'}. Its last step is "
            f"newer than its checkpoints and kept in {memory_folder}: the same command here goes on from it",
            style="red",
        )
    elif stop_requested:
        step = newest_checkpoint_step(paths)
        on = f"goes on from the checkpoint of step {step}" if step else "begins again, as there is no checkpoint"
        terminal.print(
            f"asked to stop, the run ended before it had saved (exit code {code}); the same command {on}",
            style="yellow",
        )
    else:
        terminal.print(
            f"the run failed (exit code {code}); the ranks' own words are in {paths.root / 'logs'}", style="red"
        )


# ----------------------------------------------------------------------------------------------------------- preflight
# What is done with a recipe before torch is imported here: it is made tiny, and its data are looked at.


def check_first_records(wanted: Config) -> None:
    """Raises ConfigError or DataError for mistakes that the first records of the data show."""
    fork_call(_check_first_records, load.to_yaml(wanted), timeout_s=None)


def _check_first_records(text: str) -> None:
    from phalanx.data import inspect

    inspect.check_first_records(load.build_config(yaml.safe_load(text), "the recipe"))


def shrink_recipe(wanted: Config, show: bool = True) -> Config:
    """The recipe in tiny; says what it changed."""
    agent.preload(["phalanx.data.chat"])  # with numpy, whose threads would forbid to fork later
    tiny_hf = fork_call(_tiny_hf, load.to_yaml(wanted), timeout_s=None) if wanted.model.from_hf else None
    config = tiny.shrink_config(wanted, _is_source_available, tiny_hf)
    if show:
        terminal = open_terminal()
        terminal.print("shrunk; what differs from the recipe:")
        for line in tiny.list_changes(wanted, config):
            terminal.print(Text(f"  {line}", style="dim"))
    return config


def _is_source_available(source: str) -> bool:
    from phalanx.data.chat import TEMPLATES

    built_in = source in ("stdlib", "stdlib-chat") or source in TEMPLATES
    return built_in or bool(glob.glob(os.path.expanduser(source), recursive=True))


def _tiny_hf(text: str) -> tuple[str, bool]:
    from phalanx.workload import local_copies
    from phalanx.workload.tiny_model import write_tiny_model

    return write_tiny_model(
        local_copies.fetch_local_copies(load.build_config(yaml.safe_load(text), "the recipe"), weights=False)
    )
