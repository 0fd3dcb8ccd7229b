"""How the help of commands looks: by task, with one spelling of what options take; and what a shell can complete.

`N` is a whole number, `X` any number, `PATH` a file or folder, `TEXT` anything else.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

# Groups of commands, in the order of a project's life.
TRAIN, WATCH, DATA, MODEL, MACHINES = (
    "Train", "Look after runs", "Recipes and data", "Use a trained model", "Machines and layouts",
)  # fmt: skip
HELP = ["-h", "--help"]
SEVERAL_NODES, TRYING = "Several nodes", "Trying things out"  # groups of options
PLACEHOLDERS = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


def spell_alike(command: Any) -> None:
    """Give the options of a command, and of all below it, the same placeholders; flags have none."""
    for parameter in [*command.params, command.get_help_option(command.context_class(command, help_option_names=HELP))]:
        type_of = parameter.type_descriptor.annotation
        kind = next((each for each in PLACEHOLDERS if type_of is each or each in get_args(type_of)), None)
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = _nothing  # its name says it already
        elif parameter.is_flag:
            parameter.metavar = ""
        elif parameter.metavar is None and kind is not None:  # of a few words these are shown
            parameter.metavar = PLACEHOLDERS[kind]
    for child in getattr(command, "commands", {}).values():
        spell_alike(child)


def _nothing(ctx: object) -> None:
    return None


def keys(incomplete: str) -> Iterator[tuple[str, str]]:
    """Overrides that begin so, each with what its key means: `optim.lr=`."""
    from phalanx.config import leaves

    for key, info in leaves():
        if key.startswith(incomplete):
            yield f"{key}=", str(info.description)
