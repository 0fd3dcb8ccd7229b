"""`phalanx recipes`: the recipes and examples that come with Phalanx, listed and copied."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from phalanx.config import bundled
from phalanx.report.terminal import open_terminal

recipes_app = typer.Typer(help="List or copy the recipes and examples that come with Phalanx.", no_args_is_help=True)


@recipes_app.command("list")
def recipes_list() -> None:
    """List the recipes and examples that come with Phalanx, and what each is."""
    grid = Table(box=None, pad_edge=False)
    grid.add_column(
        "recipes and examples",
        no_wrap=True,
        min_width=max(map(len, map(bundled.short_name, bundled.list_bundled_files()))),
    )
    grid.add_column("what they are")
    for name in bundled.list_bundled_files():
        grid.add_row(Text(bundled.short_name(name)), Text(bundled.describe_bundled_file(name)))
    open_terminal().print(grid)


@recipes_app.command("copy")
def recipes_copy(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Such as demo, or its path: recipes/demo.yaml.")
    ],
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where recipes/ and examples/ are made.")] = Path(),
) -> None:
    """Copy recipes and examples to recipes/ and examples/, where the documentation's commands expect them.

    A recipe brings the example that it names as its code. A file that is there already stays as it is.
    """
    for name in names:
        for path in bundled.copy_bundled_files(name, to):
            typer.echo(path)
