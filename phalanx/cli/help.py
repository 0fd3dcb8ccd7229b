"""Help of commands: groups by task, uniform placeholders, shell completion.

`N` is a whole number, `X` any number, `PATH` a file or folder, `TEXT` anything else.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from phalanx.core.errors import ConfigError

# Groups of commands, in the order of a project's life.
TRAIN, WATCH, DATA, MODEL, MACHINES = (
    "Train", "Look after runs", "Recipes and data", "Use a trained model", "Machines and layouts",
)  # fmt: skip
HELP = ["-h", "--help"]
SEVERAL_NODES, TRYING = "Several nodes", "Trying things out"  # groups of options
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Also show how each auto setting was resolved, and what was measured.")
]
PLACEHOLDERS = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


def unify_placeholders(command: Any) -> None:
    """Unify the placeholders of a command and its subcommands; flags have none."""
    unify_own_placeholders(command)
    for child in getattr(command, "commands", {}).values():
        unify_placeholders(child)


def unify_own_placeholders(command: Any) -> None:
    """Unify the placeholders of one command."""
    for parameter in [*command.params, command.get_help_option(command.context_class(command, help_option_names=HELP))]:
        type_of = parameter.type_descriptor.annotation
        kind = next((each for each in PLACEHOLDERS if type_of is each or each in get_args(type_of)), None)
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = _nothing  # its name is enough
        elif parameter.is_flag:
            parameter.metavar = ""
        elif parameter.metavar is None and kind is not None:  # a choice shows its words
            parameter.metavar = PLACEHOLDERS[kind]


def check_options(command: Any, arguments: list[str]) -> None:
    """Raise ConfigError for an unknown option with the name of a recipe key: `--steps` for `train.steps=`."""
    below = getattr(command, "commands", {}).get(arguments[0] if arguments else "")
    if below is None or all(parameter.name != "overrides" for parameter in below.params):
        return
    known = {name for parameter in below.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for name in (argument.partition("=")[0] for argument in arguments[1:]):
        if not name.startswith("--") or name in known:
            continue
        word = name[2:].replace("-", "_")
        if meant := [key[:-1] for key, _ in complete_keys("") if word in (key[:-1], key[:-1].rpartition(".")[2])]:
            raise ConfigError(
                f"{name} is not an option of `phalanx {arguments[0]}` but a key of the recipe; write "
                f"{' or '.join(f'{key}=VALUE' for key in meant)}, without dashes"
            )


def _nothing(ctx: object) -> None:
    return None


def complete_keys(incomplete: str) -> Iterator[tuple[str, str]]:
    """Complete an override, such as `optim.lr=`, with the description of its key."""
    from phalanx.config.schema import iter_knobs

    for key, info in iter_knobs():
        if key.startswith(incomplete):
            yield f"{key}=", str(info.description)
