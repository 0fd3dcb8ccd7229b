"""`phalanx config`: recipes and their keys."""

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.data import Overrides
from phalanx.config import explain, load, schema

config_app = typer.Typer(help="Show recipes and explain their keys.", no_args_is_help=True)
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, such as recipes/demo.yaml.")]


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    typer.echo(json.dumps(schema.Config.model_json_schema(), indent=2))


@config_app.command("explain")
def config_explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Such as optim.lr, or a section, such as optim.")] = "",
) -> None:
    """Explain a key and its legal values; a section, or all keys, a line each."""
    # Without a terminal lines do not wrap, for grep.
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 10_000
    typer.echo(explain.explain_key(key, width))


@config_app.command("show")
def config_show(
    recipe_path: RecipeFile,
    overrides: Overrides = None,
) -> None:
    """Print a recipe with all defaults; a run resolves each `auto` when it starts."""
    typer.echo(load.to_yaml(load.load_recipe(recipe_path, overrides or [])), nl=False)


@config_app.command("presets")
def config_presets() -> None:
    """List the model shapes that `model.preset` knows."""
    from phalanx.models.families.catalog import PRESETS, parameter_count
    from phalanx.report import formats

    room = max(map(len, PRESETS))
    for name, spec in PRESETS.items():
        shape = f"{spec.layers} layers, width {spec.hidden}, {spec.heads} heads ({spec.kv_heads} kv)"
        number = formats.format_count(parameter_count(spec))
        typer.echo(f"{name:{room}} {number:>6} parameters, {shape}, vocabulary {spec.vocab_size}")
