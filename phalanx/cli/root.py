"""The `phalanx` command: a group that imports a command only when it is called, for a fast --help."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from phalanx.cli import help
from phalanx.core.errors import PhalanxError
from phalanx.core.placement import ExitCode
from phalanx.core.renamed import RenamedWarning
from phalanx.core.version import __version__
from phalanx.elastic.membership import shared_secret


class CommandPlace(NamedTuple):
    """Location of a command: a function or a Typer of a module, or as "app.name" a registered function."""

    module: str
    name: str
    panel: str
    hidden: bool = False


MAIN, JOBS = "phalanx.cli.main", "phalanx.cli.jobs"
COMMANDS = {
    "train": CommandPlace(MAIN, "app.train", help.TRAIN),
    "export": CommandPlace(MAIN, "app.export", help.MODEL),
    "convert": CommandPlace("phalanx.cli.convert", "convert_command", help.MODEL),
    "generate": CommandPlace(MAIN, "app.generate", help.MODEL),
    "hardware": CommandPlace(MAIN, "app.hardware", help.MACHINES),
    "run": CommandPlace(MAIN, "app.run", help.TRAIN),
    "report": CommandPlace(MAIN, "app.report", help.WATCH),
    "demo": CommandPlace("phalanx.cli.demo", "demo_command", help.TRAIN),
    "doctor": CommandPlace("phalanx.cli.health", "doctor_command", help.MACHINES),
    "health": CommandPlace("phalanx.cli.health", "health_command", help.MACHINES),
    "plan": CommandPlace("phalanx.cli.plan", "plan_command", help.MACHINES),
    "config": CommandPlace("phalanx.cli.config", "config_app", help.DATA),
    "data": CommandPlace("phalanx.cli.data", "data_app", help.DATA),
    "cluster": CommandPlace("phalanx.cli.cluster", "cluster_app", help.MACHINES),
    "nodes": CommandPlace("phalanx.cli.nodes", "nodes_app", help.MACHINES),
    "recipes": CommandPlace("phalanx.cli.demo", "recipes_app", help.DATA),
    "launch": CommandPlace(JOBS, "jobs_app.launch", help.TRAIN),
    "keep": CommandPlace(JOBS, "jobs_app.keep", help.TRAIN, hidden=True),
    "status": CommandPlace(JOBS, "jobs_app.status", help.WATCH),
    "logs": CommandPlace(JOBS, "jobs_app.logs", help.WATCH),
    "dashboard": CommandPlace("phalanx.cli.dashboard", "dashboard_command", help.WATCH),
    "metrics": CommandPlace("phalanx.cli.dashboard", "metrics_command", help.WATCH),
    "cancel": CommandPlace(JOBS, "jobs_app.cancel", help.WATCH),
}
# Options of `phalanx run` that take a value.
RUN_OPTIONS = (
    "--nproc", "--smp-config", "--nodes", "--node-rank", "--spares", "--min-nodes", "--rendezvous",
    "--rendezvous-timeout", "--max-restarts", "--run-dir",
)  # fmt: skip


def load_command(name: str) -> Any:
    """Import a command's module and make the command."""
    place = COMMANDS[name]
    attribute, _, inside = place.name.partition(".")
    found = getattr(importlib.import_module(place.module), attribute)
    command: Any
    if inside:
        command = typer.main.get_group(found).commands[inside]
    elif isinstance(found, typer.Typer):
        command = typer.main.get_group(found)
        command.name, command.rich_help_panel = name, place.panel
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name, rich_help_panel=place.panel)(found)
        command = typer.main.get_command(alone)
    help.unify_placeholders(command)
    return command


def read_help(name: str) -> str:
    """First paragraph of a command's help, parsed from its module's source without importing it."""
    place = COMMANDS[name]
    spec = importlib.util.find_spec(place.module)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    attribute, _, inside = place.name.partition(".")
    typers = None if inside else re.search(rf'^{attribute} = typer\.Typer\(\s*help="(.*?)"', text, re.M)
    functions = rf'^def {inside or attribute}\(.*?\) -> [^\n]*:\n    """(.*?)"""'
    found = typers or re.search(functions, text, re.M | re.S)
    return inspect.cleandoc(found[1]).partition("\n\n")[0] if found else ""


class LazyCommands(dict[str, Any]):
    """Commands by name, created on first use."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(COMMANDS))

    def __getitem__(self, name: str) -> Any:
        if super().__getitem__(name) is None:
            self[name] = load_command(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in COMMANDS else default

    def values(self) -> Any:
        return {name: self[name] for name in self}.values()

    def items(self) -> Any:
        return {name: self[name] for name in self}.items()


class CommandGroup(TyperGroup):
    """The group of all commands. Its help does not import them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._described():
            super().format_help(ctx, formatter)

    @contextlib.contextmanager
    def _described(self) -> Iterator[None]:
        commands = self.commands
        self.commands = {
            name: TyperCommand(name, help=read_help(name), rich_help_panel=place.panel, hidden=place.hidden)
            for name, place in COMMANDS.items()
        }
        try:
            yield
        finally:
            self.commands = commands


app = typer.Typer(
    name="phalanx",
    cls=CommandGroup,
    help="Train large models on mixed GPUs, with one loss curve on any cluster.",
    epilog="Every command has --debug: errors then show a traceback.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": help.HELP},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"phalanx {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


def _open_closed_streams() -> None:
    """Give standard streams that the caller closed (`>&-`) /dev/null; else the next file opened would become one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr is closed: the exit code remains
        typer.secho(f"error: {text}", err=True, fg=typer.colors.RED)


def _split_script_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Arguments of this command, and those after the script of `phalanx run`, which belong to the script."""
    if next((each for each in arguments if each != "--debug"), None) != "run":
        return arguments, []
    at = arguments.index("run") + 1
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "--":
        at += 2 if arguments[at] in RUN_OPTIONS else 1
    at += arguments[at : at + 1] == ["--"]
    return arguments[: at + 1], arguments[at + 1 :]


def _format_warning(others: Callable[..., str], message: Warning | str, category: type[Warning], *where: Any) -> str:
    """Print a warning of Phalanx as one line; those of libraries as Python does."""
    return f"warning: {message}\n" if category is RenamedWarning else others(message, category, *where)


def main() -> None:
    """Entry point: runs a command; errors become a sentence and an exit code."""
    _open_closed_streams()
    warnings.formatwarning = functools.partial(_format_warning, warnings.formatwarning)
    ours, of_script = _split_script_arguments(sys.argv[1:])
    debug = "--debug" in ours
    arguments = [argument for argument in ours if argument != "--debug"] + of_script
    try:
        # Child processes do not need the secret of the rendezvous.
        command = typer.main.get_command(app)
        help.unify_own_placeholders(command)
        help.check_options(command, ours)
        command(args=arguments, prog_name="phalanx", obj=shared_secret.take_from_environment())
    except (PhalanxError, RenamedWarning) as error:
        if debug:
            traceback.print_exc()
        _complain(str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        if debug:
            traceback.print_exc()
        elif isinstance(error, PermissionError) and isinstance(error.filename, str | bytes):
            whose = "change its permissions, or run the command as its owner"
            _complain(f"{os.fsdecode(error.filename)} cannot be read or written ({error.strerror}); {whose}")
        else:
            hint = "this is a bug of Phalanx; --debug shows where"
            _complain(f"{type(error).__name__}: {error} ({hint})")
        sys.exit(ExitCode.FAILED)
