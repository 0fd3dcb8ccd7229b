"""`phalanx run` with a command line of Megatron or HetSeq: the recipe that it becomes, shown, and trained."""

from collections.abc import Mapping, Sequence

import typer

from phalanx.compat.command_lines import map_command
from phalanx.config import load
from phalanx.report.logs import open_terminal


def run_foreign_command(
    script: str, arguments: Sequence[str], run_dir: str | None, ranks: int | None, environment: Mapping[str, str]
) -> None:
    """Train what the command line says, after printing the recipe and all flags that are passed over, and leave with
    the run's exit code; any other script is left alone. Raises ConfigError for what has no counterpart here."""
    from phalanx.launch import child_run, rendezvous_options, run

    mapped = map_command(script, arguments)
    if mapped is None:
        return
    where = f"the command line of {mapped.system}"
    typer.echo(f"# {script} as a recipe\n{load.dump_tree(mapped.recipe)}", nl=False)
    terminal = open_terminal()
    for name, reason in mapped.passed_over.items():
        terminal.print(f"--{name} is passed over: {reason}", style="yellow", markup=False, soft_wrap=True)
    wanted = load.check_recipe(load.build_config(mapped.recipe, where), where)
    paths = child_run.prepare_run_folder(wanted, run_dir or mapped.run_dir or "runs/imported")
    meeting = rendezvous_options.rendezvous_from_allocation(paths, environment, None)
    raise typer.Exit(run.train(wanted, paths, ranks, environment, meeting))
