"""The command line. It hands work to the rest; torch is imported only by commands that need it."""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from phalanx import __version__, config, recipe
from phalanx.errors import ConfigError, PhalanxError
from phalanx.records import ExitCode, RunPaths

app = typer.Typer(
    name="phalanx",
    help="Train large models on the GPUs you really have, with one loss curve.",
    epilog="Any command takes --debug: errors then show where they come from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at recipes and their keys.", no_args_is_help=True)
data_app = typer.Typer(help="Prepare training data ahead of a run.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, such as recipes/demo.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to change, such as optim.lr=3e-4.")
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]


def _run_dir(text: str) -> Path:
    """An empty one, as of a shell's variable that was never set, would be the working folder."""
    if not text:
        raise ConfigError("--run-dir is empty, so there is no folder to put the run into; name one or leave it out")
    return Path(text)


@app.command()
def train(
    recipe_path: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Local ranks. Default: one per accelerator; one on a machine without."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            parser=_run_dir,
            metavar="PATH",
            help="Where everything of this run goes. Default: runs/ and the recipe's name.",
        ),
    ] = None,
) -> None:
    """Train a model; in a folder that holds the same run already, go on where it stopped.

    Uses the accelerators there are, or CPU ranks. Under torchrun or srun it joins the ranks that were started.
    """
    from phalanx import launch

    wanted = recipe.load(recipe_path, overrides or [])
    paths = RunPaths(run_dir if run_dir is not None else Path("runs") / recipe_path.stem)
    code = launch.train(wanted, paths, ranks, os.environ)
    raise typer.Exit(code)


@app.command()
def export(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(help="The Hugging Face folder to write; it must not exist yet.")],
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32 or fp64. Default: as imported, else the compute type.")
    ] = None,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face folder."""
    from phalanx.report.progress import phases
    from phalanx.train.export import EXPORT_DTYPES, export_run

    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ConfigError(f"--dtype {dtype} is not known; choose one of {', '.join(EXPORT_DTYPES)}")
    with phases() as progress:
        step = export_run(RunPaths(run), folder, dtype, lambda done, total: progress("export", done, total))
    typer.echo(f"step {step} of {run} is now the Hugging Face folder {folder}")


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A run folder or a Hugging Face folder.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "def ",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The same seed writes the same text.")] = 0,
) -> None:
    """Write text with a trained model, by the transformers library."""
    from phalanx.generation import stream

    stream(model, prompt, max_tokens, temperature, seed)


@app.command()
def report(run: RunFolder) -> None:
    """Write report.html from a run's records alone; a run that is going on may be looked at too."""
    from phalanx.report import html

    typer.echo(f"wrote {html.write(RunPaths(run))}")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    typer.echo(json.dumps(config.Config.model_json_schema(), indent=2))


@config_app.command("show")
def config_show(
    recipe_path: RecipeFile,
    overrides: Overrides = None,
) -> None:
    """Print a recipe with all defaults filled in; `auto` is what a run resolves when it starts."""
    typer.echo(recipe.to_yaml(recipe.load(recipe_path, overrides or [])), nl=False)


@config_app.command("presets")
def config_presets() -> None:
    """List the model shapes that `model.preset` knows."""
    from phalanx.models.spec import PRESETS, parameter_count

    for name, spec in PRESETS.items():
        shape = f"{spec.layers} layers, width {spec.hidden}, {spec.heads} heads ({spec.kv_heads} kv)"
        typer.echo(
            f"{name:16} {parameter_count(spec) / 1e9:7.2f} billion parameters, {shape}, vocabulary {spec.vocab_size}"
        )


@data_app.command("prepare")
def data_prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", help="Files or globs of text or JSONL, or stdlib.")],
    tokenizer: Annotated[str, typer.Option(help="A tokenizer folder; train: byte-level BPE on the sources.")] = "train",
    vocab: Annotated[int, typer.Option(min=257, max=2**20, help="Vocabulary of a trained tokenizer, tokens.")] = 4096,
    text_key: Annotated[str, typer.Option(help="The key of a JSONL line that holds the text.")] = "text",
    held_out: Annotated[float, typer.Option(min=0.0, max=0.99, help="Share of documents kept for evaluation.")] = 0.02,
    cache: Annotated[Path, typer.Option(help="Where token files go.")] = Path("~/.cache/phalanx"),
) -> None:
    """Tokenise sources into token files; a run with the same data settings then starts at once.

    May be stopped at any time and started again: finished parts are kept.
    """
    from phalanx.data.prepare import prepare
    from phalanx.data.tokens import TokenFile
    from phalanx.report.progress import phases

    with phases() as progress:
        done = prepare(sources, tokenizer, vocab, text_key, held_out, cache.expanduser(), progress)
    training, evaluation = TokenFile(done.train), TokenFile(done.held_out)
    typer.echo(
        f"{training.tokens:,} tokens to train on, {evaluation.tokens:,} held out, vocabulary {done.vocab_size:,}"
    )
    typer.echo(f"in {done.folder}")


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
    with contextlib.suppress(OSError):  # nobody reads it: the exit code has to do
        typer.secho(f"error: {text}", err=True, fg=typer.colors.RED)


def main() -> None:
    """The entry point: runs a command and turns its errors into a sentence and an exit code."""
    _open_closed_streams()
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(args=arguments, prog_name="phalanx")
    except PhalanxError as error:
        if debug:
            traceback.print_exc()
        _complain(str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            hint = "this is a fault of Phalanx; --debug shows where"
            _complain(f"{type(error).__name__}: {error} ({hint})")
        sys.exit(ExitCode.FAILED)
